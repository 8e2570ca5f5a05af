//! How parameters are called in a checkpoint.

use std::collections::{BTreeMap, HashMap};

use super::rows;
use crate::protocol::RefId;
use crate::rref::RRef;
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

/// Parameters by name: one name for each, one parameter for each name.
#[derive(Debug, Default)]
pub(super) struct Names {
    names: HashMap<RefId, String>,
    parameters: BTreeMap<String, RRef<Tensor>>,
}

impl Names {
    /// Adds parameters; those that have a name keep it.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for a name that another parameter has, or one of rows that another has.
    pub(super) fn add<'a>(&mut self, list: impl IntoIterator<Item = &'a (String, RRef<Tensor>)>) -> Result<()> {
        for (name, rref) in list {
            if self.names.contains_key(&rref.id()) {
                continue;
            }
            if let Some(other) = self.parameters.insert(name.clone(), rref.clone()) {
                let what = format!(
                    "two parameters are called `{name}`: {other:?} and {rref:?}; name them with `parameters`, before the optimizers"
                );
                return Err(ErrorKind::Argument {
                    op: "checkpoint".into(),
                    what,
                }
                .into());
            }
            self.names.insert(rref.id(), name.clone());
        }
        rows::overlap(self.parameters.keys()).map_or(Ok(()), |(one, other)| {
            let what = format!("`{one}` and `{other}` name the same rows of one array; call one of them otherwise");
            let op = "checkpoint".into();
            Err(ErrorKind::Argument { op, what }.into())
        })
    }

    /// The slots of an optimizer's parameters: their names, with a number after the first of those that occur again.
    pub(super) fn slots(&self, list: &[(String, RRef<Tensor>)]) -> Vec<String> {
        let mut seen: HashMap<&str, usize> = HashMap::new();
        let slot = |(name, rref): &'_ (String, RRef<Tensor>)| {
            let name = self.names.get(&rref.id()).unwrap_or(name);
            let times = self.parameters.get_key_value(name).map_or(0, |(name, _)| {
                let times = seen.entry(name).or_default();
                *times += 1;
                *times - 1
            });
            if times == 0 { name.clone() } else { format!("{name}#{times}") }
        };
        list.iter().map(slot).collect()
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = (&String, &RRef<Tensor>)> {
        self.parameters.iter()
    }

    /// The parameters of each owner.
    pub(super) fn by_owner(&self) -> BTreeMap<u32, Vec<(String, RRef<Tensor>)>> {
        let mut owners: BTreeMap<u32, Vec<_>> = BTreeMap::new();
        for (name, rref) in self.iter() {
            owners.entry(rref.owner()).or_default().push((name.clone(), rref.clone()));
        }
        owners
    }
}

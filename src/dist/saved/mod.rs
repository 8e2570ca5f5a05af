//! What checkpoints ask of optimizers: on the client what they are, on owners their state.

mod in_backward;
mod lbfgs;
mod spec;
mod steps;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Rows;
use crate::optim::{OptimizerSpec, ParameterState};
use crate::rpc::Scope;
use crate::rref::RRef;
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

/// States by the names of what they belong to.
pub(crate) type States = HashMap<String, ParameterState>;

/// An optimizer over ranks that a checkpoint can hold: a [`DistributedOptimizer`](crate::DistributedOptimizer), a
/// [`DistributedInBackward`](super::DistributedInBackward), a [`DistributedLbfgs`](crate::DistributedLbfgs). Not to be implemented elsewhere.
///
/// Its states are called by `slots`: the parameters' names in the order of [`listed`](Self::listed).
pub trait Saveable {
    /// Which kind of optimizer it is.
    #[doc(hidden)]
    fn kind(&self) -> &'static str;

    /// What it has state for: parameters by name, or by place.
    #[doc(hidden)]
    fn listed(&self) -> Vec<(String, RRef<Tensor>)>;

    /// What the client knows, as JSON: rules, options, and which slots they are for.
    #[doc(hidden)]
    fn header(&self, slots: &[String]) -> Result<Value>;

    /// What each owner is asked. With a header, for loading: the header is checked against this optimizer.
    #[doc(hidden)]
    fn parts(&self, slots: &[String], header: Option<&Value>) -> Result<BTreeMap<u32, OwnerPart>>;

    /// Takes over a header that was checked; owners put their states in place then.
    #[doc(hidden)]
    fn take_over(&mut self, slots: &[String], header: &Value) -> Result<()>;
}

/// What an owner is asked about its part of one optimizer.
#[doc(hidden)]
#[derive(Debug, Serialize, Deserialize)]
pub enum OwnerPart {
    /// Of a distributed optimizer.
    Steps(steps::Part),
    /// Optimizers in backward.
    InBackward(in_backward::Part),
    /// The vectors of L-BFGS.
    Lbfgs(lbfgs::Part),
}

impl OwnerPart {
    /// What it has state for.
    pub(crate) fn slots(&self) -> &[String] {
        match self {
            OwnerPart::Steps(part) => &part.slots,
            OwnerPart::InBackward(part) => &part.slots,
            OwnerPart::Lbfgs(part) => &part.slots,
        }
    }

    /// The states that there are. Arrays are shared, not copied, but for L-BFGS.
    pub(crate) fn read(self, scope: &Scope) -> Result<Vec<(String, ParameterState)>> {
        match self {
            OwnerPart::Steps(part) => part.read(scope),
            OwnerPart::InBackward(part) => part.read(scope),
            OwnerPart::Lbfgs(part) => part.read(scope),
        }
    }

    /// Checks options and states, and makes ready to put them in place. What has no state starts as new.
    pub(crate) fn stage(self, scope: &Scope, states: &mut States) -> Result<Staged> {
        match self {
            OwnerPart::Steps(part) => part.stage(scope, states),
            OwnerPart::InBackward(part) => part.stage(scope, states),
            OwnerPart::Lbfgs(part) => part.stage(scope, states),
        }
    }
}

/// Something that was checked, and only has to be put in place.
pub(crate) struct Staged(Box<dyn FnOnce() + Send>);

impl Staged {
    pub(crate) fn new(apply: impl FnOnce() + Send + 'static) -> Self {
        Staged(Box::new(apply))
    }

    pub(crate) fn apply(self) {
        (self.0)()
    }
}

impl std::fmt::Debug for Staged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Staged")
    }
}

/// What doesn't fit between a checkpoint and an optimizer here.
fn differs(what: String) -> crate::Error {
    let op = "restore".into();
    ErrorKind::Argument { op, what }.into()
}

/// Whether the slots of a checkpoint are those here, perhaps as other rows of the same arrays. `of` says whose they are.
fn same_arrays<'a>(of: &str, there: impl IntoIterator<Item = &'a String>, here: impl IntoIterator<Item = &'a String>) -> Result<()> {
    let there: BTreeSet<Cow<'_, str>> = there.into_iter().map(|slot| Rows::whole(slot)).collect();
    let here: BTreeSet<Cow<'_, str>> = here.into_iter().map(|slot| Rows::whole(slot)).collect();
    if there == here {
        return Ok(());
    }
    let (lacks, more): (Vec<_>, Vec<_>) = (here.difference(&there).collect(), there.difference(&here).collect());
    Err(differs(format!(
        "{of} lacks the parameters {lacks:?}, and has {more:?}, which it hasn't here"
    )))
}

/// Refuses rows that a rule's state can't be cut to.
fn by_rows(spec: &OptimizerSpec, slot: &str) -> Result<()> {
    if spec.is_by_rows() {
        return Ok(());
    }
    Err(differs(format!(
        "`{slot}` is split otherwise than it was, and {} doesn't treat each row by itself, so its state can't be dealt anew; split the array as it was",
        spec.name()
    )))
}

/// A header's JSON in its type.
fn decoded<T: serde::de::DeserializeOwned>(header: &Value) -> Result<T> {
    serde_json::from_value(header.clone()).map_err(|e| differs(format!("its optimizer can't be read: {e}")))
}

fn encoded(header: impl Serialize) -> Result<Value> {
    serde_json::to_value(header).map_err(|e| differs(format!("an optimizer can't be written: {e}")))
}

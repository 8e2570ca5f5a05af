//! The distributed optimizer in a checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::spec::{Group, Header, WrittenSpec};
use super::{OwnerPart, Saveable, Staged, States, by_rows, decoded, differs, encoded, same_arrays};
use crate::Result;
use crate::dist::DistributedOptimizer;
use crate::dist::optimizer::{ChangedOptions, find};
use crate::optim::{OptimizerSpec, ParameterState};
use crate::protocol::OptimizerId;
use crate::rpc::{Calls, Scope};
use crate::rref::RRef;
use crate::tensor::Tensor;

/// An owner's part.
#[derive(Debug, Serialize, Deserialize)]
pub struct Part {
    id: OptimizerId,
    /// Its parameters' places in the client's list, and their slots.
    places: Vec<u32>,
    pub(super) slots: Vec<String>,
    /// For reading: options that it may not have yet.
    changed: Option<ChangedOptions>,
    /// For loading: options by the number of the group, and the number of the last change in them.
    specs: Vec<(u32, OptimizerSpec)>,
    changes: u64,
}

impl Saveable for DistributedOptimizer {
    fn kind(&self) -> &'static str {
        "steps"
    }

    fn listed(&self) -> Vec<(String, RRef<Tensor>)> {
        self.parameters().map(|(name, rref)| (name.to_owned(), rref.clone())).collect()
    }

    fn header(&self, slots: &[String]) -> Result<Value> {
        let group = |(group, spec): (usize, &OptimizerSpec)| Group {
            spec: WrittenSpec(spec.clone()),
            parameters: of_group(self, slots, group).map(String::clone).collect(),
        };
        encoded(Header {
            groups: self.groups().iter().enumerate().map(group).collect(),
        })
    }

    fn parts(&self, slots: &[String], header: Option<&Value>) -> Result<BTreeMap<u32, OwnerPart>> {
        let specs = match header {
            Some(header) => checked(self, slots, decoded(header)?)?,
            None => vec![],
        };
        let specs: Vec<_> = self.group_numbers().iter().copied().zip(specs).collect();
        let part = |(owner, changed)| {
            let own = self.parameters().zip(slots).enumerate();
            let own = own.filter(|(_, ((_, rref), _))| rref.owner() == owner);
            let (places, slots) = own.map(|(place, (_, slot))| (place as u32, slot.clone())).unzip();
            let part = Part {
                id: self.id(),
                places,
                slots,
                changed,
                specs: specs.clone(),
                changes: self.last_change() + 1,
            };
            (owner, OwnerPart::Steps(part))
        };
        Ok(self.changed_of_owners().map(part).collect())
    }

    fn take_over(&mut self, _slots: &[String], header: &Value) -> Result<()> {
        let Header { groups } = decoded(header)?;
        self.replace_specs(groups.into_iter().map(|g| g.spec.0).collect());
        Ok(())
    }
}

fn of_group<'a>(optimizer: &'a DistributedOptimizer, slots: &'a [String], group: usize) -> impl Iterator<Item = &'a String> {
    let is_in = move |(place, _): &(usize, &String)| optimizer.group_of(*place) == Some(group);
    slots.iter().enumerate().filter(is_in).map(|(_, slot)| slot)
}

/// The options of each group, if the groups are those of this optimizer.
fn checked(optimizer: &DistributedOptimizer, slots: &[String], header: Header) -> Result<Vec<OptimizerSpec>> {
    let own = optimizer.groups();
    if header.groups.len() != own.len() {
        return Err(differs(format!(
            "{} groups, and the optimizer here has {}",
            header.groups.len(),
            own.len()
        )));
    }
    for (place, (group, spec)) in header.groups.iter().zip(own).enumerate() {
        if group.spec.0.name() != spec.name() {
            return Err(differs(format!(
                "group {place} is of {}, and here of {}",
                group.spec.0.name(),
                spec.name()
            )));
        }
        same_arrays(&format!("group {place}"), &group.parameters, of_group(optimizer, slots, place))?;
        let there: BTreeSet<_> = group.parameters.iter().collect();
        let mut here = of_group(optimizer, slots, place);
        if let Some(other) = here.find(|slot| !there.contains(slot)) {
            by_rows(&group.spec.0, other)?;
        }
    }
    Ok(header.groups.into_iter().map(|g| g.spec.0).collect())
}

impl Part {
    pub(super) fn read(self, scope: &Scope) -> Result<Vec<(String, ParameterState)>> {
        let states = find(scope, "checkpoint", self.id)?.states(self.changed)?;
        let slot = |place: u32| Some(self.slots[self.places.iter().position(|&p| p == place)?].clone());
        Ok(states
            .into_iter()
            .filter_map(|(place, state)| Some((slot(place)?, state)))
            .collect())
    }

    pub(super) fn stage(self, scope: &Scope, states: &mut States) -> Result<Staged> {
        let owner = find(scope, "restore", self.id)?;
        let each = self.places.into_iter().zip(self.slots);
        let states = each.filter_map(|(place, slot)| Some((place, states.remove(&slot)?)));
        let (specs, states) = owner.check_states(scope.rank(), &self.specs, states)?;
        Ok(Staged::new(move || owner.replace(specs, states, self.changes)))
    }
}

//! Optimizers in backward in a checkpoint.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::spec::{Group, Header, WrittenSpec};
use super::{OwnerPart, Saveable, Staged, States, by_rows, decoded, differs, encoded, same_arrays};
use crate::Result;
use crate::dist::in_backward::{Attachment, one};
use crate::dist::{DistributedInBackward, Rows};
use crate::optim::{OptimizerSpec, ParameterState};
use crate::rpc::Scope;
use crate::rref::RRef;
use crate::tensor::Tensor;

/// An owner's part.
#[derive(Debug, Serialize, Deserialize)]
pub struct Part {
    attachments: Vec<Attachment>,
    pub(super) slots: Vec<String>,
    /// For loading: options of each.
    specs: Vec<OptimizerSpec>,
}

impl Saveable for DistributedInBackward {
    fn kind(&self) -> &'static str {
        "in_backward"
    }

    fn listed(&self) -> Vec<(String, RRef<Tensor>)> {
        let each = self.parameters().enumerate();
        each.map(|(place, rref)| (place.to_string(), rref.clone())).collect()
    }

    fn header(&self, slots: &[String]) -> Result<Value> {
        let mut groups: Vec<Group> = Vec::new();
        for (place, slot) in slots.iter().enumerate() {
            let Some(spec) = self.spec(place) else { continue };
            match groups.iter_mut().find(|group| group.spec.0 == *spec) {
                Some(group) => group.parameters.push(slot.clone()),
                None => groups.push(Group {
                    spec: WrittenSpec(spec.clone()),
                    parameters: vec![slot.clone()],
                }),
            }
        }
        encoded(Header { groups })
    }

    fn parts(&self, slots: &[String], header: Option<&Value>) -> Result<BTreeMap<u32, OwnerPart>> {
        let specs = header.map(|header| specs(slots, header)).transpose()?;
        let mut parts: BTreeMap<u32, Part> = BTreeMap::new();
        for (place, (attachment, slot)) in self.attachments().iter().zip(slots).enumerate() {
            let part = parts.entry(attachment.0.owner()).or_insert_with(|| Part {
                attachments: vec![],
                slots: vec![],
                specs: vec![],
            });
            part.attachments.push(attachment.clone());
            part.slots.push(slot.clone());
            part.specs.extend(specs.as_ref().map(|specs| specs[place].clone()));
        }
        Ok(parts
            .into_iter()
            .map(|(owner, part)| (owner, OwnerPart::InBackward(part)))
            .collect())
    }

    fn take_over(&mut self, slots: &[String], header: &Value) -> Result<()> {
        self.replace_specs(specs(slots, header)?);
        Ok(())
    }
}

/// The options of each slot, if the slots are these, or other rows of the same arrays.
fn specs(slots: &[String], header: &Value) -> Result<Vec<OptimizerSpec>> {
    let Header { groups } = decoded(header)?;
    let of_group = |group: Group| {
        let Group { spec, parameters } = group;
        parameters.into_iter().map(move |slot| (slot, spec.0.clone()))
    };
    let found: HashMap<String, OptimizerSpec> = groups.into_iter().flat_map(of_group).collect();
    same_arrays("its list of optimizers in backward", found.keys(), slots)?;
    let mut arrays: HashMap<Cow<'_, str>, Vec<&OptimizerSpec>> = HashMap::new();
    for (slot, spec) in &found {
        arrays.entry(Rows::whole(slot)).or_default().push(spec);
    }
    let spec_of = |slot: &String| {
        if let Some(spec) = found.get(slot) {
            return Ok(spec.clone());
        }
        match arrays.get(&Rows::whole(slot)).map(Vec::as_slice) {
            Some([spec, others @ ..]) if others.iter().all(|other| other == spec) => by_rows(spec, slot).map(|()| (*spec).clone()),
            _ => Err(differs(format!(
                "`{slot}` is split otherwise than it was, and its parts had several options; split the array as it was"
            ))),
        }
    };
    slots.iter().map(spec_of).collect()
}

impl Part {
    pub(super) fn read(self, scope: &Scope) -> Result<Vec<(String, ParameterState)>> {
        let mut states = Vec::new();
        for ((rref, id), slot) in self.attachments.into_iter().zip(self.slots) {
            let state = one(scope, rref, id)?.saved(0)?;
            states.extend(state.map(|state| (slot, state)));
        }
        Ok(states)
    }

    pub(super) fn stage(self, scope: &Scope, states: &mut States) -> Result<Staged> {
        let mut staged = Vec::with_capacity(self.slots.len());
        for (((rref, id), slot), spec) in self.attachments.into_iter().zip(self.slots).zip(self.specs) {
            let optimizer = one(scope, rref, id)?;
            staged.push(optimizer.stage(0, spec, states.remove(&slot))?);
        }
        Ok(Staged::new(move || staged.into_iter().for_each(|apply| apply())))
    }
}

//! Attached optimizers on any ranks, as their user sees them.

use std::collections::{BTreeMap, HashSet};

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::remote::{self, Attachment};
use crate::dist::optimizer::{gather as gather_owners, without_updates};
use crate::dist::sent::{SentGradient, SentState};
use crate::optim::in_backward::{Groups, InBackward};
use crate::optim::schedule::Adjust;
use crate::optim::{OptimizerSpec, ParameterState, lr as lr_option};
use crate::rpc::{Caller, Calls, Future};
use crate::rref::RRef;
use crate::runtime::Windowed;
use crate::tensor::{Gradient, Tensor};
use crate::{ErrorKind, Result};

/// Optimizers in backward that are attached to parameters on any ranks, by their places in a list: from
/// [`optimizer_in_backward`](crate::optim::optimizer_in_backward) or [`optimizers_in_backward`](crate::optim::optimizers_in_backward).
///
/// Its calls are targeted: they ask all owners concerned at once, and block until all have answered. A place that isn't there is
/// [`ErrorKind::Argument`]. Dropping it leaves the optimizers attached; [`detach`](Self::detach) removes them. It remembers options as of
/// its making and its own changes since, so change them through one such value.
#[derive(Debug)]
pub struct DistributedInBackward {
    attachments: Vec<Attachment>,
    groups: Groups,
}

impl DistributedInBackward {
    pub(super) fn attach(spec: &OptimizerSpec, options: &InBackward, parameters: &[RRef<Tensor>]) -> Result<Self> {
        let operation = format!("{} in backward: attaching", spec.name());
        let mut ids = vec![0; parameters.len()];
        let mut done: Vec<Attachment> = Vec::new();
        let results = ask(parameters, 0..parameters.len(), |caller, owner, places| {
            let rrefs = some(parameters, places);
            let numbers: Vec<u32> = places.iter().map(|&place| place as u32).collect();
            caller.call_async(owner, remote::attach, (spec, options, rrefs, numbers))
        });
        for (_, places, result) in &results {
            for (&place, &id) in places.iter().zip(result.iter().flatten()) {
                ids[place] = id;
                done.push((parameters[place].clone(), id));
            }
        }
        if let Err(error) = gather(&operation, results).map_err(without_updates) {
            if let Err(e) = detach(&done) {
                log::warn!("{operation} failed, and what was attached can't be removed: {e}");
            }
            return Err(error);
        }
        Ok(DistributedInBackward {
            attachments: parameters.iter().cloned().zip(ids).collect(),
            groups: Groups::new(parameters.iter().map(|_| spec.clone())),
        })
    }

    pub(super) fn of(parameters: &[RRef<Tensor>]) -> Result<Self> {
        let results = ask(parameters, 0..parameters.len(), |caller, owner, places| {
            let rrefs = some(parameters, places);
            caller.call_async(owner, remote::attached, (rrefs,))
        });
        let mut found: Vec<(usize, Vec<(u64, OptimizerSpec)>)> = Vec::new();
        for (places, lists) in gather("optimizers in backward", results)? {
            found.extend(places.into_iter().zip(lists));
        }
        found.sort_by_key(|(place, _)| *place);
        let (mut attachments, mut specs, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        for (place, list) in found {
            let rref = &parameters[place];
            for (id, spec) in list {
                if seen.insert((rref.owner(), id)) {
                    attachments.push((rref.clone(), id));
                    specs.push(spec);
                }
            }
        }
        Ok(DistributedInBackward {
            attachments,
            groups: Groups::new(specs),
        })
    }

    /// The parameters, and the numbers of their optimizers.
    pub(in crate::dist) fn attachments(&self) -> &[Attachment] {
        &self.attachments
    }

    /// All options were replaced on the owners.
    pub(in crate::dist) fn replace_specs(&mut self, specs: Vec<OptimizerSpec>) {
        self.groups = Groups::new(specs);
    }

    fn at(&self, place: usize) -> Result<(Caller, &Attachment)> {
        let missing = || ErrorKind::Argument {
            op: "optimizers in backward".into(),
            what: format!("no optimizer {place}; there are {}", self.len()),
        };
        let attachment = self.attachments.get(place).ok_or_else(missing)?;
        Ok((caller(&attachment.0), attachment))
    }

    /// Number of optimizers. Local.
    pub fn len(&self) -> usize {
        self.attachments.len()
    }

    /// Whether there are none. Local.
    pub fn is_empty(&self) -> bool {
        self.attachments.is_empty()
    }

    /// The parameter of each. Local.
    pub fn parameters(&self) -> impl ExactSizeIterator<Item = &RRef<Tensor>> {
        self.attachments.iter().map(|(rref, _)| rref)
    }

    /// Rule and options of one; `None` if there is no such place. Local.
    pub fn spec(&self, place: usize) -> Option<&OptimizerSpec> {
        self.groups.spec(place)
    }

    /// Changes the learning rate of all.
    ///
    /// # Errors
    /// As [`set_options`](Self::set_options); [`ErrorKind::OptionValue`] also if it is infinite or NaN.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.set_options(&lr_option(self.groups.specs(), lr)?)
    }

    /// Changes an option of all.
    ///
    /// # Errors
    /// As [`set_options`](Self::set_options).
    pub fn set_option(&mut self, option: &str, value: impl Into<Value>) -> Result<()> {
        self.set_options(&json!({ option: value.into() }))
    }

    /// Changes options, by name, of all. When it returns they hold for every update that begins, on all owners.
    ///
    /// # Errors
    /// As [`OptimizerSpec::with_options`], before anything is sent. [`ErrorKind::Owners`] with every owner that failed; on the others they are
    /// changed then.
    pub fn set_options(&mut self, options: &Value) -> Result<()> {
        self.change(None, options)
    }

    fn change(&mut self, group: Option<usize>, options: &Value) -> Result<()> {
        let (specs, places) = self.groups.changed(group, options)?;
        let text = options.to_string();
        let results = ask(self.parameters(), places, |caller, owner, places| {
            caller.call_async(owner, remote::set_options, (some(&self.attachments, places), &text))
        });
        gather("optimizers in backward: options", results)?;
        self.groups.set(specs);
        Ok(())
    }

    /// State of one, for a checkpoint; `None` if it has made no update.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchValue`] if it was detached; as [`Calls::call`].
    pub fn state(&self, place: usize) -> Result<Option<ParameterState>> {
        let (caller, (rref, id)) = self.at(place)?;
        let sent = caller.call(rref.owner(), remote::state, (rref, *id))?;
        Ok(sent.map(ParameterState::from))
    }

    /// Puts the state of one in place, so that its next update goes on from there.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] as [`Optimizer::load_state`](crate::optim::Optimizer::load_state), from the owner; nothing is changed then.
    /// [`ErrorKind::NoSuchValue`] if it was detached; as [`Calls::call`].
    pub fn load_state(&mut self, place: usize, state: ParameterState) -> Result<()> {
        let (caller, (rref, id)) = self.at(place)?;
        caller.call(rref.owner(), remote::load_state, (rref, *id, SentState::from(&state)))
    }

    /// The gradient that one used in its last update, if [`InBackward::keep_gradient`] asks for it.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchValue`] if it was detached; as [`Calls::call`].
    pub fn gradient(&self, place: usize) -> Result<Option<Gradient>> {
        let (caller, (rref, id)) = self.at(place)?;
        let sent = caller.call(rref.owner(), remote::gradient, (rref, *id))?;
        sent.map(SentGradient::into_gradient).transpose()
    }

    /// Removes the optimizers from their parameters, with their state. Those that are gone already are left out.
    ///
    /// # Errors
    /// [`ErrorKind::Owners`] with every owner that failed.
    pub fn detach(self) -> Result<()> {
        detach(&self.attachments)
    }
}

fn detach(attachments: &[Attachment]) -> Result<()> {
    let rrefs = attachments.iter().map(|(rref, _)| rref);
    let results = ask(rrefs, 0..attachments.len(), |caller, owner, places| {
        caller.call_async(owner, remote::detach, (some(attachments, places),))
    });
    gather("optimizers in backward: detaching", results).map(drop)
}

/// Plain calls, as [`RRef::fetch`] makes them.
fn caller(rref: &RRef<Tensor>) -> Caller {
    Caller {
        runtime: rref.runtime().clone(),
        recorder: None,
        window: Windowed::Block,
        limit: None,
    }
}

/// What is at these places.
fn some<T: Clone>(of: &[T], places: &[usize]) -> Vec<T> {
    places.iter().map(|&place| of[place].clone()).collect()
}

/// An owner, the places of its parameters, and its answer.
type Asked<R> = Vec<(u32, Vec<usize>, Result<R>)>;

/// Asks the owners of the parameters at these places, all at once.
fn ask<'a, R: DeserializeOwned>(
    rrefs: impl IntoIterator<Item = &'a RRef<Tensor>>,
    places: impl IntoIterator<Item = usize>,
    call: impl Fn(&Caller, u32, &[usize]) -> Result<Future<R>>,
) -> Asked<R> {
    let rrefs: Vec<_> = rrefs.into_iter().collect();
    let mut owners: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for place in places {
        owners.entry(rrefs[place].owner()).or_default().push(place);
    }
    let futures: Vec<_> = owners
        .into_iter()
        .map(|(owner, places)| {
            let future = call(&caller(rrefs[places[0]]), owner, &places);
            (owner, places, future)
        })
        .collect();
    let wait = |(owner, places, future): (_, _, Result<Future<R>>)| (owner, places, future.and_then(Future::wait));
    futures.into_iter().map(wait).collect()
}

/// All answers, or every failure.
fn gather<R>(operation: &str, results: Asked<R>) -> Result<Vec<(Vec<usize>, R)>> {
    let each = results.into_iter();
    gather_owners(
        operation,
        each.map(|(rank, places, result)| (rank, result.map(|r| (places, r)))),
        true,
    )
}

/// Optimizers with equal options at the time form a group; so those of one [`optimizer_in_backward`](crate::optim::optimizer_in_backward) are one.
/// [`adjust`](Adjust::adjust) asks the owners, as [`set_options`](DistributedInBackward::set_options) does.
impl Adjust for DistributedInBackward {
    fn specs(&self) -> &[OptimizerSpec] {
        self.groups.specs()
    }

    fn adjust(&mut self, group: usize, options: &Value) -> Result<()> {
        self.change(Some(group), options)
    }
}

//! The distributed optimizer: one local optimizer on each rank that owns parameters.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap};

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::builtin::{drop_optimizer, make_optimizer, step_optimizer};
use super::changes::Changes;
use super::context::Context;
use super::tables::Tables;
use crate::optim::schedule::Adjust;
use crate::optim::{OptimizerSpec, ParameterReport};
use crate::protocol::{Gate, OptimizerId};
use crate::rpc::{Caller, Calls, Issue, Manner, Recorded, Remote};
use crate::rref::RRef;
use crate::runtime::Windowed;
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, OwnerFailure, Result};

/// What a step did on one owner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwnerReport {
    /// The owner.
    pub rank: u32,
    /// Places of its parameters in the optimizer's list.
    pub places: Vec<u32>,
    /// What happened to each of them.
    pub parameters: Vec<ParameterReport>,
    /// Time the update took there, in seconds.
    pub seconds: f64,
}

impl OwnerReport {
    /// Number of parameters that were updated.
    pub fn updated(&self) -> usize {
        self.parameters.iter().filter(|p| p.updated).count()
    }

    /// Number of parameters without a gradient, left as they were.
    pub fn without_gradient(&self) -> usize {
        self.parameters.len() - self.updated()
    }
}

/// What a step did: a row an owner, ascending by rank.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The rows.
    pub owners: Vec<OwnerReport>,
}

impl StepReport {
    /// Number of parameters that were updated, on all owners.
    pub fn updated(&self) -> usize {
        self.owners.iter().map(OwnerReport::updated).sum()
    }

    /// Number of parameters without a gradient, on all owners.
    pub fn without_gradient(&self) -> usize {
        self.owners.iter().map(OwnerReport::without_gradient).sum()
    }

    /// What happened to the parameter at a place of the optimizer's list.
    pub fn parameter(&self, place: usize) -> Option<&ParameterReport> {
        self.owners.iter().find_map(|o| {
            let at = o.places.iter().position(|&p| p as usize == place)?;
            o.parameters.get(at)
        })
    }
}

/// An optimizer over parameters on any ranks.
///
/// Each owner keeps the state of its parameters and applies their gradients itself; steps on an owner, from any rank and thread, are applied one
/// at a time in order of arrival. Absent gradients leave a parameter and its state as they are; a zero gradient is a gradient.
/// A step applies what a context holds: a second step on the same context applies it again.
///
/// Dropping it frees the state on all owners.
#[derive(Debug)]
pub struct DistributedOptimizer {
    caller: Caller,
    id: OptimizerId,
    spec: OptimizerSpec,
    owners: Vec<u32>,
    changes: Changes,
    /// For each owner, the last change of options that it is known to have made.
    made: Vec<AtomicU64>,
    _parameters: Vec<RRef<Tensor>>,
}

impl DistributedOptimizer {
    /// Builds an optimizer over parameters on any ranks. Options and references are checked before anything is sent. Targeted; asks all owners at once;
    /// blocks until all have answered.
    ///
    /// # Errors
    /// - [`ErrorKind::OptionValue`]: an option out of its bound. [`ErrorKind::NoParameters`]. [`ErrorKind::DuplicateParameter`].
    /// - [`ErrorKind::Owners`] with every owner that failed: [`ErrorKind::NotALeaf`] for tensors that can't be optimized, [`ErrorKind::Timeout`].
    ///   Nothing stays behind on the others.
    pub fn new<R: Borrow<RRef<Tensor>>>(
        at: &impl Calls,
        spec: impl Into<OptimizerSpec>,
        parameters: impl IntoIterator<Item = R>,
    ) -> Result<Self> {
        let spec = spec.into();
        spec.check()?;
        let parameters: Vec<RRef<Tensor>> = parameters.into_iter().map(|p| p.borrow().clone()).collect();
        let name = || spec.name().to_owned();
        if parameters.is_empty() {
            return Err(ErrorKind::NoParameters { optimizer: name() }.into());
        }
        let mut places = HashMap::new();
        let mut owners: BTreeMap<u32, (Vec<RRef<Tensor>>, Vec<u32>)> = BTreeMap::new();
        for (place, rref) in parameters.iter().enumerate() {
            if let Some(first) = places.insert(rref.id(), place) {
                return Err(ErrorKind::DuplicateParameter {
                    optimizer: name(),
                    first,
                    second: place,
                }
                .into());
            }
            let owner = owners.entry(rref.owner()).or_default();
            owner.0.push(rref.clone());
            owner.1.push(place as u32);
        }
        let caller = Caller {
            recorder: None,
            ..at.caller().clone()
        };
        caller.runtime.check_alive(spec.name())?;
        let id = Tables::of(&caller.runtime)?.next_optimizer(caller.rank());
        let optimizer = DistributedOptimizer {
            caller,
            id,
            spec: spec.clone(),
            owners: owners.keys().copied().collect(),
            changes: Changes::default(),
            made: owners.keys().map(|_| AtomicU64::new(0)).collect(),
            _parameters: parameters,
        };
        let futures: Vec<_> = owners
            .into_iter()
            .map(|(owner, (rrefs, places))| {
                (
                    owner,
                    optimizer.caller.call_async(owner, make_optimizer, (id, &spec, rrefs, places)),
                )
            })
            .collect();
        let results = futures
            .into_iter()
            .map(|(owner, future)| (owner, future.and_then(|f| f.wait())))
            .collect();
        optimizer.gather(&format!("{}: creation", spec.name()), results)?;
        Ok(optimizer)
    }

    /// The rule and its options, as the next step applies them. Local.
    pub fn spec(&self) -> &OptimizerSpec {
        &self.spec
    }

    /// The owners of its parameters, ascending. Local.
    pub fn owners(&self) -> &[u32] {
        &self.owners
    }

    /// Changes the learning rate on all owners. As [`set_options`](Self::set_options).
    ///
    /// # Errors
    /// As [`set_options`](Self::set_options); [`ErrorKind::OptionValue`] also if it is infinite or NaN.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        if !lr.is_finite() {
            let (optimizer, option) = (self.spec.name().into(), "lr".into());
            return Err(ErrorKind::OptionValue {
                optimizer,
                option,
                value: lr.to_string(),
                bound: "a finite number".into(),
            }
            .into());
        }
        self.set_option("lr", lr)
    }

    /// Changes an option on all owners. As [`set_options`](Self::set_options).
    ///
    /// # Errors
    /// As [`set_options`](Self::set_options).
    pub fn set_option(&mut self, option: &str, value: impl Into<Value>) -> Result<()> {
        self.set_options(&json!({ option: value.into() }))
    }

    /// Changes options, by name, on all owners. Local, blocks on nothing: they are checked here, travel with the next [`step`](Self::step) and hold on each
    /// owner before its update. Options whose bounds depend on each other are changed together.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`], [`ErrorKind::UnknownOption`] as [`OptimizerSpec::with_options`]; nothing is changed then.
    pub fn set_options(&mut self, options: &Value) -> Result<()> {
        self.spec = self.spec.with_options(options)?;
        if let Value::Object(options) = options {
            self.changes.note(options);
        }
        Ok(())
    }

    /// Applies the gradients of a context on all owners, all at once, with the options as they are now. Targeted; blocks until all have answered.
    ///
    /// # Errors
    /// - [`ErrorKind::BackwardInFlight`], [`ErrorKind::ContextReleased`], before anything is sent.
    /// - [`ErrorKind::Owners`] with every owner that failed, what it said, and which owners did update.
    pub fn step(&self, context: &Context) -> Result<StepReport> {
        let runtime = &self.caller.runtime;
        runtime.check_alive("step")?;
        runtime.check_context("step", context.id())?;
        runtime.check_gradients("step", context.id())?;
        let gate = Gate {
            queued: true,
            gradients_of: Some(context.id()),
        };
        let calls: Vec<_> = self
            .owners
            .iter()
            .zip(&self.made)
            .map(|(&owner, made)| {
                let changed = self.changes.after(made.load(Ordering::Relaxed));
                let call = self.ask(owner, step_optimizer(), gate, |bytes| {
                    crate::wire::write(&(self.id, context.id(), changed), bytes)
                });
                (owner, made, call)
            })
            .collect();
        let results = calls
            .into_iter()
            .map(|(owner, made, call)| {
                let report = call.and_then(|call| {
                    let reply = call.wait()?;
                    call.decode(reply)
                });
                if report.is_ok() {
                    made.store(self.changes.last(), Ordering::Relaxed);
                }
                (owner, report)
            })
            .collect();
        Ok(StepReport {
            owners: self.gather(&format!("{}: step", self.spec.name()), results)?,
        })
    }

    fn ask<A, R>(
        &self,
        owner: u32,
        f: Remote<A, R>,
        gate: Gate,
        write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<crate::rpc::Call> {
        // The only owner, if it is this rank, does its part at once.
        let manner = if self.owners.len() == 1 { Manner::Waits } else { Manner::Goes };
        let issue = Issue {
            to: owner,
            function: f.id()?,
            name: f.name(),
            creates: false,
            gate,
            recorded: Recorded::Never,
            manner,
        };
        self.caller.issue(issue, write)
    }

    /// All results, or every failure.
    fn gather<R>(&self, operation: &str, results: Vec<(u32, Result<R>)>) -> Result<Vec<R>> {
        let owners = results.len();
        let (mut good, mut updated, mut failures) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, result) in results {
            match result {
                Ok(value) => {
                    good.push(value);
                    updated.push(rank);
                }
                Err(error) => failures.push(OwnerFailure {
                    rank,
                    error: unwrapped(error),
                }),
            }
        }
        if failures.is_empty() {
            return Ok(good);
        }
        Err(ErrorKind::Owners {
            operation: operation.into(),
            owners,
            failures,
            updated,
        }
        .into())
    }
}

/// One group, on all owners. [`adjust`](Adjust::adjust) is [`set_options`](DistributedOptimizer::set_options).
impl Adjust for DistributedOptimizer {
    fn specs(&self) -> &[OptimizerSpec] {
        std::slice::from_ref(&self.spec)
    }

    fn adjust(&mut self, group: usize, options: &Value) -> Result<()> {
        if group > 0 {
            return Err(ErrorKind::Argument {
                op: "adjust".into(),
                what: format!("no group {group}; there is 1"),
            }
            .into());
        }
        self.set_options(options)
    }
}

/// What the owner said, without the name of our own function around it: the failure names the rank already.
fn unwrapped(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Remote { source, .. } => source.clone(),
        _ => error,
    }
}

impl Drop for DistributedOptimizer {
    fn drop(&mut self) {
        if self.caller.runtime.is_finished() {
            return;
        }
        let caller = Caller {
            window: Windowed::Bypass,
            ..self.caller.clone()
        };
        for &owner in &self.owners {
            if let Err(e) = caller.call_async(owner, drop_optimizer, (self.id,)).map(drop) {
                log::warn!(
                    "rank {}: the state of optimizer {} on rank {owner} can't be freed: {e}",
                    caller.rank(),
                    self.id
                );
            }
        }
    }
}

//! The distributed optimizer: one local optimizer on each rank that owns parameters.

pub(super) mod ask;
mod changes;
mod groups;
mod options;
mod owner;
mod parameters;
mod report;
mod state;
mod step;
mod tree;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use serde_json::{Value, json};

pub(super) use self::ask::{gather, without_updates};
pub(super) use self::changes::ChangedOptions;
use self::changes::Changes;
pub use self::options::{NotFinite, StepOptions};
pub(super) use self::owner::OwnerOptimizer;
use self::owner::drop_optimizer;
pub(super) use self::owner::find;
pub use self::parameters::{ParamGroup, ParameterRef};
pub use self::report::{OwnerReport, StepReport, StepSummary};
pub use self::step::StepFuture;
use super::tables::Tables;
use crate::optim::schedule::Adjust;
use crate::optim::{OptimizerSpec, changed, lr as lr_option};
use crate::protocol::OptimizerId;
use crate::rpc::{Caller, Calls};
use crate::rref::RRef;
use crate::runtime::Windowed;
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

/// An optimizer over parameters on any ranks.
///
/// Each owner keeps the state of its parameters and applies their gradients itself; steps on an owner, from any rank and thread, are applied one
/// at a time in order of arrival. Absent gradients leave a parameter and its state as they are; a zero gradient is a gradient. A frozen parameter stays
/// as it is. A step applies what a context holds: a second step on the same context applies it again.
///
/// Parameters are in groups, each with its own rule and options. They may have names, under which their state is saved.
///
/// Dropping it frees the state on all owners.
///
/// ```
/// use rankgrad::prelude::*;
///
/// rankgrad::local::run(3, |world| {
///     world.lead(|world| {
///         let weight = world.put(1, Tensor::from_vec(vec![3.0, 4.0], [2])?)?;
///         let bias = world.put(2, Tensor::from_vec(vec![0.0], [1])?)?;
///         let mut optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [("weight", &weight)])?;
///         optimizer.add_group(Adam::new(0.1), [("bias", &bias)])?;
///
///         let ctx = world.context()?;
///         let loss = ctx.fetch(&weight)?.sum()?;
///         ctx.backward(&[loss])?;
///         let report = optimizer.step(&ctx)?;
///         assert_eq!((report.updated(), report.without_gradient()), (1, 1));
///         assert_eq!(weight.fetch()?.to_vec::<f64>()?, [2.5, 3.5]);
///         Ok(())
///     })
/// })
/// # .unwrap();
/// ```
#[derive(Debug)]
pub struct DistributedOptimizer {
    caller: Caller,
    id: OptimizerId,
    /// Options of each group, and the number that owners know it by.
    specs: Vec<OptimizerSpec>,
    numbers: Vec<u32>,
    next_number: u32,
    parameters: Vec<Listed>,
    /// Ascending by rank.
    owners: Vec<Owner>,
    changes: Changes,
    /// Numbers of first rounds.
    tickets: AtomicU64,
    /// Owners that each owner passes steps on to; 0 if the client asks all.
    fan_out: usize,
    /// How many steps were passed on.
    passes: AtomicU64,
}

#[derive(Debug)]
struct Owner {
    rank: u32,
    /// How many joined before it.
    joined: usize,
    /// The last change of options that it is known to have made.
    made: AtomicU64,
    /// Places of its parameters.
    places: Arc<[u32]>,
}

#[derive(Debug)]
struct Listed {
    rref: RRef<Tensor>,
    name: String,
    group: usize,
}

impl DistributedOptimizer {
    /// Builds an optimizer over parameters on any ranks, in one group. Options and references are checked before anything is sent. Targeted; asks all
    /// owners at once; blocks until all have answered.
    ///
    /// # Errors
    /// - [`ErrorKind::OptionValue`]: an option out of its bound. [`ErrorKind::NoParameters`]. [`ErrorKind::DuplicateParameter`].
    ///   [`ErrorKind::Argument`] for a name given twice.
    /// - [`ErrorKind::Owners`] with every owner that failed: [`ErrorKind::NotALeaf`] for tensors that can't be optimized, [`ErrorKind::Timeout`].
    ///   Nothing stays behind on the others.
    pub fn new<P: ParameterRef>(at: &impl Calls, spec: impl Into<OptimizerSpec>, parameters: impl IntoIterator<Item = P>) -> Result<Self> {
        Self::with_groups(at, [ParamGroup::new(spec, parameters)])
    }

    /// As [`new`](Self::new), in any number of groups, each with its own rule and options.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`ErrorKind::NoParameters`] also for an empty group or none.
    pub fn with_groups(at: &impl Calls, groups: impl IntoIterator<Item = ParamGroup>) -> Result<Self> {
        let caller = Caller {
            recorder: None,
            ..at.caller().clone()
        };
        caller.runtime.check_alive("DistributedOptimizer")?;
        let id = Tables::of(&caller.runtime)?.next_optimizer(caller.rank());
        let mut optimizer = DistributedOptimizer {
            caller,
            id,
            specs: Vec::new(),
            numbers: Vec::new(),
            next_number: 0,
            parameters: Vec::new(),
            owners: Vec::new(),
            changes: Changes::default(),
            tickets: AtomicU64::new(1),
            fan_out: 0,
            passes: AtomicU64::new(0),
        };
        let groups: Vec<ParamGroup> = groups.into_iter().collect();
        if groups.is_empty() {
            let optimizer = "DistributedOptimizer".into();
            return Err(ErrorKind::NoParameters { optimizer }.into());
        }
        optimizer.extend(groups)?;
        Ok(optimizer)
    }

    /// Adds parameters with a rule and options of their own; returns the group's place. Targeted; asks their owners at once; blocks until all have answered.
    ///
    /// # Errors
    /// As [`new`](Self::new); nothing is added then, on no owner.
    pub fn add_group<P: ParameterRef>(&mut self, spec: impl Into<OptimizerSpec>, parameters: impl IntoIterator<Item = P>) -> Result<usize> {
        self.extend(vec![ParamGroup::new(spec, parameters)])?;
        Ok(self.specs.len() - 1)
    }

    /// Number of parameters, in all groups. Local.
    pub fn len(&self) -> usize {
        self.parameters.len()
    }

    /// Whether there are no parameters; never. Local.
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// The parameters by name, in the order of the list. Local.
    pub fn parameters(&self) -> impl ExactSizeIterator<Item = (&str, &RRef<Tensor>)> {
        self.parameters.iter().map(|p| (p.name.as_str(), &p.rref))
    }

    /// The group of a parameter, or `None` if there is no such parameter. Local.
    pub fn group_of(&self, parameter: usize) -> Option<usize> {
        self.parameters.get(parameter).map(|p| p.group)
    }

    /// The groups' rules and options, as the next step applies them. Local.
    pub fn groups(&self) -> &[OptimizerSpec] {
        &self.specs
    }

    /// The owners of its parameters, ascending. Local.
    pub fn owners(&self) -> Vec<u32> {
        self.owners.iter().map(|o| o.rank).collect()
    }

    /// Changes the learning rate of all groups on all owners. As [`set_options`](Self::set_options).
    ///
    /// # Errors
    /// As [`set_options`](Self::set_options); [`ErrorKind::OptionValue`] also if it is infinite or NaN.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.set_options(None, &lr_option(&self.specs, lr)?)
    }

    /// Changes an option of one group or of all. As [`set_options`](Self::set_options).
    ///
    /// # Errors
    /// As [`set_options`](Self::set_options).
    pub fn set_option(&mut self, group: Option<usize>, option: &str, value: impl Into<Value>) -> Result<()> {
        self.set_options(group, &json!({ option: value.into() }))
    }

    /// Changes options, by name, of one group or of all, on all owners. Local, blocks on nothing: they are checked here, travel with the next
    /// [`step`](Self::step) and hold on each owner before its update. Options whose bounds depend on each other are changed together.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`], [`ErrorKind::UnknownOption`] as [`OptimizerSpec::with_options`]; [`ErrorKind::Argument`] if there is no such group.
    /// Nothing is changed then.
    pub fn set_options(&mut self, group: Option<usize>, options: &Value) -> Result<()> {
        let (places, changed) = changed(&self.specs, group, options)?;
        if let Value::Object(options) = options {
            self.changes.note(&self.numbers[places.clone()], options);
        }
        self.specs.splice(places, changed);
        Ok(())
    }

    /// A caller that waits for no window.
    fn silent(&self) -> Caller {
        Caller {
            window: Windowed::Bypass,
            limit: None,
            ..self.caller.clone()
        }
    }

    /// Sends what nobody waits for.
    fn tell(&self, rank: u32, send: impl FnOnce() -> Result<()>) {
        if let Err(e) = send() {
            let me = self.caller.rank();
            log::warn!("rank {me}: the state of optimizer {} on rank {rank} can't be freed: {e}", self.id);
        }
    }
}

/// Each group, on all owners. [`adjust`](Adjust::adjust) is [`set_options`](DistributedOptimizer::set_options).
impl Adjust for DistributedOptimizer {
    fn specs(&self) -> &[OptimizerSpec] {
        &self.specs
    }

    fn adjust(&mut self, group: usize, options: &Value) -> Result<()> {
        self.set_options(Some(group), options)
    }
}

impl Drop for DistributedOptimizer {
    fn drop(&mut self) {
        if self.caller.runtime.is_finished() {
            return;
        }
        for Owner { rank, .. } in &self.owners {
            self.tell(*rank, || self.silent().call_async(*rank, drop_optimizer, (self.id,)).map(drop));
        }
    }
}

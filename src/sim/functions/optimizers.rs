//! What owners do for optimizers.

use std::collections::HashMap;

use super::super::caller::{Arguments, Caller, Results, gate};
use super::super::program::Function;
use crate::optim::{Checked, Norm, Optimizer, OptimizerSpec, Sgd};
use crate::protocol::{ContextId, Gate, OptimizerId, Turn};
use crate::rpc::Recorded;
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Result};

/// An owner's part of an optimizer.
#[derive(Debug)]
pub(crate) struct Part {
    optimizer: Optimizer,
    /// First rounds whose second hasn't come, by the step's number; `None`: it was cancelled before it came itself.
    tickets: HashMap<u64, Option<Checked>>,
    /// Owners that it passes steps on to, and how many it has passed on.
    children: Vec<u32>,
    passed: u64,
}

/// A step, as owners know it.
#[derive(Debug, Clone, Copy)]
struct Step {
    id: OptimizerId,
    client: usize,
    number: u64,
}

impl Caller {
    pub(super) async fn optimizer_function(
        &self,
        function: Function,
        tensors: &[Tensor],
        refs: &[super::super::handle::Ref],
    ) -> Result<Results> {
        match function {
            Function::MakeOptimizer { id, momentum, children } => {
                let mut parameters = Vec::new();
                for r in refs {
                    parameters.push(self.parameter(Some(r)).await?);
                }
                let momentum = if momentum { 0.9 } else { 0.0 };
                let spec = OptimizerSpec::from(Sgd {
                    lr: 0.1,
                    momentum,
                    ..Sgd::default()
                });
                let part = Part {
                    optimizer: Optimizer::new(spec, parameters)?,
                    tickets: HashMap::new(),
                    children,
                    passed: 0,
                };
                let mut world = self.sim.world();
                let node = &mut world.nodes[self.rank as usize];
                if !node.unmade.remove(&id) {
                    node.optimizers.insert(id, part);
                }
            }
            Function::Step {
                id,
                context,
                client,
                number,
            } => self.apply_step(Step { id, client, number }, context)?,
            Function::Prepare {
                id,
                context,
                client,
                number,
                refuses,
            } => {
                let tensors = vec![self.prepare(Step { id, client, number }, context, refuses)?];
                return Ok(Results { tensors, refs: Vec::new() });
            }
            Function::Apply { id, client, number } => {
                let scale = tensors
                    .first()
                    .map(Tensor::to_vec::<f64>)
                    .transpose()?
                    .and_then(|s| s.first().copied());
                self.apply_prepared(Step { id, client, number }, scale)?;
            }
            Function::Cancel { id, number } => {
                if let Some(part) = self.sim.world().nodes[self.rank as usize].optimizers.get_mut(&id)
                    && part.tickets.remove(&number).is_none()
                {
                    part.tickets.insert(number, None);
                }
            }
            Function::Freeze { frozen } => match frozen {
                true => self.parameter(refs.first()).await?.freeze()?,
                false => self.parameter(refs.first()).await?.unfreeze()?,
            },
            Function::DropOptimizer { id } => {
                let removed = {
                    let mut world = self.sim.world();
                    let node = &mut world.nodes[self.rank as usize];
                    let removed = node.optimizers.remove(&id);
                    if removed.is_none() {
                        node.unmade.insert(id);
                    }
                    removed
                };
                drop(removed);
            }
            Function::PassOn { id, number, passed } => return self.pass_on(id, number, *passed, tensors).await,
            _ => return Err(Error::user("not a function of an optimizer")),
        }
        Ok(Results::default())
    }

    /// Lets an owner's part of an optimizer do something.
    fn with_part<R>(&self, id: OptimizerId, what: impl FnOnce(&mut Part) -> Result<R>) -> Result<R> {
        let mut world = self.sim.world();
        let missing = || ErrorKind::NoSuchValue {
            operation: "step".into(),
            owner: self.rank,
            id: format!("optimizer {id}"),
        };
        what(world.nodes[self.rank as usize].optimizers.get_mut(&id).ok_or_else(missing)?)
    }

    fn apply_step(&self, step: Step, context: ContextId) -> Result<()> {
        let recording = self.known_recording(context);
        self.with_part(step.id, |part| {
            let leaves: Vec<Option<u64>> = part.optimizer.parameters().map(|p| p.leaf().map(|l| l.id())).collect();
            part.optimizer
                .step(&mut |i| recording.as_ref()?.gradient((*leaves.get(i)?)?))
                .map(drop)
        })?;
        self.sim.world().checks.steps(self.rank, step.client, step.number);
        Ok(())
    }

    /// Takes hold of the gradients as they are. Gives this rank, and the norm of each of its parameters' gradients; those without one have none.
    fn prepare(&self, step: Step, context: ContextId, refuses: bool) -> Result<Tensor> {
        let recording = self.known_recording(context);
        self.sim.world().checks.count("an owner prepares a step");
        if refuses {
            self.sim.world().checks.count("an owner refuses a step in its first round");
            return Err(Error::user("this owner always refuses"));
        }
        let norms = self.with_part(step.id, |part| {
            let gradient = |p: &Tensor| recording.as_ref()?.gradient(p.leaf()?.id());
            let gradients = part.optimizer.parameters().map(gradient).collect();
            let checked = part.optimizer.check(gradients, Norm::Two)?;
            let norms: Vec<f64> = checked.norms()?.iter().map(|n| n.unwrap_or(-1.0)).collect();
            if part.tickets.remove(&step.number).is_none() {
                part.tickets.insert(step.number, Some(checked));
            }
            Ok(norms)
        })?;
        let row: Vec<f64> = std::iter::once(f64::from(self.rank)).chain(norms).collect();
        let n = row.len();
        Tensor::from_vec(row, n)
    }

    fn apply_prepared(&self, step: Step, scale: Option<f64>) -> Result<()> {
        let applied = self.with_part(step.id, |part| {
            let Some(Some(mut checked)) = part.tickets.remove(&step.number) else {
                return Err(Error::user("no such first round"));
            };
            checked.scale(scale.unwrap_or(1.0))?;
            part.optimizer.apply(checked).map(drop)
        });
        let mut world = self.sim.world();
        match applied {
            Ok(()) => {
                world.checks.applies(self.rank, step.client, step.number);
                world.checks.steps(self.rank, step.client, step.number);
            }
            Err(ref error) => world.checks.second_round_fails(self.rank, step.client, step.number, error),
        }
        applied
    }

    /// Passes a request on to the owners below this one, does its own part in its turn, and puts the answers together. It waits in no queue
    /// itself, so that trees of several clients can't wait for each other; and passes on one after the other, so that none overtakes another.
    async fn pass_on(&self, id: OptimizerId, number: u64, passed: Function, tensors: &[Tensor]) -> Result<Results> {
        self.sim.world().checks.count("a step is passed on along a tree");
        let is_next = |world: &mut super::super::world::World| match world.nodes[self.rank as usize].optimizers.get(&id) {
            Some(part) => (part.passed >= number).then_some(()),
            None => Some(()),
        };
        let deadline = self.sim.world().now + super::super::world::TIMEOUT;
        if self.sim.until(self.rank, None, Some(deadline), is_next).await.is_none() {
            return Err(self.timed_out("passing on a step", id.rank()));
        }
        let children = self.with_part(id, |part| Ok(part.children.clone()))?;
        let arguments = Arguments {
            tensors,
            ..Default::default()
        };
        let below = Function::PassOn {
            id,
            number,
            passed: passed.clone().into(),
        };
        let mut calls = Vec::new();
        for child in children {
            calls.push(self.issue(child, &below, arguments, Gate::default(), Recorded::Never).await);
        }
        let turn = match &passed {
            Function::Step { context, .. } | Function::Prepare { context, .. } => gate(true, *context),
            _ => Gate {
                turn: Turn::Take,
                gradients_of: None,
            },
        };
        calls.push(self.issue(self.rank, &passed, arguments, turn, Recorded::Never).await);
        // After that, an optimizer that was dropped has no steps that wait.
        if let Some(part) = self.sim.world().nodes[self.rank as usize].optimizers.get_mut(&id) {
            part.passed = part.passed.max(number + 1);
        }
        self.sim.step(self.rank, |_| ());
        let (mut all, mut failure) = (Results::default(), None);
        for call in calls {
            let answer = match call {
                Ok(call) => self.results(call).await,
                Err(e) => Err(e),
            };
            match answer {
                Ok(results) => all.tensors.extend(results.tensors),
                Err(e) => failure = failure.or(Some(e)),
            }
        }
        failure.map_or(Ok(all), Err)
    }
}

//! Making optimizers, stepping and dropping them.

use std::cell::Cell;

use super::super::caller::{Arguments, Call, Caller, gate};
use super::super::functions::children_in_tree;
use super::super::handle::Ref;
use super::super::program::Function;
use super::{Made, Seen, Session};
use crate::Result;
use crate::protocol::{Gate, OptimizerId};
use crate::rpc::Recorded;
use crate::tensor::Tensor;

impl Session {
    pub(super) async fn make_optimizer(&mut self, momentum: bool, fan_out: u32) -> Result<Option<Seen>> {
        if self.parameters.is_empty() {
            return Ok(None);
        }
        let (rank, sim) = (self.caller.rank, self.caller.sim.clone());
        let id = {
            let mut world = sim.world();
            let node = &mut world.nodes[rank as usize];
            node.next_optimizer += 1;
            OptimizerId::new(rank, node.next_optimizer)
        };
        let parameters: Vec<Ref> = self.parameters.iter().map(|p| p.2.clone()).collect();
        let mut owners: Vec<u32> = parameters.iter().map(|p| p.id().owner).collect();
        owners.sort_unstable();
        owners.dedup();
        let made = Made {
            id,
            owners,
            fan_out,
            passes: Cell::new(0),
            parameters: parameters.clone(),
        };
        let mut calls = Vec::new();
        for (place, &owner) in (0..).zip(&made.owners) {
            let children = children_in_tree(place, made.owners.len() as u32, fan_out);
            let children = children.map(|c| made.owners[c as usize]).collect();
            let refs: Vec<Ref> = parameters.iter().filter(|p| p.id().owner == owner).cloned().collect();
            let arguments = Arguments {
                refs: &refs,
                ..Default::default()
            };
            let function = Function::MakeOptimizer { id, momentum, children };
            calls.push(
                self.caller
                    .issue(owner, &function, arguments, Gate::default(), Recorded::Never)
                    .await,
            );
        }
        let outcome = self.caller.all(calls).await;
        self.count("an optimizer is made");
        match outcome {
            Ok(_) => {
                self.optimizers.push(made);
                Ok(Some(Seen::Done))
            }
            Err(error) => {
                self.drop_optimizer(made).await;
                Err(error)
            }
        }
    }

    pub(super) async fn step(&mut self, optimizer: usize, context: usize, times: usize) -> Result<Option<Seen>> {
        let Some(id) = self.context(context).map(|o| o.recording.id) else {
            return Ok(None);
        };
        if self.optimizers.is_empty() {
            return Ok(None);
        }
        let made = &self.optimizers[optimizer % self.optimizers.len()];
        self.caller.sim.world().nodes[self.caller.rank as usize]
            .rank
            .check_gradients("step", id)?;
        let gate = gate(true, id);
        let mut calls = Vec::new();
        for _ in 0..times {
            self.steps += 1;
            let function = Function::Step {
                id: made.id,
                context: id,
                client: self.client,
                number: self.steps,
            };
            if made.fan_out > 0 {
                calls.push(self.pass_on(made, function, &[]).await);
                continue;
            }
            for &owner in &made.owners {
                calls.push(
                    self.caller
                        .issue(owner, &function, Arguments::default(), gate, Recorded::Never)
                        .await,
                );
            }
        }
        self.caller.all(calls).await?;
        let mut world = self.caller.sim.world();
        world.checks.count("an optimizer steps");
        for &owner in &made.owners {
            world.checks.step_answered(owner, self.client, self.steps);
        }
        Ok(Some(Seen::Done))
    }

    /// Asks the owner at the head of the tree. Its number must arrive, so it waits for no window.
    pub(super) async fn pass_on(&self, made: &Made, passed: Function, tensors: &[Tensor]) -> Result<Call> {
        let (id, number) = (made.id, made.passes.replace(made.passes.get() + 1));
        let function = Function::PassOn {
            id,
            number,
            passed: passed.into(),
        };
        let arguments = Arguments {
            tensors,
            ..Default::default()
        };
        let caller = self.unwindowed();
        caller
            .issue(made.owners[0], &function, arguments, Gate::default(), Recorded::Never)
            .await
    }

    /// A caller that waits for no window.
    pub(super) fn unwindowed(&self) -> Caller {
        Caller {
            windowed: false,
            ..self.caller.clone()
        }
    }

    pub(super) async fn drop_optimizer(&self, made: Made) {
        self.count("an optimizer is dropped");
        let caller = self.unwindowed();
        for &owner in &made.owners {
            let function = Function::DropOptimizer { id: made.id };
            let call = caller
                .issue(owner, &function, Arguments::default(), Gate::default(), Recorded::Never)
                .await;
            drop(call);
        }
    }
}

//! Steps in two rounds, as the distributed optimizer makes them.

use std::time::Duration;

use super::super::caller::{Arguments, Call, Caller, Results};
use super::super::program::{Between, Fault, Function, Rounds};
use super::{Made, Seen, Session};
use crate::optim::Clip;
use crate::protocol::{ContextId, Gate, RequestId, Turn};
use crate::rpc::Recorded;
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Result};

/// Gradients are scaled to this norm.
const MAX_NORM: f64 = 1.5;

/// An owner that was asked, and the request that it keeps its turn for, if it was to.
type Asked = (u32, Option<RequestId>);

impl Session {
    pub(super) async fn step_in_rounds(&mut self, optimizer: usize, context: usize, rounds: &Rounds) -> Result<Option<Seen>> {
        let Some(id) = self.context(context).map(|o| o.recording.id) else {
            return Ok(None);
        };
        if self.optimizers.is_empty() {
            return Ok(None);
        }
        let (sim, rank) = (self.caller.sim.clone(), self.caller.rank);
        sim.world().nodes[rank as usize].rank.check_gradients("step", id)?;
        self.steps += 1;
        self.rounds += 1;
        let this: &Session = self;
        let made = &this.optimizers[optimizer % this.optimizers.len()];
        sim.world().checks.step_begins(this.client, this.steps, &made.owners);
        let gives_up = matches!(rounds.between, Between::GiveUp { .. });
        let (asked, prepared) = match (rounds.keeps, made.fan_out > 0) {
            (true, _) => this.prepare_in_turn(made, id, rounds).await,
            (false, true) => this.prepare_over_tree(made, id, rounds).await,
            (false, false) => this.prepare_at_once(made, id, rounds).await,
        };
        let prepared = match prepared {
            Ok(prepared) if !gives_up => prepared,
            prepared => {
                this.count(if gives_up {
                    "a client gives up between two rounds"
                } else {
                    "a first round fails"
                });
                this.cancel(made, asked).await;
                return match prepared {
                    Err(error) if !gives_up => Err(error),
                    _ => Ok(Some(Seen::Done)),
                };
            }
        };
        let frozen = this.between(rounds.between).await;
        this.stop(0).await;
        sim.world().checks.step_applies(this.client, this.steps);
        let applied = this.apply(made, asked, this.scale(made, &prepared)?).await;
        if let Some(of) = frozen {
            this.freeze(of, false).await;
        }
        let mut world = sim.world();
        match &applied {
            Ok(_) => {
                world.checks.count("a step of two rounds is applied");
                for &owner in &made.owners {
                    world.checks.step_answered(owner, this.client, this.steps);
                }
            }
            Err(error) if !world.checks.lossy => {
                let (client, number) = (this.client, this.steps);
                world
                    .checks
                    .violate(|| format!("client {client}: the second round of step {number} fails: {error}"));
            }
            Err(_) => world.checks.count("a second round is in doubt"),
        }
        drop(world);
        applied.map(|_| Some(Seen::Done))
    }

    /// Waits as long for each answer of a first round.
    fn asker(&self, rounds: &Rounds) -> Caller {
        match rounds.between {
            Between::GiveUp { after } => Caller {
                limit: Some(Duration::from_micros(after)),
                impatient: true,
                ..self.caller.clone()
            },
            _ => self.caller.clone(),
        }
    }

    fn preparation(&self, made: &Made, context: ContextId, refuses: bool) -> Function {
        Function::Prepare {
            id: made.id,
            context,
            client: self.client,
            number: self.steps,
            refuses,
        }
    }

    /// Whether an owner is to refuse.
    fn refuses(&self, made: &Made, rounds: &Rounds, owner: u32) -> bool {
        let refuses = rounds.refuses.map(|of| made.parameters[of % made.parameters.len()].id().owner);
        refuses == Some(owner)
    }

    /// Asks owner after owner to keep its turn, in ascending order of ranks, so that clients can't wait for each other; until one refuses.
    async fn prepare_in_turn(&self, made: &Made, context: ContextId, rounds: &Rounds) -> (Vec<Asked>, Result<Vec<Tensor>>) {
        let (mut asked, mut prepared) = (Vec::new(), Vec::new());
        let caller = self.asker(rounds);
        for &owner in &made.owners {
            let function = self.preparation(made, context, self.refuses(made, rounds, owner));
            let gate = Gate {
                turn: Turn::Keep,
                gradients_of: Some(context),
            };
            let call = caller.issue(owner, &function, Arguments::default(), gate, Recorded::Never).await;
            let request = call.as_ref().ok().map(|call| call.request);
            let answer = match call {
                Ok(call) => caller.results(call).await,
                Err(error) => Err(error),
            };
            match answer {
                Ok(results) => prepared.extend(results.tensors),
                Err(error) => {
                    let may_keep = matches!(error.root(), ErrorKind::Timeout { .. } | ErrorKind::TooLarge { .. });
                    if may_keep || rounds.tells_all {
                        asked.push((owner, request));
                    }
                    return (asked, Err(error));
                }
            }
            asked.push((owner, request));
        }
        (asked, Ok(prepared))
    }

    async fn prepare_at_once(&self, made: &Made, context: ContextId, rounds: &Rounds) -> (Vec<Asked>, Result<Vec<Tensor>>) {
        let mut owners = made.owners.clone();
        if rounds.reversed {
            owners.reverse();
        }
        let (caller, mut calls) = (self.asker(rounds), Vec::new());
        let gate = super::super::caller::gate(true, context);
        for &owner in &owners {
            let function = self.preparation(made, context, self.refuses(made, rounds, owner));
            calls.push(caller.issue(owner, &function, Arguments::default(), gate, Recorded::Never).await);
        }
        let prepared = caller.all(calls).await.map(tensors);
        (owners.into_iter().map(|o| (o, None)).collect(), prepared)
    }

    /// All owners refuse or none, since all get the same request.
    async fn prepare_over_tree(&self, made: &Made, context: ContextId, rounds: &Rounds) -> (Vec<Asked>, Result<Vec<Tensor>>) {
        let function = self.preparation(made, context, rounds.refuses.is_some());
        let call = self.pass_on(made, function, &[]).await;
        let prepared = self.asker(rounds).all(vec![call]).await.map(tensors);
        (made.owners.iter().map(|&o| (o, None)).collect(), prepared)
    }

    async fn between(&self, between: Between) -> Option<usize> {
        match between {
            Between::Nothing | Between::GiveUp { .. } => None,
            Between::Sleep { micros } => {
                self.caller.sim.sleep(self.caller.rank, Duration::from_micros(micros)).await;
                None
            }
            Between::Freeze { of } => {
                self.count("a parameter is frozen between two rounds");
                self.freeze(of, true).await;
                Some(of)
            }
        }
    }

    /// As another thread does: it waits for no window that is full of requests behind a turn of this step.
    async fn freeze(&self, of: usize, frozen: bool) {
        let (_, place, of) = &self.parameters[of % self.parameters.len()];
        let arguments = Arguments {
            refs: std::slice::from_ref(of),
            ..Default::default()
        };
        let (caller, to) = (self.unwindowed(), self.rank_at(*place));
        let call = caller
            .issue(to, &Function::Freeze { frozen }, arguments, Gate::default(), Recorded::Never)
            .await;
        if let Ok(call) = call {
            drop(caller.results(call).await);
        }
    }

    /// If this rank is to stop in this step, once so many of its second requests are sent, it does.
    async fn stop(&self, sent: usize) {
        let (sim, rank) = (&self.caller.sim, self.caller.rank);
        let fault = Fault::StopBetween {
            client: self.client,
            step: self.rounds,
            sent,
        };
        if sim.world().faults.contains(&fault) {
            {
                let mut world = sim.world();
                world.nodes[rank as usize].stopped = true;
                world.checks.count("a rank stops answering between two rounds");
                world.trace.note(|| format!("rank {rank} stops answering between two rounds"));
            }
            sim.until(rank, None, None, |_| None::<()>).await;
        }
    }

    /// What gradients are scaled by: their global norm is put together in the order of the client's list.
    fn scale(&self, made: &Made, prepared: &[Tensor]) -> Result<f64> {
        let mut rows = Vec::new();
        for row in prepared {
            rows.push(row.to_vec::<f64>()?);
        }
        let mut next: std::collections::HashMap<u32, usize> = std::collections::HashMap::new();
        let mut sum = 0.0;
        for of in &made.parameters {
            let owner = of.id().owner;
            let at = next.entry(owner).or_insert(1);
            let row = rows.iter().find(|row| row.first() == Some(&f64::from(owner)));
            let norm = row.and_then(|row| row.get(*at)).copied();
            let norm = norm.ok_or_else(|| Error::user("no norm"))?;
            *at += 1;
            // Below zero without a gradient.
            sum += norm.max(0.0).powi(2);
        }
        Ok(Clip::coefficient(MAX_NORM, sum.sqrt()))
    }

    async fn apply(&self, made: &Made, asked: Vec<Asked>, scale: f64) -> Result<()> {
        let function = Function::Apply {
            id: made.id,
            client: self.client,
            number: self.steps,
        };
        let scale = Tensor::from_vec(vec![scale], 1)?;
        let arguments = Arguments {
            tensors: std::slice::from_ref(&scale),
            ..Default::default()
        };
        if made.fan_out > 0 && asked.iter().all(|a| a.1.is_none()) {
            let call = self.pass_on(made, function, arguments.tensors).await;
            return self.caller.all(vec![call]).await.map(drop);
        }
        let mut calls: Vec<Result<Call>> = Vec::new();
        for (sent, (owner, request)) in asked.into_iter().enumerate() {
            let (caller, gate) = self.ender(request);
            calls.push(caller.issue(owner, &function, arguments, gate, Recorded::Never).await);
            self.stop(sent + 1).await;
        }
        self.caller.all(calls).await.map(drop)
    }

    /// There is no second round. Nobody waits for the answers.
    async fn cancel(&self, made: &Made, asked: Vec<Asked>) {
        let function = Function::Cancel {
            id: made.id,
            number: self.steps,
        };
        for (owner, request) in asked {
            let (caller, gate) = self.ender(request);
            let call = caller.issue(owner, &function, Arguments::default(), gate, Recorded::Never).await;
            drop(call);
        }
    }

    /// What ends a kept turn waits for no window: it may be full of requests behind that turn.
    fn ender(&self, kept: Option<RequestId>) -> (Caller, Gate) {
        let caller = match kept {
            Some(_) => self.unwindowed(),
            None => self.caller.clone(),
        };
        let gate = Gate {
            turn: kept.map_or(Turn::Take, Turn::End),
            gradients_of: None,
        };
        (caller, gate)
    }
}

fn tensors(results: Vec<(u32, Results)>) -> Vec<Tensor> {
    results.into_iter().flat_map(|(_, r)| r.tensors).collect()
}

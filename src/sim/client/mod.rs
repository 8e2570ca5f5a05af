//! What a client of a simulated program does, and what it notes of it for the comparison with one rank.

mod contexts;
mod optimizers;
mod rounds;
mod seen;

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use super::caller::Caller;
use super::handle::Ref;
use super::node::Body;
use super::program::{Client, Function, Op};
use super::world::Sim;
use crate::protocol::OptimizerId;
use crate::rpc::Recording;
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Result};
pub(crate) use seen::{Log, Seen};
use seen::{name, tensors};

/// A context that a client has open.
struct Open {
    recording: Arc<Recording>,
    caller: Caller,
    backwards: u32,
    losses: Vec<Tensor>,
    /// A leaf of the client's own.
    leaf: Tensor,
    /// Every recorded result takes part in a root.
    whole: bool,
    /// A `Fast` backward has failed in it.
    tainted: bool,
}

/// An optimizer that a client has made.
struct Made {
    id: OptimizerId,
    /// Ascending.
    owners: Vec<u32>,
    /// Branches of its tree; none if owners are asked directly.
    fan_out: u32,
    /// How many requests were passed on along it.
    passes: Cell<u64>,
    parameters: Vec<Ref>,
}

/// A client at work.
pub(super) struct Session {
    client: usize,
    caller: Caller,
    log: Log,
    /// References, and the place of the owner if it is a parameter's.
    refs: Vec<Ref>,
    parameters: Vec<(usize, u32, Ref)>,
    contexts: Vec<Open>,
    optimizers: Vec<Made>,
    steps: u64,
    /// Steps of two rounds among them.
    rounds: u64,
    next_leaf: u64,
    parted: bool,
}

impl Session {
    pub(super) fn new(sim: &Sim, client: usize, place: u32, log: Log) -> Self {
        let (rank, limit) = {
            let world = sim.world();
            (world.rank_at(place), world.limit)
        };
        let caller = Caller {
            sim: sim.clone(),
            rank,
            recorder: None,
            limit,
            windowed: true,
            impatient: false,
        };
        Session {
            client,
            caller,
            log,
            refs: Vec::new(),
            parameters: Vec::new(),
            contexts: Vec::new(),
            optimizers: Vec::new(),
            steps: 0,
            rounds: 0,
            next_leaf: 0,
            parted: false,
        }
    }

    /// Does all that a client does; drops what it has at the end.
    pub(super) async fn run(mut self, client: Client) {
        let sim = self.caller.sim.clone();
        for (at, op) in client.ops.iter().enumerate() {
            let rank = self.caller.rank;
            {
                let mut world = sim.world();
                let (now, client) = (world.now, self.client);
                world.trace.note(|| format!("{now:>12.3?}  client {client} on rank {rank}: {op:?}"));
            }
            let start = sim.world().now;
            let seen = match self.op(op).await {
                Ok(seen) => seen,
                Err(error) => Some(self.failed(&error)),
            };
            if matches!(op, Op::Step { .. } | Op::StepInRounds { .. }) {
                let mut world = sim.world();
                let time = world.now - start;
                world.checks.waited(self.client, time);
            }
            if let Some(seen) = seen {
                if seen == Seen::Parted {
                    self.parted = true;
                }
                self.log.borrow_mut().push((at, seen));
            }
            sim.pause(rank).await;
        }
        // Contexts and optimizers are dropped as the program's values are: nobody waits.
        for context in std::mem::take(&mut self.contexts) {
            drop(self.caller.release(context.recording.id));
        }
        for made in std::mem::take(&mut self.optimizers) {
            self.drop_optimizer(made).await;
        }
    }

    /// What is noted of an error.
    fn failed(&self, error: &Error) -> Seen {
        let root = error.root();
        match root {
            ErrorKind::Timeout { .. } | ErrorKind::TooLarge { .. } => Seen::Parted,
            // What follows from something that was lost.
            _ if self.parted => Seen::Parted,
            _ => Seen::Failed(name(root)),
        }
    }

    fn count(&self, what: &'static str) {
        self.caller.sim.world().checks.count(what);
    }

    fn pick(&self, of: usize) -> Option<&Ref> {
        (!self.refs.is_empty()).then(|| &self.refs[of % self.refs.len()])
    }

    fn picked(&self, of: &[usize]) -> Vec<Ref> {
        of.iter().filter_map(|&i| self.pick(i).cloned()).collect()
    }

    async fn op(&mut self, op: &Op) -> Result<Option<Seen>> {
        match op {
            Op::Put { place, seed } => {
                self.count("a parameter is put");
                let to = self.rank_at(*place);
                let made = self.caller.create(to, &Function::Make { seed: *seed }, &[]).await?;
                self.parameters.push((self.parameters.len(), *place, made.clone()));
                self.refs.push(made);
            }
            Op::PutFails { place } => {
                let made = self.caller.create(self.rank_at(*place), &Function::MakeFails, &[]).await?;
                self.refs.push(made);
            }
            Op::Nest { place, of } => {
                let refs = self.picked(of);
                let made = match place {
                    Some(place) => self.caller.create(self.rank_at(*place), &Function::Nest, &refs).await?,
                    None => self.caller.keep(Body::Refs(refs)),
                };
                self.refs.push(made);
            }
            Op::Clone { of } => {
                let copy = self.pick(*of).cloned();
                self.refs.extend(copy);
            }
            Op::Drop { of } => {
                if !self.refs.is_empty() {
                    self.count("a reference is dropped");
                    let at = *of % self.refs.len();
                    drop(self.refs.swap_remove(at));
                    self.caller.sim.poll_soon(self.caller.rank);
                }
            }
            Op::Fetch { of } => {
                if let Some(of) = self.pick(*of).cloned() {
                    self.count("a client fetches");
                    let fetched = self.caller.fetch(&of).await?;
                    return Ok(Some(tensors(&fetched.tensors)?));
                }
            }
            Op::Exchange { exchange, of, waits } => {
                let refs = self.picked(of);
                let to = self.rank_at(exchange.place);
                let call = self.caller.send_exchange(to, exchange, &refs).await?;
                if *waits || exchange.by_id {
                    let results = self.caller.results(call).await?;
                    self.refs.extend(results.refs);
                } else {
                    self.count("an answer is not waited for");
                }
            }
            Op::DropKept => {
                let kept = std::mem::take(&mut self.caller.sim.world().nodes[self.caller.rank as usize].kept);
                drop(kept);
                self.caller.sim.poll_soon(self.caller.rank);
            }
            Op::Open => self.open()?,
            Op::Forward { context, trees, waits } => return self.forward(*context, trees, *waits).await,
            Op::Backward {
                context,
                mode,
                retain,
                all,
            } => return self.backward(*context, *mode, *retain, *all).await,
            Op::Gradients { context } => return self.gradients(*context).await,
            Op::Accumulate { context, of } => return self.accumulate(*context, *of).await,
            Op::Race { context, what } => return self.race(*context, *what).await,
            Op::Release { context, waits } => {
                if !self.contexts.is_empty() {
                    let open = self.contexts.swap_remove(context % self.contexts.len());
                    let call = self.caller.release(open.recording.id);
                    if *waits {
                        self.count("a release is waited for");
                        self.caller.wait(call).await?;
                    } else {
                        self.count("a context is dropped");
                    }
                }
            }
            Op::MakeOptimizer { momentum, fan_out } => return self.make_optimizer(*momentum, *fan_out).await,
            Op::Step { optimizer, context, times } => return self.step(*optimizer, *context, *times).await,
            Op::StepInRounds {
                optimizer,
                context,
                rounds,
            } => return self.step_in_rounds(*optimizer, *context, rounds).await,
            Op::DropOptimizer { optimizer } => {
                if !self.optimizers.is_empty() {
                    let made = self.optimizers.swap_remove(optimizer % self.optimizers.len());
                    self.drop_optimizer(made).await;
                }
            }
            Op::Sleep { micros } => self.caller.sim.sleep(self.caller.rank, Duration::from_micros(*micros)).await,
        }
        Ok(None)
    }

    fn rank_at(&self, place: u32) -> u32 {
        self.caller.sim.world().rank_at(place)
    }
}

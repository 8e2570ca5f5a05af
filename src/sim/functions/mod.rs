//! What the remote functions of a simulated program do.

mod exchange;
mod forward;
mod optimizers;

use std::sync::Arc;
use std::time::Duration;

pub(super) use optimizers::Part;

use super::caller::{Caller, Results};
use super::handle::Ref;
use super::node::{Body, Stored, Value};
use super::program::Function;
use super::world::Sim;
use crate::protocol::{ContextId, Outcome, RefId, TaskId, Work};
use crate::tensor::{Gradient, Tensor};
use crate::wire::{self, Delivered, Payload};
use crate::{Error, Result};

/// Elements of a tensor.
const FEW: usize = 3;

/// A task of a rank, from its start to its answer.
pub(super) async fn task(sim: Sim, rank: u32, task: TaskId, work: Work<Value, Payload>, handles: Vec<(RefId, wire::Handle)>) {
    let queued = matches!(&work, Work::Call { queued: true, .. });
    let turn = sim.world().nodes[rank as usize].turns.remove(&task).unwrap_or_default();
    let (outcome, kept) = match execute(&sim, rank, task, work, handles).await {
        Ok(done) => done,
        Err(error) => (Outcome::Error(error), Vec::new()),
    };
    sim.pause(rank).await;
    if queued {
        let succeeded = !matches!(outcome, Outcome::Error(_));
        sim.world().turn_done(rank, task, turn, succeeded);
    }
    sim.step(rank, |n| {
        n.rank.done(task, outcome);
        drop(kept);
    });
    sim.poll_soon(rank);
}

async fn execute(
    sim: &Sim,
    rank: u32,
    task: TaskId,
    work: Work<Value, Payload>,
    handles: Vec<(RefId, wire::Handle)>,
) -> Result<(Outcome<Value, Payload>, Vec<wire::Handle>)> {
    let tag = match &work {
        Work::Call { context, .. } | Work::Encode { context, .. } => context.clone(),
    };
    let limit = sim.world().limit;
    let plain = Caller {
        sim: sim.clone(),
        rank,
        recorder: None,
        limit,
        windowed: false,
        impatient: false,
    };
    let crossing = tag.as_ref().and_then(|t| t.crossing);
    let caller = match tag {
        Some(tag) => {
            let recording = sim.world().recording(rank, tag.context);
            plain.recording(recording, tag.path)
        }
        None => plain,
    };
    match work {
        Work::Call { creates, payload, .. } => {
            let arguments = Delivered {
                payload,
                handles,
                crossing,
            };
            let (function, tensors, refs, ids): (Function, Vec<Tensor>, Vec<Ref>, Vec<RefId>) = arguments.decode()?;
            if creates {
                let id = sim.world().creating.get(&task).copied();
                let value = caller.make(function, refs)?;
                if let Some(id) = id
                    && value.id.set(id).is_ok()
                {
                    sim.world().checks.made(id);
                }
                return Ok((Outcome::Value(value), Vec::new()));
            }
            let results = caller.call_function(function, tensors, refs, ids).await?;
            Ok(reply(&caller, &results)?)
        }
        Work::Encode { value, .. } => {
            let results = match &value.body {
                Body::Tensor(tensor) => Results {
                    tensors: vec![tensor.clone()],
                    refs: Vec::new(),
                },
                Body::Refs(refs) => Results {
                    tensors: Vec::new(),
                    refs: refs.clone(),
                },
            };
            Ok(reply(&caller, &results)?)
        }
    }
}

fn reply(caller: &Caller, results: &Results) -> Result<(Outcome<Value, Payload>, Vec<wire::Handle>)> {
    let (encoded, crossing) = caller.encode_results(results)?;
    let outcome = Outcome::Reply {
        payload: encoded.payload,
        refs: encoded.refs,
        crossing,
    };
    Ok((outcome, encoded.handles))
}

/// Numbers whose sums depend on their order.
pub(super) fn draw(seed: u64, n: usize) -> Vec<f64> {
    (0..n as u64)
        .map(|i| {
            let mixed = (seed.wrapping_add(i * 7919).wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            0.3 + (mixed >> 11) as f64 / (1u64 << 53) as f64
        })
        .collect()
}

/// Those below the one at this place in a tree of so many, as in a heap.
pub(super) fn children_in_tree(place: u32, size: u32, fan_out: u32) -> impl Iterator<Item = u32> + use<> {
    (1..=fan_out)
        .map(move |k| place.saturating_mul(fan_out).saturating_add(k))
        .filter(move |&c| c < size)
}

impl Caller {
    fn make(&self, function: Function, refs: Vec<Ref>) -> Result<Value> {
        match function {
            Function::Make { seed } => Ok(Stored::new(Body::Tensor(Tensor::from_vec(draw(seed, FEW), FEW)?.parameter()?))),
            Function::Nest => {
                self.sim.world().checks.count("a value holds references");
                Ok(Stored::new(Body::Refs(refs)))
            }
            _ => {
                self.sim.world().checks.count("a creation fails");
                Err(Error::user("this function always fails"))
            }
        }
    }

    async fn call_function(&self, function: Function, tensors: Vec<Tensor>, refs: Vec<Ref>, ids: Vec<RefId>) -> Result<Results> {
        match function {
            Function::Exchange(exchange) => {
                let refs = self.exchange(&exchange, refs, ids).await?;
                Ok(Results { tensors: Vec::new(), refs })
            }
            Function::Node { tree, parameters } => {
                let input = tensors.first().cloned().ok_or_else(|| Error::user("no input"))?;
                let parameters: Vec<(usize, u32, Ref)> = parameters.into_iter().zip(refs).map(|((i, place), r)| (i, place, r)).collect();
                let tensors = self.node(&tree, input, &parameters).await?;
                Ok(Results { tensors, refs: Vec::new() })
            }
            Function::GradientOf(context) => {
                let gradient = self.gradient_of(context, refs.first()).await?;
                let dense = gradient.map(|g| g.to_dense().map(Tensor::from_data)).transpose()?;
                Ok(Results {
                    tensors: dense.into_iter().collect(),
                    refs: Vec::new(),
                })
            }
            Function::Accumulate(context) => {
                let tensor = self.parameter(refs.first()).await?;
                let gradient = tensors.first().ok_or_else(|| Error::user("no gradient"))?.data();
                let recording = self.known_recording(context).ok_or_else(|| Error::user("no such context"))?;
                if let Some(leaf) = tensor.leaf() {
                    recording.accumulate(leaf.clone(), Gradient::Dense(gradient))?;
                }
                Ok(Results::default())
            }
            Function::Spread { fan_out } => {
                let input = tensors.into_iter().next().ok_or_else(|| Error::user("no input"))?;
                Ok(Results {
                    tensors: vec![self.spread(fan_out, input).await?],
                    refs: Vec::new(),
                })
            }
            Function::Make { .. } | Function::MakeFails | Function::Nest => Err(Error::user("this function makes a value")),
            function => self.optimizer_function(function, &tensors, &refs).await,
        }
    }

    fn known_recording(&self, context: ContextId) -> Option<Arc<crate::rpc::Recording>> {
        self.sim.world().nodes[self.rank as usize].recordings.get(&context).cloned()
    }

    async fn parameter(&self, of: Option<&Ref>) -> Result<Tensor> {
        let of = of.ok_or_else(|| Error::user("no parameter"))?;
        match &self.local(of).await?.body {
            Body::Tensor(tensor) => Ok(tensor.clone()),
            Body::Refs(_) => Err(Error::user("not a tensor")),
        }
    }

    async fn gradient_of(&self, context: ContextId, of: Option<&Ref>) -> Result<Option<Gradient>> {
        let tensor = self.parameter(of).await?;
        let recording = self.known_recording(context);
        Ok(tensor.leaf().and_then(|leaf| recording?.gradient(leaf.id())))
    }

    async fn work(&self, micros: u64) {
        if micros > 0 {
            if micros > 1_000_000 {
                self.sim.world().checks.count("a function takes long");
            }
            self.sim.sleep(self.rank, Duration::from_micros(micros)).await;
        }
    }
}

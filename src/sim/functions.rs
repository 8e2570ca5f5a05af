//! What the remote functions of a simulated program do.

use std::sync::Arc;
use std::time::Duration;

use super::caller::{Arguments, Caller, Results, gate};
use super::handle::Ref;
use super::node::{Body, Stored, Value};
use super::program::{Exchange, Function, Tree};
use super::world::Sim;
use crate::optim::{Optimizer, OptimizerSpec, Sgd};
use crate::protocol::{ContextId, Gate, OptimizerId, Outcome, RefId, TaskId, Work};
use crate::rpc::Recorded;
use crate::tensor::{Gradient, Tensor};
use crate::wire::{self, Delivered, Payload};
use crate::{Error, ErrorKind, Result};

/// Elements of a tensor, and of a large one.
const FEW: usize = 3;
const MANY: usize = 96;

/// A task of a rank, from its start to its answer.
pub(super) async fn task(sim: Sim, rank: u32, task: TaskId, work: Work<Value, Payload>, handles: Vec<(RefId, wire::Handle)>) {
    let queued = matches!(&work, Work::Call { queued: true, .. });
    let (outcome, kept) = match execute(&sim, rank, task, work, handles).await {
        Ok(done) => done,
        Err(error) => (Outcome::Error(error), Vec::new()),
    };
    sim.pause(rank).await;
    if queued {
        sim.world().checks.dequeued(rank, task);
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
            Function::MakeOptimizer { id, momentum } => {
                let mut parameters = Vec::new();
                for r in &refs {
                    parameters.push(self.parameter(Some(r)).await?);
                }
                let spec = OptimizerSpec::from(Sgd {
                    lr: 0.1,
                    momentum: if momentum { 0.9 } else { 0.0 },
                    ..Sgd::default()
                });
                let optimizer = Optimizer::new(spec, parameters)?;
                let mut world = self.sim.world();
                let node = &mut world.nodes[self.rank as usize];
                if !node.unmade.remove(&id) {
                    node.optimizers.insert(id, optimizer);
                }
                Ok(Results::default())
            }
            Function::Step {
                id,
                context,
                client,
                number,
            } => {
                self.apply_step(id, context, client, number)?;
                Ok(Results::default())
            }
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
                Ok(Results::default())
            }
            Function::PassOn {
                id,
                context,
                client,
                number,
                fan_out,
            } => {
                let passed = Function::PassOn {
                    id,
                    context,
                    client,
                    number,
                    fan_out,
                };
                let mut calls = Vec::new();
                for child in self.below(fan_out) {
                    calls.push(
                        self.issue(child, &passed, Arguments::default(), Gate::default(), Recorded::Never)
                            .await?,
                    );
                }
                // Its own part takes its turn; passing on doesn't, so that trees of several clients can't wait for each other.
                let step = Function::Step {
                    id,
                    context,
                    client,
                    number,
                };
                let turn = gate(true, context);
                calls.push(self.issue(self.rank, &step, Arguments::default(), turn, Recorded::Never).await?);
                for call in calls {
                    self.results(call).await?;
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
        }
    }

    /// The ranks below this one in a tree, as in a heap.
    fn below(&self, fan_out: u32) -> impl Iterator<Item = u32> + use<> {
        let (rank, size) = (self.rank, self.sim.world().size());
        (1..=fan_out)
            .map(move |k| rank.saturating_mul(fan_out).saturating_add(k))
            .filter(move |&c| c < size)
    }

    /// Calls the ranks below this one in a tree, all at once, and adds up what they return.
    pub(super) async fn spread(&self, fan_out: u32, input: Tensor) -> Result<Tensor> {
        let function = Function::Spread { fan_out };
        let mut calls = Vec::new();
        for child in self.below(fan_out) {
            let arguments = Arguments {
                tensors: std::slice::from_ref(&input),
                ..Default::default()
            };
            calls.push(
                self.issue(child, &function, arguments, Gate::default(), Recorded::WithGradients)
                    .await?,
            );
        }
        let mut sum = input.mul_scalar(0.5)?;
        for call in calls {
            for tensor in self.results(call).await?.tensors {
                sum = (sum + tensor)?;
            }
        }
        Ok(sum)
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

    fn apply_step(&self, id: OptimizerId, context: ContextId, client: usize, number: u64) -> Result<()> {
        let recording = self.known_recording(context);
        let mut world = self.sim.world();
        let node = &mut world.nodes[self.rank as usize];
        let missing = || ErrorKind::NoSuchValue {
            operation: "step".into(),
            owner: self.rank,
            id: format!("optimizer {id}"),
        };
        let optimizer = node.optimizers.get_mut(&id).ok_or_else(missing)?;
        let leaves: Vec<Option<u64>> = optimizer.parameters().map(|p| p.leaf().map(|l| l.id())).collect();
        optimizer.step(&mut |i| recording.as_ref()?.gradient((*leaves.get(i)?)?))?;
        world.checks.steps(self.rank, client, number);
        Ok(())
    }

    async fn work(&self, micros: u64) {
        if micros > 0 {
            if micros > 1_000_000 {
                self.sim.world().checks.count("a function takes long");
            }
            self.sim.sleep(self.rank, Duration::from_micros(micros)).await;
        }
    }

    async fn exchange(&self, exchange: &Exchange, mut refs: Vec<Ref>, ids: Vec<RefId>) -> Result<Vec<Ref>> {
        for id in ids {
            self.sim.step(self.rank, |n| n.rank.attach(id));
            let mut world = self.sim.world();
            world.checks.count("a reference is attached by its id");
            let handle = world.handles.handle(self.rank, id);
            refs.push(Ref(handle));
        }
        self.work(exchange.micros).await;
        if exchange.fetches
            && let Some(first) = refs.first()
        {
            // What it is doesn't matter here, nor if it failed to be made; `fetch` checks that it is there.
            let fetched = self.fetch(first).await;
            drop(fetched);
        }
        if exchange.fails {
            self.sim.world().checks.count("a function fails with references in its hands");
            return Err(Error::user("this function always fails"));
        }
        let mut result: Vec<Ref> = Vec::new();
        if let Some(next) = &exchange.next {
            let to = self.sim.world().rank_at(next.place);
            let returned = self.send_exchange(to, next, &refs).await?;
            refs.extend(self.results(returned).await?.refs);
        }
        for (i, r) in refs.iter().enumerate() {
            if exchange.keeps >> (i % 8) & 1 == 1 {
                let mut world = self.sim.world();
                let node = &mut world.nodes[self.rank as usize];
                // A rank that is at its end drops it.
                if !node.rank.is_ending() {
                    node.kept.push(r.clone());
                }
            }
            if exchange.returns >> (i % 8) & 1 == 1 {
                result.push(r.clone());
            }
        }
        if exchange.nests {
            result.push(self.keep(Body::Refs(refs)));
        }
        Ok(result)
    }

    /// Keeps a value on this rank.
    pub(super) fn keep(&self, body: Body) -> Ref {
        if matches!(body, Body::Refs(_)) {
            self.sim.world().checks.count("a value holds references");
        }
        let value = Stored::new(body);
        let kept = Arc::clone(&value);
        let id = self.sim.step(self.rank, |n| n.rank.keep(kept));
        let mut world = self.sim.world();
        if value.id.set(id).is_ok() {
            world.checks.made(id);
        }
        Ref(world.handles.handle(self.rank, id))
    }

    pub(super) async fn send_exchange(&self, to: u32, exchange: &Exchange, refs: &[Ref]) -> Result<super::caller::Call> {
        self.sim.world().checks.count("references are sent to a function");
        let ids: Vec<RefId> = refs.iter().map(Ref::id).collect();
        let arguments = if exchange.by_id {
            Arguments {
                ids: &ids,
                ..Default::default()
            }
        } else {
            Arguments {
                refs,
                ..Default::default()
            }
        };
        let function = Function::Exchange(exchange.clone());
        self.issue(to, &function, arguments, Gate::default(), Recorded::Never).await
    }

    /// Computes with parameters, calls its children on what came out, and adds up what they return.
    async fn node(&self, tree: &Tree, input: Tensor, parameters: &[(usize, u32, Ref)]) -> Result<Vec<Tensor>> {
        self.work(tree.micros).await;
        let mut sum = input;
        for (k, &(wanted, fetched)) in tree.uses.iter().enumerate() {
            let Some((_, owner, of)) = parameters.iter().find(|p| p.0 == wanted) else {
                continue;
            };
            let w = if fetched || *owner != tree.place {
                self.sim.world().checks.count("a parameter is fetched");
                self.fetch(of)
                    .await?
                    .tensors
                    .into_iter()
                    .next()
                    .ok_or_else(|| Error::user("no tensor"))?
            } else {
                self.parameter(Some(of)).await?
            };
            let scaled = w.mul_scalar(0.17 + k as f64 / 7.0)?;
            sum = ((&sum * &w)? + scaled)?;
        }
        if tree.fails {
            self.sim.world().checks.count("a recorded function fails");
            return Err(Error::user("this function always fails"));
        }
        let results = self.children(tree, &sum, parameters).await?;
        for (k, (child, result)) in tree.children.iter().zip(results).enumerate() {
            if child.used {
                sum = (sum.mul_scalar(0.7)? + result.mul_scalar(0.31 + k as f64 / 3.0)?)?;
            }
        }
        if tree.large {
            let many = Tensor::from_vec(draw(tree.place.into(), MANY), MANY)?;
            let large = (sum.sum()? * many)?;
            return Ok(vec![sum, large]);
        }
        let extra = if tree.extra { vec![sum.mul_scalar(2.0)?] } else { Vec::new() };
        Ok([vec![sum], extra].concat())
    }

    /// Results of the children, in their order.
    async fn children(&self, tree: &Tree, input: &Tensor, parameters: &[(usize, u32, Ref)]) -> Result<Vec<Tensor>> {
        let silent = Caller {
            recorder: None,
            ..self.clone()
        };
        let caller = if tree.silent { &silent } else { self };
        let (mut calls, mut results, mut failure) = (Vec::new(), Vec::new(), None);
        for child in &tree.children {
            let call = caller.forward(child, input, parameters).await;
            match call {
                Ok(call) if tree.parallel => calls.push((child, call)),
                Ok(call) => match caller.tensors(child, call).await {
                    Ok(tensor) => results.push(tensor),
                    Err(e) => {
                        failure = Some(e);
                        break;
                    }
                },
                Err(e) => {
                    failure = Some(e);
                    break;
                }
            }
        }
        for (child, call) in calls {
            match caller.tensors(child, call).await {
                Ok(tensor) => results.push(tensor),
                Err(e) => failure = failure.or(Some(e)),
            }
        }
        match failure {
            Some(e) => Err(e),
            None => Ok(results),
        }
    }

    /// Calls a function of a forward pass.
    pub(super) async fn forward(&self, tree: &Tree, input: &Tensor, parameters: &[(usize, u32, Ref)]) -> Result<super::caller::Call> {
        let mut needs = Vec::new();
        tree.needs(&mut needs);
        let known: Vec<&(usize, u32, Ref)> = parameters.iter().filter(|p| needs.contains(&p.0)).collect();
        let refs: Vec<Ref> = known.iter().map(|p| p.2.clone()).collect();
        let function = Function::Node {
            tree: tree.clone(),
            parameters: known.iter().map(|p| (p.0, p.1)).collect(),
        };
        let arguments = Arguments {
            tensors: std::slice::from_ref(input),
            refs: &refs,
            ids: &[],
        };
        let to = self.sim.world().rank_at(tree.place);
        self.issue(to, &function, arguments, Gate::default(), Recorded::WithGradients).await
    }

    /// The result of a function of a forward pass.
    pub(super) async fn tensors(&self, tree: &Tree, call: super::caller::Call) -> Result<Tensor> {
        let mut results = self.results(call).await?.tensors.into_iter();
        let first = results.next().ok_or_else(|| Error::user("no tensor"))?;
        match results.next() {
            Some(large) if tree.large => first + large.sum()?,
            _ => Ok(first),
        }
    }
}

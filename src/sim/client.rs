//! What a client of a simulated program does, and what it notes of it for the comparison with one rank.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::caller::{Arguments, Call, Caller, Results, gate};
use super::functions::draw;
use super::handle::Ref;
use super::node::Body;
use super::program::{Client, Function, Op, Racing, Tree};
use super::world::{Sim, World};
use crate::autograd::check_roots;
use crate::protocol::{ContextId, Gate, Mode, OptimizerId};
use crate::rpc::{Recorded, Recording};
use crate::tensor::{Leaf, Tensor};
use crate::{Error, ErrorKind, Result};

/// What a client saw.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Seen {
    /// Elements of tensors, to the bit; an absent gradient is `None`.
    Tensors(Vec<Option<Vec<u64>>>),
    Done,
    /// The kind of an error.
    Failed(&'static str),
    /// What comes after may differ from the same program on one rank: calls were lost, or raced.
    Parted,
}

/// What a client noted: which of its operations, and what came of it.
pub(crate) type Log = Rc<RefCell<Vec<(usize, Seen)>>>;

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
    owners: Vec<u32>,
    _parameters: Vec<Ref>,
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
            let seen = match self.op(op).await {
                Ok(seen) => seen,
                Err(error) => Some(self.failed(&error)),
            };
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
            Op::MakeOptimizer { momentum } => return self.make_optimizer(*momentum).await,
            Op::Step { optimizer, context, times } => return self.step(*optimizer, *context, *times).await,
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

    fn open(&mut self) -> Result<()> {
        self.count("a context is opened");
        if !self.contexts.is_empty() {
            self.count("contexts overlap");
        }
        let (sim, rank) = (&self.caller.sim, self.caller.rank);
        let id = sim.step(rank, |n| n.rank.open_context());
        let recording = sim.world().recording(rank, id);
        self.next_leaf += 1;
        let leaf = Tensor::from_vec(draw(self.next_leaf + 1000 * self.client as u64, 3), 3)?.parameter()?;
        self.contexts.push(Open {
            caller: self.caller.recording(Arc::clone(&recording), Vec::new()),
            recording,
            backwards: 0,
            losses: Vec::new(),
            leaf,
            whole: true,
            tainted: false,
        });
        Ok(())
    }

    fn context(&mut self, context: usize) -> Option<&mut Open> {
        let n = self.contexts.len();
        self.contexts.get_mut(context.checked_rem(n)?)
    }

    async fn forward(&mut self, context: usize, trees: &[Tree], waits: bool) -> Result<Option<Seen>> {
        let known = self.parameters.clone();
        let Some(open) = self.context(context) else { return Ok(None) };
        open.whole &= trees.iter().all(Tree::is_whole);
        let (caller, leaf) = (open.caller.clone(), open.leaf.clone());
        // One after the other leaves, and all are waited for together.
        let mut calls: Vec<(&Tree, Call)> = Vec::new();
        for tree in trees {
            calls.push((tree, caller.forward(tree, &leaf, &known).await?));
        }
        if !waits {
            self.count("calls of a context are left alone");
            if let Some(open) = self.context(context) {
                // They may still record when a backward begins.
                open.whole = false;
                open.tainted = true;
            }
            return Ok(None);
        }
        let (mut sums, mut failure) = (Vec::new(), None);
        for (tree, call) in calls {
            match caller.tensors(tree, call).await {
                Ok(tensor) => sums.push(tensor),
                Err(e) => failure = failure.or(Some(e)),
            }
        }
        let size = trees.iter().map(Tree::len).sum::<usize>();
        self.count(if size > trees.len() {
            "a tree of calls"
        } else {
            "a call in a context"
        });
        if let Some(error) = failure {
            if let Some(open) = self.context(context) {
                open.whole = false;
            }
            return Err(error);
        }
        let mut loss: Option<Tensor> = None;
        for (k, sum) in sums.iter().enumerate() {
            let part = sum.sum()?.mul_scalar(0.9 + k as f64 / 9.0)?;
            loss = Some(match loss {
                Some(loss) => (loss + part)?,
                None => part,
            });
        }
        let Some(loss) = loss else { return Ok(None) };
        let seen = tensors(std::slice::from_ref(&loss))?;
        if let Some(open) = self.context(context) {
            open.losses.push(loss);
        }
        Ok(Some(seen))
    }

    async fn backward(&mut self, context: usize, mode: Mode, retain: bool, all: bool) -> Result<Option<Seen>> {
        let Some(open) = self.context(context) else { return Ok(None) };
        let roots: Vec<Tensor> = match (all, open.losses.last()) {
            (true, _) => open.losses.clone(),
            (false, Some(last)) => vec![last.clone()],
            (false, None) => Vec::new(),
        };
        // What was left out by an earlier one, or is by this one, is unreached in `Fast`.
        let whole = open.whole && roots.len() == open.losses.len();
        if roots.len() < open.losses.len() {
            open.whole = false;
        }
        check_roots(&roots)?;
        open.backwards += 1;
        let (recording, caller, number) = (Arc::clone(&open.recording), open.caller.clone(), open.backwards);
        if !retain && roots.len() == open.losses.len() {
            open.losses.clear();
        }
        let tainted = open.tainted && mode == Mode::Fast;
        let before = self.caller.sim.world().gradients_of(recording.id);
        let result = caller.backward(&recording, number, mode, retain, roots).await;
        self.count(match (mode, result.is_ok()) {
            (Mode::Exact, true) => "an exact backward succeeds",
            (Mode::Exact, false) => "an exact backward fails",
            (Mode::Fast, true) => "a fast backward succeeds",
            (Mode::Fast, false) => "a fast backward fails",
        });
        let Err(error) = result else {
            return Ok(Some(if tainted { Seen::Parted } else { Seen::Done }));
        };
        self.check_undone(recording.id, &before, &error);
        let unreached = matches!(error.kind(), ErrorKind::UnreachedCalls { .. });
        if unreached && whole && !tainted && !self.parted {
            let client = self.client;
            let mut world = self.caller.sim.world();
            world
                .checks
                .violate(|| format!("client {client}: all takes part, and yet: {error}"));
        }
        if let Some(open) = self.context(context) {
            open.whole = false;
            // What it had freed is expected once more by the next.
            open.tainted |= mode == Mode::Fast;
        }
        if mode == Mode::Fast && (tainted || !unreached) {
            return Ok(Some(Seen::Parted));
        }
        Err(error)
    }

    /// A backward that failed changed no gradient on any rank.
    fn check_undone(&self, context: ContextId, before: &[(u32, u64, Vec<u64>)], error: &Error) {
        let mut world = self.caller.sim.world();
        if !world.checks.lossy && world.gradients_of(context) != before {
            world
                .checks
                .violate(|| format!("a backward of context {context} failed, and gradients were changed: {error}"));
        }
    }

    async fn gradients(&mut self, context: usize) -> Result<Option<Seen>> {
        let known = self.parameters.clone();
        let Some(open) = self.context(context) else { return Ok(None) };
        let (recording, caller, leaf) = (Arc::clone(&open.recording), open.caller.clone(), open.leaf.clone());
        let mut all = Vec::new();
        for (_, place, of) in &known {
            all.push(gradient(&caller, recording.id, *place, of).await?);
        }
        let own = leaf.leaf().and_then(|leaf: &Arc<Leaf>| recording.gradient(leaf.id()));
        let own = own.map(|g| g.to_dense().map(Tensor::from_data)).transpose()?;
        all.push(own.map(|t| bits(&t)).transpose()?);
        self.count("gradients are compared");
        Ok(Some(Seen::Tensors(all)))
    }

    async fn accumulate(&mut self, context: usize, of: usize) -> Result<Option<Seen>> {
        if self.parameters.is_empty() {
            return Ok(None);
        }
        let (_, place, of) = self.parameters[of % self.parameters.len()].clone();
        let Some(open) = self.context(context) else { return Ok(None) };
        let (id, caller) = (open.recording.id, open.caller.clone());
        let gate = gate(false, id);
        let gradient = Tensor::from_vec(draw(77, 3), 3)?;
        let arguments = Arguments {
            tensors: std::slice::from_ref(&gradient),
            refs: std::slice::from_ref(&of),
            ids: &[],
        };
        let call = caller
            .issue(
                caller.sim.world_rank(place),
                &Function::Accumulate(id),
                arguments,
                gate,
                Recorded::Always,
            )
            .await?;
        caller.results(call).await?;
        self.count("a gradient is added by hand");
        Ok(Some(Seen::Done))
    }

    /// Begins a backward and does something else in the context meanwhile.
    async fn race(&mut self, context: usize, what: Racing) -> Result<Option<Seen>> {
        let Some(open) = self.context(context) else { return Ok(None) };
        let roots = open.losses.clone();
        if check_roots(&roots).is_err() {
            return Ok(None);
        }
        open.whole = false;
        open.losses.clear();
        open.backwards += 1;
        let (recording, caller, number) = (Arc::clone(&open.recording), open.caller.clone(), open.backwards);
        let (sim, rank, id) = (caller.sim.clone(), caller.rank, recording.id);
        let done = Rc::new(Cell::new(false));
        let second = Arc::clone(&recording);
        let flag = Rc::clone(&done);
        let background = caller.clone();
        sim.spawn(rank, Arc::from([]), async move {
            // It may fail: the context may be released under it.
            let result = background.backward(&recording, number, Mode::Exact, false, roots).await;
            drop(result);
            flag.set(true);
            background.sim.step(background.rank, |_| ());
        });
        sim.pause(rank).await;
        self.count("something races with a backward");
        let seen = match what {
            Racing::Step => self.step(0, context, 1).await.map(drop),
            Racing::Gradients => self.gradients(context).await.map(drop),
            Racing::Backward => {
                if let Some(open) = self.context(context) {
                    open.backwards += 1;
                }
                caller.backward(&second, number + 1, Mode::Exact, false, Vec::new()).await
            }
            Racing::Release => {
                let at = context % self.contexts.len();
                drop(self.contexts.swap_remove(at));
                drop(self.caller.release(id));
                Ok(())
            }
        };
        if let Err(error) = seen {
            match error.root() {
                ErrorKind::BackwardInFlight { .. } => self.count("a backward in flight refuses"),
                _ => drop(self.failed(&error)),
            }
        }
        sim.until(rank, None, None, |_| done.get().then_some(())).await;
        Ok(Some(Seen::Parted))
    }

    async fn make_optimizer(&mut self, momentum: bool) -> Result<Option<Seen>> {
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
            _parameters: parameters.clone(),
        };
        let mut calls = Vec::new();
        for &owner in &made.owners {
            let refs: Vec<Ref> = parameters.iter().filter(|p| p.id().owner == owner).cloned().collect();
            let arguments = Arguments {
                refs: &refs,
                ..Default::default()
            };
            let function = Function::MakeOptimizer { id, momentum };
            calls.push(
                self.caller
                    .issue(owner, &function, arguments, Gate::default(), Recorded::Never)
                    .await,
            );
        }
        let outcome = self.all(calls).await;
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

    /// Waits for all, then says which failed first.
    async fn all(&self, calls: Vec<Result<Call>>) -> Result<Vec<(u32, Results)>> {
        let (mut results, mut failure) = (Vec::new(), None);
        for call in calls {
            let outcome = match call {
                Ok(call) => {
                    let to = call.to;
                    self.caller.results(call).await.map(|r| (to, r))
                }
                Err(e) => Err(e),
            };
            match outcome {
                Ok(result) => results.push(result),
                Err(e) => failure = failure.or(Some(e)),
            }
        }
        failure.map_or(Ok(results), Err)
    }

    async fn step(&mut self, optimizer: usize, context: usize, times: usize) -> Result<Option<Seen>> {
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
            for &owner in &made.owners {
                calls.push(
                    self.caller
                        .issue(owner, &function, Arguments::default(), gate, Recorded::Never)
                        .await,
                );
            }
        }
        let answered = self.all(calls).await?;
        let mut world = self.caller.sim.world();
        world.checks.count("an optimizer steps");
        for (owner, _) in answered {
            world.checks.step_answered(owner, self.client, self.steps);
        }
        Ok(Some(Seen::Done))
    }

    async fn drop_optimizer(&self, made: Made) {
        self.count("an optimizer is dropped");
        let caller = Caller {
            windowed: false,
            ..self.caller.clone()
        };
        for &owner in &made.owners {
            let function = Function::DropOptimizer { id: made.id };
            let call = caller
                .issue(owner, &function, Arguments::default(), Gate::default(), Recorded::Never)
                .await;
            drop(call);
        }
    }
}

async fn gradient(caller: &Caller, context: ContextId, place: u32, of: &Ref) -> Result<Option<Vec<u64>>> {
    let gate = gate(false, context);
    let arguments = Arguments {
        refs: std::slice::from_ref(of),
        ..Default::default()
    };
    let to = caller.sim.world_rank(place);
    let call = caller
        .issue(to, &Function::GradientOf(context), arguments, gate, Recorded::Always)
        .await?;
    let found = caller.results(call).await?.tensors;
    found.first().map(bits).transpose()
}

fn bits(tensor: &Tensor) -> Result<Vec<u64>> {
    Ok(tensor.to_vec::<f64>()?.into_iter().map(f64::to_bits).collect())
}

fn tensors(of: &[Tensor]) -> Result<Seen> {
    Ok(Seen::Tensors(of.iter().map(|t| bits(t).map(Some)).collect::<Result<_>>()?))
}

/// The kind of an error, without its facts: they name ranks.
fn name(kind: &ErrorKind) -> &'static str {
    match kind {
        ErrorKind::User { .. } => "user",
        ErrorKind::GraphFreed { .. } => "graph freed",
        ErrorKind::NoRoots => "no roots",
        ErrorKind::RootWithoutGradient { .. } => "root without gradient",
        ErrorKind::BackwardInFlight { .. } => "backward in flight",
        ErrorKind::ContextReleased { .. } => "context released",
        ErrorKind::NoSuchValue { .. } => "no such value",
        ErrorKind::NotALeaf { .. } => "not a leaf",
        ErrorKind::UnreachedCalls { .. } => "unreached calls",
        ErrorKind::Decode { .. } => "decode",
        ErrorKind::Argument { .. } => "argument",
        ErrorKind::Shape { .. } => "shape",
        _ => "other",
    }
}

impl World {
    /// The gradients in a context, on all ranks: rank, leaf, elements to the bit.
    fn gradients_of(&self, context: ContextId) -> Vec<(u32, u64, Vec<u64>)> {
        let mut all = Vec::new();
        for (rank, node) in (0..).zip(&self.nodes) {
            for (leaf, gradient) in node.recordings.get(&context).map(|r| r.gradients()).unwrap_or_default() {
                let elements = gradient.to_dense().map(Tensor::from_data).and_then(|t| bits(&t));
                all.push((rank, leaf.id(), elements.unwrap_or_default()));
            }
        }
        all
    }
}

impl Sim {
    fn world_rank(&self, place: u32) -> u32 {
        self.world().rank_at(place)
    }
}

/// What the main thread of a rank does besides: serves, leads or waits for the one who does, and ends.
pub(super) async fn main(sim: Sim, rank: u32, serves: u32, leads: bool, clients: Vec<Rc<Cell<bool>>>) {
    let mut clients_done = |_: &mut World| clients.iter().all(|c| c.get()).then_some(());
    if leads {
        sim.until(rank, None, None, &mut clients_done).await;
        if rank == 0 {
            sim.step(rank, |n| n.rank.led(None));
        } else {
            sim.until(rank, None, None, |w| w.nodes[rank as usize].led.then_some(())).await;
        }
    }
    for _ in 0..serves {
        end_epoch(&sim, rank, false).await;
        sim.pause(rank).await;
    }
    sim.until(rank, None, None, &mut clients_done).await;
    // What functions kept here goes before the end, now and whenever an epoch ends without being the last.
    loop {
        drop(std::mem::take(&mut sim.world().nodes[rank as usize].kept));
        end_epoch(&sim, rank, true).await;
        if sim.world().nodes[rank as usize].at_last {
            break;
        }
    }
    let mut world = sim.world();
    world.mains -= 1;
    if world.mains == 0 {
        world.checks.over = true;
    }
}

async fn end_epoch(sim: &Sim, rank: u32, finishing: bool) {
    let before = sim.world().nodes[rank as usize].ended;
    sim.step(rank, |n| n.rank.enter_end(finishing));
    sim.until(rank, None, None, |w| (w.nodes[rank as usize].ended > before).then_some(()))
        .await;
}

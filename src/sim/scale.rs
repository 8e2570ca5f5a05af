//! What things cost on many ranks: messages, bytes, rounds, and the time that a model predicts.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::caller::{Arguments, Call, Caller, gate};
use super::functions::{children_in_tree, draw};
use super::handle::Ref;
use super::loggp::LogGp;
use super::mains;
use super::program::{Function, Tree};
use super::world::Sim;
use crate::autograd::check_roots;
use crate::protocol::{Gate, Mode, OptimizerId, Window};
use crate::rpc::{Recorded, Recording};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// What one operation costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Cost {
    /// The operation.
    pub what: &'static str,
    /// Number of ranks.
    pub ranks: u32,
    /// Messages, of all ranks.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The longest row of messages, each sent because of the one before.
    pub rounds: u64,
    /// Predicted time in microseconds, until the client goes on, or all ranks have ended.
    pub micros: f64,
    /// The most entries that a rank other than the client keeps in its tables afterwards.
    pub entries: usize,
}

/// What the client of the measured program has.
#[derive(Default)]
struct State {
    parameters: Vec<Ref>,
    loss: Option<Tensor>,
    context: Option<(Arc<Recording>, Caller)>,
    failed: Option<Error>,
}

struct Measured {
    sim: Sim,
    state: Rc<RefCell<State>>,
    costs: Vec<Cost>,
}

/// Runs a program on so many ranks, with a parameter on each and a client on rank 0: all its operations, in order, and what each costs. Functions take no time.
///
/// # Errors
/// An error of the program: there should be none.
pub fn scale(ranks: u32, model: LogGp, fan_out: u32) -> Result<Vec<Cost>> {
    let window = Window {
        requests: 256,
        bytes: 1 << 26,
    };
    let sim = Sim::modelled(ranks, window, model);
    let caller = Caller {
        sim: sim.clone(),
        rank: 0,
        recorder: None,
        limit: None,
        windowed: true,
        impatient: false,
    };
    let mut measured = Measured {
        sim,
        state: Rc::default(),
        costs: Vec::new(),
    };
    let id = OptimizerId::new(0, 1);
    measured.phase(
        "put a parameter on each rank",
        put(caller.clone(), Rc::clone(&measured.state), ranks),
    );
    measured.phase(
        "make an optimizer over N owners",
        make(caller.clone(), Rc::clone(&measured.state), id, fan_out),
    );
    measured.phase("call N ranks in a context", forward(caller.clone(), Rc::clone(&measured.state)));
    measured.phase("backward over N ranks", backward(Rc::clone(&measured.state)));
    measured.phase("step over N owners", step(caller.clone(), Rc::clone(&measured.state), id));
    measured.phase(
        "step over a tree of N owners",
        step_over_tree(caller.clone(), Rc::clone(&measured.state), id),
    );
    measured.phase(
        "release a context, met through one rank",
        release(caller.clone(), Rc::clone(&measured.state)),
    );
    measured.phase(
        "call a tree of N ranks",
        spread(caller.clone(), Rc::clone(&measured.state), fan_out),
    );
    measured.phase("backward over a tree", backward(Rc::clone(&measured.state)));
    measured.phase(
        "release a context, met along a tree",
        release(caller.clone(), Rc::clone(&measured.state)),
    );
    measured.phase("drop all", drop_all(caller.clone(), Rc::clone(&measured.state), id));
    measured.end();
    drop(caller);
    measured.sim.end();
    match measured.state.take().failed {
        Some(error) => Err(error),
        None => Ok(measured.costs),
    }
}

impl Measured {
    /// Runs a part of the client's program until nothing is left to do.
    fn phase(&mut self, what: &'static str, script: impl Future<Output = Result<()>> + 'static) {
        let (sim, state) = (self.sim.clone(), Rc::clone(&self.state));
        let done = Rc::new(Cell::new(Duration::ZERO));
        let at = Rc::clone(&done);
        self.measure(what, &done, move |own| {
            own.spawn(0, Arc::from([]), async move {
                if let Err(error) = script.await {
                    state.borrow_mut().failed.get_or_insert(error);
                }
                at.set(sim.world().clock(0));
            });
        });
    }

    fn end(&mut self) {
        let size = self.sim.world().size();
        let done = Rc::new(Cell::new(Duration::ZERO));
        let at = Rc::clone(&done);
        self.measure("the end", &done, move |own| {
            own.world().mains = size as usize;
            for rank in 0..size {
                let (sim, at) = (own.clone(), Rc::clone(&at));
                own.spawn(rank, Arc::from([]), async move {
                    mains::main(sim.clone(), rank, 0, false, Vec::new()).await;
                    at.set(at.get().max(sim.world().clock(rank)));
                });
            }
        });
    }

    fn measure(&mut self, what: &'static str, done: &Cell<Duration>, start: impl FnOnce(&Sim)) {
        let (begin, messages, bytes) = {
            let mut world = self.sim.world();
            world.nodes.iter_mut().for_each(|n| n.round = 0);
            (world.latest(), world.messages, world.bytes)
        };
        start(&self.sim);
        self.sim.run();
        let world = self.sim.world();
        self.costs.push(Cost {
            what,
            ranks: world.size(),
            messages: world.messages - messages,
            bytes: world.bytes - bytes,
            rounds: world.nodes.iter().map(|n| n.round).max().unwrap_or(0),
            micros: done.get().saturating_sub(begin).as_secs_f64() * 1e6,
            entries: world.nodes[1..].iter().map(|n| n.rank.entries()).max().unwrap_or(0),
        });
    }
}

async fn put(caller: Caller, state: Rc<RefCell<State>>, ranks: u32) -> Result<()> {
    for rank in 0..ranks {
        let made = caller.create(rank, &Function::Make { seed: rank.into() }, &[]).await?;
        state.borrow_mut().parameters.push(made);
    }
    Ok(())
}

async fn make(caller: Caller, state: Rc<RefCell<State>>, id: OptimizerId, fan_out: u32) -> Result<()> {
    let parameters = state.borrow().parameters.clone();
    let mut calls = Vec::new();
    for of in &parameters {
        let arguments = Arguments {
            refs: std::slice::from_ref(of),
            ..Default::default()
        };
        let function = Function::MakeOptimizer {
            id,
            momentum: false,
            children: children_in_tree(of.id().owner, parameters.len() as u32, fan_out).collect(),
        };
        calls.push(
            caller
                .issue(of.id().owner, &function, arguments, Gate::default(), Recorded::Never)
                .await?,
        );
    }
    all(&caller, calls).await.map(drop)
}

async fn all(caller: &Caller, calls: Vec<Call>) -> Result<Vec<Tensor>> {
    let mut tensors = Vec::new();
    for call in calls {
        tensors.extend(caller.results(call).await?.tensors);
    }
    Ok(tensors)
}

fn open(caller: &Caller) -> (Arc<Recording>, Caller, Result<Tensor>) {
    let id = caller.sim.step(0, |n| n.rank.open_context());
    let recording = caller.sim.world().recording(0, id);
    let input = Tensor::from_vec(draw(7, 3), 3).and_then(Tensor::parameter);
    let caller = caller.recording(Arc::clone(&recording), Vec::new());
    (recording, caller, input)
}

fn note(state: &RefCell<State>, recording: Arc<Recording>, caller: Caller, results: &[Tensor]) -> Result<()> {
    let mut loss: Option<Tensor> = None;
    for tensor in results {
        let part = tensor.sum()?;
        loss = Some(match loss {
            Some(loss) => (loss + part)?,
            None => part,
        });
    }
    let mut state = state.borrow_mut();
    state.loss = loss;
    state.context = Some((recording, caller));
    Ok(())
}

/// Calls every rank at once; each takes its own parameter.
async fn forward(caller: Caller, state: Rc<RefCell<State>>) -> Result<()> {
    let (recording, caller, input) = open(&caller);
    let (input, parameters) = (input?, state.borrow().parameters.clone());
    let mut calls = Vec::new();
    for of in parameters {
        let place = of.id().owner;
        let tree = Tree {
            place,
            uses: vec![(0, false)],
            children: Vec::new(),
            parallel: false,
            used: true,
            extra: false,
            silent: false,
            fails: false,
            large: false,
            micros: 0,
        };
        calls.push(caller.forward(&tree, &input, &[(0, place, of)]).await?);
    }
    let results = all(&caller, calls).await?;
    note(&state, recording, caller, &results)
}

async fn spread(caller: Caller, state: Rc<RefCell<State>>, fan_out: u32) -> Result<()> {
    let (recording, caller, input) = open(&caller);
    let result = caller.spread(fan_out, input?).await?;
    note(&state, recording, caller, &[result])
}

async fn backward(state: Rc<RefCell<State>>) -> Result<()> {
    let found = {
        let state = state.borrow();
        state.loss.clone().zip(state.context.clone())
    };
    let Some((loss, (recording, caller))) = found else {
        return Err(Error::user("nothing to go back from"));
    };
    let roots = vec![loss];
    check_roots(&roots)?;
    caller.backward(&recording, 1, Mode::Exact, false, roots).await
}

async fn step(caller: Caller, state: Rc<RefCell<State>>, id: OptimizerId) -> Result<()> {
    let (parameters, context) = {
        let state = state.borrow();
        (state.parameters.clone(), state.context.as_ref().map(|c| c.0.id))
    };
    let context = context.ok_or_else(|| Error::user("no context"))?;
    let function = Function::Step {
        id,
        context,
        client: 0,
        number: 1,
    };
    let gate = gate(true, context);
    let mut calls = Vec::new();
    for of in parameters {
        calls.push(
            caller
                .issue(of.id().owner, &function, Arguments::default(), gate, Recorded::Never)
                .await?,
        );
    }
    all(&caller, calls).await.map(drop)
}

/// One request to the owner at the head of the tree.
async fn step_over_tree(caller: Caller, state: Rc<RefCell<State>>, id: OptimizerId) -> Result<()> {
    let context = state.borrow().context.as_ref().map(|c| c.0.id);
    let step = Function::Step {
        id,
        context: context.ok_or_else(|| Error::user("no context"))?,
        client: 0,
        number: 2,
    };
    let function = Function::PassOn {
        id,
        number: 0,
        passed: step.into(),
    };
    let call = caller
        .issue(0, &function, Arguments::default(), Gate::default(), Recorded::Never)
        .await?;
    caller.results(call).await.map(drop)
}

async fn release(caller: Caller, state: Rc<RefCell<State>>) -> Result<()> {
    let context = {
        let mut state = state.borrow_mut();
        state.loss = None;
        state.context.take()
    };
    let (recording, _) = context.ok_or_else(|| Error::user("no context"))?;
    let call = caller.release(recording.id);
    caller.wait(call).await.map(drop)
}

async fn drop_all(caller: Caller, state: Rc<RefCell<State>>, id: OptimizerId) -> Result<()> {
    let parameters = std::mem::take(&mut state.borrow_mut().parameters);
    let mut calls = Vec::new();
    for of in &parameters {
        let (owner, function) = (of.id().owner, Function::DropOptimizer { id });
        calls.push(
            caller
                .issue(owner, &function, Arguments::default(), Gate::default(), Recorded::Never)
                .await?,
        );
    }
    all(&caller, calls).await?;
    drop(parameters);
    caller.sim.poll_soon(0);
    Ok(())
}

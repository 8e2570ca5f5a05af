//! Contexts: calls in them, backward, gradients.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use super::super::caller::{Arguments, Call, Caller, gate};
use super::super::functions::draw;
use super::super::handle::Ref;
use super::super::program::{Function, Racing, Tree};
use super::super::world::{Sim, World};
use super::seen::{bits, tensors};
use super::{Open, Seen, Session};
use crate::autograd::check_roots;
use crate::protocol::{ContextId, Mode};
use crate::rpc::Recorded;
use crate::tensor::{Leaf, Tensor};
use crate::{Error, ErrorKind, Result};

impl Session {
    pub(super) fn open(&mut self) -> Result<()> {
        self.count("a context is opened");
        if !self.contexts.is_empty() {
            self.count("contexts overlap");
        }
        let (sim, rank) = (&self.caller.sim, self.caller.rank);
        let id = sim.step(rank, |n| n.rank.open_context());
        let recording = sim.world().recording(rank, id);
        self.next_leaf += 1;
        let leaf = Tensor::from_vec(draw(self.next_leaf + 1000 * self.client as u64, 3), 3)?;
        // Now and then all gradients stay on the ranks that the calls went to.
        let leaf = if self.next_leaf.is_multiple_of(3) {
            leaf
        } else {
            leaf.parameter()?
        };
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

    pub(super) fn context(&mut self, context: usize) -> Option<&mut Open> {
        let n = self.contexts.len();
        self.contexts.get_mut(context.checked_rem(n)?)
    }

    pub(super) async fn forward(&mut self, context: usize, trees: &[Tree], waits: bool) -> Result<Option<Seen>> {
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

    pub(super) async fn backward(&mut self, context: usize, mode: Mode, retain: bool, all: bool) -> Result<Option<Seen>> {
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

    pub(super) async fn gradients(&mut self, context: usize) -> Result<Option<Seen>> {
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

    pub(super) async fn accumulate(&mut self, context: usize, of: usize) -> Result<Option<Seen>> {
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
    pub(super) async fn race(&mut self, context: usize, what: Racing) -> Result<Option<Seen>> {
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

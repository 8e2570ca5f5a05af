//! What a rank keeps of a distributed autograd context: the tensors it sent, the gradients it accumulated, the engine at work.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::autograd::{self, Edge, Key, LeafHooks, LeafSink, one_like};
use crate::mutant::{self, Mutant};
use crate::protocol::{ContextId, CrossingId, Input, Output};
use crate::runtime::lock;
use crate::tensor::{Gradient, Leaf, Tensor};
use crate::wire::{Payload, decode_gradients, encode_gradients};
use crate::{ErrorKind, Result};

/// A frame: the code of one recorded call on one rank. Calls are numbered within the frame that issues them.
#[derive(Debug)]
pub(crate) struct Frame {
    pub path: Arc<[u32]>,
    next: AtomicU32,
}

impl Frame {
    pub(crate) fn new(path: Vec<u32>) -> Arc<Self> {
        Arc::new(Frame {
            path: path.into(),
            next: AtomicU32::new(0),
        })
    }

    /// The path of the next call that this frame issues.
    pub(crate) fn next_path(&self) -> Vec<u32> {
        let mut path = Vec::with_capacity(self.path.len() + 1);
        path.extend_from_slice(&self.path);
        path.push(self.next.fetch_add(1, Ordering::Relaxed));
        path
    }
}

/// Most crossings that a backward over ranks takes along; more are asked about, rank by rank.
const MOST_KNOWN: usize = 1024;

/// Where calls are recorded.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    pub recording: Arc<Recording>,
    pub frame: Arc<Frame>,
}

/// Tensors that went to another rank.
struct Sent {
    key: Key,
    edges: Vec<Option<Edge>>,
    what: Travels,
}

/// What travels with a call that is recorded, in words that only an error needs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Travels {
    /// The arguments of this function, to a rank.
    Arguments(&'static str, u32),
    /// What this function on a rank gave, to another.
    Result(&'static str, u32, u32),
}

impl std::fmt::Display for Travels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Travels::Arguments(function, to) => write!(f, "{function} on rank {to} (arguments)"),
            Travels::Result(function, on, to) => write!(f, "{function} on rank {on} (result for rank {to})"),
        }
    }
}

/// By the leaves' ids, in whose order a step goes over many.
type Gradients = BTreeMap<u64, (Arc<Leaf>, Gradient)>;

#[derive(Default)]
struct Engine {
    roots: Vec<Tensor>,
    backward: Option<autograd::Backward>,
    /// Gradients of this backward, apart from the context's until it succeeded.
    apart: Gradients,
    /// What hooks left of the sum of the context's gradients and those of this backward. It replaces the context's.
    left: Gradients,
    /// The hooks of this backward so far.
    hooks: LeafHooks,
    /// Crossings that `Fast` expects a gradient for.
    expected: BTreeMap<CrossingId, Travels>,
    /// Crossings that got their gradients.
    given: Vec<CrossingId>,
    /// Whether the context was released.
    released: bool,
}

/// The part of a context that lives on this rank.
pub(crate) struct Recording {
    pub id: ContextId,
    me: u32,
    sent: Mutex<BTreeMap<CrossingId, Sent>>,
    gradients: Mutex<Gradients>,
    engine: Mutex<Engine>,
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Gradients that a recording lends.
pub(crate) struct Lent<'a>(MutexGuard<'a, Gradients>);

impl Lent<'_> {
    /// Finds gradients by their leaves' ids; quickest in ascending order, where it mostly has to look at the next one only.
    pub(crate) fn finder<'g>(&'g self) -> impl FnMut(u64) -> Option<&'g Gradient> {
        let mut ahead = self.0.range(..);
        let mut next = ahead.next();
        move |leaf| {
            if next.is_none_or(|(id, _)| *id != leaf) {
                ahead = self.0.range(leaf..);
                next = ahead.next();
            }
            let (_, (_, gradient)) = next.filter(|(id, _)| **id == leaf)?;
            next = ahead.next();
            Some(gradient)
        }
    }
}

impl Recording {
    pub(crate) fn new(id: ContextId, me: u32) -> Arc<Self> {
        Arc::new(Recording {
            id,
            me,
            sent: Mutex::default(),
            gradients: Mutex::default(),
            engine: Mutex::default(),
        })
    }

    /// Notes that tensors leave this rank; gradients for them will come under the returned id.
    pub(crate) fn send(&self, edges: Vec<Option<Edge>>, what: Travels) -> CrossingId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = CrossingId::new(self.me, NEXT.fetch_add(1, Ordering::Relaxed));
        lock(&self.sent).insert(
            id,
            Sent {
                key: Key::next(),
                edges,
                what,
            },
        );
        id
    }

    /// What was sent came to nothing.
    pub(crate) fn unsend(&self, id: CrossingId) {
        lock(&self.sent).remove(&id);
    }

    /// The gradient of a leaf of this rank, if this context has one.
    pub(crate) fn gradient(&self, leaf: u64) -> Option<Gradient> {
        lock(&self.gradients).get(&leaf).map(|g| g.1.clone())
    }

    /// The gradients of leaves of this rank, lent; none is added meanwhile.
    pub(crate) fn lent(&self) -> Lent<'_> {
        Lent(lock(&self.gradients))
    }

    /// Lets go of the graph: hooks in it may hold this recording.
    pub(crate) fn clear(&self) {
        let sent = std::mem::take(&mut *lock(&self.sent));
        let released = Engine {
            released: true,
            ..Engine::default()
        };
        let engine = std::mem::replace(&mut *lock(&self.engine), released);
        drop((sent, engine));
    }

    /// All gradients of leaves of this rank.
    pub(crate) fn gradients(&self) -> Vec<(Arc<Leaf>, Gradient)> {
        lock(&self.gradients).values().cloned().collect()
    }

    /// Adds to the gradient of a leaf.
    pub(crate) fn accumulate(&self, leaf: Arc<Leaf>, gradient: Gradient) -> Result<()> {
        add(&mut lock(&self.gradients), leaf, gradient)
    }

    /// The roots of the backward that is about to begin on this rank.
    pub(crate) fn set_roots(&self, roots: Vec<Tensor>) {
        lock(&self.engine).roots = roots;
    }

    /// Does what a backward asks of this rank. Not twice at a time.
    pub(crate) fn work(&self, retain_graph: bool, inputs: Vec<Input<Payload>>) -> Output<Payload> {
        let mut output = Output::default();
        // Not under the lock: adjoints and hooks are user code, and may wait for what releases this context.
        let mut engine = std::mem::take(&mut *lock(&self.engine));
        if let Err(error) = self.try_work(&mut engine, retain_graph, inputs, &mut output) {
            output.error = Some(error);
        }
        let mut kept = lock(&self.engine);
        if !kept.released {
            std::mem::swap(&mut *kept, &mut engine);
        }
        drop(kept);
        output
    }

    fn try_work(&self, engine: &mut Engine, retain: bool, inputs: Vec<Input<Payload>>, output: &mut Output<Payload>) -> Result<()> {
        let (mut flows, mut commits) = (false, None);
        for input in inputs {
            let running = engine.backward.get_or_insert_with(|| autograd::Backward::new(retain));
            let reached = match input {
                Input::MarkRoots => {
                    let mut reached = Vec::new();
                    for (i, root) in engine.roots.iter().enumerate() {
                        reached.extend(running.mark(&root_key(i), &[root.edge()])?);
                    }
                    reached
                }
                Input::ExpectAll => {
                    let sent = lock(&self.sent);
                    output.expected = sent.len();
                    let mut reached = Vec::new();
                    for (&id, sent) in sent.iter() {
                        reached.extend(running.mark(&sent.key, &sent.edges)?);
                        engine.expected.insert(id, sent.what);
                    }
                    reached
                }
                Input::Mark(id) => self.with_sent(id, |sent| running.mark(&sent.key, &sent.edges))?,
                Input::SeedRoots => {
                    seed(running, &engine.roots)?;
                    flows = true;
                    Vec::new()
                }
                Input::SeedIfKnown => {
                    let Some(known) = running.reach().filter(|known| known.len() <= MOST_KNOWN) else {
                        continue;
                    };
                    let known: Vec<CrossingId> = known.iter().copied().map(CrossingId::from_bits).collect();
                    for &id in known.iter().filter(|id| id.rank() == self.me) {
                        self.with_sent(id, |sent| running.mark(&sent.key, &sent.edges))?;
                    }
                    seed(running, &engine.roots)?;
                    flows = true;
                    output.known = Some(known);
                    Vec::new()
                }
                Input::Gradient(id, payload) => {
                    let gradients = decode_gradients(payload)?;
                    self.with_sent(id, |sent| running.give(&sent.key, &sent.edges, gradients))?;
                    engine.expected.remove(&id);
                    engine.given.push(id);
                    flows = true;
                    Vec::new()
                }
                Input::CommitIfLast { balance, permit } => {
                    commits = Some((balance, permit));
                    Vec::new()
                }
                Input::Commit => {
                    self.commit(engine, retain)?;
                    continue;
                }
                Input::Abort => {
                    self.abort(engine, output);
                    continue;
                }
            };
            output.reached.extend(reached.into_iter().map(CrossingId::from_bits));
        }
        if flows && let Some(running) = &mut engine.backward {
            let mut sink = Apart {
                gathered: &self.gradients,
                apart: &mut engine.apart,
                left: &mut engine.left,
                hooks: &mut engine.hooks,
            };
            for (id, gradients) in running.run(&mut sink)? {
                output.gradients.push((CrossingId::from_bits(id), encode_gradients(gradients)?));
            }
        }
        let is_whole = engine.backward.as_ref().is_none_or(autograd::Backward::is_finished);
        let stay = output.gradients.is_empty() && is_whole || mutant::is(Mutant::CommitEarly);
        let expected = output.expected as i64;
        if stay && commits.is_some_and(|(balance, permit)| balance + expected == 0 && permit.take()) {
            self.commit(engine, retain)?;
            output.committed = true;
        }
        Ok(())
    }

    /// Adds what a backward gathered to the context's gradients: all of it, or nothing if that fails.
    fn commit(&self, engine: &mut Engine, retain: bool) -> Result<()> {
        if engine.backward.as_ref().is_some_and(|running| !running.is_finished()) {
            log::error!(
                "context {}: a backward ends with gradients still to come: this is a bug in rankgrad",
                self.id
            );
        }
        let mut gradients = lock(&self.gradients);
        // All sums before the first is kept: a device may lack the memory for one.
        for (id, (_, gradient)) in &mut engine.apart {
            if let Some((_, held)) = gradients.get(id) {
                let gathered = std::mem::replace(gradient, held.clone());
                gradient.accumulate(gathered)?;
            }
        }
        gradients.append(&mut engine.apart);
        gradients.append(&mut engine.left);
        drop(gradients);
        engine.hooks = LeafHooks::default();
        engine.roots.clear();
        engine.expected.clear();
        let used = std::mem::take(&mut engine.given);
        if !retain {
            let mut sent = lock(&self.sent);
            used.iter().for_each(|id| drop(sent.remove(id)));
        }
        engine.backward = None;
        Ok(())
    }

    /// Forgets it.
    fn abort(&self, engine: &mut Engine, output: &mut Output<Payload>) {
        if !mutant::is(Mutant::KeepAborted) {
            engine.apart.clear();
        }
        engine.left.clear();
        let updated = std::mem::take(&mut engine.hooks);
        if !updated.updated().is_empty() {
            log::warn!(
                "context {}: the backward failed after hooks had updated these leaves of this rank: {}",
                self.id,
                updated.updated().join(", ")
            );
        }
        engine.given.clear();
        engine.roots.clear();
        output
            .unreached
            .extend(std::mem::take(&mut engine.expected).values().map(Travels::to_string));
        engine.backward = None;
    }

    fn with_sent<R>(&self, id: CrossingId, f: impl FnOnce(&Sent) -> Result<R>) -> Result<R> {
        match lock(&self.sent).get(&id) {
            Some(sent) => f(sent),
            // Forgotten with the graph that it was part of.
            None => Err(ErrorKind::GraphFreed {
                op: format!("recorded call {id}"),
            }
            .into()),
        }
    }
}

/// Gives the roots their gradient.
fn seed(running: &mut autograd::Backward, roots: &[Tensor]) -> Result<()> {
    for (i, root) in roots.iter().enumerate() {
        running.give(&root_key(i), &[root.edge()], [Some(one_like(root))])?;
    }
    Ok(())
}

/// Roots come after everything else in the program, the first root last.
fn root_key(root: usize) -> Key {
    Key {
        frame: Arc::default(),
        seq: u64::MAX - root as u64,
    }
}

fn add(gradients: &mut Gradients, leaf: Arc<Leaf>, gradient: Gradient) -> Result<()> {
    match gradients.get_mut(&leaf.id()) {
        Some((_, sum)) => sum.accumulate(gradient),
        None => {
            gradients.insert(leaf.id(), (leaf, gradient));
            Ok(())
        }
    }
}

/// Keeps gradients apart; where a leaf has hooks they run on the sum with what the context holds, as it will be after this backward.
struct Apart<'a> {
    gathered: &'a Mutex<Gradients>,
    apart: &'a mut Gradients,
    left: &'a mut Gradients,
    hooks: &'a mut LeafHooks,
}

impl LeafSink for Apart<'_> {
    fn complete(&mut self, leaf: &Arc<Leaf>, gradient: Gradient) -> Result<()> {
        if !leaf.has_post_accumulate_hooks() {
            return add(self.apart, Arc::clone(leaf), gradient);
        }
        let held = lock(self.gathered).get(&leaf.id()).map(|held| held.1.clone());
        let mut slot = Some(match held {
            Some(mut sum) => {
                sum.accumulate(gradient)?;
                sum
            }
            None => gradient,
        });
        self.hooks.run(leaf, &mut slot)?;
        match slot {
            Some(gradient) => {
                self.left.insert(leaf.id(), (Arc::clone(leaf), gradient));
            }
            // What a hook took was used; if the backward fails it must not be used again.
            None => {
                let used = lock(self.gathered).remove(&leaf.id());
                drop(used);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::RowSparse;

    #[test]
    fn a_sum_that_fails_leaves_the_contexts_gradients_as_they_were() {
        let recording = Recording::new(ContextId::new(0, 1), 0);
        let leaves: Vec<Tensor> = (0..2)
            .map(|_| Tensor::from_vec(vec![0.0; 2], [2]).unwrap().parameter().unwrap())
            .collect();
        let ones = || Gradient::Dense(Tensor::from_vec(vec![1.0; 2], [2]).unwrap().data());
        let broken = Gradient::Sparse(RowSparse {
            rows: vec![7],
            values: Tensor::from_vec(vec![1.0], [1]).unwrap().data(),
            shape: vec![2],
        });
        let mut engine = Engine::default();
        for (leaf, gradient) in leaves.iter().zip([ones(), broken]) {
            let leaf = leaf.leaf().unwrap();
            recording.accumulate(leaf.clone(), ones()).unwrap();
            engine.apart.insert(leaf.id(), (leaf.clone(), gradient));
        }
        let told = recording.commit(&mut engine, false).unwrap_err();
        assert!(matches!(told.kind(), ErrorKind::Index { index: 7, size: 2, .. }), "{told}");
        for (_, gradient) in recording.gradients() {
            assert_eq!(Tensor::from_data(gradient.to_dense().unwrap()).to_vec::<f64>().unwrap(), [1.0, 1.0]);
        }
    }
}

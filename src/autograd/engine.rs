//! One backward on one rank's graph: counts what each value waits for, sums in a fixed order, runs what is ready.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use smallvec::SmallVec;

use crate::mutant::{self, Mutant};
use crate::tensor::graph::{Edge, Key, Kind, Node};
use crate::tensor::{Data, Gradient, Leaf};
use crate::{ErrorKind, Result};

/// Takes the gradients of leaves.
pub(crate) trait LeafSink {
    /// Called once per leaf and backward, as soon as the leaf's gradient is complete.
    fn complete(&mut self, leaf: &Arc<Leaf>, gradient: Gradient) -> Result<()>;
}

/// One backward on this rank's graph, fed from outside.
///
/// `mark` announces gradients and counts, exactly, what every value they reach will receive; `give` brings them; `run`
/// runs what has received everything. Contributions to one value are summed in descending order of their contributors'
/// keys, as their turn comes; only early ones are kept apart. So the sum doesn't depend on the order of arrival.
pub(crate) struct Backward {
    retain_graph: bool,
    tables: Tables,
    unfinished: usize,
    /// All boundaries, on any rank, that what was marked reaches; `None` if that isn't known.
    reach: Option<BTreeSet<u64>>,
}

/// What grows with the graph. A thread keeps them, empty, for its next backward: over a small graph that takes less time than making them.
#[derive(Default)]
struct Tables {
    visits: Vec<Visit>,
    index: HashMap<u64, usize, BuildHasherDefault<IdHasher>>,
    ready: BinaryHeap<(Key, Reverse<usize>)>,
    complete_leaves: Vec<usize>,
    /// Those of the node that is at work.
    gradients: Vec<Option<Gradient>>,
    dense: Vec<Data>,
}

/// Tables that grew larger aren't kept.
const MOST_KEPT: usize = 64;

thread_local! {
    static SPARE: Cell<Tables> = Cell::default();
}

/// What this backward knows of a node.
struct Visit {
    node: Arc<Node>,
    slots: SmallVec<[Slot; 1]>,
    /// Contributions still to come, over all slots.
    waiting: usize,
    done: bool,
}

/// The gradient of one output of a node, in the making.
#[derive(Default)]
struct Slot {
    sum: Option<Gradient>,
    /// In descending order from `next` on once `sorted`; those before it are in the sum.
    expected: SmallVec<[Contribution; 1]>,
    next: usize,
    sorted: bool,
}

struct Contribution {
    key: Key,
    /// Which of the contributor's edges it comes through.
    edge: usize,
    /// Before its turn.
    arrived: Option<Option<Box<Gradient>>>,
}

impl Backward {
    pub(crate) fn new(retain_graph: bool) -> Self {
        Backward {
            retain_graph,
            tables: SPARE.try_with(Cell::take).unwrap_or_default(),
            unfinished: 0,
            reach: Some(BTreeSet::new()),
        }
    }

    /// All boundaries, on any rank, that what was marked reaches; `None` if that isn't known.
    pub(crate) fn reach(&self) -> Option<&BTreeSet<u64>> {
        self.reach.as_ref()
    }

    /// Announces that gradients will be given for these edges by the contributor `key`. Walks what they reach and counts
    /// what each value waits for. Later marks may extend the reach. Returns the ids of boundaries that this backward
    /// reached for the first time.
    ///
    /// # Errors
    /// [`ErrorKind::GraphFreed`] if it reaches a node that an earlier backward freed; [`ErrorKind::Argument`] if it leads
    /// to a node of this backward that has already run.
    pub(crate) fn mark(&mut self, key: &Key, edges: &[Option<Edge>]) -> Result<Vec<u64>> {
        let mut boundaries = Vec::new();
        let mut fresh = SmallVec::new();
        for (i, edge) in edges.iter().enumerate() {
            if let Some(edge) = edge {
                self.expect(key, i, edge, &mut fresh, &mut boundaries)?;
            }
        }
        while let Some(visit) = fresh.pop() {
            let node = self.tables.visits[visit].node.clone();
            for (i, edge) in node.inputs().iter().enumerate() {
                if let Some(edge) = edge {
                    self.expect(node.key(), i, edge, &mut fresh, &mut boundaries)?;
                }
            }
        }
        Ok(boundaries)
    }

    fn expect(&mut self, key: &Key, edge: usize, target: &Edge, fresh: &mut SmallVec<[usize; 8]>, boundaries: &mut Vec<u64>) -> Result<()> {
        let visit = match self.tables.index.get(&target.node.id()) {
            Some(&visit) => visit,
            None => {
                target.node.check_saved()?;
                if let Kind::Boundary { id, beyond } = target.node.kind() {
                    boundaries.push(*id);
                    match (&mut self.reach, beyond) {
                        (Some(reach), Some(beyond)) => {
                            reach.insert(*id);
                            reach.extend(beyond.iter());
                        }
                        (reach, _) => *reach = None,
                    }
                }
                let visit = self.tables.visits.len();
                let slots = target.node.outputs().iter().map(|_| Slot::default()).collect();
                self.tables.visits.push(Visit {
                    node: target.node.clone(),
                    slots,
                    waiting: 0,
                    done: false,
                });
                self.tables.index.insert(target.node.id(), visit);
                self.unfinished += 1;
                fresh.push(visit);
                visit
            }
        };
        let state = &mut self.tables.visits[visit];
        if state.done {
            let what = format!("more gradients were announced for `{}` after it had run", state.node.name());
            return Err(ErrorKind::Argument {
                op: "backward".into(),
                what,
            }
            .into());
        }
        state.waiting += 1;
        let slot = &mut state.slots[target.slot];
        slot.sorted = slot.expected.len() == slot.next;
        slot.expected.push(Contribution {
            key: key.clone(),
            edge,
            arrived: None,
        });
        Ok(())
    }

    /// Gives what was announced. `None` where an edge is present is filled with zeros of the target's shape.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] or [`ErrorKind::Shape`] for a gradient that doesn't fit its value;
    /// [`ErrorKind::Argument`] for one that wasn't announced.
    pub(crate) fn give(
        &mut self,
        key: &Key,
        edges: &[Option<Edge>],
        gradients: impl IntoIterator<Item = Option<Gradient>, IntoIter: ExactSizeIterator>,
    ) -> Result<()> {
        let gradients = gradients.into_iter();
        if edges.len() != gradients.len() {
            let what = format!("{} gradients were given for {} values", gradients.len(), edges.len());
            return Err(ErrorKind::Argument {
                op: "backward".into(),
                what,
            }
            .into());
        }
        for (i, (edge, gradient)) in edges.iter().zip(gradients).enumerate() {
            let Some(edge) = edge else { continue };
            let gradient = match gradient {
                Some(gradient) => gradient,
                None => Data::zeros(edge.spec().dtype, edge.spec().shape()).into(),
            };
            gradient.check(edge.node.name(), edge.spec())?;
            self.arrive(key, i, edge, Some(gradient))?;
        }
        Ok(())
    }

    /// Adds a contribution, or keeps it until those that come before it in the sum are there.
    fn arrive(&mut self, key: &Key, edge: usize, target: &Edge, gradient: Option<Gradient>) -> Result<()> {
        let unannounced = || {
            let what = format!("a gradient for `{}` was given that hadn't been announced", target.node.name());
            crate::Error::from(ErrorKind::Argument {
                op: "backward".into(),
                what,
            })
        };
        let visit = *self.tables.index.get(&target.node.id()).ok_or_else(unannounced)?;
        let state = &mut self.tables.visits[visit];
        let slot = if state.done { None } else { state.slots.get_mut(target.slot) };
        if !slot.ok_or_else(unannounced)?.arrive(key, edge, gradient)? {
            return Err(unannounced());
        }
        state.waiting -= 1;
        if state.waiting == 0 {
            match state.node.kind() {
                Kind::Leaf(_) => self.tables.complete_leaves.push(visit),
                _ => self.tables.ready.push((state.node.key().clone(), Reverse(visit))),
            }
        }
        Ok(())
    }

    /// Runs everything that is ready, highest key first. Gradients of leaves go to the sink as soon as they are complete,
    /// after the operation that completed them was freed. Returns the boundaries that are complete, with a gradient per
    /// slot, `None` where a slot got nothing.
    ///
    /// # Errors
    /// Those of adjoints, hooks and the sink. This backward can't go on after one.
    pub(crate) fn run(&mut self, sink: &mut dyn LeafSink) -> Result<Vec<(u64, Vec<Option<Gradient>>)>> {
        let mut boundaries = Vec::new();
        self.drain_leaves(sink)?;
        while let Some((_, Reverse(visit))) = self.tables.ready.pop() {
            if !self.is_ready(visit) {
                continue;
            }
            let node = self.close(visit)?;
            match node.kind() {
                Kind::Boundary { id, .. } => boundaries.push((*id, std::mem::take(&mut self.tables.gradients))),
                _ => self.pass_on(&node)?,
            }
            self.drain_leaves(sink)?;
        }
        Ok(boundaries)
    }

    /// Whether everything that was marked has run.
    pub(crate) fn is_finished(&self) -> bool {
        self.unfinished == 0
    }

    fn drain_leaves(&mut self, sink: &mut dyn LeafSink) -> Result<()> {
        for next in 0.. {
            let Some(&visit) = self.tables.complete_leaves.get(next) else {
                break;
            };
            if !self.is_ready(visit) {
                continue;
            }
            let node = self.close(visit)?;
            if let (Kind::Leaf(leaf), Some(gradient)) = (node.kind(), self.tables.gradients.pop().flatten()) {
                sink.complete(leaf, gradient.into_contiguous())?;
            }
        }
        self.tables.complete_leaves.clear();
        Ok(())
    }

    /// Whether it still is as it was when it was queued: a later mark may have made it wait again.
    fn is_ready(&self, visit: usize) -> bool {
        let state = &self.tables.visits[visit];
        !state.done && state.waiting == 0
    }

    /// Takes the sums of a node that has received everything, after the hooks on them: they are the tables' `gradients` then.
    fn close(&mut self, visit: usize) -> Result<Arc<Node>> {
        let Tables { visits, gradients, .. } = &mut self.tables;
        let state = &mut visits[visit];
        state.done = true;
        self.unfinished -= 1;
        let node = state.node.clone();
        gradients.clear();
        gradients.extend(state.slots.iter_mut().map(|slot| slot.sum.take()));
        state.slots.clear();
        let mut apply = |slot: usize, hook: &dyn Fn(&Gradient) -> Option<Gradient>| -> Result<()> {
            if let Some(gradient) = &mut gradients[slot]
                && let Some(other) = hook(gradient)
            {
                other.check(node.name(), &node.outputs()[slot])?;
                *gradient = other;
            }
            Ok(())
        };
        if let Kind::Leaf(leaf) = node.kind() {
            for hook in leaf.hooks.snapshot() {
                apply(0, &*hook)?;
            }
        } else {
            for (slot, hook) in node.hooks().snapshot() {
                apply(slot, &*hook)?;
            }
        }
        Ok(node)
    }

    /// Runs an operation's adjoint and gives its inputs what it returns. Where no gradient came in, none goes out.
    fn pass_on(&mut self, node: &Node) -> Result<()> {
        let inputs = node.inputs();
        let Tables { gradients, dense, .. } = &mut self.tables;
        let mut results = if gradients.iter().all(Option::is_none) {
            if !self.retain_graph {
                node.free();
            }
            Vec::new()
        } else {
            for (gradient, spec) in gradients.drain(..).zip(node.outputs()) {
                dense.push(match gradient {
                    Some(gradient) => gradient.into_dense()?,
                    None => Data::zeros(spec.dtype, spec.shape()),
                });
            }
            let results = node.run(dense, self.retain_graph);
            dense.clear();
            results?
        };
        results.resize_with(inputs.len(), || None);
        for (i, (edge, gradient)) in inputs.iter().zip(results).enumerate() {
            let Some(edge) = edge else { continue };
            if let Some(gradient) = &gradient {
                gradient.check(node.name(), edge.spec())?;
            }
            self.arrive(node.key(), i, edge, gradient)?;
        }
        Ok(())
    }
}

impl Drop for Backward {
    fn drop(&mut self) {
        let mut tables = std::mem::take(&mut self.tables);
        tables.visits.clear();
        tables.index.clear();
        tables.ready.clear();
        tables.complete_leaves.clear();
        tables.gradients.clear();
        tables.dense.clear();
        if tables.visits.capacity() <= MOST_KEPT {
            // Not at the end of the thread.
            let _ = SPARE.try_with(|spare| spare.set(tables));
        }
    }
}

impl Slot {
    /// Takes a contribution; `false` if it wasn't expected.
    fn arrive(&mut self, key: &Key, edge: usize, gradient: Option<Gradient>) -> Result<bool> {
        let Slot {
            sum,
            expected,
            next,
            sorted,
        } = self;
        if !*sorted {
            // Later contributors first; of one contributor's edges, the first first.
            expected[*next..].sort_by(|a, b| b.key.cmp(&a.key).then(a.edge.cmp(&b.edge)));
            *sorted = true;
        }
        let pending = &mut expected[*next..];
        let first = pending.partition_point(|c| c.key.cmp(key).reverse().then(c.edge.cmp(&edge)).is_lt());
        let same = pending[first..].iter().take_while(|c| c.key == *key && c.edge == edge);
        let Some(place) = same.zip(first..).find_map(|(c, place)| c.arrived.is_none().then_some(place)) else {
            return Ok(false);
        };
        if mutant::is(Mutant::SumInOrderOfArrival) {
            pending[place].arrived = Some(None);
            return add(sum, gradient).map(|()| true);
        }
        if place > 0 {
            pending[place].arrived = Some(gradient.map(Box::new));
            return Ok(true);
        }
        *next += 1;
        add(sum, gradient)?;
        while let Some(arrived) = expected.get_mut(*next).and_then(|c| c.arrived.take()) {
            *next += 1;
            add(sum, arrived.map(|gradient| *gradient))?;
        }
        Ok(true)
    }
}

fn add(sum: &mut Option<Gradient>, gradient: Option<Gradient>) -> Result<()> {
    match (sum.as_mut(), gradient) {
        (_, None) => Ok(()),
        (None, some) => {
            *sum = some;
            Ok(())
        }
        (Some(sum), Some(gradient)) => sum.accumulate(gradient),
    }
}

/// Ids are small numbers in sequence: one multiplication spreads them.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = (self.0.rotate_left(5) ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl std::fmt::Debug for Backward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backward")
            .field("visited", &self.tables.visits.len())
            .field("unfinished", &self.unfinished)
            .finish_non_exhaustive()
    }
}

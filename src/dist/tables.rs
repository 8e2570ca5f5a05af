//! What a rank keeps for the rooms of this floor: recordings by context, optimizers by id.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::optim::Optimizer;
use crate::protocol::{ContextId, OptimizerId};
use crate::rpc::Recording;
use crate::runtime::{Runtime, Slot, lock};
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

/// The optimizer of one owner, and the places of its parameters in the list that the optimizer was made of.
#[derive(Debug)]
pub(crate) struct OwnerOptimizer {
    pub optimizer: Mutex<Optimizer>,
    pub places: Vec<u32>,
    pub parameters: Vec<Tensor>,
    /// The last change of options that it has made; read and set under the lock of `optimizer`.
    pub changes: AtomicU64,
}

/// Tables of one rank.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    recordings: Mutex<HashMap<ContextId, Arc<Recording>>>,
    optimizers: Mutex<HashMap<OptimizerId, Arc<OwnerOptimizer>>>,
    /// Optimizers that were dropped before they were made, or failed to be.
    dropped: Mutex<HashSet<OptimizerId>>,
    /// Elements of the largest optimizer.
    largest: AtomicUsize,
    next_optimizer: AtomicU64,
    /// Releases of contexts that haven't been acknowledged.
    releasing: Mutex<VecDeque<Arc<Slot>>>,
    pub(crate) updates_in_place: AtomicU64,
    pub(crate) updates_out_of_place: AtomicU64,
}

impl Tables {
    /// The tables of a running rank.
    pub(crate) fn of(runtime: &Runtime) -> Result<Arc<Tables>> {
        let found = runtime.state().get(&std::any::TypeId::of::<Tables>()).cloned();
        found.and_then(|t| t.downcast().ok()).ok_or_else(|| {
            ErrorKind::ShutDown {
                operation: "training".into(),
            }
            .into()
        })
    }

    /// The recording of a context, new if this rank hasn't met it. That of a released one isn't kept.
    pub(crate) fn recording(&self, runtime: &Runtime, context: ContextId) -> Arc<Recording> {
        let recording = Arc::clone(lock(&self.recordings).entry(context).or_insert_with(|| Recording::new(context)));
        // After the insertion: a release from now on comes with a `forget`.
        if runtime.check_context("recording", context).is_err() {
            self.forget(context);
        }
        recording
    }

    /// The recording of a context, if this rank has met it.
    pub(crate) fn known_recording(&self, context: ContextId) -> Option<Arc<Recording>> {
        lock(&self.recordings).get(&context).cloned()
    }

    pub(crate) fn forget(&self, context: ContextId) {
        let recording = lock(&self.recordings).remove(&context);
        if let Some(recording) = recording {
            recording.clear(); // outside of the lock on the table
        }
    }

    /// A new id for an optimizer made by this rank.
    pub(crate) fn next_optimizer(&self, me: u32) -> OptimizerId {
        OptimizerId::new(me, self.next_optimizer.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn insert_optimizer(&self, id: OptimizerId, optimizer: OwnerOptimizer) {
        if lock(&self.dropped).remove(&id) {
            return; // its maker gave up before it was made
        }
        let elements = optimizer.parameters.iter().map(Tensor::len).sum();
        self.largest.fetch_max(elements, Ordering::Relaxed);
        lock(&self.optimizers).insert(id, Arc::new(optimizer));
    }

    pub(crate) fn optimizer(&self, id: OptimizerId) -> Option<Arc<OwnerOptimizer>> {
        lock(&self.optimizers).get(&id).cloned()
    }

    pub(crate) fn remove_optimizer(&self, id: OptimizerId) {
        let removed = lock(&self.optimizers).remove(&id);
        if removed.is_none() {
            lock(&self.dropped).insert(id);
        }
    }

    pub(crate) fn optimizers(&self) -> usize {
        lock(&self.optimizers).len()
    }

    pub(crate) fn largest_optimizer(&self) -> usize {
        self.largest.load(Ordering::Relaxed)
    }

    /// Notes a release under way; gives back the oldest one if there are too many.
    pub(crate) fn note_release(&self, slot: Arc<Slot>) {
        lock(&self.releasing).push_back(slot);
    }

    /// The oldest release to wait for, if the backlog has reached its bound.
    pub(crate) fn backlog(&self, bound: usize) -> Option<Arc<Slot>> {
        let mut releasing = lock(&self.releasing);
        while releasing.front().is_some_and(|s| s.is_done()) {
            releasing.pop_front();
        }
        if releasing.len() >= bound {
            releasing.front().cloned()
        } else {
            None
        }
    }
}

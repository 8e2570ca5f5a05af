//! What a rank keeps for the rooms of this floor: recordings by context, optimizers by id.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustc_hash::{FxHashMap, FxHashSet};

use super::optimizer::OwnerOptimizer;
use crate::protocol::{ContextId, OptimizerId};
use crate::rpc::Recording;
use crate::runtime::{Runtime, Slot, lock};
use crate::{ErrorKind, Result};

/// Tables of one rank.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    recordings: Mutex<FxHashMap<ContextId, Arc<Recording>>>,
    optimizers: Mutex<FxHashMap<OptimizerId, Arc<OwnerOptimizer>>>,
    /// Groups of optimizers (all groups, if none is named) that were dropped before they were made, or failed to be.
    dropped: Mutex<FxHashSet<(OptimizerId, Option<u32>)>>,
    next_optimizer: AtomicU64,
    /// Releases of contexts that haven't been acknowledged.
    releasing: Mutex<VecDeque<Arc<Slot>>>,
    pub(crate) updates: Arc<Updates>,
}

/// Updates of parameters so far.
#[derive(Debug, Default)]
pub(crate) struct Updates {
    pub in_place: AtomicU64,
    pub out_of_place: AtomicU64,
}

impl Updates {
    /// Notes that so many parameters were updated, so many of them in place.
    pub(crate) fn count(&self, updated: usize, in_place: usize) {
        self.in_place.fetch_add(in_place as u64, Ordering::Relaxed);
        self.out_of_place.fetch_add((updated - in_place) as u64, Ordering::Relaxed);
    }
}

impl Tables {
    /// The tables of a running rank.
    pub(crate) fn of(runtime: &Runtime) -> Result<&Tables> {
        runtime.executor.tables().downcast_ref().ok_or_else(|| {
            ErrorKind::ShutDown {
                operation: "training".into(),
            }
            .into()
        })
    }

    /// The recording of a context, new if this rank hasn't met it. That of a released one isn't kept.
    pub(crate) fn recording(&self, runtime: &Runtime, context: ContextId) -> Arc<Recording> {
        let recording = Arc::clone(
            lock(&self.recordings)
                .entry(context)
                .or_insert_with(|| Recording::new(context, runtime.rank())),
        );
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
        if lock(&self.dropped).remove(&(id, None)) {
            return; // its maker gave up before it was made
        }
        lock(&self.optimizers).insert(id, Arc::new(optimizer));
    }

    pub(crate) fn optimizer(&self, id: OptimizerId) -> Option<Arc<OwnerOptimizer>> {
        lock(&self.optimizers).get(&id).cloned()
    }

    pub(crate) fn remove_optimizer(&self, id: OptimizerId) {
        let removed = lock(&self.optimizers).remove(&id);
        if removed.is_none() {
            lock(&self.dropped).insert((id, None));
        }
    }

    /// A group's maker gave up, perhaps before it was made here.
    pub(crate) fn give_up_group(&self, id: OptimizerId, number: u32) {
        lock(&self.dropped).insert((id, Some(number)));
    }

    /// Whether a group's maker gave up.
    pub(crate) fn is_given_up(&self, id: OptimizerId, number: u32) -> bool {
        lock(&self.dropped).contains(&(id, Some(number)))
    }

    pub(crate) fn optimizers(&self) -> usize {
        lock(&self.optimizers).len()
    }

    /// Whether a step of this optimizer may take long.
    pub(crate) fn is_heavy(&self, id: OptimizerId) -> bool {
        lock(&self.optimizers).get(&id).is_none_or(|o| o.is_heavy())
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

//! A queue that can be seen to be empty without its lock: waiting threads look at it with each poll.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::lock;

#[derive(Debug)]
pub(super) struct Queue<T> {
    len: AtomicUsize,
    items: Mutex<VecDeque<T>>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue {
            len: AtomicUsize::new(0),
            items: Mutex::default(),
        }
    }
}

impl<T> Queue<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.len.load(Ordering::SeqCst) == 0
    }

    pub(super) fn push(&self, item: T) {
        let mut items = self.items();
        items.push_back(item);
        self.len.store(items.len(), Ordering::SeqCst);
    }

    /// Takes the oldest.
    pub(super) fn pop(&self) -> Option<T> {
        self.pop_if(|_| true)
    }

    /// Takes the oldest, if it is due.
    pub(super) fn pop_if(&self, due: impl FnOnce(&T) -> bool) -> Option<T> {
        let mut items = self.items();
        let item = if items.front().is_some_and(due) { items.pop_front() } else { None };
        self.len.store(items.len(), Ordering::SeqCst);
        item
    }

    /// Whether the oldest is due.
    pub(super) fn is_due(&self, due: impl FnOnce(&T) -> bool) -> bool {
        !self.is_empty() && self.items().front().is_some_and(due)
    }

    fn items(&self) -> MutexGuard<'_, VecDeque<T>> {
        lock(&self.items)
    }
}

//! A queue that can be seen to be empty without its lock: threads that poll look at it each time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub(crate) struct Queue<T> {
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
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::SeqCst) == 0
    }

    pub(crate) fn push(&self, item: T) {
        let mut items = self.items();
        items.push_back(item);
        self.len.store(items.len(), Ordering::SeqCst);
    }

    /// Takes the oldest.
    pub(crate) fn pop(&self) -> Option<T> {
        self.pop_if(|_| true)
    }

    /// Takes the oldest, if it is due.
    pub(crate) fn pop_if(&self, due: impl FnOnce(&T) -> bool) -> Option<T> {
        let mut items = self.items();
        let item = if items.front().is_some_and(due) { items.pop_front() } else { None };
        self.len.store(items.len(), Ordering::SeqCst);
        item
    }

    /// Takes all, oldest first.
    pub(crate) fn take(&self) -> VecDeque<T> {
        let mut items = self.items();
        self.len.store(0, Ordering::SeqCst);
        std::mem::take(&mut *items)
    }

    /// Whether the oldest is due.
    pub(crate) fn is_due(&self, due: impl FnOnce(&T) -> bool) -> bool {
        !self.is_empty() && self.items().front().is_some_and(due)
    }

    fn items(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The frame that a thread is in: the path of recorded calls that led to the code it runs.

use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    static CURRENT: RefCell<Arc<[u32]>> = RefCell::new(Arc::from([]));
}

/// The frame of this thread; empty outside of recorded calls.
pub(crate) fn current() -> Arc<[u32]> {
    CURRENT.with_borrow(Arc::clone)
}

/// Makes `path` this thread's frame until the guard is dropped.
pub(crate) fn enter(path: Arc<[u32]>) -> FrameGuard {
    FrameGuard {
        outer: CURRENT.replace(path),
    }
}

/// Brings back the frame that was left by [`enter`].
#[derive(Debug)]
#[must_use]
pub(crate) struct FrameGuard {
    outer: Arc<[u32]>,
}

impl Drop for FrameGuard {
    fn drop(&mut self) {
        CURRENT.set(self.outer.clone());
    }
}

//! Lists of hooks, and the handles that remove them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{Gradient, Tensor};
use crate::Result;

/// A hook on the gradient of a tensor; what it returns replaces the gradient.
pub(crate) type GradientHook = Arc<dyn Fn(&Gradient) -> Option<Gradient> + Send + Sync>;

/// A hook that runs after a gradient was accumulated into a leaf, on the gradient where it was accumulated.
pub(crate) type PostAccumulateHook = Arc<dyn Fn(&Tensor, &mut Option<Gradient>) -> Result<()> + Send + Sync>;

type List<H> = Arc<Mutex<Vec<(u64, H)>>>;

/// Hooks in the order they were registered. The list is made on first use, so that nodes without hooks pay nothing.
pub(crate) struct Hooks<H>(OnceLock<List<H>>);

impl<H> Default for Hooks<H> {
    fn default() -> Self {
        Hooks(OnceLock::new())
    }
}

impl<H: Clone + Send + Sync + 'static> Hooks<H> {
    pub(crate) fn add(&self, hook: H) -> HookHandle {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let list = self.0.get_or_init(List::default);
        list.lock().unwrap_or_else(PoisonError::into_inner).push((id, hook));
        let list = Arc::downgrade(list);
        HookHandle(Box::new(move || {
            if let Some(list) = list.upgrade() {
                list.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .retain(|(other, _)| *other != id);
            }
        }))
    }

    pub(crate) fn is_empty(&self) -> bool {
        match self.0.get() {
            None => true,
            Some(list) => list.lock().unwrap_or_else(PoisonError::into_inner).is_empty(),
        }
    }

    /// The hooks as they are now; they run without the lock, so that one may register or remove others.
    pub(crate) fn snapshot(&self) -> Vec<H> {
        match self.0.get() {
            None => Vec::new(),
            Some(list) => list
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .iter()
                .map(|(_, hook)| hook.clone())
                .collect(),
        }
    }
}

/// Removes a hook. Dropping the handle leaves the hook in place.
#[must_use = "the hook stays unless `remove` is called; bind the handle to `_` when that is wanted"]
pub struct HookHandle(Box<dyn FnOnce() + Send + Sync>);

impl HookHandle {
    /// Removes the hook. Local; nothing happens when its tensor is gone.
    pub fn remove(self) {
        (self.0)();
    }
}

impl std::fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HookHandle")
    }
}

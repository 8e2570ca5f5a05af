//! Whether operations of this thread are recorded.

use std::cell::Cell;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// Whether operations of this thread are recorded.
pub(crate) fn grad_enabled() -> bool {
    ENABLED.get()
}

/// Runs `f` without recording: what it computes doesn't require gradients. Holds for this thread only.
///
/// ```
/// use rankgrad::{autograd::no_grad, tensor::Tensor};
/// # fn main() -> rankgrad::Result<()> {
/// let w = Tensor::from_vec(vec![1.0, 2.0], 2)?.parameter()?;
/// let norm = no_grad(|| (&w * &w)?.sum())?;
/// assert!(!norm.requires_grad());
/// # Ok(())
/// # }
/// ```
pub fn no_grad<R>(f: impl FnOnce() -> R) -> R {
    /// Brings the switch back, also when `f` panics.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            ENABLED.set(self.0);
        }
    }
    let _restore = Restore(ENABLED.replace(false));
    f()
}

//! The numbers of one step.

use super::Float;
use super::arithmetic::Descent;

/// What a step of an elementwise rule needs besides the elements: computed once for a parameter, in `f64`, and the same whether its loop runs
/// here or as a kernel on a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The kernel's name.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "kernels alone use it"))]
    pub(crate) kernel: &'static str,
    /// The state arrays that it updates, in the kernel's order.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "kernels alone use it"))]
    pub(crate) arrays: &'static [&'static str],
    pub(crate) maximize: bool,
    /// Weight of the L2 penalty.
    pub(crate) weight_decay: f64,
    /// What else its kernel takes, in the kernel's order.
    pub(crate) numbers: [f64; 9],
    pub(crate) flags: Flags,
}

/// Choices within a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Flags {
    /// The state is used for the first time.
    pub first: bool,
    /// Nesterov's momentum.
    pub ahead: bool,
    /// RAdam's rate is rectified.
    pub rectified: bool,
}

impl Step {
    pub(super) fn new<const N: usize>(
        kernel: &'static str,
        arrays: &'static [&'static str],
        maximize: bool,
        weight_decay: f64,
        numbers: [f64; N],
    ) -> Self {
        let mut all = [0.0; 9];
        all[..N].copy_from_slice(&numbers);
        Step {
            kernel,
            arrays,
            maximize,
            weight_decay,
            numbers: all,
            flags: Flags::default(),
        }
    }

    pub(super) fn flagged(self, flags: Flags) -> Self {
        Step { flags, ..self }
    }

    /// Its numbers, each rounded once.
    pub(super) fn numbers<T: Float, const N: usize>(&self) -> [T; N] {
        std::array::from_fn(|i| T::of(self.numbers[i]))
    }

    /// What is done to gradients first.
    pub(super) fn descent<T: Float>(&self) -> Descent<T> {
        Descent::new(self.maximize, self.weight_decay)
    }
}

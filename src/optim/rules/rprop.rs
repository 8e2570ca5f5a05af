//! Rprop.

use crate::Result;
use crate::optim::arithmetic::sign;
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// Resilient backpropagation (Riedmiller and Braun, *A direct adaptive method for faster backpropagation learning: the
    /// RPROP algorithm*, ICNN 1993; the variant without backtracking), in the form of `torch.optim.Rprop`.
    ///
    /// Each element has a step size, `lr` at first. It grows by `etas.1` while the gradient keeps its sign, and shrinks by
    /// `etas.0` when the sign turns, where the gradient then counts as 0; it stays within `step_sizes`.
    /// `p -= sign(g) * step size`.
    Rprop {
        /// First step size, at least 0.
        lr = 1e-2;
        /// Factors that shrink and grow the step size: the first between 0 and 1, the second above 1.
        etas: (f64, f64) = (0.5, 1.2);
        /// Smallest and largest step size.
        step_sizes: (f64, f64) = (1e-6, 50.0);
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl Rprop {
    /// The numbers of a step.
    fn numbers(&self) -> Step {
        let ((shrink, grow), (least, most)) = (self.etas, self.step_sizes);
        Step::new("rprop", &["prev", "step_size"], self.maximize, 0.0, [shrink, grow, least, most])
    }
}

impl Rule for Rprop {
    const NAME: &'static str = "Rprop";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        let (shrink, grow) = self.etas;
        check.that(
            0.0 < shrink && shrink < 1.0 && 1.0 < grow,
            "etas",
            self.etas,
            "one number between 0 and 1, and one above 1",
        )?;
        let (least, most) = self.step_sizes;
        check.that(!least.is_nan() && !most.is_nan(), "step_sizes", self.step_sizes, "two numbers")
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::zeros("prev", shape), StateArray::filled("step_size", shape, self.lr)]
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        state.count();
        Some(self.numbers())
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        state.count();
        let step = self.numbers();
        let descent = step.descent();
        let [shrink, grow, least, most] = step.numbers();
        // Not `clamp`, which panics when the bounds are the wrong way round: torch gives the upper one then.
        let bounded = {
            #[inline(always)]
            move |x: T| {
                let x = if x < least { least } else { x };
                if x > most { most } else { x }
            }
        };
        state.pass2(
            p,
            g,
            ["prev", "step_size"],
            #[inline(always)]
            move |p, g, previous, size| {
                let mut g = descent.of(g, p);
                let turn = g * *previous;
                let factor = if turn > T::ZERO {
                    grow
                } else if turn < T::ZERO {
                    shrink
                } else {
                    T::ONE
                };
                *size = bounded(*size * factor);
                if turn < T::ZERO {
                    g = T::ZERO;
                }
                *previous = g;
                p - sign(g) * *size
            },
        );
    }
}

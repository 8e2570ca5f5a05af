//! The arithmetic that the rules share: one order of operations, no fused multiply-add, no platform libm.
//!
//! The passes are the only loops of the elementwise rules; mostly a rule calls them through its [`StateView`](super::StateView). Each hands the old value
//! of an element to a closure and stores what it returns. They and the sums are compiled for several instruction sets, of which the best one that the processor has runs; the bits are the same on all.

mod ahead;
mod instructions;
mod pass;
mod power;
mod product;
mod sums;

use super::Float;

/// Elements that go through several passes while they are in the second-level cache; whole blocks, so that sums go on from one to the next.
pub(super) const PIECE: usize = 4 * BLOCK;

pub(super) use instructions::vectorized;
#[doc(hidden)]
pub use instructions::{instruction_sets, limit_instructions};
pub use pass::{pass0, pass1, pass2, pass3};
pub(super) use pass::{square_pass0, square_pass1, square_pass2, square_pass3};
pub use power::powi;
pub(super) use product::{Matrix, product};
pub(super) use sums::{
    BLOCK, Lanes, add, add_each_square, add_squares, fold, fold_blocks, fold_each, magnitude, square, sum_of_lanes, sum_squares_of_rows,
};
pub use sums::{sum, sum_squares};

/// What many rules do to a gradient first: turn it round to maximise, and add `weight_decay * p` (an L2 penalty).
#[derive(Debug, Clone, Copy)]
pub struct Descent<T> {
    sign: T,
    decay: Option<T>,
}

impl<T: Float> Descent<T> {
    /// With an L2 penalty; none when `weight_decay` is 0, so that infinite parameters don't turn into NaN.
    pub fn new(maximize: bool, weight_decay: f64) -> Self {
        Self {
            sign: if maximize { -T::ONE } else { T::ONE },
            decay: (weight_decay != 0.0).then(|| T::of(weight_decay)),
        }
    }

    /// The gradient to descend along.
    #[inline(always)]
    pub fn of(self, g: T, p: T) -> T {
        let g = self.sign * g;
        match self.decay {
            Some(decay) => g + decay * p,
            None => g,
        }
    }
}

/// Linear interpolation from `a` (weight 0) to `b` (weight 1), computed from the nearer end as torch does.
#[inline(always)]
pub fn lerp<T: Float>(a: T, b: T, weight: T) -> T {
    if weight.abs() < T::of(0.5) {
        a + weight * (b - a)
    } else {
        b - (b - a) * (T::ONE - weight)
    }
}

/// The larger of two numbers; NaN if either is.
#[inline(always)]
pub fn maximum<T: Float>(a: T, b: T) -> T {
    if a > b || a.wide().is_nan() { a } else { b }
}

/// -1, 0 or 1 as `x` is negative, zero or positive; 0 for NaN.
#[inline(always)]
pub fn sign<T: Float>(x: T) -> T {
    if x > T::ZERO {
        T::ONE
    } else if x < T::ZERO {
        -T::ONE
    } else {
        T::ZERO
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lerp_takes_the_nearer_end() {
        assert_eq!(lerp(3.0, 7.0, 0.0), 3.0);
        assert_eq!(lerp(3.0, 7.0, 1.0), 7.0);
        assert_eq!(lerp(1e300f64, 1.0, 1.0), 1.0);
    }

    #[test]
    fn nan_is_kept_by_maximum() {
        assert!(maximum(f64::NAN, 1.0).is_nan());
        assert!(maximum(1.0, f64::NAN).is_nan());
        assert_eq!(maximum(1.0, 2.0), 2.0);
    }
}

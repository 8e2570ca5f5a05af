//! The two element types that update rules work on.

use std::ops::Neg;

use ndarray::LinalgScalar;

use crate::tensor::Element;

/// `f32` or `f64`: what an update rule computes with.
///
/// Only operations that IEEE 754 defines to the bit are here, so a rule written with them gives the same bits on every
/// instruction set. Coefficients are computed in `f64` and rounded once by [`Float::of`].
pub trait Float: Element + LinalgScalar + Default + Neg<Output = Self> {
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Distance from 1 to the next larger number.
    const EPSILON: Self;

    /// The nearest number of this type.
    fn of(value: f64) -> Self;
    /// The same number as `f64`, exactly.
    fn wide(self) -> f64;
    /// Square root, correctly rounded.
    fn sqrt(self) -> Self;
    /// Magnitude.
    fn abs(self) -> Self;
}

macro_rules! float {
    ($t:ty) => {
        impl Float for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const EPSILON: Self = <$t>::EPSILON;

            #[inline(always)]
            fn of(value: f64) -> Self {
                value as $t
            }
            #[inline(always)]
            fn wide(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn abs(self) -> Self {
                self.abs()
            }
        }
    };
}
float!(f32);
float!(f64);

//! The float types that operations with gradients are written for.

use ndarray::NdFloat;

use super::Element;

/// A float that tensors can hold and that has gradients: `f32` or `f64`.
pub trait Float: Element + NdFloat {
    /// The nearest value to `x`.
    fn of(x: f64) -> Self;

    /// The value as `f64`, exactly.
    fn wide(self) -> f64;

    /// The error function, within one unit in the last place.
    fn erf(self) -> Self;
}

impl Float for f32 {
    fn of(x: f64) -> Self {
        x as f32
    }

    fn wide(self) -> f64 {
        f64::from(self)
    }

    fn erf(self) -> Self {
        libm::erff(self)
    }
}

impl Float for f64 {
    fn of(x: f64) -> Self {
        x
    }

    fn wide(self) -> f64 {
        self
    }

    fn erf(self) -> Self {
        libm::erf(self)
    }
}

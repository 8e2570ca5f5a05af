//! Norms of gradients, and what is done to gradients that are too large.

use std::ops::Range;

use ndarray::{ArcArray, IxDyn};
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

use super::Float;
use super::arithmetic::{add, fold, fold_blocks, fold_each, magnitude, maximum, square};
use super::options::Check;
use crate::Result;
use crate::tensor::device::NormKind;
use crate::tensor::{Data, Gradient};

/// Which norm of a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Norm {
    /// The sum of magnitudes.
    One,
    /// The root of the sum of squares.
    #[default]
    Two,
    /// The largest magnitude.
    Inf,
}

impl Norm {
    /// The norm of the elements of a gradient whose rows, if it is sparse, stand there once each. In `f64`, in one fixed shape.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`](crate::ErrorKind::Cuda) for a gradient on a GPU that can't be used.
    pub(crate) fn of(self, gradient: &Gradient) -> Result<f64> {
        Ok(match values(gradient) {
            Data::F32(array) => self.of_array(array),
            Data::F64(array) => self.of_array(array),
            Data::Cuda(array) => array.norm(self.kind())?,
            _ => 0.0,
        })
    }

    fn kind(self) -> NormKind {
        match self {
            Norm::One => NormKind::One,
            Norm::Two => NormKind::Two,
            Norm::Inf => NormKind::Inf,
        }
    }

    fn of_array<T: Float>(self, array: &ArcArray<T, IxDyn>) -> f64 {
        match array.as_slice() {
            Some(elements) => self.of_slice(elements),
            None => self.of_slice(&array.iter().copied().collect::<Vec<_>>()),
        }
    }

    pub(super) fn of_slice<T: Float>(self, x: &[T]) -> f64 {
        match self {
            Norm::One => fold(0.0, x, magnitude, add),
            Norm::Two => fold(0.0, x, square, add).sqrt(),
            Norm::Inf => fold(0.0, x, magnitude, maximum::<f64>),
        }
    }

    /// The norm of each of these ranges of elements, which are at most a block.
    pub(super) fn of_each<T: Float>(self, x: &[T], ranges: impl Iterator<Item = Range<usize>>, norms: &mut [f64]) {
        match self {
            Norm::One => fold_each(x, ranges, norms, magnitude, add),
            Norm::Two => {
                fold_each(x, ranges, norms, square, add);
                norms.iter_mut().for_each(|norm| *norm = norm.sqrt());
            }
            Norm::Inf => fold_each(x, ranges, norms, magnitude, maximum::<f64>),
        }
    }

    /// What the norm is made of, for each [`BLOCK`](super::arithmetic::BLOCK) of elements.
    pub(super) fn blocks<T: Float>(self, x: &[T], blocks: &mut [f64]) {
        match self {
            Norm::One => fold_blocks(x, blocks, magnitude, add),
            Norm::Two => fold_blocks(x, blocks, square, add),
            Norm::Inf => fold_blocks(x, blocks, magnitude, maximum::<f64>),
        }
    }

    /// The norm of the elements whose blocks these are; the same as that of all of them at once.
    pub(super) fn of_blocks(self, blocks: &[f64]) -> f64 {
        let sum = || blocks.iter().fold(0.0, |sum, block| sum + block);
        match self {
            Norm::One => sum(),
            Norm::Two => sum().sqrt(),
            Norm::Inf => blocks.iter().fold(0.0, |most, &block| maximum(most, block)),
        }
    }

    /// The norm of the whole from the norms of its parts, in their order.
    ///
    /// ```
    /// use rankgrad::optim::Norm;
    ///
    /// assert_eq!(Norm::Two.total([3.0, 4.0]), 5.0);
    /// assert_eq!(Norm::Inf.total([3.0, 4.0]), 4.0);
    /// ```
    pub fn total(self, parts: impl IntoIterator<Item = f64>) -> f64 {
        // Room for all is made at once and then filled: a push each takes longer.
        let mut parts = parts.into_iter();
        let room = parts.size_hint().1.unwrap_or(0).min(1 << 16);
        let (mut all, mut len): (SmallVec<[f64; 8]>, _) = (smallvec![0.0; room], 0);
        for (to, part) in all.iter_mut().zip(&mut parts) {
            *to = part;
            len += 1;
        }
        all.truncate(len);
        all.extend(parts);
        self.of_slice(&all)
    }
}

/// How gradients are made smaller before an update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Clip {
    /// All gradients are multiplied by `max / (norm + 1e-6)`, if that is below 1; `norm` is that of all gradients of all parameters together
    /// (Pascanu et al., *On the difficulty of training recurrent neural networks*, ICML 2013; the constant is torch's).
    Norm {
        /// Which norm.
        kind: Norm,
        /// What the norm may be, above 0.
        max: f64,
    },
    /// Each element is brought between `-max` and `max`.
    Value(
        /// What a magnitude may be, at least 0.
        f64,
    ),
}

impl Clip {
    /// Checks the bounds.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`](crate::ErrorKind::OptionValue): give a number in the bound that it names.
    pub fn check(&self) -> Result<()> {
        let check = Check("clipping");
        match *self {
            Clip::Norm { max, .. } => check.that(max > 0.0, "max", max, "above 0"),
            Clip::Value(max) => check.at_least_0("max", max),
        }
    }

    /// What gradients of this norm are multiplied by.
    pub(crate) fn coefficient(max: f64, norm: f64) -> f64 {
        let coefficient = max / (norm + 1e-6);
        // Not `min`, which would drop a NaN.
        if coefficient > 1.0 { 1.0 } else { coefficient }
    }
}

/// Whether no element is infinite or NaN.
pub(super) fn is_finite(gradient: &Gradient) -> Result<bool> {
    Ok(match values(gradient) {
        Data::F32(array) => array.iter().all(|x| x.is_finite()),
        Data::F64(array) => array.iter().all(|x| x.is_finite()),
        Data::Cuda(array) => array.is_finite()?,
        _ => true,
    })
}

/// The gradient times a number, in its own precision.
pub(super) fn scaled(gradient: &Gradient, factor: f64) -> Result<Gradient> {
    fn map<T: Float>(array: &ArcArray<T, IxDyn>, factor: f64) -> Data {
        let factor = T::of(factor);
        T::wrap(array.mapv(|x| x * factor).into_shared())
    }
    mapped(gradient, |data| match data {
        Data::F32(array) => Ok(map(array, factor)),
        Data::F64(array) => Ok(map(array, factor)),
        Data::Cuda(array) => Ok(Data::Cuda(array.scaled(factor)?)),
        other => Ok(other.clone()),
    })
}

/// The gradient with each element between `-max` and `max`; NaN stays. In place if nobody else holds it.
pub(super) fn clamped(mut gradient: Gradient, max: f64) -> Result<Gradient> {
    fn clamp<T: Float>(array: &mut ArcArray<T, IxDyn>, max: f64) {
        let max = T::of(max);
        array.mapv_inplace(|x| match x {
            x if x > max => max,
            x if x < -max => -max,
            x => x,
        });
    }
    let values = match &mut gradient {
        Gradient::Dense(data) => data,
        Gradient::Sparse(sparse) => &mut sparse.values,
    };
    match values {
        Data::F32(array) => clamp(array, max),
        Data::F64(array) => clamp(array, max),
        Data::Cuda(array) => *array = array.clamped(max)?,
        _ => {}
    }
    Ok(gradient)
}

fn mapped(gradient: &Gradient, f: impl Fn(&Data) -> Result<Data>) -> Result<Gradient> {
    Ok(match gradient {
        Gradient::Dense(data) => Gradient::Dense(f(data)?),
        Gradient::Sparse(sparse) => {
            let mut sparse = sparse.clone();
            sparse.values = f(&sparse.values)?;
            Gradient::Sparse(sparse)
        }
    })
}

fn values(gradient: &Gradient) -> &Data {
    match gradient {
        Gradient::Dense(data) => data,
        Gradient::Sparse(sparse) => &sparse.values,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    fn dense(values: &[f64]) -> Gradient {
        Tensor::from_vec(values.to_vec(), values.len()).unwrap().data().into()
    }

    fn elements(gradient: &Gradient) -> Vec<f64> {
        values(gradient).view::<f64>().unwrap().iter().copied().collect()
    }

    #[test]
    fn norms_are_those_of_all_elements() {
        let gradient = dense(&[3.0, -4.0, 0.0]);
        assert_eq!([Norm::One, Norm::Two, Norm::Inf].map(|n| n.of(&gradient).unwrap()), [7.0, 5.0, 4.0]);
        for norm in [Norm::One, Norm::Two, Norm::Inf] {
            assert!(norm.of(&dense(&[1.0, f64::NAN])).unwrap().is_nan());
            assert_eq!(norm.of(&dense(&[f64::INFINITY])).unwrap(), f64::INFINITY);
            assert_eq!(norm.total([]), 0.0);
        }
    }

    #[test]
    fn clipping_keeps_what_is_small_and_what_is_no_number() {
        assert_eq!(Clip::coefficient(1.0, 0.5), 1.0);
        assert_eq!(Clip::coefficient(1.0, 4.0), 1.0 / (4.0 + 1e-6));
        assert!(Clip::coefficient(1.0, f64::NAN).is_nan());
        assert_eq!(elements(&clamped(dense(&[-3.0, 0.5, 9.0]), 1.0).unwrap()), [-1.0, 0.5, 1.0]);
        assert!(elements(&clamped(dense(&[f64::NAN]), 1.0).unwrap())[0].is_nan());
        assert_eq!(elements(&scaled(&dense(&[2.0]), 0.25).unwrap()), [0.5]);
        assert!(is_finite(&dense(&[1.0])).unwrap() && !is_finite(&dense(&[f64::INFINITY])).unwrap());
    }

    #[test]
    fn bounds_are_checked() {
        for max in [0.0, -1.0, f64::NAN] {
            let clip = Clip::Norm { kind: Norm::Two, max };
            assert!(clip.check().unwrap_err().to_string().contains("max"), "{max}");
        }
        assert!(Clip::Value(-1.0).check().is_err() && Clip::Value(f64::NAN).check().is_err());
        assert!(Clip::Value(0.0).check().is_ok());
    }
}

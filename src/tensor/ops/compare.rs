//! Comparisons, positions of maxima, and casts.

use super::kernel::{array, elements, map, packed, zip};
use super::{record_any, same_dtype};
use crate::tensor::device::not_here;
use crate::tensor::shape::{self, Lanes};
use crate::tensor::{DType, Data, Element, Gradient, Tensor};
use crate::{ErrorKind, Result};

/// Declares a comparison of any dtype.
macro_rules! comparison {
    ($name:ident, $operator:tt, $doc:literal) => {
        #[doc = $doc]
        ///
        /// The result is bool and has no gradient. Shapes broadcast.
        ///
        /// # Errors
        /// [`ErrorKind::DType`] if the dtypes differ, [`ErrorKind::Shape`] if the shapes don't broadcast.
        pub fn $name(&self, other: &Tensor) -> Result<Tensor> {
            fn run<T: Element>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
                let compared = zip(stringify!($name), &a.array::<T>()?, &b.array::<T>()?, |x, y| x $operator y)?;
                Ok(Tensor::from_data(Data::Bool(compared)))
            }
            same_dtype(stringify!($name), self, &[other])?;
            match self.dtype() {
                DType::F32 => run::<f32>(self, other),
                DType::F64 => run::<f64>(self, other),
                DType::I64 => run::<i64>(self, other),
                DType::Bool => run::<bool>(self, other),
            }
        }
    };
}

impl Tensor {
    comparison!(eq, ==, "Whether elements are equal.");
    comparison!(ne, !=, "Whether elements differ.");
    comparison!(lt, <, "Whether elements are smaller than the other's.");
    comparison!(le, <=, "Whether elements are smaller than the other's or equal.");
    comparison!(gt, >, "Whether elements are larger than the other's.");
    comparison!(ge, >=, "Whether elements are larger than the other's or equal.");

    /// Places of the largest elements along an axis, which goes; the first one where several are equal. NaN counts as the
    /// largest. The result is i64.
    ///
    /// # Errors
    /// [`ErrorKind::Axis`] for an axis that isn't there, [`ErrorKind::Argument`] if it has no elements.
    pub fn argmax(&self, axis: i64) -> Result<Tensor> {
        let axis = shape::axis("argmax", axis, self.ndim())?;
        let mut kept = self.shape();
        if kept.remove(axis) == 0 {
            return Err(ErrorKind::Argument {
                op: "argmax".into(),
                what: format!("axis {axis} of shape {:?} has no elements", self.shape()),
            }
            .into());
        }
        let lanes = Lanes::new(&self.shape(), axis);
        let places = match &self.host_data()? {
            Data::F32(a) => first_largest(elements(&packed(a)), lanes),
            Data::F64(a) => first_largest(elements(&packed(a)), lanes),
            Data::I64(a) => first_largest(elements(&packed(a)), lanes),
            Data::Bool(a) => first_largest(elements(&packed(a)), lanes),
            Data::Cuda(_) => return Err(not_here("argmax", self.device())),
        };
        Ok(Tensor::from_array(array(
            &kept,
            places.into_iter().map(|place| place as i64).collect(),
        )))
    }

    /// The same values in another dtype: rounded to f32, truncated to i64 (saturating, NaN as 0), or whether they aren't
    /// zero. Between f32 and f64 the gradient is cast back; other casts have none.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] for elements on a GPU that can't be read.
    pub fn cast(&self, dtype: DType) -> Result<Tensor> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        let output = convert(&self.host_data()?, dtype);
        if !dtype.is_float() || !self.dtype().is_float() {
            return Ok(Tensor::from_data(output));
        }
        let back = self.dtype();
        Ok(record_any("cast", output, &[self], move |gradient, _| {
            Ok(vec![Some(Gradient::Dense(convert(&gradient, back)))])
        }))
    }

    /// The share of places where two label tensors of one shape are equal, as a number.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if their shapes differ; those of [`Tensor::eq`]; [`ErrorKind::Argument`] if there are no elements.
    pub fn accuracy(&self, labels: &Tensor) -> Result<f64> {
        if self.shape() != labels.shape() {
            return Err(shape::mismatch(
                "accuracy",
                &self.shape(),
                &labels.shape(),
                "both must have one shape",
            ));
        }
        let equal = self.eq(labels)?.to_vec::<bool>()?;
        if equal.is_empty() {
            return Err(ErrorKind::Argument {
                op: "accuracy".into(),
                what: "there are no elements to compare".into(),
            }
            .into());
        }
        Ok(equal.iter().filter(|&&same| same).count() as f64 / equal.len() as f64)
    }
}

/// For each lane the place of its first largest element.
pub(super) fn first_largest<T: PartialOrd + Copy>(x: &[T], lanes: Lanes) -> Vec<usize> {
    let Lanes { outer, length, inner } = lanes;
    let mut places = Vec::with_capacity(outer * inner);
    for o in 0..outer {
        for i in 0..inner {
            let at = |k: usize| x[(o * length + k) * inner + i];
            let is_nan = |value: T| value.partial_cmp(&value).is_none();
            let mut best = 0;
            for k in 1..length {
                if !is_nan(at(best)) && (at(k) > at(best) || is_nan(at(k))) {
                    best = k;
                }
            }
            places.push(best);
        }
    }
    places
}

/// Casts by Rust's `as`.
fn convert(data: &Data, dtype: DType) -> Data {
    match (data, dtype) {
        (Data::F32(a), DType::F64) => Data::F64(map(a, f64::from)),
        (Data::F32(a), DType::I64) => Data::I64(map(a, |x| x as i64)),
        (Data::F32(a), DType::Bool) => Data::Bool(map(a, |x| x != 0.0)),
        (Data::F64(a), DType::F32) => Data::F32(map(a, |x| x as f32)),
        (Data::F64(a), DType::I64) => Data::I64(map(a, |x| x as i64)),
        (Data::F64(a), DType::Bool) => Data::Bool(map(a, |x| x != 0.0)),
        (Data::I64(a), DType::F32) => Data::F32(map(a, |x| x as f32)),
        (Data::I64(a), DType::F64) => Data::F64(map(a, |x| x as f64)),
        (Data::I64(a), DType::Bool) => Data::Bool(map(a, |x| x != 0)),
        (Data::Bool(a), DType::F32) => Data::F32(map(a, |x| f32::from(u8::from(x)))),
        (Data::Bool(a), DType::F64) => Data::F64(map(a, |x| f64::from(u8::from(x)))),
        (Data::Bool(a), DType::I64) => Data::I64(map(a, i64::from)),
        (same, _) => same.clone(),
    }
}

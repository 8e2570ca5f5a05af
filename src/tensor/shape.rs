//! Shapes and axes: what callers may write, what fits together.

use ndarray::IxDyn;

use super::{DType, Data, each_dtype};
use crate::{ErrorKind, Result};

/// What can be given as a shape: a number, a tuple, an array, a slice or a vector of lengths.
pub trait IntoShape {
    /// The lengths of the axes.
    fn into_shape(self) -> Vec<usize>;
}

impl IntoShape for usize {
    fn into_shape(self) -> Vec<usize> {
        vec![self]
    }
}

impl IntoShape for () {
    fn into_shape(self) -> Vec<usize> {
        Vec::new()
    }
}

impl IntoShape for (usize,) {
    fn into_shape(self) -> Vec<usize> {
        vec![self.0]
    }
}

impl IntoShape for (usize, usize) {
    fn into_shape(self) -> Vec<usize> {
        vec![self.0, self.1]
    }
}

impl IntoShape for (usize, usize, usize) {
    fn into_shape(self) -> Vec<usize> {
        vec![self.0, self.1, self.2]
    }
}

impl IntoShape for (usize, usize, usize, usize) {
    fn into_shape(self) -> Vec<usize> {
        vec![self.0, self.1, self.2, self.3]
    }
}

impl<const N: usize> IntoShape for [usize; N] {
    fn into_shape(self) -> Vec<usize> {
        self.to_vec()
    }
}

impl<const N: usize> IntoShape for &[usize; N] {
    fn into_shape(self) -> Vec<usize> {
        self.to_vec()
    }
}

impl IntoShape for &[usize] {
    fn into_shape(self) -> Vec<usize> {
        self.to_vec()
    }
}

impl IntoShape for Vec<usize> {
    fn into_shape(self) -> Vec<usize> {
        self
    }
}

impl IntoShape for &Vec<usize> {
    fn into_shape(self) -> Vec<usize> {
        self.clone()
    }
}

/// Dtype and shape of a value: what its gradient must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) dtype: DType,
    pub(crate) shape: IxDyn,
}

impl Spec {
    pub(crate) fn of(data: &Data) -> Self {
        Spec {
            dtype: data.dtype(),
            shape: each_dtype!(data, a => a.raw_dim()),
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        ndarray::Dimension::slice(&self.shape)
    }
}

/// Number of elements of a shape; an error when it can't be addressed.
pub(crate) fn count(op: &str, shape: &[usize]) -> Result<usize> {
    shape
        .iter()
        .filter(|&&n| n != 0)
        .try_fold(1usize, |product, &n| product.checked_mul(n))
        .filter(|&n| n <= isize::MAX as usize / 8)
        .map(|n| if shape.contains(&0) { 0 } else { n })
        .ok_or_else(|| {
            ErrorKind::Argument {
                op: op.into(),
                what: format!("shape {shape:?} has more elements than can be addressed"),
            }
            .into()
        })
}

/// The place of an axis that may count from the end.
pub(crate) fn axis(op: &str, axis: i64, ndim: usize) -> Result<usize> {
    let place = if axis < 0 { axis + ndim as i64 } else { axis };
    if (0..ndim as i64).contains(&place) {
        Ok(place as usize)
    } else {
        Err(ErrorKind::Axis { op: op.into(), axis, ndim }.into())
    }
}

/// Marks the named axes; none named means all.
pub(crate) fn axes(op: &str, named: &[i64], ndim: usize) -> Result<Vec<bool>> {
    let mut marks = vec![named.is_empty(); ndim];
    for &name in named {
        let place = axis(op, name, ndim)?;
        if std::mem::replace(&mut marks[place], true) {
            return Err(ErrorKind::Axis {
                op: op.into(),
                axis: name,
                ndim,
            }
            .into());
        }
    }
    Ok(marks)
}

/// The shape that two shapes broadcast to, by numpy's rule.
pub(crate) fn broadcast(op: &str, left: &[usize], right: &[usize]) -> Result<Vec<usize>> {
    let ndim = left.len().max(right.len());
    let length = |shape: &[usize], i: usize| if i + shape.len() < ndim { 1 } else { shape[i + shape.len() - ndim] };
    (0..ndim)
        .map(|i| match (length(left, i), length(right, i)) {
            (a, b) if a == b => Ok(a),
            (1, b) => Ok(b),
            (a, 1) => Ok(a),
            _ => Err(mismatch(
                op,
                left,
                right,
                "lengths of axes, counted from the last, must be equal or 1",
            )),
        })
        .collect()
}

/// The error for shapes that don't fit.
pub(crate) fn mismatch(op: &str, left: &[usize], right: &[usize], rule: &str) -> crate::Error {
    ErrorKind::Shape {
        op: op.into(),
        left: left.to_vec(),
        right: right.to_vec(),
        rule: rule.into(),
    }
    .into()
}

/// A contiguous shape seen along one axis: how many blocks, the axis' length, and how far its elements lie apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lanes {
    pub(crate) outer: usize,
    pub(crate) length: usize,
    pub(crate) inner: usize,
}

impl Lanes {
    pub(crate) fn new(shape: &[usize], axis: usize) -> Self {
        Lanes {
            outer: shape[..axis].iter().product(),
            length: shape[axis],
            inner: shape[axis + 1..].iter().product(),
        }
    }
}

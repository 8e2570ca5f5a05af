//! Selection by index, and embeddings.

use ndarray::Axis;

use super::kernel::{array, elements, packed};
use super::shape::reshaped;
use super::{Shared, on_gpu, record_any};
use crate::tensor::shape::{self, Lanes};
use crate::tensor::{Data, Element, Float, Gradient, RowSparse, Tensor};
use crate::{ErrorKind, Result};

/// The indices of a tensor, all within an axis of this length.
pub(super) fn indices(op: &str, ids: &Tensor, size: usize) -> Result<Vec<usize>> {
    let ids = ids.array::<i64>().map_err(|_| dtype(op, ids))?;
    ids.iter()
        .map(|&index| match usize::try_from(index) {
            Ok(place) if place < size => Ok(place),
            _ => Err(ErrorKind::Index {
                op: op.into(),
                index,
                size,
            }
            .into()),
        })
        .collect()
}

fn dtype(op: &str, ids: &Tensor) -> crate::Error {
    ErrorKind::DType {
        op: op.into(),
        expected: "i64".into(),
        found: ids.dtype().to_string(),
    }
    .into()
}

fn selected(data: &Data, axis: usize, places: &[usize]) -> Data {
    fn select<T: Element>(a: &Shared<T>, axis: usize, places: &[usize]) -> Shared<T> {
        a.select(Axis(axis), places).into_shared()
    }
    match data {
        Data::F32(a) => Data::F32(select(a, axis, places)),
        Data::F64(a) => Data::F64(select(a, axis, places)),
        Data::I64(a) => Data::I64(select(a, axis, places)),
        Data::Bool(a) => Data::Bool(select(a, axis, places)),
        // Only what is here is selected from.
        Data::Cuda(a) => Data::Cuda(a.clone()),
    }
}

/// Adds what was selected back to its places.
fn scatter<T: Float>(g: &Shared<T>, shape: &[usize], axis: usize, places: &[usize]) -> Shared<T> {
    let g = packed(g);
    let Lanes { outer, length, inner } = Lanes::new(shape, axis);
    let mut out = vec![T::zero(); outer * length * inner];
    let from = elements(&g);
    for o in 0..outer {
        for (k, &place) in places.iter().enumerate() {
            let source = &from[(o * places.len() + k) * inner..][..inner];
            let target = &mut out[(o * length + place) * inner..][..inner];
            target.iter_mut().zip(source).for_each(|(sum, &x)| *sum += x);
        }
    }
    array(shape, out).into_shared()
}

impl Tensor {
    /// The entries of an axis at these indices, in their order; an index may repeat. `ids` is i64 and has one axis, or none.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless `ids` is i64, [`ErrorKind::Shape`] if it has more than one axis, [`ErrorKind::Axis`] for an
    /// axis that isn't there, [`ErrorKind::Index`] for an index outside of it.
    pub fn index_select(&self, axis: i64, ids: &Tensor) -> Result<Tensor> {
        const OP: &str = "index_select";
        let axis = shape::axis(OP, axis, self.ndim())?;
        let shape = self.shape();
        if ids.ndim() > 1 {
            return Err(shape::mismatch(OP, &shape, &ids.shape(), "the indices must have one axis"));
        }
        let places = indices(OP, ids, shape[axis])?;
        let output = selected(&self.host_data()?, axis, &places);
        Ok(record_any(OP, output, &[self], move |g, _| {
            let gradient = match &g {
                Data::F32(g) => Data::F32(scatter(g, &shape, axis, &places)),
                Data::F64(g) => Data::F64(scatter(g, &shape, axis, &places)),
                other => return Err(super::not_float(OP, other.dtype())),
            };
            Ok(vec![Some(gradient.into())])
        }))
    }

    /// The rows of this table at these indices: a result of shape `ids.shape() + self.shape()[1..]`. The gradient is
    /// row-sparse: it holds only the rows that were used.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless the table is of floats and `ids` is i64, [`ErrorKind::Axis`] if the table is a scalar,
    /// [`ErrorKind::Index`] for an index outside of it.
    pub fn embedding(&self, ids: &Tensor) -> Result<Tensor> {
        const OP: &str = "embedding";
        if !self.dtype().is_float() {
            return Err(super::not_float(OP, self.dtype()));
        }
        shape::axis(OP, 0, self.ndim())?;
        let shape = self.shape();
        let places = indices(OP, ids, shape[0])?;
        let output_shape = [&ids.shape()[..], &shape[1..]].concat();
        let mut rows_shape = shape.clone();
        rows_shape[0] = places.len();
        on_gpu!(crate::tensor::device::ops::embedding(self, &places, &output_shape));
        let output = reshaped(selected(&self.host_data()?, 0, &places), &output_shape);
        Ok(record_any(OP, output, &[self], move |g, _| {
            let rows = places.iter().map(|&place| place as i64).collect();
            let sparse = RowSparse::new(rows, reshaped(g, &rows_shape), shape.clone())?;
            Ok(vec![Some(Gradient::Sparse(sparse))])
        }))
    }
}

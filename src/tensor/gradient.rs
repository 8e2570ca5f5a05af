//! Gradients: dense arrays, or the rows of one that aren't zero.

use ndarray::{ArcArray, ArrayD, Axis, IxDyn, Slice};

use super::reuse::Give;
use super::{DType, Data, Device, Element, Float, Spec, shape};
use crate::{ErrorKind, Result};

/// The gradient of a value.
#[derive(Debug, Clone)]
pub enum Gradient {
    /// All of its elements.
    Dense(Data),
    /// Some of its rows; the others are zero.
    Sparse(RowSparse),
}

/// Rows of an array whose other rows are zero, as an embedding's gradient is.
///
/// ```
/// use rankgrad::tensor::{RowSparse, Tensor};
/// # fn main() -> rankgrad::Result<()> {
/// let values = Tensor::from_vec(vec![1.0, 2.0, 3.0], (3, 1))?.data();
/// let rows = RowSparse::new(vec![2, 0, 2], values, vec![4, 1])?;
/// let sum = rows.coalesce()?;
/// assert_eq!(sum.rows, [0, 2]);
/// assert_eq!(Tensor::from_data(rows.to_dense()?).to_vec::<f64>()?, [2.0, 0.0, 4.0, 0.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct RowSparse {
    /// The row that each entry of `values` belongs to. Rows may repeat until [`RowSparse::coalesce`]; repeated ones are summed.
    pub rows: Vec<i64>,
    /// The rows' values, of shape `[rows.len(), shape[1], ..]`.
    pub values: Data,
    /// Shape of the whole array.
    pub shape: Vec<usize>,
}

impl RowSparse {
    /// Rows of an array of shape `shape`.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] if the values aren't floats, [`ErrorKind::Shape`] if they don't have the shape
    /// `[rows.len(), shape[1], ..]`, [`ErrorKind::Index`] for a row outside of the array.
    pub fn new(rows: Vec<i64>, values: Data, shape: Vec<usize>) -> Result<Self> {
        let sparse = RowSparse { rows, values, shape };
        sparse.validate()?;
        Ok(sparse)
    }

    fn validate(&self) -> Result<()> {
        const OP: &str = "row-sparse gradient";
        if !self.values.dtype().is_float() {
            return Err(not_float(OP, self.values.dtype()));
        }
        let found = self.values.shape();
        if self.shape.is_empty() || found.first() != Some(&self.rows.len()) || found[1..] != self.shape[1..] {
            return Err(shape::mismatch(
                OP,
                &self.shape,
                found,
                "the values' shape must be the array's with the first length replaced by the number of rows",
            ));
        }
        let size = self.shape[0];
        match self.rows.iter().find(|&&row| row < 0 || row as u64 >= size as u64) {
            Some(&index) => Err(ErrorKind::Index {
                op: OP.into(),
                index,
                size,
            }
            .into()),
            None => Ok(()),
        }
    }

    /// The same gradient with each row once, in ascending order. Repeated rows are summed in the order they stand in.
    ///
    /// # Errors
    /// Those of [`RowSparse::new`], if the public fields don't fit together.
    pub fn coalesce(&self) -> Result<RowSparse> {
        self.validate()?;
        if self.rows.windows(2).all(|pair| pair[0] < pair[1]) {
            return Ok(self.clone());
        }
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        order.sort_by_key(|&entry| self.rows[entry]);
        let mut rows: Vec<i64> = Vec::new();
        let mut targets = vec![0; order.len()];
        for &entry in &order {
            if rows.last() != Some(&self.rows[entry]) {
                rows.push(self.rows[entry]);
            }
            targets[entry] = rows.len() - 1;
        }
        let mut packed = self.shape.clone();
        packed[0] = rows.len();
        let values = each_float(&self.values, &packed, |entry| targets[entry])?;
        Ok(RowSparse {
            rows,
            values,
            shape: self.shape.clone(),
        })
    }

    /// The whole array.
    ///
    /// # Errors
    /// Those of [`RowSparse::new`], if the public fields don't fit together.
    pub fn to_dense(&self) -> Result<Data> {
        self.validate()?;
        shape::count("to_dense", &self.shape)?;
        each_float(&self.values, &self.shape, |entry| self.rows[entry] as usize)
    }

    fn append(&mut self, other: &RowSparse) -> Result<()> {
        fn join<T: Element>(left: &Data, right: &Data) -> Result<Data> {
            let joined = ndarray::concatenate(Axis(0), &[left.view::<T>()?, right.view::<T>()?]);
            Ok(T::wrap(
                joined
                    .map_err(|e| ErrorKind::Argument {
                        op: "accumulate".into(),
                        what: e.to_string(),
                    })?
                    .into_shared(),
            ))
        }
        self.values = match self.values.dtype() {
            DType::F32 => join::<f32>(&self.values, &other.values)?,
            _ => join::<f64>(&self.values, &other.values)?,
        };
        self.rows.extend(&other.rows);
        Ok(())
    }
}

/// Adds the rows of `values` to a zero array, each to its target row.
fn each_float(values: &Data, shape: &[usize], target: impl Fn(usize) -> usize) -> Result<Data> {
    fn scatter<T: Float>(values: &ArcArray<T, IxDyn>, shape: &[usize], target: impl Fn(usize) -> usize) -> Data {
        let mut dense = ArrayD::zeros(shape);
        add_rows(&mut dense, values, target);
        T::wrap(dense.into_shared())
    }
    match values {
        Data::F32(values) => Ok(scatter(values, shape, target)),
        Data::F64(values) => Ok(scatter(values, shape, target)),
        other => Err(not_float("row-sparse gradient", other.dtype())),
    }
}

/// `dense[target(entry)] += values[entry]` for each entry along the first axis, in order.
fn add_rows<T: Float>(dense: &mut ArrayD<T>, values: &ArcArray<T, IxDyn>, target: impl Fn(usize) -> usize) {
    let width: usize = values.shape()[1..].iter().product();
    if let (Some(dense), Some(values)) = (dense.as_slice_mut(), values.as_slice()) {
        if width > 0 {
            for (entry, row) in values.chunks_exact(width).enumerate() {
                let start = target(entry) * width;
                dense[start..start + width].iter_mut().zip(row).for_each(|(sum, &x)| *sum += x);
            }
        }
        return;
    }
    for (entry, row) in values.outer_iter().enumerate() {
        let mut sum = dense.index_axis_mut(Axis(0), target(entry));
        sum += &row;
    }
}

impl Gradient {
    /// Its dtype.
    pub fn dtype(&self) -> DType {
        match self {
            Gradient::Dense(data) => data.dtype(),
            Gradient::Sparse(sparse) => sparse.values.dtype(),
        }
    }

    /// The shape of the value it is the gradient of.
    pub fn shape(&self) -> &[usize] {
        match self {
            Gradient::Dense(data) => data.shape(),
            Gradient::Sparse(sparse) => &sparse.shape,
        }
    }

    /// Size of its elements, and of row numbers, in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Gradient::Dense(data) => data.bytes(),
            Gradient::Sparse(sparse) => sparse.values.bytes() + sparse.rows.len() * size_of::<i64>(),
        }
    }

    /// Whether it is row-sparse.
    pub fn is_sparse(&self) -> bool {
        matches!(self, Gradient::Sparse(_))
    }

    /// A dense gradient of zeros like `data`.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] if `data` isn't of floats.
    pub fn zeros_like(data: &Data) -> Result<Gradient> {
        if !data.dtype().is_float() {
            return Err(not_float("zeros_like", data.dtype()));
        }
        Ok(Gradient::Dense(Data::zeros(data.dtype(), data.shape())))
    }

    /// All of its elements as an array; a dense gradient is returned as it is.
    ///
    /// # Errors
    /// Those of [`RowSparse::new`], if the public fields don't fit together.
    pub fn to_dense(&self) -> Result<Data> {
        match self {
            Gradient::Dense(data) => Ok(data.clone()),
            Gradient::Sparse(sparse) => sparse.to_dense(),
        }
    }

    /// The dense array, by value.
    pub(crate) fn into_dense(self) -> Result<Data> {
        match self {
            Gradient::Dense(data) => Ok(data),
            Gradient::Sparse(sparse) => sparse.to_dense(),
        }
    }

    /// A sparse gradient with each row once; a dense one is returned as it is.
    ///
    /// # Errors
    /// Those of [`RowSparse::new`], if the public fields don't fit together.
    pub fn coalesce(&self) -> Result<Gradient> {
        match self {
            Gradient::Dense(data) => Ok(Gradient::Dense(data.clone())),
            Gradient::Sparse(sparse) => sparse.coalesce().map(Gradient::Sparse),
        }
    }

    /// Adds another gradient: `self + other` element by element. Dense storage that nobody shares is written in place.
    /// Two sparse gradients stay sparse (rows are joined, not summed); sparse and dense make dense.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] or [`ErrorKind::Shape`] when they differ.
    pub fn accumulate(&mut self, other: Gradient) -> Result<()> {
        const OP: &str = "accumulate";
        if self.dtype() != other.dtype() {
            return Err(ErrorKind::DType {
                op: OP.into(),
                expected: self.dtype().to_string(),
                found: other.dtype().to_string(),
            }
            .into());
        }
        if self.shape() != other.shape() {
            return Err(shape::mismatch(
                OP,
                self.shape(),
                other.shape(),
                "gradients of one value have its shape",
            ));
        }
        // What is added comes to where the sum is; rows are added here.
        let device = self.device();
        if device != Device::Cpu && (self.is_sparse() || other.is_sparse()) {
            let mut sum = self.to(Device::Cpu)?;
            sum.accumulate(other.to(Device::Cpu)?)?;
            *self = sum.to(device)?;
            return Ok(());
        }
        let other = other.to(device)?;
        match (self, other) {
            (Gradient::Dense(Data::Cuda(sum)), Gradient::Dense(Data::Cuda(other))) => *sum = sum.sum_with(&other)?,
            (Gradient::Dense(sum), Gradient::Dense(other)) => match sum {
                Data::F32(sum) => add(sum, f32::take(other)?),
                _ => add(f64::peek_mut(sum)?, f64::take(other)?),
            },
            (Gradient::Sparse(sum), Gradient::Sparse(other)) => {
                other.validate()?;
                sum.append(&other)?;
            }
            (Gradient::Dense(sum), Gradient::Sparse(other)) => {
                other.validate()?;
                match sum {
                    Data::F32(sum) => add_sparse(sum, &other)?,
                    _ => add_sparse(f64::peek_mut(sum)?, &other)?,
                }
            }
            (this @ Gradient::Sparse(_), other @ Gradient::Dense(_)) => {
                // The sparse rows come first in the sum, as the order of additions is self + other.
                let mut sum = Gradient::Dense(this.to_dense()?);
                sum.accumulate(other)?;
                *this = sum;
            }
        }
        Ok(())
    }

    /// Multiplies all elements by `factor`, in place when nobody shares the storage.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] for a gradient on a GPU that can't be used.
    pub fn scale(&mut self, factor: f64) -> Result<()> {
        let data = match self {
            Gradient::Dense(data) => data,
            Gradient::Sparse(sparse) => &mut sparse.values,
        };
        match data {
            Data::F32(a) => a.mapv_inplace(|x| x * factor as f32),
            Data::F64(a) => a.mapv_inplace(|x| x * factor),
            Data::Cuda(a) => *a = a.scaled(factor)?,
            Data::I64(_) | Data::Bool(_) => {}
        }
        Ok(())
    }

    /// An error unless it is a gradient of a value of this dtype and shape, with its rows, if it is sparse, within.
    pub(crate) fn check(&self, op: &str, spec: &Spec) -> Result<()> {
        if self.dtype() != spec.dtype {
            return Err(ErrorKind::DType {
                op: op.into(),
                expected: spec.dtype.to_string(),
                found: self.dtype().to_string(),
            }
            .into());
        }
        if self.shape() != spec.shape() {
            return Err(shape::mismatch(
                op,
                spec.shape(),
                self.shape(),
                "a gradient has the shape of its value",
            ));
        }
        match self {
            Gradient::Dense(_) => Ok(()),
            Gradient::Sparse(sparse) => sparse.validate(),
        }
    }

    /// The same gradient in row-major order.
    pub(crate) fn into_contiguous(self) -> Gradient {
        match self {
            Gradient::Dense(data) if !data.is_contiguous() => Gradient::Dense(data.to_contiguous()),
            other => other,
        }
    }
}

impl From<Data> for Gradient {
    fn from(data: Data) -> Self {
        Gradient::Dense(data)
    }
}

/// `sum += other`, in whichever storage is free to be written to (addition commutes to the bit).
fn add<T: Float>(sum: &mut ArcArray<T, IxDyn>, mut other: ArcArray<T, IxDyn>) {
    if sum.is_unique() {
        sum.zip_mut_with(&other, |a, &b| *a += b);
        other.give();
    } else if other.is_unique() {
        other.zip_mut_with(sum, |b, &a| *b = a + *b);
        std::mem::replace(sum, other).give();
    } else {
        *sum = ndarray::Zip::from(&*sum).and(&other).map_collect(|&a, &b| a + b).into_shared();
    }
}

fn add_sparse<T: Float>(sum: &mut ArcArray<T, IxDyn>, other: &RowSparse) -> Result<()> {
    let values = T::peek(&other.values)?;
    for (entry, &row) in other.rows.iter().enumerate() {
        let mut target = sum.slice_axis_mut(Axis(0), Slice::from(row as usize..row as usize + 1));
        target += &values.slice_axis(Axis(0), Slice::from(entry..entry + 1));
    }
    Ok(())
}

fn not_float(op: &str, found: DType) -> crate::Error {
    ErrorKind::DType {
        op: op.into(),
        expected: "f32 or f64".into(),
        found: found.to_string(),
    }
    .into()
}

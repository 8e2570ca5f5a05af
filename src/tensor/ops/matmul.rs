//! Matrix products, through BLAS.

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayViewD, ArrayViewMut2, Axis, Ix2, IxDyn, ShapeBuilder};

use super::kernel::{array, packed, spread, sum_to};
use super::{Shared, on_gpu, record, same_dtype, with_float};
use crate::Result;
use crate::tensor::reuse::{self, Kept};
use crate::tensor::{Float, Tensor, shape};

/// The same elements in another shape, packed if need be.
fn reshaped<T: Float>(a: &Shared<T>, shape: &[usize]) -> Shared<T> {
    if a.shape() == shape {
        return a.clone();
    }
    packed(a)
        .into_shape_with_order(IxDyn(shape))
        .expect("the shapes hold as many elements")
}

/// The matrices transposed, in the same storage.
fn transposed<T: Float>(a: &Shared<T>) -> Shared<T> {
    let (mut a, last) = (a.clone(), a.ndim() - 1);
    a.swap_axes(last - 1, last);
    a
}

/// All matrices of a stack as one with their rows.
fn folded<T: Float>(a: &Shared<T>) -> Shared<T> {
    let (rows, width) = a.shape().split_at(a.ndim() - 1);
    reshaped(a, &[rows.iter().product(), width[0]])
}

/// The product of two matrices.
fn matrix<T: Float>(a: &Shared<T>, b: &Shared<T>) -> Shared<T> {
    let (m, k, n) = (a.shape()[0], a.shape()[1], b.shape()[1]);
    if m * k * n == 0 {
        return Shared::zeros(IxDyn(&[m, n]));
    }
    let a = a.view().into_dimensionality::<Ix2>().expect("two axes");
    let b = b.view().into_dimensionality::<Ix2>().expect("two axes");
    let Some(elements) = reuse::used(m * n) else {
        return a.dot(&b).into_dyn().into_shared();
    };
    // As `dot` does it, in memory that is there.
    let column_major = a.strides()[0] == 1 && b.strides()[0] == 1;
    let mut c = Array2::from_shape_vec((m, n).set_f(column_major), elements).expect("as many elements as the shape holds");
    general_mat_mul(T::one(), &a, &b, T::zero(), &mut c);
    c.into_dyn().into_shared()
}

/// The product of two stacks of matrices, whose leading axes broadcast.
fn stacks<T: Float>(a: &Shared<T>, b: &Shared<T>) -> Result<Shared<T>> {
    if a.ndim() == 2 && b.ndim() == 2 {
        return Ok(matrix(a, b));
    }
    let (batch_a, [m, k]) = split(a.shape());
    let (batch_b, [_, n]) = split(b.shape());
    let batch = shape::broadcast("matmul", batch_a, batch_b)?;
    let with = |last: [usize; 2]| [&batch[..], &last[..]].concat();
    if b.ndim() == 2 {
        return Ok(reshaped(&matrix(&folded(a), b), &with([m, n])));
    }
    let shape = with([m, n]);
    let len = shape::count("matmul", &shape)?;
    // Products write it whole; sums of nothing don't.
    let mut out = if k > 0 { reuse::used(len) } else { None }.unwrap_or_else(|| vec![T::zero(); len]);
    let (left, right) = (spread(a, &with([m, k])), spread(b, &with([k, n])));
    if m * k * n > 0 {
        for (place, block) in out.chunks_exact_mut(m * n).enumerate() {
            let (a, b) = (nth(left.clone(), &batch, place), nth(right.clone(), &batch, place));
            let a = a.into_dimensionality::<Ix2>().expect("two axes are left");
            let b = b.into_dimensionality::<Ix2>().expect("two axes are left");
            let mut c = ArrayViewMut2::from_shape((m, n), block).expect("a block holds one matrix");
            general_mat_mul(T::one(), &a, &b, T::zero(), &mut c);
        }
    }
    Ok(array(&shape, out).into_shared())
}

fn split(shape: &[usize]) -> (&[usize], [usize; 2]) {
    let (batch, last) = shape.split_at(shape.len() - 2);
    (batch, [last[0], last[1]])
}

/// The matrix at a place of the batch, counted in row-major order.
fn nth<'a, T>(mut stack: ArrayViewD<'a, T>, batch: &[usize], place: usize) -> ArrayViewD<'a, T> {
    let mut rest = place;
    for axis in (0..batch.len()).rev() {
        stack = stack.index_axis_move(Axis(axis), rest % batch[axis]);
        rest /= batch[axis];
    }
    stack
}

fn matmul<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (x, y): (Shared<T>, Shared<T>) = (a.array()?, b.array()?);
    let (left, right) = (a.shape(), b.shape());
    let misfit = |rule| Err(shape::mismatch("matmul", &left, &right, rule));
    if left.is_empty() || right.is_empty() {
        return misfit("both need at least one axis; use `mul` for scalars");
    }
    // A vector counts as a row on the left and as a column on the right; the axis it lacked goes from the result.
    let (row, column) = (left.len() == 1, right.len() == 1);
    let x = if row { reshaped(&x, &[1, left[0]]) } else { x };
    let y = if column { reshaped(&y, &[right[0], 1]) } else { y };
    let (k, [_, n]) = (x.shape()[x.ndim() - 1], split(y.shape()).1);
    if k != y.shape()[y.ndim() - 2] {
        return misfit("the last axis of the first must be as long as the last but one (or only) axis of the second");
    }
    let Ok(batch) = shape::broadcast("matmul", split(x.shape()).0, split(y.shape()).0) else {
        return misfit("the axes before the last two must broadcast");
    };
    // Factors without elements may have a product that has too many.
    shape::count("matmul", &[&batch[..], &[split(x.shape()).1[0], n]].concat())?;
    let product = stacks(&x, &y)?;
    let full = product.shape().to_vec();
    let mut output = full.clone();
    if column {
        output.pop();
    }
    if row {
        output.remove(full.len() - 2);
    }
    let product = reshaped(&product, &output);
    // Each factor is saved only if the other one wants a gradient.
    let (shape_x, shape_y) = (x.shape().to_vec(), y.shape().to_vec());
    let x = b.requires_grad().then(|| Kept::new(x));
    let y = a.requires_grad().then(|| Kept::new(y));
    Ok(record("matmul", product, &[a, b], move |g, _| {
        // It gives its memory back at the end; what it was reshaped from shares it and mustn't be there any more.
        let g = {
            let whole: Shared<T> = g;
            Kept::new(reshaped(&whole, &full))
        };
        let first = y.as_ref().map(|y| stacks(&g, &transposed(y))).transpose()?;
        let second = match &x {
            Some(x) if shape_y.len() == 2 => Some(matrix(&transposed(&folded(x)), &reshaped(&g, &[folded_rows(x), n]))),
            Some(x) => Some(stacks(&transposed(x), &g)?),
            None => None,
        };
        let first = first.map(|gradient| reshaped(&sum_to(gradient, &shape_x), &left));
        let second = second.map(|gradient| reshaped(&sum_to(gradient, &shape_y), &right));
        Ok(vec![first, second])
    }))
}

fn folded_rows<T>(a: &Shared<T>) -> usize {
    a.shape()[..a.ndim() - 1].iter().product()
}

impl Tensor {
    /// The matrix product. Vectors count as a row on the left and as a column on the right; axes before the last two are
    /// stacks of matrices and broadcast. Matrices that lie row-major or column-major go to BLAS without a copy.
    ///
    /// ```
    /// use rankgrad::tensor::Tensor;
    /// # fn main() -> rankgrad::Result<()> {
    /// let a = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], (2, 2))?;
    /// let x = Tensor::from_vec(vec![1.0, 1.0], 2)?;
    /// assert_eq!(a.matmul(&x)?.to_vec::<f64>()?, [3.0, 7.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless both are floats of one dtype, [`Shape`](crate::ErrorKind::Shape) if the inner
    /// lengths differ or the stacks don't broadcast.
    pub fn matmul(&self, other: &Tensor) -> Result<Tensor> {
        same_dtype("matmul", self, &[other])?;
        on_gpu!(crate::tensor::device::ops::matmul(self, other));
        with_float!("matmul", self.dtype(), T => matmul::<T>(self, other))
    }
}

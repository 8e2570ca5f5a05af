//! Views and joins: what changes places of elements, not their values.

use std::borrow::{Borrow, Cow};

use ndarray::{ArrayD, ArrayViewD, Axis, IxDyn, Slice};

use super::kernel::{packed, spread, sum_to};
use super::{Shared, edges, record_any};
use crate::tensor::graph::{Edge, Needs, Node};
use crate::tensor::{DType, Data, Element, Float, Gradient, IntoShape, Spec, Tensor, shape};
use crate::{ErrorKind, Result};

/// Runs an expression on the array inside a `Data` and wraps what it makes as the same dtype.
macro_rules! same_kind {
    ($data:expr, $array:ident => $body:expr) => {
        match $data {
            Data::F32($array) => Data::F32($body),
            Data::F64($array) => Data::F64($body),
            Data::I64($array) => Data::I64($body),
            Data::Bool($array) => Data::Bool($body),
            // Only what is here comes here.
            Data::Cuda(array) => Data::Cuda(array),
        }
    };
}

fn one(data: Data) -> Result<Vec<Option<Gradient>>> {
    Ok(vec![Some(Gradient::Dense(data))])
}

/// The same elements in another shape: a view where they lie in row-major order, else packed once.
pub(in crate::tensor) fn reshaped(data: Data, shape: &[usize]) -> Data {
    fn to<T: Element>(a: Shared<T>, shape: &[usize]) -> Shared<T> {
        packed(&a)
            .into_shape_with_order(IxDyn(shape))
            .expect("the shapes hold as many elements")
    }
    match data {
        Data::Cuda(array) => Data::Cuda(array.reshaped(shape)),
        data => same_kind!(data, a => to(a, shape)),
    }
}

fn permuted(data: Data, order: &[usize]) -> Data {
    same_kind!(data, a => a.permuted_axes(IxDyn(order)))
}

/// The part of an axis that numpy's `start:end:step` takes, as ndarray's slice.
fn part(start: Option<i64>, end: Option<i64>, step: i64, length: usize) -> Slice {
    let n = length as i64;
    let bound = |place: i64, low: i64, high: i64| (if place < 0 { place.saturating_add(n) } else { place }).clamp(low, high);
    if step > 0 {
        let from = bound(start.unwrap_or(0), 0, n);
        let to = bound(end.unwrap_or(n), 0, n).max(from);
        return Slice::new(from as isize, Some(to as isize), step as isize);
    }
    // Backwards: from `first` down to just above `last`. ndarray wants the range, and walks it from its end.
    let first = bound(start.unwrap_or(n - 1), -1, n - 1);
    let last = end.map_or(-1, |end| bound(end, -1, n - 1)).min(first);
    Slice::new((last + 1) as isize, Some((first + 1) as isize), step as isize)
}

fn sliced(data: Data, axis: usize, part: Slice) -> Data {
    fn cut<T: Element>(mut a: Shared<T>, axis: usize, part: Slice) -> Shared<T> {
        a.slice_axis_inplace(Axis(axis), part);
        a
    }
    same_kind!(data, a => cut(a, axis, part))
}

/// Zeros of a shape with the gradient in the sliced part.
fn unsliced<T: Float>(gradient: &Shared<T>, shape: &[usize], axis: usize, part: Slice) -> Shared<T> {
    let mut whole = ArrayD::zeros(shape);
    whole.slice_axis_mut(Axis(axis), part).assign(gradient);
    whole.into_shared()
}

/// Joins arrays of one dtype by an ndarray function.
fn joined(op: &str, parts: &[Data], join: Join, axis: usize) -> Result<Data> {
    fn run<T: Element>(op: &str, parts: &[Data], join: Join, axis: usize) -> Result<Data> {
        let views: Vec<ArrayViewD<'_, T>> = parts.iter().map(Data::view::<T>).collect::<Result<_>>()?;
        let joined = match join {
            Join::Concat => ndarray::concatenate(Axis(axis), &views),
            Join::Stack => ndarray::stack(Axis(axis), &views),
        };
        let shapes: Vec<&[usize]> = parts.iter().map(Data::shape).collect();
        let error = |e: ndarray::ShapeError| ErrorKind::Argument {
            op: op.into(),
            what: format!("shapes {shapes:?} along axis {axis}: {e}"),
        };
        Ok(T::wrap(joined.map_err(error)?.into_shared()))
    }
    match parts.first().map_or(DType::F64, Data::dtype) {
        DType::F32 => run::<f32>(op, parts, join, axis),
        DType::F64 => run::<f64>(op, parts, join, axis),
        DType::I64 => run::<i64>(op, parts, join, axis),
        DType::Bool => run::<bool>(op, parts, join, axis),
    }
}

#[derive(Clone, Copy)]
enum Join {
    Concat,
    Stack,
}

/// The operands of a join, all of the first one's dtype.
fn operands<T: Borrow<Tensor>>(op: &str, tensors: &[T]) -> Result<Vec<Data>> {
    let Some(first) = tensors.first() else {
        return Err(ErrorKind::Argument {
            op: op.into(),
            what: "no tensors were given".into(),
        }
        .into());
    };
    for other in tensors {
        super::same_dtype(op, first.borrow(), &[other.borrow()])?;
    }
    tensors.iter().map(|tensor| tensor.borrow().host_data()).collect()
}

impl Tensor {
    /// Two axes swapped. A view: the storage is shared.
    ///
    /// # Errors
    /// [`ErrorKind::Axis`] for an axis that isn't there.
    pub fn transpose(&self, first: i64, second: i64) -> Result<Tensor> {
        let (first, second) = (
            shape::axis("transpose", first, self.ndim())?,
            shape::axis("transpose", second, self.ndim())?,
        );
        let mut order: Vec<usize> = (0..self.ndim()).collect();
        order.swap(first, second);
        let output = permuted(self.host_data()?, &order);
        Ok(record_any("transpose", output, &[self], move |g, _| one(permuted(g, &order))))
    }

    /// The axes in another order: axis `i` of the result is axis `order[i]` of this. A view: the storage is shared.
    ///
    /// # Errors
    /// [`ErrorKind::Axis`] for an axis that isn't there or is named twice, [`ErrorKind::Argument`] unless each is named.
    pub fn permute(&self, order: &[i64]) -> Result<Tensor> {
        const OP: &str = "permute";
        let ndim = self.ndim();
        if order.len() != ndim {
            return Err(ErrorKind::Argument {
                op: OP.into(),
                what: format!("{order:?} must name each of {ndim} axes once"),
            }
            .into());
        }
        // An empty order belongs to a scalar, and names all of its axes.
        shape::axes(OP, order, ndim)?;
        let order: Vec<usize> = order.iter().map(|&axis| shape::axis(OP, axis, ndim)).collect::<Result<_>>()?;
        let mut inverse = vec![0; ndim];
        order.iter().enumerate().for_each(|(i, &axis)| inverse[axis] = i);
        let output = permuted(self.host_data()?, &order);
        Ok(record_any(OP, output, &[self], move |g, _| one(permuted(g, &inverse))))
    }

    /// The elements, in row-major order, in another shape. One length may be -1 and follows from the others. A view where
    /// the elements lie in row-major order; else they are packed once.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if the shape holds another number of elements, [`ErrorKind::Argument`] for other negative lengths.
    pub fn reshape(&self, lengths: &[i64]) -> Result<Tensor> {
        const OP: &str = "reshape";
        let wrong = || ErrorKind::Argument {
            op: OP.into(),
            what: format!("lengths {lengths:?} must not be negative, but for one -1"),
        };
        if lengths.iter().any(|&n| n < -1) || lengths.iter().filter(|&&n| n == -1).count() > 1 {
            return Err(wrong().into());
        }
        let mut target: Vec<usize> = lengths.iter().map(|&n| n.max(1) as usize).collect();
        lengths.iter().zip(&mut target).filter(|(n, _)| **n == 0).for_each(|(_, n)| *n = 0);
        let shape = self.shape();
        if let Some(free) = lengths.iter().position(|&n| n == -1) {
            let others = shape::count(OP, &target)?;
            target[free] = self.len().checked_div(others).unwrap_or(0);
        }
        if shape::count(OP, &target)? != self.len() {
            return Err(shape::mismatch(OP, &shape, &target, "both must hold as many elements"));
        }
        let output = reshaped(self.data(), &target);
        Ok(record_any(OP, output, &[self], move |g, _| one(reshaped(g, &shape))))
    }

    /// The elements repeated to a larger shape, by numpy's rule. Shares the storage if it has that shape already, else
    /// the elements are copied: operations that broadcast by themselves don't need this.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if this doesn't broadcast to it.
    pub fn broadcast_to(&self, shape: impl IntoShape) -> Result<Tensor> {
        const OP: &str = "broadcast_to";
        let (from, to) = (self.shape(), shape.into_shape());
        shape::count(OP, &to)?;
        if shape::broadcast(OP, &from, &to)? != to {
            return Err(shape::mismatch(OP, &from, &to, "a length can only grow from 1"));
        }
        if from == to {
            return Ok(self.clone());
        }
        let output = same_kind!(self.host_data()?, a => spread(&a, &to).to_owned().into_shared());
        Ok(record_any(OP, output, &[self], move |g, _| match g {
            Data::F32(g) => one(Data::F32(sum_to(g, &from))),
            Data::F64(g) => one(Data::F64(sum_to(g, &from))),
            other => Err(super::not_float(OP, other.dtype())),
        }))
    }

    /// The part `start:end:step` of an axis, as numpy's: negative places count from the end, places outside are cut to
    /// the axis, and a negative step goes backwards. `None` is the end that the step starts from or goes to. A view: the
    /// storage is shared.
    ///
    /// ```
    /// use rankgrad::tensor::Tensor;
    /// # fn main() -> rankgrad::Result<()> {
    /// let x = Tensor::from_vec(vec![0_i64, 1, 2, 3, 4], 5)?;
    /// assert_eq!(x.slice(0, 1, -1, 2)?.to_vec::<i64>()?, [1, 3]);
    /// assert_eq!(x.slice(0, None, None, -2)?.to_vec::<i64>()?, [4, 2, 0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Axis`] for an axis that isn't there, [`ErrorKind::Argument`] for a step of zero.
    pub fn slice(&self, axis: i64, start: impl Into<Option<i64>>, end: impl Into<Option<i64>>, step: i64) -> Result<Tensor> {
        const OP: &str = "slice";
        let axis = shape::axis(OP, axis, self.ndim())?;
        if step == 0 || step == i64::MIN {
            return Err(ErrorKind::Argument {
                op: OP.into(),
                what: format!("step {step} goes nowhere"),
            }
            .into());
        }
        let shape = self.shape();
        let part = part(start.into(), end.into(), step, shape[axis]);
        let output = sliced(self.host_data()?, axis, part);
        Ok(record_any(OP, output, &[self], move |g, _| match &g {
            Data::F32(g) => one(Data::F32(unsliced(g, &shape, axis, part))),
            Data::F64(g) => one(Data::F64(unsliced(g, &shape, axis, part))),
            other => Err(super::not_float(OP, other.dtype())),
        }))
    }

    /// Tensors joined along an axis that they have.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if there are none or their other lengths differ, [`ErrorKind::DType`] if their dtypes do,
    /// [`ErrorKind::Axis`] for an axis that isn't there.
    pub fn concat<T: Borrow<Tensor>>(tensors: &[T], axis: i64) -> Result<Tensor> {
        const OP: &str = "concat";
        let parts = operands(OP, tensors)?;
        let first = parts[0].shape().to_vec();
        let axis = shape::axis(OP, axis, first.len())?;
        if let Some(other) = parts.iter().find(|part| part.shape().len() != first.len()) {
            return Err(ErrorKind::Shape {
                op: OP.into(),
                left: first,
                right: other.shape().to_vec(),
                rule: "all must have the same number of dimensions".into(),
            }
            .into());
        }
        let output = joined(OP, &parts, Join::Concat, axis)?;
        let lengths: Vec<isize> = parts.iter().map(|part| part.shape()[axis] as isize).collect();
        let inputs: Vec<&Tensor> = tensors.iter().map(Borrow::borrow).collect();
        Ok(record_any(OP, output, &inputs, move |g, _| {
            let mut start = 0;
            let mut cut = |&length: &isize| {
                start += length;
                Some(Gradient::Dense(sliced(g.clone(), axis, Slice::from(start - length..start))))
            };
            Ok(lengths.iter().map(&mut cut).collect())
        }))
    }

    /// Tensors of one shape joined along a new axis.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if there are none or their shapes differ, [`ErrorKind::DType`] if their dtypes do,
    /// [`ErrorKind::Axis`] for an axis that the result doesn't have.
    pub fn stack<T: Borrow<Tensor>>(tensors: &[T], axis: i64) -> Result<Tensor> {
        const OP: &str = "stack";
        let parts = operands(OP, tensors)?;
        let axis = shape::axis(OP, axis, parts[0].shape().len() + 1)?;
        let output = joined(OP, &parts, Join::Stack, axis)?;
        let inputs: Vec<&Tensor> = tensors.iter().map(Borrow::borrow).collect();
        let count = inputs.len();
        Ok(record_any(OP, output, &inputs, move |g, _| {
            let at = |i: usize| same_kind!(g.clone(), g => g.index_axis_move(Axis(axis), i));
            Ok((0..count).map(|i| Some(Gradient::Dense(at(i)))).collect())
        }))
    }

    /// Consecutive parts of an axis, of these lengths. Views: the storage is shared.
    ///
    /// # Errors
    /// [`ErrorKind::Axis`] for an axis that isn't there, [`ErrorKind::Argument`] unless the lengths make up the axis.
    pub fn split(&self, lengths: &[usize], axis: i64) -> Result<Vec<Tensor>> {
        const OP: &str = "split";
        let axis = shape::axis(OP, axis, self.ndim())?;
        let whole = self.shape()[axis];
        if lengths.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) != Some(whole) {
            let what = format!("lengths {lengths:?} must sum to the axis' length {whole}");
            return Err(ErrorKind::Argument { op: OP.into(), what }.into());
        }
        let data = self.host_data()?;
        let mut start = 0;
        let parts: Vec<Data> = lengths
            .iter()
            .map(|&n| {
                start += n;
                sliced(data.clone(), axis, Slice::from((start - n) as isize..start as isize))
            })
            .collect();
        let Some(edges) = edges(&[self]) else {
            return Ok(parts.into_iter().map(Tensor::from_data).collect());
        };
        let specs = parts.iter().map(Spec::of).collect();
        let adjoint = move |gradients: &mut Vec<Data>, _: Needs<'_>| one(joined(OP, gradients, Join::Concat, axis)?);
        let node = Node::op(Cow::Borrowed(OP), edges, specs, Box::new(adjoint));
        Ok(parts
            .into_iter()
            .enumerate()
            .map(|(slot, part)| Tensor::with_edge(part, Edge { node: node.clone(), slot }))
            .collect())
    }
}

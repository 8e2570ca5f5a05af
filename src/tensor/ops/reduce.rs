//! Sums, means, maxima and log-sum-exp over axes.

use ndarray::Zip;

use super::compare::first_largest;
use super::kernel::{array, elements, map_in_place, packed, spread, sum_axes};
use super::{Shared, on_gpu, record, with_float};
use crate::tensor::reuse;
use crate::tensor::shape::{self, Lanes};
use crate::tensor::{Float, Tensor};
use crate::{ErrorKind, Result};

/// Which axes go, and the shape without them.
struct Reduced {
    /// The axes that go.
    marks: Vec<bool>,
    /// The shape with length 1 in their place.
    kept: Vec<usize>,
    /// The output's shape.
    output: Vec<usize>,
    /// How many elements make one.
    count: usize,
}

impl Reduced {
    fn new(op: &str, x: &Tensor, axes: &[i64], keepdims: bool) -> Result<Self> {
        let shape = x.shape();
        let marks = shape::axes(op, axes, shape.len())?;
        let kept: Vec<usize> = shape.iter().zip(&marks).map(|(&n, &gone)| if gone { 1 } else { n }).collect();
        let output = if keepdims {
            kept.clone()
        } else {
            shape.iter().zip(&marks).filter(|(_, gone)| !**gone).map(|(&n, _)| n).collect()
        };
        // Sums of nothing take memory.
        shape::count(op, &kept)?;
        let count = shape.iter().zip(&marks).filter(|(_, gone)| **gone).map(|(&n, _)| n).product();
        Ok(Reduced {
            marks,
            kept,
            output,
            count,
        })
    }

    /// An error unless there is something to reduce.
    fn not_empty(&self, op: &str, x: &Tensor) -> Result<()> {
        if self.count > 0 {
            return Ok(());
        }
        Err(ErrorKind::Argument {
            op: op.into(),
            what: format!("there are no elements to reduce in shape {:?}", x.shape()),
        }
        .into())
    }

    /// A packed array in the output's shape.
    fn out<T: Float>(&self, a: Shared<T>) -> Shared<T> {
        reshaped(a, &self.output)
    }
}

/// The same elements in another shape.
fn reshaped<T: Float>(a: Shared<T>, shape: &[usize]) -> Shared<T> {
    packed(&a)
        .into_shape_with_order(ndarray::IxDyn(shape))
        .expect("the shapes hold as many elements")
}

fn sum<T: Float>(op: &'static str, x: &Tensor, axes: &[i64], keepdims: bool, mean: bool) -> Result<Tensor> {
    let reduced = Reduced::new(op, x, axes, keepdims)?;
    let divisor = mean.then_some(reduced.count as f64);
    on_gpu!(crate::tensor::device::ops::sum(
        op,
        x,
        &reduced.marks,
        (&reduced.kept, &reduced.output),
        divisor
    ));
    let count = T::of(reduced.count as f64);
    let mut total = sum_axes(&x.array::<T>()?, &reduced.marks);
    if mean {
        total.mapv_inplace(|sum| sum / count);
    }
    let shape = x.shape();
    let kept = reduced.kept.clone();
    Ok(record(op, reduced.out(total), &[x], move |g: Shared<T>, _| {
        let g = reshaped(g, &kept);
        let g = if mean { map_in_place(g, |g| g / count) } else { g };
        let wide = match elements(&g) {
            &[g] => array(&shape, reuse::filled(shape.iter().product(), g)),
            _ => spread(&g, &shape).to_owned(),
        };
        Ok(vec![Some(wide.into_shared())])
    }))
}

/// The largest element along one axis; the first one of equal ones gets the gradient.
fn max_along<T: Float>(x: &Tensor, reduced: &Reduced, axis: usize) -> Result<Tensor> {
    let shape = x.shape();
    let lanes = Lanes::new(&shape, axis);
    let input = packed(&x.array::<T>()?);
    let values = elements(&input);
    let places = first_largest(values, lanes);
    let place = move |lane: usize, k: usize| {
        let inner = lanes.inner;
        (lane / inner * lanes.length + k) * inner + lane % inner
    };
    let largest = places.iter().enumerate().map(|(lane, &k)| values[place(lane, k)]).collect();
    let output = array(&reduced.output, largest).into_shared();
    Ok(record("max", output, &[x], move |g: Shared<T>, _| {
        let mut gradient = vec![T::zero(); shape.iter().product()];
        for (lane, (&g, &k)) in elements(&packed(&g)).iter().zip(&places).enumerate() {
            gradient[place(lane, k)] = g;
        }
        Ok(vec![Some(array(&shape, gradient).into_shared())])
    }))
}

/// The largest of the marked axes' elements, which stay with length 1.
fn largest<T: Float>(a: &Shared<T>, reduced: &Reduced) -> Shared<T> {
    let mut out = ndarray::ArrayD::from_elem(ndarray::IxDyn(&reduced.kept), T::neg_infinity());
    if let (Some(values), true) = (a.as_slice(), reduced.marks.iter().all(|&gone| gone)) {
        out.fill(values.iter().fold(T::neg_infinity(), |best, &x| larger(best, x)));
        return out.into_shared();
    }
    // The output repeated along the axes that go can't be written to, so go through the input's elements by index.
    for (index, &x) in a.indexed_iter() {
        let mut at = index;
        for (axis, &gone) in reduced.marks.iter().enumerate() {
            if gone {
                at[axis] = 0;
            }
        }
        let best = &mut out[at];
        *best = larger(*best, x);
    }
    out.into_shared()
}

fn larger<T: Float>(best: T, x: T) -> T {
    if x > best || x.is_nan() { x } else { best }
}

/// The largest over several axes; equal ones share the gradient evenly.
fn max_over<T: Float>(x: &Tensor, reduced: &Reduced) -> Result<Tensor> {
    let input: Shared<T> = x.array()?;
    let best = largest(&input, reduced);
    let (marks, kept) = (reduced.marks.clone(), reduced.kept.clone());
    Ok(record("max", reduced.out(best.clone()), &[x], move |g: Shared<T>, _| {
        let is_best = Zip::from(&input)
            .and(&spread(&best, input.shape()))
            .map_collect(|&x, &best| T::of(f64::from(u8::from(x == best))));
        let is_best = is_best.into_shared();
        let ties = sum_axes(&is_best, &marks);
        let part = Zip::from(&reshaped(g, &kept))
            .and(&ties)
            .map_collect(|&g, &ties| g / ties)
            .into_shared();
        let gradient = Zip::from(&is_best)
            .and(&spread(&part, input.shape()))
            .map_collect(|&mask, &part| mask * part);
        Ok(vec![Some(gradient.into_shared())])
    }))
}

/// `ln Σ eˣ`, with the largest element taken out so that nothing overflows.
fn logsumexp<T: Float>(x: &Tensor, axes: &[i64], keepdims: bool) -> Result<Tensor> {
    let reduced = Reduced::new("logsumexp", x, axes, keepdims)?;
    reduced.not_empty("logsumexp", x)?;
    let input: Shared<T> = x.array()?;
    // An infinite maximum would make the difference NaN.
    let shift = largest(&input, &reduced)
        .mapv(|m| if m.is_finite() { m } else { T::zero() })
        .into_shared();
    let powers = Zip::from(&input)
        .and(&spread(&shift, input.shape()))
        .map_collect(|&x, &m| (x - m).exp_portable());
    let sums = sum_axes(&powers.into_shared(), &reduced.marks);
    let total = Zip::from(&sums).and(&shift).map_collect(|&sum, &m| sum.ln() + m).into_shared();
    let kept = reduced.kept.clone();
    Ok(record("logsumexp", reduced.out(total.clone()), &[x], move |g: Shared<T>, _| {
        let g = reshaped(g, &kept);
        let shape = input.shape();
        let gradient = Zip::from(&input)
            .and(&spread(&total, shape))
            .and(&spread(&g, shape))
            .map_collect(|&x, &total, &g| g * (x - total).exp_portable());
        Ok(vec![Some(gradient.into_shared())])
    }))
}

impl Tensor {
    /// The sum of all elements, a scalar.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless the elements are floats.
    pub fn sum(&self) -> Result<Tensor> {
        self.sum_axes(&[], false)
    }

    /// The sum over the named axes, which go, or stay with length 1 if `keepdims`. Negative axes count from the last; none
    /// named means all. The order of additions depends only on the shape.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless the elements are floats, [`ErrorKind::Axis`] for an axis that isn't there or is named
    /// twice.
    pub fn sum_axes(&self, axes: &[i64], keepdims: bool) -> Result<Tensor> {
        with_float!("sum", self.dtype(), T => sum::<T>("sum", self, axes, keepdims, false))
    }

    /// The mean of all elements, a scalar; NaN if there are none.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless the elements are floats.
    pub fn mean(&self) -> Result<Tensor> {
        self.mean_axes(&[], false)
    }

    /// The mean over the named axes; axes as in [`Tensor::sum_axes`].
    ///
    /// # Errors
    /// Those of [`Tensor::sum_axes`].
    pub fn mean_axes(&self, axes: &[i64], keepdims: bool) -> Result<Tensor> {
        with_float!("mean", self.dtype(), T => sum::<T>("mean", self, axes, keepdims, true))
    }

    /// The largest element, a scalar. Equal ones share the gradient evenly, as with torch's `max()` and `amax`.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless the elements are floats, [`ErrorKind::Argument`] if there are none.
    pub fn max(&self) -> Result<Tensor> {
        self.max_axes(&[], false)
    }

    /// The largest elements over the named axes; axes as in [`Tensor::sum_axes`]. NaN counts as the largest.
    ///
    /// Over one named axis the first of equal ones gets the gradient, as with torch's `max(dim)`; over all or several they
    /// share it evenly, as with torch's `max()` and `amax`.
    ///
    /// # Errors
    /// Those of [`Tensor::sum_axes`]; [`ErrorKind::Argument`] if there are no elements to choose from.
    pub fn max_axes(&self, axes: &[i64], keepdims: bool) -> Result<Tensor> {
        let reduced = Reduced::new("max", self, axes, keepdims)?;
        reduced.not_empty("max", self)?;
        with_float!("max", self.dtype(), T => match axes {
            &[axis] => max_along::<T>(self, &reduced, shape::axis("max", axis, self.ndim())?),
            _ => max_over::<T>(self, &reduced),
        })
    }

    /// `ln Σ eˣ` over all elements, a scalar.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless the elements are floats, [`ErrorKind::Argument`] if there are none.
    pub fn logsumexp(&self) -> Result<Tensor> {
        self.logsumexp_axes(&[], false)
    }

    /// `ln Σ eˣ` over the named axes, without overflow; axes as in [`Tensor::sum_axes`].
    ///
    /// # Errors
    /// Those of [`Tensor::sum_axes`]; [`ErrorKind::Argument`] if there are no elements to reduce.
    pub fn logsumexp_axes(&self, axes: &[i64], keepdims: bool) -> Result<Tensor> {
        with_float!("logsumexp", self.dtype(), T => logsumexp::<T>(self, axes, keepdims))
    }
}

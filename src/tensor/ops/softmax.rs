//! Softmax and its logarithm along one axis.

use super::kernel::{array, elements, packed, sum_middle};
use super::{record, with_float};
use crate::Result;
use crate::tensor::reuse::{self, Give, Kept};
use crate::tensor::shape::{self, Lanes};
use crate::tensor::{Float, Tensor};

/// Exponentials along lanes, with each lane's largest element taken out so that they don't overflow.
pub(super) struct Exponentials<T> {
    /// `exp(x - shift)`, in the places of `x`.
    pub(super) values: Vec<T>,
    /// What was taken out, a number per lane.
    pub(super) shifts: Vec<T>,
    /// Sums of the values, a number per lane.
    pub(super) sums: Vec<T>,
}

impl<T: Float> Exponentials<T> {
    pub(super) fn new(x: &[T], lanes: Lanes) -> Self {
        let mut shifts = vec![T::neg_infinity(); lanes.outer * lanes.inner];
        each_row(lanes, |row, lane| {
            if lanes.inner == 1 {
                shifts[lane] = x[row].iter().fold(T::neg_infinity(), |best, &x| if x > best { x } else { best });
            } else {
                let bests = shifts[lane..].iter_mut().zip(&x[row]);
                bests.for_each(|(best, &x)| {
                    if x > *best {
                        *best = x
                    }
                });
            }
        });
        // An infinite shift would make differences NaN.
        shifts
            .iter_mut()
            .filter(|shift| !shift.is_finite())
            .for_each(|shift| *shift = T::zero());
        let mut values = reuse::copied(x);
        with_lanes(&mut values, lanes, &shifts, |x, shift| *x = (*x - shift).exp_portable());
        let sums = sum_middle(&values, lanes.outer, lanes.length, lanes.inner);
        Exponentials { values, shifts, sums }
    }
}

/// Calls `f` with the places of each run of neighbouring elements: a whole lane, or one element of each lane of a block;
/// and with the number of the (first) lane.
fn each_row(lanes: Lanes, mut f: impl FnMut(std::ops::Range<usize>, usize)) {
    let Lanes { outer, length, inner } = lanes;
    for o in 0..outer {
        if inner == 1 {
            f(o * length..(o + 1) * length, o);
            continue;
        }
        for k in 0..length {
            let start = (o * length + k) * inner;
            f(start..start + inner, o * inner);
        }
    }
}

/// Changes each element by `f`, which also gets the number of its lane.
pub(super) fn with_lanes<T: Float>(x: &mut [T], lanes: Lanes, numbers: &[T], f: impl Fn(&mut T, T)) {
    each_row(lanes, |row, lane| {
        if lanes.inner == 1 {
            let number = numbers[lane];
            x[row].iter_mut().for_each(|x| f(x, number));
        } else {
            x[row].iter_mut().zip(&numbers[lane..]).for_each(|(x, &number)| f(x, number));
        }
    });
}

fn softmax<T: Float>(x: &Tensor, axis: usize) -> Result<Tensor> {
    let shape = x.shape();
    let lanes = Lanes::new(&shape, axis);
    let Exponentials { mut values, sums, .. } = Exponentials::new(elements(&packed(&x.array::<T>()?)), lanes);
    with_lanes(&mut values, lanes, &sums, |y, sum| *y /= sum);
    let y = array(&shape, values).into_shared();
    let saved = Kept::new(y.clone());
    Ok(record("softmax", y, &[x], move |g, _| {
        let (g, y) = (packed(&g), elements(&saved));
        let products = reuse::collect(elements(&g).iter().zip(y).map(|(&g, &y)| g * y));
        let sums = sum_middle(&products, lanes.outer, lanes.length, lanes.inner);
        products.give();
        let mut gradient = reuse::copied(elements(&g));
        with_lanes(&mut gradient, lanes, &sums, |g, sum| *g -= sum);
        gradient.iter_mut().zip(y).for_each(|(g, &y)| *g *= y);
        Ok(vec![Some(array(&shape, gradient).into_shared())])
    }))
}

fn log_softmax<T: Float>(x: &Tensor, axis: usize) -> Result<Tensor> {
    let shape = x.shape();
    let lanes = Lanes::new(&shape, axis);
    let input = packed(&x.array::<T>()?);
    let Exponentials { values, shifts, sums } = Exponentials::new(elements(&input), lanes);
    values.give();
    let logs: Vec<T> = sums.iter().map(|sum| sum.ln()).collect();
    let mut values = reuse::copied(elements(&input));
    with_lanes(&mut values, lanes, &shifts, |x, shift| *x -= shift);
    with_lanes(&mut values, lanes, &logs, |x, log| *x -= log);
    let y = array(&shape, values).into_shared();
    let saved = Kept::new(y.clone());
    Ok(record("log_softmax", y, &[x], move |g, _| {
        let g = packed(&g);
        let sums = sum_middle(elements(&g), lanes.outer, lanes.length, lanes.inner);
        let mut gradient = reuse::collect(elements(&saved).iter().map(|y| y.exp_portable()));
        with_lanes(&mut gradient, lanes, &sums, |y, sum| *y *= sum);
        gradient.iter_mut().zip(elements(&g)).for_each(|(y, &g)| *y = g - *y);
        Ok(vec![Some(array(&shape, gradient).into_shared())])
    }))
}

impl Tensor {
    /// `eˣ / Σ eˣ` along an axis.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats, [`Axis`](crate::ErrorKind::Axis) for an axis that
    /// isn't there.
    pub fn softmax(&self, axis: i64) -> Result<Tensor> {
        let axis = shape::axis("softmax", axis, self.ndim())?;
        with_float!("softmax", self.dtype(), T => softmax::<T>(self, axis))
    }

    /// `x - ln Σ eˣ` along an axis: the logarithm of the softmax, without overflow.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats, [`Axis`](crate::ErrorKind::Axis) for an axis that
    /// isn't there.
    pub fn log_softmax(&self, axis: i64) -> Result<Tensor> {
        let axis = shape::axis("log_softmax", axis, self.ndim())?;
        with_float!("log_softmax", self.dtype(), T => log_softmax::<T>(self, axis))
    }
}

//! Softmax and its logarithm along one axis.

use super::kernel::{array, elements, packed};
use super::{Shared, record, with_float};
use crate::Result;
use crate::tensor::shape::{self, Lanes};
use crate::tensor::{Float, Tensor};

/// `x - ln Σ eˣ` along the lanes, into a new vector.
pub(super) fn log_softmax_lanes<T: Float>(x: &[T], lanes: Lanes) -> Vec<T> {
    let mut out = x.to_vec();
    each_lane(&mut out, lanes, |mut lane| {
        let shift = lane.shift();
        let mut sum = T::zero();
        lane.each(|x| {
            *x -= shift;
            sum += x.exp();
        });
        let sum = sum.ln();
        lane.each(|x| *x -= sum);
    });
    out
}

fn softmax_lanes<T: Float>(x: &[T], lanes: Lanes) -> Vec<T> {
    let mut out = x.to_vec();
    each_lane(&mut out, lanes, |mut lane| {
        let shift = lane.shift();
        let mut sum = T::zero();
        lane.each(|x| {
            *x = (*x - shift).exp();
            sum += *x;
        });
        lane.each(|x| *x /= sum);
    });
    out
}

/// One lane: elements `inner` apart.
struct Lane<'a, T> {
    block: &'a mut [T],
    start: usize,
    inner: usize,
}

impl<T: Float> Lane<'_, T> {
    fn each(&mut self, mut f: impl FnMut(&mut T)) {
        if self.inner == 1 {
            self.block.iter_mut().for_each(f);
        } else {
            self.block[self.start..].iter_mut().step_by(self.inner).for_each(&mut f);
        }
    }

    /// The largest element, which is taken out so that the exponentials don't overflow; zero if it is infinite.
    fn shift(&mut self) -> T {
        let mut best = T::neg_infinity();
        self.each(|x| {
            if *x > best {
                best = *x;
            }
        });
        if best.is_finite() { best } else { T::zero() }
    }
}

fn each_lane<T: Float>(x: &mut [T], lanes: Lanes, mut f: impl FnMut(Lane<'_, T>)) {
    let Lanes { length, inner, .. } = lanes;
    if length * inner == 0 {
        return;
    }
    for block in x.chunks_exact_mut(length * inner) {
        for start in 0..inner {
            f(Lane { block, start, inner });
        }
    }
}

/// For each lane of `g` and of the output `y`: `dx = f(g, y, Σ h(g, y))`.
fn lane_adjoint<T: Float>(g: &Shared<T>, y: &Shared<T>, lanes: Lanes, h: impl Fn(T, T) -> T, f: impl Fn(T, T, T) -> T) -> Shared<T> {
    let packed_g = packed(g);
    let (gradient, output) = (elements(&packed_g), elements(y));
    let Lanes { outer, length, inner } = lanes;
    let mut out = vec![T::zero(); gradient.len()];
    let mut sums = vec![T::zero(); inner];
    for o in 0..outer {
        let block = o * length * inner..(o + 1) * length * inner;
        let (gradient, output, out) = (&gradient[block.clone()], &output[block.clone()], &mut out[block]);
        sums.fill(T::zero());
        if inner == 1 {
            sums[0] = gradient.iter().zip(output).fold(T::zero(), |sum, (&g, &y)| sum + h(g, y));
            out.iter_mut()
                .zip(gradient.iter().zip(output))
                .for_each(|(dx, (&g, &y))| *dx = f(g, y, sums[0]));
            continue;
        }
        for (i, (&g, &y)) in gradient.iter().zip(output).enumerate() {
            sums[i % inner] += h(g, y);
        }
        for (i, (dx, (&g, &y))) in out.iter_mut().zip(gradient.iter().zip(output)).enumerate() {
            *dx = f(g, y, sums[i % inner]);
        }
    }
    array(g.shape(), out).into_shared()
}

fn softmax<T: Float>(x: &Tensor, axis: usize) -> Result<Tensor> {
    let shape = x.shape();
    let lanes = Lanes::new(&shape, axis);
    let y = array(&shape, softmax_lanes(elements(&packed(&x.array::<T>()?)), lanes)).into_shared();
    let saved = y.clone();
    Ok(record("softmax", y, &[x], move |g, _| {
        Ok(vec![Some(lane_adjoint(&g, &saved, lanes, |g, y| g * y, |g, y, sum| y * (g - sum)))])
    }))
}

fn log_softmax<T: Float>(x: &Tensor, axis: usize) -> Result<Tensor> {
    let shape = x.shape();
    let lanes = Lanes::new(&shape, axis);
    let y = array(&shape, log_softmax_lanes(elements(&packed(&x.array::<T>()?)), lanes)).into_shared();
    let saved = y.clone();
    Ok(record("log_softmax", y, &[x], move |g, _| {
        Ok(vec![Some(lane_adjoint(&g, &saved, lanes, |g, _| g, |g, y, sum| g - y.exp() * sum))])
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

//! Functions of one operand, element by element, and scalar forms of the arithmetic.

use super::kernel::{map, map_in_place, update};
use super::{Shared, on_gpu, record, with_float};
use crate::Result;
use crate::tensor::device::ops::unary;
use crate::tensor::reuse::Kept;
use crate::tensor::{Float, Tensor};

/// Which form of GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gelu {
    /// `x Φ(x)` with the error function.
    #[default]
    Exact,
    /// Its approximation `0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    Tanh,
}

/// `y = f(x)`; the adjoint is a function of the gradient and `x`.
fn from_input<T: Float>(op: &'static str, x: &Tensor, f: impl Fn(T) -> T, d: impl Fn(T, T) -> T + Send + 'static) -> Result<Tensor> {
    let input: Kept<Shared<T>> = Kept::new(x.array()?);
    let y = map(&input, f);
    Ok(record(op, y, &[x], move |g, _| Ok(vec![Some(update(g, &input, &d))])))
}

/// `y = f(x)`; the adjoint is a function of the gradient and `y`.
fn from_output<T: Float>(op: &'static str, x: &Tensor, f: impl Fn(T) -> T, d: impl Fn(T, T) -> T + Send + 'static) -> Result<Tensor> {
    let y = map(&x.array::<T>()?, f);
    let saved = Kept::new(y.clone());
    Ok(record(op, y, &[x], move |g, _| Ok(vec![Some(update(g, &saved, &d))])))
}

/// `y = f(x)` with a constant slope; nothing is saved.
fn linear<T: Float>(op: &'static str, x: &Tensor, f: impl Fn(T) -> T, d: impl Fn(T) -> T + Send + 'static) -> Result<Tensor> {
    let y = map(&x.array::<T>()?, f);
    Ok(record(op, y, &[x], move |g: Shared<T>, _| Ok(vec![Some(map_in_place(g, &d))])))
}

/// The same gradient, for additions of a constant.
fn shifted<T: Float>(op: &'static str, x: &Tensor, f: impl Fn(T) -> T) -> Result<Tensor> {
    Ok(record(op, map(&x.array::<T>()?, f), &[x], |g: Shared<T>, _| Ok(vec![Some(g)])))
}

fn sigmoid<T: Float>(x: T) -> T {
    T::one() / (T::one() + (-x).exp_portable())
}

/// `ln(1 + eˣ)` without overflow.
fn softplus<T: Float>(x: T) -> T {
    let zero = T::zero();
    (if x > zero { x } else { zero }) + (-x.abs()).exp_portable().ln_1p()
}

fn gelu_exact<T: Float>(x: T) -> T {
    x * T::of(0.5) * (T::one() + (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf())
}

fn gelu_exact_slope<T: Float>(x: T) -> T {
    let phi = T::of(0.5) * (T::one() + (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf());
    let density = (-x * x * T::of(0.5)).exp_portable() * T::of(0.5 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2);
    phi + x * density
}

const TANH_SCALE: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
const TANH_CUBIC: f64 = 0.044715;

fn gelu_tanh<T: Float>(x: T) -> T {
    let t = (T::of(TANH_SCALE) * (x + T::of(TANH_CUBIC) * x * x * x)).tanh_portable();
    T::of(0.5) * x * (T::one() + t)
}

fn gelu_tanh_slope<T: Float>(x: T) -> T {
    let (one, half) = (T::one(), T::of(0.5));
    let t = (T::of(TANH_SCALE) * (x + T::of(TANH_CUBIC) * x * x * x)).tanh_portable();
    half * (one + t) + half * x * (one - t * t) * T::of(TANH_SCALE) * (one + T::of(3.0 * TANH_CUBIC) * x * x)
}

impl Tensor {
    /// `-x`.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn neg(&self) -> Result<Tensor> {
        on_gpu!(unary("neg", self, 0.0));
        with_float!("neg", self.dtype(), T => linear::<T>("neg", self, |x| -x, |g| -g))
    }

    /// The exponential.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn exp(&self) -> Result<Tensor> {
        on_gpu!(unary("exp", self, 0.0));
        with_float!("exp", self.dtype(), T => from_output::<T>("exp", self, T::exp_portable, |g, y| g * y))
    }

    /// The natural logarithm.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn log(&self) -> Result<Tensor> {
        with_float!("log", self.dtype(), T => from_input::<T>("log", self, T::ln, |g, x| g / x))
    }

    /// The square root.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn sqrt(&self) -> Result<Tensor> {
        on_gpu!(unary("sqrt", self, 0.0));
        with_float!("sqrt", self.dtype(), T => from_output::<T>("sqrt", self, T::sqrt, |g, y| g / (y + y)))
    }

    /// The absolute value; the slope at zero is zero.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn abs(&self) -> Result<Tensor> {
        on_gpu!(unary("abs", self, 0.0));
        with_float!("abs", self.dtype(), T => from_input::<T>("abs", self, T::abs, |g, x| if x > 0.0 { g } else if x < 0.0 { -g } else { g * 0.0 }))
    }

    /// The sine.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn sin(&self) -> Result<Tensor> {
        with_float!("sin", self.dtype(), T => from_input::<T>("sin", self, T::sin, |g, x| g * x.cos()))
    }

    /// The cosine.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn cos(&self) -> Result<Tensor> {
        with_float!("cos", self.dtype(), T => from_input::<T>("cos", self, T::cos, |g, x| -g * x.sin()))
    }

    /// The hyperbolic tangent.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn tanh(&self) -> Result<Tensor> {
        on_gpu!(unary("tanh", self, 0.0));
        with_float!("tanh", self.dtype(), T => from_output::<T>("tanh", self, T::tanh_portable, |g, y| g * (1.0 - y * y)))
    }

    /// `1 / (1 + e⁻ˣ)`.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn sigmoid(&self) -> Result<Tensor> {
        on_gpu!(unary("sigmoid", self, 0.0));
        with_float!("sigmoid", self.dtype(), T => from_output::<T>("sigmoid", self, sigmoid, |g, y| g * y * (1.0 - y)))
    }

    /// The larger of `x` and zero; the slope at zero is zero. NaN stays NaN, and its gradient goes on to it.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn relu(&self) -> Result<Tensor> {
        on_gpu!(unary("relu", self, 0.0));
        with_float!("relu", self.dtype(), T => from_output::<T>("relu", self, |x| if x < 0.0 { 0.0 } else { x }, |g, y| if y <= 0.0 { 0.0 } else { g }))
    }

    /// `ln(1 + eˣ)`.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn softplus(&self) -> Result<Tensor> {
        with_float!("softplus", self.dtype(), T => from_input::<T>("softplus", self, softplus, |g, x| g * sigmoid(x)))
    }

    /// The Gaussian error linear unit (Hendrycks and Gimpel, 2016, arXiv 1606.08415).
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn gelu(&self, form: Gelu) -> Result<Tensor> {
        match form {
            Gelu::Exact => {
                with_float!("gelu", self.dtype(), T => from_input::<T>("gelu", self, gelu_exact, |g, x| g * gelu_exact_slope(x)))
            }
            Gelu::Tanh => {
                with_float!("gelu", self.dtype(), T => from_input::<T>("gelu", self, gelu_tanh, |g, x| g * gelu_tanh_slope(x)))
            }
        }
    }

    /// `x + c`.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn add_scalar(&self, c: f64) -> Result<Tensor> {
        on_gpu!(unary("add_scalar", self, c));
        with_float!("add_scalar", self.dtype(), T => shifted::<T>("add_scalar", self, move |x| x + c as T))
    }

    /// `x - c`.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn sub_scalar(&self, c: f64) -> Result<Tensor> {
        on_gpu!(unary("sub_scalar", self, c));
        with_float!("sub_scalar", self.dtype(), T => shifted::<T>("sub_scalar", self, move |x| x - c as T))
    }

    /// `x · c`.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn mul_scalar(&self, c: f64) -> Result<Tensor> {
        on_gpu!(unary("mul_scalar", self, c));
        with_float!("mul_scalar", self.dtype(), T => linear::<T>("mul_scalar", self, move |x| x * c as T, move |g| g * c as T))
    }

    /// `x / c`.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn div_scalar(&self, c: f64) -> Result<Tensor> {
        on_gpu!(unary("div_scalar", self, c));
        with_float!("div_scalar", self.dtype(), T => linear::<T>("div_scalar", self, move |x| x / c as T, move |g| g / c as T))
    }

    /// `x` to the power `c`. The slope is zero where `c` is zero.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the elements are floats.
    pub fn pow_scalar(&self, c: f64) -> Result<Tensor> {
        if c == 2.0 {
            on_gpu!(unary("square", self, c));
        }
        with_float!("pow_scalar", self.dtype(), T => {
            let c = c as T;
            if c == 2.0 {
                from_input::<T>("pow_scalar", self, |x| x * x, |g, x| g * (x + x))
            } else {
                from_input::<T>("pow_scalar", self, move |x| x.powf(c), move |g, x| if c == 0.0 { 0.0 } else { g * (c * x.powf(c - 1.0)) })
            }
        })
    }
}

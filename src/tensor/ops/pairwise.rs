//! Functions of two operands, element by element, with numpy's broadcasting.

use super::kernel::{map, map_in_place, sum_to, update, zip, zip3};
use super::{Shared, on_gpu, record, same_dtype, with_float};
use crate::tensor::reuse::{Give, Kept};
use crate::tensor::{Data, Float, Tensor};
use crate::{ErrorKind, Result};

/// `f(g, x)`, in the storage of `g` if it is free and has the shape of the result.
fn combined<T: Float, U: Copy>(op: &str, g: Shared<T>, x: &Shared<U>, f: impl Fn(T, U) -> T) -> Result<Shared<T>> {
    if g.shape() == x.shape() {
        return Ok(update(g, x, f));
    }
    let result = zip(op, &g, x, f);
    g.give();
    result
}

fn add<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (x, y): (Shared<T>, Shared<T>) = (a.array()?, b.array()?);
    let sum = zip("add", &x, &y, |x, y| x + y)?;
    let (left, right) = (a.shape(), b.shape());
    Ok(record("add", sum, &[a, b], move |g, needs| {
        let first = needs.input(0).then(|| sum_to(g.clone(), &left));
        Ok(vec![first, needs.input(1).then(|| sum_to(g, &right))])
    }))
}

fn sub<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (x, y): (Shared<T>, Shared<T>) = (a.array()?, b.array()?);
    let difference = zip("sub", &x, &y, |x, y| x - y)?;
    let (left, right) = (a.shape(), b.shape());
    Ok(record("sub", difference, &[a, b], move |g, needs| {
        let first = needs.input(0).then(|| sum_to(g.clone(), &left));
        Ok(vec![first, needs.input(1).then(|| sum_to(map_in_place(g, |g: T| -g), &right))])
    }))
}

fn mul<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (x, y): (Shared<T>, Shared<T>) = (a.array()?, b.array()?);
    let product = zip("mul", &x, &y, |x, y| x * y)?;
    let (left, right) = (a.shape(), b.shape());
    // Each factor is saved only if the other one wants a gradient.
    let x = b.requires_grad().then(|| Kept::new(x));
    let y = a.requires_grad().then(|| Kept::new(y));
    Ok(record("mul", product, &[a, b], move |g, _| {
        let second = x.as_ref().map(|x| combined("mul", g.clone(), x, |g, x| g * x)).transpose()?;
        let first = y.as_ref().map(|y| combined("mul", g, y, |g, y| g * y)).transpose()?;
        Ok(vec![first.map(|g| sum_to(g, &left)), second.map(|g| sum_to(g, &right))])
    }))
}

fn div<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (x, y): (Shared<T>, Shared<T>) = (a.array()?, b.array()?);
    let quotient = zip("div", &x, &y, |x, y| x / y)?;
    let (left, right) = (a.shape(), b.shape());
    let (x, y) = (b.requires_grad().then(|| Kept::new(x)), Kept::new(y));
    Ok(record("div", quotient, &[a, b], move |g, needs| {
        let second = x
            .as_ref()
            .map(|x| zip3("div", &g, x, &y, |g, x, y| -g * ((x / y) / y)))
            .transpose()?;
        let first = needs.input(0).then(|| combined("div", g, &y, |g, y| g / y)).transpose()?;
        Ok(vec![first.map(|g| sum_to(g, &left)), second.map(|g| sum_to(g, &right))])
    }))
}

/// An operation whose slopes `da(x, y)` and `db(x, y)` need both operands.
fn with_slopes<T: Float>(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    f: impl Fn(T, T) -> T,
    da: impl Fn(T, T) -> T + Send + 'static,
    db: impl Fn(T, T) -> T + Send + 'static,
) -> Result<Tensor> {
    let (x, y): (Shared<T>, Shared<T>) = (a.array()?, b.array()?);
    let output = zip(op, &x, &y, f)?;
    let (x, y) = (Kept::new(x), Kept::new(y));
    Ok(record(op, output, &[a, b], move |g, needs| {
        let first = needs.input(0).then(|| zip3(op, &g, &x, &y, |g, x, y| g * da(x, y))).transpose()?;
        let second = needs.input(1).then(|| zip3(op, &g, &x, &y, |g, x, y| g * db(x, y))).transpose()?;
        g.give();
        Ok(vec![first.map(|g| sum_to(g, x.shape())), second.map(|g| sum_to(g, y.shape()))])
    }))
}

fn pow<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let zero = T::zero();
    let base = move |x: T, y: T| if y == zero { zero } else { y * x.powf(y - T::one()) };
    let exponent = move |x: T, y: T| if x == zero && y >= zero { zero } else { x.powf(y) * x.ln() };
    with_slopes("pow", a, b, T::powf, base, exponent)
}

/// Nothing for the one that loses, a half if they are equal; so ties share the gradient, and both get all of it where one is NaN.
fn share<T: Float>(loses: bool, equal: bool) -> T {
    T::of(if equal { 0.5 } else { f64::from(u8::from(!loses)) })
}

fn maximum<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let larger = |x: T, y: T| if x > y || x.is_nan() { x } else { y };
    with_slopes("maximum", a, b, larger, |x, y| share(x < y, x == y), |x, y| share(y < x, x == y))
}

fn minimum<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let smaller = |x: T, y: T| if x < y || x.is_nan() { x } else { y };
    with_slopes("minimum", a, b, smaller, |x, y| share(x > y, x == y), |x, y| share(y > x, x == y))
}

fn select<T: Float>(condition: &Shared<bool>, a: &Tensor, b: &Tensor, inputs: &[&Tensor]) -> Result<Tensor> {
    let (x, y): (Shared<T>, Shared<T>) = (a.array()?, b.array()?);
    let output = zip3("where", condition, &x, &y, |c, x, y| if c { x } else { y })?;
    let (left, right) = (a.shape(), b.shape());
    let condition = condition.clone();
    Ok(record("where", output, inputs, move |g, needs| {
        let zero = T::zero();
        let first = needs
            .input(1)
            .then(|| combined("where", g.clone(), &condition, |g, c| if c { g } else { zero }))
            .transpose()?;
        let second = needs
            .input(2)
            .then(|| combined("where", g, &condition, |g, c| if c { zero } else { g }))
            .transpose()?;
        Ok(vec![None, first.map(|g| sum_to(g, &left)), second.map(|g| sum_to(g, &right))])
    }))
}

/// Declares a method of two operands.
macro_rules! method {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// [`ErrorKind::DType`] unless both are floats of one dtype, [`ErrorKind::Shape`] if their shapes don't broadcast.
        pub fn $name(&self, other: &Tensor) -> Result<Tensor> {
            const OP: &str = stringify!($name);
            same_dtype(OP, self, &[other])?;
            on_gpu!(crate::tensor::device::ops::binary(OP, self, other));
            with_float!(OP, self.dtype(), T => $name::<T>(self, other))
        }
    };
}

impl Tensor {
    method! {
        /// The sum, element by element.
        add
    }
    method! {
        /// The difference, element by element.
        sub
    }
    method! {
        /// The product, element by element.
        mul
    }
    method! {
        /// The quotient, element by element.
        div
    }
    method! {
        /// This to the power of the other, element by element. As in torch, the gradient of the base is zero where the
        /// exponent is zero, and that of the exponent is zero where the base is zero and the exponent isn't negative.
        pow
    }
    method! {
        /// The larger one, element by element. Equal ones share the gradient, half each. NaN wins, and then both get the gradient.
        maximum
    }
    method! {
        /// The smaller one, element by element. Equal ones share the gradient, half each. NaN wins, and then both get the gradient.
        minimum
    }

    /// Elements of `a` where this condition holds, and of `b` elsewhere. The condition is bool, or i64 and holds where it
    /// isn't zero. All three broadcast.
    ///
    /// ```
    /// use rankgrad::tensor::Tensor;
    /// # fn main() -> rankgrad::Result<()> {
    /// let (a, b) = (Tensor::from_vec(vec![1.0, 2.0], 2)?, Tensor::scalar(0.0));
    /// assert_eq!(Tensor::from_vec(vec![true, false], 2)?.where_(&a, &b)?.to_vec::<f64>()?, [1.0, 0.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::DType`] if the condition is a float, or unless `a` and `b` are floats of one dtype;
    /// [`ErrorKind::Shape`] if the shapes don't broadcast.
    pub fn where_(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        const OP: &str = "where";
        let condition = match self.host_data()? {
            Data::Bool(condition) => condition,
            Data::I64(condition) => map(&condition, |c| c != 0),
            other => {
                return Err(ErrorKind::DType {
                    op: OP.into(),
                    expected: "bool or i64".into(),
                    found: other.dtype().to_string(),
                }
                .into());
            }
        };
        same_dtype(OP, a, &[b])?;
        with_float!(OP, a.dtype(), T => select::<T>(&condition, a, b, &[self, a, b]))
    }
}

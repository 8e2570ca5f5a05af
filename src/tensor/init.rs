//! Initial values of parameters, drawn from a seed.
//!
//! Results are f64; `cast` gives f32. One seed gives the same values on any rank, number of ranks and platform: numbers
//! come from ChaCha8 and functions from software, not from the platform's libm. [`orthogonal`] also depends on LAPACK.

use ndarray::{Array2, ArrayD, Axis, Ix2, IxDyn};
use ndarray_linalg::QR;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::{IntoShape, Tensor, shape};
use crate::{Error, ErrorKind, Result};

/// Random numbers of one seed.
struct Draws {
    rng: ChaCha8Rng,
    /// The second of the last pair of normal numbers.
    spare: Option<f64>,
}

impl Draws {
    fn new(seed: u64) -> Self {
        Draws {
            rng: ChaCha8Rng::seed_from_u64(seed),
            spare: None,
        }
    }

    /// Uniform in `[0, 1)`, a multiple of 2⁻⁵³.
    fn unit(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Standard normal, in pairs (Box and Muller, 1958).
    fn normal(&mut self) -> f64 {
        if let Some(second) = self.spare.take() {
            return second;
        }
        // 1 - u is in (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * libm::log(1.0 - self.unit())).sqrt();
        let (sin, cos) = libm::sincos(std::f64::consts::TAU * self.unit());
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// Standard normal given that it lies within `low..=high` (Robert, 1995, Statistics and Computing 5, 121-125): by
    /// rejection from the normal, the uniform or the shifted exponential distribution, so it is exact in the tails too.
    fn truncated(&mut self, low: f64, high: f64) -> f64 {
        if high < 0.0 {
            return -self.truncated(-high, -low);
        }
        if low <= 0.0 {
            if high - low > std::f64::consts::TAU.sqrt() {
                return self.reject(|draws| draws.normal(), |z| if low <= z && z <= high { 1.0 } else { 0.0 });
            }
            return self.reject(|draws| low + (high - low) * draws.unit(), |z| libm::exp(-0.5 * z * z));
        }
        let root = libm::hypot(low, 2.0);
        let rate = 0.5 * (low + root);
        let width = libm::exp(0.25 * low * (low - root) + 0.5) / rate;
        if high - low < width {
            return self.reject(
                |draws| low + (high - low) * draws.unit(),
                |z| libm::exp(0.5 * (low - z) * (low + z)),
            );
        }
        self.reject(
            |draws| low - libm::log(1.0 - draws.unit()) / rate,
            |z| {
                if z <= high {
                    libm::exp(-0.5 * (z - rate) * (z - rate))
                } else {
                    0.0
                }
            },
        )
    }

    fn reject(&mut self, propose: impl Fn(&mut Self) -> f64, accept: impl Fn(f64) -> f64) -> f64 {
        loop {
            let z = propose(self);
            if self.unit() < accept(z) {
                return z;
            }
        }
    }
}

fn fill(op: &str, shape: &[usize], mut draw: impl FnMut() -> f64) -> Result<Tensor> {
    let count = shape::count(op, shape)?;
    Tensor::from_vec((0..count).map(|_| draw()).collect(), shape)
}

fn argument(op: &str, what: String) -> Error {
    ErrorKind::Argument { op: op.into(), what }.into()
}

fn check_scale(op: &str, name: &str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(argument(op, format!("{name} = {value} must be finite and not negative")))
}

/// Uniform in `[low, high)`.
///
/// # Errors
/// [`ErrorKind::Argument`] unless both are finite and `low <= high`.
pub fn uniform(shape: impl IntoShape, low: f64, high: f64, seed: u64) -> Result<Tensor> {
    if !(low <= high && (high - low).is_finite()) {
        return Err(argument("uniform", format!("bounds {low} and {high} must be finite and in order")));
    }
    let mut draws = Draws::new(seed);
    fill("uniform", &shape.into_shape(), || low + (high - low) * draws.unit())
}

/// Normal with this mean and standard deviation.
///
/// # Errors
/// [`ErrorKind::Argument`] unless both are finite and the deviation isn't negative.
pub fn normal(shape: impl IntoShape, mean: f64, std: f64, seed: u64) -> Result<Tensor> {
    check_scale("normal", "std", std)?;
    check_scale("normal", "|mean|", mean.abs())?;
    let mut draws = Draws::new(seed);
    fill("normal", &shape.into_shape(), || mean + std * draws.normal())
}

/// Normal with this mean and standard deviation, given that it lies within `low..=high` (either may be infinite). The
/// bounds are values, not multiples of the deviation. Exact also where the bounds are far from the mean.
///
/// # Errors
/// [`ErrorKind::Argument`] unless mean and deviation are finite, the deviation is positive, and `low < high`.
pub fn truncated_normal(shape: impl IntoShape, mean: f64, std: f64, low: f64, high: f64, seed: u64) -> Result<Tensor> {
    const OP: &str = "truncated_normal";
    check_scale(OP, "std", std)?;
    check_scale(OP, "|mean|", mean.abs())?;
    let (from, to) = ((low - mean) / std, (high - mean) / std);
    if !(std > 0.0 && from < to && from < f64::INFINITY && to > f64::NEG_INFINITY) {
        return Err(argument(
            OP,
            format!("std = {std} must be positive, and bounds {low} and {high} in order"),
        ));
    }
    let mut draws = Draws::new(seed);
    fill(OP, &shape.into_shape(), || {
        (mean + std * draws.truncated(from, to)).clamp(low, high)
    })
}

/// Number of inputs plus outputs of a weight of shape `[inputs, outputs, ..]` or `[outputs, inputs, ..]`; further axes
/// multiply both.
fn fans(op: &str, shape: &[usize]) -> Result<f64> {
    match shape {
        [first, second, rest @ ..] => Ok((first + second) as f64 * rest.iter().product::<usize>() as f64),
        _ => Err(argument(op, format!("shape {shape:?} needs two axes, for inputs and outputs"))),
    }
}

/// Uniform within `± gain √(6 / (inputs + outputs))` (Glorot and Bengio, 2010). The first two axes are inputs and outputs,
/// in either order.
///
/// # Errors
/// [`ErrorKind::Argument`] for fewer than two axes or a gain that isn't finite.
pub fn xavier_uniform(shape: impl IntoShape, gain: f64, seed: u64) -> Result<Tensor> {
    let shape = shape.into_shape();
    check_scale("xavier_uniform", "gain", gain)?;
    let bound = gain * (6.0 / fans("xavier_uniform", &shape)?.max(1.0)).sqrt();
    uniform(shape, -bound, bound, seed)
}

/// Normal with deviation `gain √(2 / (inputs + outputs))` (Glorot and Bengio, 2010). The first two axes are inputs and
/// outputs, in either order.
///
/// # Errors
/// [`ErrorKind::Argument`] for fewer than two axes or a gain that isn't finite.
pub fn xavier_normal(shape: impl IntoShape, gain: f64, seed: u64) -> Result<Tensor> {
    let shape = shape.into_shape();
    let std = gain * (2.0 / fans("xavier_normal", &shape)?.max(1.0)).sqrt();
    normal(shape, 0.0, std, seed)
}

/// The gain that keeps the variance through a ReLU, or a leaky one with this slope: `√(2 / (1 + slope²))` (He et al.,
/// 2015).
pub fn relu_gain(slope: f64) -> f64 {
    (2.0 / (1.0 + slope * slope)).sqrt()
}

/// Uniform within `± gain √(3 / fan)` (He et al., 2015), where `fan` is the number of inputs of each output, or, to keep
/// the variance of gradients, the number of outputs of each input.
///
/// # Errors
/// [`ErrorKind::Argument`] if `fan` is zero or the gain isn't finite.
pub fn kaiming_uniform(shape: impl IntoShape, fan: usize, gain: f64, seed: u64) -> Result<Tensor> {
    let bound = 3.0_f64.sqrt() * kaiming("kaiming_uniform", fan, gain)?;
    uniform(shape, -bound, bound, seed)
}

/// Normal with deviation `gain / √fan` (He et al., 2015); `fan` as in [`kaiming_uniform`].
///
/// # Errors
/// [`ErrorKind::Argument`] if `fan` is zero or the gain isn't finite.
pub fn kaiming_normal(shape: impl IntoShape, fan: usize, gain: f64, seed: u64) -> Result<Tensor> {
    normal(shape, 0.0, kaiming("kaiming_normal", fan, gain)?, seed)
}

fn kaiming(op: &str, fan: usize, gain: f64) -> Result<f64> {
    check_scale(op, "gain", gain)?;
    if fan == 0 {
        return Err(argument(op, "fan = 0 must be positive".into()));
    }
    Ok(gain / (fan as f64).sqrt())
}

/// A random matrix with orthonormal columns, or rows if there are fewer of them; axes after the first count as one
/// (Saxe et al., 2014). The QR factorisation of a normal matrix, with signs that make the distribution uniform.
///
/// ```
/// let q = rankgrad::tensor::init::orthogonal((4, 3), 7)?;
/// let gram = q.transpose(0, 1)?.matmul(&q)?.to_vec::<f64>()?;
/// assert!((gram[0] - 1.0).abs() < 1e-14 && gram[1].abs() < 1e-14);
/// # Ok::<(), rankgrad::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Argument`] for fewer than two axes, or if LAPACK fails.
pub fn orthogonal(shape: impl IntoShape, seed: u64) -> Result<Tensor> {
    const OP: &str = "orthogonal";
    let shape = shape.into_shape();
    let [rows, rest @ ..] = &shape[..] else {
        return Err(argument(OP, "a scalar has no columns".into()));
    };
    if rest.is_empty() {
        return Err(argument(OP, format!("shape {shape:?} needs two axes")));
    }
    let columns = shape::count(OP, rest)?;
    if rows * columns == 0 {
        return Tensor::from_vec(Vec::<f64>::new(), shape);
    }
    let tall = (*rows.max(&columns), *rows.min(&columns));
    let random: Array2<f64> = normal(tall, 0.0, 1.0, seed)?
        .into_array()?
        .into_dimensionality::<Ix2>()
        .map_err(|e| argument(OP, e.to_string()))?;
    let (mut q, r) = random.qr().map_err(|e| argument(OP, format!("QR factorisation: {e}")))?;
    for (mut column, &diagonal) in q.axis_iter_mut(Axis(1)).zip(r.diag()) {
        if diagonal < 0.0 {
            column.mapv_inplace(|x| -x);
        }
    }
    let q = if *rows < columns { q.reversed_axes() } else { q };
    let flat: Vec<f64> = q.iter().copied().collect();
    let whole = ArrayD::from_shape_vec(IxDyn(&shape), flat).map_err(|e| argument(OP, e.to_string()))?;
    Ok(Tensor::from_array(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(x: &[f64]) -> (f64, f64) {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        (mean, x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n)
    }

    #[test]
    fn one_seed_gives_the_same_values() {
        let draw = |seed| normal(5, 0.0, 1.0, seed).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        // The numbers themselves, so that a change of the stream is noticed.
        let first = uniform(2, 0.0, 1.0, 0).unwrap().to_vec::<f64>().unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        assert_eq!(first[0], (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64);
    }

    #[test]
    fn moments_are_right() {
        let n = 200_000;
        let (mean, variance) = moments(&normal(n, 2.0, 3.0, 5).unwrap().to_vec().unwrap());
        assert!((mean - 2.0).abs() < 0.03 && (variance - 9.0).abs() < 0.1, "{mean} {variance}");
        let (mean, variance) = moments(&xavier_uniform((n / 10, 10), 1.0, 5).unwrap().to_vec().unwrap());
        assert!(
            mean.abs() < 1e-4 && (variance * (n / 10 + 10) as f64 / 2.0 - 1.0).abs() < 0.02,
            "{mean} {variance}"
        );
        let (_, variance) = moments(&kaiming_normal((n / 10, 10), 10, relu_gain(0.0), 5).unwrap().to_vec().unwrap());
        assert!((variance - 0.2).abs() < 0.01, "{variance}");
    }

    #[test]
    fn truncated_normal_is_right_in_the_tails() {
        // Mean of a standard normal above `low` by the asymptotic series of Mills' ratio, whose next term is below 1e-6.
        let above = |low: f64| {
            let s = 1.0 / (low * low);
            low / (1.0 - s + 3.0 * s * s - 15.0 * s.powi(3) + 105.0 * s.powi(4) - 945.0 * s.powi(5))
        };
        for low in [8.0, 30.0, 1e6] {
            let draws = truncated_normal(100_000, 0.0, 1.0, low, f64::INFINITY, 3)
                .unwrap()
                .to_vec::<f64>()
                .unwrap();
            assert!(draws.iter().all(|&x| x >= low));
            let excess = draws.iter().map(|x| x - low).sum::<f64>() / draws.len() as f64 * low;
            let expected = (above(low) - low) * low;
            assert!((excess - expected).abs() < 0.02, "{low}: {excess} {expected}");
        }
        // A narrow window in the left tail: density falls by e^(-10 · 0.1) over it.
        let draws = truncated_normal(100_000, 1.0, 2.0, -19.2, -19.0, 4)
            .unwrap()
            .to_vec::<f64>()
            .unwrap();
        assert!(draws.iter().all(|x| (-19.2..=-19.0).contains(x)));
        let near = draws.iter().filter(|&&x| x > -19.1).count() as f64 / 1e5;
        assert!((near - 0.6225).abs() < 0.01, "{near}");
        assert!(truncated_normal(3, 0.0, 0.0, -1.0, 1.0, 0).is_err());
        let (mean, variance) = moments(&truncated_normal(200_000, 0.0, 1.0, -2.0, 2.0, 3).unwrap().to_vec().unwrap());
        assert!(mean.abs() < 0.01 && (variance - 0.7737).abs() < 0.01, "{mean} {variance}");
    }

    #[test]
    fn orthogonal_is() {
        for shape in [vec![6, 4], vec![4, 6], vec![5, 5], vec![3, 2, 4]] {
            let q = orthogonal(&shape, 11).unwrap();
            assert_eq!(q.shape(), shape);
            let flat = q.reshape(&[shape[0] as i64, -1]).unwrap();
            let transposed = flat.transpose(0, 1).unwrap();
            let wide = flat.shape()[0] <= flat.shape()[1];
            let gram = if wide { flat.matmul(&transposed) } else { transposed.matmul(&flat) }.unwrap();
            let n = gram.shape()[0];
            let gram = gram.to_vec::<f64>().unwrap();
            assert!((0..n * n).all(|i| (gram[i] - f64::from(i / n == i % n)).abs() < 1e-13), "{gram:?}");
        }
    }

    #[test]
    fn bad_arguments_are_errors() {
        assert!(uniform(3, 1.0, 0.0, 0).is_err());
        assert!(uniform(3, f64::NAN, 0.0, 0).is_err());
        assert!(normal(3, 0.0, -1.0, 0).is_err());
        assert!(truncated_normal(3, 0.0, 0.0, 0.0, 1.0, 0).is_err());
        assert!(truncated_normal(3, 0.0, 1.0, 2.0, 1.0, 0).is_err());
        assert!(xavier_uniform(3, 1.0, 0).is_err());
        assert!(kaiming_normal((3, 3), 0, 1.0, 0).is_err());
        assert!(orthogonal(3, 0).is_err());
    }
}

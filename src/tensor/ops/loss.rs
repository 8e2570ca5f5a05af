//! Losses.

use super::index::indices;
use super::kernel::{array, elements, map, packed, sum as sum_elements, sum_to, zip};
use super::softmax::{Exponentials, with_lanes};
use super::{Shared, record, record_any, same_dtype, with_float};
use crate::Result;
use crate::tensor::reuse::{self, Give, Kept};
use crate::tensor::shape::{self, Lanes};
use crate::tensor::{Device, Float, Gradient, Tensor};

/// How a loss of many elements becomes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduction {
    /// Their mean.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// They stay as they are.
    None,
}

impl Reduction {
    /// The reduced losses, in this shape where they stay.
    fn reduce<T: Float>(self, losses: Vec<T>, shape: &[usize]) -> Shared<T> {
        let reduced = match self {
            Reduction::Mean => sum_elements(&losses) / T::of(losses.len() as f64),
            Reduction::Sum => sum_elements(&losses),
            Reduction::None => return array(shape, losses).into_shared(),
        };
        losses.give();
        array(&[], vec![reduced]).into_shared()
    }

    /// The gradient of each of `count` losses from that of the reduced loss.
    fn spread<T: Float>(self, g: &Shared<T>, count: usize) -> Vec<T> {
        let g = packed(g);
        match (self, elements(&g)) {
            (Reduction::Mean, &[g]) => vec![g / T::of(count as f64); count],
            (Reduction::Sum, &[g]) => vec![g; count],
            (_, all) => all.to_vec(),
        }
    }
}

/// Targets of a classification, and where they point to in the input.
struct Classes {
    lanes: Lanes,
    /// Shape of the targets.
    shape: Vec<usize>,
    /// The class of each lane.
    targets: Vec<usize>,
}

impl Classes {
    /// Classes lie along axis 1, or along the only axis.
    fn new(op: &str, input: &Tensor, targets: &Tensor) -> Result<Self> {
        let (from, to) = (input.shape(), targets.shape());
        let axis = shape::axis(op, i64::from(from.len() > 1), from.len())?;
        let mut shape = from.clone();
        shape.remove(axis);
        if shape != to {
            return Err(shape::mismatch(
                op,
                &from,
                &to,
                "targets have the input's shape without the axis of classes (1, or the only one)",
            ));
        }
        let targets = indices(op, targets, from[axis])?;
        Ok(Classes {
            lanes: Lanes::new(&from, axis),
            shape,
            targets,
        })
    }

    /// Place of each lane's target in the input.
    fn places(&self) -> impl Iterator<Item = usize> {
        let Lanes { length, inner, .. } = self.lanes;
        self.targets
            .iter()
            .enumerate()
            .map(move |(lane, &k)| (lane / inner * length + k) * inner + lane % inner)
    }
}

fn nll<T: Float>(input: &Tensor, targets: &Tensor, reduction: Reduction) -> Result<Tensor> {
    let classes = Classes::new("nll", input, targets)?;
    let logs = packed(&input.array::<T>()?);
    let losses = classes.places().map(|place| -elements(&logs)[place]).collect();
    let shape = input.shape();
    Ok(record(
        "nll",
        reduction.reduce(losses, &classes.shape),
        &[input],
        move |g: Shared<T>, _| {
            let mut gradient = reuse::filled(shape.iter().product(), T::zero());
            for (place, g) in classes.places().zip(reduction.spread(&g, classes.targets.len())) {
                gradient[place] = -g;
            }
            Ok(vec![Some(array(&shape, gradient).into_shared())])
        },
    ))
}

fn cross_entropy<T: Float>(input: &Tensor, targets: &Tensor, reduction: Reduction) -> Result<Tensor> {
    let classes = Classes::new("cross_entropy", input, targets)?;
    if let Some(scored) = crate::tensor::device::ops::cross_entropy(input, &classes.targets)? {
        // Scores are on a GPU, their losses here.
        let losses = scored.rows().iter().map(|&(sum, score)| T::of(sum).ln() - T::of(score)).collect();
        let output = T::wrap(reduction.reduce(losses, &classes.shape));
        return Ok(record_any("cross_entropy", output, &[input], move |g, _| {
            let losses = reduction.spread(&T::take(g.to(Device::Cpu)?)?, classes.targets.len());
            let losses: Vec<f64> = losses.into_iter().map(|g| g.to_f64().unwrap_or(f64::NAN)).collect();
            Ok(vec![Some(Gradient::Dense(scored.gradient(&losses)?))])
        }));
    }
    let lanes = classes.lanes;
    let input_array = packed(&input.array::<T>()?);
    let x = elements(&input_array);
    let Exponentials { values, shifts, sums } = Exponentials::new(x, lanes);
    let values = Kept::new(values);
    let losses = classes
        .places()
        .zip(shifts.iter().zip(&sums))
        .map(|(place, (&shift, sum))| sum.ln() - (x[place] - shift))
        .collect();
    let shape = input.shape();
    Ok(record(
        "cross_entropy",
        reduction.reduce(losses, &classes.shape),
        &[input],
        move |g: Shared<T>, _| {
            // Softmax minus one at the target, times the loss's gradient.
            let g = reduction.spread(&g, classes.targets.len());
            let scales: Vec<T> = g.iter().zip(&sums).map(|(&g, &sum)| g / sum).collect();
            let mut gradient = reuse::copied(&values);
            with_lanes(&mut gradient, lanes, &scales, |x, scale| *x *= scale);
            classes.places().zip(&g).for_each(|(place, &g)| gradient[place] -= g);
            Ok(vec![Some(array(&shape, gradient).into_shared())])
        },
    ))
}

fn mse<T: Float>(input: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
    let (x, y): (Shared<T>, Shared<T>) = (input.array()?, target.array()?);
    let difference = Kept::new(packed(&zip("mse", &x, &y, |x, y| x - y)?));
    let losses = reuse::collect(elements(&difference).iter().map(|&d| d * d));
    let (left, right) = (input.shape(), target.shape());
    let output = reduction.reduce(losses, difference.shape());
    Ok(record("mse", output, &[input, target], move |g: Shared<T>, needs| {
        let g = reduction.spread(&g, difference.len());
        let gradient = reuse::collect(g.iter().zip(elements(&difference)).map(|(&g, &d)| g * (d + d)));
        let gradient: Shared<T> = array(difference.shape(), gradient).into_shared();
        let second = needs.input(1).then(|| sum_to(map(&gradient, |g: T| -g), &right));
        Ok(vec![needs.input(0).then(|| sum_to(gradient, &left)), second])
    }))
}

impl Tensor {
    /// The cross entropy of class scores: `-log_softmax(x)[target]`. Classes lie along axis 1 (along the only axis if there
    /// is one); targets are i64 and have the shape without it.
    ///
    /// ```
    /// use rankgrad::tensor::{Reduction, Tensor};
    /// # fn main() -> rankgrad::Result<()> {
    /// let scores = Tensor::from_vec(vec![0.0, 0.0, 1.0, 1.0], (2, 2))?;
    /// let targets = Tensor::from_vec(vec![0_i64, 1], 2)?;
    /// let loss = scores.cross_entropy_with(&targets, Reduction::Sum)?;
    /// assert!((loss.item::<f64>()? - 2.0 * 2_f64.ln()).abs() < 1e-15);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless the scores are floats and the targets i64, [`Shape`](crate::ErrorKind::Shape) if
    /// the targets' shape doesn't fit, [`Index`](crate::ErrorKind::Index) for a class that isn't there.
    pub fn cross_entropy_with(&self, targets: &Tensor, reduction: Reduction) -> Result<Tensor> {
        with_float!("cross_entropy", self.dtype(), T => cross_entropy::<T>(self, targets, reduction))
    }

    /// The mean [cross entropy](Tensor::cross_entropy_with).
    ///
    /// # Errors
    /// Those of [`Tensor::cross_entropy_with`].
    pub fn cross_entropy(&self, targets: &Tensor) -> Result<Tensor> {
        self.cross_entropy_with(targets, Reduction::Mean)
    }

    /// The negative log likelihood `-x[target]` of log probabilities; axes as in [`Tensor::cross_entropy_with`].
    ///
    /// # Errors
    /// Those of [`Tensor::cross_entropy_with`].
    pub fn nll_with(&self, targets: &Tensor, reduction: Reduction) -> Result<Tensor> {
        with_float!("nll", self.dtype(), T => nll::<T>(self, targets, reduction))
    }

    /// The mean [negative log likelihood](Tensor::nll_with).
    ///
    /// # Errors
    /// Those of [`Tensor::cross_entropy_with`].
    pub fn nll(&self, targets: &Tensor) -> Result<Tensor> {
        self.nll_with(targets, Reduction::Mean)
    }

    /// The squared difference from `target`. Shapes broadcast.
    ///
    /// # Errors
    /// [`DType`](crate::ErrorKind::DType) unless both are floats of one dtype, [`Shape`](crate::ErrorKind::Shape) if their shapes
    /// don't broadcast.
    pub fn mse_with(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        same_dtype("mse", self, &[target])?;
        with_float!("mse", self.dtype(), T => mse::<T>(self, target, reduction))
    }

    /// The mean [squared difference](Tensor::mse_with).
    ///
    /// # Errors
    /// Those of [`Tensor::mse_with`].
    pub fn mse(&self, target: &Tensor) -> Result<Tensor> {
        self.mse_with(target, Reduction::Mean)
    }
}

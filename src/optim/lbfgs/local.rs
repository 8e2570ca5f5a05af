//! L-BFGS over parameters of this rank.

use super::part::{Ask, Direction, Gathered, Part, Slope, add};
use super::{Driver, Lbfgs, LbfgsReport, Vectors};
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

/// L-BFGS over parameters of this rank. Local; it blocks on nothing but the closure.
///
/// ```
/// use rankgrad::optim::{Lbfgs, LbfgsOptimizer, LineSearch};
/// use rankgrad::tensor::Tensor;
///
/// let x = Tensor::from_vec(vec![3.0, -4.0], 2)?.parameter()?;
/// let mut optimizer = LbfgsOptimizer::new(Lbfgs::new(1.0).line_search_fn(LineSearch::StrongWolfe), vec![x.clone()])?;
/// let report = optimizer.step(|| {
///     x.zero_grad();
///     let loss = x.sub_scalar(1.0)?.pow_scalar(2.0)?.sum()?; // its minimum is at 1
///     loss.backward()?;
///     loss.item()
/// })?;
/// assert_eq!(report.first_loss, 29.0);
/// assert!(report.loss < 1e-12 && x.to_vec::<f64>()?.iter().all(|x| (x - 1.0).abs() < 1e-6));
/// # Ok::<(), rankgrad::Error>(())
/// ```
#[derive(Debug)]
pub struct LbfgsOptimizer {
    driver: Driver,
    part: Part,
}

impl LbfgsOptimizer {
    /// An optimizer of one group, as L-BFGS has it. Parameters may differ in dtype.
    ///
    /// # Errors
    /// As [`Optimizer::new`](crate::optim::Optimizer::new).
    pub fn new(options: Lbfgs, parameters: Vec<Tensor>) -> Result<Self> {
        let driver = Driver::new(options)?;
        if parameters.is_empty() {
            return Err(ErrorKind::NoParameters {
                optimizer: Lbfgs::NAME.into(),
            }
            .into());
        }
        let places = (0..parameters.len()).collect();
        let part = Part::new(parameters, places)?;
        Ok(Self { driver, part })
    }

    /// The options.
    pub fn options(&self) -> &Lbfgs {
        self.driver.options()
    }

    /// One step of up to `max_iter` iterations. The closure clears the gradients, computes the loss, runs a backward, and
    /// returns the loss; it is called for each evaluation. A parameter without a gradient has a gradient of zeros; sparse
    /// gradients are made dense. The history is kept from step to step.
    ///
    /// # Errors
    /// What the closure returns; [`ErrorKind::GradientKind`] if a gradient has another dtype or shape than its parameter. The
    /// parameters are then where the loss was last accepted, and the next step starts without a history.
    pub fn step(&mut self, closure: impl FnMut() -> Result<f64>) -> Result<LbfgsReport> {
        self.driver.step(&mut Here {
            part: &mut self.part,
            closure,
        })
    }
}

struct Here<'a, F> {
    part: &'a mut Part,
    closure: F,
}

impl<F: FnMut() -> Result<f64>> Vectors for Here<'_, F> {
    fn evaluate(&mut self, ask: &Ask) -> Result<(f64, Gathered)> {
        let loss = (self.closure)()?;
        let mut all = Gathered::default();
        let rows = self.part.gather(ask, &Tensor::grad)?;
        rows.into_iter().for_each(|row| all.add(row));
        Ok((loss, all))
    }

    fn products(&mut self, pair: Option<f64>, number: u64) -> Result<Vec<f64>> {
        let mut all = vec![];
        self.part.products(pair, number)?.iter().for_each(|row| add(&mut all, row));
        Ok(all)
    }

    fn direct(&mut self, direction: &Direction) -> Result<Slope> {
        let mut all = Slope::default();
        self.part.direct(direction)?.into_iter().for_each(|row| all.add(row));
        Ok(all)
    }

    fn go(&mut self, t: f64) -> Result<()> {
        self.part.go(t)
    }
}

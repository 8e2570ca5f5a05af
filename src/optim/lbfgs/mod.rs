//! L-BFGS: a quasi-Newton method over a closure.
//!
//! A closure computes the loss at the parameters as they are; the vectors (gradients, the direction, the history) stay with the
//! parameters, wherever those are, and only numbers come to the [`driver`](Driver), which decides. Vectors of one rank are a
//! [`Part`]; the optimizer of one rank has one, that over ranks one on each owner.

mod driver;
mod history;
mod line_search;
mod local;
mod part;
mod saved;
mod shard;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use driver::{Driver, Vectors};
pub use local::LbfgsOptimizer;
pub(crate) use part::{Ask, Direction, Gathered, Part, Slope, add};
pub(crate) use saved::DriverState;

use super::options::{Check, options};
use super::table;
use crate::Result;

/// How a step length is found along a direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LineSearch {
    /// One that fulfils the strong Wolfe conditions with `c1` = 1e-4 and `c2` = 0.9, by bracketing and cubic interpolation
    /// (Nocedal and Wright, *Numerical Optimization*, 2nd edition, algorithms 3.5 and 3.6), in at most 25 tries.
    StrongWolfe,
}

options! {
    /// L-BFGS (Nocedal and Wright, *Numerical Optimization*, 2nd edition, algorithm 7.4), in the form of `torch.optim.LBFGS`.
    ///
    /// The direction is `-H g` with the approximate inverse Hessian `H` of the last `history_size` pairs `s` (moves) and `y`
    /// (changes of the gradient); a pair with `y.s <= 1e-10` is left out. The first step length is `lr * min(1, 1 / |g|_1)`,
    /// later ones are `lr`, from where a line search goes on if there is one. A step makes up to `max_iter` iterations.
    ///
    /// These are its options: [`LbfgsOptimizer`] applies them to parameters of this rank, and
    /// [`DistributedLbfgs`](crate::dist::DistributedLbfgs) to parameters of any ranks.
    ///
    /// Where torch would go on with numbers that aren't finite, this stops, or lets the line search shorten the step.
    Lbfgs {
        /// Learning rate: the step length, or the first one that the line search tries. At least 0.
        lr = 1.0;
        /// Most iterations of a step.
        max_iter: u64 = 20;
        /// Evaluations of the closure after which a step makes no further iteration; none given: 5/4 of `max_iter`.
        max_eval: [u64] = None;
        /// A step ends when no element of the gradient is larger.
        tolerance_grad: f64 = 1e-7;
        /// A step ends when no element moves by more, when the loss changes by less, or when the loss falls by less along
        /// the direction.
        tolerance_change: f64 = 1e-9;
        /// Most pairs that are kept, at least 1.
        history_size: usize = 100;
        /// How a step length is found; none given: it is `lr`.
        line_search_fn: [LineSearch] = None;
    }
}

impl Lbfgs {
    pub(crate) const NAME: &'static str = "LBFGS";

    /// Options by torch's names; those that are left out have torch's defaults.
    ///
    /// ```
    /// use rankgrad::optim::{Lbfgs, LineSearch};
    ///
    /// let named = Lbfgs::from_json(&serde_json::json!({"lr": 0.5, "line_search_fn": "strong_wolfe"}))?;
    /// assert_eq!(named, Lbfgs::new(0.5).line_search_fn(LineSearch::StrongWolfe));
    /// assert!(Lbfgs::from_json(&serde_json::json!({"momentum": 0.9})).is_err());
    /// # Ok::<(), rankgrad::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`UnknownOption`](crate::ErrorKind::UnknownOption), and [`OptionValue`](crate::ErrorKind::OptionValue) for a value of
    /// another type or out of its bound.
    pub fn from_json(options: &Value) -> Result<Self> {
        let defaults = serde_json::to_value(Self::default()).unwrap_or(Value::Null);
        let given = table::replace(Self::NAME, defaults, options, serde_json::from_value::<Self>)?;
        given.check()?;
        Ok(given)
    }

    /// Checks the options.
    ///
    /// # Errors
    /// [`OptionValue`](crate::ErrorKind::OptionValue), naming option, value and bound.
    pub fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        for (option, value) in [("tolerance_grad", self.tolerance_grad), ("tolerance_change", self.tolerance_change)] {
            check.that(!value.is_nan(), option, value, "a number")?;
        }
        check.that(self.history_size >= 1, "history_size", self.history_size, "at least 1")
    }

    fn most_evaluations(&self) -> u64 {
        self.max_eval.unwrap_or(self.max_iter.saturating_mul(5) / 4)
    }
}

/// Why a step of L-BFGS ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LbfgsStop {
    /// No element of the gradient is larger than `tolerance_grad`.
    Gradient,
    /// The loss would fall by less than `tolerance_change` along the direction.
    Slope,
    /// No element moved by more than `tolerance_change`.
    Move,
    /// The loss changed by less than `tolerance_change`.
    Loss,
    /// `max_iter` iterations are made.
    Iterations,
    /// `max_eval` evaluations are made.
    Evaluations,
    /// The loss or the gradient isn't finite. The move that led there in this step is undone.
    NotFinite,
}

/// What a step of L-BFGS did.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LbfgsReport {
    /// The loss before the step; it is what torch's `step` returns.
    pub first_loss: f64,
    /// The last loss that was computed at an accepted point: that of the parameters as they are now, except that without a
    /// line search the last of `max_iter` moves isn't evaluated any more.
    pub loss: f64,
    /// Largest magnitude in the gradient at that point.
    pub gradient: f64,
    /// Iterations of this step.
    pub iterations: u64,
    /// Calls of the closure in this step.
    pub evaluations: u64,
    /// Why it ended.
    pub stop: LbfgsStop,
}

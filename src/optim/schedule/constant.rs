//! Schedules that start with a share of the learning rate.

use super::options::schedule;
use super::{Course, Rates};
use crate::Result;
use crate::optim::options::Check;

schedule! {
    /// A share of the learning rate for some epochs, then all of it: `torch.optim.lr_scheduler.ConstantLR`.
    ///
    /// `lr *= factor` at `t = 0`, `lr /= factor` at `t = total_iters`.
    Constant() {
        /// The share, above 0 and at most 1.
        factor: f64 = 1.0 / 3.0;
        /// Epochs that it holds for.
        total_iters: u64 = 5;
    }
}

impl Course for Constant {
    fn check(&self) -> Result<()> {
        let fits = self.factor > 0.0 && self.factor <= 1.0;
        Check("Constant").that(fits, "factor", self.factor, "above 0 and at most 1")
    }

    fn at(&self, epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        Ok(match epoch {
            0 => now.with_lr(now.lr * self.factor),
            t if t == self.total_iters => now.with_lr(now.lr * (1.0 / self.factor)),
            _ => now,
        })
    }
}

schedule! {
    /// A share of the learning rate that changes evenly for some epochs: `torch.optim.lr_scheduler.LinearLR`.
    ///
    /// With `f(t) = start_factor + (end_factor - start_factor) * t / total_iters`: `lr *= start_factor` at `t = 0`, then `lr *= f(t) / f(t - 1)` up to
    /// `t = total_iters`.
    Linear() {
        /// The share at first, above 0 and at most 1.
        start_factor: f64 = 1.0 / 3.0;
        /// The share in the end, at least 0 and at most 1.
        end_factor: f64 = 1.0;
        /// Epochs that the change takes.
        total_iters: u64 = 5;
    }
}

impl Course for Linear {
    fn check(&self) -> Result<()> {
        let check = Check("Linear");
        let fits = self.start_factor > 0.0 && self.start_factor <= 1.0;
        check.that(fits, "start_factor", self.start_factor, "above 0 and at most 1")?;
        let fits = (0.0..=1.0).contains(&self.end_factor);
        check.that(fits, "end_factor", self.end_factor, "at least 0 and at most 1")
    }

    fn at(&self, epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        let change = self.end_factor - self.start_factor;
        let factor = match epoch {
            0 => self.start_factor,
            t if t > self.total_iters => return Ok(now),
            t => 1.0 + change / (self.total_iters as f64 * self.start_factor + (t - 1) as f64 * change),
        };
        Ok(now.with_lr(now.lr * factor))
    }
}

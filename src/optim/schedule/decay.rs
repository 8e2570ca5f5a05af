//! Schedules that decay from epoch to epoch.

use super::options::schedule;
use super::{Course, Rates};
use crate::Result;
use crate::optim::options::Check;

schedule! {
    /// Multiplies the learning rate by `gamma` every epoch: `torch.optim.lr_scheduler.ExponentialLR`.
    ///
    /// `lr *= gamma`.
    Exponential(
        /// The factor, above 0.
        gamma: f64,
    ) {}
}

impl Course for Exponential {
    fn check(&self) -> Result<()> {
        Check("Exponential").that(self.gamma > 0.0, "gamma", self.gamma, "above 0")
    }

    fn at(&self, epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        Ok(if epoch == 0 { now } else { now.with_lr(now.lr * self.gamma) })
    }
}

schedule! {
    /// Decays the learning rate to 0 along a power: `torch.optim.lr_scheduler.PolynomialLR`.
    ///
    /// `lr *= ((1 - t / total_iters) / (1 - (t - 1) / total_iters))^power` up to `t = total_iters`.
    Polynomial() {
        /// Epochs until 0, at least 1.
        total_iters: u64 = 5;
        /// The power, at least 0.
        power: f64 = 1.0;
    }
}

impl Course for Polynomial {
    fn check(&self) -> Result<()> {
        let check = Check("Polynomial");
        check.that(self.total_iters >= 1, "total_iters", self.total_iters, "at least 1")?;
        check.at_least_0("power", self.power)
    }

    fn at(&self, epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        if epoch == 0 || epoch > self.total_iters {
            return Ok(now);
        }
        let left = |t: u64| 1.0 - t as f64 / self.total_iters as f64;
        Ok(now.with_lr(now.lr * libm::pow(left(epoch) / left(epoch - 1), self.power)))
    }
}

//! Schedules that multiply now and then.

use super::options::schedule;
use super::{Course, Rates};
use crate::Result;
use crate::optim::arithmetic::powi;
use crate::optim::options::Check;

schedule! {
    /// Multiplies the learning rate by `gamma` every `step_size` epochs: `torch.optim.lr_scheduler.StepLR`.
    ///
    /// `lr *= gamma` at `t = step_size, 2 step_size, ..`.
    Step(
        /// Epochs between two changes, at least 1.
        step_size: u64,
    ) {
        /// The factor, above 0.
        gamma: f64 = 0.1;
    }
}

impl Course for Step {
    fn check(&self) -> Result<()> {
        let check = Check("Step");
        check.that(self.step_size >= 1, "step_size", self.step_size, "at least 1")?;
        check.that(self.gamma > 0.0, "gamma", self.gamma, "above 0")
    }

    fn at(&self, epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        let changes = epoch > 0 && epoch.is_multiple_of(self.step_size);
        Ok(if changes { now.with_lr(now.lr * self.gamma) } else { now })
    }
}

schedule! {
    /// Multiplies the learning rate by `gamma` at each milestone: `torch.optim.lr_scheduler.MultiStepLR`.
    ///
    /// `lr *= gamma^n` where `t` is in `milestones` `n` times.
    MultiStep(
        /// The epochs of changes; one that is listed twice multiplies twice.
        milestones: Vec<u64>,
    ) {
        /// The factor, above 0.
        gamma: f64 = 0.1;
    }
}

impl Course for MultiStep {
    fn check(&self) -> Result<()> {
        Check("MultiStep").that(self.gamma > 0.0, "gamma", self.gamma, "above 0")
    }

    fn at(&self, epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        match self.milestones.iter().filter(|&&milestone| milestone == epoch).count() {
            0 => Ok(now),
            n => Ok(now.with_lr(now.lr * powi(self.gamma, n as u64))),
        }
    }
}

//! Less when nothing gets better.

use serde::{Deserialize, Serialize};

use super::options::schedule;
use super::{Course, Rates};
use crate::Result;
use crate::optim::options::Check;

/// Which way a metric is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlateauMode {
    /// Smaller.
    Min,
    /// Larger.
    Max,
}

/// How much better a metric has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThresholdMode {
    /// By a share of the best so far.
    Rel,
    /// By a difference.
    Abs,
}

schedule! {
    /// Multiplies the learning rate by `factor` when a metric hasn't got better for more than `patience` epochs:
    /// `torch.optim.lr_scheduler.ReduceLROnPlateau`.
    ///
    /// `lr = max(lr * factor, min_lr)`, unless that changes it by no more than `eps`. It takes a metric every epoch:
    /// [`Scheduler::step_with`](super::Scheduler::step_with).
    ReduceLROnPlateau() {
        /// Which way the metric is better.
        mode: PlateauMode = PlateauMode::Min;
        /// The factor, at least 0 and below 1.
        factor: f64 = 0.1;
        /// Epochs without a better metric that are let pass.
        patience: u64 = 10;
        /// How much better counts as better, at least 0.
        threshold: f64 = 1e-4;
        /// Whether `threshold` is a share or a difference.
        threshold_mode: ThresholdMode = ThresholdMode::Rel;
        /// Epochs after a change that don't count.
        cooldown: u64 = 0;
        /// The least learning rate, at least 0.
        min_lr: f64 = 0.0;
        /// Changes up to this size aren't made, at least 0.
        eps: f64 = 1e-8;
    }
}

/// What [`ReduceLROnPlateau`] remembers of the metrics so far.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Watch {
    /// The best metric, once there was one.
    pub best: Option<f64>,
    /// Epochs since it.
    pub num_bad_epochs: u64,
    /// Epochs that still don't count.
    pub cooldown_counter: u64,
}

impl ReduceLROnPlateau {
    /// Looks at a metric; whether the learning rate is to be reduced.
    pub(super) fn observe(&self, watch: &mut Watch, metric: f64) -> bool {
        if self.is_better(metric, watch.best) {
            watch.best = Some(metric);
            watch.num_bad_epochs = 0;
        } else {
            watch.num_bad_epochs += 1;
        }
        if watch.cooldown_counter > 0 {
            watch.cooldown_counter -= 1;
            watch.num_bad_epochs = 0;
        }
        let reduces = watch.num_bad_epochs > self.patience;
        if reduces {
            watch.cooldown_counter = self.cooldown;
            watch.num_bad_epochs = 0;
        }
        reduces
    }

    fn is_better(&self, metric: f64, best: Option<f64>) -> bool {
        match (self.mode, self.threshold_mode) {
            (PlateauMode::Min, ThresholdMode::Rel) => metric < best.unwrap_or(f64::INFINITY) * (1.0 - self.threshold),
            (PlateauMode::Min, ThresholdMode::Abs) => metric < best.unwrap_or(f64::INFINITY) - self.threshold,
            (PlateauMode::Max, ThresholdMode::Rel) => metric > best.unwrap_or(f64::NEG_INFINITY) * (self.threshold + 1.0),
            (PlateauMode::Max, ThresholdMode::Abs) => metric > best.unwrap_or(f64::NEG_INFINITY) + self.threshold,
        }
    }

    pub(super) fn reduced(&self, now: Rates) -> Rates {
        let lr = (now.lr * self.factor).max(self.min_lr);
        if now.lr - lr > self.eps { now.with_lr(lr) } else { now }
    }
}

impl Course for ReduceLROnPlateau {
    fn check(&self) -> Result<()> {
        let check = Check("ReduceLROnPlateau");
        let fits = (0.0..1.0).contains(&self.factor);
        check.that(fits, "factor", self.factor, "at least 0 and below 1")?;
        check.at_least_0("threshold", self.threshold)?;
        check.at_least_0("min_lr", self.min_lr)?;
        check.at_least_0("eps", self.eps)
    }

    /// What it does depends on metrics, not on the epoch.
    fn at(&self, _epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        Ok(now)
    }
}

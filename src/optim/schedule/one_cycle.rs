//! The one-cycle policy.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use super::options::schedule;
use super::{Course, Rates};
use crate::optim::options::Check;
use crate::{ErrorKind, Result};

/// The way from one value to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Anneal {
    /// Along half a cosine.
    Cos,
    /// Evenly.
    Linear,
}

impl Anneal {
    fn between(self, start: f64, end: f64, share: f64) -> f64 {
        match self {
            Anneal::Cos => end + (start - end) / 2.0 * (1.0 + libm::cos(PI * share)),
            Anneal::Linear => (end - start) * share + start,
        }
    }
}

schedule! {
    /// Up to `max_lr` and down again, once, momentum the other way round (Smith and Topin, *Super-convergence: very fast training of neural networks
    /// using large learning rates*, 2018): `torch.optim.lr_scheduler.OneCycleLR`.
    ///
    /// From `max_lr / div_factor` to `max_lr` in the share `pct_start` of all epochs, then down to `max_lr / div_factor / final_div_factor`. With
    /// `three_phase` as long down to where it began as it took up, and from there to the end. The optimizer's own learning rate plays no part.
    OneCycle(
        /// The highest learning rate, above 0.
        max_lr: f64,
    ) {
        /// Epochs in all, at least 1. Or give `epochs` and `steps_per_epoch`, whose product it is.
        total_steps: [u64] = None;
        /// See `total_steps`.
        epochs: [u64] = None;
        /// See `total_steps`.
        steps_per_epoch: [u64] = None;
        /// The share of epochs that it goes up for, at least 0 and at most 1.
        pct_start: f64 = 0.3;
        /// The way up and down.
        anneal_strategy: Anneal = Anneal::Cos;
        /// Whether momentum moves, too.
        cycle_momentum: bool = true;
        /// The least momentum, where the learning rate is highest.
        base_momentum: f64 = 0.85;
        /// The largest momentum, at the beginning and the end.
        max_momentum: f64 = 0.95;
        /// `max_lr` by the first learning rate, above 0.
        div_factor: f64 = 25.0;
        /// The first learning rate by the last, above 0.
        final_div_factor: f64 = 1e4;
        /// In three phases instead of two.
        three_phase: bool = false;
    }
}

impl OneCycle {
    fn total(&self) -> u64 {
        let product = || Some(self.epochs?.saturating_mul(self.steps_per_epoch?));
        self.total_steps.or_else(product).unwrap_or(0)
    }
}

impl Course for OneCycle {
    fn check(&self) -> Result<()> {
        let check = Check("OneCycle");
        let bound = "at least 1, or else epochs and steps_per_epoch";
        check.that(self.total() >= 1, "total_steps", self.total_steps, bound)?;
        check.that(self.max_lr > 0.0, "max_lr", self.max_lr, "above 0")?;
        let fits = (0.0..=1.0).contains(&self.pct_start);
        check.that(fits, "pct_start", self.pct_start, "at least 0 and at most 1")?;
        check.that(self.div_factor > 0.0, "div_factor", self.div_factor, "above 0")?;
        check.that(self.final_div_factor > 0.0, "final_div_factor", self.final_div_factor, "above 0")?;
        check.at_least_0("base_momentum", self.base_momentum)?;
        check.at_least_0("max_momentum", self.max_momentum)
    }

    fn at(&self, epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        let total = self.total();
        if epoch > total {
            let what = format!("epoch {epoch} is past the end of {total} in all; raise `total_steps`, or stop");
            return Err(ErrorKind::Argument {
                op: "OneCycle".into(),
                what,
            }
            .into());
        }
        let (first, most) = (self.max_lr / self.div_factor, self.max_lr);
        let last = first / self.final_div_factor;
        let (low, high) = (self.base_momentum, self.max_momentum);
        let (rise, end) = (self.pct_start * total as f64, total as f64 - 1.0);
        // Each phase: its end, and learning rate and momentum from where to where.
        let up = (rise - 1.0, first, most, high, low);
        let down = (end, most, last, low, high);
        let three = [up, (2.0 * rise - 2.0, most, first, low, high), (end, first, last, high, high)];
        let two = [up, down];
        let phases = if self.three_phase { &three[..] } else { &two };

        let (t, mut start) = (epoch as f64, 0.0);
        let mut rates = now;
        for (number, &(end, from, to, momentum_from, momentum_to)) in phases.iter().enumerate() {
            if t <= end || number + 1 == phases.len() {
                // A phase of no length is over at once.
                let share = if end == start { 1.0 } else { (t - start) / (end - start) };
                let momentum = self.anneal_strategy.between(momentum_from, momentum_to, share);
                rates = now
                    .with_lr(self.anneal_strategy.between(from, to, share))
                    .with_momentum(self.cycle_momentum.then_some(momentum));
                break;
            }
            start = end;
        }
        Ok(rates)
    }

    fn moves_momentum(&self) -> bool {
        self.cycle_momentum
    }
}

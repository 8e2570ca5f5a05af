//! Cyclic learning rates.

use serde::{Deserialize, Serialize};

use super::options::schedule;
use super::{Course, Rates};
use crate::Result;
use crate::optim::arithmetic::powi;
use crate::optim::options::Check;

/// How the height of a cycle changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CyclicMode {
    /// It doesn't.
    Triangular,
    /// It halves from cycle to cycle.
    Triangular2,
    /// It shrinks by `gamma` every epoch.
    ExpRange,
}

schedule! {
    /// Up and down between two bounds (Smith, *Cyclical learning rates for training neural networks*, WACV 2017), momentum the other way round:
    /// `torch.optim.lr_scheduler.CyclicLR`.
    ///
    /// `lr = base_lr + (max_lr - base_lr) * x * s`: `x` goes from 0 to 1 in `step_size_up` epochs and back in `step_size_down`; `s` is as `mode` says.
    /// The optimizer's own learning rate plays no part.
    Cyclic(
        /// The lower bound of the learning rate, at least 0.
        base_lr: f64,
        /// The upper bound of the learning rate, at least 0.
        max_lr: f64,
    ) {
        /// Epochs up, at least 1.
        step_size_up: u64 = 2000;
        /// Epochs down, at least 1; as up if not given.
        step_size_down: [u64] = None;
        /// How the height changes.
        mode: CyclicMode = CyclicMode::Triangular;
        /// The factor of [`CyclicMode::ExpRange`], above 0.
        gamma: f64 = 1.0;
        /// Whether momentum moves, too.
        cycle_momentum: bool = true;
        /// The lower bound of momentum, where the learning rate is highest.
        base_momentum: f64 = 0.8;
        /// The upper bound of momentum, where the learning rate is lowest.
        max_momentum: f64 = 0.9;
    }
}

impl Course for Cyclic {
    fn check(&self) -> Result<()> {
        let check = Check("Cyclic");
        check.at_least_0("base_lr", self.base_lr)?;
        check.at_least_0("max_lr", self.max_lr)?;
        check.that(self.step_size_up >= 1, "step_size_up", self.step_size_up, "at least 1")?;
        let down = self.step_size_down.unwrap_or(1);
        check.that(down >= 1, "step_size_down", down, "at least 1")?;
        check.that(self.gamma > 0.0, "gamma", self.gamma, "above 0")?;
        check.at_least_0("base_momentum", self.base_momentum)?;
        check.at_least_0("max_momentum", self.max_momentum)
    }

    fn at(&self, epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        let up = self.step_size_up as f64;
        let length = up + self.step_size_down.map_or(up, |down| down as f64);
        let turns = epoch as f64 / length;
        let cycle = (1.0 + turns).floor();
        let (x, turn) = (1.0 + turns - cycle, up / length);
        let height = if x <= turn { x / turn } else { (x - 1.0) / (turn - 1.0) };
        let scale = match self.mode {
            CyclicMode::Triangular => 1.0,
            CyclicMode::Triangular2 => powi(0.5, cycle as u64 - 1),
            CyclicMode::ExpRange => libm::pow(self.gamma, epoch as f64),
        };
        let momentum = self.max_momentum - (self.max_momentum - self.base_momentum) * height * scale;
        Ok(now
            .with_lr(self.base_lr + (self.max_lr - self.base_lr) * height * scale)
            .with_momentum(self.cycle_momentum.then_some(momentum)))
    }

    fn moves_momentum(&self) -> bool {
        self.cycle_momentum
    }
}

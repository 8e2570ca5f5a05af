//! Schedules along a cosine (Loshchilov and Hutter, *SGDR: stochastic gradient descent with warm restarts*, ICLR 2017).

use std::f64::consts::PI;

use libm::cos;

use super::options::schedule;
use super::{Course, Rates};
use crate::Result;
use crate::optim::options::Check;

schedule! {
    /// Down along half a cosine to `eta_min` in `T_max` epochs, then up again, and so on: `torch.optim.lr_scheduler.CosineAnnealingLR`.
    ///
    /// `lr = eta_min + (lr - eta_min) * (1 + cos(pi t / T_max)) / (1 + cos(pi (t - 1) / T_max))`, and after each low point
    /// `lr += (base - eta_min) * (1 - cos(pi / T_max)) / 2`.
    CosineAnnealing(
        /// Epochs down, at least 1.
        t_max as "T_max": u64,
    ) {
        /// The least learning rate, at least 0.
        eta_min: f64 = 0.0;
    }
}

impl Course for CosineAnnealing {
    fn check(&self) -> Result<()> {
        let check = Check("CosineAnnealing");
        check.that(self.t_max >= 1, "T_max", self.t_max, "at least 1")?;
        check.at_least_0("eta_min", self.eta_min)
    }

    fn at(&self, epoch: u64, base: f64, now: Rates) -> Result<Rates> {
        if epoch == 0 {
            return Ok(now);
        }
        let cos_at = |t: u64| cos(PI * t as f64 / self.t_max as f64);
        // An odd multiple of `T_max` lies behind: the quotient would divide by 0.
        let after_low = (epoch - 1).is_multiple_of(self.t_max) && ((epoch - 1) / self.t_max) % 2 == 1;
        Ok(now.with_lr(if after_low {
            now.lr + (base - self.eta_min) * (1.0 - cos_at(1)) / 2.0
        } else {
            (1.0 + cos_at(epoch)) / (1.0 + cos_at(epoch - 1)) * (now.lr - self.eta_min) + self.eta_min
        }))
    }
}

schedule! {
    /// Down along half a cosine, again and again from the top: `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`.
    ///
    /// `lr = eta_min + (base - eta_min) * (1 + cos(pi t_cur / T_i)) / 2`: `t_cur` epochs after the last start, and
    /// `T_i = T_0, T_0 T_mult, T_0 T_mult^2, ..` epochs from start to start.
    CosineAnnealingWarmRestarts(
        /// Epochs until the first restart, at least 1.
        t_0 as "T_0": u64,
    ) {
        /// Each time takes so many times as long as the one before, at least 1.
        t_mult as "T_mult": u64 = 1;
        /// The least learning rate, at least 0.
        eta_min: f64 = 0.0;
    }
}

impl Course for CosineAnnealingWarmRestarts {
    fn check(&self) -> Result<()> {
        let check = Check("CosineAnnealingWarmRestarts");
        check.that(self.t_0 >= 1, "T_0", self.t_0, "at least 1")?;
        check.that(self.t_mult >= 1, "T_mult", self.t_mult, "at least 1")?;
        check.at_least_0("eta_min", self.eta_min)
    }

    fn at(&self, epoch: u64, base: f64, now: Rates) -> Result<Rates> {
        let (mut since, mut length) = (epoch, self.t_0);
        if self.t_mult == 1 {
            since %= length;
        }
        while since >= length {
            since -= length;
            length = length.saturating_mul(self.t_mult);
        }
        let down = 1.0 + cos(PI * since as f64 / length as f64);
        Ok(now.with_lr(self.eta_min + (base - self.eta_min) * down / 2.0))
    }
}

//! Schedules of schedules.

use super::options::schedule;
use super::{Course, Rates, Schedule};
use crate::Result;
use crate::optim::options::Check;

schedule! {
    /// One schedule after the other: `torch.optim.lr_scheduler.SequentialLR`.
    ///
    /// At each milestone the next schedule starts, at its epoch 0, from the learning rate that the optimizer had when the scheduler was made.
    Sequential(
        /// The schedules; any but [`ReduceLROnPlateau`](super::ReduceLROnPlateau).
        schedules: Vec<Schedule>,
        /// The epoch at which each but the first starts: ascending, from 1 on.
        milestones: Vec<u64>,
    ) {}
}

impl Course for Sequential {
    fn check(&self) -> Result<()> {
        let check = Check("Sequential");
        check_parts(check, &self.schedules)?;
        let fits = self.milestones.len() + 1 == self.schedules.len();
        check.that(fits, "milestones", &self.milestones, "one fewer than the schedules")?;
        let fits = !self.milestones.contains(&0) && self.milestones.is_sorted();
        check.that(fits, "milestones", &self.milestones, "ascending, from 1 on")
    }

    fn at(&self, epoch: u64, base: f64, now: Rates) -> Result<Rates> {
        let place = self.milestones.partition_point(|&milestone| milestone <= epoch);
        let start = if place == 0 { 0 } else { self.milestones[place - 1] };
        let now = if epoch == start { now.with_lr(base) } else { now };
        self.schedules[place].at(epoch - start, base, now)
    }

    fn moves_momentum(&self) -> bool {
        self.schedules.iter().any(Schedule::moves_momentum)
    }
}

schedule! {
    /// Several schedules at once, each on what the one before made of it: `torch.optim.lr_scheduler.ChainedScheduler`.
    Chained(
        /// The schedules; any but [`ReduceLROnPlateau`](super::ReduceLROnPlateau).
        schedules: Vec<Schedule>,
    ) {}
}

impl Course for Chained {
    fn check(&self) -> Result<()> {
        check_parts(Check("Chained"), &self.schedules)
    }

    fn at(&self, epoch: u64, base: f64, now: Rates) -> Result<Rates> {
        self.schedules.iter().try_fold(now, |now, schedule| schedule.at(epoch, base, now))
    }

    fn moves_momentum(&self) -> bool {
        self.schedules.iter().any(Schedule::moves_momentum)
    }
}

fn check_parts(check: Check, schedules: &[Schedule]) -> Result<()> {
    check.that(!schedules.is_empty(), "schedules", schedules, "at least one schedule")?;
    let takes = |schedule: &Schedule| !matches!(schedule, Schedule::ReduceLROnPlateau(_));
    let names: Vec<_> = schedules.iter().map(Schedule::name).collect();
    let bound = "schedules that need no metric; drive ReduceLROnPlateau by a scheduler of its own";
    check.that(schedules.iter().all(takes), "schedules", names, bound)?;
    schedules.iter().try_for_each(Schedule::check)
}

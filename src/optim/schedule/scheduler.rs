//! Driving an optimizer by a schedule.

use serde::{Deserialize, Serialize};

use super::{Adjust, Rates, Schedule, Watch};
use crate::optim::OptimizerSpec;
use crate::{ErrorKind, Result};

/// Moves the rates of an optimizer by a schedule: of each parameter group, from its own first learning rate.
///
/// Local. With serde it keeps all that it needs to go on, unless its schedule is a function ([`resume`](Self::resume) then). To move one optimizer by
/// several schedules, [chain](super::Chained) them.
///
/// ```
/// use rankgrad::optim::schedule::{Scheduler, Step};
/// use rankgrad::optim::{Optimizer, Sgd};
/// use rankgrad::tensor::Tensor;
///
/// let p = Tensor::from_vec(vec![1.0], 1)?.parameter()?;
/// let mut optimizer = Optimizer::new(Sgd::new(0.5), vec![p])?;
/// let mut scheduler = Scheduler::new(Step::new(2).gamma(0.5), &mut optimizer)?;
/// for lr in [0.5, 0.25, 0.25, 0.125] {
///     // .. an epoch of training ..
///     assert_eq!(scheduler.step(&mut optimizer)?[0].lr, lr);
/// }
/// # Ok::<(), rankgrad::Error>(())
/// ```
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Scheduler {
    schedule: Schedule,
    epoch: u64,
    base_lrs: Vec<f64>,
    watch: Watch,
}

impl Scheduler {
    /// A scheduler at epoch 0, and the optimizer's rates for it: the first learning rates of the schedule are set here.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`] for an option of the schedule out of its bound, for one that moves momentum where there is none, and for first
    /// rates that the optimizer's rule refuses; nothing is changed then.
    pub fn new(schedule: impl Into<Schedule>, optimizer: &mut impl Adjust) -> Result<Self> {
        let now: Vec<Rates> = optimizer.specs().iter().map(Rates::of).collect::<Result<_>>()?;
        let scheduler = Self::resume(schedule, 0, now.iter().map(|rates| rates.lr).collect())?;
        if scheduler.schedule.moves_momentum()
            && let Some((spec, _)) = optimizer.specs().iter().zip(&now).find(|(_, rates)| rates.momentum.is_none())
        {
            return Err(ErrorKind::OptionValue {
                optimizer: scheduler.schedule.name().into(),
                option: "cycle_momentum".into(),
                value: "true".into(),
                bound: format!("false for {}, which has neither momentum nor betas", spec.name()),
            }
            .into());
        }
        scheduler.set(optimizer, |now, base| scheduler.schedule.at(0, base, now))?;
        Ok(scheduler)
    }

    /// A scheduler that goes on after an epoch, from what [`epoch`](Self::epoch) and [`base_lrs`](Self::base_lrs) gave. The optimizer keeps its rates: load
    /// or set them, too.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`] for an option of the schedule out of its bound.
    pub fn resume(schedule: impl Into<Schedule>, epoch: u64, base_lrs: Vec<f64>) -> Result<Self> {
        let schedule = schedule.into();
        schedule.check()?;
        let watch = Watch::default();
        Ok(Scheduler {
            schedule,
            epoch,
            base_lrs,
            watch,
        })
    }

    /// The next epoch: call it after the updates of an epoch (or of a batch, as the schedule counts). Returns the new rates of each group.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if the schedule needs a metric, is past its end, or the number of groups has changed; [`ErrorKind::OptionValue`] if the
    /// optimizer's rule refuses the new rates. Nothing is changed then.
    pub fn step(&mut self, optimizer: &mut impl Adjust) -> Result<Vec<Rates>> {
        self.advance(optimizer, None)
    }

    /// As [`step`](Self::step), with a metric for [`ReduceLROnPlateau`](super::ReduceLROnPlateau), such as the loss; other schedules don't look at it.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_with(&mut self, optimizer: &mut impl Adjust, metric: f64) -> Result<Vec<Rates>> {
        self.advance(optimizer, Some(metric))
    }

    fn advance(&mut self, optimizer: &mut impl Adjust, metric: Option<f64>) -> Result<Vec<Rates>> {
        let (epoch, mut watch) = (self.epoch + 1, self.watch.clone());
        let rates = match (&self.schedule, metric) {
            (Schedule::ReduceLROnPlateau(plateau), Some(metric)) => {
                let reduces = plateau.observe(&mut watch, metric);
                self.set(optimizer, |now, _| Ok(if reduces { plateau.reduced(now) } else { now }))?
            }
            (Schedule::ReduceLROnPlateau(_), None) => return Err(self.argument("it goes by a metric; use `step_with`".into())),
            (schedule, _) => self.set(optimizer, |now, base| schedule.at(epoch, base, now))?,
        };
        (self.epoch, self.watch) = (epoch, watch);
        Ok(rates)
    }

    /// Sets the rates of all groups, from those now and the first learning rate; of none if some can't be set.
    fn set(&self, optimizer: &mut impl Adjust, next: impl Fn(Rates, f64) -> Result<Rates>) -> Result<Vec<Rates>> {
        let specs = optimizer.specs();
        if specs.len() != self.base_lrs.len() {
            let what = format!(
                "it was made for {} parameter groups, and there are {}",
                self.base_lrs.len(),
                specs.len()
            );
            return Err(self.argument(what));
        }
        let group = |(spec, &base): (&OptimizerSpec, &f64)| {
            let rates = next(Rates::of(spec)?, base)?;
            let changes = rates.changes(spec)?;
            spec.with_options(&changes)?;
            Ok((rates, changes))
        };
        let groups: Vec<_> = specs.iter().zip(&self.base_lrs).map(group).collect::<Result<_>>()?;
        for (place, (_, changes)) in groups.iter().enumerate() {
            if changes.as_object().is_some_and(|changes| !changes.is_empty()) {
                optimizer.adjust(place, changes)?;
            }
        }
        Ok(groups.into_iter().map(|(rates, _)| rates).collect())
    }

    /// The schedule and its options.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Steps so far.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The learning rate of each group when the scheduler was made.
    pub fn base_lrs(&self) -> &[f64] {
        &self.base_lrs
    }

    fn argument(&self, what: String) -> crate::Error {
        let op = self.schedule.name().into();
        ErrorKind::Argument { op, what }.into()
    }
}

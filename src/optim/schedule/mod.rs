//! Schedules: how learning rates, and some momenta, move from epoch to epoch.
//!
//! A [`Schedule`] is which schedule with what options; the ones of `torch.optim.lr_scheduler` are here under torch's names. A [`Scheduler`] drives an
//! optimizer by it: of this rank, over ranks, or options alone. Everything is local; a distributed optimizer takes what changed along with its next step.
//!
//! Formulas say `lr` for the learning rate so far, `base` for the one that the optimizer had when the scheduler was made, and `t` for the epoch, from 0.
//! Like torch's they go from one epoch to the next where they can, so that schedules multiply when they are [`Chained`], and a learning
//! rate that was set by hand is kept.
//!
//! ```
//! use rankgrad::optim::schedule::{CosineAnnealing, Linear, Scheduler, Sequential};
//! use rankgrad::prelude::*;
//!
//! rankgrad::local::run(2, |world| {
//!     world.lead(|world| {
//!         let w = world.put(1, Tensor::from_vec(vec![1.0, 2.0], 2)?)?;
//!         let mut optimizer = DistributedOptimizer::new(world, Sgd::new(0.1), [&w])?;
//!         let warm_up_and_cool_down = Sequential::new(vec![Linear::new().into(), CosineAnnealing::new(20).into()], vec![5]);
//!         let mut scheduler = Scheduler::new(warm_up_and_cool_down, &mut optimizer)?;
//!         for _epoch in 0..25 {
//!             let ctx = world.context()?;
//!             // .. recorded calls and a backward ..
//!             optimizer.step(&ctx)?;
//!             scheduler.step(&mut optimizer)?;
//!         }
//!         assert_eq!(optimizer.groups()[0].option("lr"), Some(0.0.into()));
//!         Ok(())
//!     })
//! })
//! # .unwrap();
//! ```

mod composed;
mod constant;
mod cosine;
mod cyclic;
mod decay;
mod function;
mod one_cycle;
mod options;
mod plateau;
mod rates;
mod scheduler;
mod steps;

use std::borrow::Cow;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _, ser::Error as _};
use serde_json::Value;

pub use composed::{Chained, Sequential};
pub use constant::{Constant, Linear};
pub use cosine::{CosineAnnealing, CosineAnnealingWarmRestarts};
pub use cyclic::{Cyclic, CyclicMode};
pub use decay::{Exponential, Polynomial};
pub use function::{Lambda, Multiplicative};
pub use one_cycle::{Anneal, OneCycle};
use options::{Given, Options};
pub use plateau::{PlateauMode, ReduceLROnPlateau, ThresholdMode, Watch};
pub use rates::{Adjust, Rates};
pub use scheduler::Scheduler;
pub use steps::{MultiStep, Step};

use crate::{ErrorKind, Result};

/// One kind of schedule.
trait Course: Options {
    /// Checks the options.
    fn check(&self) -> Result<()>;

    /// The rates of an epoch, from those before it. At epoch 0 those are what the schedule starts from.
    fn at(&self, epoch: u64, base: f64, now: Rates) -> Result<Rates>;

    fn moves_momentum(&self) -> bool {
        false
    }
}

macro_rules! schedules {
    ($($schedule:ident),* $(,)?) => {
        /// A schedule and its options.
        ///
        /// ```
        /// use rankgrad::optim::schedule::{Schedule, Step};
        ///
        /// let typed: Schedule = Step::new(30).gamma(0.5).into();
        /// let named = Schedule::from_json("Step", &serde_json::json!({"step_size": 30, "gamma": 0.5}))?;
        /// assert_eq!(typed.to_json()?, named.to_json()?);
        ///
        /// let error = Schedule::from_json("Step", &serde_json::json!({"step_size": 0})).unwrap_err();
        /// assert_eq!(error.to_string(), "Step: option `step_size` = 0 must be at least 1");
        /// # Ok::<(), rankgrad::Error>(())
        /// ```
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub enum Schedule {
            $(
                #[doc = concat!("[`", stringify!($schedule), "`](struct@", stringify!($schedule), ").")]
                $schedule($schedule),
            )*
        }

        $(impl From<$schedule> for Schedule {
            fn from(schedule: $schedule) -> Self {
                Schedule::$schedule(schedule)
            }
        })*

        /// Names of all schedules.
        const NAMES: &[&str] = &[$(stringify!($schedule)),*];

        impl Schedule {
            /// The schedule's name: `"Step"`, `"OneCycle"`.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Schedule::$schedule(_) => stringify!($schedule),)*
                }
            }

            /// Checks the options.
            ///
            /// # Errors
            /// [`ErrorKind::OptionValue`], naming schedule, option, value and bound.
            pub fn check(&self) -> Result<()> {
                match self {
                    $(Schedule::$schedule(course) => course.check(),)*
                }
            }

            fn read(name: &str, options: &Value) -> Result<Self> {
                match name {
                    $(stringify!($schedule) => {
                        let mut given = Given::new(stringify!($schedule), options)?;
                        let course = $schedule::read(&mut given)?;
                        given.end()?;
                        Ok(Schedule::$schedule(course))
                    })*
                    _ => {
                        let what = format!("no schedule `{name}`; there are {}", NAMES.join(", "));
                        Err(ErrorKind::Argument { op: "schedule".into(), what }.into())
                    }
                }
            }

            /// All options by name, as [`from_json`](Self::from_json) takes them.
            ///
            /// # Errors
            /// [`ErrorKind::Argument`] for functions, which can't be written.
            pub fn to_json(&self) -> Result<Value> {
                let options = match self {
                    $(Schedule::$schedule(course) => course.write(),)*
                };
                let what = |error: serde_json::Error| ErrorKind::Argument { op: self.name().into(), what: error.to_string() };
                Ok(Value::Object(options.map_err(what)?))
            }

            fn at(&self, epoch: u64, base: f64, now: Rates) -> Result<Rates> {
                match self {
                    $(Schedule::$schedule(course) => course.at(epoch, base, now),)*
                }
            }

            fn moves_momentum(&self) -> bool {
                match self {
                    $(Schedule::$schedule(course) => course.moves_momentum(),)*
                }
            }
        }
    };
}
schedules![
    Chained,
    Constant,
    CosineAnnealing,
    CosineAnnealingWarmRestarts,
    Cyclic,
    Exponential,
    Lambda,
    Linear,
    MultiStep,
    Multiplicative,
    OneCycle,
    Polynomial,
    ReduceLROnPlateau,
    Sequential,
    Step,
];

impl Schedule {
    /// The schedule of this name with these options; options that are left out have torch's defaults.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for an unknown name, [`ErrorKind::UnknownOption`], and [`ErrorKind::OptionValue`] for a value that is missing, of another
    /// type or out of its bound.
    pub fn from_json(name: &str, options: &Value) -> Result<Self> {
        let schedule = Self::read(name, options)?;
        schedule.check()?;
        Ok(schedule)
    }
}

/// As `{"schedule": name, "options": {..}}`, for formats that describe themselves. Functions can't be written.
impl Serialize for Schedule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let written = Written {
            schedule: self.name().into(),
            options: self.to_json().map_err(S::Error::custom)?,
        };
        written.serialize(serializer)
    }
}

/// Refuses what [`Schedule::from_json`] refuses.
impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Written { schedule, options } = Written::deserialize(deserializer)?;
        Schedule::from_json(&schedule, &options).map_err(D::Error::custom)
    }
}

#[derive(Serialize, Deserialize)]
struct Written<'a> {
    schedule: Cow<'a, str>,
    #[serde(default)]
    options: Value,
}

#[cfg(test)]
mod tests;

//! Schedules by a function of the epoch.

use std::fmt;
use std::sync::Arc;

use serde::ser::Error as _;
use serde_json::{Map, Value};

use super::options::{Given, Options};
use super::{Course, Rates};
use crate::{ErrorKind, Result};

type Factor = Arc<dyn Fn(u64) -> f64 + Send + Sync>;

macro_rules! by_function {
    ($(#[$doc:meta])* $schedule:ident) => {
        $(#[$doc])*
        #[derive(Clone)]
        pub struct $schedule(Factor);

        impl $schedule {
            /// The schedule of this function of the epoch.
            pub fn new(factor: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Self {
                Self(Arc::new(factor))
            }
        }

        impl fmt::Debug for $schedule {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($schedule), "(a function)"))
            }
        }

        impl Options for $schedule {
            fn read(_: &mut Given) -> Result<Self> {
                let what = concat!("a function can't be read; make it with `", stringify!($schedule), "::new`").into();
                Err(ErrorKind::Argument { op: stringify!($schedule).into(), what }.into())
            }

            fn write(&self) -> serde_json::Result<Map<String, Value>> {
                let why = "a function can't be written; keep `Scheduler::epoch` and `base_lrs`, and use `Scheduler::resume`";
                Err(serde_json::Error::custom(why))
            }
        }
    };
}

by_function! {
    /// The first learning rate times a function: `torch.optim.lr_scheduler.LambdaLR`.
    ///
    /// `lr = base * factor(t)`. It can't be serialised.
    Lambda
}

impl Course for Lambda {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn at(&self, epoch: u64, base: f64, now: Rates) -> Result<Rates> {
        Ok(now.with_lr(base * (self.0)(epoch)))
    }
}

by_function! {
    /// Multiplies the learning rate by a function every epoch: `torch.optim.lr_scheduler.MultiplicativeLR`.
    ///
    /// `lr *= factor(t)` from `t = 1` on. It can't be serialised.
    Multiplicative
}

impl Course for Multiplicative {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn at(&self, epoch: u64, _base: f64, now: Rates) -> Result<Rates> {
        Ok(if epoch == 0 { now } else { now.with_lr(now.lr * (self.0)(epoch)) })
    }
}

//! The driver of L-BFGS as it is saved.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::history::{History, Pair};
use super::{Driver, Lbfgs};
use crate::{ErrorKind, Result};

/// All that the driver knows, but its options.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DriverState {
    fresh: bool,
    moved: Option<Exact>,
    number: u64,
    scale: Exact,
    /// Of each pair, its products with each `s` and each `y`.
    pairs: Vec<(Vec<Exact>, Vec<Exact>)>,
}

impl DriverState {
    /// Checks that it could be of a driver with these options.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`].
    pub(crate) fn check(&self, options: &Lbfgs) -> Result<()> {
        let fits = |(n, (s, y)): (usize, &(Vec<_>, Vec<_>))| s.len() == n + 1 && y.len() == n + 1;
        if self.pairs.len() <= options.history_size && self.pairs.iter().enumerate().all(fits) {
            return Ok(());
        }
        let what = format!("a history of {} pairs that don't fit together", self.pairs.len());
        Err(ErrorKind::Argument {
            op: Lbfgs::NAME.into(),
            what,
        }
        .into())
    }
}

impl Driver {
    pub(crate) fn state(&self) -> DriverState {
        let exact = |numbers: &std::collections::VecDeque<f64>| numbers.iter().copied().map(Exact).collect();
        DriverState {
            fresh: self.fresh,
            moved: self.moved.map(Exact),
            number: self.number,
            scale: Exact(self.history.scale),
            pairs: self.history.pairs.iter().map(|p| (exact(&p.with_s), exact(&p.with_y))).collect(),
        }
    }

    /// A driver that goes on from a state.
    ///
    /// # Errors
    /// As [`DriverState::check`] and [`Lbfgs::check`].
    pub(crate) fn resume(options: Lbfgs, state: DriverState) -> Result<Self> {
        state.check(&options)?;
        let mut driver = Driver::new(options.clone())?;
        let plain = |numbers: Vec<Exact>| numbers.into_iter().map(|x| x.0).collect();
        let pair = |(s, y)| Pair {
            with_s: plain(s),
            with_y: plain(y),
        };
        driver.history = History::new(options.history_size);
        driver.history.scale = state.scale.0;
        driver.history.pairs = state.pairs.into_iter().map(pair).collect();
        (driver.fresh, driver.moved, driver.number) = (state.fresh, state.moved.map(|t| t.0), state.number);
        Ok(driver)
    }
}

/// A number in JSON, which has no infinite ones: those are text.
#[derive(Debug, Clone, Copy)]
struct Exact(f64);

impl Serialize for Exact {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self.0.is_finite() {
            true => self.0.serialize(serializer),
            false => self.0.to_string().serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Exact {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(f64),
            Text(String),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(number) => Ok(Exact(number)),
            Either::Text(text) => text.parse().map(Exact).map_err(D::Error::custom),
        }
    }
}

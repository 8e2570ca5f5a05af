//! Time, as cheaply as its uses allow.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::config::Settings;

/// Settings that are times, worked out once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    pub tick: Duration,
    pub timeout: Option<Duration>,
    /// How long a wait lasts before it asks; early enough for the answer to count.
    pub ask_after: Duration,
}

impl Pace {
    pub(super) fn of(settings: &Settings) -> Self {
        let (timeout, after) = (settings.timeout(), settings.status_after());
        Pace {
            tick: settings.tick(),
            timeout,
            ask_after: timeout.map_or(after, |timeout| after.min(timeout / 2)),
        }
    }
}

/// A clock that is read with each event: precise to a few milliseconds, and several times cheaper to read than a fine one.
#[derive(Debug)]
pub(super) struct Ticks(Duration);

impl Ticks {
    pub(super) fn start() -> Self {
        Ticks(now())
    }

    pub(super) fn elapsed(&self) -> Duration {
        now().saturating_sub(self.0)
    }
}

fn now() -> Duration {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

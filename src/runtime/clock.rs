//! Time, as cheaply as its uses allow.

use std::time::{Duration, Instant};

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

/// A wait that comes back so much later than it was to has not run meanwhile.
const LATE: Duration = Duration::from_millis(250);

/// Time in which this process stood still while it waited: it was stopped, or its machine was. Who is waited for isn't to blame for it, and gets as much more.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Still(Duration);

impl Still {
    /// A wait that was to last until `until` was over `now`.
    pub(super) fn note(&mut self, until: Instant, now: Instant) {
        let late = now.saturating_duration_since(until);
        if late > LATE {
            self.0 += late;
        }
    }

    /// A point in time, put off.
    pub(super) fn put_off(&self, end: Instant) -> Instant {
        end + self.0
    }
}

/// A clock that is read with each event: precise to a few milliseconds, and several times cheaper to read than a fine one.
#[derive(Debug)]
pub(super) struct Ticks(Duration);

impl Ticks {
    pub(super) fn start() -> Self {
        Ticks(now())
    }

    #[inline]
    pub(super) fn elapsed(&self) -> Duration {
        now().saturating_sub(self.0)
    }
}

#[inline]
fn now() -> Duration {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_stood_still_is_given_back() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut still = Still::default();
        still.note(start + second, start + second + LATE);
        assert_eq!(still.put_off(start), start);
        still.note(start + second, start + 5 * second);
        still.note(start + 6 * second, start + 7 * second);
        assert_eq!(still.put_off(start), start + 5 * second);
    }
}

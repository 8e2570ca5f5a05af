//! How long a waiter spins before it sleeps: longer where that would just have saved a sleep.
//!
//! To sleep and be woken costs tens of microseconds, as much as many steps take. A quiet that ended soon after the waiter had gone to sleep doubles
//! the spinning; one that lasted brings it back to the setting. (As KVM's halt polling grows and shrinks: Linux, `Documentation/virt/kvm/halt-polling.rst`.)

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Nobody spins longer than this, unless the setting says so.
const LONGEST: Duration = Duration::from_micros(200);

#[derive(Debug)]
pub(super) struct Spin {
    first: Duration,
    longest: Duration,
    own_core: bool,
    /// In nanoseconds.
    now: AtomicU64,
}

impl Spin {
    /// It grows only where each rank has a core of its own: elsewhere a spinner keeps the rank that it waits for from running.
    pub(super) fn of(first: Duration, own_core: bool) -> Self {
        let longest = if own_core { first.max(LONGEST) } else { first };
        Spin {
            first,
            longest,
            own_core,
            now: AtomicU64::new(first.as_nanos() as u64),
        }
    }

    /// Whether a spinner keeps no other rank from running.
    #[inline]
    pub(super) fn is_harmless(&self) -> bool {
        self.own_core
    }

    #[inline]
    pub(super) fn limit(&self) -> Duration {
        Duration::from_nanos(self.now.load(Ordering::Relaxed))
    }

    /// A quiet in which the waiter slept has ended.
    pub(super) fn slept(&self, quiet: Duration) {
        let next = if quiet > self.longest {
            self.first
        } else {
            (self.limit() * 2).min(self.longest)
        };
        self.now.store(next.as_nanos() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn short_sleeps_make_it_longer_and_a_long_one_undoes_it() {
        let spin = Spin::of(40 * US, true);
        let after = |quiet: u32| {
            spin.slept(quiet * US);
            spin.limit()
        };
        assert_eq!([60, 100, 200, 60].map(after).map(|d| d.as_micros()), [80, 160, 200, 200]);
        assert_eq!(after(201).as_micros(), 40);
    }

    #[test]
    fn it_stays_where_cores_are_shared_and_where_it_is_off() {
        for spin in [Spin::of(40 * US, false), Spin::of(Duration::ZERO, true), Spin::of(900 * US, true)] {
            let first = spin.limit();
            [10, 100, 1000].into_iter().for_each(|quiet| spin.slept(quiet * US));
            assert_eq!(spin.limit(), first);
        }
    }
}

//! How long a waiter looks for its answer before it sleeps: first with its core to itself, then between offers of the core to others.
//!
//! To sleep and be woken costs tens of microseconds, as much as many steps take, and more where an idle processor is halted. Who offers its core
//! keeps it from that and holds up nobody for longer than a look takes: `sched_yield(2)` lets any other thread that is ready run first. How far it does so differs
//! between schedulers, and a spinner is in the way of one who computes in any case: a waiter that has met one sleeps at once for a while.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// An offer that took longer was taken by one who computes, not by one who waits, too.
const TAKEN: Duration = Duration::from_micros(500);

/// So long waiters sleep at once after that: twice as long each time it happens again soon, up to the last.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(128)];

#[derive(Debug)]
pub(super) struct Spin {
    alone: Duration,
    offering: Duration,
    own_core: bool,
    start: Instant,
    /// Until then waiters sleep at once, in nanoseconds from the start; and for how long in all.
    crowded: AtomicU64,
    pause: AtomicU64,
}

impl Spin {
    /// The core is offered only where each rank has one of its own: elsewhere the others are many, and to sleep lets the right one run.
    pub(super) fn of(alone: Duration, offering: Duration, own_core: bool) -> Self {
        Spin {
            alone,
            offering: if own_core { offering } else { Duration::ZERO },
            own_core,
            start: Instant::now(),
            crowded: AtomicU64::new(0),
            pause: AtomicU64::new(0),
        }
    }

    /// Whether a spinner keeps no other rank from running.
    #[inline]
    pub(super) fn is_harmless(&self) -> bool {
        self.own_core
    }

    /// Whether to look on without a pause after so long a quiet.
    #[inline]
    pub(super) fn goes_on(&self, quiet: Duration, now: Instant) -> bool {
        quiet < self.alone && !self.is_crowded(now)
    }

    /// Whether to look on between offers of the core.
    pub(super) fn offers(&self, quiet: Duration, now: Instant) -> bool {
        quiet < self.offering && !self.is_crowded(now)
    }

    #[inline]
    fn is_crowded(&self, now: Instant) -> bool {
        self.nanos(now) < self.crowded.load(Ordering::Relaxed)
    }

    /// An offer ended `now` that took so long.
    pub(super) fn offered(&self, time: Duration, now: Instant) {
        if time > TAKEN {
            let [shortest, longest] = PAUSES.map(|pause| pause.as_nanos() as u64);
            let (now, last) = (self.nanos(now), self.pause.load(Ordering::Relaxed));
            let soon = now < self.crowded.load(Ordering::Relaxed) + 2 * last;
            let pause = if soon { (2 * last).min(longest) } else { shortest };
            self.pause.store(pause, Ordering::Relaxed);
            self.crowded.store(now + pause, Ordering::Relaxed);
        }
    }

    #[inline]
    fn nanos(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);
    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn it_looks_on_then_offers_its_core_then_sleeps() {
        let spin = Spin::of(20 * US, 10 * MS, true);
        let steps = [19 * US, 20 * US, 9 * MS, 10 * MS].map(|quiet| (spin.goes_on(quiet, spin.start), spin.offers(quiet, spin.start)));
        assert_eq!(steps, [(true, true), (false, true), (false, true), (false, false)]);
    }

    #[test]
    fn a_core_that_others_share_is_not_offered() {
        let spin = Spin::of(20 * US, 10 * MS, false);
        assert!(spin.goes_on(19 * US, spin.start) && !spin.offers(19 * US, spin.start));
        assert!(!Spin::of(Duration::ZERO, Duration::ZERO, true).offers(Duration::ZERO, spin.start));
    }

    #[test]
    fn an_offer_that_is_taken_for_long_ends_all_looking_for_a_while() {
        let spin = Spin::of(20 * US, 10 * MS, true);
        let looks = |ms: u32| {
            let now = spin.start + ms * MS;
            (spin.goes_on(US, now), spin.offers(MS, now))
        };
        spin.offered(100 * US, spin.start + MS);
        assert_eq!(looks(1), (true, true));
        // From one look to the first that looks again.
        let pause = |from: u32| {
            spin.offered(3 * MS, spin.start + from * MS);
            assert_eq!(looks(from), (false, false));
            (from..).find(|&ms| looks(ms) == (true, true)).unwrap() - from
        };
        assert_eq!([5, 8, 15, 1000].map(pause), [2, 4, 8, 2]);
        let mut from = 2000;
        let again = [(); 9].map(|()| {
            let pause = pause(from);
            from += pause + 1;
            pause
        });
        assert_eq!(again, [2, 4, 8, 16, 32, 64, 128, 128, 128]);
    }
}

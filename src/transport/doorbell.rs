//! How a sleeper is woken by what is sent to it, and why no wake-up is lost.
//!
//! Each rank has a [`Slot`] that its senders can write to. A sender sends first, then counts the message in `posted`, then looks at
//! `state`, and rings if nobody polls. A receiver stores `state` first, then compares `posted` with what it has taken, then sleeps on a
//! ticket that each ring changes. All of it is sequentially consistent, so one of the two always sees the other. The count is the truth:
//! whether the message is visible yet doesn't matter. See `mpi/README.md`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// Somebody polls, or is about to.
const POLLING: u32 = 0;
/// The holder of the polling role sleeps.
const ASLEEP: u32 = 1;
/// Nobody polls; a thread may doze.
const AWAY: u32 = 2;

/// One rank's doorbell: 128 bytes, so that no two ranks share a pair of cache lines.
///
/// All zeros is a valid start.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Slot {
    posted: AtomicU64,
    state: AtomicU32,
    /// One for whoever sleeps, one for those who doze: a ring changes the one that its state names.
    tickets: [AtomicU32; 2],
}

/// Sleeping on a ticket.
pub(crate) trait Park {
    /// Sleeps while `ticket` holds `seen`, for the limit at most.
    fn park(&self, ticket: &AtomicU32, seen: u32, limit: Duration);

    /// Wakes all who sleep on `ticket`, which has changed.
    fn unpark(&self, ticket: &AtomicU32);
}

impl Slot {
    /// Counts a message that was sent to this slot's rank, and rings if nobody polls there. Call it after the send.
    pub(crate) fn ring(&self, parking: &impl Park) {
        self.posted.fetch_add(1, SeqCst);
        if self.state.load(SeqCst) != POLLING {
            match self.state.swap(POLLING, SeqCst) {
                ASLEEP => self.change(0, parking),
                AWAY => self.change(1, parking),
                _ => {}
            }
        }
    }

    fn change(&self, ticket: usize, parking: &impl Park) {
        self.tickets[ticket].fetch_add(1, SeqCst);
        parking.unpark(&self.tickets[ticket]);
    }
}

/// The receiver's private side of its slot.
#[derive(Debug, Default)]
pub(crate) struct Sleeper {
    taken: AtomicU64,
    /// Each ticket as it was when the last sleep on it returned: a later ring or wake ends the next sleep at once.
    seen: [AtomicU32; 2],
}

impl Sleeper {
    /// Counts a message as received.
    pub(crate) fn took(&self) {
        self.taken.fetch_add(1, SeqCst);
    }

    /// Whether more was sent than taken.
    pub(crate) fn arrived(&self, slot: &Slot) -> bool {
        slot.posted.load(SeqCst) != self.taken.load(SeqCst)
    }

    /// Sleeps until a ring, a wake, or the limit; not at all if something was sent that isn't taken.
    pub(crate) fn sleep(&self, slot: &Slot, parking: &impl Park, limit: Duration) {
        slot.state.store(ASLEEP, SeqCst);
        if self.arrived(slot) {
            // Sent, but perhaps not visible yet: let the sender run if it shares our core.
            std::thread::yield_now();
        } else {
            self.park(0, slot, parking, limit);
        }
        slot.state.store(POLLING, SeqCst);
    }

    /// Sleeps until a sender finds the rank away, a wake, or the limit.
    pub(crate) fn doze(&self, slot: &Slot, parking: &impl Park, limit: Duration) {
        self.park(1, slot, parking, limit);
    }

    fn park(&self, ticket: usize, slot: &Slot, parking: &impl Park, limit: Duration) {
        let (seen, ticket) = (&self.seen[ticket], &slot.tickets[ticket]);
        parking.park(ticket, seen.load(SeqCst), limit);
        seen.store(ticket.load(SeqCst), SeqCst);
    }

    /// Says that nobody polls, or that somebody does; true if something has arrived.
    pub(crate) fn set_away(&self, slot: &Slot, away: bool) -> bool {
        slot.state.store(if away { AWAY } else { POLLING }, SeqCst);
        self.arrived(slot)
    }

    /// Wakes the own rank's sleeper and dozers.
    pub(crate) fn wake(&self, slot: &Slot, parking: &impl Park) {
        slot.change(0, parking);
        slot.change(1, parking);
    }
}

/// Parking for threads of one process.
#[derive(Debug, Default)]
pub(crate) struct ThreadPark {
    lock: std::sync::Mutex<()>,
    changed: std::sync::Condvar,
}

impl Park for ThreadPark {
    fn park(&self, ticket: &AtomicU32, seen: u32, limit: Duration) {
        let guard = self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let same = |_: &mut ()| ticket.load(SeqCst) == seen;
        drop(self.changed.wait_timeout_while(guard, limit, same));
    }

    fn unpark(&self, _: &AtomicU32) {
        // Taking the lock orders this after a sleeper's look at the ticket, so that it can't miss the change.
        drop(self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;
    use std::time::Instant;

    use super::*;

    #[derive(Default)]
    struct Rank {
        slot: Slot,
        parking: ThreadPark,
        sleeper: Sleeper,
        queue: Mutex<VecDeque<u32>>,
    }

    impl Rank {
        fn send(&self, value: u32) {
            self.queue.lock().unwrap().push_back(value);
            self.slot.ring(&self.parking);
        }

        fn take(&self) -> Option<u32> {
            let value = self.queue.lock().unwrap().pop_front();
            if value.is_some() {
                self.sleeper.took();
            }
            value
        }
    }

    #[test]
    fn no_wake_up_is_lost() {
        let (here, there) = (Rank::default(), Rank::default());
        let started = Instant::now();
        std::thread::scope(|scope| {
            for (own, peer) in [(&here, &there), (&there, &here)] {
                scope.spawn(move || {
                    let mut taken = 0;
                    for value in 0..20_000 {
                        peer.send(value);
                        while own.take().is_none() {
                            own.sleeper.sleep(&own.slot, &own.parking, Duration::from_secs(60));
                        }
                        taken += 1;
                    }
                    assert_eq!(taken, 20_000);
                });
            }
        });
        assert!(started.elapsed() < Duration::from_secs(50), "a sleep lasted to its limit");
    }

    #[test]
    fn a_dozer_is_woken_only_while_away() {
        let rank = Rank::default();
        let short = Duration::from_millis(20);
        rank.send(1);
        let started = Instant::now();
        rank.sleeper.doze(&rank.slot, &rank.parking, short);
        assert!(started.elapsed() >= short, "a rank that polls isn't rung");
        assert!(rank.sleeper.set_away(&rank.slot, true), "one message is untaken");
        rank.take();
        assert!(!rank.sleeper.set_away(&rank.slot, true));
        std::thread::scope(|scope| {
            let dozer = scope.spawn(|| rank.sleeper.doze(&rank.slot, &rank.parking, Duration::from_secs(60)));
            rank.send(2);
            dozer.join().unwrap();
        });
    }

    #[test]
    fn a_wake_before_the_sleep_counts() {
        let rank = Rank::default();
        rank.sleeper.wake(&rank.slot, &rank.parking);
        let started = Instant::now();
        rank.sleeper.sleep(&rank.slot, &rank.parking, Duration::from_secs(60));
        rank.sleeper.doze(&rank.slot, &rank.parking, Duration::from_secs(60));
        assert!(started.elapsed() < Duration::from_secs(50));
    }
}

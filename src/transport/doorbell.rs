//! How a sleeper is woken by what is sent to it, and why no wake-up is lost.
//!
//! Each rank has a [`Slot`] that its senders can write to. A sender sends first, then counts the message in `posted`, then looks at
//! `state`, and rings if nobody polls. A receiver stores `state` first, then compares `posted` with what it has taken, then sleeps on a
//! ticket that each ring changes. All of it is sequentially consistent, so one of the two always sees the other. The count is the truth:
//! whether the message is visible yet doesn't matter. See `mpi/README.md`.

use std::time::Duration;

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use crate::sync::thread;

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
            thread::yield_now();
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

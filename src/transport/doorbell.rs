//! How a sleeper is woken by what is sent to it, and why no wake-up is lost.
//!
//! Each rank has a [`Slot`] that its senders can write to. A sender counts the message in `posted`, sends it, then looks at `state`, and rings
//! if nobody polls and not all that was posted is `taken`. A receiver stores `state` first, then compares the counts, then sleeps on a
//! ticket that each ring changes. All of it is sequentially consistent, so one of the two always sees the other. The count is the truth:
//! whether the message is visible yet doesn't matter. See `mpi/README.md`.

use std::time::Duration;

use crate::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use crate::sync::thread;

/// Somebody polls, or is about to.
const POLLING: u32 = 0;
/// The holder of the polling role sleeps.
const ASLEEP: u32 = 1;
/// Nobody polls; a thread may doze.
const AWAY: u32 = 2;

/// One rank's doorbell: 128 bytes, so that no two ranks share a pair of cache lines. Its first line is written by senders, its second by the rank itself.
///
/// All zeros is a valid start.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Slot {
    posted: AtomicU64,
    _rest_of_line: [u64; 7],
    taken: AtomicU64,
    state: AtomicU32,
    /// One for whoever sleeps, one for those who doze: a ring changes the one that its state names.
    tickets: [AtomicU32; 2],
    /// Of no meaning: see [`Slot::fetch_line`].
    touched: AtomicU32,
}

/// Sleeping on a ticket.
pub(crate) trait Park {
    /// Sleeps while `ticket` holds `seen`, for the limit at most.
    fn park(&self, ticket: &AtomicU32, seen: u32, limit: Duration);

    /// Wakes all who sleep on `ticket`, which has changed.
    fn unpark(&self, ticket: &AtomicU32);
}

impl Slot {
    /// Counts a message that is about to be sent to this slot's rank.
    pub(crate) fn post(&self) {
        self.posted.fetch_add(1, SeqCst);
    }

    /// Counts a message as received.
    pub(crate) fn took(&self) {
        self.taken.fetch_add(1, SeqCst);
    }

    /// Has the line of the state come over to this rank's core, without waiting for it: a sender has just looked at it, and the rank is about to change it in an
    /// order that waits.
    #[inline]
    pub(crate) fn fetch_line(&self) {
        self.touched.store(0, Relaxed);
    }

    /// Whether more was posted than taken.
    #[inline]
    pub(crate) fn has_more(&self) -> bool {
        self.posted.load(SeqCst) != self.taken.load(SeqCst)
    }

    /// Rings, after a message that was posted has been sent, if nobody polls there and it may not have been received already.
    pub(crate) fn ring(&self, parking: &impl Park) {
        self.ring_if(parking, || self.has_more());
    }

    /// Rings if nobody polls there, and what was sent, in a way that shows it at once, is still `unread`.
    #[inline]
    pub(crate) fn ring_if(&self, parking: &impl Park, unread: impl FnOnce() -> bool) {
        if self.state.load(SeqCst) != POLLING && unread() {
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
    /// Each ticket as it was when the last sleep on it returned: a later ring or wake ends the next sleep at once.
    seen: [AtomicU32; 2],
}

impl Sleeper {
    /// Sleeps until a ring, a wake, or the limit; not at all if something was sent that isn't taken, or lies there `unread`.
    pub(crate) fn sleep(&self, slot: &Slot, parking: &impl Park, limit: Duration, unread: impl FnOnce() -> bool) {
        slot.state.store(ASLEEP, SeqCst);
        if slot.has_more() || unread() {
            // Posted, but perhaps not visible yet: let the sender run if it shares our core.
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
    #[inline]
    pub(crate) fn set_away(&self, slot: &Slot, away: bool, unread: impl FnOnce() -> bool) -> bool {
        slot.state.store(if away { AWAY } else { POLLING }, SeqCst);
        slot.has_more() || unread()
    }

    /// Wakes the own rank's sleeper and dozers.
    pub(crate) fn wake(&self, slot: &Slot, parking: &impl Park) {
        slot.change(0, parking);
        slot.change(1, parking);
    }
}

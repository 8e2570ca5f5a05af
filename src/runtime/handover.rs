//! The polling role, and how the threads of a rank hand it to each other. The essay is `README.md` beside this file.
//!
//! `tests/handover.rs` runs this very file, and the doorbell's, through the orders in which threads can meet.

use std::time::Duration;

use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::thread::{self, Thread};
use crate::sync::{Mutex, MutexGuard, PoisonError, SPINS, hint};

/// The doorbell of this rank.
pub(crate) trait Bell {
    /// Tells senders whether nobody polls; true if something has arrived.
    fn set_away(&self, away: bool) -> bool;
    /// Sleeps with the role in hand, until something is sent or [`wake`](Self::wake) is called.
    fn sleep(&self, limit: Duration);
    /// Sleeps without the role, until a sender finds the rank away or [`wake`](Self::wake) is called.
    fn doze(&self, limit: Duration);
    /// Wakes whoever sleeps or dozes.
    fn wake(&self);
}

/// How a thread with nothing to do rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rest {
    /// With the polling role in hand, so that what arrives meets no second thread.
    Leading,
    /// With the role left vacant for whoever waits next.
    Vacant,
}

/// What the holder of the role does after a poll.
#[derive(Debug)]
pub(crate) enum Next {
    /// Polls again.
    Again,
    /// Leaves the role to whoever wants it, and tries to take it again.
    StandBack,
    /// Leaves the role, and runs what it has found.
    Run,
    /// Rests, as nothing moves.
    Rest,
}

/// What a thread waits for, and does while it holds the role.
pub(crate) trait Duty {
    /// What ends its turn early.
    type Error;

    /// Whether what it waits for holds. Called without the role, too.
    fn is_done(&self) -> bool;
    /// Whether its time is up. Called once in each round, after [`is_done`](Self::is_done).
    fn is_late(&mut self) -> bool;
    /// This thread is about to sleep until another one that polls wakes it: it must be known there who it is. Asked whether it is done once more after it.
    fn expect_wake(&self);
    /// Polls. Only the holder of the role is asked to.
    fn poll(&mut self) -> Result<Next, Self::Error>;
    /// Does the work that the last poll found. The role has been left.
    fn run(&mut self) -> Result<(), Self::Error>;
    /// How long it may rest with the role in hand, or while another thread polls.
    fn rest(&self) -> Duration;
    /// How long it may doze; `quiet` if it has just seen that nothing moves.
    fn doze(&self, quiet: bool) -> Duration;
}

/// The role, who waits for it, and who sleeps.
#[derive(Debug, Default)]
pub(crate) struct Handover {
    /// The polling role.
    taken: AtomicBool,
    /// Threads that wait while another one polls, and how many there are: mostly none, which needs no lock to see.
    followers: Mutex<Vec<Thread>>,
    following: AtomicUsize,
    /// Threads that doze, ready to poll when a sender rings.
    dozing: AtomicUsize,
    /// The leader sleeps, or is about to look once more whether it need.
    asleep: AtomicBool,
}

impl Handover {
    /// Does its duty until it is done (true) or late (false): polls, or waits while another thread does.
    pub(crate) fn turn<D: Duty>(&self, bell: &(impl Bell + ?Sized), duty: &mut D, rest: Rest) -> Result<bool, D::Error> {
        let mut leading = false;
        let result = loop {
            if duty.is_done() {
                break Ok(true);
            }
            if duty.is_late() {
                break Ok(false);
            }
            if !leading {
                // Whoever waits for an answer polls for it itself, without a thread in between.
                let stands_back = rest == Rest::Vacant && self.is_anyone_following();
                leading = !stands_back && self.take();
                if leading {
                    bell.set_away(false);
                } else {
                    match rest {
                        Rest::Vacant => self.doze(bell, duty.doze(false)),
                        // Who polls itself needs nobody to wake it, and needn't say who it is.
                        Rest::Leading => {
                            duty.expect_wake();
                            if !duty.is_done() {
                                self.follow(duty.rest());
                            }
                        }
                    }
                    continue;
                }
            }
            match duty.poll() {
                Err(e) => break Err(e),
                Ok(Next::Again) if rest == Rest::Leading || !self.is_anyone_following() => {}
                Ok(Next::Again | Next::StandBack) => {
                    self.leave(bell);
                    leading = false;
                }
                Ok(Next::Run) => {
                    self.leave(bell);
                    leading = false;
                    if let Err(e) = duty.run() {
                        break Err(e);
                    }
                }
                Ok(Next::Rest) if rest == Rest::Leading => {
                    // What it waits for may happen on another thread of this rank, which looks at this mark after it did its part.
                    self.asleep.store(true, Ordering::SeqCst);
                    if !duty.is_done() {
                        bell.sleep(duty.rest());
                    }
                    self.asleep.store(false, Ordering::SeqCst);
                }
                Ok(Next::Rest) => {
                    self.leave(bell);
                    leading = false;
                    self.doze(bell, duty.doze(true));
                }
            }
        };
        // A leader that left may have chosen this thread to go on, which has no need to any more: the role must not lie vacant unseen.
        if leading || (rest == Rest::Leading && self.take()) {
            self.leave(bell);
        }
        result
    }

    #[inline]
    fn take(&self) -> bool {
        !self.taken.load(Ordering::Relaxed)
            && self
                .taken
                .compare_exchange(false, true, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
    }

    /// Leaves the polling role vacant. A thread that waits takes it; if there is none, a sender will ring, which wakes a thread that dozes.
    #[inline]
    fn leave(&self, bell: &(impl Bell + ?Sized)) {
        self.taken.store(false, Ordering::SeqCst);
        // In the one order of all: a follower that this doesn't see will see the role vacant.
        let follower = if self.is_anyone_following() { self.followers().pop() } else { None };
        match follower {
            Some(follower) => follower.unpark(),
            None if bell.set_away(true) => bell.wake(),
            None => {}
        }
    }

    #[inline]
    fn is_anyone_following(&self) -> bool {
        self.following.load(Ordering::SeqCst) > 0
    }

    fn followers(&self) -> MutexGuard<'_, Vec<Thread>> {
        self.followers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn to poll, or to be woken by the answer, no longer than `limit`.
    fn follow(&self, limit: Duration) {
        let me = thread::current();
        self.followers().push(me.clone());
        self.following.fetch_add(1, Ordering::SeqCst);
        // A service thread stands back at once.
        let vacant = || !self.taken.load(Ordering::SeqCst);
        let soon = (0..SPINS).any(|_| {
            hint::spin_loop();
            vacant()
        });
        if !soon && !vacant() {
            thread::park_timeout(limit);
        }
        self.following.fetch_sub(1, Ordering::SeqCst);
        self.followers().retain(|t| t.id() != me.id());
    }

    fn doze(&self, bell: &(impl Bell + ?Sized), limit: Duration) {
        self.dozing.fetch_add(1, Ordering::SeqCst);
        bell.doze(limit);
        self.dozing.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether a thread dozes that a sender would wake.
    #[inline]
    pub(crate) fn is_anyone_dozing(&self) -> bool {
        self.dozing.load(Ordering::SeqCst) > 0
    }

    /// Something happened on this rank that the leader may wait for: ends its sleep.
    #[inline]
    pub(crate) fn notify(&self, bell: &(impl Bell + ?Sized)) {
        if self.asleep.load(Ordering::SeqCst) {
            bell.wake();
        }
    }
}

/// A mark that is set once, and wakes the thread that waits for it.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    set: AtomicBool,
    /// There is or was a waiter.
    expected: AtomicBool,
    waiter: Mutex<Option<Thread>>,
}

impl Latch {
    fn waiter(&self) -> MutexGuard<'_, Option<Thread>> {
        self.waiter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.set.load(Ordering::SeqCst)
    }

    /// The current thread is to be woken when it is set.
    pub(crate) fn wait_here(&self) {
        *self.waiter() = Some(thread::current());
        self.expected.store(true, Ordering::SeqCst);
    }

    #[inline]
    pub(crate) fn set(&self) {
        // Before the looks at who waits and at whether the leader sleeps, in the one order of all that they take part in.
        self.set.store(true, Ordering::SeqCst);
        if !self.expected.load(Ordering::SeqCst) {
            return;
        }
        let waiter = self.waiter().take();
        if let Some(waiter) = waiter
            && waiter.id() != thread::current().id()
        {
            waiter.unpark();
        }
    }
}

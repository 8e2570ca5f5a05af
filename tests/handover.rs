//! The hand-over of the polling role and the doorbell, run through the orders in which threads can meet.
//!
//! The two files are the library's own, compiled here over Shuttle's threads and atomics. Shuttle chooses which thread goes on at each access,
//! and reports a deadlock when nobody can. It has no clock: a sleep with a limit never ends by itself, so a wake-up that is lost, and which a
//! tick would hide in practice, is found. It takes every access as sequentially consistent, as all are but one, which may only be late.
//!
//! `HANDOVER_RUNS` sets how many orders of each case are tried.

#![allow(dead_code, reason = "the files have more users in the library")]

use std::collections::VecDeque;
use std::time::Duration;

mod sync {
    pub(crate) use shuttle::sync::{Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;

    pub(crate) mod atomic {
        pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
    }

    pub(crate) mod hint {
        pub(crate) use shuttle::hint::spin_loop;
    }

    pub(crate) const SPINS: usize = 1;

    pub(crate) mod thread {
        pub(crate) use shuttle::thread::{Thread, current, park_timeout, yield_now};
    }
}

#[path = "../src/transport/doorbell.rs"]
mod doorbell;
#[path = "../src/runtime/handover.rs"]
mod handover;

use doorbell::{Park, Sleeper, Slot};
use handover::{Bell, Duty, Handover, Latch, Next, Rest};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::{Config, Runner, thread};

/// Nothing in the model looks at it.
const LIMIT: Duration = Duration::from_secs(1);

/// A futex: compares and goes to sleep in one.
struct Futex {
    lock: Mutex<()>,
    changed: Condvar,
    fault: Fault,
}

impl Park for Futex {
    fn park(&self, ticket: &AtomicU32, seen: u32, _: Duration) {
        if self.fault == Fault::LooksTooEarly && ticket.load(SeqCst) != seen {
            return;
        }
        let guard = self.lock.lock().unwrap();
        // One look, then one sleep: it may also end for no reason.
        if self.fault == Fault::LooksTooEarly || ticket.load(SeqCst) == seen {
            drop(self.changed.wait(guard).unwrap());
        }
    }

    fn unpark(&self, _: &AtomicU32) {
        drop(self.lock.lock().unwrap());
        self.changed.notify_all();
    }
}

/// What is sent to the rank.
#[derive(Debug, Clone, Copy)]
enum Message {
    /// The answer that this waiter waits for.
    Answer(usize),
    /// A function, which blocks its thread until this answer has come.
    Function(usize),
}

/// What the model must find.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// A sender doesn't ring.
    DoesNotRing,
    /// A sleeper compares its ticket before it takes the lock under which it goes to sleep.
    LooksTooEarly,
    /// A thread of the rank that did what the leader waits for doesn't say so.
    KeepsSilent,
}

/// One rank.
struct Rank {
    handover: Handover,
    slot: Slot,
    sleeper: Sleeper,
    futex: Futex,
    inbox: Mutex<VecDeque<Message>>,
    polling: AtomicBool,
    answers: Vec<Latch>,
    stopped: AtomicBool,
    fault: Fault,
    /// Messages received, and service threads that have ended.
    counts: Mutex<(usize, usize)>,
    counted: Condvar,
}

impl Bell for Rank {
    fn set_away(&self, away: bool) -> bool {
        self.sleeper.set_away(&self.slot, away, || false)
    }

    fn sleep(&self, limit: Duration) {
        self.sleeper.sleep(&self.slot, &self.futex, limit, || false);
    }

    fn doze(&self, limit: Duration) {
        self.sleeper.doze(&self.slot, &self.futex, limit);
    }

    fn wake(&self) {
        self.sleeper.wake(&self.slot, &self.futex);
    }
}

impl Rank {
    fn new(answers: usize, fault: Fault) -> Arc<Rank> {
        Arc::new(Rank {
            handover: Handover::default(),
            slot: Slot::default(),
            sleeper: Sleeper::default(),
            futex: Futex {
                lock: Mutex::default(),
                changed: Condvar::default(),
                fault,
            },
            inbox: Mutex::default(),
            polling: AtomicBool::new(false),
            answers: (0..answers).map(|_| Latch::default()).collect(),
            stopped: AtomicBool::new(false),
            fault,
            counts: Mutex::default(),
            counted: Condvar::default(),
        })
    }

    fn count(&self, add: impl FnOnce(&mut (usize, usize))) {
        add(&mut self.counts.lock().unwrap());
        self.counted.notify_all();
    }

    fn wait_for_counts(&self, mut there: impl FnMut(&(usize, usize)) -> bool) {
        let counts = self.counts.lock().unwrap();
        drop(self.counted.wait_while(counts, |counts| !there(counts)).unwrap());
    }

    /// What another rank does.
    fn send(&self, message: Message) {
        self.slot.post();
        self.inbox.lock().unwrap().push_back(message);
        if self.fault != Fault::DoesNotRing {
            self.slot.ring(&self.futex);
        }
    }

    /// An answer came: sets it, and does what the driver does after an event.
    fn answer(&self, which: usize) {
        self.answers[which].set();
        if self.fault != Fault::KeepsSilent {
            self.handover.notify(self);
        }
    }

    fn wait(self: &Arc<Self>, which: usize) {
        let mut duty = Waiter {
            rank: Arc::clone(self),
            over: Over::Answered(which),
            rested: false,
            found: None,
        };
        assert_eq!(self.handover.turn(&**self, &mut duty, Rest::Leading), Ok(true));
    }

    fn serve(self: &Arc<Self>) {
        let mut duty = Waiter {
            rank: Arc::clone(self),
            over: Over::Stopped,
            rested: false,
            found: None,
        };
        assert_eq!(self.handover.turn(&**self, &mut duty, Rest::Vacant), Ok(true));
    }
}

#[derive(Clone, Copy)]
enum Over {
    Answered(usize),
    Stopped,
}

struct Waiter {
    rank: Arc<Rank>,
    over: Over,
    rested: bool,
    /// The answer that a function blocks on, which the last poll has found.
    found: Option<usize>,
}

impl Duty for Waiter {
    type Error = std::convert::Infallible;

    fn is_done(&self) -> bool {
        match self.over {
            Over::Answered(which) => self.rank.answers[which].is_set(),
            Over::Stopped => self.rank.stopped.load(SeqCst),
        }
    }

    fn is_late(&mut self) -> bool {
        // As the driver after a rest that ended at once: a sender that has counted may not have sent yet.
        if std::mem::take(&mut self.rested) {
            thread::yield_now();
        }
        false
    }

    fn expect_wake(&self) {
        if let Over::Answered(which) = self.over {
            self.rank.answers[which].wait_here();
        }
    }

    fn poll(&mut self) -> Result<Next, Self::Error> {
        let rank = &self.rank;
        assert!(!rank.polling.swap(true, SeqCst), "two threads hold the role");
        let message = rank.inbox.lock().unwrap().pop_front();
        if message.is_some() {
            rank.slot.took();
        }
        assert!(rank.polling.swap(false, SeqCst));
        if message.is_some() {
            rank.count(|counts| counts.0 += 1);
        }
        Ok(match message {
            None => {
                self.rested = true;
                Next::Rest
            }
            Some(Message::Answer(which)) => {
                rank.answer(which);
                Next::Again
            }
            Some(Message::Function(blocks_on)) => match self.over {
                Over::Stopped if rank.handover.is_anyone_dozing() => {
                    self.found = Some(blocks_on);
                    Next::Run
                }
                _ => {
                    // To the pool, which has a thread for it.
                    let rank = Arc::clone(rank);
                    thread::spawn(move || block(&rank, blocks_on));
                    Next::Again
                }
            },
        })
    }

    fn run(&mut self) -> Result<(), Self::Error> {
        if let Some(blocks_on) = self.found.take() {
            block(&self.rank, blocks_on);
        }
        Ok(())
    }

    fn rest(&self) -> Duration {
        LIMIT
    }

    fn doze(&self, _: bool) -> Duration {
        LIMIT
    }
}

/// Blocks where the library doesn't see it, so the thread can't poll meanwhile.
fn block(rank: &Rank, which: usize) {
    rank.answers[which].wait_here();
    while !rank.answers[which].is_set() {
        thread::park();
    }
}

/// A rank with so many waiters and service threads, to which these messages are sent, each by a sender of its own. Waiter `k` waits for answer `k`.
/// `local` is answered by another thread of the rank.
fn model(waiters: usize, services: usize, messages: &'static [Message], local: Option<usize>, fault: Fault) {
    let rank = Rank::new(4, fault);
    let serving: Vec<_> = (0..services)
        .map(|_| {
            let rank = Arc::clone(&rank);
            thread::spawn(move || {
                rank.serve();
                rank.count(|counts| counts.1 += 1);
            })
        })
        .collect();
    let mut threads: Vec<_> = messages
        .iter()
        .map(|&message| {
            let rank = Arc::clone(&rank);
            thread::spawn(move || rank.send(message))
        })
        .collect();
    threads.extend(local.map(|which| {
        let rank = Arc::clone(&rank);
        thread::spawn(move || rank.answer(which))
    }));
    threads.extend((1..waiters).map(|which| {
        let rank = Arc::clone(&rank);
        thread::spawn(move || rank.wait(which))
    }));
    rank.wait(0);
    for thread in threads {
        thread.join().unwrap();
    }
    // What nobody waits for is received, too.
    rank.wait_for_counts(|counts| counts.0 == messages.len() || services == 0);
    rank.stopped.store(true, SeqCst);
    // As the end of a world does: one wake may be used up by another thread.
    for already in 0..services {
        rank.wake();
        rank.wait_for_counts(|counts| counts.1 > already);
    }
    for thread in serving {
        thread.join().unwrap();
    }
}

fn runs() -> usize {
    std::env::var("HANDOVER_RUNS")
        .ok()
        .and_then(|runs| runs.parse().ok())
        .unwrap_or(20_000)
}

/// Half of the orders by chance, half with few, well placed changes of thread.
fn check(model: impl Fn() + Send + Sync + Clone + 'static) {
    let mut config = Config::new();
    config.silence_warnings = true; // one look is weaker: `Relaxed` in `take`, and may be late
    Runner::new(RandomScheduler::new(runs() / 2), config.clone()).run(model.clone());
    Runner::new(PctScheduler::new(3, runs() / 2), config).run(model);
}

use Message::{Answer, Function};

#[test]
fn a_leader_and_the_service_thread() {
    check(|| model(1, 1, &[Answer(0)], None, Fault::None));
}

#[test]
fn a_leader_a_follower_and_the_service_thread() {
    check(|| model(2, 1, &[Answer(0), Answer(1)], None, Fault::None));
}

#[test]
fn two_followers_without_a_service_thread() {
    check(|| model(3, 0, &[Answer(1), Answer(2), Answer(0)], None, Fault::None));
}

#[test]
fn an_answer_from_a_thread_of_the_same_rank() {
    check(|| model(2, 1, &[Answer(1)], Some(0), Fault::None));
}

#[test]
fn a_message_that_nobody_waits_for_is_received() {
    check(|| model(1, 1, &[Answer(0), Answer(3)], None, Fault::None));
}

#[test]
fn a_function_that_blocks_leaves_a_thread_to_poll() {
    check(|| model(1, 2, &[Function(3), Answer(3), Answer(0)], None, Fault::None));
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_model_finds_a_sender_that_does_not_ring() {
    check(|| model(1, 0, &[Answer(0)], None, Fault::DoesNotRing));
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_model_finds_a_sleeper_that_looks_too_early() {
    check(|| model(1, 0, &[Answer(0)], None, Fault::LooksTooEarly));
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_model_finds_an_answer_that_is_not_told() {
    check(|| model(1, 0, &[], Some(0), Fault::KeepsSilent));
}

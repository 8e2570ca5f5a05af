//! Who polls, who runs, who sleeps. The essay is `README.md` beside this file.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::handover::{Bell, Duty, Handover, Next, Rest};
use super::{After, Runtime, Todo};
use crate::protocol::ContextId;
use crate::transport::{Delivery, Transport};
use crate::{Error, Result};

/// What a thread that polls may run itself. The rest goes to the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permission {
    /// Nothing: there is a user's frame below, and a function on top of it could bury its wait.
    Nothing,
    /// The engine of this backward, which the thread waits for anyway.
    Engine(ContextId),
    /// Everything: no user's frame is below.
    Everything,
}

/// After so long without a message, a rank whose peers can all ring sleeps for longer.
const QUIET: Duration = Duration::from_millis(100);

/// How long an unfinished send keeps a thread from sleeping.
const PATIENCE: Duration = Duration::from_millis(100);

/// So long it doesn't even let others run.
const EAGERNESS: Duration = Duration::from_millis(1);

/// How long a poller stands back from a host's MPI call, where MPI allows one at a time.
const HOST_CALL: Duration = Duration::from_micros(50);

/// A service thread that never sleeps looks after the pool once in so many polls.
const RELIEF: u32 = 1024;

/// So many polls in a row without looking at the clock.
const POLLS: u32 = 4;

/// So many looks at what may have arrived between two polls that find nothing: about a microsecond.
const LOOKS: u32 = 32;

/// And between two offers of the core, which are system calls, and slow down a thread that shares it with this one in hardware.
const LOOKS_A_YIELD: u32 = 4 * LOOKS;

thread_local! {
    /// Where messages arrive, kept between waits.
    static INBOX: Cell<Vec<(u32, Delivery)>> = const { Cell::new(Vec::new()) };

    /// Since when nothing has moved, if the thread's last wait was late: the next goes on with the same quiet.
    static QUIET_SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// A rest that was shorter ended because something is on the way that can't be seen yet.
const NO_REST: Duration = Duration::from_micros(5);

#[derive(Debug, Default)]
pub(super) struct Progress {
    handover: Handover,
    /// The second service thread was started.
    standby: AtomicBool,
}

impl Bell for dyn Transport {
    fn set_away(&self, away: bool) -> bool {
        Transport::set_away(self, away)
    }

    fn sleep(&self, limit: Duration) {
        Transport::sleep(self, limit);
    }

    fn doze(&self, limit: Duration) {
        Transport::doze(self, limit);
    }

    fn wake(&self) {
        Transport::wake(self);
    }
}

/// One thread's wait.
struct Wait<'a> {
    runtime: &'a Arc<Runtime>,
    done: &'a dyn Fn() -> bool,
    expect_wake: &'a dyn Fn(),
    permission: Permission,
    deadline: Option<Instant>,
    rest: Rest,
    /// About now: when this round, or one of the last few, began.
    now: Instant,
    /// Polls of a service thread that never sleeps.
    vacant: u32,
    /// Polls until the clock is looked at.
    polls: u32,
    /// Something was received or run since then, which may have taken long.
    busy: bool,
    inbox: Vec<(u32, Delivery)>,
    after: After,
    quiet_since: Option<Instant>,
    /// Something has moved since the last rest.
    stirred: bool,
    rested: bool,
    /// Looks before the next poll, which then meets what they saw at once.
    looks: u32,
    /// When it last looked after what else is to be done now and then.
    tidied: Option<Instant>,
}

impl Duty for Wait<'_> {
    type Error = Error;

    fn is_done(&self) -> bool {
        (self.done)()
    }

    fn is_late(&mut self) -> bool {
        if let Some(polls) = self.polls.checked_sub(1) {
            self.polls = polls;
            return false;
        }
        if std::mem::take(&mut self.rested) && self.now.elapsed() < NO_REST {
            std::thread::yield_now();
        }
        self.now = Instant::now();
        self.deadline.is_some_and(|d| self.now >= d)
    }

    fn expect_wake(&self) {
        (self.expect_wake)();
    }

    fn poll(&mut self) -> Result<Next> {
        let runtime = self.runtime;
        if self.looks > 0 {
            runtime.transport.spin(std::mem::take(&mut self.looks));
        }
        let moved = runtime.poll(&mut self.inbox, &mut self.after)?;
        self.stirred |= moved;
        self.busy |= moved;
        if !self.after.todos.is_empty() {
            runtime.share_out(&mut self.after.todos, self.permission);
            if !self.after.todos.is_empty() {
                self.quiet_since = None;
                return Ok(Next::Run);
            }
        }
        if moved {
            self.quiet_since = None;
            return Ok(Next::Again);
        }
        if runtime.host_calls() {
            runtime.pool.relieve();
            std::thread::sleep(HOST_CALL); // nothing moves meanwhile
            return Ok(Next::Again);
        }
        if runtime.dedicated && self.rest == Rest::Vacant {
            // Never sleeps, and stands back for whoever waits.
            self.vacant = self.vacant.wrapping_add(1);
            if self.vacant.is_multiple_of(RELIEF) {
                runtime.pool.relieve();
            }
            std::hint::spin_loop();
            return Ok(Next::StandBack);
        }
        match self.quiet_since {
            None => {
                if std::mem::take(&mut self.busy) {
                    self.now = Instant::now();
                    self.polls = POLLS;
                }
                self.quiet_since = Some(self.now);
            }
            // A service thread that only looked after its tick doesn't keep the role from those who wait.
            Some(since) if self.stirred && runtime.spin.goes_on(self.now - since, self.now) => {
                self.looks = LOOKS;
            }
            // MPI moves large messages only while somebody polls.
            Some(since) if runtime.transport.in_flight() > 0 && self.now - since < PATIENCE => {
                // On a core of its own it is quicker to come back at once than to ask the system first.
                if self.now - since > EAGERNESS || !runtime.spin.is_harmless() {
                    std::thread::yield_now();
                }
            }
            Some(since) if self.rest == Rest::Leading && runtime.spin.offers(self.now - since, self.now) => self.offer_core(),
            Some(_) => {
                runtime.pool.relieve();
                self.rested = true;
                self.polls = 0; // a rest takes long
                self.stirred = self.rest == Rest::Leading;
                return Ok(Next::Rest);
            }
        }
        Ok(Next::Again)
    }

    fn run(&mut self) -> Result<()> {
        self.after.todos.pop().map_or(Ok(()), |work| self.runtime.run(work, None))
    }

    fn rest(&self) -> Duration {
        let tick = self.tick();
        self.deadline.map_or(tick, |d| tick.min(d.saturating_duration_since(self.now)))
    }

    fn doze(&self, quiet: bool) -> Duration {
        match quiet {
            true => self.tick(),
            false if self.runtime.one_node => self.tick() * 8,
            false => self.tick(),
        }
    }
}

impl Wait<'_> {
    /// Lets others run on this core, if there are any, and looks for a while.
    fn offer_core(&mut self) {
        let runtime = self.runtime;
        let start = Instant::now();
        std::thread::yield_now();
        let end = Instant::now();
        runtime.spin.offered(end - start, end);
        (self.now, self.polls) = (end, 0);
        if self.tidied.is_none_or(|before| end - before > runtime.pace.tick) {
            self.tidied = Some(end);
            runtime.pool.relieve();
            runtime.transport.tidy();
        }
        self.looks = LOOKS_A_YIELD;
    }

    #[inline]
    fn tick(&self) -> Duration {
        let tick = self.runtime.pace.tick;
        let quiet = self.quiet_since.is_some_and(|since| self.now - since > QUIET);
        if self.runtime.one_node && quiet { tick * 4 } else { tick }
    }
}

impl Runtime {
    /// Polls, or waits while another thread does, until `done` holds or the deadline passes; says whether it holds.
    pub(crate) fn wait_until(self: &Arc<Self>, done: &dyn Fn() -> bool, permission: Permission, deadline: Option<Instant>) -> Result<bool> {
        self.wait_from(Instant::now(), done, &|| (), permission, deadline)
    }

    /// As [`wait_until`](Self::wait_until), where it is about `now`; `expect_wake` is called before the thread sleeps while another one polls.
    pub(super) fn wait_from(
        self: &Arc<Self>,
        now: Instant,
        done: &dyn Fn() -> bool,
        expect_wake: &dyn Fn(),
        permission: Permission,
        deadline: Option<Instant>,
    ) -> Result<bool> {
        if done() {
            return Ok(true);
        }
        self.pool
            .blocking(|| self.turn(now, done, expect_wake, permission, deadline, Rest::Leading))
    }

    /// The service thread's whole life.
    pub(super) fn serve_forever(self: &Arc<Self>) -> Result<()> {
        let stopped = || self.is_stopped();
        self.turn(Instant::now(), &stopped, &|| (), Permission::Everything, None, Rest::Vacant)
            .map(drop)
    }

    fn turn(
        self: &Arc<Self>,
        now: Instant,
        done: &dyn Fn() -> bool,
        expect_wake: &dyn Fn(),
        permission: Permission,
        deadline: Option<Instant>,
        rest: Rest,
    ) -> Result<bool> {
        let mut wait = Wait {
            runtime: self,
            done,
            expect_wake,
            permission,
            deadline,
            rest,
            now,
            vacant: 0,
            polls: POLLS,
            busy: false,
            inbox: INBOX.take(),
            after: After::default(),
            quiet_since: QUIET_SINCE.take(),
            stirred: rest == Rest::Leading,
            rested: false,
            looks: 0,
            tidied: None,
        };
        let result = self.progress.handover.turn(&*self.transport, &mut wait, rest);
        INBOX.set(wait.inbox);
        if let Ok(false) = result {
            QUIET_SINCE.set(wait.quiet_since);
        }
        result
    }

    /// Hands work to the pool; leaves one piece at most, which this thread runs itself.
    fn share_out(self: &Arc<Self>, todos: &mut SmallVec<[Todo; 1]>, permission: Permission) {
        let is_mine = |todo: &Todo| match (permission, todo) {
            (Permission::Everything, Todo::Task { heavy, .. }) => !heavy,
            (Permission::Everything, Todo::Engine { .. }) => true,
            (Permission::Engine(mine), Todo::Engine { context, .. }) => mine == *context,
            _ => false,
        };
        // Of several only what it waits for: others may be as long.
        let mine = match permission {
            Permission::Everything if todos.len() > 1 => None,
            _ => todos.iter().position(is_mine),
        };
        match mine.filter(|_| self.is_heard_without_me()) {
            Some(0) if todos.len() == 1 => {}
            mine => {
                let mine = mine.map(|place| todos.remove(place));
                for todo in todos.drain(..) {
                    self.hand_over(todo);
                }
                todos.extend(mine);
            }
        }
    }

    /// Something happened on this rank that the leader may wait for: ends its sleep.
    #[inline]
    pub(super) fn wake_leader(&self) {
        self.progress.handover.notify(&*self.transport);
    }

    /// Whether another thread would hear a sender ring while this one runs a function, however long that takes. If there is only one service
    /// thread yet, starts the other.
    #[inline]
    fn is_heard_without_me(self: &Arc<Self>) -> bool {
        if self.progress.handover.is_anyone_dozing() {
            return true;
        }
        let first = !self.progress.standby.swap(true, Ordering::SeqCst);
        if first {
            self.spawn_service("standby");
        }
        first
    }
}

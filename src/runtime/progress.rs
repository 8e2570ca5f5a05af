//! Who polls, who runs, who sleeps. The essay is `README.md` beside this file.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::{Runtime, Todo};
use crate::Result;
use crate::protocol::ContextId;

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
const QUIET: Duration = Duration::from_secs(1);

/// How long an unfinished send keeps a thread from sleeping.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long a poller stands back from a host's MPI call, where MPI allows one at a time.
const HOST_CALL: Duration = Duration::from_micros(50);

/// How a thread with nothing to do rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// With the polling role in hand, so that what arrives meets no second thread.
    Leading,
    /// With the role left vacant for whoever waits next.
    Vacant,
}

#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The polling role.
    taken: AtomicBool,
    /// Threads that wait while another one polls.
    followers: Mutex<Vec<Thread>>,
    /// Service threads that sleep, ready to poll when a sender rings.
    dozing: AtomicUsize,
    standby: AtomicBool,
    /// The leader sleeps, or is about to look once more whether it need.
    asleep: AtomicBool,
}

impl Progress {
    fn take(&self) -> bool {
        !self.taken.load(Ordering::Relaxed)
            && self
                .taken
                .compare_exchange(false, true, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
    }

    fn is_vacant(&self) -> bool {
        !self.taken.load(Ordering::SeqCst)
    }

    fn followers(&self) -> std::sync::MutexGuard<'_, Vec<Thread>> {
        self.followers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn to poll, or to be woken by the answer, no longer than `limit`.
    fn follow(&self, limit: Duration) {
        let me = std::thread::current();
        self.followers().push(me.clone());
        if !self.is_vacant() {
            std::thread::park_timeout(limit);
        }
        self.followers().retain(|t| t.id() != me.id());
    }
}

impl Runtime {
    /// Polls, or waits while another thread does, until `done` holds or the deadline passes; says whether it holds.
    pub(crate) fn wait_until(self: &Arc<Self>, done: &dyn Fn() -> bool, permission: Permission, deadline: Option<Instant>) -> Result<bool> {
        if done() {
            return Ok(true);
        }
        self.pool.blocking(|| self.turn(done, permission, deadline, Rest::Leading))
    }

    /// The service thread's whole life.
    pub(super) fn serve_forever(self: &Arc<Self>) -> Result<()> {
        self.turn(&|| self.is_stopped(), Permission::Everything, None, Rest::Vacant)
            .map(drop)
    }

    fn turn(self: &Arc<Self>, done: &dyn Fn() -> bool, permission: Permission, deadline: Option<Instant>, rest: Rest) -> Result<bool> {
        let (spin, tick) = (self.settings.spin(), self.settings.tick());
        let mut leading = false;
        let mut quiet_since: Option<Instant> = None;
        let result = loop {
            if done() {
                break Ok(true);
            }
            let now = Instant::now();
            if deadline.is_some_and(|d| now >= d) {
                break Ok(false);
            }
            let tick = if self.one_node && quiet_since.is_some_and(|since| now - since > QUIET) {
                tick * 4
            } else {
                tick
            };
            let limit = deadline.map_or(tick, |d| tick.min(d - now));
            if !leading {
                leading = self.progress.take();
                if leading {
                    self.transport.set_away(false);
                } else if rest == Rest::Vacant {
                    self.doze(if self.one_node { tick * 8 } else { tick });
                    continue;
                } else {
                    self.progress.follow(limit);
                    continue;
                }
            }
            let (moved, todos) = match self.poll() {
                Ok(polled) => polled,
                Err(e) => break Err(e),
            };
            if let Some(mine) = self.share_out(todos, permission) {
                quiet_since = None;
                if !self.is_heard_without_me() {
                    self.push_to_pool(mine);
                    continue;
                }
                self.leave();
                leading = false;
                if let Err(e) = self.run(mine, None) {
                    break Err(e);
                }
                continue;
            }
            if moved {
                quiet_since = None;
                continue;
            }
            if self.host_calls() {
                std::thread::sleep(HOST_CALL); // nothing moves meanwhile
                continue;
            }
            if self.dedicated && rest == Rest::Vacant {
                // Never sleeps, and stands back for whoever waits.
                self.leave();
                leading = false;
                std::hint::spin_loop();
                continue;
            }
            match quiet_since {
                None => quiet_since = Some(now),
                Some(since) if now - since < spin => std::hint::spin_loop(),
                // MPI moves large messages only while somebody polls.
                Some(since) if self.transport.in_flight() > 0 && now - since < PATIENCE => std::thread::yield_now(),
                Some(_) if rest == Rest::Leading => {
                    self.pool.relieve();
                    // What it waits for may happen on another thread of this rank, which looks at this mark after it did its part.
                    self.progress.asleep.store(true, Ordering::SeqCst);
                    if !done() {
                        self.transport.sleep(limit);
                    }
                    self.progress.asleep.store(false, Ordering::SeqCst);
                    if now.elapsed() < Duration::from_micros(5) {
                        std::thread::yield_now(); // something is on the way, and not to be seen yet
                    }
                }
                Some(_) => {
                    self.pool.relieve();
                    self.leave();
                    leading = false;
                    self.doze(tick);
                    if now.elapsed() < Duration::from_micros(5) {
                        std::thread::yield_now();
                    }
                }
            }
        };
        // A leader that left may have chosen this thread to go on, which has no need to any more: the role must not lie vacant unseen.
        if leading || (rest == Rest::Leading && self.progress.take()) {
            self.leave();
        }
        result
    }

    /// Leaves the polling role vacant. A thread that waits takes it; if there is none, a sender will ring, which wakes the service thread.
    fn leave(&self) {
        self.progress.taken.store(false, Ordering::SeqCst);
        let follower = self.progress.followers().pop();
        if let Some(follower) = follower {
            follower.unpark();
            return;
        }
        if self.transport.set_away(true) && !self.is_stopped() {
            self.transport.wake();
        }
    }

    /// Picks what this thread runs itself; hands the rest to the pool.
    fn share_out(self: &Arc<Self>, todos: Vec<Todo>, permission: Permission) -> Option<Todo> {
        let mut mine = None;
        let alone = todos.len() == 1 && permission == Permission::Everything && self.is_heard_without_me();
        for todo in todos {
            let allowed = match (permission, &todo) {
                (_, Todo::OnMain { .. }) => {
                    self.push_main(todo);
                    continue;
                }
                (Permission::Everything, Todo::Task { heavy, .. }) => alone && !heavy,
                (Permission::Everything, Todo::Engine { .. }) => alone,
                (Permission::Engine(mine), Todo::Engine { context, .. }) => mine == *context,
                _ => false,
            };
            if allowed && mine.is_none() {
                mine = Some(todo);
            } else {
                self.push_to_pool(todo);
            }
        }
        mine
    }

    fn doze(&self, limit: Duration) {
        self.progress.dozing.fetch_add(1, Ordering::SeqCst);
        self.transport.doze(limit);
        self.progress.dozing.fetch_sub(1, Ordering::SeqCst);
    }

    /// Something happened on this rank that the leader may wait for: ends its sleep.
    pub(super) fn wake_leader(&self) {
        if self.progress.asleep.load(Ordering::SeqCst) {
            self.transport.wake();
        }
    }

    /// Whether another thread would hear a sender ring while this one runs a function, however long that takes. If there is only one service
    /// thread yet, starts the other.
    fn is_heard_without_me(self: &Arc<Self>) -> bool {
        if self.progress.dozing.load(Ordering::SeqCst) > 0 {
            return true;
        }
        let first = !self.progress.standby.swap(true, Ordering::SeqCst);
        if first {
            self.spawn_service("standby");
        }
        first
    }
}

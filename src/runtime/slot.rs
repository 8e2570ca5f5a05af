//! Where an answer is put for the thread that waits for it, or for a callback.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::handover::Latch;
use crate::Result;
use crate::protocol::Status;
use crate::wire::Delivered;

/// What a request came to.
pub(crate) type Reply = Result<Delivered>;

thread_local! {
    static SPARE: Cell<Option<Arc<Slot>>> = const { Cell::new(None) };
}

type Callback = Box<dyn FnOnce(Reply) + Send>;

/// Tells a thread that one of several answers is an error.
#[derive(Default)]
pub(crate) struct Alarm(Latch);

impl std::fmt::Debug for Alarm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Alarm").field(&self.has_rung()).finish()
    }
}

impl Alarm {
    /// For the current thread.
    #[inline]
    pub(crate) fn new() -> Arc<Self> {
        let alarm = Arc::<Self>::default();
        alarm.0.wait_here();
        alarm
    }

    #[inline]
    pub(crate) fn has_rung(&self) -> bool {
        self.0.is_set()
    }

    fn ring(&self) {
        self.0.set();
    }
}

#[derive(Default)]
struct State {
    reply: Option<Reply>,
    alarm: Option<Arc<Alarm>>,
    callback: Option<Callback>,
    status: Option<(Status, Instant)>,
    /// When the receiver last said that it has the request.
    heard: Option<Instant>,
}

impl State {
    /// Whether anything but the answer was put in.
    fn is_used(&self) -> bool {
        self.alarm.is_some() || self.callback.is_some() || self.status.is_some() || self.heard.is_some()
    }
}

/// One answer, once.
#[derive(Default)]
pub(crate) struct Slot {
    done: Latch,
    state: Mutex<State>,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("done", &self.is_done()).finish_non_exhaustive()
    }
}

impl Slot {
    #[inline]
    pub(crate) fn new() -> Arc<Self> {
        SPARE.take().unwrap_or_default()
    }

    /// Keeps one whose answer was taken for the thread's next request.
    #[inline]
    pub(crate) fn keep(slot: Arc<Self>) {
        Self::into_reply(slot);
    }

    /// Takes the answer out of one that its owner is done with, and keeps it for the thread's next request.
    #[inline]
    pub(crate) fn into_reply(mut slot: Arc<Self>) -> Option<Reply> {
        // Mostly nobody else has it any more, and it needs no lock.
        let Some(used) = Arc::get_mut(&mut slot) else { return slot.take() };
        used.done = Latch::default();
        let state = used.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let reply = state.reply.take();
        if state.is_used() {
            *state = State::default();
        }
        SPARE.set(Some(slot));
        reply
    }

    #[inline]
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        self.done.is_set()
    }

    /// Puts the answer in; returns the callback to run with it, if there is one.
    #[inline]
    pub(crate) fn complete(&self, reply: Reply) -> Option<(Callback, Reply)> {
        let mut state = self.state();
        let alarm = state.alarm.take().filter(|_| reply.is_err());
        let taken = match state.callback.take() {
            Some(callback) => Some((callback, reply)),
            None => {
                state.reply = Some(reply);
                None
            }
        };
        self.done.set();
        // Who hears it looks for an answer that is there.
        if let Some(alarm) = alarm {
            alarm.ring();
        }
        taken
    }

    /// Takes the answer.
    #[inline]
    pub(crate) fn take(&self) -> Option<Reply> {
        self.state().reply.take()
    }

    /// The current thread is to be woken when the answer comes.
    pub(crate) fn wait_here(&self) {
        self.done.wait_here();
    }

    /// The alarm is to ring if the answer is an error; at once if it is here already.
    pub(crate) fn ring_on_error(&self, alarm: &Arc<Alarm>) {
        let mut state = self.state();
        if matches!(state.reply, Some(Err(_))) {
            alarm.ring();
        } else {
            state.alarm = Some(Arc::clone(alarm));
        }
    }

    /// Sets a callback; gives it back with the answer if that is here already.
    pub(crate) fn on_complete(&self, callback: Callback) -> Option<(Callback, Reply)> {
        let mut state = self.state();
        if let Some(reply) = state.reply.take() {
            return Some((callback, reply));
        }
        state.callback = Some(callback);
        None
    }

    /// The receiver has said how the request fares.
    pub(crate) fn report(&self, status: Status) {
        let now = Instant::now();
        let mut state = self.state();
        state.status = Some((status, now));
        if status.is_sign_of_life() {
            state.heard = Some(now);
        }
    }

    /// The last such word.
    pub(crate) fn status(&self) -> Option<(Status, Instant)> {
        self.state().status
    }

    /// When the receiver last said that it has the request.
    pub(crate) fn heard(&self) -> Option<Instant> {
        self.state().heard
    }
}

//! What a rank knows and decides, as a state machine without MPI, threads, clocks or user code.
//!
//! A driver feeds a [`Rank`] with what happens (a message, a finished piece of work, a wish of the program on this rank) and carries out
//! the [`Action`]s that come of it, in order. Values and payloads are opaque here: `V` is what a value table holds, `P` what travels beside a message.
//! Messages between two ranks must be delivered in the order of their `Send` actions.

mod backward;
mod contexts;
mod drain;
mod ids;
#[cfg(any(test, feature = "sim"))]
mod inspect;
mod last;
mod liveness;
mod message;
mod references;
mod registering;
mod releasing;
mod requests;
mod tasks;
mod turns;
mod wishes;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

pub(crate) use backward::{Input, Output};
pub(crate) use drain::children;
pub use ids::{ContextId, OptimizerId, RefId, ValueId};
pub(crate) use ids::{CrossingId, RequestId, TaskId};
pub use message::Mode;
#[cfg(any(test, feature = "faults", feature = "sim"))]
pub(crate) use message::Part;
pub(crate) use message::{Answer, Gate, Manner, Message, Op, Status, Tag};
use references::{Lookup, References};
pub(crate) use turns::Turn;

use rustc_hash::FxHashMap;

use crate::Error;
use crate::mutant::{self, Mutant};

/// Time since the start of the world.
pub(crate) type Instant = Duration;

/// Work for the driver.
#[derive(Debug, PartialEq)]
pub(crate) enum Work<V, P> {
    /// Run a function on what came along.
    Call {
        function: u32,
        creates: bool,
        queued: bool,
        context: Option<Box<Tag>>,
        payload: P,
        refs: Vec<RefId>,
    },
    /// Put a value into a reply.
    Encode { value: V, context: Option<Box<Tag>> },
}

/// What came of it.
#[derive(Debug)]
pub(crate) enum Outcome<V, P> {
    /// A result to send back.
    Reply {
        payload: P,
        refs: Vec<RefId>,
        crossing: Option<CrossingId>,
    },
    /// A result to keep.
    Value(V),
    /// Neither.
    Error(Error),
}

/// What the driver is to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Action<V, P> {
    /// Send a message to another rank.
    Send { to: u32, message: Message, payload: P },
    /// Do some work, then call [`Rank::done`].
    Run { task: TaskId, work: Work<V, P> },
    /// Let the engine of a backward work, then call [`Rank::engine_done`].
    Engine {
        context: ContextId,
        retain_graph: bool,
        inputs: Vec<Input<P>>,
    },
    /// A request of this rank was answered. The payload holds a handle on each of `refs`.
    Answered {
        request: RequestId,
        from: u32,
        answer: Answer,
        outcome: Result<P, Error>,
        refs: Vec<RefId>,
    },
    /// A backward of this rank ended.
    BackwardDone { context: ContextId, result: Result<(), Error> },
    /// A context was released: drop what belongs to it.
    Forget { context: ContextId },
    /// Values nobody holds any more.
    Garbage { values: Vec<V> },
    /// The receiver of a request says how it fares.
    Report { request: RequestId, status: Status },
    /// Rank 0's part in `lead` is over.
    Led { error: Option<String> },
    /// All ranks have come to the end of the epoch, and nothing is on the way; `last` if all are finishing.
    Ended { last: bool },
}

/// Who made a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The program; `window` is the size it counts for, if it does.
    Program { window: Option<usize> },
    /// A backward.
    Backward(ContextId),
    /// The release of a context.
    Release(u64),
}

#[derive(Debug)]
struct Outgoing {
    to: u32,
    origin: Origin,
    context: Option<ContextId>,
    /// References of third ranks in it, kept until it is answered.
    pins: Vec<RefId>,
}

#[derive(Debug)]
struct Incoming<V, P> {
    stage: Stage<V, P>,
    creates: Option<ValueId>,
    turn: Turn,
    /// It mustn't run during a backward of this context.
    gradients_of: Option<ContextId>,
    /// The request made its sender this rank's parent in a context.
    new_child: bool,
    /// Registrations that must be acknowledged before the reply may go.
    unconfirmed: usize,
}

#[derive(Debug)]
enum Stage<V, P> {
    /// Waits for so many values.
    Parked(usize, Box<(Op, Vec<RefId>, P)>),
    Queued(Box<Work<V, P>>),
    Running(Instant),
    /// Answered as soon as registrations are confirmed.
    Held(Box<HeldReply<P>>),
}

#[derive(Debug)]
struct HeldReply<P> {
    answer: Answer,
    outcome: Result<(), Error>,
    refs: Vec<RefId>,
    payload: P,
}

/// Limits on what a rank may have outstanding at another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub requests: usize,
    pub bytes: usize,
}

/// How a release of a context goes on once all children have answered.
#[derive(Debug)]
struct Release {
    left: usize,
    task: Option<TaskId>,
    request: Option<RequestId>,
}

/// Counts of what is alive on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Counters {
    /// Values that live on this rank.
    pub values: usize,
    /// References held on this rank, to values anywhere.
    pub handles: usize,
    /// Requests of this rank that haven't been answered.
    pub requests: usize,
    /// Requests of other ranks (and of this one to itself) that this rank hasn't answered.
    pub tasks: usize,
    /// Contexts that this rank knows.
    pub contexts: usize,
    /// Backwards under way on this rank.
    pub backwards: usize,
}

/// The state of one rank.
#[derive(Debug)]
pub(crate) struct Rank<V, P> {
    me: u32,
    size: u32,
    now: Instant,
    refs: References<V>,
    contexts: Contexts,
    backwards: FxHashMap<ContextId, backward::Backward<P>>,
    outgoing: FxHashMap<RequestId, Outgoing>,
    incoming: FxHashMap<TaskId, Incoming<V, P>>,
    /// References of third ranks in replies of ours, kept until the receiver confirms.
    reply_pins: FxHashMap<TaskId, Vec<RefId>>,
    /// Registrations under way, oldest first: for each, who waits for it.
    registering: FxHashMap<RefId, VecDeque<Registering>>,
    /// Replies to confirm once so many registrations are through.
    confirming: FxHashMap<TaskId, usize>,
    releases: FxHashMap<u64, Release>,
    turns: turns::Turns,
    window: Window,
    outstanding: FxHashMap<u32, (usize, usize)>,
    drain: drain::Drain,
    sent: u64,
    received: u64,
    next_request: RequestId,
    /// Messages to oneself.
    local: VecDeque<(Message, P)>,
    actions: Vec<Action<V, P>>,
}

use contexts::Contexts;

#[derive(Debug, Clone, Copy)]
enum Registering {
    /// A task's reply waits.
    Task(TaskId),
    /// A confirmation to the sender of a reply waits; `from` is the sender.
    Reply(TaskId),
    /// Nobody does.
    Nobody,
}

impl<V: Clone, P: Default> Rank<V, P> {
    pub(crate) fn new(me: u32, size: u32, window: Window) -> Self {
        Rank {
            me,
            size,
            now: Instant::ZERO,
            refs: References::new(me),
            contexts: Contexts::new(me),
            backwards: FxHashMap::default(),
            outgoing: FxHashMap::default(),
            incoming: FxHashMap::default(),
            reply_pins: FxHashMap::default(),
            registering: FxHashMap::default(),
            confirming: FxHashMap::default(),
            releases: FxHashMap::default(),
            turns: turns::Turns::default(),
            window,
            outstanding: FxHashMap::default(),
            drain: drain::Drain::default(),
            sent: 0,
            received: 0,
            next_request: 1,
            local: VecDeque::new(),
            actions: Vec::new(),
        }
    }

    /// What there is to do, in order.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn take_actions(&mut self) -> Vec<Action<V, P>> {
        let mut actions = Vec::new();
        self.swap_actions(&mut actions);
        actions
    }

    /// What there is to do, in order, in exchange for an empty list.
    pub(crate) fn swap_actions(&mut self, empty: &mut Vec<Action<V, P>>) {
        self.flush_references();
        std::mem::swap(&mut self.actions, empty);
    }

    /// Tells the time; only used to say how long a task has been running.
    pub(crate) fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters {
            values: self.refs.values(),
            handles: self.refs.handles(),
            requests: self.outgoing.len(),
            tasks: self.incoming.len(),
            contexts: self.contexts.len(),
            backwards: self.backwards.len(),
        }
    }

    /// A message has arrived.
    pub(crate) fn receive(&mut self, from: u32, message: Message, payload: P) {
        match message {
            // One that was answered before isn't counted.
            Message::Reply { id, answer, outcome, refs } => match self.outgoing.remove(&id) {
                Some(request) => {
                    self.received += 1;
                    self.answered(from, id, request, answer, outcome, refs, payload);
                }
                None => self.received += u64::from(mutant::is(Mutant::CountDuplicate)),
            },
            Message::Quiet { .. } | Message::Wave { .. } => self.handle(from, message, payload),
            message => {
                self.received += 1;
                self.handle(from, message, payload);
            }
        }
        self.settle_local();
    }

    /// A task has been done.
    pub(crate) fn done(&mut self, task: TaskId, outcome: Outcome<V, P>) {
        let Some(incoming) = self.incoming.get(&task) else { return };
        let (creates, turn) = (incoming.creates, incoming.turn);
        let succeeded = !matches!(outcome, Outcome::Error(_));
        match (creates, outcome) {
            (Some(value), outcome) => {
                let (created, reply) = match outcome {
                    Outcome::Value(v) => (Ok(v), Ok(())),
                    Outcome::Error(e) => (Err(e.clone()), Err(e)),
                    Outcome::Reply { .. } => unreachable!("a creating task gives a value"),
                };
                for parked in self.refs.created(value, created) {
                    if !mutant::is(Mutant::ForgetParked) {
                        self.unpark(parked);
                    }
                }
                self.answer(task, Answer::default(), reply);
            }
            (None, Outcome::Reply { payload, refs, crossing }) => self.answer_with(
                task,
                Answer {
                    crossing,
                    ..Answer::default()
                },
                Ok(()),
                refs,
                payload,
            ),
            (None, Outcome::Error(e)) => self.answer(task, Answer::default(), Err(e)),
            (None, Outcome::Value(v)) => self.actions.push(Action::Garbage { values: vec![v] }),
        }
        if turn != Turn::None {
            self.turn_done(task, turn, succeeded);
        }
        self.settle_local();
    }

    fn handle(&mut self, from: u32, message: Message, payload: P) {
        match message {
            Message::Request { id, op, refs } => self.arrive(TaskId { from, request: id }, op, refs, payload, None),
            Message::Reply { id, answer, outcome, refs } => {
                if let Some(request) = self.outgoing.remove(&id) {
                    self.answered(from, id, request, answer, outcome, refs, payload);
                }
            }
            Message::Confirm { id } => {
                for pin in self.reply_pins.remove(&TaskId { from, request: id }).unwrap_or_default() {
                    self.refs.unpin(pin);
                }
            }
            Message::Register { value } => {
                self.refs.register(value, from);
                self.send(from, Message::Registered { value }, P::default());
            }
            Message::Registered { value } => {
                // The owner answers registrations in order; a second one may be on the way, of an entry that was let go and came back.
                let id = RefId { owner: from, value };
                let waiting = self.registering.get_mut(&id).and_then(VecDeque::pop_front);
                if self.registering.get(&id).is_some_and(VecDeque::is_empty) {
                    self.registering.remove(&id);
                }
                if let Some(waiting) = waiting {
                    self.registered(waiting);
                }
            }
            Message::Release { values } => {
                for (value, n) in values {
                    self.refs.released(value, from, n);
                }
            }
            Message::Query { id } => {
                let status = self.status(TaskId { from, request: id });
                self.send(from, Message::Report { id, status }, P::default());
                if let Status::Queued(_) = status {
                    self.knock();
                }
            }
            Message::Knock { id } => self.send(from, Message::Here { id }, P::default()),
            Message::Here { id } => self.turns.heard(TaskId { from, request: id }),
            Message::Probe { context, backward } => {
                let waits = self.backward_waits_for(context);
                self.send(from, Message::Sign { context, backward, waits }, P::default());
            }
            Message::Sign { context, backward, waits } => self.backward_sign(from, context, backward, &waits),
            Message::Report { id, status } => self.actions.push(Action::Report { request: id, status }),
            Message::Led { error } => {
                self.led(error.clone());
                self.actions.push(Action::Led { error });
            }
            Message::Quiet {
                epoch,
                wave,
                sent,
                received,
                finishing,
            } => self.drain.quiet(from, epoch, wave, sent, received, finishing),
            Message::Wave { epoch, wave, done, last } => {
                let step = self.drain.wave(self.me, self.size, epoch, wave, done, last);
                self.drain_step(step);
            }
        }
    }

    fn drain_step(&mut self, step: drain::Step) {
        let (messages, ended) = match step {
            drain::Step::Nothing => return,
            drain::Step::Send(messages) => (messages, None),
            drain::Step::Ended { messages, last } => (messages, Some(last)),
        };
        for (to, message) in messages {
            self.actions.push(Action::Send {
                to,
                message,
                payload: P::default(),
            });
        }
        if let Some(last) = ended {
            self.actions.push(Action::Ended { last });
        }
    }

    fn send(&mut self, to: u32, message: Message, payload: P) {
        if to == self.me {
            self.local.push_back((message, payload));
        } else {
            self.sent += 1;
            self.actions.push(Action::Send { to, message, payload });
        }
    }

    /// Delivers what this rank sent to itself.
    fn settle_local(&mut self) {
        while let Some((message, payload)) = self.local.pop_front() {
            self.handle(self.me, message, payload);
        }
    }
}

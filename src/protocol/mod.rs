//! What a rank knows and decides, as a state machine without MPI, threads, clocks or user code.
//!
//! A driver feeds a [`Rank`] with what happens (a message, a finished piece of work, a wish of the program on this rank) and carries out
//! the [`Action`]s that come of it, in order. Values and payloads are opaque here: `V` is what a value table holds, `P` what travels beside a message.
//! Messages between two ranks must be delivered in the order of their `Send` actions.

mod backward;
mod contexts;
mod drain;
mod ids;
mod liveness;
mod message;
mod references;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

pub(crate) use backward::{Input, Output};
pub(crate) use drain::children;
pub use ids::{ContextId, OptimizerId, RefId, ValueId};
pub(crate) use ids::{CrossingId, RequestId, TaskId};
pub use message::Mode;
pub(crate) use message::{Answer, Gate, Manner, Message, Op, Status, Tag};
use references::{Lookup, References};

use crate::Error;

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
        context: Option<Tag>,
        payload: P,
        refs: Vec<RefId>,
    },
    /// Put a value into a reply.
    Encode { value: V, context: Option<Tag> },
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
    /// All ranks have come to the end, and nothing is on the way.
    Ended,
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
    queued: bool,
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
    backwards: HashMap<ContextId, backward::Backward<P>>,
    outgoing: HashMap<RequestId, Outgoing>,
    incoming: HashMap<TaskId, Incoming<V, P>>,
    /// References of third ranks in replies of ours, kept until the receiver confirms.
    reply_pins: HashMap<TaskId, Vec<RefId>>,
    /// Registrations under way: for each, who waits for it.
    registering: HashMap<RefId, Vec<Registering>>,
    /// Replies to confirm once so many registrations are through.
    confirming: HashMap<TaskId, usize>,
    releases: HashMap<u64, Release>,
    queue: VecDeque<TaskId>,
    queue_busy: bool,
    window: Window,
    outstanding: HashMap<u32, (usize, usize)>,
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
}

impl<V: Clone, P: Default> Rank<V, P> {
    pub(crate) fn new(me: u32, size: u32, window: Window) -> Self {
        Rank {
            me,
            size,
            now: Instant::ZERO,
            refs: References::new(me),
            contexts: Contexts::new(me),
            backwards: HashMap::new(),
            outgoing: HashMap::new(),
            incoming: HashMap::new(),
            reply_pins: HashMap::new(),
            registering: HashMap::new(),
            confirming: HashMap::new(),
            releases: HashMap::new(),
            queue: VecDeque::new(),
            queue_busy: false,
            window,
            outstanding: HashMap::new(),
            drain: drain::Drain::default(),
            sent: 0,
            received: 0,
            next_request: 1,
            local: VecDeque::new(),
            actions: Vec::new(),
        }
    }

    /// What there is to do, in order.
    pub(crate) fn take_actions(&mut self) -> Vec<Action<V, P>> {
        self.flush_references();
        std::mem::take(&mut self.actions)
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

    // ---- wishes of the program on this rank ----------------------------------------------------------------------

    /// A new reference to a value that a request is going to create on `owner`; counts one handle.
    pub(crate) fn allocate(&mut self, owner: u32) -> RefId {
        self.refs.allocate(owner)
    }

    /// The request that was to create a value wasn't sent: it will never be.
    pub(crate) fn never_sent(&mut self, id: RefId, error: &Error) {
        if id.owner == self.me {
            self.fail_creation(id.value, error);
            self.settle_local();
        }
    }

    fn fail_creation(&mut self, value: ValueId, error: &Error) {
        for parked in self.refs.created(value, Err(error.clone())) {
            self.unpark(parked);
        }
    }

    /// Keeps a value of this rank; counts one handle.
    pub(crate) fn keep(&mut self, value: V) -> RefId {
        let id = self.refs.allocate(self.me);
        self.refs.created(id.value, Ok(value));
        id
    }

    /// A value of this rank.
    pub(crate) fn lookup(&self, operation: &str, value: ValueId) -> Result<Option<V>, Error> {
        match self.refs.lookup(value) {
            Lookup::Ready(v) => Ok(Some(v)),
            Lookup::Pending => Ok(None),
            Lookup::Failed(error) => Err(self.creation_failed(value, error)),
            Lookup::Missing => Err(self.refs.missing(operation, value)),
        }
    }

    /// A handle on a value that is known by its id alone.
    pub(crate) fn attach(&mut self, id: RefId) {
        if self.refs.receive(id, u32::MAX) {
            self.send(id.owner, Message::Register { value: id.value }, P::default());
        }
    }

    pub(crate) fn drop_handle(&mut self, id: RefId) {
        self.refs.drop_handle(id);
    }

    /// Whether a request of this size may go to a rank now.
    pub(crate) fn window_is_open(&self, to: u32, bytes: usize) -> bool {
        let (requests, outstanding) = self.outstanding.get(&to).copied().unwrap_or_default();
        requests < self.window.requests && (requests == 0 || outstanding.saturating_add(bytes) <= self.window.bytes)
    }

    /// Requests and bytes outstanding at a rank.
    pub(crate) fn outstanding(&self, to: u32) -> (usize, usize) {
        self.outstanding.get(&to).copied().unwrap_or_default()
    }

    /// Sends a request; [`Action::Answered`] brings its answer.
    pub(crate) fn request(&mut self, to: u32, op: Op, refs: Vec<RefId>, payload: P, window: Option<usize>) -> RequestId {
        let id = self.issue(to, op, refs, payload, Origin::Program { window });
        self.settle_local();
        id
    }

    /// Opens a context of this rank.
    pub(crate) fn open_context(&mut self) -> ContextId {
        self.contexts.open()
    }

    /// The sequence below which all contexts of this rank were released.
    pub(crate) fn context_low(&self) -> u64 {
        self.contexts.low()
    }

    pub(crate) fn check_context(&self, operation: &str, context: ContextId) -> Result<(), Error> {
        if self.contexts.is_live(context) {
            Ok(())
        } else {
            Err(self.contexts.gone(operation, context))
        }
    }

    /// Refuses while a backward of the context is under way here.
    pub(crate) fn check_gradients(&self, operation: &str, context: ContextId) -> Result<(), Error> {
        if self.contexts.is_released(context) {
            return Err(self.contexts.gone(operation, context));
        }
        self.check_idle(operation, context)
    }

    /// Releases a context of this rank everywhere; [`Action::Answered`] of the returned request tells that all ranks have.
    pub(crate) fn release_context(&mut self, context: ContextId) -> RequestId {
        let request = self.next_request;
        self.next_request += 1;
        let low = self.contexts.low();
        self.release(context, low, None, Some(request));
        self.settle_local();
        request
    }

    /// The ranks whose answer a release of this rank's program waits for, as far as this rank can tell.
    pub(crate) fn release_waits_for(&self, request: RequestId) -> Vec<u32> {
        let group = self
            .releases
            .iter()
            .find(|(_, release)| release.request == Some(request))
            .map(|(group, _)| *group);
        let ranks: BTreeSet<u32> = self
            .outgoing
            .values()
            .filter(|o| group.is_some_and(|g| o.origin == Origin::Release(g)))
            .map(|o| o.to)
            .collect();
        ranks.into_iter().collect()
    }

    /// Asks the receiver of a request how it fares.
    pub(crate) fn query(&mut self, request: RequestId) {
        if let Some(to) = self.outgoing.get(&request).map(|o| o.to) {
            self.send(to, Message::Query { id: request }, P::default());
            self.settle_local();
        }
    }

    /// Rank 0 tells all others that its part in `lead` is over.
    pub(crate) fn led(&mut self, error: Option<String>) {
        for child in children(self.me, self.size).collect::<Vec<_>>() {
            self.send(child, Message::Led { error: error.clone() }, P::default());
        }
    }

    /// This rank has come to the end of the epoch; [`Action::Ended`] tells that all have.
    pub(crate) fn enter_end(&mut self) {
        self.drain.enter();
    }

    /// Goes on with termination detection. `busy` says whether the driver still has work that may send.
    pub(crate) fn advance_end(&mut self, busy: bool) {
        loop {
            let quiet =
                !busy && self.outgoing.is_empty() && self.incoming.is_empty() && self.registering.is_empty() && self.local.is_empty();
            match self.drain.advance(self.me, self.size, quiet, self.sent, self.received) {
                drain::Step::Nothing => return,
                step => self.drain_step(step),
            }
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.drain.has_entered()
    }

    /// Who hasn't come to the end yet, as far as this rank can tell.
    pub(crate) fn missing_at_end(&self) -> Vec<u32> {
        self.drain.missing(self.me, self.size)
    }

    /// Values that are still held somewhere.
    pub(crate) fn still_held(&self) -> Vec<(RefId, Vec<u32>, u64, V)> {
        self.refs
            .still_held()
            .into_iter()
            .filter_map(|h| match self.refs.lookup(h.id.value) {
                Lookup::Ready(v) => Some((h.id, h.holders, h.handles, v)),
                _ => None,
            })
            .collect()
    }

    // ---- what happens --------------------------------------------------------------------------------------------

    /// A message has arrived.
    pub(crate) fn receive(&mut self, from: u32, message: Message, payload: P) {
        if !matches!(message, Message::Quiet { .. } | Message::Wave { .. }) {
            self.received += 1;
        }
        self.handle(from, message, payload);
        self.settle_local();
    }

    /// A task has been done.
    pub(crate) fn done(&mut self, task: TaskId, outcome: Outcome<V, P>) {
        let Some(incoming) = self.incoming.get(&task) else { return };
        let (creates, queued) = (incoming.creates, incoming.queued);
        match (creates, outcome) {
            (Some(value), outcome) => {
                let (created, reply) = match outcome {
                    Outcome::Value(v) => (Ok(v), Ok(())),
                    Outcome::Error(e) => (Err(e.clone()), Err(e)),
                    Outcome::Reply { .. } => unreachable!("a creating task gives a value"),
                };
                for parked in self.refs.created(value, created) {
                    self.unpark(parked);
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
        if queued {
            self.queue_busy = false;
            self.pump_queue();
        }
        self.settle_local();
    }

    fn handle(&mut self, from: u32, message: Message, payload: P) {
        match message {
            Message::Request { id, op, refs } => self.arrive(TaskId { from, request: id }, op, refs, payload, None),
            Message::Reply { id, answer, outcome, refs } => self.answered(from, id, answer, outcome, refs, payload),
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
                for waiting in self.registering.remove(&RefId { owner: from, value }).unwrap_or_default() {
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
            }
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
            } => self.drain.quiet(from, epoch, wave, sent, received),
            Message::Wave { epoch, wave, done } => {
                let step = self.drain.wave(self.me, self.size, epoch, wave, done);
                self.drain_step(step);
            }
        }
    }

    fn drain_step(&mut self, step: drain::Step) {
        let (messages, ended) = match step {
            drain::Step::Nothing => return,
            drain::Step::Send(messages) => (messages, false),
            drain::Step::Ended(messages) => (messages, true),
        };
        for (to, message) in messages {
            self.actions.push(Action::Send {
                to,
                message,
                payload: P::default(),
            });
        }
        if ended {
            self.actions.push(Action::Ended);
        }
    }

    // ---- requests of others --------------------------------------------------------------------------------------

    /// A request has arrived whose tensors the driver refused.
    pub(crate) fn refuse_request(&mut self, from: u32, id: RequestId, op: Op, refs: Vec<RefId>, error: Error) {
        self.received += 1;
        self.arrive(TaskId { from, request: id }, op, refs, P::default(), Some(error));
        self.settle_local();
    }

    fn arrive(&mut self, task: TaskId, op: Op, refs: Vec<RefId>, payload: P, refused: Option<Error>) {
        let mut unconfirmed = 0;
        for &id in &refs {
            if self.refs.receive(id, task.from) {
                self.register(id, Registering::Task(task));
                unconfirmed += 1;
            }
        }
        let (creates, context, queued) = match &op {
            Op::Call { create, context, gate, .. } => (*create, context.as_ref(), gate.queued),
            Op::Fetch { context, .. } => (None, context.as_ref(), false),
            _ => (None, None, false),
        };
        if let Some(value) = creates {
            self.refs.creating(value, task.from);
        }
        let met = context.map_or(Ok(false), |tag| self.contexts.meet(tag.context));
        let incoming = Incoming {
            stage: Stage::Running(self.now),
            creates,
            queued: false,
            new_child: matches!(met, Ok(true)),
            unconfirmed,
        };
        self.incoming.insert(task, incoming);
        if let Some(error) = met.err().or(refused) {
            return self.refuse(task, error, refs);
        }
        let mut waits = 0;
        let wanted = match &op {
            Op::Fetch { value, .. } => Some(*value),
            _ => None,
        };
        let local = refs.iter().filter(|r| r.owner == self.me).map(|r| r.value);
        for value in local.chain(wanted).collect::<BTreeSet<_>>() {
            if self.refs.park(value, task) {
                waits += 1;
            }
        }
        if let Some(incoming) = self.incoming.get_mut(&task) {
            incoming.queued = queued;
            if waits > 0 {
                incoming.stage = Stage::Parked(waits, Box::new((op, refs, payload)));
                return;
            }
        }
        self.launch(task, op, refs, payload);
    }

    fn unpark(&mut self, task: TaskId) {
        let Some(incoming) = self.incoming.get_mut(&task) else { return };
        let Stage::Parked(waits, _) = &mut incoming.stage else { return };
        *waits -= 1;
        if *waits > 0 {
            return;
        }
        let stage = std::mem::replace(&mut incoming.stage, Stage::Running(self.now));
        if let Stage::Parked(_, parts) = stage {
            let (op, refs, payload) = *parts;
            self.launch(task, op, refs, payload);
        }
    }

    /// All that a request needs is here: hands it to the driver, or does it.
    fn launch(&mut self, task: TaskId, op: Op, refs: Vec<RefId>, payload: P) {
        match op {
            Op::Call {
                function,
                create,
                context,
                gate,
            } => {
                if let Some(error) = gate
                    .gradients_of
                    .and_then(|c| self.check_gradients("step or gradient access", c).err())
                {
                    return self.refuse(task, error, refs);
                }
                let work = Work::Call {
                    function,
                    creates: create.is_some(),
                    queued: gate.queued,
                    context,
                    payload,
                    refs,
                };
                if gate.queued {
                    if let Some(incoming) = self.incoming.get_mut(&task) {
                        incoming.stage = Stage::Queued(Box::new(work));
                        self.queue.push_back(task);
                    }
                    self.pump_queue();
                } else {
                    self.run(task, work);
                }
            }
            Op::Fetch { value, context } => match self.lookup("fetch", value) {
                Ok(Some(value)) => self.run(task, Work::Encode { value, context }),
                Ok(None) => unreachable!("a fetch is parked until its value is made"),
                Err(error) => self.answer(task, Answer::default(), Err(error)),
            },
            Op::Backward {
                context,
                backward,
                manner,
                part,
            } => self.backward_part(task, context, backward, manner, part, payload),
            Op::Release { context, low } => self.release(context, low, Some(task), None),
        }
    }

    fn run(&mut self, task: TaskId, work: Work<V, P>) {
        if let Some(incoming) = self.incoming.get_mut(&task) {
            incoming.stage = Stage::Running(self.now);
        }
        self.actions.push(Action::Run { task, work });
    }

    fn pump_queue(&mut self) {
        while !self.queue_busy {
            let Some(task) = self.queue.pop_front() else { return };
            let Some(incoming) = self.incoming.get_mut(&task) else { continue };
            if let Stage::Queued(work) = std::mem::replace(&mut incoming.stage, Stage::Running(self.now)) {
                self.queue_busy = true;
                self.run(task, *work);
            }
        }
    }

    fn refuse(&mut self, task: TaskId, error: Error, refs: Vec<RefId>) {
        for id in refs {
            self.refs.drop_handle(id);
        }
        if let Some(value) = self.incoming.get(&task).and_then(|i| i.creates) {
            self.fail_creation(value, &error);
        }
        self.answer(task, Answer::default(), Err(error));
    }

    fn answer(&mut self, task: TaskId, answer: Answer, outcome: Result<(), Error>) {
        self.answer_with(task, answer, outcome, Vec::new(), P::default());
    }

    fn answer_with(&mut self, task: TaskId, answer: Answer, outcome: Result<(), Error>, refs: Vec<RefId>, payload: P) {
        let Some(incoming) = self.incoming.get_mut(&task) else { return };
        if incoming.unconfirmed > 0 {
            // References in the reply are alive: the driver holds a handle on each until the reply has gone.
            for &id in &refs {
                self.refs.retain(id);
            }
            incoming.stage = Stage::Held(Box::new(HeldReply {
                answer,
                outcome,
                refs,
                payload,
            }));
            return;
        }
        let new_child = incoming.new_child;
        self.incoming.remove(&task);
        let pins: Vec<RefId> = refs.iter().copied().filter(|&id| self.refs.send(id, task.from)).collect();
        if !pins.is_empty() {
            self.reply_pins.insert(task, pins);
        }
        let answer = Answer { new_child, ..answer };
        self.send(
            task.from,
            Message::Reply {
                id: task.request,
                answer,
                outcome,
                refs,
            },
            payload,
        );
    }

    fn status(&self, task: TaskId) -> Status {
        match self.incoming.get(&task).map(|i| &i.stage) {
            None => Status::Unknown,
            Some(Stage::Parked(..)) => Status::Parked,
            Some(Stage::Queued(_)) => Status::Queued(self.queue.iter().position(|&t| t == task).map_or(1, |n| n as u64 + 1)),
            Some(Stage::Running(since)) => Status::Running(self.now.saturating_sub(*since).as_secs_f64()),
            Some(Stage::Held(_)) => Status::Confirming,
        }
    }

    // ---- requests of this rank -----------------------------------------------------------------------------------

    fn issue(&mut self, to: u32, op: Op, refs: Vec<RefId>, payload: P, origin: Origin) -> RequestId {
        let id = self.next_request;
        self.next_request += 1;
        let context = match &op {
            Op::Call { context, .. } | Op::Fetch { context, .. } => context.as_ref().map(|t| t.context),
            _ => None,
        };
        let pins = refs.iter().copied().filter(|&r| self.refs.send(r, to)).collect();
        if let Origin::Program { window: Some(bytes) } = origin {
            let outstanding = self.outstanding.entry(to).or_default();
            outstanding.0 += 1;
            outstanding.1 += bytes;
        }
        self.outgoing.insert(id, Outgoing { to, origin, context, pins });
        self.send(to, Message::Request { id, op, refs }, payload);
        id
    }

    fn answered(&mut self, from: u32, id: RequestId, answer: Answer, outcome: Result<(), Error>, refs: Vec<RefId>, payload: P) {
        let reply = TaskId { from, request: id };
        let third = refs.iter().any(|r| r.owner != self.me && r.owner != from);
        let mut unconfirmed = 0;
        for &r in &refs {
            if self.refs.receive(r, from) {
                self.register(r, Registering::Reply(reply));
                unconfirmed += 1;
            }
        }
        if third && from != self.me {
            if unconfirmed > 0 {
                self.confirming.insert(reply, unconfirmed);
            } else {
                self.send(from, Message::Confirm { id }, P::default());
            }
        }
        let Some(request) = self.outgoing.remove(&id) else {
            for r in refs {
                self.refs.drop_handle(r);
            }
            return;
        };
        for pin in request.pins {
            self.refs.unpin(pin);
        }
        if let (true, Some(context)) = (answer.new_child, request.context)
            && !self.contexts.adopt(context, from)
        {
            // The context was released while the request was on its way: the release follows it.
            let low = if context.rank() == self.me { self.contexts.low() } else { 0 };
            self.send_release(from, context, low, u64::MAX);
        }
        match request.origin {
            Origin::Program { window } => {
                if let Some(bytes) = window {
                    let outstanding = self.outstanding.entry(from).or_default();
                    outstanding.0 = outstanding.0.saturating_sub(1);
                    outstanding.1 = outstanding.1.saturating_sub(bytes);
                }
                let outcome = outcome.map(|()| payload);
                self.actions.push(Action::Answered {
                    request: id,
                    from,
                    answer,
                    outcome,
                    refs,
                });
            }
            Origin::Backward(context) => self.backward_answered(context, from, answer, outcome),
            Origin::Release(group) => self.release_answered(group),
        }
    }

    // ---- references ----------------------------------------------------------------------------------------------

    fn register(&mut self, id: RefId, waiting: Registering) {
        self.registering.entry(id).or_default().push(waiting);
        self.send(id.owner, Message::Register { value: id.value }, P::default());
    }

    fn registered(&mut self, waiting: Registering) {
        match waiting {
            Registering::Task(task) => {
                let Some(incoming) = self.incoming.get_mut(&task) else { return };
                incoming.unconfirmed -= 1;
                if incoming.unconfirmed == 0
                    && matches!(incoming.stage, Stage::Held(_))
                    && let Stage::Held(held) = std::mem::replace(&mut incoming.stage, Stage::Running(self.now))
                {
                    let HeldReply {
                        answer,
                        outcome,
                        refs,
                        payload,
                    } = *held;
                    let kept = refs.clone();
                    self.answer_with(task, answer, outcome, refs, payload);
                    for id in kept {
                        self.refs.drop_handle(id);
                    }
                }
            }
            Registering::Reply(reply) => {
                let Some(left) = self.confirming.get_mut(&reply) else { return };
                *left -= 1;
                if *left == 0 {
                    self.confirming.remove(&reply);
                    self.send(reply.from, Message::Confirm { id: reply.request }, P::default());
                }
            }
        }
    }

    fn flush_references(&mut self) {
        for (owner, values) in self.refs.take_releases() {
            self.send(owner, Message::Release { values }, P::default());
        }
        let values = self.refs.take_garbage();
        if !values.is_empty() {
            self.actions.push(Action::Garbage { values });
        }
        self.settle_local();
    }

    fn creation_failed(&self, value: ValueId, source: Error) -> Error {
        crate::ErrorKind::Creation {
            owner: self.me,
            id: value.to_string(),
            source,
        }
        .into()
    }

    // ---- contexts ------------------------------------------------------------------------------------------------

    fn release(&mut self, context: ContextId, low: u64, task: Option<TaskId>, request: Option<RequestId>) {
        let children = self.contexts.release(context, low);
        self.backward_released(context);
        if children.is_some() {
            self.actions.push(Action::Forget { context });
        }
        let children = children.unwrap_or_default();
        let group = self.next_request;
        self.next_request += 1;
        self.releases.insert(
            group,
            Release {
                left: children.len() + 1,
                task,
                request,
            },
        );
        for child in children {
            self.send_release(child, context, low, group);
        }
        self.release_answered(group);
    }

    fn send_release(&mut self, to: u32, context: ContextId, low: u64, group: u64) {
        self.issue(to, Op::Release { context, low }, Vec::new(), P::default(), Origin::Release(group));
    }

    fn release_answered(&mut self, group: u64) {
        let Some(release) = self.releases.get_mut(&group) else { return };
        release.left -= 1;
        if release.left > 0 {
            return;
        }
        let Some(Release { task, request, .. }) = self.releases.remove(&group) else {
            return;
        };
        if let Some(task) = task {
            self.answer(task, Answer::default(), Ok(()));
        }
        if let Some(request) = request {
            let (from, answer) = (self.me, Answer::default());
            self.actions.push(Action::Answered {
                request,
                from,
                answer,
                outcome: Ok(P::default()),
                refs: Vec::new(),
            });
        }
    }

    // ---- messages ------------------------------------------------------------------------------------------------

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

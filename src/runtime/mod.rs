//! The driver of a rank: feeds its state machine with messages, carries out what comes of it, and lets threads wait.

pub(crate) mod failure;
mod host;
pub(crate) mod logging;
pub(crate) mod placement;
mod pool;
mod progress;
mod slot;

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::Settings;
use crate::protocol::{
    Action, ContextId, Counters, Input, Manner, Message, Op, Outcome, Output, Rank, RefId, RequestId, TaskId, ValueId, Window, Work,
};
use crate::transport::{Delivery, Transport};
use crate::wire::{self, Delivered, Handle, Payload};
use crate::{Error, ErrorKind, Result};

pub(crate) use pool::Pool;
pub(crate) use progress::Permission;
pub(crate) use slot::{Reply, Slot};

/// A value as the reference table holds it; the rooms above know what it is.
pub(crate) type Value = Arc<dyn Any + Send + Sync>;

/// What the rooms above do for the driver.
pub(crate) trait Executor: Send + Sync {
    /// Does a task; `main` is the state of `on_main` functions, on the thread that has it. Catches what user code panics with.
    fn execute(&self, runtime: &Arc<Runtime>, job: Job, main: Option<&mut dyn Any>) -> Done;
    /// Lets the engine of a backward work.
    fn engine(&self, runtime: &Runtime, context: ContextId, retain_graph: bool, inputs: Vec<Input<Payload>>) -> Output<Payload>;
    /// A context was released.
    fn forget(&self, context: ContextId);
    /// Wraps a reference's handle.
    fn handle(&self, runtime: &Arc<Runtime>, id: RefId) -> Handle;
    /// Whether the function runs on the main thread.
    fn is_on_main(&self, function: u32) -> bool;
    /// Whether a queued function takes long enough to be worth a thread of the pool.
    fn is_heavy(&self) -> bool;
    /// What a value is, for messages.
    fn describe(&self, value: &Value) -> String;
}

/// What a task came to, and what must stay alive until its answer has gone.
pub(crate) struct Done {
    pub outcome: Outcome<Value, Payload>,
    pub handles: Vec<Handle>,
}

/// A task with everything that keeps its references alive.
pub(crate) struct Job {
    pub from: u32,
    pub work: Work<Value, Payload>,
    pub handles: Vec<(RefId, Handle)>,
}

/// Work that came of an event, for this thread or another.
enum Todo {
    Task {
        task: TaskId,
        job: Job,
        heavy: bool,
    },
    OnMain {
        task: TaskId,
        job: Job,
    },
    Engine {
        context: ContextId,
        retain_graph: bool,
        inputs: Vec<Input<Payload>>,
    },
}

struct Core {
    rank: Rank<Value, Payload>,
    waiting: HashMap<RequestId, Arc<Slot>>,
    backwards: HashMap<ContextId, Arc<Slot>>,
}

/// What to do after the lock on the core is given back.
#[derive(Default)]
struct After {
    todos: Vec<Todo>,
    calls: Vec<Box<dyn FnOnce() + Send>>,
    garbage: Vec<Box<dyn Any + Send>>,
    forget: Vec<ContextId>,
    /// Something happened that a thread of this rank may wait for.
    awaited: bool,
}

pub(crate) type State = HashMap<std::any::TypeId, Arc<dyn Any + Send + Sync>>;

/// One rank at work.
pub(crate) struct Runtime {
    pub(crate) settings: Settings,
    pub(crate) transport: Box<dyn Transport>,
    executor: Box<dyn Executor>,
    core: Mutex<Core>,
    progress: progress::Progress,
    host: host::HostCall,
    pub(crate) pool: Pool,
    dedicated: bool,
    one_node: bool,
    started: Instant,
    /// Handles that were dropped, wherever that was.
    dropped: Mutex<Vec<RefId>>,
    any_dropped: AtomicBool,
    /// Callbacks that run or wait to.
    callbacks: AtomicUsize,
    ended: AtomicUsize,
    led: Mutex<VecDeque<Option<String>>>,
    main: Mutex<VecDeque<Todo>>,
    stopped: AtomicBool,
    finished: AtomicBool,
    service: Mutex<Vec<JoinHandle<()>>>,
    state: Mutex<State>,
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runtime {
    /// Starts the driver and its service thread. Placement is asked about the cores that this rank may use.
    pub(crate) fn start(transport: Box<dyn Transport>, settings: Settings, executor: Box<dyn Executor>, state: State) -> Result<Arc<Self>> {
        let (me, size) = (transport.rank(), transport.size());
        let node = transport.node_ranks();
        let node = placement::Node {
            ranks: node.len(),
            index: node.iter().position(|&r| r == me).unwrap_or(0),
        };
        let one_node = node.ranks == size as usize;
        let placement = placement::place(&settings, size as usize, node);
        log::debug!(
            "rank {me}: dedicated progress: {}, a spare core: {}",
            placement.dedicated,
            placement.spare_core
        );
        let window = Window {
            requests: settings.window_requests,
            bytes: settings.window_bytes,
        };
        let runtime = Arc::new(Runtime {
            core: Mutex::new(Core {
                rank: Rank::new(me, size, window),
                waiting: HashMap::new(),
                backwards: HashMap::new(),
            }),
            pool: Pool::new(me, settings.compute_threads + 1, settings.pool_threads),
            dedicated: placement.dedicated,
            one_node,
            settings,
            transport,
            executor,
            progress: Default::default(),
            host: Default::default(),
            started: Instant::now(),
            dropped: Mutex::default(),
            any_dropped: AtomicBool::new(false),
            callbacks: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            led: Mutex::default(),
            main: Mutex::default(),
            stopped: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            service: Mutex::default(),
            state: Mutex::new(state),
        });
        runtime.spawn_pinned("service", placement.pin);
        Ok(runtime)
    }

    fn spawn_service(self: &Arc<Self>, name: &str) {
        self.spawn_pinned(name, None);
    }

    fn spawn_pinned(self: &Arc<Self>, name: &str, pin: Option<placement::Pin>) {
        let runtime = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name(format!("rankgrad-{}-{name}", self.rank()))
            .spawn(move || {
                if let Some(pin) = pin {
                    pin.bind();
                }
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.serve_forever()));
                match result {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => runtime.abort(&format!("the service thread can't go on: {e}")),
                    Err(_) => runtime.abort("the service thread panicked: this is a bug in rankgrad"),
                }
            });
        match thread {
            Ok(thread) => lock(&self.service).push(thread),
            Err(e) => log::error!("rank {}: can't start a {name} thread: {e}", self.rank()),
        }
    }

    pub(crate) fn rank(&self) -> u32 {
        self.transport.rank()
    }

    pub(crate) fn size(&self) -> u32 {
        self.transport.size()
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Whether the world has ended, so that nothing can be asked of it.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::SeqCst)
    }

    pub(crate) fn check_alive(&self, operation: &str) -> Result<()> {
        if self.is_finished() {
            Err(ErrorKind::ShutDown {
                operation: operation.into(),
            }
            .into())
        } else {
            Ok(())
        }
    }

    pub(crate) fn check_rank(&self, operation: &str, rank: u32) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        Err(ErrorKind::UnknownRank {
            operation: operation.into(),
            rank: rank.into(),
            size: self.size(),
        }
        .into())
    }

    /// Ends the job: this rank can't go on.
    pub(crate) fn abort(&self, why: &str) -> ! {
        failure::last_words(self.rank(), why);
        self.transport.abort(1)
    }

    /// State of the rank by type.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    // ---- the core ------------------------------------------------------------------------------------------------

    /// Lets `event` happen to the state machine, and sends what comes of it in order. The rest is for the caller.
    fn step<R>(self: &Arc<Self>, event: impl FnOnce(&mut Core) -> R) -> Result<(R, After)> {
        let mut after = After::default();
        let mut core = lock(&self.core);
        if self.any_dropped.load(Ordering::Relaxed) && self.any_dropped.swap(false, Ordering::SeqCst) {
            for id in std::mem::take(&mut *lock(&self.dropped)) {
                core.rank.drop_handle(id);
            }
        }
        core.rank.set_now(self.started.elapsed());
        let result = event(&mut core);
        if core.rank.is_ending() {
            core.rank.advance_end(self.callbacks.load(Ordering::SeqCst) > 0);
        }
        for action in core.rank.take_actions() {
            self.carry_out(&mut core, action, &mut after)?;
        }
        Ok((result, after))
    }

    fn carry_out(self: &Arc<Self>, core: &mut Core, action: Action<Value, Payload>, after: &mut After) -> Result<()> {
        match action {
            Action::Send { to, message, mut payload } => {
                let header = wire::header(&message, &mut payload)?;
                self.transport.send(
                    to,
                    crate::transport::Frame {
                        header,
                        segments: payload.segments,
                    },
                )?;
            }
            Action::Run { task, work } => {
                let (on_main, heavy, handles) = match &work {
                    Work::Call {
                        function, queued, refs, ..
                    } => (
                        self.executor.is_on_main(*function),
                        *queued && self.executor.is_heavy(),
                        self.custody(refs),
                    ),
                    Work::Encode { .. } => (false, false, Vec::new()),
                };
                let job = Job {
                    from: task.from,
                    work,
                    handles,
                };
                after.todos.push(if on_main {
                    Todo::OnMain { task, job }
                } else {
                    Todo::Task { task, job, heavy }
                });
            }
            Action::Engine {
                context,
                retain_graph,
                inputs,
            } => after.todos.push(Todo::Engine {
                context,
                retain_graph,
                inputs,
            }),
            Action::Answered {
                request,
                answer,
                outcome,
                refs,
                ..
            } => {
                let handles = self.custody(&refs);
                let crossing = answer.crossing;
                let reply: Reply = outcome.map(|payload| Delivered {
                    payload,
                    handles,
                    crossing,
                });
                match core.waiting.remove(&request) {
                    Some(slot) => {
                        after.awaited = true;
                        if let Some((callback, reply)) = slot.complete(reply) {
                            after.calls.push(Box::new(move || callback(reply)));
                        }
                    }
                    None => after.garbage.push(Box::new(reply)),
                }
            }
            Action::BackwardDone { context, result } => {
                if let Some(slot) = core.backwards.remove(&context) {
                    after.awaited = true;
                    slot.complete(result.map(|()| Delivered::default()));
                }
            }
            Action::Forget { context } => after.forget.push(context),
            Action::Garbage { values } => after.garbage.push(Box::new(values)),
            Action::Report { request, status } => {
                if let Some(slot) = core.waiting.get(&request) {
                    slot.report(status);
                }
            }
            Action::Led { error } => lock(&self.led).push_back(error),
            Action::Ended => {
                self.ended.fetch_add(1, Ordering::SeqCst);
                after.awaited = true;
            }
        }
        Ok(())
    }

    fn custody(self: &Arc<Self>, refs: &[RefId]) -> Vec<(RefId, Handle)> {
        refs.iter().map(|&id| (id, self.executor.handle(self, id))).collect()
    }

    /// Does what needs no lock; returns the work.
    fn settle(self: &Arc<Self>, after: After) -> Vec<Todo> {
        if after.awaited {
            self.wake_leader();
        }
        drop(after.garbage);
        for context in after.forget {
            self.executor.forget(context);
        }
        for call in after.calls {
            self.callback(call);
        }
        after.todos
    }

    /// Runs a callback on the pool; the end waits for it.
    pub(crate) fn callback(self: &Arc<Self>, call: impl FnOnce() + Send + 'static) {
        self.callbacks.fetch_add(1, Ordering::SeqCst);
        let runtime = Arc::clone(self);
        self.pool.push(move || {
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err() {
                log::error!("rank {}: a future's callback panicked", runtime.rank());
            }
            runtime.callbacks.fetch_sub(1, Ordering::SeqCst);
            runtime.wake_leader();
        });
    }

    /// As [`step`](Self::step); work goes to the pool.
    fn event<R>(self: &Arc<Self>, event: impl FnOnce(&mut Core) -> R) -> Result<R> {
        let (result, after) = self.step(event)?;
        for todo in self.settle(after) {
            self.hand_over(todo);
        }
        Ok(result)
    }

    fn hand_over(self: &Arc<Self>, todo: Todo) {
        match todo {
            Todo::OnMain { .. } => self.push_main(todo),
            todo => self.push_to_pool(todo),
        }
    }

    /// Receives what has arrived. Only the holder of the polling role calls it.
    fn poll(self: &Arc<Self>) -> Result<(bool, Vec<Todo>)> {
        let mut inbox = Vec::new();
        let moved = self.transport.poll(&mut inbox)?;
        let mut todos = Vec::new();
        for (from, delivery) in inbox {
            let (header, segments, refused) = match delivery {
                Delivery::Frame(frame) => (frame.header, frame.segments, None),
                Delivery::Refused { header, bytes, limit } => (header, Vec::new(), Some((bytes, limit))),
            };
            let (message, slots, bytes) = match wire::parse_header(&header) {
                Ok(parsed) => parsed,
                Err(e) => {
                    log::error!("rank {}: a message from rank {from} was dropped: {e}", self.rank());
                    continue;
                }
            };
            let message = match refused {
                None => message,
                Some((size, limit)) => match self.refused(from, message, size, limit) {
                    Refusal::Reply(reply) => reply,
                    Refusal::Request { id, op, refs, error } => {
                        let (_, after) = self.step(|core| core.rank.refuse_request(from, id, op, refs, error))?;
                        todos.extend(self.settle(after));
                        continue;
                    }
                },
            };
            let payload = Payload { bytes, segments, slots };
            let (_, after) = self.step(|core| core.rank.receive(from, message, payload))?;
            todos.extend(self.settle(after));
        }
        if self.any_dropped.load(Ordering::Relaxed) || self.ending() {
            let (_, after) = self.step(|_| ())?;
            todos.extend(self.settle(after));
        }
        Ok((moved, todos))
    }

    fn ending(&self) -> bool {
        lock(&self.core).rank.is_ending()
    }

    /// A message whose tensors were over the limit: a reply becomes an error, a request is answered with one.
    fn refused(&self, from: u32, message: Message, bytes: u64, limit: u64) -> Refusal {
        let error = |operation: &str| {
            Error::from(ErrorKind::TooLarge {
                operation: operation.into(),
                from,
                bytes,
                limit,
            })
        };
        match message {
            Message::Reply { id, answer, refs, .. } => Refusal::Reply(Message::Reply {
                id,
                answer,
                outcome: Err(error("reply")),
                refs,
            }),
            Message::Request { id, op, refs } => Refusal::Request {
                id,
                op,
                refs,
                error: error("request"),
            },
            other => Refusal::Reply(other),
        }
    }

    // ---- work ----------------------------------------------------------------------------------------------------

    fn push_to_pool(self: &Arc<Self>, todo: Todo) {
        let runtime = Arc::clone(self);
        self.pool.push(move || {
            if let Err(e) = runtime.run(todo, None) {
                runtime.abort(&format!("can't answer: {e}"));
            }
        });
    }

    fn push_main(&self, todo: Todo) {
        lock(&self.main).push_back(todo);
        self.transport.wake();
    }

    /// Does a piece of work on this thread, and what follows from it.
    fn run(self: &Arc<Self>, todo: Todo, mut main: Option<&mut dyn Any>) -> Result<()> {
        let mut next = Some(todo);
        while let Some(todo) = next.take() {
            let (_, after) = match todo {
                Todo::Task { task, job, .. } | Todo::OnMain { task, job } => {
                    let Done { outcome, handles } = self.executor.execute(self, job, main.as_deref_mut());
                    let done = self.step(|core| core.rank.done(task, outcome))?;
                    drop(handles);
                    done
                }
                Todo::Engine {
                    context,
                    retain_graph,
                    inputs,
                } => {
                    let output = self.executor.engine(self, context, retain_graph, inputs);
                    self.step(|core| core.rank.engine_done(context, output))?
                }
            };
            let mut todos = self.settle(after);
            if todos.len() == 1 && !matches!(todos[0], Todo::OnMain { .. }) {
                next = todos.pop();
            }
            for todo in todos {
                self.hand_over(todo);
            }
        }
        Ok(())
    }

    // ---- requests ------------------------------------------------------------------------------------------------

    /// A new reference to a value that a request will create.
    pub(crate) fn allocate(self: &Arc<Self>, owner: u32) -> Result<RefId> {
        self.event(|core| core.rank.allocate(owner))
    }

    /// The request that was to create a value wasn't sent.
    pub(crate) fn never_sent(self: &Arc<Self>, id: RefId, error: &Error) -> Result<()> {
        self.event(|core| core.rank.never_sent(id, error))
    }

    /// A handle on a value that is known by its id alone.
    pub(crate) fn attach(self: &Arc<Self>, id: RefId) -> Result<()> {
        self.event(|core| core.rank.attach(id))
    }

    /// Keeps a value on this rank.
    pub(crate) fn keep(self: &Arc<Self>, value: Value) -> Result<RefId> {
        self.event(|core| core.rank.keep(value))
    }

    /// A value of this rank, once it is made.
    pub(crate) fn value(self: &Arc<Self>, operation: &str, value: ValueId) -> Result<Value> {
        self.check_alive(operation)?;
        let found = std::cell::RefCell::new(None);
        let look = || match lock(&self.core).rank.lookup(operation, value) {
            Ok(None) => false,
            other => {
                *found.borrow_mut() = Some(other);
                true
            }
        };
        self.wait_until(&look, Permission::Nothing, None)?;
        match found.into_inner() {
            Some(Ok(Some(value))) => Ok(value),
            Some(Err(e)) => Err(e),
            _ => Err(ErrorKind::ShutDown {
                operation: operation.into(),
            }
            .into()),
        }
    }

    /// A handle was dropped. May be called anywhere, whatever is locked.
    pub(crate) fn dropped(&self, id: RefId) {
        if !self.is_finished() {
            lock(&self.dropped).push(id);
            self.any_dropped.store(true, Ordering::SeqCst);
        }
    }

    /// Sends a request. With `window`, blocks until the window to the receiver has room (or refuses, if it mustn't).
    pub(crate) fn request(self: &Arc<Self>, request: Request) -> Result<(RequestId, Arc<Slot>)> {
        self.check_alive(&request.operation)?;
        self.check_rank(&request.operation, request.to)?;
        let Request {
            to,
            op,
            encoded,
            window,
            operation,
            waits,
            limit,
        } = request;
        let size = encoded.payload.size();
        if window != Windowed::Bypass && to != self.rank() {
            let open = || lock(&self.core).rank.window_is_open(to, size);
            if !open() {
                if window == Windowed::Refuse {
                    let (requests, bytes) = lock(&self.core).rank.outstanding(to);
                    return Err(ErrorKind::WindowFull {
                        operation,
                        rank: to,
                        requests,
                        bytes,
                    }
                    .into());
                }
                if !self.wait_until(&open, Permission::Nothing, limit.and_then(Limit::end))? {
                    let (requests, bytes) = lock(&self.core).rank.outstanding(to);
                    let status = format!("the window to it stayed full: {requests} requests, {bytes} bytes");
                    let seconds = limit.map_or(0.0, |l| l.time.as_secs_f64());
                    return Err(ErrorKind::Timeout {
                        operation,
                        rank: to,
                        seconds,
                        status,
                    }
                    .into());
                }
            }
        }
        let counted = (window != Windowed::Bypass).then_some(size);
        let slot = Slot::new();
        let waiting = Arc::clone(&slot);
        let stepped = self.step(move |core| {
            let id = core.rank.request(to, op, encoded.refs, encoded.payload, counted);
            core.waiting.insert(id, waiting);
            id
        });
        drop(encoded.handles);
        let (id, after) = stepped?;
        let own = TaskId {
            from: self.rank(),
            request: id,
        };
        for todo in self.settle(after) {
            match todo {
                // The caller would only wait for it: it may as well do it.
                Todo::Task { task, .. } if waits && task == own => self.run(todo, None)?,
                todo => self.hand_over(todo),
            }
        }
        Ok((id, slot))
    }

    /// How long a wait lasts before it asks; early enough for the answer to count.
    fn ask_after(&self) -> Duration {
        let after = self.settings.status_after();
        self.settings.timeout().map_or(after, |timeout| after.min(timeout / 2))
    }

    /// Waits for the answer to a request. Without a limit, the time since the receiver last said that it has the request counts.
    pub(crate) fn wait(self: &Arc<Self>, slot: &Slot, what: &Waiting<'_>) -> Result<Reply> {
        let start = Instant::now();
        slot.wait_here();
        let mut asked: Option<Instant> = None;
        let heard = || slot.heard().unwrap_or(start);
        let end = || match what.limit {
            Some(limit) => limit.end(),
            None => self.settings.timeout().map(|t| heard() + t),
        };
        loop {
            let ask = asked.unwrap_or(start).max(heard()) + self.ask_after();
            let until = end().map_or(ask, |e| e.min(ask));
            if self.wait_until(&|| slot.is_done(), Permission::Nothing, Some(until))? {
                return slot.take().ok_or_else(|| {
                    ErrorKind::ShutDown {
                        operation: what.operation.into(),
                    }
                    .into()
                });
            }
            let now = Instant::now();
            let status = slot.status();
            let to = lock(&self.core)
                .rank
                .release_waits_for(what.request)
                .first()
                .copied()
                .unwrap_or(what.to);
            // Looked at again: an answer may have come meanwhile.
            if end().is_some_and(|e| now >= e) {
                let status = status.map_or("it said nothing".into(), |(s, at)| {
                    format!("{s}, {:.1} s ago", at.elapsed().as_secs_f64())
                });
                let seconds = what
                    .limit
                    .map(|l| l.time)
                    .or(self.settings.timeout())
                    .unwrap_or_default()
                    .as_secs_f64();
                return Err(ErrorKind::Timeout {
                    operation: what.operation.into(),
                    rank: to,
                    seconds,
                    status,
                }
                .into());
            }
            if now < ask {
                continue;
            }
            if let (Some((status, _)), Some(_)) = (status, asked) {
                log::warn!(
                    "rank {}: `{}` on rank {to}: {status}; waited {:.1} s",
                    self.rank(),
                    what.operation,
                    start.elapsed().as_secs_f64()
                );
            } else {
                log::warn!(
                    "rank {}: still waiting for `{}` on rank {to}, {:.1} s",
                    self.rank(),
                    what.operation,
                    start.elapsed().as_secs_f64()
                );
            }
            asked = Some(now);
            self.event(|core| core.rank.query(what.request))?;
        }
    }

    // ---- contexts ------------------------------------------------------------------------------------------------

    pub(crate) fn open_context(self: &Arc<Self>) -> Result<ContextId> {
        self.event(|core| core.rank.open_context())
    }

    pub(crate) fn context_low(&self) -> u64 {
        lock(&self.core).rank.context_low()
    }

    pub(crate) fn check_context(&self, operation: &str, context: ContextId) -> Result<()> {
        lock(&self.core).rank.check_context(operation, context)
    }

    pub(crate) fn check_gradients(&self, operation: &str, context: ContextId) -> Result<()> {
        lock(&self.core).rank.check_gradients(operation, context)
    }

    /// Releases a context of this rank; the slot is filled when all ranks have.
    pub(crate) fn release_context(self: &Arc<Self>, context: ContextId) -> Result<(RequestId, Arc<Slot>)> {
        let slot = Slot::new();
        let waiting = Arc::clone(&slot);
        let id = self.event(move |core| {
            let id = core.rank.release_context(context);
            core.waiting.insert(id, waiting);
            id
        })?;
        Ok((id, slot))
    }

    /// Runs a backward of one of this rank's contexts. `set_roots` tells the executor its roots; it is called if no other backward is under way.
    pub(crate) fn backward(
        self: &Arc<Self>,
        context: ContextId,
        number: u32,
        manner: Manner,
        limit: Option<Limit>,
        set_roots: impl FnOnce(),
    ) -> Result<()> {
        let slot = Slot::new();
        let waiting = Arc::clone(&slot);
        let (begun, after) = self.step(move |core| {
            core.rank.begin_backward(context, number, manner)?;
            core.backwards.insert(context, waiting);
            Ok::<(), Error>(())
        })?;
        let todos = self.settle(after);
        begun?;
        set_roots();
        for todo in todos {
            match todo {
                Todo::Engine { context: c, .. } if c == context => self.run(todo, None)?,
                other => self.hand_over(other),
            }
        }
        slot.wait_here();
        let start = Instant::now();
        let mut asked = start;
        loop {
            let next = asked + self.ask_after();
            let silent = lock(&self.core).rank.backward_silent(context);
            // It was asked when `ask_after` had passed without a word.
            let lost = silent
                .zip(self.settings.timeout())
                .map(|((_, since), t)| self.started + since + t - self.ask_after());
            let end = limit.and_then(Limit::end).into_iter().chain(lost).min();
            let until = end.map_or(next, |e| e.min(next));
            if self.wait_until(&|| slot.is_done(), Permission::Engine(context), Some(until))? {
                return slot.take().map_or(Ok(()), |reply| reply.map(drop));
            }
            let now = Instant::now();
            let (ranks, still_silent) = {
                let core = lock(&self.core);
                (core.rank.backward_waits_for(context), core.rank.backward_silent(context))
            };
            if end.is_some_and(|e| now >= e) && (lost != end || still_silent == silent) {
                let rank = still_silent.map(|s| s.0).or(ranks.first().copied()).unwrap_or(self.rank());
                let seconds = limit.map_or(start.elapsed(), |l| l.time).as_secs_f64();
                let status = match still_silent {
                    Some((_, since)) => format!(
                        "it has said nothing for {:.1} s",
                        (self.started.elapsed() - since + self.ask_after()).as_secs_f64()
                    ),
                    None => format!("waiting for ranks {ranks:?}"),
                };
                let error: Error = ErrorKind::Timeout {
                    operation: "backward".into(),
                    rank,
                    seconds,
                    status,
                }
                .into();
                let abandoned = error.clone();
                self.event(|core| {
                    core.backwards.remove(&context);
                    core.rank.abandon_backward(context, abandoned);
                })?;
                return Err(error);
            }
            if now >= next {
                log::warn!(
                    "rank {}: backward of context {context} waits for ranks {ranks:?}, {:.1} s",
                    self.rank(),
                    start.elapsed().as_secs_f64()
                );
                asked = now;
                self.event(|core| core.rank.probe_backward(context))?;
            }
        }
    }

    pub(crate) fn counters(&self) -> Counters {
        lock(&self.core).rank.counters()
    }

    // ---- serving and the end -------------------------------------------------------------------------------------

    /// Rank 0's part in `lead` is over: tells all.
    pub(crate) fn tell_led(self: &Arc<Self>, error: Option<String>) -> Result<()> {
        self.event(|core| core.rank.led(error))
    }

    /// Serves until rank 0's part in `lead` is over; what it came to.
    pub(crate) fn wait_led(self: &Arc<Self>, main: Option<&mut dyn Any>) -> Result<Option<String>> {
        self.serve_main(&|| !lock(&self.led).is_empty(), main, "rank 0's closure in `lead`")?;
        Ok(lock(&self.led).pop_front().flatten())
    }

    /// Serves until all ranks have come to the end and nothing is on the way.
    pub(crate) fn drain(self: &Arc<Self>, main: Option<&mut dyn Any>) -> Result<()> {
        let before = self.ended.load(Ordering::SeqCst);
        self.event(|core| core.rank.enter_end())?;
        self.serve_main(&|| self.ended.load(Ordering::SeqCst) > before, main, "the end")
    }

    /// Serves on the main thread; runs `on_main` functions if it has their state.
    fn serve_main(self: &Arc<Self>, done: &dyn Fn() -> bool, mut main: Option<&mut dyn Any>, what: &str) -> Result<()> {
        let mut logged = Instant::now();
        loop {
            let woken = || done() || !lock(&self.main).is_empty();
            let until = logged + Duration::from_secs(5);
            if self.wait_until(&woken, Permission::Everything, Some(until))? {
                let todo = lock(&self.main).pop_front();
                match todo {
                    Some(todo) => self.run(todo, main.as_deref_mut())?,
                    None if done() => return Ok(()),
                    None => {}
                }
                continue;
            }
            logged = Instant::now();
            let missing = lock(&self.core).rank.missing_at_end();
            log::info!(
                "rank {}: serving until {what}; ranks below that haven't come: {missing:?}",
                self.rank()
            );
        }
    }

    /// Collective end, after [`drain`](Self::drain): ends our threads and the transport.
    pub(crate) fn close(self: &Arc<Self>) -> Result<()> {
        self.finished.store(true, Ordering::SeqCst);
        let held = lock(&self.core).rank.still_held();
        for (id, holders, handles, value) in held {
            log::warn!(
                "rank {}: value {} ({}), made for rank {}, is still held at the end: by ranks {holders:?}, {handles} handles here",
                self.rank(),
                id.value,
                self.executor.describe(&value),
                id.value.rank()
            );
        }
        self.pool.close();
        self.stopped.store(true, Ordering::SeqCst);
        self.transport.wake();
        for thread in std::mem::take(&mut *lock(&self.service)) {
            while !thread.is_finished() {
                self.transport.wake();
                std::thread::sleep(Duration::from_micros(50));
            }
            if thread.join().is_err() {
                log::error!("rank {}: a service thread panicked", self.rank());
            }
        }
        self.transport.close()
    }
}

/// What becomes of a message whose tensors were refused.
enum Refusal {
    Reply(Message),
    Request {
        id: RequestId,
        op: Op,
        refs: Vec<RefId>,
        error: Error,
    },
}

impl From<&Settings> for crate::transport::Settings {
    fn from(settings: &Settings) -> Self {
        crate::transport::Settings {
            eager_limit: settings.eager_limit,
            chunk_limit: settings.chunk_limit,
            message_limit: settings.message_limit as u64,
            segment_tags: settings.segment_tags.try_into().unwrap_or(u16::MAX),
            ring: settings.ring,
            pool_bytes: settings.pool_bytes,
        }
    }
}

/// How a request counts for the window to its receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Windowed {
    /// Blocks while the window is full.
    Block,
    /// Is refused while the window is full.
    Refuse,
    /// Doesn't count: it comes from inside a remote function, and nested calls must not wait for each other.
    Bypass,
}

/// A request to send.
pub(crate) struct Request {
    pub to: u32,
    pub op: Op,
    pub encoded: wire::Encoded,
    pub window: Windowed,
    pub operation: String,
    /// Whether the caller waits for the answer at once.
    pub waits: bool,
    pub limit: Option<Limit>,
}

/// What a thread waits for.
pub(crate) struct Waiting<'a> {
    pub request: RequestId,
    pub to: u32,
    pub operation: &'a str,
    pub limit: Option<Limit>,
}

/// How long a call may take in total, whatever its receiver says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    from: Instant,
    time: Duration,
}

impl Limit {
    pub(crate) fn from_now(time: Duration) -> Self {
        Limit {
            from: Instant::now(),
            time,
        }
    }

    /// `None` if it is further away than time goes.
    fn end(self) -> Option<Instant> {
        self.from.checked_add(self.time)
    }
}

//! The driver of a rank: feeds its state machine with messages, carries out what comes of it, and lets threads wait.

mod clock;
mod contexts;
mod core;
mod end;
pub(crate) mod failure;
mod handover;
mod host;
pub(crate) mod logging;
pub(crate) mod placement;
mod pool;
mod progress;
mod requests;
mod slot;
mod spin;
mod work;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::config::Settings;
use crate::protocol::{
    Action, ContextId, Counters, Input, Manner, Message, Op, Outcome, Output, Rank, RefId, RequestId, TaskId, ValueId, Window, Work,
};
use crate::queue::Queue;
use crate::tensor::DType;
use crate::transport::{Delivery, Frame, Landing, Loss, Transport};
use crate::wire::{self, Delivered, Handle, Payload};
use crate::{Error, ErrorKind, Result};

use clock::{Pace, Still, Ticks};
pub(crate) use pool::Pool;
pub(crate) use progress::Permission;
pub(crate) use requests::no_answer;
pub(crate) use slot::{Alarm, Reply, Slot};
use spin::Spin;

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
    fn is_heavy(&self, payload: &Payload) -> bool;
    /// Whether dropping a value runs none of the user's code.
    fn drops_at_once(&self, value: &Value) -> bool;
    /// What the rooms above keep of this rank.
    fn tables(&self) -> &dyn Any;
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
    /// What came of the last event; kept for its memory.
    actions: Vec<Action<Value, Payload>>,
    /// The last frame that left; kept for its memory.
    frame: Frame,
    waiting: FxHashMap<RequestId, Arc<Slot>>,
    backwards: FxHashMap<ContextId, Arc<Slot>>,
}

/// What to do after the lock on the core is given back. A thread that polls keeps one for its memory.
#[derive(Default)]
struct After {
    todos: SmallVec<[Todo; 1]>,
    chores: Vec<Chore>,
    /// Something happened that a thread of this rank may wait for.
    awaited: bool,
}

/// What is to be done beside work, and is mostly little.
enum Chore {
    /// Runs a callback that has been counted.
    Call(Box<dyn FnOnce() + Send>),
    /// Drops a reply nobody waits for.
    Reply(Box<Reply>),
    /// Drops values nobody holds.
    Values(Vec<Value>),
    Forget(ContextId),
}

/// What a program keeps on its rank, by type.
pub(crate) type State = FxHashMap<std::any::TypeId, Arc<dyn Any + Send + Sync>>;

/// One rank at work.
pub(crate) struct Runtime {
    pub(crate) settings: Settings,
    pub(crate) transport: Box<dyn Transport>,
    pub(crate) executor: Box<dyn Executor>,
    core: Mutex<Core>,
    progress: progress::Progress,
    host: host::HostCall,
    pub(crate) pool: Pool,
    dedicated: bool,
    one_node: bool,
    pace: Pace,
    spin: Spin,
    started: Instant,
    ticks: Ticks,
    main_thread: std::thread::ThreadId,
    /// Handles that were dropped, wherever that was.
    dropped: Mutex<Vec<RefId>>,
    any_dropped: AtomicBool,
    /// The end of the epoch has begun on this rank.
    ending: AtomicBool,
    /// Callbacks that run or wait to.
    callbacks: AtomicUsize,
    ended: AtomicUsize,
    /// Whether the epoch that ended last was the last one: all ranks were finishing.
    at_last: AtomicBool,
    led: Queue<Option<String>>,
    main: Queue<(Instant, Todo)>,
    stopped: AtomicBool,
    finished: AtomicBool,
    service: Mutex<Vec<JoinHandle<()>>>,
    state: Mutex<State>,
    /// Why the job is about to end.
    loss: OnceLock<Loss>,
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

#[inline]
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
        crate::tensor::device::set_local_rank(node.index as u32);
        let one_node = node.ranks == size as usize;
        let placement = placement::place(&settings, size as usize, node);
        log::debug!(
            "rank {me}: dedicated progress: {}, a core of its own: {}",
            placement.dedicated,
            placement.own_core
        );
        let window = Window {
            requests: settings.window_requests,
            bytes: settings.window_bytes,
        };
        let runtime = Arc::new(Runtime {
            core: Mutex::new(Core {
                rank: Rank::new(me, size, window),
                actions: Vec::new(),
                frame: Frame::default(),
                waiting: FxHashMap::default(),
                backwards: FxHashMap::default(),
            }),
            pool: Pool::new(me, settings.compute_threads + 1, settings.pool_threads),
            dedicated: placement.dedicated,
            one_node,
            pace: Pace::of(&settings),
            spin: Spin::of(settings.spin(), settings.offers(), placement.own_core),
            settings,
            transport,
            executor,
            progress: Default::default(),
            host: Default::default(),
            started: Instant::now(),
            ticks: Ticks::start(),
            ending: AtomicBool::new(false),
            main_thread: std::thread::current().id(),
            dropped: Mutex::default(),
            any_dropped: AtomicBool::new(false),
            callbacks: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            at_last: AtomicBool::new(false),
            led: Queue::default(),
            main: Queue::default(),
            stopped: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            service: Mutex::default(),
            state: Mutex::new(state),
            loss: OnceLock::new(),
        });
        let weak = Arc::downgrade(&runtime);
        runtime.transport.on_loss(Box::new(move |loss| {
            if let Some(runtime) = weak.upgrade() {
                runtime.lose(loss);
            }
        }));
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

    #[inline]
    pub(crate) fn rank(&self) -> u32 {
        self.transport.rank()
    }

    #[inline]
    pub(crate) fn size(&self) -> u32 {
        self.transport.size()
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Whether the world has ended, so that nothing can be asked of it.
    #[inline]
    pub(crate) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::SeqCst)
    }

    #[inline]
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

    #[inline]
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
            watch: settings.watch,
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
    pub operation: &'static str,
    /// Whether the caller waits for the answer at once.
    pub waits: bool,
    /// Whether it creates a value on the receiver.
    pub creates: bool,
    pub limit: Option<Limit>,
}

/// A request that was sent.
pub(crate) struct Requested {
    pub id: RequestId,
    pub slot: Arc<Slot>,
    /// The value that it creates, with one handle.
    pub created: Option<RefId>,
}

/// What a thread waits for.
pub(crate) struct Waiting {
    pub request: RequestId,
    pub to: u32,
    pub operation: &'static str,
    pub limit: Option<Limit>,
}

/// A caller's memory for one tensor.
pub(crate) struct Room<'a> {
    pub dtype: DType,
    pub shape: &'a [usize],
    pub memory: &'a mut [u8],
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

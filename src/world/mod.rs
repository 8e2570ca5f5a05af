//! The world: all ranks that run this program together, as one of them sees it.

mod builder;
pub mod local;
mod signals;

use std::any::{Any, TypeId};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use builder::Builder;
pub use signals::{REQUEUE, Signal};

use crate::dist::{Context, Counters, rank_counters};
use crate::optim::ComputeThreads;
use crate::rpc::{Caller, Calls};
use crate::runtime::{Runtime, Windowed};
use crate::{Error, ErrorKind, Result};

/// All ranks of this program, as one of them sees it: brings MPI and the service thread up, and ends them.
///
/// Any rank can issue calls ([`Calls`], [`ParameterCalls`](crate::ParameterCalls)) at any time, and answers those of others while its main thread does what it
/// likes. Two common ways: one rank drives and the others serve ([`lead`](Self::lead)), or all drive at once. At the end each rank calls
/// [`finish`](Self::finish). A world of several ranks that is dropped without it gave up: the job is aborted.
///
/// ```
/// use rankgrad::prelude::*;
///
/// let world = World::init()?; // without a launcher: one rank
/// world.lead(|world| {
///     let w = world.put(world.owner(1), Tensor::from_vec(vec![2.0, 3.0], [2])?)?;
///     let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&w])?;
///     let ctx = world.context()?;
///     let loss = ctx.fetch(&w)?.sum()?;
///     ctx.backward(&[loss])?;
///     optimizer.step(&ctx)?;
///     assert_eq!(w.fetch()?.to_vec::<f64>()?, [1.5, 2.5]);
///     Ok(())
/// })?;
/// world.finish()?;
/// # Ok::<(), rankgrad::Error>(())
/// ```
#[derive(Debug)]
pub struct World {
    caller: Caller,
    finished: bool,
    /// The error because of which this rank gives up, if it does; told if the world is dropped then.
    failure: OnceLock<Failure>,
    _compute: ComputeThreads,
}

impl World {
    /// Starts MPI, asking for MPI_THREAD_MULTIPLE, and takes all its ranks. Collective over MPI_COMM_WORLD; blocks until all have come. Without a launcher it
    /// is one rank, and everything works but functions on the main thread, which nobody else would call.
    ///
    /// # Errors
    /// As [`Builder::start`].
    pub fn init() -> Result<World> {
        World::builder().start()
    }

    /// A world to be set up.
    pub fn builder<'c>() -> Builder<'c> {
        Builder::default()
    }

    pub(crate) fn of(runtime: Arc<Runtime>) -> World {
        World {
            _compute: ComputeThreads::new(runtime.settings.compute_threads),
            caller: Caller {
                runtime,
                recorder: None,
                window: Windowed::Block,
                limit: None,
            },
            finished: false,
            failure: OnceLock::new(),
        }
    }

    fn runtime(&self) -> &Arc<Runtime> {
        &self.caller.runtime
    }

    /// A rank to own the `k`-th thing, dealt over the ranks in turn: `k` modulo the number of ranks, so that `owner(1)` is rank 1 where there is one,
    /// and 0 when there is one rank. Local.
    pub fn owner(&self, k: u32) -> u32 {
        k % self.size()
    }

    /// A new distributed autograd context, whose home is this rank. Local; blocks only while very many dropped ones are still being released.
    ///
    /// # Errors
    /// [`ErrorKind::ShutDown`] after the end.
    pub fn context(&self) -> Result<Context> {
        Context::open(self.runtime())
    }

    /// Rank 0 runs `f`; the others serve until it returns. Collective; blocks. `Some` of the result on rank 0, `None` on the others.
    ///
    /// # Errors
    /// `f`'s error on rank 0; [`ErrorKind::LeadFailed`] on the others, which names it in short. If all return it, rank 0 tells it and ends the job.
    pub fn lead<R>(&self, f: impl FnOnce(&World) -> Result<R>) -> Result<Option<R>> {
        self.runtime().check_alive("lead")?;
        if self.rank() == 0 {
            let result = f(self).inspect_err(|e| self.note_failure(e));
            self.runtime().tell_led(result.as_ref().err().map(ToString::to_string))?;
            return result.map(Some);
        }
        self.led(None)
    }

    fn led<R>(&self, main: Option<&mut dyn Any>) -> Result<Option<R>> {
        match self.runtime().wait_led(main)? {
            None => Ok(None),
            Some(message) => Err(ErrorKind::LeadFailed { message }.into()).inspect_err(|e| self.note_failure(e)),
        }
    }

    fn note_failure(&self, error: &Error) {
        let failure = match error.kind() {
            ErrorKind::LeadFailed { message } => Failure::OfRank0(message.clone()),
            _ => Failure::Own(error.to_string()),
        };
        let _ = self.failure.set(failure); // the first one counts
    }

    /// As [`lead`](Self::lead), whose closure runs on rank 0's main thread, so that rank 0's own `on_main` functions can't be called from it; on the ranks that serve, `on_main` functions run on the main thread, one at a time, with `state`. Collective; blocks.
    ///
    /// # Errors
    /// As [`lead`](Self::lead).
    pub fn lead_with<S: 'static, R>(&self, state: &mut S, f: impl FnOnce(&World) -> Result<R>) -> Result<Option<R>> {
        if self.rank() == 0 { self.lead(f) } else { self.led(Some(state)) }
    }

    /// Serves until all ranks serve (or finish) and nothing is left to do anywhere. Collective; blocks, without a time limit; who is missing is logged every 5 s.
    ///
    /// # Errors
    /// [`ErrorKind::ShutDown`] after the end; [`ErrorKind::Mpi`].
    pub fn serve(&self) -> Result<()> {
        self.runtime().check_alive("serve")?;
        self.runtime().drain(None)
    }

    /// As [`serve`](Self::serve); `on_main` functions run on this thread, one at a time, with `state`: for solvers that aren't `Send`, or make MPI calls of
    /// their own. Collective; blocks.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    pub fn serve_with<S: 'static>(&self, state: &mut S) -> Result<()> {
        self.runtime().check_alive("serve")?;
        self.runtime().drain(Some(state))
    }

    /// Gives this rank a state of type `T` for [`Scope::state`](crate::Scope::state), in place of an older one. Local. A call that comes earlier doesn't find it:
    /// [`Builder::state`] sets it before any call can come.
    pub fn set_state<T: Send + Sync + 'static>(&self, state: T) {
        let old = self.runtime().state().insert(TypeId::of::<T>(), Arc::new(state));
        drop(old);
    }

    /// Makes an MPI call of the host program beside ours. Local; blocks as long as the call does, and until ours have made room. Where MPI granted
    /// MPI_THREAD_MULTIPLE it just makes the call. Under MPI_THREAD_SERIALIZED our calls stand still meanwhile, and so does the service of this rank: a call
    /// that blocks for more than 5 s is logged. So a collective that another rank reaches only after an answer of this one never ends: [`wait`](Self::wait)
    /// for its non-blocking form. The closure must not use the world.
    ///
    /// ```
    /// # let world = rankgrad::World::init()?;
    /// let version = world.mpi(mpi::environment::version);
    /// assert!(version.0 >= 3);
    /// # world.finish()?;
    /// # Ok::<(), rankgrad::Error>(())
    /// ```
    pub fn mpi<R>(&self, call: impl FnOnce() -> R) -> R {
        self.runtime().host_call(call)
    }

    /// Waits for a non-blocking MPI operation of the host program: makes `test` (MPI_Test, say) again and again as [`mpi`](Self::mpi) does, until it says true.
    /// Local; blocks until then, without a time limit, while this rank goes on serving. The closure must not use the world.
    ///
    /// # Errors
    /// [`ErrorKind::Mpi`] if our own progress fails meanwhile.
    pub fn wait(&self, test: impl FnMut() -> bool) -> Result<()> {
        self.runtime().host_wait(test)
    }

    /// What is alive on a rank, and what it has done; this question itself not counted. Targeted; blocks until the answer is there.
    ///
    /// # Errors
    /// As [`Calls::call`].
    pub fn counters(&self, rank: u32) -> Result<Counters> {
        self.call(rank, rank_counters, ())
    }

    /// Messages and bytes that each rank has sent so far, in rank order. Targeted, to all ranks; blocks until all have answered.
    ///
    /// # Errors
    /// As [`Calls::call`].
    pub fn traffic(&self) -> Result<Vec<(u64, u64)>> {
        let futures: Vec<_> = (0..self.size())
            .map(|rank| self.call_async(rank, rank_counters, ()))
            .collect::<Result<_>>()?;
        futures
            .into_iter()
            .map(|f| f.wait().map(|c: Counters| (c.messages, c.bytes)))
            .collect()
    }

    /// The end. Collective; blocks until all ranks have come and nothing is on the way: calls issued from callbacks are waited for. Then our threads end, and
    /// MPI, if we started it. Values that are still held somewhere are reported in the log.
    ///
    /// # Errors
    /// [`ErrorKind::Mpi`].
    pub fn finish(mut self) -> Result<()> {
        self.end()
    }

    /// Runs `f` on this rank, then [`finish`](Self::finish)es. Collective; blocks. If `f` fails, the job is aborted, and `f`'s error is told on stderr: a `main` that returns it
    /// would be aborted before it is printed.
    ///
    /// # Errors
    /// `f`'s error if this is the only rank; as [`finish`](Self::finish).
    pub fn run<R>(self, f: impl FnOnce(&World) -> Result<R>) -> Result<R> {
        let result = f(&self).inspect_err(|e| self.note_failure(e))?;
        self.finish()?;
        Ok(result)
    }

    fn end(&mut self) -> Result<()> {
        self.finished = true;
        self.runtime().finish()?;
        let closed = self.runtime().close();
        builder::ended();
        closed
    }
}

impl Calls for World {
    fn caller(&self) -> &Caller {
        &self.caller
    }
}

/// Why a rank gives up.
#[derive(Debug)]
enum Failure {
    Own(String),
    /// What `lead` failed with there.
    OfRank0(String),
}

/// What rank 0 failed with it tells itself, and ends the job: one line instead of one a rank. If it hasn't after this time, since it goes on without the
/// others, they tell.
const RANK_0_FIRST: Duration = Duration::from_secs(1);

impl Drop for World {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        if self.size() > 1 {
            let why = match self.failure.get() {
                _ if std::thread::panicking() => "panicked".into(),
                Some(Failure::Own(error)) => format!("gave up: {error}"),
                Some(Failure::OfRank0(error)) => {
                    std::thread::sleep(RANK_0_FIRST);
                    format!("gave up, and rank 0 before it: {error}")
                }
                None => "dropped its world without `finish`, by which each rank ends its part: call it last, or use `World::run`, which also tells an error that makes a rank give up".into(),
            };
            self.runtime().abort(&why);
        }
        if let Err(e) = self.end() {
            log::error!("rank {}: the end of a world that was dropped: {e}", self.rank());
        }
    }
}

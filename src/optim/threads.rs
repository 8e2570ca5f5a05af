//! The threads that large updates are spread over: our own, none but those of the caller unless asked for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rayon_core::{ThreadPool, ThreadPoolBuilder};

/// Updates of fewer elements stay on the calling thread: waking others takes longer than they save.
const LARGE: usize = 1 << 17;

/// How long the calling thread looks whether the others are done before it sleeps.
const PATIENCE: Duration = Duration::from_micros(50);

static STATE: Mutex<State> = Mutex::new(State {
    claims: Vec::new(),
    next: 0,
    pool: None,
});

struct State {
    /// How many threads are asked for, by whom.
    claims: Vec<(u64, usize)>,
    next: u64,
    /// Threads beside the caller's; made when they are first needed.
    pool: Option<Arc<ThreadPool>>,
}

impl State {
    /// How many there are to be beside the caller's.
    fn helpers(&self) -> usize {
        self.claims.iter().map(|claim| claim.1).max().unwrap_or(1).saturating_sub(1)
    }
}

/// Threads for the large updates of this process, while it lives. A [`World`](crate::World) has one, of `RANKGRAD_COMPUTE_THREADS` threads; a program
/// without a world makes its own. Of several the largest holds.
///
/// Large parameters of elementwise rules are updated in pieces, which these threads share. The results have the same bits with any number of threads.
///
/// ```
/// use rankgrad::optim::{ComputeThreads, Sgd, Optimizer};
/// use rankgrad::tensor::{DType, Tensor};
///
/// let threads = ComputeThreads::new(2);
/// let p = Tensor::zeros(DType::F32, [1 << 20]).parameter()?;
/// let gradient = Tensor::ones(DType::F32, [1 << 20]).data();
/// Optimizer::new(Sgd::new(0.5), vec![p.clone()])?.step_one(0, gradient.into())?; // by two threads
/// assert!(p.to_vec::<f32>()?.iter().all(|&x| x == -0.5));
/// # drop(threads);
/// # Ok::<(), rankgrad::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the threads are there while it lives"]
pub struct ComputeThreads(u64);

impl ComputeThreads {
    /// Asks for so many threads, the calling one included. Local; blocks on nothing. They start with the first large update.
    pub fn new(threads: usize) -> Self {
        let mut state = state();
        let claim = state.next;
        state.next += 1;
        state.claims.push((claim, threads));
        ComputeThreads(claim)
    }
}

impl Drop for ComputeThreads {
    fn drop(&mut self) {
        let mut state = state();
        state.claims.retain(|claim| claim.0 != self.0);
        if state.helpers() == 0 {
            state.pool = None;
        }
    }
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The threads beside the caller's, as many as are asked for now.
fn pool() -> Option<Arc<ThreadPool>> {
    let mut state = state();
    let helpers = state.helpers();
    if state.pool.as_ref().map_or(0, |pool| pool.current_num_threads()) != helpers {
        state.pool = None;
        if helpers > 0 {
            let builder = ThreadPoolBuilder::new().num_threads(helpers);
            match builder.thread_name(|i| format!("rankgrad-compute-{i}")).build() {
                Ok(pool) => state.pool = Some(Arc::new(pool)),
                Err(e) => log::error!("no {helpers} threads for large updates, which stay on one: {e}"),
            }
        }
    }
    state.pool.clone()
}

/// How many threads an update of so many elements goes to, at most.
pub(super) fn count(elements: usize) -> usize {
    if elements < LARGE { 1 } else { state().helpers() + 1 }
}

/// Hands each item to `work`, in order; those of an update of many elements to several threads at once.
pub(super) fn for_each<I>(items: I, elements: usize, work: impl Fn(I::Item) + Sync)
where
    I: Iterator + Send,
    I::Item: Send,
{
    let Some(pool) = (elements >= LARGE).then(pool).flatten() else {
        return items.for_each(work);
    };
    let items = Mutex::new(items);
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let share = || {
        while let Some(item) = next() {
            work(item);
        }
    };
    let helpers = pool.current_num_threads();
    let done = AtomicUsize::new(0);
    pool.in_place_scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(|_| {
                share();
                done.fetch_add(1, Ordering::Release);
            });
        }
        share();
        // The others have a piece each to finish, which is less than it takes to sleep and be woken.
        let start = Instant::now();
        while done.load(Ordering::Acquire) < helpers && start.elapsed() < PATIENCE {
            std::hint::spin_loop();
        }
    });
}

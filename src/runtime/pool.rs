//! Threads for user functions. The pool grows when its threads block, so that nested calls always find one.
//!
//! The limit is on threads at work. One that waits for an answer doesn't count: the functions that it waits for, here and on other ranks, need
//! threads too, and if those who wait held all of them, ranks would wait for each other for ever.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce() + Send>;

/// A thread without work leaves after this time.
const KEEP: Duration = Duration::from_secs(5);
/// A job that waits this long gets a new thread, whatever the others do.
const PATIENCE: Duration = Duration::from_millis(5);

thread_local! {
    static ON_POOL: Cell<bool> = const { Cell::new(false) };
}

#[derive(Default)]
struct State {
    jobs: VecDeque<(Instant, Job)>,
    threads: usize,
    idle: usize,
    blocked: usize,
    closed: bool,
    warned: Option<Instant>,
}

impl State {
    /// Threads that neither wait for work nor in a call.
    fn at_work(&self) -> usize {
        self.threads.saturating_sub(self.blocked + self.idle)
    }

    /// Whether it is time to say again that no thread can be had.
    fn may_warn(&mut self) -> bool {
        let may = self.warned.is_none_or(|t| t.elapsed() > Duration::from_secs(5));
        if may {
            self.warned = Some(Instant::now());
        }
        may
    }
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    gone: Condvar,
    base: usize,
    limit: usize,
    rank: u32,
}

/// The function pool of a rank.
#[derive(Clone)]
pub(crate) struct Pool(Arc<Shared>);

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        f.debug_struct("Pool")
            .field("threads", &state.threads)
            .field("blocked", &state.blocked)
            .field("jobs", &state.jobs.len())
            .finish()
    }
}

impl Pool {
    pub(crate) fn new(rank: u32, base: usize, limit: usize) -> Self {
        Pool(Arc::new(Shared {
            state: Mutex::default(),
            work: Condvar::new(),
            gone: Condvar::new(),
            base: base.max(1),
            limit: limit.max(1),
            rank,
        }))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a job.
    pub(crate) fn push(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        state.jobs.push_back((Instant::now(), Box::new(job)));
        if state.idle >= state.jobs.len() {
            self.0.work.notify_one();
        } else if state.threads.saturating_sub(state.blocked) < self.0.base {
            self.grow(&mut state);
        }
    }

    /// Gives a new thread to a job that has waited too long: all others may be blocked in ways we can't see.
    pub(crate) fn relieve(&self) {
        let mut state = self.state();
        if state.jobs.front().is_some_and(|j| j.0.elapsed() > PATIENCE) {
            self.see_to_jobs(&mut state);
        }
    }

    /// Wakes a thread for jobs that wait, or makes one. One that was woken before may have left instead.
    fn see_to_jobs(&self, state: &mut State) {
        match state.idle {
            0 => self.grow(state),
            _ => self.0.work.notify_one(),
        }
    }

    fn grow(&self, state: &mut State) {
        if state.threads.saturating_sub(state.blocked) >= self.0.limit {
            if state.may_warn() {
                log::warn!(
                    "rank {}: {} threads of the function pool are at work ({} more wait in calls), {} functions wait; raise RANKGRAD_POOL_THREADS",
                    self.0.rank,
                    state.at_work(),
                    state.blocked,
                    state.jobs.len()
                );
            }
            return;
        }
        let pool = self.clone();
        let name = format!("rankgrad-{}-fn", self.0.rank);
        match std::thread::Builder::new().name(name).spawn(move || pool.work()) {
            Ok(_) => state.threads += 1,
            Err(e) if state.may_warn() => {
                log::error!(
                    "rank {}: no new thread for the function pool, which has {}: {e}; {} functions wait",
                    self.0.rank,
                    state.threads,
                    state.jobs.len()
                );
            }
            Err(_) => {}
        }
    }

    fn work(&self) {
        ON_POOL.set(true);
        let mut state = self.state();
        loop {
            // Some that waited have come back.
            if state.at_work() > self.0.limit {
                // It may have been woken for a job: that falls to another one.
                if !state.jobs.is_empty() {
                    self.0.work.notify_one();
                }
                break;
            }
            if let Some((_, job)) = state.jobs.pop_front() {
                drop(state);
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)).is_err() {
                    log::error!(
                        "rank {}: a thread of the function pool panicked: this is a bug in rankgrad",
                        self.0.rank
                    );
                }
                state = self.state();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let (next, timeout) = self.0.work.wait_timeout(state, KEEP).unwrap_or_else(PoisonError::into_inner);
            state = next;
            state.idle -= 1;
            if timeout.timed_out() && state.jobs.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        self.0.gone.notify_all();
    }

    /// Runs `wait`, which blocks; meanwhile another thread may take this one's place.
    pub(crate) fn blocking<R>(&self, wait: impl FnOnce() -> R) -> R {
        // Within a wait, another one is the same thread's.
        if !ON_POOL.replace(false) {
            return wait();
        }
        let mut state = self.state();
        state.blocked += 1;
        if !state.jobs.is_empty() {
            self.see_to_jobs(&mut state);
        }
        drop(state);
        let result = wait();
        self.state().blocked -= 1;
        ON_POOL.set(true);
        result
    }

    /// Ends all threads once the queue is empty; waits for them.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        self.0.work.notify_all();
        while state.threads > 0 {
            state = self.0.gone.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn wait(pool: &Pool, answer: &Receiver<()>) {
        pool.blocking(|| answer.recv_timeout(LONG)).expect("it is answered");
    }

    /// Jobs on two pools of one thread each, which all wait for a job on the other pool, which waits for one on the first.
    #[test]
    fn threads_that_wait_keep_none_from_those_they_wait_for() {
        let [near, far] = [0, 1].map(|rank| Pool::new(rank, 2, 1));
        let (done, all) = channel();
        for _ in 0..50 {
            let (near_too, far, done) = (near.clone(), far.clone(), done.clone());
            near.push(move || {
                let (answer, answered) = channel();
                let (here, there) = (near_too.clone(), far.clone());
                far.push(move || {
                    let (inner, heard) = channel();
                    here.push(move || inner.send(()).expect("it is waited for"));
                    wait(&there, &heard);
                    answer.send(()).expect("it is waited for");
                });
                wait(&near_too, &answered);
                done.send(()).expect("it is waited for");
            });
        }
        for _ in 0..50 {
            all.recv_timeout(LONG).expect("no pool is stuck");
        }
        near.close();
        far.close();
    }

    /// Threads come back from waits, and leave, while others are woken for jobs: none of these lies until an idle thread has had enough.
    #[test]
    fn no_job_is_left_behind_by_threads_that_leave() {
        fn nested(pools: [Pool; 2], depth: usize, done: std::sync::mpsc::Sender<()>) {
            let [here, there] = pools;
            here.clone().push(move || {
                if depth > 0 {
                    let (answer, answered) = channel();
                    nested([there, here.clone()], depth - 1, answer);
                    wait(&here, &answered);
                }
                done.send(()).expect("it is waited for");
            });
        }
        let pools = [0, 1].map(|rank| Pool::new(rank, 2, 1));
        let (done, all) = channel();
        for round in 0..500 {
            for _ in 0..3 {
                nested(pools.clone(), 3, done.clone());
            }
            for _ in 0..3 {
                all.recv_timeout(KEEP / 2).unwrap_or_else(|_| panic!("round {round}: {:?}", pools));
            }
        }
        pools.iter().for_each(Pool::close);
    }

    #[test]
    fn the_limit_is_on_threads_at_work() {
        let pool = Pool::new(0, 8, 2);
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        for _ in 0..20 {
            let (now, most) = (Arc::clone(&now), Arc::clone(&most));
            pool.push(move || {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(2));
                now.fetch_sub(1, Ordering::SeqCst);
            });
        }
        pool.close();
        assert!(most.load(Ordering::SeqCst) <= 2);
    }

    #[test]
    fn a_wait_within_a_wait_is_one_thread() {
        let pool = Pool::new(0, 1, 4);
        let (done, blocked) = channel();
        let inner = pool.clone();
        pool.push(move || {
            let count = inner.blocking(|| inner.blocking(|| inner.state().blocked));
            let after = inner.state().blocked;
            let again = inner.blocking(|| inner.state().blocked);
            done.send((count, after, again)).expect("it is waited for");
        });
        assert_eq!(blocked.recv_timeout(LONG), Ok((1, 0, 1)));
        pool.close();
    }
}

//! The result of a call that hasn't been waited for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::calls::Call;
use crate::runtime::{Alarm, Limit, Permission, Reply, Runtime, Slot, lock};
use crate::{Error, ErrorKind, Result};

/// The result of a call, now or later.
///
/// Dropping it is fine: the function still runs, and what comes back is drained.
#[must_use = "a future that isn't waited for loses its error"]
#[derive(Debug)]
pub struct Future<T> {
    source: Source<T>,
}

#[derive(Debug)]
enum Source<T> {
    Call {
        call: Call,
        decode: fn(Reply, &Call) -> Result<T>,
    },
    Chained {
        runtime: Arc<Runtime>,
        cell: Arc<Cell<T>>,
        limit: Option<Duration>,
    },
}

/// Where a callback leaves its result.
#[derive(Debug)]
struct Cell<T> {
    value: Mutex<Option<Result<T>>>,
    ready: Arc<Slot>,
}

impl<T> Cell<T> {
    fn wait_unless(&self, runtime: &Arc<Runtime>, limit: Option<Duration>, stop: &dyn Fn() -> bool) -> Result<()> {
        let deadline = limit.and_then(|l| std::time::Instant::now().checked_add(l));
        self.ready.wait_here();
        if runtime.wait_until(&|| self.ready.is_done() || stop(), Permission::Nothing, deadline)? {
            return Ok(());
        }
        Err(ErrorKind::Timeout {
            operation: "a future's callback".into(),
            rank: runtime.rank(),
            seconds: limit.unwrap_or_default().as_secs_f64(),
            status: "it has not run to its end".into(),
        }
        .into())
    }

    fn take(&self) -> Result<T> {
        lock(&self.value).take().unwrap_or_else(|| Err(panicked()))
    }
}

fn panicked() -> Error {
    Error::user("the future's callback panicked")
}

impl<T: DeserializeOwned> Future<T> {
    pub(super) fn of_call(call: Call) -> Self {
        Future {
            source: Source::Call {
                call,
                decode: |reply, call| call.decode(reply),
            },
        }
    }
}

impl<T> Future<T> {
    /// Whether the result is there, so that [`wait`](Self::wait) returns at once. Local; never blocks.
    pub fn is_done(&self) -> bool {
        match &self.source {
            Source::Call { call, .. } => call.slot.is_done(),
            Source::Chained { cell, .. } => cell.ready.is_done(),
        }
    }

    /// The result. Blocks until it is there.
    ///
    /// # Errors
    /// The function's error, as [`ErrorKind::Remote`]; [`ErrorKind::Timeout`] when the time of the call, or the default time,
    /// has passed without a sign of life from the callee.
    pub fn wait(self) -> Result<T> {
        match self.source {
            Source::Call { call, decode } => {
                let reply = call.wait()?;
                let result = decode(reply, &call);
                Slot::keep(call.slot);
                result
            }
            Source::Chained { runtime, cell, limit } => {
                cell.wait_unless(&runtime, limit, &|| false)?;
                cell.take()
            }
        }
    }

    /// Waits until the result is there, and leaves it; or until `stop`.
    fn wait_unless(&self, stop: &dyn Fn() -> bool) -> Result<()> {
        match &self.source {
            Source::Call { call, .. } => call.wait_unless(stop),
            Source::Chained { runtime, cell, limit } => cell.wait_unless(runtime, *limit, stop),
        }
    }

    /// The alarm is to ring if the result is an error.
    fn ring_on_error(&self, alarm: &Arc<Alarm>) {
        match &self.source {
            Source::Call { call, .. } => call.slot.ring_on_error(alarm),
            Source::Chained { cell, .. } => cell.ready.ring_on_error(alarm),
        }
    }

    /// The result, if it is there within `limit` from now; bounds the total, whatever the callee says.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_timeout(mut self, limit: Duration) -> Result<T> {
        match &mut self.source {
            Source::Call { call, .. } => call.limit = Some(Limit::from_now(limit)),
            Source::Chained { limit: l, .. } => *l = Some(limit),
        }
        self.wait()
    }

    /// The result if it is there, else the future again. Local; never blocks.
    ///
    /// # Errors
    /// The future itself, unchanged, when the result isn't there yet.
    #[allow(clippy::result_large_err)] // it gives the future back
    pub fn try_wait(self) -> std::result::Result<Result<T>, Self> {
        if self.is_done() { Ok(self.wait()) } else { Err(self) }
    }
}

impl<T: Send + 'static> Future<T> {
    /// Runs `f` on the result as soon as it is there, on a thread of the function pool; the returned future is `f`'s.
    /// [`World::finish`](crate::World::finish) waits for it, and for calls that it issues. Local; doesn't block.
    pub fn then<R: Send + 'static>(self, f: impl FnOnce(Result<T>) -> Result<R> + Send + 'static) -> Future<R> {
        let ready = Slot::new();
        let cell = Arc::new(Cell {
            value: Mutex::new(None),
            ready,
        });
        let target = Arc::clone(&cell);
        let finish = move |result: Result<T>| {
            // Filled also when `f` panics, so that nobody waits for ever.
            struct Done(Arc<Slot>, Reply);
            impl Drop for Done {
                fn drop(&mut self) {
                    let reply = std::mem::replace(&mut self.1, Err(panicked()));
                    if let Some((callback, reply)) = self.0.complete(reply) {
                        callback(reply);
                    }
                }
            }
            let mut done = Done(Arc::clone(&target.ready), Err(panicked()));
            let value = f(result);
            done.1 = value.as_ref().map(|_| Default::default()).map_err(Clone::clone);
            *lock(&target.value) = Some(value);
        };
        match self.source {
            Source::Call { call, decode } => {
                let runtime = Arc::clone(&call.runtime);
                let slot = Arc::clone(&call.slot);
                let at_once = slot.on_complete(Box::new(move |reply| finish(decode(reply, &call))));
                if let Some((callback, reply)) = at_once {
                    runtime.callback(move || callback(reply));
                }
                Future {
                    source: Source::Chained {
                        runtime,
                        cell,
                        limit: None,
                    },
                }
            }
            Source::Chained { runtime, cell: source, .. } => {
                let ready = Arc::clone(&source.ready);
                let run = Arc::clone(&runtime);
                let at_once = ready.on_complete(Box::new(move |_| {
                    run.callback(move || {
                        finish(source.take());
                    });
                }));
                if let Some((callback, reply)) = at_once {
                    callback(reply);
                }
                Future {
                    source: Source::Chained {
                        runtime,
                        cell,
                        limit: None,
                    },
                }
            }
        }
    }
}

/// Waits for several results, in any order; the first error that comes ends the wait, also while others are still on their way. Blocks.
///
/// # Errors
/// The first error to come; of several that are there, the first in the list.
pub fn wait_all<T>(futures: impl IntoIterator<Item = Future<T>>) -> Result<Vec<T>> {
    let alarm = Alarm::new();
    let futures: Vec<_> = futures.into_iter().inspect(|f| f.ring_on_error(&alarm)).collect();
    futures.iter().try_for_each(|f| f.wait_unless(&|| alarm.has_rung()))?;
    // All are done, or one that is has failed.
    futures.into_iter().filter(Future::is_done).map(Future::wait).collect()
}

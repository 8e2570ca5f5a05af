//! The result of a call that hasn't been waited for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::calls::Call;
use crate::runtime::{Limit, Permission, Reply, Runtime, Slot, lock};
use crate::{ErrorKind, Result};

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
                decode(reply, &call)
            }
            Source::Chained { runtime, cell, limit } => {
                let deadline = limit.and_then(|l| std::time::Instant::now().checked_add(l));
                cell.ready.wait_here();
                if !runtime.wait_until(&|| cell.ready.is_done(), Permission::Nothing, deadline)? {
                    let seconds = limit.unwrap_or_default().as_secs_f64();
                    let (operation, status) = ("a future's callback".into(), "it has not run to its end".into());
                    return Err(ErrorKind::Timeout {
                        operation,
                        rank: runtime.rank(),
                        seconds,
                        status,
                    }
                    .into());
                }
                lock(&cell.value)
                    .take()
                    .unwrap_or_else(|| Err(crate::Error::user("the future's callback panicked")))
            }
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
            let ready = Arc::clone(&target.ready);
            // Filled also when `f` panics, so that nobody waits for ever.
            struct Done(Arc<Slot>);
            impl Drop for Done {
                fn drop(&mut self) {
                    if let Some((callback, reply)) = self.0.complete(Ok(Default::default())) {
                        callback(reply);
                    }
                }
            }
            let _done = Done(ready);
            let value = f(result);
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
                        let value = lock(&source.value).take();
                        finish(value.unwrap_or_else(|| Err(crate::Error::user("the future's callback panicked"))));
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

/// Waits for several results; the first error ends the wait. Blocks.
///
/// # Errors
/// The first error in the order of the list.
pub fn wait_all<T>(futures: impl IntoIterator<Item = Future<T>>) -> Result<Vec<T>> {
    futures.into_iter().map(Future::wait).collect()
}

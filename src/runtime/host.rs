//! The host program's own MPI calls. Where MPI allows one call at a time, they are kept apart from ours.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Permission, Runtime, lock};
use crate::Result;

/// A host's call that takes longer is logged: it stops the service of its rank.
const LONG: Duration = Duration::from_secs(5);
/// Pauses between two tests of a host's operation: short at first, for most end soon.
const PAUSES: (Duration, Duration) = (Duration::from_micros(10), Duration::from_micros(500));

/// The host's call under way, if there is one.
#[derive(Debug, Default)]
pub(super) struct HostCall {
    active: AtomicBool,
    /// When it began, as long as it hasn't been logged.
    since: Mutex<Option<Instant>>,
}

/// Notes the end of a host's call, also when it panics.
struct Noted<'a>(&'a Runtime);

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        self.0.log_long_host_call();
        *lock(&self.0.host.since) = None;
        self.0.host.active.store(false, Ordering::SeqCst);
    }
}

impl Runtime {
    /// Makes a call of the host's beside ours.
    pub(crate) fn host_call<R>(&self, call: impl FnOnce() -> R) -> R {
        if !self.transport.is_serialized() {
            return call();
        }
        let (mut call, mut result) = (Some(call), None);
        self.transport.exclusive(&mut || {
            *lock(&self.host.since) = Some(Instant::now());
            self.host.active.store(true, Ordering::SeqCst);
            let _noted = Noted(self);
            result = call.take().map(|call| call());
        });
        result.expect("`exclusive` runs its closure")
    }

    /// Makes calls of the host's until one says that its operation is done; polls in between.
    pub(crate) fn host_wait(self: &Arc<Self>, mut test: impl FnMut() -> bool) -> Result<()> {
        let mut pause = PAUSES.0;
        while !self.host_call(&mut test) {
            self.wait_until(&|| false, Permission::Nothing, Some(Instant::now() + pause))?;
            pause = (pause * 2).min(PAUSES.1);
        }
        Ok(())
    }

    /// Whether a call of the host's keeps ours from MPI; logs it, once, if it takes long.
    #[inline]
    pub(super) fn host_calls(&self) -> bool {
        let active = self.host.active.load(Ordering::SeqCst);
        if active {
            self.log_long_host_call();
        }
        active
    }

    fn log_long_host_call(&self) {
        let mut since = lock(&self.host.since);
        if let Some(time) = since.filter(|since| since.elapsed() > LONG) {
            *since = None;
            drop(since);
            log::warn!(
                "rank {}: an MPI call of the host program has held MPI for {:.1} s, and this rank answers nobody meanwhile: MPI allows one call at a time; \
                 use a non-blocking call with `world.wait(..)`, or start MPI with MPI_THREAD_MULTIPLE",
                self.rank(),
                time.elapsed().as_secs_f64()
            );
        }
    }
}

//! When a rank can't go on: panics, and the last words before the job is ended.

use std::any::Any;
use std::cell::Cell;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use super::Runtime;
use crate::transport::Loss;

/// A wait is told on stderr only so far from where a death was noticed: a thousand ranks needn't all say it. The log has them all.
const NEAR: u32 = 16;

thread_local! {
    /// How many regions that catch panics this thread is in.
    static CATCHING: Cell<usize> = const { Cell::new(0) };
}

/// Marks a region whose panics become errors.
#[must_use]
pub(crate) struct Catching(());

/// Enters such a region.
#[inline]
pub(crate) fn catching() -> Catching {
    CATCHING.set(CATCHING.get() + 1);
    Catching(())
}

impl Drop for Catching {
    #[inline]
    fn drop(&mut self) {
        CATCHING.set(CATCHING.get() - 1);
    }
}

/// Whether this thread runs a user's function for another rank.
#[inline]
pub(crate) fn is_catching() -> bool {
    CATCHING.get() > 0
}

/// Whether a panic on this thread will be caught by us.
pub(crate) fn is_caught() -> bool {
    cfg!(panic = "unwind") && is_catching()
}

/// The message of a panic.
pub(crate) fn message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

/// Says why the job ends, in the log and on stderr: whoever reads the launcher's output must see which rank it was, also without a logger.
pub(crate) fn last_words(rank: u32, why: &str) {
    log::error!("rank {rank}: {why}; the job is aborted");
    say(rank, &format!("{why}; the job is aborted"));
}

fn say(rank: u32, what: &str) {
    // One write, so that the lines of several ranks don't mix.
    let line = format!("rankgrad: rank {rank}: {what}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Aborts the job when the thread that started the world panics outside of the regions that catch; on any panic where panics abort the process anyway.
/// The hook that was there before runs first.
pub(crate) fn install_hook(runtime: &Arc<Runtime>) {
    let main = std::thread::current().id();
    let runtime = Arc::downgrade(runtime);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        before(info);
        let fatal = cfg!(panic = "abort") || (std::thread::current().id() == main && !is_caught());
        if fatal
            && let Some(runtime) = runtime.upgrade()
            && !runtime.is_finished()
        {
            runtime.abort("panicked");
        }
    }));
}

impl Runtime {
    /// A rank was lost, and the transport is about to end the job.
    pub(super) fn lose(&self, loss: &Loss) {
        // The first one counts.
        let _ = self.loss.set(loss.clone());
        self.transport.wake();
    }

    /// Whether a rank was lost, so that no wait will end.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.loss.get().is_some()
    }

    /// After a rank was lost, says what this thread has waited for, and leaves the rest to the transport, which ends the job. Does nothing else: that a wait
    /// ended without what it was for may also be because another thread was faster.
    pub(super) fn end_wait_if_lost(&self, what: impl FnOnce() -> String, since: Instant) {
        let Some(loss) = self.loss.get() else { return };
        let told = format!("was waiting for {}, for {:.1} s", what(), since.elapsed().as_secs_f64());
        log::error!("rank {}: {told}", self.rank());
        if loss.died && loss.hops <= NEAR {
            say(self.rank(), &told);
        }
        loop {
            std::thread::park();
        }
    }
}

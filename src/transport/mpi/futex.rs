//! Parking on a word of memory that several processes share.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use crate::transport::doorbell::Park;

/// Parks on the word itself: a Linux futex, without the PRIVATE flag as other processes wake it. On other systems a
/// sleeper looks at the word every 200 us.
#[derive(Debug, Default)]
pub(super) struct Futex;

#[cfg(target_os = "linux")]
impl Park for Futex {
    fn park(&self, ticket: &AtomicU32, seen: u32, limit: Duration) {
        let seconds = libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX).min(1 << 30);
        // SAFETY: a timespec is plain integers; all zeros is a valid one.
        let mut timeout: libc::timespec = unsafe { std::mem::zeroed() };
        timeout.tv_sec = seconds;
        timeout.tv_nsec = limit.subsec_nanos() as _;
        // SAFETY: the word and the timeout live through the call. Every outcome (woken, changed, timed out, interrupted) means
        // only that the sleep is over, so the result doesn't matter.
        unsafe { libc::syscall(libc::SYS_futex, ticket.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout) };
    }

    fn unpark(&self, ticket: &AtomicU32) {
        // SAFETY: the word lives through the call; waking nobody isn't an error.
        unsafe { libc::syscall(libc::SYS_futex, ticket.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }
}

#[cfg(not(target_os = "linux"))]
impl Park for Futex {
    fn park(&self, ticket: &AtomicU32, seen: u32, limit: Duration) {
        let started = std::time::Instant::now();
        while ticket.load(std::sync::atomic::Ordering::SeqCst) == seen {
            let Some(left) = limit.checked_sub(started.elapsed()) else { break };
            std::thread::sleep(left.min(Duration::from_micros(200)));
        }
    }

    fn unpark(&self, _: &AtomicU32) {}
}

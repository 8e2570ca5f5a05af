//! What the hand-over between threads is built from: `std`'s. `tests/handover.rs` compiles the same files with Shuttle's in its place.

pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) mod atomic {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
}

pub(crate) mod thread {
    pub(crate) use std::thread::{Thread, current, park_timeout, yield_now};
}

pub(crate) mod hint {
    pub(crate) use std::hint::spin_loop;
}

/// How often a thread that waits for the polling role looks for it before it parks: a few microseconds.
pub(crate) const SPINS: usize = 200;

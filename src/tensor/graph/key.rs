//! Keys that order the nodes of a program alike, whatever rank a piece of it runs on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::frame;

/// The place of a node in the program: the frame it was made in, then its number.
///
/// Contributions to one value are summed in descending order of the contributors' keys. Numbers are compared only
/// within one frame, and a frame runs on one rank, so the order doesn't depend on which rank that is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) frame: Arc<[u32]>,
    pub(crate) seq: u64,
}

impl Key {
    /// The next key in this thread's frame. Its number is unique in the process.
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Key {
            frame: frame::current(),
            seq: NEXT.fetch_add(1, Ordering::Relaxed),
        }
    }
}

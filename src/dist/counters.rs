//! What is alive on a rank.

use serde::{Deserialize, Serialize};

/// What is alive on a rank, and what it has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Values that live on the rank.
    pub values: usize,
    /// Values, anywhere, that the rank holds references to.
    pub handles: usize,
    /// Requests of the rank that haven't been answered.
    pub requests: usize,
    /// Requests to the rank that it hasn't answered.
    pub tasks: usize,
    /// Contexts that the rank knows.
    pub contexts: usize,
    /// Backwards under way on the rank.
    pub backwards: usize,
    /// Optimizers that have parameters on the rank.
    pub optimizers: usize,
    /// Updates of parameters of the rank that wrote over the old values.
    pub updates_in_place: u64,
    /// Updates that wrote new storage, because somebody still held the old.
    pub updates_out_of_place: u64,
    /// Messages that the rank has sent to others.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
}

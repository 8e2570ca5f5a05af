//! What happens, and when.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;

use super::jobs::JobId;
use super::loggp::LogGp;
use super::node::Value;
use crate::protocol::RefId;
use crate::tensor::Data;

/// A message on its way.
#[derive(Debug)]
pub(super) struct Frame {
    pub from: u32,
    pub to: u32,
    pub header: Vec<u8>,
    pub segments: Vec<Data>,
    pub refs: Vec<RefId>,
    /// Messages in a row that led to it, itself included.
    pub round: u64,
    /// It comes once more.
    pub again: bool,
}

pub(super) enum Event {
    Deliver(Frame),
    /// A job may go on.
    Resume(JobId),
    /// Values are dropped.
    Callback {
        rank: u32,
        values: Vec<Value>,
    },
    /// A rank looks whether handles were dropped.
    Poll {
        rank: u32,
    },
    Stop {
        rank: u32,
    },
}

pub(super) struct Entry {
    pub at: Duration,
    pub number: u64,
    pub event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// How long things take.
pub(super) enum Timing {
    /// Any time, from this source.
    Random { rng: Box<ChaCha8Rng>, jitter: u64, slow: Vec<u32> },
    /// As a model says; `free` is when each rank's processor is.
    Model { model: LogGp, free: Vec<Duration> },
}

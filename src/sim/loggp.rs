//! How long messages take, in the LogGP model: A. Alexandrov, M. F. Ionescu, K. E. Schauser and C. Scheiman, "LogGP: incorporating long messages into the
//! LogP model", SPAA 1995. A message of `k` bytes keeps its sender busy for `o`, is under way for `L + (k - 1) G`, and keeps its receiver busy for `o`; a rank
//! sends a message at most every `g`.

use std::time::Duration;

/// The parameters, in microseconds; `big_g` in microseconds per byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogGp {
    /// Latency.
    pub l: f64,
    /// Overhead of a send, and of a receive.
    pub o: f64,
    /// Gap between messages.
    pub g: f64,
    /// Gap per byte.
    pub big_g: f64,
}

impl LogGp {
    fn time(micros: f64) -> Duration {
        Duration::from_nanos((micros.max(0.0) * 1000.0).round() as u64)
    }

    /// A rank that is busy until `free` sends so many bytes; when they arrive.
    pub(super) fn send(&self, free: &mut Duration, now: Duration, bytes: usize) -> Duration {
        let begin = now.max(*free);
        *free = begin + Self::time(self.o.max(self.g));
        begin + Self::time(self.o + self.l + bytes.saturating_sub(1) as f64 * self.big_g)
    }

    /// A rank that is busy until `free` takes a message.
    pub(super) fn receive(&self, free: &mut Duration, now: Duration) {
        *free = now.max(*free) + Self::time(self.o);
    }
}

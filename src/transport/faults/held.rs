//! Frames that are held back for a while. Order per receiver is kept: what follows a late frame waits behind it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::lock;
use crate::Result;
use crate::transport::{Frame, Transport};

/// Frames on their way to the transport.
#[derive(Debug)]
pub(super) struct Held {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    inner: Arc<dyn Transport>,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug)]
struct Waiting {
    /// For each receiver, with the time at which they are due; never falling.
    queues: Vec<VecDeque<(Instant, Frame)>>,
    closing: bool,
}

impl Held {
    /// With a thread of its own if anything can be `late`.
    pub(super) fn new(inner: &Arc<dyn Transport>, late: bool) -> Held {
        let shared = Arc::new(Shared {
            inner: Arc::clone(inner),
            waiting: Mutex::new(Waiting {
                queues: vec![VecDeque::new(); inner.size() as usize],
                closing: false,
            }),
            changed: Condvar::new(),
        });
        let thread = late.then(|| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.let_go())
        });
        Held {
            shared,
            thread: Mutex::new(thread),
        }
    }

    pub(super) fn send(&self, to: u32, frame: &mut Frame, after: Duration) -> Result<()> {
        let mut waiting = lock(&self.shared.waiting);
        let Some(queue) = waiting.queues.get_mut(to as usize) else {
            return self.shared.inner.send(to, frame); // which says what is wrong
        };
        if after.is_zero() && queue.is_empty() {
            return self.shared.inner.send(to, frame);
        }
        let due = queue.back().map_or(Instant::now(), |last| last.0).max(Instant::now() + after);
        queue.push_back((due, std::mem::take(frame)));
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Sends all that is held back, and ends the thread.
    pub(super) fn close(&self) {
        lock(&self.shared.waiting).closing = true;
        self.shared.changed.notify_all();
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            log::error!("rank {}: the thread that lets late frames go panicked", self.shared.inner.rank());
        }
    }
}

impl Shared {
    fn let_go(&self) {
        let mut waiting = lock(&self.waiting);
        loop {
            let now = Instant::now();
            let Waiting { queues, closing } = &mut *waiting;
            for (to, queue) in queues.iter_mut().enumerate() {
                while queue.front().is_some_and(|first| *closing || first.0 <= now) {
                    let Some((_, mut frame)) = queue.pop_front() else { break };
                    if let Err(e) = self.inner.send(to as u32, &mut frame) {
                        log::error!("rank {}: a late frame can't be sent: {e}", self.inner.rank());
                        self.inner.abort(1);
                    }
                }
            }
            if *closing {
                return;
            }
            let next = queues.iter().filter_map(|queue| queue.front()).map(|first| first.0).min();
            let time = next.map_or(Duration::from_secs(3600), |due| due.saturating_duration_since(now));
            waiting = self.changed.wait_timeout(waiting, time).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

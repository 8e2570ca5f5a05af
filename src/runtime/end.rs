//! Serving, and the end.

use super::*;

/// How long a call of a main thread's function waits for a main thread that serves without a state.
const GRACE: Duration = Duration::from_secs(1);

impl Runtime {
    /// Rank 0's part in `lead` is over: tells all.
    pub(crate) fn tell_led(self: &Arc<Self>, error: Option<String>) -> Result<()> {
        self.event(|core| core.rank.led(error))
    }

    /// Serves until rank 0's part in `lead` is over; what it came to.
    pub(crate) fn wait_led(self: &Arc<Self>, main: Option<&mut dyn Any>) -> Result<Option<String>> {
        self.serve_main(&|| !self.led.is_empty(), main, "rank 0's closure in `lead`")?;
        Ok(self.led.pop().flatten())
    }

    /// Serves until all ranks have come to the end and nothing is on the way.
    pub(crate) fn drain(self: &Arc<Self>, main: Option<&mut dyn Any>) -> Result<()> {
        self.end_epoch(main, false)
    }

    /// Serves until all ranks are finishing: others may end an epoch with `serve` and go on.
    pub(crate) fn finish(self: &Arc<Self>) -> Result<()> {
        self.at_last.store(false, Ordering::SeqCst);
        while !self.at_last.load(Ordering::SeqCst) {
            self.end_epoch(None, true)?;
        }
        Ok(())
    }

    fn end_epoch(self: &Arc<Self>, main: Option<&mut dyn Any>, finishing: bool) -> Result<()> {
        let before = self.ended.load(Ordering::SeqCst);
        self.event(|core| core.rank.enter_end(finishing))?;
        self.serve_main(&|| self.ended.load(Ordering::SeqCst) > before, main, "the end")
    }

    /// Serves on the main thread; runs `on_main` functions if it has their state.
    pub(super) fn serve_main(self: &Arc<Self>, done: &dyn Fn() -> bool, mut main: Option<&mut dyn Any>, what: &str) -> Result<()> {
        let ending = self.ending();
        let started = Instant::now();
        let mut logged = started;
        // A call may come while this rank is on its way from a `lead` without a state to a `serve_with`: it waits a moment.
        let has_state = main.is_some();
        let due = |waiting: &(Instant, Todo)| has_state || ending || waiting.0.elapsed() > GRACE;
        loop {
            let woken = || done() || self.main.is_due(due) || self.is_lost();
            let until = (logged + Duration::from_secs(5)).min(if self.main.is_empty() {
                logged + GRACE * 100
            } else {
                Instant::now() + GRACE
            });
            if self.wait_until(&woken, Permission::Everything, Some(until))? {
                if !done() {
                    self.end_wait_if_lost(|| self.missing(what), started);
                }
                match self.main.pop_if(due).map(|t| t.1) {
                    Some(todo) => self.run(todo, main.as_deref_mut())?,
                    None if done() => return Ok(()),
                    None => {}
                }
                continue;
            }
            if logged.elapsed() < Duration::from_secs(5) {
                continue;
            }
            logged = Instant::now();
            let level = if ending { log::Level::Warn } else { log::Level::Info };
            log::log!(level, "rank {}: serving until {}", self.rank(), self.missing(what));
        }
    }

    /// What is waited for, and who is missing.
    fn missing(&self, what: &str) -> String {
        let missing = lock(&self.core).rank.missing_at_end();
        match missing.is_empty() {
            true => what.to_owned(),
            false => format!("{what}; ranks below that haven't come: {missing:?}"),
        }
    }

    /// Collective end, after [`drain`](Self::drain): ends our threads and the transport.
    pub(crate) fn close(self: &Arc<Self>) -> Result<()> {
        self.finished.store(true, Ordering::SeqCst);
        let held = lock(&self.core).rank.still_held();
        for (id, holders, handles, value) in held {
            log::warn!(
                "rank {}: value {} ({}), made for rank {}, is still held at the end: by ranks {holders:?}, {handles} handles here",
                self.rank(),
                id.value,
                self.executor.describe(&value),
                id.value.rank()
            );
        }
        self.pool.close();
        self.stopped.store(true, Ordering::SeqCst);
        self.transport.wake();
        for thread in std::mem::take(&mut *lock(&self.service)) {
            while !thread.is_finished() {
                self.transport.wake();
                std::thread::sleep(Duration::from_micros(50));
            }
            if thread.join().is_err() {
                log::error!("rank {}: a service thread panicked", self.rank());
            }
        }
        // Values that refer to others would keep this runtime alive.
        let window = Window { requests: 0, bytes: 0 };
        let table = std::mem::replace(&mut lock(&self.core).rank, Rank::new(self.rank(), self.size(), window));
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(table))).is_err() {
            log::error!("rank {}: a value's `drop` panicked", self.rank());
        }
        self.transport.close()
    }
}

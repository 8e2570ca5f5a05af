//! Requests of this rank, and waiting for their answers.

use super::*;

impl Runtime {
    /// A handle on a value that is known by its id alone.
    pub(crate) fn attach(self: &Arc<Self>, id: RefId) -> Result<()> {
        self.event(|core| core.rank.attach(id))
    }

    /// Keeps a value on this rank.
    pub(crate) fn keep(self: &Arc<Self>, value: Value) -> Result<RefId> {
        self.event(|core| core.rank.keep(value))
    }

    /// A value of this rank, once it is made.
    pub(crate) fn value(self: &Arc<Self>, operation: &str, value: ValueId) -> Result<Value> {
        self.check_alive(operation)?;
        let found = std::cell::RefCell::new(None);
        let look = || match lock(&self.core).rank.lookup(operation, value) {
            Ok(None) => false,
            other => {
                *found.borrow_mut() = Some(other);
                true
            }
        };
        self.wait_until(&look, Permission::Nothing, None)?;
        match found.into_inner() {
            Some(Ok(Some(value))) => Ok(value),
            Some(Err(e)) => Err(e),
            _ => Err(ErrorKind::ShutDown {
                operation: operation.into(),
            }
            .into()),
        }
    }

    /// A handle was dropped. May be called anywhere, whatever is locked.
    pub(crate) fn dropped(&self, id: RefId) {
        if !self.is_finished() {
            lock(&self.dropped).push(id);
            self.any_dropped.store(true, Ordering::SeqCst);
        }
    }

    /// Sends a request. With `window`, blocks until the window to the receiver has room (or refuses, if it mustn't).
    pub(crate) fn request(self: &Arc<Self>, request: Request) -> Result<Requested> {
        self.check_alive(request.operation)?;
        self.check_rank(request.operation, request.to)?;
        let Request {
            to,
            op,
            encoded,
            window,
            operation,
            waits,
            limit,
            creates,
        } = request;
        let size = encoded.payload.size();
        let counted = (window != Windowed::Bypass).then_some(size);
        let slot = Slot::new();
        let mut after = After::default();
        let mut core = match window {
            _ if to == self.rank() => {
                let mut core = lock(&self.core);
                core.rank.set_now(self.ticks.elapsed()); // when it arrives
                core
            }
            Windowed::Bypass => lock(&self.core),
            _ => self.lock_with_room(to, size, window, operation, limit)?,
        };
        let (id, created) = self.step_in(&mut core, &mut after, |core| {
            // In the step that sends: creations must leave in the order of their ids.
            let created = creates.then(|| core.rank.allocate(to));
            let mut op = op;
            if let (Some(id), Op::Call { create, .. }) = (created, &mut op) {
                *create = Some(id.value);
            }
            let id = core.rank.request(to, op, encoded.refs, encoded.payload, counted);
            core.waiting.insert(id, Arc::clone(&slot));
            (id, created)
        })?;
        drop(core);
        drop(encoded.handles);
        let own = TaskId {
            from: self.rank(),
            request: id,
        };
        self.settle(&mut after);
        for todo in after.todos.drain(..) {
            match todo {
                // The caller would only wait for it: it may as well do it.
                Todo::Task { task, .. } if waits && task == own => self.run(todo, None)?,
                // On the main thread nobody else could: it isn't in `serve_with`, and says so.
                Todo::OnMain { task, .. } if waits && task == own && std::thread::current().id() == self.main_thread => {
                    self.run(todo, None)?
                }
                todo => self.hand_over(todo),
            }
        }
        Ok(Requested { id, slot, created })
    }

    /// The lock on the core once there is room in the window to a rank; or an error, if it mustn't wait for that.
    fn lock_with_room(
        self: &Arc<Self>,
        to: u32,
        size: usize,
        window: Windowed,
        operation: &str,
        limit: Option<Limit>,
    ) -> Result<MutexGuard<'_, Core>> {
        loop {
            let core = lock(&self.core);
            if core.rank.window_is_open(to, size) {
                return Ok(core);
            }
            if window == Windowed::Refuse {
                let (requests, bytes) = core.rank.outstanding(to);
                return Err(ErrorKind::WindowFull {
                    operation: operation.into(),
                    rank: to,
                    requests,
                    bytes,
                }
                .into());
            }
            drop(core);
            let open = || lock(&self.core).rank.window_is_open(to, size);
            self.wait_for_room(to, &open, operation, limit)?;
        }
    }

    /// Waits for room in the window to a rank: as [`wait`](Self::wait), for the oldest of the requests that fill it.
    fn wait_for_room(self: &Arc<Self>, to: u32, open: &dyn Fn() -> bool, operation: &str, limit: Option<Limit>) -> Result<()> {
        let start = Instant::now();
        let (mut oldest, mut heard, mut asked, mut still) = (None, start, start, Still::default());
        let end = |heard: Instant| match limit {
            Some(limit) => limit.end(),
            None => self.pace.timeout.map(|t| heard + t),
        };
        loop {
            let ask = asked.max(heard) + self.pace.ask_after;
            let woken = || open() || self.is_lost();
            let until = end(heard).map_or(ask, |e| still.put_off(e).min(ask));
            if self.wait_until(&woken, Permission::Nothing, Some(until))? {
                // If another thread has taken the room meanwhile, the caller comes back.
                self.end_wait_if_lost(|| format!("room for `{operation}` in the window to rank {to}"), start);
                return Ok(());
            }
            let now = Instant::now();
            still.note(until, now);
            let found = {
                let core = lock(&self.core);
                let found = core.rank.fills_window(to);
                let word = found.and_then(|id| core.waiting.get(&id)?.heard());
                // One that filled it before was answered.
                heard = if found == oldest { heard.max(word.unwrap_or(start)) } else { now };
                found
            };
            oldest = found;
            if end(heard).is_some_and(|e| now >= still.put_off(e)) {
                let (requests, bytes) = lock(&self.core).rank.outstanding(to);
                let seconds = limit.map_or(now - start, |l| l.time).as_secs_f64();
                return Err(ErrorKind::Timeout {
                    operation: operation.into(),
                    rank: to,
                    seconds,
                    status: format!("the window to it stayed full: {requests} requests, {bytes} bytes"),
                }
                .into());
            }
            if now >= ask {
                log::warn!("rank {}: `{operation}` waits for room in the window to rank {to}", self.rank());
                asked = now;
                if let Some(request) = found {
                    self.event(|core| core.rank.query(request))?;
                }
            }
        }
    }

    /// Waits for the answer to a request. Without a limit, the time since the receiver last said that it has the request counts.
    pub(crate) fn wait(self: &Arc<Self>, slot: &Slot, what: &Waiting) -> Result<Reply> {
        self.wait_unless(slot, what, &|| false)?;
        slot.take().ok_or_else(|| no_answer(what.operation))
    }

    /// As [`wait`](Self::wait); a large tensor in the answer may be received straight into the caller's memory, and then an empty one is in its place. Whether it was.
    pub(crate) fn wait_into(self: &Arc<Self>, slot: &Slot, what: &Waiting, room: Room<'_>) -> (Result<Reply>, bool) {
        let request = what.request;
        let landing = Landing {
            from: what.to,
            dtype: room.dtype,
            shape: room.shape,
            memory: room.memory,
            is_it: Box::new(move |header| wire::answers(header, request)),
        };
        let mut reply = None;
        let landed = self.transport.receive_into(landing, &mut || reply = Some(self.wait(slot, what)));
        (reply.unwrap_or_else(|| Err(no_answer(what.operation))), landed)
    }

    /// As [`wait`](Self::wait), but leaves the answer where it is, and returns without it when `stop` says so.
    pub(crate) fn wait_unless(self: &Arc<Self>, slot: &Slot, what: &Waiting, stop: &dyn Fn() -> bool) -> Result<()> {
        let start = Instant::now();
        let (mut now, mut asked, mut still) = (start, None::<Instant>, Still::default());
        // Nothing is heard before it is asked for.
        let heard = |asked: Option<Instant>| asked.and_then(|_| slot.heard()).unwrap_or(start);
        let end = |asked| match what.limit {
            Some(limit) => limit.end(),
            None => self.pace.timeout.map(|t| heard(asked) + t),
        };
        loop {
            let ask = asked.unwrap_or(start).max(heard(asked)) + self.pace.ask_after;
            let until = end(asked).map_or(ask, |e| still.put_off(e).min(ask));
            let done = || slot.is_done() || stop() || self.is_lost();
            if self.wait_from(now, &done, &|| slot.wait_here(), Permission::Nothing, Some(until))? {
                if !slot.is_done() {
                    self.end_wait_if_lost(|| format!("`{}` on rank {}", what.operation, what.to), start);
                }
                return Ok(());
            }
            now = Instant::now();
            still.note(until, now);
            let status = slot.status();
            let to = lock(&self.core)
                .rank
                .release_waits_for(what.request)
                .first()
                .copied()
                .unwrap_or(what.to);
            // Looked at again: an answer may have come meanwhile.
            if end(asked).is_some_and(|e| now >= still.put_off(e)) {
                let status = status.map_or("it said nothing".into(), |(s, at)| {
                    format!("{s}, {:.1} s ago", at.elapsed().as_secs_f64())
                });
                let seconds = what.limit.map(|l| l.time).or(self.pace.timeout).unwrap_or_default().as_secs_f64();
                return Err(ErrorKind::Timeout {
                    operation: what.operation.into(),
                    rank: to,
                    seconds,
                    status,
                }
                .into());
            }
            if now < ask {
                continue;
            }
            if let (Some((status, _)), Some(_)) = (status, asked) {
                log::warn!(
                    "rank {}: `{}` on rank {to}: {status}; waited {:.1} s",
                    self.rank(),
                    what.operation,
                    start.elapsed().as_secs_f64()
                );
            } else {
                log::warn!(
                    "rank {}: still waiting for `{}` on rank {to}, {:.1} s",
                    self.rank(),
                    what.operation,
                    start.elapsed().as_secs_f64()
                );
            }
            asked = Some(now);
            self.event(|core| core.rank.query(what.request))?;
        }
    }
}

/// The wait is over, and the answer is not there: another thread took it.
#[cold]
pub(crate) fn no_answer(operation: &str) -> Error {
    ErrorKind::ShutDown {
        operation: operation.into(),
    }
    .into()
}

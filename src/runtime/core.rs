//! The lock on the state machine: events go in, messages and work come out.

use super::*;

impl Runtime {
    /// Lets `event` happen to the state machine, and sends what comes of it in order. The rest is for the caller.
    pub(super) fn step<R>(self: &Arc<Self>, event: impl FnOnce(&mut Core) -> R) -> Result<(R, After)> {
        let mut after = After::default();
        let mut core = lock(&self.core);
        self.tell_dropped(&mut core);
        core.rank.set_now(self.started.elapsed());
        let result = event(&mut core);
        for action in core.rank.take_actions() {
            self.carry_out(&mut core, action, &mut after)?;
        }
        // Only now: callbacks that came of the event have been counted.
        if core.rank.is_ending() {
            // An answer that nobody took may have held references.
            self.tell_dropped(&mut core);
            for action in core.rank.take_actions() {
                self.carry_out(&mut core, action, &mut after)?;
            }
            core.rank.advance_end(self.callbacks.load(Ordering::SeqCst) > 0);
            for action in core.rank.take_actions() {
                self.carry_out(&mut core, action, &mut after)?;
            }
        }
        Ok((result, after))
    }

    /// Tells the state machine which handles were dropped.
    fn tell_dropped(&self, core: &mut Core) {
        if self.any_dropped.load(Ordering::Relaxed) && self.any_dropped.swap(false, Ordering::SeqCst) {
            for id in std::mem::take(&mut *lock(&self.dropped)) {
                core.rank.drop_handle(id);
            }
        }
    }

    pub(super) fn carry_out(self: &Arc<Self>, core: &mut Core, action: Action<Value, Payload>, after: &mut After) -> Result<()> {
        match action {
            Action::Send { to, message, mut payload } => {
                let header = wire::header(&message, &mut payload)?;
                self.transport.send(
                    to,
                    crate::transport::Frame {
                        header,
                        segments: payload.segments,
                    },
                )?;
            }
            Action::Run { task, work } => {
                let (on_main, heavy, handles) = match &work {
                    Work::Call {
                        function,
                        queued,
                        payload,
                        refs,
                        ..
                    } => (
                        self.executor.is_on_main(*function),
                        *queued && self.executor.is_heavy(payload),
                        self.custody(refs),
                    ),
                    Work::Encode { .. } => (false, false, Vec::new()),
                };
                let job = Job {
                    from: task.from,
                    work,
                    handles,
                };
                after.todos.push(if on_main {
                    Todo::OnMain { task, job }
                } else {
                    Todo::Task { task, job, heavy }
                });
            }
            Action::Engine {
                context,
                retain_graph,
                inputs,
            } => after.todos.push(Todo::Engine {
                context,
                retain_graph,
                inputs,
            }),
            Action::Answered {
                request,
                answer,
                outcome,
                refs,
                ..
            } => {
                let handles = self.custody(&refs);
                let crossing = answer.crossing;
                let reply: Reply = outcome.map(|payload| Delivered {
                    payload,
                    handles,
                    crossing,
                });
                match core.waiting.remove(&request) {
                    Some(slot) => {
                        after.awaited = true;
                        if let Some((callback, reply)) = slot.complete(reply) {
                            self.callbacks.fetch_add(1, Ordering::SeqCst);
                            after.calls.push(Box::new(move || callback(reply)));
                        }
                    }
                    None => after.replies.push(reply),
                }
            }
            Action::BackwardDone { context, result } => {
                if let Some(slot) = core.backwards.remove(&context) {
                    after.awaited = true;
                    slot.complete(result.map(|()| Delivered::default()));
                }
            }
            Action::Forget { context } => after.forget.push(context),
            // A user's `drop` may take its time, make calls, or panic: not on the thread that polls.
            Action::Garbage { values } if !values.iter().all(|v| self.executor.drops_at_once(v)) => {
                self.callbacks.fetch_add(1, Ordering::SeqCst);
                after.calls.push(Box::new(move || drop(values)));
            }
            Action::Garbage { values } => after.values.push(values),
            Action::Report { request, status } => {
                if let Some(slot) = core.waiting.get(&request) {
                    slot.report(status);
                }
            }
            Action::Led { error } => lock(&self.led).push_back(error),
            Action::Ended { last } => {
                self.at_last.store(last, Ordering::SeqCst);
                self.ended.fetch_add(1, Ordering::SeqCst);
                after.awaited = true;
            }
        }
        Ok(())
    }

    pub(super) fn custody(self: &Arc<Self>, refs: &[RefId]) -> Vec<(RefId, Handle)> {
        refs.iter().map(|&id| (id, self.executor.handle(self, id))).collect()
    }

    /// Does what needs no lock; returns the work.
    pub(super) fn settle(self: &Arc<Self>, after: After) -> Vec<Todo> {
        if after.awaited {
            self.wake_leader();
        }
        drop(after.replies);
        drop(after.values);
        for context in after.forget {
            self.executor.forget(context);
        }
        for call in after.calls {
            self.run_callback(call);
        }
        after.todos
    }

    /// Runs a callback on the pool; the end waits for it.
    pub(crate) fn callback(self: &Arc<Self>, call: impl FnOnce() + Send + 'static) {
        self.callbacks.fetch_add(1, Ordering::SeqCst);
        self.run_callback(call);
    }

    /// Runs a callback that has been counted.
    fn run_callback(self: &Arc<Self>, call: impl FnOnce() + Send + 'static) {
        let runtime = Arc::clone(self);
        self.pool.push(move || {
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err() {
                log::error!("rank {}: a future's callback, or a value's `drop`, panicked", runtime.rank());
            }
            runtime.callbacks.fetch_sub(1, Ordering::SeqCst);
            runtime.wake_leader();
        });
    }

    /// As [`step`](Self::step); work goes to the pool.
    pub(super) fn event<R>(self: &Arc<Self>, event: impl FnOnce(&mut Core) -> R) -> Result<R> {
        let (result, after) = self.step(event)?;
        for todo in self.settle(after) {
            self.hand_over(todo);
        }
        Ok(result)
    }

    pub(super) fn hand_over(self: &Arc<Self>, todo: Todo) {
        match todo {
            Todo::OnMain { .. } => self.push_main(todo),
            todo => self.push_to_pool(todo),
        }
    }

    /// Receives what has arrived. Only the holder of the polling role calls it.
    pub(super) fn poll(self: &Arc<Self>) -> Result<(bool, Vec<Todo>)> {
        let mut inbox = Vec::new();
        let moved = self.transport.poll(&mut inbox)?;
        let mut todos = Vec::new();
        for (from, delivery) in inbox {
            let (header, segments, refused) = match delivery {
                Delivery::Frame(frame) => (frame.header, frame.segments, None),
                Delivery::Refused { header, bytes, limit } => (header, Vec::new(), Some((bytes, limit))),
            };
            let (message, slots, bytes) = match wire::parse_header(&header) {
                Ok(parsed) => parsed,
                Err(e) => {
                    log::error!("rank {}: a message from rank {from} was dropped: {e}", self.rank());
                    continue;
                }
            };
            let message = match refused {
                None => message,
                Some((size, limit)) => match self.refused(from, message, size, limit) {
                    Refusal::Reply(reply) => reply,
                    Refusal::Request { id, op, refs, error } => {
                        let (_, after) = self.step(|core| core.rank.refuse_request(from, id, op, refs, error))?;
                        todos.extend(self.settle(after));
                        continue;
                    }
                },
            };
            let payload = Payload { bytes, segments, slots };
            let (_, after) = self.step(|core| core.rank.receive(from, message, payload))?;
            todos.extend(self.settle(after));
        }
        if self.any_dropped.load(Ordering::Relaxed) || self.ending() {
            let (_, after) = self.step(|_| ())?;
            todos.extend(self.settle(after));
        }
        Ok((moved, todos))
    }

    pub(super) fn ending(&self) -> bool {
        lock(&self.core).rank.is_ending()
    }

    /// A message whose tensors were over the limit: a reply becomes an error, a request is answered with one.
    pub(super) fn refused(&self, from: u32, message: Message, bytes: u64, limit: u64) -> Refusal {
        let error = |operation: &str| {
            Error::from(ErrorKind::TooLarge {
                operation: operation.into(),
                from,
                bytes,
                limit,
            })
        };
        match message {
            Message::Reply { id, answer, refs, .. } => Refusal::Reply(Message::Reply {
                id,
                answer,
                outcome: Err(error("reply")),
                refs,
            }),
            Message::Request { id, op, refs } => Refusal::Request {
                id,
                op,
                refs,
                error: error("request"),
            },
            other => Refusal::Reply(other),
        }
    }
}

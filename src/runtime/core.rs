//! The lock on the state machine: events go in, messages and work come out.

use super::*;

/// What actions are carried out with.
struct Hands<'a> {
    frame: &'a mut Frame,
    waiting: &'a mut FxHashMap<RequestId, Arc<Slot>>,
    backwards: &'a mut FxHashMap<ContextId, Arc<Slot>>,
}

/// A header's memory that grew larger isn't kept.
const LARGEST_KEPT: usize = 1 << 16;

impl Runtime {
    /// Lets `event` happen to the state machine, and sends what comes of it in order. The rest is for the caller.
    pub(super) fn step<R>(self: &Arc<Self>, after: &mut After, event: impl FnOnce(&mut Core) -> R) -> Result<R> {
        let mut core = lock(&self.core);
        core.rank.set_now(self.ticks.elapsed());
        self.step_in(&mut core, after, event)
    }

    /// As [`step`](Self::step), with the lock, and for an event that asks for no time.
    pub(super) fn step_in<R>(self: &Arc<Self>, core: &mut Core, after: &mut After, event: impl FnOnce(&mut Core) -> R) -> Result<R> {
        self.tell_dropped(core);
        let result = event(core);
        self.carry_out_all(core, after)?;
        // Only now: callbacks that came of the event have been counted.
        let ending = core.rank.is_ending();
        if ending != self.ending.load(Ordering::Relaxed) {
            self.ending.store(ending, Ordering::SeqCst);
        }
        if ending {
            // An answer that nobody took may have held references.
            self.tell_dropped(core);
            self.carry_out_all(core, after)?;
            core.rank.advance_end(self.callbacks.load(Ordering::SeqCst) > 0);
            self.carry_out_all(core, after)?;
            self.ending.store(core.rank.is_ending(), Ordering::SeqCst);
        }
        Ok(result)
    }

    fn carry_out_all(self: &Arc<Self>, core: &mut Core, after: &mut After) -> Result<()> {
        let Core {
            rank,
            actions,
            frame,
            waiting,
            backwards,
        } = core;
        rank.swap_actions(actions);
        let mut hands = Hands { frame, waiting, backwards };
        let done = actions.iter_mut().try_for_each(|action| self.carry_out(&mut hands, action, after));
        actions.clear();
        done
    }

    /// Tells the state machine which handles were dropped.
    #[inline]
    fn tell_dropped(&self, core: &mut Core) {
        if self.any_dropped.load(Ordering::Relaxed) && self.any_dropped.swap(false, Ordering::SeqCst) {
            for id in std::mem::take(&mut *lock(&self.dropped)) {
                core.rank.drop_handle(id);
            }
        }
    }

    #[inline]
    fn carry_out(self: &Arc<Self>, core: &mut Hands<'_>, action: &mut Action<Value, Payload>, after: &mut After) -> Result<()> {
        match action {
            // Taken apart where it is, as it is large.
            Action::Send { to, message, payload } => {
                let frame = &mut *core.frame;
                wire::header(message, payload, &mut frame.header)?;
                frame.segments = std::mem::take(&mut payload.segments);
                self.transport.send(*to, frame)?;
                frame.header.shrink_to(LARGEST_KEPT);
                Ok(())
            }
            action => {
                let action = std::mem::replace(action, Action::Led { error: None });
                self.carry_out_here(core, action, after);
                Ok(())
            }
        }
    }

    /// Carries out what isn't a message.
    #[inline]
    fn carry_out_here(self: &Arc<Self>, core: &mut Hands<'_>, action: Action<Value, Payload>, after: &mut After) {
        match action {
            Action::Send { .. } => {}
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
                            after.chores.push(Chore::Call(Box::new(move || callback(reply))));
                        }
                    }
                    None => after.chores.push(Chore::Reply(Box::new(reply))),
                }
            }
            Action::BackwardDone { context, result } => {
                if let Some(slot) = core.backwards.remove(&context) {
                    after.awaited = true;
                    slot.complete(result.map(|()| Delivered::default()));
                }
            }
            Action::Forget { context } => after.chores.push(Chore::Forget(context)),
            // A user's `drop` may take its time, make calls, or panic: not on the thread that polls.
            Action::Garbage { values } if !values.iter().all(|v| self.executor.drops_at_once(v)) => {
                self.callbacks.fetch_add(1, Ordering::SeqCst);
                after.chores.push(Chore::Call(Box::new(move || drop(values))));
            }
            Action::Garbage { values } => after.chores.push(Chore::Values(values)),
            Action::Report { request, status } => {
                if let Some(slot) = core.waiting.get(&request) {
                    slot.report(status);
                }
            }
            Action::Led { error } => self.led.push(error),
            Action::Ended { last } => {
                self.at_last.store(last, Ordering::SeqCst);
                self.ended.fetch_add(1, Ordering::SeqCst);
                after.awaited = true;
            }
        }
    }

    #[inline]
    pub(super) fn custody(self: &Arc<Self>, refs: &[RefId]) -> Vec<(RefId, Handle)> {
        match refs {
            [] => Vec::new(),
            refs => refs.iter().map(|&id| (id, self.executor.handle(self, id))).collect(),
        }
    }

    /// Does what needs no lock; leaves the work.
    #[inline]
    pub(super) fn settle(self: &Arc<Self>, after: &mut After) {
        if std::mem::take(&mut after.awaited) {
            self.wake_leader();
        }
        if after.chores.is_empty() {
            return;
        }
        for chore in after.chores.drain(..) {
            match chore {
                Chore::Call(call) => self.run_callback(call),
                Chore::Forget(context) => self.executor.forget(context),
                Chore::Reply(reply) => drop(reply),
                Chore::Values(values) => drop(values),
            }
        }
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
        let mut after = After::default();
        let result = self.step(&mut after, event)?;
        self.settle(&mut after);
        for todo in after.todos {
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

    /// Receives what has arrived, and leaves the work that comes of it. Only the holder of the polling role calls it.
    pub(super) fn poll(self: &Arc<Self>, inbox: &mut Vec<(u32, Delivery)>, after: &mut After) -> Result<bool> {
        let moved = self.transport.poll(inbox)?;
        if !inbox.is_empty() {
            inbox.reverse();
            while let Some((from, delivery)) = inbox.pop() {
                self.receive(from, delivery, after).inspect_err(|_| inbox.clear())?;
            }
        }
        if self.any_dropped.load(Ordering::Relaxed) || self.ending() {
            self.step(after, |_| ())?;
            self.settle(after);
        }
        Ok(moved)
    }

    #[inline]
    fn receive(self: &Arc<Self>, from: u32, delivery: Delivery, after: &mut After) -> Result<()> {
        let (header, segments, refused) = match delivery {
            Delivery::Frame(frame) => (frame.header, frame.segments, None),
            Delivery::Refused { header, bytes, limit } => (header, Vec::new(), Some((bytes, limit))),
        };
        let (message, payload) = match wire::parse_header(header, segments) {
            Ok(parsed) => parsed,
            Err(e) => {
                log::error!("rank {}: a message from rank {from} was dropped: {e}", self.rank());
                return Ok(());
            }
        };
        let message = match refused {
            None => message,
            Some((size, limit)) => match self.refused(from, message, size, limit) {
                Refusal::Reply(reply) => reply,
                Refusal::Request { id, op, refs, error } => {
                    self.step(after, |core| core.rank.refuse_request(from, id, op, refs, error))?;
                    self.settle(after);
                    return Ok(());
                }
            },
        };
        self.step(after, |core| core.rank.receive(from, message, payload))?;
        self.settle(after);
        Ok(())
    }

    #[inline]
    pub(super) fn ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
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

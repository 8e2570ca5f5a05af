//! Contexts of this rank: opening, releasing, going back.

use super::*;

/// How long a backward whose time is up waits for its ranks to add gradients that are all there.
const COMMIT: Duration = Duration::from_secs(2);

/// A backward whose time is up.
struct Overdue {
    context: ContextId,
    /// The ranks that it waits for, and the one that owes a sign of life, since when.
    ranks: Vec<u32>,
    silent: Option<(u32, Duration)>,
    /// How long it was to take.
    seconds: f64,
    /// It is given up since that one owes it for too long.
    silence: bool,
    /// It was too late to give up before.
    committing: bool,
}

impl Runtime {
    pub(crate) fn open_context(self: &Arc<Self>) -> Result<ContextId> {
        self.event(|core| core.rank.open_context())
    }

    pub(crate) fn context_low(&self) -> u64 {
        lock(&self.core).rank.context_low()
    }

    pub(crate) fn check_context(&self, operation: &str, context: ContextId) -> Result<()> {
        self.check_alive(operation)?;
        lock(&self.core).rank.check_context(operation, context)
    }

    /// Whether the gradients of all these contexts can be used.
    pub(crate) fn check_contexts(&self, operation: &str, contexts: &[ContextId]) -> Result<()> {
        self.check_alive(operation)?;
        let core = lock(&self.core);
        contexts.iter().try_for_each(|&context| {
            core.rank.check_context(operation, context)?;
            core.rank.check_gradients(operation, context)
        })
    }

    pub(crate) fn check_gradients(&self, operation: &str, context: ContextId) -> Result<()> {
        self.check_alive(operation)?;
        lock(&self.core).rank.check_gradients(operation, context)
    }

    /// Releases a context of this rank; the slot is filled when all ranks have.
    pub(crate) fn release_context(self: &Arc<Self>, context: ContextId) -> Result<(RequestId, Arc<Slot>)> {
        let slot = Slot::new();
        let waiting = Arc::clone(&slot);
        let id = self.event(move |core| {
            let id = core.rank.release_context(context);
            core.waiting.insert(id, waiting);
            id
        })?;
        Ok((id, slot))
    }

    /// Runs a backward of one of this rank's contexts. `set_roots` tells the executor its roots; it is called if no other backward is under way.
    pub(crate) fn backward(
        self: &Arc<Self>,
        context: ContextId,
        number: u32,
        manner: Manner,
        limit: Option<Limit>,
        set_roots: impl FnOnce(),
    ) -> Result<()> {
        let slot = Slot::new();
        let waiting = Arc::clone(&slot);
        let mut after = After::default();
        let begun = self.step(&mut after, move |core| {
            core.rank.begin_backward(context, number, manner)?;
            core.backwards.insert(context, waiting);
            Ok::<(), Error>(())
        })?;
        self.settle(&mut after);
        begun?;
        set_roots();
        for todo in after.todos {
            match todo {
                Todo::Engine { context: c, .. } if c == context => self.run(todo, None)?,
                other => self.hand_over(other),
            }
        }
        slot.wait_here();
        let start = Instant::now();
        let (mut asked, mut still) = (start, Still::default());
        let mut committing = None;
        loop {
            let next = asked + self.pace.ask_after;
            let silent = lock(&self.core).rank.backward_silent(context);
            // It was asked when `ask_after` had passed without a word.
            let lost = silent
                .zip(self.pace.timeout)
                .map(|((_, since), t)| self.started + since + t - self.pace.ask_after);
            let end = match committing {
                None => limit.and_then(Limit::end).into_iter().chain(lost).min(),
                end => end,
            };
            let until = end.map_or(next, |e| still.put_off(e).min(next));
            if self.wait_until(&|| slot.is_done() || self.is_lost(), Permission::Engine(context), Some(until))? {
                if !slot.is_done() {
                    let ranks = || lock(&self.core).rank.backward_waits_for(context);
                    self.end_wait_if_lost(|| format!("a backward over ranks {:?}", ranks()), start);
                }
                return slot.take().map_or(Ok(()), |reply| reply.map(drop));
            }
            let now = Instant::now();
            still.note(until, now);
            let (ranks, still_silent) = {
                let core = lock(&self.core);
                (core.rank.backward_waits_for(context), core.rank.backward_silent(context))
            };
            if end.is_some_and(|e| now >= still.put_off(e)) && (committing.is_some() || lost != end || still_silent == silent) {
                let overdue = Overdue {
                    context,
                    ranks,
                    silent: still_silent,
                    seconds: limit.map_or(start.elapsed(), |l| l.time).as_secs_f64(),
                    silence: end.is_some() && lost == end,
                    committing: committing.is_some(),
                };
                self.give_up(&overdue, &slot)?;
                // It is over, or about to be: to give up now would leave gradients behind.
                committing = Some(now + self.pace.timeout.unwrap_or(COMMIT).min(COMMIT));
                continue;
            }
            if now >= next {
                log::warn!(
                    "rank {}: backward of context {context} waits for ranks {ranks:?}, {:.1} s",
                    self.rank(),
                    start.elapsed().as_secs_f64()
                );
                asked = now;
                self.event(|core| core.rank.probe_backward(context))?;
            }
        }
    }

    pub(crate) fn counters(&self) -> Counters {
        lock(&self.core).rank.counters()
    }

    /// Gives up a backward, with an error that says what it waits for; unless all its gradients are there, so that it is about to be over.
    fn give_up(self: &Arc<Self>, overdue: &Overdue, slot: &Slot) -> Result<()> {
        let Overdue {
            context,
            ref ranks,
            silent,
            seconds,
            silence,
            committing,
        } = *overdue;
        let status = match silent {
            Some((_, since)) => format!(
                "it has said nothing for {:.1} s",
                (self.started.elapsed() - since + self.pace.ask_after).as_secs_f64()
            ),
            None => format!("waiting for ranks {ranks:?}"),
        };
        let error = |status| -> Error {
            ErrorKind::Timeout {
                operation: "backward".into(),
                rank: silent.map(|s| s.0).or(ranks.first().copied()).unwrap_or(self.rank()),
                seconds,
                status,
            }
            .into()
        };
        let abandoned = error(status.clone());
        // A rank that has said nothing for so long won't now; one that waits for it will.
        let at_last = committing || silence && silent.is_some_and(|(rank, _)| ranks.contains(&rank));
        let in_time = self.event(|core| {
            let in_time = core.rank.abandon_backward(context, abandoned);
            if in_time || at_last {
                core.backwards.remove(&context);
            }
            in_time
        })?;
        if in_time {
            return Err(error(status));
        }
        if at_last && !slot.is_done() {
            return Err(error(format!(
                "in doubt: it was too late to stop it, and ranks {ranks:?} haven't said that they have added its gradients to the context's"
            )));
        }
        Ok(())
    }
}

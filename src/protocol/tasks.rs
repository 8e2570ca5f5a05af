//! Requests of other ranks (and of this one to itself): how they arrive, wait, run, and are answered.

use std::collections::hash_map::Entry;

use smallvec::SmallVec;

use super::*;

impl<V: Clone, P: Default> Rank<V, P> {
    /// A request has arrived whose tensors the driver refused.
    pub(crate) fn refuse_request(&mut self, from: u32, id: RequestId, op: Op, refs: Vec<RefId>, error: Error) {
        self.received += 1;
        self.arrive(TaskId { from, request: id }, op, refs, P::default(), Some(error));
        self.settle_local();
    }

    pub(super) fn arrive(&mut self, task: TaskId, op: Op, refs: Vec<RefId>, payload: P, refused: Option<Error>) {
        let mut unconfirmed = 0;
        for &id in &refs {
            if self.refs.receive(id, task.from) {
                if mutant::is(Mutant::SkipAcknowledgement) {
                    self.register(id, Registering::Nobody);
                    continue;
                }
                self.register(id, Registering::Task(task));
                unconfirmed += 1;
            }
        }
        let (creates, gate) = match &op {
            Op::Call { create, gate, .. } => (*create, *gate),
            _ => (None, Gate::default()),
        };
        if let Some(value) = creates {
            self.refs.creating(value, task.from);
        }
        let met = op.tag().map_or(Ok(false), |tag| self.contexts.meet(tag.context));
        let incoming = Incoming {
            stage: Stage::Running(self.now),
            creates,
            turn: gate.turn,
            gradients_of: gate.gradients_of,
            new_child: matches!(met, Ok(true)),
            unconfirmed,
        };
        self.incoming.insert(task, incoming);
        if let Some(error) = met.err().or(refused) {
            if let Op::Backward { context, backward, .. } = op {
                self.backward_refused(context, backward, &error);
            }
            return self.refuse(task, error, refs);
        }
        let waits = self.park(task, &op, &refs);
        if waits > 0
            && let Some(incoming) = self.incoming.get_mut(&task)
        {
            incoming.stage = Stage::Parked(waits, Box::new((op, refs, payload)));
            return;
        }
        self.launch(task, op, refs, payload);
    }

    /// Lets a request wait for the values of this rank that it needs; how many are still being made.
    fn park(&mut self, task: TaskId, op: &Op, refs: &[RefId]) -> usize {
        let wanted = match op {
            Op::Fetch { value, .. } => Some(*value),
            _ if refs.is_empty() => return 0,
            _ => None,
        };
        let local = refs.iter().filter(|r| r.owner == self.me).map(|r| r.value);
        let mut values: SmallVec<[ValueId; 8]> = local.chain(wanted).collect();
        values.sort_unstable();
        values.dedup();
        values.into_iter().filter(|&value| self.refs.park(value, task)).count()
    }

    pub(super) fn unpark(&mut self, task: TaskId) {
        let Some(incoming) = self.incoming.get_mut(&task) else { return };
        let Stage::Parked(waits, _) = &mut incoming.stage else { return };
        *waits -= 1;
        if *waits > 0 {
            return;
        }
        let stage = std::mem::replace(&mut incoming.stage, Stage::Running(self.now));
        if let Stage::Parked(_, parts) = stage {
            let (op, refs, payload) = *parts;
            self.launch(task, op, refs, payload);
        }
    }

    /// All that a request needs is here: hands it to the driver, or does it.
    pub(super) fn launch(&mut self, task: TaskId, op: Op, refs: Vec<RefId>, payload: P) {
        // It may have waited for a value, and its context been released meanwhile.
        if let Some(context) = op.tag().map(|t| t.context).filter(|&c| !self.contexts.is_live(c)) {
            let gone = self.contexts.gone("call", context);
            return self.refuse(task, gone, refs);
        }
        match op {
            Op::Call {
                function,
                create,
                context,
                gate,
            } => {
                if let Some(error) = gate
                    .gradients_of
                    .and_then(|c| self.check_gradients("step or gradient access", c).err())
                {
                    return self.refuse(task, error, refs);
                }
                let context = context.map(|mut tag| {
                    if mutant::is(Mutant::MixContexts) {
                        tag.context = self.contexts.another(tag.context);
                    }
                    tag
                });
                let work = Work::Call {
                    function,
                    creates: create.is_some(),
                    queued: gate.turn != Turn::None,
                    context,
                    payload,
                    refs,
                };
                match gate.turn {
                    Turn::None => self.run(task, work),
                    turn => self.take_turn(task, turn, work),
                }
            }
            Op::Fetch { value, context } => match self.lookup("fetch", value) {
                Ok(Some(value)) => self.run(task, Work::Encode { value, context }),
                Ok(None) => unreachable!("a fetch is parked until its value is made"),
                Err(error) => self.answer(task, Answer::default(), Err(error)),
            },
            Op::Backward {
                context,
                backward,
                manner,
                part,
                marks,
            } => self.backward_part(task, context, (backward, manner), part, marks, payload),
            Op::Release { context, low } => self.release(context, low, Some(task), None),
        }
    }

    /// Hands work to the driver. Its stage says so already.
    pub(super) fn run(&mut self, task: TaskId, work: Work<V, P>) {
        self.actions.push(Action::Run { task, work });
    }

    pub(super) fn refuse(&mut self, task: TaskId, error: Error, refs: Vec<RefId>) {
        for id in refs {
            if !mutant::is(Mutant::KeepRefusedRefs) {
                self.refs.drop_handle(id);
            }
        }
        if let Some(value) = self.incoming.get(&task).and_then(|i| i.creates) {
            self.fail_creation(value, &error);
        }
        self.answer(task, Answer::default(), Err(error));
    }

    pub(super) fn answer(&mut self, task: TaskId, answer: Answer, outcome: Result<(), Error>) {
        self.answer_with(task, answer, outcome, Vec::new(), P::default());
    }

    pub(super) fn answer_with(&mut self, task: TaskId, answer: Answer, outcome: Result<(), Error>, refs: Vec<RefId>, payload: P) {
        let Entry::Occupied(mut entry) = self.incoming.entry(task) else {
            return;
        };
        let incoming = entry.get_mut();
        if incoming.unconfirmed > 0 {
            // References in the reply are alive: the driver holds a handle on each until the reply has gone.
            for &id in &refs {
                self.refs.retain(id);
            }
            incoming.stage = Stage::Held(Box::new(HeldReply {
                answer,
                outcome,
                refs,
                payload,
            }));
            return;
        }
        let new_child = incoming.new_child;
        entry.remove();
        let pins = self.pin(&refs, task.from);
        if !pins.is_empty() {
            self.reply_pins.insert(task, pins);
        }
        let answer = Answer { new_child, ..answer };
        self.send(
            task.from,
            Message::Reply {
                id: task.request,
                answer,
                outcome,
                refs,
            },
            payload,
        );
    }

    pub(super) fn status(&self, task: TaskId) -> Status {
        match self.incoming.get(&task).map(|i| &i.stage) {
            None => Status::Unknown,
            Some(Stage::Parked(..)) => Status::Parked,
            Some(Stage::Queued(_)) => self.turns.status(task, self.now),
            Some(Stage::Running(since)) => Status::Running(self.now.saturating_sub(*since).as_secs_f64()),
            Some(Stage::Held(_)) => Status::Confirming,
        }
    }
}

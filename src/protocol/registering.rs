//! Registering references that came from third ranks, and letting go.

use super::*;

impl<V: Clone, P: Default> Rank<V, P> {
    pub(super) fn register(&mut self, id: RefId, waiting: Registering) {
        self.registering.entry(id).or_default().push_back(waiting);
        self.send(id.owner, Message::Register { value: id.value }, P::default());
    }

    pub(super) fn registered(&mut self, waiting: Registering) {
        match waiting {
            Registering::Task(task) => {
                let Some(incoming) = self.incoming.get_mut(&task) else { return };
                incoming.unconfirmed -= 1;
                if incoming.unconfirmed == 0
                    && matches!(incoming.stage, Stage::Held(_))
                    && let Stage::Held(held) = std::mem::replace(&mut incoming.stage, Stage::Running(self.now))
                {
                    let HeldReply {
                        answer,
                        outcome,
                        refs,
                        payload,
                    } = *held;
                    let kept = refs.clone();
                    self.answer_with(task, answer, outcome, refs, payload);
                    for id in kept {
                        self.refs.drop_handle(id);
                    }
                }
            }
            Registering::Nobody => {}
            Registering::Reply(reply) => {
                let Some(left) = self.confirming.get_mut(&reply) else { return };
                *left -= 1;
                if *left == 0 {
                    self.confirming.remove(&reply);
                    self.send(reply.from, Message::Confirm { id: reply.request }, P::default());
                }
            }
        }
    }

    pub(super) fn flush_references(&mut self) {
        if !self.refs.has_news() {
            return;
        }
        for (owner, values) in self.refs.take_releases() {
            if mutant::is(Mutant::DropRelease) {
                continue;
            }
            self.send(owner, Message::Release { values }, P::default());
        }
        let values = self.refs.take_garbage();
        if !values.is_empty() {
            self.actions.push(Action::Garbage { values });
        }
        self.settle_local();
    }

    pub(super) fn creation_failed(&self, value: ValueId, source: Error) -> Error {
        crate::ErrorKind::Creation {
            owner: self.me,
            id: value.to_string(),
            source,
        }
        .into()
    }
}

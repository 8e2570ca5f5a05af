//! Requests of this rank: how they leave, and what their answers bring about.

use super::*;

impl<V: Clone, P: Default> Rank<V, P> {
    pub(super) fn issue(&mut self, to: u32, op: Op, refs: Vec<RefId>, payload: P, origin: Origin) -> RequestId {
        let id = self.next_request;
        self.next_request += 1;
        let context = op.tag().map(|t| t.context);
        let pins = self.pin(&refs, to);
        if let Origin::Program { window: Some(bytes) } = origin {
            let outstanding = self.outstanding.entry(to).or_default();
            outstanding.0 += 1;
            outstanding.1 += bytes;
        }
        self.outgoing.insert(id, Outgoing { to, origin, context, pins });
        self.send(to, Message::Request { id, op, refs }, payload);
        id
    }

    /// References leave for a rank; those of third ranks among them, which must be kept until they are there.
    pub(super) fn pin(&mut self, refs: &[RefId], to: u32) -> Vec<RefId> {
        match refs {
            [] => Vec::new(),
            refs => refs.iter().copied().filter(|&id| self.refs.send(id, to)).collect(),
        }
    }

    /// `from` answered a request that was outstanding.
    #[expect(clippy::too_many_arguments, reason = "the parts of a reply, and what was asked")]
    pub(super) fn answered(
        &mut self,
        from: u32,
        id: RequestId,
        request: Outgoing,
        answer: Answer,
        outcome: Result<(), Error>,
        refs: Vec<RefId>,
        payload: P,
    ) {
        let reply = TaskId { from, request: id };
        let third = refs.iter().any(|r| r.owner != self.me && r.owner != from);
        let mut unconfirmed = 0;
        for &r in &refs {
            if self.refs.receive(r, from) {
                self.register(r, Registering::Reply(reply));
                unconfirmed += 1;
            }
        }
        if third && from != self.me {
            if unconfirmed > 0 {
                self.confirming.insert(reply, unconfirmed);
            } else {
                self.send(from, Message::Confirm { id }, P::default());
            }
        }
        for pin in request.pins {
            self.refs.unpin(pin);
        }
        if let (true, Some(context)) = (answer.new_child, request.context)
            && !self.contexts.adopt(context, from)
        {
            // The context was released while the request was on its way: the release follows it.
            let low = if context.rank() == self.me { self.contexts.low() } else { 0 };
            if !mutant::is(Mutant::LoseLateReply) {
                self.send_release(from, context, low, u64::MAX);
            }
        }
        match request.origin {
            Origin::Program { window } => {
                if let Some(bytes) = window {
                    let outstanding = self.outstanding.entry(from).or_default();
                    outstanding.0 = outstanding.0.saturating_sub(usize::from(!mutant::is(Mutant::LeakWindow)));
                    outstanding.1 = outstanding.1.saturating_sub(bytes);
                }
                let outcome = outcome.map(|()| payload);
                self.actions.push(Action::Answered {
                    request: id,
                    from,
                    answer,
                    outcome,
                    refs,
                });
            }
            Origin::Backward(context) => self.backward_answered(context, from, answer, outcome),
            Origin::Release(group) => self.release_answered(group),
        }
    }
}

//! Releasing contexts, here and on the ranks that met them through this one.

use super::*;

impl<V: Clone, P: Default> Rank<V, P> {
    pub(super) fn release(&mut self, context: ContextId, low: u64, task: Option<TaskId>, request: Option<RequestId>) {
        let children = self.contexts.release(context, low);
        self.backward_released(context);
        if children.is_some() {
            self.actions.push(Action::Forget { context });
        }
        let children = children.unwrap_or_default();
        let group = self.next_request;
        self.next_request += 1;
        self.releases.insert(
            group,
            Release {
                left: children.len() + 1,
                task,
                request,
            },
        );
        for child in children {
            self.send_release(child, context, low, group);
            if mutant::is(Mutant::ReleaseTwice) {
                self.send_release(child, context, low, u64::MAX);
            }
        }
        self.release_answered(group);
    }

    pub(super) fn send_release(&mut self, to: u32, context: ContextId, low: u64, group: u64) {
        self.issue(to, Op::Release { context, low }, Vec::new(), P::default(), Origin::Release(group));
    }

    pub(super) fn release_answered(&mut self, group: u64) {
        let Some(release) = self.releases.get_mut(&group) else { return };
        release.left -= 1;
        if release.left > 0 {
            return;
        }
        let Some(Release { task, request, .. }) = self.releases.remove(&group) else {
            return;
        };
        if let Some(task) = task {
            self.answer(task, Answer::default(), Ok(()));
        }
        if let Some(request) = request {
            let (from, answer) = (self.me, Answer::default());
            self.actions.push(Action::Answered {
                request,
                from,
                answer,
                outcome: Ok(P::default()),
                refs: Vec::new(),
            });
        }
    }
}

//! Which rank commits a backward, if it needn't be the root.
//!
//! If all that the root sends goes to one rank, that rank commits as soon as it is idle, without a round of its own for it (the last agent of J. Gray, "Notes on
//! data base operating systems", 1978): the answer to its first part then says so. The root may have to send more, as gradients come back to it, or fail:
//! then its answer to what came says that it recalls this. The answer goes up the tree with those of the ranks between, so the rank has it before it can be idle.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::backward::{Backward, Phase};
use super::ids::CrossingId;
use crate::Error;

/// To commit, once: for the engine, unless it is taken away before.
#[derive(Debug, Clone, Default)]
pub(crate) struct Permit(Arc<AtomicBool>);

impl Permit {
    /// Whether it was still there.
    pub(crate) fn take(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }
}

impl PartialEq for Permit {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Who commits, if the root leaves it to another rank.
#[derive(Debug, Default)]
pub(super) struct Last {
    /// On the root: the rank that it has left it to.
    pub left_to: Option<u32>,
    /// On that rank: it is to commit.
    pub mine: bool,
    /// What the engine of that rank needs for it, and a recall takes away.
    pub permit: Option<Permit>,
    /// `Fast` mode: a part of what this rank knows to be expected went to the root with an answer, so it can't tell any more whether all has come.
    pub spent: bool,
    /// The root has recalled it, as far as this rank has heard.
    pub recalled: bool,
    /// That rank has committed.
    pub done: bool,
    /// On the root: its caller has given up, and is to hear so once it is sure that nothing was committed.
    pub given_up: Option<Error>,
}

impl<P> Backward<P> {
    /// The other rank that all of these gradients go to, if nothing else is under way.
    pub(super) fn only_way(&self, me: u32, gradients: &[(CrossingId, P)]) -> Option<u32> {
        let to = gradients.first()?.0.rank();
        let alone =
            self.root && to != me && self.last.left_to.is_none() && self.outstanding == 0 && self.inbox.is_empty() && self.due.is_empty();
        let is_to = |rank: &u32| *rank == to;
        (alone && gradients.iter().all(|(crossing, _)| crossing.rank() == to) && self.children.iter().all(is_to)).then_some(to)
    }

    /// Whether it is this rank's to commit, should nothing go on from here.
    pub(super) fn commits_next(&self) -> bool {
        let flows = self.phase == Phase::Flowing && self.failed.is_none();
        flows && self.last.mine && !self.last.recalled && !self.last.spent && self.outstanding == 0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ErrorKind;
    use crate::protocol::{Action, ContextId, Input, Manner, Message, Mode, Op, Output, Part, Rank, Window};

    type R = Rank<(), ()>;

    /// A context of rank 0 that rank 1 knows, in a backward whose only gradient has gone there, and the message with it.
    fn begun() -> ([R; 2], ContextId, Message) {
        let window = Window {
            requests: 8,
            bytes: 1 << 20,
        };
        let [mut root, mut other]: [R; 2] = [0, 1].map(|me| Rank::new(me, 2, window));
        let context = root.open_context();
        other.contexts.meet(context).unwrap();
        root.begin_backward(context, 1, Manner::default()).unwrap();
        engine(&mut root);
        root.engine_done(
            context,
            Output {
                known: Some(vec![CrossingId::new(1, 1)]),
                gradients: vec![(CrossingId::new(1, 1), ())],
                ..Output::default()
            },
        );
        let gradient = sent(&mut root).remove(0);
        assert!(matches!(
            gradient,
            Message::Request {
                op: Op::Backward { part: Part::Last(..), .. },
                ..
            }
        ));
        ([root, other], context, gradient)
    }

    /// What the engine is asked for; nothing else is to be done.
    fn engine(rank: &mut R) -> Vec<Input<()>> {
        match rank.take_actions().pop() {
            Some(Action::Engine { inputs, .. }) => inputs,
            other => panic!("{other:?}"),
        }
    }

    fn sent(rank: &mut R) -> Vec<Message> {
        let sends = rank.take_actions().into_iter().filter_map(|action| match action {
            Action::Send { message, .. } => Some(message),
            _ => None,
        });
        sends.collect()
    }

    fn outcome(rank: &mut R) -> Option<Result<(), Error>> {
        rank.take_actions().into_iter().find_map(|action| match action {
            Action::BackwardDone { result, .. } => Some(result),
            _ => None,
        })
    }

    fn permit(inputs: &mut Vec<Input<()>>) -> Permit {
        match inputs.pop() {
            Some(Input::CommitIfLast { balance: 0, permit }) => permit,
            other => panic!("{other:?}"),
        }
    }

    fn committed(committed: bool) -> Output<()> {
        Output {
            committed,
            ..Output::default()
        }
    }

    fn late() -> Error {
        Error::user("too late")
    }

    #[test]
    fn the_only_other_rank_commits_and_says_so() {
        let ([mut root, mut other], context, gradient) = begun();
        other.receive(0, gradient, ());
        assert!(permit(&mut engine(&mut other)).take());
        other.engine_done(context, committed(true));
        let answer = sent(&mut other);
        assert_eq!(answer.len(), 1);
        answer.into_iter().for_each(|message| root.receive(1, message, ()));
        assert_eq!(engine(&mut root), [Input::Commit]);
        root.engine_done(context, committed(false));
        assert!(matches!(outcome(&mut root), Some(Ok(()))));
    }

    #[test]
    fn a_recall_in_time_ends_the_wait_before_the_engine_does() {
        let ([mut root, mut other], context, gradient) = begun();
        other.receive(0, gradient, ());
        let permit = permit(&mut engine(&mut other));
        root.set_now(Duration::from_secs(1));
        assert!(!root.abandon_backward(context, late()));
        for message in sent(&mut root) {
            other.receive(0, message, ());
        }
        assert!(!permit.take(), "the engine mustn't commit any more");
        for message in sent(&mut other) {
            root.receive(1, message, ());
        }
        let told = outcome(&mut root).unwrap().unwrap_err();
        assert!(matches!(told.kind(), ErrorKind::User { .. }), "{told}");
        // The engine ends, and all is aborted.
        other.engine_done(context, committed(false));
        for message in sent(&mut other) {
            root.receive(1, message, ());
        }
        let abort = root.take_actions();
        let is_abort = |action: &Action<(), ()>| {
            matches!(
                action,
                Action::Send {
                    message: Message::Request {
                        op: Op::Backward { part: Part::Abort, .. },
                        ..
                    },
                    ..
                }
            )
        };
        assert!(abort.iter().any(is_abort), "{abort:?}");
    }

    /// A rank whose engine is through with a first gradient, alone, when the last one comes, and what the engine is asked then.
    fn in_two_parts(manner: Manner, first: Output<()>) -> (R, Vec<Input<()>>) {
        let ([_, mut other], context, _) = begun();
        let part = |id, part| Message::Request {
            id,
            op: Op::Backward {
                context,
                backward: 1,
                manner,
                part,
                marks: Vec::new(),
            },
            refs: Vec::new(),
        };
        other.receive(0, part(5, Part::Gradient(CrossingId::new(1, 1))), ());
        engine(&mut other);
        other.engine_done(context, first);
        sent(&mut other);
        other.receive(0, part(6, Part::Last(CrossingId::new(1, 2), 1)), ());
        let inputs = engine(&mut other);
        (other, inputs)
    }

    #[test]
    fn who_has_given_its_balance_away_does_not_commit() {
        let fast = Manner {
            mode: Mode::Fast,
            ..Manner::default()
        };
        let of_all = |expected| Output {
            expected,
            ..Output::default()
        };
        // One is missing on the root, and the one that this rank missed has come: as many as come and go cancel out, if one counts wrongly.
        let (_, mut inputs) = in_two_parts(fast, of_all(2));
        assert!(matches!(inputs.pop(), Some(Input::Gradient(..))));
        let (_, mut inputs) = in_two_parts(fast, of_all(1));
        assert!(
            matches!(inputs.pop(), Some(Input::CommitIfLast { balance: 0, .. })),
            "nothing was given away"
        );
    }

    #[test]
    fn a_refused_gradient_keeps_a_rank_from_committing_the_others() {
        let ([_, mut other], context, gradient) = begun();
        let op = |crossing| Op::Backward {
            context,
            backward: 1,
            manner: Manner::default(),
            part: Part::Gradient(CrossingId::new(1, crossing)),
            marks: Vec::new(),
        };
        other.receive(
            0,
            Message::Request {
                id: 5,
                op: op(1),
                refs: Vec::new(),
            },
            (),
        );
        engine(&mut other);
        other.refuse_request(0, 6, op(2), Vec::new(), late());
        other.receive(0, gradient, ());
        other.engine_done(context, committed(false));
        let answers = sent(&mut other);
        let is_no = |message: &Message| matches!(message, Message::Reply { answer, .. } if !answer.committed);
        assert!(answers.iter().all(is_no) && other.take_actions().is_empty(), "{answers:?}");
    }

    #[test]
    fn a_recall_that_comes_too_late_changes_nothing() {
        let ([mut root, mut other], context, gradient) = begun();
        other.receive(0, gradient, ());
        assert!(permit(&mut engine(&mut other)).take());
        assert!(!root.abandon_backward(context, late()));
        for message in sent(&mut root) {
            other.receive(0, message, ());
        }
        other.engine_done(context, committed(true));
        for message in sent(&mut other) {
            assert!(outcome(&mut root).is_none());
            root.receive(1, message, ());
        }
        assert_eq!(engine(&mut root), [Input::Commit]);
        root.engine_done(context, committed(false));
        assert!(matches!(outcome(&mut root), Some(Ok(()))));
    }
}

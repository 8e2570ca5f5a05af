//! The step queue of a rank: tasks that take turns, one at a time, in order of arrival.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::ids::{RequestId, TaskId};
use super::{Instant, Message, Rank, Stage, Status, Work};
use crate::mutant::{self, Mutant};

/// How a task uses the step queue of its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) enum Turn {
    /// Not at all.
    #[default]
    None,
    /// It runs when its turn comes.
    Take,
    /// It runs when its turn comes. If it succeeds, the turn stays its sender's until `End`.
    Keep,
    /// It runs in the turn that this request of the same sender kept, and ends it. If there is none, it takes a turn.
    End(RequestId),
}

/// Whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Holder {
    #[default]
    Nobody,
    Running(TaskId),
    Kept(TaskId),
}

#[derive(Debug, Default)]
pub(super) struct Turns {
    waiting: VecDeque<TaskId>,
    holder: Holder,
    /// Since when the rank that keeps the turn owes a sign of life.
    knocked: Option<Instant>,
}

impl Turns {
    /// Tasks that wait, and the one whose turn it is.
    #[cfg(any(test, feature = "sim"))]
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + usize::from(self.holder != Holder::Nobody)
    }

    /// The task whose sender keeps its turn.
    #[cfg(any(test, feature = "sim"))]
    pub(super) fn kept(&self) -> Option<TaskId> {
        match self.holder {
            Holder::Kept(task) => Some(task),
            _ => None,
        }
    }

    /// How a task fares that waits.
    pub(super) fn status(&self, task: TaskId, now: Instant) -> Status {
        if let (Holder::Kept(kept), Some(since)) = (self.holder, self.knocked) {
            let silent = now.saturating_sub(since).as_secs_f64();
            return Status::Kept { by: kept.from, silent };
        }
        // Those that go first, and the task itself.
        Status::Queued(self.waiting.iter().position(|&t| t == task).map_or(1, |n| n as u64 + 1))
    }

    /// The rank that keeps the turn for this task has given a sign of life.
    pub(super) fn heard(&mut self, kept: TaskId) {
        if self.holder == Holder::Kept(kept) {
            self.knocked = None;
        }
    }

    fn set(&mut self, holder: Holder) {
        self.holder = holder;
        self.knocked = None;
    }
}

impl<V: Clone, P: Default> Rank<V, P> {
    pub(super) fn take_turn(&mut self, task: TaskId, turn: Turn, work: Work<V, P>) {
        if let Turn::End(request) = turn {
            let kept = TaskId { from: task.from, request };
            let is_its = match self.turns.holder {
                Holder::Kept(holder) => holder == kept || mutant::is(Mutant::EndInAnyTurn),
                _ => false,
            };
            if is_its && !mutant::is(Mutant::EndWaits) {
                self.turns.set(Holder::Running(task));
                return self.run(task, work);
            }
            // Its sender gave up before its turn came or was over: it won't keep it.
            if let Some(incoming) = self.incoming.get_mut(&kept).filter(|_| !mutant::is(Mutant::KeepGivenUp)) {
                incoming.turn = Turn::Take;
            }
        }
        if self.turns.holder == Holder::Nobody && self.turns.waiting.is_empty() && !mutant::is(Mutant::StepsAtOnce) {
            self.turns.set(Holder::Running(task));
            return self.run(task, work);
        }
        if let Some(incoming) = self.incoming.get_mut(&task) {
            incoming.stage = Stage::Queued(Box::new(work));
            self.turns.waiting.push_back(task);
        }
        self.next_turn();
    }

    pub(super) fn turn_done(&mut self, task: TaskId, turn: Turn, succeeded: bool) {
        if self.turns.holder == Holder::Running(task) {
            let keeps = match turn {
                Turn::Keep => (succeeded || mutant::is(Mutant::KeepFailed)) && !mutant::is(Mutant::KeepNothing),
                Turn::End(_) => mutant::is(Mutant::EndKeeps),
                Turn::None | Turn::Take => false,
            };
            self.turns.set(if keeps { Holder::Kept(task) } else { Holder::Nobody });
            self.next_turn();
        }
    }

    /// Someone waits for the turn: if its holder keeps it between two requests, asks whether that rank is alive. Else nobody would know, and all would wait for ever.
    pub(super) fn knock(&mut self) {
        if let (Holder::Kept(kept), None) = (self.turns.holder, self.turns.knocked)
            && !mutant::is(Mutant::SkipKnock)
        {
            self.turns.knocked = Some(self.now);
            self.send(kept.from, Message::Knock { id: kept.request }, P::default());
        }
    }

    fn next_turn(&mut self) {
        while self.turns.holder == Holder::Nobody {
            let next = if mutant::is(Mutant::LastInFirstOut) {
                self.turns.waiting.pop_back()
            } else {
                self.turns.waiting.pop_front()
            };
            let Some(task) = next else { return };
            let Some(incoming) = self.incoming.get_mut(&task) else { continue };
            let gradients_of = incoming.gradients_of;
            if let Stage::Queued(work) = std::mem::replace(&mut incoming.stage, Stage::Running(self.now)) {
                // Since it arrived a backward may have begun, or the context been released.
                let refused = gradients_of.and_then(|c| self.check_gradients("step or gradient access", c).err());
                if let (Some(error), Work::Call { refs, .. }) = (refused, &*work) {
                    self.refuse(task, error, refs.clone());
                    continue;
                }
                if !mutant::is(Mutant::StepsAtOnce) {
                    self.turns.set(Holder::Running(task));
                }
                self.run(task, *work);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Action, Answer, Gate, Message, Op, Outcome, Window};
    use super::*;
    use crate::Error;

    fn rank() -> Rank<(), ()> {
        let window = Window {
            requests: 100,
            bytes: 1 << 30,
        };
        Rank::new(0, 3, window)
    }

    fn task(from: u32, request: RequestId) -> TaskId {
        TaskId { from, request }
    }

    /// A request arrives; the tasks that run because of it.
    fn arrive(rank: &mut Rank<(), ()>, task: TaskId, turn: Turn) -> Vec<TaskId> {
        let gate = Gate { turn, gradients_of: None };
        let op = Op::Call {
            function: 0,
            create: None,
            context: None,
            gate,
        };
        let message = Message::Request {
            id: task.request,
            op,
            refs: vec![],
        };
        rank.receive(task.from, message, ());
        running(rank)
    }

    fn done(rank: &mut Rank<(), ()>, task: TaskId, succeeds: bool) -> Vec<TaskId> {
        let outcome = match succeeds {
            true => Outcome::Reply {
                payload: (),
                refs: vec![],
                crossing: None,
            },
            false => Outcome::Error(Error::user("no")),
        };
        rank.done(task, outcome);
        running(rank)
    }

    fn running(rank: &mut Rank<(), ()>) -> Vec<TaskId> {
        let actions = rank.take_actions().into_iter();
        actions
            .filter_map(|a| match a {
                Action::Run { task, .. } => Some(task),
                Action::Send {
                    message: Message::Reply { answer, .. },
                    ..
                } => {
                    assert_eq!(answer, Answer::default());
                    None
                }
                _ => None,
            })
            .collect()
    }

    #[test]
    fn a_kept_turn_lets_nobody_in_until_its_sender_ends_it() {
        let mut rank = rank();
        let (keep, other, end) = (task(1, 1), task(2, 1), task(1, 2));
        assert_eq!(arrive(&mut rank, keep, Turn::Keep), [keep]);
        assert_eq!(arrive(&mut rank, other, Turn::Take), []);
        assert_eq!(done(&mut rank, keep, true), []);
        assert_eq!(arrive(&mut rank, end, Turn::End(1)), [end]);
        assert_eq!(done(&mut rank, end, true), [other]);
        assert_eq!(done(&mut rank, other, true), []);
    }

    #[test]
    fn a_turn_whose_task_fails_is_not_kept() {
        let mut rank = rank();
        let (keep, other, end) = (task(1, 1), task(2, 1), task(1, 2));
        arrive(&mut rank, keep, Turn::Keep);
        arrive(&mut rank, other, Turn::Take);
        assert_eq!(done(&mut rank, keep, false), [other]);
        // An end without a kept turn is a turn like others.
        assert_eq!(arrive(&mut rank, end, Turn::End(1)), []);
        assert_eq!(done(&mut rank, other, true), [end]);
    }

    #[test]
    fn a_sender_that_gives_up_early_keeps_nothing() {
        let mut rank = rank();
        let (first, keep, end, other) = (task(2, 1), task(1, 1), task(1, 2), task(2, 2));
        arrive(&mut rank, first, Turn::Take);
        arrive(&mut rank, keep, Turn::Keep);
        arrive(&mut rank, end, Turn::End(1));
        arrive(&mut rank, other, Turn::Take);
        assert_eq!(done(&mut rank, first, true), [keep]);
        assert_eq!(done(&mut rank, keep, true), [end]);
        assert_eq!(done(&mut rank, end, true), [other]);
    }

    #[test]
    fn another_sender_cannot_end_a_turn() {
        let mut rank = rank();
        let (keep, wrong, end) = (task(1, 1), task(2, 7), task(1, 2));
        arrive(&mut rank, keep, Turn::Keep);
        done(&mut rank, keep, true);
        assert_eq!(arrive(&mut rank, wrong, Turn::End(1)), []);
        assert_eq!(arrive(&mut rank, end, Turn::End(1)), [end]);
        assert_eq!(done(&mut rank, end, true), [wrong]);
    }

    /// What a rank says to another, in answer to a query of this request.
    fn asked(rank: &mut Rank<(), ()>, task: TaskId) -> (Status, Vec<(u32, Message)>) {
        rank.receive(task.from, Message::Query { id: task.request }, ());
        let mut sent = rank.take_actions().into_iter().map(|action| match action {
            Action::Send { to, message, .. } => (to, message),
            other => panic!("{other:?}"),
        });
        let report = sent.next().unwrap();
        let (to, Message::Report { id, status }) = report else {
            panic!("{report:?}")
        };
        assert_eq!((to, id), (task.from, task.request));
        (status, sent.collect())
    }

    #[test]
    fn who_waits_for_a_kept_turn_hears_whether_its_keeper_is_alive() {
        let mut rank = rank();
        let (keep, other, end) = (task(1, 1), task(2, 1), task(1, 2));
        arrive(&mut rank, keep, Turn::Keep);
        arrive(&mut rank, other, Turn::Take);
        // The keeper's function still runs: nobody needs to be asked.
        assert_eq!(asked(&mut rank, other), (Status::Queued(1), vec![]));
        done(&mut rank, keep, true);
        let knock = vec![(1, Message::Knock { id: 1 })];
        for second in 0..3 {
            rank.set_now(Instant::from_secs(10 * second));
            assert_eq!(asked(&mut rank, other), (Status::Queued(1), knock.clone()));
            rank.receive(1, Message::Here { id: 1 }, ());
        }
        assert_eq!(asked(&mut rank, other), (Status::Queued(1), knock));
        rank.set_now(Instant::from_secs(27));
        // It has been asked, and isn't asked again.
        let (status, sent) = asked(&mut rank, other);
        assert_eq!((status, sent), (Status::Kept { by: 1, silent: 7.0 }, vec![]));
        assert!(!status.is_sign_of_life());
        // It goes on after all.
        assert_eq!(arrive(&mut rank, end, Turn::End(1)), [end]);
        assert_eq!(asked(&mut rank, other), (Status::Queued(1), vec![]));
        rank.receive(1, Message::Here { id: 1 }, ());
        assert_eq!(done(&mut rank, end, true), [other]);
    }

    #[test]
    fn a_rank_answers_a_knock() {
        let mut rank = rank();
        rank.receive(2, Message::Knock { id: 7 }, ());
        let sent = rank.take_actions();
        assert!(
            matches!(
                &sent[..],
                [Action::Send {
                    to: 2,
                    message: Message::Here { id: 7 },
                    ..
                }]
            ),
            "{sent:?}"
        );
    }
}

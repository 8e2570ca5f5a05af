//! One backward over the ranks that its roots reach.
//!
//! Marks and gradients form a diffusing computation (E. W. Dijkstra and C. S. Scholten, "Termination detection for diffusing computations",
//! Information Processing Letters 11, 1980): the first part that finds a rank idle makes its sender the rank's parent, and is answered when
//! that rank is idle again with all it sent answered; others are answered when what they brought is done. So when the root is idle, all ranks are, and the
//! round is over. The ranks met form a tree; commit or abort travels it and comes back.
//!
//! If all that the root sends goes to one rank, that rank commits without such a round (`last.rs`).
//!
//! Values bring along which crossings their gradients will reach beyond (`autograd/reach.rs`). If that holds for all that the roots reach, an exact backward
//! needs no marks of its own: each gradient takes the list along, and the rank that it meets first marks what it sent of it.

use std::collections::BTreeSet;

use super::ids::{ContextId, CrossingId, TaskId};
use super::last::{Last, Permit};
use super::liveness::Probes;
use super::message::{Answer, Manner, Mode, Op, Part};
use super::{Action, Origin, Rank};
use crate::mutant::{self, Mutant};
use crate::{Error, ErrorKind};

/// What the engine of a rank is asked to do, in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input<P> {
    /// Mark what the roots reach.
    MarkRoots,
    /// `Fast`: mark what every crossing sent from here in this context reaches.
    ExpectAll,
    /// Mark what one crossing reaches.
    Mark(CrossingId),
    /// Give the roots their gradient, one.
    SeedRoots,
    /// The same, and mark what they reach by way of other ranks, if all of that is known.
    SeedIfKnown,
    /// Give a crossing its gradients.
    Gradient(CrossingId, P),
    /// After what came before: commit, if no gradients go on from here, in `Fast` mode none are expected any more (so many are, less those that came, on
    /// all ranks that were heard), and the permit is still there.
    CommitIfLast { balance: i64, permit: Permit },
    /// Add what was accumulated to the context's gradients.
    Commit,
    /// Forget what was accumulated; say which calls got no gradient.
    Abort,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Output<P> {
    /// Crossings received here that were reached for the first time.
    pub reached: Vec<CrossingId>,
    /// After `SeedIfKnown`: all crossings that the roots reach, if they are known and the roots have got their gradient.
    pub known: Option<Vec<CrossingId>>,
    /// Gradients for crossings received here.
    pub gradients: Vec<(CrossingId, P)>,
    /// Crossings that `ExpectAll` marked.
    pub expected: usize,
    /// It has committed, as `CommitIfLast` asked.
    pub committed: bool,
    /// Recorded calls that no gradient came for.
    pub unreached: Vec<String>,
    /// What failed.
    pub error: Option<Error>,
}

impl<P> Default for Output<P> {
    fn default() -> Self {
        Output {
            reached: Vec::new(),
            known: None,
            gradients: Vec::new(),
            expected: 0,
            committed: false,
            unreached: Vec::new(),
            error: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Marking,
    Flowing,
    Settling { commit: bool },
}

#[derive(Debug)]
pub(super) struct Backward<P> {
    number: u32,
    manner: Manner,
    pub(super) root: bool,
    pub(super) phase: Phase,
    /// The request that found this rank idle; answered when it is idle again.
    parent: Option<TaskId>,
    /// Other requests; answered when the engine has done what they brought, not before: an answer moves their sender to send more, while nobody here listens.
    pub(super) due: Vec<TaskId>,
    /// Those among them that the engine is at.
    doing: Vec<TaskId>,
    /// Whether the next answer is the first of this backward.
    first: bool,
    pub(super) children: BTreeSet<u32>,
    pub(super) outstanding: usize,
    /// All crossings that the roots reach, if they were known from the start.
    known: Option<Vec<CrossingId>>,
    /// Ranks that this one has told them.
    told: BTreeSet<u32>,
    running: bool,
    pub(super) inbox: Vec<Input<P>>,
    balance: i64,
    unreached: Vec<String>,
    pub(super) failed: Option<(u32, Error)>,
    pub(super) last: Last,
    /// On the root: who was asked for a sign of life.
    pub(super) probes: Probes,
}

impl<P> Backward<P> {
    fn new(number: u32, manner: Manner, root: bool) -> Self {
        Backward {
            number,
            manner,
            root,
            phase: if manner.mode == Mode::Exact {
                Phase::Marking
            } else {
                Phase::Flowing
            },
            parent: None,
            due: Vec::new(),
            doing: Vec::new(),
            first: true,
            children: BTreeSet::new(),
            outstanding: 0,
            known: None,
            told: BTreeSet::new(),
            running: false,
            inbox: Vec::new(),
            balance: 0,
            unreached: Vec::new(),
            failed: None,
            last: Last::default(),
            probes: Probes::default(),
        }
    }

    /// Its number among those of its context.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// What goes to a rank with a gradient: the known crossings, the first time.
    fn news_for(&mut self, rank: u32) -> Vec<CrossingId> {
        match &self.known {
            Some(known) if self.told.insert(rank) => known.clone(),
            _ => Vec::new(),
        }
    }

    fn fail(&mut self, rank: u32, error: Error) {
        self.failed.get_or_insert((rank, error));
    }
}

impl<V: Clone, P: Default> Rank<V, P> {
    /// Begins a backward of one of this rank's contexts; [`Action::BackwardDone`] tells its end.
    pub(crate) fn begin_backward(&mut self, context: ContextId, number: u32, manner: Manner) -> Result<(), Error> {
        if !self.contexts.is_live(context) {
            return Err(self.contexts.gone("backward", context));
        }
        self.check_idle("backward", context)?;
        let mut backward = Backward::new(number, manner, true);
        backward.inbox.push(Input::MarkRoots);
        match manner.mode {
            Mode::Fast => backward.inbox.extend([Input::ExpectAll, Input::SeedRoots]),
            Mode::Exact => backward.inbox.push(Input::SeedIfKnown),
        }
        self.backwards.insert(context, backward);
        self.pump(context);
        self.settle_local();
        Ok(())
    }

    /// The caller of a backward gives up: it is aborted as soon as all ranks have answered. False if that is too late, as it is over, or all gradients are there and
    /// ranks are adding them to those of the context; or if it is left to another rank to begin with that, which is told not to: if it hasn't yet,
    /// [`Action::BackwardDone`] comes with this error.
    pub(crate) fn abandon_backward(&mut self, context: ContextId, error: Error) -> bool {
        let me = self.me;
        let Some(backward) = self.backwards.get_mut(&context) else {
            return false;
        };
        if backward.phase == (Phase::Settling { commit: true }) || backward.last.done {
            return false;
        }
        let of = (backward.number, backward.manner);
        let is_open = backward.failed.is_none() && !backward.last.recalled && backward.phase == Phase::Flowing;
        match backward.last.left_to {
            Some(_) if backward.last.given_up.is_some() => false,
            Some(rank) if is_open => {
                backward.fail(me, error.clone());
                backward.last.given_up = Some(error);
                backward.outstanding += 1;
                self.send_part(context, of, rank, Part::Recall, Vec::new(), P::default());
                false
            }
            _ => {
                backward.fail(me, error);
                true
            }
        }
    }

    /// Ranks that a backward waits for.
    pub(crate) fn backward_waits_for(&self, context: ContextId) -> Vec<u32> {
        let ranks: BTreeSet<u32> = self
            .outgoing
            .values()
            .filter(|o| o.origin == Origin::Backward(context))
            .map(|o| o.to)
            .collect();
        ranks.into_iter().collect()
    }

    pub(super) fn check_idle(&self, operation: &str, context: ContextId) -> Result<(), Error> {
        if self.backwards.contains_key(&context) && !mutant::is(Mutant::StepDuringBackward) {
            return Err(ErrorKind::BackwardInFlight {
                operation: operation.into(),
                context: context.to_string(),
            }
            .into());
        }
        Ok(())
    }

    /// A part arrives from another rank.
    pub(super) fn backward_part(
        &mut self,
        task: TaskId,
        context: ContextId,
        (number, manner): (u32, Manner),
        part: Part,
        marks: Vec<CrossingId>,
        payload: P,
    ) {
        if !self.contexts.is_live(context) {
            let gone = self.contexts.gone("backward", context);
            return self.answer(task, Answer::default(), Err(gone));
        }
        let settling = matches!(part, Part::Commit | Part::Abort | Part::Recall);
        match self.backwards.get(&context).map(|b| b.number) {
            Some(n) if n == number => {}
            Some(_) => {
                let busy = ErrorKind::BackwardInFlight {
                    operation: "backward".into(),
                    context: context.to_string(),
                };
                return self.answer(task, Answer::default(), Err(busy.into()));
            }
            None if settling => return self.answer(task, Answer::default(), Ok(())),
            None => {
                let mut backward = Backward::new(number, manner, false);
                if !marks.is_empty() {
                    let mine = marks.iter().copied().filter(|mark| mark.rank() == self.me);
                    backward.inbox.extend(mine.map(Input::Mark));
                    backward.known = Some(marks);
                }
                self.backwards.insert(context, backward);
            }
        }
        let Some(backward) = self.backwards.get_mut(&context) else { return };
        let fresh = backward.first && backward.parent.is_none() && !backward.root;
        match part {
            Part::Mark(crossing) => backward.inbox.push(Input::Mark(crossing)),
            Part::Gradient(crossing) | Part::Last(crossing, _) => {
                if let Part::Last(_, balance) = part {
                    backward.last.mine = true;
                    backward.balance += balance;
                }
                if backward.manner.mode == Mode::Fast {
                    backward.balance -= 1;
                    if fresh {
                        backward.inbox.push(Input::ExpectAll);
                    }
                }
                backward.phase = Phase::Flowing;
                backward.inbox.push(Input::Gradient(crossing, payload));
            }
            Part::Recall => {
                let too_late = backward.last.permit.take().is_some_and(|permit| !permit.take());
                let recalled = !too_late && !matches!(backward.phase, Phase::Settling { .. });
                backward.last.recalled |= recalled;
                let answer = Answer {
                    recalled,
                    ..Answer::default()
                };
                return self.answer(task, answer, Ok(()));
            }
            Part::Commit => return self.settle(context, true, Some(task)),
            Part::Abort => return self.settle(context, false, Some(task)),
        }
        if mutant::is(Mutant::AnswerMarkEarly) {
            self.answer(task, Answer::default(), Ok(()));
        } else if backward.root || backward.parent.is_some() {
            backward.due.push(task);
        } else {
            backward.parent = Some(task);
        }
        self.pump(context);
    }

    /// The engine has done what it was asked.
    pub(crate) fn engine_done(&mut self, context: ContextId, output: Output<P>) {
        let me = self.me;
        let Some(backward) = self.backwards.get_mut(&context) else { return };
        backward.running = false;
        backward.balance += output.expected as i64;
        backward.unreached.extend(output.unreached);
        if let Some(error) = output.error {
            backward.fail(me, error);
        }
        if output.committed {
            backward.last.done = true;
            backward.phase = Phase::Settling { commit: true };
        }
        backward.last.permit = None;
        if let Some(known) = output.known {
            backward.phase = Phase::Flowing;
            backward.known = Some(known);
        }
        let asks = backward.manner.mode == Mode::Exact && backward.known.is_none();
        let marks = if asks { output.reached } else { Vec::new() };
        let gradients = output.gradients;
        // Before what the engine made: whoever gets both hears the answer while it still listens.
        let done = std::mem::take(&mut backward.doing);
        let more = !(marks.is_empty() && gradients.is_empty());
        self.answer_parts(context, done, more);
        let Some(backward) = self.backwards.get_mut(&context) else { return };
        if backward.failed.is_none() {
            let left_to = if marks.is_empty() {
                backward.only_way(me, &gradients)
            } else {
                None
            };
            backward.last.left_to = backward.last.left_to.or(left_to);
            let balance = if left_to.is_some() {
                std::mem::take(&mut backward.balance)
            } else {
                0
            };
            backward.outstanding += marks.len() + gradients.len();
            let of = (backward.number, backward.manner);
            let news: Vec<Vec<CrossingId>> = gradients.iter().map(|(crossing, _)| backward.news_for(crossing.rank())).collect();
            for crossing in marks {
                self.send_part(context, of, crossing.rank(), Part::Mark(crossing), Vec::new(), P::default());
            }
            let mut left = gradients.len();
            for ((crossing, payload), news) in gradients.into_iter().zip(news) {
                left -= 1;
                let part = match left_to {
                    Some(_) if left == 0 => Part::Last(crossing, balance),
                    _ => Part::Gradient(crossing),
                };
                self.send_part(context, of, crossing.rank(), part, news, payload);
            }
        }
        self.pump(context);
        self.settle_local();
    }

    /// A part that this rank sent was answered.
    pub(super) fn backward_answered(&mut self, context: ContextId, from: u32, answer: Answer, outcome: Result<(), Error>) {
        let Some(backward) = self.backwards.get_mut(&context) else { return };
        backward.outstanding -= 1;
        backward.balance += answer.balance;
        backward.unreached.extend(answer.unreached);
        backward.last.recalled |= answer.recalled;
        if answer.committed {
            backward.last.done = true;
            backward.children.remove(&from);
        } else if answer.engaged {
            backward.children.insert(from);
        }
        if let Some(error) = backward.last.given_up.take_if(|_| answer.recalled) {
            let result = Err(error);
            self.actions.push(Action::BackwardDone { context, result });
        }
        if let Err(error) = outcome {
            backward.fail(answer.failed_rank.unwrap_or(from), error);
        }
        self.pump(context);
    }

    /// A part was refused when it arrived.
    pub(super) fn backward_refused(&mut self, context: ContextId, number: u32, error: &Error) {
        let me = self.me;
        if let Some(backward) = self.backwards.get_mut(&context).filter(|b| b.number == number) {
            // It may be left to this rank to commit what would be less than all.
            backward.fail(me, error.clone());
        }
    }

    /// The context was released on this rank while a backward was under way (its home gave up waiting).
    pub(super) fn backward_released(&mut self, context: ContextId) {
        if let Some(backward) = self.backwards.remove(&context) {
            let gone = self.contexts.gone("backward", context);
            for task in backward.due.into_iter().chain(backward.doing) {
                let answer = Answer {
                    recalled: true,
                    ..Answer::default()
                };
                self.answer(task, answer, Ok(()));
            }
            if let Some(task) = backward.parent {
                self.answer(task, Answer::default(), Err(gone));
            } else if backward.root {
                self.actions.push(Action::BackwardDone {
                    context,
                    result: Err(gone),
                });
            }
        }
    }

    fn send_part(
        &mut self,
        context: ContextId,
        (backward, manner): (u32, Manner),
        to: u32,
        part: Part,
        marks: Vec<CrossingId>,
        payload: P,
    ) {
        self.issue(
            to,
            Op::Backward {
                context,
                backward,
                manner,
                part,
                marks,
            },
            Vec::new(),
            payload,
            Origin::Backward(context),
        );
    }

    /// Answers parts that the engine is done with; `more` if this rank sends parts of its own now.
    fn answer_parts(&mut self, context: ContextId, tasks: Vec<TaskId>, more: bool) {
        for task in tasks {
            let Some(backward) = self.backwards.get_mut(&context) else { return };
            let mut answer = Answer::default();
            if backward.last.left_to.is_some() {
                backward.last.recalled |= (more || backward.failed.is_some()) && !mutant::is(Mutant::SkipRecall);
                answer.recalled = backward.last.recalled;
                answer.balance = std::mem::take(&mut backward.balance);
            }
            self.answer(task, answer, Ok(()));
        }
    }

    /// Lets the engine do what has gathered; when nothing is left to do or to wait for, ends the round.
    fn pump(&mut self, context: ContextId) {
        let Some(backward) = self.backwards.get_mut(&context) else { return };
        if backward.running {
            return;
        }
        if backward.failed.is_some() && !matches!(backward.phase, Phase::Settling { .. }) {
            backward.inbox.clear();
            let due = std::mem::take(&mut backward.due);
            self.answer_parts(context, due, false);
        }
        let Some(backward) = self.backwards.get_mut(&context) else { return };
        if !backward.inbox.is_empty() {
            backward.running = true;
            let mut inputs = std::mem::take(&mut backward.inbox);
            if backward.commits_next() && backward.children.is_empty() {
                let (balance, permit) = (backward.balance, Permit::default());
                backward.last.permit = Some(permit.clone());
                inputs.push(Input::CommitIfLast { balance, permit });
            }
            backward.doing.append(&mut backward.due);
            let retain_graph = backward.manner.retain_graph;
            self.actions.push(Action::Engine {
                context,
                retain_graph,
                inputs,
            });
        } else if backward.outstanding == 0 {
            self.idle(context);
        }
    }

    fn idle(&mut self, context: ContextId) {
        let Some(backward) = self.backwards.get_mut(&context) else { return };
        let commits = backward.commits_next() && backward.balance == 0;
        backward.last.mine = false;
        if commits {
            backward.last.done = true;
            let parent = backward.parent.take();
            return self.settle(context, true, parent);
        }
        match (backward.parent.take(), backward.phase) {
            (Some(task), phase) => {
                backward.last.spent |= backward.balance != 0;
                let answer = Answer {
                    engaged: std::mem::take(&mut backward.first),
                    balance: std::mem::take(&mut backward.balance),
                    unreached: std::mem::take(&mut backward.unreached),
                    committed: backward.last.done,
                    recalled: backward.last.recalled,
                    failed_rank: backward.failed.as_ref().map(|f| f.0),
                    ..Answer::default()
                };
                let settled = matches!(phase, Phase::Settling { .. });
                let outcome = match &backward.failed {
                    Some((_, error)) if !settled => Err(error.clone()),
                    _ => Ok(()),
                };
                if settled {
                    self.backwards.remove(&context);
                }
                self.answer(task, answer, outcome);
            }
            (None, _) if !backward.root => {}
            (None, Phase::Marking) if backward.failed.is_none() => {
                backward.phase = Phase::Flowing;
                backward.inbox.push(Input::SeedRoots);
                self.pump(context);
            }
            (None, Phase::Settling { commit }) => self.finish_backward(context, commit),
            (None, _) => {
                // Its caller was too late.
                backward.failed.take_if(|_| backward.last.done && backward.last.given_up.is_some());
                let commit = backward.failed.is_none() && backward.balance == 0;
                self.settle(context, commit, None);
            }
        }
    }

    fn settle(&mut self, context: ContextId, commit: bool, parent: Option<TaskId>) {
        let Some(backward) = self.backwards.get_mut(&context) else { return };
        backward.phase = Phase::Settling { commit };
        backward.parent = parent;
        backward.inbox = vec![if commit { Input::Commit } else { Input::Abort }];
        let of = (backward.number, backward.manner);
        let lost = commit && mutant::is(Mutant::SkipCommit);
        let children: Vec<u32> = backward.children.iter().copied().filter(|_| !lost).collect();
        backward.outstanding += children.len();
        for child in children {
            let part = if commit { Part::Commit } else { Part::Abort };
            self.send_part(context, of, child, part, Vec::new(), P::default());
        }
        self.pump(context);
    }

    fn finish_backward(&mut self, context: ContextId, commit: bool) {
        let Some(backward) = self.backwards.remove(&context) else { return };
        let result = match backward.failed {
            Some((rank, source)) => Err(ErrorKind::Backward {
                context: context.to_string(),
                backward: backward.number,
                rank,
                source,
            }
            .into()),
            None if commit => Ok(()),
            None => {
                let mut calls = backward.unreached;
                calls.sort();
                Err(ErrorKind::UnreachedCalls { calls }.into())
            }
        };
        self.actions.push(Action::BackwardDone { context, result });
    }
}

//! Steps: one round where each owner applies what it has, two where all must agree first.

use std::borrow::{Borrow, Cow};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::ask::{self, Answers, Asked, Asking};
use super::changes::ChangedOptions;
use super::options::{NotFinite, StepOptions};
use super::owner::{Extras, Prepared, apply_step, cancel_round, parameter_versions, prepare_step, step_optimizer};
use super::report::{OwnerReport, StepReport};
use super::tree::Passed;
use super::{DistributedOptimizer, Owner};
use crate::dist::context::Context;
use crate::optim::Clip;
use crate::protocol::{ContextId, RequestId, Turn};
use crate::rpc::Call;
use crate::{ErrorKind, Result};

impl DistributedOptimizer {
    /// Applies the gradients of a context on all owners, all at once, with the options as they are now. Targeted; blocks until all have answered.
    ///
    /// # Errors
    /// - [`ErrorKind::BackwardInFlight`], [`ErrorKind::ContextReleased`], before anything is sent.
    /// - [`ErrorKind::Owners`] with every owner that failed, what it said, which owners did update, and which may have.
    pub fn step(&self, context: &Context) -> Result<StepReport> {
        self.step_with(context, &StepOptions::default())
    }

    /// As [`step`](Self::step), with options.
    ///
    /// # Errors
    /// As [`step`](Self::step); with two rounds nothing was applied unless the error names owners that updated, or are in doubt.
    /// [`ErrorKind::NotFinite`]; [`ErrorKind::Stale`] within [`ErrorKind::Owners`]; [`ErrorKind::OptionValue`], [`ErrorKind::Argument`] for the options.
    pub fn step_with(&self, context: &Context, options: &StepOptions) -> Result<StepReport> {
        self.step_many(&[context], options)
    }

    /// Applies the sums of the gradients of several contexts, added in the order given, in one step: accumulation over several forward and
    /// backward passes. (Several backwards in one context accumulate by themselves.)
    ///
    /// # Errors
    /// As [`step_with`](Self::step_with); [`ErrorKind::Argument`] for no context, or the same one twice.
    pub fn step_many<C: Borrow<Context>>(&self, contexts: &[C], options: &StepOptions) -> Result<StepReport> {
        self.begin(contexts, Cow::Borrowed(options), true)?.wait()
    }

    /// Begins a step; the future gives its report. Targeted; blocks only while the window to an owner is full.
    ///
    /// Owners start at once. A step of two rounds enters its second when the future is waited for; if it is dropped instead, nothing is applied. The
    /// context is borrowed as long: its gradients must be there.
    ///
    /// # Errors
    /// As [`step_with`](Self::step_with) for what is known at once.
    pub fn step_async<'a>(&'a self, context: &'a Context, options: &StepOptions) -> Result<StepFuture<'a>> {
        self.begin(&[context], Cow::Owned(options.clone()), false)
    }

    /// The version of each parameter now, in the order of the list: the number of its updates. Targeted; asks all owners at once; blocks until all have answered.
    ///
    /// # Errors
    /// [`ErrorKind::Owners`].
    pub fn versions(&self) -> Result<Vec<u64>> {
        let asked = self.ask_all(parameter_versions, &Asking::default(), |_, bytes| {
            crate::wire::write(&(self.id,), bytes)
        });
        let answers = ask::gather("versions", ask::collect::<Vec<(u32, u64)>>(asked), false)?;
        let mut versions = answers.concat();
        versions.sort_by_key(|v| v.0);
        Ok(versions.into_iter().map(|v| v.1).collect())
    }

    fn operation(&self) -> String {
        format!("{}: step", self.rules())
    }

    /// The rules of its groups, for an error.
    fn rules(&self) -> String {
        let mut names: Vec<&str> = Vec::new();
        for name in self.specs.iter().map(|spec| spec.name()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.join(" and ")
    }

    fn begin<'a, C: Borrow<Context>>(&'a self, contexts: &[C], options: Cow<'a, StepOptions>, waits: bool) -> Result<StepFuture<'a>> {
        let runtime = &self.caller.runtime;
        options.check_for(|| self.operation(), self.parameters.len())?;
        let contexts: SmallVec<[ContextId; 2]> = contexts.iter().map(|c| c.borrow().id()).collect();
        runtime.check_contexts("step", &contexts)?;
        for (place, &context) in contexts.iter().enumerate() {
            if contexts[..place].contains(&context) {
                return Err(argument(format!("context {context} twice; its gradients would count twice")));
            }
        }
        let Some(&first) = contexts.first() else {
            return Err(argument("no context to take gradients from".into()));
        };
        let mut future = StepFuture {
            optimizer: self,
            contexts,
            options,
            stage: Stage::Done,
        };
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        future.stage = if future.options.two_rounds() {
            Stage::Preparing(ticket, future.prepare(ticket))
        } else {
            Stage::Applying(future.apply_at_once(first, waits))
        };
        Ok(future)
    }

    /// Options that an owner may not have yet.
    pub(super) fn changed(&self, owner: &Owner) -> Option<ChangedOptions> {
        self.changes.after(owner.made.load(Ordering::Relaxed))
    }

    /// Owners' reports with the places of their parameters, which don't travel.
    fn placed(&self, mut reports: Vec<OwnerReport>) -> Vec<OwnerReport> {
        for report in &mut reports {
            if let Some(owner) = self.owner(report.rank) {
                report.places = Arc::clone(&owner.places);
            }
        }
        reports
    }

    /// Options that some owner may not have yet.
    fn changed_anywhere(&self) -> Option<ChangedOptions> {
        let made = self.owners.iter().map(|o| o.made.load(Ordering::Relaxed)).min();
        self.changes.after(made.unwrap_or(0))
    }

    /// An owner that has done what it was asked has made all changes.
    pub(super) fn note_made<R>(&self, (rank, answer): &(u32, Result<R>)) {
        if answer.is_ok()
            && let Some(owner) = self.owner(*rank)
        {
            owner.made.store(self.changes.last(), Ordering::Relaxed);
        }
    }

    fn owner(&self, rank: u32) -> Option<&Owner> {
        let place = self.owners.binary_search_by_key(&rank, |o| o.rank).ok()?;
        self.owners.get(place)
    }

    /// There will be no second round.
    pub(super) fn cancel(&self, rank: u32, ticket: u64, kept: Option<RequestId>) {
        let asking = Asking {
            turn: kept.map_or(Turn::Take, Turn::End),
            ..Asking::default()
        };
        self.tell(rank, || {
            self.ask(rank, cancel_round(), &asking, |bytes| crate::wire::write(&(self.id, ticket), bytes))
                .map(drop)
        });
    }
}

/// A step under way.
#[must_use = "a step that isn't waited for loses its error; one of two rounds applies nothing"]
#[derive(Debug)]
pub struct StepFuture<'a> {
    optimizer: &'a DistributedOptimizer,
    contexts: SmallVec<[ContextId; 2]>,
    options: Cow<'a, StepOptions>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Owners apply what they have.
    Applying(Round),
    /// Owners look at what they have, under the number of this step.
    Preparing(u64, Round),
    Done,
}

/// Who was asked.
#[derive(Debug)]
enum Round {
    Each(Asked),
    /// The head of the tree.
    Tree(Result<Call>),
    /// Nobody yet: one owner after another, when it is waited for.
    InTurn,
}

/// An owner and, if it keeps its turn, the request that it does so for.
type Kept = (u32, Option<RequestId>);

/// What a first round found.
struct Found {
    report: StepReport,
    not_finite: Vec<u32>,
}

impl StepFuture<'_> {
    /// Whether all owners have answered in this round, so that [`wait`](Self::wait) doesn't wait for it. Local; never blocks.
    pub fn is_done(&self) -> bool {
        let is_done = |call: &Result<Call>| call.as_ref().map_or(true, |call| call.slot.is_done());
        match &self.stage {
            Stage::Applying(round) | Stage::Preparing(_, round) => match round {
                Round::Each(asked) => asked.iter().all(|(_, call)| is_done(call)),
                Round::Tree(call) => is_done(call),
                Round::InTurn => true,
            },
            Stage::Done => true,
        }
    }

    /// The report. Blocks until all owners have answered, twice if the step takes two rounds.
    ///
    /// # Errors
    /// As [`DistributedOptimizer::step_with`].
    pub fn wait(mut self) -> Result<StepReport> {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Applying(round) => self.applied(round, 1.0),
            Stage::Preparing(ticket, round) => self.second_round(ticket, round),
            Stage::Done => Err(argument("the step is over".into())),
        }
    }

    fn apply_at_once(&self, context: ContextId, waits: bool) -> Round {
        let (optimizer, options) = (self.optimizer, &self.options);
        let (more, clamp) = (&self.contexts[1..], options.clamp());
        let extras = (!more.is_empty() || clamp.is_some() || options.expected.is_some()).then(|| Extras {
            contexts: more.to_vec(),
            clamp,
            expected: options.expected.clone(),
        });
        let asking = Asking {
            turn: Turn::Take,
            gradients_of: Some(context),
            limit: options.timeout,
            // The only owner, if it is this rank, does its part at once.
            at_once: waits && optimizer.owners.len() == 1,
        };
        if optimizer.has_tree() {
            let changed = optimizer.changed_anywhere();
            let passed = Passed::Step { context, changed, extras };
            return Round::Tree(optimizer.ask_tree(&passed, options));
        }
        Round::Each(optimizer.ask_all(step_optimizer, &asking, |place, bytes| {
            let changed = optimizer.changed(&optimizer.owners[place]);
            crate::wire::write(&(optimizer.id, context, changed, &extras), bytes)
        }))
    }

    fn prepare(&self, ticket: u64) -> Round {
        let (optimizer, options) = (self.optimizer, &self.options);
        if options.expected.is_some() {
            return Round::InTurn;
        }
        if optimizer.has_tree() {
            let passed = Passed::Prepare {
                ticket,
                contexts: self.contexts.to_vec(),
                changed: optimizer.changed_anywhere(),
                norm: options.norm(),
            };
            return Round::Tree(optimizer.ask_tree(&passed, options));
        }
        Round::Each(
            optimizer
                .owners
                .iter()
                .map(|o| self.prepare_on(o, ticket, Turn::Take, false))
                .collect(),
        )
    }

    fn prepare_on(&self, owner: &Owner, ticket: u64, turn: Turn, at_once: bool) -> (u32, Result<Call>) {
        let (optimizer, options) = (self.optimizer, &self.options);
        let asking = Asking {
            turn,
            gradients_of: self.contexts.first().copied(),
            limit: options.timeout,
            at_once,
        };
        let call = optimizer.ask(owner.rank, prepare_step(), &asking, |bytes| {
            let (norm, expected, changed) = (options.norm(), &options.expected, optimizer.changed(owner));
            crate::wire::write(&(optimizer.id, ticket, &self.contexts[..], changed, norm, expected), bytes)
        });
        (owner.rank, call)
    }

    /// Asks owner after owner to keep its turn, in ascending order of ranks, so that clients can't wait for each other; until one refuses.
    fn prepare_in_turn(&self, ticket: u64) -> (Vec<Kept>, Answers<Prepared>) {
        let (mut kept, mut answers) = (Vec::new(), Answers::new());
        for owner in &self.optimizer.owners {
            let (rank, call) = self.prepare_on(owner, ticket, Turn::Keep, true);
            kept.push((rank, call.as_ref().ok().map(|call| call.request)));
            let answer = call.and_then(Call::result::<Prepared>);
            let failed = answer.is_err();
            answers.push((rank, answer));
            if failed {
                break;
            }
        }
        (kept, answers)
    }

    fn applied(&self, round: Round, scale: f64) -> Result<StepReport> {
        let optimizer = self.optimizer;
        let operation = || optimizer.operation();
        match round {
            Round::Tree(call) => {
                let all = optimizer.gather_tree(operation, call.and_then(Call::result), true)?;
                Ok(StepReport::of_tree(all.summary, optimizer.placed(all.rows), scale))
            }
            Round::Each(asked) => {
                let answers = ask::answers::<OwnerReport>(asked).inspect(|answer| optimizer.note_made(answer));
                Ok(StepReport::of_rows(optimizer.placed(ask::gather(operation, answers, true)?), scale))
            }
            Round::InTurn => Err(argument("a second round in turn".into())),
        }
    }

    /// What the first round found, and which owners keep their turns.
    fn found(&self, ticket: u64, round: Round) -> (Vec<Kept>, Result<Found>) {
        let optimizer = self.optimizer;
        let operation = || format!("{} (nothing was applied)", optimizer.operation());
        let everyone = || optimizer.owners.iter().map(|o| (o.rank, None)).collect();
        let (kept, answers) = match round {
            Round::Tree(call) => {
                let all = optimizer.gather_tree(operation, call.and_then(Call::result), false);
                let found = all.map(|all| Found {
                    report: StepReport::of_tree(all.summary, optimizer.placed(all.rows), 1.0),
                    not_finite: all.not_finite,
                });
                return (everyone(), found.map_err(ask::without_updates));
            }
            Round::Each(asked) => (everyone(), ask::collect::<Prepared>(asked)),
            Round::InTurn => self.prepare_in_turn(ticket),
        };
        answers.iter().for_each(|answer| optimizer.note_made(answer));
        let found = ask::gather(operation, answers, false).map(|prepared| Found {
            not_finite: prepared.iter().flat_map(|p| p.not_finite.clone()).collect(),
            report: StepReport::of_rows(optimizer.placed(prepared.into_iter().map(|p| p.report).collect()), 1.0),
        });
        (kept, found.map_err(ask::without_updates))
    }

    fn second_round(&self, ticket: u64, round: Round) -> Result<StepReport> {
        let optimizer = self.optimizer;
        let (kept, found) = self.found(ticket, round);
        let cancel = || kept.iter().for_each(|&(rank, request)| optimizer.cancel(rank, ticket, request));
        let Found {
            mut report,
            mut not_finite,
        } = found.inspect_err(|_| cancel())?;
        if !not_finite.is_empty() && self.options.not_finite != NotFinite::Apply {
            cancel();
            not_finite.sort_unstable();
            return match self.options.not_finite {
                NotFinite::Refuse => Err(ErrorKind::NotFinite {
                    optimizer: optimizer.rules(),
                    parameters: not_finite.iter().map(|&place| self.describe(place as usize)).collect(),
                }
                .into()),
                _ => {
                    report.not_finite = not_finite.into_iter().map(|place| place as usize).collect();
                    Ok(report)
                }
            };
        }
        let (scale, clamp) = match self.options.clip {
            Some(Clip::Norm { max, .. }) => (Clip::coefficient(max, report.norm()), None),
            _ => (1.0, self.options.clamp()),
        };
        let in_turn = kept.iter().any(|k| k.1.is_some());
        if optimizer.has_tree() && !in_turn {
            let passed = Passed::Apply { ticket, scale, clamp };
            let options = StepOptions {
                timeout: None,
                ..StepOptions::clone(&self.options)
            };
            return self.applied(Round::Tree(optimizer.ask_tree(&passed, &options)), scale);
        }
        let asked = kept.into_iter().map(|(rank, request)| {
            let asking = Asking {
                turn: request.map_or(Turn::Take, Turn::End),
                ..Asking::default()
            };
            let call = optimizer.ask(rank, apply_step(), &asking, |bytes| {
                crate::wire::write(&(optimizer.id, ticket, scale, clamp), bytes)
            });
            (rank, call)
        });
        self.applied(Round::Each(asked.collect()), scale)
    }

    /// A parameter, for an error.
    fn describe(&self, place: usize) -> String {
        match self.optimizer.parameters.get(place) {
            Some(p) => format!("{place} (`{}` on rank {})", p.name, p.rref.owner()),
            None => place.to_string(),
        }
    }
}

impl Drop for StepFuture<'_> {
    fn drop(&mut self) {
        if let Stage::Preparing(ticket, Round::Each(_) | Round::Tree(_)) = self.stage {
            self.optimizer
                .owners
                .iter()
                .for_each(|o| self.optimizer.cancel(o.rank, ticket, None));
        }
    }
}

fn argument(what: String) -> crate::Error {
    ErrorKind::Argument { op: "step".into(), what }.into()
}

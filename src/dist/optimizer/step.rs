//! Steps: one round where each owner applies what it has, two where all must agree first.

use std::borrow::Borrow;
use std::sync::atomic::Ordering;

use super::ask::{self, Asked, Asking};
use super::changes::ChangedOptions;
use super::options::{NotFinite, StepOptions};
use super::owner::{Extras, Prepared, apply_step, cancel_round, parameter_versions, prepare_step, step_optimizer};
use super::report::{OwnerReport, StepReport};
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
        self.begin(contexts, options.clone(), true)?.wait()
    }

    /// Begins a step; the future gives its report. Targeted; blocks only while the window to an owner is full.
    ///
    /// Owners start at once. A step of two rounds enters its second when the future is waited for; if it is dropped instead, nothing is applied. The
    /// context is borrowed as long: its gradients must be there.
    ///
    /// # Errors
    /// As [`step_with`](Self::step_with) for what is known at once.
    pub fn step_async<'a>(&'a self, context: &'a Context, options: &StepOptions) -> Result<StepFuture<'a>> {
        self.begin(&[context], options.clone(), false)
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
        format!("{}: step", self.specs[0].name())
    }

    fn begin<C: Borrow<Context>>(&self, contexts: &[C], options: StepOptions, waits: bool) -> Result<StepFuture<'_>> {
        let runtime = &self.caller.runtime;
        runtime.check_alive("step")?;
        options.check_for(&self.operation(), self.parameters.len())?;
        let contexts: Vec<ContextId> = contexts.iter().map(|c| c.borrow().id()).collect();
        for (place, &context) in contexts.iter().enumerate() {
            runtime.check_context("step", context)?;
            runtime.check_gradients("step", context)?;
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
        future.stage = if !future.options.two_rounds() {
            Stage::Applying(self.begin_simple(first, &future, waits))
        } else {
            let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
            let asked = match future.options.expected {
                // One after another, when it is waited for.
                Some(_) => Vec::new(),
                None => {
                    let places = 0..self.owners.len();
                    places.map(|place| future.prepare(ticket, place, Turn::Take, false)).collect()
                }
            };
            Stage::Preparing { ticket, asked }
        };
        Ok(future)
    }

    fn begin_simple(&self, context: ContextId, future: &StepFuture<'_>, waits: bool) -> Asked {
        let options = &future.options;
        let asking = Asking {
            turn: Turn::Take,
            gradients_of: Some(context),
            limit: options.timeout,
            // The only owner, if it is this rank, does its part at once.
            at_once: waits && self.owners.len() == 1,
        };
        let (more, clamp) = (&future.contexts[1..], options.clamp());
        let extras = (!more.is_empty() || clamp.is_some() || options.expected.is_some()).then(|| Extras {
            contexts: more.to_vec(),
            clamp,
            expected: options.expected.clone(),
        });
        self.ask_all(step_optimizer, &asking, |place, bytes| {
            crate::wire::write(&(self.id, context, self.changed(&self.owners[place]), &extras), bytes)
        })
    }

    /// Options that an owner may not have yet.
    pub(super) fn changed(&self, owner: &Owner) -> Option<ChangedOptions> {
        self.changes.after(owner.made.load(Ordering::Relaxed))
    }

    /// These owners have answered: they have made all changes.
    pub(super) fn note_made<R>(&self, answers: &[(u32, Result<R>)]) {
        for owner in &self.owners {
            if answers.iter().any(|(rank, answer)| *rank == owner.rank && answer.is_ok()) {
                owner.made.store(self.changes.last(), Ordering::Relaxed);
            }
        }
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
    contexts: Vec<ContextId>,
    options: StepOptions,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Owners apply what they have.
    Applying(Asked),
    /// Owners look at what they have.
    Preparing {
        ticket: u64,
        asked: Asked,
    },
    Done,
}

/// What became of a first round on an owner: what it found, and the request whose turn it keeps.
type Kept = (u32, Option<RequestId>);

impl StepFuture<'_> {
    /// Whether all owners have answered in this round, so that [`wait`](Self::wait) doesn't wait for it. Local; never blocks.
    pub fn is_done(&self) -> bool {
        match &self.stage {
            Stage::Applying(asked) | Stage::Preparing { asked, .. } => {
                asked.iter().all(|(_, call)| call.as_ref().map_or(true, |call| call.slot.is_done()))
            }
            Stage::Done => true,
        }
    }

    /// The report. Blocks until all owners have answered, twice if the step takes two rounds.
    ///
    /// # Errors
    /// As [`DistributedOptimizer::step_with`].
    pub fn wait(mut self) -> Result<StepReport> {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Applying(asked) => self.applied(asked, 1.0),
            Stage::Preparing { ticket, asked } => self.second_round(ticket, asked),
            Stage::Done => Err(argument("the step is over".into())),
        }
    }

    fn applied(&self, asked: Asked, scale: f64) -> Result<StepReport> {
        let answers = ask::collect::<OwnerReport>(asked);
        self.optimizer.note_made(&answers);
        Ok(StepReport {
            owners: ask::gather(&self.optimizer.operation(), answers, true)?,
            not_finite: Vec::new(),
            scale,
        })
    }

    fn prepare(&self, ticket: u64, place: usize, turn: Turn, at_once: bool) -> (u32, Result<Call>) {
        let optimizer = self.optimizer;
        let owner = &optimizer.owners[place];
        let asking = Asking {
            turn,
            gradients_of: self.contexts.first().copied(),
            limit: self.options.timeout,
            at_once,
        };
        let call = optimizer.ask(owner.rank, prepare_step(), &asking, |bytes| {
            let (norm, expected) = (self.options.norm(), &self.options.expected);
            let changed = optimizer.changed(owner);
            crate::wire::write(&(optimizer.id, ticket, &self.contexts, changed, norm, expected), bytes)
        });
        (owner.rank, call)
    }

    /// Asks owner after owner to keep its turn, in ascending order of ranks, so that clients can't wait for each other; until one refuses.
    fn prepare_in_turn(&self, ticket: u64) -> (Vec<Kept>, Vec<(u32, Result<Prepared>)>) {
        let (mut kept, mut answers) = (Vec::new(), Vec::new());
        for place in 0..self.optimizer.owners.len() {
            let (rank, call) = self.prepare(ticket, place, Turn::Keep, true);
            kept.push((rank, call.as_ref().ok().map(|call| call.request)));
            let answer = call.and_then(ask::answer::<Prepared>);
            let failed = answer.is_err();
            answers.push((rank, answer));
            if failed {
                break;
            }
        }
        (kept, answers)
    }

    fn second_round(&self, ticket: u64, asked: Asked) -> Result<StepReport> {
        let optimizer = self.optimizer;
        let (kept, answers) = match self.options.expected {
            Some(_) => self.prepare_in_turn(ticket),
            None => {
                let kept = asked.iter().map(|(rank, _)| (*rank, None)).collect();
                (kept, ask::collect::<Prepared>(asked))
            }
        };
        optimizer.note_made(&answers);
        let cancel = || kept.iter().for_each(|&(rank, request)| optimizer.cancel(rank, ticket, request));
        let operation = optimizer.operation();
        let checking = format!("{operation} (nothing was applied)");
        let prepared = ask::gather(&checking, answers, false)
            .map_err(ask::without_updates)
            .inspect_err(|_| cancel())?;
        let not_finite = places_of(&prepared);
        let mut found = StepReport {
            owners: prepared.into_iter().map(|p| p.report).collect(),
            not_finite: Vec::new(),
            scale: 1.0,
        };
        if !not_finite.is_empty() && self.options.not_finite != NotFinite::Apply {
            cancel();
            return match self.options.not_finite {
                NotFinite::Refuse => Err(ErrorKind::NotFinite {
                    optimizer: optimizer.specs[0].name().into(),
                    parameters: not_finite.iter().map(|&place| self.describe(place)).collect(),
                }
                .into()),
                _ => {
                    found.not_finite = not_finite;
                    Ok(found)
                }
            };
        }
        if let Some(Clip::Norm { max, .. }) = self.options.clip {
            found.scale = Clip::coefficient(max, found.norm());
        }
        let (scale, clamp) = (found.scale, self.options.clamp());
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
        self.applied(asked.collect(), scale)
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
        if let Stage::Preparing { ticket, asked } = &self.stage {
            asked.iter().for_each(|(rank, _)| self.optimizer.cancel(*rank, *ticket, None));
        }
    }
}

fn places_of(prepared: &[Prepared]) -> Vec<usize> {
    let mut places: Vec<usize> = prepared.iter().flat_map(|p| &p.not_finite).map(|&p| p as usize).collect();
    places.sort_unstable();
    places
}

fn argument(what: String) -> crate::Error {
    ErrorKind::Argument { op: "step".into(), what }.into()
}

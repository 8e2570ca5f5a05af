//! Steps over many owners by a tree: each owner passes a request on to its children, does its own part, and puts the answers together.
//!
//! Owners stand in the order in which they joined; those below owner `i` are `k * i + 1` to `k * i + k`, as in a heap. So an owner that joins
//! changes what one other owner knows, and the client's work in a step is one message.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::ask::{self, Asking, Operation, ask};
use super::changes::ChangedOptions;
use super::options::{ExpectedVersions, StepOptions};
use super::owner::{Extras, Prepared, apply_step, find, prepare_step, set_children, step_optimizer};
use super::report::{OwnerReport, StepSummary};
use super::{DistributedOptimizer, Owner};
use crate::optim::Norm;
use crate::protocol::{ContextId, OptimizerId, Turn};
use crate::rpc::{Call, Calls, Scope};
use crate::{Error, ErrorKind, OwnerFailure, Result};

/// What is passed on.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Passed {
    Step {
        context: ContextId,
        changed: Option<ChangedOptions>,
        extras: Option<Extras>,
    },
    Prepare {
        ticket: u64,
        contexts: Vec<ContextId>,
        changed: Option<ChangedOptions>,
        norm: Norm,
    },
    Apply {
        ticket: u64,
        scale: f64,
        clamp: Option<f64>,
    },
}

/// What came of it, on an owner and all below it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Gathered {
    pub summary: StepSummary,
    /// A row an owner, if rows were asked for.
    pub rows: Vec<OwnerReport>,
    /// Places of parameters whose gradients aren't finite.
    pub not_finite: Vec<u32>,
    pub failures: Vec<OwnerFailure>,
}

impl Gathered {
    fn add(&mut self, other: Gathered) {
        self.summary.add(&other.summary);
        self.rows.extend(other.rows);
        self.not_finite.extend(other.not_finite);
        self.failures.extend(other.failures);
    }

    fn of(report: OwnerReport, not_finite: Vec<u32>, rows: bool) -> Self {
        Gathered {
            summary: StepSummary::of(&report),
            rows: if rows { vec![report] } else { Vec::new() },
            not_finite,
            failures: Vec::new(),
        }
    }

    fn failed(rank: u32, error: Error) -> Self {
        Gathered {
            failures: vec![OwnerFailure {
                rank,
                error: ask::unwrapped(error),
            }],
            ..Gathered::default()
        }
    }
}

impl Passed {
    /// Asks this rank to do its own part, when its turn comes.
    fn ask_myself(&self, scope: &Scope, id: OptimizerId) -> Result<Call> {
        let (caller, me) = (scope.caller(), scope.rank());
        let asking = |gradients_of| Asking {
            turn: Turn::Take,
            gradients_of,
            ..Asking::default()
        };
        match self {
            Passed::Step { context, changed, extras } => ask(caller, me, step_optimizer(), &asking(Some(*context)), |bytes| {
                crate::wire::write(&(id, context, changed, extras), bytes)
            }),
            Passed::Prepare {
                ticket,
                contexts,
                changed,
                norm,
            } => ask(caller, me, prepare_step(), &asking(contexts.first().copied()), |bytes| {
                crate::wire::write(&(id, ticket, contexts, changed, norm, None::<ExpectedVersions>), bytes)
            }),
            Passed::Apply { ticket, scale, clamp } => ask(caller, me, apply_step(), &asking(None), |bytes| {
                crate::wire::write(&(id, ticket, scale, clamp), bytes)
            }),
        }
    }

    /// What this rank's own part came to.
    fn answer(&self, call: Call, rows: bool) -> Result<Gathered> {
        Ok(match self {
            Passed::Step { .. } | Passed::Apply { .. } => Gathered::of(call.result()?, Vec::new(), rows),
            Passed::Prepare { .. } => {
                let Prepared { report, not_finite } = call.result()?;
                Gathered::of(report, not_finite, rows)
            }
        })
    }
}

crate::remote! {
    /// Passes a request on to the owners below this one, does its own part, and puts the answers together. It waits in no queue itself, so that
    /// trees of several clients can't wait for each other.
    pub(super) fn pass_on(scope: &Scope, id: OptimizerId, number: u64, passed: Passed, rows: bool) -> Result<Gathered> {
        let owner = find(scope, "step", id)?;
        owner.wait_for_pass(scope, number)?;
        let below: Vec<_> = owner
            .children()
            .into_iter()
            .map(|child| (child, scope.call_async(child, pass_on, (id, number, &passed, rows))))
            .collect();
        let me = scope.rank();
        let mine = passed.ask_myself(scope, id);
        owner.has_passed(number);
        let mut all = mine
            .and_then(|call| passed.answer(call, rows))
            .unwrap_or_else(|error| Gathered::failed(me, error));
        for (child, future) in below {
            all.add(future.and_then(|f| f.wait()).unwrap_or_else(|error| Gathered::failed(child, error)));
        }
        Ok(all)
    }
}

impl DistributedOptimizer {
    /// From now on steps go over a tree of owners, each of which passes them on to `fan_out` others; 0 asks each owner directly, which is the default.
    /// Targeted; asks all owners at once; blocks until all have answered.
    ///
    /// In a tree the client's work in a step doesn't grow with the number of owners, and the time grows with its logarithm. The report is a summary, with
    /// every failure; [`StepOptions::rows`] asks for a row an owner. Its norm is summed along the tree, so that its bits depend on
    /// the tree. A step that must agree on expected versions asks owners directly.
    ///
    /// # Errors
    /// [`ErrorKind::Owners`]; steps ask owners directly then.
    pub fn set_fan_out(&mut self, fan_out: usize) -> Result<()> {
        self.fan_out = 0;
        let mut order: Vec<&Owner> = self.owners.iter().collect();
        order.sort_by_key(|o| o.joined);
        let order: Vec<u32> = order.into_iter().map(|o| o.rank).collect();
        let told = self.ask_all(set_children, &Asking::default(), |place, bytes| {
            let first = fan_out.saturating_mul(self.owners[place].joined).saturating_add(1).min(order.len());
            let children = &order[first..first.saturating_add(fan_out).min(order.len())];
            crate::wire::write(&(self.id, children, self.passes.load(Ordering::Relaxed)), bytes)
        });
        ask::gather("set_fan_out", ask::collect::<()>(told), false)?;
        self.fan_out = fan_out;
        Ok(())
    }

    /// Whether steps go over a tree.
    pub(super) fn has_tree(&self) -> bool {
        self.fan_out > 0
    }

    /// Asks the owner at the head of the tree.
    pub(super) fn ask_tree(&self, passed: &Passed, options: &StepOptions) -> Result<Call> {
        let asking = Asking {
            limit: options.timeout,
            ..Asking::default()
        };
        // A number that was given out must arrive, so it waits for no window.
        let number = self.passes.fetch_add(1, Ordering::Relaxed);
        ask(&self.silent(), self.head(), pass_on(), &asking, |bytes| {
            crate::wire::write(&(self.id, number, passed, options.rows), bytes)
        })
    }

    fn head(&self) -> u32 {
        self.owners.iter().find(|o| o.joined == 0).map_or(0, |o| o.rank)
    }

    /// All that owners answered, or every failure. With `applies`, owners below one that didn't answer may have done what they were asked.
    pub(super) fn gather_tree(&self, operation: impl Operation, answer: Result<Gathered>, applies: bool) -> Result<Gathered> {
        let mut all = answer.unwrap_or_else(|error| Gathered::failed(self.head(), error));
        if all.failures.is_empty() {
            self.owners
                .iter()
                .for_each(|o| o.made.store(self.changes.last(), Ordering::Relaxed));
            return Ok(all);
        }
        all.failures.sort_by_key(|f| f.rank);
        let failed = |rank: u32| all.failures.iter().find(|f| f.rank == rank);
        let (mut updated, mut in_doubt) = (Vec::new(), Vec::new());
        for owner in &self.owners {
            // The nearest owner at or above it that failed.
            let mut joined = Some(owner.joined);
            let failure = loop {
                let Some(j) = joined else { break None };
                let rank = self.owners.iter().find(|o| o.joined == j).map_or(owner.rank, |o| o.rank);
                match failed(rank) {
                    // An owner that refused its own part has passed the request on.
                    Some(f) if j == owner.joined || is_lost(&f.error) => break Some(f),
                    _ => joined = j.checked_sub(1).map(|j| j / self.fan_out),
                }
            };
            match failure {
                None => updated.push(owner.rank),
                Some(f) if applies && is_lost(&f.error) => in_doubt.push(owner.rank),
                Some(_) => {}
            }
        }
        Err(ErrorKind::Owners {
            operation: operation.name(),
            owners: self.owners.len(),
            failures: all.failures,
            updated,
            in_doubt,
        }
        .into())
    }
}

/// Whether nothing is known of what the owner did.
fn is_lost(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Timeout { .. } | ErrorKind::ShutDown { .. })
}

//! Asking owners, all at once, and making one result of their answers.

use std::time::Duration;

use serde::de::DeserializeOwned;
use smallvec::SmallVec;

use super::DistributedOptimizer;
use crate::protocol::{ContextId, Gate, Turn};
use crate::rpc::{Call, Caller, Issue, Manner, Recorded, Remote};
use crate::runtime::Windowed;
use crate::{Error, ErrorKind, OwnerFailure, Result};

/// How an owner is asked.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asking {
    pub turn: Turn,
    pub gradients_of: Option<ContextId>,
    pub limit: Option<Duration>,
    /// The asker waits for the answer before it does anything else.
    pub at_once: bool,
}

impl Asking {
    /// In the owner's queue of steps.
    pub(crate) const QUEUED: Self = Asking {
        turn: Turn::Take,
        gradients_of: None,
        limit: None,
        at_once: false,
    };
}

/// Owners that were asked, and what it takes to hear their answers.
pub(crate) type Asked = SmallVec<[(u32, Result<Call>); 1]>;

/// What each of them answered.
pub(crate) type Answers<R> = SmallVec<[(u32, Result<R>); 1]>;

/// Asks an owner.
pub(crate) fn ask<A, R>(
    caller: &Caller,
    owner: u32,
    f: Remote<A, R>,
    asking: &Asking,
    write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
) -> Result<Call> {
    let gate = Gate {
        turn: asking.turn,
        gradients_of: asking.gradients_of,
    };
    let issue = Issue {
        to: owner,
        function: f.id()?,
        name: f.name(),
        creates: false,
        gate,
        recorded: Recorded::Never,
        manner: if asking.at_once { Manner::Waits } else { Manner::Goes },
    };
    // What ends a kept turn must not wait for room in a window that is full of requests behind that turn.
    let window = match asking.turn {
        Turn::End(_) => Windowed::Bypass,
        _ => caller.window,
    };
    match (asking.limit, window == caller.window) {
        (None, true) => caller.issue(issue, write),
        (limit, _) => Caller {
            limit: limit.or(caller.limit),
            window,
            ..caller.clone()
        }
        .issue(issue, write),
    }
}

impl DistributedOptimizer {
    pub(super) fn ask<A, R>(
        &self,
        owner: u32,
        f: Remote<A, R>,
        asking: &Asking,
        write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<Call> {
        ask(&self.caller, owner, f, asking, write)
    }

    /// Asks all owners; `write` gets the place of each.
    pub(super) fn ask_all<A, R>(
        &self,
        f: impl Fn() -> Remote<A, R>,
        asking: &Asking,
        write: impl Fn(usize, &mut Vec<u8>) -> Result<()>,
    ) -> Asked {
        let each = self.owners.iter().enumerate();
        each.map(|(place, owner)| (owner.rank, self.ask(owner.rank, f(), asking, |bytes| write(place, bytes))))
            .collect()
    }
}

/// What each owner answers, in the order asked. Blocks until all have.
pub(crate) fn collect<R: DeserializeOwned>(asked: Asked) -> Answers<R> {
    answers(asked).collect()
}

/// As [`collect`], one after the other: blocks for each until it has answered.
pub(super) fn answers<R: DeserializeOwned>(asked: Asked) -> impl ExactSizeIterator<Item = (u32, Result<R>)> {
    asked.into_iter().map(|(rank, call)| (rank, call.and_then(Call::result)))
}

/// All results, or every failure. With `applies`, an owner that hasn't answered in time may have done what it was asked.
pub(crate) fn gather<R>(
    operation: impl Operation,
    answers: impl IntoIterator<Item = (u32, Result<R>), IntoIter: ExactSizeIterator>,
    applies: bool,
) -> Result<Vec<R>> {
    let answers = answers.into_iter();
    let owners = answers.len();
    let mut results = Vec::with_capacity(owners);
    let mut updated: SmallVec<[u32; 8]> = SmallVec::new();
    let (mut failures, mut in_doubt) = (Vec::new(), Vec::new());
    for (rank, answer) in answers {
        match answer {
            Ok(result) => {
                results.push(result);
                updated.push(rank);
            }
            Err(error) => {
                if applies && matches!(error.kind(), ErrorKind::Timeout { .. }) {
                    in_doubt.push(rank);
                }
                let error = unwrapped(error);
                failures.push(OwnerFailure { rank, error });
            }
        }
    }
    if failures.is_empty() {
        return Ok(results);
    }
    Err(ErrorKind::Owners {
        operation: operation.name(),
        owners,
        failures,
        updated: updated.into_vec(),
        in_doubt,
    }
    .into())
}

/// What was asked for, in words that only an error needs.
pub(crate) trait Operation {
    fn name(self) -> String;
}

impl Operation for &str {
    fn name(self) -> String {
        self.into()
    }
}

impl<F: FnOnce() -> String> Operation for F {
    fn name(self) -> String {
        self()
    }
}

/// In a first round, an owner that succeeds has updated nothing.
pub(crate) fn without_updates(error: Error) -> Error {
    match error.kind().clone() {
        ErrorKind::Owners {
            operation,
            owners,
            failures,
            ..
        } => ErrorKind::Owners {
            operation,
            owners,
            failures,
            updated: Vec::new(),
            in_doubt: Vec::new(),
        }
        .into(),
        _ => error,
    }
}

/// What the owner said, without the name of our own function around it: the failure names the rank already.
pub(super) fn unwrapped(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Remote { source, .. } => source.clone(),
        _ => error,
    }
}

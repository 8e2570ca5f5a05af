//! What several owners answered, together.

use crate::{Error, ErrorKind, OwnerFailure, Result};

/// All answers, in the order given, or every failure.
pub(super) fn gather<R>(operation: &str, results: Vec<(u32, Result<R>)>) -> Result<Vec<R>> {
    let owners = results.len();
    let (mut good, mut updated, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, result) in results {
        match result {
            Ok(value) => {
                good.push(value);
                updated.push(rank);
            }
            Err(error) => failures.push(OwnerFailure {
                rank,
                error: unwrapped(error),
            }),
        }
    }
    if failures.is_empty() {
        return Ok(good);
    }
    Err(ErrorKind::Owners {
        operation: operation.into(),
        owners,
        failures,
        updated,
    }
    .into())
}

/// What the owner said, without the name of our own function around it: the failure names the rank already.
fn unwrapped(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Remote { source, .. } | ErrorKind::Creation { source, .. } => unwrapped(source.clone()),
        _ => error,
    }
}

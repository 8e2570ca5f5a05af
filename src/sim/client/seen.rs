//! What a client sees, as it is compared with one rank.

use std::cell::RefCell;
use std::rc::Rc;

use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

/// What a client saw.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Seen {
    /// Elements of tensors, to the bit; an absent gradient is `None`.
    Tensors(Vec<Option<Vec<u64>>>),
    Done,
    /// The kind of an error.
    Failed(&'static str),
    /// What comes after may differ from the same program on one rank: calls were lost, or raced.
    Parted,
}

/// What a client noted: which of its operations, and what came of it.
pub(crate) type Log = Rc<RefCell<Vec<(usize, Seen)>>>;

pub(super) fn bits(tensor: &Tensor) -> Result<Vec<u64>> {
    Ok(tensor.to_vec::<f64>()?.into_iter().map(f64::to_bits).collect())
}

pub(super) fn tensors(of: &[Tensor]) -> Result<Seen> {
    Ok(Seen::Tensors(of.iter().map(|t| bits(t).map(Some)).collect::<Result<_>>()?))
}

/// The kind of an error, without its facts: they name ranks.
pub(super) fn name(kind: &ErrorKind) -> &'static str {
    match kind {
        ErrorKind::User { .. } => "user",
        ErrorKind::GraphFreed { .. } => "graph freed",
        ErrorKind::NoRoots => "no roots",
        ErrorKind::RootWithoutGradient { .. } => "root without gradient",
        ErrorKind::BackwardInFlight { .. } => "backward in flight",
        ErrorKind::ContextReleased { .. } => "context released",
        ErrorKind::NoSuchValue { .. } => "no such value",
        ErrorKind::NotALeaf { .. } => "not a leaf",
        ErrorKind::UnreachedCalls { .. } => "unreached calls",
        ErrorKind::Decode { .. } => "decode",
        ErrorKind::Argument { .. } => "argument",
        ErrorKind::Shape { .. } => "shape",
        _ => "other",
    }
}

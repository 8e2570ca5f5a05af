//! Gradients on one rank: the engine that walks a graph, local `backward`, and a user's own functions.
//!
//! Operations of [`Tensor`] record the graph as they run. [`backward`] walks it from the roots, and leaves gather what
//! reaches them. Over ranks, `dist` drives the same engine: values that came from another rank are boundaries, whose
//! gradients it sends there.

mod engine;
pub mod function;
mod hooks;
mod local;
pub(crate) mod reach;
#[cfg(test)]
mod tests;

pub use crate::tensor::graph::no_grad;
pub(crate) use crate::tensor::graph::{Edge, Key, Node, frame, grad_enabled};
pub(crate) use engine::{Backward, LeafSink};
pub use function::{Function, apply};
pub(crate) use hooks::LeafHooks;
pub use local::backward;
pub(crate) use local::{check_roots, one_like};
pub(crate) use reach::reach;

#[cfg(doc)]
use crate::tensor::Tensor;

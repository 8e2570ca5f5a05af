//! The graph that operations record: nodes, the edges between them, the keys that order them, and the switch that
//! turns recording off. The engine that walks it is [`crate::autograd`].

pub(crate) mod frame;
mod key;
mod node;
mod recording;

pub(crate) use key::Key;
pub(crate) use node::{Edge, Gradients, Kind, Needs, Node};
pub(crate) use recording::grad_enabled;
pub use recording::no_grad;

//! Training over ranks: contexts, backward, optimizers.

mod builtin;
mod context;
mod executor;
mod optimizer;
mod parameters;
mod tables;

pub use context::{BackwardOptions, Context};
pub(crate) use executor::Ranks;
pub use optimizer::{DistributedOptimizer, OwnerReport, StepReport};
pub use parameters::ParameterCalls;
pub(crate) use tables::Tables;

pub use crate::protocol::Mode;

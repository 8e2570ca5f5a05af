//! Training over ranks: contexts, backward, optimizers.

mod builtin;
mod context;
mod counters;
mod executor;
mod in_backward;
mod lbfgs;
mod optimizer;
mod parameters;
mod rows;
mod saved;
mod sent;
mod tables;

pub(crate) use builtin::{assign_tensor, kept, parameter_here, put_tensor, rank_counters};
pub use context::{BackwardOptions, Context};
pub use counters::Counters;
pub(crate) use executor::Ranks;
pub use in_backward::DistributedInBackward;
pub use lbfgs::DistributedLbfgs;
pub(crate) use optimizer::ask::{Answers, Asked, Asking, ask, collect, gather, without_updates};
pub use optimizer::{
    DistributedOptimizer, NotFinite, OwnerReport, ParamGroup, ParameterRef, StepFuture, StepOptions, StepReport, StepSummary,
};
pub use parameters::ParameterCalls;
pub(crate) use rows::{Rows, name_of_rows, numbered};
pub use saved::Saveable;
pub(crate) use saved::{OwnerPart, Staged, States};
pub(crate) use tables::Tables;

pub use crate::protocol::Mode;

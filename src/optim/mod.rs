//! Optimizers: update rules as functions over slices, their options, and the optimizer of one rank.
//!
//! Everything here is local: no MPI, no graph. A rule ([`Rule`]) is its options and one step for one parameter; the rules
//! of `torch.optim` are here under their names ([`names`] lists them), and [`remote_optimizer!`](crate::remote_optimizer) adds a program's
//! own. An [`OptimizerSpec`] is a rule with options, to be named, checked, compared and sent. An [`Optimizer`] applies it to parameters of this
//! rank. [`schedule`]s move learning rates. [`Lbfgs`] isn't such a rule, since it evaluates a closure: [`LbfgsOptimizer`].
//!
//! The arithmetic is one contract: a fixed order of operations, no fused multiply-add, coefficients computed once a step
//! in `f64` without the platform's libm. Loops run as they were compiled for the best instruction set that the processor has, and large
//! parameters may be updated by several threads ([`ComputeThreads`]). Results repeat to the bit on every instruction set and number of threads
//! (`scripts/bits` shows it), and on GPUs. Those of L-BFGS have the bits of the closure.

pub mod arithmetic;
mod checked;
mod clip;
mod erased;
mod flat;
mod float;
mod gpu;
pub mod in_backward;
mod lbfgs;
mod optimizer;
pub mod options;
mod report;
mod rule;
mod rules;
pub mod schedule;
mod spec;
mod state;
mod state_dict;
mod step;
mod sweep;
mod table;
mod threads;
mod together;
mod view;

pub use checked::Checked;
pub use clip::{Clip, Norm};
pub use float::Float;
pub use in_backward::{InBackward, InBackwardOptimizers, optimizer_in_backward, optimizers_in_backward};
pub(crate) use lbfgs::{Ask, Direction, Driver, DriverState, Gathered, Part, Slope, Vectors, add};
pub use lbfgs::{Lbfgs, LbfgsOptimizer, LbfgsReport, LbfgsStop, LineSearch};
pub use optimizer::Optimizer;
pub use report::{ParameterReport, ParameterReports};
pub use rule::{Form, Rows, Rule, StateArray};
pub use rules::*;
pub use spec::OptimizerSpec;
pub(crate) use spec::{changed, lr};
pub use state::ParameterState;
pub use state_dict::{GroupState, StateDict};
pub use step::Step;
pub use table::{Registration, names};
pub(crate) use table::{check, listing};
pub use threads::ComputeThreads;
pub use view::StateView;

#[doc(hidden)]
pub use inventory;

#[cfg(test)]
mod tests;

//! What most programs need: `use rankgrad::prelude::*;`.

pub use crate::autograd::{Function, no_grad};
pub use crate::dist::{BackwardOptions, Context, DistributedOptimizer, Mode, ParamGroup, ParameterCalls, StepOptions};
pub use crate::optim::{Adam, InBackward, Sgd, optimizer_in_backward, optimizers_in_backward};
pub use crate::rpc::{Calls, Future, Scope};
pub use crate::tensor::{DType, Gradient, Tensor};
pub use crate::{Error, ErrorKind, RRef, Result, World, remote};

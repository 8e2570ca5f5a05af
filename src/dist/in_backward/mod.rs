//! The optimizer in backward over ranks: attached on the owners, asked for through references.

mod optimizers;
mod remote;

pub use optimizers::DistributedInBackward;
pub(super) use remote::{Attachment, one};

use crate::Result;
use crate::optim::OptimizerSpec;
use crate::optim::in_backward::{InBackward, Target};
use crate::rref::RRef;
use crate::tensor::Tensor;

impl Target for RRef<Tensor> {
    type Optimizers = DistributedInBackward;

    fn attach(spec: OptimizerSpec, parameters: Vec<Self>, options: InBackward) -> Result<DistributedInBackward> {
        DistributedInBackward::attach(&spec, &options, &parameters)
    }

    fn attached(parameters: Vec<Self>) -> Result<DistributedInBackward> {
        DistributedInBackward::of(&parameters)
    }
}

//! What an optimizer is made over.

use std::borrow::Borrow;

use crate::optim::OptimizerSpec;
use crate::rref::RRef;
use crate::tensor::Tensor;

/// A parameter in an optimizer's list: a reference, or a name and a reference.
///
/// A parameter without a name is called by its place in the list, `"0"`, `"1"`, as in torch.
pub trait ParameterRef {
    /// Its name, if it has one, and the reference.
    fn into_parts(self) -> (Option<String>, RRef<Tensor>);
}

impl ParameterRef for RRef<Tensor> {
    fn into_parts(self) -> (Option<String>, RRef<Tensor>) {
        (None, self)
    }
}

impl ParameterRef for &RRef<Tensor> {
    fn into_parts(self) -> (Option<String>, RRef<Tensor>) {
        (None, self.clone())
    }
}

impl ParameterRef for &&RRef<Tensor> {
    fn into_parts(self) -> (Option<String>, RRef<Tensor>) {
        (None, (*self).clone())
    }
}

impl<N: Into<String>, R: Borrow<RRef<Tensor>>> ParameterRef for (N, R) {
    fn into_parts(self) -> (Option<String>, RRef<Tensor>) {
        (Some(self.0.into()), self.1.borrow().clone())
    }
}

/// Parameters that share options, for [`DistributedOptimizer::with_groups`](super::DistributedOptimizer::with_groups).
#[derive(Debug, Clone)]
pub struct ParamGroup {
    pub(super) spec: OptimizerSpec,
    pub(super) parameters: Vec<(Option<String>, RRef<Tensor>)>,
}

impl ParamGroup {
    /// A group of these parameters. Local; checked where it is used.
    pub fn new<P: ParameterRef>(spec: impl Into<OptimizerSpec>, parameters: impl IntoIterator<Item = P>) -> Self {
        ParamGroup {
            spec: spec.into(),
            parameters: parameters.into_iter().map(ParameterRef::into_parts).collect(),
        }
    }
}

//! No GPUs: no parameter is there.

use super::super::optimizer::{Asked, Optimizer};
use super::super::report::ParameterReport;
use crate::Result;
use crate::tensor::Gradient;

impl Optimizer {
    #[allow(clippy::unnecessary_wraps, clippy::unused_self, reason = "as the other one")]
    pub(in super::super) fn apply_on_gpus(&mut self, _: Vec<(usize, Gradient, Asked)>) -> Result<Vec<(usize, ParameterReport)>> {
        Ok(vec![])
    }
}

//! How an optimizer in backward goes about it.

use serde::{Deserialize, Serialize};

use crate::optim::OptimizerSpec;
use crate::{ErrorKind, Result};

/// How an optimizer in backward goes about it.
///
/// ```
/// use rankgrad::optim::InBackward;
/// let fourth = InBackward { every: 4, ..InBackward::default() };
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InBackward {
    /// Whether backwards run it. With `false` it is only attached, to be driven by
    /// [`InBackwardOptimizers::step`](super::InBackwardOptimizers::step); but where a backward runs one optimizer of a leaf it runs all of them.
    pub register_hook: bool,
    /// Updates at every so many backwards that reach the leaf, with the sum of their gradients, which it keeps meanwhile; 1 for each.
    pub every: u32,
    /// Limits each element of the gradient to at most this magnitude.
    pub clip_value: Option<f64>,
    /// Limits the norm of all gradients together: refused, since it needs them all before the first update.
    pub clip_norm: Option<f64>,
    /// Updates all parameters or none: refused, since each is updated before the next gradient is known.
    pub all_or_nothing: bool,
    /// Keeps the gradient of the last update, for [`InBackwardOptimizers::gradient`](super::InBackwardOptimizers::gradient). It takes the memory that this
    /// way of updating saves.
    pub keep_gradient: bool,
}

/// Backwards run it, at each; no clipping, no gradient kept.
impl Default for InBackward {
    fn default() -> Self {
        InBackward {
            register_hook: true,
            every: 1,
            clip_value: None,
            clip_norm: None,
            all_or_nothing: false,
            keep_gradient: false,
        }
    }
}

impl InBackward {
    /// Refuses what is out of its bound or can't be had in backward.
    pub(crate) fn check(&self, spec: &OptimizerSpec) -> Result<()> {
        let bound = |option: &str, value: String, bound: &str| {
            Err(ErrorKind::OptionValue {
                optimizer: format!("{} in backward", spec.name()),
                option: option.into(),
                value,
                bound: bound.into(),
            }
            .into())
        };
        let impossible = |what: &str| {
            Err(ErrorKind::Argument {
                op: format!("{} in backward", spec.name()),
                what: what.into(),
            }
            .into())
        };
        if self.every == 0 {
            return bound("every", "0".into(), "at least 1");
        }
        if let Some(limit) = self.clip_value.filter(|limit| limit.is_nan() || *limit <= 0.0) {
            return bound("clip_value", limit.to_string(), "above 0");
        }
        if self.clip_norm.is_some() {
            return impossible(
                "`clip_norm` needs the gradients of all parameters before the first update; use `clip_value`, or a backward followed by a step",
            );
        }
        if self.all_or_nothing {
            return impossible(
                "`all_or_nothing` needs the gradients of all parameters before the first update; use a backward followed by a step",
            );
        }
        Ok(())
    }
}

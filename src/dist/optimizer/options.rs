//! How a step goes.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::optim::{Clip, Norm};
use crate::{ErrorKind, Result};

/// What a step does about gradients with infinite or NaN elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NotFinite {
    /// It applies them, as torch does.
    #[default]
    Apply,
    /// It updates nothing on any owner, counts no step, and reports which parameters they belong to.
    Skip,
    /// It updates nothing on any owner, and is an error: [`ErrorKind::NotFinite`].
    Refuse,
}

/// Versions of parameters that the gradients of a step were computed with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ExpectedVersions {
    /// In the order of the list.
    pub versions: Vec<u64>,
    /// By how much a parameter may have moved on since.
    pub staleness: u64,
}

/// How a step goes. The default is one round of messages: each owner applies what it has.
///
/// Clipping by norm, looking for gradients that aren't finite, and all-or-nothing take two rounds. The first validates, computes and allocates on every
/// owner, and holds nothing; the second applies, and can fail only by the loss of a rank, or a panic in a rule. So whatever fails in the first, a timeout too, leaves every
/// parameter and state as it was.
///
/// ```
/// use rankgrad::dist::StepOptions;
///
/// let careful = StepOptions::new().clip_norm(1.0).skip_not_finite();
/// assert!(StepOptions::new().clip_norm(-1.0).check().is_err());
/// # careful.check().unwrap();
/// ```
#[derive(Debug, Clone, Default)]
pub struct StepOptions {
    pub(super) clip: Option<Clip>,
    pub(super) not_finite: NotFinite,
    pub(super) all_or_nothing: bool,
    pub(super) expected: Option<ExpectedVersions>,
    pub(super) timeout: Option<Duration>,
    pub(super) rows: bool,
}

impl StepOptions {
    /// The default: one round, nothing clipped, nothing looked for.
    pub fn new() -> Self {
        Self::default()
    }

    /// Clips gradients. Of [`clip_norm`](Self::clip_norm) and this, the last one counts.
    pub fn clip(self, clip: Clip) -> Self {
        StepOptions { clip: Some(clip), ..self }
    }

    /// Clips the 2-norm of all gradients of all parameters together, on all owners, as `torch.nn.utils.clip_grad_norm_` does.
    pub fn clip_norm(self, max: f64) -> Self {
        self.clip(Clip::Norm { kind: Norm::Two, max })
    }

    /// Clips each element. One round.
    pub fn clip_value(self, max: f64) -> Self {
        self.clip(Clip::Value(max))
    }

    /// What to do about gradients that aren't finite.
    pub fn not_finite(self, not_finite: NotFinite) -> Self {
        StepOptions { not_finite, ..self }
    }

    /// Updates nothing anywhere if some gradient isn't finite, and says so in the report.
    pub fn skip_not_finite(self) -> Self {
        self.not_finite(NotFinite::Skip)
    }

    /// Updates nothing anywhere if some gradient isn't finite, and is an error.
    pub fn refuse_not_finite(self) -> Self {
        self.not_finite(NotFinite::Refuse)
    }

    /// Updates all owners or none.
    pub fn all_or_nothing(self) -> Self {
        StepOptions {
            all_or_nothing: true,
            ..self
        }
    }

    /// Refuses the step where a parameter has had more than `staleness` updates since the version, in the order of the optimizer's list, that its gradient
    /// was computed with ([`StepReport::versions`](super::StepReport::versions), [`DistributedOptimizer::versions`](super::DistributedOptimizer::versions)).
    ///
    /// With anything that takes two rounds it is refused on all owners or none: then the step keeps its turn on each owner, in ascending order of ranks,
    /// until all have been asked.
    pub fn expect_versions(self, versions: Vec<u64>, staleness: u64) -> Self {
        StepOptions {
            expected: Some(ExpectedVersions { versions, staleness }),
            ..self
        }
    }

    /// Gives up if some owner hasn't answered after so long. In a step of two rounds it bounds the first, so that nothing is applied then; in one of
    /// one round the owners that didn't answer are in doubt.
    pub fn timeout(self, timeout: Duration) -> Self {
        StepOptions {
            timeout: Some(timeout),
            ..self
        }
    }

    /// Asks for a row an owner also where steps go over a tree ([`set_fan_out`](super::DistributedOptimizer::set_fan_out)); otherwise they are always there.
    pub fn rows(self) -> Self {
        StepOptions { rows: true, ..self }
    }

    /// Checks bounds. Steps do so before anything is sent.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`] that names the bound.
    pub fn check(&self) -> Result<()> {
        self.clip.map_or(Ok(()), |clip| clip.check())
    }

    pub(super) fn check_for(&self, operation: impl FnOnce() -> String, parameters: usize) -> Result<()> {
        self.check()?;
        match &self.expected {
            Some(expected) if expected.versions.len() != parameters => Err(ErrorKind::Argument {
                op: operation(),
                what: format!("{} expected versions for {parameters} parameters", expected.versions.len()),
            }
            .into()),
            _ => Ok(()),
        }
    }

    /// Whether owners must agree before anything is applied.
    pub(super) fn two_rounds(&self) -> bool {
        self.all_or_nothing || self.not_finite != NotFinite::Apply || matches!(self.clip, Some(Clip::Norm { .. }))
    }

    /// The norm that is reported.
    pub(super) fn norm(&self) -> Norm {
        match self.clip {
            Some(Clip::Norm { kind, .. }) => kind,
            _ => Norm::Two,
        }
    }

    pub(super) fn clamp(&self) -> Option<f64> {
        match self.clip {
            Some(Clip::Value(max)) => Some(max),
            _ => None,
        }
    }
}

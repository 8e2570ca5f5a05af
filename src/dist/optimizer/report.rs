//! What a step did.

use serde::{Deserialize, Serialize};

use crate::optim::{Norm, ParameterReport};

/// What a step did on one owner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwnerReport {
    /// The owner.
    pub rank: u32,
    /// Places of its parameters in the optimizer's list.
    pub places: Vec<u32>,
    /// What happened to each of them.
    pub parameters: Vec<ParameterReport>,
    /// Which norm of the gradients is reported.
    pub norm_kind: Norm,
    /// Time the update took there, in seconds.
    pub seconds: f64,
}

impl OwnerReport {
    /// Number of parameters that were updated.
    pub fn updated(&self) -> usize {
        self.parameters.iter().filter(|p| p.updated).count()
    }

    /// Number of parameters without a gradient (or frozen), left as they were.
    pub fn without_gradient(&self) -> usize {
        self.parameters.iter().filter(|p| p.norm.is_none()).count()
    }

    /// Number of rows that sparse gradients touched.
    pub fn rows(&self) -> usize {
        self.parameters.iter().filter_map(|p| p.rows).sum()
    }

    /// Norm of all gradients on this owner, before any clipping.
    pub fn norm(&self) -> f64 {
        self.norm_kind.total(self.parameters.iter().filter_map(|p| p.norm))
    }
}

/// What a step did: a row an owner, ascending by rank.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The rows.
    pub owners: Vec<OwnerReport>,
    /// Places of parameters whose gradients had infinite or NaN elements. Looked for only if the step was to skip such.
    pub not_finite: Vec<usize>,
    /// What all gradients were multiplied by, to clip their norm; 1 for none.
    pub scale: f64,
}

impl StepReport {
    /// Whether nothing was updated because some gradient wasn't finite.
    pub fn skipped(&self) -> bool {
        !self.not_finite.is_empty()
    }

    /// Number of parameters that were updated, on all owners.
    pub fn updated(&self) -> usize {
        self.owners.iter().map(OwnerReport::updated).sum()
    }

    /// Number of parameters without a gradient, on all owners.
    pub fn without_gradient(&self) -> usize {
        self.owners.iter().map(OwnerReport::without_gradient).sum()
    }

    /// Norm of all gradients of all parameters together, before any clipping. The same bits wherever the parameters live.
    pub fn norm(&self) -> f64 {
        let kind = self.owners.first().map_or(Norm::Two, |o| o.norm_kind);
        let mut norms: Vec<(u32, f64)> = self
            .owners
            .iter()
            .flat_map(|o| o.places.iter().zip(&o.parameters))
            .filter_map(|(&place, p)| Some((place, p.norm?)))
            .collect();
        norms.sort_by_key(|n| n.0);
        kind.total(norms.into_iter().map(|n| n.1))
    }

    /// What happened to the parameter at a place of the optimizer's list.
    pub fn parameter(&self, place: usize) -> Option<&ParameterReport> {
        self.owners.iter().find_map(|o| {
            let at = o.places.iter().position(|&p| p as usize == place)?;
            o.parameters.get(at)
        })
    }

    /// The version of each parameter after the step, in the order of the optimizer's list.
    pub fn versions(&self) -> Vec<u64> {
        let each = self.owners.iter().flat_map(|o| o.places.iter().zip(&o.parameters));
        let mut versions: Vec<(u32, u64)> = each.map(|(&place, p)| (place, p.version)).collect();
        versions.sort_by_key(|v| v.0);
        versions.into_iter().map(|v| v.1).collect()
    }
}

//! What a step did.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::optim::{Norm, ParameterReport, ParameterReports};

/// What a step did on one owner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwnerReport {
    /// The owner.
    pub rank: u32,
    /// Places of its parameters in the optimizer's list.
    #[serde(skip)] // the client knows them
    pub places: Arc<[u32]>,
    /// What happened to each of them.
    pub parameters: ParameterReports,
    /// Which norm of the gradients is reported.
    pub norm_kind: Norm,
    /// Time the update took there, in seconds.
    pub seconds: f64,
}

impl OwnerReport {
    /// Number of parameters that were updated.
    pub fn updated(&self) -> usize {
        self.parameters.updated()
    }

    /// Number of parameters without a gradient (or frozen), left as they were.
    pub fn without_gradient(&self) -> usize {
        self.parameters.without_gradient()
    }

    /// Number of rows that sparse gradients touched.
    pub fn rows(&self) -> usize {
        self.parameters.rows()
    }

    /// Norm of all gradients on this owner, before any clipping.
    pub fn norm(&self) -> f64 {
        self.parameters.norm(self.norm_kind)
    }
}

/// What a step did on all owners together.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StepSummary {
    /// Number of owners.
    pub owners: usize,
    /// Number of parameters that were updated.
    pub updated: usize,
    /// How many of them in place.
    pub in_place: usize,
    /// Number of parameters without a gradient (or frozen), left as they were.
    pub without_gradient: usize,
    /// Number of rows that sparse gradients touched.
    pub rows: usize,
    /// Lowest and highest version of a parameter after the step.
    pub versions: Option<(u64, u64)>,
    /// Shortest and longest time that an owner took, in seconds.
    pub seconds: (f64, f64),
    norm_kind: Norm,
    norm: f64,
}

impl StepSummary {
    pub(super) fn of(report: &OwnerReport) -> Self {
        StepSummary {
            owners: 1,
            updated: report.updated(),
            in_place: report.parameters.in_place(),
            without_gradient: report.without_gradient(),
            rows: report.rows(),
            versions: report.parameters.version_range(),
            seconds: (report.seconds, report.seconds),
            norm_kind: report.norm_kind,
            norm: report.norm(),
        }
    }

    pub(super) fn add(&mut self, other: &StepSummary) {
        if self.owners == 0 || other.owners == 0 {
            if self.owners == 0 {
                *self = *other;
            }
            return;
        }
        // Other ranks say what they like.
        self.owners = self.owners.saturating_add(other.owners);
        self.updated = self.updated.saturating_add(other.updated);
        self.in_place = self.in_place.saturating_add(other.in_place);
        self.without_gradient = self.without_gradient.saturating_add(other.without_gradient);
        self.rows = self.rows.saturating_add(other.rows);
        self.versions = match (self.versions, other.versions) {
            (Some((a, b)), Some((c, d))) => Some((a.min(c), b.max(d))),
            (one, two) => one.or(two),
        };
        self.seconds = (self.seconds.0.min(other.seconds.0), self.seconds.1.max(other.seconds.1));
        self.norm = self.norm_kind.total([self.norm, other.norm]);
    }

    /// Norm of all gradients of all parameters together, before any clipping.
    pub fn norm(&self) -> f64 {
        self.norm
    }
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// All owners together.
    pub summary: StepSummary,
    /// A row an owner, ascending by rank. Where steps go over a tree, only if they were asked for.
    pub owners: Vec<OwnerReport>,
    /// Places of parameters whose gradients had infinite or NaN elements. Looked for only if the step was to skip such.
    pub not_finite: Vec<usize>,
    /// What all gradients were multiplied by, to clip their norm; 1 for none.
    pub scale: f64,
}

impl StepReport {
    pub(super) fn of_rows(owners: Vec<OwnerReport>, scale: f64) -> Self {
        let mut each = owners.iter().map(StepSummary::of);
        let mut summary = each.next().unwrap_or_default();
        each.for_each(|other| summary.add(&other));
        let mut report = StepReport {
            summary,
            owners,
            not_finite: Vec::new(),
            scale,
        };
        if let Some(norm) = report.norm_of_rows() {
            report.summary.norm = norm;
        }
        report
    }

    pub(super) fn of_tree(summary: StepSummary, mut owners: Vec<OwnerReport>, scale: f64) -> Self {
        owners.sort_by_key(|o| o.rank);
        StepReport {
            summary,
            owners,
            not_finite: Vec::new(),
            scale,
        }
    }

    /// Whether nothing was updated because some gradient wasn't finite.
    pub fn skipped(&self) -> bool {
        !self.not_finite.is_empty()
    }

    /// Number of parameters that were updated, on all owners.
    pub fn updated(&self) -> usize {
        self.summary.updated
    }

    /// Number of parameters without a gradient, on all owners.
    pub fn without_gradient(&self) -> usize {
        self.summary.without_gradient
    }

    /// Norm of all gradients of all parameters together, before any clipping. The same bits wherever the parameters live, unless the step went over a tree.
    pub fn norm(&self) -> f64 {
        self.summary.norm
    }

    /// Each parameter's norm, in the order of the list, put together.
    fn norm_of_rows(&self) -> Option<f64> {
        let kind = self.owners.first()?.norm_kind;
        if let [one] = &self.owners[..]
            && one.places.is_sorted()
        {
            return Some(self.summary.norm);
        }
        let mut norms: SmallVec<[(u32, f64); 8]> = self
            .owners
            .iter()
            .flat_map(|o| o.places.iter().zip(o.parameters.iter()))
            .filter_map(|(&place, p)| Some((place, p.norm?)))
            .collect();
        if !norms.is_sorted_by_key(|n| n.0) {
            norms.sort_by_key(|n| n.0);
        }
        Some(kind.total(norms.into_iter().map(|n| n.1)))
    }

    /// What happened to the parameter at a place of the optimizer's list, if its owner's row is there.
    pub fn parameter(&self, place: usize) -> Option<ParameterReport> {
        self.owners.iter().find_map(|o| {
            let at = o.places.iter().position(|&p| p as usize == place)?;
            o.parameters.get(at)
        })
    }

    /// The version of each parameter after the step, in the order of the optimizer's list, if the rows are there.
    pub fn versions(&self) -> Vec<u64> {
        let each = self.owners.iter().flat_map(|o| o.places.iter().zip(o.parameters.versions()));
        let mut versions: Vec<(u32, u64)> = each.map(|(&place, &version)| (place, version)).collect();
        versions.sort_by_key(|v| v.0);
        versions.into_iter().map(|v| v.1).collect()
    }
}

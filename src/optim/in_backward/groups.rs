//! Options of several optimizers as schedules see them: those that are alike form a group.

use serde_json::Value;

use crate::Result;
use crate::optim::{OptimizerSpec, changed};

/// Optimizers by their options.
#[derive(Debug, Clone, Default)]
pub(crate) struct Groups {
    specs: Vec<OptimizerSpec>,
    /// The group of each optimizer.
    of: Vec<usize>,
}

impl Groups {
    /// Groups optimizers with equal options, in the order of their first ones.
    pub(crate) fn new(specs: impl IntoIterator<Item = OptimizerSpec>) -> Self {
        let mut groups = Groups::default();
        for spec in specs {
            let group = groups.specs.iter().position(|known| *known == spec).unwrap_or_else(|| {
                groups.specs.push(spec);
                groups.specs.len() - 1
            });
            groups.of.push(group);
        }
        groups
    }

    pub(crate) fn specs(&self) -> &[OptimizerSpec] {
        &self.specs
    }

    pub(crate) fn spec(&self, optimizer: usize) -> Option<&OptimizerSpec> {
        self.specs.get(*self.of.get(optimizer)?)
    }

    /// The options of all groups after a change of one, or of all, and the optimizers that it concerns.
    pub(crate) fn changed(&self, group: Option<usize>, options: &Value) -> Result<(Vec<OptimizerSpec>, Vec<usize>)> {
        let (places, changed) = changed(&self.specs, group, options)?;
        let mut specs = self.specs.clone();
        specs.splice(places.clone(), changed);
        Ok((specs, (0..self.of.len()).filter(|&one| places.contains(&self.of[one])).collect()))
    }

    pub(crate) fn set(&mut self, specs: Vec<OptimizerSpec>) {
        self.specs = specs;
    }
}

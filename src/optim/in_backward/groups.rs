//! Options of several optimizers as schedules see them: those that are alike form a group.

use serde_json::{Value, json};

use crate::optim::OptimizerSpec;
use crate::{ErrorKind, Result};

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
        if let Some(group) = group.filter(|&group| group >= self.specs.len()) {
            return Err(ErrorKind::Argument {
                op: "set_options".into(),
                what: format!("no group {group}; there are {}", self.specs.len()),
            }
            .into());
        }
        let concerned = |place: usize| group.is_none_or(|group| group == place);
        let change = |(place, spec): (usize, &OptimizerSpec)| {
            if concerned(place) {
                spec.with_options(options)
            } else {
                Ok(spec.clone())
            }
        };
        let specs = self.specs.iter().enumerate().map(change).collect::<Result<_>>()?;
        Ok((specs, (0..self.of.len()).filter(|&one| concerned(self.of[one])).collect()))
    }

    pub(crate) fn set(&mut self, specs: Vec<OptimizerSpec>) {
        self.specs = specs;
    }
}

/// A learning rate as options.
///
/// # Errors
/// [`ErrorKind::OptionValue`] unless it is finite: JSON has no other numbers.
pub(crate) fn lr(specs: &[OptimizerSpec], lr: f64) -> Result<Value> {
    if lr.is_finite() {
        return Ok(json!({ "lr": lr }));
    }
    Err(ErrorKind::OptionValue {
        optimizer: specs.first().map_or("optimizer", OptimizerSpec::name).into(),
        option: "lr".into(),
        value: lr.to_string(),
        bound: "a finite number".into(),
    }
    .into())
}

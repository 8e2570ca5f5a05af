//! What a schedule moves, and in what.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::optim::{Optimizer, OptimizerSpec};
use crate::{ErrorKind, Result};

/// The options of one parameter group that schedules move.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Learning rate.
    pub lr: f64,
    /// The option `momentum`, or the first of `betas`; none if the rule has neither.
    pub momentum: Option<f64>,
}

impl Rates {
    /// The rates among the options of a rule.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if its learning rate isn't finite.
    pub fn of(spec: &OptimizerSpec) -> Result<Self> {
        let options = spec.to_json();
        let Some(lr) = options["lr"].as_f64() else {
            let what = format!(
                "the learning rate of {} is {} and must be a finite number",
                spec.name(),
                options["lr"]
            );
            return Err(ErrorKind::Argument {
                op: "schedule".into(),
                what,
            }
            .into());
        };
        let momentum = options["momentum"].as_f64().or_else(|| options["betas"][0].as_f64());
        Ok(Rates { lr, momentum })
    }

    /// The options that make these rates of those of `spec`; only what differs.
    pub(super) fn changes(&self, spec: &OptimizerSpec) -> Result<Value> {
        let now = Rates::of(spec)?;
        let mut changes = Map::new();
        if self.lr != now.lr {
            changes.insert("lr".into(), json!(self.lr));
        }
        match self.momentum {
            Some(momentum) if self.momentum != now.momentum => match spec.option("betas") {
                Some(betas) => changes.insert("betas".into(), json!([momentum, betas[1]])),
                None => changes.insert("momentum".into(), json!(momentum)),
            },
            _ => None,
        };
        Ok(Value::Object(changes))
    }

    pub(super) fn with_lr(self, lr: f64) -> Self {
        Rates { lr, ..self }
    }

    /// Momentum is set where there is one.
    pub(super) fn with_momentum(self, momentum: Option<f64>) -> Self {
        Rates {
            momentum: momentum.or(self.momentum),
            ..self
        }
    }
}

/// An optimizer whose options can be moved: of this rank ([`Optimizer`]), over ranks ([`DistributedOptimizer`](crate::DistributedOptimizer)), or
/// the options alone ([`OptimizerSpec`]).
pub trait Adjust {
    /// Rule and options of each parameter group.
    fn specs(&self) -> &[OptimizerSpec];

    /// Changes options, by name, of one group. They hold from the next update on.
    ///
    /// # Errors
    /// As [`OptimizerSpec::with_options`], and [`ErrorKind::Argument`] if there is no such group; nothing is changed then.
    fn adjust(&mut self, group: usize, options: &Value) -> Result<()>;
}

impl Adjust for Optimizer {
    fn specs(&self) -> &[OptimizerSpec] {
        self.groups()
    }

    fn adjust(&mut self, group: usize, options: &Value) -> Result<()> {
        self.set_options(Some(group), options)
    }
}

/// One group.
impl Adjust for OptimizerSpec {
    fn specs(&self) -> &[OptimizerSpec] {
        std::slice::from_ref(self)
    }

    fn adjust(&mut self, group: usize, options: &Value) -> Result<()> {
        if group > 0 {
            let what = format!("no group {group}; there is 1");
            return Err(ErrorKind::Argument { op: "adjust".into(), what }.into());
        }
        *self = self.with_options(options)?;
        Ok(())
    }
}

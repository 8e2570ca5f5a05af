//! Options that change between steps, on their way to the owners with the next step.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::optim::Optimizer;
use crate::{ErrorKind, Result};

/// Options that an owner may not have yet, and the number of the last change among them.
///
/// It travels with a step, again until the owner has answered one. The owner makes each change once, by its number: a step that fails there has made it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ChangedOptions {
    number: u64,
    /// By name, as JSON.
    options: String,
}

impl ChangedOptions {
    /// Changes the options of an owner's optimizer, unless it has them already.
    pub(super) fn make(&self, optimizer: &mut Optimizer, made: &AtomicU64) -> Result<()> {
        if self.number > made.load(Ordering::Relaxed) {
            let options: Value = serde_json::from_str(&self.options).map_err(|e| ErrorKind::Decode {
                what: format!("changed options: {e}"),
            })?;
            optimizer.set_options(None, &options)?;
            made.store(self.number, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// What the client notes: every option that was ever changed, with its value now and the number of its last change.
#[derive(Debug, Default)]
pub(super) struct Changes {
    last: u64,
    options: Vec<(String, Value, u64)>,
}

impl Changes {
    /// Notes options that were changed together.
    pub(super) fn note(&mut self, options: &Map<String, Value>) {
        self.last += 1;
        for (option, value) in options {
            self.options.retain(|(other, ..)| other != option);
            self.options.push((option.clone(), value.clone(), self.last));
        }
    }

    /// Number of the last change.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// What an owner needs that has all changes up to this number.
    pub(super) fn after(&self, number: u64) -> Option<ChangedOptions> {
        let newer = self.options.iter().filter(|(.., changed)| *changed > number);
        let options: Map<_, _> = newer.map(|(option, value, _)| (option.clone(), value.clone())).collect();
        (!options.is_empty()).then(|| ChangedOptions {
            number: self.last,
            options: Value::Object(options).to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::dist::{DistributedOptimizer, ParameterCalls};
    use crate::optim::Sgd;
    use crate::tensor::{DType, Gradient, RowSparse, Tensor};

    #[test]
    fn an_owner_makes_each_change_once_and_misses_none() -> Result<()> {
        let mut changes = Changes::default();
        assert!(changes.after(0).is_none());
        let mut optimizer = Optimizer::new(Sgd::new(0.1), vec![Tensor::from_vec(vec![1.0], [1])?.parameter()?])?;
        let made = AtomicU64::new(0);
        let mut note = |options: Value| changes.note(options.as_object().expect("an object"));
        note(json!({"lr": 0.2, "momentum": 0.5}));
        note(json!({"lr": 0.3}));
        let first = changes.after(0).expect("two changes");
        first.make(&mut optimizer, &made)?;
        assert_eq!(optimizer.groups()[0], Sgd::new(0.3).momentum(0.5).into());
        // The same message again, after an option was changed by other means: nothing happens.
        optimizer.set_option(None, "lr", &json!(7.0))?;
        first.make(&mut optimizer, &made)?;
        assert_eq!(optimizer.groups()[0], Sgd::new(7.0).momentum(0.5).into());
        // Only what is newer goes.
        assert_eq!(changes.after(1).expect("the second").options, r#"{"lr":0.3}"#);
        assert!(changes.after(changes.last()).is_none());
        Ok(())
    }

    #[test]
    fn options_hold_on_all_owners_from_the_next_step_on_also_when_one_failed() {
        crate::local::run(3, |world| {
            world.lead(|world| {
                let of = |x: f64| Tensor::from_vec(vec![x, x], [2]);
                let (a, b) = (world.put(1, of(1.0)?)?, world.put(2, of(1.0)?)?);
                let mut optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&a, &b])?;
                let error = optimizer.set_options(&json!({"lr": 0.25, "nesterov": true})).unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::OptionValue { option, .. } if option == "nesterov"));
                assert!(optimizer.set_lr(f64::NAN).unwrap_err().to_string().contains("NaN"));
                assert_eq!(optimizer.spec(), &Sgd::new(0.5).into());

                // SGD refuses sparse gradients with weight decay: the step fails on rank 2, which has made the change.
                optimizer.set_options(&json!({"lr": 0.25, "weight_decay": 1.0}))?;
                let ctx = world.context()?;
                ctx.accumulate(&a, Gradient::Dense(of(1.0)?.data()))?;
                ctx.accumulate(
                    &b,
                    Gradient::Sparse(RowSparse::new(vec![0], Tensor::zeros(DType::F64, [1]).data(), vec![2])?),
                )?;
                match optimizer.step(&ctx).unwrap_err().kind() {
                    ErrorKind::Owners { failures, updated, .. } => assert_eq!((failures[0].rank, &updated[..]), (2, &[1][..])),
                    other => panic!("{other:?}"),
                }
                assert_eq!(
                    (a.fetch()?.to_vec::<f64>()?, b.fetch()?.to_vec::<f64>()?),
                    (vec![0.5; 2], vec![1.0; 2])
                );

                optimizer.set_lr(0.5)?;
                let ctx = world.context()?;
                for parameter in [&a, &b] {
                    ctx.accumulate(parameter, Gradient::Dense(of(0.0)?.data()))?;
                }
                optimizer.step(&ctx)?;
                assert_eq!(
                    (a.fetch()?.to_vec::<f64>()?, b.fetch()?.to_vec::<f64>()?),
                    (vec![0.25; 2], vec![0.5; 2])
                );
                Ok(())
            })
        })
        .unwrap();
    }

    #[test]
    fn a_change_that_does_not_decode_is_an_error() {
        let mut optimizer =
            Optimizer::new(Sgd::new(0.1), vec![Tensor::zeros(DType::F64, [1]).parameter().expect("a float")]).expect("valid");
        let bad = ChangedOptions {
            number: 1,
            options: "{".into(),
        };
        assert!(matches!(
            bad.make(&mut optimizer, &AtomicU64::new(0)).unwrap_err().kind(),
            ErrorKind::Decode { .. }
        ));
    }
}

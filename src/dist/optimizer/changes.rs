//! Options that change between steps, on their way to the owners with the next step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{ErrorKind, Result};

/// Options that an owner may not have yet, and the number of the last change among them.
///
/// It travels with a step, again until the owner has answered one. The owner makes each change once, by its number: a step that fails there has made it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::dist) struct ChangedOptions {
    number: u64,
    /// For each group that has any, its number and the options by name, as JSON.
    groups: Vec<(u32, String)>,
}

impl ChangedOptions {
    /// The number of the last change.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The changed options of a group.
    pub(super) fn of_group(&self, group: u32) -> Result<Option<Value>> {
        let Some((_, options)) = self.groups.iter().find(|g| g.0 == group) else {
            return Ok(None);
        };
        let decoded = serde_json::from_str(options).map_err(|e| ErrorKind::Decode {
            what: format!("changed options: {e}"),
        })?;
        Ok(Some(decoded))
    }
}

/// What the client notes: every option that was ever changed, with its value now and the number of its last change.
#[derive(Debug, Default)]
pub(super) struct Changes {
    last: u64,
    options: Vec<Changed>,
}

#[derive(Debug)]
struct Changed {
    group: u32,
    option: String,
    value: Value,
    number: u64,
}

impl Changes {
    /// Notes options that were changed together.
    pub(super) fn note(&mut self, groups: &[u32], options: &Map<String, Value>) {
        self.last += 1;
        for &group in groups {
            for (option, value) in options {
                self.options.retain(|c| c.group != group || c.option != *option);
                let (option, value, number) = (option.clone(), value.clone(), self.last);
                self.options.push(Changed {
                    group,
                    option,
                    value,
                    number,
                });
            }
        }
    }

    /// All options were replaced by other means.
    pub(super) fn replaced(&mut self) -> u64 {
        self.options.clear();
        self.last += 1;
        self.last
    }

    /// Number of the last change.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// What an owner needs that has all changes up to this number.
    pub(super) fn after(&self, number: u64) -> Option<ChangedOptions> {
        if number >= self.last {
            return None;
        }
        let mut groups: BTreeMap<u32, Map<String, Value>> = BTreeMap::new();
        for c in self.options.iter().filter(|c| c.number > number) {
            groups.entry(c.group).or_default().insert(c.option.clone(), c.value.clone());
        }
        (!groups.is_empty()).then(|| ChangedOptions {
            number: self.last,
            groups: groups
                .into_iter()
                .map(|(group, options)| (group, Value::Object(options).to_string()))
                .collect(),
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
    fn only_what_is_newer_goes_to_the_groups_that_changed() -> Result<()> {
        let mut changes = Changes::default();
        assert!(changes.after(0).is_none());
        let mut note = |groups: &[u32], options: Value| changes.note(groups, options.as_object().expect("an object"));
        note(&[4, 7], json!({"lr": 0.2, "momentum": 0.5}));
        note(&[7], json!({"lr": 0.3}));
        let all = changes.after(0).expect("two changes");
        assert_eq!(all.number(), 2);
        assert_eq!(all.of_group(4)?, Some(json!({"lr": 0.2, "momentum": 0.5})));
        assert_eq!(all.of_group(7)?, Some(json!({"lr": 0.3, "momentum": 0.5})));
        assert_eq!(all.of_group(5)?, None);
        let second = changes.after(1).expect("the second");
        assert_eq!((second.of_group(4)?, second.of_group(7)?), (None, Some(json!({"lr": 0.3}))));
        assert!(changes.after(changes.last()).is_none());
        // Whoever gets all options by other means needs no earlier change.
        assert_eq!(changes.replaced(), 3);
        assert!(changes.after(0).is_none());
        Ok(())
    }

    #[test]
    fn options_hold_on_all_owners_from_the_next_step_on_also_when_one_failed() {
        crate::local::run(3, |world| {
            world.lead(|world| {
                let of = |x: f64| Tensor::from_vec(vec![x, x], [2]);
                let (a, b) = (world.put(1, of(1.0)?)?, world.put(2, of(1.0)?)?);
                let mut optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&a, &b])?;
                let error = optimizer.set_options(None, &json!({"lr": 0.25, "nesterov": true})).unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::OptionValue { option, .. } if option == "nesterov"));
                assert!(optimizer.set_lr(f64::NAN).unwrap_err().to_string().contains("NaN"));
                assert_eq!(optimizer.groups(), [Sgd::new(0.5).into()]);

                // SGD refuses sparse gradients with weight decay: the step fails on rank 2, which has made the change.
                optimizer.set_options(None, &json!({"lr": 0.25, "weight_decay": 1.0}))?;
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
        let groups = vec![(0, "{".into())];
        let bad = ChangedOptions { number: 1, groups };
        assert!(matches!(bad.of_group(0).unwrap_err().kind(), ErrorKind::Decode { .. }));
    }
}

//! A rule with its options, as it is named, checked, compared and sent.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _, ser::Error as _};
use serde_json::{Value, json};

use super::erased::ErasedRule;
use super::{Rule, table};
use crate::{ErrorKind, Result};

/// An optimizer's rule and options.
///
/// Built from a typed builder, or from torch's names:
///
/// ```
/// use rankgrad::optim::{OptimizerSpec, Sgd};
///
/// let typed: OptimizerSpec = Sgd::new(0.1).momentum(0.9).nesterov(true).into();
/// let named = OptimizerSpec::from_json("SGD", &serde_json::json!({"lr": 0.1, "momentum": 0.9, "nesterov": true}))?;
/// assert_eq!(typed, named);
/// assert_eq!(typed.to_json()["dampening"], 0.0);
///
/// let error = OptimizerSpec::from_json("SGD", &serde_json::json!({"lr": -1.0})).unwrap_err();
/// assert_eq!(error.to_string(), "SGD: option `lr` = -1.0 must be at least 0");
/// # Ok::<(), rankgrad::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct OptimizerSpec {
    rule: Arc<dyn ErasedRule>,
}

impl OptimizerSpec {
    pub(super) fn erased(rule: Arc<dyn ErasedRule>) -> Self {
        Self { rule }
    }

    pub(super) fn rule(&self) -> &dyn ErasedRule {
        &*self.rule
    }

    /// The numbers that the rule keeps for a parameter, and their first values.
    pub(crate) fn scalars(&self) -> &'static [(&'static str, f64)] {
        self.rule.scalars()
    }

    /// Whether the rule treats each row of a parameter by itself.
    pub(crate) fn is_by_rows(&self) -> bool {
        self.rule.is_by_rows()
    }

    /// The rule of this name with these options; options that are left out have torch's defaults.
    ///
    /// # Errors
    /// [`UnknownOptimizer`](crate::ErrorKind::UnknownOptimizer), [`UnknownOption`](crate::ErrorKind::UnknownOption), and
    /// [`OptionValue`](crate::ErrorKind::OptionValue) for a value of another type or out of its bound.
    pub fn from_json(name: &str, options: &Value) -> Result<Self> {
        table::from_json(name, options)
    }

    /// The same rule with some options replaced, checked as [`OptimizerSpec::from_json`] does.
    ///
    /// # Errors
    /// As [`OptimizerSpec::from_json`].
    pub fn with_options(&self, options: &Value) -> Result<Self> {
        table::with_options(self, options)
    }

    /// The rule's name: `"SGD"`, `"Adam"`.
    pub fn name(&self) -> &'static str {
        self.rule.name()
    }

    /// All options by name. Numbers that JSON can't hold (infinite, NaN) become null.
    pub fn to_json(&self) -> Value {
        self.rule.options()
    }

    /// One option by name.
    pub fn option(&self, name: &str) -> Option<Value> {
        self.to_json().get_mut(name).map(Value::take)
    }

    /// The options in their own type, if this is that rule.
    pub fn downcast<R: Rule>(&self) -> Option<&R> {
        self.rule.as_any().downcast_ref()
    }

    /// Checks the options.
    ///
    /// # Errors
    /// [`OptionValue`](crate::ErrorKind::OptionValue), naming optimizer, option, value and bound.
    pub fn check(&self) -> Result<()> {
        self.rule.check()
    }
}

/// The options of one group, or of all groups, with some replaced: which groups these are, and their options then.
///
/// # Errors
/// As [`OptimizerSpec::with_options`]; [`ErrorKind::Argument`](crate::ErrorKind::Argument) if there is no such group.
pub(crate) fn changed(specs: &[OptimizerSpec], group: Option<usize>, options: &Value) -> Result<(Range<usize>, Vec<OptimizerSpec>)> {
    let places = match group {
        None => 0..specs.len(),
        Some(group) if group < specs.len() => group..group + 1,
        Some(group) => {
            return Err(ErrorKind::Argument {
                op: "set_options".into(),
                what: format!("no group {group}; there are {}", specs.len()),
            }
            .into());
        }
    };
    let changed = specs[places.clone()].iter().map(|spec| spec.with_options(options));
    let changed = changed.collect::<Result<_>>()?;
    Ok((places, changed))
}

/// A learning rate as options.
///
/// # Errors
/// [`ErrorKind::OptionValue`](crate::ErrorKind::OptionValue) unless it is finite: JSON has no other numbers.
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

impl<R: Rule> From<R> for OptimizerSpec {
    fn from(rule: R) -> Self {
        Self { rule: Arc::new(rule) }
    }
}

impl PartialEq for OptimizerSpec {
    fn eq(&self, other: &Self) -> bool {
        self.rule.is_equal(other.rule())
    }
}

/// In formats for people: the name, and the options by name. In binary formats: the name, and the options' bytes.
impl Serialize for OptimizerSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            (self.name(), self.to_json()).serialize(serializer)
        } else {
            (self.name(), self.rule.bytes().map_err(S::Error::custom)?).serialize(serializer)
        }
    }
}

/// Refuses what [`OptimizerSpec::check`] refuses.
impl<'de> Deserialize<'de> for OptimizerSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            let (name, options) = <(String, Value)>::deserialize(deserializer)?;
            table::from_json(&name, &options).map_err(D::Error::custom)
        } else {
            let (name, bytes) = <(String, Vec<u8>)>::deserialize(deserializer)?;
            table::from_bytes(&name, &bytes).map_err(D::Error::custom)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::{Adam, Sgd};

    #[test]
    fn specs_survive_both_kinds_of_formats() {
        for spec in [
            OptimizerSpec::from(Adam::new(0.1 + 0.2).betas(0.8, 1.0 / 3.0)),
            Sgd::new(1e-300).nesterov(true).momentum(0.1).into(),
        ] {
            let bytes = postcard::to_stdvec(&spec).unwrap();
            assert_eq!(postcard::from_bytes::<OptimizerSpec>(&bytes).unwrap(), spec);
            let text = serde_json::to_string(&spec).unwrap();
            assert_eq!(serde_json::from_str::<OptimizerSpec>(&text).unwrap(), spec);
        }
        // Infinite rates are torch's to allow; bytes carry them.
        let endless = OptimizerSpec::from(Sgd::new(f64::INFINITY));
        assert_eq!(
            postcard::from_bytes::<OptimizerSpec>(&postcard::to_stdvec(&endless).unwrap()).unwrap(),
            endless
        );
    }

    #[test]
    fn what_arrives_is_checked() {
        let bytes = postcard::to_stdvec(&OptimizerSpec::from(Sgd::new(-1.0))).unwrap();
        assert!(postcard::from_bytes::<OptimizerSpec>(&bytes).is_err());
        let short = postcard::to_stdvec(&("SGD", vec![0u8; 3])).unwrap();
        assert!(postcard::from_bytes::<OptimizerSpec>(&short).is_err());
        let long = postcard::to_stdvec(&("SGD", vec![0u8; 64])).unwrap();
        assert!(postcard::from_bytes::<OptimizerSpec>(&long).is_err());
    }

    #[test]
    fn unknown_names_options_and_types_are_refused() {
        let kind = |name: &str, options: Value| OptimizerSpec::from_json(name, &options).unwrap_err().kind().clone();
        assert!(matches!(kind("Sgd", json!({})), ErrorKind::UnknownOptimizer { name, known } if name == "Sgd" && known.contains("SGD")));
        assert!(matches!(kind("SGD", json!({"foreach": true})), ErrorKind::UnknownOption { option, .. } if option == "foreach"));
        assert!(matches!(kind("Adam", json!({"betas": 0.9})), ErrorKind::OptionValue { option, .. } if option == "betas"));
        assert!(matches!(kind("Adam", json!({"lr": null})), ErrorKind::OptionValue { option, .. } if option == "lr"));
        assert!(matches!(kind("Adam", json!([1])), ErrorKind::OptionValue { .. }));
        assert_eq!(OptimizerSpec::from_json("Adam", &Value::Null).unwrap(), Adam::default().into());
    }

    #[test]
    fn options_are_replaced_by_name() {
        let spec = OptimizerSpec::from(Sgd::new(0.1).momentum(0.9));
        assert_eq!(spec.with_options(&json!({"lr": 0.2})).unwrap(), Sgd::new(0.2).momentum(0.9).into());
        assert!(spec.with_options(&json!({"momentum": 0.0, "nesterov": true})).is_err());
        assert_eq!(spec.option("momentum"), Some(json!(0.9)));
        assert_eq!(spec.downcast::<Sgd>().map(|sgd| sgd.lr), Some(0.1));
    }
}

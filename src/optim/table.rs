//! The table of rules: the crate's own, and those that a program registers.

use std::collections::HashMap;
use std::sync::Arc;

use serde::de::Error as _;
use serde_json::{Map, Value};

use super::erased::ErasedRule;
use super::rules::*;
use super::{OptimizerSpec, Rule};
use crate::{ErrorKind, Result};

/// The crate's rules. A new one is its file and a row here.
static RULES: &[Registration] = &[
    Registration::of::<Adadelta>(),
    Registration::of::<Adafactor>(),
    Registration::of::<Adagrad>(),
    Registration::of::<Adam>(),
    Registration::of::<Adamax>(),
    Registration::of::<AdamW>(),
    Registration::of::<Asgd>(),
    Registration::of::<Lamb>(),
    Registration::of::<Lion>(),
    Registration::of::<Muon>(),
    Registration::of::<NAdam>(),
    Registration::of::<RAdam>(),
    Registration::of::<RmsProp>(),
    Registration::of::<Rprop>(),
    Registration::of::<Sgd>(),
    Registration::of::<SparseAdam>(),
];

/// One rule, as it is found by its name. Programs register their own with [`remote_optimizer!`](crate::remote_optimizer).
#[derive(Debug, Clone, Copy)]
pub struct Registration {
    name: &'static str,
    type_name: fn() -> &'static str,
    /// The default options, in their order, as JSON.
    text: fn() -> String,
    defaults: fn() -> Value,
    from_json: fn(Value) -> serde_json::Result<Arc<dyn ErasedRule>>,
    from_bytes: fn(&[u8]) -> postcard::Result<Arc<dyn ErasedRule>>,
}

inventory::collect!(Registration);

impl Registration {
    /// The registration of rule `R`.
    pub const fn of<R: Rule>() -> Self {
        Self {
            name: R::NAME,
            type_name: std::any::type_name::<R>,
            text: || serde_json::to_string(&R::default()).unwrap_or_default(),
            defaults: || R::default().options(),
            from_json: |options| Ok(Arc::new(serde_json::from_value::<R>(options)?)),
            from_bytes: |bytes| match postcard::take_from_bytes::<R>(bytes)? {
                (rule, []) => Ok(Arc::new(rule)),
                _ => Err(postcard::Error::custom("bytes are left over")),
            },
        }
    }

    /// The rule's name.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

fn all() -> impl Iterator<Item = &'static Registration> {
    RULES.iter().chain(inventory::iter::<Registration>())
}

/// Names of all rules that this program knows: the crate's own, then those that it registered.
pub fn names() -> Vec<&'static str> {
    all().map(Registration::name).collect()
}

/// One line a rule, sorted: what ranks compare at the start, since options travel by their order.
pub(crate) fn listing() -> Vec<String> {
    let mut lines: Vec<String> = all().map(|rule| format!("optimizer {} {}", rule.name, (rule.text)())).collect();
    lines.sort();
    lines
}

/// Refuses two rules of one name.
///
/// # Errors
/// [`ErrorKind::Init`], naming it.
pub(crate) fn check() -> Result<()> {
    check_names(all())
}

fn check_names<'a>(rules: impl Iterator<Item = &'a Registration>) -> Result<()> {
    let mut known = HashMap::new();
    for rule in rules {
        if let Some(first) = known.insert(rule.name, rule.type_name) {
            return Err(ErrorKind::Init {
                what: format!("two optimizers are called `{}`: {} and {}", rule.name, first(), (rule.type_name)()),
                cure: "give one of them another `Rule::NAME`".into(),
            }
            .into());
        }
    }
    Ok(())
}

fn find(name: &str) -> Result<&'static Registration> {
    match all().find(|rule| rule.name == name) {
        Some(rule) => Ok(rule),
        None => Err(ErrorKind::UnknownOptimizer {
            name: name.into(),
            known: names().join(", "),
        }
        .into()),
    }
}

/// The rule `name` with its default options, some of them replaced.
pub(super) fn from_json(name: &str, options: &Value) -> Result<OptimizerSpec> {
    let rule = find(name)?;
    spec(rule, (rule.defaults)(), options)
}

/// `spec` with some of its options replaced.
pub(super) fn with_options(old: &OptimizerSpec, options: &Value) -> Result<OptimizerSpec> {
    spec(find(old.name())?, old.to_json(), options)
}

fn spec(rule: &Registration, all: Value, options: &Value) -> Result<OptimizerSpec> {
    let rule = replace(rule.name, all, options, rule.from_json)?;
    rule.check()?;
    Ok(OptimizerSpec::erased(rule))
}

/// Options of `optimizer` with some of them replaced, as `parse` makes them; unchecked.
pub(super) fn replace<T>(optimizer: &str, mut all: Value, options: &Value, parse: impl Fn(Value) -> serde_json::Result<T>) -> Result<T> {
    let refused = |option: &str, value: &Value, bound: String| {
        Err(ErrorKind::OptionValue {
            optimizer: optimizer.into(),
            option: option.into(),
            value: value.to_string(),
            bound,
        }
        .into())
    };
    let none = Map::new();
    let given = match options {
        Value::Object(given) => given,
        Value::Null => &none,
        other => return refused("options", other, "an object of options by name".into()),
    };
    for (option, value) in given {
        let Some(place) = all.get_mut(option) else {
            let known = all
                .as_object()
                .map(|o| o.keys().map(String::as_str).collect::<Vec<_>>().join(", "))
                .unwrap_or_default();
            return Err(ErrorKind::UnknownOption {
                optimizer: optimizer.into(),
                option: option.clone(),
                known,
            }
            .into());
        };
        *place = value.clone();
        // One option at a time, so that the one of a wrong type is named.
        if let Err(error) = parse(all.clone()) {
            return refused(option, value, format!("of the option's type ({error})"));
        }
    }
    parse(all).or_else(|error| refused("options", options, error.to_string()))
}

/// The rule `name` from the bytes of its options.
pub(super) fn from_bytes(name: &str, bytes: &[u8]) -> Result<OptimizerSpec> {
    let rule = (find(name)?.from_bytes)(bytes).map_err(|error| ErrorKind::Decode {
        what: format!("options of {name}: {error}"),
    })?;
    rule.check()?;
    Ok(OptimizerSpec::erased(rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_rules_of_one_name_are_refused() {
        assert!(check().is_ok());
        let error = check_names(RULES.iter().chain([&Registration::of::<Sgd>()])).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Init { what, .. } if what.contains("`SGD`") && what.contains("::Sgd")),
            "{error}"
        );
    }

    #[test]
    fn the_listing_has_each_rule_with_its_options_in_order() {
        let lines = listing();
        assert_eq!(lines.len(), names().len());
        let sgd = lines.iter().find(|line| line.starts_with("optimizer SGD "));
        assert!(
            sgd.is_some_and(|line| line.contains(r#"{"lr":0.001,"momentum":0.0,"dampening""#)),
            "{sgd:?}"
        );
    }
}

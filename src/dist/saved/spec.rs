//! A rule with its options in a manifest.

use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::optim::OptimizerSpec;

/// Rule and options by name, for readers; and as bytes where JSON can't hold them (an infinite rate).
#[derive(Debug, Clone)]
pub(super) struct WrittenSpec(pub OptimizerSpec);

/// What a manifest says of an optimizer that is made of groups.
#[derive(Serialize, Deserialize)]
pub(super) struct Header {
    pub groups: Vec<Group>,
}

/// Parameters with the same options.
#[derive(Serialize, Deserialize)]
pub(super) struct Group {
    #[serde(flatten)]
    pub spec: WrittenSpec,
    pub parameters: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Fields {
    rule: String,
    options: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bytes: Option<Vec<u8>>,
}

impl Serialize for WrittenSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (rule, options) = (self.0.name().to_owned(), self.0.to_json());
        let is_exact = OptimizerSpec::from_json(&rule, &options).is_ok_and(|spec| spec == self.0);
        let bytes = match is_exact {
            true => None,
            false => Some(postcard::to_stdvec(&self.0).map_err(S::Error::custom)?),
        };
        Fields { rule, options, bytes }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for WrittenSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Fields { rule, options, bytes } = Fields::deserialize(deserializer)?;
        let spec = match bytes {
            Some(bytes) => postcard::from_bytes(&bytes).map_err(D::Error::custom)?,
            None => OptimizerSpec::from_json(&rule, &options).map_err(D::Error::custom)?,
        };
        Ok(WrittenSpec(spec))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::{Adam, Sgd};

    #[test]
    fn options_come_back_to_the_bit_also_those_that_json_lacks() {
        for spec in [
            OptimizerSpec::from(Adam::new(0.1 + 0.2).betas(0.8, 1.0 / 3.0)),
            Sgd::new(f64::INFINITY).momentum(5e-324).into(),
        ] {
            let text = serde_json::to_string(&WrittenSpec(spec.clone())).unwrap();
            assert_eq!(serde_json::from_str::<WrittenSpec>(&text).unwrap().0, spec);
        }
        let wrong = r#"{"rule": "SGD", "options": {"lr": -1.0}}"#;
        assert!(serde_json::from_str::<WrittenSpec>(wrong).is_err());
    }
}

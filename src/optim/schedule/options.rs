//! Options of schedules: a struct with torch's names and defaults, its builder, and how it is read from and written to JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{ErrorKind, Result};

/// Declares the options of a schedule: the struct, `new` of those that torch asks for (in parentheses), and one builder method for each other one.
///
/// A name that isn't Rust's is given after `as`.
macro_rules! schedule {
    ($(#[$doc:meta])* $schedule:ident($($(#[$needed_doc:meta])* $needed:ident $(as $needed_key:literal)?: $needed_type:ty),* $(,)?)
        { $($(#[$field_doc:meta])* $field:ident $(as $key:literal)?: $type:tt = $default:expr;)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $schedule {
            $($(#[$needed_doc])* pub $needed: $needed_type,)*
            $($(#[$field_doc])* pub $field: $crate::remote_optimizer!(@type $type),)*
        }

        impl $schedule {
            /// The schedule with torch's defaults for what isn't given here. Options are checked when it is used.
            #[allow(clippy::new_without_default, reason = "most schedules need arguments, and all are made alike")]
            pub fn new($($needed: $needed_type),*) -> Self {
                Self { $($needed,)* $($field: $default,)* }
            }

            $($crate::remote_optimizer! { @setter $(#[$field_doc])* $field $type })*
        }

        $crate::optim::schedule::options::defaults!($schedule $($needed)*);

        impl $crate::optim::schedule::options::Options for $schedule {
            fn read(given: &mut $crate::optim::schedule::options::Given) -> $crate::Result<Self> {
                use $crate::optim::schedule::options::key;
                Ok(Self {
                    $($needed: given.needed(key!($needed $($needed_key)?))?,)*
                    $($field: given.or(key!($field $($key)?), || $default)?,)*
                })
            }

            fn write(&self) -> serde_json::Result<serde_json::Map<String, serde_json::Value>> {
                use $crate::optim::schedule::options::{key, pair};
                [
                    $(pair(key!($needed $($needed_key)?), &self.$needed),)*
                    $(pair(key!($field $($key)?), &self.$field),)*
                ].into_iter().collect()
            }
        }
    };
}
pub(super) use schedule;

/// A schedule that asks for nothing is its own default.
macro_rules! defaults {
    ($schedule:ident) => {
        impl Default for $schedule {
            fn default() -> Self {
                Self::new()
            }
        }
    };
    ($schedule:ident $($needed:ident)+) => {};
}
pub(super) use defaults;

/// The name of an option in JSON.
macro_rules! key {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $key:literal) => {
        $key
    };
}
pub(super) use key;

pub(super) fn pair(key: &str, value: &impl Serialize) -> serde_json::Result<(String, Value)> {
    Ok((key.to_owned(), serde_json::to_value(value)?))
}

/// Options as JSON.
pub(super) trait Options: Sized {
    fn read(given: &mut Given) -> Result<Self>;
    fn write(&self) -> serde_json::Result<Map<String, Value>>;
}

/// Options of a schedule as they were given, to be taken one after the other.
#[derive(Debug)]
pub(super) struct Given {
    schedule: &'static str,
    options: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Given {
    pub(super) fn new(schedule: &'static str, options: &Value) -> Result<Self> {
        let options = match options {
            Value::Object(options) => options.clone(),
            Value::Null => Map::new(),
            other => return Err(refused(schedule, "options", other, "an object of options by name".into())),
        };
        let known = vec![];
        Ok(Given { schedule, options, known })
    }

    pub(super) fn needed<T: DeserializeOwned>(&mut self, key: &'static str) -> Result<T> {
        self.take(key)?
            .ok_or_else(|| refused(self.schedule, key, "nothing", "given: it has no default".into()))
    }

    pub(super) fn or<T: DeserializeOwned>(&mut self, key: &'static str, default: impl FnOnce() -> T) -> Result<T> {
        Ok(self.take(key)?.unwrap_or_else(default))
    }

    fn take<T: DeserializeOwned>(&mut self, key: &'static str) -> Result<Option<T>> {
        self.known.push(key);
        let Some(value) = self.options.remove(key) else {
            return Ok(None);
        };
        match serde_json::from_value(value.clone()) {
            Ok(option) => Ok(Some(option)),
            Err(error) => Err(refused(self.schedule, key, &value, format!("of the option's type ({error})"))),
        }
    }

    /// Refuses what wasn't taken.
    pub(super) fn end(self) -> Result<()> {
        match self.options.keys().next() {
            None => Ok(()),
            Some(option) => Err(ErrorKind::UnknownOption {
                optimizer: self.schedule.into(),
                option: option.clone(),
                known: self.known.join(", "),
            }
            .into()),
        }
    }
}

fn refused(schedule: &str, option: &str, value: impl std::fmt::Display, bound: String) -> crate::Error {
    ErrorKind::OptionValue {
        optimizer: schedule.into(),
        option: option.into(),
        value: value.to_string(),
        bound,
    }
    .into()
}

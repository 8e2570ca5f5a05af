//! Options of update rules: a struct with torch's names and defaults, its builder, and the checks they share.

use crate::{ErrorKind, Result};

/// Declares the options of a rule: the struct with torch's defaults, `new`, and one builder method an option.
///
/// Options of type `(A, B)` have builders of two arguments.
macro_rules! options {
    ($(#[$doc:meta])* $rule:ident { $(#[$lr_doc:meta])* lr = $lr:expr; $($(#[$field_doc:meta])* $field:ident: $type:tt = $default:expr;)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $rule {
            $(#[$lr_doc])*
            pub lr: f64,
            $($(#[$field_doc])* pub $field: $crate::optim::options::option_type!($type),)*
        }

        impl Default for $rule {
            fn default() -> Self {
                Self { lr: $lr, $($field: $default,)* }
            }
        }

        impl $rule {
            #[doc = concat!("Default options with learning rate `lr` (torch's default: ", stringify!($lr), ").")]
            pub fn new(lr: f64) -> Self {
                Self { lr, ..Self::default() }
            }

            $($crate::optim::options::option_setter! { $(#[$field_doc])* $field $type })*
        }
    };
}
pub(crate) use options;

/// The type of an option.
macro_rules! option_type {
    ([$type:ty]) => { Option<$type> };
    ($type:ty) => { $type };
}
pub(crate) use option_type;

/// The builder method of an option.
macro_rules! option_setter {
    ($(#[$doc:meta])* $field:ident [$type:ty]) => {
        $(#[$doc])*
        pub fn $field(mut self, value: $type) -> Self {
            self.$field = Some(value);
            self
        }
    };
    ($(#[$doc:meta])* $field:ident ($a:ty, $b:ty)) => {
        $(#[$doc])*
        pub fn $field(mut self, first: $a, second: $b) -> Self {
            self.$field = (first, second);
            self
        }
    };
    ($(#[$doc:meta])* $field:ident $type:ty) => {
        $(#[$doc])*
        pub fn $field(mut self, value: $type) -> Self {
            self.$field = value;
            self
        }
    };
}
pub(crate) use option_setter;

/// Checks of the options of one optimizer; each refuses NaN.
#[derive(Debug, Clone, Copy)]
pub struct Check(
    /// The optimizer's name, for the error.
    pub &'static str,
);

impl Check {
    /// Refuses the option unless `holds`, saying that it must be `bound`.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`].
    pub fn that(self, holds: bool, option: &str, value: impl std::fmt::Debug, bound: &str) -> Result<()> {
        if holds {
            return Ok(());
        }
        Err(ErrorKind::OptionValue {
            optimizer: self.0.into(),
            option: option.into(),
            value: format!("{value:?}"),
            bound: bound.into(),
        }
        .into())
    }

    /// `value >= 0`.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`].
    pub fn at_least_0(self, option: &str, value: f64) -> Result<()> {
        self.that(value >= 0.0, option, value, "at least 0")
    }

    /// Both decay rates in `0 <= beta < 1`.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`].
    pub fn betas(self, betas: (f64, f64)) -> Result<()> {
        let fits = |beta: f64| (0.0..1.0).contains(&beta);
        self.that(
            fits(betas.0) && fits(betas.1),
            "betas",
            betas,
            "two numbers that are at least 0 and below 1",
        )
    }
}

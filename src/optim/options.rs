//! Options of update rules: a struct with its defaults and its builder, and the checks they share.

use crate::{ErrorKind, Result};

/// Registers an update rule of one's own, so that it works by its name and over ranks like a built-in one: in [`OptimizerSpec::from_json`], in a
/// [`DistributedOptimizer`](crate::DistributedOptimizer), in schedules and reports.
///
/// It declares the rule's options: a struct with a public field for each, its defaults, `new(lr)`, and a builder method for each option but `lr`.
/// An option `name: [T] = None` is an `Option<T>`, and one of type `(A, B)` has a builder of two arguments. What the rule does is its [`Rule`]:
///
/// ```
/// use rankgrad::optim::{Float, Form, OptimizerSpec, Rows, Rule, StateArray, StateView, arithmetic, options::Check};
/// use rankgrad::{DistributedOptimizer, prelude::*, remote_optimizer};
///
/// remote_optimizer! {
///     /// Moves against a decaying sum of the gradients.
///     pub struct Trail {
///         /// Learning rate, at least 0.
///         lr = 0.1;
///         /// Share of the sum that is kept, from 0 to 1.
///         keep: f64 = 0.5;
///     }
/// }
///
/// impl Rule for Trail {
///     const NAME: &'static str = "Trail";
///     const SCALARS: &'static [(&'static str, f64)] = &[];
///     const ELEMENTWISE: bool = true;
///
///     fn check(&self) -> Result<()> {
///         Check(Self::NAME).at_least_0("lr", self.lr)?;
///         Check(Self::NAME).that((0.0..=1.0).contains(&self.keep), "keep", self.keep, "from 0 to 1")
///     }
///     fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
///         vec![StateArray::zeros("trail", shape)]
///     }
///     fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
///         let (lr, keep) = (T::of(self.lr), T::of(self.keep));
///         let [trail] = state.arrays(["trail"]);
///         arithmetic::pass1(p, g, trail, #[inline(always)] move |p, g, trail| {
///             *trail = keep * *trail + g;
///             p - lr * *trail
///         });
///     }
/// }
///
/// assert_eq!(OptimizerSpec::from_json("Trail", &serde_json::json!({"keep": 0.25}))?, Trail::new(0.1).keep(0.25).into());
/// rankgrad::local::run(2, |world| {
///     world.lead(|world| {
///         let p = world.put(1, Tensor::from_vec(vec![1.0, 2.0], [2])?)?;
///         let optimizer = DistributedOptimizer::new(world, Trail::new(0.5), [&p])?;
///         for _ in 0..2 {
///             let context = world.context()?;
///             context.accumulate(&p, Gradient::Dense(Tensor::ones(DType::F64, [2]).data()))?;
///             optimizer.step(&context)?;
///         }
///         assert_eq!(p.fetch()?.to_vec::<f64>()?, [-0.25, 0.75]);
///         Ok(())
///     })
/// })
/// # .unwrap();
/// # Ok::<(), rankgrad::Error>(())
/// ```
///
/// `remote_optimizer!(Type)` registers a type that is declared otherwise: any [`Rule`]. The crate that uses the macro needs `serde` with its `derive`.
///
/// All ranks must have the same rules: names, options and defaults are compared when a world starts, which is refused if they differ
/// ([`ErrorKind::Mismatch`]) or if two rules have one name ([`ErrorKind::Init`]). A panic in an update is the error of the step and names the rule ([`ErrorKind::RulePanic`]).
///
/// [`ErrorKind::Init`]: crate::ErrorKind::Init
/// [`ErrorKind::Mismatch`]: crate::ErrorKind::Mismatch
/// [`ErrorKind::RulePanic`]: crate::ErrorKind::RulePanic
/// [`OptimizerSpec::from_json`]: crate::optim::OptimizerSpec::from_json
/// [`Rule`]: crate::optim::Rule
#[macro_export]
macro_rules! remote_optimizer {
    (@options [$vis:vis] [$(#[$doc:meta])*] $rule:ident {
        $(#[$lr_doc:meta])* lr = $lr:expr; $($(#[$field_doc:meta])* $field:ident: $type:tt = $default:expr;)*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        $vis struct $rule {
            $(#[$lr_doc])*
            pub lr: f64,
            $($(#[$field_doc])* pub $field: $crate::remote_optimizer!(@type $type),)*
        }

        impl ::core::default::Default for $rule {
            fn default() -> Self {
                Self { lr: $lr, $($field: $default,)* }
            }
        }

        impl $rule {
            #[doc = concat!("Default options with learning rate `lr` (by default: ", stringify!($lr), ").")]
            pub fn new(lr: f64) -> Self {
                Self { lr, ..::core::default::Default::default() }
            }

            $($crate::remote_optimizer! { @setter $(#[$field_doc])* $field $type })*
        }
    };

    (@type [$type:ty]) => { ::core::option::Option<$type> };
    (@type $type:ty) => { $type };

    (@setter $(#[$doc:meta])* $field:ident [$type:ty]) => {
        $(#[$doc])*
        pub fn $field(mut self, value: $type) -> Self {
            self.$field = ::core::option::Option::Some(value);
            self
        }
    };
    (@setter $(#[$doc:meta])* $field:ident ($a:ty, $b:ty)) => {
        $(#[$doc])*
        pub fn $field(mut self, first: $a, second: $b) -> Self {
            self.$field = (first, second);
            self
        }
    };
    (@setter $(#[$doc:meta])* $field:ident $type:ty) => {
        $(#[$doc])*
        pub fn $field(mut self, value: $type) -> Self {
            self.$field = value;
            self
        }
    };

    ($(#[$doc:meta])* $vis:vis struct $rule:ident { $($options:tt)* }) => {
        $crate::remote_optimizer! { @options [$vis] [$(#[$doc])*] $rule { $($options)* } }
        $crate::remote_optimizer!($rule);
    };

    ($rule:ty) => {
        $crate::optim::inventory::submit! { $crate::optim::Registration::of::<$rule>() }
    };
}

/// Declares the options of a rule of the crate, which the table of rules registers.
macro_rules! options {
    ($(#[$doc:meta])* $rule:ident { $($options:tt)* }) => {
        $crate::remote_optimizer! { @options [pub] [$(#[$doc])*] $rule { $($options)* } }
    };
}
pub(crate) use options;

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

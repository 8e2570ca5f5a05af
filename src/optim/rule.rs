//! What an update rule is.

use serde::{Serialize, de::DeserializeOwned};

use super::{Float, StateView, Step};
use crate::Result;

/// An array that a rule keeps for each parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct StateArray {
    /// Its name; torch's where torch has the rule.
    pub name: &'static str,
    /// Its shape; mostly the parameter's.
    pub shape: Vec<usize>,
    /// What it holds before the first update.
    pub fill: f64,
}

impl StateArray {
    /// An array of zeros in the parameter's shape.
    pub fn zeros(name: &'static str, shape: &[usize]) -> Self {
        Self::filled(name, shape, 0.0)
    }

    /// An array of one value.
    pub fn filled(name: &'static str, shape: &[usize], fill: f64) -> Self {
        Self {
            name,
            shape: shape.to_vec(),
            fill,
        }
    }
}

/// The form in which a rule takes a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// All elements: [`Rule::update`].
    Dense,
    /// The touched rows, each once: [`Rule::update_rows`].
    Rows,
}

/// The rows of a gradient that were touched, each once.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T> {
    /// Row numbers, ascending.
    pub rows: &'a [i64],
    /// Their elements, row after row.
    pub values: &'a [T],
}

impl<'a, T> Rows<'a, T> {
    /// Each row as the range of its elements in the parameter, and its gradient.
    pub fn iter(self) -> impl Iterator<Item = (std::ops::Range<usize>, &'a [T])> {
        let width = self.values.len().checked_div(self.rows.len()).unwrap_or(0);
        // A row of no elements has nothing to update.
        self.rows.iter().zip(self.values.chunks(width.max(1))).map(move |(&row, values)| {
            let start = row as usize * width;
            (start..start + width, values)
        })
    }
}

/// An update rule: its options, the state it keeps for each parameter, and one step for one parameter over slices.
///
/// A rule knows nothing of tensors, graphs or ranks. The struct itself holds the options, under the names that JSON and
/// [`OptimizerSpec`](super::OptimizerSpec) use. To repeat to the bit everywhere, a rule computes coefficients once a step
/// in `f64` and uses only the operations of [`Float`] on elements, in one fixed order.
///
/// A panic in an update is the error of its step ([`ErrorKind::RulePanic`](crate::ErrorKind::RulePanic)); the parameter may be half updated then.
///
/// A rule of one's own works like those of the crate; with [`remote_optimizer!`](crate::remote_optimizer) by its name and over ranks, too:
///
/// ```
/// use rankgrad::Result;
/// use rankgrad::optim::{Float, Optimizer, Rule, StateArray, StateView, arithmetic, options::Check};
/// use rankgrad::tensor::Tensor;
/// use serde::{Deserialize, Serialize};
///
/// /// Moves by `lr` against the gradient's sign.
/// #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
/// struct SignDescent {
///     lr: f64,
/// }
///
/// impl Rule for SignDescent {
///     const NAME: &'static str = "SignDescent";
///     const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];
///     const ELEMENTWISE: bool = true; // large parameters may come in pieces
///
///     fn check(&self) -> Result<()> {
///         Check(Self::NAME).at_least_0("lr", self.lr)
///     }
///     fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
///         vec![] // zeros in the parameter's shape: StateArray::zeros("exp_avg", shape)
///     }
///     fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
///         state.count();
///         let lr = T::of(self.lr);
///         arithmetic::pass0(p, g, #[inline(always)] move |p, g| p - lr * arithmetic::sign(g));
///     }
/// }
///
/// let p = Tensor::from_vec(vec![1.0, 2.0], 2)?.parameter()?;
/// let gradient = Tensor::from_vec(vec![3.0, -0.1], 2)?.data();
/// Optimizer::new(SignDescent { lr: 0.5 }, vec![p.clone()])?.step_one(0, gradient.into())?;
/// assert_eq!(p.to_vec::<f64>()?, [0.5, 2.5]);
/// # Ok::<(), rankgrad::Error>(())
/// ```
pub trait Rule: Clone + Default + PartialEq + std::fmt::Debug + Serialize + DeserializeOwned + Send + Sync + 'static {
    /// Its name, for [`OptimizerSpec::from_json`](super::OptimizerSpec::from_json) and errors; torch's where torch has it.
    const NAME: &'static str;

    /// The numbers it keeps for each parameter, with their first values.
    const SCALARS: &'static [(&'static str, f64)];

    /// Whether an update treats each element by itself: from its own values, the options and the numbers of the state alone, which it changes whatever
    /// the elements are. Then [`Rule::update`] may get a large parameter in pieces, also on several threads; each piece sees the numbers as they were
    /// before, and none sees which elements of the parameter it has.
    const ELEMENTWISE: bool = false;

    /// Whether an update treats each row by itself, with state in the parameter's shape and numbers that don't depend on the rows. Then rows of a
    /// [`Sharded`](crate::Sharded) array may be split otherwise when a checkpoint is loaded.
    const BY_ROWS: bool = Self::ELEMENTWISE;

    /// Checks the options.
    ///
    /// # Errors
    /// [`ErrorKind::OptionValue`](crate::ErrorKind::OptionValue), naming option, value and bound.
    fn check(&self) -> Result<()>;

    /// The arrays it keeps for a parameter of this shape under these options.
    fn arrays(&self, shape: &[usize]) -> Vec<StateArray>;

    /// The form in which it takes gradients that are dense, or sparse.
    ///
    /// # Errors
    /// Why it doesn't take them, and what does.
    fn form(&self, sparse: bool) -> Result<Form, &'static str> {
        if sparse {
            Err("its gradient is sparse; SGD, Adagrad and SparseAdam take such, or make it dense")
        } else {
            Ok(Form::Dense)
        }
    }

    /// Whether it takes parameters of this shape.
    ///
    /// # Errors
    /// Why it doesn't.
    fn takes_shape(&self, _shape: &[usize]) -> Result<(), &'static str> {
        Ok(())
    }

    /// The numbers of the next update of a parameter, if it can be made on a GPU; it counts the step, and sets what [`Rule::update`] would set.
    ///
    /// The crate's rules have it. Without it (the default) a parameter on a GPU is updated by [`Rule::update`] on a copy here.
    fn step<T: Float>(&self, _state: &mut StateView<'_, T>) -> Option<Step> {
        None
    }

    /// One step: moves `p` along `g`, of the same length, and updates the state.
    ///
    /// It needs no optimizer: with a [`StateView`] of slices a rule runs on memory of any kind.
    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>);

    /// One step for the touched rows of a sparse gradient; called only if [`Rule::form`] asks for rows.
    fn update_rows<T: Float>(&self, _p: &mut [T], _g: Rows<'_, T>, _state: &mut StateView<'_, T>) {
        unreachable!("{} asks for rows and doesn't define `update_rows`", Self::NAME)
    }
}

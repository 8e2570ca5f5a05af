//! The optimizer in backward: each parameter is updated as soon as its gradient is complete, and the gradient is freed at once.
//!
//! So no more than one gradient, or a few, is alive at a time, where backward followed by a step holds those of all parameters.
//! The results are the same to the bit, as long as no update needs the gradients of others.
//!
//! An optimizer is attached to a leaf and lives with it. It fires in local backwards and, on the leaf's rank, in distributed
//! ones: once in each, when all contributions to the leaf have arrived, however often and from wherever the leaf was used.
//! Afterwards the leaf has no gradient, in [`grad`](Tensor::grad) or in the context, and another optimizer finds none.
//! Backwards that overlap on one leaf, of several threads or contexts, update it one after the other.
//!
//! An update can't be undone: if a backward fails, leaves that were complete before have been updated. A graph that was
//! retained keeps the values that it saw, and a second backward through it goes by them.

mod attached;
mod gathered;
pub(crate) mod groups;
mod leaf;
mod optimizers;
mod options;
#[cfg(test)]
mod tests;

use super::OptimizerSpec;
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

use attached::Attached;
pub(crate) use attached::Observer;
pub(crate) use groups::Groups;
pub use optimizers::InBackwardOptimizers;
pub use options::InBackward;

/// What optimizers in backward can be attached to: a [`Tensor`] of this rank, or an [`RRef`](crate::RRef) to one on any rank. Not to be implemented elsewhere.
pub trait Target: Sized {
    /// The optimizers attached to a list of such.
    type Optimizers;

    #[doc(hidden)]
    fn attach(spec: OptimizerSpec, parameters: Vec<Self>, options: InBackward) -> Result<Self::Optimizers>;

    #[doc(hidden)]
    fn attached(parameters: Vec<Self>) -> Result<Self::Optimizers>;
}

impl<T: Target + Clone> Target for &T {
    type Optimizers = T::Optimizers;

    fn attach(spec: OptimizerSpec, parameters: Vec<Self>, options: InBackward) -> Result<T::Optimizers> {
        T::attach(spec, parameters.into_iter().cloned().collect(), options)
    }

    fn attached(parameters: Vec<Self>) -> Result<T::Optimizers> {
        T::attached(parameters.into_iter().cloned().collect())
    }
}

impl Target for Tensor {
    type Optimizers = InBackwardOptimizers;

    fn attach(spec: OptimizerSpec, parameters: Vec<Self>, options: InBackward) -> Result<InBackwardOptimizers> {
        InBackwardOptimizers::attach(&spec, &options, parameters.into_iter().enumerate(), None)
    }

    fn attached(parameters: Vec<Self>) -> Result<InBackwardOptimizers> {
        Ok(InBackwardOptimizers::of(&parameters))
    }
}

/// Attaches an optimizer to each of these parameters: it updates the parameter within every backward, as soon as the
/// gradient is complete, and the gradient is freed. They stay until they are detached, or the parameter is gone.
///
/// For tensors: local, blocks on nothing. For [`RRef`](crate::RRef)s: targeted, asks all owners at once and blocks until all
/// have answered; the optimizers live on the owners. Each occurrence in the list gets an optimizer and state of its own.
/// Several on one leaf, from one call or more, run in the order they were attached, each on the whole gradient.
///
/// ```
/// use rankgrad::optim::{InBackward, Sgd, optimizer_in_backward};
/// use rankgrad::tensor::Tensor;
///
/// let w = Tensor::from_vec(vec![1.0, 2.0], 2)?.parameter()?;
/// let b = Tensor::from_vec(vec![1.0, 1.0], 2)?.parameter()?;
/// let mut weights = optimizer_in_backward(Sgd::new(0.5), [&w], InBackward::default())?;
/// optimizer_in_backward(Sgd::new(0.25), [&b], InBackward::default())?; // another rate for biases
/// ((&w * &w)? + &b)?.sum()?.backward()?;
/// assert_eq!((w.to_vec::<f64>()?, b.to_vec::<f64>()?), (vec![0.0, 0.0], vec![0.75, 0.75]));
/// assert!(w.grad().is_none());
/// weights.set_lr(0.1)?;
/// weights.detach();
/// # Ok::<(), rankgrad::Error>(())
/// ```
///
/// Over ranks:
///
/// ```
/// use rankgrad::prelude::*;
///
/// remote! {
///     fn layer(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
///         x.mul(&w.local(scope)?)
///     }
/// }
///
/// rankgrad::local::run(2, |world| {
///     world.lead(|world| {
///         let w = world.put(1, Tensor::from_vec(vec![1.0, 2.0], 2)?)?;
///         let attached = optimizer_in_backward(Sgd::new(0.5), [&w], InBackward::default())?;
///         let ctx = world.context()?;
///         let y = ctx.call(1, layer, (Tensor::from_vec(vec![1.0, 3.0], 2)?, &w))?;
///         ctx.backward(&[y.sum()?])?; // rank 1 has updated w
///         assert_eq!(w.fetch()?.to_vec::<f64>()?, [0.5, 0.5]);
///         assert!(ctx.gradient(&w)?.is_none());
///         attached.detach()
///     })
/// })
/// # .unwrap();
/// ```
///
/// # Errors
/// Nothing is attached then, anywhere.
/// - [`ErrorKind::NotALeaf`], with the parameter's place and name: it was computed, requires no gradient, or is frozen.
/// - [`ErrorKind::OptionValue`]: an option is out of its bound. [`ErrorKind::NoParameters`].
/// - [`ErrorKind::Argument`]: [`InBackward::clip_norm`] and [`InBackward::all_or_nothing`], which need all gradients at once; or
///   the rule doesn't take a parameter of this shape.
/// - [`ErrorKind::Owners`], for references: every owner that failed, with the above.
pub fn optimizer_in_backward<P: Target>(
    spec: impl Into<OptimizerSpec>,
    parameters: impl IntoIterator<Item = P>,
    options: InBackward,
) -> Result<P::Optimizers> {
    let (spec, parameters): (OptimizerSpec, Vec<P>) = (spec.into(), parameters.into_iter().collect());
    spec.check()?;
    options.check(&spec)?;
    if parameters.is_empty() {
        return Err(ErrorKind::NoParameters {
            optimizer: spec.name().into(),
        }
        .into());
    }
    P::attach(spec, parameters, options)
}

/// The optimizers attached to these parameters: in the order of the parameters, and for each in the order they were
/// attached; of a parameter that is listed twice, once. For checkpoints and schedules, or to detach them.
///
/// For tensors: local. For [`RRef`](crate::RRef)s: targeted, asks all owners at once and blocks until all have answered.
///
/// # Errors
/// None for tensors. [`ErrorKind::Owners`] for references that don't refer to tensors or can't be asked for.
pub fn optimizers_in_backward<P: Target>(parameters: impl IntoIterator<Item = P>) -> Result<P::Optimizers> {
    P::attached(parameters.into_iter().collect())
}

/// The guard of a mutex, also after a panic.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

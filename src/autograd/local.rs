//! Backward within one rank.

use std::sync::Arc;

use super::engine::{Backward, LeafSink};
use super::hooks::LeafHooks;
use crate::tensor::graph::{Edge, Key};
use crate::tensor::{Data, Gradient, Leaf, Tensor};
use crate::{ErrorKind, Result};

/// Computes the gradients of the sum of the roots and adds them to the `grad` of the leaves they were computed from;
/// then runs each leaf's post-accumulate hooks. Local; runs on the calling thread.
///
/// What the graph saved is freed on the way unless `retain_graph`.
///
/// # Errors
/// In this order: [`ErrorKind::NoRoots`], and for each root [`ErrorKind::RootWithoutGradient`], then
/// [`ErrorKind::RootNotScalar`], then [`ErrorKind::RootIsLeaf`]. [`ErrorKind::GraphFreed`] when an earlier backward freed
/// a part of the graph, [`ErrorKind::Argument`] when it leads to values received from another rank (use the context's
/// backward); in these cases no gradient was accumulated. Errors of a [`Function`](super::Function) or of a hook end it
/// midway: leaves that were complete keep their gradients, and updates that hooks made. [`ErrorKind::InBackward`] when an
/// [optimizer in backward](crate::optim::in_backward) fails.
///
/// ```
/// use rankgrad::{autograd::backward, tensor::Tensor};
/// # fn main() -> rankgrad::Result<()> {
/// let w = Tensor::scalar(3.0).parameter()?;
/// let (square, double) = ((&w * &w)?, (&w + &w)?);
/// backward(&[square, double], false)?;
/// assert_eq!(w.grad().map(|g| g.to_dense().unwrap().view::<f64>().unwrap()[[]]), Some(8.0));
/// # Ok(())
/// # }
/// ```
pub fn backward(roots: &[Tensor], retain_graph: bool) -> Result<()> {
    check_roots(roots)?;
    let edges: Vec<Option<Edge>> = roots.iter().map(Tensor::edge).collect();
    let key = Key::next();
    let mut backward = Backward::new(retain_graph);
    if !backward.mark(&key, &edges)?.is_empty() {
        let what = "the roots were computed from values of another rank; use `backward` of the context they were received in";
        return Err(ErrorKind::Argument {
            op: "backward".into(),
            what: what.into(),
        }
        .into());
    }
    backward.give(&key, &edges, roots.iter().map(|root| Some(one_like(root))))?;
    backward.run(&mut Accumulate::default())?;
    Ok(())
}

/// The gradient of a root: one, in the root's shape.
pub(crate) fn one_like(root: &Tensor) -> Gradient {
    Gradient::Dense(Data::filled(root.dtype(), root.data().shape(), 1.0))
}

/// Checks what a backward can start from, in the order and with the meaning of torch's checks.
///
/// # Errors
/// Those named at [`backward`], before the graph is looked at.
pub(crate) fn check_roots(roots: &[Tensor]) -> Result<()> {
    if roots.is_empty() {
        return Err(ErrorKind::NoRoots.into());
    }
    for (root, tensor) in roots.iter().enumerate() {
        if !tensor.requires_grad() {
            return Err(ErrorKind::RootWithoutGradient { root }.into());
        }
        if tensor.len() != 1 {
            return Err(ErrorKind::RootNotScalar {
                root,
                shape: tensor.shape(),
            }
            .into());
        }
        if tensor.leaf().is_some() {
            return Err(ErrorKind::RootIsLeaf { root }.into());
        }
    }
    Ok(())
}

/// Gathers gradients in the leaves themselves.
#[derive(Default)]
struct Accumulate(LeafHooks);

impl LeafSink for Accumulate {
    fn complete(&mut self, leaf: &Arc<Leaf>, gradient: Gradient) -> Result<()> {
        leaf.complete_grad(gradient, |slot| self.0.run(leaf, slot))
    }
}

impl Tensor {
    /// Computes the gradients of this one-element tensor; see [`backward`].
    ///
    /// # Errors
    /// Those of [`backward`].
    pub fn backward(&self) -> Result<()> {
        self.backward_with(false)
    }

    /// Like [`Tensor::backward`]; with `retain_graph` the graph stays usable for another one.
    ///
    /// # Errors
    /// Those of [`backward`].
    pub fn backward_with(&self, retain_graph: bool) -> Result<()> {
        backward(std::slice::from_ref(self), retain_graph)
    }
}

//! A user's own operations.

use std::borrow::Cow;

use ndarray::{ArrayD, ArrayViewD};

use crate::tensor::graph::{Edge, Node, grad_enabled};
use crate::tensor::{Data, Float, Gradient, Spec, Tensor};
use crate::{ErrorKind, Result};

/// An operation with a forward and an adjoint of its own, such as a solver, over arrays of `f32` or `f64`.
///
/// The function is moved into the graph and lives until the graph is freed; settings that have no gradient are its
/// fields. See [`apply`] for an example.
pub trait Function<T: Float>: Send + 'static {
    /// What forward keeps for the adjoint.
    type Saved: Send + 'static;

    /// Its name in errors.
    fn name(&self) -> Cow<'static, str> {
        Cow::Borrowed(std::any::type_name::<Self>())
    }

    /// Computes the outputs, and what the adjoint will need.
    ///
    /// # Errors
    /// Any; [`apply`] returns it.
    fn forward(&self, inputs: &[ArrayViewD<'_, T>]) -> Result<(Vec<ArrayD<T>>, Self::Saved)>;

    /// From the gradients of the outputs to those of the inputs. An output that took no part in the loss has a gradient of
    /// zeros. `needs` says which inputs want a gradient; `None` for an input means that none flows there.
    ///
    /// # Errors
    /// Any; `backward` returns it.
    fn adjoint(&self, saved: &Self::Saved, gradients: &[ArrayViewD<'_, T>], needs: &[bool]) -> Result<Vec<Option<ArrayD<T>>>>;
}

/// Runs a function on tensors and records it.
///
/// # Errors
/// [`ErrorKind::DType`] for an input that isn't of `T`, and what `forward` returns. In `backward`: what `adjoint` returns,
/// [`ErrorKind::Argument`] for a wrong number of gradients, [`ErrorKind::Shape`] for one whose shape isn't its input's.
///
/// ```
/// use ndarray::{ArrayD, ArrayViewD};
/// use rankgrad::{Result, autograd::{Function, apply}, tensor::Tensor};
///
/// /// The cube of each element.
/// struct Cube;
///
/// impl Function<f64> for Cube {
///     type Saved = ArrayD<f64>;
///
///     fn forward(&self, inputs: &[ArrayViewD<'_, f64>]) -> Result<(Vec<ArrayD<f64>>, ArrayD<f64>)> {
///         let x = inputs[0].to_owned();
///         Ok((vec![&x * &x * &x], x))
///     }
///
///     fn adjoint(&self, x: &ArrayD<f64>, gradients: &[ArrayViewD<'_, f64>], _: &[bool]) -> Result<Vec<Option<ArrayD<f64>>>> {
///         Ok(vec![Some(x * x * 3.0 * &gradients[0])])
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let x = Tensor::from_vec(vec![1.0, 2.0], 2)?.parameter()?;
/// apply(Cube, &[&x])?[0].sum()?.backward()?;
/// assert_eq!(Tensor::from_data(x.grad().unwrap().to_dense()?).to_vec::<f64>()?, [3.0, 12.0]);
/// # Ok(())
/// # }
/// ```
pub fn apply<T: Float, F: Function<T>>(function: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let name = function.name();
    let arrays = inputs
        .iter()
        .map(|input| {
            input.array::<T>().map_err(|_| {
                ErrorKind::DType {
                    op: name.to_string(),
                    expected: T::DTYPE.to_string(),
                    found: input.dtype().to_string(),
                }
                .into()
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let views: Vec<_> = arrays.iter().map(|array| array.view()).collect();
    let (outputs, saved) = function.forward(&views)?;
    let outputs: Vec<Data> = outputs.into_iter().map(|array| T::wrap(array.into_shared())).collect();
    let edges: Vec<Option<Edge>> = inputs.iter().map(|input| input.edge()).collect();
    if !grad_enabled() || edges.iter().all(Option::is_none) {
        return Ok(outputs.into_iter().map(Tensor::from_data).collect());
    }
    let adjoint_name = name.clone();
    let adjoint = move |gradients: &mut Vec<Data>, needs: crate::tensor::graph::Needs<'_>| {
        let views = gradients.iter().map(Data::view::<T>).collect::<Result<Vec<_>>>()?;
        let needs = needs.to_vec();
        let results = function.adjoint(&saved, &views, &needs)?;
        if results.len() != needs.len() {
            let what = format!("its adjoint returned {} gradients for {} inputs", results.len(), needs.len());
            return Err(ErrorKind::Argument {
                op: adjoint_name.to_string(),
                what,
            }
            .into());
        }
        Ok(results
            .into_iter()
            .map(|array| array.map(|array| Gradient::Dense(T::wrap(array.into_shared()))))
            .collect())
    };
    let specs = outputs.iter().map(Spec::of).collect();
    let node = Node::op(name, edges, specs, Box::new(adjoint));
    Ok(outputs
        .into_iter()
        .enumerate()
        .map(|(slot, data)| Tensor::with_edge(data, Edge { node: node.clone(), slot }))
        .collect())
}

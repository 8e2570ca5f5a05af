//! Operations, by family. Each computes its output on arrays and records an adjoint: a closure over what it saved that
//! maps the gradient of the output to gradients of the inputs.

mod compare;
mod elementwise;
mod index;
mod kernel;
mod loss;
mod matmul;
mod operators;
mod pairwise;
mod reduce;
mod shape;
mod softmax;

use std::borrow::Cow;

use ndarray::{ArcArray, IxDyn};

pub use elementwise::Gelu;
pub use loss::Reduction;

use super::graph::{Edge, Gradients, Needs, Node, grad_enabled};
use super::{DType, Data, Float, Spec, Tensor};
use crate::{ErrorKind, Result};

/// A shared array.
type Shared<T> = ArcArray<T, IxDyn>;

/// Runs an expression with `$T` as the float type of `$dtype`; another dtype is an error that names `$op`.
macro_rules! with_float {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::tensor::DType::F64 => {
                type $T = f64;
                $body
            }
            other => Err($crate::tensor::ops::not_float($op, other)),
        }
    };
}
pub(crate) use with_float;

/// Returns what an operation gives on a GPU, if it runs there.
macro_rules! on_gpu {
    ($result:expr) => {
        if let Some(result) = $result? {
            return Ok(result);
        }
    };
}
use on_gpu;

#[cfg(feature = "cuda")]
pub(in crate::tensor) use shape::reshaped;

fn not_float(op: &str, found: DType) -> crate::Error {
    ErrorKind::DType {
        op: op.into(),
        expected: "f32 or f64".into(),
        found: found.to_string(),
    }
    .into()
}

/// An error unless all operands have the dtype of the first.
fn same_dtype(op: &str, first: &Tensor, others: &[&Tensor]) -> Result<()> {
    match others.iter().find(|other| other.dtype() != first.dtype()) {
        Some(other) => Err(ErrorKind::DType {
            op: op.into(),
            expected: first.dtype().to_string(),
            found: other.dtype().to_string(),
        }
        .into()),
        None => Ok(()),
    }
}

/// The output of an operation on floats; its adjoint maps the output's gradient to an array per input.
fn record<T: Float>(
    op: &'static str,
    output: Shared<T>,
    inputs: &[&Tensor],
    adjoint: impl Fn(Shared<T>, Needs<'_>) -> Result<Vec<Option<Shared<T>>>> + Send + 'static,
) -> Tensor {
    record_any(op, T::wrap(output), inputs, move |gradient, needs| {
        let results = adjoint(T::take(gradient)?, needs)?;
        Ok(results.into_iter().map(|array| array.map(|array| T::wrap(array).into())).collect())
    })
}

/// The output of an operation of any dtypes, with an adjoint over [`Data`].
pub(super) fn record_any(
    op: &'static str,
    output: Data,
    inputs: &[&Tensor],
    adjoint: impl Fn(Data, Needs<'_>) -> Result<Gradients> + Send + 'static,
) -> Tensor {
    let Some(edges) = edges(inputs) else {
        return Tensor::from_data(output);
    };
    let spec = Spec::of(&output);
    let adjoint = move |gradients: &mut Vec<Data>, needs: Needs<'_>| match gradients.pop() {
        Some(gradient) => adjoint(gradient, needs),
        None => Ok(Vec::new()),
    };
    let node = Node::op(Cow::Borrowed(op), edges, vec![spec], Box::new(adjoint));
    Tensor::with_edge(output, Edge { node, slot: 0 })
}

/// Where the inputs' gradients go; `None` if nothing is to be recorded.
fn edges(inputs: &[&Tensor]) -> Option<Vec<Option<Edge>>> {
    if !grad_enabled() || !inputs.iter().any(|input| input.requires_grad()) {
        return None;
    }
    Some(inputs.iter().map(|input| input.edge()).collect())
}

//! A case of the file: an operation with what it must compute.

use rankgrad::prelude::*;
use rankgrad::tensor::Data;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::table;

/// One line of the file.
#[derive(Debug, Deserialize)]
pub struct Case {
    pub id: String,
    op: String,
    #[serde(default)]
    attrs: Value,
    inputs: Vec<Array>,
    output: Array,
    /// The gradient of the output; null where it has none.
    upstream: Option<Array>,
    /// The gradient of each input; null where it has none.
    grads: Vec<Option<Array>>,
}

/// An array as it is written in the file.
#[derive(Debug, Deserialize)]
struct Array {
    dtype: String,
    shape: Vec<usize>,
    value: Vec<Value>,
}

impl Array {
    fn dtype(&self) -> Result<DType> {
        table::dtype(&self.dtype).ok_or_else(|| Error::user(format!("no dtype `{}`", self.dtype)))
    }

    fn tensor(&self) -> Result<Tensor> {
        fn elements<T>(values: &[Value], read: impl Fn(&Value) -> Option<T>) -> Result<Vec<T>> {
            values
                .iter()
                .map(|value| read(value).ok_or_else(|| Error::user(format!("`{value}` is no element of its dtype"))))
                .collect()
        }
        let shape = &self.shape[..];
        match self.dtype()? {
            DType::F32 => Tensor::from_vec(elements(&self.value, |v| v.as_f64().map(|x| x as f32))?, shape),
            DType::F64 => Tensor::from_vec(elements(&self.value, Value::as_f64)?, shape),
            DType::I64 => Tensor::from_vec(elements(&self.value, Value::as_i64)?, shape),
            DType::Bool => Tensor::from_vec(
                elements(&self.value, |v| v.as_bool().or_else(|| v.as_i64().map(|x| x != 0)))?,
                shape,
            ),
        }
    }
}

/// What an operation computed.
#[derive(Debug, Serialize)]
pub struct Outcome {
    pub output: Vec<f64>,
    pub grads: Vec<Option<Vec<f64>>>,
    #[serde(skip)]
    output_kind: (DType, Vec<usize>),
    #[serde(skip)]
    grad_kinds: Vec<Option<(DType, Vec<usize>)>>,
}

fn numbers(data: Data) -> Result<Vec<f64>> {
    Tensor::from_data(data).cast(DType::F64)?.to_vec()
}

remote! {
    /// Runs an operation on another rank; attributes are JSON.
    fn apply(scope: &Scope, op: String, attrs: String, inputs: Vec<Tensor>) -> Result<Tensor> {
        let _ = scope;
        let attrs = serde_json::from_str(&attrs).map_err(Error::user)?;
        table::apply(&op, &attrs, &inputs)
    }
}

/// Runs a case on this rank: the operation, and a backward from the sum of its output times the gradient from above.
pub fn run_local(case: &Case) -> Result<Outcome> {
    let inputs = case.leaves()?;
    let output = table::apply(&case.op, &case.attrs, &inputs)?;
    if let Some(root) = case.root(&output)? {
        root.backward()?;
    }
    outcome(&output, inputs.iter().map(Tensor::grad).collect())
}

/// Runs a case's operation as a recorded call on another rank; the gradients come back from there.
pub fn run_remote(case: &Case, world: &World, rank: u32) -> Result<Outcome> {
    let inputs = case.leaves()?;
    let ctx = world.context()?;
    let output = ctx.call(rank, apply, (&case.op, case.attrs.to_string(), &inputs))?;
    if let Some(root) = case.root(&output)? {
        ctx.backward(&[root])?;
    }
    let gradient = |input: &Tensor| {
        if input.leaf().is_some() {
            ctx.local_gradient(input)
        } else {
            Ok(None)
        }
    };
    outcome(&output, inputs.iter().map(gradient).collect::<Result<_>>()?)
}

impl Case {
    /// The inputs; floats are leaves.
    fn leaves(&self) -> Result<Vec<Tensor>> {
        self.inputs
            .iter()
            .map(|input| {
                let tensor = input.tensor()?;
                if tensor.dtype().is_float() {
                    tensor.with_grad()
                } else {
                    Ok(tensor)
                }
            })
            .collect()
    }

    /// What to go back from, if the output has a gradient.
    fn root(&self, output: &Tensor) -> Result<Option<Tensor>> {
        match &self.upstream {
            Some(upstream) if output.requires_grad() => Ok(Some(output.mul(&upstream.tensor()?)?.sum()?)),
            _ => Ok(None),
        }
    }
}

fn outcome(output: &Tensor, grads: Vec<Option<Gradient>>) -> Result<Outcome> {
    let grads: Vec<Option<Data>> = grads
        .into_iter()
        .map(|grad| grad.map(|g| g.to_dense()).transpose())
        .collect::<Result<_>>()?;
    Ok(Outcome {
        output_kind: (output.dtype(), output.shape()),
        grad_kinds: grads
            .iter()
            .map(|grad| grad.as_ref().map(|grad| (grad.dtype(), grad.shape().to_vec())))
            .collect(),
        output: numbers(output.data())?,
        grads: grads.into_iter().map(|grad| grad.map(numbers).transpose()).collect::<Result<_>>()?,
    })
}

/// Compares an outcome to what the case expects. Returns the largest error relative to its array's largest magnitude.
///
/// # Errors
/// For another dtype or shape, a gradient too many or too few, and an error over 1e-12 (f64) or 1e-5 (f32).
pub fn compare(case: &Case, outcome: &Outcome) -> Result<f64> {
    let mut worst = distance("output", &case.output, &outcome.output_kind, &outcome.output)?;
    if case.grads.len() != outcome.grads.len() {
        return Err(Error::user(format!(
            "{} gradients for {} inputs",
            case.grads.len(),
            outcome.grads.len()
        )));
    }
    for (i, (expected, found)) in case.grads.iter().zip(&outcome.grads).enumerate() {
        match (expected, found, &outcome.grad_kinds[i]) {
            (Some(expected), Some(found), Some(kind)) => {
                worst = worst.max(distance(&format!("gradient {i}"), expected, kind, found)?);
            }
            (None, None, _) => {}
            (Some(_), ..) => return Err(Error::user(format!("input {i} got no gradient"))),
            (None, ..) => return Err(Error::user(format!("input {i} got a gradient and should have none"))),
        }
    }
    Ok(worst)
}

fn distance(what: &str, expected: &Array, (dtype, shape): &(DType, Vec<usize>), found: &[f64]) -> Result<f64> {
    if expected.dtype()? != *dtype || expected.shape != *shape {
        return Err(Error::user(format!(
            "{what} is {dtype} {shape:?}, expected {} {:?}",
            expected.dtype, expected.shape
        )));
    }
    let expected = numbers(expected.tensor()?.data())?;
    let largest = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let scale = if largest > 0.0 { largest } else { 1.0 };
    // `max` would drop a NaN.
    let error = expected.iter().zip(found).fold(0.0_f64, |most, (x, y)| {
        if (x - y).is_nan() {
            f64::NAN
        } else {
            most.max((x - y).abs() / scale)
        }
    });
    let limit = match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::I64 | DType::Bool => 0.0,
    };
    if error <= limit {
        Ok(error)
    } else {
        Err(Error::user(format!("{what} is off by {error:e}, over {limit:e}")))
    }
}

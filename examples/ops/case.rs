//! A case of the file: an operation with what it must compute.

use rankgrad::tensor::{DType, Data, Tensor};
use rankgrad::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::table;

/// One line of the file.
#[derive(Debug, Deserialize)]
pub(crate) struct Case {
    pub(crate) id: String,
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
pub(crate) struct Outcome {
    pub(crate) output: Vec<f64>,
    pub(crate) grads: Vec<Option<Vec<f64>>>,
    #[serde(skip)]
    output_kind: (DType, Vec<usize>),
    #[serde(skip)]
    grad_kinds: Vec<Option<(DType, Vec<usize>)>>,
}

fn numbers(data: Data) -> Result<Vec<f64>> {
    Tensor::from_data(data).cast(DType::F64)?.to_vec()
}

/// Runs a case on this rank: the operation, and a backward from the sum of its output times the gradient from above.
pub(crate) fn run_local(case: &Case) -> Result<Outcome> {
    let inputs = case
        .inputs
        .iter()
        .map(|input| {
            let tensor = input.tensor()?;
            if tensor.dtype().is_float() {
                tensor.with_grad()
            } else {
                Ok(tensor)
            }
        })
        .collect::<Result<Vec<_>>>()?;
    let output = table::apply(&case.op, &case.attrs, &inputs)?;
    if let Some(upstream) = &case.upstream
        && output.requires_grad()
    {
        output.mul(&upstream.tensor()?)?.sum()?.backward()?;
    }
    let grads = inputs
        .iter()
        .map(|input| input.grad().map(|grad| grad.to_dense()).transpose())
        .collect::<Result<Vec<_>>>()?;
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
pub(crate) fn compare(case: &Case, outcome: &Outcome) -> Result<f64> {
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

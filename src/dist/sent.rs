//! Gradients and optimizer states as arguments and results.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::optim::ParameterState;
use crate::tensor::{Gradient, RowSparse, Tensor};

/// A gradient as an argument or a result.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum SentGradient {
    Dense(Tensor),
    Sparse { rows: Tensor, values: Tensor, shape: Vec<usize> },
}

impl From<Gradient> for SentGradient {
    fn from(gradient: Gradient) -> Self {
        match gradient {
            Gradient::Dense(data) => SentGradient::Dense(Tensor::from_data(data)),
            Gradient::Sparse(sparse) => SentGradient::Sparse {
                rows: Tensor::from_array(ndarray::Array1::from_vec(sparse.rows)),
                values: Tensor::from_data(sparse.values),
                shape: sparse.shape,
            },
        }
    }
}

impl SentGradient {
    pub(super) fn into_gradient(self) -> Result<Gradient> {
        Ok(match self {
            SentGradient::Dense(tensor) => Gradient::Dense(tensor.data()),
            SentGradient::Sparse { rows, values, shape } => Gradient::Sparse(RowSparse::new(rows.to_vec::<i64>()?, values.data(), shape)?),
        })
    }
}

/// A parameter's state as an argument or a result.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SentState {
    scalars: Vec<(String, f64)>,
    arrays: Vec<(String, Tensor)>,
}

impl From<&ParameterState> for SentState {
    fn from(state: &ParameterState) -> Self {
        let arrays = state.arrays().map(|(name, data)| (name.into(), Tensor::from_data(data.clone())));
        SentState {
            scalars: state.scalars().map(|(name, value)| (name.into(), value)).collect(),
            arrays: arrays.collect(),
        }
    }
}

impl From<SentState> for ParameterState {
    fn from(sent: SentState) -> Self {
        let arrays = sent.arrays.into_iter().map(|(name, tensor)| (name, tensor.data()));
        ParameterState::from_parts(sent.scalars, arrays.collect())
    }
}

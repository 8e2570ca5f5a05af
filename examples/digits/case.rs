//! What is trained: the network's widths and first values, the optimizer, how long, and what losses are expected.

use std::path::Path;

use rankgrad::optim::OptimizerSpec;
use rankgrad::tensor::{DType, Tensor, init};
use rankgrad::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::data::{CLASSES, PIXELS};

/// What a layer does after its matrix product; the last one does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// Hyperbolic tangent.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// Nothing.
    None,
}

impl Activation {
    /// Applies it.
    pub fn of(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Activation::Relu => x.relu(),
            Activation::Tanh => x.tanh(),
            Activation::Sigmoid => x.sigmoid(),
            Activation::None => Ok(x.clone()),
        }
    }
}

/// Loss and accuracy of one epoch.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Epoch {
    /// Mean over the training rows of their batch's loss, before its update.
    pub train_loss: f64,
    /// Share of the test rows that are told right after the epoch.
    pub test_accuracy: f64,
}

/// One training job.
#[derive(Debug, Clone, Deserialize)]
pub struct Case {
    /// Lengths of the rows that go into each layer, and that come out of the last.
    pub widths: Vec<usize>,
    /// Of all layers but the last.
    pub activation: Activation,
    /// The optimizer's name.
    pub optimizer: String,
    /// Its options by name.
    pub options: Value,
    /// Passes over the training rows.
    pub epochs: usize,
    /// Rows in a batch.
    pub batch: usize,
    /// Weight `[in, out]` and bias `[out]` of each layer at first.
    #[serde(deserialize_with = "arrays")]
    pub init: Vec<Tensor>,
    /// What is expected of each epoch, if anything.
    #[serde(default)]
    pub history: Vec<Epoch>,
}

impl Case {
    /// Case `index` of a file.
    pub fn read(file: &Path, index: usize) -> Result<Self> {
        let failed = |what: String| Error::user(format!("{}: {what}", file.display()));
        let text = std::fs::read_to_string(file).map_err(|e| failed(e.to_string()))?;
        let mut cases: Vec<Value> = serde_json::from_str(&text).map_err(|e| failed(e.to_string()))?;
        if index >= cases.len() {
            return Err(failed(format!("no case {index}; there are {}", cases.len())));
        }
        let case: Case = serde_json::from_value(cases.swap_remove(index)).map_err(|e| failed(format!("case {index}: {e}")))?;
        case.check().map_err(|e| failed(format!("case {index}: {e}")))?;
        Ok(case)
    }

    /// First values for these widths: uniform weights after He et al., biases 0. The same seed gives the same values on any
    /// number of ranks.
    pub fn with_first_values(mut self, seed: u64) -> Result<Self> {
        self.init.clear();
        for (seed, pair) in (seed..).zip(self.widths.windows(2)) {
            let (rows, columns) = (pair[0], pair[1]);
            self.init
                .push(init::kaiming_uniform([rows, columns], rows, init::relu_gain(0.0), seed)?);
            self.init.push(Tensor::zeros(DType::F64, [columns]));
        }
        self.check()?;
        Ok(self)
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.widths.len() - 1
    }

    /// The activation of a layer.
    pub fn activation_of(&self, layer: usize) -> Activation {
        if layer + 1 < self.layers() {
            self.activation
        } else {
            Activation::None
        }
    }

    /// The optimizer's rule and options.
    pub fn optimizer(&self) -> Result<OptimizerSpec> {
        OptimizerSpec::from_json(&self.optimizer, &self.options)
    }

    /// First values of a layer: weight and bias.
    pub fn values(&self, layer: usize) -> (Tensor, Tensor) {
        (self.init[2 * layer].clone(), self.init[2 * layer + 1].clone())
    }

    fn check(&self) -> Result<()> {
        self.optimizer()?;
        let shapes: Vec<Vec<usize>> = self.widths.windows(2).flat_map(|pair| [pair.to_vec(), vec![pair[1]]]).collect();
        let wrong = match self.widths[..] {
            [PIXELS, .., CLASSES] if self.widths.len() > 1 => {
                if self.batch == 0 || self.epochs == 0 {
                    Some("train for at least one epoch, with at least one row in a batch".to_owned())
                } else if !self.init.iter().map(Tensor::shape).eq(shapes.iter().cloned()) {
                    Some(format!("the first values must have the shapes {shapes:?}"))
                } else {
                    None
                }
            }
            _ => Some(format!("widths {:?} must start with {PIXELS} and end with {CLASSES}", self.widths)),
        };
        wrong.map_or(Ok(()), |what| Err(Error::user(what)))
    }
}

/// Arrays as a file holds them.
fn arrays<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Tensor>, D::Error> {
    #[derive(Deserialize)]
    struct Array {
        shape: Vec<usize>,
        value: Vec<f64>,
    }
    let arrays = Vec::<Array>::deserialize(deserializer)?;
    arrays
        .into_iter()
        .map(|array| Tensor::from_vec(array.value, &array.shape[..]).map_err(serde::de::Error::custom))
        .collect()
}

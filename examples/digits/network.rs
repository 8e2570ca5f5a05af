//! The network: its layers, where they are, and one training step.

use rankgrad::Result;
use rankgrad::optim::Optimizer;
use rankgrad::tensor::Tensor;

use crate::case::{Activation, Case};
use crate::data::Rows;

/// The rank that owns a layer: ranks 1 to `ranks - 1` in turn, so that rank 0 only leads; rank 0 if it is alone.
pub fn owner(layer: usize, ranks: u32) -> u32 {
    match ranks {
        0 | 1 => 0,
        ranks => 1 + (layer as u32) % (ranks - 1),
    }
}

/// One layer: `activation(x w + b)`.
fn layer(x: &Tensor, w: &Tensor, b: &Tensor, activation: Activation) -> Result<Tensor> {
    activation.of(&(x.matmul(w)? + b)?)
}

/// What one training run leaves: who owned what, and what was sent.
pub struct Traffic {
    /// Messages that each rank sent.
    pub messages: Vec<u64>,
    /// Bytes that each rank sent.
    pub bytes: Vec<u64>,
}

struct Layer {
    weight: Tensor,
    bias: Tensor,
    activation: Activation,
    owner: u32,
}

/// A network whose layers all live here.
pub struct Network {
    layers: Vec<Layer>,
    optimizer: Optimizer,
}

impl Network {
    /// The network of a case, with its first values.
    pub fn new(case: &Case) -> Result<Self> {
        let layers = (0..case.layers()).map(|k| {
            let (weight, bias) = case.values(k);
            let (weight, bias) = (weight.parameter()?, bias.parameter()?);
            Ok(Layer {
                weight,
                bias,
                activation: case.activation_of(k),
                owner: owner(k, 1),
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let parameters = layers.iter().flat_map(|l| [l.weight.clone(), l.bias.clone()]).collect();
        Ok(Self {
            optimizer: Optimizer::new(case.optimizer()?, parameters)?,
            layers,
        })
    }

    /// Scores of each class, `[rows, 10]`.
    pub fn scores(&self, pixels: &Tensor) -> Result<Tensor> {
        self.layers
            .iter()
            .try_fold(pixels.clone(), |x, l| layer(&x, &l.weight, &l.bias, l.activation))
    }

    /// One step on a batch; returns the batch's mean loss before it.
    pub fn train(&mut self, batch: &Rows) -> Result<f64> {
        let loss = self.scores(&batch.pixels)?.cross_entropy(&batch.labels)?;
        loss.backward()?;
        let parameters: Vec<Tensor> = self.optimizer.parameters().cloned().collect();
        self.optimizer
            .step(&mut |place| parameters[place].leaf().and_then(|leaf| leaf.take_grad()))?;
        loss.item::<f64>()
    }

    /// The rank that owns each parameter: weight and bias of each layer in turn.
    pub fn owners(&self) -> Vec<u32> {
        self.layers.iter().flat_map(|l| [l.owner; 2]).collect()
    }

    /// Messages and bytes sent so far.
    pub fn traffic(&self) -> Result<Traffic> {
        Ok(Traffic {
            messages: vec![0],
            bytes: vec![0],
        })
    }
}

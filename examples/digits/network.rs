//! The network: its layers, where they are, and one training step.

use rankgrad::prelude::*;

use crate::case::{Activation, Case};
use crate::data::Rows;

/// The rank that owns a layer: ranks 1 to `ranks - 1` in turn, so that rank 0 only leads; rank 0 if it is alone.
pub fn owner(layer: usize, ranks: u32) -> u32 {
    match ranks {
        0 | 1 => 0,
        ranks => 1 + (layer as u32) % (ranks - 1),
    }
}

remote! {
    /// One layer, on the rank that owns it: `activation(x w + b)`.
    fn layer(scope: &Scope, x: Tensor, w: RRef<Tensor>, b: RRef<Tensor>, activation: Activation) -> Result<Tensor> {
        activation.of(&(x.matmul(&w.local(scope)?)? + b.local(scope)?)?)
    }
}

struct Layer {
    weight: RRef<Tensor>,
    bias: RRef<Tensor>,
    activation: Activation,
}

/// A network whose layers are spread over ranks, as the rank that leads sees it.
pub struct Network<'w> {
    world: &'w World,
    layers: Vec<Layer>,
    optimizer: DistributedOptimizer,
}

impl<'w> Network<'w> {
    /// The network of a case, with its first values.
    pub fn new(world: &'w World, case: &Case) -> Result<Self> {
        let layers = (0..case.layers()).map(|k| {
            let (owner, (weight, bias)) = (owner(k, world.size()), case.values(k));
            Ok(Layer {
                weight: world.put(owner, weight)?,
                bias: world.put(owner, bias)?,
                activation: case.activation_of(k),
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let parameters: Vec<_> = layers.iter().flat_map(|l| [&l.weight, &l.bias]).collect();
        Ok(Self {
            optimizer: DistributedOptimizer::new(world, case.optimizer()?, parameters)?,
            world,
            layers,
        })
    }

    /// Scores of each class, `[rows, 10]`: through all layers, each on its rank. A context records the way.
    pub fn scores(&self, calls: &impl Calls, pixels: &Tensor) -> Result<Tensor> {
        self.layers.iter().try_fold(pixels.clone(), |x, l| {
            calls.call(l.weight.owner(), layer, (x, &l.weight, &l.bias, l.activation))
        })
    }

    /// Scores without a way back.
    pub fn guess(&self, pixels: &Tensor) -> Result<Tensor> {
        self.scores(self.world, pixels)
    }

    /// One step on a batch; returns the batch's mean loss before it.
    pub fn train(&mut self, batch: &Rows) -> Result<f64> {
        let ctx = self.world.context()?;
        let loss = self.scores(&ctx, &batch.pixels)?.cross_entropy(&batch.labels)?;
        ctx.backward(&[&loss])?;
        self.optimizer.step(&ctx)?;
        loss.item::<f64>()
    }

    /// The rank that owns each parameter: weight and bias of each layer in turn.
    pub fn owners(&self) -> Vec<u32> {
        self.layers.iter().flat_map(|l| [l.weight.owner(), l.bias.owner()]).collect()
    }
}

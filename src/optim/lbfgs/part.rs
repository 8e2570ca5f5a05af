//! The vectors of one rank's parameters, and what the driver asks of them.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::Lbfgs;
use super::shard::{Shard, Vectors};
use crate::optim::ParameterState;
use crate::optim::arithmetic::maximum;
use crate::tensor::{DType, Gradient, Tensor};
use crate::{ErrorKind, Result};

/// A gradient to be kept and measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ask {
    /// Its number from now on.
    pub number: u64,
    /// Numbers of those that are still needed, beside the one at the base.
    pub live: Vec<u64>,
    /// Whether the products with the history are wanted at once.
    pub products: bool,
    /// The step length of the move that led here, if the products are to be those of a new pair, too.
    pub pair: Option<f64>,
}

/// A direction: a combination of a gradient and of the history, and a step along it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Direction {
    /// Forget the history first.
    pub fresh: bool,
    /// The step length of the move that led here, if it makes a pair of the history.
    pub pair: Option<f64>,
    /// Whether the oldest pair makes room for it.
    pub full: bool,
    /// The number of the gradient here.
    pub number: u64,
    /// Its factor.
    pub gradient: f64,
    /// Factors of the moves, oldest first.
    pub s: Vec<f64>,
    /// Factors of the changes of the gradient, oldest first.
    pub y: Vec<f64>,
    /// The step length.
    pub t: f64,
}

/// A gradient's measures.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Gathered {
    pub largest: f64,
    pub norm1: f64,
    /// Its product with the direction.
    pub slope: f64,
    /// Those of the pair's `y` with each `s` and each `y`, if a pair is asked for; then those of the gradient. The pair's own
    /// vectors are the last of each.
    pub products: Option<Vec<f64>>,
}

impl Gathered {
    /// Those of several parameters, in their order.
    pub(crate) fn add(&mut self, other: Gathered) {
        self.largest = maximum(self.largest, other.largest);
        self.norm1 += other.norm1;
        self.slope += other.slope;
        match (&mut self.products, other.products) {
            (Some(sum), Some(other)) => add(sum, &other),
            (products, other) => *products = other,
        }
    }
}

/// Adds products of one parameter to those of others.
pub(crate) fn add(sum: &mut Vec<f64>, other: &[f64]) {
    sum.resize(other.len(), 0.0);
    sum.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
}

/// A direction's measures.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Slope {
    /// The gradient's product with it.
    pub slope: f64,
    /// Its largest magnitude.
    pub reach: f64,
}

impl Slope {
    /// Those of several parameters, in their order.
    pub(crate) fn add(&mut self, other: Slope) {
        self.slope += other.slope;
        self.reach = maximum(self.reach, other.reach);
    }
}

/// Vectors that can be put into the [`Part`] that checked them.
#[derive(Debug)]
pub(crate) struct Shards(Vec<Box<dyn Shard>>);

/// The vectors of some parameters of this rank. Each answer is a row a parameter, in their order.
#[derive(Debug)]
pub(crate) struct Part {
    parameters: Vec<Tensor>,
    /// Their places in the optimizer's list, for errors.
    places: Vec<usize>,
    shards: Vec<Box<dyn Shard>>,
}

impl Part {
    /// Checks the parameters.
    pub(crate) fn new(parameters: Vec<Tensor>, places: Vec<usize>) -> Result<Self> {
        let mut known = HashMap::new();
        let mut shards: Vec<Box<dyn Shard>> = Vec::with_capacity(parameters.len());
        for (tensor, &place) in parameters.iter().zip(&places) {
            let why = match tensor.leaf() {
                Some(leaf) if tensor.requires_grad() => {
                    if let Some(first) = known.insert(leaf.id(), place) {
                        return Err(ErrorKind::DuplicateParameter {
                            optimizer: Lbfgs::NAME.into(),
                            first,
                            second: place,
                        }
                        .into());
                    }
                    shards.push(match tensor.dtype() {
                        DType::F32 => Box::new(Vectors::<f32>::new(tensor.clone())),
                        _ => Box::new(Vectors::<f64>::new(tensor.clone())),
                    });
                    continue;
                }
                Some(_) => "it is frozen",
                None if tensor.requires_grad() => "it was computed; optimize what it was computed from",
                None => "it requires no gradient; make it one with `parameter`",
            };
            return Err(ErrorKind::NotALeaf {
                what: format!("{}: parameter {place}", Lbfgs::NAME),
                why: why.into(),
            }
            .into());
        }
        Ok(Self {
            parameters,
            places,
            shards,
        })
    }

    /// All vectors of each parameter, by name.
    pub(crate) fn saved(&self) -> Result<Vec<ParameterState>> {
        self.shards.iter().map(|shard| shard.saved()).collect()
    }

    /// The vectors that [`saved`](Self::saved) gave, checked.
    pub(crate) fn restored(&self, saved: &[ParameterState]) -> Result<Shards> {
        let each = self.parameters.iter().zip(saved);
        each.map(|(tensor, state)| match tensor.dtype() {
            DType::F32 => Ok(Box::new(Vectors::<f32>::restored(tensor.clone(), state)?) as Box<dyn Shard>),
            _ => Ok(Box::new(Vectors::<f64>::restored(tensor.clone(), state)?) as Box<dyn Shard>),
        })
        .collect::<Result<_>>()
        .map(Shards)
    }

    pub(crate) fn replace(&mut self, restored: Shards) {
        self.shards = restored.0;
    }

    /// Takes the gradient of each parameter, checked before any is kept.
    pub(crate) fn gather(&mut self, ask: &Ask, of: &dyn Fn(&Tensor) -> Option<Gradient>) -> Result<Vec<Gathered>> {
        let gradients: Vec<_> = self.parameters.iter().map(of).collect();
        for ((tensor, gradient), &place) in self.parameters.iter().zip(&gradients).zip(&self.places) {
            if !tensor.requires_grad() {
                return Err(ErrorKind::NotALeaf {
                    what: format!("{}: parameter {place}", Lbfgs::NAME),
                    why: "it is frozen; unfreeze it, or make the optimizer without it".into(),
                }
                .into());
            }
            let Some(g) = gradient else { continue };
            if g.dtype() != tensor.dtype() || g.shape() != tensor.shape() {
                let (found, shape) = (g.dtype(), g.shape());
                return Err(ErrorKind::GradientKind {
                    optimizer: Lbfgs::NAME.into(),
                    parameter: place,
                    name: tensor.leaf().and_then(|leaf| leaf.name()).map(str::to_owned),
                    why: format!(
                        "its gradient is {found} {shape:?}, and it is {} {:?}",
                        tensor.dtype(),
                        tensor.shape()
                    ),
                }
                .into());
            }
        }
        self.shards
            .iter_mut()
            .zip(gradients)
            .map(|(shard, g)| shard.gather(g, ask))
            .collect()
    }

    pub(crate) fn products(&self, pair: Option<f64>, number: u64) -> Result<Vec<Vec<f64>>> {
        self.shards.iter().map(|shard| shard.products(pair, number)).collect()
    }

    pub(crate) fn direct(&mut self, direction: &Direction) -> Result<Vec<Slope>> {
        self.shards.iter_mut().map(|shard| shard.direct(direction)).collect()
    }

    pub(crate) fn go(&mut self, t: f64) -> Result<()> {
        self.shards.iter_mut().try_for_each(|shard| shard.go(t))
    }
}

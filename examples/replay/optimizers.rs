//! Optimizers: every step of a case through a [`DistributedOptimizer`], compared with the values that torch has after it.

use std::collections::BTreeMap;

use rankgrad::optim::OptimizerSpec;
use rankgrad::prelude::*;
use rankgrad::tensor::{Data, RowSparse};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::file::Line;
use crate::tally::{Tally, worse};

#[derive(Deserialize)]
struct Case {
    optimizer: String,
    options: Value,
    dtype: Precision,
    params: Vec<Array>,
    steps: Vec<Step>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Precision {
    F32,
    F64,
}

#[derive(Deserialize)]
struct Array {
    shape: Vec<usize>,
    value: Vec<f64>,
}

#[derive(Deserialize)]
struct Step {
    /// A new learning rate, for this step and later ones.
    lr: Option<f64>,
    /// A gradient for each parameter, or none.
    grads: Vec<Option<Slope>>,
    /// The values of each parameter after the step.
    expected: Vec<Vec<f64>>,
}

/// A gradient: all elements, or rows that may repeat.
#[derive(Deserialize)]
#[serde(untagged)]
enum Slope {
    Dense { dense: Vec<f64> },
    Rows { indices: Vec<i64>, values: Vec<Value> },
}

/// What a case came to, as it is written: the values of each parameter after each step, and the rank that owns it.
#[derive(Default)]
struct Outcome {
    steps: Vec<Vec<Vec<f64>>>,
    owners: Vec<u32>,
}

/// How far values are from what is expected.
#[derive(Default, Clone, Copy)]
struct Distance {
    /// Relative to the largest magnitude of each array.
    relative: f64,
    /// In units of the learning rate: for Muon, which torch computes in bfloat16.
    of_lr: f64,
}

impl Precision {
    fn tensor(self, values: &[f64], shape: &[usize]) -> Result<Tensor> {
        match self {
            Precision::F32 => Tensor::from_vec(values.iter().map(|&x| x as f32).collect(), shape),
            Precision::F64 => Tensor::from_vec(values.to_vec(), shape),
        }
    }

    fn limit(self) -> f64 {
        match self {
            Precision::F32 => 2e-6,
            Precision::F64 => 1e-12,
        }
    }
}

impl Slope {
    fn gradient(&self, dtype: Precision, shape: &[usize]) -> Result<Gradient> {
        match self {
            Slope::Dense { dense } => Ok(Gradient::Dense(dtype.tensor(dense, shape)?.data())),
            Slope::Rows { indices, values } => {
                let mut flat = Vec::new();
                flatten(values, &mut flat)?;
                let packed = [&[indices.len()], shape.get(1..).unwrap_or(&[])].concat();
                let values: Data = dtype.tensor(&flat, &packed)?.data();
                Ok(Gradient::Sparse(RowSparse::new(indices.clone(), values, shape.to_vec())?))
            }
        }
    }
}

/// Numbers in lists of lists, in order.
fn flatten(values: &[Value], flat: &mut Vec<f64>) -> Result<()> {
    for value in values {
        match value {
            Value::Array(values) => flatten(values, flat)?,
            _ => flat.push(value.as_f64().ok_or_else(|| Error::user(format!("`{value}` is no number")))?),
        }
    }
    Ok(())
}

/// Replays all cases, with a row for each optimizer; the tally and what is written.
pub fn replay(world: &World, lines: Vec<Line>) -> Result<(Tally, Value)> {
    let (mut tally, mut entries) = (Tally::default(), Vec::new());
    let mut rows: BTreeMap<String, (usize, Distance)> = BTreeMap::new();
    for line in lines {
        let id = line.id.clone();
        let before = messages(world)?;
        let (mut outcome, mut optimizer) = (Outcome::default(), None);
        let result = line.case::<Case>().and_then(|case| {
            optimizer = Some(case.optimizer.clone());
            case.replay(world, &mut outcome)
        });
        // Each rank answered the question `before`, which rank 0 asked.
        let asked = |rank: usize| if rank == 0 { u64::from(world.size()) - 1 } else { 1 };
        let after = messages(world)?.into_iter().zip(before).enumerate();
        let sent: Vec<_> = after
            .map(|(rank, (after, before))| (after - before).saturating_sub(asked(rank)))
            .collect();
        entries.push(json!({ "id": id, "steps": outcome.steps, "owners": outcome.owners, "messages": sent }));
        if let Some(optimizer) = optimizer {
            let (cases, worst) = rows.entry(optimizer).or_default();
            *cases += 1;
            if let Ok(distance) = &result {
                worst.relative = worse(worst.relative, distance.relative);
                worst.of_lr = worse(worst.of_lr, distance.of_lr);
            }
        }
        match result {
            // Its relative error says nothing of its bound.
            Ok(distance) if distance.of_lr > 0.0 => tally.pass(),
            result => tally.count(&id, &result.map(|distance| distance.relative)),
        }
    }
    for (optimizer, (cases, worst)) in rows {
        match worst.of_lr > 0.0 {
            true => println!(
                "{optimizer:<12}{cases:>4} cases, worst absolute error {:.1e} of the learning rate",
                worst.of_lr
            ),
            false => println!("{optimizer:<12}{cases:>4} cases, worst relative error {:.1e}", worst.relative),
        }
    }
    Ok((tally, json!({ "ranks": world.size(), "cases": entries })))
}

/// Messages that each rank has sent; asks rank 0 first, so that the question isn't in its own answer.
fn messages(world: &World) -> Result<Vec<u64>> {
    (0..world.size()).map(|rank| Ok(world.counters(rank)?.messages)).collect()
}

impl Case {
    /// Makes all steps and compares after each; the worst distance, or what went wrong.
    fn replay(&self, world: &World, outcome: &mut Outcome) -> Result<Distance> {
        let spec = OptimizerSpec::from_json(&self.optimizer, &self.options)?;
        // Rank 0 owns none, unless it is alone.
        let others = world.size().max(2) - 1;
        let mut parameters: Vec<RRef<Tensor>> = Vec::with_capacity(self.params.len());
        for (place, array) in (0..).zip(&self.params) {
            let owner = world.owner(1 + place % others);
            parameters.push(world.put(owner, self.dtype.tensor(&array.value, &array.shape)?)?);
            outcome.owners.push(owner);
        }
        let mut optimizer = DistributedOptimizer::new(world, spec, &parameters)?;
        let mut worst = Distance::default();
        for (number, step) in self.steps.iter().enumerate() {
            if let Some(lr) = step.lr {
                optimizer.set_lr(lr)?;
            }
            self.step(world, &optimizer, &parameters, step)?;
            let values: Vec<_> = parameters
                .iter()
                .map(|p| p.fetch()?.cast(DType::F64)?.to_vec())
                .collect::<Result<_>>()?;
            let distance = self.compare(&optimizer, step, &values);
            outcome.steps.push(values);
            let distance = distance.map_err(|error| Error::user(format!("step {}: {error}", number + 1)))?;
            worst.relative = worse(worst.relative, distance.relative);
            worst.of_lr = worse(worst.of_lr, distance.of_lr);
        }
        Ok(worst)
    }

    fn step(&self, world: &World, optimizer: &DistributedOptimizer, parameters: &[RRef<Tensor>], step: &Step) -> Result<()> {
        if step.grads.len() != parameters.len() {
            return Err(Error::user(format!(
                "{} gradients for {} parameters",
                step.grads.len(),
                parameters.len()
            )));
        }
        let context = world.context()?;
        for ((slope, to), array) in step.grads.iter().zip(parameters).zip(&self.params) {
            if let Some(slope) = slope {
                context.accumulate(to, slope.gradient(self.dtype, &array.shape)?)?;
            }
        }
        let report = optimizer.step(&context)?;
        for (place, slope) in step.grads.iter().enumerate() {
            let updated = report.parameter(place).is_some_and(|p| p.updated);
            if updated != slope.is_some() {
                let what = if updated {
                    "without a gradient was"
                } else {
                    "with a gradient wasn't"
                };
                return Err(Error::user(format!("parameter {place} {what} updated")));
            }
        }
        Ok(())
    }

    fn compare(&self, optimizer: &DistributedOptimizer, step: &Step, values: &[Vec<f64>]) -> Result<Distance> {
        let lengths = |arrays: &[Vec<f64>]| arrays.iter().map(Vec::len).collect::<Vec<_>>();
        let (found, expected) = (lengths(values), lengths(&step.expected));
        if found != expected {
            return Err(Error::user(format!("arrays of {found:?} elements where {expected:?} are expected")));
        }
        let (mut relative, mut absolute) = (0.0, 0.0);
        for (found, expected) in values.iter().zip(&step.expected) {
            let largest = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
            let scale = if largest > 0.0 { largest } else { 1.0 };
            for (found, expected) in found.iter().zip(expected) {
                let error = if found == expected { 0.0 } else { (found - expected).abs() };
                absolute = worse(absolute, error);
                relative = worse(relative, error / scale);
            }
        }
        let (error, limit, of_lr) = if self.optimizer == "Muon" {
            let lr = optimizer.groups()[0].option("lr").and_then(|lr| lr.as_f64()).unwrap_or(0.0);
            (absolute, 0.4 * lr, absolute / lr)
        } else {
            (relative, self.dtype.limit(), 0.0)
        };
        if error <= limit {
            Ok(Distance { relative, of_lr })
        } else {
            Err(Error::user(format!("off by {error:e}, over {limit:e}")))
        }
    }
}

//! Schedules: every step of a case moves the options of a [`DistributedOptimizer`]; its learning rates and momenta are compared with torch's.

use rankgrad::optim::OptimizerSpec;
use rankgrad::optim::schedule::{Rates, Schedule, Scheduler};
use rankgrad::prelude::*;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::file::Line;
use crate::tally::{Tally, worse};

const LIMIT: f64 = 1e-12;

#[derive(Deserialize)]
struct Case {
    schedule: String,
    options: Value,
    /// Its name, and its options other than the learning rate.
    optimizer: Map<String, Value>,
    base_lr: f64,
    /// What [`ReduceLROnPlateau`](rankgrad::optim::schedule::ReduceLROnPlateau) is fed.
    metrics: Option<Vec<f64>>,
    /// The learning rate at first and after each step.
    lrs: Vec<f64>,
    /// The momentum likewise, where the schedule moves it.
    momentum: Option<Vec<f64>>,
}

/// Replays all cases; the tally and what is written.
pub fn replay(world: &World, lines: Vec<Line>) -> Result<(Tally, Value)> {
    let (mut tally, mut entries) = (Tally::default(), Vec::new());
    for line in lines {
        let id = line.id.clone();
        let (mut found, mut moves) = (Vec::new(), false);
        let result = line.case::<Case>().and_then(|case| {
            moves = case.momentum.is_some();
            case.replay(world, &mut found)?;
            case.compare(&found)
        });
        moves |= found.windows(2).any(|pair| pair[0].momentum != pair[1].momentum);
        let lrs: Vec<f64> = found.iter().map(|rates| rates.lr).collect();
        let mut entry = json!({ "id": id, "lrs": lrs });
        if moves {
            entry["momentum"] = found.iter().map(|rates| rates.momentum).collect();
        }
        entries.push(entry);
        tally.count(&id, &result);
    }
    Ok((tally, json!({ "cases": entries })))
}

impl Case {
    /// The rates at first and after each step.
    fn replay(&self, world: &World, found: &mut Vec<Rates>) -> Result<()> {
        let mut options = self.optimizer.clone();
        let name = options.remove("name").unwrap_or_default();
        options.insert("lr".into(), self.base_lr.into());
        let spec = OptimizerSpec::from_json(name.as_str().unwrap_or_default(), &options.into())?;
        let parameter = world.put(world.owner(1), Tensor::zeros(DType::F64, [2]))?;
        let mut optimizer = DistributedOptimizer::new(world, spec, [&parameter])?;
        let schedule = Schedule::from_json(&self.schedule, &self.options)?;
        let mut scheduler = Scheduler::new(schedule, &mut optimizer)?;
        found.push(Rates::of(&optimizer.groups()[0])?);
        for step in 1..self.lrs.len() {
            optimizer.step(&world.context()?)?;
            match self.metrics.as_ref().and_then(|metrics| metrics.get(step - 1)) {
                Some(&metric) => scheduler.step_with(&mut optimizer, metric)?,
                None => scheduler.step(&mut optimizer)?,
            };
            found.push(Rates::of(&optimizer.groups()[0])?);
        }
        Ok(())
    }

    /// The worst relative error.
    fn compare(&self, found: &[Rates]) -> Result<f64> {
        let lrs = distance("lr", &self.lrs, found.iter().map(|rates| rates.lr).collect())?;
        match &self.momentum {
            Some(momentum) => {
                let found = found.iter().map(|rates| rates.momentum.unwrap_or(f64::NAN)).collect();
                Ok(worse(lrs, distance("momentum", momentum, found)?))
            }
            None => Ok(lrs),
        }
    }
}

fn distance(what: &str, expected: &[f64], found: Vec<f64>) -> Result<f64> {
    if expected.len() != found.len() {
        return Err(Error::user(format!(
            "{what}: {} values where {} are expected",
            found.len(),
            expected.len()
        )));
    }
    let mut worst = 0.0;
    for (i, (expected, found)) in expected.iter().zip(found).enumerate() {
        let error = if *expected == found {
            0.0
        } else {
            (found - expected).abs() / expected.abs()
        };
        if error.is_nan() || error > LIMIT {
            return Err(Error::user(format!(
                "{what} {i} is {found}, expected {expected}: off by {error:e}, over {LIMIT:e}"
            )));
        }
        worst = worse(worst, error);
    }
    Ok(worst)
}

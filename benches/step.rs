//! Steps. `cargo bench --bench step [-- --quick]`; launches itself on two ranks.

#![allow(missing_docs, reason = "a program")]

mod bench;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use bench::{Row, finish, is_quick, quantile, ranks};
use rankgrad::optim::options::Check;
use rankgrad::optim::{Float, Registration, Rule, StateArray, StateView};
use rankgrad::prelude::*;
use serde::{Deserialize, Serialize};

/// A rule that computes for so many seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Busy {
    seconds: f64,
}

impl Rule for Busy {
    const NAME: &'static str = "Busy";
    const SCALARS: &'static [(&'static str, f64)] = &[];

    fn check(&self) -> Result<()> {
        Check(Self::NAME).at_least_0("seconds", self.seconds)
    }

    fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
        Vec::new()
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], _state: &mut StateView<'_, T>) {
        let end = Instant::now() + Duration::from_secs_f64(self.seconds);
        while Instant::now() < end {
            for (p, &g) in p.iter_mut().zip(g) {
                *p = *p * T::of(0.5) + g;
            }
        }
    }
}

rankgrad::rpc::inventory::submit! { Registration::of::<Busy>() }

fn main() -> ExitCode {
    if let Some(code) = ranks(2) {
        return code;
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let world = World::init()?;
    let rows = world.lead(|world| answers_during_a_step(world, if is_quick() { 0.5 } else { 2.0 }))?;
    if let Some(rows) = rows {
        finish("step", &rows).map_err(|e| Error::user(format!("bench/step.json: {e}")))?;
    }
    world.finish()
}

/// How long fetches from an owner take while it steps, and while it doesn't.
fn answers_during_a_step(world: &World, seconds: f64) -> Result<Vec<Row>> {
    let far = world.owner(1);
    let vector = |n: usize| Tensor::from_vec(vec![1.0f32; n], [n]);
    let (stepped, other) = (world.put(far, vector(1 << 16)?)?, world.put(far, vector(16)?)?);
    let optimizer = DistributedOptimizer::new(world, Busy { seconds }, [&stepped])?;
    let ctx = world.context()?;
    ctx.accumulate(&stepped, Gradient::Dense(vector(1 << 16)?.data()))?;
    let fetch = || -> Result<Duration> {
        let start = Instant::now();
        other.fetch()?;
        Ok(start.elapsed())
    };
    let mut quiet = Vec::new();
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < end {
        quiet.push(fetch()?);
    }
    let step = optimizer.step_async(&ctx, &StepOptions::new())?;
    let mut during = Vec::new();
    while !step.is_done() {
        during.push(fetch()?);
    }
    step.wait()?;
    let mut row = |what: &str, share: f64| {
        let (value, floor) = (quantile(&mut during, share), quantile(&mut quiet, share));
        Row::new(
            format!("fetch of 64 bytes during a step of {seconds} s, {what}"),
            value,
            "us",
            floor,
        )
    };
    Ok(vec![row("p50", 0.5), row("p99", 0.99), row("p99.9", 0.999)])
}

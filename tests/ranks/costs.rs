//! What calls and steps cost, counted: messages, and allocations on either side.

use std::time::{Duration, Instant};

use rankgrad::prelude::*;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

use crate::case::Case;
use crate::settled::led;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<std::alloc::System> = &INSTRUMENTED_SYSTEM;

/// Before it is counted, tables and buffers grow to their size.
const WARM_UP: usize = 300;
const ROUNDS: usize = 200;

remote! {
    fn nothing(scope: &Scope) -> Result<()> {
        let _ = scope;
        Ok(())
    }

    fn allocations(scope: &Scope) -> Result<usize> {
        let _ = scope;
        Ok(ALLOCATOR.stats().allocations)
    }
}

/// Allocations here and on the other rank, and messages of both, for each round of `f`.
fn per_round(world: &World, far: u32, mut f: impl FnMut() -> Result<()>) -> Result<[f64; 3]> {
    for _ in 0..WARM_UP {
        f()?;
    }
    let counts = || -> Result<[usize; 3]> {
        let messages = world.traffic()?.iter().map(|t| t.0 as usize).sum();
        let there = world.call(far, allocations, ())?;
        Ok([ALLOCATOR.stats().allocations, there, messages])
    };
    // What it takes to count, at the end of the one and the beginning of the other.
    let (first, second) = (counts()?, counts()?);
    for _ in 0..ROUNDS {
        f()?;
    }
    let third = counts()?;
    let each = |k: usize| (third[k] - second[k]).saturating_sub(second[k] - first[k]) as f64 / ROUNDS as f64;
    Ok([each(0), each(1), each(2)])
}

/// Counts, several times if need be: where the service threads get no core, what arrives goes to the pool, which allocates.
fn check(world: &World, what: &str, most: [f64; 3], mut f: impl FnMut() -> Result<()>) -> Result<()> {
    let (mut found, start) = ([0.0; 3], Instant::now());
    while start.elapsed() < Duration::from_secs(10) {
        found = per_round(world, world.owner(1), &mut f)?;
        // Growth of tables now and then is less than one in four.
        if found.iter().zip(most).all(|(found, most)| *found <= most + 0.25) {
            log::info!("{what}: {found:?}");
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(Error::user(format!(
        "{what}: {found:.2?} allocations here and there and messages a round, and at most {most:?} were expected"
    )))
}

fn costs(world: &World) -> Result<()> {
    let far = world.owner(1);
    check(world, "an empty call", [3.0, 2.0, 2.0], || world.call(far, nothing, ()))?;
    let p = world.put(far, Tensor::from_vec(vec![1.0f32], [1])?)?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(1e-3), [&p])?;
    let ctx = world.context()?;
    ctx.accumulate(&p, Gradient::Dense(Tensor::from_vec(vec![0.5f32], [1])?.data()))?;
    check(world, "a scalar step", [1.0, 0.0, 2.0], || optimizer.step(&ctx).map(drop))?;
    let many: Vec<RRef<Tensor>> = (0..100)
        .map(|_| world.put(far, Tensor::from_vec(vec![1.0f32; 10], [10])?))
        .collect::<Result<_>>()?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(1e-3), &many)?;
    for p in &many {
        ctx.accumulate(p, Gradient::Dense(Tensor::from_vec(vec![0.5f32; 10], [10])?.data()))?;
    }
    check(world, "a step of 100 small parameters", [4.0, 4.0, 2.0], || {
        optimizer.step(&ctx).map(drop)
    })?;
    drop(optimizer);
    ctx.release()
}

/// Steps of a model on one rank take the memory of the steps before.
fn training_takes_no_large_arrays(_: &World) -> Result<()> {
    const BATCH: usize = 100;
    let widths = [64, 256, 128, 10];
    let mut layers = Vec::new();
    for pair in widths.windows(2) {
        let weights = (0..pair[0] * pair[1]).map(|i| ((i * 37) % 97) as f64 / 970.0 - 0.05).collect();
        let weight = Tensor::from_vec(weights, [pair[0], pair[1]])?.parameter()?;
        layers.push((weight, Tensor::from_vec(vec![0.01; pair[1]], pair[1])?.parameter()?));
    }
    let x = Tensor::from_vec((0..BATCH * 64).map(|i| (i % 17) as f64 / 16.0).collect(), [BATCH, 64])?;
    let labels = Tensor::from_vec((0..BATCH).map(|i| (i % 10) as i64).collect(), BATCH)?;
    let step = || -> Result<()> {
        let mut y = x.clone();
        for (i, (weight, bias)) in layers.iter().enumerate() {
            y = (y.matmul(weight)? + bias)?;
            if i + 1 < layers.len() {
                y = y.relu()?;
            }
        }
        y.cross_entropy(&labels)?.backward()?;
        layers.iter().for_each(|(weight, bias)| {
            weight.zero_grad();
            bias.zero_grad();
        });
        Ok(())
    };
    (0..5).try_for_each(|_| step())?;
    let before = ALLOCATOR.stats().bytes_allocated;
    (0..ROUNDS).try_for_each(|_| step())?;
    let bytes = (ALLOCATOR.stats().bytes_allocated - before) / ROUNDS;
    // Its arrays of at least 16 KiB are 1.6 MB.
    assert!(bytes < 150_000, "{bytes} bytes are allocated in a step");
    Ok(())
}

pub const CASES: &[Case] = &[
    Case {
        ranks: &[1],
        alone: true,
        ..Case::new("costs::training_takes_the_memory_of_the_step_before", || {
            led(training_takes_no_large_arrays)
        })
    },
    Case {
        ranks: &[2],
        alone: true,
        ..Case::new("costs::calls_and_steps_take_two_messages_and_few_allocations", || led(costs))
    },
];

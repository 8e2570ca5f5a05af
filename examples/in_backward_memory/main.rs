//! What the optimizer in backward saves: trains layers with it, and with backward followed by a step, and prints the memory and the time of both as JSON.
//!
//! `in_backward_memory [LAYERS WIDTH BATCH PAIRS]`, 24 1024 8 20 without. Layers of f32 weights are dealt over the ranks; rank 0 leads, and every layer is a
//! recorded call to its owner. The update is SGD, which keeps no state. Peaks are of each rank, over where it stood after the weights were made and one forward
//! pass was run and dropped, during three iterations. *Live gradient bytes* are counted by the allocator: the bytes in live blocks of at least one weight's size,
//! beyond those that were live at the start. Nothing else in this program is so large, so a copy of a weight, if one was made, counts as well. *Resident* is the
//! kernel's peak (VmHWM). Then pairs of iterations, one of each kind, are timed in turn: context, forward, backward, the step if there is one.

// A program, not a library: nothing outside can reach it anyway.
#![allow(unreachable_pub)]

mod counting;
mod rank;

use std::time::Instant;

use rankgrad::prelude::*;
use serde_json::{Value, json};

use rank::Peaks;

struct Model {
    weights: Vec<RRef<Tensor>>,
    input: Tensor,
}

impl Model {
    fn new(world: &World, layers: u32, width: usize, batch: usize) -> Result<Self> {
        let weight = |layer: u32| world.remote(layer % world.size(), rank::weight, (width, u64::from(layer)));
        let input = (0..batch * width).map(|i| ((i * 37) % 97) as f32 / 97.0 - 0.5).collect();
        Ok(Model {
            weights: (0..layers).map(weight).collect::<Result<_>>()?,
            input: Tensor::from_vec(input, [batch, width])?,
        })
    }

    fn loss(&self, ctx: &Context) -> Result<Tensor> {
        let mut x = self.input.clone();
        for w in &self.weights {
            x = ctx.call(w.owner(), rank::layer, (&x, w))?;
        }
        x.mul(&x)?.mean()
    }

    /// One iteration, in seconds. Without a step, backward makes the updates.
    fn iterate(&self, world: &World, step: Option<&DistributedOptimizer>) -> Result<f64> {
        let start = Instant::now();
        let ctx = world.context()?;
        ctx.backward(&[self.loss(&ctx)?])?;
        step.map(|optimizer| optimizer.step(&ctx)).transpose()?;
        drop(ctx);
        Ok(start.elapsed().as_secs_f64())
    }

    fn attach(&self) -> Result<rankgrad::dist::DistributedInBackward> {
        optimizer_in_backward(Sgd::new(0.01), &self.weights, InBackward::default())
    }

    fn peaks(&self, world: &World, step: Option<&DistributedOptimizer>) -> Result<Vec<Peaks>> {
        (0..world.size()).try_for_each(|rank| world.call(rank, rank::begin, ()))?;
        for _ in 0..3 {
            self.iterate(world, step)?;
        }
        (0..world.size()).map(|rank| world.call(rank, rank::end, ())).collect()
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}

fn report(peaks: &[Peaks], p50: f64) -> Value {
    json!({
        "peak_heap_bytes": peaks.iter().map(|p| p.heap).collect::<Vec<_>>(),
        "peak_gradient_bytes": peaks.iter().map(|p| p.gradients).collect::<Vec<_>>(),
        "peak_resident_growth_bytes": peaks.iter().map(|p| p.resident).collect::<Vec<_>>(),
        "iteration_p50_seconds": p50,
    })
}

/// What rank 0 does.
fn measure(world: &World, [layers, width, batch, pairs]: [usize; 4]) -> Result<Value> {
    let model = Model::new(world, layers as u32, width, batch)?;
    model.loss(&world.context()?)?;

    let attached = model.attach()?;
    let with = model.peaks(world, None)?;
    attached.detach()?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.01), &model.weights)?;
    let without = model.peaks(world, Some(&optimizer))?;

    let mut times = [Vec::new(), Vec::new()];
    for pair in 0..pairs {
        for turn in 0..2 {
            // Each kind goes first in half of the pairs.
            let in_backward = (pair + turn).is_multiple_of(2);
            if in_backward {
                let attached = model.attach()?;
                times[0].push(model.iterate(world, None)?);
                attached.detach()?;
            } else {
                times[1].push(model.iterate(world, Some(&optimizer))?);
            }
        }
    }
    let [in_backward, then_step] = times.map(median);
    Ok(json!({
        "ranks": world.size(), "layers": layers, "width": width, "batch": batch, "pairs": pairs,
        "weight_bytes": width * width * size_of::<f32>(),
        "in_backward": report(&with, in_backward),
        "backward_then_step": report(&without, then_step),
        "iteration_p50_ratio": in_backward / then_step,
    }))
}

fn main() -> Result<()> {
    let mut sizes = [24, 1024, 8, 20];
    for (size, argument) in sizes.iter_mut().zip(std::env::args().skip(1)) {
        *size = argument
            .parse()
            .map_err(|e| Error::user(format!("{argument}: {e}; usage: in_backward_memory [LAYERS WIDTH BATCH PAIRS]")))?;
    }
    counting::set_large(sizes[1] * sizes[1] * size_of::<f32>());
    let world = World::init()?;
    let result = world.lead(|world| measure(world, sizes))?;
    world.finish()?;
    if let Some(result) = result {
        println!("{result:#}");
    }
    Ok(())
}

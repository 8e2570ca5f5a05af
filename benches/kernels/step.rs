//! A step over 4 x 1,000,000 elements.

use rankgrad::Result;
use rankgrad::optim::{Adam, ComputeThreads, Optimizer, arithmetic};
use rankgrad::tensor::{Gradient, Tensor};

use crate::Best;
use crate::bench::{Row, is_quick};
use crate::floors::{Arrays, stream_on_threads};

const PARAMETERS: usize = 4;
const ELEMENTS: usize = 1_000_000;

/// Adam in `f32`: by one thread and by two, and with less of the instruction set.
pub fn rows() -> Result<Vec<Row>> {
    let vector = |x: f32| Tensor::from_vec(vec![x; ELEMENTS], [ELEMENTS]);
    let parameters = (0..PARAMETERS).map(|_| vector(1.0)?.parameter()).collect::<Result<Vec<_>>>()?;
    let gradients = (0..PARAMETERS)
        .map(|_| Ok(vector(0.5)?.data().into()))
        .collect::<Result<Vec<Gradient>>>()?;
    let mut optimizer = Optimizer::new(Adam::new(1e-3), parameters)?;
    let mut step = move || optimizer.step(&mut |place| gradients.get(place).cloned());
    step()?;
    let rounds = if is_quick() { 40 } else { 300 };
    let all = PARAMETERS * ELEMENTS;
    let rate = |seconds: f64| Arrays::<f32>::bytes(2) as f64 * all as f64 / seconds / 1e9;
    let mut rows = Vec::new();
    for threads in [1, 2] {
        let held = ComputeThreads::new(threads);
        let (mut best, mut floor) = (Best::default(), f64::INFINITY);
        let mut parts: Vec<Arrays<f32>> = (0..threads).map(|_| Arrays::new(all / threads, 2)).collect();
        for _ in 0..rounds {
            best.time(&mut step)?;
            floor = floor.min(stream_on_threads(&mut parts));
        }
        rows.push(Row::new(
            format!("step_4x1000000_adam_threads_{threads}"),
            rate(best.seconds()),
            "GB/s",
            rate(floor),
        ));
        drop(held);
    }
    let mut floor = Arrays::<f32>::new(all, 2);
    for (place, set) in arithmetic::instruction_sets().into_iter().enumerate() {
        arithmetic::limit_instructions(place);
        let (mut best, mut streamed) = (Best::default(), Best::default());
        for _ in 0..rounds / 2 {
            best.time(&mut step)?;
            streamed.time(|| floor.stream());
        }
        rows.push(Row::new(
            format!("step_4x1000000_adam_{set}"),
            rate(best.seconds()),
            "GB/s",
            rate(streamed.seconds()),
        ));
    }
    arithmetic::limit_instructions(usize::MAX);
    Ok(rows)
}

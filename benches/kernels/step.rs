//! A step over 4 x 1,000,000 elements.

use rankgrad::Result;
use rankgrad::optim::{Adam, ComputeThreads, Optimizer, arithmetic};
use rankgrad::tensor::{Data, Tensor};

use crate::Best;
use crate::bench::{Row, is_quick};
use crate::floors::{bytes, lend, stream_on_threads};

const PARAMETERS: usize = 4;
const ELEMENTS: usize = 1_000_000;

/// Adam in `f32`: by one thread and by two, and with less of the instruction set.
pub fn rows() -> Result<Vec<Row>> {
    let vector = |x: f32| Tensor::from_vec(vec![x; ELEMENTS], [ELEMENTS]);
    let parameters = (0..PARAMETERS).map(|_| vector(1.0)?.parameter()).collect::<Result<Vec<_>>>()?;
    let gradients = (0..PARAMETERS).map(|_| Ok(vector(0.5)?.data())).collect::<Result<Vec<Data>>>()?;
    let mut optimizer = Optimizer::new(Adam::new(1e-3), parameters)?;
    let step = |optimizer: &mut Optimizer| optimizer.step(&mut |place| gradients.get(place).map(|g| g.clone().into()));
    step(&mut optimizer)?;
    let rounds = if is_quick() { 40 } else { 300 };
    let rate = |seconds: f64| (bytes::<f32>(2) * PARAMETERS * ELEMENTS) as f64 / seconds / 1e9;
    let mut rows = Vec::new();
    let mut measure = |name: String, threads: usize, rounds: usize| -> Result<()> {
        let (mut best, mut floor) = (Best::default(), f64::INFINITY);
        for _ in 0..rounds {
            best.time(|| step(&mut optimizer))?;
            floor = floor.min(lend(&mut optimizer, &gradients, |memory| stream_on_threads(memory, threads))?);
        }
        rows.push(Row::new(
            format!("step_4x1000000_adam_{name}"),
            rate(best.seconds()),
            "GB/s",
            rate(floor),
        ));
        Ok(())
    };
    for threads in [1, 2] {
        let held = ComputeThreads::new(threads);
        measure(format!("threads_{threads}"), threads, rounds)?;
        drop(held);
    }
    for (place, set) in arithmetic::instruction_sets().into_iter().enumerate() {
        arithmetic::limit_instructions(place);
        measure(set.into(), 1, rounds / 2)?;
    }
    arithmetic::limit_instructions(usize::MAX);
    Ok(rows)
}

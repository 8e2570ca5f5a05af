//! Steps over trees of owners from many threads at once, where the function pool is as small as can be.

use rankgrad::prelude::*;

use crate::case::Case;
use crate::optimizer::{dense, vector};
use crate::settled::led;

const CLIENTS: u32 = 8;
const STEPS: u32 = 10;

/// Each thread has an optimizer of its own, all over the same owners; each step waits on each owner for those below it.
fn from_many_threads(world: &World) -> Result<()> {
    let client = |number: u32| -> Result<()> {
        let parameters: Vec<RRef<Tensor>> = (0..world.size())
            .map(|rank| world.put((rank + number) % world.size(), vector(&[f64::from(number)])))
            .collect::<Result<_>>()?;
        let mut optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), &parameters)?;
        optimizer.set_fan_out(2)?;
        let ctx = world.context()?;
        for parameter in &parameters {
            ctx.accumulate(parameter, dense(&[0.5]))?;
        }
        for step in 0..STEPS {
            let options = match step % 2 {
                0 => StepOptions::new(),
                _ => StepOptions::new().all_or_nothing(),
            };
            assert_eq!(optimizer.step_with(&ctx, &options)?.updated(), parameters.len());
        }
        for parameter in &parameters {
            assert_eq!(parameter.fetch()?.to_vec::<f64>()?, [f64::from(number) - 0.5 * f64::from(STEPS)]);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || client(number))).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("no panic"))
    })
}

remote! {
    /// Calls down a binary tree of ranks, and counts them.
    fn counted(scope: &Scope, from: u32, to: u32) -> Result<u32> {
        let middle = from.midpoint(to);
        let halves = [(from, middle), (middle + 1, to)].into_iter().filter(|&(a, b)| to > from && a <= b);
        let calls: Vec<_> = halves.map(|(a, b)| scope.call_async(a % scope.size(), counted, (a, b))).collect::<Result<_>>()?;
        calls.into_iter().try_fold(1, |sum, call| Ok(sum + call.wait()?))
    }
}

/// Functions that wait for others of the same ranks.
fn nested(world: &World) -> Result<()> {
    let calls: Vec<_> = (0..CLIENTS).map(|_| world.call_async(1, counted, (0, 15))).collect::<Result<_>>()?;
    calls.into_iter().try_for_each(|call| {
        assert_eq!(call.wait()?, 31);
        Ok(())
    })
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[4],
        env: &[("RANKGRAD_POOL_THREADS", "1")],
        ..Case::new("trees::steps_of_many_threads_need_one_pool_thread", || led(from_many_threads))
    },
    Case {
        ranks: &[4],
        env: &[("RANKGRAD_POOL_THREADS", "2")],
        ..Case::new("trees::steps_of_many_threads_need_two_pool_threads", || led(from_many_threads))
    },
    Case {
        ranks: &[2, 4],
        env: &[("RANKGRAD_POOL_THREADS", "1")],
        ..Case::new("trees::nested_functions_need_one_pool_thread", || led(nested))
    },
];

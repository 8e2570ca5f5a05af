//! What broke once under pressure: orders that are rare, values whose `drop` does things, ends that differ.

use std::sync::Mutex;
use std::time::Duration;

use rankgrad::prelude::*;
use rankgrad::rpc::Caller;
use rankgrad::{BackwardOptions, Mode};

use crate::case::Case;
use crate::{Outcome, ok};

remote! {
    /// Keeps a reference on another rank than its owner's and its maker's, and fetches through it.
    fn hold(scope: &Scope, value: RRef<Tensor>) -> Result<usize> {
        std::thread::sleep(Duration::from_millis(1));
        Ok(scope.fetch(&value)?.len())
    }

    fn scale(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)
    }

    fn plain_fetch(scope: &Scope, value: RRef<Tensor>, depth: u32) -> Result<usize> {
        let n = value.fetch()?.len(); // not through the scope
        if depth == 0 {
            return Ok(n);
        }
        scope.call((scope.rank() + 1) % scope.size(), plain_fetch, (value, depth - 1))
    }

    fn noisy(scope: &Scope, panics: bool) -> Result<Noisy> {
        Ok(Noisy { caller: Mutex::new(scope.caller().clone()), panics })
    }

    fn answer(scope: &Scope) -> Result<u32> {
        Ok(scope.rank())
    }

    fn slow_tensor(scope: &Scope) -> Result<Tensor> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(300));
        Tensor::from_vec(vec![1.0], [1])?.parameter()
    }
}

/// Calls its own rank's neighbour as it is dropped, or panics.
struct Noisy {
    caller: Mutex<Caller>,
    panics: bool,
}

impl Drop for Noisy {
    fn drop(&mut self) {
        if self.panics {
            panic!("a value's drop panics");
        }
        let caller = self.caller.lock().unwrap();
        let next = (caller.rank() + 1) % caller.size();
        assert_eq!(caller.call(next, answer, ()).unwrap(), next);
    }
}

fn creations_overtaken() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let small = scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    drop(world.put_constant(1, Tensor::scalar(1.0)));
                }
            });
            let large = || -> Result<()> {
                for _ in 0..60 {
                    let r = world.put_constant(1, Tensor::zeros(DType::F64, [200_000]))?;
                    let held = world.call_async(2 % world.size(), hold, (&r,))?;
                    drop(r);
                    assert_eq!(held.wait()?, 200_000);
                }
                Ok(())
            };
            let result = large();
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            small.join().unwrap();
            result
        })
    })?;
    ok(world.finish())
}

/// A thread that waits for room may find that another was faster, and waits on.
fn threads_in_a_narrow_window() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let far = world.owner(1);
        std::thread::scope(|scope| {
            let calls = |_| scope.spawn(move || (0..500).try_for_each(|_| world.call(far, answer, ()).map(|rank| assert_eq!(rank, far))));
            let threads: Vec<_> = (0..4).map(calls).collect();
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        })
    })?;
    ok(world.finish())
}

fn gradients_without_recording() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let w = world.put(world.owner(1), Tensor::from_vec(vec![1.0, 2.0], [2])?)?;
        let ctx = world.context()?;
        let gradient = Gradient::Dense(Tensor::from_vec(vec![0.5, 0.25], [2])?.data());
        no_grad(|| ctx.accumulate(&w, gradient))?;
        assert!(ctx.gradient(&w)?.is_some());
        let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), [&w])?;
        assert_eq!(optimizer.step(&ctx)?.updated(), 1);
        assert_eq!(w.fetch()?.to_vec::<f64>()?, [0.5, 1.75]);
        Ok(())
    })?;
    ok(world.finish())
}

fn fast_twice() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let w = world.put(world.owner(1), Tensor::from_vec(vec![3.0], [1])?)?;
        let x = Tensor::from_vec(vec![2.0], [1])?;
        let ctx = world.context()?;
        for mode in [Mode::Fast, Mode::Fast, Mode::Exact, Mode::Fast] {
            let y = ctx.call(w.owner(), scale, (&x, &w))?.sum()?;
            let options = BackwardOptions {
                mode,
                ..Default::default()
            };
            ctx.backward_with(&[y], options)?;
        }
        let sum = ctx.gradient(&w)?.expect("a gradient").to_dense()?;
        assert_eq!(Tensor::from_data(sum).to_vec::<f64>()?, [8.0]);
        Ok(())
    })?;
    ok(world.finish())
}

fn serve_and_finish() -> Outcome {
    let world = World::init()?;
    if world.rank() > 0 {
        world.serve()?;
        world.serve()?;
        assert_eq!(world.call(0, answer, ())?, 0);
    }
    ok(world.finish())
}

fn drops_that_call() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        for _ in 0..30 {
            for to in 0..world.size() {
                drop(world.remote(to, noisy, (false,))?);
            }
        }
        for to in 0..world.size() {
            assert_eq!(world.call(to, answer, ())?, to);
        }
        Ok(())
    })?;
    ok(world.finish())
}

fn drops_that_panic() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        for to in 0..world.size() {
            for _ in 0..5 {
                drop(world.remote(to, noisy, (true,))?);
            }
            assert_eq!(world.call(to, answer, ())?, to);
        }
        Ok(())
    })?;
    ok(world.finish())
}

fn nested_in_a_narrow_window() -> Outcome {
    let world = World::init()?;
    let value = world.share(Tensor::zeros(DType::F64, [7]))?;
    let next = (world.rank() + 1) % world.size();
    let calls: Vec<_> = (0..20)
        .map(|_| world.call_async(next, plain_fetch, (&value, 6)))
        .collect::<Result<_>>()?;
    for call in calls {
        assert_eq!(call.wait()?, 7);
    }
    drop(value);
    ok(world.finish())
}

fn abandoned_optimizer() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let far = world.owner(1);
        let w = world.remote(far, slow_tensor, ())?;
        let hurried = world.timeout(Duration::from_millis(30));
        assert!(DistributedOptimizer::new(&hurried, Sgd::new(0.1), [&w]).is_err());
        w.fetch()?;
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(world.counters(far)?.optimizers, 0);
        Ok(())
    })?;
    ok(world.finish())
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[3, 4],
        ..Case::new("stress::a_large_creation_is_not_overtaken", creations_overtaken)
    },
    Case {
        ranks: &[1, 2],
        env: &[("RANKGRAD_WINDOW_REQUESTS", "1")],
        ..Case::new("stress::threads_in_a_narrow_window", threads_in_a_narrow_window)
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("stress::a_gradient_put_under_no_grad_counts", gradients_without_recording)
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("stress::fast_backwards_of_one_context", fast_twice)
    },
    Case::new("stress::some_serve_while_others_finish", serve_and_finish),
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("stress::values_whose_drop_calls", drops_that_call)
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("stress::values_whose_drop_panics", drops_that_panic)
    },
    Case {
        ranks: &[1, 2, 3],
        env: &[("RANKGRAD_WINDOW_REQUESTS", "1")],
        ..Case::new("stress::nested_calls_in_a_narrow_window", nested_in_a_narrow_window)
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("stress::an_optimizer_given_up_leaves_nothing", abandoned_optimizer)
    },
];

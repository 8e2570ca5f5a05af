//! Ranks that stop, and ranks that only take long: calls and backwards tell them apart.

use std::process::Command;
use std::time::{Duration, Instant};

use rankgrad::ErrorKind;
use rankgrad::prelude::*;

use crate::case::{Case, Expect};
use crate::{Outcome, ok};

const SECOND: Duration = Duration::from_secs(1);

/// Stops this process with all its threads, in a moment, and lets it go on after so many seconds.
fn freeze(seconds: u64) {
    let pid = std::process::id();
    let script = format!("sleep 0.3; kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}");
    drop(Command::new("sh").args(["-c", &script]).spawn().unwrap());
}

remote! {
    fn nothing(scope: &Scope) -> Result<u32> {
        Ok(scope.rank())
    }

    fn nap(scope: &Scope, seconds: u64) -> Result<u32> {
        std::thread::sleep(Duration::from_secs(seconds));
        Ok(scope.rank())
    }

    fn stop(scope: &Scope, seconds: u64) -> Result<()> {
        let _ = scope;
        freeze(seconds);
        Ok(())
    }

    /// Its adjoint stops the rank, or sleeps.
    fn slow_adjoint(scope: &Scope, x: Tensor, stops: u64, sleeps: u64) -> Result<Tensor> {
        let _ = scope;
        let y = x.mul_scalar(3.0)?;
        let _ = y.register_hook(move |_| {
            if stops > 0 {
                freeze(stops);
                std::thread::sleep(SECOND); // it is stopped within this time
            }
            std::thread::sleep(Duration::from_secs(sleeps));
            None
        })?;
        y.mul_scalar(2.0)
    }

    fn through(scope: &Scope, x: Tensor, to: u32, stops: u64, sleeps: u64) -> Result<Tensor> {
        scope.call(to, slow_adjoint, (x.mul_scalar(1.0)?, stops, sleeps))
    }
}

fn call_to_a_stopped_rank() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        world.call(1, nothing, ())?;
        world.call(1, stop, (6,))?;
        std::thread::sleep(SECOND);
        let start = Instant::now();
        let error = world.call(1, nothing, ()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Timeout { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains("nothing"), "{error}");
        assert!(
            start.elapsed() >= 2 * SECOND && start.elapsed() < 4 * SECOND,
            "{:?}",
            start.elapsed()
        );
        std::thread::sleep(4 * SECOND);
        assert_eq!(world.call(1, nothing, ())?, 1);
        Ok(())
    })?;
    ok(world.finish())
}

/// A call waits for room in the window to a rank: as long as that works on what fills it, and not for one that has stopped.
fn full_window() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let long = world.call_async(1, nap, (4,))?;
        assert_eq!(world.call(1, nothing, ())?, 1);
        assert_eq!(long.wait()?, 1);

        world.call(1, stop, (6,))?;
        std::thread::sleep(SECOND);
        let first = world.call_async(1, nothing, ())?;
        let start = Instant::now();
        let error = world.call(1, nothing, ()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Timeout { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains("window"), "{error}");
        assert!(start.elapsed() < 4 * SECOND, "{:?}", start.elapsed());
        std::thread::sleep(4 * SECOND);
        assert_eq!(first.wait()?, 1);
        Ok(())
    })?;
    ok(world.finish())
}

/// A wait is told to whoever looks at the log, with what it waits for.
fn waits_are_told() -> Outcome {
    let world = World::builder().env_logger().start()?;
    world.lead(|world| world.call(1, nap, (3,)))?;
    ok(world.finish())
}

/// A function that takes longer than the timeout is asked about, and waited for.
fn long_function() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        assert_eq!(world.call(1, nap, (3,))?, 1);
        let x = Tensor::from_vec(vec![1.0f64], [1])?.parameter()?;
        let ctx = world.context()?;
        let y = ctx.call(1, slow_adjoint, (&x, 0, 3))?;
        ctx.backward(&[y.sum()?])?;
        let y = ctx.call(1, through, (&x, 2, 0, 3))?;
        ctx.backward(&[y.sum()?])?;
        assert_eq!(
            Tensor::from_data(ctx.local_gradient(&x)?.unwrap().to_dense()?).to_vec::<f64>()?,
            [12.0]
        );
        Ok(())
    })?;
    ok(world.finish())
}

/// Rank `lost` stops while its adjoint runs.
fn stopped_backward(lost: u32) -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let x = Tensor::from_vec(vec![1.0f64], [1])?.parameter()?;
        let run = |ctx: &Context, stops: u64| {
            if lost == 1 {
                ctx.call(1, slow_adjoint, (&x, stops, 0))
            } else {
                ctx.call(1, through, (&x, lost, stops, 0))
            }
        };
        for released_early in [false, true] {
            let ctx = world.context()?;
            let y = run(&ctx, 6)?;
            let start = Instant::now();
            let error = ctx.backward(&[y.sum()?]).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Timeout { rank, .. } if *rank == lost), "{error}");
            assert!(start.elapsed() < 4 * SECOND, "{:?}", start.elapsed());
            let error = ctx.local_gradient(&x).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::BackwardInFlight { .. }), "{error}");
            if released_early {
                drop(ctx);
                while world.call(lost, nothing, ()).is_err() {}
            } else {
                // The abort reaches all ranks once the lost one goes on; then the context works again.
                while ctx.local_gradient(&x).is_err() {
                    assert!(start.elapsed() < 20 * SECOND);
                    std::thread::sleep(SECOND / 10);
                }
                assert!(ctx.local_gradient(&x)?.is_none());
                let y = run(&ctx, 0)?;
                ctx.backward(&[y.sum()?])?;
                assert_eq!(
                    Tensor::from_data(ctx.local_gradient(&x)?.unwrap().to_dense()?).to_vec::<f64>()?,
                    [6.0]
                );
                ctx.release()?;
            }
        }
        for rank in 0..world.size() {
            let start = Instant::now();
            loop {
                let counters = world.counters(rank)?;
                if (counters.contexts, counters.backwards) == (0, 0) {
                    break;
                }
                assert!(start.elapsed() < 10 * SECOND, "rank {rank}: {counters:?}");
                std::thread::sleep(SECOND / 10);
            }
        }
        Ok(())
    })?;
    ok(world.finish())
}

/// A backward whose time is up has left all of its gradients, and is no error, or none.
fn backwards_given_up() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let parameters: Vec<_> = (0..world.size())
            .map(|rank| world.put(rank, Tensor::ones(DType::F64, [4])))
            .collect::<Result<_>>()?;
        // An abort may still be under way.
        let has = |ctx: &Context, parameter: &RRef<Tensor>| loop {
            match ctx.gradient(parameter) {
                Err(e) if matches!(e.root(), ErrorKind::BackwardInFlight { .. }) => std::thread::sleep(Duration::from_micros(100)),
                found => return found.map(|found| found.is_some()),
            }
        };
        let (mut done, mut given_up) = (0, 0);
        for round in 0..1500 {
            let ctx = world.context()?;
            let roots: Vec<Tensor> = parameters.iter().map(|p| ctx.fetch(p)?.sum()).collect::<Result<_>>()?;
            let options = BackwardOptions {
                timeout: Some(Duration::from_micros(round * 13 % 1200)),
                ..BackwardOptions::default()
            };
            let ended = ctx.backward_with(&roots, options);
            let found: Vec<bool> = parameters.iter().map(|p| has(&ctx, p)).collect::<Result<_>>()?;
            match &ended {
                Ok(()) => done += 1,
                Err(e) if matches!(e.kind(), ErrorKind::Timeout { .. }) => given_up += 1,
                Err(e) => panic!("{e}"),
            }
            assert!(
                found.iter().all(|&found| found == ended.is_ok()),
                "{ended:?} in round {round}, and gradients {found:?}"
            );
        }
        assert!(given_up > 0, "{done} of 1500 ended in time");
        Ok(())
    })?;
    ok(world.finish())
}

const TIMEOUT_2: &[(&str, &str)] = &[("RANKGRAD_TIMEOUT", "2")];

/// The cases.
/// All stand still for longer than the timeout, as under a debugger or in a machine that is paused, and go on: nobody is to blame.
fn all_stand_still() -> Outcome {
    let world = World::init()?;
    freeze(4);
    world.lead(|world| {
        let long = world.call_async(1, nap, (6,))?;
        let start = Instant::now();
        while start.elapsed() < 6 * SECOND {
            assert_eq!(world.call(1, nothing, ())?, 1);
        }
        assert_eq!(long.wait()?, 1);
        Ok(())
    })?;
    ok(world.finish())
}

pub const CASES: &[Case] = &[
    Case {
        ranks: &[2, 3],
        env: TIMEOUT_2,
        ..Case::new("liveness::ranks_that_all_stood_still_go_on", all_stand_still)
    },
    Case {
        ranks: &[2],
        env: &[("RUST_LOG", "warn"), ("RANKGRAD_STATUS_AFTER", "1.2")],
        expect: Expect::Says(&[
            ("still waiting for `ranks::liveness::nap` on rank 1", 1),
            ("running there for 1.2 s", 1),
        ]),
        ..Case::new("liveness::waits_are_told", waits_are_told)
    },
    Case {
        ranks: &[2],
        env: TIMEOUT_2,
        ..Case::new("liveness::a_stopped_rank_is_a_timeout_and_works_again", call_to_a_stopped_rank)
    },
    Case {
        ranks: &[2],
        env: &[("RANKGRAD_TIMEOUT", "2"), ("RANKGRAD_WINDOW_REQUESTS", "1")],
        ..Case::new("liveness::a_full_window_to_a_stopped_rank_is_a_timeout", full_window)
    },
    Case {
        ranks: &[3],
        env: TIMEOUT_2,
        ..Case::new("liveness::functions_and_adjoints_may_take_longer_than_the_timeout", long_function)
    },
    Case {
        ranks: &[2],
        env: TIMEOUT_2,
        ..Case::new("liveness::a_rank_that_stops_in_a_backward_is_named", || stopped_backward(1))
    },
    Case {
        ranks: &[3],
        env: TIMEOUT_2,
        ..Case::new("liveness::also_two_hops_away", || stopped_backward(2))
    },
    Case {
        ranks: &[2, 3],
        ..Case::new("liveness::a_backward_that_is_given_up_leaves_no_gradients", backwards_given_up)
    },
];

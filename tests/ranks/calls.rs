//! Calls: kinds, nesting, failures, waiting.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rankgrad::prelude::*;
use rankgrad::rpc::wait_all;

use crate::case::Case;
use crate::{Outcome, ok};

static SIDE: AtomicU64 = AtomicU64::new(0);

remote! {
    fn nothing(scope: &Scope) -> Result<()> {
        let _ = scope;
        Ok(())
    }

    fn add(scope: &Scope, a: i64, b: i64) -> Result<i64> {
        let _ = scope;
        Ok(a + b)
    }

    fn whoami(scope: &Scope) -> Result<(u32, u32)> {
        Ok((scope.rank(), scope.caller_rank()))
    }

    fn ring(scope: &Scope, hops: u32, total: u64) -> Result<u64> {
        if hops == 0 {
            return Ok(total);
        }
        scope.call((scope.rank() + 1) % scope.size(), ring, (hops - 1, total + u64::from(scope.rank())))
    }

    fn fail(scope: &Scope, text: String) -> Result<()> {
        let _ = scope;
        Err(Error::user(text))
    }

    fn burst(scope: &Scope) -> Result<()> {
        panic!("burst on {}", scope.rank())
    }

    fn nap(scope: &Scope, millis: u64) -> Result<u32> {
        std::thread::sleep(Duration::from_millis(millis));
        Ok(scope.rank())
    }

    fn norm(scope: &Scope, x: Tensor) -> Result<f64> {
        let _ = scope;
        x.mul(&x)?.sum()?.item()
    }

    fn count(scope: &Scope) -> Result<u64> {
        let _ = scope;
        Ok(SIDE.fetch_add(1, Ordering::SeqCst) + 1)
    }
}

fn kinds() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        for to in 0..world.size() {
            assert_eq!(world.call(to, add, (2, 3))?, 5);
            assert_eq!(world.call(to, whoami, ())?, (to, 0));
            let future = world.call_async(to, add, (20, 30))?;
            assert_eq!(future.wait()?, 50);
            let doubled = world.call_async(to, add, (4, 5))?.then(|sum| Ok(sum? * 2));
            assert_eq!(doubled.wait()?, 18);
            let far = world.remote(to, add, (7, 8))?;
            assert_eq!(world.fetch(&far)?, 15);
            let x = Tensor::from_vec((0..1000).map(f64::from).collect(), [10, 100])?;
            let expected = (0..1000).map(|i| f64::from(i * i)).sum::<f64>();
            assert_eq!(world.call(to, norm, (&x,))?, expected);
        }
        Ok(())
    })?;
    ok(world.finish())
}

fn many_in_flight() -> Outcome {
    let world = World::init()?;
    let to = (world.rank() + 1) % world.size();
    let futures: Vec<_> = (0..3000).map(|i| world.call_async(to, add, (i, 1))).collect::<Result<_>>()?;
    for (i, sum) in wait_all(futures)?.into_iter().enumerate() {
        assert_eq!(sum, i as i64 + 1);
    }
    ok(world.finish())
}

/// With sleeps of up to a second, what happens on the own rank must wake who waits for it.
fn woken_at_home() -> Outcome {
    let world = World::init()?;
    let begun = std::time::Instant::now();
    for _ in 0..20 {
        assert_eq!(world.call_async(world.rank(), nap, (2,))?.wait()?, world.rank());
        assert_eq!(world.call_async(world.rank(), nap, (2,))?.then(|rank| rank).wait()?, world.rank());
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    ok(world.finish())
}

/// A waiter that sleeps at once sleeps no second time for as long when its time is up.
fn limits_hold_for_sleepers() -> Outcome {
    let world = World::init()?;
    let to = (world.rank() + 1) % world.size();
    let limit = Duration::from_millis(200);
    let wait = |_| {
        let future = world.call_async(to, nap, (2000,))?;
        let begun = std::time::Instant::now();
        assert!(future.wait_timeout(limit).is_err());
        Ok(begun.elapsed())
    };
    let times = (0..4).map(wait).collect::<Result<Vec<_>>>()?;
    // One that wasn't held up by others on its core.
    assert!(times.iter().any(|time| *time < 2 * limit), "{times:?}");
    ok(world.finish())
}

fn rings() -> Outcome {
    let world = World::init()?;
    let size = u64::from(world.size());
    let hops = 5 * world.size();
    let futures: Vec<_> = (0..8)
        .map(|_| world.call_async(world.rank(), ring, (hops, 0)))
        .collect::<Result<_>>()?;
    for total in wait_all(futures)? {
        assert_eq!(total, 5 * size * (size - 1) / 2);
    }
    ok(world.finish())
}

fn errors() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let to = world.owner(1);
        let error = world.call(to, fail, ("no such thing".to_owned(),)).unwrap_err();
        match error.kind() {
            ErrorKind::Remote { rank, operation, .. } => {
                assert_eq!(*rank, to);
                assert!(operation.contains("fail"));
            }
            other => panic!("{other:?}"),
        }
        assert!(error.to_string().contains("no such thing"));
        let error = world.call(to, burst, ()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Panic { rank, .. } if *rank == to), "{error}");
        assert_eq!(world.call(to, add, (1, 1))?, 2);
        let error = world.call(99, add, (1, 1)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::UnknownRank { rank: 99, .. }), "{error}");
        let error = world.timeout(Duration::from_millis(30)).call(to, nap, (400,)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Timeout { rank, .. } if *rank == to), "{error}");
        assert!(error.to_string().contains("nap"), "{error}");
        let failed = world.remote(to, fail, ("never made".to_owned(),))?;
        for _ in 0..2 {
            let error = world.fetch(&failed).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Creation { .. }) && error.to_string().contains("never made"),
                "{error}"
            );
        }
        Ok(())
    })?;
    ok(world.finish())
}

fn callbacks_are_waited_for() -> Outcome {
    let world = World::init()?;
    if world.rank() == 0 {
        let to = world.owner(1);
        let caller = world.timeout(Duration::from_secs(60));
        let _ = world.call_async(to, nap, (50,))?.then(move |rank| {
            let rank = rank?;
            for _ in 0..20 {
                caller.call(rank, count, ())?;
            }
            Ok(())
        });
    }
    let counts_here = world.owner(1) == world.rank();
    world.finish()?;
    if counts_here {
        assert_eq!(SIDE.load(Ordering::SeqCst), 20);
    }
    Ok(())
}

fn all_drive() -> Outcome {
    let world = World::init()?;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for i in 0..200 {
                    let to = (world.rank() + i) % world.size();
                    assert_eq!(world.call(to, whoami, ()).unwrap(), (to, world.rank()));
                }
            });
        }
    });
    world.serve()?;
    world.call((world.rank() + 1) % world.size(), nothing, ())?;
    ok(world.finish())
}

struct Solver {
    calls: Vec<u32>,
    home: std::thread::ThreadId,
    _not_send: std::rc::Rc<()>,
}

remote! {
    on_main fn solve(scope: &Scope, solver: &mut Solver, x: Tensor) -> Result<Tensor> {
        assert_eq!(std::thread::current().id(), solver.home);
        solver.calls.push(scope.caller_rank());
        x.mul_scalar(2.0)
    }
}

fn on_main() -> Outcome {
    let world = World::init()?;
    let mut solver = Solver {
        calls: Vec::new(),
        home: std::thread::current().id(),
        _not_send: std::rc::Rc::new(()),
    };
    world.lead_with(&mut solver, |world| {
        // This main thread is here, not serving: it says so instead of waiting for itself.
        let error = world.call(0, solve, (Tensor::scalar(1.0),)).unwrap_err();
        assert!(matches!(error.root(), ErrorKind::NotServing { rank: 0, .. }), "{error}");
        for to in 1..world.size() {
            let x = Tensor::from_vec(vec![1.0f32, 2.0], [2])?;
            assert_eq!(world.call(to, solve, (x,))?.to_vec::<f32>()?, [2.0, 4.0]);
        }
        Ok(())
    })?;
    assert_eq!(solver.calls.len(), usize::from(world.rank() > 0));
    ok(world.finish())
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[0, 1, 2, 3, 4],
        ..Case::new("calls::each_kind_of_call_gives_its_result", kinds)
    },
    Case {
        ranks: &[1, 2, 4],
        ..Case::new("calls::thousands_in_flight", many_in_flight)
    },
    Case {
        ranks: &[0, 1, 2],
        env: &[("RANKGRAD_TICK_MS", "1000"), ("RANKGRAD_SPIN_US", "0")],
        ..Case::new("calls::to_oneself_wake_who_waits_for_them", woken_at_home)
    },
    Case {
        ranks: &[0, 1, 2],
        env: &[("RANKGRAD_TICK_MS", "1000"), ("RANKGRAD_SPIN_US", "0"), ("RANKGRAD_YIELD_MS", "0")],
        ..Case::new("calls::limits_hold_for_those_who_sleep_at_once", limits_hold_for_sleepers)
    },
    Case::new("calls::nested_calls_in_rings_end", rings),
    Case {
        ranks: &[1, 2],
        ..Case::new("calls::errors_name_rank_and_function", errors)
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("calls::callbacks_that_call_are_waited_for", callbacks_are_waited_for)
    },
    Case {
        ranks: &[1, 2, 4],
        ..Case::new("calls::all_ranks_drive_with_four_threads", all_drive)
    },
    Case {
        ranks: &[2, 3],
        ..Case::new("calls::on_main_functions_run_on_the_main_thread", on_main)
    },
];

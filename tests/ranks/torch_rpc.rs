//! torch's tests of the calls themselves: load, futures, several results, kinds of arguments, uneven ends.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rankgrad::prelude::*;
use rankgrad::rpc::wait_all;

use crate::case::{Case, Expect};
use crate::optimizer::vector;
use crate::settled::{led, led_locally};
use crate::{Outcome, ok};

static RUN: AtomicU32 = AtomicU32::new(0);

remote! {
    fn add(scope: &Scope, a: Tensor, b: Tensor) -> Result<Tensor> {
        let _ = scope;
        a.add(&b)
    }

    fn heavy(scope: &Scope, a: Tensor) -> Result<Tensor> {
        let _ = scope;
        (0..20).try_fold(a.clone(), |x, _| x.matmul(&a)?.mul_scalar(0.01))
    }

    fn number(scope: &Scope, value: i64) -> Result<i64> {
        let _ = scope;
        Ok(value)
    }

    fn nap(scope: &Scope, millis: u64) -> Result<i64> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(millis));
        Ok(millis as i64)
    }

    fn fail(scope: &Scope, text: String) -> Result<i64> {
        let _ = scope;
        Err(Error::user(text))
    }

    /// Calls its caller back.
    fn back(scope: &Scope, value: i64) -> Result<i64> {
        Ok(scope.call(scope.caller_rank(), number, (value + 1,))? + 1)
    }

    /// Two calls, and a callback on each, inside of a function.
    fn chained(scope: &Scope, to: u32, value: i64) -> Result<i64> {
        let one = |k: i64| -> Result<Future<i64>> { Ok(scope.call_async(to, number, (value + k,))?.then(move |v| Ok(v? * 2))) };
        Ok(wait_all([one(0)?, one(1)?])?.into_iter().sum())
    }

    fn work(scope: &Scope) -> Result<u32> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(5));
        Ok(RUN.fetch_add(1, Ordering::SeqCst) + 1)
    }
}

/// Twenty one after the other, a thousand at once, and twenty that take work.
fn load(world: &World) -> Result<()> {
    let to = world.owner(1);
    for k in 0..20 {
        let x = vector(&[f64::from(k), 1.0]);
        assert_eq!(world.call(to, add, (&x, &x))?.to_vec::<f64>()?, [2.0 * f64::from(k), 2.0]);
    }
    let light: Vec<_> = (0..1000).map(|k| world.call_async(to, number, (k,))).collect::<Result<_>>()?;
    assert_eq!(wait_all(light)?, (0..1000).collect::<Vec<_>>());
    let a = Tensor::from_vec((0..10_000).map(|i| f64::from(i % 97) / 97.0).collect(), [100, 100])?;
    let expected = (0..20)
        .try_fold(a.clone(), |x, _| x.matmul(&a)?.mul_scalar(0.01))?
        .to_vec::<f64>()?;
    let heavy: Vec<_> = (0..20).map(|_| world.call_async(to, heavy, (&a,))).collect::<Result<_>>()?;
    for found in wait_all(heavy)? {
        assert_eq!(found.to_vec::<f64>()?, expected);
    }
    assert_eq!(world.call(to, back, (1,))?, 3);
    Ok(())
}

/// Results in the order of the list; the first error that comes ends the wait, also while another call goes on.
fn several(world: &World) -> Result<()> {
    let to = world.owner(1);
    let nothing: [Future<i64>; 0] = [];
    assert!(wait_all(nothing)?.is_empty());
    let calls = [30, 0, 20, 10].map(|millis| world.call_async(to, nap, (millis,)));
    assert_eq!(wait_all(calls.into_iter().collect::<Result<Vec<_>>>()?)?, [30, 0, 20, 10]);
    for place in 0..3 {
        for chained in [false, true] {
            let begun = Instant::now();
            let futures: Vec<Future<i64>> = (0..3)
                .map(|k| {
                    let future = match k == place {
                        true => world.call_async(to, fail, ("Expected error".to_owned(),))?,
                        false => world.call_async(to, nap, (1500,))?,
                    };
                    Ok(if chained { future.then(|v| v) } else { future })
                })
                .collect::<Result<_>>()?;
            let error = wait_all(futures).unwrap_err();
            assert!(error.to_string().contains("Expected error"), "{error}");
            assert!(begun.elapsed() < Duration::from_millis(1400), "{:?}", begun.elapsed());
        }
    }
    // A callback that panics is an error, and ends the wait as well.
    let begun = Instant::now();
    let slow = world.call_async(to, nap, (1500,))?;
    let panics = world
        .call_async(to, number, (1,))?
        .then(|_| -> Result<i64> { panic!("on purpose") });
    let error = wait_all([slow, panics]).unwrap_err();
    assert!(error.to_string().contains("callback panicked"), "{error}");
    assert!(begun.elapsed() < Duration::from_millis(1400), "{:?}", begun.elapsed());
    // Some of them out of time.
    let hurried = world.timeout(Duration::from_millis(50));
    let error = wait_all([world.call_async(to, nap, (0,))?, hurried.call_async(to, nap, (1000,))?]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Timeout { .. }), "{error}");
    // An error of the closure that issues them is the closure's.
    let body: Result<Vec<Future<i64>>> = [Ok(world.call_async(to, number, (1,))?), Err(Error::user("in the body"))]
        .into_iter()
        .collect();
    assert_eq!(body.err().map(|e| e.to_string()), Some("in the body".into()));
    Ok(())
}

/// Callbacks: in chains, with other results, with errors, inside of functions; and whether a future is done.
fn callbacks(world: &World) -> Result<()> {
    let to = world.owner(1);
    let mut sum = world.call_async(to, number, (0,))?;
    for k in 1..=20 {
        sum = sum.then(move |v| Ok(v? + k));
    }
    assert_eq!(sum.wait()?, 210);
    let text = world.call_async(to, number, (7,))?.then(|v| Ok(format!("<{}>", v?)));
    assert_eq!(text.wait()?, "<7>");
    let nothing = world.call_async(to, number, (7,))?.then(|v| v.map(drop));
    assert_eq!(nothing.wait()?, ());
    let failed = world.call_async(to, fail, ("Expected error".to_owned(),))?;
    let seen = failed.then(|v| Ok(v.unwrap_err().to_string())).then(|text| text);
    assert!(seen.wait()?.contains("Expected error"));
    let passed_on = world
        .call_async(to, number, (1,))?
        .then(|_| Err::<i64, _>(Error::user("another error")))
        .then(|v| v);
    assert_eq!(passed_on.wait().unwrap_err().to_string(), "another error");
    assert_eq!(world.call(to, chained, (world.owner(2), 4))?, 18);
    // Done only when it is.
    let slow = world.call_async(to, nap, (200,))?;
    assert!(!slow.is_done());
    let slow = slow.try_wait().unwrap_err();
    while !slow.is_done() {
        std::thread::yield_now();
    }
    assert_eq!(slow.wait()?, 200);
    let failing = world.call_async(to, fail, ("x".to_owned(),))?;
    while !failing.is_done() {
        std::thread::yield_now();
    }
    assert!(failing.try_wait().is_ok_and(|result| result.is_err()));
    Ok(())
}

/// What goes out comes back: views with strides, empty tensors, texts of errors with any letters.
fn kinds_of_arguments(world: &World) -> Result<()> {
    let to = world.owner(1);
    let x = Tensor::from_vec((0..24).map(f64::from).collect(), [2, 3, 4])?;
    let views = [
        x.transpose(0, 2)?,
        x.slice(1, 0, 3, 2)?,
        x.slice(2, 3, None, -1)?,
        x.permute(&[1, 2, 0])?,
        x.slice(0, 1, 1, 1)?,
    ];
    for view in views {
        let sum = world.call(to, add, (&view, &view))?;
        assert_eq!(sum.shape(), view.shape());
        assert_eq!(sum.to_vec::<f64>()?, view.mul_scalar(2.0)?.to_vec::<f64>()?);
    }
    for text in ["line one\nline two", "{} {0} %s \\ \"quoted\"", "Grüße, 世界", ""] {
        let error = world.call(to, fail, (text.to_owned(),)).unwrap_err();
        assert_eq!(*error.root(), ErrorKind::User { message: text.to_owned() });
        assert!(error.to_string().ends_with(text));
    }
    Ok(())
}

/// Limits of single calls, no limit at all: RANKGRAD_TIMEOUT=1, or 0.
fn time_limits(world: &World) -> Result<()> {
    let to = world.owner(1);
    // A function that runs is left alone by the default limit; a limit of its own holds.
    assert_eq!(world.call(to, nap, (1600,))?, 1600);
    let begun = Instant::now();
    let error = world.timeout(Duration::from_millis(100)).call(to, nap, (700,)).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Timeout { seconds, .. } if *seconds == 0.1),
        "{error}"
    );
    assert!(begun.elapsed() < Duration::from_millis(600));
    // It is the limit of calls made with it, not of others before or after.
    let (before, hurried) = (world.call_async(to, nap, (300,))?, world.timeout(Duration::from_millis(50)));
    let with = hurried.call_async(to, nap, (300,))?;
    let after = world.call_async(to, nap, (300,))?;
    assert!(with.wait().is_err());
    assert_eq!((before.wait()?, after.wait()?), (300, 300));
    Ok(())
}

/// Work is dealt unevenly, and ranks are used after they have come to the end.
fn uneven() -> Outcome {
    let world = World::init()?;
    let (me, size) = (world.rank(), world.size());
    let use_rank = |to: u32| -> Result<()> {
        let calls: Vec<_> = (0..5).map(|_| world.call_async(to, work, ())).collect::<Result<_>>()?;
        let x = vector(&[1.0]);
        let sums: Vec<_> = (0..5).map(|_| world.call_async(to, add, (&x, &x))).collect::<Result<_>>()?;
        wait_all(calls)?;
        wait_all(sums).map(drop)
    };
    for _ in 0..2 {
        if me == 0 {
            std::thread::sleep(Duration::from_millis(200)); // the others serve by now
            (1..size).try_for_each(use_rank)?;
        }
        world.serve()?;
    }
    // And in the end: whoever comes last still finds all others.
    std::thread::sleep(Duration::from_millis(100 * u64::from(me)));
    (0..me).try_for_each(use_rank)?;
    let rank = u32::from(me > 0);
    world.finish()?;
    assert_eq!(RUN.load(Ordering::SeqCst), 10 * rank + 5 * (size - 1 - me));
    Ok(())
}

/// One rank comes to the end six seconds after the other, which says so after five.
fn late() -> Outcome {
    let world = World::builder().env_logger().start()?;
    if world.rank() == 1 {
        std::thread::sleep(Duration::from_secs(6));
    }
    ok(world.finish())
}

fn futures(world: &World) -> Result<()> {
    [several as fn(&World) -> Result<()>, callbacks].iter().try_for_each(|f| f(world))
}

fn calls(world: &World) -> Result<()> {
    [load as fn(&World) -> Result<()>, kinds_of_arguments]
        .iter()
        .try_for_each(|f| f(world))
}

fn on_local_ranks() -> Outcome {
    [calls as fn(&World) -> Result<()>, futures]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 3],
        ..Case::new("torch_rpc::calls_under_load_and_their_arguments", || led(calls))
    },
    Case {
        ranks: &[1, 3],
        alone: true,
        ..Case::new("torch_rpc::futures_callbacks_and_first_errors", || led(futures))
    },
    Case {
        ranks: &[2],
        env: &[("RANKGRAD_TIMEOUT", "1")],
        alone: true,
        ..Case::new("torch_rpc::a_calls_own_limit_wins", || led(time_limits))
    },
    Case {
        ranks: &[2],
        env: &[("RANKGRAD_TIMEOUT", "0")],
        alone: true,
        ..Case::new("torch_rpc::no_limit_is_no_limit", || led(time_limits))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("torch_rpc::uneven_work_finds_all_ranks_to_the_end", uneven)
    },
    Case {
        ranks: &[2],
        env: &[("RUST_LOG", "warn")],
        expect: Expect::Says(&[("haven't come: [1]", 1)]),
        ..Case::new("torch_rpc::who_comes_late_to_the_end_is_named", late)
    },
    Case {
        ranks: &[0],
        ..Case::new("torch_rpc::hold_on_local_ranks_too", on_local_ranks)
    },
];

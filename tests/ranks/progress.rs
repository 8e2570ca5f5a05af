//! Who polls: idle ranks are quiet, busy ones answer, blocked ones don't block others.

use std::sync::{Barrier, Condvar, Mutex};
use std::time::{Duration, Instant};

use rankgrad::prelude::*;
use rankgrad::rpc::wait_all;

use crate::case::{Case, Expect};
use crate::{Outcome, ok};

static MEETING: Barrier = Barrier::new(MEMBERS);
const MEMBERS: usize = 12;

remote! {
    fn nothing(scope: &Scope) -> Result<u32> {
        Ok(scope.rank())
    }

    fn nap(scope: &Scope, millis: u64) -> Result<()> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(millis));
        Ok(())
    }

    /// Waits, not in a call of ours, until all have come.
    fn meet(scope: &Scope) -> Result<()> {
        let _ = scope;
        MEETING.wait();
        Ok(())
    }

    fn to_and_fro(scope: &Scope, depth: u32) -> Result<u32> {
        if depth == 0 { Ok(0) } else { Ok(scope.call(scope.caller_rank(), to_and_fro, (depth - 1,))? + 1) }
    }
}

/// Seconds of a core that the threads of this process have used.
fn cpu_seconds() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let spent = threads.filter_map(|t| std::fs::read_to_string(t.path().join("schedstat")).ok());
    spent.filter_map(|s| s.split(' ').next()?.parse::<f64>().ok()).sum::<f64>() * 1e-9
}

/// Rank 0's main thread sleeps in the program, the others serve.
fn idle() -> Outcome {
    const SPAN: Duration = Duration::from_secs(10);
    let world = World::init()?;
    let measured = std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(1));
        let before = cpu_seconds();
        std::thread::sleep(SPAN);
        (cpu_seconds() - before) / SPAN.as_secs_f64()
    });
    world.lead(|_| {
        std::thread::sleep(SPAN + Duration::from_secs(2));
        Ok(())
    })?;
    let used = measured.join().unwrap();
    assert!(used < 0.01, "rank {} used {:.2} % of a core", world.rank(), used * 100.0);
    ok(world.finish())
}

/// In how many of 400 looks within a second the main thread ran or was ready to, from 0.2 s after the last message on.
fn looks_at_main() -> u32 {
    std::thread::sleep(Duration::from_millis(200));
    let stat = format!("/proc/self/task/{}/stat", std::process::id());
    let runs = |_: &u32| {
        std::thread::sleep(Duration::from_micros(2500));
        // After the name, which may hold anything: the state.
        std::fs::read_to_string(&stat)
            .unwrap()
            .rsplit(')')
            .next()
            .unwrap()
            .starts_with(" R")
    };
    (0..400).filter(runs).count() as u32
}

/// The second rank serves; what its main thread does meanwhile.
fn looks_while_serving(world: &World) -> Result<u32> {
    let watch = std::thread::spawn(looks_at_main);
    world.lead(|_| {
        std::thread::sleep(Duration::from_millis(1500));
        Ok(())
    })?;
    Ok(watch.join().unwrap())
}

fn waits_asleep() -> Outcome {
    let world = World::init()?;
    let ran = looks_while_serving(&world)?;
    if world.rank() > 0 {
        assert!(ran < 200, "{ran} of 400");
    }
    ok(world.finish())
}

fn shares_and_sleeps() -> Outcome {
    match std::thread::available_parallelism().unwrap().get() {
        0..4 => waits_asleep(),
        _ => ok(World::init()?.finish()),
    }
}

/// The middle one of several calls, in time.
fn median_call(world: &World, to: u32, calls: usize, pause: Duration) -> Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..calls {
        std::thread::sleep(pause);
        let start = Instant::now();
        world.call(to, nothing, ())?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times[calls / 2])
}

const PROMPT: Duration = Duration::from_millis(50);

fn main_computes() -> Outcome {
    let world = World::init()?;
    if world.rank() == 1 {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            std::hint::black_box((0..1000).map(f64::from).sum::<f64>());
        }
    }
    let start = Instant::now();
    if world.rank() == 0 {
        let time = median_call(&world, 1, 20, Duration::from_millis(10))?;
        assert!(time < PROMPT, "{time:?}");
        assert!(start.elapsed() < Duration::from_secs(2));
    }
    ok(world.finish())
}

fn function_runs() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        for _ in 0..2 {
            let long = world.call_async(1, nap, (2_000,))?;
            let time = median_call(world, 1, 11, Duration::from_millis(30))?;
            assert!(time < PROMPT, "{time:?}");
            assert!(!long.is_done());
            long.wait()?;
        }
        Ok(())
    })?;
    ok(world.finish())
}

fn after_quiet() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let time = median_call(world, 1, 11, Duration::from_millis(200))?;
        assert!(time < PROMPT, "{time:?}");
        Ok(())
    })?;
    ok(world.finish())
}

fn functions_that_meet() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let members: Vec<_> = (0..MEMBERS).map(|_| world.call_async(1, meet, ())).collect::<Result<_>>()?;
        assert_eq!(wait_all(members)?.len(), MEMBERS);
        Ok(())
    })?;
    ok(world.finish())
}

fn deep_nesting() -> Outcome {
    let world = World::init()?;
    let to = (world.rank() + 1) % world.size();
    let towers: Vec<_> = (0..8).map(|_| world.call_async(to, to_and_fro, (40,))).collect::<Result<_>>()?;
    assert_eq!(wait_all(towers)?, [40; 8]);
    ok(world.finish())
}

/// A pool that is too small makes functions wait, and says so.
fn pool_is_full() -> Outcome {
    let world = World::builder().env_logger().start()?;
    world.lead(|world| {
        let long: Vec<_> = (0..8).map(|_| world.call_async(1, nap, (300,))).collect::<Result<_>>()?;
        wait_all(long).map(drop)
    })?;
    ok(world.finish())
}

fn starts_and_ends() -> Outcome {
    let world = World::builder().env_logger().start()?;
    world.lead(|world| world.call(world.owner(1), nothing, ()))?;
    ok(world.finish())
}

const SHARED: &[(&str, &str)] = &[("RANKGRAD_PROGRESS", "shared")];

/// The cases.
/// What `waits_for_a_sign` waits for, where the library doesn't see it.
static SIGN: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

remote! {
    fn waits_for_a_sign(scope: &Scope) -> Result<()> {
        let _ = scope;
        drop(SIGN.1.wait_while(SIGN.0.lock().unwrap(), |given| !*given).unwrap());
        Ok(())
    }

    fn gives_a_sign(scope: &Scope) -> Result<()> {
        let _ = scope;
        *SIGN.0.lock().unwrap() = true;
        SIGN.1.notify_all();
        Ok(())
    }
}

/// Functions block where the pool can't see it, and no thread of the rank waits in the library.
fn pool_is_relieved() -> Outcome {
    let world = World::init()?;
    let waits: Vec<_> = (0..8).map(|_| world.call_async(0, waits_for_a_sign, ())).collect::<Result<_>>()?;
    let sign = world.call_async(0, gives_a_sign, ())?;
    let given = || *SIGN.0.lock().unwrap();
    let start = Instant::now();
    while !given() {
        assert!(start.elapsed() < Duration::from_secs(20), "it has no thread");
        std::thread::sleep(Duration::from_millis(1));
    }
    sign.wait()?;
    wait_all(waits)?;
    ok(world.finish())
}

pub const CASES: &[Case] = &[
    Case {
        ranks: &[0],
        env: &[("RANKGRAD_PROGRESS", "dedicated")],
        ..Case::new(
            "progress::a_pool_that_blocks_unseen_grows_beside_a_service_thread_that_never_sleeps",
            pool_is_relieved,
        )
    },
    Case {
        ranks: &[1],
        env: SHARED,
        ..Case::new("progress::a_pool_that_blocks_unseen_grows", pool_is_relieved)
    },
    Case {
        ranks: &[2, 4],
        env: SHARED,
        alone: true,
        ..Case::new("progress::idle_ranks_use_under_one_percent", idle)
    },
    Case {
        ranks: &[2],
        env: &[("RANKGRAD_PROGRESS", "shared"), ("RANKGRAD_YIELD_MS", "50")],
        alone: true,
        ..Case::new("progress::a_waiter_that_has_yielded_long_enough_sleeps", waits_asleep)
    },
    Case {
        ranks: &[4],
        env: &[("RANKGRAD_PROGRESS", "shared"), ("RANKGRAD_YIELD_MS", "30000")],
        alone: true,
        ..Case::new("progress::a_waiter_that_shares_its_core_sleeps", shares_and_sleeps)
    },
    Case {
        ranks: &[2],
        env: SHARED,
        alone: true,
        ..Case::new("progress::a_rank_whose_main_computes_answers", main_computes)
    },
    Case {
        ranks: &[2],
        ..Case::new("progress::calls_overtake_a_function_that_runs", function_runs)
    },
    Case {
        ranks: &[2],
        env: SHARED,
        alone: true,
        ..Case::new("progress::a_call_wakes_a_quiet_rank", after_quiet)
    },
    Case {
        ranks: &[2],
        ..Case::new("progress::functions_that_wait_for_each_other_all_run", functions_that_meet)
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("progress::deep_nesting_grows_the_pool", deep_nesting)
    },
    Case {
        ranks: &[2],
        env: &[("RUST_LOG", "warn"), ("RANKGRAD_POOL_THREADS", "1")],
        expect: Expect::Says(&[("RANKGRAD_POOL_THREADS", 1)]),
        ..Case::new("progress::a_full_pool_is_told_once", pool_is_full)
    },
    Case {
        ranks: &[4],
        env: &[
            ("RUST_LOG", "warn"),
            ("RANKGRAD_PROGRESS", "dedicated"),
            ("RANKGRAD_COMPUTE_THREADS", "64"),
        ],
        expect: Expect::Says(&[("dedicated progress refused", 4), ("start fewer ranks a node", 1)]),
        ..Case::new("progress::too_few_cores_are_told_once_a_node", starts_and_ends)
    },
    Case {
        ranks: &[0],
        env: &[("RUST_LOG", "debug"), ("RANKGRAD_PROGRESS", "dedicated")],
        expect: Expect::Says(&[("dedicated: true", 1), ("refused", 0)]),
        ..Case::new("progress::dedicated_is_granted_where_there_are_two_cores", starts_and_ends)
    },
];

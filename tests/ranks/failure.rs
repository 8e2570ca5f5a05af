//! Ranks that panic, leave, or give up; and the end.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use mpi::Threading;
use mpi::collective::SystemOperation;
use mpi::traits::*;
use rankgrad::prelude::*;

use crate::case::{Case, Expect};
use crate::{Outcome, ok};

const HOUR: Duration = Duration::from_secs(3600);

static DONE: AtomicU32 = AtomicU32::new(0);

remote! {
    fn nothing(scope: &Scope) -> Result<u32> {
        Ok(scope.rank())
    }

    fn nap(scope: &Scope, millis: u64) -> Result<()> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(millis));
        DONE.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn burst(scope: &Scope) -> Result<()> {
        panic!("on purpose, on {}", scope.rank())
    }
}

/// Something that this rank does instead of going on with the others.
fn leave(world: &World, how: fn()) {
    if world.rank() == 1 {
        std::thread::sleep(Duration::from_millis(300)); // the others are where they are to be
        how();
    }
}

fn panic_while_others_serve() -> Outcome {
    let world = World::init()?;
    leave(&world, || panic!("on purpose"));
    world.serve()?;
    ok(world.finish())
}

fn panic_while_others_sleep() -> Outcome {
    let world = World::init()?;
    leave(&world, || panic!("on purpose"));
    std::thread::sleep(HOUR);
    ok(world.finish())
}

/// The service thread runs a function, and a thread of the program sleeps: nobody waits for them.
fn panic_while_service_is_busy() -> Outcome {
    let world = World::init()?;
    if world.rank() != 1 {
        world.call(1, nap, (3_600_000,))?;
    }
    std::thread::spawn(|| std::thread::sleep(HOUR));
    leave(&world, || panic!("on purpose"));
    ok(world.finish())
}

fn panic_in_lead() -> Outcome {
    let world = World::init()?;
    world.lead(|world| -> Result<()> {
        world.call(world.owner(1), nothing, ())?;
        panic!("on purpose")
    })?;
    ok(world.finish())
}

fn panic_in_a_function() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        for rank in 0..world.size() {
            for _ in 0..20 {
                let error = world.call(rank, burst, ()).unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::Panic { rank: r, .. } if *r == rank), "{error}");
                assert_eq!(world.call(rank, nothing, ())?, rank);
            }
        }
        Ok(())
    })?;
    ok(world.finish())
}

/// Nobody on the rank can say anything any more: the launcher ends the job.
fn killed() -> Outcome {
    let world = World::init()?;
    leave(&world, || {
        let script = format!("kill -KILL {}", std::process::id());
        drop(std::process::Command::new("sh").args(["-c", &script]).status());
    });
    world.serve()?;
    ok(world.finish())
}

fn exit_without_finish() -> Outcome {
    let world = World::init()?;
    leave(&world, || std::process::exit(0));
    world.serve()?;
    ok(world.finish())
}

fn return_without_finish() -> Outcome {
    let world = World::init()?;
    if world.rank() == 1 {
        std::mem::forget(world);
        return Ok(());
    }
    world.serve()?;
    ok(world.finish())
}

fn drop_without_finish() -> Outcome {
    let world = World::init()?;
    if world.rank() == 1 {
        return Ok(());
    }
    world.serve()?;
    ok(world.finish())
}

fn failed_lead_is_an_error_everywhere() -> Outcome {
    let world = World::init()?;
    let error = world.lead(|_| Err::<(), _>(Error::user("the data is missing"))).unwrap_err();
    assert!(error.to_string().contains("the data is missing"), "{error}");
    assert_eq!(matches!(error.kind(), ErrorKind::LeadFailed { .. }), world.rank() > 0, "{error}");
    world.lead(|_| Ok(()))?;
    ok(world.finish())
}

fn failed_lead_is_returned() -> Outcome {
    let world = World::init()?;
    world.lead(|_| Err::<(), _>(Error::user("the data is missing")))?;
    ok(world.finish())
}

/// Rank 0 goes on, so the others tell what it failed with.
fn only_others_return() -> Outcome {
    let world = World::init()?;
    if let Err(error) = world.lead(|_| Err::<(), _>(Error::user("the data is missing")))
        && world.rank() > 0
    {
        return Err(error.into());
    }
    world.lead(|_| Ok(()))?;
    ok(world.finish())
}

fn second_world() -> Outcome {
    let world = World::init()?;
    for _ in 0..2 {
        let error = World::init().unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Init { .. }) && error.to_string().contains("world already"),
            "{error}"
        );
    }
    world.lead(|world| world.call(world.owner(1), nothing, ()))?;
    world.finish()?;
    let error = World::init().unwrap_err();
    assert!(error.to_string().contains("ended"), "{error}");
    Ok(())
}

/// Requests that nobody waits for are done before the end.
fn finish_with_requests_queued() -> Outcome {
    let world = World::init()?;
    if world.rank() == 0 {
        for _ in 0..10 {
            drop(world.call_async(1, nap, (100,))?);
        }
    }
    let rank = world.rank();
    world.finish()?;
    assert_eq!(DONE.load(Ordering::SeqCst), if rank == 1 { 10 } else { 0 });
    Ok(())
}

/// A callback that is still at work when all ranks have come to the end may call.
fn finish_with_a_callback_at_work() -> Outcome {
    let world = World::init()?;
    let to = world.owner(1);
    if world.rank() == 0 {
        let caller = world.timeout(Duration::from_secs(30));
        let _ = world.call_async(to, nothing, ())?.then(move |_| {
            std::thread::sleep(Duration::from_millis(200));
            (0..5).try_for_each(|_| caller.call(to, nap, (1,)))
        });
    }
    let called = world.rank() == to;
    world.finish()?;
    assert_eq!(DONE.load(Ordering::SeqCst), if called { 5 } else { 0 });
    Ok(())
}

static KEPT: OnceLock<Vec<RRef<Vec<i64>>>> = OnceLock::new();

fn handles_outlive_the_end() -> Outcome {
    let world = World::builder().env_logger().start()?;
    if world.rank() == 0 {
        let kept = (0..3).map(|k| world.share(vec![k])).collect::<Result<_>>()?;
        KEPT.set(kept).unwrap();
    }
    world.finish()?;
    for kept in KEPT.get().into_iter().flatten() {
        let error = kept.fetch().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::ShutDown { .. }), "{error}");
    }
    Ok(())
}

/// A plain case with all of the log, which must not change what happens.
fn everything_logged() -> Outcome {
    let world = World::builder().env_logger().start()?;
    world.lead(|world| {
        let w = world.put(world.owner(1), Tensor::from_vec(vec![2.0, 3.0], [2])?)?;
        let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&w])?;
        for _ in 0..10 {
            let ctx = world.context()?;
            let loss = ctx.fetch(&w)?.sum()?;
            ctx.backward(&[loss])?;
            optimizer.step(&ctx)?;
        }
        assert_eq!(w.fetch()?.to_vec::<f64>()?, [-3.0, -2.0]);
        Ok(())
    })?;
    ok(world.finish())
}

/// As a guest, with or without the hook of ours; MPI is the host's.
fn guest(hook: bool) -> Outcome {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or("MPI is up")?;
    let all = universe.world();
    for _ in 0..2 {
        let world = World::builder().communicator(&all).panic_hook(hook).start()?;
        world.lead(|world| world.call(world.owner(1), nothing, ()))?;
        world.finish()?;
    }
    // What the host does after the end is its own affair, and MPI works.
    assert!(std::panic::catch_unwind(|| panic!("on purpose")).is_err());
    let mut sum = 0;
    all.all_reduce_into(&1, &mut sum, SystemOperation::sum());
    assert_eq!(sum, all.size());
    Ok(())
}

/// Without the hook a guest's panic may be caught by its host.
fn guest_catches_its_panics() -> Outcome {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or("MPI is up")?;
    let world = World::builder().communicator(&universe.world()).start()?;
    assert!(std::panic::catch_unwind(|| panic!("on purpose")).is_err());
    world.lead(|world| world.call(world.owner(1), nothing, ()))?;
    ok(world.finish())
}

fn guest_panics(hook: bool) -> Outcome {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or("MPI is up")?;
    let world = World::builder().communicator(&universe.world()).panic_hook(hook).start()?;
    if hook {
        // Caught or not: with the hook it ends the job.
        if world.rank() == 1 {
            let _ = std::panic::catch_unwind(|| panic!("on purpose"));
            std::thread::sleep(HOUR);
        }
    } else {
        leave(&world, || panic!("on purpose"));
    }
    world.serve()?;
    ok(world.finish())
}

const fn fails(stderr: &'static [&'static str]) -> Expect {
    Expect::Fails { within: 10, stderr }
}

const fn failing(name: &'static str, stderr: &'static [&'static str], run: fn() -> Outcome) -> Case {
    Case {
        ranks: &[2, 4],
        expect: fails(stderr),
        ..Case::new(name, run)
    }
}

fn gives_up_in_run() -> Outcome {
    let world = World::init()?;
    ok(world.run(|world| {
        if world.rank() == 1 {
            Err(Error::user("the solver diverged"))
        } else {
            Ok(())
        }
    }))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[2, 3],
        expect: Expect::Fails {
            within: 10,
            stderr: &["rank 1: gave up: the solver diverged"],
        },
        ..Case::new("failure::the_error_of_a_rank_that_gives_up_is_told", gives_up_in_run)
    },
    failing(
        "failure::a_panic_ends_the_job_while_others_serve",
        &["rank 1: panicked"],
        panic_while_others_serve,
    ),
    failing(
        "failure::a_panic_ends_the_job_while_others_sleep",
        &["rank 1: panicked"],
        panic_while_others_sleep,
    ),
    failing(
        "failure::a_panic_waits_for_no_thread",
        &["rank 1: panicked"],
        panic_while_service_is_busy,
    ),
    failing("failure::a_panic_in_lead_ends_the_job", &["rank 0: panicked"], panic_in_lead),
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("failure::a_panic_in_a_function_is_its_callers_error", panic_in_a_function)
    },
    failing("failure::a_killed_rank_ends_the_job", &[], killed),
    failing(
        "failure::exit_0_without_finish_fails",
        &["rank 1 exits while its world is open"],
        exit_without_finish,
    ),
    failing(
        "failure::a_return_without_finish_fails",
        &["rank 1 exits while its world is open"],
        return_without_finish,
    ),
    failing(
        "failure::a_world_dropped_without_finish_fails",
        &["rank 1: dropped its world"],
        drop_without_finish,
    ),
    Case {
        ranks: &[1, 2, 4],
        ..Case::new(
            "failure::a_failed_lead_is_an_error_on_every_rank",
            failed_lead_is_an_error_everywhere,
        )
    },
    Case {
        ranks: &[2, 4],
        expect: Expect::FailsSaying(&[("rank 0: gave up: the data is missing", 1), ("the data is missing", 1)]),
        ..Case::new(
            "failure::a_failed_lead_that_is_returned_fails_and_is_told_once",
            failed_lead_is_returned,
        )
    },
    failing(
        "failure::what_a_lead_failed_with_is_told_by_others_if_rank_0_goes_on",
        &["rank 1: gave up, and rank 0 before it: the data is missing"],
        only_others_return,
    ),
    Case {
        ranks: &[0, 2],
        ..Case::new("failure::a_second_world_is_an_error", second_world)
    },
    Case {
        ranks: &[2],
        ..Case::new(
            "failure::finish_waits_for_requests_that_nobody_waits_for",
            finish_with_requests_queued,
        )
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("failure::finish_waits_for_a_callback_at_work", finish_with_a_callback_at_work)
    },
    Case {
        ranks: &[2],
        expect: Expect::Says(&[("is still held at the end", 3)]),
        env: &[("RUST_LOG", "warn")],
        ..Case::new("failure::values_held_at_the_end_are_reported", handles_outlive_the_end)
    },
    Case {
        ranks: &[0, 2, 3],
        env: &[("RUST_LOG", "trace")],
        ..Case::new("failure::logging_changes_nothing", everything_logged)
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("failure::a_guest_leaves_mpi_as_it_was", || guest(false))
    },
    Case {
        ranks: &[2],
        ..Case::new("failure::also_with_its_hook", || guest(true))
    },
    Case {
        ranks: &[2],
        ..Case::new("failure::a_guest_may_catch_its_panics", guest_catches_its_panics)
    },
    failing(
        "failure::a_guests_panic_ends_the_job_when_its_world_is_dropped",
        &["rank 1: panicked"],
        || guest_panics(false),
    ),
    failing("failure::or_at_once_with_the_hook", &["rank 1: panicked"], || guest_panics(true)),
];

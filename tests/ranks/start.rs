//! How a world starts: launchers, settings, hosts, shapes of a program.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use mpi::Threading;
use mpi::collective::SystemOperation;
use mpi::topology::Color;
use mpi::traits::*;
use rankgrad::prelude::*;
use rankgrad::rpc::wait_all;

use crate::case::{Case, Expect};
use crate::{Outcome, launcher_rank, ok};

remote! {
    fn whoami(scope: &Scope) -> Result<(u32, u32)> {
        Ok((scope.rank(), scope.caller_rank()))
    }

    /// Its name is changed in a copy of this program.
    fn registry_probe_a(scope: &Scope) -> Result<()> {
        let _ = scope;
        Ok(())
    }
}

fn singletons() -> Outcome {
    let error = World::init().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Launcher { size: 1, .. }), "{error}");
    assert!(error.to_string().contains("--mpi="), "{error}");
    Ok(())
}

fn works() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        for to in 0..world.size() {
            assert_eq!(world.call(to, whoami, ())?, (to, 0));
        }
        Ok(())
    })?;
    ok(world.finish())
}

fn unknown_setting() -> Outcome {
    let error = World::init().unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Setting { .. }) && error.to_string().contains("RANKGRAD_TIMEOUT"),
        "{error}"
    );
    Ok(())
}

fn settings_arrive() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        if world.size() > 1 {
            let first = world.try_call(1, whoami, ())?;
            let refused = world.try_call(1, whoami, ()).unwrap_err();
            assert!(matches!(refused.kind(), ErrorKind::WindowFull { requests: 1, .. }), "{refused}");
            assert_eq!(first.wait()?, (1, 0));
        }
        Ok(())
    })?;
    ok(world.finish())
}

/// A bad setting on one rank: no rank starts, none waits.
fn one_rank_cannot_start() -> Outcome {
    let error = World::builder()
        .settings(|s| s.ring = if launcher_rank() == 1 { 0 } else { 16 })
        .start()
        .unwrap_err();
    match error.kind() {
        ErrorKind::Setting { name, .. } => assert!(launcher_rank() == 1 && name == "ring", "{error}"),
        ErrorKind::Remote { rank: 1, .. } => assert!(error.to_string().contains("ring"), "{error}"),
        _ => return Err(error.into()),
    }
    Ok(())
}

/// Goes on as a copy of this program in which one text of equal length stands for another; in the copy it gives the path to delete.
pub fn become_another_program(text: &str, other: &str) -> Result<PathBuf, Box<dyn std::error::Error>> {
    let here = std::env::current_exe()?;
    if std::env::var("ANOTHER_PROGRAM").is_ok() {
        return Ok(here);
    }
    let (text, other) = (text.as_bytes(), other.as_bytes());
    let mut program = std::fs::read(here)?;
    let places: Vec<usize> = program
        .windows(text.len())
        .enumerate()
        .filter(|(_, w)| *w == text)
        .map(|(at, _)| at)
        .collect();
    for at in places {
        program[at..at + other.len()].copy_from_slice(other);
    }
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("another-{}", std::process::id()));
    std::fs::write(&path, program)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Err(Command::new(path).env("ANOTHER_PROGRAM", "1").exec().into())
}

fn registries_differ() -> Outcome {
    let copy = match launcher_rank() {
        1 => Some(become_another_program("registry_probe_a", "registry_probe_b")?),
        _ => None,
    };
    let error = World::init().unwrap_err();
    if let Some(copy) = copy {
        std::fs::remove_file(copy)?;
    }
    assert!(matches!(error.kind(), ErrorKind::Mismatch { rank: 1, .. }), "{error}");
    assert!(
        error.to_string().contains("registry_probe_a") && error.to_string().contains("registry_probe_b"),
        "{error}"
    );
    Ok(())
}

/// Each half of MPI_COMM_WORLD is a world.
fn part_of_a_host() -> Outcome {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or("MPI is up")?;
    let all = universe.world();
    let half = all.split_by_color(Color::with_value(all.rank() % 2)).ok_or("no colour")?;
    let world = World::builder().communicator(&half).start()?;
    assert_eq!((world.rank() as i32, world.size() as i32), (half.rank(), half.size()));
    for to in 0..world.size() {
        assert_eq!(world.call(to, whoami, ())?, (to, world.rank()));
    }
    let mut sum = 0;
    world.mpi(|| all.all_reduce_into(&1, &mut sum, SystemOperation::sum()));
    assert_eq!(sum, all.size());
    ok(world.finish())
}

/// MPI_THREAD_SERIALIZED: the host's calls are kept apart from ours.
fn serialized_host() -> Outcome {
    let (universe, granted) = mpi::initialize_with_threading(Threading::Serialized).ok_or("MPI is up")?;
    assert!(granted >= Threading::Serialized);
    let all = universe.world();
    let world = World::builder().communicator(&all).start()?;
    for round in 0..20 {
        let futures: Vec<_> = (0..world.size())
            .map(|to| world.call_async(to, whoami, ()))
            .collect::<Result<_>>()?;
        let level = world.mpi(mpi::environment::threading_support);
        assert_eq!(level, granted);
        for (to, answer) in wait_all(futures)?.into_iter().enumerate() {
            assert_eq!(answer, (to as u32, world.rank()));
        }
        world.serve()?; // nobody needs an answer of a rank that blocks
        let mut sum = 0;
        world.mpi(|| all.all_reduce_into(&round, &mut sum, SystemOperation::sum()));
        assert_eq!(sum, round * all.size());
    }
    // Rank 0 comes last, and calls those that wait: they serve.
    if world.rank() == 0 {
        std::thread::sleep(Duration::from_millis(300));
        for to in 0..world.size() {
            assert_eq!(world.call(to, whoami, ())?, (to, 0));
        }
    }
    let mut barrier = Some(world.mpi(|| all.immediate_barrier()));
    world.wait(|| match barrier.take().map(|b| b.test()) {
        Some(Err(pending)) => {
            barrier = Some(pending);
            false
        }
        _ => true,
    })?;
    ok(world.finish())
}

/// A host's call that blocks for long is told.
fn long_host_call() -> Outcome {
    let (universe, _) = mpi::initialize_with_threading(Threading::Serialized).ok_or("MPI is up")?;
    let world = World::builder().communicator(&universe.world()).env_logger().start()?;
    if world.rank() == 1 {
        world.mpi(|| std::thread::sleep(Duration::from_secs(7)));
    }
    ok(world.finish())
}

fn level_too_low() -> Outcome {
    refused_at(Threading::Single)
}

/// A level below what is needed is refused, with the cure, where MPI grants no more than was asked for.
pub fn refused_at(level: Threading) -> Outcome {
    let (universe, granted) = mpi::initialize_with_threading(level).ok_or("MPI is up")?;
    let all = universe.world();
    match World::builder().communicator(&all).start() {
        Ok(world) if granted >= Threading::Serialized => world.finish()?,
        Ok(_) => return Err("started below MPI_THREAD_SERIALIZED".into()),
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::ThreadLevel { .. }), "{error}");
            assert!(error.to_string().contains("MPI_Init_thread(MPI_THREAD_MULTIPLE)"), "{error}");
        }
    }
    all.barrier();
    Ok(())
}

fn level_too_low_on_one_rank() -> Outcome {
    let level = if launcher_rank() == 1 {
        Threading::Single
    } else {
        Threading::Multiple
    };
    let (universe, granted) = mpi::initialize_with_threading(level).ok_or("MPI is up")?;
    let all = universe.world();
    let mut low = 0;
    all.all_reduce_into(&i32::from(granted < Threading::Serialized), &mut low, SystemOperation::sum());
    match World::builder().communicator(&all).start() {
        Ok(world) => {
            assert_eq!(low, 0);
            world.finish()?;
        }
        Err(error) => match error.kind() {
            ErrorKind::ThreadLevel { .. } => assert!(granted < Threading::Serialized),
            ErrorKind::Remote { rank: 1, .. } => assert!(error.to_string().contains("MPI_THREAD_MULTIPLE"), "{error}"),
            _ => return Err(error.into()),
        },
    }
    all.barrier();
    Ok(())
}

fn shapes_of_a_program() -> Outcome {
    let world = World::init()?;
    for _ in 0..2 {
        let led = world.lead(|world| world.call(world.owner(1), whoami, ()))?;
        assert_eq!(led, (world.rank() == 0).then_some((world.owner(1), 0)));
    }
    for to in 0..world.size() {
        assert_eq!(world.call(to, whoami, ())?, (to, world.rank())); // all drive
    }
    world.serve()?;
    world.lead(|world| world.call(world.owner(2), whoami, ()))?;
    world.serve()?;
    ok(world.finish())
}

fn all_to_all() -> Outcome {
    let world = World::init()?;
    for _ in 0..2 {
        let futures: Vec<_> = (0..world.size())
            .map(|to| world.call_async(to, whoami, ()))
            .collect::<Result<_>>()?;
        for (to, answer) in wait_all(futures)?.into_iter().enumerate() {
            assert_eq!(answer, (to as u32, world.rank()));
        }
    }
    ok(world.finish())
}

/// A rank that comes late to MPI's start is waited for, and the others say so.
fn late_to_the_start() -> Outcome {
    if launcher_rank() == 1 {
        std::thread::sleep(Duration::from_secs(12));
    }
    let world = World::builder().env_logger().start()?;
    ok(world.finish())
}

const SLURM_STEP: &[(&str, &str)] = &[("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0")];

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[0],
        env: SLURM_STEP,
        ..Case::new("start::singletons_by_mistake_are_refused", singletons)
    },
    Case {
        ranks: &[0],
        env: &[("SLURM_NTASKS", "4")],
        ..Case::new("start::a_batch_script_may_run_one_rank", works)
    },
    Case {
        ranks: &[0, 1],
        ..Case::new("start::one_rank_works", works)
    },
    Case {
        ranks: &[0, 2],
        env: &[("RANKGRAD_TIMOUT", "5")],
        ..Case::new("start::unknown_settings_are_refused", unknown_setting)
    },
    Case {
        ranks: &[0, 2],
        env: &[("RANKGRAD_WINDOW_REQUESTS", "1")],
        ..Case::new("start::variables_are_settings", settings_arrive)
    },
    Case {
        ranks: &[2, 4],
        ..Case::new("start::if_one_rank_cannot_start_none_does", one_rank_cannot_start)
    },
    Case {
        ranks: &[2, 3],
        ..Case::new("start::other_functions_are_refused", registries_differ)
    },
    Case {
        ranks: &[2, 4],
        ..Case::new("start::part_of_a_hosts_ranks_is_a_world", part_of_a_host)
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("start::a_serialized_host_keeps_its_calls_apart", serialized_host)
    },
    Case {
        ranks: &[2],
        env: &[("RUST_LOG", "warn")],
        expect: Expect::Says(&[("has held MPI for", 1)]),
        ..Case::new("start::a_host_call_that_blocks_for_long_is_logged", long_host_call)
    },
    Case {
        ranks: &[2],
        env: &[("RUST_LOG", "warn")],
        expect: Expect::Says(&[(" s: of the 2 ranks of this node only [0] have come to it", 1)]),
        ..Case::new("start::a_rank_that_is_late_is_told", late_to_the_start)
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("start::too_low_a_thread_level_is_refused", level_too_low)
    },
    Case {
        ranks: &[2, 3],
        ..Case::new("start::also_if_only_one_rank_has_it", level_too_low_on_one_rank)
    },
    Case {
        ranks: &[0, 1, 2, 4],
        ..Case::new("start::lead_serve_and_drive_in_any_order", shapes_of_a_program)
    },
    Case {
        ranks: &[32],
        limit: 120,
        ..Case::new("start::more_ranks_than_cores", all_to_all)
    },
];

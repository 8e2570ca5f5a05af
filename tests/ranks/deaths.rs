//! Ranks that die without a word, under a launcher that doesn't care: the others notice, say who it was and what they waited for, and end the job.

use std::process::{Command, id};
use std::time::Duration;

use rankgrad::prelude::*;

use crate::case::{Case, Expect};
use crate::{Outcome, launcher_rank, ok};

remote! {
    fn last_call(scope: &Scope, signal: String) -> Result<()> {
        let _ = scope;
        die(&signal)
    }

    fn dies_backward(scope: &Scope, x: Tensor) -> Result<Tensor> {
        let _ = scope;
        let _ = x.register_hook(|_| die("KILL").ok().map(|()| unreachable!()))?;
        x.mul_scalar(2.0)
    }
}

/// By a signal, without a word.
fn die(signal: &str) -> Result<()> {
    // The first SIGSEGV that isn't of the processor's making only takes away the handler of the standard library.
    let script = format!("kill -{signal} {0}; sleep 0.1; kill -{signal} {0} 2>/dev/null", id());
    Command::new("sh").args(["-c", &script]).status().map_err(Error::user)?;
    std::thread::sleep(Duration::from_secs(60));
    Ok(())
}

fn dies_in_a_call(signal: &'static str) -> Outcome {
    let world = World::init()?;
    world.lead(|world| world.call(world.owner(1), last_call, (signal.to_owned(),)))?;
    ok(world.finish())
}

fn dies_in_a_backward() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let ctx = world.context()?;
        let x = Tensor::from_vec(vec![1.0], [1])?.parameter()?;
        let y = ctx.call(world.owner(1), dies_backward, (&x,))?;
        ctx.backward(&[y.sum()?])
    })?;
    ok(world.finish())
}

/// The rank that leads dies, and all others only serve; one of them is in a call of its own.
fn leader_dies() -> Outcome {
    let world = World::init()?;
    world.lead(|_| die("KILL"))?;
    ok(world.finish())
}

/// The last one: its watcher is in the midst of the ring.
fn last_rank_dies() -> Outcome {
    let world = World::init()?;
    if world.rank() + 1 == world.size() {
        std::thread::sleep(Duration::from_millis(300));
        die("KILL")?;
    }
    world.serve()?;
    ok(world.finish())
}

/// The process exits while another of its threads is inside MPI's start.
fn exits_inside_the_start() -> Outcome {
    if launcher_rank() == 1 {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            std::process::exit(0)
        });
    }
    let world = World::init()?;
    world.serve()?;
    ok(world.finish())
}

/// Killed while it waits inside MPI's start for rank 0, which comes late: also when nobody else was there yet.
fn dies_inside_mpi_init() -> Outcome {
    match launcher_rank() {
        0 => std::thread::sleep(Duration::from_millis(1500)),
        1 => {
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                die("KILL")
            });
        }
        _ => {}
    }
    let world = World::init()?;
    world.serve()?;
    ok(world.finish())
}

/// What goes wrong comes from the case's variables.
#[cfg(feature = "faults")]
fn plain() -> Outcome {
    let world = World::init()?;
    world.serve()?;
    ok(world.finish())
}

const fn hidden(name: &'static str, stderr: &'static [&'static str], run: fn() -> Outcome) -> Case {
    Case {
        ranks: &[2, 4],
        limit: 60,
        // From the launch on. The launcher must also end shells that are stopped, and takes seconds for it.
        expect: Expect::Fails { within: 20, stderr },
        hides: true,
        ..Case::new(name, run)
    }
}

#[cfg(feature = "faults")]
const fn killed(name: &'static str, faults: &'static [(&'static str, &'static str)], stderr: &'static [&'static str]) -> Case {
    Case {
        env: faults,
        ..hidden(name, stderr, plain)
    }
}

/// The cases.
pub const CASES: &[Case] = &[
    hidden(
        "deaths::a_killed_rank_is_named_with_what_was_waited_for",
        &[
            "rankgrad: rank 0 on ",
            ": rank 1 on ",
            "has died",
            "rank 0: was waiting for `ranks::deaths::last_call` on rank 1",
        ],
        || dies_in_a_call("KILL"),
    ),
    hidden(
        "deaths::so_is_one_with_a_fault_of_memory",
        &["rank 1 on ", "has died", "was waiting for `ranks::deaths::last_call` on rank 1"],
        || dies_in_a_call("SEGV"),
    ),
    hidden(
        "deaths::so_is_one_that_dies_in_a_backward",
        &["rank 1 on ", "has died", "rank 0: was waiting for a backward over ranks [1]"],
        dies_in_a_backward,
    ),
    hidden(
        "deaths::a_leader_is_missed_by_those_that_serve",
        &["rank 0 on ", "has died", "was waiting for rank 0's closure in `lead`"],
        leader_dies,
    ),
    hidden(
        "deaths::the_last_rank_is_watched_too",
        &["has died", "was waiting for the end"],
        last_rank_dies,
    ),
    Case {
        hides: false,
        ..hidden(
            "deaths::an_exit_during_the_start",
            &["rank 1 exits while its world is open"],
            exits_inside_the_start,
        )
    },
    hidden(
        "deaths::inside_mpi_init",
        &[
            "rankgrad: rank ",
            ": rank 1 on ",
            "has died: its process has ended before all ranks were up",
            "was waiting for MPI_Init_thread",
        ],
        dies_inside_mpi_init,
    ),
    #[cfg(feature = "faults")]
    killed(
        "deaths::between_mpi_init_and_the_ring",
        &[("RANKS_FAULTS", "kill=mpi:1@1")],
        &["rank 1 on ", "has died", "was waiting for "],
    ),
    #[cfg(feature = "faults")]
    killed(
        "deaths::inside_the_start",
        &[("RANKS_FAULTS", "kill=init:1@1")],
        &["rank 1 on ", "has died"],
    ),
    #[cfg(feature = "faults")]
    killed(
        "deaths::while_programs_are_compared",
        &[("RANKS_FAULTS", "kill=start:1@1")],
        &["rank 1 on ", "has died"],
    ),
    #[cfg(feature = "faults")]
    killed(
        "deaths::when_the_world_closes",
        &[("RANKS_FAULTS", "kill=close:1@1")],
        &["rank 1 on ", "has died"],
    ),
    #[cfg(feature = "faults")]
    // Inside MPI_Finalize there may be no MPI_Abort any more: the ranks end themselves, and the launcher must see it.
    Case {
        hides: false,
        ..killed("deaths::before_mpi_ends", &[("RANKS_FAULTS", "kill=finalize:1@1")], &[])
    },
];

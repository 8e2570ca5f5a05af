//! Tests on several MPI ranks: `cargo test --test ranks -- [FILTER] [--ranks N] [--jobs N] [--list]`.
//!
//! Without `RANKS_CASE` this is the driver. It launches itself under `scripts/mpirun` for each case and each number of ranks, `--jobs` at
//! once (as many as there are cores), those that measure one after the other, kills what overruns its time limit, and ends with a line `N passed, M failed`. With `RANKS_CASE` it is a rank and
//! runs the case's function on its main thread. `MPI=openmpi` or `MPI=mpich` chooses the launcher; it must be the MPI of the build.
//!
//! With the feature `faults`, `RANKS_FAULTS` makes things go wrong in any case (`RANKS_FAULTS="seed=1 delay=all:5"`); see `rankgrad::faults::set`.
//!
//! With the feature `cuda`, `RANKGRAD_CUDA=true` puts the parameters of any case on a GPU, of a driver that needs none unless `REQUIRE_CUDA=1`.
//!
//! A new topic is a module beside this file with a `CASES` of its own, listed in [`TOPICS`].

#![allow(unreachable_pub, reason = "a test has no other users than itself")]

mod calls;
mod case;
mod checkpoint;
mod cluster;
mod contexts;
mod contract;
mod costs;
mod deaths;
mod driver;
mod errors;
mod failure;
#[cfg(feature = "faults")]
mod faults;
mod field;
#[cfg(feature = "cuda")]
mod gpus;
mod groups;
mod in_backward;
mod launch;
mod lbfgs;
mod liveness;
mod optimizer;
mod progress;
mod references;
mod rules;
mod selftest;
mod settled;
mod sharded;
mod slow;
mod start;
mod steps;
mod stress;
mod torch_backward;
mod torch_contexts;
mod torch_optim;
mod torch_rpc;
mod torch_rref;
mod training;

use std::process::ExitCode;

use case::Case;

/// The cases of each topic.
const TOPICS: &[&[Case]] = &[
    selftest::CASES,
    calls::CASES,
    references::CASES,
    errors::CASES,
    contexts::CASES,
    training::CASES,
    optimizer::CASES,
    lbfgs::CASES,
    sharded::CASES,
    checkpoint::CASES,
    rules::CASES,
    groups::CASES,
    contract::CASES,
    costs::CASES,
    steps::CASES,
    in_backward::CASES,
    start::CASES,
    progress::CASES,
    failure::CASES,
    deaths::CASES,
    cluster::CASES,
    liveness::CASES,
    stress::CASES,
    torch_contexts::CASES,
    torch_backward::CASES,
    torch_rref::CASES,
    torch_rpc::CASES,
    torch_optim::CASES,
    field::CASES,
    #[cfg(feature = "cuda")]
    gpus::CASES,
    #[cfg(feature = "faults")]
    faults::CASES,
];

fn main() -> ExitCode {
    match std::env::var(launch::CASE) {
        Ok(name) => {
            #[cfg(feature = "cuda")]
            driver_without_gpu();
            #[cfg(feature = "faults")]
            if let Err(error) = rankgrad::faults::set(&std::env::var("RANKS_FAULTS").unwrap_or_default()) {
                eprintln!("RANKS_FAULTS: {error}");
                return ExitCode::from(2);
            }
            case::run_rank(&name, TOPICS.iter().copied().chain([selftest::HELPERS]).flatten())
        }
        Err(_) => driver::run(TOPICS.iter().copied().flatten()),
    }
}

/// Without a GPU a driver that needs none, so that `RANKGRAD_CUDA=true` runs any case with parameters there.
#[cfg(feature = "cuda")]
fn driver_without_gpu() {
    if std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1") {
        return;
    }
    // SAFETY: the fake driver's functions have the signatures of the driver's.
    #[allow(unsafe_code, reason = "a driver for tests")]
    let first = unsafe { rankgrad_cuda::driver::install(rankgrad_cuda_fake::symbol) };
    assert!(first, "a driver was looked for before");
}

/// What a case comes to.
pub type Outcome = Result<(), Box<dyn std::error::Error>>;

/// This process's rank as the launcher says it, before MPI is up.
pub fn launcher_rank() -> u32 {
    let rank = std::env::var("OMPI_COMM_WORLD_RANK").or_else(|_| std::env::var("PMI_RANK"));
    rank.ok().and_then(|rank| rank.parse().ok()).unwrap_or(0)
}

/// The end of a case.
pub fn ok(result: rankgrad::Result<()>) -> Outcome {
    Ok(result?)
}

//! Distributed autograd, remote references and distributed optimizers for programs that run as MPI ranks.
//!
//! Ranks own parameters; any rank can hold a reference to any of them ([`RRef`]). Functions that [`remote!`] declares run on other
//! ranks; a [`Context`] records the calls, and its [`backward`](Context::backward) goes back through all ranks that took part. A
//! [`DistributedOptimizer`] updates each parameter on the rank that owns it. See [`World`] for a whole program.
//!
//! Rooms, from the ground up: [`tensor`], [`autograd`], [`optim`] know nothing of ranks; `wire`, `protocol` and [`transport`] make messages of them;
//! `runtime`, [`rpc`] and [`dist`] make them work for a program; [`shard`] splits arrays, and [`checkpoint`] saves it all. `docs/design.md` in the repository says why.

#![warn(unreachable_pub)]

pub mod autograd;
pub mod checkpoint;
pub mod config;
pub mod dist;
mod error;
#[cfg(feature = "faults")]
#[doc(hidden)]
pub mod faults;
mod mutant;
pub mod optim;
pub mod prelude;
mod protocol;
mod queue;
pub mod rpc;
mod rref;
mod runtime;
pub mod shard;
#[cfg(any(test, feature = "sim"))]
#[doc(hidden)]
pub mod sim;
mod spare;
mod sync;
pub mod tensor;
pub mod transport;
mod wire;
mod world;

pub use checkpoint::Checkpoint;
pub use dist::{BackwardOptions, Context, DistributedLbfgs, DistributedOptimizer, Mode, ParameterCalls, StepReport};
pub use error::{CheckpointFault, Error, ErrorKind, OwnerFailure, Result};
pub use protocol::{ContextId, OptimizerId, RefId, ValueId};
#[cfg(feature = "cuda")]
pub use rankgrad_cuda as cuda;
pub use rpc::{Calls, Future, Scope};
pub use rref::{Fetch, RRef};
pub use shard::Sharded;
pub use tensor::Tensor;
pub use world::{Builder, REQUEUE, Signal, World, local};

/// The programs in the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

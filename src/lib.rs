//! Distributed autograd, remote references and distributed optimizers for programs that run as MPI ranks.

pub mod autograd;
pub mod config;
pub mod dist;
mod error;
pub mod optim;
mod protocol;
pub mod rpc;
pub mod rref;
pub mod runtime;
pub mod tensor;
pub mod transport;
mod wire;

pub use error::{Error, ErrorKind, OwnerFailure, Result};

//! GPU memory, optimizer kernels and tensor operations, through the CUDA driver. No MPI, no tensors, no graph: slices and numbers.
//!
//! Nothing of CUDA is needed to build or to start: [`driver`] finds the driver's library at the first use of a [`Gpu`], and where there is none
//! [`Gpu::open`] returns [`Error::NoDevice`]. Kernels are PTX that ships with the crate (`kernels/`), and the driver compiles it for its device.
//!
//! All work of a process on a device goes through one stream in the order of the calls, and copies from the host through a second one, which the
//! first waits for. So memory that was freed can be used again at once, and results need no synchronisation until they come back to the host. Copies to
//! the host go through a third, which waits for the work asked for before, and not for what comes later. Each call binds the context to the thread that makes it.

mod array;
pub mod driver;
pub mod elementwise;
mod error;
mod gpu;
mod memory;
pub mod ops;
pub mod products;
pub mod rules;

pub use array::{Array, Float, Scalar};
pub use error::{Error, Result};
pub use gpu::{Gpu, devices};

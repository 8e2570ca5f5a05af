//! Updates of parameters that live on GPUs.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
mod none;
#[cfg(feature = "cuda")]
mod state;

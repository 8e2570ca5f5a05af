//! Updates of parameters that live on GPUs.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod muon;
#[cfg(not(feature = "cuda"))]
mod none;
#[cfg(feature = "cuda")]
mod several;
#[cfg(feature = "cuda")]
mod state;

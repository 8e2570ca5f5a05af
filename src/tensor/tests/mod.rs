//! Tests of tensors and of their operations.

mod adjoints;
mod core;
#[cfg(feature = "cuda")]
mod gpu;
mod ops;
mod reuse;

//! Tests of tensors and of their operations.

mod adjoints;
mod core;
mod ops;

//! Tests of the optimizer and of every rule: against torch's results, and of what torch gets wrong.

mod bits;
mod contract;
mod flat;
mod golden;
#[cfg(feature = "cuda")]
mod gpu;
mod reference;

//! A CUDA driver without a GPU: it interprets the PTX that ships, and is stricter than a device.
//!
//! - A thread without a current context gets 201, as with the real one.
//! - Work on a stream happens when something waits for it, stream by stream, so that a forgotten event or synchronisation shows every time; until then
//!   the target of a copy to the host holds 0xEE.
//! - Device addresses can't be touched by the host. An access that isn't within one allocation is fault 700, a misaligned one 716; both stay.
//! - Registers and memory begin as garbage. Floating-point instructions that may be fused or approximated are refused when a module is loaded.
//! - [`fail`] makes a call of a function fail; [`counts`] tells what is alive.
//!
//! It can't test the driver's compiler, streams that really run side by side, nor speed.

mod arithmetic;
mod driver;
mod memory;
mod ptx;
mod run;
mod state;

pub use driver::symbol;
pub use state::{Counts, clear_failures, counts, fail, fault_count, launches, set_devices};

/// Reads a module as the driver would when it loads it, and lists its kernels.
///
/// # Errors
/// The line that it refuses, and why.
pub fn kernels(ptx: &str) -> Result<Vec<String>, String> {
    Ok(ptx::parse(ptx)?.into_iter().map(|kernel| kernel.name).collect())
}

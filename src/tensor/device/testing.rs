//! A device for tests: the fake driver's, or with `REQUIRE_CUDA=1` a real one.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::Device;

/// The first device, for one test at a time.
pub(crate) fn device() -> (Device, MutexGuard<'static, ()>) {
    static TURN: Mutex<()> = Mutex::new(());
    static DRIVER: OnceLock<()> = OnceLock::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    DRIVER.get_or_init(|| {
        if !is_real() {
            // SAFETY: the fake driver's functions have the signatures of the driver's.
            #[allow(unsafe_code, reason = "a driver for tests")]
            let first = unsafe { rankgrad_cuda::driver::install(rankgrad_cuda_fake::symbol) };
            assert!(first, "a driver was looked for before");
        }
    });
    (Device::Cuda(0), turn)
}

/// Whether tests run on a real device.
pub(crate) fn is_real() -> bool {
    std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1")
}

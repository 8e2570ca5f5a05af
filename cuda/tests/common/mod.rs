//! A device for tests: the fake driver's, or with `REQUIRE_CUDA=1` a real one.
#![allow(dead_code, reason = "not every test uses all")]

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rankgrad_cuda::{Gpu, devices, driver};

/// Whether tests run on a real device.
pub fn is_real() -> bool {
    std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1")
}

/// One test at a time, since they look at what is alive.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    static DRIVER: OnceLock<()> = OnceLock::new();
    DRIVER.get_or_init(|| {
        if is_real() {
            devices().expect("REQUIRE_CUDA=1");
        } else {
            // SAFETY: the fake driver's functions have the signatures of the driver's.
            assert!(unsafe { driver::install(rankgrad_cuda_fake::symbol) });
        }
    });
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first device.
pub fn gpu() -> Gpu {
    Gpu::open(0).expect("a device")
}

/// A fixed sequence of numbers that look random, some of them special.
pub fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64 - 0.5
    };
    (0..n).map(|_| next() * 4.0).collect()
}

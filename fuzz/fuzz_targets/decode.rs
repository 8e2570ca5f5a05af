//! Any bytes, to every decoder: none may panic, and each failure is a typed error. Memory is bounded by `-malloc_limit_mb`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rankgrad::ErrorKind;

fuzz_target!(|bytes: &[u8]| {
    for error in rankgrad::faults::decode(bytes, 1 << 20).errors {
        assert!(matches!(error.kind(), ErrorKind::Decode { .. }), "{error}");
    }
});

//! Where there is no driver, a program runs and is told so.

#[test]
fn no_driver_is_an_error() {
    let devices = rankgrad_cuda::devices();
    match devices {
        Ok(count) => println!("there is a driver, and {count} devices"),
        Err(error) => {
            assert!(std::env::var_os("REQUIRE_CUDA").is_none_or(|v| v != "1"), "REQUIRE_CUDA=1: {error}");
            assert!(error.to_string().starts_with("no CUDA device: "), "{error}");
            let error = rankgrad_cuda::Gpu::open(0).unwrap_err();
            assert!(matches!(error, rankgrad_cuda::Error::NoDevice { .. }), "{error}");
            println!("skipped: {error}");
        }
    }
}

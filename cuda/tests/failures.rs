//! Each call of the driver fails once: an error, nothing leaked, nothing half updated.

mod common;

use common::{is_real, numbers, turn};
use rankgrad_cuda::rules::{Kernel, Step, Sum, block_sums, update};
use rankgrad_cuda::{Array, Gpu, Result};
use rankgrad_cuda_fake as fake;

const CALLS: &[&str] = &[
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuStreamCreateWithPriority",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemAllocHost_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuLaunchKernel",
];

/// A step in place on two parameters; what they are afterwards, and the error of the step if it failed.
fn step(values: &[f64]) -> Result<([Vec<f64>; 2], Result<()>)> {
    let gpu = Gpu::open(0)?;
    let [p, q, g] = Array::from_slices(&gpu, &[values, values, values])?.try_into().expect("three");
    // Of more than a half of the pinned memory.
    let large = Array::from_slice(&gpu, &vec![1.5; 600_000])?;
    let state = Array::full(&gpu, values.len(), 0.0)?;
    let copy = state.deep_copy()?;
    let mut numbers = [0.0; 12];
    (numbers[0], numbers[2], numbers[3], numbers[4]) = (1.0, 0.5, 0.25, 1.0);
    let step = |p, state| Step {
        p,
        out: p,
        g: &g,
        rows: None,
        state: [Some(state), None, None],
        numbers,
        flags: 0,
    };
    let done = update(Kernel::Momentum, &[step(&p, &state), step(&q, &copy)]);
    let done = done.and_then(|()| block_sums(Sum::Squares, &[&p]).map(drop));
    // Whatever happened on the way, failures are over.
    fake::clear_failures();
    assert!(large.to_vec()?.iter().all(|&x| x == 1.5));
    Ok(([p.to_vec()?, q.to_vec()?], done))
}

#[test]
fn each_call_that_fails_is_an_error_and_leaves_nothing() {
    let _turn = turn();
    if is_real() {
        println!("skipped: only the fake driver fails on purpose");
        return;
    }
    let values = numbers(1, 5_000);
    let after: Vec<f64> = values.iter().map(|x| x - 0.5 * (0.0 * 0.25 + 1.0 * x)).collect();
    let (whole, done) = step(&values).unwrap();
    done.unwrap();
    assert!(whole.iter().all(|p| *p == after));
    assert_eq!(fake::counts(), fake::Counts::default());
    let mut tried = 0;
    for call in CALLS {
        for nth in 0.. {
            let before = fake::fault_count();
            fake::fail(call, nth, 999);
            let result = step(&values);
            fake::clear_failures();
            if fake::fault_count() == before {
                break;
            }
            tried += 1;
            if let Ok((found, done)) = result {
                for p in &found {
                    assert!(*p == values || *p == after, "{call} {nth}: half updated");
                }
                // Calls that only clean up may fail unnoticed; all others say it.
                if let Err(error) = done {
                    assert_eq!(error.code(), Some(999), "{call} {nth}: {error}");
                    assert!(found[0] == found[1], "{call} {nth}");
                } else {
                    assert!(found.iter().all(|p| *p == after), "{call} {nth}");
                }
            }
            assert_eq!(fake::counts(), fake::Counts::default(), "{call} {nth}");
        }
    }
    assert!(tried > 40, "{tried}");
}

//! Bytes a second of the update kernels, beside those of a copy on the device in the same run: `cargo bench -p rankgrad-cuda [-- MOST]`, with up to
//! `2^MOST` parameters (28). It fails if Adam in `f32` with the most parameters moves less than 0.9 of what the copy moves.
//!
//! `python3` with torch measures its fused optimizers, if they are there.

use std::process::ExitCode;
use std::time::Instant;

use rankgrad_cuda::rules::{Kernel, Step, update};
use rankgrad_cuda::{Array, Float, Gpu, Result};

/// What Adam must reach of the copy's rate.
const BAR: f64 = 0.9;
const REPEATS: usize = 10;

const TORCH: &str = r#"
import sys, torch
n = 1 << int(sys.argv[1])
for name, make in [("SGD", lambda p: torch.optim.SGD([p], 0.1, fused=True)), ("Adam", lambda p: torch.optim.Adam([p], fused=True)), ("AdamW", lambda p: torch.optim.AdamW([p], fused=True))]:
    p = torch.randn(n, device="cuda", requires_grad=True); p.grad = torch.randn_like(p); o = make(p); o.step()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); [o.step() for _ in range(10)]; b.record(); b.synchronize()
    print(f"torch {torch.__version__} fused {name} f32 2^{sys.argv[1]}: {a.elapsed_time(b) / 10:.3f} ms a step")
"#;

fn main() -> ExitCode {
    let most = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(28);
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("skipped: {error}");
            let required = std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1");
            return ExitCode::from(u8::from(required));
        }
    };
    println!("{}, {} GiB", gpu.name(), gpu.total_memory() >> 30);
    match run(&gpu, most) {
        Ok(share) if share >= BAR => ExitCode::SUCCESS,
        Ok(share) => {
            println!("Adam moves {share:.2} of what a copy moves; {BAR} is the bar");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures all, and gives Adam's share.
fn run(gpu: &Gpu, most: u32) -> Result<f64> {
    let mut share = 0.0;
    for exponent in (20..=most).step_by(4) {
        let n = 1 << exponent;
        for zeros in [false, true] {
            let copy = copies(gpu, n)?;
            println!(
                "2^{exponent} {}: copy {:.0} GB/s",
                if zeros { "zeros" } else { "random" },
                copy * 1e-9
            );
            for &kernel in Kernel::ALL {
                let single = rate::<f32>(gpu, kernel, n, zeros, |x| x as f32)?;
                let double = rate::<f64>(gpu, kernel, n, zeros, |x| x)?;
                println!(
                    "  {:28} f32 {:6.0} GB/s {:5.2}   f64 {:6.0} GB/s {:5.2}",
                    kernel.name(),
                    single * 1e-9,
                    single / copy,
                    double * 1e-9,
                    double / copy
                );
                if kernel == Kernel::Adam && !zeros {
                    share = single / copy;
                }
            }
        }
    }
    latency(gpu)?;
    end_to_end(gpu, 1 << most.min(26))?;
    let torch = std::process::Command::new("python3")
        .args(["-c", TORCH, &most.to_string()])
        .output();
    match torch {
        Ok(output) if output.status.success() => print!("{}", String::from_utf8_lossy(&output.stdout)),
        _ => println!("torch with a GPU isn't here"),
    }
    Ok(share)
}

/// Bytes read and written a second by a copy on the device.
fn copies(gpu: &Gpu, n: usize) -> Result<f64> {
    let x = Array::full(gpu, n, 1.0_f32)?;
    drop(x.deep_copy()?);
    let seconds = gpu.time(|| (0..REPEATS).try_for_each(|_| x.deep_copy().map(drop)))?;
    Ok((REPEATS * n * 8) as f64 / seconds)
}

/// Numbers that look random, in a pattern that is repeated.
fn values<T: Float>(gpu: &Gpu, n: usize, zeros: bool, of: fn(f64) -> T) -> Result<Array<T>> {
    if zeros {
        return Array::full(gpu, n, of(0.0));
    }
    let elements: Vec<T> = (0..n as u64)
        .map(|i| of(((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 + 1.0) / (1 << 24) as f64))
        .collect();
    Array::from_slice(gpu, &elements)
}

/// Bytes a second that a kernel must read and write at least.
fn rate<T: Float>(gpu: &Gpu, kernel: Kernel, n: usize, zeros: bool, of: fn(f64) -> T) -> Result<f64> {
    let p = values(gpu, n, zeros, of)?;
    let g = p.deep_copy()?;
    let state: Vec<Array<T>> = (0..kernel.arrays()).map(|_| p.deep_copy()).collect::<Result<_>>()?;
    let step = Step {
        p: &p,
        out: &p,
        g: &g,
        rows: None,
        state: [state.first(), state.get(1), state.get(2)],
        numbers: [1.0, 0.0, 0.1, 0.999, 0.001, -1e-3, 0.5, 1e-8, 1.0, 0.5, 1.0, 1.0].map(of),
        flags: 0,
    };
    update(kernel, &[step])?;
    let seconds = gpu.time(|| (0..REPEATS).try_for_each(|_| update(kernel, &[step])))?;
    let words = 3 + 2 * kernel.arrays();
    Ok((REPEATS * n * words * size_of::<T>()) as f64 / seconds)
}

/// How long a step of a small shard takes, from the call until it is done.
fn latency(gpu: &Gpu) -> Result<()> {
    let p = values(gpu, 1024, false, |x| x as f32)?;
    let state = [p.deep_copy()?, p.deep_copy()?];
    let step = Step {
        p: &p,
        out: &p,
        g: &p,
        rows: None,
        state: [Some(&state[0]), Some(&state[1]), None],
        numbers: [1.0; 12],
        flags: 0,
    };
    let start = Instant::now();
    for _ in 0..1000 {
        update(Kernel::Adam, &[step])?;
        gpu.synchronize()?;
    }
    println!(
        "Adam on 1,024 parameters: {:.1} us a step, each waited for",
        start.elapsed().as_secs_f64() * 1e3
    );
    Ok(())
}

/// A step whose gradients are in host memory: the link decides.
fn end_to_end(gpu: &Gpu, n: usize) -> Result<()> {
    let gradients: Vec<f32> = (0..n).map(|i| i as f32 * 1e-9).collect();
    let p = Array::full(gpu, n, 1.0_f32)?;
    let state = [p.deep_copy()?, p.deep_copy()?];
    let step = || {
        let g = Array::from_slice(gpu, &gradients)?;
        let step = Step {
            p: &p,
            out: &p,
            g: &g,
            rows: None,
            state: [Some(&state[0]), Some(&state[1]), None],
            numbers: [1.0; 12],
            flags: 0,
        };
        update(Kernel::Adam, &[step])?;
        gpu.synchronize()
    };
    step()?;
    let start = Instant::now();
    (0..5).try_for_each(|_| step())?;
    let seconds = start.elapsed().as_secs_f64() / 5.0;
    println!(
        "Adam on {n} parameters with gradients in host memory: {:.2} ms a step, {:.1} GB/s up the link",
        seconds * 1e3,
        (n * 4) as f64 / seconds * 1e-9
    );
    Ok(())
}

//! Bytes a second of the update kernels, beside those of a copy on the device in the same run: `cargo bench -p rankgrad-cuda [-- MOST]`, with up to
//! `2^MOST` parameters (28). It fails if Adam in `f32` with the most parameters, of 2^28 or more, moves less than 0.9 of what the copy moves. Each rate is
//! the median of several runs, by the device's clock.
//!
//! `python3` with torch measures its fused optimizers, if they are there.
//!
//! `cargo test` (without `--bench`) goes through all of it on a few parameters, with a driver that needs no GPU unless `REQUIRE_CUDA=1`.

use std::process::ExitCode;
use std::time::Instant;

use rankgrad_cuda::products::{Matrix, Product, multiply};
use rankgrad_cuda::rules::{Kernel, NUMBERS, Step, Sum, block_sums, lamb_squares, update};
use rankgrad_cuda::{Array, Error, Float, Gpu, Result, driver};

/// What Adam must reach of the copy's rate, from so many parameters on: fewer fit into the device's caches.
const BAR: f64 = 0.9;
const BAR_FROM: u32 = 28;
/// Runs of which the median counts, and launches of one.
const RUNS: usize = 5;
const REPEATS: usize = 4;

const TORCH: &str = r#"
import sys, torch
n = 1 << int(sys.argv[1])
for name, make in [("SGD", lambda p: torch.optim.SGD([p], 0.1, fused=True)), ("Adam", lambda p: torch.optim.Adam([p], fused=True)), ("AdamW", lambda p: torch.optim.AdamW([p], fused=True))]:
    p = torch.randn(n, device="cuda", requires_grad=True); p.grad = torch.randn_like(p); o = make(p); o.step()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); [o.step() for _ in range(10)]; b.record(); b.synchronize()
    print(f"torch {torch.__version__} fused {name} f32 2^{sys.argv[1]}: {a.elapsed_time(b) / 10:.3f} ms a step")
"#;

/// Powers of two, and how often the small things are done.
struct Size {
    exponents: Vec<u32>,
    steps: usize,
    /// Whether figures are of interest.
    measured: bool,
}

fn main() -> ExitCode {
    let required = std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1");
    let measured = std::env::args().any(|argument| argument == "--bench");
    let most = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(28);
    let size = if measured {
        let mut exponents: Vec<u32> = (20..most).step_by(4).collect();
        exponents.push(most);
        Size {
            exponents,
            steps: 1000,
            measured,
        }
    } else {
        if !required {
            // SAFETY: the fake driver's functions have the signatures of the driver's.
            unsafe { driver::install(rankgrad_cuda_fake::symbol) };
        }
        Size {
            exponents: vec![6],
            steps: 2,
            measured,
        }
    };
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("skipped: {error}");
            return ExitCode::from(u8::from(required || !measured));
        }
    };
    println!("{}, {} GiB", gpu.name(), gpu.total_memory() >> 30);
    match run(&gpu, &size) {
        Ok(share) if !measured || most < BAR_FROM || share >= BAR => ExitCode::SUCCESS,
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
fn run(gpu: &Gpu, size: &Size) -> Result<f64> {
    let mut share = 0.0;
    for &exponent in &size.exponents {
        let n = 1 << exponent;
        for zeros in [false, true] {
            let copy = copies(gpu, n)?;
            let (singles, doubles) = (values(gpu, n, zeros, |x| x as f32)?, values(gpu, n, zeros, |x| x)?);
            println!(
                "2^{exponent} {}: copy {:.0} GB/s",
                if zeros { "zeros" } else { "random" },
                copy * 1e-9
            );
            for &kernel in Kernel::ALL {
                let single = rate(gpu, kernel, &singles, |x| x as f32)?;
                let double = rate(gpu, kernel, &doubles, |x| x)?;
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
    let most = size.exponents.last().copied().unwrap_or(20);
    products::<f32>(gpu, if size.measured { 4096 } else { 20 })?;
    products::<f64>(gpu, if size.measured { 4096 } else { 20 })?;
    latency(gpu, size.steps)?;
    end_to_end(gpu, 1 << most.min(26))?;
    if !size.measured {
        return Ok(share);
    }
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
    let seconds = seconds(gpu, || x.deep_copy().map(drop))?;
    Ok((n * 8) as f64 / seconds)
}

/// What the device takes for some work: the median of several runs, after one that isn't counted.
fn seconds(gpu: &Gpu, work: impl Fn() -> Result<()>) -> Result<f64> {
    work()?;
    let mut runs = (0..RUNS)
        .map(|_| gpu.time(|| (0..REPEATS).try_for_each(|_| work())))
        .collect::<Result<Vec<f64>>>()?;
    runs.sort_by(f64::total_cmp);
    Ok(runs[RUNS / 2] / REPEATS as f64)
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

/// Bytes a second that a rule must read and write at least.
fn rate<T: Float>(gpu: &Gpu, kernel: Kernel, values: &Array<T>, of: fn(f64) -> T) -> Result<f64> {
    let (p, g) = (values.deep_copy()?, values);
    let state: Vec<Array<T>> = (0..kernel.arrays()).map(|_| p.deep_copy()).collect::<Result<_>>()?;
    let step = Step {
        p: &p,
        out: &p,
        g,
        rows: None,
        state: [state.first(), state.get(1), state.get(2)],
        numbers: [1.0, 0.0, 0.1, 0.999, 0.001, -1e-3, 0.5, 1e-8, 1.0, 0.5, 1.0, 1.0].map(of),
        flags: 0,
    };
    // As an optimizer does it: LAMB needs two norms first, which reads all but writes nothing.
    let norms = kernel == Kernel::Lamb;
    let seconds = seconds(gpu, || {
        if norms {
            block_sums(Sum::Squares, &[&p])?;
            lamb_squares(&[step])?;
        }
        update(kernel, &[step])
    })?;
    let words = 3 + 2 * kernel.arrays() + if norms { 5 } else { 0 };
    Ok((p.len() * words * size_of::<T>()) as f64 / seconds)
}

/// Products of two numbers a second in those of square matrices, and of symmetric ones, whose other half isn't computed.
fn products<T: Float>(gpu: &Gpu, n: usize) -> Result<()> {
    let (x, out) = (Array::full(gpu, n * n, T::default())?, Array::new(gpu, n * n)?);
    let matrix = Matrix::new(&x, (n, n));
    let rate = |symmetric| {
        let (a, b, out) = (matrix, matrix.t(), &out);
        let product = Product {
            a,
            b,
            out,
            with: None,
            symmetric,
        };
        Ok::<_, Error>((n as f64).powi(3) / seconds(gpu, || multiply(&[product]))? * 1e-12)
    };
    let (whole, half) = (rate(false)?, rate(true)?);
    println!("products of {n} x {n}, {}: {whole:.2} T/s, symmetric {half:.2} T/s", T::SUFFIX);
    Ok(())
}

/// How long a step of a small shard takes, from the call until it is done.
fn latency(gpu: &Gpu, steps: usize) -> Result<()> {
    let p = values(gpu, 1024, false, |x| x as f32)?;
    let state = [p.deep_copy()?, p.deep_copy()?];
    let step = Step {
        p: &p,
        out: &p,
        g: &p,
        rows: None,
        state: [Some(&state[0]), Some(&state[1]), None],
        numbers: [1.0; NUMBERS],
        flags: 0,
    };
    let start = Instant::now();
    for _ in 0..steps {
        update(Kernel::Adam, &[step])?;
        gpu.synchronize()?;
    }
    println!(
        "Adam on 1,024 parameters: {:.1} us a step, each waited for",
        start.elapsed().as_secs_f64() * 1e6 / steps as f64
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
            numbers: [1.0; NUMBERS],
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

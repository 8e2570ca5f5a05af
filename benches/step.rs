//! Calls and steps against raw MPI. `cargo bench --bench step [-- --quick]`; launches itself on two ranks.

#![allow(missing_docs, reason = "a program")]

mod bench;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use bench::{Row, Times, finish, is_quick, mpirun, placed, places, ranks_after};
use mpi::Threading;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use rankgrad::optim::options::Check;
use rankgrad::optim::{Float, Rule, StateArray, StateView};
use rankgrad::prelude::*;

rankgrad::remote_optimizer! {
    /// A rule that computes for a time.
    struct Busy {
        /// Not used.
        lr = 0.0;
        /// For how long.
        seconds: f64 = 0.0;
    }
}

impl Rule for Busy {
    const NAME: &'static str = "Busy";
    const SCALARS: &'static [(&'static str, f64)] = &[];

    fn check(&self) -> Result<()> {
        Check(Self::NAME).at_least_0("seconds", self.seconds)
    }

    fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
        Vec::new()
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], _state: &mut StateView<'_, T>) {
        let end = Instant::now() + Duration::from_secs_f64(self.seconds);
        while Instant::now() < end {
            for (p, &g) in p.iter_mut().zip(g) {
                *p = *p * T::of(0.5) + g;
            }
        }
    }
}

/// The owner's main may stop to compute.
static STOP: AtomicBool = AtomicBool::new(false);

/// Bytes of an empty call on its way, with what the transport puts in front; its answer has four less.
const FRAME: usize = 18;

/// Pauses between round trips, in microseconds.
const GAPS: [u64; 2] = [50, 1_000];

remote! {
    fn stop(scope: &Scope) -> Result<()> {
        let _ = scope;
        STOP.store(true, SeqCst);
        Ok(())
    }

    fn nothing(scope: &Scope) -> Result<()> {
        let _ = scope;
        Ok(())
    }

    fn times(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)
    }

    /// Goes to and fro between two ranks, so many times.
    fn bounce(scope: &Scope, x: Tensor, here: RRef<Tensor>, there: RRef<Tensor>, turns: u32) -> Result<Tensor> {
        let y = x.mul(&here.local(scope)?)?;
        match turns {
            0 => Ok(y),
            _ => scope.call(there.owner(), bounce, (y, &there, &here, turns - 1)),
        }
    }

    /// Bytes a second of a plain loop over as much memory as Adam moves: four arrays read, three of them written.
    fn stream(scope: &Scope, elements: u64, rounds: u32) -> Result<f64> {
        let _ = scope;
        let n = elements as usize;
        let (mut p, g, mut m, mut v) = (vec![1.0f32; n], vec![0.5f32; n], vec![0.0f32; n], vec![0.0f32; n]);
        let mut best = f64::INFINITY;
        for _ in 0..rounds {
            let start = Instant::now();
            for (((p, &g), m), v) in p.iter_mut().zip(&g).zip(&mut m).zip(&mut v) {
                *m = *m * 0.5 + g;
                *v = *v * 0.5 + g;
                *p += *m + *v;
            }
            std::hint::black_box((&mut p, &mut m, &mut v));
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(28.0 * n as f64 / best)
    }
}

fn main() -> ExitCode {
    if let Some(code) = ranks_after(2, alone) {
        return code;
    }
    bench::ended(run())
}

/// The variable that holds what [`alone`] found.
const ALONE: &str = "BENCH_PING_PONG_IN_C";

/// Has `ping_pong.c` compiled, and run where the ranks will; the microseconds of a round trip. Nothing where there is no C compiler.
fn alone() -> std::io::Result<Option<(&'static str, String)>> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/bench/ping_pong.c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ping_pong");
    let compiler = std::env::var_os("MPICC").unwrap_or_else(|| "mpicc".into());
    let compiled = Command::new(&compiler).arg("-O2").arg(source).arg("-o").arg(&program).status();
    if !compiled.is_ok_and(|status| status.success()) {
        eprintln!("no ping-pong in C to compare with: {} failed", compiler.display());
        return Ok(None);
    }
    let ran = mpirun(2)?.arg(program).output()?;
    let said = String::from_utf8_lossy(&ran.stdout);
    match said.lines().map(str::trim).find(|line| line.parse::<f64>().is_ok()) {
        Some(found) => Ok(Some((ALONE, found.into()))),
        None => Err(std::io::Error::other(format!("ping_pong.c ended with {}", ran.status))),
    }
}

/// Lets time pass, without sleeping where that is too coarse.
fn pause(time: Duration) {
    if time >= Duration::from_millis(1) {
        return std::thread::sleep(time);
    }
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// Arithmetic for a time.
fn compute(time: Duration) {
    let (end, mut x) = (Instant::now() + time, 1.0f64);
    while Instant::now() < end {
        for _ in 0..100 {
            x = std::hint::black_box(x * 0.5 + 1.0);
        }
    }
}

/// Round trips of so many bytes, by MPI alone, after pauses.
fn ping_pong(comm: &SimpleCommunicator, bytes: usize, rounds: usize, gap: u64) -> Times {
    let (mut buffer, other) = (vec![0u8; bytes], comm.process_at_rank(1 - comm.rank()));
    let mut times = Times::default();
    for _ in 0..rounds {
        if comm.rank() == 0 && gap > 0 {
            pause(Duration::from_micros(gap));
        }
        let start = Instant::now();
        if comm.rank() == 0 {
            other.send(&buffer[..]);
            other.receive_into(&mut buffer[..]);
        } else {
            other.receive_into(&mut buffer[..]);
            other.send(&buffer[..]);
        }
        times.push(start.elapsed());
    }
    times
}

fn run() -> Result<()> {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or_else(|| Error::user("MPI is up already"))?;
    let comm = universe.world();
    let n = if is_quick() { 2_000 } else { 20_000 };
    let places = places(&comm);
    ping_pong(&comm, 8, n, 0);
    let mut floors = [ping_pong(&comm, 8, n, 0), ping_pong(&comm, FRAME, n, 0)];
    let mut gaps = GAPS.map(|gap| [8, FRAME].map(|bytes| ping_pong(&comm, bytes, n / 20, gap)));
    let world = World::builder().communicator(&comm).start()?;
    let rows = world.lead(|world| {
        let [small, frame] = &mut floors;
        let alone = std::env::var(ALONE).ok().and_then(|us| us.parse().ok());
        let mut rows: Vec<Row> = alone
            .map(|us| Row::new("ping_pong_8_bytes_against_c", small.quantile(0.5), "us", us))
            .into_iter()
            .collect();
        rows.extend(latencies(world, n, small, frame)?);
        rows.extend(with_gaps(world, n / 20, &mut gaps)?);
        rows.extend(exact(world, n / 4)?);
        rows.extend(large(world)?);
        rows.extend(answers_during_a_step(world, if is_quick() { 0.5 } else { 2.0 })?);
        Ok(rows)
    })?;
    let rows = match rows {
        Some(mut rows) => {
            let [small, frame] = &mut floors;
            rows.extend(both_compute(&world, n / 20, small, frame)?);
            Some(rows)
        }
        None => {
            while !STOP.load(SeqCst) {
                compute(Duration::from_millis(1));
            }
            None
        }
    };
    if let Some(rows) = rows.map(|rows| placed(rows, &places)) {
        finish("step", &rows).map_err(|e| Error::user(format!("bench/step.json: {e}")))?;
    }
    world.finish()
}

fn vector(n: usize, x: f32) -> Result<Tensor> {
    Tensor::from_vec(vec![x; n], [n])
}

/// Round trips of calls, steps and whole iterations on small tensors, against ping-pongs of 8 bytes and of as many as an empty call has.
fn latencies(world: &World, n: usize, small: &mut Times, frame: &mut Times) -> Result<Vec<Row>> {
    let far = world.owner(1);
    let mut rows = Vec::new();
    let mut time = |name: &str, n: usize, floor: &mut Times, f: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let mut times = Times::default();
        for round in 0..n + n / 10 {
            let start = Instant::now();
            f()?;
            if round >= n / 10 {
                times.push(start.elapsed());
            }
        }
        rows.extend(times.rows(name, floor));
        Ok(())
    };
    time("call_empty", n, frame, &mut || world.call(far, nothing, ()))?;
    let p = world.put(far, vector(1, 1.0)?)?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(1e-3), [&p])?;
    let ctx = world.context()?;
    ctx.accumulate(&p, Gradient::Dense(vector(1, 0.5)?.data()))?;
    time("step_scalar_adam", n, small, &mut || optimizer.step(&ctx).map(drop))?;
    let many: Vec<RRef<Tensor>> = (0..1_000).map(|_| world.put(far, vector(10, 1.0)?)).collect::<Result<_>>()?;
    let of_many = DistributedOptimizer::new(world, Adam::new(1e-3), &many)?;
    let ctx = world.context()?;
    for p in &many {
        ctx.accumulate(p, Gradient::Dense(vector(10, 0.5)?.data()))?;
    }
    time("step_1000x10_adam", n / 20, small, &mut || of_many.step(&ctx).map(drop))?;
    let x = vector(1, 1.0)?;
    for (name, mode) in [("iteration_exact", Mode::Exact), ("iteration_fast", Mode::Fast)] {
        time(name, n / 4, small, &mut || {
            let ctx = world.context()?;
            let y = ctx.call(far, times, (&x, &p))?.sum()?;
            let options = BackwardOptions {
                mode,
                ..BackwardOptions::default()
            };
            ctx.backward_with(&[y], options)?;
            optimizer.step(&ctx)?;
            ctx.release()
        })?;
    }
    Ok(rows)
}

/// Runs `f` so many times, each after `before`.
fn timed(n: usize, before: impl Fn(), mut f: impl FnMut() -> Result<()>) -> Result<Times> {
    let mut times = Times::default();
    for _ in 0..n {
        before();
        let start = Instant::now();
        f()?;
        times.push(start.elapsed());
    }
    Ok(times)
}

/// A scalar parameter on the other rank, with a gradient in a context.
fn scalar(world: &World) -> Result<(DistributedOptimizer, Context)> {
    let p = world.put(world.owner(1), vector(1, 1.0)?)?;
    let ctx = world.context()?;
    ctx.accumulate(&p, Gradient::Dense(vector(1, 0.5)?.data()))?;
    Ok((DistributedOptimizer::new(world, Adam::new(1e-3), [&p])?, ctx))
}

/// Empty calls and scalar steps after pauses, against ping-pongs after the same.
fn with_gaps(world: &World, n: usize, floors: &mut [[Times; 2]; 2]) -> Result<Vec<Row>> {
    let (far, (optimizer, ctx)) = (world.owner(1), scalar(world)?);
    let mut rows = Vec::new();
    for (gap, [small, frame]) in GAPS.into_iter().zip(floors) {
        let before = || pause(Duration::from_micros(gap));
        let mut calls = timed(n, before, || world.call(far, nothing, ()))?;
        rows.extend(calls.rows(&format!("call_empty_gap_{gap}_us"), frame));
        let mut steps = timed(n, before, || optimizer.step(&ctx).map(drop))?;
        rows.extend(steps.rows(&format!("step_scalar_adam_gap_{gap}_us"), small));
    }
    Ok(rows)
}

/// Empty calls and scalar steps while the owner's main computes and doesn't serve, and this one computes between them, against ping-pongs of mains
/// that do nothing else.
fn both_compute(world: &World, n: usize, small: &mut Times, frame: &mut Times) -> Result<Vec<Row>> {
    let (far, (optimizer, ctx)) = (world.owner(1), scalar(world)?);
    let before = || compute(Duration::from_micros(200));
    let mut rows = timed(n, before, || world.call(far, nothing, ()))?.rows("call_empty_both_compute", frame);
    rows.extend(timed(n, before, || optimizer.step(&ctx).map(drop))?.rows("step_scalar_adam_both_compute", small));
    world.call(far, stop, ())?;
    Ok(rows)
}

/// An exact backward against a fast one, in pairs: through one call, and through a chain of eight.
fn exact(world: &World, n: usize) -> Result<Vec<Row>> {
    let far = world.owner(1);
    let (here, there) = (world.put(0, vector(1, 1.0)?)?, world.put(far, vector(1, 1.0)?)?);
    let x = vector(1, 1.0)?.parameter()?;
    let mut rows = Vec::new();
    for (name, turns) in [("backward_exact_one_call", 0), ("backward_exact_chain_of_8", 7)] {
        let mut times = [Times::default(), Times::default()];
        for round in 0..n + n / 10 {
            for (mode, times) in [Mode::Exact, Mode::Fast].into_iter().zip(&mut times) {
                let ctx = world.context()?;
                let y = ctx.call(far, bounce, (&x, &there, &here, turns))?.sum()?;
                let options = BackwardOptions {
                    mode,
                    ..BackwardOptions::default()
                };
                let start = Instant::now();
                ctx.backward_with(&[y], options)?;
                if round >= n / 10 {
                    times.push(start.elapsed());
                }
                ctx.release()?;
            }
        }
        let [mut exact, mut fast] = times;
        rows.extend(exact.rows(name, &mut fast));
    }
    Ok(rows)
}

/// Bytes a second of a step over 4 x 1,000,000 elements, against a plain loop on the same rank.
fn large(world: &World) -> Result<Vec<Row>> {
    let far = world.owner(1);
    let parameters: Vec<RRef<Tensor>> = (0..4).map(|_| world.put(far, vector(1_000_000, 1.0)?)).collect::<Result<_>>()?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(1e-3), &parameters)?;
    let ctx = world.context()?;
    for p in &parameters {
        ctx.accumulate(p, Gradient::Dense(vector(1_000_000, 0.5)?.data()))?;
    }
    let rounds = if is_quick() { 10 } else { 100 };
    let mut best = f64::INFINITY;
    for _ in 0..rounds {
        let report = optimizer.step(&ctx)?;
        best = best.min(report.owners[0].seconds);
    }
    let floor = world.call(far, stream, (4_000_000u64, rounds))?;
    Ok(vec![Row::new("step_4x1000000_adam", 28.0 * 4e6 / best / 1e9, "GB/s", floor / 1e9)])
}

/// How long fetches from an owner take while it steps, and while it doesn't.
fn answers_during_a_step(world: &World, seconds: f64) -> Result<Vec<Row>> {
    let far = world.owner(1);
    let (stepped, other) = (world.put(far, vector(1 << 16, 1.0)?)?, world.put(far, vector(16, 1.0)?)?);
    let optimizer = DistributedOptimizer::new(world, Busy::default().seconds(seconds), [&stepped])?;
    let ctx = world.context()?;
    ctx.accumulate(&stepped, Gradient::Dense(vector(1 << 16, 1.0)?.data()))?;
    let fetch = || -> Result<Duration> {
        let start = Instant::now();
        other.fetch()?;
        Ok(start.elapsed())
    };
    let (mut quiet, mut during) = (Times::default(), Times::default());
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < end {
        quiet.push(fetch()?);
    }
    let step = optimizer.step_async(&ctx, &StepOptions::new())?;
    while !step.is_done() {
        during.push(fetch()?);
    }
    step.wait()?;
    Ok(during.rows(&format!("fetch_during_a_step_of_{seconds}_s"), &mut quiet))
}

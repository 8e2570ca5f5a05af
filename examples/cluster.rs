//! Trains as a batch system wants it: saves every so many steps, stops with a checkpoint at SIGUSR1 or SIGTERM, asks by its exit code to be put
//! back into the queue, and goes on where it stopped, to the bit, on as many ranks as it gets.
//!
//! `cluster DIR [--steps N] [--every K] [--nap MS] [--fail panic|exit|memory|init]`; `slurm/requeue.sbatch` runs it. What it learns is a wave, with two layers on two ranks.
//! `--fail` shows what it looks like when a program breaks: rank 0 does so at its tenth step (`memory`: takes up to 4 GiB, so run it where less is allowed), or the last rank
//! is killed inside MPI_Init, where it waits for the one before it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use rankgrad::checkpoint::{Checkpoint, Save};
use rankgrad::prelude::*;
use rankgrad::tensor::init::orthogonal;
use rankgrad::{REQUEUE, Signal};

const HIDDEN: usize = 16;
const POINTS: usize = 64;

remote! {
    /// The hidden layer, on the rank that owns it.
    fn hidden(scope: &Scope, x: Tensor, w: RRef<Tensor>, b: RRef<Tensor>) -> Result<Tensor> {
        (x.matmul(&w.local(scope)?)? + b.local(scope)?)?.tanh()
    }
}

struct Options {
    dir: PathBuf,
    steps: u64,
    every: u64,
    nap: Duration,
    fail: Option<Failure>,
}

#[derive(Clone, Copy)]
enum Failure {
    Panic,
    Exit,
    Memory,
    Init,
}

impl Failure {
    fn happen(self) {
        match self {
            Failure::Panic => panic!("a panic was asked for"),
            Failure::Exit => std::process::exit(3),
            Failure::Memory => {
                let taken: Vec<Vec<u8>> = (0..64).map(|_| vec![1; 64 << 20]).collect();
                panic!("{} x 64 MiB were there", taken.len());
            }
            Failure::Init => {}
        }
    }
}

/// What the launcher says under one of these names.
fn told(names: &[&str]) -> Option<u32> {
    names.iter().find_map(|name| std::env::var(name).ok()?.parse().ok())
}

/// The last rank is killed while it waits inside MPI_Init, as the one before it comes late.
fn fail_inside_init() {
    let rank = told(&["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]).unwrap_or(0);
    let size = told(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]).unwrap_or(1);
    if rank + 1 == size {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            let _ = std::process::Command::new("kill")
                .args(["-KILL", &std::process::id().to_string()])
                .status();
        });
    } else if rank + 2 == size {
        std::thread::sleep(Duration::from_secs(1));
    }
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Options> {
        let mut options = Options {
            dir: arguments.next()?.into(),
            steps: 200,
            every: 20,
            nap: Duration::ZERO,
            fail: None,
        };
        while let Some(name) = arguments.next() {
            let value = arguments.next()?;
            let number = || value.parse::<u64>().ok();
            match (name.as_str(), value.as_str()) {
                ("--steps", _) => options.steps = number()?,
                ("--every", _) => options.every = std::num::NonZeroU64::new(number()?)?.get(),
                ("--nap", _) => options.nap = Duration::from_millis(number()?),
                ("--fail", "panic") => options.fail = Some(Failure::Panic),
                ("--fail", "exit") => options.fail = Some(Failure::Exit),
                ("--fail", "memory") => options.fail = Some(Failure::Memory),
                ("--fail", "init") => options.fail = Some(Failure::Init),
                _ => return None,
            }
        }
        Some(options)
    }
}

fn main() -> ExitCode {
    let Some(options) = Options::parse(std::env::args().skip(1)) else {
        eprintln!("usage: cluster DIR [--steps N] [--every K] [--nap MS] [--fail panic|exit|memory|init]");
        return ExitCode::from(2);
    };
    match work(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(REQUEUE),
        Err(error) => {
            eprintln!("cluster: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What each rank does; whether all is done.
fn work(options: &Options) -> Result<bool> {
    if let Some(Failure::Init) = options.fail {
        fail_inside_init();
    }
    // From before MPI's start: a signal that comes early must not end the process.
    let world = World::builder().env_logger().on_signal(&[Signal::Usr1, Signal::Term]).start()?;
    // A failure ends the job on all ranks, as nobody else could go on.
    world.run(|world| {
        // Rank 0 knows.
        Ok(world.lead(|world| train(world, options))?.unwrap_or(true))
    })
}

/// What rank 0 does; whether all steps are made.
fn train(world: &World, options: &Options) -> Result<bool> {
    let w = world.put(world.owner(1), orthogonal([1, HIDDEN], 7)?)?;
    let b = world.put(world.owner(1), orthogonal([1, HIDDEN], 8)?)?;
    let v = world.put(world.owner(2), orthogonal([HIDDEN, 1], 9)?)?;
    let named = [("hidden.weight", &w), ("hidden.bias", &b), ("out.weight", &v)];
    let mut optimizer = DistributedOptimizer::new(world, Adam::new(0.01), named)?;
    // There may be one whatever the batch system says about restarts.
    let first = match Checkpoint::load(world, &options.dir)? {
        Some(checkpoint) => {
            checkpoint.restore(&mut optimizer)?;
            checkpoint.step()
        }
        None => 0,
    };
    println!("steps {first} to {} on {} rank(s)", options.steps, world.size());

    let points = |f: fn(f64) -> f64| {
        let values = (0..POINTS).map(|i| f(i as f64 / POINTS as f64)).collect();
        Tensor::from_vec(values, [POINTS, 1])
    };
    let (x, y) = (points(|t| t)?, points(|t| (6.0 * t).sin())?);
    let mut loss = f64::NAN;
    for step in first..options.steps {
        if world.stop_at(step)? {
            save(&options.dir, step, &optimizer)?;
            let signal = world.signal()?.map_or_else(String::new, |signal| signal.to_string());
            println!("stopped by {signal} before step {step}");
            return Ok(false);
        }
        if let Some(failure) = options.fail.filter(|_| step == first + 10) {
            failure.happen();
        }
        let ctx = world.context()?;
        let h = ctx.call(w.owner(), hidden, (&x, &w, &b))?;
        let error = h.matmul(&ctx.fetch(&v)?)?.mse(&y)?;
        ctx.backward(&[&error])?;
        optimizer.step(&ctx)?;
        loss = error.item()?;
        std::thread::sleep(options.nap);
        if (step + 1) % options.every == 0 || step + 1 == options.steps {
            save(&options.dir, step + 1, &optimizer)?;
        }
    }
    let bits = [&w, &b, &v].into_iter().try_fold(0u64, |bits, parameter| {
        let values = parameter.fetch()?.to_vec::<f64>()?;
        Ok::<u64, Error>(values.iter().fold(bits, |bits, x| bits.rotate_left(5) ^ x.to_bits()))
    })?;
    println!("done after {} steps: loss {loss:.6}, parameters {bits:016x}", options.steps);
    Ok(true)
}

fn save(dir: &Path, step: u64, optimizer: &DistributedOptimizer) -> Result<()> {
    Checkpoint::save(dir, step, Save::new().optimizer("optimizer", optimizer).keep(2)).map(drop)
}

//! Trains a small network over ranks, saves it every so many steps, and goes on from the last checkpoint when it is started again. However often it is
//! killed or asked to stop, and on however many ranks it is started, its history has the same bits; `scripts/soak` shows it.
//!
//! `mpirun -n 4 target/release/examples/soak --dir DIR --steps N --every K [--seconds S] [--out history.json]`
//!
//! It ends at step N, or after S seconds at the next step that is saved. At SIGUSR1 or SIGTERM it saves, and leaves with the code that asks to be put back
//! into the queue.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rankgrad::checkpoint::{Checkpoint, Restore, Save};
use rankgrad::optim::schedule::{CosineAnnealingWarmRestarts, Scheduler};
use rankgrad::prelude::*;
use rankgrad::tensor::init;
use rankgrad::{REQUEUE, Signal};
use serde::{Deserialize, Serialize};
use serde_json::json;

const USAGE: &str = "usage: soak --dir DIR --steps N --every K [--seconds S] [--out FILE]";

struct Options {
    dir: PathBuf,
    steps: u64,
    every: u64,
    seconds: Option<f64>,
    out: Option<PathBuf>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Options> {
        let mut options = Options {
            dir: PathBuf::new(),
            steps: 0,
            every: 0,
            seconds: None,
            out: None,
        };
        while let Some(option) = arguments.next() {
            let value = arguments.next()?;
            match option.as_str() {
                "--dir" => options.dir = value.into(),
                "--steps" => options.steps = value.parse().ok()?,
                "--every" => options.every = value.parse().ok()?,
                "--seconds" => options.seconds = Some(value.parse().ok()?),
                "--out" => options.out = Some(value.into()),
                _ => return None,
            }
        }
        (options.steps > 0 && options.every > 0 && !options.dir.as_os_str().is_empty()).then_some(options)
    }
}

remote! {
    /// One layer, on the rank that owns its weights.
    fn layer(scope: &Scope, x: Tensor, weight: RRef<Tensor>, bias: RRef<Tensor>) -> Result<Tensor> {
        x.matmul(&weight.local(scope)?)?.add(&bias.local(scope)?)?.tanh()
    }
}

const WIDTHS: [usize; 4] = [8, 32, 32, 1];

/// The network, what trains it, and what it has seen so far.
struct Training {
    layers: Vec<(RRef<Tensor>, RRef<Tensor>)>,
    optimizer: DistributedOptimizer,
    scheduler: Scheduler,
    random: ChaCha8Rng,
    history: History,
}

/// Losses at the steps that were saved, and a digest of the bits of all.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct History {
    losses: Vec<(u64, f64)>,
    digest: u64,
}

impl History {
    fn add(&mut self, step: u64, loss: f64, is_saved: bool) {
        self.digest = (self.digest.rotate_left(5) ^ loss.to_bits()).wrapping_mul(0x0100_0000_01b3);
        if is_saved {
            self.losses.push((step, loss));
        }
    }
}

impl Training {
    fn new(world: &World) -> Result<Self> {
        let (mut layers, mut named) = (Vec::new(), Vec::new());
        for (place, sizes) in WIDTHS.windows(2).enumerate() {
            let owner = world.owner(place as u32 + 1);
            let bound = 1.0 / (sizes[0] as f64).sqrt();
            let weight = world.put(owner, init::uniform([sizes[0], sizes[1]], -bound, bound, place as u64)?)?;
            let bias = world.put(owner, Tensor::zeros(DType::F64, [sizes[1]]))?;
            named.push((format!("{place}.weight"), weight.clone()));
            named.push((format!("{place}.bias"), bias.clone()));
            layers.push((weight, bias));
        }
        let mut optimizer = DistributedOptimizer::new(world, Adam::new(0.01), named)?;
        let scheduler = Scheduler::new(CosineAnnealingWarmRestarts::new(50), &mut optimizer)?;
        Ok(Training {
            layers,
            optimizer,
            scheduler,
            random: ChaCha8Rng::seed_from_u64(7),
            history: History::default(),
        })
    }

    /// Rows of numbers, and for each the sine of their sum.
    fn batch(&mut self) -> Result<(Tensor, Tensor)> {
        let rows = 16;
        let mut draw = || f64::from(self.random.next_u32()) / f64::from(u32::MAX) - 0.5;
        let x: Vec<f64> = (0..rows * WIDTHS[0]).map(|_| draw()).collect();
        let y: Vec<f64> = x.chunks(WIDTHS[0]).map(|row| libm::sin(row.iter().sum())).collect();
        Ok((Tensor::from_vec(x, [rows, WIDTHS[0]])?, Tensor::from_vec(y, [rows, 1])?))
    }

    fn step(&mut self, world: &World) -> Result<f64> {
        let (mut x, y) = self.batch()?;
        let context = world.context()?;
        for (weight, bias) in &self.layers {
            x = context.call(weight.owner(), layer, (x, weight, bias))?;
        }
        let loss = x.sub(&y)?.pow_scalar(2.0)?.mean()?;
        let value = loss.item()?;
        context.backward(&[loss])?;
        self.optimizer.step(&context)?;
        self.scheduler.step(&mut self.optimizer)?;
        Ok(value)
    }

    fn save(&self, dir: &Path, step: u64) -> Result<()> {
        let save = Save::from(&self.optimizer)
            .value("scheduler", &self.scheduler)?
            .value("random", &self.random)?
            .value("history", &self.history)?;
        Checkpoint::save(dir, step, save.keep(3)).map(drop)
    }

    /// Goes on from the last checkpoint; its step.
    fn resume(&mut self, world: &World, dir: &Path) -> Result<u64> {
        let Some(checkpoint) = Checkpoint::load(world, dir)? else {
            return Ok(0);
        };
        checkpoint.restore(Restore::from(&mut self.optimizer))?;
        self.scheduler = checkpoint.value("scheduler")?;
        self.random = checkpoint.value("random")?;
        self.history = checkpoint.value("history")?;
        for skipped in checkpoint.skipped() {
            eprintln!("soak: {}", skipped.why);
        }
        Ok(checkpoint.step())
    }

    /// The history, and the parameters at its end.
    fn told(&self, step: u64) -> Result<String> {
        let values = |(weight, bias): &(RRef<Tensor>, RRef<Tensor>)| Ok([weight.fetch()?.to_vec::<f64>()?, bias.fetch()?.to_vec::<f64>()?]);
        let parameters: Vec<_> = self.layers.iter().map(values).collect::<Result<_>>()?;
        let history = &self.history;
        let told = json!({"steps": step, "digest": history.digest, "losses": history.losses, "parameters": parameters});
        Ok(format!("{told}\n"))
    }
}

/// What rank 0 does; whether all steps are made.
fn train(world: &World, options: &Options) -> Result<bool> {
    let deadline = options.seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    let mut training = Training::new(world)?;
    let mut step = training.resume(world, &options.dir)?;
    eprintln!("soak: {} ranks from step {step}", world.size());
    while step < options.steps {
        if world.stop_at(step)? {
            eprintln!("soak: stopped before step {}", step + 1);
            training.save(&options.dir, step)?;
            return Ok(false);
        }
        step += 1;
        let (loss, is_saved) = (training.step(world)?, step % options.every == 0);
        training.history.add(step, loss, is_saved);
        if is_saved || step == options.steps {
            training.save(&options.dir, step)?;
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                break;
            }
        }
    }
    if let Some(out) = &options.out {
        std::fs::write(out, training.told(step)?).map_err(Error::user)?;
    }
    Ok(true)
}

fn main() -> ExitCode {
    let Some(options) = Options::parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match work(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(REQUEUE),
        Err(error) => {
            eprintln!("soak: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What each rank does; whether all is done.
fn work(options: &Options) -> Result<bool> {
    let world = World::builder().env_logger().on_signal(&[Signal::Usr1, Signal::Term]).start()?;
    world.run(|world| {
        // Rank 0 knows.
        Ok(world.lead(|world| train(world, options))?.unwrap_or(true))
    })
}

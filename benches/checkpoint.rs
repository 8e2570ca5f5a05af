//! A checkpoint of 1 GB against `dd` with fsync, on the disk of the build, in the same run. `cargo bench --bench checkpoint [-- --quick]`; launches itself
//! on two ranks.

#![allow(missing_docs, reason = "a program")]

mod bench;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use bench::{Row, finish, is_quick, ranks};
use rankgrad::checkpoint::Checkpoint;
use rankgrad::prelude::*;

/// Writes so many MiB with `dd`; in MB/s.
fn dd(folder: &Path, mib: usize) -> Result<f64> {
    let file = folder.join("dd");
    let mut command = Command::new("dd");
    command.args(["if=/dev/zero", "bs=1M", "conv=fsync", "status=none"]);
    command.arg(format!("of={}", file.display())).arg(format!("count={mib}"));
    let start = Instant::now();
    let status = command.status().map_err(Error::user)?;
    let seconds = start.elapsed().as_secs_f64();
    if !status.success() {
        return Err(Error::user(format!("dd ended with {status}")));
    }
    std::fs::remove_file(file).map_err(Error::user)?;
    Ok(mib as f64 * 1.048576 / seconds)
}

fn measure(world: &World) -> Result<Vec<Row>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench-checkpoint");
    std::fs::create_dir_all(&folder).map_err(Error::user)?;
    let mib = if is_quick() { 96 } else { 1024 };
    // Parameters, and twice as much state, in eight arrays of each kind.
    let elements = mib * (1 << 20) / 8 / 24;
    let parameters: Vec<_> = (0..8)
        .map(|k| world.put(world.owner(k), Tensor::from_vec(vec![0.1 * f64::from(k); elements], [elements])?))
        .collect::<Result<_>>()?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(0.1), &parameters)?;
    let step = || {
        let context = world.context()?;
        for parameter in &parameters {
            context.accumulate(parameter, parameter.fetch()?.data().into())?;
        }
        optimizer.step(&context).map(drop)
    };
    step()?;
    let (mut saves, mut floors, mut taken) = (vec![], vec![], vec![]);
    for round in 0..3 {
        // Both in turn, and `dd` after a save, too: freed blocks are sometimes faster than fresh ones.
        floors.push(dd(&folder, mib)?);
        let start = Instant::now();
        let saved = Checkpoint::save(&folder, round, &optimizer)?;
        saves.push(saved.bytes as f64 / 1e6 / start.elapsed().as_secs_f64());
        std::fs::remove_dir_all(saved.path).map_err(Error::user)?;
        floors.push(dd(&folder, mib)?);
        let start = Instant::now();
        let saving = Checkpoint::save_async(&folder, round, &optimizer)?;
        taken.push(start.elapsed().as_secs_f64() * 1e3);
        step()?;
        let saved = saving.wait()?;
        std::fs::remove_dir_all(saved.path).map_err(Error::user)?;
    }
    let start = Instant::now();
    let saved = Checkpoint::save(&folder, 9, &optimizer)?;
    let whole = start.elapsed().as_secs_f64() * 1e3;
    let start = Instant::now();
    let found = Checkpoint::load(world, &folder)?.ok_or_else(|| Error::user("no checkpoint"))?;
    let verified = saved.bytes as f64 / 1e6 / start.elapsed().as_secs_f64();
    let mut into = DistributedOptimizer::new(world, Adam::new(0.1), &parameters)?;
    let start = Instant::now();
    found.restore(&mut into)?;
    let restored = saved.bytes as f64 / 1e6 / start.elapsed().as_secs_f64();
    std::fs::remove_dir_all(&folder).map_err(Error::user)?;
    let median = |mut values: Vec<f64>| {
        values.sort_unstable_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let floor = floors.iter().copied().fold(0.0, f64::max); // the best of all
    Ok(vec![
        Row::new(format!("save_{mib}_mib"), median(saves), "MB/s", floor),
        Row::new("snapshot_taken_async", median(taken), "ms", whole),
        Row::new("verify_on_load", verified, "MB/s", floor),
        Row::new("restore", restored, "MB/s", floor),
    ])
}

fn main() -> ExitCode {
    if let Some(code) = ranks(2) {
        return code;
    }
    let result = World::init().and_then(|world| world.run(|world| world.lead(measure)));
    match result {
        Ok(Some(rows)) => match finish("checkpoint", &rows) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        },
        Ok(None) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

//! Replays files of torch's results and compares: optimizers over ranks, options that must be refused, schedules.
//!
//! `mpirun -n N replay FILE [--out FILE]`: one optimizer a line, as in `tests/golden/optimizers.jsonl`, its parameters dealt over the ranks (over all but
//! rank 0, if there is more than one). `replay --refused FILE`: options that must be refused before anything is sent, as in `refused.jsonl`.
//! `replay --schedules FILE [--out FILE]`: schedules of learning rates, as in `schedules.jsonl`.
//!
//! Ends with the number of cases that passed and failed and the worst relative error; the exit code is 1 if one failed.

// A program, not a library: nothing outside can reach it anyway.
#![allow(unreachable_pub)]

mod file;
mod optimizers;
mod refused;
mod schedules;
mod tally;

use std::process::ExitCode;

use rankgrad::prelude::*;

const USAGE: &str = "usage: replay [--schedules] FILE [--out FILE] | replay --refused FILE";

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Optimizers,
    Refused,
    Schedules,
}

struct Options {
    kind: Kind,
    file: String,
    out: Option<String>,
}

fn options(mut arguments: impl Iterator<Item = String>) -> std::result::Result<Options, String> {
    let (mut kind, mut file, mut out) = (Kind::Optimizers, None, None);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = Some(arguments.next().ok_or(USAGE)?),
            "--refused" if kind == Kind::Optimizers => kind = Kind::Refused,
            "--schedules" if kind == Kind::Optimizers => kind = Kind::Schedules,
            _ if argument.starts_with("--") || file.is_some() => return Err(format!("`{argument}` is not understood; {USAGE}")),
            _ => file = Some(argument),
        }
    }
    match (file, kind, &out) {
        (None, ..) | (_, Kind::Refused, Some(_)) => Err(USAGE.into()),
        (Some(file), ..) => Ok(Options { kind, file, out }),
    }
}

/// What rank 0 does; whether all cases passed.
fn run(world: &World, options: &Options) -> Result<bool> {
    let cases = file::lines(&options.file)?;
    let (tally, out) = match options.kind {
        Kind::Optimizers => optimizers::replay(world, cases)?,
        Kind::Refused => refused::replay(world, cases)?,
        Kind::Schedules => schedules::replay(world, cases)?,
    };
    if let Some(file) = &options.out {
        std::fs::write(file, out.to_string()).map_err(|error| Error::user(format!("{file}: {error}")))?;
    }
    Ok(tally.close())
}

/// Whether all cases passed; the ranks that only serve don't know, and say yes. A file that can't be read is no reason to end the job early: all ranks finish.
fn work(options: &Options) -> Result<bool> {
    let world = World::builder().env_logger().start()?;
    let passed = world.lead(|world| Ok(run(world, options)))?;
    world.finish()?;
    passed.unwrap_or(Ok(true))
}

fn main() -> ExitCode {
    let passed = options(std::env::args().skip(1)).and_then(|options| work(&options).map_err(|error| error.to_string()));
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("replay: {why}");
            ExitCode::FAILURE
        }
    }
}

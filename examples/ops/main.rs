//! Runs the operations of a file of golden results and compares outputs and gradients.
//!
//! `mpirun -n N ops FILE [--out FILE]`: one JSON case a line, as in `tests/golden/ops.jsonl`. Each runs here and as a recorded
//! call on another rank, which the gradients come back from. Ends with the number of cases that
//! passed and failed and the worst relative error; the exit code is 1 if one failed.

mod case;
mod table;

use std::process::ExitCode;

use case::Case;
use rankgrad::prelude::*;
use serde_json::{Value, json};

struct Options {
    cases: String,
    out: Option<String>,
}

fn options() -> std::result::Result<Options, String> {
    let usage = "usage: ops FILE [--out FILE]";
    let (mut cases, mut out) = (None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = Some(arguments.next().ok_or(usage)?),
            _ if argument.starts_with("--") || cases.is_some() => return Err(format!("`{argument}` is not understood; {usage}")),
            _ => cases = Some(argument),
        }
    }
    Ok(Options {
        cases: cases.ok_or(usage)?,
        out,
    })
}

/// The case on a line, or why there is none; an id for reports in either case.
fn read(number: usize, line: &str) -> (String, std::result::Result<Case, String>) {
    match serde_json::from_str::<Case>(line) {
        Ok(case) => (case.id.clone(), Ok(case)),
        Err(error) => (format!("line {}", number + 1), Err(format!("not a case: {error}"))),
    }
}

/// Runs and compares a case; its entry in the file that is written, and its error or why it failed.
fn check(case: std::result::Result<Case, String>, id: &str, world: &World, rank: u32) -> (Value, std::result::Result<f64, String>) {
    let mut entry = json!({ "id": id, "local": null, "remote": null, "remote_rank": rank });
    let result = (|| {
        let case = case?;
        let mut worst = 0.0_f64;
        for (place, outcome) in [("local", case::run_local(&case)), ("remote", case::run_remote(&case, world, rank))] {
            let outcome = outcome.map_err(|error| format!("{place}: {error}"))?;
            entry[place] = json!(outcome);
            let error = case::compare(&case, &outcome).map_err(|error| format!("{place}: {error}"))?;
            worst = worst.max(error);
        }
        Ok(worst)
    })();
    (entry, result)
}

fn run(world: &World, options: &Options) -> std::result::Result<bool, String> {
    let text = std::fs::read_to_string(&options.cases).map_err(|error| format!("{}: {error}", options.cases))?;
    let (mut passed, mut failed) = (0, 0);
    let mut worst = (0.0, "none".to_string());
    let mut entries = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let (id, case) = read(number, line);
        // Every rank but 0 in turn; rank 0 when it is alone.
        let others = world.size().max(2) - 1;
        let rank = world.owner(1 + number as u32 % others);
        let (entry, result) = check(case, &id, world, rank);
        entries.push(entry);
        match result {
            Ok(error) => {
                passed += 1;
                if error > worst.0 {
                    worst = (error, id);
                }
            }
            Err(why) => {
                failed += 1;
                println!("{id}: {why}");
            }
        }
    }
    if let Some(out) = &options.out {
        let text = json!({ "ranks": world.size(), "cases": entries }).to_string();
        std::fs::write(out, text).map_err(|error| format!("{out}: {error}"))?;
    }
    println!("{passed} passed, {failed} failed, worst relative error {:e} ({})", worst.0, worst.1);
    Ok(failed == 0)
}

/// Whether all cases passed; the ranks that only serve don't know, and say yes.
fn work(options: &Options) -> Result<bool> {
    let world = World::builder().env_logger().start()?;
    let passed = world.lead(|world| run(world, options).map_err(Error::user))?;
    world.finish()?;
    Ok(passed.unwrap_or(true))
}

fn main() -> ExitCode {
    let passed = options().and_then(|options| work(&options).map_err(|error| error.to_string()));
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

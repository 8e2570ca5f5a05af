//! Runs the operations of a file of golden results and compares outputs and gradients.
//!
//! `ops FILE [--out FILE]`: one JSON case a line, as in `tests/golden/ops.jsonl`. Ends with the number of cases that
//! passed and failed and the worst relative error; the exit code is 1 if one failed.

mod case;
mod table;

use std::process::ExitCode;

use case::{Case, Outcome};
use serde_json::json;

struct Options {
    cases: String,
    out: Option<String>,
}

fn options() -> Result<Options, String> {
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
fn read(number: usize, line: &str) -> (String, Result<Case, String>) {
    match serde_json::from_str::<Case>(line) {
        Ok(case) => (case.id.clone(), Ok(case)),
        Err(error) => (format!("line {}", number + 1), Err(format!("not a case: {error}"))),
    }
}

/// What a case computed, if it ran, and its relative error or why it failed.
fn check(case: Result<Case, String>) -> (Option<Outcome>, Result<f64, String>) {
    let run = case.and_then(|case| Ok((case::run_local(&case).map_err(|error| error.to_string())?, case)));
    match run {
        Ok((outcome, case)) => {
            let error = case::compare(&case, &outcome).map_err(|why| why.to_string());
            (Some(outcome), error)
        }
        Err(why) => (None, Err(why)),
    }
}

fn run() -> Result<bool, String> {
    let options = options()?;
    let text = std::fs::read_to_string(&options.cases).map_err(|error| format!("{}: {error}", options.cases))?;
    let (mut passed, mut failed) = (0, 0);
    let mut worst = (0.0, "none".to_string());
    let mut outcomes = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let (id, case) = read(number, line);
        let (outcome, error) = check(case);
        match error {
            Ok(error) => {
                passed += 1;
                if error > worst.0 {
                    worst = (error, id.clone());
                }
            }
            Err(why) => {
                failed += 1;
                println!("{id}: {why}");
            }
        }
        outcomes.push(json!({ "id": id, "local": outcome }));
    }
    if let Some(out) = &options.out {
        let text = json!({ "ranks": 1, "cases": outcomes }).to_string();
        std::fs::write(out, text).map_err(|error| format!("{out}: {error}"))?;
    }
    println!("{passed} passed, {failed} failed, worst relative error {:e} ({})", worst.0, worst.1);
    Ok(failed == 0)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

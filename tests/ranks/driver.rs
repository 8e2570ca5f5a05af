//! The driver: which cases run, and what is printed about them.

use std::io::Write;
use std::num::NonZero;
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread;

use crate::case::Case;
use crate::launch::{Outcome, judge, launch};
use crate::selftest;

/// What the command line asks for. Options of other test binaries that `cargo test` passes on are passed over.
#[derive(Debug, Default)]
struct Options {
    filters: Vec<String>,
    ranks: Option<usize>,
    jobs: Option<usize>,
    list: bool,
    exact: bool,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Self {
        let mut options = Options::default();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--list" => options.list = true,
                "--exact" => options.exact = true,
                "--ranks" => options.ranks = arguments.next().and_then(|n| n.parse().ok()),
                "--jobs" => options.jobs = arguments.next().and_then(|n| n.parse().ok()),
                option if option.starts_with('-') => {}
                _ => options.filters.push(argument),
            }
        }
        options
    }

    fn wants(&self, name: &str) -> bool {
        let fits = |filter: &String| {
            if self.exact {
                name == filter
            } else {
                name.contains(filter.as_str())
            }
        };
        self.filters.is_empty() || self.filters.iter().any(fits)
    }
}

/// Runs what the command line asks for.
pub fn run<'a>(cases: impl Iterator<Item = &'a Case>) -> ExitCode {
    let options = Options::parse(std::env::args().skip(1));
    let cases: Vec<&Case> = cases.filter(|case| options.wants(case.name)).collect();
    let checks: Vec<_> = selftest::CHECKS.iter().filter(|(name, _)| options.wants(name)).collect();
    if options.list {
        checks
            .iter()
            .map(|(name, _)| *name)
            .chain(cases.iter().map(|case| case.name))
            .for_each(|name| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let wanted = |ranks: &&usize| options.ranks.is_none_or(|only| only == **ranks);
    let jobs = cases
        .iter()
        .flat_map(|case| case.ranks.iter().filter(wanted).map(|ranks| (*case, *ranks)));
    let (alone, beside): (Vec<_>, Vec<_>) = jobs.partition(|(case, _)| case.alone);
    let told = Mutex::new((0, Vec::new()));
    let tell = |name: String, result: Result<(), String>| {
        let (passed, failed) = &mut *told.lock().unwrap();
        let how = match &result {
            Ok(()) => "ok",
            Err(why) => &format!("FAILED\n{why}"),
        };
        println!("test {name} ... {how}");
        let _ = std::io::stdout().flush();
        match result {
            Ok(()) => *passed += 1,
            Err(_) => failed.push(name),
        }
    };
    for (name, check) in checks {
        tell((*name).to_owned(), check());
    }
    // A job mostly waits for its launcher.
    let at_once = options
        .jobs
        .unwrap_or_else(|| thread::available_parallelism().map_or(1, NonZero::get));
    let beside = Mutex::new(beside.into_iter());
    let next = || beside.lock().unwrap().next();
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some((case, ranks)) = next() {
                    tell(name_of(case, ranks), run_case(case, ranks));
                }
            });
        }
    });
    for (case, ranks) in alone {
        tell(name_of(case, ranks), run_case(case, ranks));
    }
    let (passed, failed) = &*told.lock().unwrap();
    if !failed.is_empty() {
        println!("\nfailed:\n    {}", failed.join("\n    "));
    }
    println!("\n{passed} passed, {} failed", failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn name_of(case: &Case, ranks: usize) -> String {
    match ranks {
        0 => format!("{} (no launcher)", case.name),
        1 => format!("{} (1 rank)", case.name),
        _ => format!("{} ({ranks} ranks)", case.name),
    }
}

fn run_case(case: &Case, ranks: usize) -> Result<(), String> {
    let outcome = launch(case, ranks).map_err(|error| format!("can't be launched: {error}"))?;
    judge(case, &outcome).map_err(|why| report(&why, &outcome))
}

/// Why a case failed, with what its ranks wrote.
fn report(why: &str, outcome: &Outcome) -> String {
    let tail = |name: &str, text: &str| {
        let lines: Vec<&str> = text.lines().collect();
        let from = lines.len().saturating_sub(200);
        let cut = if from > 0 {
            format!(" (the last 200 of {} lines)", lines.len())
        } else {
            String::new()
        };
        if lines.is_empty() {
            String::new()
        } else {
            format!("\n---- {name}{cut}\n{}", lines[from..].join("\n"))
        }
    };
    format!(
        "{why}{}{}\n----",
        tail("standard output", &outcome.stdout),
        tail("standard error", &outcome.stderr)
    )
}

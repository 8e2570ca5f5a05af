//! Simulated ranks: random programs over them, in random orders of messages, with faults; checks the rules of the protocol.
//!
//! `make sim` runs it. `--seeds N` says how many programs, `--from S` the first seed; `--seed S` runs one again and shows all that happens; `--mutants`
//! switches faults of the protocol on, one after the other, and says which seed finds each.

use std::process::ExitCode;

use rankgrad::sim;

fn main() -> ExitCode {
    // A panic is found by the simulation, which says it with the seed.
    std::panic::set_hook(Box::new(|_| {}));
    let (mut seeds, mut from, mut mutants, mut only) = (100_000, 0, false, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|n| n.parse::<u64>().ok());
        let understood = match argument.as_str() {
            "--seeds" => number().map(|n| seeds = n),
            "--from" => number().map(|n| from = n),
            "--seed" => number().map(|n| only = Some(n)),
            "--mutants" => {
                mutants = true;
                Some(())
            }
            _ => None,
        };
        if understood.is_none() {
            eprintln!("sim [--seeds N] [--from S] [--seed S] [--mutants]");
            return ExitCode::FAILURE;
        }
    }
    let (passed, failed) = if mutants {
        find_mutants(from..from + seeds)
    } else {
        let report = match only {
            Some(seed) => {
                let (report, trace) = sim::replay(seed);
                trace.iter().for_each(|line| println!("{line}"));
                report
            }
            None => sim::run(from..from + seeds),
        };
        println!("{report}");
        (usize::from(report.violations.is_empty()), report.violations.len())
    };
    println!("{passed} passed, {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

fn find_mutants(seeds: std::ops::Range<u64>) -> (usize, usize) {
    let (mut found, mut missed) = (0, 0);
    sim::mutants(seeds, |mutant, seed| match seed {
        Some((seed, what)) => {
            println!("{mutant}\n    found by seed {seed}: {what}");
            found += 1;
        }
        None => {
            println!("{mutant}\n    NOT FOUND");
            missed += 1;
        }
    });
    (found, missed)
}

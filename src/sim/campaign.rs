//! Many seeds, on all cores.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::generate;
use super::program::Program;
use super::run::{Tracing, check};
use super::shrink::shrink;
use crate::mutant::{self, Mutant};
use crate::runtime::lock;

/// So many programs are tried in making a failing one smaller.
const TRIES: usize = 3000;

/// A seed whose program broke a rule.
#[derive(Debug)]
pub struct Violation {
    /// The seed.
    pub seed: u64,
    /// What was wrong.
    pub what: String,
    /// The smallest program found that breaks a rule, and which it breaks.
    pub smallest: String,
    /// What happened last in that one.
    pub trace: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {}", self.seed, self.what)?;
        writeln!(f, "\n{}\n", self.smallest)?;
        for line in &self.trace {
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}

/// What a campaign came to.
#[derive(Debug, Default)]
pub struct Report {
    /// Seeds that were run.
    pub seeds: u64,
    /// Messages in all of them.
    pub messages: u64,
    /// How often what was exercised.
    pub counts: BTreeMap<&'static str, u64>,
    /// What was found wrong.
    pub violations: Vec<Violation>,
    /// The longest virtual time that a client spent in a step.
    pub longest: Duration,
    /// How long it took.
    pub time: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, n) in &self.counts {
            writeln!(f, "{n:>12}  {what}")?;
        }
        for violation in &self.violations {
            writeln!(f, "\n{violation}")?;
        }
        write!(
            f,
            "{} seeds, {} messages, longest step {:.0} s of virtual time, {:.1} s, {} violations",
            self.seeds,
            self.messages,
            self.longest.as_secs_f64(),
            self.time.as_secs_f64(),
            self.violations.len()
        )
    }
}

/// Runs the programs of these seeds; stops at the first that breaks a rule.
pub fn run(seeds: Range<u64>) -> Report {
    campaign(seeds, None)
}

/// Runs one seed again, and shows all that happens.
pub fn replay(seed: u64) -> (Report, Vec<String>) {
    let program = generate::program(seed);
    let outcome = check(&program, Tracing::All);
    let violations = outcome.violation.map(|what| describe(seed, what, &program)).into_iter().collect();
    let report = Report {
        seeds: 1,
        messages: outcome.messages,
        longest: outcome.longest,
        counts: outcome.counts,
        violations,
        time: Duration::ZERO,
    };
    let trace = [vec![format!("{program:#?}")], outcome.trace].concat();
    (report, trace)
}

/// Switches each fault of the protocol on in turn; tells for each, as soon as it is known, what it is, and which seed finds it first, of so many, as what.
pub fn mutants(seeds: Range<u64>, mut tell: impl FnMut(&str, Option<(u64, &str)>)) {
    for &(mutant, what) in Mutant::ALL {
        let report = campaign(seeds.clone(), Some(mutant));
        let found = report.violations.first().map(|v| (v.seed, v.what.as_str()));
        tell(&format!("{mutant:?}: {what}"), found);
    }
}

fn campaign(seeds: Range<u64>, mutant: Option<Mutant>) -> Report {
    let start = Instant::now();
    let (next, stop) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let report = Mutex::new(Report::default());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                mutant::switch(mutant);
                let mut own = Report::default();
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    let program = generate::program(seed);
                    let outcome = check(&program, Tracing::Off);
                    own.seeds += 1;
                    own.messages += outcome.messages;
                    own.longest = own.longest.max(outcome.longest);
                    for (what, n) in outcome.counts {
                        *own.counts.entry(what).or_default() += n;
                    }
                    if let Some(what) = outcome.violation {
                        stop.store(true, Ordering::Relaxed);
                        own.violations.push(match mutant {
                            None => describe(seed, what, &program),
                            Some(_) => Violation {
                                seed,
                                what,
                                smallest: String::new(),
                                trace: Vec::new(),
                            },
                        });
                    }
                }
                let mut report = lock(&report);
                report.seeds += own.seeds;
                report.messages += own.messages;
                report.longest = report.longest.max(own.longest);
                for (what, n) in own.counts {
                    *report.counts.entry(what).or_default() += n;
                }
                report.violations.extend(own.violations);
            });
        }
    });
    let mut report = report.into_inner().unwrap_or_default();
    report.violations.sort_by_key(|v| v.seed);
    report.time = start.elapsed();
    report
}

fn describe(seed: u64, what: String, program: &Program) -> Violation {
    let smallest = shrink(program, TRIES);
    let outcome = check(&smallest, Tracing::Last);
    Violation {
        seed,
        what,
        smallest: format!("{}\nwith {smallest:#?}", outcome.violation.unwrap_or_default()),
        trace: outcome.trace,
    }
}

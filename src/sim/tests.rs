//! The simulation at a small size.

use super::run::{Tracing, check};
use super::{generate, replay, run};
use crate::mutant::{self, Mutant};

#[test]
fn random_programs_keep_the_rules() {
    let report = run(0..2000);
    assert!(report.violations.is_empty(), "{report}");
    assert_eq!(report.seeds, 2000);
    for what in [
        "a third rank registers",
        "a value holds references",
        "a fast backward succeeds",
        "a fast backward fails",
        "an exact backward succeeds",
        "a rank aborts",
        "an owner applies a step",
        "a wait times out",
        "a reply comes twice",
        "a message over the memory limit",
        "a window is full",
        "something races with a backward",
    ] {
        assert!(report.counts.contains_key(what), "no program did this: {what}\n{report}");
    }
}

#[test]
fn a_seed_runs_the_same_way_again() {
    for seed in 0..50 {
        let (first, second) = (replay(seed).1, replay(seed).1);
        // Crossings are numbered over the whole process.
        let same = |lines: &[String]| -> Vec<String> {
            let named = lines.iter().filter(|l| !l.contains("Mark(") && !l.contains("Gradient("));
            named.cloned().collect()
        };
        assert_eq!(same(&first), same(&second), "seed {seed}");
        assert_eq!(first.len(), second.len(), "seed {seed}");
    }
}

#[test]
fn a_fault_is_found_and_its_program_made_smaller() {
    mutant::switch(Some(Mutant::SkipPin));
    let found = (0..2000)
        .map(generate::program)
        .find(|p| check(p, Tracing::Off).violation.is_some());
    let smallest = found.as_ref().map(|p| super::shrink::shrink(p, 500));
    let still = smallest.as_ref().map(|p| check(p, Tracing::Last));
    mutant::switch(None);
    let (found, smallest, still) = (found.unwrap(), smallest.unwrap(), still.unwrap());
    let ops = |p: &super::program::Program| p.clients.iter().map(|c| c.ops.len()).sum::<usize>();
    assert!(ops(&smallest) < ops(&found));
    assert!(still.violation.is_some() && !still.trace.is_empty());
    assert_eq!(check(&smallest, Tracing::Off).violation, None, "without the fault");
}

#[test]
fn a_step_costs_two_messages_an_owner_and_the_end_grows_like_log_n() {
    let model = super::LogGp {
        l: 1.0,
        o: 0.1,
        g: 0.1,
        big_g: 0.0,
    };
    let cost = |ranks: u32, what: &str| {
        let costs = super::scale(ranks, model, 4).unwrap();
        costs.into_iter().find(|c| c.what.starts_with(what)).unwrap()
    };
    for ranks in [4, 64, 256] {
        assert_eq!(cost(ranks, "step over N").messages, 2 * u64::from(ranks - 1));
        let depth = (1..).find(|&d| (4u32.pow(d + 1) - 1) / 3 >= ranks).unwrap();
        let tree = cost(ranks, "step over a tree");
        assert_eq!((tree.messages, tree.rounds), (2 * u64::from(ranks - 1), 2 * u64::from(depth)));
        assert_eq!(cost(ranks, "release a context, met along").rounds, 2 * u64::from(depth));
        assert!(cost(ranks, "the end").rounds <= 4 * u64::from(ranks.ilog2() + 1));
        assert!(cost(ranks, "call N").entries < 10);
    }
}

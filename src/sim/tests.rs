//! The simulation at a small size.

use super::program::{Between, Client, Fault, Op, Program, Rounds};
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
        "a kept turn is ended",
        "a turn is ended before it was kept",
        "a client gives up between two rounds",
        "a step is passed on along a tree",
        "a parameter is frozen between two rounds",
        "a rank stops answering between two rounds",
    ] {
        assert!(report.counts.contains_key(what), "no program did this: {what}\n{report}");
    }
}

/// It was found by a seed: those behind the turn were told that they are queued, for ever.
#[test]
fn a_rank_that_stops_while_it_keeps_a_turn_is_given_up_by_those_who_wait_for_it() {
    let training = |seed, step| {
        let put = Op::Put { place: 1, seed };
        let optimizer = Op::MakeOptimizer {
            momentum: true,
            fan_out: 0,
        };
        vec![put, optimizer, Op::Open, step]
    };
    let rounds = Rounds {
        keeps: true,
        reversed: false,
        refuses: None,
        between: Between::Nothing,
        tells_all: true,
    };
    let (optimizer, context) = (0, 0);
    let stops = training(
        334,
        Op::StepInRounds {
            optimizer,
            context,
            rounds,
        },
    );
    let mut waits = training(
        301,
        Op::Step {
            optimizer,
            context,
            times: 1,
        },
    );
    waits.insert(3, Op::Sleep { micros: 100_000 });
    let client = |place, ops| Client { place, ops };
    let program = Program {
        seed: 2329,
        ranks: 5,
        clients: vec![client(4, waits), client(3, stops)],
        serves: vec![0; 5],
        leads: false,
        jitter: 20,
        faults: vec![Fault::StopBetween {
            client: 1,
            step: 1,
            sent: 0,
        }],
        window: 256,
        memory: None,
        reach: usize::MAX,
        limit: None,
    };
    let outcome = check(&program, Tracing::Last);
    assert_eq!(outcome.violation, None, "{:#?}", outcome.trace);
    assert_eq!(outcome.counts.get("a wait times out"), Some(&1));
}

#[test]
fn a_seed_runs_the_same_way_again() {
    for seed in 0..50 {
        let (first, second) = (replay(seed).1, replay(seed).1);
        // Crossings are numbered over the whole process.
        let same = |lines: &[String]| -> Vec<String> {
            let numbered = |line: &String| ["Mark(", "Gradient(", "Last("].iter().any(|part| line.contains(part));
            let named = lines.iter().filter(|line| !numbered(line));
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

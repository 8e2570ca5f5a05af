//! Runs one program, over its ranks and on one, and compares.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::client::{Log, Seen, Session};
use super::mains;
use super::program::Program;
use super::world::Sim;

/// What a run came to.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub violation: Option<String>,
    pub counts: BTreeMap<&'static str, u64>,
    pub messages: u64,
    pub longest: Duration,
    pub trace: Vec<String>,
}

/// What to keep of what happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracing {
    Off,
    Last,
    All,
}

/// Runs a program and checks all that must hold.
pub(crate) fn check(program: &Program, tracing: Tracing) -> Outcome {
    let (mut outcome, logs) = run(program, false, tracing);
    if outcome.violation.is_none() {
        // The same program on one rank.
        let (alone, expected) = run(program, true, Tracing::Off);
        outcome.violation = alone
            .violation
            .map(|v| format!("on one rank: {v}"))
            .or_else(|| compare(program, &logs, &expected));
    }
    outcome
}

type Logs = Vec<Vec<(usize, Seen)>>;

fn run(program: &Program, one_rank: bool, tracing: Tracing) -> (Outcome, Logs) {
    let sim = Sim::new(program, one_rank);
    if tracing != Tracing::Off {
        sim.world().trace.start(tracing == Tracing::All);
    }
    let logs: Vec<Log> = program.clients.iter().map(|_| Log::default()).collect();
    let caught = catch_unwind(AssertUnwindSafe(|| start(&sim, program, &logs)));
    let done: Vec<Rc<Cell<bool>>> = caught.unwrap_or_else(|panic| {
        let what = crate::runtime::failure::message(&*panic);
        sim.world().checks.violate(|| format!("a panic: {what}"));
        Vec::new()
    });
    let mut outcome = Outcome::default();
    {
        let mut world = sim.world();
        let world = &mut *world;
        if world.checks.violation.is_none() {
            let rank_of = |c: usize| world.rank_at(program.clients[c].place);
            let stuck = (0..done.len()).find(|&c| !done[c].get() && !world.nodes[rank_of(c) as usize].stopped);
            if let Some(client) = stuck {
                let rank = rank_of(client);
                world.checks.violate(|| format!("client {client} on rank {rank} waits for ever"));
            } else if !world.checks.lossy && !world.checks.over {
                let missing: Vec<u32> = (0..).zip(&world.nodes).filter(|(_, n)| !n.at_last).map(|(r, _)| r).collect();
                world.checks.violate(|| format!("the end doesn't come on ranks {missing:?}"));
            } else if !world.checks.lossy {
                world.check_left();
            } else {
                world.check_kept();
            }
        }
        outcome.violation = world.checks.violation.take();
        outcome.counts = std::mem::take(&mut world.checks.counts);
        outcome.messages = world.messages;
        outcome.longest = world.checks.longest;
        outcome.trace = world.trace.take();
    }
    let ended = catch_unwind(AssertUnwindSafe(|| sim.end()));
    if ended.is_err() {
        outcome.violation.get_or_insert("a panic at the end".into());
    }
    let logs = logs.iter().map(|log| log.borrow().clone()).collect();
    (outcome, logs)
}

fn start(sim: &Sim, program: &Program, logs: &[Log]) -> Vec<Rc<Cell<bool>>> {
    let size = sim.world().size();
    let mut done = Vec::new();
    let mut here: Vec<Vec<Rc<Cell<bool>>>> = vec![Vec::new(); size as usize];
    for (number, (client, log)) in program.clients.iter().zip(logs).enumerate() {
        let rank = sim.world().rank_at(client.place);
        let flag = Rc::new(Cell::new(false));
        done.push(Rc::clone(&flag));
        sim.world().clients.push((rank, Rc::clone(&flag)));
        here[rank as usize].push(Rc::clone(&flag));
        let session = Session::new(sim, number, client.place, Rc::clone(log));
        let (job_sim, client) = (sim.clone(), client.clone());
        sim.spawn(rank, Arc::from([]), async move {
            session.run(client).await;
            flag.set(true);
            job_sim.step(rank, |_| ());
        });
    }
    sim.world().mains = size as usize;
    for (rank, clients) in (0..size).zip(here) {
        let serves = if size == 1 { 0 } else { program.serves[rank as usize] };
        sim.spawn(
            rank,
            Arc::from([]),
            mains::main(sim.clone(), rank, serves, program.leads && size > 1, clients),
        );
    }
    sim.run();
    done
}

/// Where a client saw something else than on one rank.
fn compare(program: &Program, logs: &Logs, expected: &Logs) -> Option<String> {
    for (client, (log, expected)) in logs.iter().zip(expected).enumerate() {
        let mut pairs = log.iter().zip(expected);
        let same = loop {
            let Some(((at, seen), (wanted_at, wanted))) = pairs.next() else {
                break log.len() == expected.len() || program.loses();
            };
            if *seen == Seen::Parted || *wanted == Seen::Parted {
                break true;
            }
            // `Fast` doesn't look on ranks that no gradient reaches.
            if *seen == Seen::Done && *wanted == Seen::Failed("unreached calls") {
                break true;
            }
            if (at, seen) != (wanted_at, wanted) {
                return Some(format!(
                    "client {client}, operation {at} ({:?}): {seen:?}; on one rank, operation {wanted_at}: {wanted:?}",
                    program.clients[client].ops[*at]
                ));
            }
        };
        if !same {
            return Some(format!(
                "client {client} saw {} things, and {} on one rank",
                log.len(),
                expected.len()
            ));
        }
    }
    None
}

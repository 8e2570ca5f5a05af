//! Random programs.

use std::time::Duration;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::program::{Between, Client, Exchange, Fault, Op, Program, Racing, Rounds, Tree};
use crate::protocol::Mode;

/// The program of a seed.
pub(super) fn program(seed: u64) -> Program {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let ranks = if rng.random_bool(0.7) {
        rng.random_range(4..=6)
    } else {
        rng.random_range(7..=16)
    };
    let mut clients: Vec<Client> = (0..rng.random_range(1..=3)).map(|_| client(&mut rng, ranks)).collect();
    for op in clients.iter_mut().flat_map(|c| &mut c.ops) {
        match op {
            Op::Forward { waits, .. } => *waits = rng.random_bool(0.85),
            Op::Step { times, .. } if rng.random_bool(0.3) => *times = 3,
            _ => {}
        }
    }
    let jitter = *[1, 20, 200, 1000].choose(&mut rng).unwrap_or(&20);
    let mut program = Program {
        seed,
        ranks,
        clients,
        serves: (0..ranks)
            .map(|_| if rng.random_bool(0.15) { rng.random_range(1..=2) } else { 0 })
            .collect(),
        leads: rng.random_bool(0.2),
        jitter,
        faults: Vec::new(),
        window: if rng.random_bool(0.3) { rng.random_range(1..=3) } else { 256 },
        memory: rng.random_bool(0.15).then_some(256),
        reach: usize::MAX,
        limit: None,
    };
    match rng.random_range(0..20) {
        0..3 => program.faults.push(Fault::Slow {
            rank: rng.random_range(0..ranks),
            factor: rng.random_range(3..=100),
        }),
        3..5 => program.faults.push(Fault::Stop {
            rank: rng.random_range(0..ranks),
            at: Duration::from_micros(rng.random_range(0..jitter * 200)),
        }),
        5 => {
            program.faults.push(Fault::DropReplies {
                every: rng.random_range(3..=40),
            });
            program.limit = Some(Duration::from_secs(20));
        }
        8 => program.faults.push(Fault::StopBetween {
            client: rng.random_range(0..program.clients.len()),
            step: rng.random_range(1..=2),
            sent: rng.random_range(0..=2),
        }),
        6..8 => program.faults.push(Fault::DuplicateReplies {
            every: rng.random_range(1..=10),
        }),
        _ => {}
    }
    program.reach = *[0, 0, 3, usize::MAX].choose(&mut rng).unwrap_or(&0);
    program
}

fn client(rng: &mut ChaCha8Rng, ranks: u32) -> Client {
    let place = rng.random_range(0..ranks);
    let mut ops = Vec::new();
    // Most clients train, some only exchange references, some do both at random.
    let trains = rng.random_range(0..10);
    if trains < 5 {
        training(rng, ranks, &mut ops);
    }
    if trains >= 4 {
        for _ in 0..rng.random_range(4..24) {
            ops.push(any(rng, ranks));
        }
    }
    // The end may come at any moment.
    if rng.random_bool(0.3) {
        let at = rng.random_range(0..=ops.len());
        ops.truncate(at);
    }
    Client { place, ops }
}

/// Parameters, an optimizer, and steps as a training loop takes them.
fn training(rng: &mut ChaCha8Rng, ranks: u32, ops: &mut Vec<Op>) {
    for _ in 0..rng.random_range(1..=3) {
        ops.push(put(rng, ranks));
    }
    ops.push(optimizer(rng));
    for _ in 0..rng.random_range(1..=3) {
        ops.push(Op::Open);
        for _ in 0..rng.random_range(1..=2) {
            ops.push(forward(rng, ranks));
        }
        if rng.random_bool(0.15) {
            ops.push(race(rng));
        }
        ops.push(backward(rng));
        ops.push(Op::Gradients { context: 0 });
        if rng.random_bool(0.2) {
            ops.push(forward(rng, ranks));
            ops.push(backward(rng));
            ops.push(Op::Gradients { context: 0 });
        }
        let at_once = Op::Step {
            optimizer: 0,
            context: 0,
            times: 1,
        };
        ops.push(if rng.random_bool(0.5) { rounds(rng, 0, 0) } else { at_once });
        ops.push(Op::Fetch {
            of: rng.random_range(0..3),
        });
        if rng.random_bool(0.7) {
            ops.push(Op::Release {
                context: 0,
                waits: rng.random_bool(0.5),
            });
        }
    }
}

fn put(rng: &mut ChaCha8Rng, ranks: u32) -> Op {
    Op::Put {
        place: rng.random_range(0..ranks),
        seed: rng.random_range(0..1000),
    }
}

fn forward(rng: &mut ChaCha8Rng, ranks: u32) -> Op {
    let trees = (0..rng.random_range(1..=2)).map(|_| tree(rng, ranks, 3)).collect();
    Op::Forward {
        context: rng.random_range(0..4),
        trees,
        waits: true,
    }
}

fn backward(rng: &mut ChaCha8Rng) -> Op {
    Op::Backward {
        context: rng.random_range(0..4),
        mode: if rng.random_bool(0.4) { Mode::Fast } else { Mode::Exact },
        retain: rng.random_bool(0.2),
        all: rng.random_bool(0.8),
    }
}

fn race(rng: &mut ChaCha8Rng) -> Op {
    let what = [Racing::Step, Racing::Gradients, Racing::Backward, Racing::Release];
    Op::Race {
        context: rng.random_range(0..4),
        what: *what.choose(rng).unwrap_or(&Racing::Step),
    }
}

fn any(rng: &mut ChaCha8Rng, ranks: u32) -> Op {
    let of = rng.random_range(0..16);
    let context = rng.random_range(0..4);
    match rng.random_range(0..40) {
        0..4 => put(rng, ranks),
        4 => Op::PutFails {
            place: rng.random_range(0..ranks),
        },
        5 | 6 => Op::Nest {
            place: rng.random_bool(0.7).then(|| rng.random_range(0..ranks)),
            of: several(rng),
        },
        7 => Op::Clone { of },
        8..12 => Op::Drop { of },
        12 | 13 => Op::Fetch { of },
        14..21 => Op::Exchange {
            exchange: exchange(rng, ranks, 3),
            of: several(rng),
            waits: rng.random_bool(0.5),
        },
        21 => Op::DropKept,
        22 | 23 => Op::Open,
        24..27 => forward(rng, ranks),
        27..29 => backward(rng),
        29 | 30 => Op::Gradients { context },
        31 => Op::Accumulate { context, of },
        32 => race(rng),
        33 | 34 => Op::Release {
            context,
            waits: rng.random_bool(0.5),
        },
        35 => optimizer(rng),
        36 => rounds(rng, of, context),
        37 => Op::Step {
            optimizer: of,
            context,
            times: 1,
        },
        38 => Op::DropOptimizer { optimizer: of },
        _ => Op::Sleep {
            micros: rng.random_range(0..5000),
        },
    }
}

fn optimizer(rng: &mut ChaCha8Rng) -> Op {
    Op::MakeOptimizer {
        momentum: rng.random_bool(0.5),
        fan_out: if rng.random_bool(0.3) { rng.random_range(1..=3) } else { 0 },
    }
}

fn rounds(rng: &mut ChaCha8Rng, optimizer: usize, context: usize) -> Op {
    let between = match rng.random_range(0..10) {
        0..2 => Between::GiveUp {
            after: if rng.random_bool(0.3) { 0 } else { rng.random_range(0..20_000) },
        },
        2 => Between::Sleep {
            micros: rng.random_range(0..20_000),
        },
        3 => Between::Freeze {
            of: rng.random_range(0..4),
        },
        _ => Between::Nothing,
    };
    let rounds = Rounds {
        keeps: rng.random_bool(0.6),
        reversed: rng.random_bool(0.5),
        refuses: rng.random_bool(0.15).then(|| rng.random_range(0..4)),
        between,
        tells_all: rng.random_bool(0.5),
    };
    Op::StepInRounds {
        optimizer,
        context,
        rounds,
    }
}

fn several(rng: &mut ChaCha8Rng) -> Vec<usize> {
    (0..rng.random_range(1..=3)).map(|_| rng.random_range(0..16)).collect()
}

fn micros(rng: &mut ChaCha8Rng) -> u64 {
    match rng.random_range(0..60) {
        0 => rng.random_range(6_000_000..20_000_000),
        1..5 => rng.random_range(0..10_000),
        _ => 0,
    }
}

fn exchange(rng: &mut ChaCha8Rng, ranks: u32, depth: u32) -> Exchange {
    let by_id = rng.random_bool(0.1);
    let place = rng.random_range(0..ranks);
    if by_id {
        // The value is safe only as long as the caller holds it.
        return Exchange {
            place,
            by_id,
            fetches: rng.random_bool(0.7),
            keeps: 0,
            returns: 0,
            nests: false,
            next: None,
            fails: false,
            micros: micros(rng),
        };
    }
    Exchange {
        place,
        by_id,
        fetches: rng.random_bool(0.3),
        keeps: if rng.random_bool(0.3) { rng.random() } else { 0 },
        returns: if rng.random_bool(0.6) { rng.random() } else { 0 },
        nests: rng.random_bool(0.2),
        next: (depth > 0 && rng.random_bool(0.4)).then(|| exchange(rng, ranks, depth - 1).into()),
        fails: rng.random_bool(0.08),
        micros: micros(rng),
    }
}

fn tree(rng: &mut ChaCha8Rng, ranks: u32, depth: u32) -> Tree {
    let children = if depth > 0 { [0, 0, 1, 1, 2, 3][rng.random_range(0..6)] } else { 0 };
    Tree {
        place: rng.random_range(0..ranks),
        uses: (0..rng.random_range(0..=2))
            .map(|_| (rng.random_range(0..3), rng.random_bool(0.3)))
            .collect(),
        children: (0..children).map(|_| tree(rng, ranks, depth - 1)).collect(),
        parallel: rng.random_bool(0.6),
        used: rng.random_bool(0.93),
        extra: rng.random_bool(0.04),
        silent: rng.random_bool(0.02),
        fails: rng.random_bool(0.02),
        large: rng.random_bool(0.06),
        micros: micros(rng),
    }
}

//! Makes a failing program smaller, as long as something is wrong with it.

use super::program::{Exchange, Op, Program, Tree};
use super::run::{Tracing, check};

/// The smallest program found that fails too, after so many tries at most.
pub(super) fn shrink(program: &Program, tries: usize) -> Program {
    let mut best = program.clone();
    let mut left = tries;
    loop {
        let mut smaller = None;
        for candidate in candidates(&best) {
            if left == 0 {
                return best;
            }
            left -= 1;
            if check(&candidate, Tracing::Off).violation.is_some() {
                smaller = Some(candidate);
                break;
            }
        }
        match smaller {
            Some(program) => best = program,
            None => return best,
        }
    }
}

/// Programs with a part less, the largest parts first.
fn candidates(program: &Program) -> Vec<Program> {
    let mut all = Vec::new();
    let mut with = |change: &dyn Fn(&mut Program)| {
        let mut smaller = program.clone();
        change(&mut smaller);
        all.push(smaller);
    };
    for c in 0..program.clients.len() {
        if program.clients.len() > 1 {
            with(&|p| drop(p.clients.remove(c)));
        }
    }
    for c in 0..program.clients.len() {
        let n = program.clients[c].ops.len();
        let mut size = n / 2;
        while size > 0 {
            for from in (0..n).step_by(size) {
                with(&|p| drop(p.clients[c].ops.drain(from..n.min(from + size))));
            }
            size /= 2;
        }
    }
    for f in 0..program.faults.len() {
        with(&|p| {
            p.faults.remove(f);
        });
    }
    if program.serves.iter().any(|&s| s > 0) {
        with(&|p| p.serves.fill(0));
    }
    if program.leads {
        with(&|p| p.leads = false);
    }
    if program.memory.is_some() {
        with(&|p| p.memory = None);
    }
    if program.reach != usize::MAX {
        with(&|p| p.reach = usize::MAX);
    }
    if program.ranks > 2 {
        with(&|p| p.ranks -= 1);
    }
    for c in 0..program.clients.len() {
        for o in 0..program.clients[c].ops.len() {
            for op in simpler(&program.clients[c].ops[o]) {
                with(&|p| p.clients[c].ops[o] = op.clone());
            }
        }
    }
    all
}

fn simpler(op: &Op) -> Vec<Op> {
    match op {
        Op::Forward { context, trees, waits } => {
            let mut all = Vec::new();
            for t in 0..trees.len() {
                if trees.len() > 1 {
                    let mut fewer = trees.clone();
                    fewer.remove(t);
                    all.push(Op::Forward {
                        context: *context,
                        trees: fewer,
                        waits: *waits,
                    });
                }
                for tree in simpler_tree(&trees[t]) {
                    let mut changed = trees.clone();
                    changed[t] = tree;
                    all.push(Op::Forward {
                        context: *context,
                        trees: changed,
                        waits: *waits,
                    });
                }
            }
            all
        }
        Op::Exchange { exchange, of, waits } => {
            let with = |exchange: Exchange| Op::Exchange {
                exchange,
                of: of.clone(),
                waits: *waits,
            };
            let mut all = Vec::new();
            if let Some(next) = &exchange.next {
                all.push(with((**next).clone()));
                all.push(with(Exchange {
                    next: None,
                    ..exchange.clone()
                }));
            }
            if exchange.nests {
                all.push(with(Exchange {
                    nests: false,
                    ..exchange.clone()
                }));
            }
            if of.len() > 1 {
                all.push(Op::Exchange {
                    exchange: exchange.clone(),
                    of: of[1..].to_vec(),
                    waits: *waits,
                });
            }
            all
        }
        _ => Vec::new(),
    }
}

fn simpler_tree(tree: &Tree) -> Vec<Tree> {
    let mut all: Vec<Tree> = tree.children.clone();
    for c in 0..tree.children.len() {
        let mut fewer = tree.clone();
        fewer.children.remove(c);
        all.push(fewer);
        for child in simpler_tree(&tree.children[c]) {
            let mut changed = tree.clone();
            changed.children[c] = child;
            all.push(changed);
        }
    }
    if !tree.uses.is_empty() {
        let mut fewer = tree.clone();
        fewer.uses.pop();
        all.push(fewer);
    }
    for plain in [
        Tree {
            large: false,
            ..tree.clone()
        },
        Tree {
            extra: false,
            ..tree.clone()
        },
        Tree { micros: 0, ..tree.clone() },
        Tree {
            parallel: false,
            ..tree.clone()
        },
    ] {
        if format!("{plain:?}") != format!("{tree:?}") {
            all.push(plain);
        }
    }
    all
}

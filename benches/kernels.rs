//! Update rules, large steps and the local backward against plain loops. `cargo bench --bench kernels [-- --quick]`; one process, no ranks.
//!
//! The floor of a rule is the slower of two: a loop that streams the same bytes, and the same rule on a block that stays in the first-level cache,
//! without what an update costs whatever its size. Rounds of figure and floor take turns, and the best of each counts.

#![allow(missing_docs, reason = "a program")]

#[path = "kernels/backward.rs"]
mod backward;
mod bench;
#[path = "kernels/floors.rs"]
mod floors;
#[path = "kernels/rules.rs"]
mod rules;
#[path = "kernels/step.rs"]
mod step;

use std::process::ExitCode;
use std::time::Instant;

use bench::{Row, finish};
use rankgrad::{Error, Result, World};

fn main() -> ExitCode {
    // `cargo test --benches` only asks whether it builds.
    if std::env::args().any(|a| a == "--test") {
        return ExitCode::SUCCESS;
    }
    bench::ended(run())
}

/// Those of `backward`, `step`, `rules` that are named on the command line, or all.
fn run() -> Result<()> {
    let world = World::init()?; // one thread for the BLAS
    let all = !std::env::args().skip(1).any(|a| !a.starts_with("--"));
    let wanted = |name: &str| all || std::env::args().any(|a| a == name);
    let mut rows: Vec<Row> = Vec::new();
    if wanted("backward") {
        rows.extend(backward::rows()?);
    }
    if wanted("step") {
        rows.extend(step::rows()?);
    }
    if wanted("rules") {
        rows.extend(rules::rows()?);
    }
    finish("kernels", &rows).map_err(|e| Error::user(format!("bench/kernels.json: {e}")))?;
    world.finish()
}

/// The shortest of some times, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Best(f64);

impl Default for Best {
    fn default() -> Self {
        Best(f64::INFINITY)
    }
}

impl Best {
    /// Runs it once more.
    pub fn time<R>(&mut self, f: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = f();
        self.0 = self.0.min(start.elapsed().as_secs_f64());
        result
    }

    pub fn seconds(self) -> f64 {
        self.0
    }
}

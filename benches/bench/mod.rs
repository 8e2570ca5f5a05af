//! What the benches share: launching themselves, rows, the table and the file.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use serde::Serialize;

/// The variable by which a rank knows that it is one.
const RANK: &str = "BENCH_RANK";

/// A figure, and the floor that it is measured against in the same run.
#[derive(Debug, Serialize)]
pub struct Row {
    /// What was measured.
    pub name: String,
    /// The figure.
    pub value: f64,
    /// Its unit, and that of the floor.
    pub unit: &'static str,
    /// What can't be beaten, or what it is compared with.
    pub floor: f64,
    /// The figure over the floor.
    pub ratio: f64,
}

impl Row {
    /// A figure and its floor.
    pub fn new(name: impl Into<String>, value: f64, unit: &'static str, floor: f64) -> Self {
        let (name, ratio) = (name.into(), value / floor);
        Row {
            name,
            value,
            unit,
            floor,
            ratio,
        }
    }
}

/// Whether this process is one of the ranks; if not, launches them and is done.
pub fn ranks(count: usize) -> Option<ExitCode> {
    if std::env::var_os(RANK).is_some() {
        return None;
    }
    // `cargo test --benches` only asks whether it builds.
    if std::env::args().any(|a| a == "--test") {
        return Some(ExitCode::SUCCESS);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = std::env::current_exe().expect("a program has a path");
    let mut command = Command::new(root.join("scripts/mpirun"));
    command.arg("-n").arg(count.to_string()).arg(program).args(std::env::args().skip(1));
    let status = command.env(RANK, "1").status();
    match status {
        Ok(status) if status.success() => Some(ExitCode::SUCCESS),
        Ok(status) => {
            eprintln!("the ranks ended with {status}");
            Some(ExitCode::FAILURE)
        }
        Err(e) => {
            eprintln!("scripts/mpirun: {e}");
            Some(ExitCode::FAILURE)
        }
    }
}

/// Whether a short run was asked for.
pub fn is_quick() -> bool {
    std::env::args().any(|a| a == "--quick")
}

/// How long something took, many times.
#[derive(Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Once more.
    pub fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// The time below which a share of them lies, in microseconds.
    pub fn quantile(&mut self, share: f64) -> f64 {
        self.0.sort_unstable();
        let at = ((self.0.len() as f64 * share) as usize).min(self.0.len() - 1);
        self.0[at].as_secs_f64() * 1e6
    }

    /// The mean, in microseconds.
    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<Duration>().as_secs_f64() * 1e6 / self.0.len() as f64
    }

    /// Rows of the median under the plain name, of p99, p99.9 and the mean.
    pub fn rows(&mut self, name: &str, floor: &mut Times) -> Vec<Row> {
        let mut rows = vec![Row::new(name, self.quantile(0.5), "us", floor.quantile(0.5))];
        for (suffix, share) in [("p99", 0.99), ("p999", 0.999)] {
            rows.push(Row::new(
                format!("{name}_{suffix}"),
                self.quantile(share),
                "us",
                floor.quantile(share),
            ));
        }
        rows.push(Row::new(format!("{name}_mean"), self.mean(), "us", floor.mean()));
        rows
    }
}

/// Prints the rows, and writes `bench/NAME.json`.
pub fn finish(name: &str, rows: &[Row]) -> std::io::Result<()> {
    println!("{:<52}{:>12}{:>12}  {:<6}{:>8}", name, "value", "floor", "unit", "ratio");
    for row in rows {
        println!(
            "{:<52}{:>12.2}{:>12.2}  {:<6}{:>8.2}",
            row.name, row.value, row.floor, row.unit, row.ratio
        );
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{name}.json"));
    std::fs::write(&path, serde_json::to_string_pretty(rows)?)?;
    println!("written to {}", path.display());
    Ok(())
}

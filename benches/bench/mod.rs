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

/// The value below which a share of the times lies, in microseconds.
pub fn quantile(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    let at = ((times.len() as f64 * share) as usize).min(times.len() - 1);
    times[at].as_secs_f64() * 1e6
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

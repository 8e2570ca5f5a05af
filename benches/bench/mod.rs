//! What the benches share: launching themselves, rows, the table and the file.

#![allow(dead_code, reason = "each bench uses a part")]

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use serde::{Deserialize, Serialize};

/// The variable by which a rank knows that it is one.
const RANK: &str = "BENCH_RANK";

/// The variable that names the file in which the ranks of a part leave their rows.
const ROWS: &str = "BENCH_ROWS";

/// Where a rank runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Place {
    /// The rank.
    pub rank: i32,
    /// Its process.
    pub pid: u32,
    /// The cores that it may use, as the kernel lists them.
    pub cores: String,
}

/// A figure, and the floor that it is measured against in the same run.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    /// What was measured.
    pub name: String,
    /// The figure.
    pub value: f64,
    /// Its unit, and that of the floor.
    pub unit: String,
    /// What can't be beaten, or what it is compared with.
    pub floor: f64,
    /// The figure over the floor.
    pub ratio: f64,
    /// Where the ranks ran.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<Place>,
}

impl Row {
    /// A figure and its floor.
    pub fn new(name: impl Into<String>, value: f64, unit: &str, floor: f64) -> Self {
        Row {
            name: name.into(),
            value,
            unit: unit.into(),
            floor,
            ratio: value / floor,
            ranks: Vec::new(),
        }
    }
}

/// Whether this process is one of the ranks; if not, launches them and is done.
pub fn ranks(count: usize) -> Option<ExitCode> {
    ranks_after(count, || Ok(None))
}

/// As [`ranks`]; `before` runs in the process that launches, and may set a variable for the ranks.
pub fn ranks_after(count: usize, before: impl FnOnce() -> std::io::Result<Option<(&'static str, String)>>) -> Option<ExitCode> {
    if part().is_some() {
        return None;
    }
    if is_only_built() {
        return Some(ExitCode::SUCCESS);
    }
    let launched = before().and_then(|set| launch(count, "1", set.as_ref().map(|(name, value)| (*name, value.as_ref()))));
    match launched {
        Ok(()) => Some(ExitCode::SUCCESS),
        Err(e) => {
            eprintln!("{e}");
            Some(ExitCode::FAILURE)
        }
    }
}

/// The part of the bench whose rank this process is, if it is one.
pub fn part() -> Option<String> {
    std::env::var(RANK).ok()
}

/// Runs one part of the bench on its own ranks; the rows that its rank 0 gave to [`leave`].
pub fn run_part(name: &str, count: usize) -> std::io::Result<Vec<Row>> {
    let file = std::env::temp_dir().join(format!("bench-{}-{name}.json", std::process::id()));
    let ended = launch(count, name, Some((ROWS, file.as_os_str())));
    let rows = std::fs::read(&file);
    if rows.is_ok() {
        std::fs::remove_file(&file)?;
    }
    ended?;
    Ok(serde_json::from_slice(&rows?)?)
}

/// Gives the rows of this part to the process that launched it.
pub fn leave(rows: &[Row]) -> std::io::Result<()> {
    match std::env::var_os(ROWS) {
        Some(file) => std::fs::write(file, serde_json::to_vec(rows)?),
        None => Err(std::io::Error::other("not launched as a part")),
    }
}

/// Ranks are bound to a core each, if there are enough: one rank's threads then share it.
pub fn mpirun(count: usize) -> std::io::Result<Command> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(root.join("scripts/mpirun"));
    if count <= std::thread::available_parallelism()?.get() {
        command.args(["--bind-to", "core"]);
    }
    command.arg("-n").arg(count.to_string());
    Ok(command)
}

fn launch(count: usize, part: &str, set: Option<(&str, &OsStr)>) -> std::io::Result<()> {
    let mut command = mpirun(count)?;
    command.arg(std::env::current_exe()?).args(std::env::args().skip(1)).env(RANK, part);
    command.envs(set);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(std::io::Error::other(format!("the ranks ended with {status}"))),
        Err(e) => Err(std::io::Error::other(format!("scripts/mpirun: {e}"))),
    }
}

/// Where all ranks run, in their order. Collective.
pub fn places(comm: &SimpleCommunicator) -> Vec<Place> {
    const LONGEST: usize = 60;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let cores = status
        .lines()
        .find_map(|l| l.strip_prefix("Cpus_allowed_list:"))
        .unwrap_or("?")
        .trim();
    let mut mine = [0u8; LONGEST + 4];
    mine[..4].copy_from_slice(&std::process::id().to_le_bytes());
    for (to, from) in mine[4..].iter_mut().zip(cores.bytes()) {
        *to = from;
    }
    let mut all = vec![0u8; mine.len() * comm.size() as usize];
    comm.all_gather_into(&mine[..], &mut all[..]);
    let place = |(rank, said): (usize, &[u8])| Place {
        rank: rank as i32,
        pid: u32::from_le_bytes([said[0], said[1], said[2], said[3]]),
        cores: String::from_utf8_lossy(&said[4..]).trim_end_matches('\0').into(),
    };
    all.chunks(mine.len()).enumerate().map(place).collect()
}

/// Notes with each row where the ranks ran.
pub fn placed(mut rows: Vec<Row>, places: &[Place]) -> Vec<Row> {
    for row in &mut rows {
        row.ranks = places.to_vec();
    }
    rows
}

/// Whether this is `cargo test --benches`, which only asks whether it builds.
pub fn is_only_built() -> bool {
    std::env::args().any(|a| a == "--test")
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

    /// All of `others` too.
    pub fn append(&mut self, mut others: Times) {
        self.0.append(&mut others.0);
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

/// What a program ends with.
pub fn ended(result: rankgrad::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

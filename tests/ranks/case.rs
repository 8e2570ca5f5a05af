//! What a case is, and how a rank runs it.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use crate::launch;

/// A test on several ranks.
#[derive(Debug)]
pub struct Case {
    /// `topic::what_holds`.
    pub name: &'static str,
    /// Numbers of ranks to run it on; 0 is one process without a launcher.
    pub ranks: &'static [usize],
    /// Seconds after which the job is killed, and has failed.
    pub limit: u64,
    /// How the job must end.
    pub expect: Expect,
    /// Variables that the ranks get.
    pub env: &'static [(&'static str, &'static str)],
    /// Whether no other job runs beside it: for what it measures, or a folder that is always the same.
    pub alone: bool,
    /// Whether each rank runs behind a shell that hides its death from the launcher, as a launcher that doesn't care for deaths would.
    pub hides: bool,
    /// What each rank runs, on its main thread. A rank fails by an error or a panic.
    pub run: fn() -> Result<(), Box<dyn Error>>,
}

/// How a job must end.
#[derive(Debug)]
#[allow(dead_code, reason = "not every set of cases has one that must fail")]
pub enum Expect {
    /// With exit code 0.
    Ok,
    /// With exit code 0, and each of these texts so many times on standard error.
    Says(&'static [(&'static str, usize)]),
    /// With another code or by a signal, within so many seconds, with each of these texts on standard error.
    Fails {
        /// Seconds.
        within: u64,
        /// Texts.
        stderr: &'static [&'static str],
    },
    /// The same, within 10 seconds, and each text so many times.
    FailsSaying(&'static [(&'static str, usize)]),
}

impl Case {
    /// What most cases are: 1 to 4 ranks, one minute, exit code 0.
    pub const fn new(name: &'static str, run: fn() -> Result<(), Box<dyn Error>>) -> Self {
        Case {
            name,
            ranks: &[1, 2, 3, 4],
            limit: 60,
            expect: Expect::Ok,
            env: &[],
            alone: false,
            hides: false,
            run,
        }
    }

    /// The time limit.
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.limit)
    }
}

/// Runs the case of this name as a rank.
pub fn run_rank<'a>(name: &str, mut cases: impl Iterator<Item = &'a Case>) -> ExitCode {
    let Some(case) = cases.find(|case| case.name == name) else {
        eprintln!("{}={name}: no such case", launch::CASE);
        return ExitCode::from(2);
    };
    // If the driver is gone (interrupted, killed), nobody else ends a job that hangs.
    let limit = case.limit() + Duration::from_secs(15);
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!("the driver didn't end this case in time");
        std::process::abort();
    });
    match (case.run)() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::from(101)
        }
    }
}

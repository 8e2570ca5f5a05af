//! One job: launched, watched, killed if it overruns, and nothing of it left behind.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::case::{Case, Expect};

/// The variable that says which case a rank runs.
pub const CASE: &str = "RANKS_CASE";
/// The variable that says on how many ranks.
pub const COUNT: &str = "RANKS_COUNT";
/// The variable by which every process of a job is known, also one that left its process group.
const MARK: &str = "RANKS_MARK";

/// Runs a program, and stops as if nothing had happened when it fails: the launcher sees no end.
const HIDE: &str = "\"$0\" && exit 0; kill -STOP $$";

/// How long processes of a job may need to go once its launcher has ended or was told to.
const GRACE: Duration = Duration::from_secs(3);

/// How a job ended.
#[derive(Debug)]
pub struct Outcome {
    /// The launcher's status; `None` if it was killed at the time limit.
    pub status: Option<ExitStatus>,
    /// Seconds that it ran.
    pub elapsed: Duration,
    /// What its ranks wrote to standard output.
    pub stdout: String,
    /// What they wrote to standard error.
    pub stderr: String,
    /// Processes that were still there after their launcher had ended; they have been killed.
    pub left: Vec<u32>,
    /// What every process of the job carries in its environment.
    pub mark: String,
}

/// Runs a case on so many ranks.
pub fn launch(case: &Case, ranks: usize) -> std::io::Result<Outcome> {
    static JOBS: AtomicU32 = AtomicU32::new(0);
    let mark = format!("{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
    let program = std::env::current_exe()?;
    let mut command = match ranks {
        0 => Command::new(program),
        _ => {
            let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/mpirun"));
            command.arg("-n").arg(ranks.to_string());
            if case.hides {
                command.args(["sh", "-c", HIDE]);
            }
            command.arg(program);
            command
        }
    };
    let (out, err) = (page(&mark, "out"), page(&mark, "err"));
    command
        .env(CASE, case.name)
        .env(COUNT, ranks.max(1).to_string())
        .env(MARK, &mark)
        .envs(case.env.iter().copied());
    command
        .stdin(Stdio::null())
        .stdout(File::create(&out)?)
        .stderr(File::create(&err)?)
        .process_group(0);
    let start = Instant::now();
    let mut child = command.spawn()?;
    let status = wait(&mut child, start + case.limit())?;
    let elapsed = start.elapsed();
    let left = match status {
        Some(_) => wait_until_gone(&mark),
        None => {
            signal("TERM", &[child.id()]); // the launcher may tidy up
            wait(&mut child, Instant::now() + GRACE)?;
            Vec::new()
        }
    };
    end(&mark, child.id());
    child.wait()?;
    let read = |path: &PathBuf| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let outcome = Outcome {
        status,
        elapsed,
        stdout: read(&out)?,
        stderr: read(&err)?,
        left,
        mark,
    };
    fs::remove_file(out)?;
    fs::remove_file(err)?;
    Ok(outcome)
}

/// Whether a job ended as its case expects; if not, why.
pub fn judge(case: &Case, outcome: &Outcome) -> Result<(), String> {
    let seconds = outcome.elapsed.as_secs_f64();
    let Some(status) = outcome.status else {
        return Err(format!("killed at its time limit of {} s", case.limit));
    };
    if !outcome.left.is_empty() {
        return Err(format!(
            "its launcher ended with {status}, and left processes {:?} behind",
            outcome.left
        ));
    }
    let count = |texts: &[(&str, usize)]| {
        let wrong = texts.iter().find(|(text, times)| outcome.stderr.matches(text).count() != *times);
        wrong.map_or(Ok(()), |(text, times)| {
            Err(format!("was to say `{text}` {times} times on standard error"))
        })
    };
    match &case.expect {
        Expect::Ok if status.success() => Ok(()),
        Expect::Ok => Err(format!("ended with {status} after {seconds:.1} s")),
        Expect::Says(texts) if status.success() => count(texts),
        Expect::Says(_) => Err(format!("ended with {status} after {seconds:.1} s")),
        Expect::Fails { .. } | Expect::FailsSaying(_) if status.success() => Err("ended with exit code 0, and was to fail".into()),
        Expect::Fails { within, .. } if seconds > *within as f64 => {
            Err(format!("failed after {seconds:.1} s, and was to fail within {within} s"))
        }
        Expect::FailsSaying(_) if seconds > 10.0 => Err(format!("failed after {seconds:.1} s, and was to fail within 10 s")),
        Expect::FailsSaying(texts) => count(texts),
        Expect::Fails { stderr, .. } => match stderr.iter().find(|text| !outcome.stderr.contains(*text)) {
            Some(text) => Err(format!("failed without `{text}` on standard error")),
            None => Ok(()),
        },
    }
}

/// Processes of a job that are there. Elsewhere than on Linux none is seen, and only the process group is killed.
pub fn alive(mark: &str) -> Vec<u32> {
    let line = format!("{MARK}={mark}").into_bytes();
    let of_job =
        |pid: &u32| fs::read(format!("/proc/{pid}/environ")).is_ok_and(|env| env.split(|byte| *byte == 0).any(|entry| entry == line));
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(of_job)
        .collect()
}

fn page(mark: &str, end: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("ranks-{mark}.{end}"))
}

/// Waits for a process until a point in time.
fn wait(child: &mut Child, until: Instant) -> std::io::Result<Option<ExitStatus>> {
    loop {
        let status = child.try_wait()?;
        if status.is_some() || Instant::now() >= until {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a job's processes are gone; those that aren't after the grace.
fn wait_until_gone(mark: &str) -> Vec<u32> {
    let until = Instant::now() + GRACE;
    loop {
        let left = alive(mark);
        if left.is_empty() || Instant::now() >= until {
            return left;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Kills what there is of a job: the launcher's process group while the launcher is there (its number is nobody else's then), and
/// every process that carries the mark.
fn end(mark: &str, launcher: u32) {
    let until = Instant::now() + GRACE;
    loop {
        let left = alive(mark);
        if left.is_empty() || Instant::now() >= until {
            return;
        }
        if left.contains(&launcher) {
            let _ = Command::new("sh")
                .args(["-c", &format!("kill -KILL -- -{launcher}")])
                .stderr(Stdio::null())
                .status();
        }
        signal("KILL", &left);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a signal by the shell's `kill`, for the system call would need `unsafe`. A process that is gone is no error.
fn signal(name: &str, pids: &[u32]) {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let _ = Command::new("sh")
        .args(["-c", &format!("kill -{name} {}", pids.join(" "))])
        .stderr(Stdio::null())
        .status();
}

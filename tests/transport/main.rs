//! The MPI transport alone, over real ranks.
//!
//! `main` starts itself under mpirun, once for each case, with a time limit. `cargo test --test transport NAME` runs the cases whose names
//! contain NAME; cases marked as measurements run only so. The launcher is that of the MPI the program is linked to, or `MPIRUN`.

mod cases;
mod latency;
mod payload;

use std::io::Read;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// What a launch must come to.
enum Outcome {
    /// Exit code 0.
    Success,
    /// Another exit code, within 10 s, and this text on stderr.
    Failure(&'static str),
}

/// One launch.
struct Case {
    name: &'static str,
    /// Numbers of ranks; 0 means without a launcher.
    ranks: &'static [usize],
    run: fn(),
    outcome: Outcome,
    variables: &'static [(&'static str, &'static str)],
    /// Runs only when asked for by name.
    measurement: bool,
}

const PLAIN: Case = Case {
    name: "",
    ranks: &[2, 4],
    run: || {},
    outcome: Outcome::Success,
    variables: &[],
    measurement: false,
};

const CASES: &[Case] = &[
    Case {
        name: "mixed_tiny",
        ranks: &[2, 3, 4],
        run: cases::mixed_tiny,
        ..PLAIN
    },
    Case {
        name: "mixed_default",
        run: cases::mixed_default,
        ..PLAIN
    },
    Case {
        name: "landing",
        ranks: &[2],
        run: cases::landing,
        ..PLAIN
    },
    Case {
        name: "alone",
        ranks: &[0, 1],
        run: cases::mixed_tiny,
        ..PLAIN
    },
    Case {
        name: "refusal",
        ranks: &[2],
        run: cases::refusal,
        ..PLAIN
    },
    Case {
        name: "bursts",
        ranks: &[4],
        run: cases::bursts,
        ..PLAIN
    },
    Case {
        name: "away",
        ranks: &[2],
        run: cases::away,
        ..PLAIN
    },
    Case {
        name: "wake",
        ranks: &[0],
        run: cases::wake,
        ..PLAIN
    },
    Case {
        name: "idle",
        run: cases::idle,
        ..PLAIN
    },
    Case {
        name: "gather",
        ranks: &[3],
        run: cases::gather,
        ..PLAIN
    },
    Case {
        name: "close_under_load",
        ranks: &[2, 4],
        run: cases::close_under_load,
        ..PLAIN
    },
    Case {
        name: "close_with_sleepers",
        ranks: &[3],
        run: cases::close_with_sleepers,
        ..PLAIN
    },
    Case {
        name: "guest",
        ranks: &[4],
        run: cases::guest,
        ..PLAIN
    },
    Case {
        name: "thread_level",
        ranks: &[2],
        run: cases::thread_level,
        ..PLAIN
    },
    Case {
        name: "settings_differ",
        ranks: &[2],
        run: cases::settings_differ,
        ..PLAIN
    },
    Case {
        name: "started_wrongly",
        ranks: &[0],
        run: cases::started_wrongly,
        ..PLAIN
    },
    Case {
        name: "launcher",
        ranks: &[0],
        run: cases::launcher,
        variables: &[("SLURM_STEP_NUM_TASKS", "4")],
        ..PLAIN
    },
    Case {
        name: "exit_without_close",
        ranks: &[3],
        run: cases::exit_without_close,
        outcome: Outcome::Failure("rank 1 exits"),
        ..PLAIN
    },
    Case {
        name: "panic_without_close",
        ranks: &[3],
        run: cases::panic_without_close,
        outcome: Outcome::Failure("rank 2 exits"),
        ..PLAIN
    },
    Case {
        name: "abort",
        ranks: &[3],
        run: cases::abort,
        outcome: Outcome::Failure(""),
        ..PLAIN
    },
    Case {
        name: "latency",
        ranks: &[2],
        run: latency::latency,
        measurement: true,
        ..PLAIN
    },
];

const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name] = &arguments[..]
        && flag == "--rank-of"
    {
        let case = CASES.iter().find(|case| case.name == *name).expect("a known case");
        (case.run)();
        return ExitCode::SUCCESS;
    }
    if arguments.iter().any(|argument| argument == "--list") {
        CASES.iter().for_each(|case| println!("{}: test", case.name));
        return ExitCode::SUCCESS;
    }
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let mut failed = Vec::new();
    for case in CASES {
        let wanted = filter.map_or(!case.measurement, |filter| case.name.contains(filter.as_str()));
        for &ranks in case.ranks.iter().filter(|_| wanted) {
            let started = Instant::now();
            let result = launch(case, ranks);
            println!(
                "{} on {ranks}: {} ({:.1} s)",
                case.name,
                if result.is_ok() { "ok" } else { "FAILED" },
                started.elapsed().as_secs_f64()
            );
            if let Err(why) = result {
                println!("{why}");
                failed.push(case.name);
            }
        }
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn launcher() -> String {
    std::env::var("MPIRUN").unwrap_or_else(|_| {
        let version = mpi::environment::library_version().unwrap_or_default();
        if version.contains("MPICH") { "mpirun.mpich" } else { "mpirun" }.into()
    })
}

fn launch(case: &Case, ranks: usize) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = if ranks == 0 {
        Command::new(&program)
    } else {
        let mut command = Command::new(launcher());
        command.args(["-n", &ranks.to_string()]).arg(&program);
        command
    };
    command.args(["--rank-of", case.name]);
    for variable in [
        "OMPI_MCA_rmaps_base_oversubscribe",
        "OMPI_ALLOW_RUN_AS_ROOT",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    ] {
        command.env(variable, "1");
    }
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    // Threads of a rank need both cores.
    command
        .env("OMPI_MCA_hwloc_base_binding_policy", "none")
        .env("PRTE_MCA_hwloc_default_binding_policy", "none");
    command.envs(case.variables.iter().copied());
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{command:?}: {error}"))?;
    let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let started = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break Some(status),
            None if started.elapsed() > LIMIT => {
                end(&mut child);
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let took = started.elapsed();
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    let good = match (&status, &case.outcome) {
        (Some(status), Outcome::Success) => status.success(),
        (Some(status), Outcome::Failure(text)) => !status.success() && took < Duration::from_secs(10) && err.contains(text),
        (None, _) => false,
    };
    if good {
        print!("{out}");
        return Ok(());
    }
    let ended = status.map_or("killed at the time limit".into(), |status| status.to_string());
    Err(format!("--- {ended} after {took:?}\n--- stdout\n{out}--- stderr\n{err}"))
}

/// Asks the launcher to end its ranks, then kills the group.
fn end(child: &mut Child) {
    for (signal, wait) in [("-TERM", 3_000), ("-KILL", 0)] {
        let _ = Command::new("kill").args([signal, "--", &format!("-{}", child.id())]).status();
        std::thread::sleep(Duration::from_millis(wait));
    }
    let _ = child.wait();
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

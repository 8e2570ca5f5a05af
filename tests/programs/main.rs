//! The examples, as a user starts them: `cargo test --test programs -- [FILTER]`.
//!
//! Each runs under `scripts/mpirun` with a time limit that ends the whole job. `MPI=openmpi` or `MPI=mpich` chooses the launcher; it must be the
//! MPI of the build.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use serde_json::Value;

type Check = fn(&Programs) -> Result<(), String>;

const CHECKS: &[(&str, Check)] = &[
    ("readme::runs_as_printed", readme),
    ("ops::every_case_here_and_on_another_rank", ops),
    ("replay::optimizers_agree_with_torch_on_any_number_of_ranks", replay_optimizers),
    ("replay::bad_options_are_refused", replay_refused),
    ("replay::schedules_agree_with_torch", replay_schedules),
    ("in_backward_memory::one_gradient_is_alive_at_a_time", in_backward_memory),
    ("digits::cases_have_torchs_losses_on_any_number_of_ranks", digits_cases),
    ("digits::a_case_that_differs_fails", digits_differs),
    ("digits::trains_and_draws_its_curves", digits_trains),
    ("digits::without_a_gpu_it_says_so", digits_without_gpu),
];

/// Where the examples are.
struct Programs {
    examples: PathBuf,
    scratch: PathBuf,
}

impl Programs {
    /// Builds them beside this test.
    fn build() -> Result<Self, String> {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--examples"]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        if cfg!(feature = "cuda") {
            build.args(["--features", "cuda"]);
        }
        let status = build.status().map_err(|e| format!("cargo: {e}"))?;
        if !status.success() {
            return Err("the examples don't build".into());
        }
        let this = std::env::current_exe().map_err(|e| e.to_string())?;
        let profile = this.parent().and_then(Path::parent).ok_or("no target folder")?;
        let scratch = profile.join("programs-scratch");
        std::fs::create_dir_all(&scratch).map_err(|e| e.to_string())?;
        Ok(Programs {
            examples: profile.join("examples"),
            scratch,
        })
    }

    /// Runs one on so many ranks; 0 is without a launcher.
    fn run(&self, ranks: usize, name: &str, arguments: &[&str]) -> Result<Output, String> {
        let program = self.examples.join(name);
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "120"]);
        if ranks > 0 {
            command.args(["scripts/mpirun", "-n", &ranks.to_string()]);
        }
        command.arg(program).args(arguments).env("RUST_LOG", "error");
        command.output().map_err(|e| format!("{name}: {e}"))
    }

    /// Runs one that must end well; its standard output.
    fn succeed(&self, ranks: usize, name: &str, arguments: &[&str]) -> Result<String, String> {
        let output = self.run(ranks, name, arguments)?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if output.status.success() {
            return Ok(out.into_owned());
        }
        Err(format!("{name} {arguments:?} on {ranks} ranks: {}\n{out}\n{err}", output.status))
    }

    fn scratch(&self, name: &str) -> String {
        self.scratch.join(name).display().to_string()
    }
}

fn require(holds: bool, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.into()) }
}

fn json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|e| format!("{e}: {text}"))
}

fn read_json(path: &str) -> Result<Value, String> {
    json(&std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?)
}

fn readme(programs: &Programs) -> Result<(), String> {
    let alone = programs.succeed(0, "readme", &[])?;
    require(alone.contains("epoch 199"), &alone)?;
    for ranks in 1..=3 {
        let out = programs.succeed(ranks, "readme", &[])?;
        require(out == alone, &format!("{ranks} ranks print\n{out}\nand one prints\n{alone}"))?;
    }
    Ok(())
}

fn ops(programs: &Programs) -> Result<(), String> {
    for ranks in 1..=3 {
        let file = programs.scratch("ops.json");
        let out = programs.succeed(ranks, "ops", &["tests/golden/ops.jsonl", "--out", &file])?;
        require(
            out.trim_end()
                .lines()
                .last()
                .is_some_and(|l| l.starts_with("196 passed, 0 failed, worst relative error")),
            &out,
        )?;
        let written = read_json(&file)?;
        require(written["ranks"] == ranks, "ranks")?;
        let cases = written["cases"].as_array().ok_or("no cases")?;
        require(cases.len() == 196, "196 cases")?;
        for case in cases {
            require(case["local"] == case["remote"], &format!("{}: here and there differ", case["id"]))?;
            let rank = case["remote_rank"].as_u64().ok_or("remote_rank")?;
            require(if ranks == 1 { rank == 0 } else { rank > 0 && rank < ranks as u64 }, "remote_rank")?;
        }
    }
    Ok(())
}

fn replay_optimizers(programs: &Programs) -> Result<(), String> {
    let cases = lines("tests/golden/optimizers.jsonl")?;
    for ranks in 1..=3 {
        let file = programs.scratch("replay.json");
        let out = programs.succeed(ranks, "replay", &["tests/golden/optimizers.jsonl", "--out", &file])?;
        let expected = format!("{cases} passed, 0 failed, worst relative error");
        require(out.trim_end().lines().last().is_some_and(|l| l.starts_with(&expected)), &out)?;
        let written = read_json(&file)?;
        for case in written["cases"].as_array().ok_or("no cases")? {
            let owners = case["owners"].as_array().ok_or("owners")?;
            require(ranks == 1 || owners.iter().all(|o| *o != 0), "rank 0 owns no parameter")?;
        }
    }
    Ok(())
}

fn replay_refused(programs: &Programs) -> Result<(), String> {
    let cases = lines("tests/golden/refused.jsonl")?;
    let out = programs.succeed(2, "replay", &["--refused", "tests/golden/refused.jsonl"])?;
    require(out.contains(&format!("{cases} passed, 0 failed")), &out)
}

fn replay_schedules(programs: &Programs) -> Result<(), String> {
    let cases = lines("tests/golden/schedules.jsonl")?;
    for ranks in 1..=2 {
        let out = programs.succeed(ranks, "replay", &["--schedules", "tests/golden/schedules.jsonl"])?;
        require(out.contains(&format!("{cases} passed, 0 failed")), &out)?;
    }
    Ok(())
}

fn in_backward_memory(programs: &Programs) -> Result<(), String> {
    for ranks in [1, 4] {
        let out = json(&programs.succeed(ranks, "in_backward_memory", &["8", "128", "2", "1"])?)?;
        let weight = out["weight_bytes"].as_u64().ok_or("weight_bytes")?;
        let peaks = |kind: &str| -> Result<Vec<u64>, String> {
            let peaks = out[kind]["peak_gradient_bytes"].as_array().ok_or("peak_gradient_bytes")?;
            require(peaks.len() == ranks, "a peak for each rank")?;
            peaks.iter().map(|p| p.as_u64().ok_or_else(|| "a peak".into())).collect()
        };
        require(peaks("in_backward")?.iter().all(|&p| p > 0 && p <= 2 * weight), &out.to_string())?;
        let all = 8 / ranks as u64 * weight;
        require(peaks("backward_then_step")?.iter().all(|&p| p >= all), &out.to_string())?;
    }
    Ok(())
}

fn lines(path: &str) -> Result<usize, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    Ok(text.lines().filter(|line| !line.trim().is_empty()).count())
}

fn digits_cases(programs: &Programs) -> Result<(), String> {
    for index in 0..2 {
        let mut histories = Vec::new();
        for ranks in [1, 2, 3, 4, 7] {
            let file = programs.scratch("digits.json");
            let out = programs.succeed(
                ranks,
                "digits",
                &[
                    "--case",
                    "tests/golden/digits_mlp.json",
                    "--index",
                    &index.to_string(),
                    "--out",
                    &file,
                ],
            )?;
            let line = json(out.trim())?;
            require(line["case"] == index && line["ranks"] == ranks, &out)?;
            require(line["max_loss_error"].as_f64().is_some_and(|e| e <= 1e-9), &out)?;
            let written = read_json(&file)?;
            let owners = written["owners"].as_array().ok_or("owners")?;
            require(ranks == 1 || owners.iter().all(|o| *o != 0), "rank 0 owns no layer")?;
            require(written["messages"].as_array().is_some_and(|m| m.len() == ranks), "messages")?;
            histories.push(written["history"].to_string());
        }
        require(
            histories.iter().all(|h| *h == histories[0]),
            "the same losses to the bit on any number of ranks",
        )?;
    }
    Ok(())
}

fn digits_differs(programs: &Programs) -> Result<(), String> {
    let mut cases = read_json("tests/golden/digits_mlp.json")?;
    let loss = &mut cases[0]["history"][3]["train_loss"];
    *loss = (loss.as_f64().ok_or("a loss")? * (1.0 + 1e-8)).into();
    let file = programs.scratch("differs.json");
    std::fs::write(&file, cases.to_string()).map_err(|e| e.to_string())?;
    for ranks in [1, 2] {
        let output = programs.run(ranks, "digits", &["--case", &file, "--index", "0"])?;
        require(!output.status.success(), "a loss that is off by 1e-8 must fail")?;
        let output = programs.run(ranks, "digits", &["--case", &file, "--index", "5"])?;
        require(!output.status.success(), "there is no case 5")?;
    }
    Ok(())
}

/// Nor does it hang: ranks that had no error end, too.
fn digits_without_gpu(programs: &Programs) -> Result<(), String> {
    if std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1") {
        return Ok(());
    }
    let text = match cfg!(feature = "cuda") {
        true => "no CUDA device",
        false => "was built without the feature `cuda`",
    };
    for ranks in [0, 2] {
        let output = programs.run(ranks, "digits", &["--device", "cuda", "--epochs", "1"])?;
        let err = String::from_utf8_lossy(&output.stderr);
        require(
            !output.status.success() && output.status.code() != Some(124),
            &format!("{}", output.status),
        )?;
        require(err.contains(text), &err)?;
    }
    Ok(())
}

fn digits_trains(programs: &Programs) -> Result<(), String> {
    let curves = programs.scratch("curves");
    let out = programs.succeed(4, "digits", &["--epochs", "3", "--curves", &curves])?;
    require(out.contains("digit taken for") && out.contains("% of 360 test digits"), &out)?;
    for name in ["curves.svg", "curves.png"] {
        let path = Path::new(&curves).join(name);
        let size = std::fs::metadata(&path).map_err(|e| format!("{}: {e}", path.display()))?.len();
        require(size > 5_000, &format!("{name} has {size} bytes"))?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let programs = match Programs::build() {
        Ok(programs) => programs,
        Err(why) => {
            eprintln!("{why}\n0 passed, 1 failed");
            return ExitCode::FAILURE;
        }
    };
    let (mut passed, mut failed) = (0, 0);
    for (name, check) in CHECKS.iter().filter(|c| c.0.contains(&filter)) {
        match check(&programs) {
            Ok(()) => {
                passed += 1;
                println!("test {name} ... ok");
            }
            Err(why) => {
                failed += 1;
                println!("test {name} ... FAILED\n{why}\n----");
            }
        }
    }
    println!("\n{passed} passed, {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

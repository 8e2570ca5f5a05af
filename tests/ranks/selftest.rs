//! The harness's own tests: it is trusted with the time limits of everything else.

use std::error::Error;
use std::process::Command;
use std::time::Duration;

use crate::case::{Case, Expect};
use crate::launch::{self, Outcome, judge, launch};

/// Cases that pass.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[0, 1, 2, 4],
        env: &[("SELFTEST_WORD", "two words")],
        ..Case::new("selftest::ranks_get_what_the_case_says", ranks_get_what_the_case_says)
    },
    Case {
        ranks: &[2],
        expect: Expect::Fails {
            within: 10,
            stderr: &["this rank gives up"],
        },
        ..Case::new("selftest::a_case_may_expect_failure", gives_up)
    },
];

/// Cases that don't, for the checks below.
pub const HELPERS: &[Case] = &[OVERRUNS, EXITS_3, GIVES_UP, ENDS_WELL];

const OVERRUNS: Case = Case {
    limit: 2,
    ..Case::new("selftest::overruns", overruns)
};
const EXITS_3: Case = Case::new("selftest::exits_3", || std::process::exit(3));
const GIVES_UP: Case = Case::new("selftest::gives_up", gives_up);
const ENDS_WELL: Case = Case {
    expect: Expect::Fails { within: 10, stderr: &[] },
    ..Case::new("selftest::ends_well", || Ok(()))
};

/// What a check is: its name, and what it runs in the driver.
pub type Check = (&'static str, fn() -> Result<(), String>);

/// Checks of the harness.
pub const CHECKS: &[Check] = &[
    ("selftest::a_job_that_overruns_is_killed_and_leaves_nothing", || {
        for ranks in [0, 1, 3] {
            let outcome = start(&OVERRUNS, ranks)?;
            refused(&OVERRUNS, &outcome, "time limit of 2 s")?;
            require(outcome.elapsed < Duration::from_secs(4), &format!("took {:?}", outcome.elapsed))?;
            require(outcome.stdout.contains("started"), "its output is lost")?;
            let left = launch::alive(&outcome.mark);
            require(left.is_empty(), &format!("{ranks} ranks left {left:?}"))?;
        }
        Ok(())
    }),
    ("selftest::another_exit_code_is_a_failure", || {
        for ranks in [0, 2] {
            refused(&EXITS_3, &start(&EXITS_3, ranks)?, "3")?;
        }
        Ok(())
    }),
    ("selftest::an_error_is_a_failure_with_its_text", || {
        let outcome = start(&GIVES_UP, 2)?;
        refused(&GIVES_UP, &outcome, "101")?;
        require(outcome.stderr.contains("this rank gives up"), "the error's text is lost")
    }),
    ("selftest::a_failure_that_was_expected_must_happen", || {
        refused(&ENDS_WELL, &start(&ENDS_WELL, 2)?, "was to fail")
    }),
    ("selftest::a_failure_must_say_what_was_expected", || {
        let case = Case {
            expect: Expect::Fails {
                within: 10,
                stderr: &["gives up", "another text"],
            },
            ..GIVES_UP
        };
        refused(&case, &start(&case, 2)?, "another text")
    }),
];

fn start(case: &Case, ranks: usize) -> Result<Outcome, String> {
    launch(case, ranks).map_err(|error| error.to_string())
}

fn require(holds: bool, otherwise: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise.to_owned()) }
}

/// The harness must call this a failure, and say why.
fn refused(case: &Case, outcome: &Outcome, why: &str) -> Result<(), String> {
    match judge(case, outcome) {
        Err(text) if text.contains(why) => Ok(()),
        other => Err(format!("judged {other:?}, not a failure with `{why}`: {outcome:?}")),
    }
}

fn ranks_get_what_the_case_says() -> Result<(), Box<dyn Error>> {
    assert_eq!(std::env::var("SELFTEST_WORD")?, "two words");
    assert_eq!(std::env::var("OPENBLAS_NUM_THREADS").unwrap_or("1".into()), "1");
    let count = std::env::var(launch::COUNT)?;
    let size = std::env::var("OMPI_COMM_WORLD_SIZE")
        .or_else(|_| std::env::var("PMI_SIZE"))
        .unwrap_or("1".into());
    assert_eq!(size, count);
    Ok(())
}

fn gives_up() -> Result<(), Box<dyn Error>> {
    Err("this rank gives up".into())
}

fn overruns() -> Result<(), Box<dyn Error>> {
    println!("started");
    let _ = Command::new("sleep").arg("600").spawn()?; // a grandchild must go too
    loop {
        std::thread::sleep(Duration::from_secs(600));
    }
}

//! Trains a network on hand-written digits: rank 0 holds the data and leads, the other ranks own the layers.
//!
//! Without arguments it trains a network of its own, draws its curves and prints a confusion matrix. With `--case FILE
//! --index K` it trains a case of a file and compares each epoch's loss with what the file expects. `--help` tells the rest.

// A program, not a library: nothing outside can reach it anyway.
#![allow(unreachable_pub)]

mod case;
mod curves;
mod data;
mod network;
mod options;
mod progress;
mod report;
mod train;

use std::process::ExitCode;
use std::time::Instant;

use rankgrad::{Calls, Error, Result, World};

use case::Case;
use network::Network;
use options::Options;
use progress::{Progress, Show};
use report::{Line, Run, TOLERANCE};

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{}", options::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("digits: {error}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    match work(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("digits: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What each rank does. That a case differs from its file is no reason to end the job early: all ranks finish.
fn work(options: &Options) -> Result<()> {
    let world = World::builder().env_logger();
    // Said here or in the environment.
    let world = if options.cuda { world.settings(|s| s.cuda = true) } else { world };
    let world = world.start()?;
    let result = world.lead(|world| Ok(run(world, options)))?;
    world.finish()?;
    result.unwrap_or(Ok(()))
}

/// What rank 0 does.
fn run(world: &World, options: &Options) -> Result<()> {
    let digits = data::load()?;
    let case = match &options.case {
        Some((file, index)) => Case::read(file, *index)?,
        None => options.network.clone().with_first_values(options.seed)?,
    };
    let mut network = Network::new(world, &case)?;
    let show = options
        .progress
        .unwrap_or(if options.case.is_some() { Show::Nothing } else { Show::Auto });
    let mut progress = Progress::new(case.epochs, show);
    let start = Instant::now();
    let history = train::train(&mut network, &case, &digits, |epoch| progress.ended(epoch))?;
    let seconds = start.elapsed().as_secs_f64();
    progress.finish();

    let (messages, bytes) = world.traffic()?.into_iter().unzip();
    let run = Run {
        ranks: world.size(),
        history,
        owners: network.owners(),
        messages,
        bytes,
    };
    if let Some(file) = &options.out {
        run.write(file)?;
    }
    match options.case {
        Some((_, index)) => compare(index, &case, &run, seconds),
        None => {
            println!("\n{}\n", report::confusion(&train::confusion(&network, &digits.test)?));
            let (accuracy, rows) = (100.0 * last(&run)?.test_accuracy, digits.test.len());
            println!(
                "{accuracy:.1} % of {rows} test digits told right, after {seconds:.1} s of training on {} rank(s)",
                run.ranks
            );
            let [svg, png] = curves::draw(&run.history, &options.curves).map_err(|e| Error::user(format!("curves: {e}")))?;
            println!("curves of loss and accuracy: {} and {}", svg.display(), png.display());
            Ok(())
        }
    }
}

/// Prints the line of a case, and fails if it isn't what the file expects.
fn compare(index: usize, case: &Case, run: &Run, seconds: f64) -> Result<()> {
    let last = last(run)?;
    let (max_loss_error, accuracies_equal) = report::compare(&run.history, &case.history);
    let line = Line {
        case: index,
        ranks: run.ranks,
        max_loss_error,
        final_train_loss: last.train_loss,
        final_test_accuracy: last.test_accuracy,
        seconds,
    };
    println!("{}", serde_json::to_string(&line).map_err(Error::user)?);
    let wrong = if case.history.len() != run.history.len() {
        format!(
            "the file has {} epochs of history for {} epochs",
            case.history.len(),
            run.history.len()
        )
    } else if max_loss_error > TOLERANCE {
        format!("a loss differs by {max_loss_error:.1e}, relative; {TOLERANCE:e} are allowed")
    } else if !accuracies_equal {
        "a test accuracy differs".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::user(format!("case {index}: {wrong}")))
}

fn last(run: &Run) -> Result<&case::Epoch> {
    run.history.last().ok_or_else(|| Error::user("train for at least one epoch"))
}

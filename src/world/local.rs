//! Ranks as threads of one process: for doc tests and a user's own unit tests. The rules are the same, the messages never leave the process.

use super::{World, builder};
use crate::config::Settings;
use crate::{Error, ErrorKind, Result, transport};

/// Runs `f` as `n` ranks, each on a thread of its own, and ends their world. Blocks until all have ended.
///
/// # Errors
/// The first error in rank order.
///
/// # Panics
/// A panic of a rank ends the process, as it would end an MPI job.
pub fn run<R>(n: u32, f: impl Fn(&World) -> Result<R> + Sync) -> Result<()> {
    run_with(n, |_| (), f)
}

/// As [`run`], with settings.
///
/// # Errors
/// As [`run`].
pub fn run_with<R>(n: u32, settings: impl Fn(&mut Settings) + Sync, f: impl Fn(&World) -> Result<R> + Sync) -> Result<()> {
    let mut made = Settings::default();
    settings(&mut made);
    made.check()?;
    let ranks = transport::local::ranks(n, (&made).into());
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| {
                let (made, f) = (made.clone(), &f);
                scope.spawn(move || {
                    let world = builder::assemble(Box::new(rank), made, Default::default())?;
                    let result = f(&world);
                    world.finish()?;
                    result.map(drop)
                })
            })
            .collect();
        let results: Vec<Result<()>> = threads
            .into_iter()
            .map(|t| {
                t.join().unwrap_or_else(|_| {
                    Err(Error::from(ErrorKind::User {
                        message: "a rank panicked".into(),
                    }))
                })
            })
            .collect();
        results.into_iter().collect()
    })
}

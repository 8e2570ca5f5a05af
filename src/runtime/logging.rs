//! `env_logger` for programs that have no logger of their own: `[time rank level target] text` on standard error, or in a file for each rank.
//!
//! The filter is `RUST_LOG`'s; without it warnings and errors are shown. `scripts/logs` puts the files of all ranks in order.

mod file;

use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicI64, Ordering};

use env_logger::{Builder, Env, Target};

use crate::{ErrorKind, Result};

/// What [`RANK`] holds before the rank is known.
const UNKNOWN: i64 = -1;

/// This process's rank, for the lines of the log.
static RANK: AtomicI64 = AtomicI64::new(UNKNOWN);

/// Sets up `env_logger` for this process; with a folder, for a file in it once the rank is known. If the program has set a logger already, it keeps it, and our
/// lines go there. Local; blocks on nothing.
///
/// # Errors
///
/// [`ErrorKind::Init`] if the folder can't be made.
pub(crate) fn init(folder: &str) -> Result<()> {
    let mut builder = builder();
    if !folder.is_empty() {
        let pages = file::in_folder(folder).map_err(|e| ErrorKind::Init {
            what: format!("the folder for logs, {folder}, can't be made: {e}"),
            cure: "set RANKGRAD_LOG_DIR to a folder that every rank may write to".into(),
        })?;
        builder.target(Target::Pipe(Box::new(pages)));
    }
    if builder.try_init().is_err() {
        log::debug!("env_logger was not set up: the program has set a logger already");
    }
    Ok(())
}

/// Tells the log which rank this process is; lines before that say `rank ?`.
pub(crate) fn set_rank(rank: u32) {
    RANK.store(rank.into(), Ordering::Relaxed);
    file::open(rank);
}

fn builder() -> Builder {
    let mut builder = Builder::from_env(Env::default().default_filter_or("warn"));
    builder.format(|out, record| {
        let (time, rank) = (out.timestamp_micros(), Rank(RANK.load(Ordering::Relaxed)));
        writeln!(out, "[{time} {rank} {} {}] {}", record.level(), record.target(), record.args())
    });
    builder
}

/// A rank in a line of the log.
struct Rank(i64);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            UNKNOWN => write!(f, "rank ?"),
            rank => write!(f, "rank {rank}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use log::{Level, Log, Record};

    use super::*;

    /// Keeps what is written.
    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Page {
        fn take(&self) -> String {
            String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
        }
    }

    /// One test, for the rank and the logger belong to the process.
    #[test]
    fn lines_have_time_rank_level_and_target_and_a_second_logger_leaves_the_first() {
        let page = Page::default();
        let logger = builder().target(Target::Pipe(Box::new(page.clone()))).build();
        let log = |level, text: &str| {
            logger.log(
                &Record::builder()
                    .args(format_args!("{text}"))
                    .level(level)
                    .target("rankgrad::test")
                    .build(),
            );
            page.take()
        };
        let line = log(Level::Warn, "two words");
        assert!(
            line.starts_with("[20") && line.ends_with("Z rank ? WARN rankgrad::test] two words\n"),
            "{line}"
        );
        set_rank(7);
        assert!(log(Level::Error, "x").ends_with(" rank 7 ERROR rankgrad::test] x\n"));
        RANK.store(UNKNOWN, Ordering::Relaxed);

        init("").unwrap(); // the first may have been set by another test
        init("").unwrap();
        let error = init("/dev/null/logs").unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Init { .. }) && error.to_string().contains("/dev/null/logs"),
            "{error}"
        );
    }
}

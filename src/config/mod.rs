//! Settings of a rank: their defaults, and what the builder and the environment make of them.
//!
//! A value comes from, in this order: a call of the builder, the variable of the environment, the default. So a program that
//! sets a value in its code means it, and what it leaves open can be tuned in a job script. A variable is read and checked also
//! where the builder's value wins. A name that starts with `RANKGRAD_` and isn't in the table is an error: a misspelt setting
//! that silently does nothing is worse than a job that doesn't start.
//!
//! Bytes take the suffixes `KiB`, `MiB` and `GiB`; flags are `true`/`false`, `on`/`off` or `1`/`0`.
//!
#![doc = include_str!("settings.md")]

pub(crate) mod launcher;
mod near;
mod table;

use std::ffi::{OsStr, OsString};
use std::time::Duration;

pub use table::{Setting, settings};

use crate::{ErrorKind, Result};

/// What every variable of ours starts with.
const PREFIX: &str = "RANKGRAD_";

/// Who moves messages on a rank while none of its threads waits for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Progress {
    /// [`Dedicated`](Self::Dedicated) where each rank of the node has a core for it, else [`Shared`](Self::Shared).
    #[default]
    Auto,
    /// The service thread spins for a short while, then sleeps until it is rung or the tick passes.
    Shared,
    /// The service thread never sleeps. Granted only where the rank's affinity mask holds a second core.
    Dedicated,
}

/// Settings of one rank. [`resolve`](Self::resolve) makes them from the builder's calls and the environment.
///
/// Ranks may have different settings, but those that concern messages (`eager_limit`, `chunk_limit`, `segment_tags`) must be
/// equal on all ranks of a world.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Who moves messages while none of the rank's threads waits for one (`RANKGRAD_PROGRESS`).
    pub progress: Progress,
    /// How long a waiting thread spins before it offers its core to others, or sleeps, in microseconds (`RANKGRAD_SPIN_US`); 0 for never.
    pub spin_us: f64,
    /// How long a wait lasts until the thread sleeps, in milliseconds, if each rank of the node has a core of its own (`RANKGRAD_YIELD_MS`); until then it looks,
    /// and yields its core to whoever is ready to run there. The default lets what comes ten times a second find a waiter awake. 0 for never.
    pub yield_ms: f64,
    /// Longest sleep of the service thread while it listens, in milliseconds (`RANKGRAD_TICK_MS`); four times that on a single node after a tenth of a
    /// second without messages.
    pub tick_ms: f64,
    /// How long a waiter hears nothing of its request before it gives up, in seconds; 0 for no limit (`RANKGRAD_TIMEOUT`).
    pub timeout_s: f64,
    /// How long a waiter waits before it asks the owner how its request is doing, in seconds (`RANKGRAD_STATUS_AFTER`).
    pub status_after_s: f64,
    /// Largest message in bytes that is sent at once, without asking its receiver first (`RANKGRAD_EAGER_LIMIT`).
    pub eager_limit: usize,
    /// Largest piece in bytes that one MPI call sends (`RANKGRAD_CHUNK_LIMIT`).
    pub chunk_limit: usize,
    /// Largest message in bytes that this rank receives (`RANKGRAD_MESSAGE_LIMIT`).
    pub message_limit: usize,
    /// Number of MPI tags for the arrays of messages over the eager limit (`RANKGRAD_SEGMENT_TAGS`).
    pub segment_tags: usize,
    /// Number of receives posted ahead for small messages (`RANKGRAD_RING`).
    pub ring: usize,
    /// Most bytes of receive buffers kept for reuse (`RANKGRAD_POOL_BYTES`).
    pub pool_bytes: usize,
    /// Most requests of this rank that one owner may have unanswered (`RANKGRAD_WINDOW_REQUESTS`).
    pub window_requests: usize,
    /// Most bytes of this rank's requests that one owner may have unanswered (`RANKGRAD_WINDOW_BYTES`).
    pub window_bytes: usize,
    /// Most threads of the pool that run remote functions at once; those that wait for an answer don't count (`RANKGRAD_POOL_THREADS`).
    pub pool_threads: usize,
    /// Threads of the pool that runs large updates and other arithmetic (`RANKGRAD_COMPUTE_THREADS`).
    pub compute_threads: usize,
    /// Threads that BLAS may use in one call (`RANKGRAD_BLAS_THREADS`).
    pub blas_threads: usize,
    /// Whether the service thread is bound to a processing unit of its own where there is room (`RANKGRAD_PIN`).
    pub pin: bool,
    /// Whether parameters that are put on this rank live on its GPU (`RANKGRAD_CUDA`).
    pub cuda: bool,
    /// Whether each rank watches the next one, so that a death ends the job whatever the launcher does about it (`RANKGRAD_WATCH`).
    pub watch: bool,
    /// Folder in which each rank writes its log to a file of its own; empty for standard error (`RANKGRAD_LOG_DIR`).
    pub log_dir: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            progress: Progress::Auto,
            spin_us: 20.0,
            yield_ms: 102.0,
            tick_ms: 4.0,
            timeout_s: 60.0,
            status_after_s: 5.0,
            eager_limit: 4000,
            chunk_limit: 1 << 30,
            message_limit: 8 << 30,
            segment_tags: 1024,
            ring: 16,
            pool_bytes: 256 << 20,
            window_requests: 1024,
            window_bytes: 256 << 20,
            pool_threads: 1024,
            compute_threads: 1,
            blas_threads: 1,
            pin: true,
            cuda: false,
            watch: true,
            log_dir: String::new(),
        }
    }
}

impl Settings {
    /// The settings that these variables and explicit calls make: defaults, then `variables`, then `explicit`. Local; blocks on nothing.
    ///
    /// Variables whose names don't start with `RANKGRAD_` are passed over. Their order has no influence.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Setting`] for a name that isn't a setting (with names that are near to it), a value that can't be read, and a
    /// value out of its bounds, from a variable or from `explicit`: the text says what is expected.
    ///
    /// # Examples
    ///
    /// ```
    /// use rankgrad::config::Settings;
    ///
    /// let variables = [("RANKGRAD_TIMEOUT", "5"), ("RANKGRAD_RING", "8"), ("HOME", "/root")];
    /// let settings = Settings::resolve(variables, |explicit| explicit.ring = 32)?;
    /// assert_eq!((settings.timeout_s, settings.ring, settings.eager_limit), (5.0, 32, 4000));
    ///
    /// let error = Settings::resolve([("RANKGRAD_TIMOUT", "5")], |_| ()).unwrap_err();
    /// assert!(error.to_string().contains("RANKGRAD_TIMEOUT"));
    /// # Ok::<(), rankgrad::Error>(())
    /// ```
    pub fn resolve<N, V>(variables: impl IntoIterator<Item = (N, V)>, explicit: impl FnOnce(&mut Settings)) -> Result<Self>
    where
        N: AsRef<OsStr>,
        V: AsRef<OsStr>,
    {
        let mut ours: Vec<(String, String)> = variables
            .into_iter()
            .map(|(name, value)| {
                (
                    name.as_ref().to_string_lossy().into_owned(),
                    value.as_ref().to_string_lossy().into_owned(),
                )
            })
            .filter(|(name, _)| name.starts_with(PREFIX))
            .collect();
        ours.sort(); // so that every rank names the same fault first
        let mut settings = Settings::default();
        for (name, value) in &ours {
            let setting = table::find(name).ok_or_else(|| unknown(name, value))?;
            setting.read(&mut settings, value)?;
        }
        explicit(&mut settings);
        settings.check()?;
        Ok(settings)
    }

    /// [`resolve`](Self::resolve) with the variables of this process. Local; blocks on nothing.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Self::resolve).
    pub fn from_env(explicit: impl FnOnce(&mut Settings)) -> Result<Self> {
        Self::resolve::<OsString, OsString>(std::env::vars_os(), explicit)
    }

    /// Whether every value is within its bounds. Local; blocks on nothing.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Setting`] with the first that isn't, and its bounds.
    pub fn check(&self) -> Result<()> {
        settings().iter().try_for_each(|setting| setting.check(self))
    }

    /// How long a waiting thread spins before it yields its core, or sleeps.
    pub fn spin(&self) -> Duration {
        Duration::from_secs_f64(self.spin_us * 1e-6)
    }

    /// How long a wait lasts until the thread sleeps, if each rank has a core of its own.
    pub fn offers(&self) -> Duration {
        Duration::from_secs_f64(self.yield_ms * 1e-3)
    }

    /// Longest sleep of the service thread while it listens and messages come.
    pub fn tick(&self) -> Duration {
        Duration::from_secs_f64(self.tick_ms * 1e-3)
    }

    /// How long a waiter hears nothing of its request before it gives up; `None` for no limit.
    pub fn timeout(&self) -> Option<Duration> {
        (self.timeout_s > 0.0).then(|| Duration::from_secs_f64(self.timeout_s))
    }

    /// How long a waiter waits before it asks the owner how its request is doing.
    pub fn status_after(&self) -> Duration {
        Duration::from_secs_f64(self.status_after_s)
    }
}

/// The error for a variable that isn't a setting.
fn unknown(name: &str, value: &str) -> crate::Error {
    let known = settings().iter().map(Setting::name);
    let expected = match near::near(name, known.clone()).as_slice() {
        [] => format!(
            "a known name, and there is no such setting; there are {}",
            known.collect::<Vec<_>>().join(", ")
        ),
        near => format!("a known name, and there is no such setting; near names: {}", near.join(", ")),
    };
    ErrorKind::Setting {
        name: name.to_owned(),
        value: value.to_owned(),
        expected,
    }
    .into()
}

#[cfg(test)]
mod tests;

//! The one table of settings: it drives parsing, checks, errors and the documentation.

use std::str::FromStr;

use super::{Progress, Settings};
use crate::{ErrorKind, Result};

/// A row of the table of settings.
#[derive(Debug)]
pub struct Setting {
    /// Name of its variable.
    name: &'static str,
    /// Name of its field in [`Settings`].
    field: &'static str,
    /// Where it is kept, and within which bounds.
    kind: Kind,
    /// What it does.
    doc: &'static str,
}

/// Where a setting is kept, and within which bounds.
#[derive(Debug)]
enum Kind {
    Progress(fn(&mut Settings) -> &mut Progress),
    Flag(fn(&mut Settings) -> &mut bool),
    /// A number with its unit.
    Real(fn(&mut Settings) -> &mut f64, f64, f64, &'static str),
    Count(fn(&mut Settings) -> &mut usize, usize, usize),
    Bytes(fn(&mut Settings) -> &mut usize, usize, usize),
    /// A path.
    Path(fn(&mut Settings) -> &mut String),
}

use Kind::{Bytes, Count, Flag, Path, Real};

/// MPI counts are C ints, so no piece may be longer.
const MAX_COUNT: usize = i32::MAX as usize;
/// No bound but the address space.
const MAX: usize = isize::MAX as usize;
/// A day, in seconds.
const DAY: f64 = 86_400.0;

const fn row(name: &'static str, field: &'static str, kind: Kind, doc: &'static str) -> Setting {
    Setting { name, field, kind, doc }
}

static TABLE: [Setting; 21] = [
    row(
        "RANKGRAD_PROGRESS",
        "progress",
        Kind::Progress(|s| &mut s.progress),
        "Who moves messages on a rank while none of its threads waits for one: a service thread that sleeps when idle (`shared`), or one that never sleeps (`dedicated`, only with a second core).",
    ),
    row(
        "RANKGRAD_SPIN_US",
        "spin_us",
        Real(|s| &mut s.spin_us, 0.0, 1e6, "us"),
        "How long a waiting thread spins before it yields its core, or sleeps.",
    ),
    row(
        "RANKGRAD_YIELD_MS",
        "yield_ms",
        Real(|s| &mut s.yield_ms, 0.0, 60e3, "ms"),
        "How long a wait lasts until the thread sleeps, if each rank of the node has a core of its own; until then it looks, and yields the core to whoever is ready to run there.",
    ),
    row(
        "RANKGRAD_TICK_MS",
        "tick_ms",
        Real(|s| &mut s.tick_ms, 0.1, 1e3, "ms"),
        "Longest sleep of the service thread while it listens; four times that on a single node after a tenth of a second without messages.",
    ),
    row(
        "RANKGRAD_TIMEOUT",
        "timeout_s",
        Real(|s| &mut s.timeout_s, 0.0, 365.0 * DAY, "s"),
        "How long a waiter hears nothing of its request before it gives up; 0 for no limit.",
    ),
    row(
        "RANKGRAD_STATUS_AFTER",
        "status_after_s",
        Real(|s| &mut s.status_after_s, 0.001, DAY, "s"),
        "How long a waiter waits before it asks the owner how its request is doing, and logs the answer.",
    ),
    row(
        "RANKGRAD_EAGER_LIMIT",
        "eager_limit",
        Bytes(|s| &mut s.eager_limit, 64, 16 << 20),
        "Largest message that is sent at once, without asking its receiver first; equal on all ranks.",
    ),
    row(
        "RANKGRAD_CHUNK_LIMIT",
        "chunk_limit",
        Bytes(|s| &mut s.chunk_limit, 16, MAX_COUNT),
        "Largest piece that one MPI call sends; equal on all ranks.",
    ),
    row(
        "RANKGRAD_MESSAGE_LIMIT",
        "message_limit",
        Bytes(|s| &mut s.message_limit, 1024, MAX),
        "Largest message that this rank receives; a larger one is refused, and its sender told.",
    ),
    row(
        "RANKGRAD_SEGMENT_TAGS",
        "segment_tags",
        Count(|s| &mut s.segment_tags, 1, 16_384),
        "Number of MPI tags for the arrays of messages over the eager limit; equal on all ranks.",
    ),
    row(
        "RANKGRAD_RING",
        "ring",
        Count(|s| &mut s.ring, 1, 4096),
        "Number of receives posted ahead for small messages.",
    ),
    row(
        "RANKGRAD_POOL_BYTES",
        "pool_bytes",
        Bytes(|s| &mut s.pool_bytes, 0, MAX),
        "Most bytes of receive buffers that nobody uses, kept for reuse.",
    ),
    row(
        "RANKGRAD_WINDOW_REQUESTS",
        "window_requests",
        Count(|s| &mut s.window_requests, 1, 1 << 20),
        "Most requests of this rank that one owner may have unanswered; more wait, or are refused by `try_call`.",
    ),
    row(
        "RANKGRAD_WINDOW_BYTES",
        "window_bytes",
        Bytes(|s| &mut s.window_bytes, 1024, MAX),
        "Most bytes of this rank's requests that one owner may have unanswered; one larger request goes alone.",
    ),
    row(
        "RANKGRAD_POOL_THREADS",
        "pool_threads",
        Count(|s| &mut s.pool_threads, 1, 65_536),
        "Most threads of the pool that run remote functions at once; those that wait for an answer don't count.",
    ),
    row(
        "RANKGRAD_COMPUTE_THREADS",
        "compute_threads",
        Count(|s| &mut s.compute_threads, 1, 4096),
        "Threads of the pool that runs large updates and other arithmetic.",
    ),
    row(
        "RANKGRAD_BLAS_THREADS",
        "blas_threads",
        Count(|s| &mut s.blas_threads, 1, 4096),
        "Threads that BLAS may use in one call.",
    ),
    row(
        "RANKGRAD_PIN",
        "pin",
        Flag(|s| &mut s.pin),
        "Whether the service thread is bound to a processing unit of its own where the affinity mask has room.",
    ),
    row(
        "RANKGRAD_CUDA",
        "cuda",
        Flag(|s| &mut s.cuda),
        "Whether parameters that are put on this rank live on its GPU, and the state of their optimizers with them; needs the feature `cuda`.",
    ),
    row(
        "RANKGRAD_WATCH",
        "watch",
        Flag(|s| &mut s.watch),
        "Whether each rank watches the next one over a connection of its own, so that a death ends the job whatever the launcher does about it.",
    ),
    row(
        "RANKGRAD_LOG_DIR",
        "log_dir",
        Path(|s| &mut s.log_dir),
        "Folder in which each rank writes its log to a file of its own, `rank-N.log`; made if it isn't there.",
    ),
];

/// Every setting there is, in the order of the documentation. Local; blocks on nothing.
pub fn settings() -> &'static [Setting] {
    &TABLE
}

/// The setting of a variable.
pub(super) fn find(name: &str) -> Option<&'static Setting> {
    TABLE.iter().find(|setting| setting.name == name)
}

impl Setting {
    /// Name of its variable in the environment.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Name of its field in [`Settings`].
    pub fn field(&self) -> &'static str {
        self.field
    }

    /// What it does.
    pub fn doc(&self) -> &'static str {
        self.doc
    }

    /// Its value in `settings`, as its variable would be written.
    pub fn value(&self, settings: &Settings) -> String {
        let settings = &mut settings.clone();
        match self.kind {
            Kind::Progress(at) => match at(settings) {
                Progress::Auto => "auto".to_owned(),
                Progress::Shared => "shared".to_owned(),
                Progress::Dedicated => "dedicated".to_owned(),
            },
            Flag(at) => at(settings).to_string(),
            Real(at, ..) => at(settings).to_string(),
            Count(at, ..) => at(settings).to_string(),
            Bytes(at, ..) => bytes_text(*at(settings)),
            Path(at) => at(settings).clone(),
        }
    }

    /// The values it takes, in words.
    pub fn expected(&self) -> String {
        match self.kind {
            Kind::Progress(_) => "auto, shared or dedicated".to_owned(),
            Flag(_) => "true or false".to_owned(),
            Real(_, min, max, unit) => format!("{min} to {max} {unit}"),
            Path(_) => "a path; empty for none".to_owned(),
            Count(_, min, max) => format!("{min} to {max}"),
            Bytes(_, min, MAX) => format!("at least {} (bytes)", bytes_text(min)),
            Bytes(_, min, max) => format!("{} to {} (bytes)", bytes_text(min), bytes_text(max)),
        }
    }

    /// Sets its field from the text of its variable.
    pub(super) fn read(&self, settings: &mut Settings, text: &str) -> Result<()> {
        let text = text.trim();
        let read = match self.kind {
            Kind::Progress(at) => put(at(settings), progress(text)),
            Flag(at) => put(at(settings), flag(text)),
            Real(at, ..) => put(at(settings), f64::from_str(text).ok()),
            Count(at, ..) => put(at(settings), usize::from_str(text).ok()),
            Bytes(at, ..) => put(at(settings), bytes(text)),
            Path(at) => put(at(settings), Some(text.to_owned())),
        };
        if read && self.within(settings) {
            Ok(())
        } else {
            Err(self.error(self.name, text))
        }
    }

    /// Whether its value is within its bounds.
    pub(super) fn check(&self, settings: &Settings) -> Result<()> {
        if self.within(&mut settings.clone()) {
            Ok(())
        } else {
            Err(self.error(self.field, &self.value(settings)))
        }
    }

    fn within(&self, settings: &mut Settings) -> bool {
        match self.kind {
            Kind::Progress(_) | Flag(_) | Path(_) => true,
            Real(at, min, max, _) => (min..=max).contains(at(settings)),
            Count(at, min, max) | Bytes(at, min, max) => (min..=max).contains(at(settings)),
        }
    }

    fn error(&self, name: &str, value: &str) -> crate::Error {
        ErrorKind::Setting {
            name: name.to_owned(),
            value: value.to_owned(),
            expected: self.expected(),
        }
        .into()
    }
}

fn put<T>(place: &mut T, value: Option<T>) -> bool {
    value.map(|value| *place = value).is_some()
}

fn progress(text: &str) -> Option<Progress> {
    match text.to_ascii_lowercase().as_str() {
        "auto" => Some(Progress::Auto),
        "shared" => Some(Progress::Shared),
        "dedicated" => Some(Progress::Dedicated),
        _ => None,
    }
}

fn flag(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "on" | "1" => Some(true),
        "false" | "off" | "0" => Some(false),
        _ => None,
    }
}

/// The units of bytes, largest first.
const UNITS: [(&str, usize); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

fn bytes(text: &str) -> Option<usize> {
    let (digits, unit) = UNITS
        .iter()
        .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)))
        .unwrap_or((text, 1));
    digits.trim_end().parse::<usize>().ok()?.checked_mul(unit)
}

fn bytes_text(bytes: usize) -> String {
    match UNITS.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit)) {
        Some((suffix, unit)) => format!("{}{suffix}", bytes / unit),
        None => bytes.to_string(),
    }
}

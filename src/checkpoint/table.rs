//! What a rank keeps between the requests of a save or a restore.

use std::any::TypeId;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::shard::Written;
use crate::dist::Staged;
use crate::runtime::{Runtime, lock};
use crate::{Error, ErrorKind, Result};

/// The table of one rank.
#[derive(Debug, Default)]
pub(super) struct Table {
    writers: Mutex<Writers>,
    /// What restores have checked, by their numbers.
    staged: Mutex<HashMap<u64, Vec<Staged>>>,
    /// Folders that a client of this rank is saving to.
    pub in_use: Mutex<HashSet<PathBuf>>,
}

#[derive(Debug, Default)]
struct Writers {
    /// The save whose shard is being written: one at a time, so that there is at most one old copy of the shard.
    running: Option<(u64, JoinHandle<Result<Written>>)>,
    /// What became of others that weren't asked for yet.
    ended: HashMap<u64, Result<Written>>,
}

impl Writers {
    /// Blocks until no shard is being written.
    fn settle(&mut self) {
        if let Some((number, thread)) = self.running.take() {
            let panicked = |_| Err(Error::user("the thread that writes a shard panicked: this is a bug in rankgrad"));
            self.ended.insert(number, thread.join().unwrap_or_else(panicked));
        }
    }
}

impl Table {
    pub(super) fn of(runtime: &Runtime) -> Arc<Table> {
        let mut states = runtime.state();
        let state = states.entry(TypeId::of::<Table>()).or_insert_with(|| Arc::new(Table::default()));
        Arc::clone(state).downcast().unwrap_or_default()
    }

    /// Starts to write a shard, of what `snapshot` gives once no other is being written. Blocks until then.
    pub(super) fn write<F: FnOnce() -> Result<Written> + Send + 'static>(
        &self,
        runtime: &Runtime,
        number: u64,
        snapshot: impl FnOnce() -> Result<F>,
    ) -> Result<()> {
        let mut writers = runtime.pool.blocking(|| {
            let mut writers = lock(&self.writers);
            writers.settle();
            writers
        });
        let write = snapshot()?;
        let name = format!("rankgrad-{}-shard", runtime.rank());
        let thread = std::thread::Builder::new().name(name).spawn(write).map_err(|e| ErrorKind::Io {
            operation: "a thread to write a shard".into(),
            text: e.to_string(),
        })?;
        writers.running = Some((number, thread));
        Ok(())
    }

    /// What became of a shard. Blocks until it is written.
    pub(super) fn written(&self, runtime: &Runtime, number: u64) -> Result<Written> {
        let ended = runtime.pool.blocking(|| {
            let mut writers = lock(&self.writers);
            if writers.running.as_ref().is_some_and(|(running, _)| *running == number) {
                writers.settle();
            }
            writers.ended.remove(&number)
        });
        ended.unwrap_or_else(|| Err(gone(runtime, "the snapshot of this save")))
    }

    pub(super) fn stage(&self, number: u64, staged: Vec<Staged>) {
        lock(&self.staged).insert(number, staged);
    }

    /// What a restore has checked.
    pub(super) fn staged(&self, runtime: &Runtime, number: u64) -> Result<Vec<Staged>> {
        lock(&self.staged)
            .remove(&number)
            .ok_or_else(|| gone(runtime, "what this restore has read"))
    }

    pub(super) fn forget(&self, number: u64) {
        let staged = lock(&self.staged).remove(&number);
        drop(staged); // outside of the lock
    }
}

fn gone(runtime: &Runtime, what: &str) -> Error {
    let (operation, owner, id) = ("checkpoint".into(), runtime.rank(), what.into());
    ErrorKind::NoSuchValue { operation, owner, id }.into()
}

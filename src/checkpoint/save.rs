//! Saving, from the client's side.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use serde::Serialize;
use serde_json::Value;

use super::file::{self, format, make_folder, remove_file};
use super::folder;
use super::manifest::{self, FORMAT, Manifest};
use super::names::Names;
use super::rows;
use super::shard::{Take, Written, shard_written, take_snapshot};
use super::table::Table;
use crate::dist::{Answers, Asked, Asking, OwnerPart, Saveable, ask, collect, gather};
use crate::rpc::Caller;
use crate::rref::RRef;
use crate::runtime::{Windowed, lock};
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Result};

/// What goes into a checkpoint: optimizers with their parameters, further parameters, values. Made from a reference to an optimizer alone, too.
///
/// ```
/// use rankgrad::checkpoint::{Checkpoint, Save};
/// use rankgrad::prelude::*;
///
/// # let dir = std::env::temp_dir().join(format!("rankgrad-doc-save-{}", std::process::id()));
/// rankgrad::local::run(2, |world| {
///     world.lead(|world| {
///         let table = world.put(1, Tensor::from_vec(vec![1.0, 2.0], [2])?)?;
///         let weight = world.put(0, Tensor::from_vec(vec![3.0], [1])?)?;
///         let optimizer = DistributedOptimizer::new(world, Adam::new(0.1), [("weight", &weight)])?;
///         let attached = optimizer_in_backward(Sgd::new(0.5), [&table], InBackward::default())?;
///         let save = Save::new()
///             .parameters([("table", &table)])
///             .optimizer("dense", &optimizer)
///             .optimizer("sparse", &attached)
///             .value("epoch", &7)?
///             .keep(3);
///         let saved = Checkpoint::save(&dir, 100, save)?;
///         assert!(saved.path.ends_with("step-0000000100"));
///         Ok(())
///     })
/// })
/// # .unwrap();
/// # std::fs::remove_dir_all(dir).unwrap();
/// ```
#[derive(Default)]
pub struct Save<'a> {
    parameters: Vec<(String, RRef<Tensor>)>,
    optimizers: Vec<(String, &'a dyn Saveable)>,
    values: BTreeMap<String, Value>,
    keep: Option<usize>,
}

impl std::fmt::Debug for Save<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Save")
            .field("parameters", &self.parameters.len())
            .field("optimizers", &self.optimizers.iter().map(|o| &o.0).collect::<Vec<_>>())
            .field("values", &self.values.keys())
            .field("keep", &self.keep)
            .finish()
    }
}

/// The name of an optimizer that was given alone.
pub(super) const ALONE: &str = "optimizer";

impl<'a, S: Saveable> From<&'a S> for Save<'a> {
    fn from(optimizer: &'a S) -> Self {
        Save::new().optimizer(ALONE, optimizer)
    }
}

impl<'a> Save<'a> {
    /// Nothing yet. Local.
    pub fn new() -> Self {
        Save::default()
    }

    /// Adds parameters, or tensors that are none, by name: those that no optimizer has, and those that are to be called otherwise than their optimizer
    /// calls them (name them before it is added). Local.
    pub fn parameters<N: Into<String>, R: std::borrow::Borrow<RRef<Tensor>>>(
        mut self,
        parameters: impl IntoIterator<Item = (N, R)>,
    ) -> Self {
        let parameters = parameters.into_iter();
        self.parameters
            .extend(parameters.map(|(name, rref)| (name.into(), rref.borrow().clone())));
        self
    }

    /// Adds an optimizer under a name, with its parameters, their state and options. A parameter is called as the first one calls it. Local.
    pub fn optimizer(mut self, name: impl Into<String>, optimizer: &'a impl Saveable) -> Self {
        self.optimizers.push((name.into(), optimizer));
        self
    }

    /// Adds a value that serde can write: a [`Scheduler`](crate::optim::schedule::Scheduler), a random number generator, an epoch. It is kept in JSON, where
    /// finite numbers keep their bits and others become null. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if it can't be written as JSON.
    pub fn value(mut self, name: impl Into<String>, value: &(impl Serialize + ?Sized)) -> Result<Self> {
        let name = name.into();
        match serde_json::to_value(value) {
            Ok(value) => self.values.insert(name, value),
            Err(e) => return Err(argument(format!("value `{name}`: {e}"))),
        };
        Ok(self)
    }

    /// Removes older checkpoints, so that so many are left, the new one among them; at least that one. Without it all are kept. Local.
    pub fn keep(mut self, last: usize) -> Self {
        self.keep = Some(last);
        self
    }
}

/// A checkpoint that is whole and on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Saved {
    /// Its folder.
    pub path: PathBuf,
    /// Size of all shards.
    pub bytes: u64,
}

/// A save under way. The snapshot is taken; training may go on. Dropping it waits for the end, and logs an error.
#[must_use = "dropping it waits for the save to end"]
#[derive(Debug)]
pub struct Saving {
    thread: Option<JoinHandle<Result<Saved>>>,
    step: u64,
}

impl Saving {
    /// Whether it has ended. Local; never blocks.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the end. Local; blocks until the checkpoint is on the disk.
    ///
    /// # Errors
    /// As [`Checkpoint::save`](super::Checkpoint::save).
    pub fn wait(mut self) -> Result<Saved> {
        self.join()
    }

    fn join(&mut self) -> Result<Saved> {
        let panicked = |_| Err(Error::user("the thread that ends a save panicked: this is a bug in rankgrad"));
        match self.thread.take() {
            Some(thread) => thread.join().unwrap_or_else(panicked),
            None => Err(argument("it was waited for before".into())),
        }
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        if self.thread.is_some()
            && let Err(e) = self.join()
        {
            log::error!("the checkpoint of step {}, which nobody waited for, was not saved: {e}", self.step);
        }
    }
}

fn argument(what: String) -> Error {
    let op = "checkpoint".into();
    ErrorKind::Argument { op, what }.into()
}

/// A save whose snapshots are taken.
struct Begun {
    caller: Caller,
    number: u64,
    dir: PathBuf,
    folder: PathBuf,
    asked: Asked,
    manifest: Manifest,
    keep: Option<usize>,
    _in_use: InUse,
}

/// A folder that is saved to, as long as this lives.
struct InUse(Arc<Table>, PathBuf);

impl InUse {
    fn of(table: Arc<Table>, folder: &Path) -> Result<Self> {
        if !lock(&table.in_use).insert(folder.to_owned()) {
            return Err(argument(format!(
                "{} is being saved to; wait for that save to end",
                folder.display()
            )));
        }
        Ok(InUse(table, folder.to_owned()))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        lock(&self.0.in_use).remove(&self.1);
    }
}

pub(super) fn save(dir: &Path, step: u64, save: Save<'_>) -> Result<Saved> {
    Begun::new(dir, step, save)?.end()
}

pub(super) fn save_async(dir: &Path, step: u64, save: Save<'_>) -> Result<Saving> {
    let begun = Begun::new(dir, step, save)?;
    let thread = std::thread::Builder::new()
        .name("rankgrad-checkpoint".into())
        .spawn(move || begun.end())
        .map_err(|e| ErrorKind::Io {
            operation: "a thread to end a save".into(),
            text: e.to_string(),
        })?;
    let thread = Some(thread);
    Ok(Saving { thread, step })
}

/// What each owner is asked to save.
fn requests(names: &Names, optimizers: &[(String, &dyn Saveable)], slots: &[Vec<String>]) -> Result<BTreeMap<u32, Request>> {
    let mut requests: BTreeMap<u32, Request> = BTreeMap::new();
    for (owner, parameters) in names.by_owner() {
        requests.entry(owner).or_default().0 = parameters;
    }
    for ((name, optimizer), slots) in optimizers.iter().zip(slots) {
        for (owner, part) in optimizer.parts(slots, None)? {
            requests.entry(owner).or_default().1.push((name.clone(), part));
        }
    }
    Ok(requests)
}

/// Parameters, and parts of optimizers, by name.
type Request = (Vec<(String, RRef<Tensor>)>, Vec<(String, OwnerPart)>);

impl Begun {
    /// Takes a snapshot on all owners, between two steps of each. Blocks until all have it.
    fn new(dir: &Path, step: u64, save: Save<'_>) -> Result<Self> {
        let mut names = Names::default();
        names.add(&save.parameters)?;
        let listed: Vec<_> = save.optimizers.iter().map(|(_, optimizer)| optimizer.listed()).collect();
        listed.iter().try_for_each(|list| names.add(list))?;
        let slots: Vec<_> = listed.iter().map(|list| names.slots(list)).collect();
        let Some((_, first)) = names.iter().next() else {
            return Err(argument("neither parameters nor optimizers".into()));
        };
        let caller = Caller {
            runtime: first.runtime().clone(),
            recorder: None,
            window: Windowed::Block,
            limit: None,
        };
        caller.runtime.check_alive("checkpoint")?;
        let dir = std::path::absolute(dir).map_err(|e| argument(format!("{}: {e}", dir.display())))?;
        let folder = folder::of_step(&dir, step);
        if folder.to_str().is_none() {
            return Err(argument(format!("{}: not UTF-8", folder.display())));
        }
        let in_use = InUse::of(Table::of(&caller.runtime), &folder)?;
        let number = super::number();
        let mut manifest = Manifest {
            format: FORMAT,
            library: env!("CARGO_PKG_VERSION").into(),
            step,
            ranks: caller.runtime.size(),
            shards: vec![],
            parameters: BTreeMap::new(),
            arrays: BTreeMap::new(),
            optimizers: BTreeMap::new(),
            values: save.values,
        };
        for ((name, optimizer), slots) in save.optimizers.iter().zip(&slots) {
            let facts = manifest::Optimizer {
                kind: optimizer.kind().into(),
                header: optimizer.header(slots)?,
                state: BTreeMap::new(),
            };
            if manifest.optimizers.insert(name.clone(), facts).is_some() {
                return Err(argument(format!("two optimizers are called `{name}`")));
            }
        }
        let requests = requests(&names, &save.optimizers, &slots)?;
        make_folder(&folder)?;
        let asked = requests.into_iter().enumerate().map(|(shard, (owner, (parameters, optimizers)))| {
            let file = format!("shard-{owner:05}-{number:016x}.safetensors");
            let path = folder.join(&file);
            manifest.shards.push(manifest::Shard {
                file,
                owner,
                bytes: 0,
                crc32: 0,
            });
            let metadata = BTreeMap::from([("rankgrad".to_owned(), format!("step {step}, rank {owner}"))]);
            let take = Take {
                number,
                path,
                metadata,
                shard,
                parameters,
                optimizers,
            };
            let write = |bytes: &mut Vec<u8>| crate::wire::write(&(take,), bytes);
            (owner, ask(&caller, owner, take_snapshot(), &Asking::QUEUED, write))
        });
        let asked: Asked = asked.collect();
        let taken = gather("checkpoint: snapshot", collect::<()>(asked), false);
        // Also of those that have one if others have not: so they forget it.
        let owners = manifest.shards.iter().map(|shard| shard.owner);
        let written = |owner| {
            let write = |bytes: &mut Vec<u8>| crate::wire::write(&(number,), bytes);
            (owner, ask(&caller, owner, shard_written(), &Asking::default(), write))
        };
        let asked = owners.map(written).collect();
        let begun = Begun {
            caller: caller.clone(),
            number,
            dir,
            folder,
            asked,
            manifest,
            keep: save.keep,
            _in_use: in_use,
        };
        match taken {
            Ok(_) => Ok(begun),
            Err(error) => {
                begun.give_up();
                Err(error)
            }
        }
    }

    /// Waits for the shards, writes the manifest, and removes what is old.
    fn end(mut self) -> Result<Saved> {
        let written = collect::<Written>(std::mem::take(&mut self.asked));
        let ended = gather("checkpoint: shard", written, false).and_then(|written| {
            let bytes = written.iter().map(|w| w.bytes).sum();
            self.note(written)?;
            self.manifest.write(&self.folder)?;
            Ok(bytes)
        });
        match ended {
            Ok(bytes) => {
                let in_use = lock(&Table::of(&self.caller.runtime).in_use).clone();
                folder::prune(&self.dir, self.manifest.step, &self.manifest, self.keep, &in_use);
                let path = self.folder;
                Ok(Saved { path, bytes })
            }
            Err(error) => {
                self.give_up();
                Err(error)
            }
        }
    }

    fn note(&mut self, written: Vec<Written>) -> Result<()> {
        for (shard, written) in self.manifest.shards.iter_mut().zip(written) {
            (shard.bytes, shard.crc32) = (written.bytes, written.crc32);
            self.manifest.parameters.extend(written.parameters);
            for (optimizer, slot, state) in written.states {
                let facts = self.manifest.optimizers.get_mut(&optimizer);
                let facts = facts.ok_or_else(|| format(&self.folder, format_args!("an owner has saved an optimizer `{optimizer}`")))?;
                facts.state.insert(slot, state);
            }
        }
        self.manifest.arrays = rows::arrays(&self.manifest.parameters);
        Ok(())
    }

    /// Removes what was written, once no owner writes any more.
    fn give_up(self) {
        let _: Answers<Written> = collect(self.asked);
        let ending = format!("-{:016x}.safetensors", self.number);
        let placed = |manifest: Manifest| manifest.shards.iter().any(|shard| shard.file.ends_with(&ending));
        if Manifest::read(&self.folder).is_ok_and(placed) {
            // The checkpoint is there; all that failed is to make sure that it outlives a loss of power.
            return;
        }
        let files = self.manifest.shards.iter().map(|shard| &shard.file);
        let files = files.filter(|file| file.ends_with(&ending)).map(|file| self.folder.join(file));
        files.filter(|file| file.exists()).for_each(|file| remove_file(&file));
        file::remove_if_empty(&self.folder);
    }
}

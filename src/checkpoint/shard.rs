//! What owners do: write their shard from a snapshot, read from shards, put in place what was read.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::file::{self, Sum, misfit, wrong};
use super::manifest::{NAME, Parameter, State, parameter_name, state_name};
use super::rows::{self, Cut, Source};
use super::safetensors::{self, Entry, Reader};
use super::table::Table;
use crate::dist::{OwnerPart, Staged, States, parameter_here};
use crate::error::CheckpointFault;
use crate::optim::ParameterState;
use crate::rpc::{Calls, Scope};
use crate::rref::RRef;
use crate::tensor::{Data, Tensor};
use crate::{ErrorKind, Result};

/// What an owner is to save.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Take {
    /// Of this save.
    pub number: u64,
    pub path: PathBuf,
    /// Texts for the file.
    pub metadata: BTreeMap<String, String>,
    /// Its place in the manifest.
    pub shard: usize,
    pub parameters: Vec<(String, RRef<Tensor>)>,
    /// With the optimizers' names.
    pub optimizers: Vec<(String, OwnerPart)>,
}

/// What an owner has saved.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Written {
    pub bytes: u64,
    pub crc32: u32,
    pub parameters: Vec<(String, Parameter)>,
    /// By optimizer and slot.
    pub states: Vec<(String, String, State)>,
}

/// What an owner is to put in place.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Put {
    /// Of this restore.
    pub number: u64,
    /// The files, by their places in the manifest.
    pub files: Vec<PathBuf>,
    pub parameters: Vec<(String, RRef<Tensor>, Vec<Source<Parameter>>)>,
    /// Name, part, and the states that there are.
    pub optimizers: Vec<(String, OwnerPart, rows::States)>,
}

/// Everything of an owner at one moment: arrays are shared with the parameters and states until those change.
struct Snapshot {
    entries: Vec<Entry>,
    written: Written,
}

impl Snapshot {
    fn take(scope: &Scope, shard: usize, parameters: Vec<(String, RRef<Tensor>)>, optimizers: Vec<(String, OwnerPart)>) -> Result<Self> {
        let mut entries = Vec::new();
        let mut add = |name: String, data: Data| entries.push(Entry { name, data });
        let mut written = Written {
            bytes: 0,
            crc32: 0,
            parameters: vec![],
            states: vec![],
        };
        for (name, rref) in parameters {
            let tensor = rref.local(scope)?;
            let (data, version) = match tensor.leaf() {
                Some(leaf) => leaf.versioned(),
                None => (tensor.data(), 0),
            };
            let facts = Parameter {
                shard,
                dtype: data.dtype(),
                shape: data.shape().to_vec(),
                version,
                requires_grad: tensor.leaf().is_some_and(|leaf| leaf.requires_grad()),
                is_leaf: tensor.leaf().is_some(),
            };
            add(parameter_name(&name), data);
            written.parameters.push((name, facts));
        }
        for (optimizer, part) in optimizers {
            for (slot, state) in part.read(scope)? {
                let names = State {
                    shard,
                    scalars: state.scalars().map(|(name, _)| name.to_owned()).collect(),
                    arrays: state.arrays().map(|(name, _)| name.to_owned()).collect(),
                };
                for (name, value) in state.scalars() {
                    add(state_name(&optimizer, &slot, name), Tensor::scalar(value).data());
                }
                for (name, data) in state.arrays() {
                    add(state_name(&optimizer, &slot, name), data.clone());
                }
                written.states.push((optimizer.clone(), slot, names));
            }
        }
        Ok(Snapshot { entries, written })
    }

    fn write(self, path: PathBuf, metadata: BTreeMap<String, String>) -> Result<Written> {
        let Sum { bytes, crc32 } = safetensors::write(path, self.entries, metadata)?;
        Ok(Written {
            bytes,
            crc32,
            ..self.written
        })
    }
}

/// Files of a checkpoint, each opened when it is needed first.
struct Shards {
    files: Vec<PathBuf>,
    open: HashMap<usize, Reader>,
}

impl Shards {
    fn new(files: Vec<PathBuf>) -> Self {
        let open = HashMap::new();
        Shards { files, open }
    }

    fn reader(&mut self, shard: usize) -> Result<&mut Reader> {
        let Some(path) = self.files.get(shard) else {
            let (operation, id) = ("restore".into(), format!("shard {shard}"));
            return Err(ErrorKind::NoSuchValue { operation, owner: 0, id }.into());
        };
        Ok(match self.open.entry(shard) {
            std::collections::hash_map::Entry::Occupied(open) => open.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => place.insert(Reader::open(path)?),
        })
    }

    fn read(&mut self, shard: usize, name: &str) -> Result<Data> {
        self.reader(shard)?.read(name)
    }

    fn differs(&self, shard: usize, what: String) -> crate::Error {
        let path = self.files.get(shard).cloned().unwrap_or_default();
        wrong(&path, CheckpointFault::Mismatch { what })
    }

    /// An error over an array of a file, with the file.
    fn unfit(&self, shard: usize, name: &str, error: crate::Error) -> crate::Error {
        misfit(&format!("`{name}`"), error).map_or_else(|e| e, |what| self.differs(shard, what))
    }

    /// A parameter from its sources.
    fn parameter(&mut self, name: &str, sources: Vec<Source<Parameter>>) -> Result<(Data, Parameter)> {
        let read = |Source { name, facts, cut }: &Source<Parameter>| {
            let full = parameter_name(name);
            let found = self.reader(facts.shard)?.shape(&full)?.to_vec();
            if found != facts.shape {
                return Err(self.differs(
                    facts.shard,
                    format!("`{full}` is {found:?} in it, and {:?} in the manifest", facts.shape),
                ));
            }
            match cut {
                Some(Cut { rows, .. }) => self.reader(facts.shard)?.read_rows(&full, rows.clone()),
                None => self.read(facts.shard, &full),
            }
        };
        let data: Vec<Data> = sources.iter().map(read).collect::<Result<_>>()?;
        let shard = sources.first().map_or(0, |source| source.facts.shard);
        let joined = rows::joined(data).map_err(|e| self.differs(shard, format!("the rows of `{name}`: {e}")))?;
        Ok((joined, rows::same_facts(sources).map_err(|what| self.differs(shard, what))?))
    }

    /// A state from its sources.
    fn merged_state(&mut self, optimizer: &str, sources: &[Source<State>]) -> Result<ParameterState> {
        let shard = sources.first().map_or(0, |source| source.facts.shard);
        let states: Vec<_> = sources
            .iter()
            .map(|source| Ok((source.name.clone(), self.state(optimizer, source)?)))
            .collect::<Result<_>>()?;
        rows::merged(states).map_err(|what| self.differs(shard, what))
    }

    fn state(&mut self, optimizer: &str, source: &Source<State>) -> Result<ParameterState> {
        let Source { name: slot, facts, cut } = source;
        let array = |name: &String| {
            let reader = self.reader(facts.shard)?;
            let full = state_name(optimizer, slot, name);
            let Some(Cut { rows, shape }) = cut else {
                return Ok((name.clone(), reader.read(&full)?));
            };
            if reader.shape(&full)? != shape {
                let what = format!("`{full}` isn't of its parameter's shape {shape:?}, so it can't be cut; split the array as it was");
                return Err(self.differs(facts.shard, what));
            }
            Ok((name.clone(), reader.read_rows(&full, rows.clone())?))
        };
        let arrays = facts.arrays.iter().map(array).collect::<Result<_>>()?;
        let scalar = |name: &String| {
            let full = state_name(optimizer, slot, name);
            let data = self.read(facts.shard, &full)?;
            let number = Tensor::from_data(data).item();
            Ok((name.clone(), number.map_err(|e| self.unfit(facts.shard, &full, e))?))
        };
        let scalars = facts.scalars.iter().map(scalar).collect::<Result<_>>()?;
        Ok(ParameterState::from_parts(scalars, arrays))
    }
}

/// A tensor's values to be put in place.
fn stage_tensor(scope: &Scope, path: &Path, name: &str, rref: RRef<Tensor>, data: Data, facts: Parameter) -> Result<Staged> {
    let tensor = rref.local(scope)?;
    let here = (tensor.dtype(), tensor.shape(), tensor.leaf().is_some());
    let there = (data.dtype(), data.shape().to_vec(), facts.is_leaf);
    if here != there {
        let kind = |leaf| if leaf { "a parameter" } else { "a constant" };
        let what = format!(
            "`{name}` is {} {:?} ({}) in it, and {} {:?} ({}) here",
            there.0,
            there.1,
            kind(there.2),
            here.0,
            here.1,
            kind(here.2)
        );
        return Err(wrong(path, CheckpointFault::Mismatch { what }));
    }
    let caller = scope.caller().clone();
    // Where it lives: what can fail is done before anything is put in place.
    let data = data.to(tensor.device())?;
    Ok(Staged::new(move || match tensor.leaf() {
        Some(leaf) => leaf.restore(data, facts.version, facts.requires_grad),
        None => {
            let put = rref.modify("restore", &caller, |tensor| {
                *tensor = Tensor::from_data(data);
                Ok(())
            });
            if let Err(e) = put {
                log::error!("a constant that was there a moment ago can't be restored: {e}");
            }
        }
    }))
}

crate::remote! {
    /// Takes a snapshot and starts to write it. Waits until the one before it is written.
    pub(super) fn take_snapshot(scope: &Scope, take: Take) -> Result<()> {
        let Take { number, path, metadata, shard, parameters, optimizers } = take;
        let runtime = &scope.caller().runtime;
        Table::of(runtime).write(runtime, number, || {
            let snapshot = Snapshot::take(scope, shard, parameters, optimizers)?;
            Ok(move || snapshot.write(path, metadata))
        })
    }

    /// Answers when the shard is on the disk.
    pub(super) fn shard_written(scope: &Scope, number: u64) -> Result<Written> {
        let runtime = &scope.caller().runtime;
        Table::of(runtime).written(runtime, number)
    }

    /// Reads a file through.
    pub(super) fn verify_shard(scope: &Scope, path: PathBuf, bytes: u64, crc32: u32) -> Result<()> {
        let pool = &scope.caller().runtime.pool;
        pool.blocking(|| file::verify(&path, Sum { bytes, crc32 }))
    }

    /// Reads and checks everything for this owner; changes nothing.
    pub(super) fn stage_restore(scope: &Scope, put: Put) -> Result<()> {
        let Put { number, files, parameters, optimizers } = put;
        let runtime = &scope.caller().runtime;
        let staged = runtime.pool.blocking(|| {
            let (mut staged, mut shards) = (Vec::new(), Shards::new(files.clone()));
            for (name, rref, sources) in parameters {
                let (data, facts) = shards.parameter(&name, sources)?;
                let path = files.get(facts.shard).cloned().unwrap_or_default();
                staged.push(stage_tensor(scope, &path, &name, rref, data, facts)?);
            }
            for (optimizer, part, states) in optimizers {
                let read = |(slot, sources): (String, Vec<Source<State>>)| {
                    let read = shards.merged_state(&optimizer, &sources)?;
                    Ok((slot, read))
                };
                let mut states: States = states.into_iter().map(read).collect::<Result<_>>()?;
                let manifest = files.first().map(|file| file.with_file_name(NAME)).unwrap_or_default();
                let differs = |what| wrong(&manifest, CheckpointFault::Mismatch { what });
                let part = part.stage(scope, &mut states);
                staged.push(part.map_err(|e| misfit(&format!("optimizer `{optimizer}`"), e).map_or_else(|e| e, differs))?);
            }
            Ok::<_, crate::Error>(staged)
        })?;
        Table::of(runtime).stage(number, staged);
        Ok(())
    }

    /// Puts in place what was read.
    pub(super) fn apply_restore(scope: &Scope, number: u64) -> Result<()> {
        let runtime = &scope.caller().runtime;
        Table::of(runtime).staged(runtime, number)?.into_iter().for_each(Staged::apply);
        Ok(())
    }

    /// There will be nothing to put in place.
    pub(super) fn drop_restore(scope: &Scope, number: u64) -> Result<()> {
        Table::of(&scope.caller().runtime).forget(number);
        Ok(())
    }

    /// Makes tensors of this rank from a checkpoint.
    pub(super) fn make_tensors(scope: &Scope, files: Vec<PathBuf>, list: Vec<(String, Parameter)>) -> Result<Vec<RRef<Tensor>>> {
        let mut shards = Shards::new(files);
        let make = |(name, facts): (String, Parameter)| {
            let data = shards.read(facts.shard, &parameter_name(&name))?;
            let tensor = Tensor::from_data(data);
            if !facts.is_leaf {
                return Ok(tensor);
            }
            let tensor = parameter_here(scope, tensor).map_err(|e| shards.unfit(facts.shard, &name, e))?;
            if let Some(leaf) = tensor.leaf() {
                leaf.set_name(name);
                leaf.restore(leaf.data(), facts.version, facts.requires_grad);
            }
            Ok(tensor)
        };
        let tensors: Vec<Tensor> = scope.caller().runtime.pool.blocking(|| list.into_iter().map(make).collect::<Result<_>>())?;
        tensors.into_iter().map(|tensor| scope.share(tensor)).collect()
    }
}

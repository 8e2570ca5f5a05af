//! Restoring: into parameters and optimizers that are there.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::file::{misfit, wrong};
use super::manifest::{self, Manifest, NAME, Parameter};
use super::names::Names;
use super::rows::{self, Source};
use super::save::ALONE;
use super::shard::{Put, apply_restore, drop_restore, stage_restore};
use crate::dist::{Asking, OwnerPart, Saveable, ask, collect, gather};
use crate::error::CheckpointFault;
use crate::rpc::{Caller, Calls};
use crate::rref::RRef;
use crate::runtime::Windowed;
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Result};

/// What a checkpoint is loaded into: the same optimizers, under the same names, as the [`Save`](super::Save) had, and further parameters. Made
/// from a mutable reference to an optimizer alone, too. Ranks may be others, in number and in what they own: parameters are found by name.
#[derive(Default)]
pub struct Restore<'a> {
    parameters: Vec<(String, RRef<Tensor>)>,
    optimizers: Vec<(String, &'a mut dyn Saveable)>,
    partly: bool,
}

impl std::fmt::Debug for Restore<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restore")
            .field("parameters", &self.parameters.len())
            .field("optimizers", &self.optimizers.iter().map(|o| &o.0).collect::<Vec<_>>())
            .field("partly", &self.partly)
            .finish()
    }
}

impl<'a, S: Saveable> From<&'a mut S> for Restore<'a> {
    fn from(optimizer: &'a mut S) -> Self {
        Restore::new().optimizer(ALONE, optimizer)
    }
}

impl<'a> Restore<'a> {
    /// Nothing yet. Local.
    pub fn new() -> Self {
        Restore::default()
    }

    /// Adds parameters, as [`Save::parameters`](super::Save::parameters) has them. Local.
    pub fn parameters<N: Into<String>, R: Borrow<RRef<Tensor>>>(mut self, parameters: impl IntoIterator<Item = (N, R)>) -> Self {
        let parameters = parameters.into_iter();
        self.parameters
            .extend(parameters.map(|(name, rref)| (name.into(), rref.borrow().clone())));
        self
    }

    /// Adds an optimizer, as [`Save::optimizer`](super::Save::optimizer) has it. Local.
    pub fn optimizer(mut self, name: impl Into<String>, optimizer: &'a mut impl Saveable) -> Self {
        self.optimizers.push((name.into(), optimizer));
        self
    }

    /// Lets the checkpoint have more parameters and optimizers than these. Otherwise that is an error. Local.
    pub fn partly(mut self) -> Self {
        self.partly = true;
        self
    }
}

/// What one owner is to put in place: parameters, and parts of optimizers.
#[derive(Default)]
struct Request {
    parameters: Vec<(String, RRef<Tensor>, Vec<Source<Parameter>>)>,
    optimizers: Vec<(String, OwnerPart, rows::States)>,
}

/// A manifest, its path, and what is to be restored from it.
struct Plan<'a> {
    manifest: &'a Manifest,
    path: PathBuf,
    names: Names,
    slots: Vec<Vec<String>>,
}

pub(super) fn restore(folder: &Path, manifest: &Manifest, mut restore: Restore<'_>) -> Result<()> {
    let mut names = Names::default();
    names.add(&restore.parameters)?;
    let listed: Vec<_> = restore.optimizers.iter().map(|(_, optimizer)| optimizer.listed()).collect();
    listed.iter().try_for_each(|list| names.add(list))?;
    let slots: Vec<_> = listed.iter().map(|list| names.slots(list)).collect();
    let plan = Plan {
        manifest,
        path: folder.join(NAME),
        names,
        slots,
    };
    plan.check(&restore)?;
    let requests = plan.requests(&restore)?;
    let Some((_, first)) = plan.names.iter().next() else {
        return Err(plan.differs("nothing is to be restored".into()));
    };
    let caller = Caller {
        runtime: first.runtime().clone(),
        recorder: None,
        window: Windowed::Block,
        limit: None,
    };
    let number = super::number();
    let owners: Vec<u32> = requests.keys().copied().collect();
    let files: Vec<PathBuf> = manifest.shards.iter().map(|shard| folder.join(&shard.file)).collect();
    let asked = requests.into_iter().map(|(owner, Request { parameters, optimizers })| {
        let put = Put {
            number,
            files: files.clone(),
            parameters,
            optimizers,
        };
        let write = |bytes: &mut Vec<u8>| crate::wire::write(&(put,), bytes);
        (owner, ask(&caller, owner, stage_restore(), &Asking::QUEUED, write))
    });
    let staged = gather("restore (nothing was loaded)", collect::<()>(asked.collect()), false);
    let ready = staged.map_err(crate::dist::without_updates).and_then(|_| {
        let mut optimizers = restore.optimizers.iter_mut().zip(&plan.slots);
        optimizers.try_for_each(|((name, optimizer), slots)| optimizer.take_over(slots, &manifest.optimizers[name.as_str()].header))
    });
    if let Err(error) = ready {
        for &owner in &owners {
            if let Err(e) = caller.call_async(owner, drop_restore, (number,)) {
                log::warn!("rank {owner} may keep what a restore has read: {e}");
            }
        }
        return Err(error);
    }
    let apply = |&owner: &u32| {
        let write = |bytes: &mut Vec<u8>| crate::wire::write(&(number,), bytes);
        (owner, ask(&caller, owner, apply_restore(), &Asking::QUEUED, write))
    };
    gather("restore", collect::<()>(owners.iter().map(apply).collect()), true).map(drop)
}

impl Plan<'_> {
    /// Before anything was loaded.
    fn differs(&self, what: String) -> Error {
        let what = format!("{what}; nothing was loaded");
        wrong(&self.path, CheckpointFault::Mismatch { what })
    }

    /// Whether the checkpoint has what is to be restored, and, unless it is to be restored in part, nothing else.
    fn check(&self, restore: &Restore<'_>) -> Result<()> {
        let compare = |what: &str, there: BTreeSet<&str>, here: BTreeSet<&str>| {
            let lacks: Vec<_> = here.difference(&there).collect();
            let more: Vec<_> = there.difference(&here).filter(|_| !restore.partly).collect();
            if lacks.is_empty() && more.is_empty() {
                return Ok(());
            }
            let lacks = (!lacks.is_empty()).then(|| format!("it lacks the {what} {lacks:?}"));
            let more = (!more.is_empty()).then(|| format!("it has {more:?}, which aren't asked for"));
            let differs: Vec<String> = lacks.into_iter().chain(more).collect();
            Err(self.differs(differs.join(", and ")))
        };
        let optimizers: BTreeSet<&str> = restore.optimizers.iter().map(|(name, _)| name.as_str()).collect();
        if optimizers.len() < restore.optimizers.len() {
            let what = "two optimizers of one name".into();
            return Err(ErrorKind::Argument {
                op: "restore".into(),
                what,
            }
            .into());
        }
        compare(
            "optimizers",
            self.manifest.optimizers.keys().map(String::as_str).collect(),
            optimizers,
        )?;
        // Rows may be dealt otherwise.
        let here = self.names.iter().map(|(name, _)| self.manifest.array_of(name)).collect();
        let there = self.manifest.parameters.keys().map(|name| self.manifest.array_of(name)).collect();
        compare("parameters", there, here)?;
        match restore.partly {
            true => Ok(()),
            false => self.manifest.check_rows(self.names.iter().map(|(name, _)| name.as_str())),
        }
        .map_err(|what| self.differs(what))
    }

    fn requests(&self, restore: &Restore<'_>) -> Result<BTreeMap<u32, Request>> {
        let mut requests: BTreeMap<u32, Request> = BTreeMap::new();
        for (name, rref) in self.names.iter() {
            let sources = self.manifest.parameter_sources(name).map_err(|what| self.differs(what))?;
            let request = requests.entry(rref.owner()).or_default();
            request.parameters.push((name.clone(), rref.clone(), sources));
        }
        for ((name, optimizer), slots) in restore.optimizers.iter().zip(&self.slots) {
            let manifest::Optimizer { kind, header, state } = &self.manifest.optimizers[name.as_str()];
            if *kind != optimizer.kind() {
                return Err(self.differs(format!(
                    "optimizer `{name}` is of kind `{kind}`, and here of `{}`",
                    optimizer.kind()
                )));
            }
            let parts = optimizer.parts(slots, Some(header));
            let parts = parts.map_err(|e| misfit(&format!("optimizer `{name}`"), e).map_or_else(|e| e, |what| self.differs(what)))?;
            for (owner, part) in parts {
                let mut states = BTreeMap::new();
                for slot in part.slots() {
                    let sources = self.manifest.state_sources(state, slot).map_err(|what| self.differs(what))?;
                    if !sources.is_empty() {
                        states.insert(slot.clone(), sources);
                    }
                }
                requests.entry(owner).or_default().optimizers.push((name.clone(), part, states));
            }
        }
        Ok(requests)
    }
}

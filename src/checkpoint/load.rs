//! Finding a checkpoint, and what can be done with it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::file::wrong;
use super::folder;
use super::manifest::{Manifest, NAME, Parameter};
use super::restore::{Restore, restore};
use super::save::{Save, Saved, Saving, save, save_async};
use super::shard::{make_tensors, verify_shard};
use crate::error::CheckpointFault;
use crate::rpc::{Caller, Calls};
use crate::rref::RRef;
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Result};

/// A checkpoint on disk that is whole.
///
/// ```
/// use rankgrad::checkpoint::Checkpoint;
/// use rankgrad::prelude::*;
///
/// /// One job: goes on from the last checkpoint, makes steps up to `until`, and saves. Returns the weight.
/// fn job(ranks: u32, dir: &std::path::Path, until: u64) -> Result<f64> {
///     let result = std::sync::Mutex::new(0.0);
///     rankgrad::local::run(ranks, |world| {
///         world.lead(|world| {
///             let weight = world.put(world.owner(1), Tensor::from_vec(vec![4.0], [1])?)?;
///             let mut optimizer = DistributedOptimizer::new(world, Adam::new(0.1), [("weight", &weight)])?;
///             let mut step = 0;
///             if let Some(checkpoint) = Checkpoint::load(world, dir)? {
///                 checkpoint.restore(&mut optimizer)?;
///                 step = checkpoint.step();
///             }
///             for _ in step..until {
///                 let ctx = world.context()?;
///                 let loss = ctx.fetch(&weight)?.pow_scalar(2.0)?.sum()?;
///                 ctx.backward(&[loss])?;
///                 optimizer.step(&ctx)?;
///             }
///             Checkpoint::save(dir, until, &optimizer)?;
///             *result.lock().unwrap() = weight.fetch()?.item::<f64>()?;
///             Ok(())
///         })
///     })?;
///     Ok(result.into_inner().unwrap())
/// }
///
/// # let temp = std::env::temp_dir().join(format!("rankgrad-doc-load-{}", std::process::id()));
/// let (once, twice) = (temp.join("once"), temp.join("twice"));
/// job(2, &twice, 3)?;
/// assert_eq!(job(3, &twice, 5)?, job(2, &once, 5)?); // to the bit, also on other ranks
/// # std::fs::remove_dir_all(temp).unwrap();
/// # Ok::<(), rankgrad::Error>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    skipped: Vec<Skipped>,
}

/// A newer checkpoint than the one that was loaded, that isn't whole.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Skipped {
    /// Its step.
    pub step: u64,
    /// Why it was skipped: [`ErrorKind::Checkpoint`], with the file.
    pub why: Error,
}

impl Checkpoint {
    /// Saves a step in a folder of its own within `dir`, and returns when it is on the disk. Targeted: asks all owners of what is saved; blocks until all
    /// have written their shards. All owners must see the folder under the same name.
    ///
    /// Each owner takes a snapshot between two steps. Steps that have returned are in it; of steps that go on meanwhile, of other clients or threads, some
    /// owners may have more than others. Owners write a shard each, at the same time. The manifest comes last: before, the checkpoint isn't there. A step that was
    /// saved before is replaced at that moment.
    ///
    /// # Errors
    /// The checkpoint isn't there then, and older ones are as they were.
    /// - [`ErrorKind::Argument`]: two parameters or optimizers of one name; nothing to save; a save of this step is under way.
    /// - [`ErrorKind::Checkpoint`] with the folder or manifest, [`ErrorKind::Owners`] with it for shards: the system refused (a full disk, a read-only or
    ///   missing folder).
    pub fn save<'a>(dir: impl AsRef<Path>, step: u64, what: impl Into<Save<'a>>) -> Result<Saved> {
        save(dir.as_ref(), step, what.into())
    }

    /// As [`save`](Self::save), but returns when all owners have taken their snapshots; they write while training goes on. Targeted; blocks until then, and
    /// until the shard that an owner writes from an earlier save is written.
    ///
    /// A snapshot shares arrays with the parameters and states, and an update meanwhile writes elsewhere. So an owner needs memory for at most
    /// one more copy of its shard. Wait for the [`Saving`] before the world is finished.
    ///
    /// # Errors
    /// As [`save`](Self::save), for the snapshot; [`Saving::wait`] for the rest.
    pub fn save_async<'a>(dir: impl AsRef<Path>, step: u64, what: impl Into<Save<'a>>) -> Result<Saving> {
        save_async(dir.as_ref(), step, what.into())
    }

    /// The newest whole checkpoint in `dir`; `None` if no save there has come to its end. Ranks read all its files through, each some of them. Targeted; blocks until
    /// they have. It says in the log, and in [`skipped`](Self::skipped), which newer ones it left out and why.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] if there are checkpoints and none is whole, or the folder can't be listed. As [`Calls::call`].
    pub fn load(at: &impl Calls, dir: impl AsRef<Path>) -> Result<Option<Checkpoint>> {
        let dir = absolute(dir.as_ref())?;
        let mut skipped: Vec<Skipped> = Vec::new();
        for (step, _) in folder::steps(&dir)? {
            match Self::open(at, &dir, step) {
                Ok(checkpoint) => return Ok(Some(Checkpoint { skipped, ..checkpoint })),
                Err(why) => match why.root() {
                    ErrorKind::Checkpoint { .. } => {
                        log::warn!("the checkpoint of step {step} was skipped: {why}");
                        let why = why.root().clone().into();
                        skipped.push(Skipped { step, why });
                    }
                    _ => return Err(why),
                },
            }
        }
        let ended = |s: &&Skipped| {
            let unfinished = CheckpointFault::Unfinished;
            !matches!(s.why.kind(), ErrorKind::Checkpoint { fault, .. } if *fault == unfinished)
        };
        if skipped.iter().any(|s| ended(&s)) {
            let skipped = skipped.iter().map(|s| s.why.to_string()).collect();
            return Err(wrong(&dir, CheckpointFault::NoneWhole { skipped }));
        }
        Ok(None)
    }

    /// The checkpoint of one step, if it is whole. As [`load`](Self::load).
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`], within [`ErrorKind::Remote`] if another rank found it, with the file that is missing, was changed, is of a newer format
    /// or can't be read. As [`Calls::call`].
    pub fn open(at: &impl Calls, dir: impl AsRef<Path>, step: u64) -> Result<Checkpoint> {
        let (caller, dir) = (plain(at), absolute(dir.as_ref())?);
        let folder = folder::of_step(&dir, step);
        let manifest = folder::manifest(&dir, step)?;
        let ranks = caller.size();
        let ask = |shard: &super::manifest::Shard| {
            let (path, sum) = (folder.join(&shard.file), shard.sum());
            caller.call_async(shard.owner % ranks, verify_shard, (path, sum.bytes, sum.crc32))
        };
        let asked: Vec<_> = manifest.shards.iter().map(ask).collect::<Result<_>>()?;
        let answers: Vec<Result<()>> = asked.into_iter().map(|future| future.wait()).collect();
        answers.into_iter().collect::<Result<()>>()?;
        Ok(Checkpoint {
            folder,
            manifest,
            skipped: vec![],
        })
    }

    /// Steps that have a manifest in `dir`, ascending; whether they are whole shows when they are opened. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] if the folder can't be listed.
    pub fn steps(dir: impl AsRef<Path>) -> Result<Vec<u64>> {
        let mut steps = folder::steps(dir.as_ref())?;
        steps.retain(|(_, folder)| folder.join(NAME).is_file());
        Ok(steps.into_iter().rev().map(|(step, _)| step).collect())
    }

    /// The step that it was saved as. Local.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Its folder. Local.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// The number of ranks that it was saved by. Local.
    pub fn ranks(&self) -> u32 {
        self.manifest.ranks
    }

    /// Newer ones that weren't whole, the newest first. Local.
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// The names of its parameters. Local.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.manifest.parameters.keys().map(String::as_str)
    }

    /// A value that [`Save::value`] added. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] if there is none of this name, or it is of another type.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let differs = |what| wrong(&self.folder.join(NAME), CheckpointFault::Mismatch { what });
        let value = self.manifest.values.get(name);
        let value = value.ok_or_else(|| differs(format!("it has no value `{name}`")))?;
        serde_json::from_value(value.clone()).map_err(|e| differs(format!("value `{name}`: {e}")))
    }

    /// Puts all of it in place: values and versions of parameters, whether they are frozen, options and states of optimizers. The next step continues from
    /// there, to the bit. Targeted; asks all owners of what is restored, twice: all read and check before any puts something in place. Blocks until all have
    /// answered.
    ///
    /// # Errors
    /// Nothing was loaded then, unless an owner was lost in the second round.
    /// - [`ErrorKind::Checkpoint`]: it is of other parameters or optimizers than these.
    /// - [`ErrorKind::Owners`] with every owner that failed: [`ErrorKind::Checkpoint`] for a shape or dtype that differs, a state that the rule doesn't keep, or a file
    ///   that can't be read any more.
    pub fn restore<'a>(&self, into: impl Into<Restore<'a>>) -> Result<()> {
        restore(&self.folder, &self.manifest, into.into())
    }

    /// Makes all its parameters anew, by name, for a program that doesn't make them itself: on the owners that they had; on another number of ranks
    /// dealt so that each gets about as many bytes. Owners read their parameters from the files. Targeted; blocks until all have answered.
    ///
    /// # Errors
    /// [`ErrorKind::Remote`] with [`ErrorKind::Checkpoint`] for a file that can't be read any more. As [`Calls::call`].
    pub fn parameters(&self, at: &impl Calls) -> Result<BTreeMap<String, RRef<Tensor>>> {
        let caller = plain(at);
        let files: Vec<PathBuf> = self.manifest.shards.iter().map(|s| self.folder.join(&s.file)).collect();
        let dealt = self.deal(caller.size()).into_iter().filter(|(_, list)| !list.is_empty());
        let asked: Vec<_> = dealt
            .map(|(owner, list)| {
                let names: Vec<String> = list.iter().map(|(name, _)| name.clone()).collect();
                Ok((names, caller.call_async(owner, make_tensors, (&files, list))?))
            })
            .collect::<Result<_>>()?;
        let mut made = BTreeMap::new();
        for (names, future) in asked {
            made.extend(names.into_iter().zip(future.wait()?));
        }
        Ok(made)
    }

    /// The parameters of each rank.
    fn deal(&self, ranks: u32) -> BTreeMap<u32, Vec<(String, Parameter)>> {
        let mut list: Vec<(&String, &Parameter)> = self.manifest.parameters.iter().collect();
        let bytes = |p: &Parameter| p.shape.iter().fold(p.dtype.size(), |bytes, &n| bytes.saturating_mul(n));
        list.sort_by_key(|(_, p)| std::cmp::Reverse(bytes(p)));
        let mut dealt: BTreeMap<u32, (usize, Vec<_>)> = (0..ranks).map(|rank| (rank, Default::default())).collect();
        for (name, facts) in list {
            let lightest = || dealt.iter().min_by_key(|(_, (bytes, _))| *bytes).map_or(0, |(rank, _)| *rank);
            let owner = match ranks == self.manifest.ranks {
                true => self.manifest.shards[facts.shard].owner,
                false => lightest(),
            };
            let (sum, list) = dealt.entry(owner).or_default();
            *sum = sum.saturating_add(bytes(facts));
            list.push((name.clone(), facts.clone()));
        }
        dealt.into_iter().map(|(rank, (_, list))| (rank, list)).collect()
    }
}

fn absolute(dir: &Path) -> Result<PathBuf> {
    std::path::absolute(dir).map_err(|e| {
        let (operation, text) = ("absolute path".into(), e.to_string());
        wrong(dir, CheckpointFault::Io { operation, text })
    })
}

/// Calls that no context records.
fn plain(at: &impl Calls) -> Caller {
    Caller {
        recorder: None,
        ..at.caller().clone()
    }
}

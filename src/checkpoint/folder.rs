//! The folder of a run: a folder for each step that was saved.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::file::{io_error, remove_file, remove_folder, sync_folder, wrong};
use super::manifest::{self, Manifest};
use crate::Result;
use crate::error::CheckpointFault;

/// Where a step is saved.
pub(super) fn of_step(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step-{step:010}"))
}

/// All steps in a folder, the last one first; none if there is no folder.
pub(super) fn steps(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        Err(e) => return Err(io_error(dir, "list")(e)),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io_error(dir, "list"))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok());
        steps.extend(step.map(|step| (step, entry.path())));
    }
    steps.sort_by(|a, b| b.cmp(a));
    Ok(steps)
}

/// Removes what the checkpoint at `step`, just written, makes useless: files of its folder that it doesn't name, steps before it that never got a
/// manifest, and with `keep` all but so many, itself and the last ones before it.
///
/// Folders `in_use` stay.
pub(super) fn prune(dir: &Path, step: u64, manifest: &Manifest, keep: Option<usize>, in_use: &HashSet<PathBuf>) {
    let own = of_step(dir, step);
    let named: HashSet<&str> = manifest.shards.iter().map(|s| s.file.as_str()).chain([manifest::NAME]).collect();
    for file in files(&own) {
        if !file
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| named.contains(name))
        {
            remove_file(&file);
        }
    }
    let before = match steps(dir) {
        Ok(steps) => steps
            .into_iter()
            .filter(|(other, folder)| *other < step && !in_use.contains(folder)),
        Err(e) => return log::warn!("old checkpoints stay: {e}"),
    };
    let mut kept = 1;
    for (_, folder) in before {
        let has_manifest = folder.join(manifest::NAME).is_file();
        if has_manifest && keep.is_none_or(|keep| kept < keep) {
            kept += 1;
        } else {
            remove(&folder);
        }
    }
}

/// Removes a checkpoint: first its manifest, so that it is never there in part.
fn remove(folder: &Path) {
    let manifest = folder.join(manifest::NAME);
    if manifest.exists() {
        remove_file(&manifest);
        if let Err(e) = sync_folder(folder) {
            return log::warn!("an old checkpoint stays: {e}");
        }
    }
    files(folder).iter().for_each(|file| remove_file(file));
    remove_folder(folder);
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// The manifest of a step.
pub(super) fn manifest(dir: &Path, step: u64) -> Result<Manifest> {
    let folder = of_step(dir, step);
    let manifest = Manifest::read(&folder)?;
    if manifest.step != step {
        let what = format!("it is of step {}", manifest.step);
        return Err(wrong(&folder.join(manifest::NAME), CheckpointFault::Mismatch { what }));
    }
    Ok(manifest)
}

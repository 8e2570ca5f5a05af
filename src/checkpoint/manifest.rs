//! The manifest: what is in a checkpoint, and in which files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::file::{NewFile, Sum, checksum, format, io_error, wrong};
use super::rows::{self, PartOf};
use crate::Result;
use crate::error::CheckpointFault;
use crate::tensor::DType;

/// The format that this version writes, and the newest that it reads.
pub(super) const FORMAT: u64 = 1;

/// Its name in the folder of a step.
pub(super) const NAME: &str = "manifest.json";

/// More updates than any parameter has had: what is beyond is a mistake, and would soon be beyond its type.
const MOST_UPDATES: u64 = 1 << 62;

/// What is in a checkpoint. As a file its first line holds the CRC-32 of all bytes after that line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub format: u64,
    pub library: String,
    pub step: u64,
    /// Number of ranks that it was saved by.
    pub ranks: u32,
    pub shards: Vec<Shard>,
    pub parameters: BTreeMap<String, Parameter>,
    /// Which of them are parts of one array.
    #[serde(default)]
    pub arrays: BTreeMap<String, Vec<PartOf>>,
    pub optimizers: BTreeMap<String, Optimizer>,
    /// What the program added.
    pub values: BTreeMap<String, Value>,
}

/// The file of one owner.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Shard {
    pub file: String,
    pub owner: u32,
    pub bytes: u64,
    pub crc32: u32,
}

impl Shard {
    pub(super) fn sum(&self) -> Sum {
        Sum {
            bytes: self.bytes,
            crc32: self.crc32,
        }
    }
}

/// A parameter, or a tensor that is none.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Parameter {
    pub shard: usize,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Number of its updates.
    pub version: u64,
    pub requires_grad: bool,
    /// Whether it is a leaf: a constant isn't.
    pub is_leaf: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Optimizer {
    pub kind: String,
    /// Rules and options.
    #[serde(flatten)]
    pub header: Value,
    /// Which state there is.
    pub state: BTreeMap<String, State>,
}

/// The names of one parameter's state.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct State {
    pub shard: usize,
    pub scalars: Vec<String>,
    pub arrays: Vec<String>,
}

/// The name of a parameter's array.
pub(super) fn parameter_name(parameter: &str) -> String {
    format!("model.{parameter}")
}

/// The name of an array or a number of a state.
pub(super) fn state_name(optimizer: &str, slot: &str, name: &str) -> String {
    format!("optim.{optimizer}.state.{slot}.{name}")
}

#[derive(Deserialize)]
struct FirstLine {
    crc32: u32,
}

impl Manifest {
    /// Brings it to its place in a folder; with that the checkpoint is there.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`](crate::ErrorKind::Checkpoint).
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(NAME);
        let text = serde_json::to_string_pretty(self).map_err(|e| format(&path, e))?;
        // The object's brace stands in the first line.
        let rest = text.strip_prefix("{\n").unwrap_or(&text);
        let mut file = NewFile::create(path)?;
        file.write(format!("{{\"crc32\": {},\n", crc32fast::hash(rest.as_bytes())).as_bytes())?;
        file.write(rest.as_bytes())?;
        file.finish().map(drop)
    }

    /// Reads and checks it.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`](crate::ErrorKind::Checkpoint): it isn't there, was changed, or is of a newer format.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(NAME);
        if folder.is_dir() && !path.exists() {
            return Err(wrong(folder, CheckpointFault::Unfinished));
        }
        let bytes = fs::read(&path).map_err(io_error(&path, "read"))?;
        let end = bytes.iter().position(|&b| b == b'\n').unwrap_or(bytes.len());
        let (line, rest) = bytes.split_at(end);
        let line = String::from_utf8_lossy(line);
        let first: FirstLine = serde_json::from_str(&format!("{}}}", line.trim_end_matches(','))).map_err(|e| format(&path, e))?;
        checksum(&path, first.crc32, crc32fast::hash(rest.strip_prefix(b"\n").unwrap_or(rest)))?;
        let all: Value = serde_json::from_slice(&bytes).map_err(|e| format(&path, e))?;
        let found = all.get("format").and_then(Value::as_u64).unwrap_or(0);
        if found == 0 || found > FORMAT {
            return Err(wrong(&path, CheckpointFault::Version { found, known: FORMAT }));
        }
        let manifest: Manifest = serde_json::from_value(all).map_err(|e| format(&path, e))?;
        let shards = manifest.parameters.values().map(|p| p.shard);
        let shards = shards.chain(manifest.optimizers.values().flat_map(|o| o.state.values()).map(|s| s.shard));
        if let Some(shard) = shards.max().filter(|&shard| shard >= manifest.shards.len()) {
            return Err(format(&path, format_args!("shard {shard} of {}", manifest.shards.len())));
        }
        if let Some(shard) = manifest.shards.iter().find(|shard| shard.owner >= manifest.ranks) {
            let Shard { file, owner, .. } = shard;
            return Err(format(&path, format_args!("shard `{file}` of rank {owner} of {}", manifest.ranks)));
        }
        if let Some((name, facts)) = manifest.parameters.iter().find(|(_, facts)| facts.version > MOST_UPDATES) {
            return Err(format(&path, format_args!("version {} of `{name}`", facts.version)));
        }
        if !rows::is_sound(&manifest) {
            return Err(format(&path, "an array has parts that aren't its parameters"));
        }
        if let Some(shard) = manifest.shards.iter().find(|s| s.file.contains(['/', '\\'])) {
            return Err(format(&path, format_args!("shard `{}` is in another folder", shard.file)));
        }
        Ok(manifest)
    }
}

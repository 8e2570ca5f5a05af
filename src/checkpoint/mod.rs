//! Checkpoints: parameters, optimizer states and values on disk, so that a job can go on where another ended, to the bit.
//!
//! Each owner writes its own shard; the client that saves writes a manifest last, so a save that dies at any moment leaves the checkpoint before it. See
//! [`Checkpoint`]; the files are described in `docs/checkpoints.md`.

mod crash;
#[cfg(test)]
mod edited;
mod file;
mod folder;
mod load;
mod manifest;
mod names;
mod restore;
mod rows;
mod safetensors;
mod save;
mod shard;
mod table;
#[cfg(test)]
mod tests;
mod torch;

use std::hash::{BuildHasher, Hasher};

pub use load::{Checkpoint, Skipped};
pub use restore::Restore;
pub use save::{Save, Saved, Saving};
pub use torch::{read_state_dict, write_state_dict};

pub use crate::dist::Saveable;

/// A number that no other save or restore has.
fn number() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

//! What can be wrong with a checkpoint.

use serde::{Deserialize, Serialize};
use thiserror::Error as ThisError;

/// What is wrong with a file or folder of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ThisError)]
#[non_exhaustive]
pub enum CheckpointFault {
    /// It isn't there.
    #[error("it is missing")]
    Missing,
    /// There is no manifest: the save didn't come to its end.
    #[error("it has no manifest: its save didn't come to its end")]
    Unfinished,
    /// It has another size than the manifest says.
    #[error("it has {found} bytes, and the manifest says {expected}")]
    Size {
        /// Bytes by the manifest.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// It has another checksum than it should.
    #[error("its contents have the CRC-32 {found:08x}, and it should be {expected:08x}: they were changed")]
    Checksum {
        /// By the manifest (that of the manifest: by its first line).
        expected: u32,
        /// Of the contents.
        found: u32,
    },
    /// It was written by a newer version of this library.
    #[error("it has format {found}, and this version reads up to {known}; use a newer version of rankgrad")]
    Version {
        /// Its format.
        found: u64,
        /// The newest one that this version reads.
        known: u64,
    },
    /// Its contents don't follow the format.
    #[error("it can't be read: {what}")]
    Format {
        /// What is wrong.
        what: String,
    },
    /// It is of another model or another optimizer.
    #[error("it doesn't fit: {what}")]
    Mismatch {
        /// What differs.
        what: String,
    },
    /// The operating system refused.
    #[error("{operation}: {text}")]
    Io {
        /// What was tried.
        operation: String,
        /// What the system said.
        text: String,
    },
    /// There are checkpoints, and none of them is whole.
    #[error("no checkpoint in it is whole: {}; move them away to begin anew", skipped.join("; "))]
    NoneWhole {
        /// Each one, and why it was skipped.
        skipped: Vec<String>,
    },
}

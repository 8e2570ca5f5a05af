//! The place where tests let a save die: after so many bytes and operations in a folder nothing more reaches the disk.

use std::io;
use std::path::Path;

/// How many of the bytes that are about to be written to `path` may be; an operation is one byte.
#[cfg(not(test))]
#[inline(always)]
pub(super) fn spend(_path: &Path, bytes: usize) -> io::Result<usize> {
    Ok(bytes)
}

#[cfg(test)]
pub(super) use tests::spend;

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashMap;
    use std::path::PathBuf;
    use std::sync::Mutex;

    use super::*;
    use crate::runtime::lock;

    struct Left {
        bytes: usize,
        /// Only the first thing beyond fails, as if the disk had stuttered.
        once: bool,
    }

    static LEFT: Mutex<Option<HashMap<PathBuf, Left>>> = Mutex::new(None);

    /// Lets what happens in a folder die after so many bytes and operations, or lets it live again.
    pub(in crate::checkpoint) fn die_after(folder: &Path, bytes: Option<usize>) {
        let mut left = lock(&LEFT);
        let left = left.get_or_insert_default();
        match bytes {
            Some(bytes) => left.insert(folder.to_owned(), Left { bytes, once: false }),
            None => left.remove(folder),
        };
    }

    /// Lets one thing fail in a folder, after so many bytes and operations.
    pub(in crate::checkpoint) fn fail_once_after(folder: &Path, bytes: usize) {
        lock(&LEFT)
            .get_or_insert_default()
            .insert(folder.to_owned(), Left { bytes, once: true });
    }

    /// How many bytes and operations are left for a folder.
    pub(in crate::checkpoint) fn left(folder: &Path) -> usize {
        lock(&LEFT).as_ref().and_then(|left| left.get(folder)).map_or(0, |left| left.bytes)
    }

    pub(in crate::checkpoint) fn spend(path: &Path, bytes: usize) -> io::Result<usize> {
        let mut left = lock(&LEFT);
        let of_path = left.iter_mut().flatten().find(|(folder, _)| path.starts_with(folder));
        let Some((_, left)) = of_path else { return Ok(bytes) };
        let allowed = bytes.min(left.bytes);
        left.bytes -= allowed;
        if allowed == 0 && bytes > 0 {
            if left.once {
                left.bytes = usize::MAX;
            }
            return Err(io::Error::other("the process has died here"));
        }
        Ok(allowed)
    }
}

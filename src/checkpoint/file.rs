//! Files that are whole or not there, and folders of them.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::crash;
use crate::error::CheckpointFault;
use crate::{Error, ErrorKind, Result};

/// Writes of more than this go past the buffer.
const BUFFER: usize = 1 << 20;

/// What is wrong with a file or folder.
pub(super) fn wrong(path: &Path, fault: CheckpointFault) -> Error {
    let path = path.display().to_string();
    ErrorKind::Checkpoint { path, fault }.into()
}

pub(super) fn format(path: &Path, what: impl std::fmt::Display) -> Error {
    let what = what.to_string();
    wrong(path, CheckpointFault::Format { what })
}

/// What an optimizer or a tensor has against what a file holds, as it knows of no file; or the error, if it is of another kind.
pub(super) fn misfit(whose: &str, error: Error) -> Result<String> {
    let what = match error.kind() {
        ErrorKind::Argument { what, .. } => what.clone(),
        ErrorKind::Shape { .. }
        | ErrorKind::DType { .. }
        | ErrorKind::Axis { .. }
        | ErrorKind::Index { .. }
        | ErrorKind::OptionValue { .. }
        | ErrorKind::UnknownOption { .. }
        | ErrorKind::UnknownOptimizer { .. } => error.to_string(),
        _ => return Err(error),
    };
    Ok(format!("{whose}: {what}"))
}

/// What the system said about an operation on a path.
pub(super) fn io_error<'a>(path: &'a Path, operation: &'a str) -> impl Fn(io::Error) -> Error + 'a {
    move |error| {
        let fault = match (operation, error.kind()) {
            ("open" | "read", io::ErrorKind::NotFound) => CheckpointFault::Missing,
            _ => CheckpointFault::Io {
                operation: operation.into(),
                text: error.to_string(),
            },
        };
        wrong(path, fault)
    }
}

/// Size and CRC-32 of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sum {
    pub bytes: u64,
    pub crc32: u32,
}

/// A file that is being written beside its place. If it is dropped before it is [`finish`](Self::finish)ed, nothing stays.
pub(super) struct NewFile {
    path: PathBuf,
    part: PathBuf,
    file: BufWriter<Disk>,
    crc32: crc32fast::Hasher,
    bytes: u64,
    finished: bool,
}

struct Disk {
    file: File,
    path: PathBuf,
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let allowed = crash::spend(&self.path, bytes.len())?;
        self.file.write(&bytes[..allowed])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl NewFile {
    /// Begins the file that will be at `path`.
    pub(super) fn create(path: PathBuf) -> Result<Self> {
        let mut part = path.clone().into_os_string();
        part.push(".part");
        let part = PathBuf::from(part);
        let file = crash::spend(&part, 1).and_then(|_| File::create(&part));
        let file = file.map_err(io_error(&part, "create"))?;
        let disk = Disk { file, path: part.clone() };
        Ok(NewFile {
            path,
            part,
            file: BufWriter::with_capacity(BUFFER, disk),
            crc32: crc32fast::Hasher::new(),
            bytes: 0,
            finished: false,
        })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        // In pieces that are still in the cache when they are written.
        for piece in bytes.chunks(BUFFER) {
            self.crc32.update(piece);
            self.file.write_all(piece).map_err(io_error(&self.part, "write"))?;
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Brings the file to the disk, and then to its name. Blocks until the disk has it.
    pub(super) fn finish(mut self) -> Result<Sum> {
        self.file.flush().map_err(io_error(&self.part, "write"))?;
        let synced = crash::spend(&self.part, 1).and_then(|_| self.file.get_ref().file.sync_all());
        synced.map_err(io_error(&self.part, "sync"))?;
        let renamed = crash::spend(&self.path, 1).and_then(|_| fs::rename(&self.part, &self.path));
        renamed.map_err(io_error(&self.path, "rename"))?;
        self.finished = true;
        if let Some(folder) = self.path.parent() {
            sync_folder(folder)?;
        }
        Ok(Sum {
            bytes: self.bytes,
            crc32: self.crc32.clone().finalize(),
        })
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.finished {
            remove_file(&self.part);
        }
    }
}

/// Brings the names in a folder to the disk.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    let synced = crash::spend(path, 1).and_then(|_| File::open(path)?.sync_all());
    synced.map_err(io_error(path, "sync"))
}

/// Makes a folder and those above it that are missing, on the disk too.
pub(super) fn make_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    above.map_or(Ok(()), make_folder)?;
    let made = crash::spend(path, 1).and_then(|_| fs::create_dir(path));
    match made {
        // Another client may have been faster.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
        made => made.map_err(io_error(path, "create"))?,
    }
    above.map_or(Ok(()), sync_folder)
}

/// Removes a file that isn't needed. That it can't be isn't an error of the caller.
pub(super) fn remove_file(path: &Path) {
    let removed = crash::spend(path, 1).and_then(|_| fs::remove_file(path));
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => log::warn!("checkpoint {}: can't be removed: {e}", path.display()),
        _ => {}
    }
}

/// Removes a folder, unless something is in it.
pub(super) fn remove_if_empty(path: &Path) {
    let _ = crash::spend(path, 1).and_then(|_| fs::remove_dir(path));
}

/// Removes a folder that must be empty.
pub(super) fn remove_folder(path: &Path) {
    if let Err(e) = crash::spend(path, 1).and_then(|_| fs::remove_dir(path)) {
        log::warn!("checkpoint {}: can't be removed: {e}", path.display());
    }
}

/// Reads a file through, and compares its size and CRC-32.
///
/// # Errors
/// [`ErrorKind::Checkpoint`] for the file.
pub(super) fn verify(path: &Path, expected: Sum) -> Result<()> {
    let mut file = File::open(path).map_err(io_error(path, "open"))?;
    let found = file.metadata().map_err(io_error(path, "read"))?.len();
    if found != expected.bytes {
        let expected = expected.bytes;
        return Err(wrong(path, CheckpointFault::Size { expected, found }));
    }
    let (mut crc32, mut buffer) = (crc32fast::Hasher::new(), vec![0; BUFFER]);
    loop {
        match file.read(&mut buffer).map_err(io_error(path, "read"))? {
            0 => break,
            n => crc32.update(&buffer[..n]),
        }
    }
    checksum(path, expected.crc32, crc32.finalize())
}

pub(super) fn checksum(path: &Path, expected: u32, found: u32) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(wrong(path, CheckpointFault::Checksum { expected, found }))
}

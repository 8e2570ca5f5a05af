//! A rank's log in a file of its own.

use std::fs::{File, OpenOptions, create_dir_all};
use std::io::{Result, Write, stderr};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Where lines go.
enum Page {
    /// To standard error.
    Nowhere,
    /// To standard error, and to a file in this folder once the rank is known.
    Before(PathBuf, Vec<u8>),
    /// To a file.
    In(File),
}

static PAGE: Mutex<Page> = Mutex::new(Page::Nowhere);

fn page() -> std::sync::MutexGuard<'static, Page> {
    PAGE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The logger's end of it.
pub(super) struct Pages;

/// Makes the folder; the file comes when the rank is known.
pub(super) fn in_folder(folder: &str) -> Result<Pages> {
    create_dir_all(folder)?;
    let mut page = page();
    if matches!(*page, Page::Nowhere) {
        *page = Page::Before(folder.into(), Vec::new());
    }
    Ok(Pages)
}

/// The rank is known: opens its file, and adds to what is in it, for a job may have run before. If that fails, lines go on to standard error.
pub(super) fn open(rank: u32) {
    let mut page = page();
    let Page::Before(folder, lines) = &*page else { return };
    let path = folder.join(format!("rank-{rank}.log"));
    let opened = OpenOptions::new().create(true).append(true).open(&path);
    match opened.and_then(|mut file| file.write_all(lines).map(|()| file)) {
        Ok(file) => *page = Page::In(file),
        Err(e) => {
            *page = Page::Nowhere;
            let _ = writeln!(
                stderr(),
                "rankgrad: rank {rank}: {}: {e}; the log goes to standard error",
                path.display()
            );
        }
    }
}

impl Write for Pages {
    /// A line as a whole, so that one that is cut short by the end of the process is the last.
    fn write(&mut self, line: &[u8]) -> Result<usize> {
        match &mut *page() {
            Page::Nowhere => stderr().write_all(line)?,
            Page::Before(_, lines) => {
                lines.extend_from_slice(line);
                stderr().write_all(line)?;
            }
            Page::In(file) => file.write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

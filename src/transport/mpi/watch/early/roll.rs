//! The roll: a file in memory in which the ranks of a node write while they start.

use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Error, ErrorKind, Result, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::launcher::{environment, job};
use crate::transport::Loss;
use crate::transport::mpi::watch::card;

/// How its name begins.
const PREFIX: &str = "rankgrad-start";
/// Launchers, by the names of their processes, as far as the kernel keeps them.
const LAUNCHERS: [&str; 9] = [
    "slurmstepd",
    "orted",
    "prted",
    "mpirun",
    "mpiexec",
    "orterun",
    "prterun",
    "hydra_pmi_proxy",
    "palsd",
];
/// So many processes may stand between a launcher and a rank.
const SHELLS: usize = 16;

/// A rank that starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rank {
    pub(super) rank: u32,
    pub(super) host: String,
    pub(super) pid: u32,
    /// When that process began; 0 if unknown.
    pub(super) born: u64,
}

impl Rank {
    pub(super) fn own(rank: u32) -> Rank {
        let pid = std::process::id();
        Rank {
            rank,
            host: card::host(),
            pid,
            born: card::born(pid).unwrap_or(0),
        }
    }
}

/// What a rank writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Entry {
    /// It is about to bring MPI up.
    Begins(Rank),
    /// All ranks watch each other.
    Started(Rank),
    /// A rank is lost.
    Lost { text: String, died: bool, hops: u32 },
}

impl From<&Loss> for Entry {
    fn from(loss: &Loss) -> Entry {
        Entry::Lost {
            text: loss.text.clone(),
            died: loss.died,
            hops: loss.hops,
        }
    }
}

/// The file, open.
#[derive(Debug)]
pub(super) struct Roll {
    file: File,
    path: PathBuf,
}

impl Roll {
    /// Opens the one of this start on this node, or makes it.
    pub(super) fn open() -> Result<Roll> {
        let folder = Path::new("/dev/shm");
        let folder = if folder.is_dir() { folder.to_owned() } else { std::env::temp_dir() };
        let (namespace, launcher) = (namespace(), launcher());
        clear(&folder, namespace);
        let mut hash = DefaultHasher::new();
        job(environment).hash(&mut hash);
        let user = rustix::process::geteuid().as_raw();
        let name = format!(
            "{PREFIX}-{user}-{namespace}-{}-{}-{:016x}",
            launcher.pid,
            launcher.born,
            hash.finish()
        );
        Roll::at(folder.join(name), user)
    }

    fn at(path: PathBuf, user: u32) -> Result<Roll> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW);
        let file = options.open(&path)?;
        let facts = file.metadata()?;
        if !facts.is_file() || facts.uid() != user {
            return Err(Error::new(ErrorKind::PermissionDenied, format!("{} is another's", path.display())));
        }
        Ok(Roll { file, path })
    }

    /// Adds a line, in one piece.
    pub(super) fn write(&self, entry: &Entry) -> Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        (&self.file).write_all(&line)
    }

    /// The lines behind `seen`, which moves on.
    pub(super) fn read(&self, seen: &mut u64) -> Result<Vec<Entry>> {
        let length = self.file.metadata()?.len().saturating_sub(*seen);
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        let read = self.file.read_at(&mut bytes, *seen)?;
        let whole = bytes[..read].iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        *seen += whole as u64;
        // What can't be read is of a newer version, or of nobody.
        let lines = bytes[..whole].split(|&b| b == b'\n');
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }

    /// Takes its name away; ranks that have it open go on with it.
    pub(super) fn remove(&self) {
        // Another rank may have been faster.
        let _ = fs::remove_file(&self.path);
    }
}

/// A process of the launcher that all ranks of a node have above them. As a process's number and birth aren't another's, a file that was left behind is no other start's.
#[derive(Debug)]
struct Launcher {
    pid: u32,
    born: u64,
}

fn launcher() -> Launcher {
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get().unsigned_abs());
    let mut pid = parent;
    for _ in 0..SHELLS {
        let Some((name, above)) = name_and_parent(pid) else { break };
        if LAUNCHERS
            .iter()
            .any(|known| name == *known || name.starts_with(&format!("{known}.")))
        {
            let born = card::born(pid).unwrap_or(0);
            return Launcher { pid, born };
        }
        pid = above;
    }
    Launcher {
        pid: parent,
        born: card::born(parent).unwrap_or(0),
    }
}

/// Fields 2 and 4 of `/proc/PID/stat`, proc(5).
fn name_and_parent(pid: u32) -> Option<(String, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (head, tail) = stat.rsplit_once(") ")?;
    let name = head.split_once('(')?.1.to_owned();
    Some((name, tail.split(' ').nth(1)?.parse().ok()?))
}

/// The number of this process's namespace of process numbers; 0 if unknown.
fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |facts| facts.ino())
}

/// Removes this user's rolls of launchers that have gone: those of starts whose ranks were all killed.
fn clear(folder: &Path, namespace: u64) {
    let user = rustix::process::geteuid().as_raw();
    let start = format!("{PREFIX}-{user}-{namespace}-");
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(numbers) = name.to_str().and_then(|name| name.strip_prefix(&start)) else {
            continue;
        };
        let mut numbers = numbers.split('-').map(str::parse::<u64>);
        let (Some(Ok(pid)), Some(Ok(born))) = (numbers.next(), numbers.next()) else {
            continue;
        };
        if namespace != 0 && born != 0 && u32::try_from(pid).is_ok_and(|pid| card::ended(pid, born) == Some(true)) {
            // Another rank may have been faster.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_and_once() {
        let path = std::env::temp_dir().join(format!("{PREFIX}-test-{}", std::process::id()));
        let user = rustix::process::geteuid().as_raw();
        let (roll, other) = (Roll::at(path.clone(), user).unwrap(), Roll::at(path.clone(), user).unwrap());
        let (mut seen, begins) = (0, Entry::Begins(Rank::own(3)));
        assert_eq!(roll.read(&mut seen).unwrap(), []);
        other.write(&begins).unwrap();
        (&other.file).write_all(b"what?\n{\"Begins\":").unwrap();
        assert_eq!(roll.read(&mut seen).unwrap(), [begins]);
        assert_eq!(roll.read(&mut seen).unwrap(), []);
        (&other.file).write_all(b"1}\n").unwrap();
        let lost = Entry::Lost {
            text: "rank 1\non n1".into(),
            died: true,
            hops: 0,
        };
        other.write(&lost).unwrap();
        assert_eq!(roll.read(&mut seen).unwrap(), [lost]);
        other.remove();
        assert!(!path.exists() && Roll::at(path, user + 1).is_err());
        fs::remove_file(&roll.path).unwrap();
    }

    #[test]
    fn the_launcher_is_above_this_process() {
        let (name, parent) = name_and_parent(std::process::id()).unwrap();
        assert!(!name.is_empty() && parent != 0);
        assert!(launcher().pid != 0 && namespace() != 0);
    }

    #[test]
    fn what_is_left_of_launchers_that_have_gone_is_removed() {
        let folder = std::env::temp_dir().join(format!("rankgrad-rolls-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (user, here) = (rustix::process::geteuid().as_raw(), namespace());
        let me = std::process::id();
        let born = card::born(me).unwrap();
        let name = |namespace: u64, born: u64| folder.join(format!("{PREFIX}-{user}-{namespace}-{me}-{born}-00"));
        let (mine, old, elsewhere) = (name(here, born), name(here, born + 1), name(here + 1, born + 1));
        for path in [&mine, &old, &elsewhere] {
            fs::write(path, "").unwrap();
        }
        clear(&folder, here);
        assert!(mine.exists() && !old.exists() && elsewhere.exists());
        fs::remove_dir_all(folder).unwrap();
    }
}

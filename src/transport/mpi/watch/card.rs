//! What a rank tells the one that watches it.

use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::process;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

/// Where and what a rank's process is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Card {
    /// Name of its host.
    pub(super) host: String,
    /// The boot of its machine; empty if unknown.
    pub(super) boot: String,
    /// The namespace of its process number; empty if unknown.
    pub(super) namespace: String,
    /// Its process.
    pub(super) pid: u32,
    /// When that process began, in the kernel's ticks: a number may be another's later.
    pub(super) born: u64,
    /// Where it listens; 0 if it isn't to be watched.
    pub(super) port: u16,
    /// What whoever connects must know.
    pub(super) key: [u8; 16],
}

impl Card {
    /// This process's, listening at a port.
    pub(super) fn own(port: u16) -> Card {
        let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
        let namespace = std::fs::read_link("/proc/self/ns/pid").map(|path| path.to_string_lossy().into_owned());
        let mut key = [0; 16];
        for half in key.chunks_exact_mut(8) {
            // Keyed by the system's random numbers.
            half.copy_from_slice(&RandomState::new().hash_one(process::id()).to_le_bytes());
        }
        Card {
            host: host(),
            boot: read("/proc/sys/kernel/random/boot_id"),
            namespace: namespace.unwrap_or_default(),
            pid: process::id(),
            born: born(process::id()).unwrap_or(0),
            port,
            key,
        }
    }

    /// Whether both run on one machine.
    pub(super) fn is_near(&self, other: &Card) -> bool {
        !self.boot.is_empty() && self.boot == other.boot
    }

    /// Whether the process number of one means the same process to the other.
    pub(super) fn shares_processes(&self, other: &Card) -> bool {
        self.is_near(other) && !self.namespace.is_empty() && self.namespace == other.namespace
    }
}

/// This host's name.
pub(super) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// When a process began, in the kernel's ticks since boot: field 22 of `/proc/PID/stat` (proc(5)), behind a name that may hold anything.
pub(super) fn born(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// A process whose end can be waited for, if the number is still its own.
#[cfg(target_os = "linux")]
pub(super) fn process(pid: u32, born: u64) -> rustix::io::Result<OwnedFd> {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let none = rustix::io::Errno::SRCH;
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(none)?;
    let process = pidfd_open(number, PidfdFlags::empty())?;
    // Looked at after the number was taken hold of.
    match self::born(pid) {
        Some(now) if now == born => Ok(process),
        Some(_) => Err(none),
        None => Err(rustix::io::Errno::IO),
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn process(_: u32, _: u64) -> rustix::io::Result<OwnedFd> {
    Err(rustix::io::Errno::NOSYS)
}

/// Whether a process has ended, as far as can be told: also one that nobody has waited for yet.
pub(super) fn ended(pid: u32, born: u64) -> Option<bool> {
    if born == 0 {
        return None;
    }
    match process(pid, born) {
        Ok(process) => has_ended(&process, Duration::ZERO),
        Err(rustix::io::Errno::SRCH) => Some(true),
        Err(_) => None,
    }
}

/// Whether a process ends within a time.
pub(super) fn has_ended(process: &OwnedFd, limit: Duration) -> Option<bool> {
    let limit = Timespec {
        tv_sec: limit.as_secs() as _,
        tv_nsec: limit.subsec_nanos() as _,
    };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)).map(|n| n > 0).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_of_this_process_and_its_key_of_nobody_else() {
        let (a, b) = (Card::own(7), Card::own(7));
        assert_eq!((a.pid, a.port, &a.host), (process::id(), 7, &b.host));
        assert!(!a.host.is_empty() && a.key != b.key);
        if cfg!(target_os = "linux") {
            assert!(a.is_near(&b) && a.shares_processes(&b) && a.born > 0 && a.born == b.born);
            let elsewhere = Card {
                namespace: "pid:[1]".into(),
                ..b.clone()
            };
            assert!(a.is_near(&elsewhere) && !a.shares_processes(&elsewhere));
            let unknown = Card { boot: String::new(), ..b };
            assert!(!unknown.is_near(&unknown.clone()));
            assert_eq!(born(u32::MAX), None);
            assert_eq!(
                (ended(a.pid, a.born), ended(a.pid, a.born + 1), ended(u32::MAX, 1)),
                (Some(false), Some(true), Some(true))
            );
            let mut child = process::Command::new("true").spawn().unwrap();
            let (pid, since) = (child.id(), born(child.id()).unwrap());
            // Before and after it was waited for.
            for _ in 0..200 {
                if ended(pid, since) == Some(true) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            assert_eq!(ended(pid, since), Some(true));
            child.wait().unwrap();
            assert_eq!(ended(pid, since), Some(true));
        }
    }
}

//! Bringing MPI up, or joining a host's.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use ::mpi::ffi;
use ::mpi::raw::AsRaw;

use super::call::{Handle, WORLD_RANK, mpi_call};
use super::comm::Comm;
use super::launcher;
use super::watch::early::Early;
use crate::config::launcher::environment;
use crate::{ErrorKind, Result};

/// Who brings MPI up: this crate, or the host program, which then gives a communicator to duplicate.
#[derive(Debug)]
pub struct Host<'c> {
    communicator: Option<Handle<ffi::MPI_Comm>>,
    borrowed: PhantomData<&'c ()>,
}

impl<'c> Host<'c> {
    /// No host: this crate starts MPI, asks for MPI_THREAD_MULTIPLE, takes all ranks of MPI_COMM_WORLD, and ends MPI at the end. Local.
    pub fn none() -> Host<'static> {
        Host {
            communicator: None,
            borrowed: PhantomData,
        }
    }

    /// The host's communicator: its ranks are ours. MPI must be up, and stays so at the end. Local.
    pub fn communicator(communicator: &'c impl AsRaw<Raw = ffi::MPI_Comm>) -> Host<'c> {
        Host {
            communicator: Some(Handle(communicator.as_raw())),
            borrowed: PhantomData,
        }
    }

    /// As [`communicator`](Self::communicator), for hosts with other bindings. Local.
    ///
    /// # Safety
    /// The handle is a communicator that stays alive until the start has returned.
    pub unsafe fn from_raw(communicator: ffi::MPI_Comm) -> Host<'static> {
        Host {
            communicator: Some(Handle(communicator)),
            borrowed: PhantomData,
        }
    }

    /// Whether this crate starts and ends MPI.
    pub(super) fn is_none(&self) -> bool {
        self.communicator.is_none()
    }
}

/// What MPI lets threads do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadLevel {
    /// The process has one thread.
    Single,
    /// Only the main thread calls MPI.
    Funneled,
    /// Any thread calls MPI, one at a time: the host must keep its own calls apart from ours.
    Serialized,
    /// Any thread calls MPI at any time.
    Multiple,
}

impl std::fmt::Display for ThreadLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ThreadLevel::Single => "MPI_THREAD_SINGLE",
            ThreadLevel::Funneled => "MPI_THREAD_FUNNELED",
            ThreadLevel::Serialized => "MPI_THREAD_SERIALIZED",
            ThreadLevel::Multiple => "MPI_THREAD_MULTIPLE",
        })
    }
}

fn level(raw: c_int) -> ThreadLevel {
    // SAFETY: constants of MPI.
    let (multiple, serialized, funneled) =
        unsafe { (ffi::RSMPI_THREAD_MULTIPLE, ffi::RSMPI_THREAD_SERIALIZED, ffi::RSMPI_THREAD_FUNNELED) };
    // MPI orders the levels.
    let granted = match raw {
        _ if raw >= multiple => ThreadLevel::Multiple,
        _ if raw >= serialized => ThreadLevel::Serialized,
        _ if raw >= funneled => ThreadLevel::Funneled,
        _ => ThreadLevel::Single,
    };
    #[cfg(feature = "faults")]
    let granted = crate::transport::faults::granted(granted, world_rank());
    granted
}

/// This process's rank in MPI_COMM_WORLD. MPI must be up.
#[cfg(feature = "faults")]
fn world_rank() -> u32 {
    let mut rank = 0;
    // SAFETY: MPI is up, and writes to our variable.
    match unsafe { mpi_call!(MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &mut rank)) } {
        Ok(()) => rank as u32,
        Err(_) => 0,
    }
}

fn init_error(what: &str, cure: &str) -> crate::Error {
    ErrorKind::Init {
        what: what.into(),
        cure: cure.into(),
    }
    .into()
}

fn enough(granted: ThreadLevel, cure: &str) -> Result<()> {
    if granted >= ThreadLevel::Serialized {
        return Ok(());
    }
    Err(ErrorKind::ThreadLevel {
        needed: "SERIALIZED".into(),
        granted: granted.to_string(),
        cure: cure.into(),
    }
    .into())
}

/// MPI is up, and we have a communicator of our own.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) comm: Comm,
    pub(super) thread_level: ThreadLevel,
    /// Whether this rank can go on. Others may see it otherwise, so they must be told.
    pub(super) fit: Result<()>,
    /// Who watches until the ring does; nobody where a host has brought MPI up.
    pub(super) early: Option<Early>,
}

/// Starts MPI if there is no host. Collective over its ranks.
pub(super) fn start(host: &Host, watched: bool) -> Result<Started> {
    let (mut up, mut over) = (0, 0);
    // SAFETY: both may be called at any time, and write to our variables.
    unsafe {
        mpi_call!(MPI_Initialized(&mut up))?;
        mpi_call!(MPI_Finalized(&mut over))?;
    }
    if over != 0 {
        return Err(init_error(
            "MPI has already ended in this process",
            "start before MPI_Finalize; MPI can't be started twice in a process",
        ));
    }
    let Some(Handle(communicator)) = host.communicator else {
        return start_own(up != 0, watched);
    };
    if up == 0 {
        return Err(init_error(
            "a communicator was given, and MPI is not initialised",
            "initialise MPI first, with MPI_THREAD_MULTIPLE",
        ));
    }
    let mut granted = 0;
    // SAFETY: MPI is up.
    unsafe { mpi_call!(MPI_Query_thread(&mut granted)) }?;
    // SAFETY: constants of MPI.
    if communicator == unsafe { ffi::RSMPI_COMM_NULL } {
        return Err(init_error(
            "the communicator given is MPI_COMM_NULL",
            "start only on the ranks that belong to the communicator",
        ));
    }
    // SAFETY: the communicator is alive, as it is borrowed or its giver said so.
    let comm = unsafe { Comm::duplicate(communicator) }?;
    let thread_level = level(granted);
    let cure = "initialise MPI with MPI_Init_thread(MPI_THREAD_MULTIPLE) instead of MPI_Init";
    let fit = enough(thread_level, cure).and_then(|()| check_launcher());
    let early = None;
    Ok(Started {
        comm,
        thread_level,
        fit,
        early,
    })
}

fn start_own(up: bool, watched: bool) -> Result<Started> {
    if up {
        let cure = "give it a communicator, for example `World::builder().communicator(&comm)`";
        return Err(init_error("the host program has already initialised MPI", cure));
    }
    let mut granted = 0;
    let early = Early::begin(watched);
    let usr1 = Usr1::now();
    // SAFETY: MPI takes null for both arguments of `main`.
    unsafe {
        mpi_call!(MPI_Init_thread(
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            ffi::RSMPI_THREAD_MULTIPLE,
            &mut granted
        ))?;
    }
    usr1.put_back();
    early.waits_for("MPI_Comm_dup");
    let cure = "rebuild MPI with thread support (Open MPI before 3: --enable-mpi-thread-multiple; MPICH: --enable-threads=multiple)";
    let thread_level = level(granted);
    let fit = enough(thread_level, cure).and_then(|()| check_launcher());
    // SAFETY: MPI is up, and the communicator is one of its constants.
    match unsafe { Comm::duplicate(ffi::RSMPI_COMM_WORLD) } {
        Ok(comm) => Ok(Started {
            comm,
            thread_level,
            fit,
            early: Some(early),
        }),
        Err(error) => {
            // The first error is the one to tell.
            let _ = finalize();
            Err(error)
        }
    }
}

/// What SIGUSR1 does. To MPICH it means that a process has died, so it asks the launcher which; a process without one would wait for ever.
struct Usr1(Option<libc::sigaction>);

impl Usr1 {
    /// As it is now, if there is no launcher whom MPICH could ask.
    fn now() -> Usr1 {
        if ["PMI_FD", "PMI_PORT", "PMIX_RANK"].iter().any(|name| environment(name).is_some()) {
            return Usr1(None);
        }
        // SAFETY: zero is a valid value of all its parts.
        let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: changes nothing, and writes to our variable.
        let known = unsafe { libc::sigaction(libc::SIGUSR1, std::ptr::null(), &mut now) } == 0;
        Usr1(known.then_some(now))
    }

    /// Makes it so again.
    fn put_back(self) {
        if let Some(before) = self.0 {
            // SAFETY: it was so before, and whoever made it so expects it still.
            unsafe { libc::sigaction(libc::SIGUSR1, &before, std::ptr::null_mut()) };
        }
    }
}

/// Notes this process's rank in MPI_COMM_WORLD, and compares its size with the launcher's.
fn check_launcher() -> Result<()> {
    let (mut rank, mut size) = (0, 0);
    // SAFETY: MPI is up.
    unsafe {
        mpi_call!(MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &mut rank))?;
        mpi_call!(MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &mut size))?;
    }
    WORLD_RANK.store(rank.into(), Relaxed);
    launcher::check(size as u32, environment)
}

/// Ends MPI. Collective over MPI_COMM_WORLD.
pub(super) fn finalize() -> Result<()> {
    // SAFETY: this crate started MPI, and nothing of ours is left.
    unsafe { mpi_call!(MPI_Finalize()) }
}

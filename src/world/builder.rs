//! Setting a world up.

use std::any::TypeId;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::World;
use super::signals::{self, Signal, Stop};
use crate::config::Settings;
use crate::dist::{Ranks, Tables};
use crate::rpc;
use crate::runtime::{Runtime, State, failure, logging};
use crate::transport::Transport;
use crate::transport::mpi::{self, Host};
use crate::{ErrorKind, Result};

type Setter = Box<dyn FnOnce(&mut Settings)>;

/// Sets a [`World`] up: settings, the host program's communicator, state, logging.
///
/// Settings that are made here win over `RANKGRAD_*` variables of the environment, which win over defaults ([`Settings`]).
#[must_use = "a builder does nothing until `start`"]
#[derive(Default)]
pub struct Builder<'c> {
    host: Option<Host<'c>>,
    explicit: Vec<Setter>,
    states: State,
    env_logger: bool,
    panic_hook: Option<bool>,
    signals: Vec<Signal>,
}

impl std::fmt::Debug for Builder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("guest", &self.host.is_some())
            .finish_non_exhaustive()
    }
}

/// Whether this process has had a world over MPI: one at a time, and MPI that we ended can't start again.
static ALIVE: AtomicBool = AtomicBool::new(false);

impl<'c> Builder<'c> {
    /// Lives in a program that has started MPI itself: duplicates its communicator, and leaves MPI as it was at the end. Finish the world before the host
    /// ends MPI: its service thread uses MPI until then.
    pub fn communicator(self, communicator: &'c impl ::mpi::raw::AsRaw<Raw = ::mpi::ffi::MPI_Comm>) -> Self {
        self.host(Host::communicator(communicator))
    }

    /// As [`communicator`](Self::communicator), for hosts with other bindings ([`Host::from_raw`]).
    pub fn host(mut self, host: Host<'c>) -> Self {
        self.host = Some(host);
        self
    }

    /// Makes settings that win over the environment.
    pub fn settings(mut self, make: impl FnOnce(&mut Settings) + 'static) -> Self {
        self.explicit.push(Box::new(make));
        self
    }

    /// Gives this rank a state of type `T`, there before any call can come ([`Scope::state`](crate::Scope::state)).
    pub fn state<T: Send + Sync + 'static>(mut self, state: T) -> Self {
        self.states.insert(TypeId::of::<T>(), Arc::new(state));
        self
    }

    /// Sets env_logger up, with time, rank and level in each line, as `RUST_LOG` says. A logger that is there already stays. The setting `RANKGRAD_LOG_DIR` does so
    /// too, with a file for each rank.
    pub fn env_logger(mut self) -> Self {
        self.env_logger = true;
        self
    }

    /// Whether a panic on the thread that starts the world aborts the job. On by default when we start MPI, off as a guest. The hook that was there
    /// before runs first.
    pub fn panic_hook(mut self, on: bool) -> Self {
        self.panic_hook = Some(on);
        self
    }

    /// As [`World::on_signal`], from the beginning: a signal that comes during the start isn't the end of the process, and counts when the world is up.
    pub fn on_signal(mut self, signals: &[Signal]) -> Self {
        self.signals.extend_from_slice(signals);
        self
    }

    /// Starts the world on this rank. Collective over the ranks that take part; blocks until all have come. The thread that calls it is the rank's main
    /// thread: it must also finish the world.
    ///
    /// # Errors
    /// If one rank can't start, none does: the others get [`ErrorKind::Remote`] with its text.
    /// - [`ErrorKind::Setting`]: a setting, or an unknown `RANKGRAD_*` variable.
    /// - [`ErrorKind::Init`]: a second world in this process; MPI that the host has started, without a communicator; MPI that has ended.
    /// - [`ErrorKind::Launcher`]: N jobs of one rank instead of one of N. [`ErrorKind::ThreadLevel`]: MPI can't serve threads.
    /// - [`ErrorKind::Mismatch`]: ranks run different programs.
    pub fn start(mut self) -> Result<World> {
        let explicit = std::mem::take(&mut self.explicit);
        let settings = Settings::from_env(|settings| explicit.into_iter().for_each(|make| make(settings)));
        let settings = settings.and_then(|settings| {
            if self.env_logger || !settings.log_dir.is_empty() {
                logging::init(&settings.log_dir)?;
            }
            Ok(settings)
        });
        if ALIVE.swap(true, Ordering::SeqCst) {
            return Err(ErrorKind::Init {
                what: "this process has a world already".into(),
                cure: "start one world, and pass references to it around; finish it before a guest starts another".into(),
            }
            .into());
        }
        self.bring_up(settings).inspect_err(|_| ended())
    }

    fn bring_up(self, settings: Result<Settings>) -> Result<World> {
        // A rank that can't take signals says so to the others, as with a bad setting.
        let taken = if self.signals.is_empty() {
            Ok(())
        } else {
            signals::take(&self.signals)
        };
        let settings = settings.and_then(|settings| taken.map(|()| settings));
        let guest = self.host.is_some();
        // A rank with a bad setting says so to the others, which would wait for it.
        let sizes = settings.as_ref().map(Into::into).map_err(Clone::clone);
        let host = match self.host {
            Some(host) => host,
            None => Host::none(),
        };
        let transport = mpi::start_together(host, sizes)?;
        let settings = settings?;
        logging::set_rank(transport.rank());
        if settings.blas_threads > 0 && !mpi::set_blas_threads(settings.blas_threads) {
            log::debug!(
                "rank {}: this BLAS doesn't take a number of threads; set OPENBLAS_NUM_THREADS or its like",
                transport.rank()
            );
        }
        let world = assemble(Box::new(transport), settings, self.states)?;
        if self.panic_hook.unwrap_or(!guest) {
            failure::install_hook(world.runtime());
        }
        if signals::are_taken() {
            signals::attach(world.runtime());
        }
        Ok(world)
    }
}

/// A world over this process's MPI has ended.
pub(super) fn ended() {
    ALIVE.store(false, Ordering::SeqCst);
}

/// A world over a transport that is up.
pub(super) fn assemble(transport: Box<dyn Transport>, settings: Settings, mut states: State) -> Result<World> {
    #[cfg(feature = "faults")]
    let transport = crate::transport::faults::wrap(transport, crate::wire::kind);
    if let Err(error) = same_program(&*transport) {
        // On all ranks alike. The first error is the one to tell.
        let _ = transport.close();
        return Err(error);
    }
    states.extend([Stop::as_state()]);
    let ranks = Box::new(Ranks(Tables::default()));
    Ok(World::of(Runtime::start(transport, settings, ranks, states)?))
}

/// All ranks must have the same remote functions and speak the same wire version: ids are places in the list.
fn same_program(transport: &dyn Transport) -> Result<()> {
    let mine = rpc::listing().join("\n");
    let sound = rpc::check();
    let digests = transport.all_gather(&fnv(&mine).to_le_bytes())?;
    if digests.iter().all(|d| *d == digests[0]) {
        return sound;
    }
    let lists = transport.all_gather(mine.as_bytes())?;
    sound?;
    let first = String::from_utf8_lossy(&lists[0]).into_owned();
    for (rank, list) in lists.iter().enumerate() {
        let other = String::from_utf8_lossy(list);
        if other != first {
            let (mut a, mut b) = (first.lines(), other.lines());
            let difference = loop {
                match (a.next(), b.next()) {
                    (Some(x), Some(y)) if x == y => {}
                    (x, y) => break format!("`{}` on rank 0, `{}` there", x.unwrap_or("nothing"), y.unwrap_or("nothing")),
                }
            };
            return Err(ErrorKind::Mismatch {
                rank: rank as u32,
                difference,
            }
            .into());
        }
    }
    Ok(())
}

/// FNV-1a, 64 bits.
fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

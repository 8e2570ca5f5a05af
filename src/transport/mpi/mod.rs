//! Frames over MPI: the only place that calls MPI.
//!
//! `README.md` beside this file explains the inbox, how large frames travel, the doorbell, and why no wake-up is lost.

// The calls themselves are foreign functions.
#![allow(unsafe_code)]

mod call;
mod comm;
mod engine;
mod futex;
mod incoming;
mod landing;
mod launcher;
mod mailbox;
mod message;
mod order;
mod outgoing;
mod page;
mod pmi;
mod process;
mod ring;
mod start;
mod watch;

use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use comm::{Comm, Request, SumScatter};
use engine::Engine;
use page::Doorbells;
pub use process::set_blas_threads;
#[cfg(feature = "faults")]
pub(super) use process::{kill, stop};
pub use start::{Host, ThreadLevel};
use watch::Watch;

use super::{Delivery, Frame, Landing, Loss, Settings, Traffic, Transport};
use crate::queue::Queue;
use crate::{ErrorKind, Result};

/// The longest sleep while sends or receives are under way: they need polling to end.
const SLEEP_IN_FLIGHT: Duration = Duration::from_millis(1);
/// The same while segments are: without direct copies between processes both sides feed a pipeline.
const SLEEP_FLOWING: Duration = Duration::from_micros(50);
/// A poller stands back this often for threads that want the lock.
const PATIENCE: usize = 100;

/// One rank's way to the others over MPI. Made by [`start`], ended by [`close`](Transport::close).
///
/// A frame behind a large one from the same sender waits for it, so that order per pair holds across sizes. All MPI calls are made under one
/// lock, by whichever thread calls; none blocks, except at the start, in `all_gather`, at the end and in `abort`.
///
/// Dropping it before `close` leaves MPI as it is, and leaks what MPI may still write to.
#[derive(Debug)]
pub struct MpiTransport {
    rank: u32,
    size: u32,
    node_ranks: Vec<u32>,
    thread_level: ThreadLevel,
    /// Whether MPI ends with this transport.
    own_mpi: bool,
    message_limit: u64,
    eager_limit: usize,
    /// `None` after the end.
    engine: Mutex<Option<Engine>>,
    /// Threads that want the engine's lock to send: the poller stands back for them.
    wanted: AtomicUsize,
    doorbells: Doorbells,
    /// Frames to this rank itself.
    own: Queue<Frame>,
    in_flight: AtomicUsize,
    flowing: AtomicUsize,
    /// Memory in the pool, in use or not, beyond what may be kept unused.
    spare: AtomicUsize,
    closed: AtomicBool,
    messages: AtomicU64,
    bytes: AtomicU64,
    /// `None` for one rank alone, and after the end.
    watch: Mutex<Option<Watch>>,
}

/// Starts the transport, and MPI if there is no host. Collective over the ranks that take part; blocks until all called it. Works without a
/// launcher, as one rank.
///
/// The thread that starts must be the one that closes, if MPI is ours: MPI wants to be ended by the thread that started it.
///
/// # Errors
/// - [`ErrorKind::Setting`]: a size out of its bounds, or `eager_limit` or `chunk_limit` not the same on all ranks.
/// - [`ErrorKind::Init`]: MPI is already up and no communicator was given, or isn't up and one was, or has ended.
/// - [`ErrorKind::ThreadLevel`]: less than MPI_THREAD_SERIALIZED; initialise MPI with MPI_THREAD_MULTIPLE.
/// - [`ErrorKind::Launcher`]: the launcher started several ranks, and this process is alone: launcher and MPI don't fit together.
/// - [`ErrorKind::Mpi`]: an MPI call failed.
///
/// # Examples
/// ```
/// use rankgrad::transport::mpi::{self, Host};
/// use rankgrad::transport::{Frame, Settings, Transport};
///
/// let transport = mpi::start(Host::none(), Settings::default())?;
/// let next = (transport.rank() + 1) % transport.size();
/// transport.send(next, &mut Frame { header: b"hello".to_vec(), segments: vec![] })?;
/// let mut inbox = Vec::new();
/// while inbox.is_empty() {
///     transport.poll(&mut inbox)?;
/// }
/// transport.close()?;
/// # Ok::<(), rankgrad::Error>(())
/// ```
pub fn start(host: Host<'_>, settings: Settings) -> Result<MpiTransport> {
    settings.check()?;
    start_together(host, Ok(settings))
}

/// As [`start`], on a rank that may have found already that it can't: then no rank starts, and each learns which one it was.
pub(crate) fn start_together(host: Host<'_>, settings: Result<Settings>) -> Result<MpiTransport> {
    // From here on an exit leaves others waiting.
    process::opened();
    bring_up(&host, settings).inspect_err(|_| process::closed())
}

fn bring_up(host: &Host<'_>, settings: Result<Settings>) -> Result<MpiTransport> {
    let own_mpi = host.is_none();
    let watched = settings.as_ref().map_or(true, |settings| settings.watch);
    let start::Started {
        comm,
        thread_level,
        fit,
        early,
    } = start::start(host, watched)?;
    let waits_for = |what| early.iter().for_each(|early| early.waits_for(what));
    let (rank, size) = (comm.rank, comm.size);
    #[cfg(feature = "faults")]
    super::faults::reached("mpi", rank);
    waits_for("its neighbours in the watch");
    // First of all, as whatever follows may wait for a rank that has died.
    let watch = Watch::start(&comm, watched).map_err(|error| give_up(own_mpi, None, error))?;
    #[cfg(feature = "faults")]
    super::faults::reached("init", rank);
    let mine = settings.and_then(|settings| fit.and(settings.check()).map(|()| settings));
    waits_for("the settings of all ranks");
    let agreed = agree(&comm, mine);
    // All ranks were here, so the ring is closed everywhere.
    if let Some(early) = early {
        early.finish();
    }
    let settings = match agreed {
        Ok(settings) => settings,
        Err(error) => {
            // On all ranks alike. The first error is the one to tell.
            let _ = comm.free();
            return Err(give_up(own_mpi, watch, error));
        }
    };
    let joined = Doorbells::new(&comm).and_then(|(doorbells, node_ranks)| {
        let engine = Engine::new(comm, doorbells.bells(), &settings)?;
        Ok((doorbells, node_ranks, engine))
    });
    let (doorbells, node_ranks, engine) = match joined {
        Ok(joined) => joined,
        Err(error) => return Err(give_up(own_mpi, watch, error)),
    };
    log::debug!(
        "rank {rank} of {size} is up: {thread_level}, {} ranks on this node",
        node_ranks.len()
    );
    Ok(MpiTransport {
        rank,
        size,
        node_ranks,
        thread_level,
        own_mpi,
        message_limit: settings.message_limit,
        eager_limit: settings.eager_limit,
        engine: Mutex::new(Some(engine)),
        wanted: AtomicUsize::new(0),
        doorbells,
        own: Queue::default(),
        in_flight: AtomicUsize::new(0),
        flowing: AtomicUsize::new(0),
        spare: AtomicUsize::new(0),
        closed: AtomicBool::new(false),
        messages: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        watch: Mutex::new(watch),
    })
}

/// Ends MPI, if it is ours, after a start that failed.
fn give_up(own_mpi: bool, watch: Option<Watch>, error: crate::Error) -> crate::Error {
    if own_mpi {
        // The first error is the one to tell.
        let _ = start::finalize();
    }
    if let Some(watch) = watch {
        watch.end();
    }
    error
}

/// What a rank that can't start says in place of its sizes.
const CANT: &str = "can't start: ";

/// All ranks can start, and agree on what fits in a slot, and where chunks end; or each learns of the first that can't. Collective.
fn agree(comm: &Comm, mine: Result<Settings>) -> Result<Settings> {
    let said = match &mine {
        Ok(settings) => format!("eager_limit={} chunk_limit={}", settings.eager_limit, settings.chunk_limit),
        Err(error) => format!("{CANT}{error}"),
    };
    let all = comm.all_gather(said.as_bytes())?;
    let settings = mine?;
    for (rank, said) in all.iter().enumerate() {
        if let Some(why) = String::from_utf8_lossy(said).strip_prefix(CANT) {
            let source = crate::Error::user(why);
            let operation = "start".into();
            let rank = rank as u32;
            return Err(ErrorKind::Remote { rank, operation, source }.into());
        }
    }
    match all.iter().position(|other| *other != all[0]) {
        None => Ok(settings),
        Some(rank) => {
            let [first, other] = [0, rank].map(|rank| String::from_utf8_lossy(&all[rank]).into_owned());
            let (name, expected) = (format!("transport on rank {rank}"), format!("the same as on rank 0: {first}"));
            Err(ErrorKind::Setting {
                name,
                value: other,
                expected,
            }
            .into())
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cold]
fn shut_down() -> crate::Error {
    ErrorKind::ShutDown {
        operation: "the MPI transport".into(),
    }
    .into()
}

impl MpiTransport {
    /// What MPI lets threads do. Below MPI_THREAD_MULTIPLE the host must not call MPI while we do. Local.
    pub fn thread_level(&self) -> ThreadLevel {
        self.thread_level
    }

    /// The engine, for a thread that goes before the poller.
    #[inline]
    fn engine(&self) -> MutexGuard<'_, Option<Engine>> {
        match self.engine.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.wanted.fetch_add(1, SeqCst);
                let engine = lock(&self.engine);
                self.wanted.fetch_sub(1, SeqCst);
                engine
            }
        }
    }

    #[inline]
    fn note(&self, engine: &Engine) {
        // A store costs more than a look, and mostly nothing has changed. All writers hold the engine.
        for (seen, now) in [
            (&self.in_flight, engine.in_flight()),
            (&self.flowing, engine.flowing()),
            (&self.spare, engine.incoming.spare()),
        ] {
            if seen.load(Relaxed) != now {
                seen.store(now, SeqCst);
            }
        }
    }

    fn send_to_self(&self, frame: &mut Frame) -> Result<()> {
        if self.closed.load(SeqCst) {
            return Err(shut_down());
        }
        self.doorbells.to_myself(|| self.own.push(std::mem::take(frame)));
        Ok(())
    }

    #[inline]
    fn poll_self(&self, inbox: &mut Vec<(u32, Delivery)>) -> bool {
        if self.own.is_empty() {
            return false;
        }
        let before = inbox.len();
        for frame in self.own.take() {
            self.doorbells.took_mine();
            inbox.push((self.rank, frame.within(self.message_limit)));
        }
        inbox.len() > before
    }

    fn progress(&self, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool> {
        // A poll doesn't wait: who holds the lock may be the host, in a call of its own that blocks for long.
        let mut guard = match self.engine.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        let Some(engine) = guard.as_mut() else { return Ok(false) };
        let moved = engine.progress(inbox);
        self.note(engine);
        moved
    }

    /// Moves things on until `done`; drops what arrives. The engine is there until the end has taken it.
    fn progress_until(&self, dropped: &mut usize, mut done: impl FnMut(&mut Engine) -> Result<bool>) -> Result<()> {
        let mut inbox = Vec::new();
        let mut quiet_since = Instant::now();
        loop {
            if self.progress(&mut inbox)? {
                quiet_since = Instant::now();
            }
            *dropped += inbox.drain(..).count();
            if lock(&self.engine).as_mut().map_or(Ok(true), &mut done)? {
                return Ok(());
            }
            // Others may need the core to get here: yield at first, then sleep.
            if quiet_since.elapsed() < Duration::from_micros(50) {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Brings the traffic to an end: afterwards no message is under way to or from any rank.
    fn drain(&self) -> Result<usize> {
        let mut dropped = 0;
        // Own transfers first: when all ranks have entered the barrier, nobody has an answer to wait for or to give.
        self.progress_until(&mut dropped, |engine| Ok(engine.outgoing.len() == 0))?;
        let mut barrier: Option<Request> = None;
        self.progress_until(&mut dropped, |engine| {
            if barrier.is_none() {
                barrier = Some(engine.comm.ibarrier()?);
            }
            barrier.as_mut().map_or(Ok(false), Request::done)
        })?;
        // A send that is done may not have arrived: each rank learns how many messages to expect.
        let mut counts: Option<SumScatter> = None;
        let mut expected = None;
        self.progress_until(&mut dropped, |engine| {
            if counts.is_none() {
                counts = Some(engine.comm.isum_scatter(engine.outgoing.sent().to_vec())?);
            }
            expected = counts.as_mut().map_or(Ok(None), SumScatter::done)?;
            Ok(expected.is_some())
        })?;
        self.progress_until(&mut dropped, |engine| {
            Ok(Some(engine.received) == expected && engine.in_flight() == 0 && !engine.has_mail())
        })?;
        Ok(dropped)
    }
}

impl Transport for MpiTransport {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn node_ranks(&self) -> &[u32] {
        &self.node_ranks
    }

    fn send(&self, to: u32, frame: &mut Frame) -> Result<()> {
        if to >= self.size {
            return Err(ErrorKind::UnknownRank {
                operation: "send".into(),
                rank: to.into(),
                size: self.size,
            }
            .into());
        }
        for segment in frame.segments.iter_mut().filter(|segment| !segment.is_contiguous()) {
            *segment = segment.to_contiguous();
        }
        if to == self.rank {
            return self.send_to_self(frame);
        }
        let bytes = frame.header.len() as u64 + frame.segment_bytes();
        {
            let mut guard = self.engine();
            // Looked at under the lock: the end counts what was sent before.
            let engine = guard.as_mut().filter(|_| !self.closed.load(SeqCst)).ok_or_else(shut_down)?;
            engine.send(to, frame)?;
            self.note(engine);
            // Written by the engine's holder alone.
            self.messages.store(self.messages.load(Relaxed) + 1, Relaxed);
            self.bytes.store(self.bytes.load(Relaxed) + bytes, Relaxed);
        }
        Ok(())
    }

    fn poll(&self, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool> {
        for _ in 0..PATIENCE {
            if self.wanted.load(SeqCst) == 0 {
                break;
            }
            std::thread::yield_now();
        }
        let moved = self.poll_self(inbox);
        Ok(self.progress(inbox)? || moved)
    }

    fn receive_into(&self, landing: Landing<'_>, wait: &mut dyn FnMut()) -> bool {
        // What comes in one message with its header is copied out of the inbox anyway.
        if landing.memory.len() < self.eager_limit / 2 || landing.from == self.rank {
            wait();
            return false;
        }
        landing::receive_into(self, landing, wait)
    }

    fn spin(&self, looks: u32) {
        let looks = if self.in_flight() > 0 { 1 } else { looks };
        self.doorbells.spin(looks, || !self.own.is_empty());
    }

    fn in_flight(&self) -> usize {
        self.in_flight.load(SeqCst)
    }

    fn sleep(&self, limit: Duration) {
        let most = if self.flowing.load(SeqCst) > 0 {
            SLEEP_FLOWING
        } else if self.in_flight() > 0 {
            SLEEP_IN_FLIGHT
        } else {
            limit
        };
        if self.spare.load(Relaxed) > 0
            && let Ok(mut guard) = self.engine.try_lock()
            && let Some(engine) = guard.as_mut()
        {
            engine.incoming.trim();
            self.note(engine);
        }
        self.doorbells.sleep(limit.min(most));
    }

    fn set_away(&self, away: bool) -> bool {
        self.doorbells.set_away(away)
    }

    fn doze(&self, limit: Duration) {
        self.doorbells.doze(limit);
    }

    fn wake(&self) {
        self.doorbells.wake();
    }

    fn is_serialized(&self) -> bool {
        self.thread_level < ThreadLevel::Multiple
    }

    fn exclusive(&self, f: &mut dyn FnMut()) {
        let _one_at_a_time = self.is_serialized().then(|| self.engine());
        f();
    }

    fn traffic(&self) -> Traffic {
        Traffic {
            messages: self.messages.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
        }
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.engine().as_ref().ok_or_else(shut_down)?.comm.all_gather(bytes)
    }

    fn close(&self) -> Result<()> {
        if self.closed.swap(true, SeqCst) {
            return Ok(());
        }
        let dropped = self.drain()? + self.own.take().len();
        let Some(engine) = lock(&self.engine).take() else { return Ok(()) };
        // From here on no other thread gets to MPI.
        let comm = engine.end()?;
        self.doorbells.free()?;
        comm.free()?;
        #[cfg(feature = "faults")]
        super::faults::reached("finalize", self.rank);
        if self.own_mpi {
            start::finalize()?;
        }
        process::closed();
        // Last of all, as a rank may die in all that went before.
        if let Some(watch) = lock(&self.watch).take() {
            watch.end();
        }
        if dropped > 0 {
            log::warn!(
                "rank {}: {dropped} frames arrived after the last poll and were dropped at the end",
                self.rank
            );
        }
        Ok(())
    }

    fn on_loss(&self, hook: Box<dyn Fn(&Loss) + Send + Sync>) {
        if let Some(watch) = &*lock(&self.watch) {
            watch.on_loss(hook);
        }
    }

    fn abort(&self, code: i32) -> ! {
        log::error!("rank {} aborts the job (code {code})", self.rank);
        process::abort(code)
    }
}

/// Decodes a message as the inbox does; the segments of an announcement are made up.
#[cfg(feature = "faults")]
pub(crate) fn decode(bytes: &[u8], limit: u64) -> Result<Option<Delivery>> {
    if let Some(frame) = message::plain_frame(bytes) {
        return Ok(Some(frame.within(limit)));
    }
    let (message, rest) = message::decode(bytes)?;
    Ok(match message {
        message::Message::Frame { header, layouts } => Some(message::decode_frame(header, &layouts, rest)?.within(limit)),
        message::Message::Announce { bytes, lead, .. } => Some(incoming::as_if(bytes, lead, rest, limit)?),
        message::Message::Clear { .. } | message::Message::Refuse { .. } => None,
    })
}

/// The messages in which a frame can come, for [`decode`].
#[cfg(feature = "faults")]
pub(crate) fn messages(frame: &Frame) -> Result<Vec<Vec<u8>>> {
    let room = frame.header.len() + frame.segment_bytes() as usize + 64 * (frame.segments.len() + 1);
    let mut slot = vec![0; room];
    let mut messages: Vec<Vec<u8>> = message::encode_frame(frame, &mut slot)
        .map(|size| slot[..size].to_vec())
        .into_iter()
        .collect();
    let (size, _) = message::encode_announcement(1, frame, &mut slot)?;
    messages.push(slot[..size].to_vec());
    let (_, lead) = message::encode_announcement(1, frame, &mut [0; 64])?;
    if !lead.is_empty() {
        let bytes = frame.segment_bytes();
        let apart = message::Lead::Apart { bytes: lead.len() as u64 };
        let announcement = message::Message::Announce {
            transfer: 1,
            bytes,
            lead: apart,
        };
        let size = message::encode(&announcement, &mut slot).unwrap_or(0);
        messages.push([&slot[..size], &lead].concat());
    }
    Ok(messages)
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            log::warn!("rank {}: the transport is dropped before its end", self.rank);
            // MPI may still write to it.
            std::mem::forget(engine);
        }
    }
}

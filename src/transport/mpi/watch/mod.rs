//! Each rank watches the next one in a ring, so that a death is noticed whatever the launcher does about it.
//!
//! A rank's watcher holds a connection to it, and, where both see each other's process numbers, a pidfd. Both are waited for by one sleeping thread, so
//! watching costs nothing while all live: no message, no tick. A rank that comes to its end says goodbye. An end without a goodbye is a death: the watcher says who died
//! and where, the news goes round the ring against the direction of watching, each rank says what it was waiting for, and all abort. A stopped process ends no
//! connection, so it isn't taken for dead. `README.md` of the folder above has the order of things.

#![deny(unsafe_code)]

mod card;
pub(super) mod early;
mod link;

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use card::Card;
use link::Word;

use super::comm::Comm;
use super::process;
use crate::transport::Loss;
use crate::{ErrorKind, Result};

/// How long a rank that comes to its end waits for a watcher that it hasn't met yet.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long a process whose connection has ended may take to be gone.
const GOING: Duration = Duration::from_secs(1);
/// How long a rank that gave up gets to end the job, before the others end it too.
const GIVING_UP: Duration = Duration::from_secs(3);
/// A card's longest encoding.
const CARD: usize = 1024;

type Hook = Box<dyn Fn(&Loss) + Send + Sync>;

/// What other threads tell the one that watches.
struct Shared {
    bell: UnixStream,
    ending: AtomicBool,
    aborting: AtomicBool,
    hook: Mutex<Option<Hook>>,
}

impl Shared {
    fn ring(&self) {
        // If it is full, it rings already.
        let _ = std::io::Write::write(&mut &self.bell, &[1]);
    }
}

/// The rings that this process is in: an abort tells them.
static RINGS: Mutex<Vec<Arc<Shared>>> = Mutex::new(Vec::new());

/// Tells the rings that this process aborts the job, so that ranks that are killed for it aren't taken for the cause. Takes no lock that it would wait for.
pub(super) fn aborting() {
    if let Ok(rings) = RINGS.try_lock() {
        for ring in rings.iter() {
            ring.aborting.store(true, SeqCst);
            ring.ring();
        }
    }
    early::aborting();
}

/// This rank's place in the ring.
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

impl Watch {
    /// Closes the ring. `None` for one rank alone. A rank that can't be watched is told in the log; no rank fails for it. Collective; blocks until both
    /// neighbours came, and for some seconds where a neighbour can't be reached.
    pub(super) fn start(comm: &Comm, wanted: bool) -> Result<Option<Watch>> {
        let (rank, size) = (comm.rank, comm.size);
        if size == 1 {
            return Ok(None);
        }
        let listener = if wanted {
            link::listen()
        } else {
            Err(std::io::ErrorKind::Unsupported.into())
        };
        let port = listener.as_ref().ok().and_then(|l| Some(l.local_addr().ok()?.port())).unwrap_or(0);
        let own = Card::own(port);
        let bytes = postcard::to_allocvec(&own).map_err(|e| encoding(&e))?;
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let theirs = comm.exchange(&bytes, before, next, CARD)?;
        let theirs: Card = postcard::from_bytes(&theirs).map_err(|e| encoding(&e))?;
        let link = match wanted && theirs.port != 0 {
            true => link::connect(&theirs, &own)
                .inspect_err(|e| {
                    log::warn!(
                        "rank {rank}: can't watch rank {next} on {}: {e}; only the launcher notices its death (RANKGRAD_WATCH=off leaves out the watch)",
                        theirs.host
                    );
                })
                .ok(),
            false => None,
        };
        // The watched rank must know whether its goodbye is waited for.
        let watched = comm.exchange(&[u8::from(link.is_some())], next, before, 1)? == [1];
        let next = link.map(|stream| Next::new(next, theirs, stream, &own));
        let Ok(listener) = listener else { return Ok(None) };
        let ring = Ring::new(rank, own, listener, watched, next);
        match ring.and_then(|(ring, shared)| {
            let name = format!("rankgrad-{rank}-watch");
            let thread = std::thread::Builder::new().name(name).spawn(move || ring.watch())?;
            Ok(Watch { shared, thread })
        }) {
            Ok(watch) => {
                rings().push(Arc::clone(&watch.shared));
                Ok(Some(watch))
            }
            Err(e) => {
                log::warn!("rank {rank}: can't start its watch: {e}; only the launcher notices a death");
                Ok(None)
            }
        }
    }

    /// What to do when a rank is lost, before the job is aborted. Local.
    pub(super) fn on_loss(&self, hook: Hook) {
        *lock(&self.shared.hook) = Some(hook);
    }

    /// Says goodbye: this rank has come to its end. Blocks for a moment, for two seconds at most.
    pub(super) fn end(self) {
        rings().retain(|ring| !Arc::ptr_eq(ring, &self.shared));
        self.shared.ending.store(true, SeqCst);
        self.shared.ring();
        // A panic there was told when it happened.
        let _ = self.thread.join();
    }
}

fn rings() -> std::sync::MutexGuard<'static, Vec<Arc<Shared>>> {
    lock(&RINGS)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn encoding(error: &postcard::Error) -> crate::Error {
    ErrorKind::Decode {
        what: format!("the card of a neighbour in the watch: {error}"),
    }
    .into()
}

/// The rank that this one watches.
struct Next {
    rank: u32,
    card: Card,
    stream: TcpStream,
    /// Whether it has said that it is the rank that was meant.
    known: bool,
    process: Option<OwnedFd>,
}

impl Next {
    fn new(rank: u32, card: Card, stream: TcpStream, own: &Card) -> Next {
        let process = process_of(&card, own);
        Next {
            rank,
            card,
            stream,
            known: false,
            process,
        }
    }

    /// Whether its process has ended, as far as can be told from here; waits for that for a while.
    fn has_ended(&self, limit: Duration) -> Option<bool> {
        card::has_ended(self.process.as_ref()?, limit)
    }

    fn loss(&self, how: &str) -> Loss {
        Loss {
            text: format!(
                "rank {} on {} (process {}) has died: {how}",
                self.rank, self.card.host, self.card.pid
            ),
            died: true,
            hops: 0,
        }
    }
}

/// A process's end can be waited for, if both see the same numbers.
fn process_of(card: &Card, own: &Card) -> Option<OwnedFd> {
    card.shares_processes(own)
        .then(|| card::process(card.pid, card.born).ok())
        .flatten()
}

/// What the watching thread has.
struct Ring {
    rank: u32,
    own: Card,
    listener: TcpListener,
    /// Whether the rank before this one waits for a goodbye.
    watched: bool,
    before: Option<TcpStream>,
    next: Option<Next>,
    bell: UnixStream,
    shared: Arc<Shared>,
    /// A loss was told, and another isn't.
    told: bool,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Bell,
    Watcher,
    Before,
    Word,
    Process,
}

impl Ring {
    fn new(rank: u32, own: Card, listener: TcpListener, watched: bool, next: Option<Next>) -> std::io::Result<(Ring, Arc<Shared>)> {
        let (theirs, bell) = UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        bell.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            bell: theirs,
            ending: AtomicBool::new(false),
            aborting: AtomicBool::new(false),
            hook: Mutex::new(None),
        });
        let ring = Ring {
            rank,
            own,
            listener,
            watched,
            before: None,
            next,
            bell,
            shared: Arc::clone(&shared),
            told: false,
        };
        Ok((ring, shared))
    }

    /// Sleeps until something happens, until the end.
    fn watch(mut self) {
        while !self.shared.ending.load(SeqCst) {
            match self.sleep(None) {
                Ok(events) => events.into_iter().for_each(|event| self.happens(event)),
                Err(e) => {
                    log::warn!(
                        "rank {}: its watch ends: {e}; only the launcher notices a death from now on",
                        self.rank
                    );
                    return;
                }
            }
        }
        self.leave();
    }

    fn sleep(&self, limit: Option<Duration>) -> std::io::Result<Vec<Event>> {
        let mut events = vec![Event::Bell, Event::Watcher];
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        if let Some(before) = &self.before {
            events.push(Event::Before);
            fds.push(PollFd::new(before, PollFlags::IN));
        }
        if let Some(next) = &self.next {
            // What it said before it ended comes first.
            events.push(Event::Word);
            fds.push(PollFd::new(&next.stream, PollFlags::IN));
            if let Some(process) = &next.process {
                events.push(Event::Process);
                fds.push(PollFd::new(process, PollFlags::IN));
            }
        }
        let limit = limit.map(|limit| Timespec {
            tv_sec: limit.as_secs() as _,
            tv_nsec: limit.subsec_nanos() as _,
        });
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(e) => return Err(e.into()),
        }
        let happened = events.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(happened.map(|(event, _)| event).collect())
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Bell => {
                let mut rings = [0; 64];
                let _ = std::io::Read::read(&mut self.bell, &mut rings);
                if self.shared.aborting.load(SeqCst) && !self.told {
                    self.told = true;
                    self.pass_on(&Loss {
                        text: format!("rank {} on {} aborts the job", self.rank, self.own.host),
                        died: false,
                        hops: 0,
                    });
                }
            }
            Event::Watcher => match link::accept(&self.listener, &self.own) {
                Ok(stream) => self.before = Some(stream),
                Err(e) => log::debug!("rank {}: a connection to its watch was turned away: {e}", self.rank),
            },
            Event::Before => {
                let mut word = [0];
                let read = self.before.as_mut().map(|mut stream| std::io::Read::read(&mut stream, &mut word));
                // Its own watcher, and a new connection, tell the rest.
                if !matches!(read, Some(Ok(1)) if word[0] == link::NO_NEED) {
                    self.before = None;
                    return;
                }
                self.watched = false;
                self.before = None;
            }
            Event::Word => self.hear(),
            Event::Process => {
                // It may have said something that was on its way when this thread looked.
                while self.next.as_ref().is_some_and(|next| next.has_ended(Duration::ZERO) == Some(true)) {
                    let word = self.next.as_ref().map(|next| Word::read(&next.stream));
                    match word {
                        Some(Ok(word)) => self.heard(word),
                        _ => self.died("its process has ended without `finish`"),
                    }
                }
            }
        }
    }

    /// Something came from the watched rank, or its connection has ended.
    fn hear(&mut self) {
        let Some(next) = &self.next else { return };
        match Word::read(&next.stream) {
            Ok(word) => self.heard(word),
            Err(e) => self.broken(&e),
        }
    }

    fn heard(&mut self, word: Word) {
        match word {
            Word::Welcome => {
                if let Some(next) = &mut self.next {
                    next.known = true;
                }
            }
            Word::Goodbye => self.next = None,
            Word::Lost(loss) => self.lost(Loss {
                hops: loss.hops.saturating_add(1),
                ..loss
            }),
        }
    }

    /// The connection has ended without a goodbye: the rank has died, or the network has dropped it.
    fn broken(&mut self, error: &std::io::Error) {
        let Some(next) = &mut self.next else { return };
        if next.has_ended(GOING) == Some(true) {
            return self.died("its process has ended without `finish`");
        }
        match link::connect(&next.card, &self.own) {
            Ok(stream) if next.known => {
                log::info!("rank {}: connected to rank {} again, after {error}", self.rank, next.rank);
                (next.stream, next.known) = (stream, false);
            }
            Ok(_) => {
                log::warn!(
                    "rank {}: can't watch rank {} on {}: another process answers at its address; only the launcher notices its death",
                    self.rank,
                    next.rank,
                    next.card.host
                );
                self.next = None;
            }
            // It is there, and only its connection can't be made again.
            Err(e) if next.process.is_some() => {
                log::warn!("rank {}: lost the connection to rank {}: {e}", self.rank, next.rank);
                self.next = None;
            }
            Err(e) => self.died(&format!(
                "its connection has ended ({error}), and it can't be reached any more ({e})"
            )),
        }
    }

    fn died(&mut self, how: &str) {
        if let Some(next) = self.next.take() {
            self.lost(next.loss(how));
        }
    }

    /// A rank is lost: passes it on, lets this rank say what it waits for, and ends the job.
    fn lost(&mut self, loss: Loss) {
        if std::mem::replace(&mut self.told, true) {
            return;
        }
        self.pass_on(&loss);
        if loss.died && loss.hops == 0 {
            process::last_words(&format!(
                "rank {} on {}: {}; the job is aborted",
                self.rank, self.own.host, loss.text
            ));
        } else {
            log::error!("rank {} on {}: {}; the job is aborted", self.rank, self.own.host, loss.text);
        }
        if let Some(hook) = &*lock(&self.shared.hook) {
            hook(&loss);
        }
        if !loss.died {
            // Whoever gave up ends the job, with its own exit code.
            let end = Instant::now() + GIVING_UP;
            while Instant::now() < end {
                if self.shared.ending.load(SeqCst) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        process::abort(1)
    }

    /// Tells the watcher, who tells its own.
    fn pass_on(&mut self, loss: &Loss) {
        if self.before.is_none() && self.watched {
            self.meet_watcher();
        }
        if let Some(before) = &self.before
            && let Err(e) = Word::Lost(loss.clone()).write(before)
        {
            log::debug!("rank {}: can't tell its watcher: {e}", self.rank);
        }
    }

    /// Waits for the watcher to connect, for a while.
    fn meet_watcher(&mut self) {
        let end = Instant::now() + FAREWELL;
        while self.before.is_none() && self.watched {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(events) = self.sleep(Some(left)) else { return };
            if left.is_zero() {
                return;
            }
            for event in events {
                match event {
                    Event::Watcher | Event::Before => self.happens(event),
                    // Not now: this rank is leaving.
                    Event::Word | Event::Process => self.next = None,
                    Event::Bell => {
                        let mut rings = [0; 64];
                        let _ = std::io::Read::read(&mut self.bell, &mut rings);
                    }
                }
            }
        }
    }

    /// The end of this rank's part.
    fn leave(mut self) {
        if let Some(next) = self.next.take() {
            let _ = std::io::Write::write_all(&mut &next.stream, &[link::NO_NEED]);
        }
        if self.before.is_none() && self.watched {
            self.meet_watcher();
        }
        if let Some(before) = &self.before {
            // If the watcher has gone, it needs none.
            let _ = Word::Goodbye.write(before);
        }
    }
}

//! The page of doorbells that the ranks of a node share.

use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, Release, SeqCst},
};
use std::sync::{Arc, PoisonError, RwLock, TryLockError};
use std::time::Duration;

use ::mpi::ffi;

use super::call::{Handle, mpi_call};
use super::comm::Comm;
use super::futex::Futex;
use super::mailbox::Mailbox;
use crate::Result;
use crate::transport::doorbell::{Sleeper, Slot};

/// One rank's part of the page. All zeros is a valid start.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct Place {
    bell: Slot,
    mailbox: Mailbox,
}

/// No doorbell: the rank is on another node.
const ELSEWHERE: u32 = u32::MAX;

/// This rank's doorbell, and those of the ranks on its node.
#[derive(Debug)]
pub(super) struct Doorbells {
    /// `None` after the end. Read while a doorbell is in use, so that the page outlives each use.
    page: RwLock<Option<Page>>,
    /// Set when the end waits for uses to stop: from then on there are no new ones.
    ending: AtomicBool,
    /// For each rank its slot in the page.
    slots: Arc<[u32]>,
    own: usize,
    /// Whether all ranks are on this node, and count what they send.
    all_count: bool,
    /// Messages taken out of this rank's mailbox so far.
    read: Arc<AtomicU64>,
    sleeper: Sleeper,
}

/// The page as the engine sees it: without its lock, since the end frees the page only after it has taken the engine.
#[derive(Debug)]
pub(super) struct Bells {
    /// `None` if there is nobody else on this node.
    first: Option<Handle<NonNull<Place>>>,
    slots: Arc<[u32]>,
    own: usize,
    read: Arc<AtomicU64>,
    /// Whether all ranks are on this node, and count what they send.
    all_count: bool,
}

impl Bells {
    #[inline]
    fn at(&self, place: usize) -> Option<&Place> {
        // SAFETY: the page has as many places as there are ranks on this node, which `slots` and `own` number. It outlives the engine that has this.
        self.first.map(|first| unsafe { first.0.add(place).as_ref() })
    }

    #[inline]
    fn place(&self, rank: u32) -> Option<&Place> {
        let place = self.slots[rank as usize];
        if place == ELSEWHERE { None } else { self.at(place as usize) }
    }

    /// Whether a rank is another one of this node.
    #[inline]
    pub(super) fn is_here(&self, rank: u32) -> bool {
        self.first.is_some() && self.slots[rank as usize] != ELSEWHERE
    }

    /// Whether MPI has nothing on the way to this rank, as far as that can be known.
    #[inline]
    pub(super) fn has_nothing_posted(&self) -> bool {
        self.all_count && self.at(self.own).is_none_or(|own| !own.bell.has_more())
    }

    /// Whether this rank's mailbox holds messages.
    #[inline]
    pub(super) fn has_mail(&self) -> bool {
        self.at(self.own).is_some_and(|own| own.mailbox.holds(self.read.load(Relaxed)))
    }

    /// Announces a message to a rank, if it is on this node, before it is sent by MPI.
    pub(super) fn post(&self, to: u32) {
        if let Some(place) = self.place(to) {
            place.bell.post();
        }
    }

    /// Wakes that rank, if need be, after the message was sent.
    pub(super) fn ring(&self, to: u32) {
        if let Some(place) = self.place(to) {
            place.bell.ring(&Futex);
        }
    }

    /// Puts a message, in two parts, into the mailbox of a rank, if it is on this node and there is room, and wakes it if need be.
    #[inline]
    pub(super) fn mail(&self, from: u32, to: u32, front: &[u8], rest: &[u8]) -> bool {
        let Some(Place { bell, mailbox }) = self.place(to) else {
            return false;
        };
        let Some(place) = mailbox.put(from, front, rest) else {
            return false;
        };
        bell.ring_if(&Futex, || mailbox.holds(place));
        true
    }

    /// Hands the oldest message of this rank's mailbox to `f`, if there is one. Only the holder of the engine may.
    #[inline]
    pub(super) fn read<R>(&self, f: impl FnOnce(u32, &[u8]) -> R) -> Option<R> {
        let place = self.read.load(Relaxed);
        let own = self.at(self.own)?;
        let (result, next) = own.mailbox.take(place, |from, bytes| {
            own.bell.fetch_line();
            f(from, bytes)
        })?;
        self.read.store(next, Release); // those who look hold the engine or the polling role, and had it from here
        Some(result)
    }

    /// Counts a message that was received by MPI.
    pub(super) fn took(&self, from: u32) {
        if self.slots[from as usize] != ELSEWHERE
            && let Some(own) = self.at(self.own)
        {
            own.bell.took();
        }
    }
}

#[derive(Debug)]
enum Page {
    /// A node with one rank needs no shared memory.
    Private(Box<Place>),
    /// Memory of an MPI window, with its communicator.
    Shared {
        first: Handle<NonNull<Place>>,
        len: usize,
        window: Handle<ffi::MPI_Win>,
        node: Comm,
    },
}

impl Page {
    #[inline]
    fn place(&self, place: usize) -> &Place {
        match self {
            Page::Private(place) => place,
            Page::Shared { first, len, .. } => {
                assert!(place < *len, "a rank of this node");
                // SAFETY: the window holds `len` aligned places, zeroed before anyone used them, and lives until `free` takes the page.
                // Places are atomics, and bytes that these guard, so other processes may write to them.
                unsafe { first.0.add(place).as_ref() }
            }
        }
    }

    /// Makes the page. Collective over the node, blocking.
    fn new(node: Comm) -> Result<Page> {
        let len = node.size as usize;
        if len == 1 {
            node.free()?;
            return Ok(Page::Private(Box::default()));
        }
        // One place more than needed leaves room to align the first. Only the node's first rank gives memory.
        let bytes = if node.rank == 0 { (len + 1) * size_of::<Place>() } else { 0 };
        let mut base: *mut u8 = std::ptr::null_mut();
        let (mut size, mut unit) = (0, 0);
        // SAFETY: all zeros is a valid start for a handle that MPI writes before anyone reads it.
        let mut window: ffi::MPI_Win = unsafe { std::mem::zeroed() };
        // SAFETY: the communicator is live; MPI writes a pointer to `base`, although its type doesn't say so.
        unsafe {
            let info = ffi::RSMPI_INFO_NULL;
            mpi_call!(MPI_Win_allocate_shared(
                bytes as ffi::MPI_Aint,
                1,
                info,
                node.raw(),
                (&raw mut base).cast(),
                &mut window
            ))?;
            mpi_call!(MPI_Win_set_errhandler(window, ffi::RSMPI_ERRORS_RETURN))?;
            mpi_call!(MPI_Win_shared_query(window, 0, &mut size, &mut unit, (&raw mut base).cast()))?;
        }
        // A mapping starts at a page on every rank, so all align to the same place.
        let aligned = base.wrapping_add(base.align_offset(align_of::<Place>())).cast::<Place>();
        let first = NonNull::new(aligned).ok_or_else(|| no_memory(size))?;
        if node.rank == 0 {
            // SAFETY: the memory holds `len` places from here on, and the barrier below keeps others off until it is zeroed.
            unsafe { first.as_ptr().write_bytes(0, len) };
        }
        node.barrier()?;
        Ok(Page::Shared {
            first: Handle(first),
            len,
            window: Handle(window),
            node,
        })
    }

    /// Collective over the node.
    fn free(self) -> Result<()> {
        let Page::Shared { window, node, .. } = self else { return Ok(()) };
        let mut window = window.0;
        // SAFETY: the window is ours, and as `self` ends here nobody uses its memory again.
        unsafe { mpi_call!(MPI_Win_free(&mut window)) }?;
        node.free()
    }
}

#[cold]
fn no_memory(size: ffi::MPI_Aint) -> crate::Error {
    let text = format!("the window of {size} bytes has no address; is /dev/shm full?");
    crate::ErrorKind::Mpi {
        call: "MPI_Win_shared_query".into(),
        rank: -1,
        class: 0,
        text,
    }
    .into()
}

impl Doorbells {
    /// Collective, blocking; also returns the ranks of this node, ascending.
    pub(super) fn new(comm: &Comm) -> Result<(Doorbells, Vec<u32>)> {
        let node = comm.node()?;
        let ranks: Vec<u32> = node
            .all_gather_number(comm.rank as i32)?
            .into_iter()
            .map(|rank| rank as u32)
            .collect();
        let mut slots = vec![ELSEWHERE; comm.size as usize];
        for (slot, &rank) in ranks.iter().enumerate() {
            slots[rank as usize] = slot as u32;
        }
        let own = node.rank as usize;
        let page = RwLock::new(Some(Page::new(node)?));
        Ok((
            Doorbells {
                page,
                ending: AtomicBool::new(false),
                all_count: !slots.contains(&ELSEWHERE),
                slots: slots.into(),
                own,
                read: Arc::default(),
                sleeper: Sleeper::default(),
            },
            ranks,
        ))
    }

    #[inline]
    fn has_mail(&self, own: &Place) -> bool {
        own.mailbox.holds(self.read.load(Relaxed))
    }

    /// `None` after the end.
    #[inline]
    fn with_own<T>(&self, operation: impl FnOnce(&Place) -> T) -> Option<T> {
        if self.ending.load(SeqCst) {
            return None;
        }
        self.page
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(|page| operation(page.place(self.own)))
    }

    /// A message from this rank to itself, which `send` leaves where it is found.
    pub(super) fn to_myself(&self, send: impl FnOnce()) {
        self.with_own(|own| own.bell.post());
        send();
        self.with_own(|own| own.bell.ring(&Futex));
    }

    /// Counts a message of this rank to itself as received.
    pub(super) fn took_mine(&self) {
        self.with_own(|own| own.bell.took());
    }

    /// The page for the engine, which uses it with each message and needs no lock for that.
    pub(super) fn bells(&self) -> Bells {
        let page = self.page.read().unwrap_or_else(PoisonError::into_inner);
        let first = match page.as_ref() {
            Some(Page::Shared { first, .. }) => Some(*first),
            _ => None,
        };
        Bells {
            first,
            slots: Arc::clone(&self.slots),
            own: self.own,
            read: Arc::clone(&self.read),
            all_count: self.all_count,
        }
    }

    /// Looks so many times, one apart, until something was sent to this rank or `stop`; once if not all ranks are on this node.
    pub(super) fn spin(&self, looks: u32, stop: impl Fn() -> bool) {
        let looks = if self.all_count { looks } else { 1 };
        self.with_own(|own| {
            for _ in 0..looks {
                std::hint::spin_loop();
                if self.has_mail(own) || own.bell.has_more() || stop() {
                    break;
                }
            }
        });
    }

    pub(super) fn sleep(&self, limit: Duration) {
        // After the end nobody rings.
        if self
            .with_own(|own| self.sleeper.sleep(&own.bell, &Futex, limit, || self.has_mail(own)))
            .is_none()
        {
            std::thread::sleep(limit.min(Duration::from_millis(1)));
        }
    }

    pub(super) fn doze(&self, limit: Duration) {
        if self.with_own(|own| self.sleeper.doze(&own.bell, &Futex, limit)).is_none() {
            std::thread::sleep(limit.min(Duration::from_millis(1)));
        }
    }

    #[inline]
    pub(super) fn set_away(&self, away: bool) -> bool {
        self.with_own(|own| self.sleeper.set_away(&own.bell, away, || self.has_mail(own)))
            .unwrap_or(false)
    }

    pub(super) fn wake(&self) {
        self.with_own(|own| self.sleeper.wake(&own.bell, &Futex));
    }

    /// Wakes those who sleep, waits until they have left, and frees the page. Collective over the node.
    pub(super) fn free(&self) -> Result<()> {
        self.ending.store(true, SeqCst);
        loop {
            // One who was not asleep yet at the last wake may be by now.
            if let Some(page) = self.page.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
                self.sleeper.wake(&page.place(self.own).bell, &Futex);
            }
            let mut page = match self.page.try_write() {
                Ok(page) => page,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(Duration::from_micros(50));
                    continue;
                }
            };
            return page.take().map_or(Ok(()), Page::free);
        }
    }
}

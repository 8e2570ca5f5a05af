//! The page of doorbells that the ranks of a node share.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{PoisonError, RwLock, TryLockError};
use std::time::Duration;

use ::mpi::ffi;

use super::call::{Handle, mpi_call};
use super::comm::Comm;
use super::futex::Futex;
use crate::Result;
use crate::transport::doorbell::{Sleeper, Slot};

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
    slots: Vec<u32>,
    own: usize,
    sleeper: Sleeper,
}

#[derive(Debug)]
enum Page {
    /// A node with one rank needs no shared memory.
    Private(Box<Slot>),
    /// Memory of an MPI window, with its communicator.
    Shared {
        first: Handle<NonNull<Slot>>,
        len: usize,
        window: Handle<ffi::MPI_Win>,
        node: Comm,
    },
}

impl Page {
    fn slots(&self) -> &[Slot] {
        match self {
            Page::Private(slot) => std::slice::from_ref(slot),
            // SAFETY: the window holds `len` aligned slots, zeroed before anyone used them, and lives until `free` takes the page.
            // Slots are atomics only, so other processes may write to them.
            Page::Shared { first, len, .. } => unsafe { std::slice::from_raw_parts(first.0.as_ptr(), *len) },
        }
    }

    /// Makes the page. Collective over the node, blocking.
    fn new(node: Comm) -> Result<Page> {
        let len = node.size as usize;
        if len == 1 {
            node.free()?;
            return Ok(Page::Private(Box::default()));
        }
        // One slot more than needed leaves room to align the first. Only the node's first rank gives memory.
        let bytes = if node.rank == 0 { (len + 1) * size_of::<Slot>() } else { 0 };
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
        // A mapping starts at a page on every rank, so all align to the same slot.
        let aligned = base.wrapping_add(base.align_offset(align_of::<Slot>())).cast::<Slot>();
        let first = NonNull::new(aligned).ok_or_else(|| no_memory(size))?;
        if node.rank == 0 {
            // SAFETY: the memory holds `len` slots from here on, and the barrier below keeps others off until it is zeroed.
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
                slots,
                own,
                sleeper: Sleeper::default(),
            },
            ranks,
        ))
    }

    /// `None` after the end.
    fn with<T>(&self, operation: impl FnOnce(&[Slot]) -> T) -> Option<T> {
        if self.ending.load(SeqCst) {
            return None;
        }
        self.page
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(|page| operation(page.slots()))
    }

    /// Tells a rank, if it is on this node, of a message that was sent to it.
    pub(super) fn ring(&self, to: u32) {
        let slot = self.slots[to as usize];
        if slot != ELSEWHERE {
            self.with(|slots| slots[slot as usize].ring(&Futex));
        }
    }

    /// Counts a message that was received.
    pub(super) fn took(&self, from: u32) {
        if self.slots[from as usize] != ELSEWHERE {
            self.sleeper.took();
        }
    }

    pub(super) fn sleep(&self, limit: Duration) {
        // After the end nobody rings.
        if self.with(|slots| self.sleeper.sleep(&slots[self.own], &Futex, limit)).is_none() {
            std::thread::sleep(limit.min(Duration::from_millis(1)));
        }
    }

    pub(super) fn doze(&self, limit: Duration) {
        if self.with(|slots| self.sleeper.doze(&slots[self.own], &Futex, limit)).is_none() {
            std::thread::sleep(limit.min(Duration::from_millis(1)));
        }
    }

    pub(super) fn set_away(&self, away: bool) -> bool {
        self.with(|slots| self.sleeper.set_away(&slots[self.own], away)).unwrap_or(false)
    }

    pub(super) fn wake(&self) {
        self.with(|slots| self.sleeper.wake(&slots[self.own], &Futex));
    }

    /// Wakes those who sleep, waits until they have left, and frees the page. Collective over the node.
    pub(super) fn free(&self) -> Result<()> {
        self.ending.store(true, SeqCst);
        loop {
            // One who was not asleep yet at the last wake may be by now.
            if let Some(page) = self.page.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
                self.sleeper.wake(&page.slots()[self.own], &Futex);
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

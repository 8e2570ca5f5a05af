//! Memory of callers that segments are received straight into.
//!
//! A caller lends its memory for the time of a wait. While nothing is posted into it, a landing is only a note, and can be struck out. Once receives are
//! posted, MPI can't be told to leave the memory alone, so the caller stays until they are done, whatever it waited for.

use std::cell::Cell;
use std::ptr::NonNull;

use super::call::Handle;
use super::engine::Engine;
use super::{MpiTransport, process};
use crate::tensor::DType;
use crate::transport::segment::Layout;
use crate::transport::{IsIt, Landing};

/// A caller's memory, known by its key. Valid until [`Engine::lift`] said that it isn't used.
pub(super) struct Lent {
    pub(super) key: u64,
    from: u32,
    layout: Layout,
    memory: Handle<NonNull<u8>>,
    bytes: usize,
    is_it: IsIt,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Lent { key, from, layout, .. } = self;
        f.debug_struct("Lent")
            .field("key", key)
            .field("from", from)
            .field("layout", layout)
            .finish_non_exhaustive()
    }
}

impl Lent {
    pub(super) fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// The memory, to receive into.
    pub(super) fn memory(&mut self) -> &mut [u8] {
        // SAFETY: the caller lent so many bytes, touches none of them, and stays until this is lifted.
        unsafe { std::slice::from_raw_parts_mut(self.memory.0.as_ptr(), self.bytes) }
    }
}

/// What is lent, and nothing has begun to arrive in.
#[derive(Debug, Default)]
pub(super) struct Landings {
    next_key: u64,
    waiting: Vec<Lent>,
}

impl Landings {
    /// # Safety
    /// The memory stays lent, and nobody touches it, until the landing was lifted.
    unsafe fn lend(&mut self, landing: Landing<'_>) -> u64 {
        let key = self.next_key;
        self.next_key += 1;
        self.waiting.push(Lent {
            key,
            from: landing.from,
            layout: Layout {
                dtype: landing.dtype,
                shape: landing.shape.to_vec(),
            },
            bytes: landing.memory.len(),
            memory: Handle(NonNull::from(landing.memory).cast()),
            is_it: landing.is_it,
        });
        key
    }

    /// The memory that was lent for this frame, if any was.
    pub(super) fn take(&mut self, from: u32, header: &[u8], layouts: &[Layout]) -> Option<Lent> {
        let [layout] = layouts else { return None };
        let fits = |lent: &Lent| lent.from == from && lent.layout == *layout && layout.bytes().is_ok_and(|n| n == lent.bytes);
        let at = self.waiting.iter().position(|lent| fits(lent) && (lent.is_it)(header))?;
        Some(self.waiting.swap_remove(at))
    }

    /// Strikes out what nothing has begun to arrive in.
    pub(super) fn strike(&mut self, key: u64) -> bool {
        let found = self.waiting.iter().position(|lent| lent.key == key);
        found.map(|at| self.waiting.swap_remove(at)).is_some()
    }
}

/// Where a landing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Landed {
    /// All of the segment is there.
    Yes,
    /// Nothing came, and nothing will.
    No,
    /// Receives are posted.
    UnderWay,
}

/// Takes a landing back when the caller leaves, also in a panic.
struct Lift<'a> {
    transport: &'a MpiTransport,
    key: u64,
    landed: &'a Cell<bool>,
}

impl Lift<'_> {
    fn lift(&self) -> Landed {
        let mut guard = self.transport.engine();
        // The end takes the engine only when nothing is under way.
        let Some(engine) = guard.as_mut() else { return Landed::No };
        match engine.lift(self.key) {
            Ok(landed) => landed,
            Err(error) => {
                // What MPI still does to the memory isn't known, so it can't be given back.
                log::error!("rank {}: receiving into a caller's memory: {error}", self.transport.rank);
                process::abort(1)
            }
        }
    }
}

impl Drop for Lift<'_> {
    fn drop(&mut self) {
        loop {
            match self.lift() {
                Landed::UnderWay => std::thread::yield_now(),
                landed => return self.landed.set(landed == Landed::Yes),
            }
        }
    }
}

/// As [`Transport::receive_into`](crate::transport::Transport::receive_into).
pub(super) fn receive_into(transport: &MpiTransport, landing: Landing<'_>, wait: &mut dyn FnMut()) -> bool {
    let lend = |engine: &mut Engine| {
        // SAFETY: the landing borrows the memory until this function returns, and `lift` lifts it before, also if `wait` panics.
        unsafe { engine.incoming.landings.lend(landing) }
    };
    let key = transport.engine().as_mut().map(lend);
    let Some(key) = key else {
        wait();
        return false;
    };
    let landed = Cell::new(false);
    let lift = Lift {
        transport,
        key,
        landed: &landed,
    };
    wait();
    drop(lift);
    landed.get()
}

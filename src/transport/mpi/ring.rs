//! The inbox: receives posted ahead, of which only the oldest is tested. That keeps the order of messages, which testing any
//! of them would not.

use super::comm::{Comm, Received, Request};
use crate::Result;

/// Tag of everything that isn't a segment.
pub(super) const INBOX_TAG: i32 = 0;

/// A ring of slots, each with a receive posted into it.
#[derive(Debug)]
pub(super) struct Ring {
    slots: Vec<Vec<u8>>,
    /// One a slot.
    requests: Vec<Request>,
    head: usize,
}

impl Ring {
    /// Posts `count` receives of `size` bytes.
    pub(super) fn new(comm: &Comm, count: usize, size: usize) -> Result<Ring> {
        let mut slots: Vec<Vec<u8>> = (0..count).map(|_| vec![0; size]).collect();
        // SAFETY: a slot's memory never moves; it is read between the end of its receive and the next only, and freed after `cancel`.
        let requests = slots
            .iter_mut()
            .map(|slot| unsafe { comm.irecv(slot, None, INBOX_TAG) })
            .collect::<Result<_>>()?;
        Ok(Ring { slots, requests, head: 0 })
    }

    /// The oldest message, if it has arrived. Give it back with [`next`](Self::next).
    pub(super) fn head(&mut self) -> Result<Option<(u32, &[u8])>> {
        let received = self.requests[self.head].received()?;
        Ok(received.map(|Received { from, bytes }| (from, &self.slots[self.head][..bytes])))
    }

    /// Posts the head's slot again, behind all others.
    pub(super) fn next(&mut self, comm: &Comm) -> Result<()> {
        // SAFETY: as in `new`; the receive that was posted into this slot is done.
        self.requests[self.head] = unsafe { comm.irecv(&mut self.slots[self.head], None, INBOX_TAG) }?;
        self.head = (self.head + 1) % self.slots.len();
        Ok(())
    }

    /// Takes all receives back.
    pub(super) fn cancel(self) -> Result<()> {
        let Ring { slots, requests, .. } = self;
        for request in requests {
            // A receive that could not be cancelled may still be written to: its memory stays.
            if let Err(error) = request.cancel() {
                std::mem::forget(slots);
                return Err(error);
            }
        }
        Ok(())
    }
}

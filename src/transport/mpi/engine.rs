//! All that lies behind the transport's lock: the inbox and both sides of transfers.

use super::comm::Comm;
use super::incoming::{Incoming, Peers};
use super::message::{self, Message};
use super::outgoing::Outgoing;
use super::page::Doorbells;
use super::ring::Ring;
use crate::transport::{Delivery, Frame, Settings};
use crate::{ErrorKind, Result};

/// The state of one rank's MPI traffic. Leaked, not dropped, while anything is under way: MPI writes to its memory.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) comm: Comm,
    pub(super) outgoing: Outgoing,
    ring: Ring,
    incoming: Incoming,
    batch: usize,
    /// Messages of every kind received from other ranks.
    pub(super) received: u64,
}

impl Engine {
    /// Posts the inbox. Local.
    pub(super) fn new(comm: Comm, settings: &Settings) -> Result<Engine> {
        Ok(Engine {
            outgoing: Outgoing::new(comm.size, settings.eager_limit, settings.chunk_limit),
            ring: Ring::new(&comm, settings.ring, settings.eager_limit)?,
            incoming: Incoming::new(settings),
            batch: settings.ring,
            received: 0,
            comm,
        })
    }

    /// Starts to send a frame; the caller rings.
    pub(super) fn send(&mut self, to: u32, frame: Frame) -> Result<()> {
        self.outgoing.collect_small()?;
        self.outgoing.frame(&self.comm, to, frame)
    }

    /// Moves everything on; appends what arrived; says whether anything moved.
    pub(super) fn progress(&mut self, doorbells: &Doorbells, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool> {
        let before = self.received;
        // A batch at most, so that others get the lock and the caller its messages.
        for _ in 0..self.batch {
            if !self.receive(doorbells, inbox)? {
                break;
            }
        }
        if self.incoming.len() > 0 {
            let mut peers = Peers {
                comm: &self.comm,
                doorbells,
                outgoing: &mut self.outgoing,
                inbox,
            };
            self.received += self.incoming.progress(&mut peers)?;
        }
        let collected = self.outgoing.len() > 0 && self.outgoing.collect()?;
        Ok(collected || self.received != before)
    }

    /// Takes the oldest message of the inbox, if there is one.
    fn receive(&mut self, doorbells: &Doorbells, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool> {
        let Engine {
            comm,
            outgoing,
            ring,
            incoming,
            received,
            ..
        } = self;
        let Some((from, bytes)) = ring.head()? else { return Ok(false) };
        *received += 1;
        doorbells.took(from);
        let mut peers = Peers {
            comm,
            doorbells,
            outgoing,
            inbox,
        };
        let handled = handle(incoming, &mut peers, from, bytes).map_err(|error| name_sender(from, error));
        // Also after a message that makes no sense: the inbox goes on.
        ring.next(comm)?;
        handled.map(|()| true)
    }

    /// Sends and receives that need polling to end.
    pub(super) fn in_flight(&self) -> usize {
        self.outgoing.len() + self.incoming.len()
    }

    /// Large frames that are under way now.
    pub(super) fn flowing(&self) -> usize {
        self.outgoing.flowing() + self.incoming.flowing()
    }

    /// Takes back the inbox; the communicator is left. Nothing may be under way.
    pub(super) fn end(self) -> Result<Comm> {
        self.ring.cancel()?;
        Ok(self.comm)
    }
}

fn handle(incoming: &mut Incoming, peers: &mut Peers, from: u32, bytes: &[u8]) -> Result<()> {
    let (message, rest) = message::decode(bytes)?;
    match message {
        Message::Frame { header, layouts } => {
            let delivery = message::decode_frame(header, &layouts, rest)?.within(incoming.message_limit());
            incoming.deliver(from, delivery, peers.inbox);
            Ok(())
        }
        Message::Announce { transfer, bytes, lead } => incoming.announced(peers, from, transfer, bytes, lead, rest),
        Message::Clear { transfer, tag, segments } => peers.outgoing.cleared(peers.comm, peers.doorbells, from, transfer, tag, segments),
        Message::Refuse { transfer } => peers.outgoing.refused(from, transfer),
    }
}

#[cold]
fn name_sender(from: u32, error: crate::Error) -> crate::Error {
    match error.kind() {
        ErrorKind::Decode { what } => ErrorKind::Decode {
            what: format!("from rank {from}: {what}"),
        }
        .into(),
        _ => error,
    }
}

//! All that lies behind the transport's lock: the inbox and both sides of transfers.

use super::comm::Comm;
use super::incoming::{Incoming, Peers};
use super::landing::Landed;
use super::message::{self, Message};
use super::order::{NUMBER, Order};
use super::outgoing::Outgoing;
use super::page::Bells;
use super::ring::Ring;
use crate::Result;
use crate::transport::{Delivery, Frame, Settings};

/// The state of one rank's MPI traffic. Leaked, not dropped, while anything is under way: MPI writes to its memory.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) comm: Comm,
    pub(super) outgoing: Outgoing,
    bells: Bells,
    ring: Ring,
    pub(super) incoming: Incoming,
    order: Order,
    batch: usize,
    /// Messages of every kind received from other ranks.
    pub(super) received: u64,
}

impl Engine {
    /// Posts the inbox. Local.
    pub(super) fn new(comm: Comm, bells: Bells, settings: &Settings) -> Result<Engine> {
        Ok(Engine {
            outgoing: Outgoing::new(&comm, settings.eager_limit, settings.chunk_limit),
            ring: Ring::new(&comm, settings.ring, NUMBER + settings.eager_limit)?,
            incoming: Incoming::new(settings),
            order: Order::new(comm.size),
            bells,
            batch: settings.ring,
            received: 0,
            comm,
        })
    }

    /// Starts to send a frame.
    #[inline]
    pub(super) fn send(&mut self, to: u32, frame: &mut Frame) -> Result<()> {
        self.outgoing.frame(&self.comm, &self.bells, to, frame)?;
        self.outgoing.collect_small().map(drop)
    }

    /// Moves everything on; appends what arrived; says whether anything moved.
    pub(super) fn progress(&mut self, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool> {
        let (before, had) = (self.received, inbox.len());
        let mut moved = false;
        // A batch at most, so that others get the lock and the caller its messages.
        for _ in 0..self.batch {
            if !self.read(inbox)? {
                break;
            }
            moved = true;
        }
        for _ in 0..self.batch {
            // To see that MPI has nothing takes less time than to ask it.
            if self.bells.has_nothing_posted() || !self.receive(inbox)? {
                break;
            }
        }
        if self.incoming.len() > 0 {
            let mut peers = Peers {
                comm: &self.comm,
                bells: &self.bells,
                outgoing: &mut self.outgoing,
                inbox,
            };
            self.received += self.incoming.progress(&mut peers)?;
        }
        let collected = self.outgoing.len() > 0 && self.outgoing.collect()?;
        // What was lent may have filled outside of here.
        Ok(moved || collected || self.received != before || inbox.len() != had)
    }

    /// Takes the oldest message of the mailbox, if there is one.
    #[inline]
    fn read(&mut self, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool> {
        let Engine {
            comm,
            bells,
            outgoing,
            incoming,
            order,
            ..
        } = self;
        let handled = bells.read(|from, bytes| {
            let mut peers = Peers {
                comm,
                bells,
                outgoing,
                inbox,
            };
            order.sort(from, bytes, |bytes| handle(incoming, &mut peers, from, bytes))
        });
        handled.unwrap_or(Ok(false))
    }

    /// Takes the oldest message of the inbox, if there is one.
    fn receive(&mut self, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool> {
        let Engine {
            comm,
            bells,
            outgoing,
            ring,
            incoming,
            order,
            received,
            ..
        } = self;
        let Some((from, bytes)) = ring.head()? else { return Ok(false) };
        *received += 1;
        bells.took(from);
        let mut peers = Peers {
            comm,
            bells,
            outgoing,
            inbox,
        };
        let handled = order.sort(from, bytes, |bytes| handle(incoming, &mut peers, from, bytes));
        // Also after a message that makes no sense: the inbox goes on.
        ring.next(comm)?;
        handled
    }

    /// Takes back memory that was lent, unless receives are posted into it; moves on those that are.
    pub(super) fn lift(&mut self, key: u64) -> Result<Landed> {
        let (arrived, landed) = self.incoming.lift(key, &self.bells)?;
        self.received += arrived;
        Ok(landed)
    }

    /// Whether messages lie in the mailbox.
    pub(super) fn has_mail(&self) -> bool {
        self.bells.has_mail()
    }

    /// Sends and receives that need polling to end.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.outgoing.len() + self.incoming.len()
    }

    /// Large frames that are under way now.
    #[inline]
    pub(super) fn flowing(&self) -> usize {
        self.outgoing.flowing() + self.incoming.flowing()
    }

    /// Takes back the inbox; the communicator is left. Nothing may be under way.
    pub(super) fn end(self) -> Result<Comm> {
        self.ring.cancel()?;
        Ok(self.comm)
    }
}

#[inline]
fn handle(incoming: &mut Incoming, peers: &mut Peers, from: u32, bytes: &[u8]) -> Result<()> {
    if let Some(frame) = message::plain_frame(bytes) {
        let delivery = frame.within(incoming.message_limit());
        incoming.deliver(from, delivery, peers.inbox);
        return Ok(());
    }
    let (message, rest) = message::decode(bytes)?;
    match message {
        Message::Frame { header, layouts } => {
            let delivery = message::decode_frame(header, &layouts, rest)?.within(incoming.message_limit());
            incoming.deliver(from, delivery, peers.inbox);
            Ok(())
        }
        Message::Announce { transfer, bytes, lead } => incoming.announced(peers, from, transfer, bytes, lead, rest),
        Message::Clear { transfer, tag, segments } => peers.outgoing.cleared(peers.comm, peers.bells, from, transfer, tag, segments),
        Message::Refuse { transfer } => peers.outgoing.refused(from, transfer),
    }
}

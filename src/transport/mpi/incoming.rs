//! The receiving side of large frames: announcements, the tags they are received on, and what waits behind them.

use std::collections::{HashMap, VecDeque};

use super::comm::{Comm, Request};
use super::landing::{Landed, Landings, Lent};
use super::message::{self, Lead, Message};
use super::outgoing::Outgoing;
use super::page::Bells;
use crate::Result;
use crate::tensor::Data;
use crate::transport::pool::Pool;
use crate::transport::segment::{Buffer, Layout, decode_error, shaped, total_bytes};
use crate::transport::{Delivery, Frame, Settings};

/// What a step of the receiving side works with.
pub(super) struct Peers<'a> {
    pub(super) comm: &'a Comm,
    pub(super) bells: &'a Bells,
    pub(super) outgoing: &'a mut Outgoing,
    pub(super) inbox: &'a mut Vec<(u32, Delivery)>,
}

/// All large frames on their way to this rank.
#[derive(Debug)]
pub(super) struct Incoming {
    message_limit: u64,
    chunk_limit: usize,
    /// Tags that no transfer uses.
    tags: Vec<u16>,
    /// Announced, without a tag yet; oldest first.
    waiting: VecDeque<Transfer>,
    active: Vec<Transfer>,
    next_key: u64,
    /// For each sender with a large frame on its way: that frame, and all that came after it.
    behind: HashMap<u32, VecDeque<Place>>,
    pool: Pool,
    pub(super) landings: Landings,
}

/// A place in a sender's order.
#[derive(Debug)]
enum Place {
    Taken(u64),
    Ready(Delivery),
}

/// A large frame on its way.
#[derive(Debug)]
struct Transfer {
    key: u64,
    from: u32,
    /// The sender's number for it.
    id: u64,
    bytes: u64,
    stage: Stage,
    tag: u16,
    requests: VecDeque<Request>,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// Layouts and header are on their way.
    Lead(Vec<u8>),
    /// The segments are.
    Segments {
        header: Vec<u8>,
        layouts: Vec<Layout>,
        buffers: Vec<Buffer>,
        /// In place of buffers.
        lent: Option<Lent>,
    },
}

impl Stage {
    /// What an announcement of so many bytes begins with, or what is delivered in its place as it is over the limit.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`](crate::ErrorKind::Decode) if its parts don't fit together.
    pub(super) fn first(bytes: u64, lead: Lead, rest: &[u8], limit: u64) -> Result<Result<Stage, Delivery>> {
        Ok(match lead {
            Lead::Here { header, layouts } => {
                let header = message::decode_header(header, rest)?;
                Stage::segments(layouts, header, bytes, limit)?.map_err(|header| Delivery::Refused { header, bytes, limit })
            }
            Lead::Apart { bytes: len } => match usize::try_from(len) {
                Ok(len) if len as u64 <= limit => Ok(Stage::Lead(vec![0; len])),
                _ => Err(Delivery::Refused {
                    header: rest.to_vec(),
                    bytes: bytes.saturating_add(len),
                    limit,
                }),
            },
        })
    }

    /// What follows a lead that has arrived; gives the header back if the segments are over the limit.
    pub(super) fn after_lead(lead: &[u8], bytes: u64, limit: u64) -> Result<Result<Stage, Vec<u8>>> {
        let (layouts, header) = message::decode_lead(lead)?;
        Stage::segments(layouts, header, bytes, limit)
    }

    fn segments(layouts: Vec<Layout>, header: Vec<u8>, bytes: u64, limit: u64) -> Result<Result<Stage, Vec<u8>>> {
        check_total(&layouts, bytes)?;
        Ok(if bytes > limit {
            Err(header)
        } else {
            Ok(Stage::Segments {
                header,
                layouts,
                buffers: Vec::new(),
                lent: None,
            })
        })
    }

    /// Takes memory for what is to come; where it is to be received.
    fn memory(&mut self, pool: &mut Pool) -> Result<Vec<&mut [u8]>> {
        match self {
            Stage::Lead(lead) => Ok(vec![lead]),
            Stage::Segments { lent: Some(lent), .. } => Ok(vec![lent.memory()]),
            Stage::Segments { layouts, buffers, .. } => {
                for layout in &*layouts {
                    buffers.push(pool.take(layout.dtype, layout.len()?));
                }
                let parts = layouts.iter().zip(buffers);
                parts
                    .map(|(layout, buffer)| Ok(&mut buffer.as_bytes_mut()[..layout.bytes()?]))
                    .collect()
            }
        }
    }

    /// The key of the memory that was lent for it.
    fn lent(&self) -> Option<u64> {
        match self {
            Stage::Segments { lent, .. } => lent.as_ref().map(|lent| lent.key),
            Stage::Lead(_) => None,
        }
    }

    /// What has arrived, once all of it is there.
    #[inline]
    fn deliver(self, bytes: u64, limit: u64, pool: &mut Pool) -> Result<Delivery> {
        Ok(match self {
            Stage::Lead(lead) => {
                let (_, header) = message::decode_lead(&lead)?;
                Delivery::Refused { header, bytes, limit }
            }
            Stage::Segments {
                header, lent: Some(lent), ..
            } => {
                let segments = vec![Data::zeros(lent.dtype(), &[0])];
                Delivery::Frame(Frame { header, segments })
            }
            Stage::Segments {
                header, layouts, buffers, ..
            } => {
                let mut segments = Vec::with_capacity(buffers.len());
                for (layout, buffer) in layouts.iter().zip(buffers) {
                    let storage = buffer.into_storage()?;
                    pool.keep(&storage);
                    segments.push(shaped(storage, &layout.shape)?);
                }
                Delivery::Frame(Frame { header, segments })
            }
        })
    }
}

impl Incoming {
    pub(super) fn new(settings: &Settings) -> Incoming {
        Incoming {
            message_limit: settings.message_limit,
            chunk_limit: settings.chunk_limit,
            tags: (1..=settings.segment_tags).rev().collect(),
            waiting: VecDeque::new(),
            active: Vec::new(),
            next_key: 0,
            behind: HashMap::new(),
            pool: Pool::new(settings.pool_bytes),
            landings: Landings::default(),
        }
    }

    /// Largest sum of segments, and largest header, that this rank takes.
    #[inline]
    pub(super) fn message_limit(&self) -> u64 {
        self.message_limit
    }

    /// Hands over what came from a rank, in its order.
    #[inline]
    pub(super) fn deliver(&mut self, from: u32, delivery: Delivery, inbox: &mut Vec<(u32, Delivery)>) {
        match self.behind.get_mut(&from) {
            Some(queue) => queue.push_back(Place::Ready(delivery)),
            None => inbox.push((from, delivery)),
        }
    }

    /// Takes up an announcement, or refuses it.
    pub(super) fn announced(&mut self, peers: &mut Peers, from: u32, id: u64, bytes: u64, lead: Lead, rest: &[u8]) -> Result<()> {
        let stage = match Stage::first(bytes, lead, rest, self.message_limit)? {
            Ok(stage) => stage,
            Err(refused) => return self.refuse(peers, from, id, refused),
        };
        let key = self.next_key;
        self.next_key += 1;
        self.behind.entry(from).or_default().push_back(Place::Taken(key));
        self.waiting.push_back(Transfer {
            key,
            from,
            id,
            bytes,
            stage,
            tag: 0,
            requests: VecDeque::new(),
        });
        self.begin(peers)
    }

    fn refuse(&mut self, peers: &mut Peers, from: u32, id: u64, delivery: Delivery) -> Result<()> {
        self.deliver(from, delivery, peers.inbox);
        peers
            .outgoing
            .message(peers.comm, peers.bells, from, &Message::Refuse { transfer: id })
    }

    /// Posts the receives of waiting transfers, as long as there are tags, and clears their senders to send.
    fn begin(&mut self, peers: &mut Peers) -> Result<()> {
        while let Some(tag) = self.tags.pop() {
            let Some(mut transfer) = self.waiting.pop_front() else {
                self.tags.push(tag);
                break;
            };
            transfer.tag = tag;
            let (from, id, segments) = (transfer.from, transfer.id, transfer.bytes <= self.message_limit);
            self.active.push(transfer);
            let Some(transfer) = self.active.last_mut() else { break };
            transfer.post(peers.comm, &mut self.pool, &mut self.landings, self.chunk_limit)?;
            peers.outgoing.message(
                peers.comm,
                peers.bells,
                from,
                &Message::Clear {
                    transfer: id,
                    tag,
                    segments,
                },
            )?;
        }
        Ok(())
    }

    /// Tests the transfers under way; returns how many messages arrived.
    pub(super) fn progress(&mut self, peers: &mut Peers) -> Result<u64> {
        let mut arrived = 0;
        let mut at = 0;
        while at < self.active.len() {
            let transfer = &mut self.active[at];
            arrived += transfer.receive(peers.bells)?;
            if !transfer.requests.is_empty() {
                at += 1;
            } else if !self.segments_follow(peers, at)? {
                let transfer = self.active.swap_remove(at);
                self.tags.push(transfer.tag);
                self.finish(transfer, peers.inbox)?;
            }
        }
        self.begin(peers)?;
        Ok(arrived)
    }

    /// After a lead: posts the receives of the segments. False if the transfer is complete.
    fn segments_follow(&mut self, peers: &mut Peers, at: usize) -> Result<bool> {
        let transfer = &mut self.active[at];
        let Stage::Lead(lead) = &transfer.stage else { return Ok(false) };
        let Ok(stage) = Stage::after_lead(lead, transfer.bytes, self.message_limit)? else {
            return Ok(false);
        };
        transfer.stage = stage;
        transfer.post(peers.comm, &mut self.pool, &mut self.landings, self.chunk_limit)?;
        Ok(true)
    }

    /// Puts a complete frame into its place, and hands over what waits no longer.
    fn finish(&mut self, transfer: Transfer, inbox: &mut Vec<(u32, Delivery)>) -> Result<()> {
        let delivery = transfer.stage.deliver(transfer.bytes, self.message_limit, &mut self.pool)?;
        let Some(queue) = self.behind.get_mut(&transfer.from) else {
            return Ok(());
        };
        if let Some(place) = queue
            .iter_mut()
            .find(|place| matches!(place, Place::Taken(key) if *key == transfer.key))
        {
            *place = Place::Ready(delivery);
        }
        while let Some(Place::Ready(_)) = queue.front() {
            if let Some(Place::Ready(delivery)) = queue.pop_front() {
                inbox.push((transfer.from, delivery));
            }
        }
        if queue.is_empty() {
            self.behind.remove(&transfer.from);
        }
        Ok(())
    }

    /// Takes back memory that was lent, unless receives are posted into it; tests those that are, and counts what arrived.
    pub(super) fn lift(&mut self, key: u64, bells: &Bells) -> Result<(u64, Landed)> {
        if self.landings.strike(key) {
            return Ok((0, Landed::No));
        }
        let Some(transfer) = self.active.iter_mut().find(|t| t.stage.lent() == Some(key)) else {
            return Ok((0, Landed::Yes));
        };
        let arrived = transfer.receive(bells)?;
        // When they are done, the frame is delivered without another look at the memory.
        let landed = if transfer.requests.is_empty() {
            Landed::Yes
        } else {
            Landed::UnderWay
        };
        Ok((arrived, landed))
    }

    /// Memory in the pool beyond what may be kept unused.
    #[inline]
    pub(super) fn spare(&self) -> usize {
        self.pool.spare()
    }

    /// Frees what was given back of that.
    pub(super) fn trim(&mut self) {
        self.pool.trim();
    }

    /// Large frames on their way.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.active.len()
    }

    /// Those whose receives are posted.
    #[inline]
    pub(super) fn flowing(&self) -> usize {
        self.active.len()
    }
}

fn check_total(layouts: &[Layout], bytes: u64) -> Result<()> {
    match total_bytes(layouts)? {
        total if total == bytes => Ok(()),
        total => Err(decode_error(format!("an announcement of {bytes} bytes lists segments of {total}"))),
    }
}

impl Transfer {
    /// Tests its receives, in order; how many are done.
    fn receive(&mut self, bells: &Bells) -> Result<u64> {
        let mut arrived = 0;
        while let Some(request) = self.requests.front_mut() {
            if !request.done()? {
                break;
            }
            self.requests.pop_front();
            bells.took(self.from);
            arrived += 1;
        }
        Ok(arrived)
    }

    /// Posts the receives of its stage. The transfer must be among the active ones, which keep its memory even if this fails.
    fn post(&mut self, comm: &Comm, pool: &mut Pool, landings: &mut Landings, chunk_limit: usize) -> Result<()> {
        let Transfer {
            from,
            tag,
            stage,
            requests,
            ..
        } = self;
        if let Stage::Segments { header, layouts, lent, .. } = stage {
            *lent = landings.take(*from, header, layouts);
        }
        for part in stage.memory(pool)? {
            for chunk in part.chunks_mut(chunk_limit) {
                // SAFETY: the part is heap memory of this transfer, which keeps it, untouched, until its requests are done; or it was lent, and its
                // owner waits until then.
                requests.push_back(unsafe { comm.irecv(chunk, Some(*from), i32::from(*tag)) }?);
            }
        }
        Ok(())
    }
}

/// As if what was announced had come: a lead from what follows the announcement, and segments of ones and zeros, which are values of every dtype. For
/// tests of the decoders.
#[cfg(feature = "faults")]
pub(super) fn as_if(bytes: u64, lead: Lead, rest: &[u8], limit: u64) -> Result<Delivery> {
    let mut pool = Pool::new(0);
    let mut stage = match Stage::first(bytes, lead, rest, limit)? {
        Ok(stage) => stage,
        Err(refused) => return Ok(refused),
    };
    if let Stage::Lead(lead) = &mut stage {
        let Some(arrived) = rest.get(..lead.len()) else {
            return Err(decode_error(format!(
                "a lead of {} bytes, of which {} arrived",
                lead.len(),
                rest.len()
            )));
        };
        lead.copy_from_slice(arrived);
    }
    if let Stage::Lead(lead) = &stage
        && let Ok(next) = Stage::after_lead(lead, bytes, limit)?
    {
        stage = next;
    }
    stage.memory(&mut pool)?;
    if let Stage::Segments { buffers, .. } = &mut stage {
        for buffer in buffers {
            buffer.as_bytes_mut().iter_mut().for_each(|byte| *byte &= 1);
        }
    }
    stage.deliver(bytes, limit, &mut pool)
}

//! The sending side: small messages with their buffers, and frames that wait for their receiver's answer.

use std::collections::{HashMap, VecDeque};

use super::comm::{Comm, Request};
use super::mailbox;
use super::message::{self, Message, contiguous_bytes};
use super::order::{NUMBER, Numbers};
use super::page::Bells;
use super::ring::INBOX_TAG;
use crate::Result;
use crate::tensor::Data;
use crate::transport::Frame;
use crate::transport::segment::decode_error;

/// Buffers of small messages kept for the next ones.
const SPARE_BUFFERS: usize = 64;

/// Between ranks of a node frames of so many times the eager limit are sent at once.
const MAILED: usize = 4;

/// All sends of this rank that aren't done.
#[derive(Debug)]
pub(super) struct Outgoing {
    me: u32,
    eager_limit: usize,
    chunk_limit: usize,
    numbers: Numbers,
    /// Small messages under way, oldest first. A small send is mostly done at once, and they end mostly in order, so only the head is tested.
    small: VecDeque<(Request, Vec<u8>)>,
    spare: Vec<Vec<u8>>,
    /// For whole frames over the eager limit.
    mail: Vec<u8>,
    /// Announced, not answered.
    announced: HashMap<u64, Large>,
    /// Cleared, under way.
    flowing: Vec<Flow>,
    next_transfer: u64,
    /// Messages sent to each rank, of every kind.
    sent: Vec<u64>,
}

/// A frame that was announced.
#[derive(Debug)]
struct Large {
    to: u32,
    /// Layouts and header, if they were too long for the announcement.
    lead: Vec<u8>,
    segments: Vec<Data>,
}

/// A frame whose chunks are under way.
#[derive(Debug)]
struct Flow {
    /// Keeps the memory alive.
    _large: Large,
    requests: VecDeque<Request>,
}

impl Outgoing {
    pub(super) fn new(comm: &Comm, eager_limit: usize, chunk_limit: usize) -> Outgoing {
        Outgoing {
            me: comm.rank,
            numbers: Numbers::new(comm.size),
            eager_limit,
            chunk_limit,
            small: VecDeque::new(),
            spare: Vec::new(),
            mail: Vec::new(),
            announced: HashMap::new(),
            flowing: Vec::new(),
            next_transfer: 0,
            sent: vec![0; comm.size as usize],
        }
    }

    /// Starts to send a frame whose segments are contiguous: one message for now.
    #[inline]
    pub(super) fn frame(&mut self, comm: &Comm, bells: &Bells, to: u32, frame: &mut Frame) -> Result<()> {
        if frame.segments.is_empty() && self.mail_plain(bells, to, &frame.header) {
            return Ok(());
        }
        let mut slot = self.buffer();
        if let Some(size) = message::encode_frame(frame, &mut slot[NUMBER..]) {
            frame.segments.clear();
            return self.post(comm, bells, to, slot, size);
        }
        if self.mail(bells, to, frame) {
            self.keep(slot);
            frame.segments.clear();
            return Ok(());
        }
        let transfer = self.next_transfer;
        let (size, lead) = message::encode_announcement(transfer, frame, &mut slot[NUMBER..])?;
        self.post(comm, bells, to, slot, size)?;
        self.next_transfer += 1;
        self.announced.insert(
            transfer,
            Large {
                to,
                lead,
                segments: std::mem::take(&mut frame.segments),
            },
        );
        Ok(())
    }

    /// Most bytes of a message between ranks of a node that is sent at once.
    #[inline]
    fn most_mailed(&self) -> usize {
        (MAILED * self.eager_limit).min(mailbox::LONGEST - NUMBER)
    }

    /// Puts a frame without segments straight into the mailbox of a rank of this node, if that has room.
    #[inline]
    fn mail_plain(&mut self, bells: &Bells, to: u32, header: &[u8]) -> bool {
        if header.len() >= self.most_mailed() || !bells.is_here(to) {
            return false;
        }
        let mut front = [message::PLAIN; NUMBER + 1];
        self.numbers.stamp(to, &mut front);
        let is_there = bells.mail(self.me, to, &front, header);
        if !is_there {
            self.numbers.take_back(to);
        }
        is_there
    }

    /// Puts a frame over the eager limit into the mailbox of a rank of this node, if that has room: two copies of so little take less time than to ask first.
    fn mail(&mut self, bells: &Bells, to: u32, frame: &Frame) -> bool {
        let limit = self.most_mailed();
        if !bells.is_here(to) || frame.header.len() as u64 + frame.segment_bytes() > limit as u64 {
            return false;
        }
        self.mail.resize(NUMBER + limit, 0);
        let Some(size) = message::encode_frame(frame, &mut self.mail[NUMBER..]) else {
            return false;
        };
        self.numbers.stamp(to, &mut self.mail);
        let is_there = bells.mail(self.me, to, &self.mail[..NUMBER + size], &[]);
        if !is_there {
            self.numbers.take_back(to);
        }
        is_there
    }

    /// Starts to send a message that nothing follows.
    pub(super) fn message(&mut self, comm: &Comm, bells: &Bells, to: u32, message: &Message) -> Result<()> {
        let mut slot = self.buffer();
        let size = message::encode(message, &mut slot[NUMBER..])
            .ok_or_else(|| decode_error("a control message does not fit in the eager limit"))?;
        self.post(comm, bells, to, slot, size)
    }

    fn keep(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < SPARE_BUFFERS {
            self.spare.push(buffer);
        }
    }

    fn buffer(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_else(|| vec![0; NUMBER + self.eager_limit])
    }

    /// Sends the first `size` bytes after the number.
    fn post(&mut self, comm: &Comm, bells: &Bells, to: u32, mut buffer: Vec<u8>, size: usize) -> Result<()> {
        let size = NUMBER + size;
        self.numbers.stamp(to, &mut buffer);
        if bells.mail(self.me, to, &buffer[..size], &[]) {
            self.keep(buffer);
            return Ok(());
        }
        bells.post(to);
        // SAFETY: the buffer's memory doesn't move with the Vec, and the queue keeps it, untouched, until the request is done.
        let request = unsafe { comm.isend(&buffer[..size], to, INBOX_TAG) }?;
        bells.ring(to);
        self.small.push_back((request, buffer));
        self.sent[to as usize] += 1;
        Ok(())
    }

    /// `from` takes the frame: starts to send it on `tag`, without the segments if it doesn't want those.
    pub(super) fn cleared(&mut self, comm: &Comm, bells: &Bells, from: u32, transfer: u64, tag: u16, segments: bool) -> Result<()> {
        let mut large = self.answered(from, transfer)?;
        if !segments {
            large.segments.clear();
        }
        let (to, tag) = (large.to, i32::from(tag));
        let mut requests = VecDeque::new();
        let parts = std::iter::once(&large.lead[..]).chain(large.segments.iter().map(contiguous_bytes));
        for chunk in parts.flat_map(|part| part.chunks(self.chunk_limit)) {
            bells.post(to);
            // SAFETY: `large` goes into the flow with its memory where it is: the lead's is on the heap, and the segments' storage is
            // shared, so nobody writes to it while this handle lives.
            match unsafe { comm.isend(chunk, to, tag) } {
                Ok(request) => requests.push_back(request),
                Err(error) => {
                    self.flowing.push(Flow { _large: large, requests });
                    return Err(error);
                }
            }
            self.sent[to as usize] += 1;
            bells.ring(to);
        }
        self.flowing.push(Flow { _large: large, requests });
        Ok(())
    }

    /// `from` doesn't take the frame: drops it.
    pub(super) fn refused(&mut self, from: u32, transfer: u64) -> Result<()> {
        self.answered(from, transfer).map(|_| ())
    }

    fn answered(&mut self, from: u32, transfer: u64) -> Result<Large> {
        match self.announced.remove(&transfer) {
            Some(large) if large.to == from => Ok(large),
            other => {
                self.announced.extend(other.map(|large| (transfer, large)));
                Err(decode_error(format!(
                    "rank {from} answers announcement {transfer}, which was not made to it"
                )))
            }
        }
    }

    /// Takes back what is done; says whether anything was.
    pub(super) fn collect(&mut self) -> Result<bool> {
        let mut moved = self.collect_small()?;
        let mut at = 0;
        while at < self.flowing.len() {
            let requests = &mut self.flowing[at].requests;
            moved |= pop_done(requests)?;
            if requests.is_empty() {
                self.flowing.swap_remove(at);
            } else {
                at += 1;
            }
        }
        Ok(moved)
    }

    /// Takes back small messages that are done; says whether any was.
    #[inline]
    pub(super) fn collect_small(&mut self) -> Result<bool> {
        let mut moved = false;
        while let Some((request, _)) = self.small.front_mut() {
            if !request.done()? {
                break;
            }
            moved = true;
            if let Some((_, buffer)) = self.small.pop_front() {
                self.keep(buffer);
            }
        }
        Ok(moved)
    }

    /// Sends that aren't done.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.small.len() + self.announced.len() + self.flowing.len()
    }

    /// Frames whose chunks are under way.
    pub(super) fn flowing(&self) -> usize {
        self.flowing.len()
    }

    /// Messages sent to each rank so far.
    pub(super) fn sent(&self) -> &[u64] {
        &self.sent
    }
}

/// Drops the requests at the front that are done; says whether any was.
pub(super) fn pop_done(requests: &mut VecDeque<Request>) -> Result<bool> {
    let before = requests.len();
    while let Some(request) = requests.front_mut() {
        if !request.done()? {
            break;
        }
        requests.pop_front();
    }
    Ok(requests.len() < before)
}

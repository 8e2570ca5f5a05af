//! Frames between ranks: the contract, and the back ends that keep it.
//!
//! A back end moves [`Frame`]s and knows nothing of their meaning. What must hold:
//!
//! - Frames from one rank to another are delivered in the order in which they were sent, whole, once.
//! - [`Transport::send`] never blocks on the receiver. Segments go from the array's memory; the transport keeps
//!   the arrays alive until they are out.
//! - [`Transport::poll`] makes progress on everything: receives, sends under way, transfers announced.
//! - Every sleeper is woken by what is sent to it ([`Transport::sleep`]), and no wake-up is lost.
//! - Any method may be called from any thread.
//!
//! Two back ends keep it: [`mpi`], and [`local`] (ranks as threads of one process).

mod doorbell;
#[cfg(feature = "faults")]
pub(crate) mod faults;
pub mod local;
pub mod mpi;
mod parking;
mod pool;
mod segment;

use std::time::Duration;

use crate::tensor::{DType, Data};
use crate::{ErrorKind, Result};

/// Sizes that a back end works with. Local: each rank has its own, but `eager_limit` and `chunk_limit` must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Largest frame in bytes, headers included, that travels as one message; size of an inbox slot. 64 to 2^30.
    pub eager_limit: usize,
    /// Largest piece in bytes in which a segment travels. 1 to `i32::MAX`.
    pub chunk_limit: usize,
    /// Largest sum of a frame's segments, and largest header, in bytes, that this rank receives.
    pub message_limit: u64,
    /// How many large frames this rank receives at the same time; one tag each. 1 to 32,766.
    pub segment_tags: u16,
    /// Receives posted ahead in the inbox. At least 1.
    pub ring: usize,
    /// Bound in bytes on memory that nobody uses, and that is kept for large segments to come.
    pub pool_bytes: usize,
    /// Whether ranks watch each other, so that a death ends the job whatever the launcher does about it. Only over MPI.
    pub watch: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            eager_limit: 4_000,
            chunk_limit: 1 << 30,
            message_limit: 16 << 30,
            segment_tags: 1_024,
            ring: 16,
            pool_bytes: 256 << 20,
            watch: true,
        }
    }
}

impl Settings {
    /// Says whether every size lies within its bounds. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Setting`] names the first that doesn't, and its bounds.
    pub fn check(&self) -> Result<()> {
        let rules = [
            ("eager_limit", self.eager_limit as u64, 64, 1 << 30),
            ("chunk_limit", self.chunk_limit as u64, 1, i32::MAX as u64),
            ("segment_tags", self.segment_tags.into(), 1, 32_766),
            ("ring", self.ring as u64, 1, 65_536),
        ];
        for (name, value, least, most) in rules {
            if !(least..=most).contains(&value) {
                return Err(ErrorKind::Setting {
                    name: name.into(),
                    value: value.to_string(),
                    expected: format!("{least} to {most}"),
                }
                .into());
            }
        }
        Ok(())
    }
}

/// A message: a small header, and arrays sent beside it without a copy of ours.
#[derive(Debug, Clone, Default)]
pub struct Frame {
    /// Encoded header.
    pub header: Vec<u8>,
    /// Arrays in row-major order.
    pub segments: Vec<Data>,
}

impl Frame {
    /// Size of all segments in bytes.
    #[inline]
    pub fn segment_bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes() as u64).sum()
    }

    /// What a receiver with this limit gets.
    #[inline]
    pub(crate) fn within(self, limit: u64) -> Delivery {
        let (header, segments) = (self.header.len() as u64, self.segment_bytes());
        let bytes = if header > limit { header + segments } else { segments };
        if bytes > limit {
            Delivery::Refused {
                header: self.header,
                bytes,
                limit,
            }
        } else {
            Delivery::Frame(self)
        }
    }
}

/// What arrives.
#[derive(Debug)]
pub enum Delivery {
    /// A frame.
    Frame(Frame),
    /// The header of a frame that was over the limit, and was refused.
    Refused {
        /// Encoded header; at least its beginning, if it was itself over the limit.
        header: Vec<u8>,
        /// Size of the segments in bytes, with the header's if that was over the limit.
        bytes: u64,
        /// The receiver's limit in bytes.
        limit: u64,
    },
}

/// Tells a frame by its header.
pub type IsIt = Box<dyn Fn(&[u8]) -> bool + Send>;

/// Memory of a caller's that a frame's segment may be received into ([`Transport::receive_into`]).
pub struct Landing<'a> {
    /// Whose frame it is for.
    pub from: u32,
    /// Type of the segment's elements.
    pub dtype: DType,
    /// Shape of the segment.
    pub shape: &'a [usize],
    /// Room for it, to the byte.
    pub memory: &'a mut [u8],
    /// Tells the frame. Runs on the thread that polls.
    pub is_it: IsIt,
}

impl std::fmt::Debug for Landing<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Landing { from, dtype, shape, .. } = self;
        f.debug_struct("Landing")
            .field("from", from)
            .field("dtype", dtype)
            .field("shape", shape)
            .finish_non_exhaustive()
    }
}

/// Messages and bytes that this rank has sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames sent to other ranks.
    pub messages: u64,
    /// Their bytes, headers and segments.
    pub bytes: u64,
}

/// Why the job ends: a rank that died, or gave up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// Which rank, where, and how, in words.
    pub text: String,
    /// Whether it died. Otherwise it gave up, has said why, and ends the job itself.
    pub died: bool,
    /// How many ranks have passed it on; 0 where it was noticed.
    pub hops: u32,
}

/// A way between ranks.
pub trait Transport: Send + Sync + std::fmt::Debug {
    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// Ranks on this node (this one included), ascending.
    fn node_ranks(&self) -> &[u32];

    /// Starts to send a frame; order per receiver is kept. What it leaves of the frame is memory for the next one. Local; blocks on nothing but the transport's own lock.
    fn send(&self, to: u32, frame: &mut Frame) -> Result<()>;

    /// Appends what has arrived, with its sender, in order; says whether anything moved. Local; never blocks.
    fn poll(&self, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool>;

    /// Runs `wait`, once. If the frame that `landing` describes begins to arrive meanwhile, large and with this one segment, the segment may be received straight
    /// into the memory: then true, and an empty segment of that dtype is delivered in its place. Local; blocks as long as `wait` does, and until
    /// nothing is being received into the memory any more. A back end that can't do it only runs `wait`.
    fn receive_into(&self, landing: Landing<'_>, wait: &mut dyn FnMut()) -> bool {
        drop(landing);
        wait();
        false
    }

    /// Waits until a poll may find something, for the time of at most so many looks, some tens of nanoseconds each. Local. Looks only at memory, so
    /// that a thread on the same core isn't held up; where that can't show what arrives, it returns at once.
    fn spin(&self, looks: u32);

    /// Sends and receives under way that need polling to end.
    fn in_flight(&self) -> usize;

    /// Sleeps until something was sent to this rank since the last poll, [`wake`](Self::wake) was called, or the limit passed.
    /// Senders see that this rank is asleep. Only the holder of the polling role may call it. While sends or receives are under
    /// way the sleep is short, whatever the limit, as they need polling to end. Senders on other nodes can't ring: the limit bounds how late
    /// their messages are seen.
    fn sleep(&self, limit: Duration);

    /// Tells senders that nobody polls here for now (a user function runs, or the polling role lies vacant), or that
    /// somebody does again. A sender that finds the rank so wakes its sleeper. True if something has arrived already.
    fn set_away(&self, away: bool) -> bool;

    /// Sleeps without taking part in polling: until a sender finds this rank away and rings, [`wake`](Self::wake) was called, or the
    /// limit passed. A ring since the last `doze` returned ends this one at once, so none is missed between two of them.
    fn doze(&self, limit: Duration);

    /// Wakes whoever is in [`sleep`](Self::sleep) or [`doze`](Self::doze) on this rank. If nobody is, the next one of each returns at once.
    fn wake(&self);

    /// Whether MPI allows one call at a time, so that the host's calls and ours must be kept apart by [`exclusive`](Self::exclusive).
    fn is_serialized(&self) -> bool;

    /// Runs `f`, once, while no thread of this process makes an MPI call of ours, where MPI allows only one call at a time; elsewhere just runs it.
    /// Blocks until the lock is free. Meanwhile [`poll`](Self::poll) moves nothing, and whoever sends waits; `f` must not call this transport.
    fn exclusive(&self, f: &mut dyn FnMut());

    /// What this rank has sent so far.
    fn traffic(&self) -> Traffic;

    /// Collective at start, before any frame: every rank's bytes, in rank order. Blocks until all ranks called it.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Collective end: finishes sends, closes the inbox, frees what is ours, and ends MPI if we started it. Blocks until all ranks called it.
    fn close(&self) -> Result<()>;

    /// What to do when a rank is lost, on a thread of the transport, before the job is ended. Local. Where ranks can't be lost, nothing.
    fn on_loss(&self, hook: Box<dyn Fn(&Loss) + Send + Sync>) {
        drop(hook);
    }

    /// Ends the whole job with this exit code. Takes no lock and joins no thread.
    fn abort(&self, code: i32) -> !;
}

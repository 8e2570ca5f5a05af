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

use std::time::Duration;

use crate::Result;
use crate::tensor::Data;

/// A message: a small header, and arrays sent beside it without a copy of ours.
#[derive(Debug, Clone, Default)]
pub struct Frame {
    /// Encoded header.
    pub header: Vec<u8>,
    /// Arrays in row-major order.
    pub segments: Vec<Data>,
}

/// What arrives.
#[derive(Debug)]
pub enum Delivery {
    /// A frame.
    Frame(Frame),
    /// The header of a frame whose segments were over the limit, and were refused.
    Refused {
        /// Encoded header.
        header: Vec<u8>,
        /// Size of the segments in bytes.
        bytes: u64,
        /// The receiver's limit in bytes.
        limit: u64,
    },
}

/// Messages and bytes that this rank has sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames sent to other ranks.
    pub messages: u64,
    /// Their bytes, headers and segments.
    pub bytes: u64,
}

/// A way between ranks.
pub trait Transport: Send + Sync + std::fmt::Debug {
    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// Ranks on this node (this one included), ascending.
    fn node_ranks(&self) -> &[u32];

    /// Starts to send a frame; order per receiver is kept. Local; blocks on nothing but the transport's own lock.
    fn send(&self, to: u32, frame: Frame) -> Result<()>;

    /// Appends what has arrived, with its sender, in order; says whether anything moved. Local; never blocks.
    fn poll(&self, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool>;

    /// Sends and receives under way that need polling to end.
    fn in_flight(&self) -> usize;

    /// Sleeps until something was sent to this rank since the last poll, [`wake`](Self::wake) was called, or the limit passed.
    /// Senders see that this rank is asleep. Only the holder of the polling role may call it.
    fn sleep(&self, limit: Duration);

    /// Tells senders that nobody polls here for now (a user function runs, or the polling role lies vacant), or that
    /// somebody does again. A sender that finds the rank so wakes its sleeper. True if something has arrived already.
    fn set_away(&self, away: bool) -> bool;

    /// Sleeps as [`sleep`](Self::sleep) does, without taking part in polling: until a sender rings, or the limit passed.
    fn doze(&self, limit: Duration);

    /// Wakes whoever is in [`sleep`](Self::sleep) or [`doze`](Self::doze) on this rank.
    fn wake(&self);

    /// What this rank has sent so far.
    fn traffic(&self) -> Traffic;

    /// Collective at start, before any frame: every rank's bytes, in rank order. Blocks until all ranks called it.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Collective end: finishes sends, closes the inbox, frees what is ours, and ends MPI if we started it. Blocks until all ranks called it.
    fn close(&self) -> Result<()>;

    /// Ends the whole job with this exit code. Takes no lock and joins no thread.
    fn abort(&self, code: i32) -> !;
}

//! For the tests of this crate: faults on purpose between ranks, and a door to the decoders. Only with the feature `faults`; no part of the API.

use std::collections::BTreeMap;

pub use crate::transport::faults::{Tally, record, recorded, tally};

use crate::optim::OptimizerSpec;
use crate::protocol::CrossingId;
use crate::rref::RRef;
use crate::transport::faults::{self, PLACES};
use crate::transport::{Delivery, Frame, mpi};
use crate::wire::{self, Delivered};
use crate::{Error, Result, Tensor};

/// The kinds of messages.
pub const KINDS: [&str; 21] = wire::KINDS;

/// What goes wrong in the worlds that this process starts from now on: rules apart by white space, each with `@RANK` for one rank only.
///
/// - `delay=KIND:MS`: each message of the kind is sent late, by chance up to so many milliseconds; what follows it to the same rank waits behind it.
/// - `drop=KIND:N`: the Nth message of the kind that a rank sends is lost.
/// - `kill=KIND:N`, `stop=KIND:N:SECONDS`: before it is sent the rank is killed; or stopped, and goes on later.
/// - `level=single|funneled|serialized`: MPI grants no more.
/// - `seed=N` for what is drawn by chance.
///
/// Kinds are [`KINDS`], `all`, and the places `init`, `start`, `close` and `finalize` in a rank's life, with the number 1. An empty text ends it.
///
/// # Errors
/// [`ErrorKind::Setting`](crate::ErrorKind::Setting) for a rule that can't be read.
pub fn set(rules: &str) -> Result<()> {
    let known: Vec<&str> = KINDS.into_iter().chain(PLACES).collect();
    faults::set(rules, &known)
}

/// The kind of a frame's message, or `none`.
pub fn kind(frame: &Frame) -> &'static str {
    wire::kind(&frame.header)
}

/// The messages, as MPI would carry them, in which a frame can come: whole, announced with its header, and announced without.
pub fn messages(frame: &Frame) -> Result<Vec<Vec<u8>>> {
    mpi::messages(frame)
}

/// What became of bytes that were fed to the decoders.
#[derive(Debug, Default)]
pub struct Decoded {
    /// Frames whose header named a message.
    pub understood: usize,
    /// What the decoders said about the rest.
    pub errors: Vec<Error>,
}

/// Feeds bytes to every decoder: as a message from the inbox, as a lead, as a header, and what comes of them as values of many types. `limit` is the
/// receiver's, in bytes.
pub fn decode(bytes: &[u8], limit: u64) -> Decoded {
    let mut decoded = Decoded::default();
    match mpi::decode(bytes, limit) {
        Ok(Some(Delivery::Frame(frame))) => decoded.frame(frame),
        Ok(Some(Delivery::Refused { header, .. })) => decoded.frame(Frame {
            header,
            segments: Vec::new(),
        }),
        Ok(None) => {}
        Err(e) => decoded.errors.push(e),
    }
    decoded.frame(Frame {
        header: bytes.to_vec(),
        segments: Vec::new(),
    });
    decoded
}

impl Decoded {
    fn note<T>(&mut self, result: Result<T>) {
        self.errors.extend(result.err());
    }

    fn frame(&mut self, frame: Frame) {
        let (message, payload) = match wire::parse_header(frame.header, frame.segments) {
            Ok(parsed) => parsed,
            Err(e) => return self.errors.push(e),
        };
        self.understood += 1;
        drop(format!("{message:?}"));
        self.note(wire::decode_gradients(payload.clone()));
        for crossing in [None, Some(CrossingId::from_bits(1))] {
            let value = Delivered {
                payload: payload.clone(),
                crossing,
                ..Delivered::default()
            };
            self.note(value.clone().decode::<(Tensor, RRef<Tensor>)>());
            self.note(value.clone().decode::<(Vec<Tensor>, Option<f64>)>());
            self.note(value.clone().decode::<(OptimizerSpec, Vec<u32>, Vec<Option<String>>)>());
            self.note(value.clone().decode::<BTreeMap<String, Vec<i64>>>());
            self.note(value.decode::<Vec<Vec<u8>>>());
        }
    }
}

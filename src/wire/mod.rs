//! What travels beside a message: bytes, and tensors out of band.
//!
//! Values are encoded with serde and postcard. While that happens, an encoder is set for the thread: tensors leave their storage with it
//! and write only their place, references leave their id. Decoding is the mirror image, and trusts nothing that it reads.

mod gradients;
#[cfg(feature = "faults")]
mod kind;
mod message;
mod tensor;

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;
use std::thread::LocalKey;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::autograd::{Edge, Node, reach};
use crate::protocol::{CrossingId, Message, RefId, RequestId};
use crate::tensor::{Data, Device, Spec};
use crate::{Error, ErrorKind, Result, spare};

pub(crate) use gradients::{decode_gradients, encode_gradients};
#[cfg(feature = "faults")]
pub(crate) use kind::{KINDS, kind};
pub(crate) use message::Recorded;

/// Number of this encoding; ranks that speak different ones are refused at start.
pub(crate) const VERSION: u32 = 4;

/// Keeps a reference alive; the rooms above know what it is.
pub(crate) type Handle = Arc<dyn Any + Send + Sync>;

/// What travels beside a message.
#[derive(Debug, Clone, Default)]
pub(crate) struct Payload {
    pub bytes: Vec<u8>,
    pub segments: Vec<Data>,
    /// `None` if none of them has a gradient, as in most messages.
    pub recorded: Option<Box<Recorded>>,
}

impl Payload {
    /// Size in bytes, as windows count it.
    #[inline]
    pub(crate) fn size(&self) -> usize {
        self.bytes.len() + self.segments.iter().map(Data::bytes).sum::<usize>()
    }
}

/// The result of encoding.
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    pub payload: Payload,
    pub refs: Vec<RefId>,
    /// Alive until the message has gone.
    pub handles: Vec<Handle>,
    /// Where the gradients of the slots go.
    pub edges: Vec<Option<Edge>>,
}

/// Collects what values leave while they are written. Most leave nothing, which costs nothing then.
#[derive(Debug, Default)]
struct Encoder {
    left: Option<Box<Encoded>>,
    record: bool,
}

impl Encoder {
    fn left(&mut self) -> &mut Encoded {
        self.left.get_or_insert_default()
    }
}

struct Decoder {
    segments: Vec<Data>,
    recorded: Option<Box<Recorded>>,
    node: Option<Arc<Node>>,
    handles: Vec<(RefId, Handle)>,
}

thread_local! {
    static ENCODER: RefCell<Option<Encoder>> = const { RefCell::new(None) };
    static DECODER: RefCell<Option<Decoder>> = const { RefCell::new(None) };
}

/// A thread's encoder or decoder, while it is in use. The one before comes back, also when a user's serde code panics.
struct Current<T: 'static> {
    place: &'static LocalKey<RefCell<Option<T>>>,
    outer: Option<T>,
}

impl<T> Current<T> {
    #[inline]
    fn set(place: &'static LocalKey<RefCell<Option<T>>>, inner: T) -> Self {
        Current {
            place,
            outer: place.replace(Some(inner)),
        }
    }

    /// Ends its use early, and gives it back.
    fn take(mut self) -> Option<T> {
        let inner = self.place.replace(self.outer.take());
        std::mem::forget(self);
        inner
    }
}

impl<T> Drop for Current<T> {
    fn drop(&mut self) {
        let inner = self.place.replace(self.outer.take());
        drop(inner); // its references go after the place is free
    }
}

/// Encodes with `write`. With `record`, tensors that require a gradient become slots.
pub(crate) fn encode(record: bool, write: impl FnOnce(&mut Vec<u8>) -> Result<()>) -> Result<Encoded> {
    let current = Current::set(
        &ENCODER,
        Encoder {
            record,
            ..Encoder::default()
        },
    );
    let mut bytes = spare::take();
    write(&mut bytes)?;
    let left = current.take().and_then(|encoder| encoder.left);
    let mut encoded = left.map_or_else(Encoded::default, |left| *left);
    encoded.payload.bytes = bytes;
    if !encoded.edges.is_empty() {
        encoded.payload.recorded.get_or_insert_default().reach = reach(&encoded.edges);
    }
    Ok(encoded)
}

/// Appends one value.
pub(crate) fn write<T: Serialize + ?Sized>(value: &T, bytes: &mut Vec<u8>) -> Result<()> {
    let taken = std::mem::take(bytes);
    *bytes = postcard::to_extend(value, taken).map_err(|e| refused("a value", e))?;
    Ok(())
}

/// A payload that has arrived, with what keeps its references alive.
#[derive(Clone, Default)]
pub(crate) struct Delivered {
    pub payload: Payload,
    pub handles: Vec<(RefId, Handle)>,
    /// The crossing that its slots belong to, if it was recorded.
    pub crossing: Option<CrossingId>,
}

impl std::fmt::Debug for Delivered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Delivered")
            .field("payload", &self.payload)
            .field("crossing", &self.crossing)
            .finish_non_exhaustive()
    }
}

impl Delivered {
    /// Decodes a value. Its tensors with gradients hang on a new boundary node of the crossing.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if the bytes are no such value.
    pub(crate) fn decode<T: DeserializeOwned>(mut self) -> Result<T> {
        let node = match (self.crossing, &mut self.payload.recorded) {
            (Some(crossing), Some(recorded)) if !recorded.slots.is_empty() => Some(boundary(crossing, recorded, &self.payload.segments)?),
            _ => None,
        };
        let bytes = self.payload.bytes;
        // Without a decoder there is nothing to be found, too.
        let needed = !self.payload.segments.is_empty() || !self.handles.is_empty() || DECODER.with_borrow(Option::is_some);
        let current = needed.then(|| {
            let decoder = Decoder {
                segments: self.payload.segments,
                recorded: self.payload.recorded,
                node,
                handles: self.handles,
            };
            Current::set(&DECODER, decoder)
        });
        let value = postcard::take_from_bytes(&bytes);
        drop(current);
        let result = match value {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(decode_error(format!(
                "{} bytes left over after `{}`",
                rest.len(),
                std::any::type_name::<T>()
            ))),
            Err(e) => Err(decode_error(format!("`{}`: {e}", std::any::type_name::<T>()))),
        };
        spare::keep(bytes);
        result
    }
}

fn boundary(crossing: CrossingId, recorded: &mut Recorded, segments: &[Data]) -> Result<Arc<Node>> {
    let of_slot = |&slot: &u32| segments.get(slot as usize).map(Spec::of);
    let slots: Vec<Spec> = recorded
        .slots
        .iter()
        .map(of_slot)
        .collect::<Option<_>>()
        .ok_or_else(|| decode_error("a slot names a segment that isn't there".into()))?;
    if slots.iter().any(|slot| !slot.dtype.is_float()) {
        return Err(decode_error("a slot of a dtype without gradients".into()));
    }
    Ok(Node::boundary(crossing.to_bits(), slots, recorded.reach.take()))
}

/// Writes the header of a frame: the message, then the payload's bytes.
#[inline]
pub(crate) fn header(message: &Message, payload: &mut Payload, header: &mut Vec<u8>) -> Result<()> {
    header.clear();
    message::write(message, payload.recorded.as_deref(), header)?;
    header.append(&mut payload.bytes); // leaves its memory
    spare::keep(std::mem::take(&mut payload.bytes));
    Ok(())
}

/// Takes a frame apart.
///
/// # Errors
/// [`ErrorKind::Decode`] if it is none.
#[inline]
pub(crate) fn parse_header(mut header: Vec<u8>, segments: Vec<Data>) -> Result<(Message, Payload)> {
    let (message, recorded, rest) = message::read(&header)?;
    let start = header.len() - rest.len();
    header.drain(..start);
    if header.is_empty() {
        spare::keep(std::mem::take(&mut header));
    }
    let payload = Payload {
        bytes: header,
        segments,
        recorded,
    };
    Ok((message, payload))
}

/// Whether a header is that of the answer to a request of this rank.
pub(crate) fn answers(header: &[u8], request: RequestId) -> bool {
    matches!(message::read(header), Ok((Message::Reply { id, .. }, ..)) if id == request)
}

/// An array as it travels: ranks send each other memory of theirs, never a GPU's, and in row-major order. So it is in a call to oneself, too: a BLAS gives other
/// bits for other strides.
fn as_sent(mut data: Data) -> Result<Data> {
    if data.device() != Device::Cpu {
        data = data.to(Device::Cpu)?;
    }
    if !data.is_contiguous() {
        data = data.to_contiguous();
    }
    Ok(data)
}

/// Leaves a reference with the encoder.
pub(crate) fn put_reference(id: RefId, handle: Handle) -> bool {
    ENCODER.with_borrow_mut(|encoder| match encoder {
        Some(encoder) => {
            let left = encoder.left();
            left.refs.push(id);
            left.handles.push(handle);
            true
        }
        None => false,
    })
}

/// Takes the handle of a reference from the decoder.
pub(crate) fn take_reference(id: RefId) -> Option<Handle> {
    DECODER.with_borrow(|decoder| decoder.as_ref()?.handles.iter().find(|h| h.0 == id).map(|h| h.1.clone()))
}

pub(crate) fn decode_error(what: String) -> Error {
    ErrorKind::Decode { what }.into()
}

fn refused(what: &str, error: postcard::Error) -> Error {
    ErrorKind::Argument {
        op: "encode".into(),
        what: format!("{what} can't be encoded: {error}; tensors and references only travel in calls"),
    }
    .into()
}

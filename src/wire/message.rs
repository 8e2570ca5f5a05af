//! Messages in bytes. Nearly all that travels are calls and replies, with little in them: these begin with a byte that says what is there, then come their
//! numbers, and by postcard what is there. All others are postcard's.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{decode_error, refused};
use crate::Result;
use crate::protocol::{Answer, Gate, Message, Op};

/// First byte of a call, without its parts: no postcard of a [`Message`] begins so.
const CALL: u8 = 0x80;
/// That of a reply.
const REPLY: u8 = 0xc0;

const CREATES: u8 = 1;
const CONTEXT: u8 = 2;
const GATE: u8 = 4;
const REFS: u8 = 8;
const RECORDED: u8 = 16;
const ANSWER: u8 = 1;
const ERROR: u8 = 2;

/// The tensors with gradients among a payload's segments.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recorded {
    /// Their places, in the order of their crossing's slots.
    pub slots: Vec<u32>,
    /// Crossings, on any rank, that the gradients of the slots reach beyond their own; `None` if that isn't known.
    pub reach: Option<Vec<u64>>,
}

/// Appends a message, and what its payload says of gradients.
#[inline]
pub(super) fn write(message: &Message, recorded: Option<&Recorded>, out: &mut Vec<u8>) -> Result<()> {
    let mut parts = Parts { out, sum: 0 };
    let first = parts.out.len();
    match message {
        Message::Request {
            id,
            op: Op::Call {
                function,
                create,
                context,
                gate,
            },
            refs,
        } => {
            parts.out.extend_from_slice(&head(CALL, *id));
            parts.out.extend_from_slice(&function.to_le_bytes());
            parts.some(CREATES, create.as_ref())?;
            parts.some(CONTEXT, context.as_ref())?;
            parts.some(GATE, Some(gate).filter(|gate| **gate != Gate::default()))?;
            parts.some(REFS, Some(refs).filter(|refs| !refs.is_empty()))?;
        }
        Message::Reply { id, answer, outcome, refs } => {
            parts.out.extend_from_slice(&head(REPLY, *id));
            parts.some(ANSWER, Some(answer).filter(|answer| **answer != Answer::default()))?;
            parts.some(ERROR, outcome.as_ref().err())?;
            parts.some(REFS, Some(refs).filter(|refs| !refs.is_empty()))?;
        }
        message => return append(&(message, recorded), parts.out),
    }
    parts.some(RECORDED, recorded)?;
    let sum = parts.sum;
    out[first] |= sum;
    Ok(())
}

const HEAD: usize = 1 + size_of::<u64>();

#[inline]
fn head(kind: u8, id: u64) -> [u8; HEAD] {
    let mut head = [kind; HEAD];
    head[1..].copy_from_slice(&id.to_le_bytes());
    head
}

fn append<T: Serialize>(value: &T, out: &mut Vec<u8>) -> Result<()> {
    *out = postcard::to_extend(value, std::mem::take(out)).map_err(|e| refused("a message", e))?;
    Ok(())
}

struct Parts<'a> {
    out: &'a mut Vec<u8>,
    /// Which there are.
    sum: u8,
}

impl Parts<'_> {
    fn some<T: Serialize>(&mut self, part: u8, value: Option<&T>) -> Result<()> {
        let Some(value) = value else { return Ok(()) };
        self.sum |= part;
        append(value, self.out)
    }
}

/// A message, what its payload says of gradients, and what follows it.
type Parsed<'a> = (Message, Option<Box<Recorded>>, &'a [u8]);

/// Takes a message from the front of `bytes`.
///
/// # Errors
/// [`ErrorKind::Decode`](crate::ErrorKind::Decode) if there is none.
#[inline]
pub(super) fn read(bytes: &[u8]) -> Result<Parsed<'_>> {
    let Some(&first) = bytes.first().filter(|first| **first >= CALL) else {
        let ((message, recorded), rest) = take(bytes)?;
        return Ok((message, recorded, rest));
    };
    let (id, rest) = number(&bytes[1..])?;
    let id = u64::from_le_bytes(id);
    let mut parts = Read { bytes: rest, left: 0 };
    let message = if first < REPLY {
        parts.left = first - CALL;
        let (function, rest) = number(parts.bytes)?;
        parts.bytes = rest;
        let op = Op::Call {
            function: u32::from_le_bytes(function),
            create: parts.some(CREATES)?,
            context: parts.some(CONTEXT)?,
            gate: parts.some(GATE)?.unwrap_or_default(),
        };
        let refs = parts.some(REFS)?.unwrap_or_default();
        Message::Request { id, op, refs }
    } else {
        parts.left = first - REPLY;
        let answer = parts.some(ANSWER)?.unwrap_or_default();
        let outcome = parts.some(ERROR)?.map_or(Ok(()), Err);
        let refs = parts.some(REFS)?.unwrap_or_default();
        Message::Reply { id, answer, outcome, refs }
    };
    let recorded = parts.some(RECORDED)?;
    match parts.left {
        0 => Ok((message, recorded, parts.bytes)),
        left => Err(decode_error(format!("message: parts {left:#04x} of a kind {first:#04x}"))),
    }
}

#[inline]
fn number<const N: usize>(bytes: &[u8]) -> Result<([u8; N], &[u8])> {
    let found = bytes.split_first_chunk();
    let (number, rest) = found.ok_or_else(|| decode_error(format!("message: {} bytes in place of a number", bytes.len())))?;
    Ok((*number, rest))
}

fn take<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8])> {
    postcard::take_from_bytes(bytes).map_err(|e| decode_error(format!("message: {e}")))
}

struct Read<'a> {
    bytes: &'a [u8],
    /// Parts that are there and weren't taken.
    left: u8,
}

impl Read<'_> {
    fn some<T: DeserializeOwned>(&mut self, part: u8) -> Result<Option<T>> {
        if self.left & part == 0 {
            return Ok(None);
        }
        self.left -= part;
        let (value, rest) = take(self.bytes)?;
        self.bytes = rest;
        Ok(Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::protocol::{ContextId, CrossingId, RefId, RequestId, Status, Tag, Turn, ValueId};

    fn messages() -> Vec<Message> {
        let refs = vec![RefId {
            owner: 3,
            value: ValueId::new(3, 70),
        }];
        let tag = Tag {
            context: ContextId::new(1, 9),
            low: 300,
            path: vec![1, 2],
            crossing: Some(CrossingId::new(1, 5)),
        };
        let mut all = Vec::new();
        for parts in 0..16u8 {
            let there = |part| parts & part != 0;
            let refs = if there(8) { refs.clone() } else { Vec::new() };
            let id: RequestId = 1 << (3 * parts);
            all.push(Message::Request {
                id,
                op: Op::Call {
                    function: u32::from(parts) * 77,
                    create: there(1).then(|| ValueId::new(2, 1)),
                    context: there(2).then(|| Box::new(tag.clone())),
                    gate: Gate {
                        turn: if there(4) { Turn::End(id) } else { Turn::None },
                        gradients_of: there(4).then_some(tag.context),
                    },
                },
                refs: refs.clone(),
            });
            all.push(Message::Reply {
                id,
                answer: Answer {
                    new_child: there(1),
                    balance: if there(4) { -3 } else { 0 },
                    ..Answer::default()
                },
                outcome: if there(2) { Err(Error::user("no")) } else { Ok(()) },
                refs,
            });
        }
        all.push(Message::Report {
            id: 7,
            status: Status::Running(0.5),
        });
        all.push(Message::Query { id: u64::MAX });
        all
    }

    #[test]
    fn messages_come_back_with_what_follows_them() {
        let recorded = Recorded {
            slots: vec![0, 2],
            reach: Some(vec![1 << 40]),
        };
        for message in messages() {
            for recorded in [None, Some(&recorded)] {
                let mut bytes = b"before".to_vec();
                write(&message, recorded, &mut bytes).unwrap();
                let end = bytes.len();
                bytes.extend_from_slice(b"after");
                let (back, also, rest) = read(&bytes[6..]).unwrap();
                assert_eq!((&back, also.as_deref(), rest), (&message, recorded, &b"after"[..]));
                for cut in 6..end {
                    assert!(read(&bytes[6..cut]).is_err(), "{message:?} cut to {cut} of {end}");
                }
            }
        }
    }

    #[test]
    fn parts_that_no_message_has_are_refused() {
        let mut bytes = Vec::new();
        let reply = Message::Reply {
            id: 1,
            answer: Answer::default(),
            outcome: Ok(()),
            refs: Vec::new(),
        };
        write(&reply, None, &mut bytes).unwrap();
        assert_eq!(bytes.len(), HEAD);
        for part in [4, 32] {
            let mut other = bytes.clone();
            other[0] |= part;
            assert!(read(&other).is_err(), "part {part}");
        }
    }
}

//! What travels on the inbox tag, and its encoding. The decoder trusts nothing.

use serde::{Deserialize, Serialize};

use crate::tensor::Data;
use crate::transport::Frame;
use crate::transport::segment::{self, Layout, decode_error};
use crate::{Result, spare};

/// First byte of a frame without segments, whose header is all that follows: most frames are such. No [`Message`] begins so.
pub(super) const PLAIN: u8 = 0xff;

/// What leads a message. Header and segments that travel in the same message follow it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// A whole frame: the header, of this many bytes, and the segments follow.
    Frame { header: u64, layouts: Vec<Layout> },
    /// A frame whose segments wait until the receiver is ready.
    Announce {
        /// The sender's number for it.
        transfer: u64,
        /// Size of the segments in bytes.
        bytes: u64,
        lead: Lead,
    },
    /// The answer to an announcement: send on this tag. Only the lead, if the segments are over the limit.
    Clear { transfer: u64, tag: u16, segments: bool },
    /// The other answer: send nothing.
    Refuse { transfer: u64 },
}

/// Layouts and header of an announced frame.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Lead {
    /// The header, of this many bytes, follows.
    Here { header: u64, layouts: Vec<Layout> },
    /// They are too long, and travel as this many bytes before the first segment. As much of the header as fits follows, for a
    /// receiver that refuses.
    Apart { bytes: u64 },
}

/// Encodes a whole frame into `slot`, if it fits; says how many bytes it takes.
pub(super) fn encode_frame(frame: &Frame, slot: &mut [u8]) -> Option<usize> {
    if frame.segments.is_empty() {
        let (first, rest) = slot.split_first_mut()?;
        *first = PLAIN;
        rest.get_mut(..frame.header.len())?.copy_from_slice(&frame.header);
        return Some(1 + frame.header.len());
    }
    let payload = frame.header.len() as u64 + frame.segment_bytes();
    if payload > slot.len() as u64 {
        return None;
    }
    let layouts = frame.segments.iter().map(Layout::of).collect();
    let mut at = encode(
        &Message::Frame {
            header: frame.header.len() as u64,
            layouts,
        },
        slot,
    )?;
    if at as u64 + payload > slot.len() as u64 {
        return None;
    }
    let segments = frame.segments.iter().map(contiguous_bytes);
    for part in std::iter::once(&frame.header[..]).chain(segments) {
        slot[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    Some(at)
}

/// Encodes an announcement into `slot`; returns its size, and the lead if that has to travel apart.
pub(super) fn encode_announcement(transfer: u64, frame: &Frame, slot: &mut [u8]) -> Result<(usize, Vec<u8>)> {
    let bytes = frame.segment_bytes();
    let header = &frame.header;
    let layouts: Vec<Layout> = frame.segments.iter().map(Layout::of).collect();
    let here = Message::Announce {
        transfer,
        bytes,
        lead: Lead::Here {
            header: header.len() as u64,
            layouts,
        },
    };
    if let Some(at) = encode(&here, slot).filter(|at| at + header.len() <= slot.len()) {
        slot[at..at + header.len()].copy_from_slice(header);
        return Ok((at + header.len(), Vec::new()));
    }
    let Message::Announce {
        lead: Lead::Here { layouts, .. },
        ..
    } = here
    else {
        unreachable!("built above")
    };
    let mut lead = postcard::to_allocvec(&layouts).map_err(|error| decode_error(error.to_string()))?;
    lead.extend_from_slice(header);
    let apart = Message::Announce {
        transfer,
        bytes,
        lead: Lead::Apart { bytes: lead.len() as u64 },
    };
    let size = encode(&apart, slot).ok_or_else(|| decode_error("an announcement does not fit in the eager limit"))?;
    let beginning = &header[..header.len().min(slot.len() - size)];
    slot[size..size + beginning.len()].copy_from_slice(beginning);
    Ok((size + beginning.len(), lead))
}

/// Encodes a message without what follows it, if it fits.
pub(super) fn encode(message: &Message, slot: &mut [u8]) -> Option<usize> {
    postcard::to_slice(message, slot).ok().map(|used| used.len())
}

/// The frame without segments that these bytes are, if so.
#[inline]
pub(super) fn plain_frame(bytes: &[u8]) -> Option<Frame> {
    let [PLAIN, header @ ..] = bytes else { return None };
    let segments = Vec::new();
    Some(Frame {
        header: kept(header),
        segments,
    })
}

#[inline]
fn kept(header: &[u8]) -> Vec<u8> {
    let mut kept = spare::take();
    kept.extend_from_slice(header);
    kept
}

/// Decodes what leads a message; returns what follows it, too.
pub(super) fn decode(bytes: &[u8]) -> Result<(Message, &[u8])> {
    postcard::take_from_bytes(bytes).map_err(|error| decode_error(format!("{} bytes in the inbox: {error}", bytes.len())))
}

/// Decodes a lead that travelled apart: layouts and header.
pub(super) fn decode_lead(bytes: &[u8]) -> Result<(Vec<Layout>, Vec<u8>)> {
    let (layouts, header) =
        postcard::take_from_bytes(bytes).map_err(|error| decode_error(format!("a lead of {} bytes: {error}", bytes.len())))?;
    Ok((layouts, header.to_vec()))
}

/// The whole frame that follows [`Message::Frame`].
pub(super) fn decode_frame(header: u64, layouts: &[Layout], rest: &[u8]) -> Result<Frame> {
    let (header, mut rest) = split_header(header, rest)?;
    let segments = layouts
        .iter()
        .map(|layout| segment::take(layout, &mut rest))
        .collect::<Result<_>>()?;
    if !rest.is_empty() {
        return Err(decode_error(format!("{} bytes follow the last segment", rest.len())));
    }
    let header = kept(header);
    Ok(Frame { header, segments })
}

/// The header that follows [`Lead::Here`].
pub(super) fn decode_header(header: u64, rest: &[u8]) -> Result<Vec<u8>> {
    match split_header(header, rest)? {
        (header, []) => Ok(header.to_vec()),
        (_, rest) => Err(decode_error(format!("{} bytes follow the header of an announcement", rest.len()))),
    }
}

fn split_header(header: u64, rest: &[u8]) -> Result<(&[u8], &[u8])> {
    let split = usize::try_from(header).ok().and_then(|header| rest.split_at_checked(header));
    split.ok_or_else(|| decode_error(format!("a header of {header} bytes, of which {} arrived", rest.len())))
}

/// The memory of a segment that was made contiguous before.
pub(super) fn contiguous_bytes(data: &Data) -> &[u8] {
    segment::as_bytes(data).expect("segments are made contiguous before they are sent")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensor::DType;

    fn frame(header: usize) -> Frame {
        Frame {
            header: vec![5; header],
            segments: vec![Data::zeros(DType::F32, &[3, 2]), Data::zeros(DType::Bool, &[5])],
        }
    }

    #[test]
    fn a_frame_comes_back() {
        let mut slot = [0; 200];
        let size = encode_frame(&frame(10), &mut slot).unwrap();
        let (Message::Frame { header, layouts }, rest) = decode(&slot[..size]).unwrap() else {
            panic!()
        };
        let back = decode_frame(header, &layouts, rest).unwrap();
        assert_eq!(back.header, vec![5; 10]);
        assert_eq!(back.segments[0].shape(), [3, 2]);
        assert_eq!(back.segment_bytes(), 29);
        for cut in 0..size {
            let whole = decode(&slot[..cut]).and_then(|(message, rest)| match message {
                Message::Frame { header, layouts } => decode_frame(header, &layouts, rest).map(|_| ()),
                _ => Ok(()),
            });
            assert!(whole.is_err(), "cut to {cut}");
        }
    }

    #[test]
    fn a_frame_without_segments_comes_back() {
        let mut slot = [0; 64];
        for header in [0, 1, 63] {
            let mut frame = frame(header);
            frame.segments.clear();
            let size = encode_frame(&frame, &mut slot).unwrap();
            assert_eq!(plain_frame(&slot[..size]).unwrap().header, frame.header);
            assert!(decode(&slot[..size]).is_err());
            frame.header.extend([0; 64]);
            assert!(encode_frame(&frame, &mut slot).is_none());
        }
        assert!(plain_frame(&[]).is_none() && plain_frame(&[0, 0, 0]).is_none());
    }

    #[test]
    fn what_does_not_fit_is_announced() {
        let mut slot = [0; 64];
        assert_eq!(encode_frame(&frame(30), &mut slot), None);
        let (size, lead) = encode_announcement(7, &frame(30), &mut slot).unwrap();
        assert!(lead.is_empty());
        let (message, rest) = decode(&slot[..size]).unwrap();
        let Message::Announce {
            transfer: 7,
            bytes: 29,
            lead: Lead::Here { header, .. },
        } = message
        else {
            panic!("{message:?}")
        };
        assert_eq!(decode_header(header, rest).unwrap(), vec![5; 30]);

        let (size, lead) = encode_announcement(u64::MAX, &frame(3_000), &mut slot).unwrap();
        let (message, beginning) = decode(&slot[..size]).unwrap();
        assert!(matches!(message, Message::Announce { bytes: 29, lead: Lead::Apart { bytes }, .. } if bytes == lead.len() as u64));
        assert_eq!((size, beginning), (slot.len(), &[5; 3_000][..beginning.len()]));
        let (layouts, header) = decode_lead(&lead).unwrap();
        assert_eq!((layouts.len(), header.len()), (2, 3_000));
    }

    #[test]
    fn the_longest_control_messages_fit_in_the_smallest_slot() {
        let mut slot = [0; 64];
        let apart = Message::Announce {
            transfer: u64::MAX,
            bytes: u64::MAX,
            lead: Lead::Apart { bytes: u64::MAX },
        };
        for message in [
            apart,
            Message::Clear {
                transfer: u64::MAX,
                tag: u16::MAX,
                segments: true,
            },
            Message::Refuse { transfer: u64::MAX },
        ] {
            assert!(encode(&message, &mut slot).is_some());
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(plain_frame(&bytes));
            if let Ok((message, rest)) = decode(&bytes) {
                match message {
                    Message::Frame { header, layouts } => drop(decode_frame(header, &layouts, rest)),
                    Message::Announce { lead: Lead::Here { header, layouts }, .. } => {
                        drop(decode_header(header, rest));
                        drop(segment::total_bytes(&layouts));
                    }
                    _ => {}
                }
            }
            drop(decode_lead(&bytes));
        }
    }
}

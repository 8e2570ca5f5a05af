//! The kind of a message, by name: for faults on purpose.

use super::parse_header;
use crate::protocol::{Message, Op, Part};

/// All kinds.
pub(crate) const KINDS: [&str; 21] = [
    "call",
    "fetch",
    "mark",
    "gradient",
    "commit",
    "abort",
    "forget",
    "reply",
    "confirm",
    "register",
    "registered",
    "release",
    "query",
    "report",
    "knock",
    "here",
    "probe",
    "sign",
    "led",
    "quiet",
    "wave",
];

/// The kind of the message in a frame's header.
pub(crate) fn kind(header: &[u8]) -> &'static str {
    let Ok((message, ..)) = parse_header(header.to_vec(), Vec::new()) else {
        return "none";
    };
    match message {
        Message::Request { op, .. } => match op {
            Op::Call { .. } => "call",
            Op::Fetch { .. } => "fetch",
            Op::Backward { part, .. } => match part {
                Part::Mark(_) => "mark",
                Part::Gradient(_) | Part::Last(..) => "gradient",
                Part::Recall => "recall",
                Part::Commit => "commit",
                Part::Abort => "abort",
            },
            Op::Release { .. } => "forget",
        },
        Message::Reply { .. } => "reply",
        Message::Confirm { .. } => "confirm",
        Message::Register { .. } => "register",
        Message::Registered { .. } => "registered",
        Message::Release { .. } => "release",
        Message::Query { .. } => "query",
        Message::Report { .. } => "report",
        Message::Knock { .. } => "knock",
        Message::Here { .. } => "here",
        Message::Probe { .. } => "probe",
        Message::Sign { .. } => "sign",
        Message::Led { .. } => "led",
        Message::Quiet { .. } => "quiet",
        Message::Wave { .. } => "wave",
    }
}

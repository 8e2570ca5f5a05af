//! The last things that happened, for a person to read.

use std::collections::VecDeque;

use crate::Error;
use crate::protocol::{Message, Op, RefId, Turn};

/// How many are kept.
const KEPT: usize = 40;

/// Off unless it is asked for: a failing seed is run again with it.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    on: bool,
    lines: VecDeque<String>,
    all: bool,
}

impl Trace {
    /// Keeps the last lines, or all of them.
    pub(super) fn start(&mut self, all: bool) {
        self.on = true;
        self.all = all;
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        if self.on {
            if self.lines.len() == KEPT && !self.all {
                self.lines.pop_front();
            }
            self.lines.push_back(line());
        }
    }

    pub(super) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lines).into()
    }
}

/// A message in short.
pub(super) fn shown(message: &Message) -> String {
    let outcome = |o: &std::result::Result<(), Error>| match o {
        Ok(()) => "ok".into(),
        Err(e) => format!("error: {e}"),
    };
    match message {
        Message::Request { id, op, refs } => {
            let what = match op {
                Op::Call { create, context, gate, .. } => {
                    let mut what = "call".to_owned();
                    if let Some(value) = create {
                        what += &format!(" making {value}");
                    }
                    if let Some(tag) = context {
                        what += &format!(" in context {}, frame {:?}", tag.context, tag.path);
                    }
                    if gate.turn != Turn::None {
                        what += ", queued";
                    }
                    if let Some(context) = gate.gradients_of {
                        what += &format!(", gradients of {context}");
                    }
                    what
                }
                Op::Fetch { value, context } => match context {
                    Some(tag) => format!("fetch {value} in context {}", tag.context),
                    None => format!("fetch {value}"),
                },
                Op::Backward {
                    context, backward, part, ..
                } => format!("backward {backward} of context {context}: {part:?}"),
                Op::Release { context, .. } => format!("release context {context}"),
            };
            format!("request {id}: {what}{}", with(refs))
        }
        Message::Reply {
            id,
            answer,
            outcome: o,
            refs,
        } => {
            let child = if answer.new_child { ", a new child" } else { "" };
            format!("reply to {id}: {}{child}{}", outcome(o), with(refs))
        }
        other => format!("{other:?}"),
    }
}

fn with(refs: &[RefId]) -> String {
    if refs.is_empty() {
        return String::new();
    }
    let all: Vec<String> = refs.iter().map(|r| format!("{}@{}", r.value, r.owner)).collect();
    format!(", with {}", all.join(" "))
}

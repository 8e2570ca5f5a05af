//! Termination detection: have all ranks come to the end, and is nothing on the way?
//!
//! Ranks form a binary tree. A rank that has entered the epoch and is quiet adds its counts of messages sent and received to those of its
//! children and passes them up. Rank 0 ends the epoch when two waves in a row counted the same, with as many sent as received
//! (the four-counter method of F. Mattern, "Algorithms for distributed termination detection", Distributed Computing 2, 1987).

use super::message::Message;
use crate::mutant::{self, Mutant};

#[derive(Debug, Default)]
pub(crate) struct Drain {
    /// Number of the epoch that is open, or will be next.
    epoch: u64,
    entered: bool,
    /// Whether this rank is at its very end, not only at the end of the epoch.
    finishing: bool,
    wave: u64,
    /// Whether this rank has contributed to the wave.
    contributed: bool,
    /// What children said about the wave.
    heard: Vec<Heard>,
    /// Rank 0: counts of the last wave.
    last: Option<(u64, u64)>,
}

/// A child's report: what was counted below it, and whether all there are at their very end.
#[derive(Debug)]
struct Heard {
    from: u32,
    sent: u64,
    received: u64,
    finishing: bool,
}

/// What comes of a step.
#[derive(Debug, PartialEq)]
pub(crate) enum Step {
    Nothing,
    Send(Vec<(u32, Message)>),
    /// The epoch ended, perhaps the last one: tell the children.
    Ended {
        messages: Vec<(u32, Message)>,
        last: bool,
    },
}

fn parent(rank: u32) -> u32 {
    (rank - 1) / 2
}

pub(crate) fn children(rank: u32, size: u32) -> impl Iterator<Item = u32> {
    (1..=2u64)
        .map(move |k| 2 * u64::from(rank) + k)
        .filter(move |&c| c < u64::from(size))
        .map(|c| c as u32)
}

impl Drain {
    /// This rank has nothing more to do of its own. Returns the epoch's number.
    pub(crate) fn enter(&mut self, finishing: bool) -> u64 {
        self.entered = true;
        self.finishing = finishing;
        self.epoch
    }

    pub(crate) fn has_entered(&self) -> bool {
        self.entered
    }

    /// Ranks below this one that haven't reported to the wave.
    pub(crate) fn missing(&self, me: u32, size: u32) -> Vec<u32> {
        children(me, size).filter(|c| !self.heard.iter().any(|h| h.from == *c)).collect()
    }

    /// A child reports.
    pub(crate) fn quiet(&mut self, from: u32, epoch: u64, wave: u64, sent: u64, received: u64, finishing: bool) {
        if epoch == self.epoch && wave == self.wave {
            self.heard.push(Heard {
                from,
                sent,
                received,
                finishing,
            });
        }
    }

    /// Contributes if it is this rank's turn; `sent` and `received` are its own counts.
    pub(crate) fn advance(&mut self, me: u32, size: u32, quiet: bool, sent: u64, received: u64) -> Step {
        if !self.entered || self.contributed || !quiet || self.heard.len() < children(me, size).count() {
            return Step::Nothing;
        }
        let sent = sent + self.heard.iter().map(|h| h.sent).sum::<u64>();
        let received = received + self.heard.iter().map(|h| h.received).sum::<u64>();
        let finishing = self.finishing && self.heard.iter().all(|h| h.finishing);
        self.contributed = true;
        if me > 0 {
            return Step::Send(vec![(
                parent(me),
                Message::Quiet {
                    epoch: self.epoch,
                    wave: self.wave,
                    sent,
                    received,
                    finishing,
                },
            )]);
        }
        let same = self.last == Some((sent, received)) || mutant::is(Mutant::EndAfterOneWave);
        let done = sent == received && same;
        self.last = Some((sent, received));
        self.wave(me, size, self.epoch, self.wave + 1, done, finishing)
    }

    /// Rank 0 begins a wave, or ends the epoch; goes down the tree.
    pub(crate) fn wave(&mut self, me: u32, size: u32, epoch: u64, wave: u64, done: bool, last: bool) -> Step {
        if epoch != self.epoch {
            return Step::Nothing;
        }
        let messages = children(me, size).map(|c| (c, Message::Wave { epoch, wave, done, last })).collect();
        self.heard.clear();
        self.contributed = false;
        if done {
            *self = Drain {
                epoch: self.epoch + 1,
                ..Drain::default()
            };
            Step::Ended { messages, last }
        } else {
            self.wave = wave;
            Step::Send(messages)
        }
    }
}

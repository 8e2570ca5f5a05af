//! The last things that happened, for a person to read.

use std::collections::VecDeque;

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

//! Which contexts this rank knows, through whom, and who knows them through it.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::ids::ContextId;
use crate::mutant::{self, Mutant};
use crate::{Error, ErrorKind};

#[derive(Debug, Default)]
struct Context {
    /// Ranks that met the context through this one; release travels to them.
    children: BTreeSet<u32>,
}

/// Contexts of one home that were released, as this rank knows it.
#[derive(Debug, Default)]
struct Released {
    /// All below.
    low: u64,
    above: BTreeSet<u64>,
}

#[derive(Debug)]
pub(crate) struct Contexts {
    me: u32,
    next: u64,
    live: FxHashMap<ContextId, Context>,
    released: FxHashMap<u32, Released>,
    /// Sequences of this rank's own contexts that are alive.
    own: BTreeSet<u64>,
}

impl Contexts {
    pub(crate) fn new(me: u32) -> Self {
        Contexts {
            me,
            next: 1,
            live: FxHashMap::default(),
            released: FxHashMap::default(),
            own: BTreeSet::new(),
        }
    }

    /// A new context of this rank.
    pub(crate) fn open(&mut self) -> ContextId {
        let id = ContextId::new(self.me, self.next);
        self.next += 1;
        self.own.insert(id.sequence());
        self.live.insert(id, Context::default());
        id
    }

    /// Every context of this rank below this sequence was released.
    pub(crate) fn low(&self) -> u64 {
        self.own.first().copied().unwrap_or(self.next)
    }

    /// The same, once this one is released, too.
    pub(crate) fn low_without(&self, id: ContextId) -> u64 {
        let mut own = self.own.iter().copied();
        own.find(|&sequence| sequence != id.sequence()).unwrap_or(self.next)
    }

    pub(crate) fn is_live(&self, id: ContextId) -> bool {
        self.live.contains_key(&id)
    }

    pub(crate) fn is_released(&self, id: ContextId) -> bool {
        if id.rank() == self.me {
            return !self.live.contains_key(&id) && id.sequence() < self.next;
        }
        self.released
            .get(&id.rank())
            .is_some_and(|r| id.sequence() < r.low || r.above.contains(&id.sequence()))
    }

    /// A message of this context has arrived; true if it is new here.
    pub(crate) fn meet(&mut self, id: ContextId) -> Result<bool, Error> {
        if self.live.contains_key(&id) {
            return Ok(false);
        }
        if (self.is_released(id) && !mutant::is(Mutant::ForgetReleased)) || id.rank() == self.me {
            return Err(self.gone("call", id));
        }
        self.live.insert(id, Context::default());
        Ok(true)
    }

    /// A rank met the context through this one. False if the context is gone here, so that the release must follow it.
    pub(crate) fn adopt(&mut self, id: ContextId, child: u32) -> bool {
        match self.live.get_mut(&id) {
            Some(context) => {
                if child != self.me && !mutant::is(Mutant::SkipChild) {
                    context.children.insert(child);
                }
                true
            }
            None => child == self.me,
        }
    }

    /// Forgets a context; returns the ranks that must hear of it. None if it was gone already.
    pub(crate) fn release(&mut self, id: ContextId, low: u64) -> Option<BTreeSet<u32>> {
        let context = self.live.remove(&id);
        if id.rank() == self.me {
            self.own.remove(&id.sequence());
        } else {
            let released = self.released.entry(id.rank()).or_default();
            released.low = released.low.max(low);
            if id.sequence() >= released.low {
                released.above.insert(id.sequence());
            }
            while released.above.first().is_some_and(|&first| first < released.low) {
                released.above.pop_first();
            }
        }
        context.map(|c| c.children)
    }

    /// Another context that is alive here: what a fault records a call in.
    pub(super) fn another(&self, id: ContextId) -> ContextId {
        self.live.keys().copied().filter(|&c| c != id).min().unwrap_or(id)
    }

    pub(crate) fn len(&self) -> usize {
        self.live.len()
    }

    /// Entries of its tables.
    #[cfg(any(test, feature = "sim"))]
    pub(super) fn entries(&self) -> usize {
        let children: usize = self.live.values().map(|c| c.children.len()).sum();
        let above: usize = self.released.values().map(|r| r.above.len()).sum();
        self.live.len() + children + self.released.len() + above + self.own.len()
    }

    /// The error for a context that isn't here.
    pub(crate) fn gone(&self, operation: &str, id: ContextId) -> Error {
        if self.is_released(id) {
            ErrorKind::ContextReleased {
                operation: operation.into(),
                context: id.to_string(),
            }
            .into()
        } else {
            ErrorKind::NoContext {
                operation: operation.into(),
                rank: self.me,
                context: id.to_string(),
            }
            .into()
        }
    }
}

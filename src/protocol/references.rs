//! Who holds what: the rules are on the page `README.md` beside this file.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::ids::{RefId, TaskId, ValueId};
use crate::mutant::{self, Mutant};
use crate::{Error, ErrorKind};

/// A value on its owner.
#[derive(Debug)]
struct Owned<V> {
    state: State<V>,
    /// Registrations per holding rank.
    holders: BTreeMap<u32, u64>,
    /// Handles on this rank, payloads in custody included.
    handles: u64,
    /// Requests that wait for the value.
    parked: Vec<TaskId>,
}

#[derive(Debug)]
enum State<V> {
    Pending,
    Ready(V),
    Failed(Error),
}

/// Another rank's value, on a rank that holds it: all copies share this entry.
#[derive(Debug, Default)]
struct Held {
    /// Registrations that the owner made for this rank, or is about to.
    registrations: u64,
    handles: u64,
    /// Our sends to third ranks that haven't confirmed yet.
    pins: u64,
}

/// What a lookup on the owner finds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Lookup<V> {
    Pending,
    Ready(V),
    Failed(Error),
    Missing,
}

/// A value that is still held, for the report at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StillHeld {
    pub id: RefId,
    pub holders: Vec<u32>,
    pub handles: u64,
}

#[derive(Debug)]
pub(crate) struct References<V> {
    me: u32,
    next: u64,
    owned: FxHashMap<ValueId, Owned<V>>,
    held: FxHashMap<RefId, Held>,
    /// Per rank, the last of its creations that arrived here: a later id may still come, an earlier one was freed.
    created: FxHashMap<u32, u64>,
    /// Releases to send, per owner.
    releases: BTreeMap<u32, Vec<(ValueId, u64)>>,
    /// Values nobody holds any more, for the driver to drop.
    garbage: Vec<V>,
}

impl<V: Clone> References<V> {
    pub(crate) fn new(me: u32) -> Self {
        References {
            me,
            next: 1,
            owned: FxHashMap::default(),
            held: FxHashMap::default(),
            created: FxHashMap::default(),
            releases: BTreeMap::new(),
            garbage: Vec::new(),
        }
    }

    /// A new id for a value on `owner`, with one handle here. The request that creates it counts as this rank's registration.
    pub(crate) fn allocate(&mut self, owner: u32) -> RefId {
        let id = RefId {
            owner,
            value: ValueId::new(self.me, self.next),
        };
        self.next += 1;
        if owner == self.me {
            self.owned.insert(
                id.value,
                Owned {
                    state: State::Pending,
                    holders: BTreeMap::new(),
                    handles: 1,
                    parked: Vec::new(),
                },
            );
        } else {
            self.held.insert(
                id,
                Held {
                    registrations: 1,
                    handles: 1,
                    pins: 0,
                },
            );
        }
        id
    }

    /// A request of `from` to create a value has arrived.
    pub(crate) fn creating(&mut self, value: ValueId, from: u32) {
        if from == self.me {
            return; // allocated here, with its handle
        }
        let last = self.created.entry(from).or_default();
        *last = (*last).max(value.sequence());
        *self.placeholder(value).holders.entry(from).or_default() += 1;
    }

    fn placeholder(&mut self, value: ValueId) -> &mut Owned<V> {
        self.owned.entry(value).or_insert_with(|| Owned {
            state: State::Pending,
            holders: BTreeMap::new(),
            handles: 0,
            parked: Vec::new(),
        })
    }

    /// A value has been made, or has failed to be; returns the requests that waited for it.
    pub(crate) fn created(&mut self, value: ValueId, outcome: Result<V, Error>) -> Vec<TaskId> {
        let Some(entry) = self.owned.get_mut(&value) else {
            self.garbage.extend(outcome.ok());
            return Vec::new();
        };
        entry.state = match outcome {
            Ok(v) => State::Ready(v),
            Err(e) => State::Failed(e),
        };
        let parked = std::mem::take(&mut entry.parked);
        self.retire(value);
        parked
    }

    pub(crate) fn lookup(&self, value: ValueId) -> Lookup<V> {
        match self.owned.get(&value).map(|o| &o.state) {
            None => Lookup::Missing,
            Some(State::Pending) => Lookup::Pending,
            Some(State::Ready(v)) => Lookup::Ready(v.clone()),
            Some(State::Failed(e)) => Lookup::Failed(e.clone()),
        }
    }

    /// Lets a request wait for a value; false if it needn't.
    pub(crate) fn park(&mut self, value: ValueId, task: TaskId) -> bool {
        match self.owned.get_mut(&value) {
            Some(Owned {
                state: State::Pending,
                parked,
                ..
            }) => {
                parked.push(task);
                true
            }
            _ => false,
        }
    }

    /// A reference leaves for `to`. True if this rank keeps it pinned until `to` confirms.
    pub(crate) fn send(&mut self, id: RefId, to: u32) -> bool {
        if to == self.me || id.owner == to {
            return false; // custody there begins before anything we send later arrives
        }
        if id.owner == self.me {
            if let Some(entry) = self.owned.get_mut(&id.value) {
                *entry.holders.entry(to).or_default() += 1;
            }
            return false;
        }
        if let Some(entry) = self.held.get_mut(&id) {
            if mutant::is(Mutant::SkipPin) {
                return false;
            }
            entry.pins += 1;
            return true;
        }
        false
    }

    /// A third rank has confirmed.
    pub(crate) fn unpin(&mut self, id: RefId) {
        if let Some(entry) = self.held.get_mut(&id) {
            entry.pins = entry.pins.saturating_sub(1);
            self.let_go(id);
        }
    }

    /// A reference arrives from `from`; counts one handle. True if it must be registered with its owner before `from` may let go.
    pub(crate) fn receive(&mut self, id: RefId, from: u32) -> bool {
        if id.owner == self.me {
            if let Some(entry) = self.owned.get_mut(&id.value) {
                entry.handles += 1;
            }
            return false;
        }
        let known = self.held.contains_key(&id);
        let entry = self.held.entry(id).or_default();
        entry.handles += 1;
        let from_owner = id.owner == from;
        if from_owner || !known {
            entry.registrations += 1;
        }
        !known && !from_owner && from != self.me
    }

    /// Another rank registers as a holder.
    pub(crate) fn register(&mut self, value: ValueId, holder: u32) {
        let creator = value.rank();
        let may_come = creator != self.me && value.sequence() > self.created.get(&creator).copied().unwrap_or(0);
        if may_come || self.owned.contains_key(&value) {
            *self.placeholder(value).holders.entry(holder).or_default() += 1;
        }
    }

    /// A holder lets go of what it had registered.
    pub(crate) fn released(&mut self, value: ValueId, holder: u32, registrations: u64) {
        if let Some(entry) = self.owned.get_mut(&value) {
            if let Some(n) = entry.holders.get_mut(&holder) {
                *n = n.saturating_sub(registrations);
                if *n == 0 || mutant::is(Mutant::ReleaseAll) {
                    entry.holders.remove(&holder);
                }
            }
            self.retire(value);
        }
    }

    /// A handle on this rank was cloned out of thin air (custody handed to a second holder).
    pub(crate) fn retain(&mut self, id: RefId) {
        if id.owner == self.me {
            if let Some(entry) = self.owned.get_mut(&id.value) {
                entry.handles += 1;
            }
        } else if let Some(entry) = self.held.get_mut(&id) {
            entry.handles += 1;
        }
    }

    /// A handle on this rank was dropped.
    pub(crate) fn drop_handle(&mut self, id: RefId) {
        if id.owner == self.me {
            if let Some(entry) = self.owned.get_mut(&id.value) {
                entry.handles = entry.handles.saturating_sub(1);
                self.retire(id.value);
            }
        } else if let Some(entry) = self.held.get_mut(&id) {
            entry.handles = entry.handles.saturating_sub(1);
            self.let_go(id);
        }
    }

    fn retire(&mut self, value: ValueId) {
        let Some(entry) = self.owned.get(&value) else { return };
        if entry.handles == 0
            && entry.holders.is_empty()
            && !matches!(entry.state, State::Pending)
            && let Some(Owned {
                state: State::Ready(v), ..
            }) = self.owned.remove(&value)
        {
            self.garbage.push(v);
        }
    }

    fn let_go(&mut self, id: RefId) {
        let Some(entry) = self.held.get(&id) else { return };
        if entry.handles == 0 && entry.pins == 0 {
            let n = entry.registrations;
            self.held.remove(&id);
            self.releases.entry(id.owner).or_default().push((id.value, n));
        }
    }

    /// Whether there are releases to send or values to drop.
    pub(crate) fn has_news(&self) -> bool {
        !self.releases.is_empty() || !self.garbage.is_empty()
    }

    pub(crate) fn take_releases(&mut self) -> BTreeMap<u32, Vec<(ValueId, u64)>> {
        std::mem::take(&mut self.releases)
    }

    pub(crate) fn take_garbage(&mut self) -> Vec<V> {
        std::mem::take(&mut self.garbage)
    }

    /// Entries of its tables.
    #[cfg(any(test, feature = "sim"))]
    pub(super) fn entries(&self) -> usize {
        let holders: usize = self.owned.values().map(|o| o.holders.len()).sum();
        self.owned.len() + holders + self.held.len() + self.created.len()
    }

    /// Number of values that live here.
    pub(crate) fn values(&self) -> usize {
        self.owned.len()
    }

    /// Number of references held here, to values here or elsewhere.
    pub(crate) fn handles(&self) -> usize {
        self.held.len() + self.owned.values().filter(|o| o.handles > 0).count()
    }

    pub(crate) fn still_held(&self) -> Vec<StillHeld> {
        let mut all: Vec<_> = self
            .owned
            .iter()
            .map(|(&value, o)| StillHeld {
                id: RefId { owner: self.me, value },
                holders: o.holders.keys().copied().collect(),
                handles: o.handles,
            })
            .collect();
        all.sort_by_key(|h| h.id);
        all
    }

    /// The error of a value that isn't there.
    pub(crate) fn missing(&self, operation: &str, value: ValueId) -> Error {
        ErrorKind::NoSuchValue {
            operation: operation.into(),
            owner: self.me,
            id: value.to_string(),
        }
        .into()
    }
}

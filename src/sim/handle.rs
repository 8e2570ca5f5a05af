//! References as the simulated program holds them: the last copy that goes tells the rank.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::protocol::RefId;
use crate::runtime::lock;
use crate::wire;

/// The handles of all ranks.
#[derive(Debug)]
pub(crate) struct Handles {
    /// How many there are of each value, on all ranks.
    live: Mutex<HashMap<RefId, usize>>,
    /// Handles that were dropped, per rank: told in its next step.
    dropped: Vec<Mutex<Vec<RefId>>>,
}

impl Handles {
    pub(crate) fn new(ranks: u32) -> Arc<Self> {
        Arc::new(Handles {
            live: Mutex::default(),
            dropped: (0..ranks).map(|_| Mutex::default()).collect(),
        })
    }

    /// A handle that its rank has counted.
    pub(crate) fn handle(self: &Arc<Self>, rank: u32, id: RefId) -> Arc<Handle> {
        *lock(&self.live).entry(id).or_default() += 1;
        Arc::new(Handle {
            id,
            rank,
            all: Arc::clone(self),
        })
    }

    pub(crate) fn is_held(&self, id: RefId) -> bool {
        lock(&self.live).contains_key(&id)
    }

    pub(crate) fn take_dropped(&self, rank: u32) -> Vec<RefId> {
        std::mem::take(&mut *lock(&self.dropped[rank as usize]))
    }

    pub(crate) fn any_dropped(&self, rank: u32) -> bool {
        !lock(&self.dropped[rank as usize]).is_empty()
    }
}

/// A handle on one rank.
#[derive(Debug)]
pub(crate) struct Handle {
    id: RefId,
    rank: u32,
    all: Arc<Handles>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut live = lock(&self.all.live);
        if let Some(n) = live.get_mut(&self.id) {
            *n -= 1;
            if *n == 0 {
                live.remove(&self.id);
            }
        }
        drop(live);
        lock(&self.all.dropped[self.rank as usize]).push(self.id);
    }
}

/// A reference; all copies of one share a handle.
#[derive(Debug, Clone)]
pub(crate) struct Ref(pub Arc<Handle>);

impl Ref {
    pub(crate) fn id(&self) -> RefId {
        self.0.id
    }
}

impl Serialize for Ref {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !wire::put_reference(self.0.id, self.0.clone()) {
            return Err(S::Error::custom("not in a call"));
        }
        self.0.id.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Ref {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let id = RefId::deserialize(deserializer)?;
        let handle = wire::take_reference(id).and_then(|h| h.downcast::<Handle>().ok());
        handle
            .map(Ref)
            .ok_or_else(|| D::Error::custom("a reference that its message doesn't announce"))
    }
}

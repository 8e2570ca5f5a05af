//! What a test looks at inside a rank.

use super::*;

impl<V: Clone, P: Default> Rank<V, P> {
    /// The number of this rank's next request.
    pub(crate) fn next_request(&self) -> RequestId {
        self.next_request
    }

    /// Whether a request or a reply that waits here holds the reference.
    pub(crate) fn carries(&self, id: RefId) -> bool {
        self.incoming.values().any(|i| match &i.stage {
            Stage::Parked(_, parts) => parts.1.contains(&id),
            Stage::Queued(work) => matches!(&**work, Work::Call { refs, .. } if refs.contains(&id)),
            Stage::Held(held) => held.refs.contains(&id),
            Stage::Running(_) => false,
        })
    }

    /// The request whose sender keeps its turn here.
    pub(crate) fn kept_turn(&self) -> Option<TaskId> {
        self.turns.kept()
    }

    /// Tables, and the number of entries in each that stand for something alive.
    pub(crate) fn residue(&self) -> Vec<(&'static str, usize)> {
        let Counters {
            values,
            handles,
            requests,
            tasks,
            contexts,
            backwards,
        } = self.counters();
        vec![
            ("values", values),
            ("handles", handles),
            ("requests", requests),
            ("tasks", tasks),
            ("contexts", contexts),
            ("backwards", backwards),
            ("pins of replies", self.reply_pins.len()),
            ("registrations under way", self.registering.len()),
            ("confirmations due", self.confirming.len()),
            ("releases under way", self.releases.len()),
            ("queued", self.turns.len()),
            ("outstanding", self.outstanding.values().filter(|o| **o != (0, 0)).count()),
        ]
    }

    /// Entries of all tables, whatever they stand for.
    pub(crate) fn entries(&self) -> usize {
        let alive: usize = self.residue().iter().map(|r| r.1).sum();
        alive + self.outstanding.len() + self.contexts.entries() + self.refs.entries()
    }
}

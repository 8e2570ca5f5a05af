//! Is a backward still alive? Its root follows, from rank to rank, who waits for whom, and finds the rank that says nothing.
//!
//! A rank may work on its part for as long as it likes: what counts is that it answers a probe. The root asks the ranks it waits for; each
//! names those it waits for itself, and they are asked next. A rank that hasn't answered isn't asked again, so the time since it was asked is its silence.

use std::collections::BTreeMap;

use super::ids::ContextId;
use super::message::Message;
use super::{Instant, Rank};

/// Ranks that were asked in this round: since when an answer is due, or nothing if it has come.
#[derive(Debug, Default)]
pub(super) struct Probes(BTreeMap<u32, Option<Instant>>);

impl Probes {
    /// Begins a round; ranks that owe an answer stay asked.
    fn begin(&mut self) {
        self.0.retain(|_, due| due.is_some());
    }

    /// Whether a rank is to be asked now; notes that it is.
    fn ask(&mut self, rank: u32, now: Instant) -> bool {
        let fresh = !self.0.contains_key(&rank);
        self.0.entry(rank).or_insert(Some(now));
        fresh
    }

    fn heard(&mut self, rank: u32) {
        if let Some(due) = self.0.get_mut(&rank) {
            *due = None;
        }
    }

    /// The rank that has been silent for longest, and since when.
    fn silent(&self) -> Option<(u32, Instant)> {
        self.0
            .iter()
            .filter_map(|(rank, due)| Some((*rank, (*due)?)))
            .min_by_key(|(_, since)| *since)
    }
}

impl<V: Clone, P: Default> Rank<V, P> {
    /// Asks all that a backward of this rank waits for, over any number of ranks, for a sign of life.
    pub(crate) fn probe_backward(&mut self, context: ContextId) {
        if let Some(backward) = self.backwards.get_mut(&context) {
            backward.probes.begin();
            let waits = self.backward_waits_for(context);
            self.probe(context, &waits);
            self.settle_local();
        }
    }

    /// The rank that has owed a sign of life for longest, and since when.
    pub(crate) fn backward_silent(&self, context: ContextId) -> Option<(u32, Instant)> {
        self.backwards.get(&context)?.probes.silent()
    }

    /// A rank has given a sign of life.
    pub(super) fn backward_sign(&mut self, from: u32, context: ContextId, number: u32, waits: &[u32]) {
        if let Some(backward) = self.backwards.get_mut(&context).filter(|b| b.number() == number) {
            backward.probes.heard(from);
            self.probe(context, waits);
        }
    }

    fn probe(&mut self, context: ContextId, ranks: &[u32]) {
        let (me, size, now) = (self.me, self.size, self.now);
        let Some(backward) = self.backwards.get_mut(&context) else { return };
        let number = backward.number();
        let asked: Vec<u32> = ranks
            .iter()
            .copied()
            .filter(|&r| r != me && r < size && backward.probes.ask(r, now))
            .collect();
        for to in asked {
            self.send(to, Message::Probe { context, backward: number }, P::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::message::{Manner, Op, Part};
    use super::super::{Action, Window};
    use super::*;
    use crate::protocol::{CrossingId, Input, Output};

    type R = Rank<(), ()>;

    fn sent(rank: &mut R) -> Vec<(u32, Message)> {
        let sends = rank.take_actions().into_iter().filter_map(|action| match action {
            Action::Send { to, message, .. } => Some((to, message)),
            _ => None,
        });
        sends.collect()
    }

    /// Rank 0 waits for rank 1, and 1 for 2, which says nothing.
    #[test]
    fn the_silent_rank_is_found_two_hops_away() {
        let window = Window {
            requests: 8,
            bytes: 1 << 20,
        };
        let [mut root, mut middle]: [R; 2] = [0, 1].map(|me| Rank::new(me, 3, window));
        let context = root.open_context();
        middle.contexts.meet(context).unwrap();
        root.begin_backward(context, 1, Manner::default()).unwrap();
        assert!(
            matches!(&root.take_actions()[..], [Action::Engine { inputs, .. }] if inputs[..] == [Input::MarkRoots, Input::SeedIfKnown])
        );
        root.engine_done(
            context,
            Output {
                reached: vec![CrossingId::new(1, 1)],
                ..Output::default()
            },
        );
        let (to, mark) = sent(&mut root).remove(0);
        assert!(
            to == 1
                && matches!(
                    &mark,
                    Message::Request {
                        op: Op::Backward { part: Part::Mark(_), .. },
                        ..
                    }
                )
        );
        middle.receive(0, mark, ());
        middle.engine_done(
            context,
            Output {
                reached: vec![CrossingId::new(2, 1)],
                ..Output::default()
            },
        );
        assert_eq!(sent(&mut middle)[0].0, 2);

        assert_eq!(root.backward_silent(context), None);
        for second in 5..8 {
            root.set_now(Duration::from_secs(second));
            root.probe_backward(context);
            for (to, probe) in sent(&mut root) {
                if to == 1 {
                    middle.receive(0, probe, ());
                    for (_, sign) in sent(&mut middle) {
                        assert!(matches!(&sign, Message::Sign { waits, .. } if waits[..] == [2]), "{sign:?}");
                        root.receive(1, sign, ());
                    }
                    let onward = sent(&mut root);
                    assert_eq!(
                        onward.iter().map(|s| s.0).collect::<Vec<_>>(),
                        if second == 5 { vec![2] } else { vec![] }
                    );
                }
            }
            assert_eq!(root.backward_silent(context), Some((2, Duration::from_secs(5))));
        }
        root.receive(
            2,
            Message::Sign {
                context,
                backward: 1,
                waits: vec![],
            },
            (),
        );
        assert_eq!(root.backward_silent(context), None);
    }
}

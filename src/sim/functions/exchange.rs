//! Functions that get references: keep them, send them on, return them.

use std::sync::Arc;

use super::super::caller::{Arguments, Call, Caller};
use super::super::handle::Ref;
use super::super::node::{Body, Stored};
use super::super::program::{Exchange, Function};
use crate::protocol::{Gate, RefId};
use crate::rpc::Recorded;
use crate::{Error, Result};

impl Caller {
    pub(super) async fn exchange(&self, exchange: &Exchange, mut refs: Vec<Ref>, ids: Vec<RefId>) -> Result<Vec<Ref>> {
        for id in ids {
            self.sim.step(self.rank, |n| n.rank.attach(id));
            let mut world = self.sim.world();
            world.checks.count("a reference is attached by its id");
            let handle = world.handles.handle(self.rank, id);
            refs.push(Ref(handle));
        }
        self.work(exchange.micros).await;
        if exchange.fetches
            && let Some(first) = refs.first()
        {
            // What it is doesn't matter here, nor if it failed to be made; `fetch` checks that it is there.
            let fetched = self.fetch(first).await;
            drop(fetched);
        }
        if exchange.fails {
            self.sim.world().checks.count("a function fails with references in its hands");
            return Err(Error::user("this function always fails"));
        }
        let mut result: Vec<Ref> = Vec::new();
        if let Some(next) = &exchange.next {
            let to = self.sim.world().rank_at(next.place);
            let returned = self.send_exchange(to, next, &refs).await?;
            refs.extend(self.results(returned).await?.refs);
        }
        for (i, r) in refs.iter().enumerate() {
            if exchange.keeps >> (i % 8) & 1 == 1 {
                let mut world = self.sim.world();
                let node = &mut world.nodes[self.rank as usize];
                // A rank that is at its end drops it.
                if !node.rank.is_ending() {
                    node.kept.push(r.clone());
                }
            }
            if exchange.returns >> (i % 8) & 1 == 1 {
                result.push(r.clone());
            }
        }
        if exchange.nests {
            result.push(self.keep(Body::Refs(refs)));
        }
        Ok(result)
    }

    /// Keeps a value on this rank.
    pub(in super::super) fn keep(&self, body: Body) -> Ref {
        if matches!(body, Body::Refs(_)) {
            self.sim.world().checks.count("a value holds references");
        }
        let value = Stored::new(body);
        let kept = Arc::clone(&value);
        let id = self.sim.step(self.rank, |n| n.rank.keep(kept));
        let mut world = self.sim.world();
        if value.id.set(id).is_ok() {
            world.checks.made(id);
        }
        Ref(world.handles.handle(self.rank, id))
    }

    pub(in super::super) async fn send_exchange(&self, to: u32, exchange: &Exchange, refs: &[Ref]) -> Result<Call> {
        self.sim.world().checks.count("references are sent to a function");
        let ids: Vec<RefId> = refs.iter().map(Ref::id).collect();
        let arguments = if exchange.by_id {
            Arguments {
                ids: &ids,
                ..Default::default()
            }
        } else {
            Arguments {
                refs,
                ..Default::default()
            }
        };
        let function = Function::Exchange(exchange.clone());
        self.issue(to, &function, arguments, Gate::default(), Recorded::Never).await
    }
}

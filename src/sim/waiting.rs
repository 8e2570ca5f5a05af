//! Waiting: for room, for answers, for the end of a backward. Each asks after what it waits for, and gives up when it hears nothing.

use std::rc::Rc;
use std::time::Duration;

use super::caller::{Call, Caller};
use super::node::Slot;
use super::world::{ASK_AFTER, TIMEOUT, World};
use crate::protocol::{ContextId, Manner, Mode};
use crate::rpc::Recording;
use crate::tensor::Tensor;
use crate::wire::Delivered;
use crate::{Error, ErrorKind, Result};

impl Caller {
    /// Waits for room in the window, as `Runtime::wait_for_room` does.
    pub(super) async fn room(&self, to: u32, size: usize) -> Result<()> {
        let (sim, rank) = (&self.sim, self.rank);
        let open = |world: &mut World| world.nodes[rank as usize].rank.window_is_open(to, size).then_some(());
        if !self.windowed || to == rank || open(&mut sim.world()).is_some() {
            return Ok(());
        }
        let start = {
            let mut world = sim.world();
            world.checks.count("a window is full");
            world.now
        };
        let (mut oldest, mut heard, mut asked) = (None, start, start);
        loop {
            let end = |heard: Duration| self.limit.map_or(heard + TIMEOUT, |l| start + l);
            let ask = asked.max(heard) + ASK_AFTER;
            if sim.until(rank, None, Some(end(heard).min(ask)), open).await.is_some() {
                return Ok(());
            }
            let (now, found) = {
                let world = sim.world();
                let node = &world.nodes[rank as usize];
                let found = node.rank.fills_window(to);
                let word = found.and_then(|id| node.waiting.get(&id)?.heard.get());
                heard = if found == oldest {
                    heard.max(word.unwrap_or(start))
                } else {
                    world.now
                };
                (world.now, found)
            };
            oldest = found;
            if now >= end(heard) {
                return Err(self.timed_out("room in a window", to));
            }
            if now >= ask {
                asked = now;
                if let Some(request) = found {
                    sim.step(rank, |n| n.rank.query(request));
                }
            }
        }
    }

    /// Waits for an answer; asks after it, and gives up when nothing is heard.
    pub(super) async fn wait(&self, call: Call) -> Result<Delivered> {
        let (sim, rank, slot) = (&self.sim, self.rank, &call.slot);
        let mut asked: Option<Duration> = None;
        let reply = loop {
            let heard = slot.heard.get().unwrap_or(call.start);
            let ask = asked.unwrap_or(call.start).max(heard) + ASK_AFTER;
            let end = |heard: Duration| self.limit.map_or(heard + TIMEOUT, |l| call.start + l);
            let until = end(heard).min(ask);
            let done = sim.until(rank, Some(slot), Some(until), |_| slot.is_done().then_some(())).await;
            if done.is_some()
                && let Some(reply) = slot.take()
            {
                break reply;
            }
            let now = sim.world().now;
            if now >= end(slot.heard.get().unwrap_or(call.start)) {
                break Err(self.timed_out("a call", call.to));
            }
            if now >= ask {
                asked = Some(now);
                sim.step(rank, |n| n.rank.query(call.request));
            }
        };
        if reply.is_err()
            && let (Some(recorder), Some(sent)) = (&call.recorder, call.sent)
        {
            recorder.recording.unsend(sent);
        }
        reply
    }

    pub(super) fn timed_out(&self, operation: &str, to: u32) -> Error {
        let mut world = self.sim.world();
        world.checks.count("a wait times out");
        let (now, rank) = (world.now, self.rank);
        world
            .trace
            .note(|| format!("{now:>12.3?}  rank {rank} gives up on rank {to}: {operation}"));
        if !world.checks.lossy && !self.impatient {
            world
                .checks
                .violate(|| format!("rank {rank} gives up on rank {to} ({operation}), though nothing is lost"));
        }
        ErrorKind::Timeout {
            operation: operation.into(),
            rank: to,
            seconds: 0.0,
            status: String::new(),
        }
        .into()
    }

    /// Runs a backward of one of this rank's contexts, as `Runtime::backward` does.
    pub(super) async fn backward(&self, recording: &Recording, number: u32, mode: Mode, retain: bool, roots: Vec<Tensor>) -> Result<()> {
        let (sim, rank, context): (_, _, ContextId) = (&self.sim, self.rank, recording.id);
        let manner = Manner {
            mode,
            retain_graph: retain,
        };
        let slot = Slot::new();
        let waiting = Rc::clone(&slot);
        sim.step(rank, |n| {
            n.rank.begin_backward(context, number, manner)?;
            n.backwards.insert(context, waiting);
            Ok::<(), Error>(())
        })?;
        // The engine begins in another job.
        recording.set_roots(roots);
        let start = sim.world().now;
        let mut asked = start;
        let mut committing = None;
        loop {
            let next = asked + ASK_AFTER;
            let silent = sim.world().nodes[rank as usize].rank.backward_silent(context);
            let lost = silent.map(|(_, since)| since + TIMEOUT - ASK_AFTER);
            let end = committing.or_else(|| self.limit.map(|l| start + l).into_iter().chain(lost).min());
            let until = end.map_or(next, |e| e.min(next));
            let done = sim.until(rank, Some(&slot), Some(until), |_| slot.is_done().then_some(())).await;
            if done.is_some() {
                return slot.take().map_or(Ok(()), |reply| reply.map(drop));
            }
            let now = sim.world().now;
            if end.is_some_and(|e| now >= e) {
                let error = self.timed_out("backward", silent.map_or(rank, |s| s.0));
                let abandoned = error.clone();
                let in_time = sim.step(rank, |n| n.rank.abandon_backward(context, abandoned));
                if in_time || committing.is_some() {
                    sim.world().nodes[rank as usize].backwards.remove(&context);
                    return Err(error);
                }
                sim.world().checks.count("a backward is given up too late");
                committing = Some(now + TIMEOUT);
                continue;
            }
            if now >= next {
                asked = now;
                sim.world().checks.count("a backward is asked after");
                sim.step(rank, |n| n.rank.probe_backward(context));
            }
        }
    }
}

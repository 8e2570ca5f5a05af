//! Feeds the state machine of a rank and carries out what comes of it, as `runtime` does.

use std::sync::Arc;

use super::events::{Event, Frame};
use super::functions;
use super::node::{Body, Node, Slot, Value};
use super::program::Fault;
use super::trace::shown;
use super::world::{Sim, World};
use crate::mutant::{self, Mutant};
use crate::protocol::{Action, ContextId, Input, Message, Op, RefId, TaskId, Turn, Work};
use crate::rpc::Recording;
use crate::tensor::Data;
use crate::wire::{self, Delivered, Payload};
use crate::{Error, ErrorKind, Result};

/// A task, and what keeps its references alive.
type Begun = (TaskId, Work<Value, Payload>, Vec<(RefId, wire::Handle)>);

/// What a step leaves to do without the world.
#[derive(Default)]
struct After {
    values: Vec<Value>,
    forgotten: Vec<Arc<Recording>>,
    replies: Vec<Result<Delivered>>,
    tasks: Vec<Begun>,
    engines: Vec<(ContextId, bool, Vec<Input<Payload>>)>,
}

impl Sim {
    /// Lets an event happen to a rank, and carries out what comes of it.
    pub(super) fn step<R>(&self, rank: u32, event: impl FnOnce(&mut Node) -> R) -> R {
        let mut after = After::default();
        let result = {
            let mut world = self.world();
            let world = &mut *world;
            let now = world.now;
            world.tell_dropped(rank);
            let node = &mut world.nodes[rank as usize];
            node.rank.set_now(now);
            let result = event(node);
            let actions = node.rank.take_actions();
            for action in actions {
                world.carry_out(rank, action, &mut after);
            }
            if world.nodes[rank as usize].rank.is_ending() {
                world.tell_dropped(rank);
                for action in world.nodes[rank as usize].rank.take_actions() {
                    world.carry_out(rank, action, &mut after);
                }
                let node = &mut world.nodes[rank as usize];
                node.rank.advance_end(node.callbacks > 0);
                for action in node.rank.take_actions() {
                    world.carry_out(rank, action, &mut after);
                }
            }
            for job in std::mem::take(&mut world.nodes[rank as usize].waiters) {
                world.wake(rank, job);
            }
            result
        };
        self.settle(rank, after);
        result
    }

    fn settle(&self, rank: u32, after: After) {
        let After {
            values,
            forgotten,
            replies,
            tasks,
            engines,
        } = after;
        drop((values, replies));
        for recording in forgotten {
            recording.clear();
        }
        for (task, work, handles) in tasks {
            let path: Arc<[u32]> = match &work {
                Work::Call { context: Some(tag), .. } | Work::Encode { context: Some(tag), .. } => tag.path.clone().into(),
                _ => Arc::from([]),
            };
            self.spawn(rank, path, functions::task(self.clone(), rank, task, work, handles));
        }
        for (context, retain, inputs) in engines {
            let sim = self.clone();
            self.spawn_loose(rank, async move {
                sim.pause(rank).await;
                let recording = sim.world().recording(rank, context);
                let output = recording.work(retain, inputs);
                sim.pause(rank).await;
                if output.committed {
                    sim.world().checks.count("a rank commits at once");
                }
                sim.step(rank, |n| n.rank.engine_done(context, output));
            });
        }
        self.poll_soon(rank);
    }

    /// A message arrives.
    pub(super) fn deliver(&self, frame: Frame) {
        let Frame {
            from,
            to,
            header,
            segments,
            ..
        } = frame;
        let size: usize = segments.iter().map(Data::bytes).sum();
        let (message, payload) = match wire::parse_header(header, segments) {
            Ok(parsed) => parsed,
            Err(e) => return self.world().checks.violate(|| format!("a header can't be read: {e}")),
        };
        let limit = {
            let mut world = self.world();
            let world = &mut *world;
            world
                .trace
                .note(|| format!("{:>12.3?}  {to} <- {from}  {}", world.now, shown(&message)));
            if let Message::Request { id, op, .. } = &message {
                world.expect(to, TaskId { from, request: *id }, op);
            }
            world.memory.filter(|&limit| size > limit)
        };
        let Some(limit) = limit else {
            let context = match &message {
                Message::Request {
                    op: Op::Call { context, .. } | Op::Fetch { context, .. },
                    ..
                } => context.as_ref().map(|t| t.context),
                _ => None,
            };
            let knows = self.step(to, |n| {
                n.rank.receive(from, message, payload);
                context.filter(|&c| n.rank.check_context("", c).is_ok())
            });
            if let Some(context) = knows {
                self.world().checks.meets(to, context);
            }
            return;
        };
        self.world().checks.count("a message over the memory limit");
        let error: Error = ErrorKind::TooLarge {
            operation: "message".into(),
            from,
            bytes: size as u64,
            limit: limit as u64,
        }
        .into();
        match message {
            Message::Request { id, op, refs } => self.step(to, |n| n.rank.refuse_request(from, id, op, refs, error)),
            Message::Reply { id, answer, refs, .. } => {
                let outcome = Err(error);
                let payload = Payload {
                    segments: Vec::new(),
                    ..payload
                };
                self.step(to, |n| n.rank.receive(from, Message::Reply { id, answer, outcome, refs }, payload));
            }
            other => self.step(to, |n| n.rank.receive(from, other, Payload::default())),
        }
    }
}

impl World {
    /// The recording of a context, new if the rank hasn't met it. That of a released one isn't kept.
    pub(super) fn recording(&mut self, rank: u32, context: ContextId) -> Arc<Recording> {
        let node = &mut self.nodes[rank as usize];
        if node.rank.check_context("recording", context).is_err() {
            return node.recordings.remove(&context).unwrap_or_else(|| Recording::new(context, rank));
        }
        Arc::clone(node.recordings.entry(context).or_insert_with(|| Recording::new(context, rank)))
    }

    pub(super) fn custody(&self, rank: u32, refs: &[RefId]) -> Vec<(RefId, wire::Handle)> {
        refs.iter().map(|&id| (id, self.handles.handle(rank, id) as wire::Handle)).collect()
    }

    /// Tells the state machine which handles were dropped.
    fn tell_dropped(&mut self, rank: u32) {
        for id in self.handles.take_dropped(rank) {
            self.nodes[rank as usize].rank.drop_handle(id);
        }
    }

    fn complete(&mut self, rank: u32, slot: &Slot, reply: Result<Delivered>) {
        *slot.reply.borrow_mut() = Some(reply);
        if let Some(job) = slot.job.take() {
            self.wake(rank, job);
        }
    }

    fn carry_out(&mut self, rank: u32, action: Action<Value, Payload>, after: &mut After) {
        match action {
            Action::Send { to, message, payload } => self.send(rank, to, &message, payload),
            Action::Run { task, work } => {
                let handles = match &work {
                    Work::Call { refs, .. } => self.custody(rank, refs),
                    Work::Encode { .. } => Vec::new(),
                };
                self.check_gate(rank, task);
                let node = &mut self.nodes[rank as usize];
                let turn = node.turns.get(&task).copied().unwrap_or_default();
                self.checks.runs(rank, (task, turn), &work, &mut node.arrivals);
                after.tasks.push((task, work, handles));
            }
            Action::Engine {
                context,
                retain_graph,
                inputs,
            } => {
                self.checks.engine(rank, context, &inputs);
                after.engines.push((context, retain_graph, inputs));
            }
            Action::Answered {
                request,
                answer,
                outcome,
                refs,
                from,
            } => {
                let handles = self.custody(rank, &refs);
                let crossing = answer.crossing;
                let reply = outcome.map(|payload| Delivered {
                    payload,
                    handles,
                    crossing,
                });
                match self.nodes[rank as usize].waiting.remove(&request) {
                    Some(slot) => {
                        self.complete(rank, &slot, reply);
                    }
                    None => {
                        self.checks
                            .violate(|| format!("rank {rank}: rank {from} answered request {request} once more, or it was never made"));
                        after.replies.push(reply);
                    }
                }
            }
            Action::BackwardDone { context, result } => {
                if let Some(slot) = self.nodes[rank as usize].backwards.remove(&context) {
                    self.complete(rank, &slot, result.map(|()| Delivered::default()));
                }
            }
            Action::Forget { context } => {
                self.checks.forgets(rank, context);
                after.forgotten.extend(self.nodes[rank as usize].recordings.remove(&context));
            }
            Action::Garbage { values } => {
                for value in &values {
                    self.check_freed(rank, value);
                }
                if values.iter().any(|v| matches!(v.body, Body::Refs(_))) {
                    self.nodes[rank as usize].callbacks += 1;
                    let at = self.clock(rank) + self.delay(rank);
                    self.schedule(at, Event::Callback { rank, values });
                } else {
                    after.values.extend(values);
                }
            }
            Action::Report { request, status } => {
                self.checks.count("a request is asked after");
                if let Some(slot) = self.nodes[rank as usize].waiting.get(&request)
                    && status.is_sign_of_life()
                {
                    slot.heard.set(Some(self.now));
                }
            }
            Action::Led { .. } => self.nodes[rank as usize].led = true,
            Action::Ended { last } => {
                let node = &mut self.nodes[rank as usize];
                node.ended += 1;
                node.at_last = last;
                self.check_ended(rank, last);
            }
        }
    }

    fn send(&mut self, from: u32, to: u32, message: &Message, mut payload: Payload) {
        let mut header = Vec::new();
        if let Err(e) = wire::header(message, &mut payload, &mut header) {
            return self.checks.violate(|| format!("rank {from}: a message can't be encoded: {e}"));
        }
        let refs = match message {
            Message::Request { refs, .. } | Message::Reply { refs, .. } => refs.clone(),
            _ => Vec::new(),
        };
        self.checks.sends(from, to, message);
        let round = self.nodes[from as usize].round + 1;
        let segments = payload.segments;
        let mut copies = 1;
        if let Message::Reply { id, .. } = message {
            self.replies += 1;
            for fault in &self.faults {
                match *fault {
                    Fault::DropReplies { every } if self.replies.is_multiple_of(every) => {
                        self.trace
                            .note(|| format!("{:>12.3?}  the reply of {from} to {to}'s request {id} is lost", self.now));
                        self.checks.count("a reply is lost");
                        copies = 0;
                    }
                    Fault::DuplicateReplies { every } if self.replies.is_multiple_of(every) => {
                        self.checks.count("a reply comes twice");
                        copies = 2;
                    }
                    _ => {}
                }
            }
        }
        if mutant::is(Mutant::RequestTwice)
            && matches!(message, Message::Request { op: Op::Call { gate, .. }, .. } if gate.turn != Turn::None)
        {
            copies = 2;
        }
        for copy in 0..copies {
            self.post(Frame {
                from,
                to,
                header: header.clone(),
                segments: segments.clone(),
                // What comes twice is there once.
                refs: if copy == 0 { refs.clone() } else { Vec::new() },
                round,
                again: copy > 0,
            });
        }
    }
}

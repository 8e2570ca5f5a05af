//! Issuing calls, as `rpc` and `runtime` do.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::handle::Ref;
use super::node::{Slot, Value};
use super::program::Function;
use super::world::{Sim, World};
use crate::protocol::{ContextId, CrossingId, Gate, Op, RefId, RequestId, Tag, TaskId, Turn};
use crate::rpc::{Frame, Recorded, Recorder, Recording};
use crate::tensor::Tensor;
use crate::wire::{self, Encoded, Payload};
use crate::{Error, ErrorKind, Result};

/// What goes along with a call.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arguments<'a> {
    pub tensors: &'a [Tensor],
    pub refs: &'a [Ref],
    /// References by id alone.
    pub ids: &'a [RefId],
}

/// The gate of a function that reads or changes the gradients of a context.
pub(super) fn gate(queued: bool, context: ContextId) -> Gate {
    Gate {
        turn: if queued { Turn::Take } else { Turn::None },
        gradients_of: Some(context),
    }
}

/// What comes back.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Results {
    pub tensors: Vec<Tensor>,
    pub refs: Vec<Ref>,
}

/// Where calls come from.
#[derive(Clone)]
pub(super) struct Caller {
    pub sim: Sim,
    pub rank: u32,
    pub recorder: Option<Recorder>,
    pub limit: Option<Duration>,
    /// A client's calls count for the window to their receiver.
    pub windowed: bool,
    /// It may give up though nothing is lost.
    pub impatient: bool,
}

/// A request on its way.
pub(super) struct Call {
    pub slot: Rc<Slot>,
    pub request: RequestId,
    pub to: u32,
    pub start: Duration,
    pub recorder: Option<Recorder>,
    pub sent: Option<CrossingId>,
}

impl Caller {
    /// Calls a function on a rank.
    pub(super) async fn issue(
        &self,
        to: u32,
        function: &Function,
        arguments: Arguments<'_>,
        gate: Gate,
        recorded: Recorded,
    ) -> Result<Call> {
        let (mut encoded, context) = self.encode(function, arguments, recorded)?;
        let sent = context.as_ref().and_then(|t| t.crossing);
        let op = Op::Call {
            function: 0,
            create: None,
            context,
            gate,
        };
        let size = encoded.payload.size();
        self.room(to, size).await?;
        let (refs, payload) = (std::mem::take(&mut encoded.refs), std::mem::take(&mut encoded.payload));
        let window = self.windowed.then_some(size);
        Ok(self.send(to, op, refs, payload, window, sent))
    }

    /// Calls a function that makes a value on a rank; the reference to it is there at once.
    pub(super) async fn create(&self, to: u32, function: &Function, refs: &[Ref]) -> Result<Ref> {
        let arguments = Arguments {
            refs,
            ..Default::default()
        };
        let (mut encoded, context) = self.encode(function, arguments, Recorded::WithGradients)?;
        let size = encoded.payload.size();
        self.room(to, size).await?;
        let (refs, payload) = (std::mem::take(&mut encoded.refs), std::mem::take(&mut encoded.payload));
        let window = self.windowed.then_some(size);
        let slot = Slot::new();
        // In the step that sends: creations leave in the order of their ids.
        let (request, id) = self.sim.step(self.rank, |node| {
            let id = node.rank.allocate(to);
            let op = Op::Call {
                function: 0,
                create: Some(id.value),
                context,
                gate: Gate::default(),
            };
            let request = node.rank.request(to, op, refs, payload, window);
            node.waiting.insert(request, slot);
            (request, id)
        });
        let mut world = self.sim.world();
        world.creating.insert(TaskId { from: self.rank, request }, id);
        Ok(Ref(world.handles.handle(self.rank, id)))
    }

    /// Asks for a value.
    pub(super) async fn fetch(&self, of: &Ref) -> Result<Results> {
        let call = self.send_fetch(of.id()).await?;
        let results = self.results(call).await;
        if let Err(error) = &results
            && matches!(error.root(), ErrorKind::NoSuchValue { .. })
        {
            let (id, rank) = (of.id(), self.rank);
            self.sim.world().checks.violate(|| {
                format!(
                    "rank {rank} holds value {} of rank {}, and can't fetch it: {error}",
                    id.value, id.owner
                )
            });
        }
        results
    }

    async fn send_fetch(&self, id: RefId) -> Result<Call> {
        let mut encoded = Encoded::default();
        let context = self.tag(Recorded::WithGradients, &mut encoded)?;
        let op = Op::Fetch { value: id.value, context };
        self.room(id.owner, 0).await?;
        let window = self.windowed.then_some(0);
        Ok(self.send(id.owner, op, Vec::new(), Payload::default(), window, None))
    }

    /// A value of this rank, once it is made.
    pub(super) async fn local(&self, of: &Ref) -> Result<Value> {
        let (rank, value) = (self.rank, of.id().value);
        let look = |world: &mut World| world.nodes[rank as usize].rank.lookup("local", value).transpose();
        self.sim
            .until(rank, None, None, look)
            .await
            .unwrap_or_else(|| Err(Error::user("no value")))
    }

    fn records(&self) -> bool {
        self.recorder.is_some()
    }

    fn encode(&self, function: &Function, arguments: Arguments<'_>, recorded: Recorded) -> Result<(Encoded, Option<Box<Tag>>)> {
        let Arguments { tensors, refs, ids } = arguments;
        let mut encoded = wire::encode(recorded != Recorded::Never && self.records(), |bytes| {
            wire::write(&(function, tensors, refs, ids), bytes)
        })?;
        let tag = self.tag(recorded, &mut encoded)?;
        Ok((encoded, tag))
    }

    fn tag(&self, recorded: Recorded, encoded: &mut Encoded) -> Result<Option<Box<Tag>>> {
        let Some(recorder) = self.recorder.as_ref().filter(|_| recorded != Recorded::Never) else {
            return Ok(None);
        };
        let context = recorder.recording.id;
        let low = {
            let mut world = self.sim.world();
            let rank = &world.nodes[self.rank as usize].rank;
            rank.check_context("call", context)?;
            let low = if context.rank() == self.rank { rank.context_low() } else { 0 };
            world.checks.count("a recorded call");
            low
        };
        let crossing = self.note(recorder, encoded);
        Ok(Some(Box::new(Tag {
            context,
            low,
            path: recorder.frame.next_path(),
            crossing,
        })))
    }

    fn note(&self, recorder: &Recorder, encoded: &mut Encoded) -> Option<CrossingId> {
        let edges = std::mem::take(&mut encoded.edges);
        (!edges.is_empty()).then(|| recorder.recording.send(edges, "a call".into()))
    }

    /// Encodes what a function gives back.
    pub(super) fn encode_results(&self, results: &impl Serialize) -> Result<(Encoded, Option<CrossingId>)> {
        let mut encoded = wire::encode(self.records(), |bytes| wire::write(results, bytes))?;
        let crossing = self.recorder.as_ref().and_then(|r| self.note(r, &mut encoded));
        Ok((encoded, crossing))
    }

    fn send(&self, to: u32, op: Op, refs: Vec<RefId>, payload: Payload, window: Option<usize>, sent: Option<CrossingId>) -> Call {
        let (slot, from) = (Slot::new(), self.rank);
        let waiting = Rc::clone(&slot);
        if to == from {
            let mut world = self.sim.world();
            let request = world.nodes[from as usize].rank.next_request();
            world.expect(from, TaskId { from, request }, &op);
        }
        let request = self.sim.step(from, |node| {
            let request = node.rank.request(to, op, refs, payload, window);
            node.waiting.insert(request, waiting);
            request
        });
        self.call(request, to, slot, sent)
    }

    fn call(&self, request: RequestId, to: u32, slot: Rc<Slot>, sent: Option<CrossingId>) -> Call {
        Call {
            slot,
            request,
            to,
            start: self.sim.world().now,
            recorder: self.recorder.clone(),
            sent,
        }
    }

    pub(super) async fn results(&self, call: Call) -> Result<Results> {
        self.wait(call).await?.decode()
    }

    /// Waits for all, then says which failed first.
    pub(super) async fn all(&self, calls: Vec<Result<Call>>) -> Result<Vec<(u32, Results)>> {
        let (mut results, mut failure) = (Vec::new(), None);
        for call in calls {
            let outcome = match call {
                Ok(call) => {
                    let to = call.to;
                    self.results(call).await.map(|r| (to, r))
                }
                Err(e) => Err(e),
            };
            match outcome {
                Ok(result) => results.push(result),
                Err(e) => failure = failure.or(Some(e)),
            }
        }
        failure.map_or(Ok(results), Err)
    }

    /// The same, in a frame of a context.
    pub(super) fn recording(&self, recording: Arc<Recording>, path: Vec<u32>) -> Caller {
        Caller {
            recorder: Some(Recorder {
                recording,
                frame: Frame::new(path),
            }),
            ..self.clone()
        }
    }

    /// Releases a context everywhere; the call's answer says that all ranks have.
    pub(super) fn release(&self, context: ContextId) -> Call {
        let slot = Slot::new();
        let waiting = Rc::clone(&slot);
        let request = self.sim.step(self.rank, |n| {
            let request = n.rank.release_context(context);
            n.waiting.insert(request, waiting);
            request
        });
        self.call(request, self.rank, slot, None)
    }
}

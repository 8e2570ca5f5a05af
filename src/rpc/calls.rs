//! Issuing calls: the methods that a [`World`](crate::World), a [`Context`](crate::Context) and a [`Scope`] share.

use std::any::type_name;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::On;
#[cfg(doc)]
use super::Scope;
use super::arguments::Arguments;
use super::future::Future;
use super::recording::Recorder;
use super::registry::Remote;
use super::stored::{Stored, into_value, stored};
use crate::autograd::grad_enabled;
use crate::protocol::{CrossingId, Gate, Op, RefId, RequestId, Tag};
use crate::rref::{Fetch, Handle, RRef};
use crate::runtime::{Limit, Reply, Request, Requested, Room, Runtime, Slot, Waiting, Windowed, no_answer};
use crate::tensor::{Data, Element, Tensor};
use crate::wire::{self, Delivered, Encoded};
use crate::{Error, ErrorKind, Result};

/// Where calls come from: a rank, with or without a context that records them, and how long they may take.
#[derive(Debug, Clone)]
pub struct Caller {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) recorder: Option<Recorder>,
    pub(crate) window: Windowed,
    pub(crate) limit: Option<Duration>,
}

/// A request on its way, and what it takes to understand its answer.
#[derive(Debug)]
pub(crate) struct Call {
    pub runtime: Arc<Runtime>,
    pub slot: Arc<Slot>,
    pub request: RequestId,
    pub to: u32,
    pub operation: &'static str,
    pub limit: Option<Limit>,
    /// The value that it creates, with one handle that the issuer takes over.
    pub created: Option<RefId>,
    recorder: Option<Recorder>,
    sent: Option<CrossingId>,
}

/// A call of a function to be sent.
pub(crate) struct Issue {
    pub to: u32,
    pub function: u32,
    pub name: &'static str,
    pub creates: bool,
    pub gate: Gate,
    pub recorded: Recorded,
    pub manner: Manner,
}

/// Whether the context takes note of a call, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recorded {
    Never,
    /// Where gradients are recorded: not under `no_grad`.
    WithGradients,
    /// The callee must know the context, whatever is recorded.
    Always,
}

/// How the issuer of a call waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// For the answer, at once.
    Waits,
    /// Perhaps later.
    Goes,
    /// Not even for room in the window.
    Tries,
}

impl Caller {
    #[inline]
    fn window(&self, manner: Manner) -> Windowed {
        match self.window {
            Windowed::Bypass => Windowed::Bypass,
            // Inside of a remote function, whatever the call comes from: nested calls must not wait for each other.
            _ if crate::runtime::failure::is_catching() => Windowed::Bypass,
            _ if manner == Manner::Tries => Windowed::Refuse,
            other => other,
        }
    }

    /// The mark of the context on a message that takes `encoded` along; notes the tensors that leave.
    #[inline]
    fn tag(&self, recorded: Recorded, encoded: &mut Encoded, name: impl FnOnce() -> String) -> Result<Option<Box<Tag>>> {
        let noted = match recorded {
            Recorded::Never => false,
            Recorded::WithGradients => grad_enabled(),
            Recorded::Always => true,
        };
        let Some(recorder) = self.recorder.as_ref().filter(|_| noted) else {
            return Ok(None);
        };
        let context = recorder.recording.id;
        self.runtime.check_context("call", context)?;
        let crossing = self.note(recorder, encoded, name);
        let low = if context.rank() == self.runtime.rank() {
            self.runtime.context_low()
        } else {
            0
        };
        Ok(Some(Box::new(Tag {
            context,
            low,
            path: recorder.frame.next_path(),
            crossing,
        })))
    }

    #[inline]
    fn note(&self, recorder: &Recorder, encoded: &mut Encoded, name: impl FnOnce() -> String) -> Option<CrossingId> {
        if encoded.edges.is_empty() {
            return None;
        }
        Some(recorder.recording.send(std::mem::take(&mut encoded.edges), name()))
    }

    #[inline]
    fn records(&self) -> bool {
        self.recorder.is_some() && grad_enabled()
    }

    #[inline]
    fn send(&self, to: u32, op: Op, encoded: Encoded, operation: &'static str, manner: Manner, creates: bool) -> Result<Call> {
        let sent = match &op {
            Op::Call { context: Some(tag), .. } | Op::Fetch { context: Some(tag), .. } => tag.crossing,
            _ => None,
        };
        let limit = self.limit.map(Limit::from_now);
        // With a limit, a call to oneself must be left to another thread: this one must come back in time.
        let (window, waits) = (self.window(manner), manner == Manner::Waits && limit.is_none());
        let request = Request {
            to,
            op,
            encoded,
            window,
            operation,
            waits,
            limit,
            creates,
        };
        let Requested { id, slot, created } = self.runtime.request(request).inspect_err(|_| self.unsend(sent))?;
        Ok(Call {
            runtime: Arc::clone(&self.runtime),
            slot,
            request: id,
            created,
            to,
            operation,
            limit,
            recorder: self.recorder.clone(),
            sent,
        })
    }

    fn unsend(&self, sent: Option<CrossingId>) {
        if let (Some(recorder), Some(id)) = (&self.recorder, sent) {
            recorder.recording.unsend(id);
        }
    }

    /// Sends a call whose arguments `write` encodes.
    pub(crate) fn issue(&self, issue: Issue, write: impl FnOnce(&mut Vec<u8>) -> Result<()>) -> Result<Call> {
        let Issue {
            to,
            function,
            name,
            creates,
            gate,
            recorded,
            manner,
        } = issue;
        let mut encoded = wire::encode(recorded != Recorded::Never && self.records(), write)?;
        let context = self.tag(recorded, &mut encoded, || format!("{name} on rank {to} (arguments)"))?;
        let create = None; // set as it is sent, if it creates
        let op = Op::Call {
            function,
            create,
            context,
            gate,
        };
        self.send(to, op, encoded, name, manner, creates)
    }

    fn invoke<A, R>(&self, to: u32, f: Remote<A, R>, write: impl FnOnce(&mut Vec<u8>) -> Result<()>, manner: Manner) -> Result<Call> {
        let issue = Issue {
            to,
            function: f.id()?,
            name: f.name(),
            creates: false,
            gate: Gate::default(),
            recorded: Recorded::WithGradients,
            manner,
        };
        self.issue(issue, write)
    }

    /// Encodes the result of a function that this caller's scope ran, as an answer to `to`.
    #[inline]
    pub(crate) fn encode_result(
        &self,
        to: u32,
        name: &str,
        encode: impl FnOnce(bool) -> Result<Encoded>,
    ) -> Result<(Encoded, Option<CrossingId>)> {
        let mut encoded = encode(self.records())?;
        let crossing = match &self.recorder {
            Some(recorder) if self.records() => self.note(recorder, &mut encoded, || {
                format!("{name} on rank {} (result for rank {to})", self.runtime.rank())
            }),
            _ => None,
        };
        Ok((encoded, crossing))
    }
}

impl Call {
    #[inline]
    fn waiting(&self) -> Waiting {
        Waiting {
            request: self.request,
            to: self.to,
            operation: self.operation,
            limit: self.limit,
        }
    }

    #[inline]
    pub(crate) fn wait(&self) -> Result<Reply> {
        self.runtime.wait(&self.slot, &self.waiting())
    }

    /// As [`wait`](Self::wait), with room for a large tensor of the answer; whether that was used.
    fn wait_into(&self, room: Room<'_>) -> (Result<Reply>, bool) {
        self.runtime.wait_into(&self.slot, &self.waiting(), room)
    }

    /// Waits until the answer is there, and leaves it; or until `stop`.
    pub(crate) fn wait_unless(&self, stop: &dyn Fn() -> bool) -> Result<()> {
        self.runtime.wait_unless(&self.slot, &self.waiting(), stop)
    }

    /// The payload of an answer, or the owner's error with its rank.
    #[inline]
    pub(crate) fn delivered(&self, reply: Reply) -> Result<Delivered> {
        reply.map_err(|source| failed(source, self.to, self.operation, self.recorder.as_ref().zip(self.sent)))
    }

    pub(crate) fn decode<T: DeserializeOwned>(&self, reply: Reply) -> Result<T> {
        self.delivered(reply)?.decode()
    }

    /// The result. Blocks until it is there.
    pub(crate) fn result<T: DeserializeOwned>(self) -> Result<T> {
        self.wait_unless(&|| false)?;
        match Slot::into_reply(self.slot) {
            Some(Ok(delivered)) => delivered.decode(),
            Some(Err(source)) => Err(failed(source, self.to, self.operation, self.recorder.as_ref().zip(self.sent))),
            None => Err(no_answer(self.operation)),
        }
    }
}

/// The error of a call, with the rank it comes from; `sent` is what went along with gradients to come.
#[cold]
fn failed(source: Error, to: u32, operation: &str, sent: Option<(&Recorder, CrossingId)>) -> Error {
    if let Some((recorder, id)) = sent {
        recorder.recording.unsend(id);
    }
    match source.kind() {
        ErrorKind::TooLarge { .. }
        | ErrorKind::ContextReleased { .. }
        | ErrorKind::BackwardInFlight { .. }
        | ErrorKind::NoSuchValue { .. } => source,
        ErrorKind::Creation { .. } | ErrorKind::Panic { .. } => source,
        _ => ErrorKind::Remote {
            rank: to,
            operation: operation.into(),
            source,
        }
        .into(),
    }
}

/// Decodes a fetched value, whose type stands in front.
pub(crate) fn decode_value<T: DeserializeOwned>(mut delivered: Delivered, id: RefId) -> Result<T> {
    let (found, rest) =
        postcard::take_from_bytes::<String>(&delivered.payload.bytes).map_err(|e| wire::decode_error(format!("type of a value: {e}")))?;
    if found != type_name::<T>() {
        return Err(wrong_type::<T>("fetch", id, &found));
    }
    delivered.payload.bytes = rest.to_vec();
    delivered.decode()
}

fn wrong_type<T: ?Sized>(operation: &str, id: RefId, found: &str) -> Error {
    ErrorKind::WrongType {
        operation: operation.into(),
        owner: id.owner,
        id: id.value.to_string(),
        expected: type_name::<T>().into(),
        found: found.into(),
    }
    .into()
}

/// Issuing calls. A [`World`](crate::World) issues plain calls, a [`Context`](crate::Context) records them, a [`Scope`] does what its own call did.
///
/// Every call is targeted: it needs nothing of any rank but the one it goes to. A call to the own rank takes a short way and means the same:
/// arguments and results are values, not shared.
pub trait Calls {
    /// Where the calls come from.
    fn caller(&self) -> &Caller;

    /// This rank. Local.
    fn rank(&self) -> u32 {
        self.caller().runtime.rank()
    }

    /// Number of ranks. Local.
    fn size(&self) -> u32 {
        self.caller().runtime.size()
    }

    /// The same, but each call may take at most `limit` in total, from its issue. Local.
    fn timeout(&self, limit: Duration) -> Caller {
        Caller {
            limit: Some(limit),
            ..self.caller().clone()
        }
    }

    /// Runs a function on a rank and returns its result. Targeted; blocks until the answer is there.
    ///
    /// # Errors
    /// What the function returned, as [`ErrorKind::Remote`]; [`ErrorKind::Panic`] if it panicked; [`ErrorKind::Timeout`] without a sign of life for the
    /// default time; [`ErrorKind::UnknownRank`]; [`ErrorKind::ContextReleased`]; [`ErrorKind::ShutDown`] after `finish`.
    fn call<A, R: DeserializeOwned>(&self, to: u32, f: impl FnOnce() -> Remote<A, R>, arguments: impl Arguments<A>) -> Result<R> {
        self.caller()
            .invoke(to, f(), |bytes| arguments.encode(bytes), Manner::Waits)?
            .result()
    }

    /// Runs a function on a rank; the future gives its result. Targeted; blocks only while the window to the rank is full.
    ///
    /// # Errors
    /// As [`call`](Self::call), at once for what is known at once.
    fn call_async<A, R: DeserializeOwned>(
        &self,
        to: u32,
        f: impl FnOnce() -> Remote<A, R>,
        arguments: impl Arguments<A>,
    ) -> Result<Future<R>> {
        Ok(Future::of_call(self.caller().invoke(
            to,
            f(),
            |bytes| arguments.encode(bytes),
            Manner::Goes,
        )?))
    }

    /// As [`call_async`](Self::call_async), but never blocks.
    ///
    /// # Errors
    /// [`ErrorKind::WindowFull`] if the window to the rank is full: wait for an answer first.
    fn try_call<A, R: DeserializeOwned>(
        &self,
        to: u32,
        f: impl FnOnce() -> Remote<A, R>,
        arguments: impl Arguments<A>,
    ) -> Result<Future<R>> {
        Ok(Future::of_call(self.caller().invoke(
            to,
            f(),
            |bytes| arguments.encode(bytes),
            Manner::Tries,
        )?))
    }

    /// Runs a function on a rank and leaves its result there; the reference to it is there at once. Targeted; blocks only while the window is full.
    ///
    /// # Errors
    /// As [`call`](Self::call) for what is known at once. If the function fails, each use of the reference says so ([`ErrorKind::Creation`]).
    fn remote<A, R>(&self, to: u32, f: impl FnOnce() -> Remote<A, R>, arguments: impl Arguments<A>) -> Result<RRef<R>> {
        let (caller, f) = (self.caller(), f());
        let issue = Issue {
            to,
            function: f.id()?,
            name: f.name(),
            creates: true,
            gate: Gate::default(),
            recorded: Recorded::WithGradients,
            manner: Manner::Goes,
        };
        let call = caller.issue(issue, |bytes| arguments.encode(bytes))?;
        let id = call.created.ok_or_else(|| Error::user("a creating call without a value"))?;
        Ok(RRef::from_handle(Handle::new(&caller.runtime, id)))
    }

    /// Keeps a value on this rank and makes it referable. Local. Other ranks can fetch it.
    ///
    /// # Errors
    /// [`ErrorKind::ShutDown`] after `finish`.
    fn share<T: Fetch>(&self, value: T) -> Result<RRef<T>> {
        use super::stored::{Encodable as _, Probe};
        let encoder = Probe::<T>(std::marker::PhantomData).encoder();
        keep(self.caller(), Stored::new(value, encoder, None))
    }

    /// Keeps a value on this rank and makes it referable; it can't leave the rank, functions go to it. Local.
    ///
    /// # Errors
    /// [`ErrorKind::ShutDown`] after `finish`.
    fn share_object<T: Send + Sync + 'static>(&self, value: T) -> Result<RRef<T>> {
        keep(self.caller(), Stored::new(value, None, None))
    }

    /// A reference to a value whose owner and id are known. Targeted; doesn't wait. Whether there is such a value shows when it is used.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownRank`] if there is no such owner.
    fn attach<T>(&self, id: RefId) -> Result<RRef<T>> {
        let runtime = &self.caller().runtime;
        runtime.check_alive("attach")?;
        runtime.check_rank("attach", id.owner)?;
        runtime.attach(id)?;
        Ok(RRef::from_handle(Handle::new(runtime, id)))
    }

    /// A copy of the value of a reference. Targeted; blocks until it is there, also when it is still being made.
    /// Recorded by a context: the gradient of what is fetched goes back to the value.
    ///
    /// # Errors
    /// [`ErrorKind::Creation`] if the value failed to be made; [`ErrorKind::NoSuchValue`]; [`ErrorKind::WrongType`]; as [`call`](Self::call).
    fn fetch<T: Fetch>(&self, rref: &RRef<T>) -> Result<T> {
        let call = send_fetch(self.caller(), rref.id())?;
        let delivered = call.delivered(call.wait()?)?;
        decode_value(delivered, rref.id())
    }

    /// Fetches a tensor into the caller's memory: `view` has its shape and dtype. Targeted; blocks until it is there. Not recorded.
    ///
    /// A large tensor of numbers is received straight into a view in row-major order, without a copy of ours. Then a time limit bounds when it begins to arrive:
    /// MPI can't be stopped, so the call stays until it is there.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] or [`ErrorKind::DType`] if the view doesn't fit; as [`fetch`](Self::fetch). After another error than these two the view may have been written to.
    fn fetch_into<T: Element>(&self, rref: &RRef<Tensor>, mut view: ndarray::ArrayViewMutD<'_, T>) -> Result<()> {
        let caller = Caller {
            recorder: None,
            ..self.caller().clone()
        };
        let call = send_fetch(&caller, rref.id())?;
        let shape = view.shape().to_vec();
        let (reply, landed) = match view.as_slice_mut().and_then(T::bytes_mut) {
            Some(memory) => call.wait_into(Room {
                dtype: T::DTYPE,
                shape: &shape,
                memory,
            }),
            None => (call.wait(), false),
        };
        let tensor: Tensor = decode_value(call.delivered(reply?)?, rref.id())?;
        if landed {
            return Ok(());
        }
        let data: Data = tensor.data();
        let source = data.view::<T>()?;
        if source.shape() != view.shape() {
            return Err(ErrorKind::Shape {
                op: "fetch_into".into(),
                left: source.shape().to_vec(),
                right: view.shape().to_vec(),
                rule: "the view must have the value's shape".into(),
            }
            .into());
        }
        view.assign(&source);
        Ok(())
    }

    /// Runs a function on the value of a reference, on its owner, one at a time. Targeted; blocks until the answer is there.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    fn call_mut<T, A, R: DeserializeOwned>(
        &self,
        rref: &RRef<T>,
        f: impl FnOnce() -> Remote<On<T, A>, R>,
        arguments: impl Arguments<A>,
    ) -> Result<R> {
        self.caller()
            .invoke(rref.owner(), f(), on(rref, &arguments), Manner::Waits)?
            .result()
    }

    /// As [`call_mut`](Self::call_mut); the future gives the result.
    ///
    /// # Errors
    /// As [`call_async`](Self::call_async).
    fn call_mut_async<T, A, R: DeserializeOwned>(
        &self,
        rref: &RRef<T>,
        f: impl FnOnce() -> Remote<On<T, A>, R>,
        arguments: impl Arguments<A>,
    ) -> Result<Future<R>> {
        Ok(Future::of_call(self.caller().invoke(
            rref.owner(),
            f(),
            on(rref, &arguments),
            Manner::Goes,
        )?))
    }
}

impl Calls for Caller {
    fn caller(&self) -> &Caller {
        self
    }
}

fn keep<T>(caller: &Caller, value: Stored) -> Result<RRef<T>> {
    caller.runtime.check_alive("share")?;
    let id = caller.runtime.keep(into_value(value))?;
    Ok(RRef::from_handle(Handle::new(&caller.runtime, id)))
}

/// Encodes a value's reference, then the arguments of a function on it.
fn on<T, A>(rref: &RRef<T>, arguments: &impl Arguments<A>) -> impl FnOnce(&mut Vec<u8>) -> Result<()> {
    move |bytes| {
        wire::write(rref, bytes)?;
        arguments.encode(bytes)
    }
}

fn send_fetch(caller: &Caller, id: RefId) -> Result<Call> {
    let mut encoded = Encoded::default();
    let context = caller.tag(Recorded::WithGradients, &mut encoded, String::new)?;
    caller.send(
        id.owner,
        Op::Fetch { value: id.value, context },
        encoded,
        "fetch",
        Manner::Waits,
        false,
    )
}

impl<T: 'static> RRef<T> {
    /// The value, on its owner: a clone of it (a tensor's clone is the same tensor). Local; blocks while it is still being made.
    ///
    /// # Errors
    /// [`ErrorKind::NotOwner`] on another rank; [`ErrorKind::Creation`] if it failed to be made; [`ErrorKind::WrongType`].
    pub fn local(&self, _at: &impl Calls) -> Result<T>
    where
        T: Clone,
    {
        self.with(T::clone)
    }

    /// Runs `f` on the value, on its owner. Local; blocks while it is still being made, or being changed by `call_mut`.
    ///
    /// # Errors
    /// As [`local`](Self::local).
    pub fn with<R>(&self, f: impl FnOnce(&T) -> R) -> Result<R> {
        let value = self.value("local")?;
        let found = stored(&value);
        let guard = found.and_then(Stored::read::<T>);
        guard
            .map(|v| f(&v))
            .ok_or_else(|| wrong_type::<T>("local", self.id(), found.map_or("?", Stored::type_name)))
    }

    pub(crate) fn modify<X>(&self, operation: &str, at: &Caller, f: impl FnOnce(&mut T) -> Result<X>) -> Result<X> {
        let value = self.value(operation)?;
        let found = stored(&value);
        let guard = at.runtime.pool.blocking(|| found.and_then(Stored::write::<T>));
        match guard {
            Some(mut value) => f(&mut value),
            None => Err(wrong_type::<T>(operation, self.id(), found.map_or("?", Stored::type_name))),
        }
    }

    fn value(&self, operation: &str) -> Result<crate::runtime::Value> {
        let id = self.id();
        if !self.is_local() {
            return Err(ErrorKind::NotOwner {
                operation: operation.into(),
                owner: id.owner,
                id: id.value.to_string(),
                rank: self.runtime().rank(),
            }
            .into());
        }
        self.runtime().value(operation, id.value)
    }
}

impl<T: Fetch> RRef<T> {
    /// A copy of the value, without recording. As [`Calls::fetch`]; torch calls it `to_here`.
    ///
    /// # Errors
    /// As [`Calls::fetch`].
    pub fn fetch(&self) -> Result<T> {
        let caller = Caller {
            runtime: Arc::clone(self.runtime()),
            recorder: None,
            window: Windowed::Block,
            limit: None,
        };
        caller.fetch(self)
    }
}

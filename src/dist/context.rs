//! Distributed autograd contexts.

use std::borrow::Borrow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::builtin::{accumulate_gradient, gradient_of};
use super::parameters::ParameterCalls;
use super::sent::SentGradient;
use super::tables::Tables;
use crate::autograd::check_roots;
use crate::protocol::{ContextId, Gate, Manner, Mode, Turn};
use crate::rpc::{Caller, Calls, Frame, Issue, Manner as Issuing, Recorded, Recorder, Recording, Remote};
use crate::rref::RRef;
use crate::runtime::{Limit, Runtime, Waiting, Windowed};
use crate::tensor::{Gradient, Tensor};
use crate::{ErrorKind, Result};

/// So many releases may be under way before a new context waits for the oldest.
const BACKLOG: usize = 256;

/// How a backward goes.
#[derive(Debug, Clone, Copy, Default)]
pub struct BackwardOptions {
    /// How it finds out what takes part.
    pub mode: Mode,
    /// Keeps what the graph has saved, on all ranks, for another backward.
    pub retain_graph: bool,
    /// At most so long, in total.
    pub timeout: Option<Duration>,
}

/// A distributed autograd context: the calls made through it are recorded, [`backward`](Self::backward) goes back through them, and gradients
/// gather in it on the ranks that own the leaves.
///
/// A context is a value: any number may be open on a rank, and threads may share one. Gradients of one never touch those of another, nor a tensor's
/// own [`grad`](Tensor::grad). Dropping it releases it on all ranks that took part, without waiting; [`release`](Self::release) waits.
#[derive(Debug)]
pub struct Context {
    caller: Caller,
    recording: Arc<Recording>,
    backwards: AtomicU32,
    released: AtomicBool,
}

impl Context {
    pub(crate) fn open(runtime: &Arc<Runtime>) -> Result<Self> {
        runtime.check_alive("context")?;
        let tables = Tables::of(runtime)?;
        while let Some(oldest) = tables.backlog(BACKLOG) {
            runtime.wait_until(&|| oldest.is_done(), crate::runtime::Permission::Nothing, None)?;
        }
        let recording = tables.recording(runtime, runtime.open_context()?);
        let recorder = Recorder {
            recording: Arc::clone(&recording),
            frame: Frame::new(Vec::new()),
        };
        let caller = Caller {
            runtime: Arc::clone(runtime),
            recorder: Some(recorder),
            window: Windowed::Block,
            limit: None,
        };
        Ok(Context {
            caller,
            recording,
            backwards: AtomicU32::new(0),
            released: AtomicBool::new(false),
        })
    }

    fn runtime(&self) -> &Arc<Runtime> {
        &self.caller.runtime
    }

    /// The context's id, the same on all ranks. Local.
    pub fn id(&self) -> ContextId {
        self.recording.id
    }

    /// Goes back from the roots, scalars that are summed, through all ranks that they reach, and adds gradients to this context on the ranks
    /// that own the leaves. Targeted: no rank has to call anything. Blocks until all ranks are done. Frees what the graph has saved.
    ///
    /// # Errors
    /// - [`ErrorKind::NoRoots`], [`ErrorKind::RootWithoutGradient`], [`ErrorKind::RootNotScalar`], [`ErrorKind::RootIsLeaf`], before anything is sent.
    /// - [`ErrorKind::BackwardInFlight`]: wait for the other backward of this context.
    /// - [`ErrorKind::Backward`]: some rank failed; it is named, and no gradient was changed anywhere, except of leaves whose
    ///   [hook](Tensor::register_post_accumulate_hook) took it: those that were complete before have been updated.
    /// - [`ErrorKind::InBackward`] within that: an [optimizer in backward](crate::optim::in_backward) failed.
    /// - [`ErrorKind::GraphFreed`] within that: an earlier backward freed the graph; pass `retain_graph` to that one.
    pub fn backward<T: Borrow<Tensor>>(&self, roots: &[T]) -> Result<()> {
        self.backward_with(roots, BackwardOptions::default())
    }

    /// As [`backward`](Self::backward), with options.
    ///
    /// # Errors
    /// As [`backward`](Self::backward); [`ErrorKind::UnreachedCalls`] in [`Mode::Fast`]; [`ErrorKind::Timeout`], after which no gradient was
    /// changed, unless its status says that this is in doubt: ranks that were adding them, or free to, don't answer.
    pub fn backward_with<T: Borrow<Tensor>>(&self, roots: &[T], options: BackwardOptions) -> Result<()> {
        let runtime = self.runtime();
        runtime.check_alive("backward")?;
        runtime.check_context("backward", self.id())?;
        let roots: Vec<Tensor> = roots.iter().map(|r| r.borrow().clone()).collect();
        check_roots(&roots)?;
        runtime.check_gradients("backward", self.id())?;
        let number = self.backwards.fetch_add(1, Ordering::Relaxed) + 1;
        let manner = Manner {
            mode: options.mode,
            retain_graph: options.retain_graph,
        };
        let set_roots = || self.recording.set_roots(roots);
        runtime.backward(self.id(), number, manner, options.timeout.map(Limit::from_now), set_roots)
    }

    /// The gradients in this context of leaves of this rank. Local. On other ranks: [`gradients_here`](ParameterCalls::gradients_here).
    ///
    /// # Errors
    /// [`ErrorKind::BackwardInFlight`] while a backward is under way.
    pub fn gradients(&self) -> Result<Vec<(Tensor, Gradient)>> {
        self.gradients_here(self.id())
    }

    /// The gradient in this context of a leaf of this rank; none if nothing reached it. Local.
    ///
    /// # Errors
    /// [`ErrorKind::BackwardInFlight`]; [`ErrorKind::NotALeaf`].
    pub fn local_gradient(&self, leaf: &Tensor) -> Result<Option<Gradient>> {
        self.runtime().check_gradients("gradient", self.id())?;
        match leaf.leaf() {
            Some(leaf) => Ok(self.recording.gradient(leaf.id())),
            None => Err(ErrorKind::NotALeaf {
                what: "gradient".into(),
                why: "only leaves gather gradients".into(),
            }
            .into()),
        }
    }

    /// The gradient in this context of a parameter on any rank; none if nothing reached it. Targeted; blocks until the answer is there.
    ///
    /// # Errors
    /// [`ErrorKind::BackwardInFlight`]; [`ErrorKind::NotALeaf`] from the owner; as [`Calls::call`].
    pub fn gradient(&self, of: &RRef<Tensor>) -> Result<Option<Gradient>> {
        let sent = self.gated(of.owner(), gradient_of(), |bytes| {
            crate::wire::write(&self.id(), bytes)?;
            crate::wire::write(of, bytes)
        })?;
        sent.map(SentGradient::into_gradient).transpose()
    }

    /// Adds a gradient that was made otherwise (a solver's adjoint, say) to a parameter's in this context. Targeted; blocks until the owner has added it.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`], [`ErrorKind::DType`] if it doesn't fit the parameter; as [`gradient`](Self::gradient).
    pub fn accumulate(&self, to: &RRef<Tensor>, gradient: Gradient) -> Result<()> {
        let gradient = SentGradient::from(gradient);
        // The owner must know the context, so that it hears of its release.
        self.gated(to.owner(), accumulate_gradient(), |bytes| {
            crate::wire::write(&self.id(), bytes)?;
            crate::wire::write(to, bytes)?;
            crate::wire::write(&gradient, bytes)
        })
    }

    fn gated<A, R: serde::de::DeserializeOwned>(
        &self,
        to: u32,
        f: Remote<A, R>,
        write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<R> {
        let gate = Gate {
            turn: Turn::None,
            gradients_of: Some(self.id()),
        };
        let issue = Issue {
            to,
            function: f.id()?,
            name: f.name(),
            creates: false,
            gate,
            recorded: Recorded::Always,
            manner: Issuing::Waits,
        };
        let call = self.caller.issue(issue, write)?;
        let reply = call.wait()?;
        call.decode(reply)
    }

    /// Releases the context on all ranks that took part. Targeted; blocks until all have, at most for the default time a rank.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] if some rank doesn't answer.
    pub fn release(self) -> Result<()> {
        self.released.store(true, Ordering::SeqCst);
        let runtime = self.runtime();
        runtime.check_alive("release")?;
        let (request, slot) = runtime.release_context(self.id())?;
        let waiting = Waiting {
            request,
            to: self.rank(),
            operation: "release of a context",
            limit: self.caller.limit.map(Limit::from_now),
        };
        runtime.wait(&slot, &waiting)?.map(drop)
    }
}

impl Calls for Context {
    fn caller(&self) -> &Caller {
        &self.caller
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.released.load(Ordering::SeqCst) || self.runtime().is_finished() {
            return;
        }
        match self.runtime().release_context(self.id()) {
            Ok((_, slot)) => {
                if let Ok(tables) = Tables::of(self.runtime()) {
                    tables.note_release(slot);
                }
            }
            Err(e) => log::error!("rank {}: context {} can't be released: {e}", self.rank(), self.id()),
        }
    }
}

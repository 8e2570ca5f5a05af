//! Does the tasks of a rank: runs functions, encodes values, lets engines work.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::tables::Tables;
use crate::autograd::frame;
use crate::protocol::{ContextId, Input, OptimizerId, Outcome, Output, RefId, Tag, Work};
use crate::rpc::{self, Answer, Caller, Frame, Given, Incoming, Recorder, Scope, into_value, stored};
use crate::rref::Handle;
use crate::runtime::{self, Done, Executor, Job, Runtime, Value, Windowed};
use crate::tensor::Tensor;
use crate::wire::{Delivered, Encoded, Payload};
use crate::{Error, ErrorKind, Result};

/// The executor of every rank.
#[derive(Debug)]
pub(crate) struct Ranks(pub Tables);

impl Ranks {
    fn caller(&self, runtime: &Arc<Runtime>, tag: Option<&Tag>) -> Caller {
        let recorder = tag.map(|tag| Recorder {
            recording: self.0.recording(runtime, tag.context),
            frame: Frame::new(tag.path.clone()),
        });
        Caller {
            runtime: Arc::clone(runtime),
            recorder,
            window: Windowed::Bypass,
            limit: None,
        }
    }

    fn run(
        &self,
        runtime: &Arc<Runtime>,
        job: Job,
        main: Option<&mut dyn Any>,
    ) -> Result<(Outcome<Value, Payload>, Vec<crate::wire::Handle>)> {
        let from = job.from;
        match job.work {
            Work::Call {
                function,
                creates,
                context,
                payload,
                ..
            } => {
                let registration = rpc::get(function)?;
                let caller = self.caller(runtime, context.as_deref());
                let _frame = caller.recorder.as_ref().map(|r| frame::enter(Arc::clone(&r.frame.path)));
                let crossing = context.as_ref().and_then(|t| t.crossing);
                let scope = Scope::new(caller, from);
                let arguments = Incoming(Delivered {
                    payload,
                    handles: job.handles,
                    crossing,
                });
                guarded(runtime.rank(), registration.path(), || {
                    Ok(match registration.run(&scope, arguments, main, creates)? {
                        Given::Value(value) => (Outcome::Value(into_value(value)), Vec::new()),
                        Given::Answer(Answer(encoded, crossing)) => reply(encoded, crossing),
                    })
                })
            }
            Work::Encode { value, context } => {
                let caller = self.caller(runtime, context.as_deref());
                let _frame = caller.recorder.as_ref().map(|r| frame::enter(Arc::clone(&r.frame.path)));
                let value = stored(&value).ok_or_else(|| Error::user("a value of an unknown kind"))?;
                let (encoded, crossing) = guarded(runtime.rank(), "fetch", || {
                    caller.encode_result(from, "fetch", |record| value.encode(record))
                })?;
                Ok(reply(encoded, crossing))
            }
        }
    }
}

fn reply(encoded: Encoded, crossing: Option<crate::protocol::CrossingId>) -> (Outcome<Value, Payload>, Vec<crate::wire::Handle>) {
    (
        Outcome::Reply {
            payload: encoded.payload,
            refs: encoded.refs,
            crossing,
        },
        encoded.handles,
    )
}

/// Runs user code; a panic in it becomes its caller's error.
fn guarded<R>(rank: u32, function: &str, f: impl FnOnce() -> Result<R>) -> Result<R> {
    let _caught = runtime::failure::catching();
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let message = runtime::failure::message(&*panic);
        Err(ErrorKind::Panic {
            rank,
            function: function.into(),
            message,
        }
        .into())
    })
}

impl Executor for Ranks {
    fn execute(&self, runtime: &Arc<Runtime>, job: Job, main: Option<&mut dyn Any>) -> Done {
        match self.run(runtime, job, main) {
            Ok((outcome, handles)) => Done { outcome, handles },
            Err(error) => Done {
                outcome: Outcome::Error(error),
                handles: Vec::new(),
            },
        }
    }

    fn engine(&self, runtime: &Runtime, context: ContextId, retain_graph: bool, inputs: Vec<Input<Payload>>) -> Output<Payload> {
        let recording = self.0.recording(runtime, context);
        let worked = guarded(runtime.rank(), "backward", || Ok(recording.work(retain_graph, inputs)));
        worked.unwrap_or_else(|error| Output {
            error: Some(error),
            ..Output::default()
        })
    }

    fn forget(&self, context: ContextId) {
        self.0.forget(context);
    }

    fn handle(&self, runtime: &Arc<Runtime>, id: RefId) -> crate::wire::Handle {
        Handle::new(runtime, id)
    }

    fn is_on_main(&self, function: u32) -> bool {
        rpc::get(function).is_ok_and(|r| r.is_on_main())
    }

    fn is_heavy(&self, payload: &Payload) -> bool {
        // Functions that take turns have an optimizer's id in front; those that don't may take long.
        let id = postcard::take_from_bytes::<OptimizerId>(&payload.bytes);
        id.map_or(true, |(id, _)| self.0.is_heavy(id))
    }

    fn drops_at_once(&self, value: &Value) -> bool {
        stored(value).is_some_and(|s| s.type_name() == std::any::type_name::<Tensor>())
    }

    fn tables(&self) -> &dyn Any {
        &self.0
    }

    fn describe(&self, value: &Value) -> String {
        stored(value).map_or("?".into(), |s| s.type_name().into())
    }
}

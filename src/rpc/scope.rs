//! What a remote function knows of the call that it serves.

use super::calls::{Caller, Calls};
use crate::protocol::ContextId;
use crate::{Error, ErrorKind, Result};
use std::any::type_name;
use std::sync::Arc;

/// The surroundings of a remote function: its rank, its caller, and the context that the call is recorded in, if it is.
///
/// Calls made through it are recorded in the same context. They don't count for the caller's window: nested calls can't wait for each other.
#[derive(Debug)]
pub struct Scope {
    caller: Caller,
    from: u32,
}

impl Scope {
    pub(crate) fn new(caller: Caller, from: u32) -> Self {
        Scope { caller, from }
    }

    /// The rank that made the call.
    pub fn caller_rank(&self) -> u32 {
        self.from
    }

    /// The context that the call is recorded in.
    pub fn context(&self) -> Option<ContextId> {
        self.caller.recorder.as_ref().map(|r| r.recording.id)
    }

    /// This rank's state of type `T`, as [`World::set_state`](crate::World::set_state) set it. Local.
    ///
    /// # Errors
    /// [`ErrorKind::NoState`] if this rank has none.
    pub fn state<T: Send + Sync + 'static>(&self) -> Result<Arc<T>> {
        let found = self.caller.runtime.state().get(&std::any::TypeId::of::<T>()).cloned();
        found
            .and_then(|s| s.downcast::<T>().ok())
            .ok_or_else(|| self.no_state(type_name::<T>()))
    }

    fn no_state(&self, name: &str) -> Error {
        ErrorKind::NoState {
            rank: self.rank(),
            type_name: name.into(),
        }
        .into()
    }
}

impl Calls for Scope {
    fn caller(&self) -> &Caller {
        &self.caller
    }
}

//! Remote functions and calls.

mod arguments;
mod calls;
mod future;
mod macros;
mod recording;
mod registry;
mod scope;
mod stored;

use std::any::{Any, type_name};

#[doc(hidden)]
pub use inventory;

pub use arguments::Arguments;
pub(crate) use calls::{Call, Issue, Manner, Recorded};
pub use calls::{Caller, Calls};
pub use future::{Future, wait_all};
#[cfg(any(test, feature = "sim"))]
pub(crate) use recording::Travels;
pub(crate) use recording::{Frame, Recorder, Recording};
pub use registry::Remote;
#[doc(hidden)]
pub use registry::{Entry, Incoming, Registration};
pub(crate) use registry::{check, get, listing};
pub use scope::Scope;
pub(crate) use stored::{Answer, into_value, stored};
#[doc(hidden)]
pub use stored::{Encodable, Given, HasParameters, NoParameters, Opaque, Probe, give};

use crate::rref::RRef;
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Result};

/// A value that has parameters: a user's model. [`ParameterCalls::parameters`](crate::ParameterCalls::parameters) refers to those of one on another rank.
pub trait Module {
    /// The parameters, in a fixed order.
    fn parameters(&self) -> Vec<Tensor>;
}

/// Parameters of a function on a value that a reference names: the value's type, then the rest.
#[derive(Debug)]
pub struct On<T, A>(std::marker::PhantomData<fn(T, A)>);

/// The result type of a remote function: a [`Result`].
pub trait Outcome {
    /// What it gives.
    type Value;

    #[doc(hidden)]
    fn into_result(self) -> Result<Self::Value>;
}

impl<T> Outcome for Result<T, Error> {
    type Value = T;

    fn into_result(self) -> Result<T> {
        self
    }
}

#[doc(hidden)]
pub fn outcome<R: Outcome>(result: R) -> Result<R::Value> {
    result.into_result()
}

/// Lends a value of this rank to a function, alone.
#[doc(hidden)]
pub fn on_value<T: 'static, X>(scope: &Scope, this: &RRef<T>, f: impl FnOnce(&mut T) -> Result<X>) -> Result<X> {
    this.modify("call_mut", scope.caller(), f)
}

/// The state of `on_main` functions.
#[doc(hidden)]
pub fn main_state<'a, T: 'static>(scope: &Scope, function: &str, main: Option<&'a mut dyn Any>) -> Result<&'a mut T> {
    let rank = scope.rank();
    match main {
        Some(state) => state.downcast_mut().ok_or_else(|| {
            ErrorKind::Argument {
                op: function.into(),
                what: format!(
                    "the state that rank {rank} serves with is not a `{}`: give `serve_with` or `lead_with` one",
                    type_name::<T>()
                ),
            }
            .into()
        }),
        None => Err(ErrorKind::NotServing {
            rank,
            function: function.into(),
        }
        .into()),
    }
}

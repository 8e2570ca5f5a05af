//! A value as its owner keeps it: behind a lock, with what is known of its type.

use std::any::{Any, type_name};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use serde::Serialize;

use super::{Calls, Module, Scope};
use crate::protocol::CrossingId;
use crate::runtime::Value;
use crate::tensor::Tensor;
use crate::wire::{self, Encoded};
use crate::{Error, ErrorKind, Result};

type Encode<T> = fn(&T, &mut Vec<u8>) -> Result<()>;
type Parameters<T> = fn(&T) -> Vec<Tensor>;

/// A value of some type.
trait Cell: Any + Send + Sync {
    /// Encodes it; `None` if it can't be.
    fn encode(&self, bytes: &mut Vec<u8>) -> Option<Result<()>>;
    fn parameters(&self) -> Option<Vec<Tensor>>;
}

struct Typed<T> {
    value: RwLock<T>,
    encode: Option<Encode<T>>,
    parameters: Option<Parameters<T>>,
}

impl<T> Typed<T> {
    fn read(&self) -> RwLockReadGuard<'_, T> {
        self.value.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + Sync + 'static> Cell for Typed<T> {
    fn encode(&self, bytes: &mut Vec<u8>) -> Option<Result<()>> {
        self.encode.map(|encode| encode(&self.read(), bytes))
    }

    fn parameters(&self) -> Option<Vec<Tensor>> {
        self.parameters.map(|list| list(&self.read()))
    }
}

/// A value of any type, kept by its owner.
#[doc(hidden)]
pub struct Stored {
    cell: Box<dyn Cell>,
    type_name: &'static str,
}

impl std::fmt::Debug for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stored").field("type", &self.type_name).finish_non_exhaustive()
    }
}

impl Stored {
    /// A value that can be fetched if there is an encoder for it, and asked for its parameters if it is a [`Module`].
    pub(super) fn new<T: Send + Sync + 'static>(value: T, encode: Option<Encode<T>>, parameters: Option<Parameters<T>>) -> Self {
        Stored {
            cell: Box::new(Typed {
                value: RwLock::new(value),
                encode,
                parameters,
            }),
            type_name: type_name::<T>(),
        }
    }

    pub(crate) fn type_name(&self) -> &'static str {
        self.type_name
    }

    /// The parameters of a [`Module`].
    pub(crate) fn parameters(&self) -> Option<Vec<Tensor>> {
        self.cell.parameters()
    }

    fn typed<T: 'static>(&self) -> Option<&Typed<T>> {
        let cell: &dyn Any = &*self.cell;
        cell.downcast_ref()
    }

    pub(crate) fn read<T: 'static>(&self) -> Option<RwLockReadGuard<'_, T>> {
        Some(self.typed()?.read())
    }

    pub(crate) fn write<T: 'static>(&self) -> Option<RwLockWriteGuard<'_, T>> {
        Some(self.typed()?.value.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Encodes the value, its type in front.
    pub(crate) fn encode(&self, record: bool) -> Result<Encoded> {
        wire::encode(record, |bytes| {
            wire::write(self.type_name, bytes)?;
            self.cell.encode(bytes).unwrap_or_else(|| Err(cannot_leave(self.type_name)))
        })
    }
}

fn cannot_leave(type_name: &str) -> Error {
    ErrorKind::Argument {
        op: "fetch".into(),
        what: format!("a `{type_name}` can't leave its rank: it doesn't implement serde's Serialize; call a function on it there"),
    }
    .into()
}

/// What a remote function gave: a value to keep, or one that goes back to its caller.
#[doc(hidden)]
#[derive(Debug)]
pub enum Given {
    /// To keep.
    Value(Stored),
    /// Encoded.
    Answer(Answer),
}

/// An encoded result.
#[doc(hidden)]
#[derive(Debug)]
pub struct Answer(pub(crate) Encoded, pub(crate) Option<CrossingId>);

/// Keeps a function's result, or encodes it for the caller.
#[doc(hidden)]
pub fn give<T: Send + Sync + 'static>(
    scope: &Scope,
    name: &'static str,
    value: T,
    keep: bool,
    encode: Option<Encode<T>>,
    parameters: Option<Parameters<T>>,
) -> Result<Given> {
    if keep {
        return Ok(Given::Value(Stored::new(value, encode, parameters)));
    }
    let encode = encode.ok_or_else(|| cannot_leave(type_name::<T>()))?;
    let (encoded, crossing) = scope.caller().encode_result(scope.caller_rank(), name, |record| {
        wire::encode(record, |bytes| encode(&value, bytes))
    })?;
    Ok(Given::Answer(Answer(encoded, crossing)))
}

pub(crate) fn stored(value: &Value) -> Option<&Stored> {
    value.downcast_ref()
}

/// Wraps a stored value for the reference table.
pub(crate) fn into_value(stored: Stored) -> Value {
    Arc::new(stored)
}

/// Finds out, for a concrete type, whether there is an encoder: method lookup prefers [`Encodable`], which asks for `Serialize`.
#[doc(hidden)]
#[derive(Debug)]
pub struct Probe<T>(pub std::marker::PhantomData<T>);

#[doc(hidden)]
pub trait Encodable<T> {
    /// The encoder.
    fn encoder(&self) -> Option<Encode<T>>;
}

impl<T: Serialize + 'static> Encodable<T> for Probe<T> {
    fn encoder(&self) -> Option<Encode<T>> {
        Some(wire::write::<T>)
    }
}

#[doc(hidden)]
pub trait Opaque<T> {
    /// None.
    fn encoder(&self) -> Option<Encode<T>>;
}

impl<T> Opaque<T> for &Probe<T> {
    fn encoder(&self) -> Option<Encode<T>> {
        None
    }
}

#[doc(hidden)]
pub trait HasParameters<T> {
    /// What lists them.
    fn list(&self) -> Option<Parameters<T>>;
}

impl<T: Module + 'static> HasParameters<T> for Probe<T> {
    fn list(&self) -> Option<Parameters<T>> {
        Some(T::parameters)
    }
}

#[doc(hidden)]
pub trait NoParameters<T> {
    /// Nothing.
    fn list(&self) -> Option<Parameters<T>>;
}

impl<T> NoParameters<T> for &Probe<T> {
    fn list(&self) -> Option<Parameters<T>> {
        None
    }
}

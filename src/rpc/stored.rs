//! A value as its owner keeps it: behind a lock, with what is known of its type.

use std::any::{Any, type_name};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use serde::Serialize;

use super::Module;
use crate::runtime::Value;
use crate::tensor::Tensor;
use crate::wire::{self, Encoded};
use crate::{ErrorKind, Result};

type EncodeFn = fn(&dyn Any, &mut Vec<u8>) -> Result<()>;
type ParametersFn = fn(&dyn Any) -> Vec<Tensor>;

/// A value of any type, kept by its owner.
#[doc(hidden)]
pub struct Stored {
    cell: Box<dyn Any + Send + Sync>,
    type_name: &'static str,
    encode: Option<EncodeFn>,
    parameters: Option<ParametersFn>,
}

impl std::fmt::Debug for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stored").field("type", &self.type_name).finish_non_exhaustive()
    }
}

impl Stored {
    /// A value that can be fetched if there is an encoder for it, and asked for its parameters if it is a [`Module`].
    pub fn new<T: Send + Sync + 'static>(value: T, encode: Option<EncodeFn>, parameters: Option<ParametersFn>) -> Self {
        Stored {
            cell: Box::new(RwLock::new(value)),
            type_name: type_name::<T>(),
            encode,
            parameters,
        }
    }

    pub(crate) fn type_name(&self) -> &'static str {
        self.type_name
    }

    /// The parameters of a [`Module`].
    pub(crate) fn parameters(&self) -> Option<Vec<Tensor>> {
        self.parameters.map(|list| list(&*self.cell))
    }

    fn lock<T: 'static>(&self) -> Option<&RwLock<T>> {
        self.cell.downcast_ref()
    }

    pub(crate) fn read<T: 'static>(&self) -> Option<RwLockReadGuard<'_, T>> {
        Some(self.lock()?.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn write<T: 'static>(&self) -> Option<RwLockWriteGuard<'_, T>> {
        Some(self.lock()?.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Encodes the value; with `typed`, its type goes in front.
    pub(crate) fn encode(&self, record: bool, typed: bool) -> Result<Encoded> {
        let Some(encode) = self.encode else {
            return Err(ErrorKind::Argument {
                op: "fetch".into(),
                what: format!(
                    "a `{}` can't leave its rank: it doesn't implement serde's Serialize; call a function on it there",
                    self.type_name
                ),
            }
            .into());
        };
        wire::encode(record, |bytes| {
            if typed {
                wire::write(self.type_name, bytes)?;
            }
            encode(&*self.cell, bytes)
        })
    }
}

pub(crate) fn stored(value: &Value) -> Option<&Stored> {
    value.downcast_ref()
}

/// Wraps a stored value for the reference table.
pub(crate) fn into_value(stored: Stored) -> Value {
    Arc::new(stored)
}

fn encode_as<T: Serialize + 'static>(cell: &dyn Any, bytes: &mut Vec<u8>) -> Result<()> {
    match cell.downcast_ref::<RwLock<T>>() {
        Some(lock) => wire::write(&*lock.read().unwrap_or_else(PoisonError::into_inner), bytes),
        None => Err(ErrorKind::Argument {
            op: "encode".into(),
            what: format!("not a `{}`", type_name::<T>()),
        }
        .into()),
    }
}

/// Finds out, for a concrete type, whether there is an encoder: method lookup prefers [`Encodable`], which asks for `Serialize`.
#[doc(hidden)]
#[derive(Debug)]
pub struct Probe<T>(pub std::marker::PhantomData<T>);

#[doc(hidden)]
pub trait Encodable {
    /// The encoder.
    fn encoder(&self) -> Option<EncodeFn>;
}

impl<T: Serialize + 'static> Encodable for Probe<T> {
    fn encoder(&self) -> Option<EncodeFn> {
        Some(encode_as::<T>)
    }
}

#[doc(hidden)]
pub trait Opaque {
    /// None.
    fn encoder(&self) -> Option<EncodeFn>;
}

impl<T> Opaque for &Probe<T> {
    fn encoder(&self) -> Option<EncodeFn> {
        None
    }
}

fn parameters_of<T: Module + 'static>(cell: &dyn Any) -> Vec<Tensor> {
    match cell.downcast_ref::<RwLock<T>>() {
        Some(lock) => lock.read().unwrap_or_else(PoisonError::into_inner).parameters(),
        None => Vec::new(),
    }
}

#[doc(hidden)]
pub trait HasParameters {
    /// What lists them.
    fn list(&self) -> Option<ParametersFn>;
}

impl<T: Module + 'static> HasParameters for Probe<T> {
    fn list(&self) -> Option<ParametersFn> {
        Some(parameters_of::<T>)
    }
}

#[doc(hidden)]
pub trait NoParameters {
    /// Nothing.
    fn list(&self) -> Option<ParametersFn>;
}

impl<T> NoParameters for &Probe<T> {
    fn list(&self) -> Option<ParametersFn> {
        None
    }
}

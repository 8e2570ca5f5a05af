//! A value as its owner keeps it: behind a lock, with what is known of its type.

use std::any::{Any, type_name};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use serde::Serialize;

use crate::runtime::Value;
use crate::wire::{self, Encoded};
use crate::{ErrorKind, Result};

type EncodeFn = fn(&dyn Any, &mut Vec<u8>) -> Result<()>;

/// A value of any type, kept by its owner.
#[doc(hidden)]
pub struct Stored {
    cell: Box<dyn Any + Send + Sync>,
    type_name: &'static str,
    encode: Option<EncodeFn>,
}

impl std::fmt::Debug for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stored").field("type", &self.type_name).finish_non_exhaustive()
    }
}

impl Stored {
    /// A value that can be fetched if there is an encoder for it.
    pub fn new<T: Send + Sync + 'static>(value: T, encode: Option<EncodeFn>) -> Self {
        Stored { cell: Box::new(RwLock::new(value)), type_name: type_name::<T>(), encode }
    }

    pub(crate) fn type_name(&self) -> &'static str {
        self.type_name
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
                what: format!("a `{}` can't leave its rank: it doesn't implement serde's Serialize; call a function on it there", self.type_name),
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
        None => Err(ErrorKind::Argument { op: "encode".into(), what: format!("not a `{}`", type_name::<T>()) }.into()),
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

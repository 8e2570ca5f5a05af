//! References to values on other ranks.

use std::marker::PhantomData;
use std::sync::Arc;

use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::protocol::RefId;
use crate::runtime::Runtime;
use crate::wire;

/// Keeps a value alive on its owner: one count on this rank. The last one to be dropped tells the owner.
#[derive(Debug)]
pub(crate) struct Handle {
    id: RefId,
    runtime: Arc<Runtime>,
}

impl Handle {
    /// Stands for a count that the state machine has made already.
    pub(crate) fn new(runtime: &Arc<Runtime>, id: RefId) -> Arc<Self> {
        Arc::new(Handle {
            id,
            runtime: Arc::clone(runtime),
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.runtime.dropped(self.id);
    }
}

/// A reference to a value of type `T` that lives on its owner.
///
/// Cloning is local and free. A reference can be an argument or a result of a call, alone or inside another value, to any rank; the value
/// stays alive as long as anybody holds a reference, or one is on the way. Serialising it elsewhere is an error.
///
/// What to do with it: [`fetch`](crate::Calls::fetch), [`local`](Self::local) on the owner, pass it to a function that runs there,
/// [`call_mut`](crate::Calls::call_mut), [`assign`](crate::ParameterCalls::assign).
pub struct RRef<T: ?Sized> {
    handle: Arc<Handle>,
    value: PhantomData<fn() -> Box<T>>,
}

impl<T: ?Sized> Clone for RRef<T> {
    fn clone(&self) -> Self {
        RRef {
            handle: Arc::clone(&self.handle),
            value: PhantomData,
        }
    }
}

impl<T: ?Sized> std::fmt::Debug for RRef<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "RRef<{}>({} on rank {})",
            std::any::type_name::<T>(),
            self.handle.id.value,
            self.owner()
        )
    }
}

/// Two references are equal when they refer to the same value.
impl<T: ?Sized> PartialEq for RRef<T> {
    fn eq(&self, other: &Self) -> bool {
        self.handle.id == other.handle.id
    }
}

impl<T: ?Sized> Eq for RRef<T> {}

impl<T: ?Sized> std::hash::Hash for RRef<T> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.handle.id.hash(state);
    }
}

impl<T: ?Sized> RRef<T> {
    pub(crate) fn from_handle(handle: Arc<Handle>) -> Self {
        RRef {
            handle,
            value: PhantomData,
        }
    }

    /// The rank that owns the value. Local.
    pub fn owner(&self) -> u32 {
        self.handle.id.owner
    }

    /// Owner and id of the value. Local.
    pub fn id(&self) -> RefId {
        self.handle.id
    }

    /// Whether the value lives on this rank. Local.
    pub fn is_local(&self) -> bool {
        self.owner() == self.handle.runtime.rank()
    }

    /// The same reference, whatever the type.
    pub(crate) fn untyped(&self) -> RRef<()> {
        RRef::from_handle(Arc::clone(&self.handle))
    }

    pub(crate) fn runtime(&self) -> &Arc<Runtime> {
        &self.handle.runtime
    }
}

/// As an argument or a result of a call.
impl<T: ?Sized> Serialize for RRef<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !wire::put_reference(self.handle.id, self.handle.clone()) {
            return Err(S::Error::custom(
                "a reference can be serialised only as an argument or a result of a call",
            ));
        }
        self.handle.id.serialize(serializer)
    }
}

impl<'de, T: ?Sized> Deserialize<'de> for RRef<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let id = RefId::deserialize(deserializer)?;
        let handle = wire::take_reference(id).ok_or_else(|| D::Error::custom("a reference that its message doesn't announce"))?;
        let handle = handle
            .downcast::<Handle>()
            .map_err(|_| D::Error::custom("a reference can be deserialised only from a call"))?;
        Ok(RRef::from_handle(handle))
    }
}

/// What can be fetched.
pub trait Fetch: Serialize + DeserializeOwned + Send + Sync + 'static {}

impl<T: Serialize + DeserializeOwned + Send + Sync + 'static> Fetch for T {}

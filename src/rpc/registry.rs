//! The functions that other ranks can call, as the linker finds them.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::de::DeserializeOwned;

use super::Scope;
use super::stored::Given;
use crate::wire::Delivered;
use crate::{Error, ErrorKind, Result};

/// The arguments of a call, on the rank that runs it.
#[doc(hidden)]
#[derive(Debug)]
pub struct Incoming(pub(crate) Delivered);

impl Incoming {
    /// Decodes them.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if they are none.
    pub fn decode<A: DeserializeOwned>(self) -> Result<A> {
        self.0.decode()
    }
}

type Run = fn(&Scope, Incoming, Option<&mut dyn Any>, bool) -> Result<Given>;

/// A function that other ranks can call.
#[doc(hidden)]
#[derive(Debug)]
pub struct Registration {
    path: &'static str,
    signature: &'static str,
    on_main: bool,
    run: Run,
    /// Place in the sorted list.
    id: AtomicU32,
}

impl Registration {
    /// Describes a function.
    pub const fn new(path: &'static str, signature: &'static str, on_main: bool, run: Run) -> Self {
        Registration {
            path,
            signature,
            on_main,
            run,
            id: AtomicU32::new(u32::MAX),
        }
    }

    /// Path and name of the function.
    pub fn path(&self) -> &'static str {
        self.path
    }

    pub(crate) fn is_on_main(&self) -> bool {
        self.on_main
    }

    /// Runs it; its result is to be kept here, or encoded for the caller.
    #[inline]
    pub(crate) fn run(&self, scope: &Scope, arguments: Incoming, main: Option<&mut dyn Any>, keep: bool) -> Result<Given> {
        (self.run)(scope, arguments, main, keep)
    }
}

/// An entry of the linker's list.
#[doc(hidden)]
#[derive(Debug)]
pub struct Entry(pub &'static Registration);

inventory::collect!(Entry);

/// A remote function, as [`remote!`](crate::remote) declares it: arguments `A`, result `R`.
pub struct Remote<A, R> {
    registration: &'static Registration,
    signature: PhantomData<fn(A) -> R>,
}

impl<A, R> Clone for Remote<A, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, R> Copy for Remote<A, R> {}

impl<A, R> std::fmt::Debug for Remote<A, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "remote fn {}", self.registration.path)
    }
}

impl<A, R> Remote<A, R> {
    #[doc(hidden)]
    pub const fn new(registration: &'static Registration) -> Self {
        Remote {
            registration,
            signature: PhantomData,
        }
    }

    /// Path and name of the function. Local.
    pub fn name(&self) -> &'static str {
        self.registration.path
    }

    #[inline]
    pub(crate) fn id(&self) -> Result<u32> {
        sorted();
        match self.registration.id.load(Ordering::Relaxed) {
            u32::MAX => Err(unregistered(self.name())),
            id => Ok(id),
        }
    }
}

/// All functions, sorted by path and signature: the place is the id.
#[inline]
fn sorted() -> &'static [&'static Registration] {
    static SORTED: OnceLock<Vec<&'static Registration>> = OnceLock::new();
    SORTED.get_or_init(|| {
        let mut all: Vec<_> = inventory::iter::<Entry>().map(|e| e.0).collect();
        all.sort_by_key(|r| (r.path, r.signature));
        for (id, registration) in all.iter().enumerate() {
            registration.id.store(id as u32, Ordering::Relaxed);
        }
        all
    })
}

/// The function of an id.
///
/// # Errors
/// [`ErrorKind::Decode`] if there is none: the caller's binary is another one.
#[inline]
pub(crate) fn get(id: u32) -> Result<&'static Registration> {
    sorted()
        .get(id as usize)
        .copied()
        .ok_or_else(|| unregistered(&format!("number {id}")))
}

fn unregistered(name: &str) -> Error {
    ErrorKind::Decode {
        what: format!("no remote function {name}: is it declared with `remote!` in a crate that is linked here?"),
    }
    .into()
}

/// One line a function, in the order of their ids, and one an update rule: what ranks compare at start.
pub(crate) fn listing() -> Vec<String> {
    let mut lines: Vec<String> = sorted().iter().map(|r| format!("{} {}", r.path, r.signature)).collect();
    lines.extend(crate::optim::listing());
    lines.insert(0, format!("rankgrad {} wire {}", env!("CARGO_PKG_VERSION"), crate::wire::VERSION));
    lines
}

/// Path and signature of two functions may not be the same, nor the names of two update rules.
pub(crate) fn check() -> Result<()> {
    for pair in sorted().windows(2) {
        if (pair[0].path, pair[0].signature) == (pair[1].path, pair[1].signature) {
            let what = format!("two remote functions {} with the same signature", pair[0].path);
            return Err(ErrorKind::Init {
                what,
                cure: "rename one".into(),
            }
            .into());
        }
    }
    crate::optim::check()
}

//! The choke point: every MPI call of this crate goes through [`mpi_call!`], which turns its return code into an error.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use ::mpi::ffi;

use crate::{ErrorKind, Result};

/// This process's rank in MPI_COMM_WORLD, for error texts; -1 before it is known.
pub(super) static WORLD_RANK: AtomicI64 = AtomicI64::new(-1);

/// Makes one MPI call and returns [`ErrorKind::Mpi`] if it failed. Needs an `unsafe` block around it.
macro_rules! mpi_call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::transport::mpi::call::check(stringify!($function), ::mpi::ffi::$function($($argument),*))
    };
}
pub(super) use mpi_call;

/// Turns a return code into an error.
pub(super) fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        Ok(())
    } else {
        Err(describe(call, code))
    }
}

#[cold]
fn describe(call: &'static str, code: c_int) -> crate::Error {
    let (mut class, mut length) = (0, 0);
    let mut text = [0u8; 4096];
    // SAFETY: both write to our variables; the text has far more room than MPI_MAX_ERROR_STRING and stays nul-terminated, as it is zeroed.
    unsafe {
        ffi::MPI_Error_class(code, &mut class);
        ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length);
    }
    let text = CStr::from_bytes_until_nul(&text).map_or("(no text)".into(), |text| text.to_string_lossy().into_owned());
    ErrorKind::Mpi {
        call: call.into(),
        rank: WORLD_RANK.load(Relaxed),
        class,
        text,
    }
    .into()
}

/// An MPI handle that may move between threads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Handle<T>(pub(super) T);

// SAFETY: a handle is only a name, an integer or an opaque pointer that Rust never follows. MPI allows every thread to use it, one at a
// time below MPI_THREAD_MULTIPLE: callers hold the transport's lock.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above; a shared reference only gives a copy of the name.
unsafe impl<T> Sync for Handle<T> {}

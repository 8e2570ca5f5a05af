//! The launcher's own way to end a job, for when MPI_Abort can't be called: inside MPI_Init.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::config::launcher::environment;

/// Asks the launcher to end all ranks on all nodes, where this process has a connection to it: by PMIx, or else by PMI. May block; whether it worked shows only by
/// the end of this process.
pub(super) fn abort(code: i32) {
    if !pmix(code) {
        pmi(code);
    }
}

/// PMIx_Abort (PMIx 4.1, section 7.1) of the library that MPI has loaded, if it is connected.
fn pmix(code: i32) -> bool {
    type Abort = extern "C" fn(c_int, *const c_char, *mut c_void, usize) -> c_int;
    // SAFETY: the name is nul-terminated; only a library that is loaded already is found.
    let library = unsafe { libc::dlopen(c"libpmix.so.2".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    let library = if library.is_null() { libc::RTLD_DEFAULT } else { library };
    let symbol = |name: &CStr| {
        // SAFETY: looks a name up in a library that stays loaded; the name is nul-terminated.
        std::ptr::NonNull::new(unsafe { libc::dlsym(library, name.as_ptr()) })
    };
    let (Some(is_up), Some(abort)) = (symbol(c"PMIx_Initialized"), symbol(c"PMIx_Abort")) else {
        return false;
    };
    // SAFETY: these are C functions of these signatures since PMIx 1; both may be called by any thread. No processes means all of the job.
    unsafe {
        std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(is_up.as_ptr())() != 0
            && std::mem::transmute::<*mut c_void, Abort>(abort.as_ptr())(code, c"rankgrad".as_ptr(), std::ptr::null_mut(), 0) == 0
    }
}

/// `abort` of PMI 1, as MPICH and its relatives say it: one line, without an answer.
fn pmi(code: i32) {
    say(&format!("cmd=abort exitcode={code}\n"));
}

/// Whether the launcher has given this process a connection of PMI.
pub(super) fn is_there() -> bool {
    connection().is_some()
}

/// The first line of that connection, which MPI says in MPI_Init; for a process that won't come to it. The answer isn't read.
pub(super) fn greet() {
    say("cmd=init pmi_version=1 pmi_subversion=1\n");
}

/// The connection that MPI speaks on.
fn connection() -> Option<c_int> {
    let fd = environment("PMI_FD")?.trim().parse().ok()?;
    // SAFETY: zero is a valid value of all its numbers.
    let mut facts: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: writes to our variable.
    let is_socket = unsafe { libc::fstat(fd, &mut facts) } == 0 && facts.st_mode & libc::S_IFMT == libc::S_IFSOCK;
    is_socket.then_some(fd)
}

fn say(line: &str) {
    if let Some(fd) = connection() {
        // SAFETY: the bytes live through the call; a signal for a connection that has ended is asked not to come. A failure can't be helped.
        unsafe { libc::send(fd, line.as_ptr().cast(), line.len(), libc::MSG_NOSIGNAL) };
    }
}

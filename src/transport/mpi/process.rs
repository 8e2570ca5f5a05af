//! What concerns the whole process: ending the job, an exit without an end, BLAS threads.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use ::mpi::ffi;

use super::call::WORLD_RANK;
use super::{pmi, watch};
use crate::config::launcher::{environment, rank};

/// How long MPI_Abort gets before the process ends by itself.
const ABORT_LIMIT: Duration = Duration::from_secs(2);

/// How long the launcher gets to pass on what this process wrote: it drops the output of a job that it kills.
const OUTPUT_PAUSE: Duration = Duration::from_millis(200);

/// Transports that were started and not closed.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// The process that started them.
static OPENER: AtomicU32 = AtomicU32::new(0);

/// Counts a transport that was started, and sees to it that an exit without its end is noticed.
pub(super) fn opened() {
    static HANDLER: Once = Once::new();
    OPEN.fetch_add(1, SeqCst);
    OPENER.store(std::process::id(), SeqCst);
    HANDLER.call_once(|| {
        // SAFETY: the handler is a plain function that doesn't unwind.
        if unsafe { libc::atexit(on_exit) } != 0 {
            log::warn!("no exit handler could be installed: if this process exits before the end, other ranks may wait for it");
        }
    });
}

/// Counts a transport that was closed.
pub(super) fn closed() {
    OPEN.fetch_sub(1, SeqCst);
}

/// Without this, other ranks would wait for a rank that has left; MPICH's launcher even calls `exit(0)` without MPI_Finalize a success.
extern "C" fn on_exit() {
    // A child that this process forked has no part in the world.
    if OPEN.load(SeqCst) == 0 || OPENER.load(SeqCst) != std::process::id() {
        return;
    }
    let rank = match WORLD_RANK.load(SeqCst) {
        // Inside MPI's start.
        -1 => rank(environment).unwrap_or_else(|| "?".into()),
        rank => rank.to_string(),
    };
    let message = format!("rank {rank} exits while its world is open; the job is aborted (end each world with `finish`)");
    // A logger may have been torn down already, and must not unwind into C.
    let _ = std::panic::catch_unwind(|| log::error!("{message}"));
    let line = format!("rankgrad: {message}\n");
    write_stderr(&line);
    abort(1)
}

/// One write, so that the lines of several ranks don't mix, and no lock, for another thread may hold it for ever.
fn write_stderr(line: &str) {
    // SAFETY: the bytes live through the call. A failure can't be reported any more.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// Says why the job ends, in the log and on stderr: whoever reads the launcher's output must see which rank it was, also without a logger.
pub(super) fn last_words(why: &str) {
    log::error!("{why}");
    write_stderr(&format!("rankgrad: {why}\n"));
}

/// Ends the whole job with MPI_Abort on MPI_COMM_WORLD. Takes no lock, joins no thread; if MPI doesn't end this process within 2 s, it is killed,
/// which launchers take as a failure too. The exit code is never 0.
pub(super) fn abort(code: i32) -> ! {
    // Exit codes have 8 bits: 256 would read as 0.
    let code = if code & 0xff == 0 { 1 } else { code };
    OPEN.store(0, SeqCst);
    watch::aborting();
    let watchdog = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(ABORT_LIMIT);
        kill()
    });
    if watchdog.is_err() {
        // SAFETY: no memory is involved. Unhandled, the signal ends the process.
        unsafe { libc::alarm(ABORT_LIMIT.as_secs() as u32) };
    }
    std::thread::sleep(OUTPUT_PAUSE);
    let (mut initialised, mut finalised) = (0, 0);
    // SAFETY: both may be called at any time, and write to our variables.
    unsafe {
        ffi::MPI_Initialized(&mut initialised);
        ffi::MPI_Finalized(&mut finalised);
    }
    if initialised != 0 && finalised == 0 {
        // SAFETY: MPI is up. Another thread may be inside MPI below MPI_THREAD_MULTIPLE; at worst this call hangs, and the watchdog ends it.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
    } else if rank(environment).is_some() {
        pmi::abort(code);
        // Only the launcher can end the others, and it takes a signal for a failure, whatever it makes of an exit code.
        kill()
    }
    // SAFETY: ends the process without running anything else.
    unsafe { libc::_exit(code) }
}

/// By a signal, as MPICH's launcher leaves the other ranks running when one has merely left with `_exit`.
pub(in crate::transport) fn kill() -> ! {
    // SAFETY: no memory is involved.
    unsafe {
        libc::kill(libc::getpid(), libc::SIGKILL);
        libc::_exit(1)
    }
}

/// Stops this process with all its threads, until a signal lets it go on.
#[cfg(feature = "faults")]
pub(in crate::transport) fn stop() {
    // SAFETY: no memory is involved.
    unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
}

/// Sets how many threads the process's BLAS uses, if it is OpenBLAS or MKL, linked dynamically; says whether it took effect. Local.
///
/// Without it each rank of a node starts as many threads as the node has cores.
pub fn set_blas_threads(threads: usize) -> bool {
    let Ok(threads) = c_int::try_from(threads) else { return false };
    let libraries = [
        (c"openblas_set_num_threads", c"openblas_get_num_threads"),
        (c"MKL_Set_Num_Threads", c"MKL_Get_Max_Threads"),
    ];
    libraries.iter().any(|(set, get)| {
        let (Some(set), Some(get)) = (symbol(set), symbol(get)) else {
            return false;
        };
        // SAFETY: these symbols are C functions of these signatures in both libraries.
        unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(set.as_ptr())(threads);
            std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(get.as_ptr())() == threads
        }
    })
}

fn symbol(name: &CStr) -> Option<std::ptr::NonNull<c_void>> {
    // SAFETY: looks a name up in what is loaded; the name is nul-terminated.
    std::ptr::NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}

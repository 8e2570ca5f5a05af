//! The functions of the CUDA driver that cust links against, defined here: each finds its namesake in `libcuda.so.1` when it is first called.
//!
//! So neither the linker nor the loader needs the driver, and a program runs where there is none. It also keeps cust sound: codes of newer
//! drivers, which cust's closed enum lacks, become `CUDA_ERROR_UNKNOWN`, and [`last_code`] has what the driver said.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ushort, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use cust::sys::*;

/// Where the driver is looked for, in this order.
const LIBRARIES: [&CStr; 2] = [c"libcuda.so.1", c"/usr/local/nvidia/lib64/libcuda.so.1"];

/// Finds a function of the driver by its name; null where there is none.
pub type Symbols = fn(&CStr) -> *mut c_void;

static SYMBOLS: OnceLock<Option<Symbols>> = OnceLock::new();
static LIBRARY: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

thread_local! {
    static LAST: Cell<u32> = const { Cell::new(0) };
}

/// Takes another driver than the system's, for tests. Local. False if the driver was looked for before; nothing changes then.
///
/// # Safety
/// Each function that `symbols` returns must have the signature of the driver's function of that name, and live as long as the program.
pub unsafe fn install(symbols: Symbols) -> bool {
    SYMBOLS.set(Some(symbols)).is_ok()
}

/// Whether a driver library was found. Local; looks for it at the first call.
pub fn is_there() -> bool {
    matches!(symbols(), Some(symbols) if !symbols(c"cuInit").is_null())
}

/// The code of the last call that failed on this thread, as the driver gave it; 0 before the first.
pub fn last_code() -> u32 {
    LAST.get()
}

fn symbols() -> Option<Symbols> {
    *SYMBOLS.get_or_init(|| {
        LIBRARIES.iter().find_map(|name| {
            // SAFETY: the name is a C string; loading the driver runs its initialisers, as linking to it would.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            (!library.is_null()).then(|| {
                LIBRARY.store(library, Ordering::Release);
                of_library as Symbols
            })
        })
    })
}

fn of_library(name: &CStr) -> *mut c_void {
    // SAFETY: the library was opened before this function was handed out, and is never closed; the name is a C string.
    unsafe { libc::dlsym(LIBRARY.load(Ordering::Acquire), name.as_ptr()) }
}

/// The function of this name, which `slot` keeps.
fn resolve(slot: &AtomicPtr<c_void>, name: &CStr) -> Option<*mut c_void> {
    let known = slot.load(Ordering::Acquire);
    if !known.is_null() {
        return Some(known);
    }
    let found = symbols()?(name);
    slot.store(found, Ordering::Release);
    (!found.is_null()).then_some(found)
}

/// Notes a failure, and gives a code that cust's enum has.
fn known(code: u32) -> u32 {
    if code != 0 && code != CUresult::CUDA_ERROR_NOT_READY as u32 {
        LAST.set(code);
    }
    match code {
        // Later than CUDA 11.4.
        36 | 46 | 225 | 226 | 402 | 721 | 810..=812 | 912..=998 => CUresult::CUDA_ERROR_UNKNOWN as u32,
        0..=8
        | 34
        | 100..=102
        | 200..=202
        | 205..=224
        | 300..=304
        | 400
        | 401
        | 500
        | 600
        | 700..=705
        | 708..=720
        | 800..=809
        | 900..=911 => code,
        _ => CUresult::CUDA_ERROR_UNKNOWN as u32,
    }
}

/// The code of a call of a function that isn't there: no device for the first one, so that this is what a program is told.
fn missing(name: &CStr) -> u32 {
    let code = match (name == c"cuInit", symbols().is_some()) {
        (true, false) => CUresult::CUDA_ERROR_NO_DEVICE,
        (_, false) => CUresult::CUDA_ERROR_NOT_INITIALIZED,
        (_, true) => CUresult::CUDA_ERROR_NOT_SUPPORTED,
    };
    known(code as u32)
}

/// The driver's name of a code, without asking the driver.
///
/// # Safety
/// `text` must be valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { *text = crate::error::name(code).as_ptr() };
    0
}

macro_rules! forward {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        $(
            /// Forwards to the driver.
            ///
            /// # Safety
            /// As the driver's function of this name.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "names of the driver's header")]
            #[allow(clippy::too_many_arguments, reason = "the driver's")]
            unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
                static SLOT: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
                // SAFETY: a name without a NUL, and one at its end.
                let name = unsafe { CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) };
                match resolve(&SLOT, name) {
                    Some(function) => {
                        // SAFETY: the driver's function of this name has this signature (cust_raw has it from the driver's header), and the
                        // caller keeps to its contract.
                        known(unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> u32>(function)($($argument),*) })
                    }
                    None => missing(name),
                }
            }
        )*

        /// All of them.
        #[doc(hidden)]
        pub const FORWARDED: &[&str] = &[$(stringify!($name)),*];
    };
}

include!("forward.rs");

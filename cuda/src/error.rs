//! What the driver says when something fails, with the raw code.

use std::ffi::CStr;

use crate::driver;

/// A result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why something on a GPU failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no driver, or it knows no device.
    #[error("no CUDA device: {why}")]
    NoDevice {
        /// What was looked for.
        why: String,
    },
    /// There is no device of this number.
    #[error("no CUDA device {ordinal}: there are {count}, numbered from 0")]
    NoSuchDevice {
        /// The number asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// The device has no memory left, also after all that was cached was given back.
    #[error("CUDA device {ordinal} has no memory for {asked} bytes: {free} of {total} are free (code {code})")]
    OutOfMemory {
        /// The device.
        ordinal: u32,
        /// Bytes asked for.
        asked: usize,
        /// Bytes free then.
        free: usize,
        /// Bytes of the device.
        total: usize,
        /// The driver's code.
        code: u32,
    },
    /// A call of the driver failed.
    #[error("CUDA device {ordinal}: {operation} failed with {name} (code {code}){}", cure(*code))]
    Driver {
        /// The device.
        ordinal: u32,
        /// What was asked.
        operation: String,
        /// The driver's code.
        code: u32,
        /// Its name.
        name: &'static str,
    },
    /// Operands that don't go together.
    #[error("{operation}: {what}")]
    Argument {
        /// What was asked.
        operation: &'static str,
        /// What is wrong with it.
        what: String,
    },
}

impl Error {
    /// The driver's code, if it gave one.
    pub fn code(&self) -> Option<u32> {
        match self {
            Error::OutOfMemory { code, .. } | Error::Driver { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// The call that just failed on this thread.
    pub(crate) fn last(ordinal: u32, operation: impl Into<String>) -> Self {
        let code = driver::last_code();
        Error::Driver {
            ordinal,
            operation: operation.into(),
            code,
            name: name(code).to_str().unwrap_or_default(),
        }
    }

    pub(crate) fn argument(operation: &'static str, what: impl Into<String>) -> Self {
        Error::Argument {
            operation,
            what: what.into(),
        }
    }
}

/// What helps, for codes that a user can do something about.
fn cure(code: u32) -> &'static str {
    match code {
        46 => "; another process owns the device in exclusive mode: run one rank a device, or start MPS",
        100 | 101 => "; set CUDA_VISIBLE_DEVICES, or ask the scheduler for a device",
        209 | 218 | 221 | 222 => {
            "; the driver refuses the kernels: it must be of CUDA 9 or newer, and the device of compute capability 7.0 or newer"
        }
        700 | 716 | 719 => "; the device's context is lost: end the program",
        802 | 803 => "; the driver isn't ready, or isn't of the version of its libraries",
        805..=809 => "; look at the MPS daemon, or unset CUDA_MPS_PIPE_DIRECTORY",
        810 => "; the MPS client was ended",
        _ => "",
    }
}

/// The name of a code in the driver's header.
pub(crate) fn name(code: u32) -> &'static CStr {
    match code {
        0 => c"CUDA_SUCCESS",
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        3 => c"CUDA_ERROR_NOT_INITIALIZED",
        4 => c"CUDA_ERROR_DEINITIALIZED",
        34 => c"CUDA_ERROR_STUB_LIBRARY",
        46 => c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        100 => c"CUDA_ERROR_NO_DEVICE",
        101 => c"CUDA_ERROR_INVALID_DEVICE",
        200 => c"CUDA_ERROR_INVALID_IMAGE",
        201 => c"CUDA_ERROR_INVALID_CONTEXT",
        209 => c"CUDA_ERROR_NO_BINARY_FOR_GPU",
        214 => c"CUDA_ERROR_ECC_UNCORRECTABLE",
        218 => c"CUDA_ERROR_INVALID_PTX",
        221 => c"CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
        222 => c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        304 => c"CUDA_ERROR_OPERATING_SYSTEM",
        400 => c"CUDA_ERROR_INVALID_HANDLE",
        500 => c"CUDA_ERROR_NOT_FOUND",
        600 => c"CUDA_ERROR_NOT_READY",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        701 => c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        702 => c"CUDA_ERROR_LAUNCH_TIMEOUT",
        709 => c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
        716 => c"CUDA_ERROR_MISALIGNED_ADDRESS",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        800 => c"CUDA_ERROR_NOT_PERMITTED",
        801 => c"CUDA_ERROR_NOT_SUPPORTED",
        802 => c"CUDA_ERROR_SYSTEM_NOT_READY",
        803 => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        804 => c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        805 => c"CUDA_ERROR_MPS_CONNECTION_FAILED",
        806 => c"CUDA_ERROR_MPS_RPC_FAILURE",
        807 => c"CUDA_ERROR_MPS_SERVER_NOT_READY",
        808 => c"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
        809 => c"CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED",
        810 => c"CUDA_ERROR_MPS_CLIENT_TERMINATED",
        999 => c"CUDA_ERROR_UNKNOWN",
        _ => c"a code of the driver's header",
    }
}

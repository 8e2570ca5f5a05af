//! A device of this process: its context, streams, kernels and memory.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cust::context::{Context, CurrentContext};
use cust::device::{Device, DeviceAttribute};
use cust::event::{Event, EventFlags};
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUfunction, CUresult, CUstream};
use cust::{CudaFlags, error::CudaError};

use crate::memory::{Pool, Staging};
use crate::{Error, Result, driver};

/// The kernels, as PTX.
const MODULES: [&str; 2] = [include_str!("../kernels/optim.ptx"), include_str!("../kernels/ops.ptx")];
/// Threads of a block; the kernels say so too.
pub(crate) const BLOCK: u32 = 256;

/// Devices that are open, without holding them open.
static OPEN: Mutex<Vec<(u32, Weak<Inner>)>> = Mutex::new(Vec::new());

/// A device that this process uses. Cloning shares it; it is closed when the last clone and the last memory on it are dropped.
#[derive(Clone)]
pub struct Gpu(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub ordinal: u32,
    name: String,
    total: usize,
    pub pool: Mutex<Pool>,
    pub staging: Mutex<Staging>,
    functions: Mutex<HashMap<String, Function>>,
    pub stream: Stream,
    pub copies: Stream,
    pub reads: Stream,
    modules: Vec<Module>,
    /// The last to be dropped.
    context: Context,
}

/// A kernel of one of the modules.
#[derive(Clone, Copy)]
struct Function(CUfunction);

// SAFETY: the driver's handles may be used from any thread; it lives as long as the modules beside it.
unsafe impl Send for Function {}

/// Locks, whatever happened to the thread that held the lock before.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether there is a driver with a device, and how many. Local; loads the driver at the first call.
///
/// # Errors
/// [`Error::NoDevice`]: run where there is a GPU and its driver, and make it visible (`CUDA_VISIBLE_DEVICES`).
pub fn devices() -> Result<u32> {
    let none = |why: String| Error::NoDevice { why };
    if !driver::is_there() {
        return Err(none("driver library libcuda.so.1 not found".into()));
    }
    let said = |operation: &str| {
        let error = Error::last(0, operation);
        none(error.to_string())
    };
    cust::init(CudaFlags::empty()).map_err(|_| said("cuInit"))?;
    match Device::num_devices() {
        Ok(0) => Err(none("the driver knows none".into())),
        Ok(count) => Ok(count),
        Err(_) => Err(said("cuDeviceGetCount")),
    }
}

impl Gpu {
    /// Opens the device of this number, or gives the one that is open. Local; the first time, it blocks while the driver makes a context and
    /// compiles the kernels, which can take a second.
    ///
    /// # Errors
    /// [`Error::NoDevice`] and [`Error::NoSuchDevice`]; [`Error::Driver`] where the driver refuses: the device is exclusive to another process (46),
    /// MPS isn't ready (805 to 810), or it can't compile the kernels (218, 221, 222).
    pub fn open(ordinal: u32) -> Result<Gpu> {
        let mut open = lock(&OPEN);
        open.retain(|(_, gpu)| gpu.strong_count() > 0);
        if let Some(gpu) = open.iter().find(|(n, _)| *n == ordinal).and_then(|(_, gpu)| gpu.upgrade()) {
            return Ok(Gpu(gpu));
        }
        let count = devices()?;
        if ordinal >= count {
            return Err(Error::NoSuchDevice { ordinal, count });
        }
        let failed = |operation: &'static str| move |_: CudaError| Error::last(ordinal, operation);
        let device = Device::get_device(ordinal).map_err(failed("cuDeviceGet"))?;
        let name = device.name().map_err(failed("cuDeviceGetName"))?;
        let total = device.total_memory().map_err(failed("cuDeviceTotalMem"))?;
        let context = Context::new(device).map_err(failed("making a context"))?;
        CurrentContext::set_current(&context).map_err(failed("cuCtxSetCurrent"))?;
        let modules = MODULES.iter().map(|ptx| Module::from_ptx(ptx, &[]));
        let modules = modules
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(failed("loading the kernels"))?;
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None).map_err(failed("cuStreamCreate"))?;
        let copies = Stream::new(StreamFlags::NON_BLOCKING, None).map_err(failed("cuStreamCreate"))?;
        let reads = Stream::new(StreamFlags::NON_BLOCKING, None).map_err(failed("cuStreamCreate"))?;
        let inner = Arc::new(Inner {
            ordinal,
            name,
            total,
            pool: Mutex::default(),
            staging: Mutex::default(),
            functions: Mutex::default(),
            stream,
            copies,
            reads,
            modules,
            context,
        });
        open.push((ordinal, Arc::downgrade(&inner)));
        Ok(Gpu(inner))
    }

    /// Its number among the devices that this process sees, from 0.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Its name, as the driver says it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Bytes of memory that it has.
    pub fn total_memory(&self) -> usize {
        self.0.total
    }

    /// Bytes of memory that are free now for anyone.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn free_memory(&self) -> Result<usize> {
        self.bind()?;
        Ok(self.0.free_memory())
    }

    /// The PCI address of a device (`0000:3b:00.0`), to find the cores near it. Local; makes no context.
    ///
    /// # Errors
    /// As [`devices`], and [`Error::NoSuchDevice`].
    pub fn pci_address(ordinal: u32) -> Result<String> {
        let count = devices()?;
        if ordinal >= count {
            return Err(Error::NoSuchDevice { ordinal, count });
        }
        let failed = |_: CudaError| Error::last(ordinal, "cuDeviceGetAttribute");
        let device = Device::get_device(ordinal).map_err(failed)?;
        let number = |attribute| device.get_attribute(attribute).map_err(failed);
        let (domain, bus, slot) = (
            number(DeviceAttribute::PciDomainId)?,
            number(DeviceAttribute::PciBusId)?,
            number(DeviceAttribute::PciDeviceId)?,
        );
        Ok(format!("{domain:04x}:{bus:02x}:{slot:02x}.0"))
    }

    /// Blocks until all work on the device that this process asked for is done.
    ///
    /// # Errors
    /// [`Error::Driver`]: work failed since the last wait; its results are lost.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        self.0.copies.synchronize().map_err(|_| self.failed("waiting for copies"))?;
        self.0.stream.synchronize().map_err(|_| self.failed("waiting for the device"))
    }

    /// Seconds that the device takes for the work that is asked for in `work`, by its own clock. Blocks until it is done.
    ///
    /// # Errors
    /// What `work` returns, and [`Error::Driver`].
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.bind()?;
        let [start, end] = [(); 2].map(|()| Event::new(EventFlags::DEFAULT).map_err(|_| self.failed("cuEventCreate")));
        let (start, end) = (start?, end?);
        start.record(&self.0.stream).map_err(|_| self.failed("cuEventRecord"))?;
        work()?;
        end.record(&self.0.stream).map_err(|_| self.failed("cuEventRecord"))?;
        end.synchronize().map_err(|_| self.failed("cuEventSynchronize"))?;
        let milliseconds = end.elapsed_time_f32(&start).map_err(|_| self.failed("cuEventElapsedTime"))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    /// Makes its context current on this thread.
    pub(crate) fn bind(&self) -> Result<()> {
        CurrentContext::set_current(&self.0.context).map_err(|_| self.failed("cuCtxSetCurrent"))
    }

    /// The error of the call that just failed on this thread.
    pub(crate) fn failed(&self, operation: impl Into<String>) -> Error {
        Error::last(self.0.ordinal, operation)
    }

    pub(crate) fn check(&self, code: CUresult, operation: &'static str) -> Result<()> {
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            _ => Err(self.failed(operation)),
        }
    }

    /// Makes one stream wait for what was asked of another.
    pub(crate) fn after(&self, first: CUstream, second: CUstream) -> Result<()> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the pointer is valid for a write; the streams are the caller's; the driver keeps a destroyed event until nothing waits for it.
        unsafe {
            self.check(
                sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32),
                "cuEventCreate",
            )?;
            let ordered = self
                .check(sys::cuEventRecord(event, first), "cuEventRecord")
                .and_then(|()| self.check(sys::cuStreamWaitEvent(second, event, 0), "cuStreamWaitEvent"));
            let _ = sys::cuEventDestroy_v2(event);
            ordered
        }
    }

    fn function(&self, name: &str) -> Result<Function> {
        let mut functions = lock(&self.0.functions);
        if let Some(&function) = functions.get(name) {
            return Ok(function);
        }
        let found = self.0.modules.iter().find_map(|module| match module.get_function(name) {
            Err(CudaError::NotFound) => None,
            found => Some(found),
        });
        let found = found.unwrap_or(Err(CudaError::NotFound));
        let function = Function(found.map_err(|_| self.failed(format!("finding kernel {name}")))?.to_raw());
        functions.insert(name.into(), function);
        Ok(function)
    }

    /// Puts a kernel on the stream, with `blocks` x `rows` blocks of [`BLOCK`] threads.
    ///
    /// # Safety
    /// `arguments` must point to values of the types of the kernel's parameters, and the device memory that they name must hold as many elements
    /// as the kernel touches.
    pub(crate) unsafe fn launch(&self, name: &str, (blocks, rows): (usize, usize), arguments: &mut [*mut c_void]) -> Result<()> {
        if blocks == 0 || rows == 0 {
            return Ok(());
        }
        let too_many = |_| Error::argument("launch", format!("{name}: {blocks} x {rows} blocks are more than a grid holds"));
        let (blocks, rows) = (
            i32::try_from(blocks).map_err(too_many)? as u32,
            u16::try_from(rows).map_err(too_many)?.into(),
        );
        self.bind()?;
        let Function(function) = self.function(name)?;
        let stream = self.0.stream.as_inner();
        // SAFETY: the function is of a module that lives as long as this device; arguments are the caller's promise.
        let code = unsafe {
            cust::sys::cuLaunchKernel(
                function,
                blocks,
                rows,
                1,
                BLOCK,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            _ => Err(self.failed(format!("launching {name}"))),
        }
    }

    /// Whether the PTX has a kernel of this name.
    #[doc(hidden)]
    pub fn has_kernel(name: &str) -> bool {
        CString::new(name).is_ok() && MODULES.iter().any(|ptx| ptx.contains(&format!(".entry {name}(")))
    }
}

impl Inner {
    pub fn free_memory(&self) -> usize {
        cust::memory::mem_get_info().map_or(0, |(free, _)| free)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Errors have nobody to go to here: what the driver doesn't free, it frees with the process.
        let _ = CurrentContext::set_current(&self.context);
        let _ = self.copies.synchronize();
        let _ = self.reads.synchronize();
        let _ = self.stream.synchronize();
        lock(&self.staging).free();
        lock(&self.pool).free_all();
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({}, {})", self.0.ordinal, self.0.name)
    }
}

//! The driver's functions.
#![allow(non_snake_case, reason = "names of the driver's header")]
// Each function is what the driver's header says of its namesake; the pointers it gets are its caller's promise.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::ptx;
use crate::state::{CURRENT, Event, State, Stream, Work, state};

const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const NO_DEVICE: u32 = 101;
const INVALID_PTX: u32 = 218;
const INVALID_CONTEXT: u32 = 201;
const INVALID_HANDLE: u32 = 400;
const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;

/// Functions that are here, by name; and for each its failures on purpose, before it does anything.
macro_rules! functions {
    ($(fn $name:ident($state:ident $(, $argument:ident: $type:ty)* $(,)?) $body:block)*) => {
        $(unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            let mut guard = state();
            if let Some(code) = guard.failure(stringify!($name)) {
                return code;
            }
            let $state: &mut State = &mut guard;
            let _ = &$state;
            code(|| $body)
        })*

        /// The function of this name; null for one that isn't here.
        pub fn symbol(name: &CStr) -> *mut c_void {
            match name.to_str() {
                $(Ok(stringify!($name)) => $name as *mut c_void,)*
                _ => std::ptr::null_mut(),
            }
        }
    };
}

fn code(call: impl FnOnce() -> Result<(), u32>) -> u32 {
    call().err().unwrap_or(0)
}

/// The device whose context is current.
fn current(state: &State) -> Result<u32, u32> {
    let device = CURRENT.get().ok_or(INVALID_CONTEXT)?;
    let found = state.devices.get(&device).filter(|d| d.retained > 0).ok_or(INVALID_CONTEXT)?;
    fault(found.fault).map(|()| device)
}

fn fault(code: u32) -> Result<(), u32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// Puts work on a stream of the current device.
fn push(state: &mut State, stream: u64, work: Work) -> Result<(), u32> {
    let device = current(state)?;
    let found = state
        .streams
        .get_mut(&stream)
        .filter(|s| s.device == device)
        .ok_or(INVALID_HANDLE)?;
    found.work.push_back(work);
    Ok(())
}

/// Writes a result where the caller wants it.
macro_rules! give {
    ($place:expr, $value:expr) => {{
        let (place, value) = ($place, $value);
        if place.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's pointer for this result.
        unsafe { *place = value };
        Ok::<(), u32>(())
    }};
}

functions! {
    fn cuInit(state, _flags: c_uint) { if state.count == 0 { Err(100) } else { Ok(()) } }
    fn cuDriverGetVersion(_state, version: *mut c_int) { give!(version, 12000) }
    fn cuDeviceGetCount(state, count: *mut c_int) { give!(count, state.count as c_int) }
    fn cuDeviceGet(state, device: *mut c_int, ordinal: c_int) {
        if ordinal < 0 || ordinal as u32 >= state.count {
            return Err(NO_DEVICE);
        }
        give!(device, ordinal)
    }
    fn cuDeviceGetName(_state, name: *mut c_char, length: c_int, _device: c_int) {
        let text = b"a device that isn't there\0";
        let length = text.len().min(length as usize);
        // SAFETY: the caller's buffer of that length.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, length) };
        Ok(())
    }
    fn cuDeviceTotalMem_v2(state, bytes: *mut usize, _device: c_int) { give!(bytes, state.bytes) }
    fn cuDeviceGetAttribute(_state, value: *mut c_int, attribute: c_uint, device: c_int) {
        // PCI bus, slot and domain; multiprocessors.
        let found = match attribute { 33 => 0x3b + device, 34 | 50 => 0, 16 => 132, _ => 1 };
        give!(value, found)
    }

    fn cuDevicePrimaryCtxRetain(state, context: *mut u64, device: c_int) {
        let device = device as u32;
        if device >= state.count {
            return Err(NO_DEVICE);
        }
        state.memory(device);
        state.devices.entry(device).or_default().retained += 1;
        give!(context, u64::from(device) + 1)
    }
    fn cuDevicePrimaryCtxRelease_v2(state, device: c_int) {
        let found = state.devices.get_mut(&(device as u32)).filter(|d| d.retained > 0).ok_or(INVALID_CONTEXT)?;
        found.retained -= 1;
        Ok(())
    }
    fn cuCtxSetCurrent(state, context: u64) {
        if context > u64::from(state.count) {
            return Err(INVALID_CONTEXT);
        }
        CURRENT.set((context > 0).then(|| context as u32 - 1));
        Ok(())
    }
    fn cuCtxGetCurrent(_state, context: *mut u64) { give!(context, CURRENT.get().map_or(0, |device| u64::from(device) + 1)) }
    fn cuCtxSynchronize(state) {
        let device = current(state)?;
        fault(state.drain_all(device))
    }

    fn cuModuleLoadDataEx(state, module: *mut u64, image: *const c_char, _n: c_uint, _options: *mut c_uint, _values: *mut *mut c_void) {
        current(state)?;
        // SAFETY: an image of PTX is a C string.
        let text = unsafe { CStr::from_ptr(image) }.to_str().map_err(|_| INVALID_PTX)?;
        let kernels = match state.read.iter().find(|(known, _)| known == text) {
            Some((_, kernels)) => kernels.clone(),
            None => {
                let kernels = ptx::parse(text).inspect_err(|why| eprintln!("fake driver: {why}")).map_err(|_| INVALID_PTX)?;
                let kernels: Vec<_> = kernels.into_iter().map(Arc::new).collect();
                state.read.push((text.into(), kernels.clone()));
                kernels
            }
        };
        let handle = state.handle();
        state.modules.insert(handle, kernels);
        give!(module, handle)
    }
    fn cuModuleUnload(state, module: u64) {
        state.modules.remove(&module).ok_or(INVALID_HANDLE)?;
        state.functions.retain(|_, (of, _)| *of != module);
        Ok(())
    }
    fn cuModuleGetFunction(state, function: *mut u64, module: u64, name: *const c_char) {
        // SAFETY: the caller's C string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let kernels = state.modules.get(&module).ok_or(INVALID_HANDLE)?;
        let kernel = kernels.iter().find(|kernel| kernel.name == name).ok_or(NOT_FOUND)?.clone();
        let handle = state.handle();
        state.functions.insert(handle, (module, kernel));
        give!(function, handle)
    }

    fn cuStreamCreateWithPriority(state, stream: *mut u64, _flags: c_uint, _priority: c_int) {
        let device = current(state)?;
        let handle = state.handle();
        state.streams.insert(handle, Stream { device, work: VecDeque::new() });
        give!(stream, handle)
    }
    fn cuStreamCreate(state, stream: *mut u64, _flags: c_uint) {
        let device = current(state)?;
        let handle = state.handle();
        state.streams.insert(handle, Stream { device, work: VecDeque::new() });
        give!(stream, handle)
    }
    fn cuStreamDestroy_v2(state, stream: u64) {
        state.drain(stream);
        state.streams.remove(&stream).map(drop).ok_or(INVALID_HANDLE)
    }
    fn cuStreamSynchronize(state, stream: u64) {
        current(state)?;
        fault(state.drain(stream))
    }
    fn cuStreamWaitEvent(state, stream: u64, event: u64, _flags: c_uint) {
        state.events.get_mut(&event).filter(|e| !e.destroyed).ok_or(INVALID_HANDLE)?.waits += 1;
        push(state, stream, Work::Wait(event))
    }

    fn cuEventCreate(state, event: *mut u64, _flags: c_uint) {
        current(state)?;
        let handle = state.handle();
        state.events.insert(handle, Event::default());
        give!(event, handle)
    }
    fn cuEventRecord(state, event: u64, stream: u64) {
        let found = state.events.get_mut(&event).filter(|e| !e.destroyed).ok_or(INVALID_HANDLE)?;
        (found.stream, found.records) = (stream, found.records + 1);
        push(state, stream, Work::Record(event))
    }
    fn cuEventDestroy_v2(state, event: u64) {
        state.events.get_mut(&event).filter(|e| !e.destroyed).ok_or(INVALID_HANDLE)?.destroyed = true;
        state.release(event);
        Ok(())
    }
    fn cuEventSynchronize(state, event: u64) {
        let device = current(state)?;
        state.reach(event);
        fault(state.devices.get(&device).map_or(0, |d| d.fault))
    }
    fn cuEventQuery(state, event: u64) {
        let found = state.events.get(&event).ok_or(INVALID_HANDLE)?;
        if found.records > 0 { Err(NOT_READY) } else { Ok(()) }
    }
    fn cuEventElapsedTime(state, milliseconds: *mut f32, start: u64, end: u64) {
        let done = |event| state.events.get(event).is_some_and(|e: &Event| e.records == 0);
        if !done(&start) || !done(&end) {
            return Err(NOT_READY);
        }
        // Time means nothing here.
        give!(milliseconds, 1.0)
    }

    fn cuMemAlloc_v2(state, pointer: *mut u64, bytes: usize) {
        let device = current(state)?;
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let address = state.memory(device).allocate(bytes).ok_or(OUT_OF_MEMORY)?;
        give!(pointer, address)
    }
    fn cuMemFree_v2(state, pointer: u64) {
        let device = current(state)?;
        state.drain_all(device);
        if state.memory(device).free(pointer) { Ok(()) } else { Err(INVALID_VALUE) }
    }
    fn cuMemGetInfo_v2(state, free: *mut usize, total: *mut usize) {
        let device = current(state)?;
        let (used, all) = { let memory = state.memory(device); (memory.used, memory.total) };
        give!(total, all)?;
        give!(free, all - used)
    }
    fn cuMemAllocHost_v2(state, pointer: *mut *mut c_void, bytes: usize) {
        current(state)?;
        let mut memory = vec![0_u64; bytes.div_ceil(8)];
        let address = memory.as_mut_ptr();
        state.pinned.insert(address as u64, memory);
        give!(pointer, address.cast())
    }
    fn cuMemFreeHost(state, pointer: u64) {
        current(state)?;
        state.pinned.remove(&pointer).map(drop).ok_or(INVALID_VALUE)
    }

    fn cuMemcpyHtoDAsync_v2(state, target: u64, source: usize, bytes: usize, stream: u64) {
        push(state, stream, Work::ToDevice { target, source, bytes })
    }
    fn cuMemcpyDtoHAsync_v2(state, target: usize, source: u64, bytes: usize, stream: u64) {
        push(state, stream, Work::ToHost { target, source, bytes })?;
        // SAFETY: the caller's memory, which it may not read before the copy is done.
        unsafe { std::ptr::write_bytes(target as *mut u8, 0xee, bytes) };
        Ok(())
    }
    fn cuMemcpyDtoDAsync_v2(state, target: u64, source: u64, bytes: usize, stream: u64) {
        push(state, stream, Work::Within { target, source, bytes })
    }
    fn cuMemsetD8Async(state, target: u64, byte: u8, bytes: usize, stream: u64) {
        push(state, stream, Work::Fill { target, byte, bytes })
    }

    fn cuLaunchKernel(
        state, function: u64, x: c_uint, y: c_uint, z: c_uint, threads: c_uint, threads_y: c_uint, threads_z: c_uint,
        shared: c_uint, stream: u64, arguments: *mut *mut c_void, _extra: *mut *mut c_void,
    ) {
        let (_, kernel) = state.functions.get(&function).ok_or(INVALID_HANDLE)?.clone();
        if [x, y, threads].contains(&0) || [z, threads_y, threads_z] != [1; 3] || threads > kernel.threads || shared != 0 {
            return Err(INVALID_VALUE);
        }
        let mut bytes = vec![0xee; kernel.parameters.last().map_or(0, |(offset, size)| offset + size)];
        for (n, &(offset, size)) in kernel.parameters.iter().enumerate() {
            // SAFETY: the caller gives a pointer for each parameter of the kernel.
            let value = unsafe { std::slice::from_raw_parts((*arguments.add(n)).cast::<u8>(), size) };
            bytes[offset..offset + size].copy_from_slice(value);
        }
        state.launches += 1;
        push(state, stream, Work::Launch { kernel, grid: [x, y], threads, arguments: bytes })
    }
}

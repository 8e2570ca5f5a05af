//! Device memory: blocks that are used again, and the pinned host memory that copies go through.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cust::event::{Event, EventFlags};
use cust::stream::Stream;
use cust::sys::{self, CUresult};

use crate::gpu::lock;
use crate::{Error, Gpu, Result};

/// Where blocks begin and end, in bytes: what the widest access of a kernel needs.
const ALIGNMENT: usize = 16;
/// Bytes of each half of the pinned memory.
const STAGING: usize = 4 << 20;

/// Memory that was freed, by size: the next to ask for that size gets it, without the driver.
///
/// All work is in the order of one stream, so whoever gets a block comes after whoever had it.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    free: HashMap<usize, Vec<u64>>,
}

impl Pool {
    /// Gives all cached blocks back to the driver; nothing may use them any more.
    pub fn free_all(&mut self) {
        for pointer in self.free.drain().flat_map(|(_, blocks)| blocks) {
            // SAFETY: it was allocated by the driver, and is in the pool once; the caller has waited for the device.
            let _ = unsafe { sys::cuMemFree_v2(pointer) };
        }
    }
}

/// Memory of a device, in one piece. Dropping it gives it to the next to ask.
pub(crate) struct Block {
    pointer: u64,
    bytes: usize,
    /// A copy from the host that isn't known to be done: the stream waits for it before it uses the block.
    copy: Mutex<Option<Event>>,
    gpu: Gpu,
}

impl Block {
    /// A block of at least this many bytes, of any content.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Arc<Block>> {
        let size = bytes.next_multiple_of(ALIGNMENT);
        let block = |pointer| {
            Arc::new(Block {
                pointer,
                bytes: size,
                copy: Mutex::new(None),
                gpu: gpu.clone(),
            })
        };
        if size == 0 {
            return Ok(block(0));
        }
        if let Some(pointer) = lock(&gpu.0.pool).free.get_mut(&size).and_then(Vec::pop) {
            return Ok(block(pointer));
        }
        gpu.bind()?;
        let mut pointer = 0;
        // SAFETY: the pointer is valid for a write.
        let mut allocate = || unsafe { sys::cuMemAlloc_v2(&mut pointer, size) };
        let mut code = allocate();
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            gpu.synchronize()?;
            lock(&gpu.0.pool).free_all();
            code = allocate();
        }
        match code {
            CUresult::CUDA_SUCCESS => Ok(block(pointer)),
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(Error::OutOfMemory {
                ordinal: gpu.ordinal(),
                asked: size,
                free: gpu.0.free_memory(),
                total: gpu.total_memory(),
                code: code as u32,
            }),
            _ => Err(gpu.failed("cuMemAlloc")),
        }
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Its address, for work on the stream, which waits for the copy that fills it.
    pub fn pointer(&self) -> Result<u64> {
        if let Some(copy) = lock(&self.copy).take() {
            self.gpu.bind()?;
            self.gpu.0.wait_for(&self.gpu.0.stream, copy, &self.gpu)?;
        }
        Ok(self.pointer)
    }

    /// Fills it from its beginning. The source is read before this returns; the copy itself goes on beside the stream.
    pub fn fill<'a>(&self, sources: impl Iterator<Item = (usize, &'a [u8])>) -> Result<()> {
        let gpu = &self.gpu;
        gpu.bind()?;
        // Who had this block before may still use it.
        let before = gpu.0.event(&gpu.0.stream, gpu)?;
        gpu.0.wait_for(&gpu.0.copies, before, gpu)?;
        let mut staging = lock(&gpu.0.staging);
        let filled = Packing {
            block: self,
            staging: &mut staging,
            start: 0,
            used: 0,
        }
        .fill(sources);
        drop(staging);
        // Also after a failure the stream must not overtake copies that were made.
        let made = gpu.0.event_or_wait(&gpu.0.copies, gpu);
        *lock(&self.copy) = made?;
        filled
    }

    /// Reads from it. Blocks until the work before is done and the bytes are there.
    pub fn read(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        let source = self.begin_read()? + offset as u64;
        let mut parts = target.chunks_mut(STAGING).enumerate();
        parts.try_for_each(|(n, part)| self.read_part(source + (n * STAGING) as u64, part))
    }

    /// Gives its bytes to `each`, some at a time. Blocks until the work before is done, and not for what is asked of the device meanwhile.
    pub fn read_in_parts<E: From<Error>>(
        &self,
        offset: usize,
        length: usize,
        mut each: impl FnMut(&[u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let source = self.begin_read()? + offset as u64;
        let mut bytes = vec![0; length.min(STAGING)];
        for start in (0..length).step_by(STAGING) {
            let part = &mut bytes[..STAGING.min(length - start)];
            self.read_part(source + start as u64, part)?;
            each(part)?;
        }
        Ok(())
    }

    /// Its address, for reads after the work before.
    fn begin_read(&self) -> Result<u64> {
        let (gpu, pointer) = (&self.gpu, self.pointer()?);
        gpu.bind()?;
        let before = gpu.0.event(&gpu.0.stream, gpu)?;
        gpu.0.wait_for(&gpu.0.reads, before, gpu)?;
        Ok(pointer)
    }

    /// Reads at most STAGING bytes.
    fn read_part(&self, source: u64, part: &mut [u8]) -> Result<()> {
        let gpu = &self.gpu;
        gpu.bind()?;
        let mut staging = lock(&gpu.0.staging);
        let half = staging.half(0, gpu)?;
        // SAFETY: the half is pinned memory of STAGING bytes that nobody else uses while it is locked, and is waited for below.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(half.cast(), source, part.len(), gpu.0.reads.as_inner()) };
        gpu.check(code, "copying from the device")?;
        gpu.0.reads.synchronize().map_err(|_| gpu.failed("copying from the device"))?;
        // SAFETY: the copy is done; both sides hold as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(half, part.as_mut_ptr(), part.len()) };
        Ok(())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // A copy on its way must be before what the next owner does. If that can't be had, the memory isn't used again.
        let usable = self.bytes > 0 && self.pointer().is_ok();
        if usable {
            lock(&self.gpu.0.pool).free.entry(self.bytes).or_default().push(self.pointer);
        }
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({} bytes at {:#x})", self.bytes, self.pointer)
    }
}

impl crate::gpu::Inner {
    fn event(&self, stream: &Stream, gpu: &Gpu) -> Result<Event> {
        let event = Event::new(EventFlags::DISABLE_TIMING).map_err(|_| gpu.failed("cuEventCreate"))?;
        event.record(stream).map_err(|_| gpu.failed("cuEventRecord"))?;
        Ok(event)
    }

    /// As `event`; where there can be none, waits for the stream instead.
    fn event_or_wait(&self, stream: &Stream, gpu: &Gpu) -> Result<Option<Event>> {
        self.event(stream, gpu).map(Some).inspect_err(|_| {
            let _ = stream.synchronize();
        })
    }

    fn wait_for(&self, stream: &Stream, event: Event, gpu: &Gpu) -> Result<()> {
        let flags = cust::stream::StreamWaitEventFlags::DEFAULT;
        stream.wait_event(event, flags).map_err(|_| gpu.failed("cuStreamWaitEvent"))
    }
}

/// Pinned host memory in two halves: one is filled while the other is copied.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    /// Address of the first half; 0 until it is needed.
    start: usize,
    next: usize,
    /// The copy that last read each half.
    copies: [Option<Event>; 2],
}

impl Staging {
    /// A half that no copy reads any more.
    fn half(&mut self, half: usize, gpu: &Gpu) -> Result<*mut u8> {
        if self.start == 0 {
            let mut pointer: *mut c_void = std::ptr::null_mut();
            // SAFETY: the pointer is valid for a write.
            let code = unsafe { sys::cuMemAllocHost_v2(&mut pointer, 2 * STAGING) };
            gpu.check(code, "cuMemAllocHost")?;
            self.start = pointer as usize;
        }
        if let Some(copy) = &self.copies[half] {
            copy.synchronize().map_err(|_| gpu.failed("waiting for a copy to the device"))?;
            self.copies[half] = None;
        }
        Ok((self.start + half * STAGING) as *mut u8)
    }

    pub fn free(&mut self) {
        self.copies = [None, None];
        if self.start != 0 {
            // SAFETY: it was allocated above, and the caller has waited for all copies.
            let _ = unsafe { sys::cuMemFreeHost(self.start as *mut c_void) };
            self.start = 0;
        }
    }
}

/// Sources on their way into a block, in pieces of a half of the pinned memory.
struct Packing<'a> {
    block: &'a Block,
    staging: &'a mut Staging,
    /// Where the piece begins in the block.
    start: usize,
    /// Bytes of the piece that are in the half.
    used: usize,
}

impl Packing<'_> {
    fn fill<'a>(mut self, sources: impl Iterator<Item = (usize, &'a [u8])>) -> Result<()> {
        for (mut place, mut bytes) in sources {
            while !bytes.is_empty() {
                if place >= self.start + STAGING {
                    self.flush()?;
                    self.start = place;
                }
                let inside = place - self.start;
                let (now, later) = bytes.split_at(bytes.len().min(STAGING - inside));
                let half = self.staging.half(self.staging.next, self.block.gpu())?;
                // SAFETY: the half holds STAGING bytes, of which these end within; no copy reads it.
                unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), half.add(inside), now.len()) };
                self.used = inside + now.len();
                (place, bytes) = (place + now.len(), later);
            }
        }
        self.flush()
    }

    /// Copies the piece.
    fn flush(&mut self) -> Result<()> {
        if self.used == 0 {
            return Ok(());
        }
        let gpu = self.block.gpu();
        let half = self.staging.next;
        let (source, target) = (self.staging.half(half, gpu)?, self.block.pointer + self.start as u64);
        // SAFETY: the half is pinned memory that isn't written to until the event below has come; the piece lies within the block.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(target, source.cast(), self.used, gpu.0.copies.as_inner()) };
        gpu.check(code, "copying to the device")?;
        self.staging.next = 1 - half;
        self.used = 0;
        self.staging.copies[half] = gpu.0.event_or_wait(&gpu.0.copies, gpu)?;
        Ok(())
    }
}

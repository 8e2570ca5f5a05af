//! What the driver knows: contexts, streams and what waits on them, and failures made on purpose.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::memory::Memory;
use crate::ptx::Kernel;
use crate::run::Launch;

static STATE: Mutex<State> = Mutex::new(State::new());

thread_local! {
    /// The device whose context is current on this thread.
    pub(crate) static CURRENT: Cell<Option<u32>> = const { Cell::new(None) };
}

pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Contexts that are retained.
    pub contexts: usize,
    /// Allocations on devices.
    pub allocations: usize,
    /// Bytes of them.
    pub bytes: usize,
    /// Allocations of pinned memory.
    pub pinned: usize,
    /// Streams.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Modules.
    pub modules: usize,
}

/// What is alive now.
pub fn counts() -> Counts {
    let state = state();
    let memories = state.devices.values().filter_map(|d| d.memory.as_ref());
    Counts {
        contexts: state.devices.values().filter(|d| d.retained > 0).count(),
        allocations: memories.clone().map(Memory::count).sum(),
        bytes: memories.map(|m| m.used).sum(),
        pinned: state.pinned.len(),
        streams: state.streams.len(),
        events: state.events.values().filter(|e| !e.destroyed).count(),
        modules: state.modules.len(),
    }
}

/// Makes the call of a function after `after` more fail with a code, once; calls of other functions don't count.
pub fn fail(function: &str, after: usize, code: u32) {
    state().failures.insert(function.into(), (after, code));
}

/// Forgets failures that haven't come, and faults of devices that stay.
pub fn clear_failures() {
    let mut state = state();
    state.failures.clear();
    state.devices.values_mut().for_each(|d| d.fault = 0);
}

/// How many failures have come since the program began.
pub fn fault_count() -> usize {
    state().failed
}

/// How many kernels were launched since the program began.
pub fn launches() -> usize {
    state().launches
}

/// The number of devices, and bytes of memory of each; before the first is used.
pub fn set_devices(count: u32, bytes: usize) {
    let mut state = state();
    (state.count, state.bytes) = (count, bytes);
}

pub(crate) struct State {
    pub count: u32,
    pub bytes: usize,
    pub devices: BTreeMap<u32, Device>,
    pub modules: BTreeMap<u64, Vec<Arc<Kernel>>>,
    /// Each with its module.
    pub functions: BTreeMap<u64, (u64, Arc<Kernel>)>,
    /// Texts that were read before, since tests load the same ones often.
    pub read: Vec<(String, Vec<Arc<Kernel>>)>,
    pub streams: BTreeMap<u64, Stream>,
    pub events: BTreeMap<u64, Event>,
    pub pinned: BTreeMap<u64, Vec<u64>>,
    failures: BTreeMap<String, (usize, u32)>,
    failed: usize,
    pub launches: usize,
    next: u64,
}

#[derive(Default)]
pub(crate) struct Device {
    pub retained: usize,
    pub memory: Option<Memory>,
    /// The fault of a kernel, which stays.
    pub fault: u32,
}

pub(crate) struct Stream {
    pub device: u32,
    pub work: VecDeque<Work>,
}

#[derive(Default)]
pub(crate) struct Event {
    /// The stream it was recorded on last.
    pub stream: u64,
    /// Records of it that haven't happened.
    pub records: usize,
    /// Waits for it that haven't happened.
    pub waits: usize,
    pub destroyed: bool,
}

pub(crate) enum Work {
    ToDevice {
        target: u64,
        source: usize,
        bytes: usize,
    },
    ToHost {
        target: usize,
        source: u64,
        bytes: usize,
    },
    Within {
        target: u64,
        source: u64,
        bytes: usize,
    },
    Fill {
        target: u64,
        byte: u8,
        bytes: usize,
    },
    Launch {
        kernel: Arc<Kernel>,
        grid: [u32; 2],
        threads: u32,
        arguments: Vec<u8>,
    },
    Record(u64),
    Wait(u64),
}

impl State {
    const fn new() -> Self {
        State {
            count: 2,
            bytes: 1 << 30,
            devices: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            read: Vec::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            pinned: BTreeMap::new(),
            failures: BTreeMap::new(),
            failed: 0,
            launches: 0,
            next: 0x1000,
        }
    }

    /// A handle that wasn't given before.
    pub fn handle(&mut self) -> u64 {
        self.next += 0x10;
        self.next
    }

    /// Whether this call must fail, and how.
    pub fn failure(&mut self, function: &str) -> Option<u32> {
        let (left, code) = self.failures.get_mut(function)?;
        if *left > 0 {
            *left -= 1;
            return None;
        }
        let code = *code;
        self.failures.remove(function);
        self.failed += 1;
        Some(code)
    }

    /// The memory of the current device.
    pub fn memory(&mut self, device: u32) -> &mut Memory {
        let bytes = self.bytes;
        self.devices
            .entry(device)
            .or_default()
            .memory
            .get_or_insert_with(|| Memory::new(bytes))
    }

    /// Does what waits on a stream; the device's fault, if there is one.
    pub fn drain(&mut self, stream: u64) -> u32 {
        while let Some((device, work)) = self.take(stream) {
            self.perform(device, work);
        }
        let device = self.streams.get(&stream).map_or(0, |s| s.device);
        self.devices.get(&device).map_or(0, |d| d.fault)
    }

    /// Does what waits on all streams of a device.
    pub fn drain_all(&mut self, device: u32) -> u32 {
        let streams: Vec<u64> = self.streams.iter().filter(|(_, s)| s.device == device).map(|(&n, _)| n).collect();
        for stream in streams {
            self.drain(stream);
        }
        self.devices.get(&device).map_or(0, |d| d.fault)
    }

    /// Does what is before the records of an event.
    pub fn reach(&mut self, event: u64) {
        while let Some(stream) = self.events.get(&event).filter(|e| e.records > 0).map(|e| e.stream) {
            match self.take(stream) {
                Some((device, work)) => self.perform(device, work),
                None => return,
            }
        }
    }

    /// Forgets an event that is destroyed, once nothing names it.
    pub fn release(&mut self, event: u64) {
        if self.events.get(&event).is_some_and(|e| e.destroyed && e.records + e.waits == 0) {
            self.events.remove(&event);
        }
    }

    fn take(&mut self, stream: u64) -> Option<(u32, Work)> {
        let stream = self.streams.get_mut(&stream)?;
        Some((stream.device, stream.work.pop_front()?))
    }

    fn perform(&mut self, device: u32, work: Work) {
        match work {
            Work::Record(event) => {
                self.events.entry(event).and_modify(|e| e.records -= 1);
                self.release(event);
            }
            Work::Wait(event) => {
                self.reach(event);
                self.events.entry(event).and_modify(|e| e.waits -= 1);
                self.release(event);
            }
            // What comes after a fault doesn't happen.
            _ if self.devices.get(&device).is_some_and(|d| d.fault != 0) => {}
            work => {
                if let Err(fault) = perform(self.memory(device), work) {
                    self.devices.entry(device).or_default().fault = fault;
                }
            }
        }
    }
}

/// The code of an access that isn't within one allocation.
const ILLEGAL_ADDRESS: u32 = 700;

fn perform(memory: &mut Memory, work: Work) -> Result<(), u32> {
    match work {
        Work::ToDevice { target, source, bytes } => {
            let target = memory.reach(target, bytes).ok_or(ILLEGAL_ADDRESS)?;
            // SAFETY: who asked for the copy keeps the source valid until it has waited for it.
            unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target.as_mut_ptr(), bytes) };
        }
        Work::ToHost { target, source, bytes } => {
            let source = memory.reach(source, bytes).ok_or(ILLEGAL_ADDRESS)?;
            // SAFETY: who asked for the copy keeps the target valid until it has waited for it.
            unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target as *mut u8, bytes) };
        }
        Work::Within { target, source, bytes } => {
            let source = memory.reach(source, bytes).ok_or(ILLEGAL_ADDRESS)?.as_ptr();
            let target = memory.reach(target, bytes).ok_or(ILLEGAL_ADDRESS)?;
            // SAFETY: both hold as many bytes, and nothing is freed between; a copy within one allocation may overlap.
            unsafe { std::ptr::copy(source, target.as_mut_ptr(), bytes) };
        }
        Work::Fill { target, byte, bytes } => memory.reach(target, bytes).ok_or(ILLEGAL_ADDRESS)?.fill(byte),
        Work::Launch {
            kernel,
            grid,
            threads,
            arguments,
        } => {
            let launch = Launch {
                kernel: &kernel,
                grid,
                threads,
                arguments: &arguments,
            };
            launch.run(memory)?;
        }
        Work::Record(_) | Work::Wait(_) => {}
    }
    Ok(())
}

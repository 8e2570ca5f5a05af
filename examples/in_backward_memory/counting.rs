//! The heap of this process, counted.

// An allocator can't be written without it.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, counting.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Live bytes now, and at most since the last reset.
struct Gauge {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    const fn new() -> Self {
        Gauge {
            live: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
        }
    }

    fn add(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(live, Relaxed);
    }

    fn take(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Relaxed);
    }

    fn reset(&self) -> usize {
        let live = self.live.load(Relaxed);
        self.peak.store(live, Relaxed);
        live
    }
}

static ALL: Gauge = Gauge::new();
static LARGE: Gauge = Gauge::new();
/// Blocks of so many bytes are large.
static LARGE_FROM: AtomicUsize = AtomicUsize::new(usize::MAX);

fn counted(bytes: usize, count: fn(&Gauge, usize)) {
    count(&ALL, bytes);
    if bytes >= LARGE_FROM.load(Relaxed) {
        count(&LARGE, bytes);
    }
}

// SAFETY: each call goes to the system's allocator with the caller's arguments; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        counted(layout.size(), Gauge::add);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        counted(layout.size(), Gauge::add);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        counted(layout.size(), Gauge::take);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        counted(size, Gauge::add);
        counted(layout.size(), Gauge::take);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(block, layout, size) }
    }
}

/// Sets, before anything that large is allocated, from how many bytes on a block is large.
pub fn set_large(bytes: usize) {
    LARGE_FROM.store(bytes, Relaxed);
}

/// Live bytes, in all and in large blocks; peaks begin anew.
pub fn reset() -> [usize; 2] {
    [ALL.reset(), LARGE.reset()]
}

/// Most live bytes since the last reset, in all and in large blocks.
pub fn peaks() -> [usize; 2] {
    [ALL.peak.load(Relaxed), LARGE.peak.load(Relaxed)]
}

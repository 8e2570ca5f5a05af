//! Memory of the device. Its addresses can't be touched by the host, and between allocations lie gaps that nobody owns.

use std::collections::BTreeMap;
use std::ptr::null_mut;

/// Addresses set aside for a device.
const RANGE: usize = 1 << 36;
/// Bytes between allocations.
const GAP: u64 = 256;

pub(crate) struct Memory {
    start: u64,
    next: u64,
    allocations: BTreeMap<u64, Vec<u8>>,
    /// The last ones met, since accesses come in runs.
    recent: [(u64, *mut u8, usize); 8],
    turn: usize,
    pub total: usize,
    pub used: usize,
}

// SAFETY: the pointers lead into allocations that the same struct owns; it is used under one lock.
unsafe impl Send for Memory {}

const NOTHING: (u64, *mut u8, usize) = (0, null_mut(), 0);

impl Memory {
    pub fn new(total: usize) -> Self {
        // SAFETY: an anonymous mapping at an address of the kernel's choice; no access is allowed to it.
        let start = unsafe {
            libc::mmap(
                null_mut(),
                RANGE,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED, "no room for the addresses of a device");
        Memory {
            start: start as u64,
            next: start as u64,
            allocations: BTreeMap::new(),
            recent: [NOTHING; 8],
            turn: 0,
            total,
            used: 0,
        }
    }

    pub fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let size = bytes.next_multiple_of(GAP as usize) as u64;
        let left = (self.start + RANGE as u64).saturating_sub(self.next);
        if self.used + bytes > self.total || size + GAP > left {
            return None;
        }
        let address = self.next + GAP;
        self.next = address + size;
        self.used += bytes;
        self.allocations.insert(address, vec![0xee; bytes]);
        Some(address)
    }

    pub fn free(&mut self, address: u64) -> bool {
        self.recent = [NOTHING; 8];
        let freed = self.allocations.remove(&address);
        self.used -= freed.as_ref().map_or(0, Vec::len);
        freed.is_some()
    }

    pub fn count(&self) -> usize {
        self.allocations.len()
    }

    /// Bytes of the device; none if they aren't all of one allocation.
    pub fn reach(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let fits = |&&(start, _, length): &&(u64, *mut u8, usize)| {
            let offset = address.wrapping_sub(start) as usize;
            offset < length && length - offset >= bytes
        };
        let (start, pointer, _) = match self.recent.iter().find(fits) {
            Some(&found) => found,
            None => {
                let (&start, allocation) = self.allocations.range_mut(..=address).next_back()?;
                let found = (start, allocation.as_mut_ptr(), allocation.len());
                fits(&&found).then_some(())?;
                self.recent[self.turn] = found;
                self.turn = (self.turn + 1) % self.recent.len();
                found
            }
        };
        // SAFETY: within the allocation, as was just seen; it lives until it is freed, which forgets the pointer. The borrow of `self` keeps it
        // from being reached twice.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer.add((address - start) as usize), bytes) })
    }
}

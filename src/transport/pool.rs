//! Memory for large segments, kept and used again: copying into fresh memory costs 5 to 10 times a warm copy.
//!
//! The pool can see whether somebody else holds a storage, but isn't told when it is dropped. So it keeps handles of those in use, too, and looks.

use std::collections::VecDeque;

use super::segment::Buffer;
use crate::tensor::{DType, Data};

/// Smallest size in bytes that is worth keeping.
const SMALLEST: usize = 64 << 10;

/// Most handles: each search looks at them.
const HANDLES: usize = 1_024;

/// Storages that were delivered. The pool holds one handle of each; it is free again when that is the only one left.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Oldest first.
    kept: VecDeque<Data>,
    bytes: usize,
    limit: usize,
}

impl Pool {
    /// A pool that keeps at most `limit` bytes that nobody else holds.
    pub(crate) fn new(limit: usize) -> Pool {
        Pool {
            kept: VecDeque::new(),
            bytes: 0,
            limit,
        }
    }

    /// Memory for at least `len` elements: a storage that nobody else holds any more, or fresh.
    pub(crate) fn take(&mut self, dtype: DType, len: usize) -> Buffer {
        if !kept_here(dtype, len * dtype.size()) {
            return Buffer::new(dtype, len);
        }
        let class = size_class(len);
        for at in 0..self.kept.len() {
            let kept = &self.kept[at];
            if kept.dtype() != dtype || kept.len() != class || !kept.is_unique() {
                continue;
            }
            let Some(storage) = self.kept.remove(at) else { break };
            match unshare(storage) {
                Ok(buffer) => {
                    self.bytes -= class * dtype.size();
                    return buffer;
                }
                Err(storage) => self.kept.insert(at, storage),
            }
        }
        Buffer::new(dtype, class)
    }

    /// Keeps a handle of a storage made from [`take`](Self::take).
    pub(crate) fn keep(&mut self, storage: &Data) {
        if !kept_here(storage.dtype(), storage.bytes()) || storage.bytes() > self.limit {
            return;
        }
        self.bytes += storage.bytes();
        self.kept.push_back(storage.clone());
        if self.kept.len() > HANDLES
            && let Some(oldest) = self.kept.pop_front()
        {
            self.bytes -= oldest.bytes();
        }
        self.trim();
    }

    /// Bytes of all storages beyond the limit; as many of them may be unused.
    pub(crate) fn spare(&self) -> usize {
        self.bytes.saturating_sub(self.limit)
    }

    /// Forgets the oldest of those that nobody else holds, down to the limit.
    pub(crate) fn trim(&mut self) {
        if self.spare() == 0 {
            return;
        }
        let unused: usize = self.kept.iter().filter(|kept| kept.is_unique()).map(Data::bytes).sum();
        let (mut over, bytes) = (unused.saturating_sub(self.limit), &mut self.bytes);
        self.kept.retain(|kept| {
            let forget = over > 0 && kept.is_unique();
            if forget {
                over = over.saturating_sub(kept.bytes());
                *bytes -= kept.bytes();
            }
            !forget
        });
    }
}

fn kept_here(dtype: DType, bytes: usize) -> bool {
    bytes >= SMALLEST && dtype != DType::Bool
}

/// The length rounded up to the next eighth of its power of two: at most 1/8 more.
fn size_class(len: usize) -> usize {
    let step = (len.next_power_of_two() / 16).max(1);
    len.next_multiple_of(step)
}

/// The memory of a storage, if this is its only handle.
fn unshare(storage: Data) -> Result<Buffer, Data> {
    macro_rules! unshare {
        ($array:expr, $variant:ident) => {
            match $array.try_into_owned_nocopy() {
                Ok(owned) => Ok(Buffer::$variant(owned.into_raw_vec_and_offset().0)),
                Err(shared) => Err(Data::$variant(shared)),
            }
        };
    }
    match storage {
        Data::F32(array) => unshare!(array, F32),
        Data::F64(array) => unshare!(array, F64),
        Data::I64(array) => unshare!(array, I64),
        Data::Bool(_) | Data::Cuda(_) => Err(storage),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::segment::shaped;

    fn address(buffer: &mut Buffer) -> *const u8 {
        buffer.as_bytes_mut().as_ptr()
    }

    #[test]
    fn memory_comes_back_when_nobody_else_holds_it() {
        let mut pool = Pool::new(10 << 20);
        let mut buffer = pool.take(DType::F64, 100_000);
        let place = address(&mut buffer);
        let storage = buffer.into_storage().unwrap();
        pool.keep(&storage);
        let user = shaped(storage, &[1_000, 100]).unwrap();
        assert!(user.is_contiguous());
        assert_ne!(address(&mut pool.take(DType::F64, 100_000)), place, "still held");
        drop(user);
        assert_ne!(address(&mut pool.take(DType::I64, 100_000)), place, "another dtype");
        assert_eq!(address(&mut pool.take(DType::F64, 99_999)), place);
        assert_eq!(pool.bytes, 0);
    }

    #[test]
    fn the_bound_holds_for_what_nobody_uses() {
        let mut pool = Pool::new(3 << 20);
        let take = |pool: &mut Pool| {
            let storage = pool.take(DType::F32, 1 << 18).into_storage().unwrap();
            pool.keep(&storage);
            storage
        };
        let used: Vec<Data> = (0..5).map(|_| take(&mut pool)).collect();
        assert_eq!((pool.bytes, pool.spare()), (5 << 20, 2 << 20), "in use: nothing to forget");
        pool.trim();
        assert_eq!(pool.bytes, 5 << 20);
        let places: Vec<*const f32> = used.iter().map(|data| data.view::<f32>().unwrap().as_ptr()).collect();
        drop(used);
        pool.trim();
        assert_eq!((pool.bytes, pool.spare()), (3 << 20, 0), "the oldest two are gone");
        let again = take(&mut pool);
        assert!(again.view::<f32>().unwrap().as_ptr() == places[2], "the oldest that is left");
        assert_eq!(pool.bytes, pool.kept.iter().map(Data::bytes).sum::<usize>());
        pool.keep(&Data::zeros(DType::F64, &[1 << 20]));
        assert!(pool.bytes <= 3 << 20, "one that is over the bound alone isn't kept");
        pool.keep(&Data::zeros(DType::F64, &[10]));
        assert!(pool.kept.iter().all(|kept| kept.bytes() >= SMALLEST));
    }

    #[test]
    fn classes_waste_an_eighth_at_most() {
        for len in (1..100_000).step_by(37) {
            let class = size_class(len);
            assert!(class >= len && class <= len + len / 8 + 1, "{len} -> {class}");
        }
    }
}

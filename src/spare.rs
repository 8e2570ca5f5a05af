//! Buffers that a thread keeps for its next messages: making and freeing them takes longer than what is done with short ones.

use std::cell::RefCell;

/// A buffer that grew larger isn't kept.
const LARGEST: usize = 1 << 16;
const BUFFERS: usize = 4;

thread_local! {
    static SPARE: RefCell<Spare> = const { RefCell::new(Spare { buffers: [const { Vec::new() }; BUFFERS], len: 0 }) };
}

struct Spare {
    buffers: [Vec<u8>; BUFFERS],
    len: usize,
}

/// An empty buffer.
#[inline]
pub(crate) fn take() -> Vec<u8> {
    SPARE.with_borrow_mut(|spare| match spare.len.checked_sub(1) {
        Some(last) => {
            spare.len = last;
            std::mem::take(&mut spare.buffers[last])
        }
        None => Vec::new(),
    })
}

/// Keeps a buffer that has been used.
#[inline]
pub(crate) fn keep(mut buffer: Vec<u8>) {
    if buffer.capacity() == 0 || buffer.capacity() > LARGEST {
        return;
    }
    buffer.clear();
    SPARE.with_borrow_mut(|spare| {
        if let Some(place) = spare.buffers.get_mut(spare.len) {
            *place = buffer;
            spare.len += 1;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_empty() {
        for round in 0..3 {
            let mut taken: Vec<Vec<u8>> = (0..6).map(|_| take()).collect();
            assert_eq!(
                taken.iter().filter(|b| b.capacity() > 0).count(),
                if round == 0 { 0 } else { BUFFERS }
            );
            taken.iter_mut().for_each(|b| b.extend_from_slice(b"message"));
            taken.into_iter().for_each(keep);
            keep(Vec::with_capacity(2 * LARGEST));
            let again = take();
            assert!(again.is_empty() && again.capacity() >= 7);
            keep(again);
        }
    }
}

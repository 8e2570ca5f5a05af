//! Buffers that a thread keeps for its next messages: making and freeing them takes longer than what is done with short ones.

use std::cell::Cell;

/// A buffer that grew larger isn't kept.
const LARGEST: usize = 1 << 16;
const BUFFERS: usize = 4;

thread_local! {
    static SPARE: Cell<Spare> = const { Cell::new(Spare { buffers: [const { Vec::new() }; BUFFERS], len: 0 }) };
}

#[derive(Default)]
struct Spare {
    buffers: [Vec<u8>; BUFFERS],
    len: usize,
}

/// An empty buffer.
pub(crate) fn take() -> Vec<u8> {
    let mut spare = SPARE.take();
    let mut buffer = Vec::new();
    if let Some(last) = spare.len.checked_sub(1) {
        spare.len = last;
        buffer = std::mem::take(&mut spare.buffers[last]);
    }
    SPARE.set(spare);
    buffer
}

/// Keeps a buffer that has been used.
pub(crate) fn keep(mut buffer: Vec<u8>) {
    if buffer.capacity() == 0 || buffer.capacity() > LARGEST {
        return;
    }
    buffer.clear();
    let mut spare = SPARE.take();
    if spare.len < BUFFERS {
        spare.buffers[spare.len] = buffer;
        spare.len += 1;
    }
    SPARE.set(spare);
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

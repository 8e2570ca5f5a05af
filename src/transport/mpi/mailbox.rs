//! Short messages between ranks of a node, through memory that they share.
//!
//! A rank's mailbox is a ring of letters that any rank of its node puts messages into, and it alone takes them out. A letter's `turn` says what it is:
//! in lap `n` of the ring it is free at `2n` and full at `2n + 1`, so memory of zeros is an empty mailbox. (The bounded queue of D. Vyukov, 1024cores.net,
//! with one reader.) A full mailbox refuses, and the message goes by MPI.

use std::cell::UnsafeCell;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

/// Longest message in bytes.
pub(super) const LONGEST: usize = 496;

/// Letters in a mailbox.
const LETTERS: u64 = 64;

#[derive(Debug)]
#[repr(C, align(64))]
struct Letter {
    turn: AtomicU64,
    from: AtomicU32,
    size: AtomicU32,
    bytes: UnsafeCell<[u8; LONGEST]>,
}

/// One rank's mailbox. All zeros is a valid start.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Mailbox {
    /// Letters that were begun so far: of senders alone, so that a single one keeps it in its cache.
    begun: AtomicU64,
    letters: [Letter; LETTERS as usize],
}

// SAFETY: a letter's bytes are written only by who has moved `begun` past it while it was free, and read only by the one reader while it is full;
// `turn` orders the two.
unsafe impl Sync for Mailbox {}

impl Default for Mailbox {
    fn default() -> Self {
        let letter = |_| Letter {
            turn: AtomicU64::new(0),
            from: AtomicU32::new(0),
            size: AtomicU32::new(0),
            bytes: UnsafeCell::new([0; LONGEST]),
        };
        Mailbox {
            begun: AtomicU64::new(0),
            letters: std::array::from_fn(letter),
        }
    }
}

impl Mailbox {
    /// Puts a message in, if there is room; its place.
    pub(super) fn put(&self, from: u32, message: &[u8]) -> Option<u64> {
        let mut place = self.begun.load(Relaxed);
        let (letter, lap) = loop {
            let (letter, lap) = self.letter(place);
            let turn = letter.turn.load(Acquire);
            if turn < 2 * lap || message.len() > LONGEST {
                return None; // not read yet
            }
            if turn > 2 * lap {
                place = self.begun.load(Relaxed); // another sender was faster
                continue;
            }
            match self.begun.compare_exchange_weak(place, place + 1, Relaxed, Relaxed) {
                Ok(_) => break (letter, lap),
                Err(now) => place = now,
            }
        };
        // SAFETY: the letter is free, and ours since `begun` moved past it; the reader looks at it after the store below. The message isn't longer than it.
        unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), letter.bytes.get().cast::<u8>(), message.len()) };
        letter.from.store(from, Relaxed);
        letter.size.store(message.len() as u32, Relaxed);
        // In the one order of all that a sleeper's look at it and the sender's look for sleepers take part in.
        letter.turn.store(2 * lap + 1, SeqCst);
        Some(place)
    }

    /// Whether the message at a place is there, and hasn't been taken.
    pub(super) fn holds(&self, place: u64) -> bool {
        let (letter, lap) = self.letter(place);
        letter.turn.load(SeqCst) == 2 * lap + 1
    }

    /// Hands the message at the place `read` to `f`, if it is there. Only the mailbox's owner may call it, one thread at a time, and counts on then.
    pub(super) fn take<R>(&self, read: u64, f: impl FnOnce(u32, &[u8]) -> R) -> Option<R> {
        let (letter, lap) = self.letter(read);
        if letter.turn.load(Acquire) != 2 * lap + 1 {
            return None;
        }
        let (from, size) = (letter.from.load(Relaxed), letter.size.load(Relaxed) as usize);
        // SAFETY: the letter is full, so nobody writes to it until the store below.
        let bytes = unsafe { &*letter.bytes.get() };
        let result = f(from, &bytes[..size.min(LONGEST)]);
        letter.turn.store(2 * (lap + 1), Release);
        Some(result)
    }

    fn letter(&self, place: u64) -> (&Letter, u64) {
        (&self.letters[(place % LETTERS) as usize], place / LETTERS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_as_they_went_in_until_it_is_full() {
        let mailbox = Box::<Mailbox>::default();
        let mut read = 0;
        for lap in 0..3u8 {
            assert!(mailbox.take(read, |_, _| ()).is_none());
            for i in 0..LETTERS as u8 {
                assert_eq!(mailbox.put(u32::from(lap), &vec![i; usize::from(i)]), Some(read + u64::from(i)));
                assert!(mailbox.holds(read + u64::from(i)));
            }
            assert!(mailbox.put(0, b"no room").is_none());
            for i in 0..LETTERS as u8 {
                let seen = mailbox.take(read, |from, bytes| (from, bytes.to_vec()));
                assert_eq!(seen, Some((u32::from(lap), vec![i; usize::from(i)])));
                read += 1;
            }
        }
        assert!(mailbox.put(0, &[0; LONGEST + 1]).is_none() && !mailbox.holds(read));
        assert!(mailbox.put(0, &[7; LONGEST]).is_some());
        assert_eq!(mailbox.take(read, |_, bytes| bytes.to_vec()), Some(vec![7; LONGEST]));
    }

    #[test]
    fn each_message_of_several_senders_arrives_once_in_its_senders_order() {
        const EACH: u32 = if cfg!(miri) { 200 } else { 20_000 };
        let mailbox = Box::<Mailbox>::default();
        std::thread::scope(|scope| {
            for from in 0..3 {
                let mailbox = &mailbox;
                scope.spawn(move || {
                    for number in 0..EACH {
                        while mailbox.put(from, &number.to_le_bytes()).is_none() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0u32; 3];
            let mut read = 0;
            while read < 3 * u64::from(EACH) {
                let taken = mailbox.take(read, |from, bytes| {
                    assert_eq!(bytes, next[from as usize].to_le_bytes());
                    next[from as usize] += 1;
                });
                match taken {
                    Some(()) => read += 1,
                    None => std::thread::yield_now(),
                }
            }
        });
    }
}

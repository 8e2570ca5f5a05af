//! Short messages between ranks of a node, through memory that they share.
//!
//! A rank's mailbox is a ring of letters that any rank of its node puts messages into, and it alone takes them out. A letter's `turn` says what it is:
//! in lap `n` of the ring it is free at `2n` and full at `2n + 1`, so memory of zeros is an empty mailbox. (The bounded queue of D. Vyukov, 1024cores.net,
//! with one reader.) A message that is longer than a letter goes on in the next ones; its first is marked full last, so that all are there when that is.
//! A full mailbox refuses, and the message goes by MPI.

use std::cell::UnsafeCell;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

use crate::spare;

/// Bytes of a letter.
const LETTER: usize = 496;

/// Letters in a mailbox.
const LETTERS: u64 = 64;

/// Longest message in bytes: half a mailbox, so that a second one finds room while the first is read.
pub(super) const LONGEST: usize = LETTER * (LETTERS as usize) / 2;

/// How many letters a message takes.
#[inline]
fn letters(size: usize) -> u64 {
    size.div_ceil(LETTER).max(1) as u64
}

#[derive(Debug)]
#[repr(C, align(64))]
struct Letter {
    turn: AtomicU64,
    from: AtomicU32,
    /// Of the whole message, in its first letter.
    size: AtomicU32,
    bytes: UnsafeCell<[u8; LETTER]>,
}

/// One rank's mailbox. All zeros is a valid start.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Mailbox {
    /// Letters that were begun so far: of senders alone, so that a single one keeps it in its cache.
    begun: AtomicU64,
    letters: [Letter; LETTERS as usize],
}

// SAFETY: a letter's bytes are written only by who has moved `begun` past it while it was free, and read only by the one reader while the message's first
// letter is full; that one's `turn` orders the two.
unsafe impl Sync for Mailbox {}

impl Default for Mailbox {
    fn default() -> Self {
        let letter = |_| Letter {
            turn: AtomicU64::new(0),
            from: AtomicU32::new(0),
            size: AtomicU32::new(0),
            bytes: UnsafeCell::new([0; LETTER]),
        };
        Mailbox {
            begun: AtomicU64::new(0),
            letters: std::array::from_fn(letter),
        }
    }
}

impl Letter {
    /// Writes as much as fits, from a place on; the rest. Only who has moved `begun` past it while it was free may, until the message's first letter is full.
    #[inline]
    fn write<'a>(&self, at: usize, bytes: &'a [u8]) -> &'a [u8] {
        let (part, rest) = bytes.split_at(bytes.len().min(LETTER - at));
        // SAFETY: by the rule above nobody else looks at the bytes, and there are as many from `at` on, which the subtraction has checked to be within them.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), self.bytes.get().cast::<u8>().add(at), part.len()) };
        rest
    }

    /// Only the reader may, while the message's first letter is full.
    #[inline]
    fn read(&self) -> &[u8; LETTER] {
        // SAFETY: by the rule above nobody writes to it.
        unsafe { &*self.bytes.get() }
    }
}

impl Mailbox {
    /// Puts a message in, if there is room; its place. The message is both parts, one behind the other; a front that something follows is no longer than a letter.
    #[inline]
    pub(super) fn put(&self, from: u32, front: &[u8], rest: &[u8]) -> Option<u64> {
        let size = front.len() + rest.len();
        if size > LONGEST || (front.len() > LETTER && !rest.is_empty()) {
            return None;
        }
        let count = letters(size);
        let mut place = self.begun.load(Relaxed);
        loop {
            // Letters become free in their order.
            let (last, lap) = self.letter(place + count - 1);
            let turn = last.turn.load(Acquire);
            if turn < 2 * lap {
                return None; // not read yet
            }
            if turn > 2 * lap {
                place = self.begun.load(Relaxed); // another sender was faster
                continue;
            }
            match self.begun.compare_exchange_weak(place, place + count, Relaxed, Relaxed) {
                Ok(_) => break,
                Err(now) => place = now,
            }
        }
        let (first, lap) = self.letter(place);
        let mut left = first.write(0, front);
        if !rest.is_empty() {
            left = first.write(front.len(), rest);
        }
        for at in place + 1..place + count {
            let (letter, lap) = self.letter(at);
            left = letter.write(0, left);
            letter.turn.store(2 * lap + 1, Relaxed);
        }
        first.from.store(from, Relaxed);
        first.size.store(size as u32, Relaxed);
        // In the one order of all that a sleeper's look at it and the sender's look for sleepers take part in.
        first.turn.store(2 * lap + 1, SeqCst);
        // Its reader has written to the next letter last: by the time that one is needed, it will have come over.
        std::hint::black_box(self.letter(place + count).0.turn.load(Relaxed));
        Some(place)
    }

    /// Whether the message at a place is there, and hasn't been taken.
    #[inline]
    pub(super) fn holds(&self, place: u64) -> bool {
        let (letter, lap) = self.letter(place);
        letter.turn.load(SeqCst) == 2 * lap + 1
    }

    /// Hands the message at the place `read` to `f`, if it is there; also gives the place of the next. Only the mailbox's owner may call it, one thread at a
    /// time, and goes on there then.
    #[inline]
    pub(super) fn take<R>(&self, read: u64, f: impl FnOnce(u32, &[u8]) -> R) -> Option<(R, u64)> {
        let (first, lap) = self.letter(read);
        if first.turn.load(Acquire) != 2 * lap + 1 {
            return None;
        }
        let (from, size) = (first.from.load(Relaxed), first.size.load(Relaxed) as usize);
        let size = size.min(LONGEST);
        let next = read + letters(size);
        let result = if size <= LETTER {
            f(from, &first.read()[..size])
        } else {
            let mut message = spare::take();
            (read..next).for_each(|at| message.extend_from_slice(self.letter(at).0.read()));
            let result = f(from, &message[..size]);
            spare::keep(message);
            result
        };
        for at in read..next {
            let (letter, lap) = self.letter(at);
            letter.turn.store(2 * (lap + 1), Release);
        }
        Some((result, next))
    }

    #[inline]
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
                assert_eq!(
                    mailbox.put(u32::from(lap), &vec![i; usize::from(i / 3)], &vec![i; usize::from(i - i / 3)]),
                    Some(read + u64::from(i))
                );
                assert!(mailbox.holds(read + u64::from(i)));
            }
            assert!(mailbox.put(0, b"no", b" room").is_none());
            for i in 0..LETTERS as u8 {
                let seen = mailbox.take(read, |from, bytes| (from, bytes.to_vec()));
                assert_eq!(seen, Some(((u32::from(lap), vec![i; usize::from(i)]), read + 1)));
                read += 1;
            }
        }
        assert!(mailbox.put(0, &[0; 1], &[0; LONGEST]).is_none() && !mailbox.holds(read));
    }

    #[test]
    fn long_messages_take_several_letters() {
        let mailbox = Box::<Mailbox>::default();
        let message = |size: usize| (0..size).map(|at| (at % 251) as u8).collect::<Vec<_>>();
        let sizes = [LETTER, LETTER + 1, 3 * LETTER, 0, LONGEST - 1, 5_000];
        let (mut read, mut end) = (0, 0);
        for round in 0..40 {
            let size = sizes[round % sizes.len()];
            let whole = message(size);
            let (front, rest) = whole.split_at(match round % 3 {
                0 => size,
                1 => 0,
                _ => size.min(LETTER - round),
            });
            assert_eq!(mailbox.put(7, front, rest), Some(end), "round {round}");
            end += letters(size);
            let (seen, next) = mailbox.take(read, |from, bytes| (from, bytes.to_vec())).unwrap();
            assert!(seen == (7, message(size)) && next == end, "round {round}");
            read = next;
        }
        // Two of the longest fill it; half of it read makes room for one more.
        let longest = message(LONGEST);
        assert!(mailbox.put(1, &longest, &[]).is_some() && mailbox.put(1, &[], &longest).is_some() && mailbox.put(1, &[1], &[]).is_none());
        let (seen, _) = mailbox.take(read, |_, bytes| bytes.to_vec()).unwrap();
        assert!(seen == longest && mailbox.put(1, &longest, &[]).is_some() && mailbox.put(1, &[], &[]).is_none());
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
                        // Of one letter, two, and more.
                        let message = number.to_le_bytes().repeat(1 + (number as usize * 97) % 700);
                        while mailbox.put(from, &message[..4], &message[4..]).is_none() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0u32; 3];
            let mut read = 0;
            while next != [EACH; 3] {
                let taken = mailbox.take(read, |from, bytes| {
                    let number = next[from as usize];
                    assert!(
                        bytes.len() == 4 * (1 + (number as usize * 97) % 700) && bytes.chunks(4).all(|part| part == number.to_le_bytes())
                    );
                    next[from as usize] += 1;
                });
                match taken {
                    Some(((), after)) => read = after,
                    None => std::thread::yield_now(),
                }
            }
        });
    }
}

//! The order of messages that take two ways: mailboxes and MPI. Each carries its number among those from its sender to its receiver.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::transport::segment::decode_error;
use crate::{ErrorKind, Result};

/// Bytes of a message's number, in front.
pub(super) const NUMBER: usize = size_of::<u32>();

/// Numbers the messages to each rank.
#[derive(Debug)]
pub(super) struct Numbers(Vec<u32>);

impl Numbers {
    pub(super) fn new(size: u32) -> Self {
        Numbers(vec![0; size as usize])
    }

    /// Writes the next number to a rank into the front of a message.
    #[inline]
    pub(super) fn stamp(&mut self, to: u32, message: &mut [u8]) {
        let next = &mut self.0[to as usize];
        message[..NUMBER].copy_from_slice(&next.to_le_bytes());
        *next = next.wrapping_add(1);
    }

    /// The last message to a rank wasn't sent: the next one gets its number.
    #[inline]
    pub(super) fn take_back(&mut self, to: u32) {
        let next = &mut self.0[to as usize];
        *next = next.wrapping_sub(1);
    }
}

/// Brings messages from each rank into their order.
#[derive(Debug)]
pub(super) struct Order {
    expected: Vec<u32>,
    /// Those that came before an earlier one; by how far they are ahead of the start, so that numbers may wrap.
    early: FxHashMap<u32, BTreeMap<u32, Vec<u8>>>,
}

impl Order {
    pub(super) fn new(size: u32) -> Self {
        Order {
            expected: vec![0; size as usize],
            early: FxHashMap::default(),
        }
    }

    /// Hands on a message, and those behind it that have come already, if it is its turn; else keeps it. True, as something arrived.
    ///
    /// # Errors
    /// The first that `handle` meets, with the sender's rank; [`ErrorKind::Decode`] for a message without a number. The order goes on.
    #[inline]
    pub(super) fn sort(&mut self, from: u32, message: &[u8], mut handle: impl FnMut(&[u8]) -> Result<()>) -> Result<bool> {
        let Some((number, rest)) = message.split_first_chunk::<NUMBER>() else {
            return Err(decode_error(format!("from rank {from}: a message of {} bytes", message.len())));
        };
        let (number, expected) = (u32::from_le_bytes(*number), &mut self.expected[from as usize]);
        if number != *expected {
            self.early.entry(from).or_default().insert(number, rest.to_vec());
            return Ok(true);
        }
        *expected = expected.wrapping_add(1);
        let mut result = handle(rest);
        while !self.early.is_empty()
            && let Some(next) = self.early.get_mut(&from).and_then(|early| early.remove(expected))
        {
            *expected = expected.wrapping_add(1);
            result = result.and(handle(&next));
            if self.early.get(&from).is_some_and(BTreeMap::is_empty) {
                self.early.remove(&from);
            }
        }
        result.map(|()| true).map_err(|error| name_sender(from, error))
    }
}

#[cold]
fn name_sender(from: u32, error: crate::Error) -> crate::Error {
    match error.kind() {
        ErrorKind::Decode { what } => ErrorKind::Decode {
            what: format!("from rank {from}: {what}"),
        }
        .into(),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_messages_wait_for_earlier_ones_also_where_numbers_wrap() {
        let (mut numbers, mut order) = (Numbers::new(2), Order::new(2));
        numbers.0[1] = u32::MAX - 1;
        order.expected[1] = u32::MAX - 1;
        let messages: Vec<Vec<u8>> = (0..5u8)
            .map(|k| {
                let mut message = vec![0, 0, 0, 0, k];
                numbers.stamp(1, &mut message);
                message
            })
            .collect();
        let mut seen = Vec::new();
        for (arriving, then) in [
            (2, vec![]),
            (1, vec![]),
            (0, vec![0, 1, 2]),
            (4, vec![0, 1, 2]),
            (3, vec![0, 1, 2, 3, 4]),
        ] {
            let sorted = order.sort(1, &messages[arriving], |bytes| {
                seen.extend_from_slice(bytes);
                Ok(())
            });
            assert!(sorted.unwrap());
            assert_eq!(seen, then, "after message {arriving}");
        }
        assert!(order.early.is_empty());
        assert!(order.sort(1, &[1, 2], |_| Ok(())).is_err());
    }
}

//! Parking for threads of one process.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use super::doorbell::Park;

/// Parking for threads of one process.
#[derive(Debug, Default)]
pub(crate) struct ThreadPark {
    lock: std::sync::Mutex<()>,
    changed: std::sync::Condvar,
}

impl Park for ThreadPark {
    fn park(&self, ticket: &AtomicU32, seen: u32, limit: Duration) {
        let guard = self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let same = |_: &mut ()| ticket.load(SeqCst) == seen;
        drop(self.changed.wait_timeout_while(guard, limit, same));
    }

    fn unpark(&self, _: &AtomicU32) {
        // Taking the lock orders this after a sleeper's look at the ticket, so that it can't miss the change.
        drop(self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;
    use std::time::Instant;

    use super::*;
    use crate::transport::doorbell::{Sleeper, Slot};

    #[derive(Default)]
    struct Rank {
        slot: Slot,
        parking: ThreadPark,
        sleeper: Sleeper,
        queue: Mutex<VecDeque<u32>>,
    }

    impl Rank {
        fn send(&self, value: u32) {
            self.slot.post();
            self.queue.lock().unwrap().push_back(value);
            self.slot.ring(&self.parking);
        }

        fn take(&self) -> Option<u32> {
            let value = self.queue.lock().unwrap().pop_front();
            if value.is_some() {
                self.slot.took();
            }
            value
        }
    }

    #[test]
    fn no_wake_up_is_lost() {
        let (here, there) = (Rank::default(), Rank::default());
        let started = Instant::now();
        std::thread::scope(|scope| {
            for (own, peer) in [(&here, &there), (&there, &here)] {
                scope.spawn(move || {
                    let mut taken = 0;
                    for value in 0..20_000 {
                        peer.send(value);
                        while own.take().is_none() {
                            own.sleeper.sleep(&own.slot, &own.parking, Duration::from_secs(60), || false);
                        }
                        taken += 1;
                    }
                    assert_eq!(taken, 20_000);
                });
            }
        });
        assert!(started.elapsed() < Duration::from_secs(50), "a sleep lasted to its limit");
    }

    #[test]
    fn a_dozer_is_woken_only_while_away() {
        let rank = Rank::default();
        let short = Duration::from_millis(20);
        rank.send(1);
        let started = Instant::now();
        rank.sleeper.doze(&rank.slot, &rank.parking, short);
        assert!(started.elapsed() >= short, "a rank that polls isn't rung");
        assert!(rank.sleeper.set_away(&rank.slot, true, || false), "one message is untaken");
        rank.take();
        assert!(!rank.sleeper.set_away(&rank.slot, true, || false));
        std::thread::scope(|scope| {
            let dozer = scope.spawn(|| rank.sleeper.doze(&rank.slot, &rank.parking, Duration::from_secs(60)));
            rank.send(2);
            dozer.join().unwrap();
        });
    }

    #[test]
    fn a_wake_before_the_sleep_counts() {
        let rank = Rank::default();
        rank.sleeper.wake(&rank.slot, &rank.parking);
        let started = Instant::now();
        rank.sleeper.sleep(&rank.slot, &rank.parking, Duration::from_secs(60), || false);
        rank.sleeper.doze(&rank.slot, &rank.parking, Duration::from_secs(60));
        assert!(started.elapsed() < Duration::from_secs(50));
    }
}

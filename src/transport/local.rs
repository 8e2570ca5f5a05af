//! Ranks as threads of one process, over queues in memory: for doc tests and unit tests, without a launcher.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::doorbell::{Sleeper, Slot};
use super::parking::ThreadPark;
use super::{Delivery, Frame, Settings, Traffic, Transport};
use crate::{ErrorKind, Result};

/// One of the ranks made by [`ranks`].
///
/// Frames move without a copy: the receiver's arrays share the sender's storage until one of them writes.
#[derive(Debug)]
pub struct LocalTransport {
    hub: Arc<Hub>,
    rank: u32,
    limit: u64,
    sleeper: Sleeper,
    closed: AtomicBool,
    messages: AtomicU64,
    bytes: AtomicU64,
}

/// What all ranks share.
#[derive(Debug)]
struct Hub {
    posts: Vec<Post>,
    ranks: Vec<u32>,
    gathering: Mutex<Gathering>,
    gathered: Condvar,
}

/// One rank's inbox and doorbell.
#[derive(Debug, Default)]
struct Post {
    queue: Mutex<VecDeque<(u32, Frame)>>,
    slot: Slot,
    parking: ThreadPark,
}

/// A gathering under way, and the result of the last one.
#[derive(Debug, Default)]
struct Gathering {
    round: u64,
    present: usize,
    parts: Vec<Vec<u8>>,
    result: Arc<Vec<Vec<u8>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes `n` ranks that can talk to each other; give each to a thread of its own. Local; returns at once. Of the settings
/// only `message_limit` matters.
///
/// # Examples
/// ```
/// use rankgrad::transport::{Delivery, Frame, Settings, Transport, local};
///
/// let ranks = local::ranks(2, Settings::default());
/// ranks[0].send(1, &mut Frame { header: b"hello".to_vec(), segments: vec![] })?;
/// let mut inbox = Vec::new();
/// ranks[1].poll(&mut inbox)?;
/// assert!(matches!(&inbox[..], [(0, Delivery::Frame(frame))] if frame.header == b"hello"));
/// # Ok::<(), rankgrad::Error>(())
/// ```
pub fn ranks(n: u32, settings: Settings) -> Vec<LocalTransport> {
    let hub = Arc::new(Hub {
        posts: (0..n).map(|_| Post::default()).collect(),
        ranks: (0..n).collect(),
        gathering: Mutex::new(Gathering {
            parts: vec![Vec::new(); n as usize],
            ..Gathering::default()
        }),
        gathered: Condvar::new(),
    });
    (0..n)
        .map(|rank| LocalTransport {
            hub: hub.clone(),
            rank,
            limit: settings.message_limit,
            sleeper: Sleeper::default(),
            closed: AtomicBool::new(false),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
        .collect()
}

impl LocalTransport {
    fn post(&self) -> &Post {
        &self.hub.posts[self.rank as usize]
    }

    fn open(&self, operation: &str) -> Result<()> {
        if self.closed.load(SeqCst) {
            Err(ErrorKind::ShutDown {
                operation: operation.into(),
            }
            .into())
        } else {
            Ok(())
        }
    }
}

impl Transport for LocalTransport {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.hub.ranks.len() as u32
    }

    fn node_ranks(&self) -> &[u32] {
        &self.hub.ranks
    }

    fn send(&self, to: u32, frame: &mut Frame) -> Result<()> {
        self.open("send")?;
        let Some(post) = self.hub.posts.get(to as usize) else {
            return Err(ErrorKind::UnknownRank {
                operation: "send".into(),
                rank: to.into(),
                size: self.size(),
            }
            .into());
        };
        for segment in frame.segments.iter_mut().filter(|segment| !segment.is_contiguous()) {
            *segment = segment.to_contiguous();
        }
        if to != self.rank {
            self.messages.fetch_add(1, SeqCst);
            self.bytes.fetch_add(frame.header.len() as u64 + frame.segment_bytes(), SeqCst);
        }
        post.slot.post();
        lock(&post.queue).push_back((self.rank, std::mem::take(frame)));
        post.slot.ring(&post.parking);
        Ok(())
    }

    fn poll(&self, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool> {
        // The lock is held while the frames are handed over, so that two pollers can't swap them.
        let mut queue = lock(&self.post().queue);
        let moved = !queue.is_empty();
        for (from, frame) in queue.drain(..) {
            self.post().slot.took();
            inbox.push((from, frame.within(self.limit)));
        }
        Ok(moved)
    }

    fn spin(&self, looks: u32) {
        for _ in 0..looks {
            std::hint::spin_loop();
            if self.post().slot.has_more() {
                break;
            }
        }
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn sleep(&self, limit: Duration) {
        self.sleeper.sleep(&self.post().slot, &self.post().parking, limit, || false);
    }

    fn set_away(&self, away: bool) -> bool {
        self.sleeper.set_away(&self.post().slot, away, || false)
    }

    fn doze(&self, limit: Duration) {
        self.sleeper.doze(&self.post().slot, &self.post().parking, limit);
    }

    fn wake(&self) {
        self.sleeper.wake(&self.post().slot, &self.post().parking);
    }

    fn is_serialized(&self) -> bool {
        false
    }

    fn exclusive(&self, f: &mut dyn FnMut()) {
        f();
    }

    fn traffic(&self) -> Traffic {
        Traffic {
            messages: self.messages.load(SeqCst),
            bytes: self.bytes.load(SeqCst),
        }
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.open("all_gather")?;
        let mut gathering = lock(&self.hub.gathering);
        let round = gathering.round;
        gathering.parts[self.rank as usize] = bytes.to_vec();
        gathering.present += 1;
        if gathering.present == self.hub.posts.len() {
            let fresh = vec![Vec::new(); self.hub.posts.len()];
            gathering.result = Arc::new(std::mem::replace(&mut gathering.parts, fresh));
            gathering.present = 0;
            gathering.round += 1;
            self.hub.gathered.notify_all();
        }
        let gathering = self
            .hub
            .gathered
            .wait_while(gathering, |g| g.round == round)
            .unwrap_or_else(PoisonError::into_inner);
        // Nobody can end the next round before this rank has joined it: the result is still this round's.
        Ok(gathering.result.to_vec())
    }

    fn close(&self) -> Result<()> {
        if self.closed.load(SeqCst) {
            return Ok(());
        }
        self.all_gather(&[])?;
        if self.closed.swap(true, SeqCst) {
            return Ok(());
        }
        let dropped = lock(&self.post().queue).drain(..).count();
        if dropped > 0 {
            log::warn!(
                "rank {}: {dropped} frames arrived after the last poll and were dropped at the end",
                self.rank
            );
        }
        self.wake();
        Ok(())
    }

    fn abort(&self, code: i32) -> ! {
        log::error!("rank {} aborts the process (code {code})", self.rank);
        std::process::abort()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::tensor::{DType, Data};

    fn frame(value: u32, len: usize) -> Frame {
        Frame {
            header: value.to_le_bytes().to_vec(),
            segments: vec![Data::zeros(DType::F64, &[len])],
        }
    }

    #[test]
    fn order_holds_and_sleepers_wake() {
        const COUNT: u32 = 2_000;
        let started = Instant::now();
        std::thread::scope(|scope| {
            for rank in ranks(3, Settings::default()) {
                scope.spawn(move || {
                    let peers: Vec<u32> = (0..3).collect();
                    let mut next = [0u32; 3];
                    for value in 0..COUNT {
                        for &to in &peers {
                            rank.send(to, &mut frame(value, 3)).unwrap();
                        }
                    }
                    let mut inbox = Vec::new();
                    while next.iter().sum::<u32>() < 3 * COUNT {
                        if !rank.poll(&mut inbox).unwrap() {
                            rank.sleep(Duration::from_secs(60));
                        }
                        for (from, delivery) in inbox.drain(..) {
                            let Delivery::Frame(frame) = delivery else { panic!("refused") };
                            assert_eq!(frame.header, next[from as usize].to_le_bytes());
                            next[from as usize] += 1;
                        }
                    }
                    assert_eq!(
                        rank.traffic(),
                        Traffic {
                            messages: 2 * u64::from(COUNT),
                            bytes: 2 * u64::from(COUNT) * 28
                        }
                    );
                    rank.close().unwrap();
                    rank.close().unwrap();
                    assert!(matches!(
                        rank.send(0, &mut Frame::default()).unwrap_err().kind(),
                        ErrorKind::ShutDown { .. }
                    ));
                });
            }
        });
        assert!(started.elapsed() < Duration::from_secs(50));
    }

    #[test]
    fn a_frame_over_the_limit_is_refused() {
        let ranks = ranks(
            1,
            Settings {
                message_limit: 100,
                ..Settings::default()
            },
        );
        ranks[0].send(0, &mut frame(1, 13)).unwrap();
        ranks[0].send(0, &mut frame(2, 12)).unwrap();
        let mut inbox = Vec::new();
        ranks[0].poll(&mut inbox).unwrap();
        assert!(matches!(&inbox[0], (0, Delivery::Refused { header, bytes: 104, limit: 100 }) if header[0] == 1));
        assert!(matches!(&inbox[1], (0, Delivery::Frame(frame)) if frame.header[0] == 2));
        let mut long = frame(3, 1);
        long.header.resize(500, 3);
        ranks[0].send(0, &mut long).unwrap();
        ranks[0].poll(&mut inbox).unwrap();
        assert!(matches!(&inbox[2], (0, Delivery::Refused { header, bytes: 508, limit: 100 }) if header[0] == 3));
        assert!(matches!(
            ranks[0].send(1, &mut Frame::default()).unwrap_err().kind(),
            ErrorKind::UnknownRank { rank: 1, size: 1, .. }
        ));
    }

    #[test]
    fn gathering_keeps_rank_order() {
        std::thread::scope(|scope| {
            for rank in ranks(4, Settings::default()) {
                scope.spawn(move || {
                    for round in 0..100u8 {
                        let all = rank.all_gather(&vec![round; rank.rank() as usize]).unwrap();
                        assert_eq!(all, (0..4).map(|r| vec![round; r]).collect::<Vec<_>>());
                    }
                });
            }
        });
    }
}

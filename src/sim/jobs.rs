//! Jobs: futures that wait where a thread would block.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::events::Event;
use super::node::Slot;
use super::world::{Sim, World};
use crate::autograd::frame;

pub(super) type JobId = u64;
type Script = Pin<Box<dyn Future<Output = ()>>>;

pub(super) struct Job {
    script: Option<Script>,
    pub rank: u32,
    path: Arc<[u32]>,
    /// The end may come before it is done: the engine of a backward whose context was released.
    pub loose: bool,
}

impl Sim {
    /// Starts a job on a rank, in a frame.
    pub(super) fn spawn(&self, rank: u32, path: Arc<[u32]>, script: impl Future<Output = ()> + 'static) {
        self.world().spawn(rank, path, Box::pin(script), false);
    }

    /// Starts a job that the end doesn't wait for.
    pub(super) fn spawn_loose(&self, rank: u32, script: impl Future<Output = ()> + 'static) {
        self.world().spawn(rank, Arc::from([]), Box::pin(script), true);
    }

    pub(super) fn resume(&self, job: JobId) {
        let taken = {
            let mut world = self.world();
            world.current = job;
            let world = &mut *world;
            world.jobs.get_mut(&job).and_then(|j| {
                let stopped = world.nodes[j.rank as usize].stopped;
                let script = if stopped { None } else { j.script.take() };
                script.map(|s| (s, Arc::clone(&j.path)))
            })
        };
        let Some((mut script, path)) = taken else { return };
        let frame = frame::enter(path);
        let polled = script.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        drop(frame);
        if polled.is_pending() {
            if let Some(j) = self.world().jobs.get_mut(&job) {
                j.script = Some(script);
            }
        } else {
            drop(script);
            let ended = self.world().jobs.remove(&job);
            if let Some(j) = ended {
                self.poll_soon(j.rank);
            }
        }
    }

    /// Waits until `ready` has something, or until a time: looks again whenever something happens on the rank, or when the slot is filled.
    pub(super) async fn until<T>(
        &self,
        rank: u32,
        slot: Option<&Rc<Slot>>,
        deadline: Option<Duration>,
        mut ready: impl FnMut(&mut World) -> Option<T>,
    ) -> Option<T> {
        let mut timed = false;
        std::future::poll_fn(|_| {
            let mut world = self.world();
            if let Some(value) = ready(&mut world) {
                return Poll::Ready(Some(value));
            }
            if deadline.is_some_and(|d| world.now >= d) {
                return Poll::Ready(None);
            }
            let job = world.current;
            match slot {
                Some(slot) => slot.job.set(Some(job)),
                None => {
                    let waiters = &mut world.nodes[rank as usize].waiters;
                    if !waiters.contains(&job) {
                        waiters.push(job);
                    }
                }
            }
            if let (Some(deadline), false) = (deadline, timed) {
                timed = true;
                world.schedule(deadline, Event::Resume(job));
            }
            Poll::Pending
        })
        .await
    }

    /// Waits for a while.
    pub(super) async fn sleep(&self, rank: u32, time: Duration) {
        let (deadline, slot) = (self.world().clock(rank) + time, Slot::new());
        self.until(rank, Some(&slot), Some(deadline), |_| None::<()>).await;
    }

    /// Lets others go first, for some time.
    pub(super) async fn pause(&self, rank: u32) {
        let time = self.world().delay(rank);
        if time > Duration::ZERO {
            self.sleep(rank, time).await;
        }
    }

    /// Ends all jobs: they hold the world that holds them.
    pub(super) fn end(&self) {
        let (jobs, events) = {
            let mut world = self.world();
            (std::mem::take(&mut world.jobs), std::mem::take(&mut world.events))
        };
        drop((jobs, events));
        let nodes = std::mem::take(&mut self.world().nodes);
        drop(nodes);
    }
}

impl World {
    fn spawn(&mut self, rank: u32, path: Arc<[u32]>, script: Script, loose: bool) {
        self.next_job += 1;
        let job = self.next_job;
        self.jobs.insert(
            job,
            Job {
                script: Some(script),
                rank,
                path,
                loose,
            },
        );
        self.wake(rank, job);
    }
}

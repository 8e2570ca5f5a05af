//! The loop: events in virtual time, one after the other. Whatever could go one way or another is drawn from one seed.

use std::cell::{Cell, RefCell, RefMut};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::checks::Checks;
use super::events::{Entry, Event, Frame, Timing};
use super::handle::Handles;
use super::jobs::{Job, JobId};
use super::loggp::LogGp;
use super::node::Node;
use super::program::{Fault, Program};
use super::trace::Trace;
use crate::protocol::{RefId, TaskId, Window};
use crate::tensor::Data;

/// A wait asks the receiver after so long, and gives up when it has heard nothing for so long.
pub(super) const ASK_AFTER: Duration = Duration::from_secs(5);
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
/// No program takes so long.
const FOREVER: Duration = Duration::from_secs(20_000);
/// Nor has so many events.
const MOST: u64 = 1_000_000;

/// All ranks, what is on the way, and the jobs that run on them.
pub(crate) struct World {
    pub(super) now: Duration,
    pub(super) nodes: Vec<Node>,
    pub(super) handles: Arc<Handles>,
    pub(super) checks: Checks,
    pub(super) trace: Trace,
    pub(super) faults: Vec<Fault>,
    pub(super) memory: Option<usize>,
    pub(super) limit: Option<Duration>,
    /// Rank of each place.
    one_rank: bool,
    pub(super) messages: u64,
    pub(super) bytes: u64,
    pub(super) replies: u64,
    pub(super) mains: usize,
    /// The clients, where they are, and whether they are done.
    pub(super) clients: Vec<(u32, Rc<Cell<bool>>)>,
    timing: Timing,
    pub(super) events: BinaryHeap<Reverse<Entry>>,
    next_event: u64,
    /// When the last message of each pair arrives.
    last: HashMap<(u32, u32), Duration>,
    pub(super) jobs: HashMap<JobId, Job>,
    pub(super) next_job: JobId,
    pub(super) current: JobId,
    /// What creating requests create.
    pub(super) creating: HashMap<TaskId, RefId>,
}

impl World {
    fn new(size: u32, window: Window, timing: Timing) -> Self {
        World {
            now: Duration::ZERO,
            nodes: (0..size).map(|me| Node::new(me, size, window)).collect(),
            handles: Handles::new(size),
            checks: Checks::default(),
            trace: Trace::default(),
            faults: Vec::new(),
            memory: None,
            limit: None,
            one_rank: false,
            messages: 0,
            bytes: 0,
            replies: 0,
            mains: 0,
            clients: Vec::new(),
            timing,
            events: BinaryHeap::new(),
            next_event: 0,
            last: HashMap::new(),
            jobs: HashMap::new(),
            next_job: 0,
            current: 0,
            creating: HashMap::new(),
        }
    }

    pub(super) fn size(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// The rank at a place.
    pub(super) fn rank_at(&self, place: u32) -> u32 {
        if self.one_rank { 0 } else { place % self.size() }
    }

    /// When a rank has time.
    pub(super) fn clock(&self, rank: u32) -> Duration {
        match &self.timing {
            Timing::Random { .. } => self.now,
            Timing::Model { free, .. } => self.now.max(free[rank as usize]),
        }
    }

    /// When all ranks have time.
    pub(super) fn latest(&self) -> Duration {
        match &self.timing {
            Timing::Random { .. } => self.now,
            Timing::Model { free, .. } => free.iter().copied().max().unwrap_or_default().max(self.now),
        }
    }

    /// Whether it is to be found out what breaks the rules, not what things cost.
    pub(super) fn is_checked(&self) -> bool {
        matches!(self.timing, Timing::Random { .. })
    }

    /// How long until a rank gets round to something.
    pub(super) fn delay(&mut self, rank: u32) -> Duration {
        let Timing::Random { rng, jitter, slow } = &mut self.timing else {
            return Duration::ZERO;
        };
        if *jitter == 0 {
            return Duration::ZERO;
        }
        let most = match rng.random_range(0..16u32) {
            0 => *jitter * 50,
            1..=3 => *jitter * 5,
            4..=6 => 0,
            _ => *jitter,
        };
        let nanos = rng.random_range(0..=most * 1000);
        Duration::from_nanos(nanos) * slow[rank as usize]
    }

    pub(super) fn schedule(&mut self, at: Duration, event: Event) {
        self.next_event += 1;
        let number = self.next_event;
        self.events.push(Reverse(Entry { at, number, event }));
    }

    /// Lets a job go on soon.
    pub(super) fn wake(&mut self, rank: u32, job: JobId) {
        let at = self.clock(rank) + self.delay(rank);
        self.schedule(at, Event::Resume(job));
    }

    /// Puts a message on its way, behind those of the same pair.
    pub(super) fn post(&mut self, frame: Frame) {
        let size = frame.header.len() + frame.segments.iter().map(Data::bytes).sum::<usize>();
        self.messages += 1;
        self.bytes += size as u64;
        let pair = (frame.from, frame.to);
        let at = match &mut self.timing {
            Timing::Random { .. } => self.now + self.delay(frame.from) + self.delay(frame.to),
            Timing::Model { model, free } => model.send(&mut free[frame.from as usize], self.now, size),
        };
        let last = self.last.entry(pair).or_default();
        *last = at.max(*last);
        let at = *last;
        self.schedule(at, Event::Deliver(frame));
    }

    /// References in messages on the way.
    pub(super) fn is_on_the_way(&self, id: RefId) -> bool {
        self.events
            .iter()
            .any(|e| matches!(&e.0.event, Event::Deliver(frame) if frame.refs.contains(&id)))
    }

    /// Messages on the way, as a check of the end sees them.
    pub(super) fn frames(&self) -> impl Iterator<Item = &Frame> {
        self.events.iter().filter_map(|e| match &e.0.event {
            Event::Deliver(frame) => Some(frame),
            _ => None,
        })
    }

    /// Jobs of a rank, but for the one that goes on right now.
    pub(super) fn jobs_of(&self, rank: u32) -> usize {
        let counts = |id: JobId, j: &Job| j.rank == rank && id != self.current && !j.loose;
        self.jobs.iter().filter(|(id, j)| counts(**id, j)).count()
    }

    /// Where something is lost the end doesn't come: all is over when the clients are done.
    fn look_whether_over(&mut self) {
        let nodes = &self.nodes;
        if self.checks.lossy && self.clients.iter().all(|(rank, done)| done.get() || nodes[*rank as usize].stopped) {
            self.checks.over = true;
        }
    }

    fn received(&mut self, rank: u32, round: u64) {
        let node = &mut self.nodes[rank as usize];
        node.round = node.round.max(round);
        if let Timing::Model { model, free } = &mut self.timing {
            model.receive(&mut free[rank as usize], self.now);
        }
    }
}

/// The simulation, as jobs hold it.
#[derive(Clone)]
pub(crate) struct Sim(Rc<RefCell<World>>);

impl Sim {
    /// Ranks for a program, or for all of its places on one rank.
    pub(super) fn new(program: &Program, one_rank: bool) -> Self {
        let size = if one_rank { 1 } else { program.ranks };
        let mut slow = vec![1; size as usize];
        let mut faults = Vec::new();
        if !one_rank {
            for fault in &program.faults {
                match *fault {
                    Fault::Slow { rank, factor } => slow[(rank % size) as usize] = factor,
                    other => faults.push(other),
                }
            }
        }
        let window = Window {
            requests: if one_rank { usize::MAX } else { program.window },
            bytes: 1 << 20,
        };
        let timing = Timing::Random {
            rng: ChaCha8Rng::seed_from_u64(program.seed ^ 0x5eed).into(),
            jitter: if one_rank { 0 } else { program.jitter },
            slow,
        };
        let mut world = World::new(size, window, timing);
        for fault in &faults {
            if let Fault::Stop { rank, at } = *fault {
                world.schedule(at, Event::Stop { rank: rank % size });
            }
        }
        crate::autograd::reach::limit(program.reach);
        world.one_rank = one_rank;
        world.memory = program.memory.filter(|_| !one_rank);
        world.limit = program.limit.filter(|_| !one_rank);
        world.checks.lossy = !one_rank && program.loses();
        world.faults = faults;
        Sim(Rc::new(RefCell::new(world)))
    }

    /// Ranks whose messages take as long as a model says.
    pub(super) fn modelled(size: u32, window: Window, model: LogGp) -> Self {
        let free = vec![Duration::ZERO; size as usize];
        Sim(Rc::new(RefCell::new(World::new(size, window, Timing::Model { model, free }))))
    }

    pub(super) fn world(&self) -> RefMut<'_, World> {
        self.0.borrow_mut()
    }

    /// Runs until nothing is left to do, all is over, or something was found wrong.
    pub(super) fn run(&self) {
        loop {
            let event = {
                let mut world = self.world();
                if world.checks.violation.is_some() || world.checks.over {
                    break;
                }
                let Some(Reverse(entry)) = world.events.pop() else { break };
                if entry.at > FOREVER || (world.next_event > MOST && matches!(world.timing, Timing::Random { .. })) {
                    world.checks.violate(|| "the program doesn't come to an end".into());
                    break;
                }
                world.now = entry.at;
                entry.event
            };
            match event {
                Event::Resume(job) => {
                    self.resume(job);
                    self.world().look_whether_over();
                }
                Event::Deliver(frame) => {
                    let (to, round) = (frame.to, frame.round);
                    if !self.is_stopped(to) {
                        self.world().received(to, round);
                        self.deliver(frame);
                    }
                }
                Event::Callback { rank, values } => {
                    drop(values);
                    self.world().nodes[rank as usize].callbacks -= 1;
                    self.step(rank, |_| ());
                }
                Event::Poll { rank } => {
                    if !self.is_stopped(rank) {
                        self.world().nodes[rank as usize].poll_due = false;
                        self.step(rank, |_| ());
                    }
                }
                Event::Stop { rank } => {
                    let mut world = self.world();
                    world.nodes[rank as usize].stopped = true;
                    world.checks.count("a rank stops answering");
                    world.trace.note(|| format!("rank {rank} stops answering"));
                }
            }
        }
    }

    fn is_stopped(&self, rank: u32) -> bool {
        self.world().nodes[rank as usize].stopped
    }

    /// If handles were dropped on a rank, it tells soon.
    pub(super) fn poll_soon(&self, rank: u32) {
        let mut world = self.world();
        if world.handles.any_dropped(rank) && !world.nodes[rank as usize].poll_due {
            world.nodes[rank as usize].poll_due = true;
            let at = world.clock(rank) + world.delay(rank);
            world.schedule(at, Event::Poll { rank });
        }
    }
}

//! Random programs over a few ranks: references are created, sent, nested in replies, fetched and dropped while messages between different pairs
//! of ranks overtake each other and tasks end in any order. A failing seed is printed, and fails again.

use std::collections::{HashMap, VecDeque};

use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// What a task of the script still has to do.
enum Pending {
    Call { creates: bool, custody: Vec<RefId> },
    Fetch,
}

struct Ranks {
    seed: u64,
    rng: ChaCha8Rng,
    ranks: Vec<Rank<RefId, ()>>,
    /// Messages on the way, in order per pair.
    wires: HashMap<(u32, u32), VecDeque<Message>>,
    tasks: Vec<(u32, TaskId, Pending)>,
    /// Handles that each rank's program holds.
    held: Vec<Vec<RefId>>,
    /// What a creating request of a rank creates.
    creating: HashMap<TaskId, RefId>,
    fetching: HashMap<TaskId, RefId>,
    freed: usize,
    ended: usize,
}

impl Ranks {
    fn new(seed: u64, size: u32) -> Self {
        let window = Window {
            requests: 1 << 20,
            bytes: 1 << 40,
        };
        Ranks {
            seed,
            rng: ChaCha8Rng::seed_from_u64(seed),
            ranks: (0..size).map(|me| Rank::new(me, size, window)).collect(),
            wires: HashMap::new(),
            tasks: Vec::new(),
            held: vec![Vec::new(); size as usize],
            creating: HashMap::new(),
            fetching: HashMap::new(),
            freed: 0,
            ended: 0,
        }
    }

    fn size(&self) -> u32 {
        self.ranks.len() as u32
    }

    fn any_rank(&mut self) -> u32 {
        let size = self.size();
        self.rng.random_range(0..size)
    }

    fn some_handles(&mut self, rank: u32) -> Vec<RefId> {
        let n = self.rng.random_range(0..3);
        let held = &self.held[rank as usize];
        (0..n).filter_map(|_| held.choose(&mut self.rng).copied()).collect()
    }

    /// Keeps each of these handles, or drops it.
    fn keep_or_drop(&mut self, rank: u32, handles: Vec<RefId>) {
        for id in handles {
            if self.rng.random_bool(0.5) {
                self.held[rank as usize].push(id);
            } else {
                self.ranks[rank as usize].drop_handle(id);
            }
        }
    }

    fn call(&mut self, rank: u32, create: bool) {
        let to = self.any_rank();
        let refs = self.some_handles(rank);
        let me = &mut self.ranks[rank as usize];
        let id = create.then(|| me.allocate(to));
        let op = Op::Call {
            function: 0,
            create: id.map(|i| i.value),
            context: None,
            gate: Gate::default(),
        };
        let request = me.request(to, op, refs, (), None);
        if let Some(id) = id {
            self.creating.insert(TaskId { from: rank, request }, id);
            self.held[rank as usize].push(id);
        }
        self.carry_out(rank);
    }

    fn fetch(&mut self, rank: u32) {
        let Some(&id) = self.held[rank as usize].choose(&mut self.rng) else {
            return;
        };
        let op = Op::Fetch {
            value: id.value,
            context: None,
        };
        let request = self.ranks[rank as usize].request(id.owner, op, Vec::new(), (), None);
        // The handle is held until the answer: what is fetched through it must be there.
        self.held[rank as usize].retain({
            let mut first = true;
            move |h| !(*h == id && std::mem::take(&mut first))
        });
        self.fetching.insert(TaskId { from: rank, request }, id);
        self.carry_out(rank);
    }

    fn drop_one(&mut self, rank: u32) {
        let held = &mut self.held[rank as usize];
        if !held.is_empty() {
            let at = self.rng.random_range(0..held.len());
            let id = held.swap_remove(at);
            self.ranks[rank as usize].drop_handle(id);
            self.carry_out(rank);
        }
    }

    fn deliver(&mut self) -> bool {
        let mut busy: Vec<(u32, u32)> = self.wires.iter().filter(|w| !w.1.is_empty()).map(|w| *w.0).collect();
        busy.sort_unstable();
        let Some(&(from, to)) = busy.choose(&mut self.rng) else {
            return false;
        };
        let message = self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        self.ranks[to as usize].receive(from, message.expect("the wire is busy"), ());
        self.carry_out(to);
        true
    }

    fn finish_task(&mut self) -> bool {
        if self.tasks.is_empty() {
            return false;
        }
        let at = self.rng.random_range(0..self.tasks.len());
        let (rank, task, pending) = self.tasks.swap_remove(at);
        match pending {
            Pending::Fetch => self.ranks[rank as usize].done(task, reply(Vec::new())),
            Pending::Call { creates, custody } => {
                self.keep_or_drop(rank, custody);
                let outcome = if creates {
                    Outcome::Value(self.creating[&task])
                } else {
                    reply(self.some_handles(rank))
                };
                self.ranks[rank as usize].done(task, outcome);
            }
        }
        self.carry_out(rank);
        true
    }

    fn carry_out(&mut self, rank: u32) {
        for action in self.ranks[rank as usize].take_actions() {
            match action {
                Action::Send { to, message, .. } => self.wires.entry((rank, to)).or_default().push_back(message),
                Action::Run { task, work } => {
                    let pending = match work {
                        Work::Call { creates, refs, .. } => Pending::Call { creates, custody: refs },
                        Work::Encode { .. } => Pending::Fetch,
                    };
                    self.tasks.push((rank, task, pending));
                }
                Action::Answered {
                    request, outcome, refs, ..
                } => {
                    if let Some(id) = self.fetching.remove(&TaskId { from: rank, request }) {
                        assert!(outcome.is_ok(), "seed {}: rank {rank} holds {id:?}: {outcome:?}", self.seed);
                        self.ranks[rank as usize].drop_handle(id);
                    }
                    self.keep_or_drop(rank, refs);
                }
                Action::Garbage { values } => {
                    for id in values {
                        self.freed += 1;
                        let holder = self.held.iter().position(|h| h.contains(&id));
                        assert_eq!(holder, None, "seed {}: {id:?} was freed while a rank holds it", self.seed);
                        let custody = self
                            .tasks
                            .iter()
                            .any(|t| matches!(&t.2, Pending::Call { custody, .. } if custody.contains(&id)));
                        assert!(!custody, "seed {}: {id:?} was freed while a task holds it", self.seed);
                        let on_the_way = self.wires.values().flatten().any(|m| match m {
                            Message::Request { refs, .. } | Message::Reply { refs, .. } => refs.contains(&id),
                            _ => false,
                        });
                        assert!(!on_the_way, "seed {}: {id:?} was freed while it is on the way", self.seed);
                    }
                }
                Action::Ended { last } => {
                    assert!(last, "all ranks are finishing");
                    self.ended += 1;
                }
                other => panic!("seed {}: unexpected {other:?}", self.seed),
            }
        }
    }

    /// Until nothing is on the way and no task is left.
    fn settle(&mut self) {
        loop {
            let mut steps: [fn(&mut Self) -> bool; 2] = [Self::deliver, Self::finish_task];
            steps.shuffle(&mut self.rng);
            let moved = steps.iter().any(|step| step(self));
            for rank in 0..self.size() {
                self.carry_out(rank);
            }
            if !moved && self.wires.values().all(VecDeque::is_empty) {
                return;
            }
        }
    }
}

fn reply(refs: Vec<RefId>) -> Outcome<RefId, ()> {
    Outcome::Reply {
        payload: (),
        refs,
        crossing: None,
    }
}

/// How many programs.
const SEEDS: u64 = 10_000;

#[test]
fn references_live_exactly_as_long_as_somebody_holds_them() {
    let mut freed = 0;
    for seed in 0..SEEDS {
        let mut ranks = Ranks::new(seed, 2 + (seed % 4) as u32);
        for _ in 0..120 {
            let rank = ranks.any_rank();
            match ranks.rng.random_range(0..12) {
                0 | 1 => ranks.call(rank, true),
                2 | 3 => ranks.call(rank, false),
                4 => ranks.fetch(rank),
                5 | 6 => ranks.drop_one(rank),
                7..10 => drop(ranks.deliver()),
                _ => drop(ranks.finish_task()),
            }
        }
        ranks.settle();
        for rank in 0..ranks.size() {
            while !ranks.held[rank as usize].is_empty() {
                ranks.drop_one(rank);
            }
        }
        ranks.settle();
        for rank in 0..ranks.size() {
            let counters = ranks.ranks[rank as usize].counters();
            assert_eq!(counters, Counters::default(), "seed {seed}: rank {rank} keeps something");
        }
        assert_eq!(ranks.freed, ranks.creating.len(), "seed {seed}: each value is freed once");
        freed += ranks.freed;
    }
    assert!(freed > 10_000, "the programs create too little: {freed}");
}

#[test]
fn the_end_comes_on_all_ranks_after_everything_was_delivered() {
    for seed in 0..500 {
        let mut ranks = Ranks::new(seed, 1 + (seed % 9) as u32);
        for _ in 0..40 {
            let rank = ranks.any_rank();
            match ranks.rng.random_range(0..4) {
                0 => ranks.call(rank, false),
                1 => drop(ranks.finish_task()),
                _ => drop(ranks.deliver()),
            }
        }
        let mut order: Vec<u32> = (0..ranks.size()).collect();
        while ranks.ended < ranks.size() as usize {
            if !order.is_empty() && ranks.rng.random_bool(0.3) {
                let at = ranks.rng.random_range(0..order.len());
                let rank = order.swap_remove(at);
                ranks.ranks[rank as usize].enter_end(true);
            }
            if ranks.rng.random_bool(0.5) {
                ranks.deliver();
            } else {
                ranks.finish_task();
            }
            for rank in 0..ranks.size() {
                if ranks.ranks[rank as usize].is_ending() {
                    let busy = ranks.tasks.iter().any(|t| t.0 == rank);
                    ranks.ranks[rank as usize].advance_end(busy);
                }
                ranks.carry_out(rank);
            }
            if ranks.ended > 0 {
                assert!(ranks.tasks.is_empty() && order.is_empty(), "seed {seed}: the end came early");
                let left = ranks.wires.values().flatten().any(|m| !matches!(m, Message::Wave { .. }));
                assert!(!left, "seed {seed}: the end came before a message");
            }
        }
    }
}

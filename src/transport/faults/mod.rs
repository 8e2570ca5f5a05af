//! Faults on purpose, for tests: a transport around another one that delays, loses, records; ranks that stop or die. Only with the feature `faults`.

mod held;
mod plan;

use std::collections::{BTreeMap, HashMap};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::mpi::{self, ThreadLevel};
use super::{Delivery, Frame, Landing, Loss, Traffic, Transport};
use crate::Result;
use held::Held;
use plan::{ALL, Fault, Plan};

/// Places of a rank's life, beside the kinds of messages: before ranks watch each other, before they agree on settings, before they compare programs, at the end.
pub(crate) const PLACES: [&str; 5] = ["mpi", "init", "start", "close", "finalize"];

/// How long the launcher gets to pass on what a rank wrote before it was killed.
const OUTPUT_PAUSE: Duration = Duration::from_millis(200);

static PLAN: Mutex<Option<Plan>> = Mutex::new(None);
static TALLY: Mutex<BTreeMap<&'static str, Tally>> = Mutex::new(BTreeMap::new());
static RECORD: Mutex<Option<Vec<Frame>>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What became of the messages of a kind that this process has sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// All of them.
    pub sent: u64,
    /// Those that were held back for a while.
    pub delayed: u64,
    /// Those that were lost.
    pub lost: u64,
}

/// What goes wrong in the worlds that start from now on in this process; nothing, for an empty text. `known` are the kinds.
pub(crate) fn set(text: &str, known: &[&str]) -> Result<()> {
    let plan = Plan::parse(text, known)?;
    *lock(&PLAN) = (!plan.is_empty()).then_some(plan);
    Ok(())
}

/// What became of messages since the last call, by kind.
pub fn tally() -> BTreeMap<&'static str, Tally> {
    std::mem::take(&mut *lock(&TALLY))
}

/// From now on, frames that the worlds of this process send are kept: of worlds that start later.
pub fn record() {
    *lock(&RECORD) = Some(Vec::new());
}

/// Frames kept since [`record`], which ends.
pub fn recorded() -> Vec<Frame> {
    lock(&RECORD).take().unwrap_or_default()
}

/// What MPI grants, by the plan.
pub(crate) fn granted(level: ThreadLevel, rank: u32) -> ThreadLevel {
    let plan = lock(&PLAN);
    plan.iter().flat_map(|plan| plan.on(rank)).fold(level, |level, fault| match fault {
        Fault::Level(most) => level.min(*most),
        _ => level,
    })
}

/// A rank gets to a place before its transport is up.
pub(crate) fn reached(place: &str, rank: u32) {
    let plan = lock(&PLAN).clone();
    plan.iter()
        .flat_map(|plan| plan.on(rank))
        .for_each(|fault| strike(fault, rank, place, 1, 1));
}

/// Kills or stops this process, if the fault says so for the `number`th message of this kind, the `all`th of any.
fn strike(fault: &Fault, rank: u32, kind: &str, number: u64, all: u64) {
    let hits = |which: &str, at: u64| (which == kind && at == number) || (which == ALL && at == all);
    match fault {
        Fault::Kill { kind: which, number: at } if hits(which, *at) => {
            log::warn!("rank {rank} is killed at {kind} {number}, message {all}");
            std::thread::sleep(OUTPUT_PAUSE);
            mpi::kill()
        }
        Fault::Stop {
            kind: which,
            number: at,
            time,
        } if hits(which, *at) => {
            log::warn!("rank {rank} is stopped at {kind} {number}, message {all}");
            let script = format!("sleep {}; kill -CONT {}", time.as_secs_f64(), std::process::id());
            match Command::new("sh").args(["-c", &script]).spawn() {
                Ok(_) => mpi::stop(),
                Err(e) => log::error!("rank {rank} isn't stopped, as nothing would let it go on: {e}"),
            }
        }
        _ => {}
    }
}

/// Puts the plan between a transport and its user, if there is one. `kind` tells a frame's from its header.
pub(crate) fn wrap(inner: Box<dyn Transport>, kind: fn(&[u8]) -> &'static str) -> Box<dyn Transport> {
    let plan = lock(&PLAN).clone();
    if plan.is_none() && lock(&RECORD).is_none() {
        return inner;
    }
    let (plan, rank) = (plan.unwrap_or_default(), inner.rank());
    let faults: Vec<Fault> = plan.on(rank).cloned().collect();
    let late = faults.iter().any(|fault| matches!(fault, Fault::Delay { .. }));
    let inner: Arc<dyn Transport> = Arc::from(inner);
    let seed = plan.seed ^ u64::from(rank) << 32;
    Box::new(Faulty {
        held: Held::new(&inner, late),
        inner,
        kind,
        faults,
        counts: Mutex::new((HashMap::new(), ChaCha8Rng::seed_from_u64(seed))),
    })
}

/// A transport with faults.
#[derive(Debug)]
struct Faulty {
    inner: Arc<dyn Transport>,
    kind: fn(&[u8]) -> &'static str,
    faults: Vec<Fault>,
    /// Messages of each kind that came by.
    counts: Mutex<(HashMap<&'static str, u64>, ChaCha8Rng)>,
    held: Held,
}

/// What becomes of a message.
enum Fate {
    Lost,
    Late(Duration),
}

impl Faulty {
    /// A message, or a place, comes by.
    fn passes(&self, kind: &'static str) -> Fate {
        let mut counts = lock(&self.counts);
        let (counts, random) = &mut *counts;
        let mut count = |kind| {
            let count = counts.entry(kind).or_insert(0);
            *count += 1;
            *count
        };
        let (number, all) = (count(kind), count(ALL));
        let mut fate = Fate::Late(Duration::ZERO);
        for fault in &self.faults {
            strike(fault, self.rank(), kind, number, all);
            match fault {
                Fault::Drop { kind: which, number: at } if (which == kind && *at == number) || (which == ALL && *at == all) => {
                    fate = Fate::Lost;
                }
                Fault::Delay { kind: which, most } if which == kind || which == ALL => {
                    if let Fate::Late(time) = &mut fate {
                        *time += most.mul_f64(random.random());
                    }
                }
                _ => {}
            }
        }
        fate
    }
}

impl Transport for Faulty {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn node_ranks(&self) -> &[u32] {
        self.inner.node_ranks()
    }

    fn send(&self, to: u32, frame: &mut Frame) -> Result<()> {
        if let Some(kept) = &mut *lock(&RECORD) {
            kept.push(frame.clone());
        }
        let kind = (self.kind)(&frame.header);
        let fate = self.passes(kind);
        {
            let mut tally = lock(&TALLY);
            let tally = tally.entry(kind).or_default();
            tally.sent += 1;
            match fate {
                Fate::Lost => tally.lost += 1,
                Fate::Late(time) => tally.delayed += u64::from(!time.is_zero()),
            }
        }
        match fate {
            Fate::Lost => Ok(()),
            Fate::Late(time) => self.held.send(to, frame, time),
        }
    }

    fn poll(&self, inbox: &mut Vec<(u32, Delivery)>) -> Result<bool> {
        self.inner.poll(inbox)
    }

    fn receive_into(&self, landing: Landing<'_>, wait: &mut dyn FnMut()) -> bool {
        self.inner.receive_into(landing, wait)
    }

    fn spin(&self, looks: u32) {
        self.inner.spin(looks);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn sleep(&self, limit: Duration) {
        self.inner.sleep(limit);
    }

    fn set_away(&self, away: bool) -> bool {
        self.inner.set_away(away)
    }

    fn doze(&self, limit: Duration) {
        self.inner.doze(limit);
    }

    fn wake(&self) {
        self.inner.wake();
    }

    fn is_serialized(&self) -> bool {
        self.inner.is_serialized()
    }

    fn exclusive(&self, f: &mut dyn FnMut()) {
        self.inner.exclusive(f);
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.passes("start");
        self.inner.all_gather(bytes)
    }

    fn close(&self) -> Result<()> {
        self.passes("close");
        self.held.close();
        self.inner.close()
    }

    fn on_loss(&self, hook: Box<dyn Fn(&Loss) + Send + Sync>) {
        self.inner.on_loss(hook);
    }

    fn abort(&self, code: i32) -> ! {
        self.inner.abort(code)
    }
}

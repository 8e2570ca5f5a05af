//! The watch before the ring: from just before MPI_Init until all ranks watch each other.
//!
//! Inside MPI_Init no rank knows another, so they find each other by what the launcher told them. The ranks of a node write into one file, the roll, and each looks
//! after the process of the next one that is in it. The first ranks of the nodes keep connections ([`nodes`]). A process that ends before it has written that it
//! started is a death, whenever the others come.

mod nodes;
mod roll;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{GIVING_UP, card, lock};
use crate::config::launcher::{environment, local_size, rank, size};
use crate::transport::Loss;
use crate::transport::mpi::{pmi, process};
use nodes::Nodes;
use roll::{Entry, Rank, Roll};

/// How often a rank looks.
const TICK: Duration = Duration::from_millis(200);
/// How long the others get to learn of a loss, and to say what they waited for, before a rank ends the job.
const TELLING: Duration = Duration::from_millis(800);
/// How often the log hears that the start takes long.
const PATIENCE: Duration = Duration::from_secs(10);

/// The start that this process is in: an abort tells it.
static START: Mutex<Option<Arc<Shared>>> = Mutex::new(None);

/// Tells the ranks that start that this process aborts the job, as [`super::aborting`].
pub(super) fn aborting() {
    if let Ok(start) = START.try_lock()
        && let Some(shared) = &*start
        && !shared.told.swap(true, SeqCst)
    {
        shared.pass_on(&Loss {
            text: format!("rank {} on {} aborts the job", shared.me.rank, shared.me.host),
            died: false,
            hops: 0,
        });
    }
}

/// The watch of a start. Dropped, it ends, and who still watches takes the end of this process for a death.
#[derive(Debug)]
pub(in crate::transport::mpi) struct Early {
    shared: Arc<Shared>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    me: Rank,
    /// `None` if there is nobody to watch, or no way to.
    roll: Option<Roll>,
    nodes: Option<Nodes>,
    /// What this rank waits for, since when.
    waiting: Mutex<(&'static str, Instant)>,
    /// A loss was told, and another isn't.
    told: AtomicBool,
}

impl Early {
    /// Begins it. Local: others may come later, or never. May end the job if a rank is lost already.
    pub(in crate::transport::mpi) fn begin(wanted: bool) -> Early {
        let rank: Option<u32> = rank(environment).and_then(|rank| rank.trim().parse().ok());
        let me = Rank::own(rank.unwrap_or(0));
        let several = rank.is_some() && size(environment).is_some_and(|size| size > 1);
        let roll = (wanted && several).then(|| {
            let roll = Roll::open()?;
            roll.write(&Entry::Begins(me.clone()))?;
            Ok(roll)
        });
        let roll = roll.and_then(|roll: std::io::Result<Roll>| {
            roll.inspect_err(|e| {
                log::warn!(
                    "rank {}: no file for the start ({e}); until MPI is up only the launcher notices a death",
                    me.rank
                );
            })
            .ok()
        });
        let nodes = roll.as_ref().and_then(|_| Nodes::of(&me));
        let shared = Arc::new(Shared {
            me,
            roll,
            nodes,
            waiting: Mutex::new(("MPI_Init_thread", Instant::now())),
            told: AtomicBool::new(false),
        });
        *lock(&START) = Some(Arc::clone(&shared));
        if shared.nodes.is_some() {
            let shared = Arc::clone(&shared);
            // Without it the start goes on all the same; so below.
            let _ = std::thread::Builder::new()
                .name("rankgrad-nodes".into())
                .spawn(move || nodes::watch(&shared));
        }
        let (end, ended) = mpsc::channel();
        let mut watcher = Watcher::new(Arc::clone(&shared));
        // MPI_Init is what connects to a PMIx launcher, so there it is entered all the same. With PMI it would hold srun up, which tries to reach a node without ranks for long.
        if pmi::is_there()
            && let Some(loss) = watcher.look()
        {
            pmi::greet();
            shared.lost(&loss, |limit| {
                std::thread::sleep(limit);
                false
            });
        }
        let thread = std::thread::Builder::new()
            .name("rankgrad-start".into())
            .spawn(move || watcher.watch(&ended));
        Early {
            shared,
            end: Some(end),
            thread: thread.ok(),
        }
    }

    /// What this rank waits for from now on. Local.
    pub(in crate::transport::mpi) fn waits_for(&self, what: &'static str) {
        *lock(&self.shared.waiting) = (what, Instant::now());
    }

    /// All ranks watch each other: this one isn't missed here any more. Local.
    pub(in crate::transport::mpi) fn finish(self) {
        let shared = &self.shared;
        if let Some(roll) = &shared.roll {
            if let Err(e) = roll.write(&Entry::Started(shared.me.clone())) {
                log::warn!(
                    "rank {}: can't tell the others of its node that it has started: {e}",
                    shared.me.rank
                );
            }
            // All have opened it, or they wouldn't watch each other.
            roll.remove();
        }
        if let Some(nodes) = &shared.nodes {
            nodes.leave(&shared.me);
        }
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        *lock(&START) = None;
        self.shared.told.store(true, SeqCst);
        self.end.take();
        if let Some(thread) = self.thread.take() {
            // A panic there was told when it happened.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// What this rank waits for, in words.
    fn waiting(&self) -> String {
        let (what, since) = *lock(&self.waiting);
        format!("waiting for {what}, for {:.1} s", since.elapsed().as_secs_f64())
    }

    /// To the ranks of this node, and to other nodes.
    fn pass_on(&self, loss: &Loss) {
        let further = Loss {
            hops: loss.hops + 1,
            ..loss.clone()
        };
        if let Some(roll) = &self.roll
            && let Err(e) = roll.write(&Entry::from(&further))
        {
            log::debug!("rank {}: can't tell the ranks of its node: {e}", self.me.rank);
        }
        if let Some(nodes) = &self.nodes {
            nodes.tell(&further);
        }
    }

    /// A rank is lost: passes it on, says what this rank waits for, and ends the job: if it only gave up, unless `ended` says within a time that the start is over.
    fn lost(&self, loss: &Loss, mut ended: impl FnMut(Duration) -> bool) {
        if self.told.swap(true, SeqCst) {
            return;
        }
        self.pass_on(loss);
        let (rank, host) = (self.me.rank, &self.me.host);
        let text = format!(
            "rank {rank} on {host}: {}; the job is aborted; rank {rank} was {}",
            loss.text,
            self.waiting()
        );
        if loss.died && loss.hops == 0 {
            process::last_words(&text);
        } else {
            log::error!("{text}");
        }
        if loss.died {
            std::thread::sleep(TELLING);
            process::abort(1)
        }
        // Who gave up ends the job, with its own exit code.
        if !ended(GIVING_UP) {
            process::abort(1)
        }
    }
}

/// What the watching thread has.
struct Watcher {
    shared: Arc<Shared>,
    /// How much of the roll was read.
    seen: u64,
    /// Who has begun, and hasn't started.
    starting: BTreeMap<u32, Rank>,
    begun: usize,
    /// Two processes are one rank: this is no start of one job.
    confused: bool,
}

impl Watcher {
    fn new(shared: Arc<Shared>) -> Watcher {
        Watcher {
            shared,
            seen: 0,
            starting: BTreeMap::new(),
            begun: 0,
            confused: false,
        }
    }

    fn watch(mut self, end: &mpsc::Receiver<()>) {
        let (begun, mut said) = (Instant::now(), Instant::now());
        let mut told = false;
        while end.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            if let Some(loss) = self.look() {
                // Nothing is sent: what comes is the end.
                self.shared
                    .lost(&loss, |limit| end.recv_timeout(limit) != Err(RecvTimeoutError::Timeout));
            }
            if said.elapsed() >= PATIENCE {
                said = Instant::now();
                let advice = match environment("SLURM_JOB_ID") {
                    Some(_) => "; `srun --kill-on-bad-exit=1` ends a job whose ranks die",
                    None => "",
                };
                let (me, waiting, missing) = (self.shared.me.rank, self.shared.waiting(), self.missing());
                let text = format!("rank {me}: {waiting}: {missing}{advice}");
                // Who has no logger would see a job that hangs, and nothing else.
                if !told && begun.elapsed() >= 2 * PATIENCE && !log::log_enabled!(log::Level::Warn) {
                    told = true;
                    process::last_words(&text);
                } else {
                    log::warn!("{text}");
                }
            }
        }
    }

    /// A loss, if there is one that hasn't been told.
    fn look(&mut self) -> Option<Loss> {
        let told = self.read();
        if told.is_some() || self.confused {
            return told;
        }
        let next = self.next()?.clone();
        if card::ended(next.pid, next.born) != Some(true) {
            return None;
        }
        // What it wrote before it ended counts.
        let told = self.read();
        if told.is_some() || self.confused || self.next() != Some(&next) {
            return told;
        }
        Some(died(&next, "its process has ended before all ranks were up"))
    }

    /// Reads on in the roll.
    fn read(&mut self) -> Option<Loss> {
        let entries = self.shared.roll.as_ref()?.read(&mut self.seen);
        let entries = entries.inspect_err(|e| log::debug!("rank {}: can't read the roll: {e}", self.shared.me.rank));
        let mut told = None;
        for entry in entries.unwrap_or_default() {
            match entry {
                Entry::Begins(rank) => {
                    self.begun += 1;
                    self.confused |= self.starting.insert(rank.rank, rank).is_some();
                }
                Entry::Started(rank) => drop(self.starting.remove(&rank.rank)),
                Entry::Lost { text, died, hops } => told = told.or(Some(Loss { text, died, hops })),
            }
        }
        told
    }

    /// The rank that this one looks after: the next one of those that start.
    fn next(&self) -> Option<&Rank> {
        let me = self.shared.me.rank;
        let behind = self.starting.range(me + 1..).next();
        let (rank, next) = behind.or_else(|| self.starting.iter().next())?;
        (*rank != me).then_some(next)
    }

    /// Who is waited for, as far as this node knows.
    fn missing(&self) -> String {
        if let Some(node) = self.shared.nodes.as_ref().and_then(Nodes::missing) {
            return format!("the first rank of node {node} doesn't answer; it comes late, or has died before another rank was there");
        }
        match local_size(environment) {
            Some(size) if self.begun > 0 && self.begun < size as usize => {
                let ranks: Vec<_> = self.starting.keys().collect();
                format!("of the {size} ranks of this node only {ranks:?} have come to it; the others come late, or have died before")
            }
            _ => "other ranks come late, or have died before they came to it".into(),
        }
    }
}

fn died(rank: &Rank, how: &str) -> Loss {
    let Rank { rank, host, pid, .. } = rank;
    Loss {
        text: format!("rank {rank} on {host} (process {pid}) has died: {how}"),
        died: true,
        hops: 0,
    }
}

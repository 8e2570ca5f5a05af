//! What must hold, noted and looked at as a program runs.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::events::Frame;
use super::node::Value;
use super::world::World;
use crate::Error;
use crate::protocol::{ContextId, Input, Message, Op, Part, RefId, TaskId, Turn, Work};
use crate::wire::Payload;

/// No step takes so long: it may wait for a rank that was lost, on each of its owners one after the other.
const LONGEST: Duration = Duration::from_secs(2000);

/// What was noted of one run.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    /// What was found wrong, first of all.
    pub violation: Option<String>,
    /// Every rank has come to its end.
    pub over: bool,
    /// Something may be lost in this run.
    pub lossy: bool,
    /// The longest time that a client spent in a step.
    pub longest: Duration,
    /// How often what was exercised.
    pub counts: BTreeMap<&'static str, u64>,
    /// Values that were made, and whether they were freed.
    values: HashMap<RefId, bool>,
    /// Who has met which context, and who has forgotten it.
    met: HashSet<(ContextId, u32)>,
    forgotten: HashSet<(ContextId, u32)>,
    /// Release messages, per context and receiver.
    releases: HashMap<(ContextId, u32), u64>,
    /// The request of the step queue that runs, per rank.
    queued: HashMap<u32, TaskId>,
    /// The request whose turn is kept, per rank; and requests whose turn won't be, since what ends it came first.
    kept: HashMap<u32, TaskId>,
    given_up: HashSet<(u32, TaskId)>,
    /// Steps in two rounds, by client and number: their owners, and whether the client has sent the second round.
    rounds: HashMap<(usize, u64), (Vec<u32>, bool)>,
    /// Steps that were applied: per owner and client, the number of the last, and how often each.
    steps: HashMap<(u32, usize, u64), u64>,
    last_steps: HashMap<(u32, usize), u64>,
}

impl Checks {
    pub(super) fn violate(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    pub(super) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// A value was made.
    pub(super) fn made(&mut self, id: RefId) {
        if self.values.insert(id, false).is_some() {
            self.violate(|| format!("value {} was made twice on rank {}", id.value, id.owner));
        }
    }

    /// A message was sent.
    pub(super) fn sends(&mut self, from: u32, to: u32, message: &Message) {
        match message {
            Message::Request {
                op: Op::Release { context, .. },
                ..
            } => {
                let n = self.releases.entry((*context, to)).or_default();
                *n += 1;
                if *n > 1 {
                    self.violate(|| format!("rank {from} tells rank {to} once more that context {context} is released"));
                }
            }
            Message::Register { .. } => self.count("a third rank registers"),
            Message::Request {
                op: Op::Backward { part, .. },
                ..
            } => match part {
                Part::Last(..) => self.count("the root leaves the commit to a rank"),
                Part::Recall => self.count("the root gives up what it left to a rank"),
                _ => {}
            },
            Message::Reply { answer, .. } if answer.committed => self.count("a rank commits for the root"),
            Message::Reply { answer, .. } if answer.recalled => self.count("a commit is recalled"),
            _ => {}
        }
    }

    /// A rank knows a context.
    pub(super) fn meets(&mut self, rank: u32, context: ContextId) {
        self.met.insert((context, rank));
    }

    pub(super) fn forgets(&mut self, rank: u32, context: ContextId) {
        if !self.forgotten.insert((context, rank)) {
            self.violate(|| format!("rank {rank} forgets context {context} twice"));
        }
        self.count("a rank forgets a context");
    }

    fn check_context(&mut self, rank: u32, context: ContextId, what: &str) {
        if self.forgotten.contains(&(context, rank)) {
            self.violate(|| format!("rank {rank}: {what} in context {context}, which was released there"));
        }
    }

    /// A rank begins a task.
    pub(super) fn runs(&mut self, rank: u32, (task, turn): (TaskId, Turn), work: &Work<Value, Payload>, arrivals: &mut VecDeque<TaskId>) {
        match work {
            Work::Call { context: Some(tag), .. } => self.check_context(rank, tag.context, "a call runs"),
            Work::Encode { context: Some(tag), .. } => self.check_context(rank, tag.context, "a fetch runs"),
            _ => {}
        }
        if let Work::Call { queued: true, .. } = work {
            if let Some(other) = self.queued.insert(rank, task) {
                self.violate(|| format!("rank {rank}: {task:?} of the step queue begins while {other:?} runs"));
            }
            let kept = self.kept.get(&rank).copied();
            let ends_it = matches!((turn, kept), (Turn::End(request), Some(kept)) if kept == TaskId { request, ..task });
            match arrivals.iter().position(|t| *t == task) {
                // It goes before all that wait for the turn that it ends.
                Some(at) if ends_it => {
                    self.kept.remove(&rank);
                    arrivals.remove(at);
                    self.count("a kept turn is ended");
                }
                Some(_) if kept.is_some() => {
                    self.violate(|| format!("rank {rank}: {task:?} of the step queue begins in the turn that {kept:?} keeps"));
                }
                // Those before it were refused.
                Some(at) => drop(arrivals.drain(..=at)),
                None => self.violate(|| format!("rank {rank}: {task:?} of the step queue is out of order, or runs twice")),
            }
        }
    }

    /// A client has waited so long in a step.
    pub(super) fn waited(&mut self, client: usize, time: Duration) {
        self.longest = self.longest.max(time);
        if time > LONGEST {
            self.violate(|| format!("client {client} waits for {time:?} in a step"));
        }
    }

    /// A client begins a step in two rounds.
    pub(super) fn step_begins(&mut self, client: usize, number: u64, owners: &[u32]) {
        self.rounds.insert((client, number), (owners.to_vec(), false));
    }

    /// It sends the second round.
    pub(super) fn step_applies(&mut self, client: usize, number: u64) {
        if let Some(step) = self.rounds.get_mut(&(client, number)) {
            step.1 = true;
        }
    }

    /// An owner applies a step in a second round.
    pub(super) fn applies(&mut self, rank: u32, client: usize, number: u64) {
        if self.rounds.get(&(client, number)).is_none_or(|step| !step.1) {
            self.violate(|| format!("rank {rank} applies step {number} of client {client}, which has no second round"));
        }
    }

    /// An owner can't apply a step in a second round.
    pub(super) fn second_round_fails(&mut self, rank: u32, client: usize, number: u64, error: &Error) {
        if !self.lossy {
            self.violate(|| format!("rank {rank} fails in the second round of step {number} of client {client}: {error}"));
        }
    }

    pub(super) fn engine(&mut self, rank: u32, context: ContextId, inputs: &[Input<Payload>]) {
        self.check_context(rank, context, "a backward works");
        for input in inputs {
            self.count(match input {
                Input::Mark(_) => "a crossing is marked",
                Input::Gradient(..) => "a crossing gets its gradients",
                Input::ExpectAll => "a rank expects all (fast)",
                Input::Commit => "a rank commits",
                Input::CommitIfLast { .. } => continue,
                Input::Abort => "a rank aborts",
                Input::MarkRoots | Input::SeedRoots => continue,
                Input::SeedIfKnown => "an exact backward may know all that it reaches",
            });
        }
    }

    /// A step is applied on an owner.
    pub(super) fn steps(&mut self, rank: u32, client: usize, number: u64) {
        let n = self.steps.entry((rank, client, number)).or_default();
        *n += 1;
        if *n > 1 {
            self.violate(|| format!("rank {rank} applies step {number} of client {client} twice"));
        }
        let last = self.last_steps.insert((rank, client), number);
        if last.is_some_and(|l| l >= number) {
            self.violate(|| {
                format!(
                    "rank {rank} applies step {number} of client {client} after step {}",
                    last.unwrap_or(0)
                )
            });
        }
        self.count("an owner applies a step");
    }

    /// An owner said that it has applied a step.
    pub(super) fn step_answered(&mut self, rank: u32, client: usize, number: u64) {
        if !self.steps.contains_key(&(rank, client, number)) {
            self.violate(|| format!("rank {rank} answers that step {number} of client {client} was applied; it wasn't"));
        }
    }
}

impl World {
    /// Notes a request that arrives.
    pub(super) fn expect(&mut self, rank: u32, task: TaskId, op: &Op) {
        let Op::Call { gate, .. } = op else { return };
        let node = &mut self.nodes[rank as usize];
        if gate.turn != Turn::None {
            node.arrivals.push_back(task);
            node.turns.insert(task, gate.turn);
        }
        if let Turn::End(request) = gate.turn {
            let kept = TaskId { request, ..task };
            if self.checks.kept.get(&rank) != Some(&kept) {
                self.checks.count("a turn is ended before it was kept");
                self.checks.given_up.insert((rank, kept));
            }
        }
        if let Some(context) = gate.gradients_of {
            node.gated.insert(task, context);
        }
    }

    /// A task of the step queue is done.
    pub(super) fn turn_done(&mut self, rank: u32, task: TaskId, turn: Turn, succeeded: bool) {
        let checks = &mut self.checks;
        if checks.queued.get(&rank) == Some(&task) {
            checks.queued.remove(&rank);
        }
        if turn == Turn::Keep && succeeded && !checks.given_up.contains(&(rank, task)) {
            checks.kept.insert(rank, task);
            checks.count("a turn is kept");
        }
    }

    /// Where something is lost: a turn is kept only for a rank that was lost.
    pub(super) fn check_kept(&mut self) {
        for (rank, node) in (0..).zip(&self.nodes) {
            let Some(kept) = node.rank.kept_turn().filter(|kept| {
                let ends = |f: &Frame| f.from == kept.from && f.to == rank;
                !node.stopped && !self.nodes[kept.from as usize].stopped && !self.frames().any(ends)
            }) else {
                continue;
            };
            self.checks.violate(|| format!("rank {rank} keeps a turn for ever, for {kept:?}"));
            return;
        }
    }

    /// A request begins that a backward of its context, or its release, should have refused.
    pub(super) fn check_gate(&mut self, rank: u32, task: TaskId) {
        let node = &mut self.nodes[rank as usize];
        if let Some(context) = node.gated.remove(&task)
            && let Err(error) = node.rank.check_gradients("a step or a gradient access", context)
        {
            self.checks.violate(|| format!("rank {rank}: {task:?} begins: {error}"));
        }
    }

    /// A value is freed.
    pub(super) fn check_freed(&mut self, rank: u32, value: &Value) {
        let Some(&id) = value.id.get().filter(|_| self.is_checked()) else {
            return;
        };
        self.checks.count("a value is freed");
        match self.checks.values.insert(id, true) {
            Some(false) => {}
            Some(true) => self.checks.violate(|| format!("value {} was freed twice on rank {rank}", id.value)),
            None => self
                .checks
                .violate(|| format!("value {} was freed on rank {rank}, where it wasn't made", id.value)),
        }
        if self.handles.is_held(id) {
            self.checks
                .violate(|| format!("value {} was freed on rank {rank} while a rank holds it", id.value));
        }
        if self.is_on_the_way(id) {
            self.checks
                .violate(|| format!("value {} was freed on rank {rank} while a reference to it is on the way", id.value));
        }
        if let Some(holder) = self.nodes.iter().position(|n| !n.stopped && n.rank.carries(id)) {
            self.checks.violate(|| {
                format!(
                    "value {} was freed on rank {rank} while a request that waits on rank {holder} holds it",
                    id.value
                )
            });
        }
    }

    /// An epoch has ended on a rank: nothing may be on the way.
    pub(super) fn check_ended(&mut self, rank: u32, last: bool) {
        self.checks.count("an epoch ends on a rank");
        if !last || !self.is_checked() {
            return;
        }
        let late = self.frames().find(|f| {
            !f.again
                && !matches!(
                    crate::wire::parse_header(f.header.clone(), Vec::new()),
                    Ok((Message::Wave { .. }, ..)) | Ok((Message::Quiet { .. }, ..))
                )
        });
        if let Some((from, to)) = late.map(|f| (f.from, f.to)) {
            self.checks
                .violate(|| format!("the end came on rank {rank} while a message from {from} to {to} was on the way"));
        }
        for other in 0..self.size() {
            // Its main job is still there, until it hears of the end.
            let (jobs, node) = (self.jobs_of(other), &self.nodes[other as usize]);
            if jobs > 1 || node.callbacks > 0 || self.handles.any_dropped(other) {
                self.checks
                    .violate(|| format!("the end came on rank {rank} while something is still to be done on rank {other}"));
            }
        }
    }

    /// All is over, and nothing was lost: nothing may be left.
    pub(super) fn check_left(&mut self) {
        for rank in 0..self.size() {
            let node = &self.nodes[rank as usize];
            let mut left = node.rank.residue();
            left.extend([
                ("requests waited for", node.waiting.len()),
                ("recordings", node.recordings.len()),
                ("optimizers", node.optimizers.len()),
                ("optimizers dropped before they were made", node.unmade.len()),
                ("backwards waited for", node.backwards.len()),
            ]);
            left.retain(|l| l.1 > 0);
            if !left.is_empty() {
                return self.checks.violate(|| format!("at the end rank {rank} keeps {left:?}"));
            }
        }
        if let Some(id) = self.checks.values.iter().filter(|v| !v.1).map(|v| *v.0).min() {
            return self
                .checks
                .violate(|| format!("at the end value {} on rank {} was never freed", id.value, id.owner));
        }
        let mut halves: Vec<_> = self.checks.rounds.iter().filter(|(_, step)| step.1).collect();
        halves.sort_unstable();
        for (&(client, number), (owners, _)) in halves {
            if let Some(rank) = owners
                .iter()
                .find(|&&rank| !self.checks.steps.contains_key(&(rank, client, number)))
            {
                let what = format!("step {number} of client {client} was applied on some owners, and not on rank {rank}");
                return self.checks.violate(|| what);
            }
        }
        let Checks { met, releases, .. } = &self.checks;
        let mut all: Vec<_> = met.iter().chain(releases.keys()).copied().collect();
        all.sort_unstable();
        for (context, rank) in all {
            let (known, told) = (met.contains(&(context, rank)), releases.get(&(context, rank)).copied().unwrap_or(0));
            if context.rank() != rank && u64::from(known) != told {
                return self.checks.violate(|| {
                    format!(
                        "context {context} was released {told} times on rank {rank}, which met it {} times",
                        u64::from(known)
                    )
                });
            }
        }
    }
}

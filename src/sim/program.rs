//! The programs that the simulation runs, as data: what clients do, what the functions they call do, what goes wrong.
//!
//! A program names *places*, not ranks. Usually place `p` is rank `p`; for comparison the same program runs with all places on one rank.
//! Operands are taken modulo what there is, and an operation without any does nothing: so a program stays one when parts are taken out of it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::protocol::{ContextId, Mode, OptimizerId};

/// What is run.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub seed: u64,
    pub ranks: u32,
    pub clients: Vec<Client>,
    /// How often each rank serves before it finishes.
    pub serves: Vec<u32>,
    /// Rank 0 leads: the others come to the end only when they hear of it.
    pub leads: bool,
    /// Delays are drawn from so many microseconds; some are much longer.
    pub jitter: u64,
    pub faults: Vec<Fault>,
    /// Requests that may be outstanding at a rank.
    pub window: usize,
    /// Tensors of a message above so many bytes are refused.
    pub memory: Option<usize>,
    /// Crossings, at most, that a value says its gradients reach; beyond them a backward asks.
    pub reach: usize,
    /// How long each call may take in total.
    pub limit: Option<Duration>,
}

/// A thread of the program on one rank.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    pub place: u32,
    pub ops: Vec<Op>,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// All that a rank does takes so many times as long.
    Slow { rank: u32, factor: u32 },
    /// A rank stops answering at this time.
    Stop { rank: u32, at: Duration },
    /// A client's rank stops answering in its so many-th step of two rounds, when so many requests of the second are sent.
    StopBetween { client: usize, step: u64, sent: usize },
    /// Of every so many replies, one is lost.
    DropReplies { every: u64 },
    /// Of every so many replies, one comes twice.
    DuplicateReplies { every: u64 },
}

impl Fault {
    /// Whether something may be lost by it.
    pub(crate) fn loses(self) -> bool {
        !matches!(self, Fault::Slow { .. } | Fault::DuplicateReplies { .. })
    }
}

impl Program {
    /// Whether something may be lost, so that requests may time out and values may stay behind.
    pub(crate) fn loses(&self) -> bool {
        self.faults.iter().any(|f| f.loses())
    }
}

/// A step of a client.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    /// Makes a parameter at a place.
    Put { place: u32, seed: u64 },
    /// As `Put`, but the function fails.
    PutFails { place: u32 },
    /// Makes a value that holds references, here or at a place.
    Nest { place: Option<u32>, of: Vec<usize> },
    /// Copies a reference.
    Clone { of: usize },
    /// Drops a reference.
    Drop { of: usize },
    /// Fetches what a reference names.
    Fetch { of: usize },
    /// Sends references to a function, which does this with them; doesn't wait for the answer if `async`.
    Exchange { exchange: Exchange, of: Vec<usize>, waits: bool },
    /// Drops what functions have kept on this rank.
    DropKept,
    /// Opens a context.
    Open,
    /// Calls a tree of functions in a context; may leave without the answers.
    Forward { context: usize, trees: Vec<Tree>, waits: bool },
    /// Goes back from the newest loss of a context, or from all.
    Backward {
        context: usize,
        mode: Mode,
        retain: bool,
        all: bool,
    },
    /// Reads the gradients of all parameters in a context.
    Gradients { context: usize },
    /// Adds to a gradient in a context.
    Accumulate { context: usize, of: usize },
    /// Begins a backward, and does this while it is under way.
    Race { context: usize, what: Racing },
    /// Releases a context; waits for it or not.
    Release { context: usize, waits: bool },
    /// Makes an optimizer over the parameters, whose steps go over a tree of so many branches each; of none, to each owner directly.
    MakeOptimizer { momentum: bool, fan_out: u32 },
    /// Steps an optimizer with a context's gradients, so many times at once.
    Step { optimizer: usize, context: usize, times: usize },
    /// Steps an optimizer in two rounds: on all owners or on none, with gradients scaled by their global norm.
    StepInRounds { optimizer: usize, context: usize, rounds: Rounds },
    /// Drops an optimizer.
    DropOptimizer { optimizer: usize },
    /// Waits for a while.
    Sleep { micros: u64 },
}

/// What is done during a backward.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Racing {
    Step,
    Gradients,
    Backward,
    Release,
}

/// A step in two rounds.
#[derive(Debug, Clone)]
pub(crate) struct Rounds {
    /// Owner after owner, ascending, keeps its turn until the second round. Else all prepare at once, over the tree if there is one, and hold no turn.
    pub keeps: bool,
    /// Where turns aren't kept, owners are asked in the opposite order.
    pub reversed: bool,
    /// The owner of this parameter refuses.
    pub refuses: Option<usize>,
    pub between: Between,
    /// An owner that refused is told, too, that there is no second round; it makes no difference.
    pub tells_all: bool,
}

/// What happens between two rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Between {
    Nothing,
    /// Time passes.
    Sleep {
        micros: u64,
    },
    /// A parameter is frozen, until the step is over.
    Freeze {
        of: usize,
    },
    /// The client gives up on each answer of the first round after a time, and on the step whatever comes.
    GiveUp {
        after: u64,
    },
}

/// What a function does with references.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Exchange {
    pub place: u32,
    /// References are known by their ids alone.
    pub by_id: bool,
    /// Fetches the first.
    pub fetches: bool,
    /// Keeps those of these bits.
    pub keeps: u8,
    /// Returns those of these bits.
    pub returns: u8,
    /// Makes a value that holds all, and returns a reference to it.
    pub nests: bool,
    /// Sends all on to another function, and takes what that returns for its own.
    pub next: Option<Box<Exchange>>,
    pub fails: bool,
    /// Takes so long.
    pub micros: u64,
}

/// A function of a forward pass, and those it calls.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Tree {
    pub place: u32,
    /// Parameters that it takes, by their place in the client's list; fetched, if they live elsewhere or if told to.
    pub uses: Vec<(usize, bool)>,
    pub children: Vec<Tree>,
    /// Calls all children at once.
    pub parallel: bool,
    /// Its caller uses its result.
    pub used: bool,
    /// Returns a second tensor, which nobody uses.
    pub extra: bool,
    /// Calls its children without recording.
    pub silent: bool,
    pub fails: bool,
    /// Side of the square tensors that it returns: large ones may be refused.
    pub large: bool,
    pub micros: u64,
}

impl Tree {
    /// Whether every recorded result takes part in the root.
    pub(crate) fn is_whole(&self) -> bool {
        self.used && !self.extra && !self.fails && !self.silent && self.children.iter().all(Tree::is_whole)
    }

    /// Number of functions.
    pub(crate) fn len(&self) -> usize {
        1 + self.children.iter().map(Tree::len).sum::<usize>()
    }

    /// Parameters that it and its children take.
    pub(crate) fn needs(&self, found: &mut Vec<usize>) {
        for &(parameter, _) in &self.uses {
            if !found.contains(&parameter) {
                found.push(parameter);
            }
        }
        self.children.iter().for_each(|c| c.needs(found));
    }
}

/// A remote function, as it travels.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Function {
    Make {
        seed: u64,
    },
    MakeFails,
    Nest,
    Exchange(Exchange),
    Node {
        tree: Tree,
        parameters: Vec<(usize, u32)>,
    },
    GradientOf(ContextId),
    Accumulate(ContextId),
    MakeOptimizer {
        id: OptimizerId,
        momentum: bool,
        /// Owners that it passes steps on to.
        children: Vec<u32>,
    },
    Step {
        id: OptimizerId,
        context: ContextId,
        client: usize,
        number: u64,
    },
    /// The first round of a step: takes hold of gradients, changes nothing.
    Prepare {
        id: OptimizerId,
        context: ContextId,
        client: usize,
        number: u64,
        refuses: bool,
    },
    /// The second: applies what the first prepared, times a number that comes along.
    Apply {
        id: OptimizerId,
        client: usize,
        number: u64,
    },
    /// There will be no second round.
    Cancel {
        id: OptimizerId,
        number: u64,
    },
    /// Freezes a parameter, or lets it go on.
    Freeze {
        frozen: bool,
    },
    DropOptimizer {
        id: OptimizerId,
    },
    /// Passes a request, the optimizer's so many-th, on to the owners below this one, and does its own part.
    PassOn {
        id: OptimizerId,
        number: u64,
        passed: Box<Function>,
    },
    /// Calls ranks below this one in a tree of so many branches each, and adds up.
    Spread {
        fan_out: u32,
    },
}

//! What ranks say to each other.

use serde::{Deserialize, Serialize};

use super::ids::{ContextId, CrossingId, RefId, RequestId, ValueId};
use super::turns::Turn;
use crate::Error;

/// How a backward finds out what takes part in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Mode {
    /// A marking round over ranks finds what the roots reach, before any gradient flows: right for every program.
    #[default]
    Exact,
    /// Assumes that every recorded result takes part in the roots; one round less. If one doesn't, `backward` is an error that names the calls.
    Fast,
}

/// What all ranks of a backward must know about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Manner {
    pub mode: Mode,
    pub retain_graph: bool,
}

/// The part of a recorded message that places it in its context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tag {
    pub context: ContextId,
    /// Every context of this home below this sequence was released.
    pub low: u64,
    /// The frame that the callee runs in: the path of recorded calls that leads to it.
    pub path: Vec<u32>,
    /// The tensors with gradients that go along.
    pub crossing: Option<CrossingId>,
}

/// Conditions under which a function runs, beside its arguments being there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Gate {
    /// Its turn in the step queue of its rank.
    pub turn: Turn,
    /// Reads or changes the gradients of this context: refused while a backward of it is under way.
    pub gradients_of: Option<ContextId>,
}

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Op {
    /// Run a function; keep its result under `create`, if given, else send it back.
    Call {
        function: u32,
        create: Option<ValueId>,
        context: Option<Box<Tag>>,
        gate: Gate,
    },
    /// Send a value.
    Fetch { value: ValueId, context: Option<Box<Tag>> },
    /// A part of a backward.
    Backward {
        context: ContextId,
        backward: u32,
        manner: Manner,
        part: Part,
        /// With a sender's first gradient to a rank, if the root knew them from the start: all crossings that the roots reach. The receiver marks its own.
        marks: Vec<CrossingId>,
    },
    /// Forget a context, here and on all ranks that met it through this one.
    Release { context: ContextId, low: u64 },
}

impl Op {
    /// The mark of the context that records it.
    pub(crate) fn tag(&self) -> Option<&Tag> {
        match self {
            Op::Call { context, .. } | Op::Fetch { context, .. } => context.as_deref(),
            Op::Backward { .. } | Op::Release { .. } => None,
        }
    }
}

/// A part of a backward, from one rank to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Part {
    /// A gradient for what you sent as this crossing will come.
    Mark(CrossingId),
    /// Here it is.
    Gradient(CrossingId),
    /// Here it is, and nothing else of this backward is under way: if all that comes of it goes well, you commit, and say so in your answer. `Fast` mode: gradients
    /// expected less gradients that came, on the root.
    Last(CrossingId, i64),
    /// Don't commit by yourself any more.
    Recall,
    /// All went well: add the gradients to the context's.
    Commit,
    /// Something failed: forget them.
    Abort,
}

/// How a request fares at its receiver.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) enum Status {
    /// Not there: not arrived, or answered already.
    Unknown,
    /// Waits for a value that is still being made.
    Parked,
    /// Waits in the step queue, behind so many.
    Queued(u64),
    /// Waits in the step queue for a turn that this rank keeps, which was asked for a sign of life so many seconds ago and has given none.
    Kept { by: u32, silent: f64 },
    /// Handed to a thread so many seconds ago.
    Running(f64),
    /// Ran; its reply waits for a reference to be registered with its owner.
    Confirming,
}

impl Status {
    /// Whether the request is there, and all that it waits for is alive as far as its receiver can tell.
    pub(crate) fn is_sign_of_life(self) -> bool {
        // A registration takes no time: if it isn't confirmed, the value's owner is lost.
        !matches!(self, Status::Unknown | Status::Confirming | Status::Kept { .. })
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Status::Unknown => f.write_str("unknown there: not arrived, or its answer is on the way"),
            Status::Parked => f.write_str("waits there for a value that is still being made"),
            Status::Queued(n) => write!(f, "queued there behind {n}"),
            Status::Kept { by, silent } => write!(
                f,
                "queued there behind a step of rank {by}, which has said nothing for {silent:.1} s"
            ),
            Status::Running(s) => write!(f, "running there for {s:.1} s"),
            Status::Confirming => f.write_str("ran there; a reference in it is being registered with its owner"),
        }
    }
}

/// What an answer says beside its payload.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The receiver met the request's context for the first time, and became the sender's child in it.
    pub new_child: bool,
    /// The tensors with gradients that come along.
    pub crossing: Option<CrossingId>,
    /// First part of a backward on that rank: it became the sender's child in it.
    pub engaged: bool,
    /// `Fast` mode: gradients expected less gradients that came, since the last answer.
    pub balance: i64,
    /// It was left to the receiver to commit, and it has, with all ranks that it found.
    pub committed: bool,
    /// The root has sent more since it left that to a rank, or has failed: it isn't that rank's to commit any more.
    pub recalled: bool,
    /// Names of recorded calls that no gradient came for.
    pub unreached: Vec<String>,
    /// The rank that an error comes from, if it isn't the one that answers.
    pub failed_rank: Option<u32>,
}

/// A message. A payload travels beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Message {
    Request {
        id: RequestId,
        op: Op,
        refs: Vec<RefId>,
    },
    Reply {
        id: RequestId,
        answer: Answer,
        outcome: Result<(), Error>,
        refs: Vec<RefId>,
    },
    /// I registered the references of others that your reply brought.
    Confirm {
        id: RequestId,
    },
    /// I hold this value of yours now.
    Register {
        value: ValueId,
    },
    /// I know.
    Registered {
        value: ValueId,
    },
    /// I let these go; each was registered so many times.
    Release {
        values: Vec<(ValueId, u64)>,
    },
    /// How does my request fare?
    Query {
        id: RequestId,
    },
    /// So.
    Report {
        id: RequestId,
        status: Status,
    },
    /// By this request you keep a turn of my step queue, and others wait for it. Are you there?
    Knock {
        id: RequestId,
    },
    /// I am.
    Here {
        id: RequestId,
    },
    /// What does this backward wait for on your rank?
    Probe {
        context: ContextId,
        backward: u32,
    },
    /// I'm alive, and it waits here for these ranks; for none while my engine works, or when it isn't here any more.
    Sign {
        context: ContextId,
        backward: u32,
        waits: Vec<u32>,
    },
    /// Rank 0's part in `lead` is over.
    Led {
        error: Option<String>,
    },
    /// Everything below me is quiet: messages sent and received there.
    Quiet {
        epoch: u64,
        wave: u64,
        sent: u64,
        received: u64,
        finishing: bool,
    },
    /// Next wave, or the end of the epoch; the last one if all ranks are finishing.
    Wave {
        epoch: u64,
        wave: u64,
        done: bool,
        last: bool,
    },
}

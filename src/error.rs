//! One error type: what failed, on which rank, and what to do about it.

mod checkpoint;
mod nesting;

pub use checkpoint::CheckpointFault;

use serde::{Deserialize, Serialize};
use thiserror::Error as ThisError;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What failed. [`Error::kind`] gives the facts; the text says what to do.
///
/// An error travels between ranks as it is: what a remote function returned on its rank is what its caller gets,
/// wrapped in [`ErrorKind::Remote`] with the rank and the function. Of an error with more than 64 causes, one inside the other, the innermost
/// arrive as text.
#[derive(Clone, PartialEq)]
pub struct Error(Box<ErrorKind>);

/// As the text: what a `main` that returns an error prints.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// The facts of this error.
    pub fn kind(&self) -> &ErrorKind {
        &self.0
    }

    /// The innermost cause: the error itself, or what the rank that failed said.
    pub fn root(&self) -> &ErrorKind {
        match self.kind() {
            ErrorKind::Remote { source, .. }
            | ErrorKind::Creation { source, .. }
            | ErrorKind::Backward { source, .. }
            | ErrorKind::InBackward { source, .. } => source.root(),
            kind => kind,
        }
    }

    /// The same, with the leaves that were updated before, if it is about an optimizer in backward.
    pub(crate) fn after_updates(mut self, leaves: &[String]) -> Self {
        if let ErrorKind::InBackward { updated, .. } = &mut *self.0 {
            *updated = leaves.to_vec();
        }
        self
    }

    /// An error of the host program or of a user's function, by its text.
    pub fn user(message: impl std::fmt::Display) -> Self {
        ErrorKind::User {
            message: message.to_string(),
        }
        .into()
    }
}

/// A parameter's name, behind its place.
pub(crate) fn named(name: &Option<String>) -> String {
    name.as_ref().map_or(String::new(), |name| format!(" (`{name}`)"))
}

/// The beginning of what another rank tells in full.
fn brief(message: &str) -> String {
    const MOST: usize = 60;
    let line = message.lines().next().unwrap_or_default();
    match line.char_indices().nth(MOST) {
        None if line.len() == message.len() => message.to_owned(),
        None => format!("{line} ... (rank 0's error says more)"),
        Some((end, _)) => format!("{} ... (rank 0's error says more)", line[..end].trim_end()),
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Error(Box::new(kind))
    }
}

/// One owner's part in a failed step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwnerFailure {
    /// The owner that failed.
    pub rank: u32,
    /// What it said.
    pub error: Error,
}

/// The facts of an [`Error`].
#[derive(Debug, Clone, PartialEq, ThisError, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    // ---- tensors -------------------------------------------------------------------------------------------------
    /// Operands whose shapes don't fit together.
    #[error("{op}: shapes {left:?} and {right:?} don't fit: {rule}")]
    Shape {
        /// The operation.
        op: String,
        /// Shape of the first operand.
        left: Vec<usize>,
        /// Shape of the second operand, or the shape asked for.
        right: Vec<usize>,
        /// The rule that they break.
        rule: String,
    },
    /// An operand of a dtype that the operation doesn't take.
    #[error("{op}: expected dtype {expected}, found {found}; convert with `cast`")]
    DType {
        /// The operation.
        op: String,
        /// What it takes.
        expected: String,
        /// What it was given.
        found: String,
    },
    /// An axis that the tensor doesn't have, or one named twice.
    #[error("{op}: axis {axis} is not valid for a tensor of {ndim} dimensions")]
    Axis {
        /// The operation.
        op: String,
        /// The axis given.
        axis: i64,
        /// Number of dimensions.
        ndim: usize,
    },
    /// An index outside of its axis.
    #[error("{op}: index {index} is outside of 0..{size}")]
    Index {
        /// The operation.
        op: String,
        /// The index given.
        index: i64,
        /// Length of the axis.
        size: usize,
    },
    /// An argument that can't be used.
    #[error("{op}: {what}")]
    Argument {
        /// The operation.
        op: String,
        /// What is wrong with it, and what would be right.
        what: String,
    },
    /// An operation that isn't there for tensors on a GPU, or operands on several devices.
    #[error(
        "{op}: its operand is on {device}, where there is no such operation; copy it with `to(Device::Cpu)`, or all operands to one device"
    )]
    Device {
        /// The operation.
        op: String,
        /// Where the operand is.
        device: String,
    },
    /// A GPU can't be used: there is none, or its driver failed.
    #[error("{what}")]
    Cuda {
        /// What failed, with the driver's code.
        what: String,
    },

    // ---- gradients -----------------------------------------------------------------------------------------------
    /// `backward` was given no tensor.
    #[error("backward: no roots given; pass at least one scalar tensor that was computed from leaves that require gradients")]
    NoRoots,
    /// A root that doesn't require a gradient.
    #[error("backward: root {root} does not require a gradient; compute it from a leaf or a recorded call that does")]
    RootWithoutGradient {
        /// Position of the root.
        root: usize,
    },
    /// A root that isn't a scalar.
    #[error("backward: root {root} has shape {shape:?}; roots must hold one element: reduce it with `sum` or `mean`")]
    RootNotScalar {
        /// Position of the root.
        root: usize,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A root that is a bare leaf.
    #[error("backward: root {root} is a leaf; there is nothing to go back through")]
    RootIsLeaf {
        /// Position of the root.
        root: usize,
    },
    /// A second backward through a graph that was freed.
    #[error("backward: the values saved by `{op}` were freed by an earlier backward; pass `retain_graph` to that one")]
    GraphFreed {
        /// The operation whose values are gone.
        op: String,
    },
    /// A tensor that must be a leaf and isn't.
    #[error("{what}: not a leaf that requires gradients ({why})")]
    NotALeaf {
        /// The parameter, by place or name.
        what: String,
        /// Why not.
        why: String,
    },
    /// A backward over ranks failed; nothing was accumulated anywhere. (Unless `rank` failed as it added its sums, for lack of memory on its device:
    /// it has added none, and others may have added theirs.)
    #[error("backward {backward} of context {context}: rank {rank}: {source}")]
    Backward {
        /// The context.
        context: String,
        /// The backward's number within the context.
        backward: u32,
        /// The rank that failed first.
        rank: u32,
        /// What it said.
        source: Error,
    },
    /// A second backward of a context while one is under way.
    #[error("{operation}: a backward of context {context} is under way; wait for it to return")]
    BackwardInFlight {
        /// What was asked for.
        operation: String,
        /// The context.
        context: String,
    },
    /// In `Fast` mode, recorded calls whose results don't take part in the loss.
    #[error(
        "backward (fast mode): the results of these recorded calls take no part in the roots: {calls:?}; use `Mode::Exact`, or don't record them"
    )]
    UnreachedCalls {
        /// The calls, by function and rank.
        calls: Vec<String>,
    },
    /// A context this rank has never met.
    #[error("{operation}: rank {rank} knows no context {context}")]
    NoContext {
        /// What was asked for.
        operation: String,
        /// The rank that was asked.
        rank: u32,
        /// The context.
        context: String,
    },
    /// A context that was released.
    #[error("{operation}: context {context} was released; keep it alive until its calls and steps are done")]
    ContextReleased {
        /// What was asked for.
        operation: String,
        /// The context.
        context: String,
    },

    // ---- optimizers ----------------------------------------------------------------------------------------------
    /// An option outside of its bound.
    #[error("{optimizer}: option `{option}` = {value} must be {bound}")]
    OptionValue {
        /// The optimizer, or the schedule.
        optimizer: String,
        /// The option.
        option: String,
        /// The value given.
        value: String,
        /// The bound it breaks.
        bound: String,
    },
    /// An option that the optimizer doesn't have.
    #[error("{optimizer}: no option `{option}`; it has {known}")]
    UnknownOption {
        /// The optimizer, or the schedule.
        optimizer: String,
        /// The option.
        option: String,
        /// The options it has.
        known: String,
    },
    /// An optimizer that doesn't exist.
    #[error("no optimizer `{name}`; there are {known}")]
    UnknownOptimizer {
        /// The name given.
        name: String,
        /// Those that exist.
        known: String,
    },
    /// A gradient that the optimizer can't use.
    #[error("{optimizer}: parameter {parameter}{}: {why}", named(name))]
    GradientKind {
        /// The optimizer.
        optimizer: String,
        /// The parameter, by place.
        parameter: usize,
        /// Its name, if it has one.
        name: Option<String>,
        /// Why not, and what to use instead.
        why: String,
    },
    /// An update rule panicked; the parameter may be half updated.
    #[error("{optimizer}: the update of parameter {parameter}{} panicked: {message}", named(name))]
    RulePanic {
        /// The optimizer.
        optimizer: String,
        /// The parameter, by place.
        parameter: usize,
        /// Its name, if it has one.
        name: Option<String>,
        /// The panic's message.
        message: String,
    },
    /// No parameter was given.
    #[error("{optimizer}: got an empty parameter list")]
    NoParameters {
        /// The optimizer.
        optimizer: String,
    },
    /// The same parameter twice.
    #[error("{optimizer}: parameter {second} is the same as parameter {first}; list each once")]
    DuplicateParameter {
        /// The optimizer.
        optimizer: String,
        /// Place of the first.
        first: usize,
        /// Place of the second.
        second: usize,
    },
    /// An update inside a backward failed. Leaves that became complete later weren't updated on that rank.
    #[error("{optimizer} in backward: {parameter}: {source}; updated in this backward on the same rank: {updated:?}")]
    InBackward {
        /// The optimizer.
        optimizer: String,
        /// The parameter: its place in the list that the optimizer was attached with, and its name if it has one.
        parameter: String,
        /// The leaves of that rank that this backward had updated, by name or number, in order.
        updated: Vec<String>,
        /// Why.
        source: Error,
    },
    /// Building or stepping failed on some owners.
    #[error("{operation}: {} of {owners} owners failed: {}; updated: {updated:?}{}", failures.len(), failures.iter().map(|f| format!("rank {}: {}", f.rank, f.error)).collect::<Vec<_>>().join("; "), if in_doubt.is_empty() { String::new() } else { format!("; no answer, so perhaps updated too: {in_doubt:?}") })]
    Owners {
        /// What was asked for.
        operation: String,
        /// Number of owners asked.
        owners: usize,
        /// Every owner that failed.
        failures: Vec<OwnerFailure>,
        /// The owners that did what was asked.
        updated: Vec<u32>,
        /// Owners whose answer didn't come in time: they may have done it, or do it later.
        in_doubt: Vec<u32>,
    },
    /// Gradients with infinite or NaN elements, in a step that refuses them.
    #[error("{optimizer}: the gradients of parameters {} have infinite or NaN elements; nothing was updated", parameters.join(", "))]
    NotFinite {
        /// The optimizer.
        optimizer: String,
        /// The parameters: place, name, owner.
        parameters: Vec<String>,
    },
    /// A parameter has moved on too far since its gradient was computed.
    #[error(
        "{optimizer}: parameter {parameter}{} is at version {found}; its gradient is of version {expected}, and may be {staleness} behind",
        named(name)
    )]
    Stale {
        /// The optimizer.
        optimizer: String,
        /// The parameter, by place.
        parameter: usize,
        /// Its name, if it has one.
        name: Option<String>,
        /// The version that its gradient was computed with.
        expected: u64,
        /// Its version now.
        found: u64,
        /// How many updates may lie between.
        staleness: u64,
    },

    // ---- references and calls ------------------------------------------------------------------------------------
    /// A reference whose value isn't (or no longer) on its owner.
    #[error("{operation}: rank {owner} holds no value {id}")]
    NoSuchValue {
        /// What was asked for.
        operation: String,
        /// The owner.
        owner: u32,
        /// The value's id.
        id: String,
    },
    /// A reference to a value of another type.
    #[error("{operation}: value {id} on rank {owner} is a `{found}`, not a `{expected}`")]
    WrongType {
        /// What was asked for.
        operation: String,
        /// The owner.
        owner: u32,
        /// The value's id.
        id: String,
        /// The type asked for.
        expected: String,
        /// The type it has.
        found: String,
    },
    /// `local` on a rank that isn't the owner.
    #[error("{operation}: value {id} lives on rank {owner}, this is rank {rank}; use `fetch`, or run a function on the owner")]
    NotOwner {
        /// What was asked for.
        operation: String,
        /// The owner.
        owner: u32,
        /// The value's id.
        id: String,
        /// This rank.
        rank: u32,
    },
    /// A value whose creation failed; every use of its reference says so.
    #[error("value {id} on rank {owner} was never created: {source}")]
    Creation {
        /// The owner.
        owner: u32,
        /// The value's id.
        id: String,
        /// Why.
        source: Error,
    },
    /// A rank that doesn't exist.
    #[error("{operation}: no rank {rank} in a world of {size}")]
    UnknownRank {
        /// What was asked for.
        operation: String,
        /// The rank given.
        rank: i64,
        /// The world's size.
        size: u32,
    },
    /// No answer in time.
    #[error(
        "{operation}: no answer from rank {rank} within {seconds} s ({status}); raise the limit with `timeout` or RANKGRAD_TIMEOUT, or look at that rank"
    )]
    Timeout {
        /// What was asked for.
        operation: String,
        /// The rank that was asked.
        rank: u32,
        /// The limit.
        seconds: f64,
        /// What the rank last said about it.
        status: String,
    },
    /// Something was asked of a world that has ended.
    #[error("{operation}: the world has ended; do this before `finish`")]
    ShutDown {
        /// What was asked for.
        operation: String,
    },
    /// A remote function, or the owner of something, returned an error.
    #[error("{operation} on rank {rank}: {source}")]
    Remote {
        /// The rank it ran on.
        rank: u32,
        /// The function or request.
        operation: String,
        /// What it said.
        source: Error,
    },
    /// A remote function panicked.
    #[error("`{function}` panicked on rank {rank}: {message}")]
    Panic {
        /// The rank it ran on.
        rank: u32,
        /// The function.
        function: String,
        /// The panic's message.
        message: String,
    },
    /// An error of the host program or of a user's function.
    #[error("{message}")]
    User {
        /// Its text.
        message: String,
    },
    /// A rank's state of this type wasn't set.
    #[error("rank {rank} has no state of type `{type_name}`; set it with `World::set_state` before it serves")]
    NoState {
        /// The rank.
        rank: u32,
        /// The type.
        type_name: String,
    },
    /// An `on_main` function was called on a rank whose main thread doesn't serve such functions.
    #[error(
        "`{function}` runs on the main thread of rank {rank}, which is not serving with a state (`serve_with`; `lead_with` on the ranks that serve)"
    )]
    NotServing {
        /// The rank.
        rank: u32,
        /// The function.
        function: String,
    },
    /// `try_call` met a full window.
    #[error(
        "{operation}: the window to rank {rank} is full ({requests} requests, {bytes} bytes outstanding); wait for an answer, or raise RANKGRAD_WINDOW_REQUESTS or RANKGRAD_WINDOW_BYTES"
    )]
    WindowFull {
        /// What was asked for.
        operation: String,
        /// The rank.
        rank: u32,
        /// Requests outstanding.
        requests: usize,
        /// Bytes outstanding.
        bytes: usize,
    },
    /// A message that its receiver won't take.
    #[error(
        "{operation}: a message of {bytes} bytes from rank {from} is over the receiver's limit of {limit}; raise RANKGRAD_MESSAGE_LIMIT"
    )]
    TooLarge {
        /// What it was part of.
        operation: String,
        /// The sender.
        from: u32,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A message that doesn't decode.
    #[error("message does not decode: {what}")]
    Decode {
        /// What was wrong.
        what: String,
    },
    /// A tensor or reference was serialised outside of a call.
    #[error("{what} can be serialised only as an argument or a result of a call")]
    OutsideOfCall {
        /// What it was.
        what: String,
    },

    // ---- a rank --------------------------------------------------------------------------------------------------
    /// An MPI call failed.
    #[error("{call} failed on rank {rank}: {text} (class {class})")]
    Mpi {
        /// The call.
        call: String,
        /// This rank (-1 before it is known).
        rank: i64,
        /// MPI's error class.
        class: i32,
        /// MPI's text.
        text: String,
    },
    /// MPI grants less thread support than is needed.
    #[error("MPI grants {granted}, and MPI_THREAD_{needed} is needed: {cure}")]
    ThreadLevel {
        /// The level needed.
        needed: String,
        /// The level granted.
        granted: String,
        /// What to do.
        cure: String,
    },
    /// The launcher started N jobs of size 1 instead of one of size N.
    #[error("MPI_COMM_WORLD has {size} rank, but {variable}={value}: {cure}")]
    Launcher {
        /// MPI_COMM_WORLD's size.
        size: u32,
        /// The launcher's variable.
        variable: String,
        /// Its value.
        value: String,
        /// What to do.
        cure: String,
    },
    /// A second world in one process, or MPI that has already ended.
    #[error("{what}: {cure}")]
    Init {
        /// What is the matter.
        what: String,
        /// What to do.
        cure: String,
    },
    /// Ranks that were built from different sources.
    #[error("rank {rank} runs another program than rank 0: first difference: {difference}; start the same binary on each rank")]
    Mismatch {
        /// The rank that differs.
        rank: u32,
        /// What differs.
        difference: String,
    },
    /// The closure given to `lead` failed on rank 0, whose own error tells it in full: as text this one is short, since every rank may print it.
    #[error("rank 0 gave up: {}", brief(message))]
    LeadFailed {
        /// What it said, in full.
        message: String,
    },
    /// A setting that can't be used.
    #[error("setting {name}={value}: expected {expected}")]
    Setting {
        /// Its name.
        name: String,
        /// Its value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// A file or folder of a checkpoint.
    #[error("checkpoint {path}: {fault}")]
    Checkpoint {
        /// The file or folder.
        path: String,
        /// What is wrong with it.
        fault: CheckpointFault,
    },
    /// A file or the operating system.
    #[error("{operation}: {text}")]
    Io {
        /// What was tried.
        operation: String,
        /// What the system said.
        text: String,
    },
}

//! One rank, and what a driver and the rooms above keep for it.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::functions::Part;
use super::handle::Ref;
use super::jobs::JobId;
use crate::Result;
use crate::protocol::{ContextId, OptimizerId, Rank, RefId, RequestId, TaskId, Turn, Window};
use crate::rpc::Recording;
use crate::tensor::Tensor;
use crate::wire::{Delivered, Payload};

/// What a value table holds.
pub(crate) type Value = Arc<Stored>;

#[derive(Debug)]
pub(crate) struct Stored {
    /// Known a moment after it is made.
    pub id: OnceLock<RefId>,
    pub body: Body,
}

#[derive(Debug)]
pub(crate) enum Body {
    Tensor(Tensor),
    Refs(Vec<Ref>),
}

impl Stored {
    pub(super) fn new(body: Body) -> Value {
        Arc::new(Stored { id: OnceLock::new(), body })
    }
}

/// One answer, and the job that waits for it.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub reply: RefCell<Option<Result<Delivered>>>,
    pub job: Cell<Option<JobId>>,
    /// When the receiver last said that it has the request.
    pub heard: Cell<Option<Duration>>,
}

impl Slot {
    pub(super) fn new() -> Rc<Self> {
        Rc::default()
    }

    pub(super) fn is_done(&self) -> bool {
        self.reply.borrow().is_some()
    }

    pub(super) fn take(&self) -> Option<Result<Delivered>> {
        self.reply.borrow_mut().take()
    }
}

/// One rank, and what a driver and the rooms above keep for it.
#[derive(Debug)]
pub(super) struct Node {
    pub rank: Rank<Value, Payload>,
    pub waiting: HashMap<RequestId, Rc<Slot>>,
    pub backwards: HashMap<ContextId, Rc<Slot>>,
    pub recordings: HashMap<ContextId, Arc<Recording>>,
    pub optimizers: HashMap<OptimizerId, Part>,
    /// Optimizers that were dropped before they were made.
    pub unmade: HashSet<OptimizerId>,
    pub next_optimizer: u64,
    /// What functions kept.
    pub kept: Vec<Ref>,
    /// Jobs that wait for something of this rank.
    pub waiters: Vec<JobId>,
    /// Requests to the step queue, in order of arrival.
    pub arrivals: VecDeque<TaskId>,
    /// How those that haven't begun use it.
    pub turns: HashMap<TaskId, Turn>,
    /// Requests that mustn't run during a backward of a context.
    pub gated: HashMap<TaskId, ContextId>,
    pub callbacks: usize,
    pub poll_due: bool,
    pub stopped: bool,
    pub ended: u64,
    pub at_last: bool,
    pub led: bool,
    /// The longest row of messages that led here.
    pub round: u64,
}

impl Node {
    pub(super) fn new(me: u32, size: u32, window: Window) -> Self {
        Node {
            rank: Rank::new(me, size, window),
            waiting: HashMap::new(),
            backwards: HashMap::new(),
            recordings: HashMap::new(),
            optimizers: HashMap::new(),
            unmade: HashSet::new(),
            next_optimizer: 1,
            kept: Vec::new(),
            waiters: Vec::new(),
            arrivals: VecDeque::new(),
            turns: HashMap::new(),
            gated: HashMap::new(),
            callbacks: 0,
            poll_due: false,
            stopped: false,
            ended: 0,
            at_last: false,
            led: false,
            round: 0,
        }
    }
}

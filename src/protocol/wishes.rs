//! What the program on this rank asks of the state machine.

use super::*;

impl<V: Clone, P: Default> Rank<V, P> {
    /// A new reference to a value that a request is going to create on `owner`; counts one handle.
    pub(crate) fn allocate(&mut self, owner: u32) -> RefId {
        self.refs.allocate(owner)
    }

    pub(super) fn fail_creation(&mut self, value: ValueId, error: &Error) {
        for parked in self.refs.created(value, Err(error.clone())) {
            self.unpark(parked);
        }
    }

    /// Keeps a value of this rank; counts one handle.
    pub(crate) fn keep(&mut self, value: V) -> RefId {
        let id = self.refs.allocate(self.me);
        self.refs.created(id.value, Ok(value));
        id
    }

    /// A value of this rank.
    pub(crate) fn lookup(&self, operation: &str, value: ValueId) -> Result<Option<V>, Error> {
        match self.refs.lookup(value) {
            Lookup::Ready(v) => Ok(Some(v)),
            Lookup::Pending => Ok(None),
            Lookup::Failed(error) => Err(self.creation_failed(value, error)),
            Lookup::Missing => Err(self.refs.missing(operation, value)),
        }
    }

    /// A handle on a value that is known by its id alone.
    pub(crate) fn attach(&mut self, id: RefId) {
        if self.refs.receive(id, u32::MAX) {
            self.register(id, Registering::Nobody);
        }
    }

    pub(crate) fn drop_handle(&mut self, id: RefId) {
        self.refs.drop_handle(id);
    }

    /// Whether a request of this size may go to a rank now.
    pub(crate) fn window_is_open(&self, to: u32, bytes: usize) -> bool {
        let (requests, outstanding) = self.outstanding.get(&to).copied().unwrap_or_default();
        requests < self.window.requests && (requests == 0 || outstanding.saturating_add(bytes) <= self.window.bytes)
    }

    /// Requests and bytes outstanding at a rank.
    pub(crate) fn outstanding(&self, to: u32) -> (usize, usize) {
        self.outstanding.get(&to).copied().unwrap_or_default()
    }

    /// The oldest request that counts for the window to a rank.
    pub(crate) fn fills_window(&self, to: u32) -> Option<RequestId> {
        let windowed = |o: &Outgoing| o.to == to && matches!(o.origin, Origin::Program { window: Some(_) });
        self.outgoing.iter().filter(|(_, o)| windowed(o)).map(|(id, _)| *id).min()
    }

    /// Sends a request; [`Action::Answered`] brings its answer.
    pub(crate) fn request(&mut self, to: u32, op: Op, refs: Vec<RefId>, payload: P, window: Option<usize>) -> RequestId {
        let id = self.issue(to, op, refs, payload, Origin::Program { window });
        self.settle_local();
        id
    }

    /// Opens a context of this rank.
    pub(crate) fn open_context(&mut self) -> ContextId {
        self.contexts.open()
    }

    /// The sequence below which all contexts of this rank were released.
    pub(crate) fn context_low(&self) -> u64 {
        self.contexts.low()
    }

    pub(crate) fn check_context(&self, operation: &str, context: ContextId) -> Result<(), Error> {
        if self.contexts.is_live(context) {
            Ok(())
        } else {
            Err(self.contexts.gone(operation, context))
        }
    }

    /// Refuses while a backward of the context is under way here.
    pub(crate) fn check_gradients(&self, operation: &str, context: ContextId) -> Result<(), Error> {
        if self.contexts.is_released(context) {
            return Err(self.contexts.gone(operation, context));
        }
        self.check_idle(operation, context)
    }

    /// Releases a context of this rank everywhere; [`Action::Answered`] of the returned request tells that all ranks have.
    pub(crate) fn release_context(&mut self, context: ContextId) -> RequestId {
        let request = self.next_request;
        self.next_request += 1;
        let low = self.contexts.low_without(context);
        self.release(context, low, None, Some(request));
        self.settle_local();
        request
    }

    /// The ranks whose answer a release of this rank's program waits for, as far as this rank can tell.
    pub(crate) fn release_waits_for(&self, request: RequestId) -> Vec<u32> {
        let group = self
            .releases
            .iter()
            .find(|(_, release)| release.request == Some(request))
            .map(|(group, _)| *group);
        let ranks: BTreeSet<u32> = self
            .outgoing
            .values()
            .filter(|o| group.is_some_and(|g| o.origin == Origin::Release(g)))
            .map(|o| o.to)
            .collect();
        ranks.into_iter().collect()
    }

    /// Asks the receiver of a request how it fares.
    pub(crate) fn query(&mut self, request: RequestId) {
        if let Some(to) = self.outgoing.get(&request).map(|o| o.to) {
            self.send(to, Message::Query { id: request }, P::default());
            self.settle_local();
        }
    }

    /// Rank 0 tells all others that its part in `lead` is over.
    pub(crate) fn led(&mut self, error: Option<String>) {
        for child in children(self.me, self.size).collect::<Vec<_>>() {
            self.send(child, Message::Led { error: error.clone() }, P::default());
        }
    }

    /// This rank has come to the end of the epoch (to its very end, if it is `finishing`); [`Action::Ended`] tells that all have.
    pub(crate) fn enter_end(&mut self, finishing: bool) {
        self.drain.enter(finishing);
    }

    /// Goes on with termination detection. `busy` says whether the driver still has work that may send.
    pub(crate) fn advance_end(&mut self, busy: bool) {
        loop {
            let quiet =
                !busy && self.outgoing.is_empty() && self.incoming.is_empty() && self.registering.is_empty() && self.local.is_empty();
            match self.drain.advance(self.me, self.size, quiet, self.sent, self.received) {
                drain::Step::Nothing => return,
                step => self.drain_step(step),
            }
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.drain.has_entered()
    }

    /// Who hasn't come to the end yet, as far as this rank can tell.
    pub(crate) fn missing_at_end(&self) -> Vec<u32> {
        self.drain.missing(self.me, self.size)
    }

    /// Values that are still held somewhere.
    pub(crate) fn still_held(&self) -> Vec<(RefId, Vec<u32>, u64, V)> {
        self.refs
            .still_held()
            .into_iter()
            .filter_map(|h| match self.refs.lookup(h.id.value) {
                Lookup::Ready(v) => Some((h.id, h.holders, h.handles, v)),
                _ => None,
            })
            .collect()
    }
}

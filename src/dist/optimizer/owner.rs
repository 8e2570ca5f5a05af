//! The part of an optimizer that lives on an owner, and what its client asks of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::changes::ChangedOptions;
use super::options::ExpectedVersions;
use super::report::OwnerReport;
use crate::dist::builtin::parameter;
use crate::dist::sent::SentState;
use crate::dist::tables::Tables;
use crate::optim::{Checked, Norm, Optimizer, OptimizerSpec, ParameterReport, ParameterReports, ParameterState};
use crate::protocol::{ContextId, OptimizerId};
use crate::rpc::{Calls, Recording, Scope};
use crate::rref::RRef;
use crate::runtime::{Permission, Runtime, lock};
use crate::tensor::{Gradient, Tensor};
use crate::{ErrorKind, Result};

/// Steps over more elements are always for a thread of the pool, not for the one that polls.
const HEAVY_ELEMENTS: usize = 1 << 15;
/// So are those of an optimizer whose last step took longer than this, in seconds.
const HEAVY_SECONDS: f64 = 1e-3;

/// The optimizer of one owner.
#[derive(Debug)]
pub(crate) struct OwnerOptimizer {
    part: Mutex<Part>,
    /// First rounds whose second hasn't come, by number; and numbers of those that were cancelled before they came themselves.
    tickets: Mutex<FxHashMap<u64, Ticket>>,
    /// Whether its next step may take long; until one was fast, it may.
    heavy: AtomicBool,
    /// Owners that it passes steps on to; none until it was told.
    children: Mutex<Option<Vec<u32>>>,
    /// How many steps it has passed on: the number of the next.
    passed: AtomicU64,
}

#[derive(Debug)]
struct Part {
    optimizer: Optimizer,
    /// Places of its parameters in the client's list.
    places: Vec<u32>,
    /// The client's number of each of its groups.
    groups: Vec<u32>,
    /// Number of the last change of options that it has made.
    changes: u64,
    /// Of all its parameters.
    elements: usize,
}

/// Options of an owner's groups, and states of its parameters.
type Loaded = (Vec<OptimizerSpec>, Vec<Option<ParameterState>>);

#[derive(Debug)]
enum Ticket {
    Cancelled,
    /// Gradients that are ready to be applied.
    Step(Checked, Norm),
    /// Options and state that are ready to be put in place.
    State(Vec<OptimizerSpec>, Vec<Option<ParameterState>>),
}

impl OwnerOptimizer {
    pub(crate) fn is_heavy(&self) -> bool {
        self.heavy.load(Ordering::Relaxed)
    }

    pub(super) fn children(&self) -> Vec<u32> {
        lock(&self.children).clone().unwrap_or_default()
    }

    /// Waits until all steps before this one have been passed on, so that none overtakes another.
    pub(super) fn wait_for_pass(&self, scope: &Scope, number: u64) -> Result<()> {
        let (runtime, is_next) = (&scope.caller().runtime, || self.passed.load(Ordering::SeqCst) >= number);
        let limit = runtime.settings.timeout();
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        if runtime.wait_until(&is_next, Permission::Nothing, deadline)? {
            return Ok(());
        }
        let status = format!("step {} hasn't come to rank {}", self.passed.load(Ordering::SeqCst), scope.rank());
        Err(ErrorKind::Timeout {
            operation: format!("passing on step {number}"),
            rank: scope.caller_rank(),
            seconds: limit.unwrap_or_default().as_secs_f64(),
            status,
        }
        .into())
    }

    /// This step has been passed on.
    pub(super) fn has_passed(&self, number: u64) {
        self.passed.fetch_max(number + 1, Ordering::SeqCst);
    }

    /// The state of the parameters that have one, by their places, after changes of options.
    pub(in crate::dist) fn states(&self, changed: Option<ChangedOptions>) -> Result<Vec<(u32, ParameterState)>> {
        let mut part = lock(&self.part);
        part.make_changes(changed)?;
        let each = part.places.iter().enumerate();
        Ok(each
            .filter_map(|(local, &place)| Some((place, part.optimizer.saved_state(local)?)))
            .collect())
    }

    /// Checks options, by the client's numbers of groups, and states; gives both in the order of this owner. Parameters that aren't named have none.
    pub(in crate::dist) fn check_states(
        &self,
        rank: u32,
        groups: &[(u32, OptimizerSpec)],
        states: impl Iterator<Item = (u32, ParameterState)>,
    ) -> Result<Loaded> {
        let part = lock(&self.part);
        let missing = |what: &str| no_such("loading state", rank, what);
        let of_group = |number: &u32| groups.iter().find(|g| g.0 == *number).map(|g| g.1.clone());
        let specs = part.groups.iter().map(of_group).collect::<Option<Vec<_>>>();
        let specs = specs.ok_or_else(|| missing("options of each group"))?;
        let mut loaded = vec![None; part.optimizer.len()];
        for (place, state) in states {
            let local = part.local(place).ok_or_else(|| missing(&format!("parameter {place}")))?;
            if let Some(group) = part.optimizer.group_of(local) {
                part.optimizer.check_state(&specs[group], local, &state)?;
            }
            loaded[local] = Some(state);
        }
        Ok((specs, loaded))
    }

    /// Puts options and states in place that were checked. The options are those after change `changes`.
    pub(in crate::dist) fn replace(&self, specs: Vec<OptimizerSpec>, states: Vec<Option<ParameterState>>, changes: u64) {
        let mut part = lock(&self.part);
        part.optimizer.replace(specs, states);
        part.changes = changes;
    }

    fn ticket(&self, rank: u32, number: u64) -> Result<Ticket> {
        lock(&self.tickets)
            .remove(&number)
            .ok_or_else(|| no_such("second round", rank, &format!("first round {number}")))
    }

    /// Keeps what a first round has prepared, unless it has been cancelled.
    fn keep(&self, number: u64, ticket: Ticket) {
        let mut tickets = lock(&self.tickets);
        if tickets.remove(&number).is_none() {
            tickets.insert(number, ticket);
        }
    }

    fn cancel(&self, number: u64) {
        let mut tickets = lock(&self.tickets);
        if tickets.remove(&number).is_none() {
            // It may come yet, over a tree. What is much older won't.
            tickets.retain(|&other, t| !matches!(t, Ticket::Cancelled) || other + 1024 > number);
            tickets.insert(number, Ticket::Cancelled);
        }
    }
}

impl Part {
    /// The local place of a parameter of the client's list.
    fn local(&self, place: u32) -> Option<usize> {
        self.places.iter().position(|&p| p == place)
    }

    fn make_changes(&mut self, changed: Option<ChangedOptions>) -> Result<()> {
        let Some(changed) = changed.filter(|c| c.number() > self.changes) else {
            return Ok(());
        };
        for (local, group) in self.groups.iter().enumerate() {
            if let Some(options) = changed.of_group(*group)? {
                self.optimizer.set_options(Some(local), &options)?;
            }
        }
        self.changes = changed.number();
        Ok(())
    }

    /// What the contexts hold for each parameter, summed in their order.
    fn gradients(&self, recordings: &[Option<Arc<Recording>>]) -> Result<Vec<Option<Gradient>>> {
        let sum = |parameter: &Tensor| {
            let Some(leaf) = parameter.leaf() else { return Ok(None) };
            let mut each = recordings.iter().flatten().filter_map(|r| r.gradient(leaf.id()));
            let Some(mut sum) = each.next() else { return Ok(None) };
            each.try_for_each(|gradient| sum.accumulate(gradient))?;
            Ok(Some(sum))
        };
        self.optimizer.parameters().map(sum).collect()
    }

    /// Makes changes of options, and checks what a step would apply.
    fn check(
        &mut self,
        recordings: &[Option<Arc<Recording>>],
        changed: Option<ChangedOptions>,
        expected: Option<ExpectedVersions>,
        norm: Norm,
    ) -> Result<Checked> {
        self.make_changes(changed)?;
        self.check_versions(expected)?;
        let gradients = self.gradients(recordings)?;
        self.optimizer.check(gradients, norm)
    }

    /// Adds a group, under the client's number of it.
    fn add(&mut self, number: u32, spec: OptimizerSpec, tensors: Vec<Tensor>, places: Vec<u32>) -> Result<()> {
        let elements: usize = tensors.iter().map(Tensor::len).sum();
        self.optimizer.add_group_at(spec, tensors, &places)?;
        self.elements += elements;
        self.groups.push(number);
        self.places.extend(places);
        Ok(())
    }

    fn versions(&self) -> impl Iterator<Item = u64> + '_ {
        self.optimizer.parameters().map(|p| p.leaf().map_or(0, |leaf| leaf.version()))
    }

    fn check_versions(&self, expected: Option<ExpectedVersions>) -> Result<()> {
        let Some(ExpectedVersions { versions, staleness }) = expected else {
            return Ok(());
        };
        for ((found, tensor), &place) in self.versions().zip(self.optimizer.parameters()).zip(&self.places) {
            let expected = versions.get(place as usize).copied().unwrap_or(found);
            if found.saturating_sub(expected) > staleness {
                let (optimizer, parameter) = (self.optimizer.groups()[0].name().into(), place as usize);
                return Err(ErrorKind::Stale {
                    optimizer,
                    parameter,
                    name: tensor.leaf().and_then(|leaf| leaf.name()).map(str::to_owned),
                    expected,
                    found,
                    staleness,
                }
                .into());
            }
        }
        Ok(())
    }

    fn report(&self, rank: u32, parameters: ParameterReports, norm_kind: Norm, start: Instant) -> OwnerReport {
        OwnerReport {
            rank,
            places: Arc::default(),
            parameters,
            norm_kind,
            seconds: start.elapsed().as_secs_f64(),
        }
    }

    /// What a step would report that updates nothing.
    fn untouched(&self, norms: &[Option<f64>]) -> ParameterReports {
        let report = |(version, norm): (u64, &Option<f64>)| ParameterReport {
            updated: false,
            rows: None,
            norm: *norm,
            version,
            in_place: false,
        };
        self.versions().zip(norms).map(report).collect()
    }
}

/// A group of parameters for an owner.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct OwnerGroup {
    pub number: u32,
    pub spec: OptimizerSpec,
    pub parameters: Vec<RRef<Tensor>>,
    pub places: Vec<u32>,
    pub names: Vec<Option<String>>,
}

/// What a step asks for beyond the gradients of one context.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Extras {
    /// Further contexts.
    pub contexts: Vec<ContextId>,
    pub clamp: Option<f64>,
    pub expected: Option<ExpectedVersions>,
}

/// What the first round of a step found.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Prepared {
    /// As if nothing were updated.
    pub report: OwnerReport,
    /// Places of parameters whose gradients aren't finite.
    pub not_finite: Vec<u32>,
}

fn no_such(operation: &str, owner: u32, what: &str) -> crate::Error {
    ErrorKind::NoSuchValue {
        operation: operation.into(),
        owner,
        id: what.into(),
    }
    .into()
}

pub(in crate::dist) fn find(scope: &Scope, operation: &str, id: OptimizerId) -> Result<Arc<OwnerOptimizer>> {
    let found = Tables::of(&scope.caller().runtime)?.optimizer(id);
    found.ok_or_else(|| no_such(operation, scope.rank(), &format!("optimizer {id}")))
}

/// What this rank has recorded of contexts, the first of which the request's gate has checked.
fn recordings(runtime: &Runtime, contexts: impl Iterator<Item = ContextId>) -> Result<SmallVec<[Option<Arc<Recording>>; 1]>> {
    let tables = Tables::of(runtime)?;
    let mut recordings = SmallVec::new();
    for (n, context) in contexts.enumerate() {
        if n > 0 {
            runtime.check_gradients("step", context)?;
        }
        recordings.push(tables.known_recording(context));
    }
    Ok(recordings)
}

/// Applies gradients, and tells what came of it.
fn apply(scope: &Scope, owner: &OwnerOptimizer, part: &mut Part, checked: Checked, norm: Norm, start: Instant) -> Result<OwnerReport> {
    let parameters = part.optimizer.apply_all(checked)?;
    applied(scope, owner, part, parameters, norm, start)
}

fn applied(
    scope: &Scope,
    owner: &OwnerOptimizer,
    part: &Part,
    parameters: ParameterReports,
    norm: Norm,
    start: Instant,
) -> Result<OwnerReport> {
    let tables = Tables::of(&scope.caller().runtime)?;
    tables.updates.count(parameters.updated(), parameters.in_place());
    let report = part.report(scope.rank(), parameters, norm, start);
    let heavy = part.elements > HEAVY_ELEMENTS || report.seconds > HEAVY_SECONDS;
    owner.heavy.store(heavy, Ordering::Relaxed);
    Ok(report)
}

crate::remote! {
    /// Builds the local optimizer of this owner, or adds groups to it.
    pub(super) fn make_groups(scope: &Scope, id: OptimizerId, groups: Vec<OwnerGroup>) -> Result<()> {
        let tables = Tables::of(&scope.caller().runtime)?;
        let mut made: Vec<(u32, OptimizerSpec, Vec<Tensor>, Vec<u32>)> = Vec::with_capacity(groups.len());
        for OwnerGroup { number, spec, parameters, places, names } in groups {
            if tables.is_given_up(id, number) {
                continue;
            }
            let mut tensors = Vec::with_capacity(parameters.len());
            for ((rref, &place), name) in parameters.iter().zip(&places).zip(names) {
                let named = crate::error::named(&name);
                let tensor = parameter(scope, &format!("{}: parameter {place}{named}", spec.name()), rref)?;
                if let (Some(name), Some(leaf)) = (name, tensor.leaf()) {
                    leaf.set_name(name);
                }
                tensors.push(tensor);
            }
            made.push((number, spec, tensors, places));
        }
        if let Some(owner) = tables.optimizer(id) {
            let mut part = lock(&owner.part);
            made.into_iter().try_for_each(|(number, spec, tensors, places)| part.add(number, spec, tensors, places))?;
            owner.heavy.store(true, Ordering::Relaxed);
            return Ok(());
        }
        if made.is_empty() {
            return Ok(());
        }
        let mut part = Part { optimizer: Optimizer::empty(), places: Vec::new(), groups: Vec::new(), changes: 0, elements: 0 };
        made.into_iter().try_for_each(|(number, spec, tensors, places)| part.add(number, spec, tensors, places))?;
        let owner = OwnerOptimizer { part: part.into(), tickets: Mutex::default(), heavy: true.into(), children: Mutex::default(), passed: AtomicU64::new(0) };
        tables.insert_optimizer(id, owner);
        Ok(())
    }

    /// Forgets a group that another owner refused.
    pub(super) fn drop_group(scope: &Scope, id: OptimizerId, number: u32) -> Result<()> {
        let tables = Tables::of(&scope.caller().runtime)?;
        tables.give_up_group(id, number);
        let Some(owner) = tables.optimizer(id) else { return Ok(()) };
        let mut part = lock(&owner.part);
        if part.groups.last() != Some(&number) {
            return Ok(());
        }
        if part.groups.len() == 1 {
            drop(part);
            tables.remove_optimizer(id);
            return Ok(());
        }
        part.groups.pop();
        part.optimizer.remove_last_group();
        let left = part.optimizer.len();
        part.places.truncate(left);
        part.elements = part.optimizer.parameters().map(Tensor::len).sum();
        Ok(())
    }

    /// Tells this owner whom it passes steps on to, from the step of this number on.
    pub(super) fn set_children(scope: &Scope, id: OptimizerId, children: Vec<u32>, next: u64) -> Result<()> {
        let owner = find(scope, "set_fan_out", id)?;
        let was_told = lock(&owner.children).is_some();
        if was_told {
            owner.wait_for_pass(scope, next)?;
        } else {
            owner.passed.store(next, Ordering::SeqCst);
        }
        *lock(&owner.children) = Some(children);
        Ok(())
    }

    /// Changes options, if they came along, and applies the gradients of contexts.
    pub(super) fn step_optimizer(
        scope: &Scope,
        id: OptimizerId,
        context: ContextId,
        changed: Option<ChangedOptions>,
        extras: Option<Extras>,
    ) -> Result<OwnerReport> {
        let start = Instant::now();
        let owner = find(scope, "step", id)?;
        let Extras { contexts, clamp, expected } = extras.unwrap_or_default();
        let recordings = recordings(&scope.caller().runtime, std::iter::once(context).chain(contexts))?;
        let mut part = lock(&owner.part);
        part.make_changes(changed)?;
        part.check_versions(expected)?;
        if let ([Some(recording)], None) = (&recordings[..], clamp) {
            let lent = recording.lent();
            if let Some(parameters) = part.optimizer.step_lent(lent.finder(), Norm::Two)? {
                return applied(scope, &owner, &part, parameters, Norm::Two, start);
            }
        }
        let mut checked = part.check(&recordings, None, None, Norm::Two)?;
        if let Some(max) = clamp {
            checked.clamp(max)?;
        }
        apply(scope, &owner, &mut part, checked, Norm::Two, start)
    }

    /// The first round of a step: validates, computes norms, allocates; changes nothing but options.
    pub(super) fn prepare_step(
        scope: &Scope,
        id: OptimizerId,
        ticket: u64,
        contexts: Vec<ContextId>,
        changed: Option<ChangedOptions>,
        norm: Norm,
        expected: Option<ExpectedVersions>,
    ) -> Result<Prepared> {
        let start = Instant::now();
        let owner = find(scope, "step", id)?;
        let recordings = recordings(&scope.caller().runtime, contexts.into_iter())?;
        let mut part = lock(&owner.part);
        let checked = part.check(&recordings, changed, expected, norm)?;
        let not_finite = checked.not_finite()?.into_iter().filter_map(|local| part.places.get(local).copied()).collect();
        let report = part.report(scope.rank(), part.untouched(checked.norms()?), norm, start);
        owner.keep(ticket, Ticket::Step(checked, norm));
        Ok(Prepared { report, not_finite })
    }

    /// The second round of a step: applies what the first has prepared.
    pub(super) fn apply_step(scope: &Scope, id: OptimizerId, ticket: u64, scale: f64, clamp: Option<f64>) -> Result<OwnerReport> {
        let start = Instant::now();
        let owner = find(scope, "step", id)?;
        let Ticket::Step(mut checked, norm) = owner.ticket(scope.rank(), ticket)? else {
            return Err(no_such("step", scope.rank(), "prepared gradients"));
        };
        let mut part = lock(&owner.part);
        checked.scale(scale)?;
        if let Some(max) = clamp {
            checked.clamp(max)?;
        }
        apply(scope, &owner, &mut part, checked, norm, start)
    }

    /// There will be no second round.
    pub(super) fn cancel_round(scope: &Scope, id: OptimizerId, ticket: u64) -> Result<()> {
        if let Some(owner) = Tables::of(&scope.caller().runtime)?.optimizer(id) {
            owner.cancel(ticket);
        }
        Ok(())
    }

    /// The versions of the parameters, by their places.
    pub(super) fn parameter_versions(scope: &Scope, id: OptimizerId) -> Result<Vec<(u32, u64)>> {
        let owner = find(scope, "versions", id)?;
        let part = lock(&owner.part);
        Ok(part.places.iter().copied().zip(part.versions()).collect())
    }

    /// The state of the parameters that have one, by their places, after changes of options.
    pub(super) fn read_state(scope: &Scope, id: OptimizerId, changed: Option<ChangedOptions>) -> Result<Vec<(u32, SentState)>> {
        let states = find(scope, "state_dict", id)?.states(changed)?;
        Ok(states.iter().map(|(place, state)| (*place, state.into())).collect())
    }

    /// The first round of loading state: checks it. Parameters that aren't named lose theirs.
    pub(super) fn prepare_state(
        scope: &Scope,
        id: OptimizerId,
        ticket: u64,
        groups: Vec<(u32, OptimizerSpec)>,
        states: Vec<(u32, SentState)>,
    ) -> Result<()> {
        let owner = find(scope, "load_state_dict", id)?;
        let states = states.into_iter().map(|(place, state)| (place, ParameterState::from(state)));
        let (specs, loaded) = owner.check_states(scope.rank(), &groups, states)?;
        owner.keep(ticket, Ticket::State(specs, loaded));
        Ok(())
    }

    /// The second round of loading state: puts it in place. Its options are those after change `changes`.
    pub(super) fn apply_state(scope: &Scope, id: OptimizerId, ticket: u64, changes: u64) -> Result<()> {
        let owner = find(scope, "load_state_dict", id)?;
        let Ticket::State(specs, states) = owner.ticket(scope.rank(), ticket)? else {
            return Err(no_such("load_state_dict", scope.rank(), "prepared state"));
        };
        owner.replace(specs, states, changes);
        Ok(())
    }

    /// Forgets the state of all parameters.
    pub(super) fn zero_state(scope: &Scope, id: OptimizerId) -> Result<()> {
        let owner = find(scope, "zero_state", id)?;
        lock(&owner.part).optimizer.zero_state();
        Ok(())
    }

    /// Forgets an optimizer.
    pub(super) fn drop_optimizer(scope: &Scope, id: OptimizerId) -> Result<()> {
        Tables::of(&scope.caller().runtime)?.remove_optimizer(id);
        Ok(())
    }
}

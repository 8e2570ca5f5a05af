//! L-BFGS over parameters on any ranks: the vectors stay with their owners, and numbers travel.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::context::Context;
use super::optimizer::ask::{Asking, ask, collect, gather};
use super::tables::Tables;
use crate::optim::{Ask, Direction, Driver, DriverState, Gathered, Lbfgs, LbfgsReport, Part, Slope, Vectors, add};
use crate::protocol::ContextId;
use crate::rpc::{Caller, Calls, On, Remote};
use crate::rref::RRef;
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

crate::remote! {
    /// The vectors of this owner's parameters.
    fn make(scope: &Scope, parameters: Vec<RRef<Tensor>>, places: Vec<usize>) -> Result<Part> {
        Part::new(parameters.iter().map(|p| p.local(scope)).collect::<Result<_>>()?, places)
    }

    /// Answers when it is made.
    fn is_made(scope: &Scope, part: &mut Part) -> Result<()> {
        let _ = (scope, part);
        Ok(())
    }

    /// Takes the gradients of a context.
    fn take(scope: &Scope, part: &mut Part, context: ContextId, ask: Ask) -> Result<Vec<Gathered>> {
        let recording = Tables::of(&scope.caller().runtime)?.known_recording(context);
        part.gather(&ask, &|tensor| recording.as_ref()?.gradient(tensor.leaf()?.id()))
    }

    /// The products that weren't asked for with a gradient.
    fn products(scope: &Scope, part: &mut Part, pair: Option<f64>, number: u64) -> Result<Vec<Vec<f64>>> {
        let _ = scope;
        part.products(pair, number)
    }

    /// Makes a direction and moves along it.
    fn direct(scope: &Scope, part: &mut Part, direction: Direction) -> Result<Vec<Slope>> {
        let _ = scope;
        part.direct(&direction)
    }

    /// Moves to another step length.
    fn go(scope: &Scope, part: &mut Part, t: f64) -> Result<()> {
        let _ = scope;
        part.go(t)
    }
}

/// L-BFGS over parameters on any ranks.
///
/// Gradients, directions and the history stay with their owners; an inner product is a number for each parameter, added here in the order of the list, so
/// that results have the same bits on any number of ranks. An iteration that needs one evaluation costs two rounds of messages beside it: one takes the
/// gradients, and one makes the direction and moves. Owners are asked all at once, and serve what they are asked in the order of their other steps. Don't
/// step other optimizers over the same parameters meanwhile.
///
/// An owner keeps for each element of a parameter up to `2 history_size + 6` numbers. Dropping the optimizer frees them.
///
/// ```
/// use rankgrad::DistributedLbfgs;
/// use rankgrad::optim::{Lbfgs, LineSearch};
/// use rankgrad::prelude::*;
///
/// remote! {
///     /// Square of the distance to `target`.
///     fn distance(scope: &Scope, x: RRef<Tensor>, target: f64) -> Result<Tensor> {
///         x.local(scope)?.sub_scalar(target)?.pow_scalar(2.0)?.sum()
///     }
/// }
///
/// rankgrad::local::run(2, |world| {
///     world.lead(|world| {
///         let start = Tensor::from_vec(vec![3.0, -4.0], [2])?;
///         let (a, b) = (world.put(0, start.clone())?, world.put(1, start)?);
///         let options = Lbfgs::new(1.0).line_search_fn(LineSearch::StrongWolfe);
///         let mut optimizer = DistributedLbfgs::new(world, options, [&a, &b])?;
///         let report = optimizer.step(|| {
///             let context = world.context()?;
///             let loss = context.call(0, distance, (&a, 1.0))?.add(&context.call(1, distance, (&b, 2.0))?)?;
///             let value = loss.item()?;
///             context.backward(&[loss])?;
///             Ok((value, context))
///         })?;
///         assert!(report.loss < 1e-12);
///         assert!(b.fetch()?.to_vec::<f64>()?.iter().all(|x| (x - 2.0).abs() < 1e-6));
///         Ok(())
///     })
/// })
/// # .unwrap();
/// ```
#[derive(Debug)]
pub struct DistributedLbfgs {
    driver: Driver,
    parts: Parts,
}

/// The vectors, on all owners.
#[derive(Debug)]
struct Parts {
    caller: Caller,
    /// Ascending by owner, each with the places of its parameters in the list.
    parts: Vec<(RRef<Part>, Vec<usize>)>,
    parameters: Vec<RRef<Tensor>>,
}

impl DistributedLbfgs {
    /// Builds an optimizer over parameters on any ranks. Options and references are checked before anything is sent. Targeted; asks all owners at once;
    /// blocks until all have answered.
    ///
    /// # Errors
    /// - [`ErrorKind::OptionValue`]: an option out of its bound. [`ErrorKind::NoParameters`]. [`ErrorKind::DuplicateParameter`].
    /// - [`ErrorKind::Owners`] with every owner that failed: [`ErrorKind::NotALeaf`] for tensors that can't be optimized, [`ErrorKind::Timeout`].
    ///   Nothing stays behind on the others.
    pub fn new<R: Borrow<RRef<Tensor>>>(at: &impl Calls, options: Lbfgs, parameters: impl IntoIterator<Item = R>) -> Result<Self> {
        let driver = Driver::new(options)?;
        let parameters: Vec<RRef<Tensor>> = parameters.into_iter().map(|p| p.borrow().clone()).collect();
        let optimizer = || Lbfgs::NAME.to_owned();
        if parameters.is_empty() {
            return Err(ErrorKind::NoParameters { optimizer: optimizer() }.into());
        }
        let mut known = HashMap::new();
        let mut owners: BTreeMap<u32, (Vec<&RRef<Tensor>>, Vec<usize>)> = BTreeMap::new();
        for (place, rref) in parameters.iter().enumerate() {
            if let Some(first) = known.insert(rref.id(), place) {
                return Err(ErrorKind::DuplicateParameter {
                    optimizer: optimizer(),
                    first,
                    second: place,
                }
                .into());
            }
            let owner = owners.entry(rref.owner()).or_default();
            owner.0.push(rref);
            owner.1.push(place);
        }
        let caller = Caller {
            recorder: None,
            ..at.caller().clone()
        };
        caller.runtime.check_alive(Lbfgs::NAME)?;
        let make_part = |(owner, (rrefs, places)): (u32, (Vec<&RRef<Tensor>>, Vec<usize>))| {
            let rrefs: Vec<RRef<Tensor>> = rrefs.into_iter().cloned().collect();
            Ok((caller.remote(owner, make, (rrefs, &places))?, places))
        };
        let parts = Parts {
            parts: owners.into_iter().map(make_part).collect::<Result<_>>()?,
            parameters,
            caller,
        };
        parts.ask("creation", is_made, (Asking::default(), false), &())?;
        Ok(Self { driver, parts })
    }

    /// The options. Local.
    pub fn options(&self) -> &Lbfgs {
        self.driver.options()
    }

    /// The owners of its parameters, ascending. Local.
    pub fn owners(&self) -> Vec<u32> {
        self.parts.parts.iter().map(|(part, _)| part.owner()).collect()
    }

    /// One step of up to `max_iter` iterations. The closure makes a context, computes the loss, runs a backward, and returns the loss and the context; it is
    /// called for each evaluation. A parameter without a gradient has a gradient of zeros; sparse gradients are made dense. The history is kept from step to
    /// step. Targeted; blocks until all owners have answered.
    ///
    /// # Errors
    /// What the closure returns; [`ErrorKind::BackwardInFlight`], [`ErrorKind::ContextReleased`] for its context; [`ErrorKind::Owners`] with every owner that
    /// failed. The parameters are then where the loss was last accepted, on all owners that can be reached, and the next step starts without a history.
    pub fn step(&mut self, closure: impl FnMut() -> Result<(f64, Context)>) -> Result<LbfgsReport> {
        self.parts.caller.runtime.check_alive("step")?;
        self.driver.step(&mut Everywhere {
            parts: &self.parts,
            closure,
        })
    }
}

/// For checkpoints.
impl DistributedLbfgs {
    pub(super) fn listed_parameters(&self) -> &[RRef<Tensor>] {
        &self.parts.parameters
    }

    pub(super) fn driver_state(&self) -> (Lbfgs, DriverState) {
        (self.driver.options().clone(), self.driver.state())
    }

    /// The vectors on each owner, with the places of their parameters.
    pub(super) fn parts_of_owners(&self) -> &[(RRef<Part>, Vec<usize>)] {
        &self.parts.parts
    }

    pub(super) fn resume(&mut self, options: Lbfgs, state: DriverState) -> Result<()> {
        self.driver = Driver::resume(options, state)?;
        Ok(())
    }
}

impl Parts {
    /// Asks all owners at once.
    fn ask<A, R: DeserializeOwned>(
        &self,
        what: &str,
        f: impl Fn() -> Remote<On<Part, A>, R>,
        (asking, applies): (Asking, bool),
        arguments: &impl Serialize,
    ) -> Result<Vec<R>> {
        let asking = Asking {
            // The only owner, if it is this rank, does its part at once.
            at_once: self.parts.len() == 1,
            ..asking
        };
        let asked = self.parts.iter().map(|(part, _)| {
            let call = ask(&self.caller, part.owner(), f(), &asking, |bytes| {
                crate::wire::write(part, bytes)?;
                crate::wire::write(arguments, bytes)
            });
            (part.owner(), call)
        });
        let created = |result: Result<R>| {
            result.map_err(|error| match error.kind() {
                ErrorKind::Creation { source, .. } => source.clone(),
                _ => error,
            })
        };
        let results = collect(asked.collect()).into_iter();
        gather(
            || format!("{}: {what}", Lbfgs::NAME),
            results.map(|(owner, result)| (owner, created(result))),
            applies,
        )
    }

    /// Asks for a row a parameter; the rows in the order of the list.
    fn rows<A, R: DeserializeOwned>(
        &self,
        what: &str,
        f: impl Fn() -> Remote<On<Part, A>, Vec<R>>,
        how: (Asking, bool),
        arguments: &impl Serialize,
    ) -> Result<Vec<R>> {
        let mut rows: Vec<(usize, R)> = Vec::with_capacity(self.parameters.len());
        for ((_, places), answer) in self.parts.iter().zip(self.ask(what, f, how, arguments)?) {
            rows.extend(places.iter().copied().zip(answer));
        }
        rows.sort_by_key(|(place, _)| *place);
        Ok(rows.into_iter().map(|(_, row)| row).collect())
    }
}

struct Everywhere<'a, F> {
    parts: &'a Parts,
    closure: F,
}

impl<F: FnMut() -> Result<(f64, Context)>> Vectors for Everywhere<'_, F> {
    fn evaluate(&mut self, ask: &Ask) -> Result<(f64, Gathered)> {
        let (loss, context) = (self.closure)()?;
        self.parts.caller.runtime.check_gradients("step", context.id())?;
        let asking = Asking {
            gradients_of: Some(context.id()),
            ..Asking::QUEUED
        };
        let mut all = Gathered::default();
        let rows = self.parts.rows("gradients", take, (asking, false), &(context.id(), ask))?;
        rows.into_iter().for_each(|row| all.add(row));
        Ok((loss, all))
    }

    fn products(&mut self, pair: Option<f64>, number: u64) -> Result<Vec<f64>> {
        let mut all = vec![];
        let rows = self.parts.rows("products", products, (Asking::QUEUED, false), &(pair, number))?;
        rows.iter().for_each(|row| add(&mut all, row));
        Ok(all)
    }

    fn direct(&mut self, direction: &Direction) -> Result<Slope> {
        let mut all = Slope::default();
        let rows = self.parts.rows("direction", direct, (Asking::QUEUED, true), &(direction,))?;
        rows.into_iter().for_each(|row| all.add(row));
        Ok(all)
    }

    fn go(&mut self, t: f64) -> Result<()> {
        self.parts.ask("move", go, (Asking::QUEUED, true), &(t,)).map(drop)
    }
}

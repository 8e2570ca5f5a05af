//! Attached optimizers of this rank, as their user sees them.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::{Value, json};

use super::{Attached, Groups, InBackward, Observer, leaf};
use crate::optim::schedule::Adjust;
use crate::optim::{OptimizerSpec, ParameterReport, ParameterState, lr as lr_option};
use crate::tensor::{Gradient, Tensor};
use crate::{ErrorKind, Result};

/// Optimizers in backward that are attached to tensors of this rank, by their places in a list: from
/// [`optimizer_in_backward`](super::optimizer_in_backward) or [`optimizers_in_backward`](super::optimizers_in_backward).
///
/// All of it is local. A place that isn't there is [`ErrorKind::Argument`]. Dropping it leaves the optimizers attached; [`detach`](Self::detach) removes
/// them. It remembers options as of its making and its own changes since, so change them through one such value.
#[derive(Debug)]
pub struct InBackwardOptimizers {
    optimizers: Vec<(Tensor, Arc<Attached>)>,
    groups: Groups,
}

impl InBackwardOptimizers {
    /// Attaches to parameters, each with its place in the user's list; to all or none.
    pub(crate) fn attach(
        spec: &OptimizerSpec,
        options: &InBackward,
        parameters: impl IntoIterator<Item = (usize, Tensor)>,
        observer: Option<Observer>,
    ) -> Result<Self> {
        let make = |(place, tensor): (usize, Tensor)| {
            let (leaf, attached) = Attached::new(spec, options, (place, &tensor), observer.clone())?;
            Ok((tensor, leaf, attached))
        };
        let made: Vec<_> = parameters.into_iter().map(make).collect::<Result<_>>()?;
        let add = |(tensor, on, attached)| {
            let on: Arc<_> = on;
            leaf::attach(&on, Arc::clone(&attached));
            (tensor, attached)
        };
        Ok(Self::from_list(made.into_iter().map(add).collect()))
    }

    /// Those attached to these tensors.
    pub(crate) fn of(tensors: &[Tensor]) -> Self {
        let mut seen = HashSet::new();
        let mut optimizers = Vec::new();
        for tensor in tensors {
            if let Some(on) = tensor.leaf().filter(|leaf| seen.insert(leaf.id())) {
                optimizers.extend(leaf::attached(on).into_iter().map(|one| (tensor.clone(), one)));
            }
        }
        Self::from_list(optimizers)
    }

    fn from_list(optimizers: Vec<(Tensor, Arc<Attached>)>) -> Self {
        let groups = Groups::new(optimizers.iter().map(|(_, one)| one.spec()));
        Self { optimizers, groups }
    }

    /// Only those with these ids.
    pub(crate) fn only(mut self, ids: &[u64]) -> Self {
        self.optimizers.retain(|(_, one)| ids.contains(&one.id()));
        Self::from_list(self.optimizers)
    }

    /// Their ids and options.
    pub(crate) fn ids(&self) -> Vec<(u64, OptimizerSpec)> {
        self.optimizers.iter().map(|(_, one)| (one.id(), one.spec())).collect()
    }

    fn at(&self, place: usize) -> Result<&(Tensor, Arc<Attached>)> {
        self.optimizers.get(place).ok_or_else(|| {
            ErrorKind::Argument {
                op: "optimizers in backward".into(),
                what: format!("no optimizer {place}; there are {}", self.len()),
            }
            .into()
        })
    }

    /// Number of optimizers.
    pub fn len(&self) -> usize {
        self.optimizers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.optimizers.is_empty()
    }

    /// The parameter of each.
    pub fn parameters(&self) -> impl ExactSizeIterator<Item = &Tensor> {
        self.optimizers.iter().map(|(tensor, _)| tensor)
    }

    /// Rule and options of one; `None` if there is no such place.
    pub fn spec(&self, place: usize) -> Option<&OptimizerSpec> {
        self.groups.spec(place)
    }

    /// Changes the learning rate of all.
    ///
    /// # Errors
    /// As [`set_options`](Self::set_options); [`ErrorKind::OptionValue`] also if it is infinite or NaN.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.set_options(&lr_option(self.groups.specs(), lr)?)
    }

    /// Changes an option of all.
    ///
    /// # Errors
    /// As [`set_options`](Self::set_options).
    pub fn set_option(&mut self, option: &str, value: impl Into<Value>) -> Result<()> {
        self.set_options(&json!({ option: value.into() }))
    }

    /// Changes options, by name, of all. They hold from the next update on.
    ///
    /// # Errors
    /// As [`OptimizerSpec::with_options`]; nothing is changed then.
    pub fn set_options(&mut self, options: &Value) -> Result<()> {
        self.change(None, options)
    }

    fn change(&mut self, group: Option<usize>, options: &Value) -> Result<()> {
        let (specs, places) = self.groups.changed(group, options)?;
        let concerned: Vec<&Attached> = places.iter().map(|&place| &*self.optimizers[place].1).collect();
        let changed: Vec<OptimizerSpec> = concerned.iter().map(|one| one.changed(options)).collect::<Result<_>>()?;
        concerned.iter().zip(changed).for_each(|(one, spec)| one.set_spec(spec));
        self.groups.set(specs);
        Ok(())
    }

    /// State of one, for a checkpoint; `None` if it has made no update.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if there is no such place.
    pub fn state(&self, place: usize) -> Result<Option<ParameterState>> {
        Ok(self.at(place)?.1.state())
    }

    /// Puts the state of one in place, so that its next update goes on from there.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] as [`Optimizer::load_state`](crate::optim::Optimizer::load_state); nothing is changed then.
    pub fn load_state(&mut self, place: usize, state: ParameterState) -> Result<()> {
        let (tensor, one) = self.at(place)?;
        tensor.leaf().map_or(Ok(()), |leaf| one.load_state(leaf, state))
    }

    /// All of one that a checkpoint holds, as a state with names of its own; `None` if it was never used.
    pub(crate) fn saved(&self, place: usize) -> Result<Option<ParameterState>> {
        let (tensor, one) = self.at(place)?;
        Ok(tensor.leaf().and_then(|leaf| one.saved(leaf)))
    }

    /// Checks what [`saved`](Self::saved) gave, and options for it; what is returned puts both in place.
    pub(crate) fn stage(&self, place: usize, spec: OptimizerSpec, saved: Option<ParameterState>) -> Result<impl FnOnce() + Send + use<>> {
        let (tensor, one) = self.at(place)?;
        let progress = tensor.leaf().map(|leaf| one.restored(leaf, spec, saved)).transpose()?;
        let one = Arc::clone(one);
        Ok(move || progress.into_iter().for_each(|progress| one.replace(progress)))
    }

    /// The gradient that one used in its last update, if [`InBackward::keep_gradient`] asks for it.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if there is no such place.
    pub fn gradient(&self, place: usize) -> Result<Option<Gradient>> {
        Ok(self.at(place)?.1.last())
    }

    /// Gives one a gradient, as a backward does: it updates, or adds to what it gathers. For optimizers that no backward runs.
    ///
    /// # Errors
    /// [`ErrorKind::InBackward`]; [`ErrorKind::Argument`] if there is no such place.
    pub fn step(&mut self, place: usize, gradient: Gradient) -> Result<Option<ParameterReport>> {
        let (tensor, one) = self.at(place)?;
        tensor.leaf().map_or(Ok(None), |leaf| one.take(tensor, leaf, gradient))
    }

    /// Removes the optimizers from their parameters, with their state. Those that are gone already are left out.
    pub fn detach(self) {
        for (tensor, one) in &self.optimizers {
            if let Some(on) = tensor.leaf() {
                leaf::detach(on, one.id());
            }
        }
    }
}

/// Optimizers with equal options at the time form a group; so those of one [`optimizer_in_backward`](super::optimizer_in_backward) are one.
impl Adjust for InBackwardOptimizers {
    fn specs(&self) -> &[OptimizerSpec] {
        self.groups.specs()
    }

    fn adjust(&mut self, group: usize, options: &Value) -> Result<()> {
        self.change(Some(group), options)
    }
}

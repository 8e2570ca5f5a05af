//! The optimizer of one rank: parameters, their groups, and their state.

use std::collections::HashMap;
use std::sync::Arc;

use ndarray::{ArcArray, IxDyn};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::clip::{clamped, is_finite, scaled};
use super::erased::{ErasedRule, Taken};
use super::spec::changed;
use super::{Float, Form, Norm, OptimizerSpec, ParameterState, Rows, StateView};
use crate::tensor::{DType, Data, Device, Element, Gradient, Leaf, RowSparse, Tensor, Updated};
use crate::{Error, ErrorKind, Result};

/// What a step did to one parameter.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ParameterReport {
    /// Whether there was a gradient, and so an update.
    pub updated: bool,
    /// Rows that a sparse gradient touched; `None` for a dense one.
    pub rows: Option<usize>,
    /// Norm of its gradient before any clipping: of the kind that the step clips by, else the 2-norm. `None` without a gradient.
    pub norm: Option<f64>,
    /// The parameter's version after the step.
    pub version: u64,
    /// Whether the update wrote over the old values, because nobody else held them.
    pub in_place: bool,
}

/// Gradients that an [`Optimizer`] has checked, each in the form that its rule takes, with their norms. Made by [`Optimizer::check`].
#[derive(Debug, Clone)]
pub struct Checked {
    gradients: Vec<Option<Gradient>>,
    norms: Vec<Option<f64>>,
}

impl Checked {
    /// Norm of each parameter's gradient; `None` without one.
    pub fn norms(&self) -> &[Option<f64>] {
        &self.norms
    }

    /// Places of the parameters whose gradient has an element that is infinite or NaN.
    pub fn not_finite(&self) -> Vec<usize> {
        // A finite norm is one of finite elements; another one may be too large for a number.
        let suspects = self.norms.iter().zip(&self.gradients).enumerate();
        suspects
            .filter(|(_, (norm, _))| norm.is_some_and(|n| !n.is_finite()))
            .filter(|(_, (_, gradient))| gradient.as_ref().is_some_and(|g| !is_finite(g)))
            .map(|(place, _)| place)
            .collect()
    }

    /// Multiplies all gradients by a number. The norms stay those before.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] for gradients on a GPU that can't be used.
    pub fn scale(&mut self, factor: f64) -> Result<()> {
        if factor != 1.0 {
            for gradient in self.gradients.iter_mut().flatten() {
                *gradient = scaled(gradient, factor)?;
            }
        }
        Ok(())
    }

    /// Brings all elements between `-max` and `max`. The norms stay those before.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] for gradients on a GPU that can't be used.
    pub fn clamp(&mut self, max: f64) -> Result<()> {
        let clamped = |g: Option<Gradient>| g.map(|g| clamped(g, max)).transpose();
        self.gradients = std::mem::take(&mut self.gradients)
            .into_iter()
            .map(clamped)
            .collect::<Result<_>>()?;
        Ok(())
    }
}

/// An optimizer over parameters of this rank. Local; it blocks on nothing but the parameters' own locks.
///
/// Parameters are known by their place in the order given. Those of one group share options. State is allocated when a
/// parameter meets its first gradient, or before by [`Optimizer::check`]. A frozen parameter (one that requires no gradient) may be among them:
/// it and its state stay as they are, whatever gradient it has, until it is unfrozen.
///
/// ```
/// use rankgrad::optim::{Optimizer, Sgd};
/// use rankgrad::tensor::{Gradient, Tensor};
///
/// let p = Tensor::from_vec(vec![1.0, 2.0], &[2])?.parameter()?;
/// let mut optimizer = Optimizer::new(Sgd::new(0.5), vec![p.clone()])?;
/// let gradient = Gradient::Dense(Tensor::from_vec(vec![1.0, -1.0], &[2])?.data());
/// let report = optimizer.step(&mut |_| Some(gradient.clone()))?;
/// assert!(report[0].updated);
/// assert_eq!(p.to_vec::<f64>()?, [0.5, 2.5]);
/// # Ok::<(), rankgrad::Error>(())
/// ```
#[derive(Debug)]
pub struct Optimizer {
    pub(super) groups: Vec<OptimizerSpec>,
    pub(super) parameters: Vec<Parameter>,
}

#[derive(Debug)]
pub(super) struct Parameter {
    /// Its place, for errors.
    pub(super) place: usize,
    tensor: Tensor,
    pub(super) leaf: Arc<Leaf>,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) group: usize,
    pub(super) state: Option<ParameterState>,
    /// Whether `state` has all that the group's options need.
    pub(super) prepared: bool,
}

impl Optimizer {
    /// An optimizer of one group.
    ///
    /// # Errors
    /// - [`ErrorKind::OptionValue`]: an option is out of its bound.
    /// - [`ErrorKind::NoParameters`], [`ErrorKind::DuplicateParameter`]: list each parameter once.
    /// - [`ErrorKind::NotALeaf`]: make parameters with [`Tensor::parameter`]; optimize no results of operations.
    /// - [`ErrorKind::Argument`]: the rule doesn't take a parameter of this shape.
    pub fn new(spec: impl Into<OptimizerSpec>, parameters: Vec<Tensor>) -> Result<Self> {
        let mut optimizer = Self::empty();
        optimizer.add_group(spec, parameters)?;
        Ok(optimizer)
    }

    /// One to add groups to.
    pub(crate) fn empty() -> Self {
        Self {
            groups: vec![],
            parameters: vec![],
        }
    }

    /// An optimizer of one parameter that goes on from a state; neither is checked. [`Optimizer::into_state`] is the way back.
    pub(super) fn resume(spec: OptimizerSpec, (place, tensor): (usize, Tensor), leaf: Arc<Leaf>, state: Option<ParameterState>) -> Self {
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let parameter = Parameter {
            place,
            tensor,
            leaf,
            dtype,
            shape,
            group: 0,
            state,
            prepared: false,
        };
        Self {
            groups: vec![spec],
            parameters: vec![parameter],
        }
    }

    /// The state of its only parameter.
    pub(super) fn into_state(mut self) -> Option<ParameterState> {
        self.parameters.pop().and_then(|p| p.state)
    }

    /// Adds parameters with options of their own; returns the group's place. Any rule does, also another one.
    ///
    /// # Errors
    /// As [`Optimizer::new`]; nothing is added then.
    pub fn add_group(&mut self, spec: impl Into<OptimizerSpec>, parameters: Vec<Tensor>) -> Result<usize> {
        let first = self.parameters.len() as u32;
        let places: Vec<u32> = (first..first + parameters.len() as u32).collect();
        self.add_group_at(spec.into(), parameters, &places)
    }

    /// As [`add_group`](Self::add_group); errors name parameters by these places.
    pub(crate) fn add_group_at(&mut self, spec: OptimizerSpec, parameters: Vec<Tensor>, places: &[u32]) -> Result<usize> {
        spec.check()?;
        let optimizer = || spec.name().to_owned();
        if parameters.is_empty() {
            return Err(ErrorKind::NoParameters { optimizer: optimizer() }.into());
        }
        let mut known: HashMap<u64, usize> = self.parameters.iter().map(|p| (p.leaf.id(), p.place)).collect();
        let mut added = Vec::with_capacity(parameters.len());
        for (&place, tensor) in places.iter().zip(parameters) {
            let place = place as usize;
            let refused = |why: &str| ErrorKind::NotALeaf {
                what: format!("{}: parameter {place}", spec.name()),
                why: why.into(),
            };
            let leaf = match tensor.leaf() {
                Some(leaf) => Arc::clone(leaf),
                None if tensor.requires_grad() => return Err(refused("it was computed; optimize what it was computed from").into()),
                None => return Err(refused("it requires no gradient; make it one with `parameter`").into()),
            };
            if let Some(first) = known.insert(leaf.id(), place) {
                return Err(ErrorKind::DuplicateParameter {
                    optimizer: optimizer(),
                    first,
                    second: place,
                }
                .into());
            }
            let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
            if let Err(why) = spec.rule().takes_shape(&shape) {
                return Err(ErrorKind::Argument {
                    op: optimizer(),
                    what: format!("parameter {place} of shape {shape:?}: {why}"),
                }
                .into());
            }
            added.push(Parameter {
                place,
                tensor,
                leaf,
                dtype,
                shape,
                group: self.groups.len(),
                state: None,
                prepared: false,
            });
        }
        self.parameters.extend(added);
        self.groups.push(spec);
        Ok(self.groups.len() - 1)
    }

    /// Removes the group that was added last, with its parameters and their state. The first one stays.
    pub(crate) fn remove_last_group(&mut self) {
        if self.groups.len() > 1 {
            self.groups.pop();
            self.parameters.retain(|p| p.group < self.groups.len());
        }
    }

    /// Number of parameters.
    pub fn len(&self) -> usize {
        self.parameters.len()
    }

    /// Whether there are no parameters; never, since [`Optimizer::new`] refuses none.
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// The parameters, in their order.
    pub fn parameters(&self) -> impl ExactSizeIterator<Item = &Tensor> {
        self.parameters.iter().map(|p| &p.tensor)
    }

    /// The groups' options.
    pub fn groups(&self) -> &[OptimizerSpec] {
        &self.groups
    }

    /// The group of a parameter, or `None` if there is no such parameter.
    pub fn group_of(&self, parameter: usize) -> Option<usize> {
        self.parameters.get(parameter).map(|p| p.group)
    }

    /// Changes one option of one group, or of all groups. It holds from the next update on.
    ///
    /// # Errors
    /// As [`Optimizer::set_options`].
    pub fn set_option(&mut self, group: Option<usize>, option: &str, value: &Value) -> Result<()> {
        self.set_options(group, &json!({ option: value }))
    }

    /// Changes options, by name, of one group or of all groups. They hold from the next update on.
    ///
    /// # Errors
    /// As [`OptimizerSpec::with_options`], and [`ErrorKind::Argument`] if there is no such group; nothing is changed then.
    pub fn set_options(&mut self, group: Option<usize>, options: &Value) -> Result<()> {
        let (places, specs) = changed(&self.groups, group, options)?;
        self.groups.splice(places.clone(), specs);
        self.parameters
            .iter_mut()
            .filter(|p| places.contains(&p.group))
            .for_each(|p| p.prepared = false);
        Ok(())
    }

    /// One step: asks for the gradient of each parameter by its place, checks all of them, then updates. A parameter
    /// without a gradient is left alone: no update, no state, no step counted. So is a frozen one.
    ///
    /// # Errors
    /// As [`Optimizer::check`]; nothing is changed then.
    pub fn step(&mut self, gradients: &mut dyn FnMut(usize) -> Option<Gradient>) -> Result<Vec<ParameterReport>> {
        let gradients = (0..self.len()).map(gradients).collect();
        let checked = self.check(gradients, Norm::Two)?;
        self.apply(checked)
    }

    /// One update of one parameter, as soon as its gradient is there.
    ///
    /// # Errors
    /// As [`Optimizer::check`]; nothing is changed then.
    pub fn step_one(&mut self, parameter: usize, gradient: Gradient) -> Result<ParameterReport> {
        self.known(parameter)?;
        let gradient = self.check_one(parameter, Some(gradient))?;
        let norm = gradient.as_ref().map(|g| Norm::Two.of(g));
        self.apply_one(parameter, gradient, norm)
    }

    /// The first half of a step: checks a gradient for each parameter, computes its norm and allocates all that the second half needs.
    /// Changes no parameter and no state.
    ///
    /// # Errors
    /// [`ErrorKind::GradientKind`] if a gradient has another dtype or shape than its parameter, or is of a kind that the
    /// rule doesn't take; [`ErrorKind::Argument`] if their number isn't that of the parameters.
    pub fn check(&mut self, gradients: Vec<Option<Gradient>>, norm: Norm) -> Result<Checked> {
        if gradients.len() != self.len() {
            return Err(argument(
                "step",
                format!("{} gradients for {} parameters", gradients.len(), self.len()),
            ));
        }
        let check = |(place, gradient): (usize, Option<Gradient>)| self.check_one(place, gradient);
        let gradients = gradients.into_iter().enumerate().map(check).collect::<Result<Vec<_>>>()?;
        let norms = gradients.iter().map(|g| g.as_ref().map(|g| norm.of(g))).collect();
        Ok(Checked { gradients, norms })
    }

    /// The second half of a step: updates each parameter that has a gradient, in order.
    ///
    /// # Errors
    /// As [`Optimizer::check`], and only if options were changed between the two; [`ErrorKind::Argument`] if another optimizer has checked them.
    pub fn apply(&mut self, gradients: Checked) -> Result<Vec<ParameterReport>> {
        let Checked { gradients, norms } = gradients;
        let fits = |(g, p): (&Option<Gradient>, &Parameter)| g.as_ref().is_none_or(|g| g.dtype() == p.dtype && g.shape() == p.shape);
        if gradients.len() != self.len() || !gradients.iter().zip(&self.parameters).all(fits) {
            return Err(argument("apply", "gradients that were checked for other parameters".into()));
        }
        let mut together = Vec::new();
        let mut reports = Vec::with_capacity(self.len());
        for (place, (gradient, norm)) in gradients.into_iter().zip(norms).enumerate() {
            let leaf = &self.parameters[place].leaf;
            match gradient {
                Some(gradient) if leaf.device() != Device::Cpu && leaf.requires_grad() => together.push((place, gradient, norm)),
                gradient => reports.push((place, self.apply_one(place, gradient, norm)?)),
            }
        }
        if !together.is_empty() {
            reports.extend(self.apply_on_gpus(together)?);
            reports.sort_by_key(|report| report.0);
        }
        Ok(reports.into_iter().map(|report| report.1).collect())
    }

    /// State of a parameter; `None` if it was never updated.
    pub fn state(&self, parameter: usize) -> Option<&ParameterState> {
        let state = self.parameters.get(parameter)?.state.as_ref();
        state.filter(|state| state.is_used())
    }

    /// State of a parameter as it is saved: what its rule keeps under its options now. `None` if that is nothing.
    pub(crate) fn saved_state(&self, parameter: usize) -> Option<ParameterState> {
        let p = self.parameters.get(parameter)?;
        let kept = self.state(parameter)?.kept(&self.groups[p.group].rule().arrays(&p.shape));
        (!kept.is_empty()).then_some(kept)
    }

    /// Puts a parameter's state in place, so that the next step continues from it. What the rule keeps and isn't there
    /// starts as new.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if there is no such parameter, or if the state has a name, dtype or shape that the rule
    /// doesn't keep; nothing is changed then.
    pub fn load_state(&mut self, parameter: usize, state: ParameterState) -> Result<()> {
        self.known(parameter)?;
        self.check_state(&self.groups[self.parameters[parameter].group], parameter, &state)?;
        let p = &mut self.parameters[parameter];
        p.state = Some(state);
        p.prepared = false;
        Ok(())
    }

    /// Whether a parameter could have this state under these options.
    pub(crate) fn check_state(&self, spec: &OptimizerSpec, parameter: usize, state: &ParameterState) -> Result<()> {
        self.known(parameter)?;
        let (p, rule) = (&self.parameters[parameter], spec.rule());
        state.check("load_state", rule.scalars(), &rule.arrays(&p.shape), p.dtype)
    }

    /// Replaces the options of all groups and the state of all parameters, which have been checked.
    pub(crate) fn replace(&mut self, groups: Vec<OptimizerSpec>, states: Vec<Option<ParameterState>>) {
        self.groups = groups;
        for (p, state) in self.parameters.iter_mut().zip(states) {
            p.state = state;
            p.prepared = false;
        }
    }

    /// Forgets the state of every parameter, as if no step had been made. Parameters stay as they are.
    pub fn zero_state(&mut self) {
        for p in &mut self.parameters {
            p.state = None;
            p.prepared = false;
        }
    }

    fn known(&self, parameter: usize) -> Result<()> {
        match parameter < self.len() {
            true => Ok(()),
            false => Err(argument("optimizer", format!("no parameter {parameter}; there are {}", self.len()))),
        }
    }

    fn check_one(&mut self, place: usize, gradient: Option<Gradient>) -> Result<Option<Gradient>> {
        let p = &mut self.parameters[place];
        let Some(gradient) = gradient.filter(|_| p.leaf.requires_grad()) else {
            return Ok(None);
        };
        let rule = self.groups[p.group].rule();
        let gradient = p.take(rule, gradient)?;
        p.prepare(rule)?;
        Ok(Some(gradient))
    }

    fn apply_one(&mut self, place: usize, gradient: Option<Gradient>, norm: Option<f64>) -> Result<ParameterReport> {
        let p = &mut self.parameters[place];
        // It may have been frozen since the check.
        let Some(gradient) = gradient.filter(|_| p.leaf.requires_grad()) else {
            return Ok(ParameterReport {
                updated: false,
                rows: None,
                norm,
                version: p.leaf.version(),
                in_place: false,
            });
        };
        if p.leaf.device() != Device::Cpu {
            let mut reports = self.apply_on_gpus(vec![(place, gradient, norm)])?;
            return reports
                .pop()
                .map(|report| report.1)
                .ok_or_else(|| argument("apply", "no update".into()));
        }
        let rule = self.groups[p.group].rule();
        // Options may have changed since the check.
        let gradient = if p.prepared { gradient } else { p.take(rule, gradient)? };
        p.prepare(rule)?;
        let rows = match &gradient {
            Gradient::Sparse(sparse) => Some(sparse.rows.len()),
            Gradient::Dense(_) => None,
        };
        let (state, shape) = (p.state.get_or_insert_default(), &p.shape);
        let panicked = |message| ErrorKind::RulePanic {
            optimizer: rule.name().into(),
            parameter: p.place,
            message,
        };
        let update = |data: &mut Data| update(rule, data, &gradient, state, shape)?.map_err(|message| panicked(message).into());
        let (_, Updated { version, in_place }) = p.leaf.update(update)?;
        Ok(ParameterReport {
            updated: true,
            rows,
            norm,
            version,
            in_place,
        })
    }
}

impl Parameter {
    /// The gradient in the form that the rule takes, or why it doesn't.
    pub(super) fn take(&self, rule: &dyn ErasedRule, gradient: Gradient) -> Result<Gradient> {
        let refused = |why: String| {
            Error::from(ErrorKind::GradientKind {
                optimizer: rule.name().into(),
                parameter: self.place,
                why,
            })
        };
        if gradient.dtype() != self.dtype || gradient.shape() != self.shape {
            let (dtype, shape) = (gradient.dtype(), gradient.shape());
            return Err(refused(format!(
                "its gradient is {dtype} {shape:?}, and it is {} {:?}",
                self.dtype, self.shape
            )));
        }
        let sparse = matches!(gradient, Gradient::Sparse(_));
        let form = rule.form(sparse).map_err(|why| refused(why.into()))?;
        match (gradient, form) {
            (Gradient::Dense(data), Form::Dense) => Ok(Gradient::Dense(data.to_contiguous())),
            (Gradient::Sparse(rows), Form::Rows) => Ok(Gradient::Sparse(contiguous(rows.coalesce()?))),
            (Gradient::Sparse(rows), Form::Dense) => Ok(Gradient::Dense(rows.to_dense()?.to_contiguous())),
            (Gradient::Dense(_), Form::Rows) => Err(refused("the rule asks for rows of a dense gradient".into())),
        }
    }

    pub(super) fn prepare(&mut self, rule: &dyn ErasedRule) -> Result<()> {
        if !self.prepared {
            let kind = (self.dtype, self.leaf.device());
            self.state
                .get_or_insert_default()
                .prepare(rule.scalars(), rule.arrays(&self.shape), kind)?;
            self.prepared = true;
        }
        Ok(())
    }
}

fn contiguous(mut sparse: RowSparse) -> RowSparse {
    sparse.values = sparse.values.to_contiguous();
    sparse
}

/// One update of a parameter's values by a gradient in the form that the rule takes, or the text of a panic in the rule.
pub(super) fn update(
    rule: &dyn ErasedRule,
    data: &mut Data,
    gradient: &Gradient,
    state: &mut ParameterState,
    shape: &[usize],
) -> Result<Result<(), String>> {
    if !data.is_contiguous() {
        *data = data.to_contiguous();
    }
    Ok(match data {
        Data::F32(p) => rule.update_f32(slice_mut(p)?, taken(gradient)?, &mut StateView::new(state, shape)),
        _ => rule.update_f64(
            slice_mut(f64::peek_mut(data)?)?,
            taken(gradient)?,
            &mut StateView::new(state, shape),
        ),
    })
}

fn taken<T: Float>(gradient: &Gradient) -> Result<Taken<'_, T>> {
    Ok(match gradient {
        Gradient::Dense(data) => Taken::Dense(slice(T::peek(data)?)?),
        Gradient::Sparse(RowSparse { rows, values, .. }) => Taken::Rows(Rows {
            rows,
            values: slice(T::peek(values)?)?,
        }),
    })
}

fn slice<T>(array: &ArcArray<T, IxDyn>) -> Result<&[T]> {
    array.as_slice().ok_or_else(not_contiguous)
}

fn slice_mut<T: Clone>(array: &mut ArcArray<T, IxDyn>) -> Result<&mut [T]> {
    array.as_slice_mut().ok_or_else(not_contiguous)
}

fn not_contiguous() -> Error {
    argument("optimizer", "values that are not in row-major order".into())
}

fn argument(op: &str, what: String) -> Error {
    ErrorKind::Argument { op: op.into(), what }.into()
}

//! The optimizer of one rank: parameters, their groups, and their state.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use ndarray::{ArcArray, IxDyn};
use serde_json::{Value, json};

use super::checked::Checked;
use super::erased::{ErasedRule, RuleOn, Taken};
use super::flat::{FlatGroup, each};
use super::report::{ParameterReport, ParameterReports};
use super::spec::changed;
use super::sweep::Sweep;
use super::view::After;
use super::{Float, Form, Norm, OptimizerSpec, ParameterState, Rows};
use crate::tensor::{DType, Data, Device, Gradient, Leaf, RowSparse, Tensor, Updated};
use crate::{Error, ErrorKind, Result};

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
    /// Small parameters that are updated together, with their state.
    pub(super) flats: Vec<FlatGroup>,
    /// Whether it was looked for such since parameters or state were changed.
    pub(super) flattened: bool,
}

#[derive(Debug)]
pub(super) struct Parameter {
    /// Its place, for errors.
    pub(super) place: usize,
    pub(super) tensor: Tensor,
    pub(super) leaf: Arc<Leaf>,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) group: usize,
    /// Not that of a member of a flat group.
    pub(super) state: Option<ParameterState>,
    /// Whether it is a member of a flat group.
    pub(super) flat: bool,
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
            flats: Vec::new(),
            flattened: false,
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
            flat: false,
            prepared: false,
        };
        Self {
            groups: vec![spec],
            parameters: vec![parameter],
            ..Self::empty()
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
            let name = leaf.name().map(str::to_owned);
            if let Err(why) = spec.rule().takes_shape(&shape) {
                return Err(ErrorKind::Argument {
                    op: optimizer(),
                    what: format!("parameter {place}{} of shape {shape:?}: {why}", crate::error::named(&name)),
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
                flat: false,
                prepared: false,
            });
        }
        self.dissolve();
        self.parameters.extend(added);
        self.groups.push(spec);
        Ok(self.groups.len() - 1)
    }

    /// Removes the group that was added last, with its parameters and their state. The first one stays.
    pub(crate) fn remove_last_group(&mut self) {
        if self.groups.len() > 1 {
            self.dissolve();
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
        let fit = |flat: &FlatGroup| each!(flat, flat => flat.fits(self.groups[flat.group].rule()));
        if self.flats.is_empty() || !self.flats.iter().all(fit) {
            self.dissolve();
        }
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
        self.dissolve();
        let gradient = self.check_one(parameter, Some(gradient))?;
        self.apply_one(parameter, gradient, Asked::For(Norm::Two))
    }

    /// The first half of a step: checks a gradient for each parameter, and allocates all that the second half needs. Norms are of the kind `norm`.
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
        Ok(Checked {
            gradients,
            kind: norm,
            norms: OnceLock::new(),
        })
    }

    /// The second half of a step: updates each parameter that has a gradient, in order.
    ///
    /// # Errors
    /// As [`Optimizer::check`], and only if options were changed between the two; [`ErrorKind::Argument`] if another optimizer has checked them.
    pub fn apply(&mut self, gradients: Checked) -> Result<Vec<ParameterReport>> {
        Ok(self.apply_all(gradients)?.iter().collect())
    }

    /// As [`apply`](Self::apply).
    pub(crate) fn apply_all(&mut self, gradients: Checked) -> Result<ParameterReports> {
        let Checked {
            mut gradients,
            kind,
            norms,
        } = gradients;
        let fits = |(g, p): (&Option<Gradient>, &Parameter)| g.as_ref().is_none_or(|g| g.dtype() == p.dtype && g.shape() == p.shape);
        if gradients.len() != self.len() || !gradients.iter().zip(&self.parameters).all(fits) {
            return Err(argument("apply", "gradients that were checked for other parameters".into()));
        }
        let norms = norms.into_inner();
        let asked = |place: usize| norms.as_ref().map_or(Asked::For(kind), |norms| Asked::Known(norms[place]));
        let mut reports = ParameterReports::nothing(self.len());
        // What can fail comes first.
        let mut on_gpus = Vec::new();
        for place in (0..self.len()).filter(|&place| self.parameters[place].is_on_gpu()) {
            on_gpus.extend(gradients[place].take().map(|gradient| (place, gradient, asked(place))));
        }
        let on_gpus = self.apply_on_gpus(on_gpus)?;
        self.flatten();
        if !self.take_flat(|place, _| gradients[place].as_ref()) {
            self.dissolve();
            self.flattened = true; // until something changes
        }
        self.step_flat(kind, &mut reports)?;
        for (place, gradient) in gradients.into_iter().enumerate() {
            let p = &self.parameters[place];
            match asked(place) {
                Asked::Known(norm) if p.flat => reports.set_norm(place, norm),
                Asked::For(_) if p.flat => {}
                norm => reports.set(place, self.apply_one(place, gradient, norm)?),
            }
        }
        on_gpus.into_iter().for_each(|(place, report)| reports.set(place, report));
        Ok(reports)
    }

    /// State of a parameter; `None` if it was never updated.
    pub fn state(&self, parameter: usize) -> Option<ParameterState> {
        let p = self.parameters.get(parameter)?;
        let in_flat = || {
            let state = |flat: &FlatGroup| each!(flat, flat => flat.state(flat.position(parameter)?));
            self.flats.iter().find_map(state)
        };
        let state = if p.flat { in_flat() } else { p.state.clone() };
        state.filter(ParameterState::is_used)
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
        self.dissolve();
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
        self.dissolve();
        self.groups = groups;
        for (p, state) in self.parameters.iter_mut().zip(states) {
            p.state = state;
            p.prepared = false;
        }
    }

    /// Forgets the state of every parameter, as if no step had been made. Parameters stay as they are.
    pub fn zero_state(&mut self) {
        self.dissolve();
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
        if !p.flat {
            p.prepare(rule)?;
        }
        Ok(Some(gradient))
    }

    fn apply_one(&mut self, place: usize, gradient: Option<Gradient>, norm: Asked) -> Result<ParameterReport> {
        let p = &mut self.parameters[place];
        // It may have been frozen since the check.
        let Some(gradient) = gradient.filter(|_| p.leaf.requires_grad()) else {
            let norm = match norm {
                Asked::Known(norm) => norm,
                Asked::For(_) => None,
            };
            return Ok(ParameterReport {
                updated: false,
                rows: None,
                norm,
                version: p.leaf.version(),
                in_place: false,
            });
        };
        if p.is_on_gpu() {
            let reports = self.apply_on_gpus(vec![(place, gradient, norm)])?;
            return Ok(reports.first().map_or(ParameterReport::NOTHING, |report| report.1));
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
        let elementwise = rule.is_elementwise();
        let panicked = |message| ErrorKind::RulePanic {
            optimizer: rule.name().into(),
            parameter: p.place,
            name: p.leaf.name().map(str::to_owned),
            message,
        };
        let update = |old: Option<&Data>, data: &mut Data| {
            let updated = match data.dtype() {
                DType::F32 => update::<f32>(
                    &|p, g, s| rule.update_f32(p, g, s),
                    elementwise,
                    (old, data),
                    &gradient,
                    (state, shape),
                    norm,
                )?,
                _ => update::<f64>(
                    &|p, g, s| rule.update_f64(p, g, s),
                    elementwise,
                    (old, data),
                    &gradient,
                    (state, shape),
                    norm,
                )?,
            };
            updated.map_err(|message| panicked(message).into())
        };
        let (norm, Updated { version, in_place }) = p.leaf.update_from(update)?;
        Ok(ParameterReport {
            updated: true,
            rows,
            norm,
            version,
            in_place,
        })
    }
}

/// The norm of a gradient before it is applied.
#[derive(Debug, Clone, Copy)]
pub(super) enum Asked {
    Known(Option<f64>),
    /// It is to be computed with the update.
    For(Norm),
}

impl Parameter {
    /// Its name, for errors.
    pub(super) fn name(&self) -> Option<String> {
        self.leaf.name().map(str::to_owned)
    }

    /// The gradient in the form that the rule takes, or why it doesn't.
    pub(super) fn take(&self, rule: &dyn ErasedRule, gradient: Gradient) -> Result<Gradient> {
        let refused = |why: String| {
            Error::from(ErrorKind::GradientKind {
                optimizer: rule.name().into(),
                parameter: self.place,
                name: self.name(),
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

    /// Whether it is to be updated on a GPU.
    fn is_on_gpu(&self) -> bool {
        self.leaf.device() != Device::Cpu && self.leaf.requires_grad()
    }
}

fn contiguous(mut sparse: RowSparse) -> RowSparse {
    sparse.values = sparse.values.to_contiguous();
    sparse
}

/// One update of a parameter's values, which are in `data` or still in `old`, by a gradient in the form that the rule takes. Returns the norm, or the
/// text of a panic in the rule.
pub(super) fn update<T: Float>(
    rule: &RuleOn<'_, T>,
    elementwise: bool,
    (old, data): (Option<&Data>, &mut Data),
    gradient: &Gradient,
    (state, shape): (&mut ParameterState, &[usize]),
    norm: Asked,
) -> Result<Result<Option<f64>, String>> {
    if !data.is_contiguous() {
        *data = data.to_contiguous();
    }
    let old = old.map(Data::to_contiguous);
    let (p, view) = (slice_mut(T::peek_mut(data)?)?, state.view(shape));
    let old = old.as_ref().map(|old| slice(T::peek(old)?)).transpose()?;
    let (norm, wanted) = match (norm, gradient) {
        (Asked::Known(norm), _) => (norm, None),
        (Asked::For(norm), Gradient::Sparse(_)) => (Some(norm.of(gradient)?), None),
        (Asked::For(norm), Gradient::Dense(_)) => (None, Some(norm)),
    };
    let updated = match gradient {
        Gradient::Dense(data) => {
            let sweep = Sweep {
                p,
                old,
                g: slice(T::peek(data)?)?,
                state: view,
                norm: wanted,
            };
            sweep.run(elementwise, |p, g, state| rule(p, Taken::Dense(g), state))
        }
        Gradient::Sparse(RowSparse { rows, values, .. }) => {
            let values = slice(T::peek(values)?)?;
            let mut view = view;
            if let Some(old) = old {
                p.copy_from_slice(old);
            }
            rule(p, Taken::Rows(Rows { rows, values }), &mut view).map(|()| (None, view.after()))
        }
    };
    Ok(updated.map(|(swept, after): (Option<f64>, After)| {
        state.settle(&after);
        norm.or(swept)
    }))
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

//! One optimizer on one leaf.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::{InBackward, gathered, lock};
use crate::optim::clip::clamped;
use crate::optim::{Optimizer, OptimizerSpec, ParameterReport, ParameterState};
use crate::tensor::{Gradient, Leaf, Tensor};
use crate::{ErrorKind, Result};

/// Is told of each update.
pub(crate) type Observer = Arc<dyn Fn(&ParameterReport) + Send + Sync>;

/// An optimizer that is attached to a leaf. The leaf keeps it, so it doesn't keep the leaf.
pub(crate) struct Attached {
    id: u64,
    /// Of the parameter in the list that it was attached with.
    place: usize,
    label: String,
    options: InBackward,
    observer: Option<Observer>,
    progress: Mutex<Progress>,
}

pub(super) struct Progress {
    spec: OptimizerSpec,
    state: Option<ParameterState>,
    /// Sum of the gradients since the last update, of so many backwards.
    pending: Option<Gradient>,
    backwards: u32,
    last: Option<Gradient>,
}

impl Attached {
    /// An optimizer for a parameter, and its leaf.
    ///
    /// # Errors
    /// [`ErrorKind::NotALeaf`], [`ErrorKind::Argument`] if the rule doesn't take its shape.
    pub(super) fn new(
        spec: &OptimizerSpec,
        options: &InBackward,
        (place, tensor): (usize, &Tensor),
        observer: Option<Observer>,
    ) -> Result<(Arc<Leaf>, Arc<Attached>)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = tensor.leaf().and_then(|leaf| leaf.name());
        let label = name.map_or(format!("parameter {place}"), |name| format!("parameter {place} (`{name}`)"));
        let refused = |why: &str| ErrorKind::NotALeaf {
            what: format!("{} in backward: {label}", spec.name()),
            why: why.into(),
        };
        let leaf = match tensor.leaf() {
            Some(leaf) if tensor.requires_grad() => Arc::clone(leaf),
            Some(_) => return Err(refused("it is frozen; unfreeze it first").into()),
            None if tensor.requires_grad() => return Err(refused("it was computed; attach to what it was computed from").into()),
            None => return Err(refused("it requires no gradient; make it one with `parameter`").into()),
        };
        let shape = tensor.shape();
        if let Err(why) = spec.rule().takes_shape(&shape) {
            return Err(ErrorKind::Argument {
                op: format!("{} in backward", spec.name()),
                what: format!("{label} of shape {shape:?}: {why}"),
            }
            .into());
        }
        let attached = Attached {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            place,
            label,
            options: options.clone(),
            observer,
            progress: Mutex::new(Progress {
                spec: spec.clone(),
                state: None,
                pending: None,
                backwards: 0,
                last: None,
            }),
        };
        Ok((leaf, Arc::new(attached)))
    }

    /// A number that no other of this process has.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn options(&self) -> &InBackward {
        &self.options
    }

    pub(crate) fn spec(&self) -> OptimizerSpec {
        lock(&self.progress).spec.clone()
    }

    /// The options after a change.
    pub(super) fn changed(&self, options: &Value) -> Result<OptimizerSpec> {
        lock(&self.progress).spec.with_options(options)
    }

    pub(super) fn set_spec(&self, spec: OptimizerSpec) {
        lock(&self.progress).spec = spec;
    }

    /// The state; none if it was never used.
    pub(crate) fn state(&self) -> Option<ParameterState> {
        lock(&self.progress).state.clone().filter(ParameterState::is_used)
    }

    pub(crate) fn load_state(&self, leaf: &Leaf, state: ParameterState) -> Result<()> {
        let mut progress = lock(&self.progress);
        let (rule, spec) = (progress.spec.rule(), leaf.spec());
        state.check("load_state", rule.scalars(), &rule.arrays(spec.shape()), spec.dtype)?;
        progress.state = Some(state);
        Ok(())
    }

    /// What a checkpoint holds: the state, and what was gathered for the next update. `None` if it was never used.
    pub(super) fn saved(&self, leaf: &Leaf) -> Option<ParameterState> {
        let progress = lock(&self.progress);
        let state = progress.state.as_ref().filter(|state| state.is_used());
        let state = state.map(|state| state.kept(&progress.spec.rule().arrays(leaf.spec().shape())));
        let mut saved = state.unwrap_or_default();
        if progress.backwards > 0 {
            saved = gathered::join(&saved, progress.backwards, progress.pending.as_ref());
        }
        (!saved.is_empty()).then_some(saved)
    }

    /// What [`saved`](Self::saved) gave, checked against these options.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for a state that the rule doesn't keep, or a gradient that isn't the parameter's.
    pub(super) fn restored(&self, leaf: &Leaf, options: OptimizerSpec, saved: Option<ParameterState>) -> Result<Progress> {
        let (state, backwards, pending) = match saved {
            Some(saved) => gathered::split(saved, leaf.spec().shape())?,
            None => (None, 0, None),
        };
        let (rule, spec) = (options.rule(), leaf.spec());
        if let Some(state) = &state {
            state.check("restore", rule.scalars(), &rule.arrays(spec.shape()), spec.dtype)?;
        }
        if let Some(gradient) = &pending {
            gradient.check("restore", spec)?;
        }
        Ok(Progress {
            spec: options,
            state,
            pending,
            backwards,
            last: None,
        })
    }

    pub(super) fn replace(&self, progress: Progress) {
        *lock(&self.progress) = progress;
    }

    /// The gradient of the last update, if it is to be kept.
    pub(crate) fn last(&self) -> Option<Gradient> {
        lock(&self.progress).last.clone()
    }

    /// Takes the gradient of one backward: updates, or adds to what is gathered for the next update.
    ///
    /// # Errors
    /// [`ErrorKind::InBackward`]; the gradient is lost then, and what was gathered.
    pub(super) fn take(&self, tensor: &Tensor, leaf: &Arc<Leaf>, gradient: Gradient) -> Result<Option<ParameterReport>> {
        let mut progress = lock(&self.progress);
        let optimizer = progress.spec.name();
        let updated = progress.take((self.place, tensor), leaf, gradient, &self.options);
        drop(progress);
        if let (Ok(Some(report)), Some(observer)) = (&updated, &self.observer) {
            observer(report);
        }
        updated.map_err(|error| {
            ErrorKind::InBackward {
                optimizer: optimizer.into(),
                parameter: self.label.clone(),
                updated: Vec::new(),
                source: error,
            }
            .into()
        })
    }
}

impl Progress {
    fn take(
        &mut self,
        (place, tensor): (usize, &Tensor),
        leaf: &Arc<Leaf>,
        gradient: Gradient,
        options: &InBackward,
    ) -> Result<Option<ParameterReport>> {
        // Before it is added to what was gathered.
        gradient.check("gradient", leaf.spec())?;
        let mut gradient = match self.pending.take() {
            Some(mut sum) => {
                // If that fails what was gathered is lost, and so is its count.
                let gathered = std::mem::take(&mut self.backwards);
                sum.accumulate(gradient)?;
                self.backwards = gathered;
                sum
            }
            None => gradient,
        };
        self.backwards += 1;
        if self.backwards < options.every {
            self.pending = Some(gradient);
            return Ok(None);
        }
        self.backwards = 0;
        self.last = None;
        if let Some(limit) = options.clip_value {
            // Rows that occur twice are limited as their sum.
            gradient = clamped(if gradient.is_sparse() { gradient.coalesce()? } else { gradient }, limit)?;
        }
        if options.keep_gradient {
            self.last = Some(gradient.clone());
        }
        let mut optimizer = Optimizer::resume(self.spec.clone(), (place, tensor.clone()), Arc::clone(leaf), self.state.take());
        let report = optimizer.step_one(0, gradient);
        self.state = optimizer.into_state();
        report.map(Some)
    }
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached")
            .field("id", &self.id)
            .field("parameter", &self.label)
            .field("spec", &self.spec())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

//! The small parameters of an optimizer, which it updates together: which they are, and a step of them.

use std::sync::Arc;

use super::flat::{self, Candidate, FlatGroup, each};
use super::optimizer::{Optimizer, Parameter};
use super::report::ParameterReports;
use super::{Form, Norm};
use crate::tensor::{DType, Device, Gradient, Leaf};
use crate::{ErrorKind, Result};

impl Optimizer {
    /// One step of an optimizer all of whose parameters are small, with gradients that are lent by their leaves' ids: the quick way of [`check`](Self::check) and
    /// [`apply`](Self::apply). `None` if it isn't for these parameters or gradients; nothing is changed then.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub(crate) fn step_lent<'g>(
        &mut self,
        mut gradient: impl FnMut(u64) -> Option<&'g Gradient>,
        norm: Norm,
    ) -> Result<Option<ParameterReports>> {
        self.flatten();
        let in_flats: usize = self.flats.iter().map(|flat| each!(flat, flat => flat.len())).sum();
        if in_flats < self.len() || !self.take_flat(|_, leaf| gradient(leaf.id())) {
            return Ok(None);
        }
        let mut reports = ParameterReports::nothing(self.len());
        self.step_flat(norm, &mut reports)?;
        Ok(Some(reports))
    }

    /// Whether some parameters are members of flat groups.
    #[cfg(test)]
    pub(super) fn has_flat(&self) -> bool {
        !self.flats.is_empty()
    }

    /// Makes flat groups of small parameters, if that wasn't tried before.
    pub(super) fn flatten(&mut self) {
        if std::mem::replace(&mut self.flattened, true) {
            return;
        }
        for (group, spec) in self.groups.iter().enumerate() {
            let rule = spec.rule();
            if !rule.is_elementwise() || !matches!(rule.form(false), Ok(Form::Dense)) {
                continue;
            }
            for dtype in [DType::F32, DType::F64] {
                let small = |p: &Parameter| {
                    p.group == group && p.dtype == dtype && !p.flat && p.tensor.len() <= flat::SMALL && p.leaf.device() == Device::Cpu
                };
                if !self.parameters.iter().any(&small) {
                    continue;
                }
                let mut candidates = Vec::new();
                for (place, p) in self.parameters.iter_mut().enumerate().filter(|(_, p)| small(p)) {
                    // Here, where it can't fail.
                    let _ = p.prepare(rule);
                    candidates.push(Candidate {
                        place,
                        leaf: Arc::clone(&p.leaf),
                        state: p.state.take().unwrap_or_default(),
                    });
                }
                let made = FlatGroup::of(group, dtype, rule, &mut candidates);
                for candidate in candidates {
                    self.parameters[candidate.place].state = Some(candidate.state); // none was made of them
                }
                let Some(made) = made else { continue };
                each!(&made, flat => flat.places().for_each(|place| self.parameters[place].flat = true));
                self.flats.push(made);
            }
        }
    }

    /// Gives each member of a flat group its state back.
    pub(super) fn dissolve(&mut self) {
        for flat in self.flats.drain(..) {
            for (place, state) in each!(&flat, flat => flat.states().collect::<Vec<_>>()) {
                let p = &mut self.parameters[place];
                (p.state, p.flat, p.prepared) = (Some(state), false, false);
            }
        }
        self.flattened = false;
    }

    /// Takes gradients of members of flat groups; `false` if one can't be.
    pub(super) fn take_flat<'g>(&mut self, mut gradient: impl FnMut(usize, &Leaf) -> Option<&'g Gradient>) -> bool {
        self.flats.iter_mut().all(|flat| each!(flat, flat => flat.take(&mut gradient)))
    }

    pub(super) fn step_flat(&mut self, norm: Norm, reports: &mut ParameterReports) -> Result<()> {
        let Self {
            flats, groups, parameters, ..
        } = self;
        for flat in flats {
            let (rule, stepped) = match flat {
                FlatGroup::F32(flat) => {
                    let rule = groups[flat.group].rule();
                    (rule, flat.step(&|p, g, s| rule.update_f32(p, g, s), norm, reports)?)
                }
                FlatGroup::F64(flat) => {
                    let rule = groups[flat.group].rule();
                    (rule, flat.step(&|p, g, s| rule.update_f64(p, g, s), norm, reports)?)
                }
            };
            stepped.map_err(|(place, message)| ErrorKind::RulePanic {
                optimizer: rule.name().into(),
                parameter: parameters[place].place,
                name: parameters[place].name(),
                message,
            })?;
        }
        Ok(())
    }
}

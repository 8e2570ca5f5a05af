//! What an optimizer keeps for each parameter.

use super::{Float, StateArray};
use crate::tensor::{DType, Data, Device};
use crate::{ErrorKind, Result};

/// One parameter's state: numbers and arrays by name, under torch's names.
///
/// Cloning is cheap: arrays are shared until one side writes.
#[derive(Debug, Clone, Default)]
pub struct ParameterState {
    scalars: Vec<(String, f64)>,
    arrays: Vec<Named>,
    /// Whether some update has used it.
    used: bool,
}

#[derive(Debug, Clone)]
struct Named {
    name: String,
    data: Data,
    /// Allocated, but no update has used it yet.
    fresh: bool,
}

impl ParameterState {
    /// A state from its parts, to be checked and loaded by `Optimizer::load_state`.
    pub fn from_parts(scalars: Vec<(String, f64)>, arrays: Vec<(String, Data)>) -> Self {
        Self {
            scalars,
            arrays: arrays.into_iter().map(|(name, data)| Named { name, data, fresh: false }).collect(),
            used: true,
        }
    }

    /// The numbers, such as `step`.
    pub fn scalars(&self) -> impl Iterator<Item = (&str, f64)> {
        self.scalars.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// The arrays, such as `exp_avg`, that some update has used.
    pub fn arrays(&self) -> impl Iterator<Item = (&str, &Data)> {
        self.arrays.iter().filter(|a| !a.fresh).map(|a| (a.name.as_str(), &a.data))
    }

    /// The number of this name.
    pub fn scalar(&self, name: &str) -> Option<f64> {
        self.scalars().find(|(n, _)| *n == name).map(|(_, value)| value)
    }

    /// The array of this name, if some update has used it.
    pub fn array(&self, name: &str) -> Option<&Data> {
        self.arrays().find(|(n, _)| *n == name).map(|(_, data)| data)
    }

    /// Whether it has neither numbers nor arrays.
    pub fn is_empty(&self) -> bool {
        self.scalars.is_empty() && self.arrays().next().is_none()
    }

    pub(super) fn is_used(&self) -> bool {
        self.used
    }

    /// Adds what a rule keeps and isn't there yet, and brings all to a device. After it an update allocates no state.
    pub(super) fn prepare(&mut self, scalars: &[(&str, f64)], arrays: Vec<StateArray>, (dtype, device): (DType, Device)) -> Result<()> {
        for &(name, value) in scalars {
            if !self.scalars.iter().any(|(n, _)| n == name) {
                self.scalars.push((name.into(), value));
            }
        }
        for array in arrays {
            if !self.arrays.iter().any(|a| a.name == array.name) {
                self.arrays.push(Named {
                    name: array.name.into(),
                    data: Data::filled_on(device, dtype, &array.shape, array.fill)?,
                    fresh: true,
                });
            }
        }
        for array in self.arrays.iter_mut().filter(|array| array.data.device() != device) {
            array.data = array.data.to(device)?;
        }
        Ok(())
    }

    /// The array of this name, also if it is fresh.
    pub(super) fn array_mut(&mut self, name: &str) -> Option<&mut Data> {
        self.arrays.iter_mut().find(|a| a.name == name).map(|a| &mut a.data)
    }

    /// As `array_mut`, to look at.
    pub(super) fn any_array(&self, name: &str) -> Option<&Data> {
        self.arrays.iter().find(|a| a.name == name).map(|a| &a.data)
    }

    /// An update has used these arrays.
    pub(super) fn mark_used(&mut self, names: &[&str]) {
        self.used = true;
        self.arrays
            .iter_mut()
            .filter(|a| names.contains(&a.name.as_str()))
            .for_each(|a| a.fresh = false);
    }

    /// The numbers, to be put back if an update fails.
    pub(super) fn numbers(&self) -> (bool, Vec<(String, f64)>) {
        (self.used, self.scalars.clone())
    }

    pub(super) fn set_numbers(&mut self, (used, numbers): (bool, Vec<(String, f64)>)) {
        (self.used, self.scalars) = (used, numbers);
    }

    /// The same state with its arrays on a device.
    pub(super) fn on(&self, device: Device) -> Result<Self> {
        let mut moved = self.clone();
        for array in &mut moved.arrays {
            array.data = array.data.to(device)?;
        }
        Ok(moved)
    }

    /// Without the arrays that a rule no longer keeps under its options.
    pub(super) fn kept(&self, arrays: &[StateArray]) -> Self {
        let mut kept = self.clone();
        kept.arrays.retain(|a| arrays.iter().any(|known| known.name == a.name));
        kept
    }

    /// Refuses names, dtypes and shapes that the rule doesn't keep.
    pub(super) fn check(&self, op: &str, scalars: &[(&str, f64)], arrays: &[StateArray], dtype: DType) -> Result<()> {
        let argument = |what: String| Err(ErrorKind::Argument { op: op.into(), what }.into());
        if let Some((name, value)) = self.scalars.iter().find(|(_, value)| value.is_nan()) {
            return argument(format!("`{name}` is {value}"));
        }
        for (name, _) in &self.scalars {
            if !scalars.iter().any(|(n, _)| n == name) {
                return argument(format!("no number `{name}` in the state of this rule under these options"));
            }
        }
        for Named { name, data, .. } in &self.arrays {
            match arrays.iter().find(|a| a.name == name) {
                None => return argument(format!("no array `{name}` in the state of this rule under these options")),
                Some(a) if a.shape != data.shape() || dtype != data.dtype() => {
                    return argument(format!(
                        "`{name}` is {} {:?} and must be {dtype} {:?}",
                        data.dtype(),
                        data.shape(),
                        a.shape
                    ));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}

/// A rule's view of one parameter's state during one step.
#[derive(Debug)]
pub struct StateView<'a, T> {
    state: &'a mut ParameterState,
    shape: &'a [usize],
    element: std::marker::PhantomData<T>,
}

impl<'a, T: Float> StateView<'a, T> {
    pub(super) fn new(state: &'a mut ParameterState, shape: &'a [usize]) -> Self {
        state.used = true;
        Self {
            state,
            shape,
            element: std::marker::PhantomData,
        }
    }

    /// The parameter's shape.
    pub fn shape(&self) -> &[usize] {
        self.shape
    }

    /// The number of this name.
    ///
    /// # Panics
    /// If the rule doesn't declare it in [`Rule::SCALARS`](super::Rule::SCALARS).
    pub fn scalar(&mut self, name: &str) -> &mut f64 {
        match self.state.scalars.iter_mut().find(|(n, _)| n == name) {
            Some((_, value)) => value,
            None => panic!("the rule doesn't declare the number `{name}`"),
        }
    }

    /// Adds one to `step`, and gives the number of this step, from 1.
    ///
    /// # Panics
    /// If the rule doesn't declare `step` in [`Rule::SCALARS`](super::Rule::SCALARS).
    pub fn count(&mut self) -> u64 {
        let step = self.scalar("step");
        *step += 1.0;
        *step as u64
    }

    /// Whether no update has used this array yet.
    pub fn is_fresh(&self, name: &str) -> bool {
        self.state.arrays.iter().any(|a| a.name == name && a.fresh)
    }

    /// The elements of these arrays, in row-major order.
    ///
    /// # Panics
    /// If the rule doesn't declare one of them in [`Rule::arrays`](super::Rule::arrays), or if one is named twice.
    pub fn arrays<const N: usize>(&mut self, names: [&str; N]) -> [&mut [T]; N] {
        let mut found = [const { None }; N];
        for array in &mut self.state.arrays {
            if let Some(place) = names.iter().position(|name| *name == array.name) {
                array.fresh = false;
                if !array.data.is_contiguous() {
                    array.data = array.data.to_contiguous();
                }
                found[place] = T::peek_mut(&mut array.data).ok().and_then(|a| a.as_slice_mut());
            }
        }
        let mut names = names.iter();
        found.map(|slice| {
            let name = names.next();
            slice.unwrap_or_else(|| panic!("the rule doesn't declare the array {name:?}"))
        })
    }
}

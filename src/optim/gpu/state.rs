//! State of parameters on GPUs.

use super::super::state::ParameterState;
use super::super::view::StateView;
use super::super::{Float, Step};
use crate::Result;
use crate::tensor::{Data, Device};

/// The numbers of a state, to be put back if an update fails.
#[derive(Debug, Clone)]
pub(super) struct Before {
    used: bool,
    scalars: Vec<(String, f64)>,
}

impl ParameterState {
    /// The numbers of the next update, which counts as made; and how it was before.
    pub(super) fn count_step<T: Float>(
        &mut self,
        shape: &[usize],
        step: impl FnOnce(&mut StateView<'_, T>) -> Option<Step>,
    ) -> (Before, Option<Step>) {
        let before = Before {
            used: self.used,
            scalars: self.scalars.clone(),
        };
        // Arrays are elsewhere; their names and whether they were used are all that is asked for.
        let arrays = self.arrays.iter().map(|a| (a.name.as_str(), <&mut [T]>::default(), a.fresh));
        let scalars = self.scalars.iter().map(|(name, value)| (name.as_str(), *value));
        let mut view = StateView::of(shape, scalars, arrays);
        let step = step(&mut view);
        let after = view.after();
        drop(view);
        self.scalars
            .iter_mut()
            .zip(after.scalars)
            .for_each(|(scalar, value)| scalar.1 = value);
        (before, step)
    }

    /// There was no update after all.
    pub(super) fn restore(&mut self, Before { used, scalars }: Before) {
        (self.used, self.scalars) = (used, scalars);
    }

    /// The array of this name, used or not.
    pub(super) fn array_of(&self, name: &str) -> Option<&Data> {
        self.arrays.iter().find(|a| a.name == name).map(|a| &a.data)
    }

    /// An update has used the array of this name, which is now what `data` makes of its shape.
    pub(super) fn put_used(&mut self, name: &str, data: impl FnOnce(&[usize]) -> Data) {
        if let Some(array) = self.arrays.iter_mut().find(|a| a.name == name) {
            (array.data, array.fresh) = (data(array.data.shape()), false);
        }
    }

    /// The same state with its arrays on a device.
    pub(super) fn on(&self, device: Device) -> Result<Self> {
        let mut moved = self.clone();
        for array in &mut moved.arrays {
            array.data = array.data.to(device)?;
        }
        Ok(moved)
    }
}

//! What an optimizer keeps for each parameter.

use ndarray::{Array1, ArrayD, s};

use super::arithmetic::PIECE;
use super::view::{After, StateView};
use super::{Float, StateArray};
use crate::tensor::{DType, Data, Device};
use crate::{ErrorKind, Result};

/// One parameter's state: numbers and arrays by name, under torch's names.
///
/// Cloning is cheap: arrays are shared until one side writes.
#[derive(Debug, Clone, Default)]
pub struct ParameterState {
    pub(super) scalars: Vec<(String, f64)>,
    pub(super) arrays: Vec<Named>,
    /// Whether some update has used it.
    pub(super) used: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) data: Data,
    /// Allocated, but no update has used it yet.
    pub(super) fresh: bool,
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

    /// The elements of an array, in row-major order, and whether no update has used it yet.
    pub(super) fn elements<T: Float>(&self, name: &str) -> Option<(&[T], bool)> {
        let array = self.arrays.iter().find(|a| a.name == name)?;
        Some((T::peek(&array.data).ok()?.as_slice()?, array.fresh))
    }

    /// The names of all arrays, used or not.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.arrays.iter().map(|a| a.name.as_str())
    }

    /// A state from copies of its parts; all arrays have this shape.
    pub(super) fn of_elements<'a, T: Float>(
        scalars: impl Iterator<Item = (&'a str, f64)>,
        arrays: impl Iterator<Item = (&'a str, &'a [T], bool)>,
        shape: &[usize],
        used: bool,
    ) -> Option<Self> {
        let array = |(name, elements, fresh): (&str, &[T], bool)| {
            let array = ArrayD::from_shape_vec(shape, elements.to_vec()).ok()?;
            Some(Named {
                name: name.into(),
                data: T::wrap(array.into_shared()),
                fresh,
            })
        };
        Some(Self {
            scalars: scalars.map(|(name, value)| (name.into(), value)).collect(),
            arrays: arrays.map(array).collect::<Option<_>>()?,
            used,
        })
    }

    pub(super) fn is_used(&self) -> bool {
        self.used
    }

    /// What a rule sees of it in an update. [`settle`](Self::settle) is the way back.
    pub(super) fn view<'a, T: Float>(&'a mut self, shape: &'a [usize]) -> StateView<'a, T> {
        let Self { scalars, arrays, .. } = self;
        let arrays = arrays.iter_mut().filter_map(|array| {
            if !array.data.is_contiguous() {
                array.data = array.data.to_contiguous();
            }
            let elements = T::peek_mut(&mut array.data).ok()?.as_slice_mut()?;
            Some((array.name.as_str(), elements, array.fresh))
        });
        StateView::of(shape, scalars.iter().map(|(name, value)| (name.as_str(), *value)), arrays)
    }

    /// Takes over what an update did to its numbers, and which arrays it used.
    pub(super) fn settle(&mut self, after: &After) {
        self.used = true;
        self.scalars
            .iter_mut()
            .zip(&after.scalars)
            .for_each(|(scalar, &value)| scalar.1 = value);
        self.arrays
            .iter_mut()
            .zip(&after.fresh)
            .for_each(|(array, &fresh)| array.fresh = fresh);
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
                let data = match device {
                    Device::Cpu => filled(dtype, &array, self.arrays.len()),
                    _ => Data::filled_on(device, dtype, &array.shape, array.fill)?,
                };
                self.arrays.push(Named {
                    name: array.name.into(),
                    data,
                    fresh: true,
                });
            }
        }
        for array in self.arrays.iter_mut().filter(|array| array.data.device() != device) {
            array.data = array.data.to(device)?;
        }
        Ok(())
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

/// Arrays that are large begin so many bytes apart within a page, one after the other: a load from the place of an earlier store, pages aside, would
/// wait for it.
const APART: usize = 1536;

/// The array of this place in the state.
fn filled(dtype: DType, array: &StateArray, place: usize) -> Data {
    fn filled<T: Float>(array: &StateArray, place: usize) -> Data {
        let (len, shape) = (array.shape.iter().product::<usize>(), array.shape.as_slice());
        let skipped = if len < PIECE { 0 } else { (place + 1) * APART / size_of::<T>() };
        let all = Array1::from_elem(len + skipped, T::of(array.fill)).slice_move(s![skipped..]);
        let shaped = all.into_shape_with_order(shape);
        T::wrap(shaped.unwrap_or_else(|_| ArrayD::from_elem(shape, T::of(array.fill))).into_shared())
    }
    match dtype {
        DType::F32 => filled::<f32>(array, place),
        _ => filled::<f64>(array, place),
    }
}

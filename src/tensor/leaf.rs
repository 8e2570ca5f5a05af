//! Leaves: cells whose values change between uses of a graph, and which gather gradients.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::graph::{self, Edge, Node};
use super::hooks::{GradientHook, Hooks, PostAccumulateHook};
use super::{Data, Device, Element, Gradient, HookHandle, Spec, Tensor, shape};
use crate::{ErrorKind, Result};

/// A cell that holds the current values of a parameter, their version, and the gradient gathered for them.
///
/// Graphs, fetches and snapshots share the storage they read. An update writes in place when nobody shares it, else it
/// swaps in a new storage, so nobody ever sees values change under it.
///
/// ```
/// use rankgrad::tensor::{Data, Element, Tensor};
/// # fn main() -> rankgrad::Result<()> {
/// let w = Tensor::from_vec(vec![1.0, 2.0], 2)?.parameter()?;
/// let leaf = w.leaf().expect("a parameter is a leaf");
/// let double = |data: &mut Data| {
///     f64::peek_mut(data)?.mapv_inplace(|x| 2.0 * x);
///     Ok(())
/// };
/// let ((), updated) = leaf.update(double)?;
/// assert_eq!((updated.version, updated.in_place), (1, true));
/// let before = w.data();
/// assert!(!leaf.update(double)?.1.in_place);
/// assert_eq!(before.view::<f64>()?[1], 4.0);
/// assert_eq!(w.to_vec::<f64>()?, [4.0, 8.0]);
/// # Ok(())
/// # }
/// ```
pub struct Leaf {
    id: u64,
    spec: Spec,
    device: Device,
    parameter: bool,
    requires_grad: AtomicBool,
    name: OnceLock<String>,
    key: graph::Key,
    cell: Mutex<Cell>,
    grad: Mutex<Option<Gradient>>,
    pub(crate) hooks: Hooks<GradientHook>,
    post_accumulate: Hooks<PostAccumulateHook>,
    attachment: OnceLock<Box<dyn Any + Send + Sync>>,
}

struct Cell {
    data: Data,
    version: u64,
    /// How often its values were changed; a version may come back with a checkpoint, this doesn't.
    changes: u64,
}

impl Cell {
    /// There are new values.
    fn changed(&mut self) {
        self.version += 1;
        self.changes += 1;
    }
}

/// A leaf's values, locked.
pub(crate) struct Locked<'a>(MutexGuard<'a, Cell>);

impl Locked<'_> {
    pub(crate) fn version(&self) -> u64 {
        self.0.version
    }

    /// A number that stays the same as long as the values do.
    pub(crate) fn changes(&self) -> u64 {
        self.0.changes
    }

    /// Copies the values, which are of this type and number.
    pub(crate) fn read<T: Element>(&self, into: &mut [T]) -> Result<()> {
        let values = T::peek(&self.0.data)?;
        match values.as_slice() {
            Some(values) => into.copy_from_slice(values),
            None => into.iter_mut().zip(values).for_each(|(to, &value)| *to = value),
        }
        Ok(())
    }

    /// Replaces the values, which are of this type and number: in place if nobody else holds them.
    pub(crate) fn write<T: Element>(&mut self, values: &[T]) -> Result<Updated> {
        let cell = &mut *self.0;
        let old = T::peek_mut(&mut cell.data)?;
        let before = old.as_ptr();
        // Either way ndarray gives it a storage of its own first.
        match old.as_slice_mut() {
            Some(old) => old.copy_from_slice(values),
            None => old.iter_mut().zip(values).for_each(|(old, &value)| *old = value),
        }
        let in_place = old.as_ptr() == before;
        cell.changed();
        Ok(Updated {
            version: cell.version,
            in_place,
        })
    }
}

/// What an update of a leaf did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Updated {
    /// The leaf's version after it.
    pub version: u64,
    /// Whether the storage was written in place; else new storage was swapped in.
    pub in_place: bool,
}

/// An update of a leaf under way. Dropping it changes nothing.
#[cfg(feature = "cuda")]
pub(crate) struct LeafUpdate<'a>(MutexGuard<'a, Cell>);

#[cfg(feature = "cuda")]
impl LeafUpdate<'_> {
    pub(crate) fn data(&self) -> &Data {
        &self.0.data
    }

    /// Puts values of the leaf's dtype and shape in place, or says that those there were updated.
    pub(crate) fn finish(mut self, fresh: Option<Data>) -> Updated {
        let in_place = fresh.is_none();
        if let Some(data) = fresh {
            self.0.data = data;
        }
        self.0.changed();
        Updated {
            version: self.0.version,
            in_place,
        }
    }
}

impl Leaf {
    pub(crate) fn new(data: Data, parameter: bool) -> Self {
        let key = graph::Key::next();
        Leaf {
            id: key.seq,
            spec: Spec::of(&data),
            device: data.device(),
            parameter,
            requires_grad: AtomicBool::new(true),
            name: OnceLock::new(),
            key,
            cell: Mutex::new(Cell {
                data,
                version: 0,
                changes: 0,
            }),
            grad: Mutex::new(None),
            hooks: Hooks::default(),
            post_accumulate: Hooks::default(),
            attachment: OnceLock::new(),
        }
    }

    fn cell(&self) -> MutexGuard<'_, Cell> {
        self.cell.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that no other leaf of this process has.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Number of updates so far.
    pub fn version(&self) -> u64 {
        self.cell().version
    }

    /// Whether it was made as a parameter.
    pub fn is_parameter(&self) -> bool {
        self.parameter
    }

    /// The name given to it, if any.
    pub fn name(&self) -> Option<&str> {
        self.name.get().map(String::as_str)
    }

    /// Names the leaf for reports and errors. A name is given once; later ones are ignored.
    pub fn set_name(&self, name: impl Into<String>) {
        let _ = self.name.set(name.into());
    }

    /// What to call it in reports and errors: its name, or its number, dtype and shape.
    pub(crate) fn label(&self) -> String {
        match self.name() {
            Some(name) => format!("`{name}`"),
            None => format!("leaf {} ({} {:?})", self.id, self.spec.dtype, self.spec.shape()),
        }
    }

    /// What an upper room keeps with this leaf, for as long as it lives; made on first use. There is room for one type.
    pub(crate) fn attachment<T: Any + Default + Send + Sync>(&self) -> Option<&T> {
        self.attachment.get_or_init(|| Box::new(T::default())).downcast_ref()
    }

    /// Whether gradients are gathered for it.
    pub fn requires_grad(&self) -> bool {
        self.requires_grad.load(Ordering::Relaxed)
    }

    /// Sets whether graphs that are recorded from now on lead to it.
    pub fn set_requires_grad(&self, requires_grad: bool) {
        self.requires_grad.store(requires_grad, Ordering::Relaxed);
    }

    /// Dtype and shape, which never change.
    pub(crate) fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Where the values lie, which never changes.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Its shape, which never changes.
    pub(crate) fn shape(&self) -> &[usize] {
        self.spec.shape()
    }

    pub(crate) fn key(&self) -> &graph::Key {
        &self.key
    }

    /// The current values. They share the storage; a later update doesn't change them.
    ///
    /// Blocks while an update is under way.
    pub fn data(&self) -> Data {
        self.cell().data.clone()
    }

    pub(crate) fn into_data(self) -> Data {
        self.cell.into_inner().unwrap_or_else(PoisonError::into_inner).data
    }

    /// The current values and their version, from one moment.
    ///
    /// Blocks while an update is under way.
    pub fn versioned(&self) -> (Data, u64) {
        let cell = self.cell();
        (cell.data.clone(), cell.version)
    }

    /// Replaces the values and returns the new version. Values from another device are copied to the leaf's.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] and [`ErrorKind::Shape`] when they aren't those of the leaf; nothing changed then.
    pub fn set_data(&self, data: Data) -> Result<u64> {
        let found = Spec::of(&data);
        if found.dtype != self.spec.dtype {
            return Err(ErrorKind::DType {
                op: "set_data".into(),
                expected: self.spec.dtype.to_string(),
                found: found.dtype.to_string(),
            }
            .into());
        }
        if found != self.spec {
            return Err(shape::mismatch(
                "set_data",
                self.spec.shape(),
                found.shape(),
                "a leaf keeps its shape",
            ));
        }
        let data = data.to(self.device)?;
        let mut cell = self.cell();
        cell.data = data;
        cell.changed();
        Ok(cell.version)
    }

    /// Puts values, which must be of its dtype and shape, and a version in place, as a checkpoint had them.
    pub(crate) fn restore(&self, data: Data, version: u64, requires_grad: bool) {
        debug_assert!(Spec::of(&data) == self.spec, "checked before");
        let mut cell = self.cell();
        cell.data = data;
        cell.changed();
        cell.version = version;
        drop(cell);
        self.set_requires_grad(requires_grad);
    }

    /// Runs `f` on the values under the leaf's lock, in place if nobody else shares the storage, else on a copy that is
    /// then swapped in. The version grows by one if `f` returns `Ok`, and if it fails in place, where values may have changed.
    ///
    /// # Errors
    /// What `f` returns. Out of place, nothing changed then; in place, what `f` wrote before it failed stays.
    /// [`ErrorKind::Shape`] when `f` put values of another dtype or shape there, which are dropped (in place, zeros are left).
    pub fn update<R>(&self, f: impl FnOnce(&mut Data) -> Result<R>) -> Result<(R, Updated)> {
        self.rewrite(Data::deep_copy, |_, data| f(data))
    }

    /// As [`update`](Self::update), but out of place `f` gets the old values beside zeros of their shape, so that it copies them as it goes.
    pub(crate) fn update_from<R>(&self, f: impl FnOnce(Option<&Data>, &mut Data) -> Result<R>) -> Result<(R, Updated)> {
        self.rewrite(|old| Data::zeros(old.dtype(), old.shape()), f)
    }

    fn rewrite<R>(&self, fresh: impl FnOnce(&Data) -> Data, f: impl FnOnce(Option<&Data>, &mut Data) -> Result<R>) -> Result<(R, Updated)> {
        let mut cell = self.cell();
        let in_place = cell.data.is_unique();
        let wrong = |data: &Data| shape::mismatch("update", self.spec.shape(), data.shape(), "a leaf keeps its dtype and shape");
        let result = if in_place {
            let result = f(None, &mut cell.data);
            if Spec::of(&cell.data) != self.spec {
                let error = wrong(&cell.data);
                cell.data = Data::zeros(self.spec.dtype, self.spec.shape());
                cell.changed();
                return Err(error);
            }
            result.inspect_err(|_| cell.changed())?
        } else {
            let mut fresh = fresh(&cell.data);
            let result = f(Some(&cell.data), &mut fresh)?;
            if Spec::of(&fresh) != self.spec {
                return Err(wrong(&fresh));
            }
            cell.data = fresh;
            result
        };
        cell.changed();
        Ok((
            result,
            Updated {
                version: cell.version,
                in_place,
            },
        ))
    }

    /// Holds the values of a leaf for an update that [`LeafUpdate::finish`] ends; nobody sees them meanwhile.
    #[cfg(feature = "cuda")]
    pub(crate) fn begin_update(&self) -> LeafUpdate<'_> {
        LeafUpdate(self.cell())
    }

    /// Its values, for a while alone. Who locks several leaves does so in ascending order of their ids.
    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked(self.cell())
    }

    /// The gradient gathered so far.
    pub fn grad(&self) -> Option<Gradient> {
        self.grad.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The gradient gathered so far, which the leaf then no longer has.
    pub fn take_grad(&self) -> Option<Gradient> {
        self.grad.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Adds a gradient to the one gathered so far.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] and [`ErrorKind::Shape`] when they aren't those of the leaf; nothing changed then.
    pub fn accumulate_grad(&self, gradient: Gradient) -> Result<()> {
        gradient.check("accumulate_grad", &self.spec)?;
        let mut grad = self.grad.lock().unwrap_or_else(PoisonError::into_inner);
        match grad.as_mut() {
            Some(sum) => sum.accumulate(gradient),
            None => {
                *grad = Some(gradient);
                Ok(())
            }
        }
    }

    /// Adds the gradient of a backward to the one gathered so far, and runs the hooks on the sum. What they leave stays
    /// gathered. While they run the sum is not in the leaf: a backward on another thread begins a new one, and none is lost.
    pub(crate) fn complete_grad(
        self: &Arc<Self>,
        gradient: Gradient,
        hooks: impl FnOnce(&mut Option<Gradient>) -> Result<()>,
    ) -> Result<()> {
        if self.post_accumulate.is_empty() {
            return self.accumulate_grad(gradient);
        }
        gradient.check("accumulate_grad", &self.spec)?;
        let mut slot = self.take_grad();
        match &mut slot {
            Some(sum) => sum.accumulate(gradient)?,
            None => slot = Some(gradient),
        }
        let result = hooks(&mut slot);
        let mut grad = self.grad.lock().unwrap_or_else(PoisonError::into_inner);
        match (slot, grad.take()) {
            (Some(mut sum), Some(meanwhile)) => {
                sum.accumulate(meanwhile)?;
                *grad = Some(sum);
            }
            (left, meanwhile) => *grad = left.or(meanwhile),
        }
        result
    }

    /// Registers a hook that runs after a gradient was accumulated; see [`Tensor::register_post_accumulate_hook`].
    pub fn register_post_accumulate_hook(
        &self,
        hook: impl Fn(&Tensor, &mut Option<Gradient>) -> Result<()> + Send + Sync + 'static,
    ) -> HookHandle {
        self.post_accumulate.add(Arc::new(hook))
    }

    /// Whether hooks are registered for after an accumulation.
    pub(crate) fn has_post_accumulate_hooks(&self) -> bool {
        !self.post_accumulate.is_empty()
    }

    /// Runs the hooks registered for after an accumulation on the gradient where it was accumulated, in their order; the
    /// first error ends it.
    pub(crate) fn run_post_accumulate_hooks(self: &Arc<Self>, slot: &mut Option<Gradient>) -> Result<()> {
        let tensor = Tensor::from_leaf(self.clone());
        self.post_accumulate.snapshot().iter().try_for_each(|hook| hook(&tensor, slot))?;
        slot.as_ref().map_or(Ok(()), |left| left.check("post-accumulate hook", &self.spec))
    }

    /// Where gradients for this leaf go.
    pub(crate) fn edge(self: &Arc<Self>) -> Edge {
        Edge {
            node: Node::leaf(self.clone()),
            slot: 0,
        }
    }
}

impl std::fmt::Debug for Leaf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leaf")
            .field("id", &self.id)
            .field("name", &self.name())
            .field("dtype", &self.spec.dtype)
            .field("shape", &self.spec.shape())
            .field("version", &self.version())
            .field("requires_grad", &self.requires_grad())
            .finish()
    }
}

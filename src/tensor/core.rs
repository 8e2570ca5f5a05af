//! The tensor.

use std::sync::Arc;

use ndarray::{ArcArray, Array, ArrayBase, ArrayD, Dimension, IxDyn, OwnedRepr};

use super::graph::Edge;
use super::reuse::{Give, Kept};
use super::{DType, Data, Device, Element, Gradient, HookHandle, IntoShape, Leaf, shape};
use crate::{ErrorKind, Result};

/// An n-dimensional array of one dtype that operations are recorded for. Cloning shares it.
///
/// It holds fixed values, or is a [`Leaf`]: a cell whose values an optimizer updates. Operations are methods; they
/// broadcast as numpy's do, return errors that name the operation, shapes and dtypes, and never change their inputs.
///
/// ```
/// use rankgrad::tensor::Tensor;
/// # fn main() -> rankgrad::Result<()> {
/// let w = Tensor::from_vec(vec![1.0, 2.0, 3.0], 3)?.parameter()?;
/// let loss = (&w * &w)?.sum()?;
/// loss.backward()?;
/// let grad = w.grad().expect("backward went through w").to_dense()?;
/// assert_eq!(grad.view::<f64>()?.as_slice(), Some([2.0, 4.0, 6.0].as_slice()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tensor(Arc<Inner>);

struct Inner {
    content: Content,
    edge: Option<Edge>,
}

enum Content {
    Fixed(Kept<Data>),
    Leaf(Arc<Leaf>),
}

impl Tensor {
    fn new(content: Content, edge: Option<Edge>) -> Self {
        Tensor(Arc::new(Inner { content, edge }))
    }

    // ---- making one ----------------------------------------------------------------------------------------------

    /// A tensor of these values, without a copy.
    pub fn from_data(data: Data) -> Self {
        Tensor::new(Content::Fixed(Kept::new(data)), None)
    }

    /// A tensor of an ndarray `Array` or `ArcArray` of any dimension, without a copy.
    ///
    /// ```
    /// let x = rankgrad::tensor::Tensor::from_array(ndarray::array![[1.0_f32, 2.0], [3.0, 4.0]]);
    /// assert_eq!(x.shape(), [2, 2]);
    /// ```
    pub fn from_array<T: Element, D: Dimension>(array: impl Into<ArcArray<T, D>>) -> Self {
        Tensor::from_data(T::wrap(array.into().into_dyn()))
    }

    /// A tensor of the elements in row-major order, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if the shape holds another number of elements.
    pub fn from_vec<T: Element>(elements: Vec<T>, shape: impl IntoShape) -> Result<Self> {
        let shape = shape.into_shape();
        if shape::count("from_vec", &shape)? != elements.len() {
            return Err(shape::mismatch(
                "from_vec",
                &[elements.len()],
                &shape,
                "the shape must hold as many elements as the vector",
            ));
        }
        let array = ArrayD::from_shape_vec(IxDyn(&shape), elements).map_err(|e| ErrorKind::Argument {
            op: "from_vec".into(),
            what: format!("shape {shape:?}: {e}"),
        })?;
        Ok(Tensor::from_array(array))
    }

    /// A tensor of no dimensions with one element.
    pub fn scalar<T: Element>(element: T) -> Self {
        Tensor::from_array(ndarray::arr0(element))
    }

    /// Zeros (`false` for bool).
    ///
    /// # Panics
    /// If the shape has more elements than can be allocated, as ndarray does.
    pub fn zeros(dtype: DType, shape: impl IntoShape) -> Self {
        Tensor::from_data(Data::zeros(dtype, &shape.into_shape()))
    }

    /// Ones (`true` for bool).
    ///
    /// # Panics
    /// If the shape has more elements than can be allocated, as ndarray does.
    pub fn ones(dtype: DType, shape: impl IntoShape) -> Self {
        Tensor::full(dtype, shape, 1.0)
    }

    /// Elements that are all `value`: rounded to `f32`, truncated to `i64`, or whether it isn't zero.
    ///
    /// # Panics
    /// If the shape has more elements than can be allocated, as ndarray does.
    pub fn full(dtype: DType, shape: impl IntoShape, value: f64) -> Self {
        Tensor::from_data(Data::filled(dtype, &shape.into_shape(), value))
    }

    /// A tensor whose gradient goes to `edge`: a computed or received one.
    pub(crate) fn with_edge(data: Data, edge: Edge) -> Self {
        Tensor::new(Content::Fixed(Kept::new(data)), Some(edge))
    }

    /// A tensor of a leaf.
    pub(crate) fn from_leaf(leaf: Arc<Leaf>) -> Self {
        let edge = leaf.edge();
        Tensor::new(Content::Leaf(leaf), Some(edge))
    }

    // ---- leaves --------------------------------------------------------------------------------------------------

    /// Makes it a parameter: a leaf that requires gradients and that optimizers update. A computed tensor loses its
    /// graph; storage that only it holds is taken over, so that updates are in place.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless its elements are floats.
    pub fn parameter(self) -> Result<Tensor> {
        self.into_leaf("parameter", true)
    }

    /// Makes it a leaf that requires gradients without being a parameter: an input whose gradient is wanted.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless its elements are floats.
    pub fn with_grad(self) -> Result<Tensor> {
        self.into_leaf("with_grad", false)
    }

    fn into_leaf(self, op: &str, parameter: bool) -> Result<Tensor> {
        let dtype = self.dtype();
        if !dtype.is_float() {
            return Err(ErrorKind::DType {
                op: op.into(),
                expected: "f32 or f64".into(),
                found: dtype.to_string(),
            }
            .into());
        }
        Ok(Tensor::from_leaf(Arc::new(Leaf::new(self.into_data(), parameter))))
    }

    /// Whether operations on it are recorded for `backward`.
    pub fn requires_grad(&self) -> bool {
        match &self.0.content {
            Content::Leaf(leaf) => leaf.requires_grad(),
            Content::Fixed(_) => self.0.edge.is_some(),
        }
    }

    /// Whether it wasn't computed by a recorded operation.
    pub fn is_leaf(&self) -> bool {
        self.leaf().is_some() || self.0.edge.is_none()
    }

    /// Whether it was made by [`Tensor::parameter`].
    pub fn is_parameter(&self) -> bool {
        self.leaf().is_some_and(|leaf| leaf.is_parameter())
    }

    /// Its leaf, if it is one made by [`Tensor::parameter`] or [`Tensor::with_grad`].
    pub fn leaf(&self) -> Option<&Arc<Leaf>> {
        match &self.0.content {
            Content::Leaf(leaf) => Some(leaf),
            Content::Fixed(_) => None,
        }
    }

    fn must_be_leaf(&self, what: &str) -> Result<&Arc<Leaf>> {
        self.leaf().ok_or_else(|| {
            ErrorKind::NotALeaf {
                what: what.into(),
                why: format!("{self:?} holds fixed values; make a leaf with `parameter` or `with_grad`"),
            }
            .into()
        })
    }

    /// Stops gathering gradients for this leaf, in graphs recorded from now on. All tensors of the leaf see it.
    ///
    /// # Errors
    /// [`ErrorKind::NotALeaf`] if it isn't one.
    pub fn freeze(&self) -> Result<()> {
        self.must_be_leaf("freeze")?.set_requires_grad(false);
        Ok(())
    }

    /// Gathers gradients for this leaf again.
    ///
    /// # Errors
    /// [`ErrorKind::NotALeaf`] if it isn't one.
    pub fn unfreeze(&self) -> Result<()> {
        self.must_be_leaf("unfreeze")?.set_requires_grad(true);
        Ok(())
    }

    // ---- looking at it -------------------------------------------------------------------------------------------

    /// The dtype.
    pub fn dtype(&self) -> DType {
        match &self.0.content {
            Content::Fixed(data) => data.dtype(),
            Content::Leaf(leaf) => leaf.spec().dtype,
        }
    }

    fn lengths(&self) -> &[usize] {
        match &self.0.content {
            Content::Fixed(data) => data.shape(),
            Content::Leaf(leaf) => leaf.spec().shape(),
        }
    }

    /// Lengths of the axes; empty for a scalar.
    pub fn shape(&self) -> Vec<usize> {
        self.lengths().to_vec()
    }

    /// Number of axes.
    pub fn ndim(&self) -> usize {
        self.lengths().len()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.lengths().iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where its elements lie.
    pub fn device(&self) -> Device {
        match &self.0.content {
            Content::Fixed(data) => data.device(),
            Content::Leaf(leaf) => leaf.device(),
        }
    }

    /// Its values as they are now: they share the storage, and a later update of a leaf doesn't change them.
    ///
    /// Blocks while an update of the leaf is under way.
    pub fn data(&self) -> Data {
        match &self.0.content {
            Content::Fixed(data) => Data::clone(data),
            Content::Leaf(leaf) => leaf.data(),
        }
    }

    /// Its values, by value: not shared with this tensor if it was the last to hold them.
    fn into_data(self) -> Data {
        match Arc::try_unwrap(self.0) {
            Ok(Inner {
                content: Content::Fixed(data),
                ..
            }) => data.into_inner(),
            Ok(Inner {
                content: Content::Leaf(leaf),
                edge,
            }) => {
                // The node that the edge leads to holds the leaf too.
                drop(edge);
                Arc::try_unwrap(leaf).map_or_else(|shared| shared.data(), Leaf::into_data)
            }
            Err(shared) => Tensor(shared).data(),
        }
    }

    /// Its values as an ndarray, without a copy. Those on a GPU are copied here, which waits for it.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] if its elements aren't of type `T`; [`ErrorKind::Cuda`].
    pub fn array<T: Element>(&self) -> Result<ArcArray<T, IxDyn>> {
        T::take(self.host_data()?)
    }

    /// Its values in the memory of this rank, for an operation that isn't there on GPUs.
    pub(crate) fn host_data(&self) -> Result<Data> {
        self.data().to(Device::Cpu)
    }

    /// Its values as an ndarray of its own; without a copy if nobody else holds them.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] if its elements aren't of type `T`.
    pub fn into_array<T: Element>(self) -> Result<ArrayD<T>> {
        let mut data = self.into_data();
        if data.device() != Device::Cpu {
            data = data.to(Device::Cpu)?;
        }
        T::take(data).map(ArrayBase::<_, IxDyn>::into_owned)
    }

    /// Its elements in row-major order. Those on a GPU are copied here, which waits for it.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] if its elements aren't of type `T`; [`ErrorKind::Cuda`].
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.array::<T>()?.iter().copied().collect())
    }

    /// The element of a tensor that has one.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] if it isn't of type `T`, [`ErrorKind::Shape`] unless there is exactly one.
    pub fn item<T: Element>(&self) -> Result<T> {
        let array = self.array::<T>()?;
        match array.first() {
            Some(&element) if array.len() == 1 => Ok(element),
            _ => Err(shape::mismatch(
                "item",
                array.shape(),
                &[],
                "the tensor must hold exactly one element",
            )),
        }
    }

    /// The same values as they are now, without a graph. The storage is shared.
    pub fn detach(&self) -> Tensor {
        Tensor::from_data(self.data())
    }

    // ---- gradients -----------------------------------------------------------------------------------------------

    /// The gradient gathered for this leaf by local backwards; `None` for other tensors and where none arrived.
    pub fn grad(&self) -> Option<Gradient> {
        self.leaf().and_then(|leaf| leaf.grad())
    }

    /// Forgets the gradient gathered for this leaf.
    pub fn zero_grad(&self) {
        if let Some(Gradient::Dense(data)) = self.leaf().and_then(|leaf| leaf.take_grad()) {
            data.give();
        }
    }

    /// Registers a hook that runs in each backward, as soon as the gradient of this tensor is complete. What it returns
    /// replaces the gradient. Hooks run in the order they were registered.
    ///
    /// # Errors
    /// [`ErrorKind::NotALeaf`] if the tensor doesn't require gradients.
    pub fn register_hook(&self, hook: impl Fn(&Gradient) -> Option<Gradient> + Send + Sync + 'static) -> Result<HookHandle> {
        match (self.leaf(), &self.0.edge) {
            (Some(leaf), _) => Ok(leaf.hooks.add(Arc::new(hook))),
            (None, Some(edge)) => Ok(edge.node.hooks().add((edge.slot, Arc::new(hook)))),
            (None, None) => Err(ErrorKind::NotALeaf {
                what: "register_hook".into(),
                why: format!("{self:?} requires no gradient, so the hook would never run"),
            }
            .into()),
        }
    }

    /// Registers a hook that runs once in each backward that reaches this leaf, when its gradient is complete and was
    /// accumulated: in a local backward to [`grad`](Tensor::grad), in a distributed one, on the leaf's rank, to the context's gradient.
    ///
    /// The hook gets the leaf's tensor and the place of the accumulated gradient (which `grad` doesn't show meanwhile). It
    /// may read it, change it, or take it: then the leaf has none afterwards. What the graph saved of the leaf's values was
    /// freed before, unless the graph is retained, so an update here is in place. Hooks run in the order they were
    /// registered, on the thread that goes back; the error of one ends the backward and comes out of it. A failed
    /// distributed backward gives back no gradient that a hook took.
    ///
    /// ```
    /// use rankgrad::tensor::Tensor;
    /// # fn main() -> rankgrad::Result<()> {
    /// let w = Tensor::from_vec(vec![1.0, 2.0], 2)?.parameter()?;
    /// let _hook = w.register_post_accumulate_hook(|w, gradient| {
    ///     let taken = gradient.take().expect("it is complete");
    ///     println!("{w:?} got {taken:?}");
    ///     Ok(())
    /// })?;
    /// (&w * &w)?.sum()?.backward()?;
    /// assert!(w.grad().is_none());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::NotALeaf`] if it isn't one. In the backward: [`ErrorKind::Shape`] or [`ErrorKind::DType`] if the hook left
    /// a gradient that doesn't fit the leaf.
    pub fn register_post_accumulate_hook(
        &self,
        hook: impl Fn(&Tensor, &mut Option<Gradient>) -> Result<()> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        Ok(self
            .must_be_leaf("register_post_accumulate_hook")?
            .register_post_accumulate_hook(hook))
    }

    /// Where its gradient goes; `None` if it doesn't require one.
    pub(crate) fn edge(&self) -> Option<Edge> {
        if self.requires_grad() { self.0.edge.clone() } else { None }
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({}, {:?}", self.dtype(), self.lengths())?;
        if self.device() != Device::Cpu {
            write!(f, ", {}", self.device())?;
        }
        if self.requires_grad() {
            f.write_str(", requires grad")?;
        }
        f.write_str(")")
    }
}

impl<T: Element, D: Dimension> From<Array<T, D>> for Tensor {
    fn from(array: ArrayBase<OwnedRepr<T>, D>) -> Self {
        Tensor::from_array(array)
    }
}

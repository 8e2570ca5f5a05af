//! Tensors: dtype, device, shape; to and from ndarray without a copy; operations with gradients; row-sparse gradients.

mod core;
mod data;
pub(crate) mod device;
mod float;
mod gradient;
pub(crate) mod graph;
mod hooks;
pub mod init;
mod leaf;
mod ops;
mod reuse;
mod shape;
#[cfg(test)]
mod tests;

pub use self::core::Tensor;
pub(crate) use data::each_dtype;
pub use data::{DType, Data, Element};
pub use device::{CudaArray, Device};
pub use float::Float;
pub use gradient::{Gradient, RowSparse};
pub use hooks::HookHandle;
#[cfg(feature = "cuda")]
pub(crate) use leaf::LeafUpdate;
pub(crate) use leaf::Locked;
pub use leaf::{Leaf, Updated};
pub use ops::{Gelu, Reduction};
pub use shape::IntoShape;
pub(crate) use shape::Spec;

//! Tensors: dtype, device, shape; to and from ndarray without a copy; row-sparse gradients.

mod data;

pub use data::{DType, Data, Element};
pub(crate) use data::each_dtype;

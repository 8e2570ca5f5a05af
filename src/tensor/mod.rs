//! Tensors: dtype, device, shape; to and from ndarray without a copy; row-sparse gradients.

mod data;

pub(crate) use data::each_dtype;
pub use data::{DType, Data, Element};

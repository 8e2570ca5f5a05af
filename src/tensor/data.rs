//! What a tensor holds: an n-dimensional array of one dtype, shared and copied on write.

use ndarray::{ArcArray, ArrayD, ArrayViewD, IxDyn};
use serde::{Deserialize, Serialize};

use super::device::{CudaArray, Device, not_here};
use crate::{ErrorKind, Result};

/// Type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    /// 32-bit floating point.
    F32,
    /// 64-bit floating point.
    F64,
    /// 64-bit signed integer; without gradients.
    I64,
    /// Boolean, one byte an element; without gradients.
    Bool,
}

impl DType {
    /// Size of an element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F64 | DType::I64 => 8,
            DType::Bool => 1,
        }
    }

    /// Whether tensors of this dtype can have gradients.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::I64 => "i64",
            DType::Bool => "bool",
        })
    }
}

/// A shared array of one dtype. Cloning shares the storage; views (transposes, slices, broadcasts) share it too.
#[derive(Debug, Clone)]
pub enum Data {
    /// Elements of type `f32`.
    F32(ArcArray<f32, IxDyn>),
    /// Elements of type `f64`.
    F64(ArcArray<f64, IxDyn>),
    /// Elements of type `i64`.
    I64(ArcArray<i64, IxDyn>),
    /// Elements of type `bool`.
    Bool(ArcArray<bool, IxDyn>),
    /// Elements of any type on a GPU.
    Cuda(CudaArray),
}

/// Runs one expression on the array inside a [`Data`], whatever its dtype.
macro_rules! each_dtype {
    ($data:expr, $array:ident => $body:expr) => {
        match $data {
            $crate::tensor::Data::F32($array) => $body,
            $crate::tensor::Data::F64($array) => $body,
            $crate::tensor::Data::I64($array) => $body,
            $crate::tensor::Data::Bool($array) => $body,
            $crate::tensor::Data::Cuda($array) => $body,
        }
    };
}
pub(crate) use each_dtype;

impl Data {
    /// The dtype.
    pub fn dtype(&self) -> DType {
        match self {
            Data::F32(_) => DType::F32,
            Data::F64(_) => DType::F64,
            Data::I64(_) => DType::I64,
            Data::Bool(_) => DType::Bool,
            Data::Cuda(a) => a.dtype(),
        }
    }

    /// The shape; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        each_dtype!(self, a => a.shape())
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        each_dtype!(self, a => a.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the elements in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype().size()
    }

    /// Whether the elements lie in memory one after the other in row-major order.
    pub fn is_contiguous(&self) -> bool {
        each_dtype!(self, a => a.is_standard_layout())
    }

    /// The same values in row-major order: itself when it already is, else one packed copy.
    pub fn to_contiguous(&self) -> Data {
        if self.is_contiguous() {
            return self.clone();
        }
        match self {
            Data::F32(a) => Data::F32(a.as_standard_layout().into_owned().into_shared()),
            Data::F64(a) => Data::F64(a.as_standard_layout().into_owned().into_shared()),
            Data::I64(a) => Data::I64(a.as_standard_layout().into_owned().into_shared()),
            Data::Bool(a) => Data::Bool(a.as_standard_layout().into_owned().into_shared()),
            Data::Cuda(a) => Data::Cuda(a.clone()),
        }
    }

    /// Whether nobody else holds the storage, so that it can be written to in place.
    pub fn is_unique(&self) -> bool {
        each_dtype!(self, a => a.is_unique())
    }

    /// Whether both see the same storage at the same place.
    pub fn shares_storage(&self, other: &Data) -> bool {
        fn start(data: &Data) -> *const u8 {
            match data {
                Data::F32(a) => a.as_ptr().cast(),
                Data::F64(a) => a.as_ptr().cast(),
                Data::I64(a) => a.as_ptr().cast(),
                Data::Bool(a) => a.as_ptr().cast(),
                Data::Cuda(_) => std::ptr::null(),
            }
        }
        match (self, other) {
            (Data::Cuda(a), Data::Cuda(b)) => a.is_same(b),
            _ => self.dtype() == other.dtype() && start(self) == start(other),
        }
    }

    /// A copy with a storage of its own, in row-major order. Elements on a GPU stay shared: what writes to them there copies them first.
    pub fn deep_copy(&self) -> Data {
        match self {
            Data::F32(a) => Data::F32(copy(a)),
            Data::F64(a) => Data::F64(copy(a)),
            Data::I64(a) => Data::I64(copy(a)),
            Data::Bool(a) => Data::Bool(copy(a)),
            Data::Cuda(a) => Data::Cuda(a.clone()),
        }
    }

    /// A view of the elements, if they are of type `T`.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] for another dtype.
    pub fn view<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        Ok(T::peek(self)?.view())
    }

    /// Elements that are all `value`: rounded to `f32`, truncated to `i64`, or whether it isn't zero.
    pub(crate) fn filled(dtype: DType, shape: &[usize], value: f64) -> Data {
        match dtype {
            DType::F32 => Data::F32(ArrayD::from_elem(shape, value as f32).into_shared()),
            DType::F64 => Data::F64(ArrayD::from_elem(shape, value).into_shared()),
            DType::I64 => Data::I64(ArrayD::from_elem(shape, value as i64).into_shared()),
            DType::Bool => Data::Bool(ArrayD::from_elem(shape, value != 0.0).into_shared()),
        }
    }

    /// Zeros of a dtype and shape.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Data {
        match dtype {
            DType::F32 => Data::F32(ArrayD::zeros(shape).into_shared()),
            DType::F64 => Data::F64(ArrayD::zeros(shape).into_shared()),
            DType::I64 => Data::I64(ArrayD::zeros(shape).into_shared()),
            DType::Bool => Data::Bool(ArrayD::from_elem(shape, false).into_shared()),
        }
    }
}

fn copy<T: Copy>(array: &ArcArray<T, IxDyn>) -> ArcArray<T, IxDyn> {
    match array.as_slice() {
        Some(elements) => ArrayD::from_shape_vec(array.raw_dim(), elements.to_vec())
            .expect("as many elements as the shape says")
            .into_shared(),
        None => array.as_standard_layout().into_owned().into_shared(),
    }
}

/// A type that tensors can hold: `f32`, `f64`, `i64` or `bool`.
pub trait Element: Copy + PartialOrd + Send + Sync + std::fmt::Debug + 'static {
    /// Its dtype.
    const DTYPE: DType;

    /// Wraps an array.
    fn wrap(array: ArcArray<Self, IxDyn>) -> Data;

    /// The array inside.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] for another dtype.
    fn peek(data: &Data) -> Result<&ArcArray<Self, IxDyn>>;

    /// The array inside, by value.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] for another dtype.
    fn take(data: Data) -> Result<ArcArray<Self, IxDyn>>;

    /// The elements' memory, where any bytes make elements.
    #[doc(hidden)]
    fn bytes_mut(elements: &mut [Self]) -> Option<&mut [u8]>
    where
        Self: Sized;

    /// The array inside, to write to.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] for another dtype.
    fn peek_mut(data: &mut Data) -> Result<&mut ArcArray<Self, IxDyn>>;
}

macro_rules! element {
    ($type:ty, $variant:ident, $bytes_mut:expr) => {
        impl Element for $type {
            const DTYPE: DType = DType::$variant;

            fn wrap(array: ArcArray<Self, IxDyn>) -> Data {
                Data::$variant(array)
            }

            fn peek(data: &Data) -> Result<&ArcArray<Self, IxDyn>> {
                match data {
                    Data::$variant(array) => Ok(array),
                    other => Err(mismatch(Self::DTYPE, other)),
                }
            }

            fn take(data: Data) -> Result<ArcArray<Self, IxDyn>> {
                match data {
                    Data::$variant(array) => Ok(array),
                    other => Err(mismatch(Self::DTYPE, &other)),
                }
            }

            fn bytes_mut(elements: &mut [Self]) -> Option<&mut [u8]> {
                $bytes_mut(elements)
            }

            fn peek_mut(data: &mut Data) -> Result<&mut ArcArray<Self, IxDyn>> {
                match data {
                    Data::$variant(array) => Ok(array),
                    other => Err(mismatch(Self::DTYPE, other)),
                }
            }
        }
    };
}
element!(f32, F32, |elements| Some(bytemuck::cast_slice_mut(elements)));
element!(f64, F64, |elements| Some(bytemuck::cast_slice_mut(elements)));
element!(i64, I64, |elements| Some(bytemuck::cast_slice_mut(elements)));
element!(bool, Bool, |_| None);

fn mismatch(expected: DType, found: &Data) -> crate::Error {
    if found.device() != Device::Cpu {
        return not_here("array access", found.device());
    }
    let found = found.dtype();
    ErrorKind::DType {
        op: "array access".into(),
        expected: expected.to_string(),
        found: found.to_string(),
    }
    .into()
}

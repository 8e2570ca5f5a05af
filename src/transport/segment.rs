//! Segments as bytes, and bytes as segments.

use bytemuck::Pod;
use ndarray::{ArcArray, Array1, IxDyn, SliceInfoElem};
use serde::{Deserialize, Serialize};

use crate::tensor::{DType, Data};
use crate::{Error, ErrorKind, Result};

/// Dtype and shape of a segment, as they travel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// A [`Layout`] to be encoded: the shape is the segment's own.
#[derive(Serialize)]
pub(crate) struct LayoutOf<'a> {
    dtype: DType,
    shape: &'a [usize],
}

impl LayoutOf<'_> {
    pub(crate) fn new(data: &Data) -> LayoutOf<'_> {
        LayoutOf {
            dtype: data.dtype(),
            shape: data.shape(),
        }
    }
}

pub(crate) fn decode_error(what: impl Into<String>) -> Error {
    ErrorKind::Decode { what: what.into() }.into()
}

impl Layout {
    pub(crate) fn of(data: &Data) -> Layout {
        Layout {
            dtype: data.dtype(),
            shape: data.shape().to_vec(),
        }
    }

    /// Number of elements.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if the array could not exist in memory.
    pub(crate) fn len(&self) -> Result<usize> {
        let nonzero = self
            .shape
            .iter()
            .filter(|&&n| n != 0)
            .try_fold(self.dtype.size(), |product, &n| product.checked_mul(n));
        match nonzero {
            Some(bytes) if isize::try_from(bytes).is_ok() => Ok(self.shape.iter().product()),
            _ => Err(decode_error(format!(
                "a segment of {} with shape {:?} is larger than memory",
                self.dtype, self.shape
            ))),
        }
    }

    /// Size in bytes.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub(crate) fn bytes(&self) -> Result<usize> {
        Ok(self.len()? * self.dtype.size())
    }
}

/// Sum of the sizes of segments in bytes.
///
/// # Errors
/// [`ErrorKind::Decode`] if a segment, or all of them, could not exist in memory.
pub(crate) fn total_bytes(layouts: &[Layout]) -> Result<u64> {
    layouts.iter().try_fold(0u64, |sum, layout| {
        sum.checked_add(layout.bytes()? as u64)
            .ok_or_else(|| decode_error("the segments together are larger than memory"))
    })
}

/// The elements' memory, if they lie in row-major order.
pub(crate) fn as_bytes(data: &Data) -> Option<&[u8]> {
    match data {
        Data::F32(array) => array.as_slice().map(bytemuck::cast_slice),
        Data::F64(array) => array.as_slice().map(bytemuck::cast_slice),
        Data::I64(array) => array.as_slice().map(bytemuck::cast_slice),
        Data::Bool(array) => array.as_slice().map(bytemuck::cast_slice),
        Data::Cuda(_) => None,
    }
}

/// Memory that a segment is received into. It may be longer than the segment.
#[derive(Debug)]
pub(crate) enum Buffer {
    F32(Vec<f32>),
    F64(Vec<f64>),
    I64(Vec<i64>),
    /// Bytes until they are checked: not every byte is a `bool`.
    Bool(Vec<u8>),
}

impl Buffer {
    /// Fresh memory for `len` elements.
    pub(crate) fn new(dtype: DType, len: usize) -> Buffer {
        match dtype {
            DType::F32 => Buffer::F32(vec![0.0; len]),
            DType::F64 => Buffer::F64(vec![0.0; len]),
            DType::I64 => Buffer::I64(vec![0; len]),
            DType::Bool => Buffer::Bool(vec![0; len]),
        }
    }

    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Buffer::F32(vec) => bytemuck::cast_slice_mut(vec),
            Buffer::F64(vec) => bytemuck::cast_slice_mut(vec),
            Buffer::I64(vec) => bytemuck::cast_slice_mut(vec),
            Buffer::Bool(vec) => vec,
        }
    }

    /// All of the memory as one array of one dimension.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if a byte of a bool segment is neither 0 nor 1.
    pub(crate) fn into_storage(self) -> Result<Data> {
        Ok(match self {
            Buffer::F32(vec) => Data::F32(storage(vec)),
            Buffer::F64(vec) => Data::F64(storage(vec)),
            Buffer::I64(vec) => Data::I64(storage(vec)),
            Buffer::Bool(vec) => match vec.iter().find(|&&byte| byte > 1) {
                None => Data::Bool(storage(vec.into_iter().map(|byte| byte == 1).collect())),
                Some(byte) => return Err(decode_error(format!("a bool segment holds the byte {byte}"))),
            },
        })
    }
}

fn storage<T: Clone>(vec: Vec<T>) -> ArcArray<T, IxDyn> {
    Array1::from_vec(vec).into_dyn().into_shared()
}

/// The first elements of a storage, in a shape. Shares the memory.
///
/// # Errors
/// [`ErrorKind::Decode`] if the storage is too small for the shape.
pub(crate) fn shaped(storage: Data, shape: &[usize]) -> Result<Data> {
    fn first<T: Clone>(mut array: ArcArray<T, IxDyn>, shape: &[usize]) -> Result<ArcArray<T, IxDyn>> {
        let len: usize = shape.iter().product();
        if len > array.len() {
            return Err(decode_error(format!("{} elements can't have shape {shape:?}", array.len())));
        }
        if len < array.len() {
            array.slice_collapse(
                &[SliceInfoElem::Slice {
                    start: 0,
                    end: Some(len as isize),
                    step: 1,
                }][..],
            );
        }
        array
            .into_shape_with_order(shape)
            .map_err(|error| decode_error(format!("shape {shape:?}: {error}")))
    }
    Ok(match storage {
        Data::F32(array) => Data::F32(first(array, shape)?),
        Data::F64(array) => Data::F64(first(array, shape)?),
        Data::I64(array) => Data::I64(first(array, shape)?),
        Data::Bool(array) => Data::Bool(first(array, shape)?),
        Data::Cuda(_) => return Err(decode_error("a segment on a GPU")),
    })
}

/// Takes one segment from the front of `bytes`, by copy.
///
/// # Errors
/// [`ErrorKind::Decode`] if there are too few bytes, or they don't make sense.
pub(crate) fn take(layout: &Layout, bytes: &mut &[u8]) -> Result<Data> {
    let len = layout.bytes()?;
    let Some((mine, rest)) = bytes.split_at_checked(len) else {
        return Err(decode_error(format!("a segment of {len} bytes, of which {} arrived", bytes.len())));
    };
    *bytes = rest;
    Ok(match layout.dtype {
        DType::F32 => Data::F32(copied(mine, &layout.shape)?),
        DType::F64 => Data::F64(copied(mine, &layout.shape)?),
        DType::I64 => Data::I64(copied(mine, &layout.shape)?),
        DType::Bool => return shaped(Buffer::Bool(mine.to_vec()).into_storage()?, &layout.shape),
    })
}

fn copied<T: Pod>(bytes: &[u8], shape: &[usize]) -> Result<ArcArray<T, IxDyn>> {
    let mut vec = vec![T::zeroed(); bytes.len() / size_of::<T>()];
    bytemuck::cast_slice_mut(&mut vec).copy_from_slice(bytes);
    ArcArray::from_shape_vec(shape, vec).map_err(|error| decode_error(format!("shape {shape:?}: {error}")))
}

#[cfg(test)]
mod tests {
    use ndarray::arr2;

    use super::*;

    #[test]
    fn segments_come_back_from_bytes() {
        let all = [
            Data::F32(arr2(&[[1.0f32, 2.0], [3.0, 4.0]]).into_dyn().into_shared()),
            Data::F64(arr2(&[[-1.5f64], [2.5]]).into_dyn().into_shared()),
            Data::I64(ndarray::arr0(i64::MIN).into_dyn().into_shared()),
            Data::Bool(arr2(&[[true, false, true]]).into_dyn().into_shared()),
            Data::zeros(DType::F64, &[3, 0, 2]),
        ];
        for data in &all {
            // One byte in front: the bytes of a message aren't aligned.
            let mut message = vec![9];
            message.extend_from_slice(as_bytes(data).unwrap());
            message.push(7);
            let mut rest = &message[1..];
            let back = take(&Layout::of(data), &mut rest).unwrap();
            assert_eq!(rest, [7]);
            assert_eq!((back.dtype(), back.shape()), (data.dtype(), data.shape()));
            assert_eq!(as_bytes(&back), as_bytes(data));
            assert!(data.is_empty() || take(&Layout::of(data), &mut &message[..data.bytes() - 1]).is_err());
        }
    }

    #[test]
    fn lying_layouts_are_errors() {
        let huge = Layout {
            dtype: DType::F64,
            shape: vec![usize::MAX, 2],
        };
        assert!(huge.len().is_err() && total_bytes(std::slice::from_ref(&huge)).is_err());
        assert!(
            Layout {
                dtype: DType::F64,
                shape: vec![usize::MAX / 4, 0]
            }
            .len()
            .is_err()
        );
        let large = Layout {
            dtype: DType::Bool,
            shape: vec![isize::MAX as usize],
        };
        assert!(total_bytes(&[large.clone(), large.clone(), large]).is_err());
        assert!(
            take(
                &Layout {
                    dtype: DType::Bool,
                    shape: vec![2]
                },
                &mut &[1, 2][..]
            )
            .is_err()
        );
    }

    #[test]
    fn a_view_of_other_order_has_no_bytes() {
        let transposed = Data::F64(arr2(&[[1.0, 2.0], [3.0, 4.0]]).into_shared().reversed_axes().into_dyn());
        assert!(as_bytes(&transposed).is_none() && as_bytes(&transposed.to_contiguous()).is_some());
    }
}

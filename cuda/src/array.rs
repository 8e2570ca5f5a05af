//! Arrays on a device.

use std::marker::PhantomData;
use std::sync::Arc;

use cust::sys;

use crate::memory::Block;
use crate::{Error, Gpu, Result};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for i64 {}
    impl Sealed for u8 {}
}

/// A type of elements: `f32`, `f64`, `i64` or `u8`. Any bytes are one, and none of its bytes are padding.
pub trait Scalar: sealed::Sealed + Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + 'static {
    /// What names of kernels end with.
    const SUFFIX: &'static str;
}

impl Scalar for f32 {
    const SUFFIX: &'static str = "f32";
}
impl Scalar for f64 {
    const SUFFIX: &'static str = "f64";
}
impl Scalar for i64 {
    const SUFFIX: &'static str = "i64";
}
impl Scalar for u8 {
    const SUFFIX: &'static str = "u8";
}

/// `f32` or `f64`: what kernels compute with.
pub trait Float: Scalar {}
impl Float for f32 {}
impl Float for f64 {}

/// Where a piece of a block begins; blocks are shared by arrays that were made together.
const ALIGNMENT: usize = 256;

#[derive(Debug)]
struct Region {
    block: Arc<Block>,
    /// In bytes.
    start: usize,
}

/// Elements on a device, one after the other. Cloning shares them.
///
/// All that uses them happens in the order of the calls. Making one, and what computes on it, doesn't wait for the device; reading it does.
#[derive(Debug)]
pub struct Array<T> {
    region: Arc<Region>,
    length: usize,
    element: PhantomData<T>,
}

impl<T> Clone for Array<T> {
    fn clone(&self) -> Self {
        Array {
            region: self.region.clone(),
            length: self.length,
            element: PhantomData,
        }
    }
}

/// The bytes of elements.
fn bytes<T: Scalar>(elements: &[T]) -> &[u8] {
    // SAFETY: a scalar has no padding, and any alignment does for bytes.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn bytes_mut<T: Scalar>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; any bytes are a scalar.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}

/// Where arrays of these lengths begin that share a block, and its size; all in bytes.
fn starts<T>(lengths: &[usize]) -> Result<(Vec<usize>, usize)> {
    let (mut starts, mut total) = (Vec::with_capacity(lengths.len()), 0_usize);
    for &length in lengths {
        starts.push(total);
        let end = length
            .checked_mul(size_of::<T>())
            .and_then(|size| size.checked_next_multiple_of(ALIGNMENT));
        let end = end.and_then(|size| total.checked_add(size));
        total = end.ok_or_else(|| Error::argument("allocate", format!("{length} elements are more than memory can hold")))?;
    }
    // The last needs no room behind it.
    if let (Some(start), Some(length)) = (starts.last(), lengths.last()) {
        total = start + length * size_of::<T>();
    }
    Ok((starts, total))
}

impl<T: Scalar> Array<T> {
    /// Arrays of these lengths in one block of memory, of any content.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn uninitialised(gpu: &Gpu, lengths: &[usize]) -> Result<Vec<Self>> {
        let (starts, total) = starts::<T>(lengths)?;
        let block = Block::new(gpu, total)?;
        let array = |(start, &length)| Array {
            region: Arc::new(Region {
                block: block.clone(),
                start,
            }),
            length,
            element: PhantomData,
        };
        Ok(starts.into_iter().zip(lengths).map(array).collect())
    }

    /// As many elements as hold arrays of these lengths as [`pieces`](Self::pieces).
    ///
    /// # Errors
    /// [`Error::Argument`] for more than memory can hold.
    pub fn room(lengths: &[usize]) -> Result<usize> {
        Ok(starts::<T>(lengths)?.1 / size_of::<T>())
    }

    /// Pieces of these lengths of this array, whose memory they share.
    ///
    /// # Errors
    /// [`Error::Argument`] if it has fewer elements than they have [`room`](Self::room).
    pub fn pieces(&self, lengths: &[usize]) -> Result<Vec<Self>> {
        let (starts, total) = starts::<T>(lengths)?;
        if total > self.length * size_of::<T>() {
            let what = format!("pieces of {lengths:?} elements of {}", self.length);
            return Err(Error::argument("divide", what));
        }
        let piece = |(start, &length)| Array {
            region: Arc::new(Region {
                block: self.region.block.clone(),
                start: self.region.start + start,
            }),
            length,
            element: PhantomData,
        };
        Ok(starts.into_iter().zip(lengths).map(piece).collect())
    }

    /// An array of any content.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(gpu: &Gpu, length: usize) -> Result<Self> {
        let mut made = Self::uninitialised(gpu, &[length])?;
        made.pop().ok_or_else(|| Error::argument("allocate", "no array"))
    }

    /// The elements, copied to the device. They are read before this returns; the copy goes on beside other work.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn from_slice(gpu: &Gpu, elements: &[T]) -> Result<Self> {
        let mut made = Self::from_slices(gpu, &[elements])?;
        made.pop().ok_or_else(|| Error::argument("copy", "no array"))
    }

    /// Each of the slices, copied to the device together: one block of memory, and a copy for each 4 MiB.
    ///
    /// # Errors
    /// As [`from_slice`](Self::from_slice).
    pub fn from_slices(gpu: &Gpu, slices: &[&[T]]) -> Result<Vec<Self>> {
        let lengths: Vec<usize> = slices.iter().map(|slice| slice.len()).collect();
        let made = Self::uninitialised(gpu, &lengths)?;
        if let Some(first) = made.first().filter(|_| lengths.iter().any(|&length| length > 0)) {
            let sources = made.iter().zip(slices).map(|(array, slice)| (array.region.start, bytes(slice)));
            first.region.block.fill(sources)?;
        }
        Ok(made)
    }

    /// Elements that are all one value.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn full(gpu: &Gpu, length: usize, value: T) -> Result<Self> {
        let array = Self::new(gpu, length)?;
        array.fill(value)?;
        Ok(array)
    }

    /// Arrays of these lengths, each of one value, in one block of memory.
    ///
    /// # Errors
    /// As [`full`](Self::full).
    pub fn filled(gpu: &Gpu, arrays: &[(usize, T)]) -> Result<Vec<Self>> {
        let lengths: Vec<usize> = arrays.iter().map(|a| a.0).collect();
        let made = Self::uninitialised(gpu, &lengths)?;
        // Mostly all are of one value, zero, and gaps between them may be written to.
        let uniform = arrays.windows(2).all(|w| w[0].1 == w[1].1);
        match (made.first(), made.last(), arrays.first()) {
            (Some(first), Some(last), Some(&(_, value))) if uniform => {
                let end = last.region.start + last.length * size_of::<T>();
                let all = Array {
                    region: first.region.clone(),
                    length: end / size_of::<T>(),
                    element: PhantomData,
                };
                all.fill(value)?;
            }
            _ => made.iter().zip(arrays).try_for_each(|(array, &(_, value))| array.fill(value))?,
        }
        Ok(made)
    }

    fn fill(&self, value: T) -> Result<()> {
        if self.length == 0 {
            return Ok(());
        }
        let (gpu, pointer) = (self.gpu(), self.pointer()?);
        if bytes(&[value]).iter().all(|&b| b == 0) || size_of::<T>() == 1 {
            gpu.bind()?;
            let byte = bytes(&[value])[0];
            // SAFETY: as many bytes as the array has.
            let code = unsafe { sys::cuMemsetD8Async(pointer, byte, self.length * size_of::<T>(), gpu.0.stream.as_inner()) };
            return gpu.check(code, "cuMemsetD8Async");
        }
        let (mut pointer, mut length, mut value) = (pointer, self.length as u64, value);
        let mut arguments = [(&raw mut pointer).cast(), (&raw mut length).cast(), (&raw mut value).cast()];
        // SAFETY: the kernel takes a pointer, the number of elements there, and one.
        unsafe { gpu.launch(&format!("fill_{}", T::SUFFIX), (grid(self.length), 1), &mut arguments) }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        self.region.block.gpu()
    }

    /// Whether nobody else holds these elements.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.region) == 1
    }

    /// Whether both are the same elements.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.region, &other.region)
    }

    /// Reads the elements. Blocks until all work before is done.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what failed before.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let mut elements = vec![T::default(); self.length];
        self.read(&mut elements)?;
        Ok(elements)
    }

    /// Reads the elements into a slice of the same length. Blocks as [`to_vec`](Self::to_vec).
    ///
    /// # Errors
    /// [`Error::Argument`] for another length; [`Error::Driver`].
    pub fn read(&self, elements: &mut [T]) -> Result<()> {
        if elements.len() != self.length {
            return Err(Error::argument("read", format!("{} elements into {}", self.length, elements.len())));
        }
        if self.length == 0 {
            return Ok(());
        }
        self.region.block.read(self.region.start, bytes_mut(elements))
    }

    /// Gives the bytes of the elements to `each`, up to 4 MiB at a time: for an array that the host has no room for. Blocks until all work before is
    /// done, and not for work that others ask for meanwhile.
    ///
    /// # Errors
    /// What `each` returns; [`Error::Driver`].
    pub fn read_in_parts<E: From<Error>>(&self, each: impl FnMut(&[u8]) -> std::result::Result<(), E>) -> std::result::Result<(), E> {
        if self.length == 0 {
            return Ok(());
        }
        let region = &self.region;
        region.block.read_in_parts(region.start, self.length * size_of::<T>(), each)
    }

    /// A copy of its own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn deep_copy(&self) -> Result<Self> {
        let copy = Self::new(self.gpu(), self.length)?;
        if self.length > 0 {
            let (gpu, target, source) = (self.gpu(), copy.pointer()?, self.pointer()?);
            gpu.bind()?;
            // SAFETY: both hold as many bytes, and live until the stream is done with them, as all memory does.
            let code = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, self.length * size_of::<T>(), gpu.0.stream.as_inner()) };
            gpu.check(code, "copying on the device")?;
        }
        Ok(copy)
    }

    /// A copy of elements that something else put on the device, such as the host program's own kernels. It is made after all that was asked of `stream`
    /// before, and what is asked of `stream` later comes after the copy; a null `stream` is the legacy default one. Local; doesn't wait for the device.
    ///
    /// # Safety
    /// `pointer` must be the address of `length` elements on this device that stay there until the copy is done, and `stream` a stream of its primary
    /// context.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub unsafe fn copy_from_device(gpu: &Gpu, pointer: u64, length: usize, stream: *mut std::ffi::c_void) -> Result<Self> {
        let copy = Self::new(gpu, length)?;
        if length > 0 {
            let (target, foreign) = (copy.pointer()?, stream.cast());
            gpu.bind()?;
            gpu.after(foreign, gpu.0.stream.as_inner())?;
            // SAFETY: the source is the caller's promise; the target has as many bytes.
            let code = unsafe { sys::cuMemcpyDtoDAsync_v2(target, pointer, length * size_of::<T>(), gpu.0.stream.as_inner()) };
            gpu.check(code, "copying on the device")?;
            gpu.after(gpu.0.stream.as_inner(), foreign)?;
        }
        Ok(copy)
    }

    /// The address, and the stream after whose work of now it holds the elements: for the host program's own kernels, as long as this lives.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn as_device_pointer(&self) -> Result<(u64, *mut std::ffi::c_void)> {
        Ok((self.pointer()?, self.gpu().0.stream.as_inner().cast()))
    }

    /// The address, for work that the stream does next.
    pub(crate) fn pointer(&self) -> Result<u64> {
        Ok(self.region.block.pointer()? + self.region.start as u64)
    }

    /// Refuses another device or length.
    pub(crate) fn check(&self, operation: &'static str, gpu: &Gpu, length: usize) -> Result<()> {
        if !Arc::ptr_eq(&self.gpu().0, &gpu.0) {
            let what = format!("operands on devices {} and {}", gpu.ordinal(), self.gpu().ordinal());
            return Err(Error::argument(operation, what));
        }
        if self.length != length {
            return Err(Error::argument(
                operation,
                format!("{} elements where {length} are needed", self.length),
            ));
        }
        Ok(())
    }
}

/// Blocks of a kernel over so many elements, a thread an element until the grid is large enough to loop.
pub(crate) fn grid(elements: usize) -> usize {
    elements.div_ceil(crate::gpu::BLOCK as usize).min(1 << 14)
}

//! Elements on a GPU, in one piece and row-major order.

use ndarray::{ArrayD, Dimension, IxDyn};
use rankgrad_cuda::{Array, Gpu, Scalar, elementwise, rules};

use super::{Device, NormKind};
use crate::tensor::{DType, Data, IntoShape};
use crate::{Error, ErrorKind, Result};

/// Elements of a tensor on a GPU. Cloning shares them; who writes to them makes sure that nobody else holds them.
#[derive(Debug, Clone)]
pub struct CudaArray {
    shape: IxDyn,
    elements: Elements,
}

/// The elements by dtype; booleans are bytes.
#[derive(Debug, Clone)]
pub(crate) enum Elements {
    F32(Array<f32>),
    F64(Array<f64>),
    I64(Array<i64>),
    Bool(Array<u8>),
}

/// `f32` or `f64`, on a GPU.
pub(crate) trait GpuFloat: rankgrad_cuda::Float {
    fn of_elements(elements: &Elements) -> Option<&Array<Self>>;
    fn into_elements(array: Array<Self>) -> Elements;
}

macro_rules! gpu_float {
    ($type:ty, $variant:ident) => {
        impl GpuFloat for $type {
            fn of_elements(elements: &Elements) -> Option<&Array<Self>> {
                match elements {
                    Elements::$variant(array) => Some(array),
                    _ => None,
                }
            }
            fn into_elements(array: Array<Self>) -> Elements {
                Elements::$variant(array)
            }
        }
    };
}
gpu_float!(f32, F32);
gpu_float!(f64, F64);

/// Runs one expression on the elements, whatever their dtype.
macro_rules! each {
    ($elements:expr, $array:ident => $body:expr) => {
        match $elements {
            Elements::F32($array) => $body,
            Elements::F64($array) => $body,
            Elements::I64($array) => $body,
            Elements::Bool($array) => $body,
        }
    };
}

impl From<rankgrad_cuda::Error> for Error {
    fn from(error: rankgrad_cuda::Error) -> Self {
        ErrorKind::Cuda { what: error.to_string() }.into()
    }
}

fn not_float(op: &str) -> Error {
    ErrorKind::DType {
        op: op.into(),
        expected: "f32 or f64".into(),
        found: "i64 or bool".into(),
    }
    .into()
}

/// The numbers in a list of the kernel's form, `0-3,8`.
fn listed(text: &str) -> impl Iterator<Item = usize> + '_ {
    text.trim().split(',').flat_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        match (first.parse::<usize>(), last.parse::<usize>()) {
            (Ok(first), Ok(last)) => first..last + 1,
            _ => 0..0,
        }
    })
}

fn allowed_cores() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.map(|list| listed(list).collect()).unwrap_or_default()
}

impl Data {
    /// Floats on a GPU.
    pub(crate) fn gpu_floats<T: GpuFloat>(&self) -> Result<&Array<T>> {
        let array = match self {
            Data::Cuda(array) => array.floats::<T>(),
            _ => None,
        };
        array.ok_or_else(|| {
            let (dtype, shape, device) = (self.dtype(), self.shape(), self.device());
            ErrorKind::Cuda {
                what: format!("an array of {dtype} {shape:?} on {device} where another dtype on a GPU was expected"),
            }
            .into()
        })
    }
}

/// Arrays of the crate `rankgrad_cuda`, such as gradients that a program's own kernels made, without a copy.
impl CudaArray {
    /// Elements of type `f32`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if the shape holds another number of elements.
    pub fn from_f32(array: Array<f32>, shape: impl IntoShape) -> Result<Self> {
        Self::shaped(Elements::F32(array), &shape.into_shape())
    }

    /// Elements of type `f64`.
    ///
    /// # Errors
    /// As [`from_f32`](Self::from_f32).
    pub fn from_f64(array: Array<f64>, shape: impl IntoShape) -> Result<Self> {
        Self::shaped(Elements::F64(array), &shape.into_shape())
    }

    fn shaped(elements: Elements, shape: &[usize]) -> Result<Self> {
        let array = Self::of(elements, shape);
        if crate::tensor::shape::count("from_array", shape)? != array.len() {
            let rule = "the shape must hold as many elements as the array";
            return Err(crate::tensor::shape::mismatch("from_array", &[array.len()], shape, rule));
        }
        Ok(array)
    }
}

impl CudaArray {
    /// Devices whose cores this process may use; all if that can't be told.
    ///
    /// From the file that hwloc has it from, too: hwloc leaves devices out of a topology unless it is told otherwise before it reads it, and the crate
    /// hwloc2 can't tell it.
    pub(crate) fn near() -> Result<Vec<u32>> {
        let (all, mine) = (0..rankgrad_cuda::devices()?, allowed_cores());
        let is_near = |&n: &u32| {
            let cores = Gpu::pci_address(n).map(|address| {
                let file = format!("/sys/bus/pci/devices/{address}/local_cpulist");
                std::fs::read_to_string(file).unwrap_or_default()
            });
            cores.is_ok_and(|cores| listed(&cores).any(|core| mine.contains(&core)))
        };
        let near: Vec<u32> = all.clone().filter(is_near).collect();
        Ok(if near.is_empty() { all.collect() } else { near })
    }

    pub(crate) fn of(elements: Elements, shape: &[usize]) -> Self {
        CudaArray {
            shape: IxDyn(shape),
            elements,
        }
    }

    /// The elements, if they are of this type.
    pub(crate) fn floats<T: GpuFloat>(&self) -> Option<&Array<T>> {
        T::of_elements(&self.elements)
    }

    /// Floats in a shape that holds as many.
    pub(crate) fn of_floats<T: GpuFloat>(array: Array<T>, shape: &[usize]) -> Self {
        CudaArray::of(T::into_elements(array), shape)
    }

    /// Contiguous elements, copied to a device.
    pub(crate) fn from_host(data: &Data, ordinal: u32) -> Result<Self> {
        let gpu = Gpu::open(ordinal)?;
        fn slice<T: Copy>(array: &ndarray::ArcArray<T, IxDyn>) -> std::borrow::Cow<'_, [T]> {
            array
                .as_slice()
                .map_or_else(|| array.iter().copied().collect::<Vec<_>>().into(), Into::into)
        }
        let elements = match data {
            Data::F32(a) => Elements::F32(Array::from_slice(&gpu, &slice(a))?),
            Data::F64(a) => Elements::F64(Array::from_slice(&gpu, &slice(a))?),
            Data::I64(a) => Elements::I64(Array::from_slice(&gpu, &slice(a))?),
            Data::Bool(a) => {
                let bytes: Vec<u8> = a.iter().map(|&b| u8::from(b)).collect();
                Elements::Bool(Array::from_slice(&gpu, &bytes)?)
            }
            Data::Cuda(array) => return Ok(array.clone()),
        };
        Ok(CudaArray::of(elements, data.shape()))
    }

    pub(crate) fn full(ordinal: u32, dtype: DType, shape: &[usize], value: f64) -> Result<Self> {
        let (gpu, n) = (Gpu::open(ordinal)?, shape.iter().product());
        let elements = match dtype {
            DType::F32 => Elements::F32(Array::full(&gpu, n, value as f32)?),
            DType::F64 => Elements::F64(Array::full(&gpu, n, value)?),
            DType::I64 => Elements::I64(Array::full(&gpu, n, value as i64)?),
            DType::Bool => Elements::Bool(Array::full(&gpu, n, u8::from(value != 0.0))?),
        };
        Ok(CudaArray::of(elements, shape))
    }

    pub(crate) fn device(&self) -> Device {
        Device::Cuda(each!(&self.elements, a => a.gpu().ordinal()))
    }

    pub(crate) fn dtype(&self) -> DType {
        match &self.elements {
            Elements::F32(_) => DType::F32,
            Elements::F64(_) => DType::F64,
            Elements::I64(_) => DType::I64,
            Elements::Bool(_) => DType::Bool,
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.shape.slice()
    }

    pub(crate) fn raw_dim(&self) -> IxDyn {
        self.shape.clone()
    }

    pub(crate) fn len(&self) -> usize {
        each!(&self.elements, a => a.len())
    }

    pub(crate) fn is_standard_layout(&self) -> bool {
        true
    }

    pub(crate) fn is_unique(&self) -> bool {
        each!(&self.elements, a => a.is_unique())
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (&self.elements, &other.elements) {
            (Elements::F32(a), Elements::F32(b)) => a.is_same(b),
            (Elements::F64(a), Elements::F64(b)) => a.is_same(b),
            (Elements::I64(a), Elements::I64(b)) => a.is_same(b),
            (Elements::Bool(a), Elements::Bool(b)) => a.is_same(b),
            _ => false,
        }
    }

    pub(crate) fn to_host(&self) -> Result<Data> {
        fn shaped<T: Scalar>(array: &Array<T>, shape: &IxDyn) -> Result<ArrayD<T>> {
            ArrayD::from_shape_vec(shape.clone(), array.to_vec()?).map_err(|error| {
                ErrorKind::Cuda {
                    what: format!("elements of shape {shape:?}: {error}"),
                }
                .into()
            })
        }
        Ok(match &self.elements {
            Elements::F32(a) => Data::F32(shaped(a, &self.shape)?.into_shared()),
            Elements::F64(a) => Data::F64(shaped(a, &self.shape)?.into_shared()),
            Elements::I64(a) => Data::I64(shaped(a, &self.shape)?.into_shared()),
            Elements::Bool(a) => Data::Bool(shaped(a, &self.shape)?.mapv(|byte| byte != 0).into_shared()),
        })
    }

    /// Gives the bytes of the elements to `each`, some at a time. Blocks for the work before.
    pub(crate) fn read_in_parts(&self, each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        each!(&self.elements, a => a.read_in_parts(each))
    }

    /// The same elements in a shape that holds as many.
    pub(crate) fn reshaped(self, shape: &[usize]) -> Self {
        CudaArray {
            shape: IxDyn(shape),
            ..self
        }
    }

    /// The sum of two arrays of one shape, on the device of the first.
    pub(crate) fn sum_with(&self, other: &Self) -> Result<Self> {
        let elements = match (&self.elements, &other.elements) {
            (Elements::F32(a), Elements::F32(b)) => Elements::F32(elementwise::add(a, b)?),
            (Elements::F64(a), Elements::F64(b)) => Elements::F64(elementwise::add(a, b)?),
            _ => return Err(not_float("accumulate")),
        };
        Ok(CudaArray::of(elements, self.shape()))
    }

    pub(crate) fn scaled(&self, factor: f64) -> Result<Self> {
        Ok(CudaArray::of(
            match &self.elements {
                Elements::F32(a) => Elements::F32(elementwise::scale(a, factor as f32)?),
                Elements::F64(a) => Elements::F64(elementwise::scale(a, factor)?),
                _ => return Err(not_float("scale")),
            },
            self.shape(),
        ))
    }

    /// Each element between `-max` and `max`; NaN stays.
    pub(crate) fn clamped(&self, max: f64) -> Result<Self> {
        Ok(CudaArray::of(
            match &self.elements {
                Elements::F32(a) => Elements::F32(elementwise::clamp(a, max as f32)?),
                Elements::F64(a) => Elements::F64(elementwise::clamp(a, max)?),
                _ => return Err(not_float("clamp")),
            },
            self.shape(),
        ))
    }

    fn sums(&self, sum: rules::Sum) -> Result<Vec<f64>> {
        let sums = match &self.elements {
            Elements::F32(a) => rules::block_sums(sum, &[a])?,
            Elements::F64(a) => rules::block_sums(sum, &[a])?,
            _ => return Err(not_float("norm")),
        };
        Ok(sums.concat())
    }

    /// The norm of all elements, in the order of `arithmetic::sum`: blocks are added up from the first to the last.
    pub(crate) fn norm(&self, kind: NormKind) -> Result<f64> {
        let total = |sums: Vec<f64>| sums.into_iter().fold(0.0, |sum, block| sum + block);
        Ok(match kind {
            NormKind::One => total(self.sums(rules::Sum::Magnitudes)?),
            NormKind::Two => total(self.sums(rules::Sum::Squares)?).sqrt(),
            NormKind::Inf => {
                let larger = |most: f64, x: f64| if most > x || most.is_nan() { most } else { x };
                self.sums(rules::Sum::Largest)?.into_iter().fold(0.0, larger)
            }
        })
    }

    pub(crate) fn is_finite(&self) -> Result<bool> {
        Ok(self.sums(rules::Sum::NotFinite)?.iter().all(|&count| count == 0.0))
    }
}

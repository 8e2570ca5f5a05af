//! Where elements lie: the memory of this rank, or a GPU. Without the feature `cuda` there are no GPUs, and all of this compiles to nothing.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
mod none;
#[cfg(not(feature = "cuda"))]
#[path = "no_ops.rs"]
pub(crate) mod ops;
#[cfg(feature = "cuda")]
pub(crate) mod ops;
#[cfg(all(test, feature = "cuda"))]
pub(crate) mod testing;

use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(feature = "cuda")]
pub use cuda::CudaArray;
#[cfg(feature = "cuda")]
pub(crate) use cuda::GpuFloat;
#[cfg(not(feature = "cuda"))]
pub use none::CudaArray;
use serde::{Deserialize, Serialize};

use super::ops::record_any;
use super::{DType, Data, Gradient, Tensor};
use crate::config::launcher;
use crate::{ErrorKind, Result};

/// Where a tensor's elements lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Device {
    /// The memory of this rank.
    #[default]
    Cpu,
    /// A GPU, by its number among those that this process sees, from 0. Needs the feature `cuda`. An operation that has no kernel runs here, on a
    /// copy of its operands, and so do those whose operands are on several devices; their results are here.
    Cuda(u32),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

/// Which norm, for arrays on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormKind {
    One,
    Two,
    Inf,
}

/// This rank's place among those of its node; the largest number until a world says so.
static LOCAL_RANK: AtomicU32 = AtomicU32::new(u32::MAX);

/// Says which place this rank has among those of its node.
pub(crate) fn set_local_rank(rank: u32) {
    LOCAL_RANK.store(rank, Ordering::Relaxed);
}

fn local_rank() -> u32 {
    match LOCAL_RANK.load(Ordering::Relaxed) {
        u32::MAX => launcher::local_rank(launcher::environment).unwrap_or(0),
        known => known,
    }
}

impl Device {
    /// The GPU of this rank: of those near the cores that it may use, the one at its place among the ranks of its node. Local; loads the driver
    /// the first time, and opens no device.
    ///
    /// Ranks that no device shard lives on needn't call it, and then never touch a GPU.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`]: there is no driver or no device, or the program was built without the feature `cuda`.
    ///
    /// # Examples
    /// ```
    /// use rankgrad::tensor::Device;
    ///
    /// let device = Device::local_cuda().unwrap_or_else(|error| {
    ///     println!("{error}");
    ///     Device::Cpu
    /// });
    /// ```
    pub fn local_cuda() -> Result<Device> {
        let near = CudaArray::near()?;
        let place = local_rank() as usize % near.len().max(1);
        Ok(near.get(place).map_or(Device::Cpu, |&n| Device::Cuda(n)))
    }
}

impl Data {
    /// Where the elements lie.
    pub fn device(&self) -> Device {
        match self {
            Data::Cuda(array) => array.device(),
            _ => Device::Cpu,
        }
    }

    /// The same elements on a device: themselves if they are there. A copy to a GPU doesn't wait for it; one from a GPU does.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`]: no such device, or no memory there.
    pub fn to(&self, device: Device) -> Result<Data> {
        match (self, device) {
            (data, device) if data.device() == device => Ok(data.clone()),
            (Data::Cuda(array), Device::Cpu) => array.to_host(),
            (Data::Cuda(array), Device::Cuda(n)) => Ok(Data::Cuda(CudaArray::from_host(&array.to_host()?, n)?)),
            (data, Device::Cuda(n)) => Ok(Data::Cuda(CudaArray::from_host(&data.to_contiguous(), n)?)),
            (data, Device::Cpu) => Ok(data.clone()),
        }
    }

    /// Elements that are all one value, on a device.
    pub(crate) fn filled_on(device: Device, dtype: DType, shape: &[usize], value: f64) -> Result<Data> {
        match device {
            Device::Cpu => Ok(Data::filled(dtype, shape, value)),
            Device::Cuda(n) => Ok(Data::Cuda(CudaArray::full(n, dtype, shape, value)?)),
        }
    }
}

impl Gradient {
    /// Where its values lie.
    pub fn device(&self) -> Device {
        match self {
            Gradient::Dense(data) => data.device(),
            Gradient::Sparse(sparse) => sparse.values.device(),
        }
    }

    /// The same gradient with its values on a device.
    ///
    /// # Errors
    /// As [`Data::to`].
    pub fn to(&self, device: Device) -> Result<Gradient> {
        Ok(match self {
            Gradient::Dense(data) => Gradient::Dense(data.to(device)?),
            Gradient::Sparse(sparse) => {
                let mut moved = sparse.clone();
                moved.values = sparse.values.to(device)?;
                Gradient::Sparse(moved)
            }
        })
    }
}

impl Tensor {
    /// The same values on a device; itself if they are there. Local; a copy to a GPU doesn't wait for it, one from a GPU waits for all work on
    /// what is copied. Gradients go the way back, but stay where they are for a leaf: an optimizer takes them from anywhere.
    ///
    /// ```
    /// use rankgrad::tensor::{Device, Tensor};
    ///
    /// let x = Tensor::from_vec(vec![1.0, 2.0], 2)?;
    /// assert_eq!(x.to(Device::Cpu)?.device(), Device::Cpu);
    /// if let Ok(device) = Device::local_cuda() {
    ///     let p = x.to(device)?.parameter()?; // updated on the GPU
    ///     assert_eq!(p.to_vec::<f64>()?, [1.0, 2.0]);
    /// }
    /// # Ok::<(), rankgrad::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`]: no such device, no memory there, or a program without the feature `cuda`.
    pub fn to(&self, device: Device) -> Result<Tensor> {
        let from = self.device();
        if from == device {
            return Ok(self.clone());
        }
        let back = if self.is_leaf() { None } else { Some(from) };
        Ok(record_any("to", self.data().to(device)?, &[self], move |gradient, _| {
            let gradient = match back {
                Some(device) => gradient.to(device)?,
                None => gradient,
            };
            Ok(vec![Some(Gradient::Dense(gradient))])
        }))
    }
}

/// An operation that isn't there for elements on a GPU.
pub(crate) fn not_here(op: &str, device: Device) -> crate::Error {
    ErrorKind::Device {
        op: op.into(),
        device: device.to_string(),
    }
    .into()
}

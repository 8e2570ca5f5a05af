//! No GPUs.

use std::convert::Infallible;

use ndarray::IxDyn;

use super::Device;
use crate::tensor::{DType, Data};
use crate::{ErrorKind, Result};

/// Elements on a GPU; there are none without the feature `cuda`.
#[derive(Debug, Clone)]
pub struct CudaArray {
    never: Infallible,
}

fn not_built<T>() -> Result<T> {
    Err(ErrorKind::Cuda {
        what: "this program was built without the feature `cuda`".into(),
    }
    .into())
}

#[allow(dead_code, reason = "as the other one")]
impl CudaArray {
    pub(crate) fn near() -> Result<Vec<u32>> {
        not_built()
    }
    pub(crate) fn from_host(_: &Data, _: u32) -> Result<Self> {
        not_built()
    }
    pub(crate) fn full(_: u32, _: DType, _: &[usize], _: f64) -> Result<Self> {
        not_built()
    }
    pub(crate) fn device(&self) -> Device {
        match self.never {}
    }
    pub(crate) fn dtype(&self) -> DType {
        match self.never {}
    }
    pub(crate) fn shape(&self) -> &[usize] {
        match self.never {}
    }
    pub(crate) fn raw_dim(&self) -> IxDyn {
        match self.never {}
    }
    pub(crate) fn len(&self) -> usize {
        match self.never {}
    }
    pub(crate) fn is_standard_layout(&self) -> bool {
        match self.never {}
    }
    pub(crate) fn is_unique(&self) -> bool {
        match self.never {}
    }
    pub(crate) fn is_same(&self, _: &Self) -> bool {
        match self.never {}
    }
    pub(crate) fn to_host(&self) -> Result<Data> {
        match self.never {}
    }
    pub(crate) fn read_in_parts(&self, _: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match self.never {}
    }
    pub(crate) fn reshaped(self, _: &[usize]) -> Self {
        match self.never {}
    }
    pub(crate) fn sum_with(&self, _: &Self) -> Result<Self> {
        match self.never {}
    }
    pub(crate) fn scaled(&self, _: f64) -> Result<Self> {
        match self.never {}
    }
    pub(crate) fn clamped(&self, _: f64) -> Result<Self> {
        match self.never {}
    }
    pub(crate) fn norm(&self, _: crate::tensor::device::NormKind) -> Result<f64> {
        match self.never {}
    }
    pub(crate) fn is_finite(&self) -> Result<bool> {
        match self.never {}
    }
}

//! Parameters on other ranks.

use super::builtin::{assign_tensor, freeze_parameter, module_parameters, put_tensor, version_of};
use super::tables::Tables;
use crate::protocol::ContextId;
use crate::rpc::Calls;
use crate::rref::RRef;
use crate::tensor::{Device, Gradient, Tensor};
use crate::{ErrorKind, Result};

/// Putting tensors on ranks, and setting them. Whatever issues [`Calls`] has these methods.
pub trait ParameterCalls: Calls {
    /// Makes a tensor a parameter of a rank: a leaf there that requires gradients (f32 or f64). Targeted; the reference is there at once. Blocks only while
    /// the window to the rank is full.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] for integers and booleans: use [`put_constant`](Self::put_constant). As [`Calls::remote`].
    fn put(&self, to: u32, tensor: Tensor) -> Result<RRef<Tensor>> {
        if !tensor.dtype().is_float() {
            let (op, expected) = ("put (a parameter)".into(), "f32 or f64".into());
            return Err(ErrorKind::DType {
                op,
                expected,
                found: tensor.dtype().to_string(),
            }
            .into());
        }
        self.remote(to, put_tensor, (tensor, true))
    }

    /// Keeps a tensor on a rank, without gradients. Targeted; the reference is there at once.
    ///
    /// # Errors
    /// As [`Calls::remote`].
    fn put_constant(&self, to: u32, tensor: Tensor) -> Result<RRef<Tensor>> {
        self.remote(to, put_tensor, (tensor, false))
    }

    /// A copy of a tensor, on a device of this rank; [`fetch`](Calls::fetch) gives one in its memory. Targeted; blocks until it is there. Recorded by a
    /// context: gradients go back to the tensor.
    ///
    /// What lives on that device already is shared, not copied, unless a context records it.
    ///
    /// ```
    /// use rankgrad::prelude::*;
    /// use rankgrad::tensor::Device;
    ///
    /// rankgrad::local::run(2, |world| {
    ///     world.lead(|world| {
    ///         let w = world.put(1, Tensor::from_vec(vec![1.0, 2.0], [2])?)?;
    ///         let device = Device::local_cuda().unwrap_or(Device::Cpu);
    ///         assert_eq!(world.fetch_to(&w, device)?.to_vec::<f64>()?, [1.0, 2.0]);
    ///         Ok(())
    ///     })
    /// })
    /// # .unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`Calls::fetch`]; [`ErrorKind::Cuda`]: no such device, no memory there.
    fn fetch_to(&self, rref: &RRef<Tensor>, device: Device) -> Result<Tensor> {
        if rref.is_local() && self.caller().recorder.is_none() {
            return rref.with(Tensor::detach)?.to(device);
        }
        self.fetch(rref)?.to(device)
    }

    /// References to the parameters of a user's model on its owner. Targeted; blocks until the answer is there.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] from the owner if its type is no [`Module`](crate::rpc::Module); as [`Calls::call`].
    fn parameters<T>(&self, module: &RRef<T>) -> Result<Vec<RRef<Tensor>>> {
        self.call(module.owner(), module_parameters, (module.untyped(),))
    }

    /// The gradients that a context holds on this rank, of leaves of this rank: on any rank that took part, also without the [`Context`](crate::Context). Local.
    ///
    /// # Errors
    /// [`ErrorKind::BackwardInFlight`] while a backward of it is under way here; [`ErrorKind::ContextReleased`].
    fn gradients_here(&self, context: ContextId) -> Result<Vec<(Tensor, Gradient)>> {
        let runtime = &self.caller().runtime;
        runtime.check_gradients("gradients", context)?;
        let recording = Tables::of(runtime)?.known_recording(context);
        let gradients = recording.map(|r| r.gradients()).unwrap_or_default();
        Ok(gradients
            .into_iter()
            .map(|(leaf, gradient)| (Tensor::from_leaf(leaf), gradient))
            .collect())
    }

    /// Freezes a parameter: graphs recorded from now on don't lead to it, and optimizers leave it and its state as they are. Targeted; blocks until it is.
    ///
    /// # Errors
    /// [`ErrorKind::NotALeaf`] from its owner; as [`Calls::call`].
    fn freeze(&self, parameter: &RRef<Tensor>) -> Result<()> {
        self.call(parameter.owner(), freeze_parameter, (parameter, true))
    }

    /// Undoes [`freeze`](Self::freeze). Targeted; blocks until it is done.
    ///
    /// # Errors
    /// As [`freeze`](Self::freeze).
    fn unfreeze(&self, parameter: &RRef<Tensor>) -> Result<()> {
        self.call(parameter.owner(), freeze_parameter, (parameter, false))
    }

    /// The version of a parameter: the number of its updates. Targeted; blocks until the answer is there.
    ///
    /// # Errors
    /// [`ErrorKind::NotALeaf`] from its owner; as [`Calls::call`].
    fn version(&self, parameter: &RRef<Tensor>) -> Result<u64> {
        self.call(parameter.owner(), version_of, (parameter,))
    }

    /// Sets the value of a tensor on its owner. A parameter keeps its dtype and shape, and gets a new version, which is returned (0 for others).
    /// Graphs that saw the old value keep it. Targeted; blocks until it is set.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] or [`ErrorKind::DType`] if a parameter's value doesn't fit, from its owner. As [`Calls::call`].
    fn assign(&self, target: &RRef<Tensor>, value: Tensor) -> Result<u64> {
        self.call(target.owner(), assign_tensor, (target, value))
    }
}

impl<C: Calls + ?Sized> ParameterCalls for C {}

//! What this library asks of other ranks with its own remote functions.

use super::Counters;
use super::sent::SentGradient;
use super::tables::Tables;
use crate::protocol::ContextId;
use crate::rpc::{Calls, Scope, stored};
use crate::rref::RRef;
use crate::tensor::{Device, Tensor};
use crate::{Error, ErrorKind, Result};

/// The leaf that a reference names.
pub(super) fn parameter(scope: &Scope, what: &str, rref: &RRef<Tensor>) -> Result<Tensor> {
    let tensor = rref.local(scope)?;
    if tensor.leaf().is_none() {
        let why = if tensor.requires_grad() {
            "it was computed"
        } else {
            "it requires no gradient"
        };
        return Err(ErrorKind::NotALeaf {
            what: what.into(),
            why: why.into(),
        }
        .into());
    }
    Ok(tensor)
}

/// A parameter of this rank with these values, where the settings want parameters: here or on the rank's GPU.
pub(crate) fn parameter_here(scope: &Scope, tensor: Tensor) -> Result<Tensor> {
    let on_gpu = scope.caller().runtime.settings.cuda && tensor.dtype().is_float();
    let tensor = if on_gpu { tensor.to(Device::local_cuda()?)? } else { tensor };
    tensor.parameter()
}

/// A tensor as this rank keeps it: as a parameter, or as it is.
pub(crate) fn kept(scope: &Scope, tensor: Tensor, parameter: bool) -> Result<Tensor> {
    if parameter { parameter_here(scope, tensor) } else { Ok(tensor) }
}

crate::remote! {
    /// A tensor that is kept on this rank; floats become parameters if `parameter`.
    pub(crate) fn put_tensor(scope: &Scope, tensor: Tensor, parameter: bool) -> Result<Tensor> {
        kept(scope, tensor, parameter)
    }

    /// References to the parameters of a module.
    pub(super) fn module_parameters(scope: &Scope, module: RRef<()>) -> Result<Vec<RRef<Tensor>>> {
        let value = scope.caller().runtime.value("parameters", module.id().value)?;
        let stored = stored(&value).ok_or_else(|| Error::user("a value of an unknown kind"))?;
        let parameters = stored.parameters().ok_or_else(|| ErrorKind::Argument {
            op: "parameters".into(),
            what: format!("`{}` doesn't implement `rankgrad::rpc::Module`", stored.type_name()),
        })?;
        parameters.into_iter().map(|p| scope.share(p)).collect()
    }

    /// Sets the value of a tensor.
    pub(crate) fn assign_tensor(scope: &Scope, target: RRef<Tensor>, value: Tensor) -> Result<u64> {
        let current = target.local(scope)?;
        if let Some(leaf) = current.leaf() {
            return leaf.set_data(value.data());
        }
        target.modify("assign", scope.caller(), |tensor| {
            *tensor = value;
            Ok(0)
        })
    }

    /// The gradient of a parameter of this rank in a context.
    pub(super) fn gradient_of(scope: &Scope, context: ContextId, of: RRef<Tensor>) -> Result<Option<SentGradient>> {
        let tensor = parameter(scope, "gradient", &of)?;
        let recording = Tables::of(&scope.caller().runtime)?.known_recording(context);
        Ok(tensor.leaf().and_then(|leaf| recording?.gradient(leaf.id())).map(SentGradient::from))
    }

    /// Adds to the gradient of a parameter of this rank in a context.
    pub(super) fn accumulate_gradient(scope: &Scope, context: ContextId, of: RRef<Tensor>, gradient: SentGradient) -> Result<()> {
        let tensor = parameter(scope, "accumulate", &of)?;
        let gradient = gradient.into_gradient()?;
        let op = || "accumulate".to_owned();
        if gradient.shape() != tensor.shape() {
            let rule = "a gradient has its parameter's shape".into();
            return Err(ErrorKind::Shape { op: op(), left: gradient.shape().to_vec(), right: tensor.shape(), rule }.into());
        }
        if gradient.dtype() != tensor.dtype() {
            return Err(ErrorKind::DType { op: op(), expected: tensor.dtype().to_string(), found: gradient.dtype().to_string() }.into());
        }
        match tensor.leaf() {
            Some(leaf) => {
                let recording = Tables::of(&scope.caller().runtime)?.known_recording(context);
                let gone = || ErrorKind::ContextReleased { operation: op(), context: context.to_string() };
                recording.ok_or_else(gone)?.accumulate(leaf.clone(), gradient)
            }
            None => Ok(()),
        }
    }

    /// Freezes or unfreezes a parameter of this rank.
    pub(super) fn freeze_parameter(scope: &Scope, of: RRef<Tensor>, frozen: bool) -> Result<()> {
        let tensor = parameter(scope, if frozen { "freeze" } else { "unfreeze" }, &of)?;
        if let Some(leaf) = tensor.leaf() {
            leaf.set_requires_grad(!frozen);
        }
        Ok(())
    }

    /// The version of a parameter of this rank.
    pub(super) fn version_of(scope: &Scope, of: RRef<Tensor>) -> Result<u64> {
        Ok(parameter(scope, "version", &of)?.leaf().map_or(0, |leaf| leaf.version()))
    }

    /// What is alive on this rank.
    pub(crate) fn rank_counters(scope: &Scope) -> Result<Counters> {
        use std::sync::atomic::Ordering;
        let runtime = &scope.caller().runtime;
        let (alive, traffic, tables) = (runtime.counters(), runtime.transport.traffic(), Tables::of(runtime)?);
        let asked_by_itself = usize::from(scope.caller_rank() == scope.rank());
        Ok(Counters {
            values: alive.values,
            handles: alive.handles,
            requests: alive.requests - asked_by_itself,
            tasks: alive.tasks - 1,
            contexts: alive.contexts,
            backwards: alive.backwards,
            optimizers: tables.optimizers(),
            updates_in_place: tables.updates.in_place.load(Ordering::Relaxed),
            updates_out_of_place: tables.updates.out_of_place.load(Ordering::Relaxed),
            messages: traffic.messages,
            bytes: traffic.bytes,
        })
    }
}

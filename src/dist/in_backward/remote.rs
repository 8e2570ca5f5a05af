//! What the owner of parameters does for optimizers in backward.

use std::sync::Arc;

use serde_json::Value;

use crate::dist::sent::{SentGradient, SentState};
use crate::dist::tables::Tables;
use crate::optim::in_backward::{InBackward, Observer};
use crate::optim::{InBackwardOptimizers, OptimizerSpec, ParameterReport};
use crate::rpc::{Calls, Scope};
use crate::rref::RRef;
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

/// An optimizer in backward: the parameter that it is attached to, and its number on the owner.
pub(in crate::dist) type Attachment = (RRef<Tensor>, u64);

/// Those of these optimizers that are still attached.
fn chosen(scope: &Scope, attachments: &[Attachment]) -> Result<InBackwardOptimizers> {
    let tensors: Vec<Tensor> = attachments.iter().map(|(rref, _)| rref.local(scope)).collect::<Result<_>>()?;
    let ids: Vec<u64> = attachments.iter().map(|(_, id)| *id).collect();
    Ok(InBackwardOptimizers::of(&tensors).only(&ids))
}

/// One that must still be attached.
pub(in crate::dist) fn one(scope: &Scope, rref: RRef<Tensor>, id: u64) -> Result<InBackwardOptimizers> {
    let value = rref.id().value;
    let found = chosen(scope, &[(rref, id)])?;
    if found.is_empty() {
        return Err(ErrorKind::NoSuchValue {
            operation: "optimizers in backward".into(),
            owner: scope.rank(),
            id: format!("optimizer {id} of {value} (it was detached)"),
        }
        .into());
    }
    Ok(found)
}

crate::remote! {
    /// Attaches an optimizer to each parameter of this owner, with its place in the client's list; returns their numbers.
    pub(super) fn attach(scope: &Scope, spec: OptimizerSpec, options: InBackward, parameters: Vec<RRef<Tensor>>, places: Vec<u32>) -> Result<Vec<u64>> {
        let tensors: Vec<Tensor> = parameters.iter().map(|rref| rref.local(scope)).collect::<Result<_>>()?;
        let updates = Arc::clone(&Tables::of(&scope.caller().runtime)?.updates);
        let observer: Observer = Arc::new(move |report: &ParameterReport| updates.count(usize::from(report.updated), usize::from(report.updated && report.in_place)));
        let parameters = places.iter().map(|&place| place as usize).zip(tensors);
        let attached = InBackwardOptimizers::attach(&spec, &options, parameters, Some(observer))?;
        Ok(attached.ids().into_iter().map(|(id, _)| id).collect())
    }

    /// Numbers and options of what is attached to each parameter.
    pub(super) fn attached(scope: &Scope, parameters: Vec<RRef<Tensor>>) -> Result<Vec<Vec<(u64, OptimizerSpec)>>> {
        let ids = |rref: &RRef<Tensor>| Ok(InBackwardOptimizers::of(&[rref.local(scope)?]).ids());
        parameters.iter().map(ids).collect()
    }

    /// Changes options.
    pub(super) fn set_options(scope: &Scope, attachments: Vec<Attachment>, options: String) -> Result<()> {
        let options: Value = serde_json::from_str(&options).map_err(|e| ErrorKind::Decode { what: format!("changed options: {e}") })?;
        chosen(scope, &attachments)?.set_options(&options)
    }

    /// State of one.
    pub(super) fn state(scope: &Scope, rref: RRef<Tensor>, id: u64) -> Result<Option<SentState>> {
        Ok(one(scope, rref, id)?.state(0)?.as_ref().map(SentState::from))
    }

    /// Puts the state of one in place.
    pub(super) fn load_state(scope: &Scope, rref: RRef<Tensor>, id: u64, state: SentState) -> Result<()> {
        one(scope, rref, id)?.load_state(0, state.into())
    }

    /// The gradient that one has kept.
    pub(super) fn gradient(scope: &Scope, rref: RRef<Tensor>, id: u64) -> Result<Option<SentGradient>> {
        Ok(one(scope, rref, id)?.gradient(0)?.map(SentGradient::from))
    }

    /// Removes them.
    pub(super) fn detach(scope: &Scope, attachments: Vec<Attachment>) -> Result<()> {
        chosen(scope, &attachments)?.detach();
        Ok(())
    }
}

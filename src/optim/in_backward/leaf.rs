//! The optimizers of one leaf, and the hook that runs them.

use std::sync::{Arc, Mutex};

use super::{Attached, lock};
use crate::Result;
use crate::tensor::{Gradient, HookHandle, Leaf, Tensor};

/// The optimizers of one leaf, in the order they were attached.
#[derive(Debug, Default)]
pub(super) struct LeafOptimizers {
    list: Mutex<List>,
    /// Held while they run: backwards that overlap on the leaf update it one after the other. Each single update is also
    /// under the leaf's own lock, which every optimizer's update takes.
    running: Mutex<()>,
}

#[derive(Debug, Default)]
struct List {
    attached: Vec<Arc<Attached>>,
    /// There while one of them asks for it.
    hook: Option<HookHandle>,
}

impl List {
    /// Registers the hook or removes it, as the optimizers ask for.
    fn settle(&mut self, leaf: &Leaf) {
        let wanted = self.attached.iter().any(|one| one.options().register_hook);
        match self.hook.take() {
            Some(hook) if !wanted => hook.remove(),
            None if wanted => self.hook = Some(leaf.register_post_accumulate_hook(run)),
            hook => self.hook = hook,
        }
    }
}

/// Adds an optimizer to a leaf.
pub(super) fn attach(leaf: &Leaf, optimizer: Arc<Attached>) {
    if let Some(optimizers) = leaf.attachment::<LeafOptimizers>() {
        let mut list = lock(&optimizers.list);
        list.attached.push(optimizer);
        list.settle(leaf);
    }
}

/// Takes an optimizer from a leaf; one that is gone already is no error.
pub(super) fn detach(leaf: &Leaf, optimizer: u64) {
    if let Some(optimizers) = leaf.attachment::<LeafOptimizers>() {
        let mut list = lock(&optimizers.list);
        list.attached.retain(|one| one.id() != optimizer);
        list.settle(leaf);
    }
}

/// The optimizers of a leaf.
pub(super) fn attached(leaf: &Leaf) -> Vec<Arc<Attached>> {
    let optimizers = leaf.attachment::<LeafOptimizers>();
    optimizers.map_or_else(Vec::new, |optimizers| lock(&optimizers.list).attached.clone())
}

/// Runs them all on the gradient, each on the whole of it, and leaves none.
fn run(tensor: &Tensor, slot: &mut Option<Gradient>) -> Result<()> {
    let Some((leaf, optimizers)) = tensor.leaf().and_then(|leaf| Some((leaf, leaf.attachment::<LeafOptimizers>()?))) else {
        return Ok(());
    };
    let _one_backward_at_a_time = lock(&optimizers.running);
    let attached = lock(&optimizers.list).attached.clone();
    let Some((last, others)) = attached.split_last() else {
        return Ok(());
    };
    let Some(gradient) = slot.take() else { return Ok(()) };
    for optimizer in others {
        optimizer.take(tensor, leaf, gradient.clone())?;
    }
    last.take(tensor, leaf, gradient)?;
    Ok(())
}

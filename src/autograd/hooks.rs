//! The hooks of leaves in one backward, and what they updated.

use std::sync::Arc;

use crate::Result;
use crate::tensor::{Gradient, Leaf};

/// Runs the post-accumulate hooks of one backward on one rank, and knows which leaves they updated: the error of a hook says so.
#[derive(Debug, Default)]
pub(crate) struct LeafHooks {
    updated: Vec<String>,
}

impl LeafHooks {
    /// Runs the hooks of a leaf on its accumulated gradient.
    ///
    /// # Errors
    /// The first of theirs.
    pub(crate) fn run(&mut self, leaf: &Arc<Leaf>, slot: &mut Option<Gradient>) -> Result<()> {
        let version = leaf.version();
        let result = leaf.run_post_accumulate_hooks(slot);
        if leaf.version() != version {
            self.updated.push(leaf.label());
        }
        result.map_err(|error| error.after_updates(&self.updated))
    }

    /// The leaves that were updated so far.
    pub(crate) fn updated(&self) -> &[String] {
        &self.updated
    }
}

//! One update of one parameter in a single pass over memory: a piece at a time goes through all that is done to it, so that it is fetched once.

use std::sync::OnceLock;

use super::arithmetic::{BLOCK, PIECE};
use super::view::After;
use super::{Float, Norm, StateView, threads};

/// What an update is made of.
#[derive(Debug)]
pub(super) struct Sweep<'a, T> {
    /// The values to update.
    pub p: &'a mut [T],
    /// Where the values are, if not in `p` yet.
    pub old: Option<&'a [T]>,
    pub g: &'a [T],
    pub state: StateView<'a, T>,
    /// The norm of the gradient that is asked for.
    pub norm: Option<Norm>,
}

impl<T: Float> Sweep<'_, T> {
    /// Runs `update` on all elements, in pieces if it is `elementwise`; returns the norm that was asked for. Pieces of a large parameter go to the
    /// threads of the pool; bits don't depend on it.
    ///
    /// # Errors
    /// The first that `update` gives; some elements may be updated then.
    pub(super) fn run(
        mut self,
        elementwise: bool,
        update: impl Fn(&mut [T], &[T], &mut StateView<'_, T>) -> Result<(), String> + Sync,
    ) -> Result<(Option<f64>, After), String> {
        let len = self.p.len();
        if !elementwise || len <= PIECE || self.g.len() != len || !self.state.is_of_len(len) {
            if let Some(old) = self.old {
                self.p.copy_from_slice(old);
            }
            let norm = self.norm.map(|norm| norm.of_slice(self.g));
            update(self.p, self.g, &mut self.state)?;
            return Ok((norm, self.state.after()));
        }
        let mut blocks = vec![0.0; if self.norm.is_some() { len.div_ceil(BLOCK) } else { 0 }];
        let (after, failed) = (OnceLock::new(), OnceLock::new());
        let mut sums = blocks.chunks_mut(PIECE / BLOCK);
        let mut old = self.old.map(|old| old.chunks(PIECE));
        let arrays = self.p.chunks_mut(PIECE).zip(self.g.chunks(PIECE));
        let pieces = arrays.zip(self.state.pieces(PIECE)).map(|((p, g), state)| {
            let old = old.as_mut().and_then(Iterator::next);
            (p, old, g, state, sums.next())
        });
        threads::for_each(pieces, len, |(p, old, g, mut state, sums)| {
            if failed.get().is_some() {
                return;
            }
            if let Some(old) = old {
                p.copy_from_slice(old);
            }
            match update(p, g, &mut state) {
                Ok(()) => drop(after.set(state.after())),
                Err(message) => drop(failed.set(message)),
            }
            // After the update: what it fetched is in the cache now, while a pass before it would wait for memory and do nothing else.
            if let (Some(norm), Some(sums)) = (self.norm, sums) {
                norm.blocks(g, sums);
            }
        });
        match (failed.into_inner(), after.into_inner()) {
            (None, Some(after)) => Ok((self.norm.map(|norm| norm.of_blocks(&blocks)), after)),
            (message, _) => Err(message.unwrap_or_default()),
        }
    }
}

//! One update of one parameter in a single pass over memory: a piece at a time goes through all that is done to it, so that it is fetched once.

use std::sync::OnceLock;

use smallvec::{SmallVec, smallvec};

use super::arithmetic::{BLOCK, PIECE};
use super::view::After;
use super::{Float, Norm, StateView, threads};

/// Elements of a piece that goes through nothing but the update, at most: what a piece costs, whatever its size, is little beside it.
const LONGEST: usize = 8 * PIECE;

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
        self,
        elementwise: bool,
        update: impl Fn(&mut [T], &[T], &mut StateView<'_, T>) -> Result<(), String> + Sync,
    ) -> Result<(Option<f64>, After), String> {
        let Self { p, old, g, state, norm } = self;
        let len = p.len();
        let in_pieces = elementwise && len > PIECE && g.len() == len && state.is_of_len(len);
        let mut blocks: SmallVec<[f64; PIECE / BLOCK]> = smallvec![0.0; norm.map_or(0, |_| len.div_ceil(BLOCK))];
        let after = if in_pieces {
            let (after, failed) = (OnceLock::new(), OnceLock::new());
            // What is done besides the update finds a piece in the cache.
            let longest = if old.is_none() && matches!(norm, None | Some(Norm::Two)) {
                LONGEST
            } else {
                PIECE
            };
            let threads = threads::count(len);
            let (mut p, mut old, mut g, mut state, mut blocks) = (p, old, g, state, &mut blocks[..]);
            let pieces = std::iter::from_fn(|| {
                let left = p.len();
                // Smaller and smaller ones, so that all threads end at about the same time; one alone takes all.
                let share = (left / (2 * threads - 1)).next_multiple_of(BLOCK);
                let size = share.clamp(PIECE, longest).min(left);
                Some((
                    p.split_off_mut(..size).filter(|p| !p.is_empty())?,
                    old.as_mut().and_then(|old| old.split_off(..size)),
                    g.split_off(..size)?,
                    state.split_off(size)?,
                    blocks.split_off_mut(..size.div_ceil(BLOCK)).unwrap_or_default(),
                ))
            });
            threads::for_each(pieces, len, |(p, old, g, state, blocks)| {
                if failed.get().is_some() {
                    return;
                }
                match piece(&update, p, old, g, state, norm, blocks) {
                    Ok(state) => drop(after.set(state)),
                    Err(message) => drop(failed.set(message)),
                }
            });
            match (failed.into_inner(), after.into_inner()) {
                (None, Some(after)) => after,
                (message, _) => return Err(message.unwrap_or_default()),
            }
        } else {
            piece(&update, p, old, g, state, norm, &mut blocks)?
        };
        Ok((norm.map(|norm| norm.of_blocks(&blocks)), after))
    }
}

/// Updates some elements, and puts what the norm of their gradient is made of into its blocks.
fn piece<T: Float>(
    update: &impl Fn(&mut [T], &[T], &mut StateView<'_, T>) -> Result<(), String>,
    p: &mut [T],
    old: Option<&[T]>,
    g: &[T],
    mut state: StateView<'_, T>,
    norm: Option<Norm>,
    blocks: &mut [f64],
) -> Result<After, String> {
    if let Some(old) = old {
        p.copy_from_slice(old);
    }
    // The passes of the update compute the usual norm while they wait for memory.
    if norm == Some(Norm::Two) {
        state.ask_for_squares(g);
    }
    update(p, g, &mut state)?;
    match (norm, state.squares()) {
        (Some(_), Some(squares)) => blocks.iter_mut().zip(squares).for_each(|(block, sum)| *block = sum),
        (Some(norm), None) => norm.blocks(g, blocks),
        (None, _) => {}
    }
    Ok(state.after())
}

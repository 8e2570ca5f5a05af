//! Which rank gets which rows.

use std::ops::Range;

use crate::{ErrorKind, Result};

/// The owners of the parts of a [`Sharded`](super::Sharded) array, in the order of the parts. A rank may be named several times.
///
/// Made of ranks alone (`0..world.size()`, `[2, 0]`), rows are dealt evenly: of `n` parts the first `rows % n` have one more, as `numpy.array_split`
/// has it. [`lengths`](Self::lengths) sets them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owners {
    ranks: Vec<u32>,
    lengths: Option<Vec<usize>>,
}

impl Owners {
    /// These ranks, each with about as many rows. Local.
    pub fn new(ranks: impl IntoIterator<Item = u32>) -> Self {
        Owners {
            ranks: ranks.into_iter().collect(),
            lengths: None,
        }
    }

    /// Numbers of rows, one for each owner; they may be 0. Local.
    pub fn lengths(mut self, lengths: impl IntoIterator<Item = usize>) -> Self {
        self.lengths = Some(lengths.into_iter().collect());
        self
    }

    /// Owner and rows of each part.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if there is no owner, or the lengths don't fit.
    pub(super) fn deal(&self, op: &str, rows: usize) -> Result<Vec<(u32, Range<usize>)>> {
        let refused = |what: String| Err(ErrorKind::Argument { op: op.into(), what }.into());
        let parts = self.ranks.len();
        if parts == 0 {
            return refused("no owners; name at least one rank".into());
        }
        let even = || (0..parts).map(|part| rows / parts + usize::from(part < rows % parts)).collect();
        let lengths: Vec<usize> = self.lengths.clone().unwrap_or_else(even);
        let sum = lengths.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        if lengths.len() != parts || sum != Some(rows) {
            return refused(format!(
                "{rows} rows over the ranks {:?} in lengths {lengths:?}; give one length for each, {rows} in sum",
                self.ranks
            ));
        }
        let mut end = 0;
        let mut next = |n: usize| {
            end += n;
            end - n..end
        };
        Ok(self.ranks.iter().zip(lengths).map(|(&rank, n)| (rank, next(n))).collect())
    }
}

impl From<Range<u32>> for Owners {
    fn from(ranks: Range<u32>) -> Self {
        Owners::new(ranks)
    }
}

impl From<Vec<u32>> for Owners {
    fn from(ranks: Vec<u32>) -> Self {
        Owners::new(ranks)
    }
}

impl From<&[u32]> for Owners {
    fn from(ranks: &[u32]) -> Self {
        Owners::new(ranks.iter().copied())
    }
}

impl<const N: usize> From<[u32; N]> for Owners {
    fn from(ranks: [u32; N]) -> Self {
        Owners::new(ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_dealt_evenly_or_as_told() {
        let dealt = |owners: Owners, rows| owners.deal("split", rows);
        assert_eq!(dealt([0, 1, 2].into(), 8).unwrap(), [(0, 0..3), (1, 3..6), (2, 6..8)]);
        assert_eq!(dealt((1..4).into(), 1).unwrap(), [(1, 0..1), (2, 1..1), (3, 1..1)]);
        assert_eq!(dealt(vec![5].into(), 0).unwrap(), [(5, 0..0)]);
        assert_eq!(
            dealt(Owners::new([2, 0, 2]).lengths([0, 1, 3]), 4).unwrap(),
            [(2, 0..0), (0, 0..1), (2, 1..4)]
        );
        for (owners, rows) in [
            (Owners::new([]), 0),
            (Owners::new([0]).lengths([2]), 3),
            (Owners::new([0, 1]).lengths([3]), 3),
            (Owners::new([0, 1]).lengths([usize::MAX, 4]), 3),
        ] {
            assert!(dealt(owners, rows).is_err());
        }
    }
}

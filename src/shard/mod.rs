//! Arrays that are split over ranks by rows: a weight, a table or a field that one rank can't or shouldn't hold.

mod make;
mod owners;
mod rows;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use owners::Owners;

use crate::dist::name_of_rows;
use crate::rref::RRef;
use crate::tensor::{DType, Tensor};

/// A tensor that is split along its first axis: each part is a tensor of some rows on its owner. Floats are parameters, other dtypes constants.
///
/// It holds references alone, so cloning is cheap, and it can be an argument or a result of a call, to any rank. Parts may have no rows; owners may have
/// several parts.
///
/// Where `at` is a [`Context`](crate::Context), or the [`Scope`](crate::Scope) of a recorded call, what is read is recorded, and gradients go back to the parts. Then
/// every part that has rows is asked, also for none of them: its gradient is zero, not absent, so the optimizer counts the same steps on all parts, as it
/// would on one tensor.
///
/// For an optimizer, and in a checkpoint, each part is a parameter of its own, under a name that tells its rows ([`named`](Self::named)). An elementwise rule gives the bits that it would
/// give on one tensor. Norms don't: that of a whole array is the sum of its parts' (clipping by the global norm), and some rules (LAMB, Muon, Adafactor)
/// would see each part as an array. A [`Checkpoint`](crate::Checkpoint) re-deals the rows, when they are split otherwise than they were.
///
/// ```
/// use rankgrad::optim::SparseAdam;
/// use rankgrad::prelude::*;
/// use rankgrad::shard::{Owners, Sharded};
///
/// remote! {
///     /// The share that some rows of a weight have in a product.
///     fn times(scope: &Scope, x: Tensor, rows: RRef<Tensor>) -> Result<Tensor> {
///         x.matmul(&rows.local(scope)?)
///     }
/// }
///
/// rankgrad::local::run(3, |world| {
///     world.lead(|world| {
///         // Words of two numbers each; nobody ever holds all of them.
///         let words = Sharded::zeros(world, DType::F64, [10, 2], 0..world.size())?;
///         assert_eq!(words.parts().iter().map(|part| part.rows.clone()).collect::<Vec<_>>(), [0..4, 4..7, 7..10]);
///         // A weight, split as its owners like it.
///         let weight = Tensor::from_vec(vec![1.0, 2.0], [2, 1])?;
///         let weight = Sharded::split(world, &weight, Owners::new([2, 0]).lengths([1, 1]))?;
///         let mut optimizer = DistributedOptimizer::new(world, SparseAdam::new(0.1), words.named("words"))?;
///         optimizer.add_group(Adam::new(0.1), weight.named("weight"))?;
///
///         let ctx = world.context()?;
///         let x = words.embedding(&ctx, &Tensor::from_vec(vec![9, 0, 9], [3])?)?;
///         let x = x.add_scalar(1.0)?;
///         let shares = weight.call_each(&ctx, times, |part| {
///             let x = x.slice(1, part.rows.start as i64, part.rows.end as i64, 1)?;
///             Ok((x, &part.rref))
///         })?;
///         let y = (&shares[0] + &shares[1])?;
///         assert_eq!(y.to_vec::<f64>()?, [3.0, 3.0, 3.0]);
///         ctx.backward(&[y.sum()?])?;
///         assert_eq!(optimizer.step(&ctx)?.updated(), 5);
///
///         let last = words.fetch_rows(world, 9..10)?;
///         assert!(last.to_vec::<f64>()?.iter().all(|x| (x + 0.1).abs() < 1e-6));
///         Ok(())
///     })
/// })
/// # .unwrap();
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sharded {
    dtype: DType,
    shape: Vec<usize>,
    parts: Vec<Part>,
}

/// Some rows of a [`Sharded`] array.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Part {
    /// Which rows of the whole; they may be none.
    pub rows: Range<usize>,
    /// The tensor of these rows, on its owner.
    pub rref: RRef<Tensor>,
}

impl Sharded {
    /// Dtype of its elements. Local.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape of the whole. Local.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of rows: the length of the first axis. Local.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    /// The parts, in the order of their rows. Local.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The part that has a row; `None` if there is no such row. Local.
    pub fn part_of(&self, row: usize) -> Option<&Part> {
        let place = self.parts.partition_point(|part| part.rows.end <= row);
        self.parts.get(place).filter(|part| part.rows.contains(&row))
    }

    /// The rank that owns a row; `None` if there is no such row. Local.
    pub fn owner_of(&self, row: usize) -> Option<u32> {
        self.part_of(row).map(|part| part.rref.owner())
    }

    /// The parts that have rows, by name, for optimizers and checkpoints: rows 0 to 4 of `table` are `table[0:5]`. Under such names a checkpoint knows them as
    /// one array. Local.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (String, RRef<Tensor>)> + 'a {
        let parts = self.parts.iter().filter(|part| !part.rows.is_empty());
        parts.map(move |part| (name_of_rows(name, &part.rows), part.rref.clone()))
    }

    /// Shape of so many rows.
    fn shape_of(&self, rows: usize) -> Vec<usize> {
        std::iter::once(rows).chain(self.shape.iter().skip(1).copied()).collect()
    }
}

//! Reading and writing arrays that are split, by rows and by parts.

use std::ops::Range;

use serde::de::DeserializeOwned;

use super::{Part, Sharded};
use crate::autograd::grad_enabled;
use crate::dist::assign_tensor;
use crate::rpc::{Arguments, Calls, Future, Remote, wait_all};
use crate::rref::RRef;
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

crate::remote! {
    /// Rows of a part.
    fn rows_here(scope: &Scope, part: RRef<Tensor>, rows: Range<usize>) -> Result<Tensor> {
        let part = part.local(scope)?;
        match part.shape().first() {
            Some(&all) if rows != (0..all) => part.slice(0, rows.start as i64, rows.end as i64, 1),
            _ => Ok(part),
        }
    }

    /// Rows of a part at these indices.
    fn look_up(scope: &Scope, part: RRef<Tensor>, ids: Tensor) -> Result<Tensor> {
        part.local(scope)?.embedding(&ids)
    }
}

/// Whether all parts take part in what is read.
fn is_recorded(at: &impl Calls) -> bool {
    at.caller().recorder.is_some() && grad_enabled()
}

impl Sharded {
    /// The whole, here. Targeted; asks all owners at once; blocks until all have answered. Recorded by a context.
    ///
    /// # Errors
    /// As [`Calls::call`].
    pub fn fetch(&self, at: &impl Calls) -> Result<Tensor> {
        self.fetch_rows(at, 0..self.rows())
    }

    /// Some rows, here. Targeted; asks their owners at once, in a context those of all parts; blocks until all have answered. Recorded by a context.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for rows that there aren't. As [`Calls::call`].
    pub fn fetch_rows(&self, at: &impl Calls, rows: Range<usize>) -> Result<Tensor> {
        const OP: &str = "fetch_rows";
        if rows.start > rows.end || rows.end > self.rows() {
            let last = rows.end.saturating_sub(1).max(rows.start);
            return Err(self.outside(OP, last as i64));
        }
        let all = is_recorded(at);
        let mut asked = Vec::new();
        for part in self.parts.iter().filter(|part| !part.rows.is_empty()) {
            let (start, end) = (rows.start.max(part.rows.start), rows.end.min(part.rows.end));
            let within = start.saturating_sub(part.rows.start)..end.saturating_sub(part.rows.start);
            match start < end {
                true => asked.push(at.call_async(part.rref.owner(), rows_here, (&part.rref, within))?),
                false if all => asked.push(at.call_async(part.rref.owner(), rows_here, (&part.rref, 0..0))?),
                false => {}
            }
        }
        self.joined(OP, asked, rows.len())
    }

    /// Rows at these indices (i64), which may repeat, in their order: a result of shape `ids.shape() + shape()[1..]`, as [`Tensor::embedding`] of the whole. Targeted; asks
    /// the owners of these rows at once, in a context those of all parts; blocks until all have answered. Recorded by a context: the gradient of each part is
    /// row-sparse, which `SparseAdam`, `Sgd` and `Adagrad` take.
    ///
    /// # Errors
    /// [`ErrorKind::DType`] unless `ids` are i64 and the array is of floats, [`ErrorKind::Index`] for a row that there isn't. As [`Calls::call`].
    pub fn embedding(&self, at: &impl Calls, ids: &Tensor) -> Result<Tensor> {
        const OP: &str = "embedding";
        let places = ids.to_vec::<i64>()?;
        // For each part its rows, counted within it; for each index the place of its row among all that come back.
        let mut wanted: Vec<Vec<i64>> = vec![vec![]; self.parts.len()];
        let mut found = Vec::with_capacity(places.len());
        for &row in &places {
            let within = usize::try_from(row).ok().and_then(|row| {
                let place = self.parts.partition_point(|part| part.rows.end <= row);
                let part = self.parts.get(place).filter(|part| part.rows.contains(&row))?;
                Some((place, row - part.rows.start))
            });
            let (place, within) = within.ok_or_else(|| self.outside(OP, row))?;
            found.push((place, wanted[place].len()));
            wanted[place].push(within as i64);
        }
        let before: Vec<usize> = wanted
            .iter()
            .scan(0, |sum, rows| Some(std::mem::replace(sum, *sum + rows.len())))
            .collect();
        let order: Vec<i64> = found.into_iter().map(|(place, nth)| (before[place] + nth) as i64).collect();
        let all = is_recorded(at);
        let mut asked = Vec::new();
        for (part, rows) in self.parts.iter().zip(wanted) {
            if !rows.is_empty() || (all && !part.rows.is_empty()) {
                let shape = [rows.len()];
                asked.push(at.call_async(part.rref.owner(), look_up, (&part.rref, Tensor::from_vec(rows, shape)?))?);
            }
        }
        let joined = self.joined(OP, asked, order.len())?;
        let ordered = match order.is_sorted() {
            true => joined,
            false => {
                let shape = [order.len()];
                joined.index_select(0, &Tensor::from_vec(order, shape)?)?
            }
        };
        let shape: Vec<i64> = ids.shape().iter().chain(self.shape.iter().skip(1)).map(|&n| n as i64).collect();
        ordered.reshape(&shape)
    }

    /// Sets all values. Targeted; sends each owner its rows; blocks until all have set them. Dtype and shape are checked before anything is sent; if a rank is lost then, others may
    /// have theirs.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] or [`ErrorKind::DType`] if the tensor doesn't fit. As [`Calls::call`].
    pub fn assign(&self, at: &impl Calls, value: &Tensor) -> Result<()> {
        let op = || "Sharded::assign".to_owned();
        if value.shape() != self.shape {
            let rule = "the shape of the whole stays".into();
            let (left, right) = (self.shape.clone(), value.shape());
            return Err(ErrorKind::Shape {
                op: op(),
                left,
                right,
                rule,
            }
            .into());
        }
        if value.dtype() != self.dtype {
            let (expected, found) = (self.dtype.to_string(), value.dtype().to_string());
            return Err(ErrorKind::DType { op: op(), expected, found }.into());
        }
        let value = value.detach();
        let set = |part: &Part| {
            let rows = value.slice(0, part.rows.start as i64, part.rows.end as i64, 1)?;
            at.call_async(part.rref.owner(), assign_tensor, (&part.rref, rows))
        };
        let asked: Vec<Future<u64>> = self.parts.iter().map(set).collect::<Result<_>>()?;
        wait_all(asked).map(drop)
    }

    /// Runs a function for each part on its owner, at once, and gives the results in the order of the parts. `arguments` says what it gets for a part: mostly the reference among
    /// them, whose value is [`local`](RRef::local) there; perhaps its rows. Targeted; blocks until all have answered. Recorded by a context.
    ///
    /// # Errors
    /// What `arguments` returns, then nothing more is sent; of several failures the first to come. As [`Calls::call`].
    pub fn call_each<'p, A, R: DeserializeOwned, G: Arguments<A>>(
        &'p self,
        at: &impl Calls,
        f: impl Fn() -> Remote<A, R>,
        mut arguments: impl FnMut(&'p Part) -> Result<G>,
    ) -> Result<Vec<R>> {
        let call = |part: &'p Part| at.call_async(part.rref.owner(), &f, arguments(part)?);
        let asked: Vec<Future<R>> = self.parts.iter().map(call).collect::<Result<_>>()?;
        wait_all(asked)
    }

    /// The rows that are asked for, one after the other.
    fn joined(&self, op: &str, asked: Vec<Future<Tensor>>, rows: usize) -> Result<Tensor> {
        let mut parts = wait_all(asked)?;
        let joined = match parts.len() {
            0 => Tensor::zeros(self.dtype, self.shape_of(rows)),
            1 => parts.remove(0),
            _ => Tensor::concat(&parts, 0)?,
        };
        if joined.shape() == self.shape_of(rows) && joined.dtype() == self.dtype {
            return Ok(joined);
        }
        let (dtype, shape) = (joined.dtype(), joined.shape());
        let what = format!("{rows} rows of {self:?} came as {dtype} {shape:?}; a part was changed");
        Err(ErrorKind::Argument { op: op.into(), what }.into())
    }

    fn outside(&self, op: &str, index: i64) -> crate::Error {
        let (op, size) = (op.into(), self.rows());
        ErrorKind::Index { op, index, size }.into()
    }
}

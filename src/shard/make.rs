//! Making arrays that are split.

use std::ops::Range;

use super::{Owners, Part, Sharded};
use crate::dist::{kept, put_tensor};
use crate::rpc::{Caller, Calls, Future, wait_all};
use crate::rref::RRef;
use crate::tensor::{DType, IntoShape, Tensor};
use crate::{ErrorKind, Result};

crate::remote! {
    /// Zeros that are kept on this rank.
    fn zeros_here(scope: &Scope, dtype: DType, shape: Vec<usize>) -> Result<Tensor> {
        let bytes = bytes_of("Sharded::zeros", dtype, &shape)?;
        // The allocator ends the process if it is asked for more than there is; this only asks.
        if Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
            return argument("Sharded::zeros", format!("rank {} has no memory for {bytes} bytes, {dtype} {shape:?}", scope.rank()));
        }
        kept(scope, Tensor::zeros(dtype, shape), dtype.is_float())
    }

    /// Dtype and shape of a tensor of this rank.
    fn form_of(scope: &Scope, tensor: RRef<Tensor>) -> Result<(DType, Vec<usize>)> {
        let tensor = tensor.local(scope)?;
        Ok((tensor.dtype(), tensor.shape()))
    }
}

/// How many bytes an array takes.
fn bytes_of(op: &str, dtype: DType, shape: &[usize]) -> Result<usize> {
    let axes = shape.iter().filter(|&&n| n > 0);
    let most = axes
        .copied()
        .try_fold(dtype.size(), usize::checked_mul)
        .filter(|&bytes| bytes <= isize::MAX as usize);
    match most {
        Some(_) if shape.contains(&0) => Ok(0),
        Some(bytes) => Ok(bytes),
        None => argument(op, format!("{dtype} {shape:?} is more than memory can have")),
    }
}

/// Calls that no context records.
fn plain(at: &impl Calls) -> Caller {
    Caller {
        recorder: None,
        ..at.caller().clone()
    }
}

fn argument<T>(op: &str, what: String) -> Result<T> {
    Err(ErrorKind::Argument { op: op.into(), what }.into())
}

impl Sharded {
    /// Splits a tensor: each owner gets a copy of its rows. Targeted; blocks only while the window to a rank is full. Not recorded.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if the tensor is a scalar, there is no owner, or lengths don't fit. As [`Calls::remote`].
    pub fn split(at: &impl Calls, tensor: &Tensor, owners: impl Into<Owners>) -> Result<Self> {
        const OP: &str = "Sharded::split";
        let tensor = tensor.detach();
        let Some(&rows) = tensor.shape().first() else {
            return argument(OP, "a scalar has no rows".into());
        };
        let rows_of = |rows: Range<usize>| tensor.slice(0, rows.start as i64, rows.end as i64, 1);
        make(OP, at, rows, owners.into(), rows_of)
    }

    /// Zeros, made on each owner. Targeted; blocks only while the window to a rank is full.
    ///
    /// # Errors
    /// As [`split`](Self::split); [`ErrorKind::Argument`] for rows that no memory can have. What uses a part whose owner has no memory for it fails.
    pub fn zeros(at: &impl Calls, dtype: DType, shape: impl IntoShape, owners: impl Into<Owners>) -> Result<Self> {
        const OP: &str = "Sharded::zeros";
        let shape = shape.into_shape();
        let Some(&rows) = shape.first() else {
            return argument(OP, "a scalar has no rows".into());
        };
        bytes_of(OP, dtype, &[&[1], &shape[1..]].concat())?;
        let (caller, mut whole) = (
            plain(at),
            Sharded {
                dtype,
                shape,
                parts: vec![],
            },
        );
        for (owner, rows) in owners.into().deal(OP, rows)? {
            let rref = caller.remote(owner, zeros_here, (dtype, whole.shape_of(rows.len())))?;
            whole.parts.push(Part { rows, rref });
        }
        Ok(whole)
    }

    /// An array of so many rows, which `make` gives part by part, also for parts without rows: nobody holds the whole. Targeted; blocks only while the
    /// window to a rank is full. Where owners are to make their parts themselves: [`Calls::remote`] on each, and [`from_parts`](Self::from_parts).
    ///
    /// ```
    /// use rankgrad::Sharded;
    /// use rankgrad::prelude::*;
    ///
    /// rankgrad::local::run(2, |world| {
    ///     world.lead(|world| {
    ///         let numbers = Sharded::from_fn(world, 5, [1, 0], |rows| {
    ///             let values: Vec<f64> = rows.map(|row| row as f64).collect();
    ///             let len = values.len();
    ///             Tensor::from_vec(values, [len])
    ///         })?;
    ///         assert_eq!((numbers.owner_of(2), numbers.owner_of(3)), (Some(1), Some(0)));
    ///         assert_eq!(numbers.fetch(world)?.to_vec::<f64>()?, [0.0, 1.0, 2.0, 3.0, 4.0]);
    ///         Ok(())
    ///     })
    /// })
    /// # .unwrap();
    /// ```
    ///
    /// # Errors
    /// What `make` returns; [`ErrorKind::Argument`] if a part has another number of rows than asked for, or other dtype or row shape than the first. As [`split`](Self::split).
    pub fn from_fn(
        at: &impl Calls,
        rows: usize,
        owners: impl Into<Owners>,
        make: impl FnMut(Range<usize>) -> Result<Tensor>,
    ) -> Result<Self> {
        self::make("Sharded::from_fn", at, rows, owners.into(), make)
    }

    /// Joins tensors that are on ranks already, in this order. Targeted; asks their owners for dtypes and shapes; blocks until all have answered.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if there are none, one is a scalar, or dtypes or row shapes differ. As [`Calls::call`].
    pub fn from_parts(at: &impl Calls, parts: impl IntoIterator<Item = RRef<Tensor>>) -> Result<Self> {
        const OP: &str = "Sharded::from_parts";
        let (caller, parts): (_, Vec<RRef<Tensor>>) = (plain(at), parts.into_iter().collect());
        let ask = |rref: &RRef<Tensor>| caller.call_async(rref.owner(), form_of, (rref,));
        let asked: Vec<Future<_>> = parts.iter().map(ask).collect::<Result<_>>()?;
        let mut whole = Joined(None);
        for (rref, (dtype, shape)) in parts.into_iter().zip(wait_all(asked)?) {
            whole.add(OP, dtype, &shape, |_| Ok(rref))?;
        }
        whole.end(OP)
    }
}

/// Parts on their owners, as `make` gives them.
fn make(op: &str, at: &impl Calls, rows: usize, owners: Owners, mut make: impl FnMut(Range<usize>) -> Result<Tensor>) -> Result<Sharded> {
    let (caller, mut whole) = (plain(at), Joined(None));
    for (owner, rows) in owners.deal(op, rows)? {
        let tensor = make(rows.clone())?.detach();
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        if shape.first() != Some(&rows.len()) {
            return argument(
                op,
                format!("rows {rows:?} have the shape {shape:?}; {} rows were asked for", rows.len()),
            );
        }
        whole.add(op, dtype, &shape, |_| caller.remote(owner, put_tensor, (tensor, dtype.is_float())))?;
    }
    whole.end(op)
}

/// An array that grows part by part.
struct Joined(Option<Sharded>);

impl Joined {
    fn add(&mut self, op: &str, dtype: DType, shape: &[usize], rref: impl FnOnce(&Range<usize>) -> Result<RRef<Tensor>>) -> Result<()> {
        let Some((&rows, row)) = shape.split_first() else {
            return argument(op, "a scalar has no rows".into());
        };
        let empty = || Sharded {
            dtype,
            shape: [&[0], row].concat(),
            parts: vec![],
        };
        let whole = self.0.get_or_insert_with(empty);
        if (whole.dtype, &whole.shape[1..]) != (dtype, row) {
            let (first, at) = (&whole.shape[1..], whole.rows());
            return argument(
                op,
                format!("rows from {at} on are {dtype} {row:?}, and those before {} {first:?}", whole.dtype),
            );
        }
        let rows = whole.shape[0]..whole.shape[0] + rows;
        let rref = rref(&rows)?;
        whole.shape[0] = rows.end;
        whole.parts.push(Part { rows, rref });
        Ok(())
    }

    fn end(self, op: &str) -> Result<Sharded> {
        match self.0 {
            Some(whole) => Ok(whole),
            None => argument(op, "no parts".into()),
        }
    }
}

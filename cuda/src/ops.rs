//! Operations on arrays, and the parts that their gradients are made of. All are local and don't wait for the device unless they say so.
//!
//! # Errors
//! Each returns [`Error::Argument`] for operands that don't go together, [`Error::OutOfMemory`] and
//! [`Error::Driver`].

use crate::array::{Float, grid};
use crate::{Array, Error, Gpu, Result};

/// A function of one operand; numbered as in kernels/ops.cu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "their names say it")]
pub enum Unary {
    Neg,
    Exp,
    Sqrt,
    Abs,
    Tanh,
    Sigmoid,
    Relu,
    AddScalar,
    SubScalar,
    MulScalar,
    DivScalar,
    Square,
}

impl Unary {
    /// Whether its gradient needs the operand; else it needs the result.
    pub fn saves_operand(self) -> bool {
        matches!(self, Unary::Abs | Unary::Square)
    }
}

/// `op` of each element, with the number `c` if it takes one.
///
/// # Errors
/// See the module.
pub fn unary<T: Float>(op: Unary, x: &Array<T>, mut c: T) -> Result<Array<T>> {
    let out = Array::new(x.gpu(), x.len())?;
    let (mut op, mut from, mut to, mut n) = (op as u32, x.pointer()?, out.pointer()?, x.len() as u64);
    let mut arguments = [
        (&raw mut op).cast(),
        (&raw mut from).cast(),
        (&raw mut to).cast(),
        (&raw mut n).cast(),
        (&raw mut c).cast(),
    ];
    // SAFETY: both arrays have `n` elements, and the kernel takes these types.
    unsafe {
        x.gpu()
            .launch(&format!("unary_{}", T::SUFFIX), (grid(x.len()), 1), &mut arguments)?
    };
    Ok(out)
}

/// The gradient of the operand of [`unary`] from that of its result, and what it saved.
///
/// # Errors
/// See the module.
pub fn unary_gradient<T: Float>(op: Unary, g: &Array<T>, saved: &Array<T>, mut c: T) -> Result<Array<T>> {
    saved.check("gradient", g.gpu(), g.len())?;
    let out = Array::new(g.gpu(), g.len())?;
    let (mut op, mut from, mut with, mut to, mut n) = (op as u32, g.pointer()?, saved.pointer()?, out.pointer()?, g.len() as u64);
    let mut arguments = [
        (&raw mut op).cast(),
        (&raw mut from).cast(),
        (&raw mut with).cast(),
        (&raw mut to).cast(),
        (&raw mut n).cast(),
        (&raw mut c).cast(),
    ];
    // SAFETY: the three arrays have `n` elements, and the kernel takes these types.
    unsafe {
        g.gpu()
            .launch(&format!("unary_gradient_{}", T::SUFFIX), (grid(g.len()), 1), &mut arguments)?
    };
    Ok(out)
}

/// Most axes that [`binary`] broadcasts over.
pub const AXES: usize = 6;

/// A function of two operands; numbered as in kernels/ops.cu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "their names say it")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Layout {
    lengths: [u64; AXES],
    a: [u64; AXES],
    b: [u64; AXES],
}

/// Strides of an operand of this shape for each axis of a result, 0 where it is repeated; its elements must be as many as its shape says.
fn strides(operation: &'static str, shape: &[usize], result: &[usize]) -> Result<[u64; AXES]> {
    let mut strides = [0; AXES];
    if shape.len() > result.len() || result.len() > AXES {
        return Err(Error::argument(operation, format!("shape {shape:?} in {result:?}")));
    }
    let mut stride = 1;
    for (i, &length) in shape.iter().rev().enumerate() {
        let of_result = result[result.len() - 1 - i];
        if length != of_result && length != 1 {
            return Err(Error::argument(operation, format!("shape {shape:?} in {result:?}")));
        }
        strides[AXES - 1 - i] = if length == 1 { 0 } else { stride };
        stride *= length as u64;
    }
    Ok(strides)
}

/// `op` of each pair of elements of operands of these shapes, repeated to the result's shape, which has at most [`AXES`] axes.
///
/// # Errors
/// See the module.
pub fn binary<T: Float>(
    op: Binary,
    (a, of_a): (&Array<T>, &[usize]),
    (b, of_b): (&Array<T>, &[usize]),
    shape: &[usize],
) -> Result<Array<T>> {
    const OP: &str = "binary";
    let n: usize = shape.iter().product();
    a.check(OP, a.gpu(), of_a.iter().product())?;
    b.check(OP, a.gpu(), of_b.iter().product())?;
    let mut layout = Layout {
        lengths: [1; AXES],
        a: strides(OP, of_a, shape)?,
        b: strides(OP, of_b, shape)?,
    };
    let own = &mut layout.lengths[AXES - shape.len()..];
    own.iter_mut().zip(shape).for_each(|(length, &n)| *length = n as u64);
    let out = Array::new(a.gpu(), n)?;
    let (mut op, mut x, mut y, mut z, mut n) = (op as u32, a.pointer()?, b.pointer()?, out.pointer()?, n as u64);
    let mut arguments = [
        (&raw mut op).cast(),
        (&raw mut x).cast(),
        (&raw mut y).cast(),
        (&raw mut z).cast(),
        (&raw mut n).cast(),
        (&raw mut layout).cast(),
    ];
    // SAFETY: strides lead to elements that the operands have, as was checked; the result has `n`.
    unsafe {
        a.gpu()
            .launch(&format!("binary_{}", T::SUFFIX), (grid(out.len()), 1), &mut arguments)?
    };
    Ok(out)
}

/// Sums over the middle of `[outer, length, inner]`, in an order that the shape alone fixes.
///
/// # Errors
/// See the module.
pub fn sum_middle<T: Float>(x: &Array<T>, [outer, length, inner]: [usize; 3]) -> Result<Array<T>> {
    x.check("sum", x.gpu(), outer * length * inner)?;
    let out = Array::new(x.gpu(), outer * inner)?;
    let (mut from, mut to) = (x.pointer()?, out.pointer()?);
    let (mut rows, mut terms, mut width) = (outer as u64, length as u64, inner as u64);
    // SAFETY: the operand has `outer * length * inner` elements and the result `outer * inner`, and the kernels take these types.
    unsafe {
        if inner == 1 && length > 32 {
            let mut arguments = [(&raw mut from).cast(), (&raw mut to).cast(), (&raw mut terms).cast()];
            x.gpu().launch(&format!("sum_rows_{}", T::SUFFIX), (outer, 1), &mut arguments)?;
        } else {
            let mut arguments = [
                (&raw mut from).cast(),
                (&raw mut to).cast(),
                (&raw mut rows).cast(),
                (&raw mut terms).cast(),
                (&raw mut width).cast(),
            ];
            x.gpu()
                .launch(&format!("sum_middle_{}", T::SUFFIX), (grid(outer * inner), 1), &mut arguments)?;
        }
    }
    Ok(out)
}

/// Places on the device, each checked to be below `bound`.
fn places(operation: &'static str, gpu: &Gpu, places: &[i64], bound: usize) -> Result<Array<i64>> {
    let fits = |&place: &i64| usize::try_from(place).is_ok_and(|place| place < bound);
    if !places.iter().all(fits) {
        return Err(Error::argument(operation, format!("a place outside of 0..{bound}")));
    }
    Array::from_slice(gpu, places)
}

/// Rows of scores whose cross entropy was computed, for its gradient.
#[derive(Debug)]
pub struct CrossEntropy<T> {
    scores: Array<T>,
    targets: Array<i64>,
    sums: Array<T>,
    classes: usize,
    /// For each row the sum of `exp(x - largest)`, and the target's score less the largest: the loss is `ln(sum) - score`.
    pub rows: (Vec<T>, Vec<T>),
}

/// The cross entropy of rows of scores against a class each. Blocks until all work before is done.
///
/// # Errors
/// See the module.
pub fn cross_entropy<T: Float>(scores: &Array<T>, targets: &[i64], classes: usize) -> Result<CrossEntropy<T>> {
    const OP: &str = "cross_entropy";
    let (gpu, rows) = (scores.gpu(), targets.len());
    scores.check(OP, gpu, rows * classes)?;
    let targets = places(OP, gpu, targets, classes)?;
    let (sums, of_targets) = (Array::new(gpu, rows)?, Array::new(gpu, rows)?);
    let (mut x, mut t, mut s, mut p) = (scores.pointer()?, targets.pointer()?, sums.pointer()?, of_targets.pointer()?);
    let (mut count, mut width) = (rows as u64, classes as u64);
    let mut arguments = [
        (&raw mut x).cast(),
        (&raw mut t).cast(),
        (&raw mut s).cast(),
        (&raw mut p).cast(),
        (&raw mut count).cast(),
        (&raw mut width).cast(),
    ];
    // SAFETY: there are `rows * classes` scores, targets are below `classes`, and both results have a place a row.
    unsafe { gpu.launch(&format!("cross_entropy_{}", T::SUFFIX), (grid(rows), 1), &mut arguments)? };
    let rows = (sums.to_vec()?, of_targets.to_vec()?);
    Ok(CrossEntropy {
        scores: scores.clone(),
        targets,
        sums,
        classes,
        rows,
    })
}

impl<T: Float> CrossEntropy<T> {
    /// The gradient of the scores, from that of each row's loss.
    ///
    /// # Errors
    /// See the module.
    pub fn gradient(&self, losses: &[T]) -> Result<Array<T>> {
        let gpu = self.scores.gpu();
        let g = Array::from_slice(gpu, losses)?;
        g.check("cross_entropy", gpu, self.targets.len())?;
        let out = Array::new(gpu, self.scores.len())?;
        let (mut x, mut t, mut s) = (self.scores.pointer()?, self.targets.pointer()?, self.sums.pointer()?);
        let (mut g_at, mut to, mut count, mut width) = (g.pointer()?, out.pointer()?, g.len() as u64, self.classes as u64);
        let mut arguments = [
            (&raw mut x).cast(),
            (&raw mut t).cast(),
            (&raw mut s).cast(),
            (&raw mut g_at).cast(),
            (&raw mut to).cast(),
            (&raw mut count).cast(),
            (&raw mut width).cast(),
        ];
        // SAFETY: as in the forward, and the result has as many elements as the scores.
        unsafe {
            gpu.launch(
                &format!("cross_entropy_gradient_{}", T::SUFFIX),
                (grid(losses.len()), 1),
                &mut arguments,
            )?
        };
        Ok(out)
    }
}

/// Rows of a table of this width, one after the other.
///
/// # Errors
/// See the module.
pub fn gather<T: Float>(table: &Array<T>, width: usize, rows: &[i64]) -> Result<Array<T>> {
    const OP: &str = "embedding";
    let (gpu, count) = (table.gpu(), table.len().checked_div(width).unwrap_or(0));
    table.check(OP, gpu, count * width)?;
    let places = places(OP, gpu, rows, count)?;
    let out = Array::new(gpu, rows.len() * width)?;
    let (mut from, mut which, mut to) = (table.pointer()?, places.pointer()?, out.pointer()?);
    let (mut n, mut wide) = (out.len() as u64, width as u64);
    let mut arguments = [
        (&raw mut from).cast(),
        (&raw mut which).cast(),
        (&raw mut to).cast(),
        (&raw mut n).cast(),
        (&raw mut wide).cast(),
    ];
    // SAFETY: places are rows of the table, and the result has a row for each.
    unsafe { gpu.launch(&format!("gather_{}", T::SUFFIX), (grid(out.len()), 1), &mut arguments)? };
    Ok(out)
}

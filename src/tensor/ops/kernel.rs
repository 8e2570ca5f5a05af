//! Loops that the families share: maps over broadcast operands, and sums with one fixed order of additions.

use ndarray::{ArrayD, ArrayViewD, IxDyn, Zip};

use super::Shared;
use crate::Result;
use crate::tensor::reuse::{self, Give};
use crate::tensor::{Element, Float, shape};

/// A row-major array of these elements.
pub(super) fn array<T>(shape: &[usize], elements: Vec<T>) -> ArrayD<T> {
    ArrayD::from_shape_vec(IxDyn(shape), elements).expect("kernels make as many elements as the shape holds")
}

/// The elements in row-major order, packed if they aren't.
pub(super) fn packed<T: Element>(a: &Shared<T>) -> Shared<T> {
    if a.is_standard_layout() {
        a.clone()
    } else {
        a.as_standard_layout().into_owned().into_shared()
    }
}

/// The elements of a packed array.
pub(super) fn elements<T>(a: &Shared<T>) -> &[T] {
    a.as_slice().expect("the array was packed")
}

/// `f` of each element.
pub(super) fn map<T: Copy, U: Copy + 'static>(a: &Shared<T>, f: impl Fn(T) -> U) -> Shared<U> {
    match a.as_slice() {
        // Collecting from a slice is vectorised, ndarray's `map` isn't.
        Some(elements) => array(a.shape(), reuse::collect(elements.iter().map(|&x| f(x)))).into_shared(),
        None => a.map(|&x| f(x)).into_shared(),
    }
}

/// `f(g, x)` for arrays of one shape, in the storage of `g` if it is free.
pub(super) fn update<T: Element, U: Copy>(mut g: Shared<T>, x: &Shared<U>, f: impl Fn(T, U) -> T) -> Shared<T> {
    if g.is_unique() {
        g.zip_mut_with(x, |g, &x| *g = f(*g, x));
        g
    } else {
        pairs(&g, x, f)
    }
}

/// `f(x)` of each element, in the same storage if it is free.
pub(super) fn map_in_place<T: Element>(mut x: Shared<T>, f: impl Fn(T) -> T) -> Shared<T> {
    if x.is_unique() {
        x.mapv_inplace(f);
        x
    } else {
        map(&x, f)
    }
}

/// `f` of each pair of elements of arrays of one shape.
fn pairs<A: Copy, B: Copy, C: Copy + 'static>(a: &Shared<A>, b: &Shared<B>, f: impl Fn(A, B) -> C) -> Shared<C> {
    match (a.as_slice(), b.as_slice()) {
        (Some(x), Some(y)) => array(a.shape(), reuse::collect(x.iter().zip(y).map(|(&x, &y)| f(x, y)))).into_shared(),
        _ => Zip::from(a).and(b).map_collect(|&x, &y| f(x, y)).into_shared(),
    }
}

/// Whether `small` without leading ones is the tail of `shape`.
fn is_tail(small: &[usize], shape: &[usize]) -> bool {
    let ones = small.iter().take_while(|&&n| n == 1).count();
    shape.ends_with(&small[ones..])
}

/// `f` of each pair of elements, broadcasting.
pub(super) fn zip<A: Copy, B: Copy, C: Copy + 'static>(op: &str, a: &Shared<A>, b: &Shared<B>, f: impl Fn(A, B) -> C) -> Result<Shared<C>> {
    if a.shape() == b.shape() {
        return Ok(pairs(a, b, f));
    }
    let shape = shape::broadcast(op, a.shape(), b.shape())?;
    let len = shape::count(op, &shape)?;
    if let (Some(x), Some(y)) = (a.as_slice(), b.as_slice())
        && len > 0
    {
        // One operand has all elements and the other is repeated over them: rows without strides.
        if x.len() == len && is_tail(b.shape(), &shape) {
            return Ok(array(&shape, rows(x, y, f)).into_shared());
        }
        if y.len() == len && is_tail(a.shape(), &shape) {
            return Ok(array(&shape, rows(y, x, |y, x| f(x, y))).into_shared());
        }
    }
    let (a, b) = (spread(a, &shape), spread(b, &shape));
    Ok(Zip::from(&a).and(&b).map_collect(|&x, &y| f(x, y)).into_shared())
}

fn rows<A: Copy, B: Copy, C: 'static>(all: &[A], row: &[B], f: impl Fn(A, B) -> C) -> Vec<C> {
    if let [y] = *row {
        return reuse::collect(all.iter().map(|&x| f(x, y)));
    }
    let mut out = reuse::empty(all.len());
    for block in all.chunks_exact(row.len()) {
        out.extend(block.iter().zip(row).map(|(&x, &y)| f(x, y)));
    }
    out
}

/// `f` of each triple of elements, broadcasting.
pub(super) fn zip3<A: Copy, B: Copy, C: Copy, R: Copy + 'static>(
    op: &str,
    a: &Shared<A>,
    b: &Shared<B>,
    c: &Shared<C>,
    f: impl Fn(A, B, C) -> R,
) -> Result<Shared<R>> {
    let shape = shape::broadcast(op, a.shape(), b.shape())?;
    let shape = shape::broadcast(op, &shape, c.shape())?;
    shape::count(op, &shape)?;
    let (a, b, c) = (spread(a, &shape), spread(b, &shape), spread(c, &shape));
    if let (Some(x), Some(y), Some(z)) = (a.as_slice(), b.as_slice(), c.as_slice()) {
        let elements = x.iter().zip(y).zip(z).map(|((&x, &y), &z)| f(x, y, z));
        return Ok(array(&shape, reuse::collect(elements)).into_shared());
    }
    Ok(Zip::from(&a).and(&b).and(&c).map_collect(|&x, &y, &z| f(x, y, z)).into_shared())
}

/// A view of `a` repeated to `shape`, which it broadcasts to.
pub(super) fn spread<'a, T>(a: &'a Shared<T>, shape: &[usize]) -> ArrayViewD<'a, T> {
    if a.shape() == shape {
        a.view()
    } else {
        a.broadcast(IxDyn(shape)).expect("the shape was computed by broadcasting")
    }
}

/// Sums the gradient of a broadcast operand back to the operand's shape.
pub(super) fn sum_to<T: Float>(gradient: Shared<T>, shape: &[usize]) -> Shared<T> {
    if gradient.shape() == shape {
        return gradient;
    }
    let extra = gradient.ndim() - shape.len();
    let marks: Vec<bool> = gradient
        .shape()
        .iter()
        .enumerate()
        .map(|(i, &n)| i < extra || (shape[i - extra] == 1 && n != 1))
        .collect();
    let sum = packed(&sum_axes(&gradient, &marks));
    gradient.give();
    sum.into_shape_with_order(IxDyn(shape))
        .expect("lengths of 1 were added or left out")
}

/// Sums over the marked axes, which stay with length 1.
///
/// Neighbouring marked axes are summed together, the last group first. The order of additions is fixed by the shape.
pub(super) fn sum_axes<T: Float>(a: &Shared<T>, marks: &[bool]) -> Shared<T> {
    let mut sum = packed(a);
    let mut lengths = a.shape().to_vec();
    let mut end = lengths.len();
    while end > 0 {
        if !marks[end - 1] {
            end -= 1;
            continue;
        }
        let mut start = end;
        while start > 0 && marks[start - 1] {
            start -= 1;
        }
        let outer = lengths[..start].iter().product();
        let length = lengths[start..end].iter().product();
        let inner = lengths[end..].iter().product();
        lengths[start..end].fill(1);
        let summed = sum_middle(elements(&sum), outer, length, inner);
        std::mem::replace(&mut sum, array(&lengths, summed).into_shared()).give();
        end = start;
    }
    sum
}

/// Sums over the middle of `[outer, length, inner]`.
pub(super) fn sum_middle<T: Float>(x: &[T], outer: usize, length: usize, inner: usize) -> Vec<T> {
    if inner == 1 {
        return reuse::collect((0..outer).map(|o| sum(&x[o * length..(o + 1) * length])));
    }
    let mut out = reuse::filled(outer * inner, T::zero());
    if inner > 0 && length > 0 {
        for (sums, block) in out.chunks_exact_mut(inner).zip(x.chunks_exact(length * inner)) {
            for row in block.chunks_exact(inner) {
                sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += x);
            }
        }
    }
    out
}

/// The sum of a slice: halves down to blocks, so that rounding errors grow with the logarithm of the length; eight
/// partial sums within a block.
pub(super) fn sum<T: Float>(x: &[T]) -> T {
    const BLOCK: usize = 256;
    if x.len() > BLOCK {
        let (left, right) = x.split_at((x.len() / 2).next_multiple_of(8));
        return sum(left) + sum(right);
    }
    let mut partial = [T::zero(); 8];
    let blocks = x.chunks_exact(8);
    let rest = blocks.remainder();
    for block in blocks {
        partial.iter_mut().zip(block).for_each(|(sum, &x)| *sum += x);
    }
    partial.iter_mut().zip(rest).for_each(|(sum, &x)| *sum += x);
    let [a, b, c, d, e, f, g, h] = partial;
    ((a + e) + (b + f)) + ((c + g) + (d + h))
}

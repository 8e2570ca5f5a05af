//! The loops of the elementwise rules.

use std::ops::Range;

use super::Float;
use super::instructions::vectorized;
use super::sums::{BLOCK, Lanes, add_squares_to};

/// Bytes of a line of the cache, and of the widest vector.
const LINE: usize = 64;
/// Elements that are updated before the squares of their gradients are summed: few enough to stay in the first-level cache, and for the processor to do
/// one while it waits for the memory of the other.
const STRIP: usize = 256;

/// The places of a strip, of [`count`] in all. All but the first, which is short, begin at the start of a cache line. Arrays of one length mostly lie
/// alike, so this aligns all of them; stores across lines cost half of the speed.
#[inline(always)]
fn strip<T>(number: usize, p: &[T]) -> Range<usize> {
    let head = (LINE - p.as_ptr().addr() % LINE) % LINE / size_of::<T>();
    let end = |number: usize| (head + number * STRIP).min(p.len());
    number.checked_sub(1).map_or(0, end)..end(number)
}

#[inline(always)]
fn count(len: usize) -> usize {
    len.div_ceil(STRIP) + 1
}

/// After a strip: adds the squares of gradients, one strip behind, to the sums of their block, if they are asked for.
#[inline(always)]
fn follow<T: Float>(number: usize, g: &[T], squares: &mut [Lanes]) {
    if let Some(before) = number.checked_sub(1)
        && let Some(sums) = squares.get_mut(before * STRIP / BLOCK)
    {
        add_squares_to(sums, &g[before * STRIP..g.len().min(number * STRIP)]);
    }
}

/// One pass over parameters and gradients, which have one length.
///
/// Write the closure as `#[inline(always)] move |…| …`, here and for the other passes: only so does it become a part of the loop for each instruction
/// set. Otherwise it may be called for each element, or fetch its coefficients each time.
#[inline]
pub fn pass0<T: Float>(p: &mut [T], g: &[T], update: impl Fn(T, T) -> T) {
    square_pass0(p, g, &mut [], update);
}

/// As [`pass0`]; adds the squares of gradients to the sums of their blocks, of which there may be none.
#[inline]
pub(in crate::optim) fn square_pass0<T: Float>(p: &mut [T], g: &[T], squares: &mut [Lanes], update: impl Fn(T, T) -> T) {
    #[inline(always)]
    fn strips<T: Float>(p: &mut [T], g: &[T], squares: &mut [Lanes], update: impl Fn(T, T) -> T) {
        for number in 0..count(p.len()) {
            let at = strip(number, p);
            each(&mut p[at.clone()], &g[at.clone()], &update);
            follow(number, g, squares);
        }
    }
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], update: &impl Fn(T, T) -> T) {
        for (p, &g) in p.iter_mut().zip(g) {
            *p = update(*p, g);
        }
    }
    vectorized(
        (p, g, squares, update),
        #[inline(always)]
        |(p, g, squares, update)| strips(p, g, squares, update),
    );
}

/// One pass over parameters, gradients and one state array, which have one length.
#[inline]
pub fn pass1<T: Float>(p: &mut [T], g: &[T], a: &mut [T], update: impl Fn(T, T, &mut T) -> T) {
    square_pass1(p, g, a, &mut [], update);
}

/// As [`pass1`]; adds the squares of gradients to the sums of their blocks, of which there may be none.
#[inline]
pub(in crate::optim) fn square_pass1<T: Float>(
    p: &mut [T],
    g: &[T],
    a: &mut [T],
    squares: &mut [Lanes],
    update: impl Fn(T, T, &mut T) -> T,
) {
    #[inline(always)]
    fn strips<T: Float>(p: &mut [T], g: &[T], a: &mut [T], squares: &mut [Lanes], update: impl Fn(T, T, &mut T) -> T) {
        for number in 0..count(p.len()) {
            let at = strip(number, p);
            each(&mut p[at.clone()], &g[at.clone()], &mut a[at.clone()], &update);
            follow(number, g, squares);
        }
    }
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], a: &mut [T], update: &impl Fn(T, T, &mut T) -> T) {
        for ((p, &g), a) in p.iter_mut().zip(g).zip(a) {
            *p = update(*p, g, a);
        }
    }
    vectorized(
        (p, g, a, squares, update),
        #[inline(always)]
        |(p, g, a, squares, update)| strips(p, g, a, squares, update),
    );
}

/// One pass over parameters, gradients and two state arrays, which have one length.
#[inline]
pub fn pass2<T: Float>(p: &mut [T], g: &[T], [a, b]: [&mut [T]; 2], update: impl Fn(T, T, &mut T, &mut T) -> T) {
    square_pass2(p, g, [a, b], &mut [], update);
}

/// As [`pass2`]; adds the squares of gradients to the sums of their blocks, of which there may be none.
#[inline]
pub(in crate::optim) fn square_pass2<T: Float>(
    p: &mut [T],
    g: &[T],
    [a, b]: [&mut [T]; 2],
    squares: &mut [Lanes],
    update: impl Fn(T, T, &mut T, &mut T) -> T,
) {
    #[inline(always)]
    fn strips<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T], squares: &mut [Lanes], update: impl Fn(T, T, &mut T, &mut T) -> T) {
        for number in 0..count(p.len()) {
            let at = strip(number, p);
            each(&mut p[at.clone()], &g[at.clone()], &mut a[at.clone()], &mut b[at.clone()], &update);
            follow(number, g, squares);
        }
    }
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T], update: &impl Fn(T, T, &mut T, &mut T) -> T) {
        for ((p, &g), (a, b)) in p.iter_mut().zip(g).zip(a.iter_mut().zip(b)) {
            *p = update(*p, g, a, b);
        }
    }
    vectorized(
        (p, g, a, b, squares, update),
        #[inline(always)]
        |(p, g, a, b, squares, update)| strips(p, g, a, b, squares, update),
    );
}

/// One pass over parameters, gradients and three state arrays, which have one length.
#[inline]
pub fn pass3<T: Float>(p: &mut [T], g: &[T], [a, b, c]: [&mut [T]; 3], update: impl Fn(T, T, &mut T, &mut T, &mut T) -> T) {
    square_pass3(p, g, [a, b, c], &mut [], update);
}

/// As [`pass3`]; adds the squares of gradients to the sums of their blocks, of which there may be none.
#[inline]
pub(in crate::optim) fn square_pass3<T: Float>(
    p: &mut [T],
    g: &[T],
    [a, b, c]: [&mut [T]; 3],
    squares: &mut [Lanes],
    update: impl Fn(T, T, &mut T, &mut T, &mut T) -> T,
) {
    #[inline(always)]
    fn strips<T: Float>(
        p: &mut [T],
        g: &[T],
        a: &mut [T],
        b: &mut [T],
        c: &mut [T],
        squares: &mut [Lanes],
        update: impl Fn(T, T, &mut T, &mut T, &mut T) -> T,
    ) {
        for number in 0..count(p.len()) {
            let at = strip(number, p);
            each(
                &mut p[at.clone()],
                &g[at.clone()],
                &mut a[at.clone()],
                &mut b[at.clone()],
                &mut c[at.clone()],
                &update,
            );
            follow(number, g, squares);
        }
    }
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T], c: &mut [T], update: &impl Fn(T, T, &mut T, &mut T, &mut T) -> T) {
        for ((p, &g), ((a, b), c)) in p.iter_mut().zip(g).zip(a.iter_mut().zip(b).zip(c)) {
            *p = update(*p, g, a, b, c);
        }
    }
    vectorized(
        (p, g, a, b, c, squares, update),
        #[inline(always)]
        |(p, g, a, b, c, squares, update)| strips(p, g, a, b, c, squares, update),
    );
}

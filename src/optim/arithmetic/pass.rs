//! The loops of the elementwise rules.
//!
//! The loops over a strip read and write arrays by numbers of places, and elements of the state through copies: only so does the compiler keep in mind
//! that the arrays don't overlap, which it would check again for each strip.

use std::ops::Range;

use super::Float;
use super::ahead::{LINE, ask_ahead};
use super::instructions::vectorized;
use super::sums::{BLOCK, Lanes, add_squares_to};

/// Elements that are updated before the squares of their gradients are summed: few enough for the processor to do one while it waits for the other's
/// memory or divisions.
const STRIP: usize = 128;
/// The same where an update does so little that the ends of loops would cost more.
const LONG_STRIP: usize = 256;

/// The places of a strip of `len` elements, of [`count`] in all. All but the first, which is short, begin at the start of a cache line. Arrays of one
/// length mostly lie alike, so this aligns all of them; stores across lines cost half of the speed.
#[inline(always)]
fn strip<T>(number: usize, len: usize, p: &[T]) -> Range<usize> {
    let head = (LINE - p.as_ptr().addr() % LINE) % LINE / size_of::<T>();
    let end = |number: usize| (head + number * len).min(p.len());
    number.checked_sub(1).map_or(0, end)..end(number)
}

#[inline(always)]
fn count(elements: usize, len: usize) -> usize {
    elements.div_ceil(len) + 1
}

/// After a strip: adds the squares of an array's elements, one strip behind, to the sums of their block, if they are asked for.
#[inline(always)]
fn follow<T: Float>(number: usize, len: usize, x: &[T], squares: &mut [Lanes]) {
    if let Some(before) = number.checked_sub(1)
        && let Some(sums) = squares.get_mut(before * len / BLOCK)
    {
        add_squares_to(sums, &x[before * len..x.len().min(number * len)]);
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
        for number in 0..count(p.len(), LONG_STRIP) {
            let at = strip(number, LONG_STRIP, p);
            each(&mut p[at.clone()], &g[at.clone()], &update);
            ask_ahead(at, [p.as_ptr(), g.as_ptr()]);
            follow(number, LONG_STRIP, g, squares);
        }
    }
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], update: &impl Fn(T, T) -> T) {
        assert!(p.len() == g.len());
        for i in 0..p.len() {
            p[i] = update(p[i], g[i]);
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
        for number in 0..count(p.len(), STRIP) {
            let at = strip(number, STRIP, p);
            each(&mut p[at.clone()], &g[at.clone()], &mut a[at.clone()], &update);
            ask_ahead(at, [p.as_ptr(), g.as_ptr(), a.as_ptr()]);
            follow(number, STRIP, g, squares);
        }
    }
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], a: &mut [T], update: &impl Fn(T, T, &mut T) -> T) {
        assert!(p.len() == g.len() && p.len() == a.len());
        for i in 0..p.len() {
            let mut x = a[i];
            p[i] = update(p[i], g[i], &mut x);
            a[i] = x;
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
        for number in 0..count(p.len(), STRIP) {
            let at = strip(number, STRIP, p);
            each(&mut p[at.clone()], &g[at.clone()], &mut a[at.clone()], &mut b[at.clone()], &update);
            ask_ahead(at, [p.as_ptr(), g.as_ptr(), a.as_ptr(), b.as_ptr()]);
            follow(number, STRIP, g, squares);
        }
    }
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T], update: &impl Fn(T, T, &mut T, &mut T) -> T) {
        assert!(p.len() == g.len() && p.len() == a.len() && p.len() == b.len());
        for i in 0..p.len() {
            let (mut x, mut y) = (a[i], b[i]);
            p[i] = update(p[i], g[i], &mut x, &mut y);
            (a[i], b[i]) = (x, y);
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
    square_pass3(p, g, [a, b, c], [&mut [], &mut [], &mut []], update);
}

/// As [`pass3`]; adds the squares of new parameters, of gradients and of the new third state array to the sums of their blocks, of which there may be none.
#[inline]
pub(in crate::optim) fn square_pass3<T: Float>(
    p: &mut [T],
    g: &[T],
    [a, b, c]: [&mut [T]; 3],
    squares: [&mut [Lanes]; 3],
    update: impl Fn(T, T, &mut T, &mut T, &mut T) -> T,
) {
    #[inline(always)]
    fn strips<T: Float>(
        p: &mut [T],
        g: &[T],
        a: &mut [T],
        b: &mut [T],
        c: &mut [T],
        [of_p, of_g, of_c]: [&mut [Lanes]; 3],
        update: impl Fn(T, T, &mut T, &mut T, &mut T) -> T,
    ) {
        for number in 0..count(p.len(), STRIP) {
            let at = strip(number, STRIP, p);
            each(
                &mut p[at.clone()],
                &g[at.clone()],
                &mut a[at.clone()],
                &mut b[at.clone()],
                &mut c[at.clone()],
                &update,
            );
            ask_ahead(at, [p.as_ptr(), g.as_ptr(), a.as_ptr(), b.as_ptr(), c.as_ptr()]);
            follow(number, STRIP, p, of_p);
            follow(number, STRIP, g, of_g);
            follow(number, STRIP, c, of_c);
        }
    }
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T], c: &mut [T], update: &impl Fn(T, T, &mut T, &mut T, &mut T) -> T) {
        assert!(p.len() == g.len() && p.len() == a.len() && p.len() == b.len() && p.len() == c.len());
        for i in 0..p.len() {
            let (mut x, mut y, mut z) = (a[i], b[i], c[i]);
            p[i] = update(p[i], g[i], &mut x, &mut y, &mut z);
            (a[i], b[i], c[i]) = (x, y, z);
        }
    }
    vectorized(
        (p, g, a, b, c, squares, update),
        #[inline(always)]
        |(p, g, a, b, c, squares, update)| strips(p, g, a, b, c, squares, update),
    );
}

//! The loops of the elementwise rules.

use std::ops::Range;

use super::Float;
use super::instructions::vectorized;

/// Bytes of a line of the cache, and of the widest vector.
const LINE: usize = 64;

/// The places before the first element that lies at the start of a cache line, and those from it on. Arrays of one length mostly lie alike, so this
/// aligns all of them; stores across lines cost half of the speed.
#[inline(always)]
fn parts<T>(p: &[T], len: usize) -> [Range<usize>; 2] {
    let beyond = p.as_ptr().addr() % LINE;
    let head = ((LINE - beyond) % LINE / size_of::<T>()).min(len);
    [0..head, head..len]
}

/// One pass over parameters and gradients, which have one length.
///
/// Write the closure as `#[inline(always)] move |…| …`, here and for the other passes: only so does it become a part of the loop for each instruction
/// set. Otherwise it is called for each element, or fetches its coefficients each time.
#[inline]
pub fn pass0<T: Float>(p: &mut [T], g: &[T], update: impl Fn(T, T) -> T) {
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], update: impl Fn(T, T) -> T) {
        for at in parts(p, p.len()) {
            for (p, &g) in p[at.clone()].iter_mut().zip(&g[at]) {
                *p = update(*p, g);
            }
        }
    }
    vectorized(
        (p, g, update),
        #[inline(always)]
        |(p, g, update)| each(p, g, update),
    );
}

/// One pass over parameters, gradients and one state array, which have one length.
#[inline]
pub fn pass1<T: Float>(p: &mut [T], g: &[T], a: &mut [T], update: impl Fn(T, T, &mut T) -> T) {
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], a: &mut [T], update: impl Fn(T, T, &mut T) -> T) {
        for at in parts(p, p.len()) {
            let states = a[at.clone()].iter_mut();
            for ((p, &g), a) in p[at.clone()].iter_mut().zip(&g[at]).zip(states) {
                *p = update(*p, g, a);
            }
        }
    }
    vectorized(
        (p, g, a, update),
        #[inline(always)]
        |(p, g, a, update)| each(p, g, a, update),
    );
}

/// One pass over parameters, gradients and two state arrays, which have one length.
#[inline]
pub fn pass2<T: Float>(p: &mut [T], g: &[T], [a, b]: [&mut [T]; 2], update: impl Fn(T, T, &mut T, &mut T) -> T) {
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T], update: impl Fn(T, T, &mut T, &mut T) -> T) {
        for at in parts(p, p.len()) {
            let states = a[at.clone()].iter_mut().zip(&mut b[at.clone()]);
            for ((p, &g), (a, b)) in p[at.clone()].iter_mut().zip(&g[at]).zip(states) {
                *p = update(*p, g, a, b);
            }
        }
    }
    vectorized(
        (p, g, a, b, update),
        #[inline(always)]
        |(p, g, a, b, update)| each(p, g, a, b, update),
    );
}

/// One pass over parameters, gradients and three state arrays, which have one length.
#[inline]
pub fn pass3<T: Float>(p: &mut [T], g: &[T], [a, b, c]: [&mut [T]; 3], update: impl Fn(T, T, &mut T, &mut T, &mut T) -> T) {
    #[inline(always)]
    fn each<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T], c: &mut [T], update: impl Fn(T, T, &mut T, &mut T, &mut T) -> T) {
        for at in parts(p, p.len()) {
            let states = a[at.clone()].iter_mut().zip(&mut b[at.clone()]).zip(&mut c[at.clone()]);
            for ((p, &g), ((a, b), c)) in p[at.clone()].iter_mut().zip(&g[at]).zip(states) {
                *p = update(*p, g, a, b, c);
            }
        }
    }
    vectorized(
        (p, g, a, b, c, update),
        #[inline(always)]
        |(p, g, a, b, c, update)| each(p, g, a, b, c, update),
    );
}

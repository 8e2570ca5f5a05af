//! Sums in one fixed shape: blocks of 4,096 terms, eight partial sums in each; sums of blocks are added in order.

use std::ops::Range;

use super::Float;
use super::instructions::vectorized;

/// Elements that are summed in one go.
pub(in crate::optim) const BLOCK: usize = 4096;
/// Partial sums within a block.
const LANES: usize = 8;
/// The partial sums of a block.
pub(in crate::optim) type Lanes = [f64; LANES];
/// Fewer elements aren't worth the choice of an instruction set.
const SHORT: usize = 64;
/// Blocks that are summed side by side: additions of one wait for each other, those of several don't.
const TOGETHER: usize = 4;

/// Sum of `term(0)` to `term(n - 1)`.
pub fn sum(n: usize, term: impl Fn(usize) -> f64) -> f64 {
    let block = |start: usize| {
        let end = n.min(start + BLOCK);
        let mut lanes = [0.0; LANES];
        let whole = end - (end - start) % LANES;
        for i in (start..whole).step_by(LANES) {
            for (lane, k) in lanes.iter_mut().zip(0..LANES) {
                *lane += term(i + k);
            }
        }
        for (lane, i) in lanes.iter_mut().zip(whole..end) {
            *lane += term(i);
        }
        folded(lanes, add)
    };
    (0..n).step_by(BLOCK).map(block).fold(0.0, |sum, block| sum + block)
}

/// Sum of squares in `f64`, in the shape of [`sum`].
pub fn sum_squares<T: Float>(x: &[T]) -> f64 {
    fold(0.0, x, square, add)
}

/// A sum of squares goes on with more elements. What was summed before must be whole blocks.
pub(in crate::optim) fn add_squares<T: Float>(total: &mut f64, x: &[T]) {
    *total = fold(*total, x, square, add);
}

/// Sums of squares of rows of so many elements each, in the shape of [`sum`].
pub(in crate::optim) fn sum_squares_of_rows<T: Float>(x: &[T], columns: usize, sums: &mut [f64]) {
    if columns > BLOCK {
        return x.chunks(columns).zip(sums).for_each(|(row, sum)| *sum = sum_squares(row));
    }
    fold_runs(x, columns, sums, square, add);
}

/// Adds the squares of elements to as many sums.
pub(in crate::optim) fn add_each_square<T: Float>(sums: &mut [f64], x: &[T]) {
    #[inline(always)]
    fn each<T: Float>(sums: &mut [f64], x: &[T]) {
        for (sum, &x) in sums.iter_mut().zip(x) {
            *sum += square(x);
        }
    }
    vectorized(
        (sums, x),
        #[inline(always)]
        |(sums, x)| each(sums, x),
    );
}

/// Adds the squares of elements to the partial sums of their block, in which whole groups of lanes came before.
#[inline(always)]
pub(super) fn add_squares_to<T: Float>(sums: &mut Lanes, x: &[T]) {
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut lanes = *sums;
    for x in whole {
        lanes = step(lanes, x, &square, &add);
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += square(x);
    }
    *sums = lanes;
}

/// The sum of a block from its partial sums.
pub(in crate::optim) fn sum_of_lanes(lanes: Lanes) -> f64 {
    folded(lanes, add)
}

/// All terms put together by `combine` with `total`, in the shape of [`sum`].
pub(in crate::optim) fn fold<T: Float>(
    mut total: f64,
    x: &[T],
    term: impl Fn(T) -> f64 + Copy,
    combine: impl Fn(f64, f64) -> f64 + Copy,
) -> f64 {
    if x.len() <= SHORT {
        let [lanes] = side_by_side([x], &term, &combine);
        return if x.is_empty() {
            total
        } else {
            combine(total, folded(lanes, combine))
        };
    }
    for x in x.chunks(TOGETHER * BLOCK) {
        let mut sums = [0.0; TOGETHER];
        let sums = &mut sums[..x.len().div_ceil(BLOCK)];
        fold_blocks(x, sums, term, combine);
        total = sums.iter().fold(total, |total, &sum| combine(total, sum));
    }
    total
}

/// What [`fold`] makes of each block.
pub(in crate::optim) fn fold_blocks<T: Float>(
    x: &[T],
    sums: &mut [f64],
    term: impl Fn(T) -> f64 + Copy,
    combine: impl Fn(f64, f64) -> f64 + Copy,
) {
    fold_runs(x, BLOCK, sums, term, combine);
}

/// What [`fold`] makes of each of these ranges of elements, at most a block each. `term`, `combine` and what gives the ranges must be `#[inline(always)]`.
pub(in crate::optim) fn fold_each<T: Float>(
    x: &[T],
    ranges: impl Iterator<Item = Range<usize>>,
    sums: &mut [f64],
    term: impl Fn(T) -> f64 + Copy,
    combine: impl Fn(f64, f64) -> f64 + Copy,
) {
    vectorized(
        (x, ranges, sums, term, combine),
        #[inline(always)]
        |(x, ranges, sums, term, combine)| {
            for (sum, range) in sums.iter_mut().zip(ranges) {
                let [lanes] = side_by_side([&x[range]], &term, &combine);
                *sum = combine(0.0, folded(lanes, combine));
            }
        },
    );
}

/// Folds runs of `len` elements each, at most a block, of which the last may be shorter. `term` and `combine` must be `#[inline(always)]`.
fn fold_runs<T: Float>(x: &[T], len: usize, sums: &mut [f64], term: impl Fn(T) -> f64 + Copy, combine: impl Fn(f64, f64) -> f64 + Copy) {
    let len = len.max(1);
    for (x, sums) in x.chunks(TOGETHER * len).zip(sums.chunks_mut(TOGETHER)) {
        // Put together outside of the loops: the compiler would arrange their vectors for it.
        let mut lanes = [[0.0; LANES]; TOGETHER];
        vectorized(
            (&mut lanes, x, len, term, combine),
            #[inline(always)]
            |(lanes, x, len, term, combine)| lanes_of_runs(lanes, x, len, term, combine),
        );
        sums.iter_mut().zip(lanes).for_each(|(sum, lanes)| *sum = folded(lanes, combine));
    }
}

/// The partial sums of up to so many runs.
#[inline(always)]
fn lanes_of_runs<T: Float>(lanes: &mut [Lanes; TOGETHER], x: &[T], len: usize, term: impl Fn(T) -> f64, combine: impl Fn(f64, f64) -> f64) {
    if x.len() == TOGETHER * len {
        let (first, second) = x.split_at(2 * len);
        let ((x, y), (z, w)) = (first.split_at(len), second.split_at(len));
        *lanes = side_by_side([x, y, z, w], &term, &combine);
    } else {
        for (lanes, x) in lanes.iter_mut().zip(x.chunks(len)) {
            [*lanes] = side_by_side([x], &term, &combine);
        }
    }
}

/// The partial sums of runs of one length.
#[inline(always)]
fn side_by_side<T: Float, const N: usize>(x: [&[T]; N], term: &impl Fn(T) -> f64, combine: &impl Fn(f64, f64) -> f64) -> [Lanes; N] {
    let mut lanes = [[0.0; LANES]; N];
    let split = x.map(|x| x.as_chunks::<LANES>());
    for i in 0..split[0].0.len() {
        for (lanes, (whole, _)) in lanes.iter_mut().zip(&split) {
            *lanes = step(*lanes, &whole[i], term, combine);
        }
    }
    for (lanes, (_, rest)) in lanes.iter_mut().zip(&split) {
        for (lane, &x) in lanes.iter_mut().zip(*rest) {
            *lane = combine(*lane, term(x));
        }
    }
    lanes
}

#[inline(always)]
fn step<T: Float>(mut lanes: Lanes, x: &[T; LANES], term: &impl Fn(T) -> f64, combine: &impl Fn(f64, f64) -> f64) -> Lanes {
    for (lane, &x) in lanes.iter_mut().zip(x) {
        *lane = combine(*lane, term(x));
    }
    lanes
}

#[inline(always)]
fn folded([a, b, c, d, e, f, g, h]: Lanes, plus: impl Fn(f64, f64) -> f64) -> f64 {
    plus(plus(plus(a, b), plus(c, d)), plus(plus(e, f), plus(g, h)))
}

#[inline(always)]
pub(in crate::optim) fn square<T: Float>(x: T) -> f64 {
    x.wide() * x.wide()
}

#[inline(always)]
pub(in crate::optim) fn magnitude<T: Float>(x: T) -> f64 {
    x.wide().abs()
}

#[inline(always)]
pub(in crate::optim) fn add(a: f64, b: f64) -> f64 {
    a + b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_squares_have_one_shape() {
        let x: Vec<f64> = (0..30_001).map(|i| f64::from(i) * 0.1).collect();
        for n in [0, 1, 7, 8, 4096, 4097, 16_384, 16_385, 30_001] {
            let blocks: f64 = x[..n].chunks(BLOCK).map(sum_squares).fold(0.0, |a, b| a + b);
            assert_eq!(sum_squares(&x[..n]), blocks, "{n}");
            assert_eq!(sum_squares(&x[..n]), sum(n, |i| x[i] * x[i]), "{n}");
        }
        let (mut rows, mut columns, width) = ([0.0; 7], vec![0.0; 9], 9);
        sum_squares_of_rows(&x[1..64], width, &mut rows);
        x[1..64].chunks(width).for_each(|row| add_each_square(&mut columns, row));
        assert_eq!(rows.as_slice(), x[1..64].chunks(width).map(sum_squares).collect::<Vec<_>>());
        assert_eq!(columns[0], (0..7).map(|row| square(x[1 + row * width])).fold(0.0, |a, b| a + b));
        let (ranges, mut folds) = ([0..0, 0..7, 7..80, 80..80 + BLOCK, 9..10], [1.0; 5]);
        fold_each(&x, ranges.iter().cloned(), &mut folds, square, add);
        assert_eq!(folds, ranges.map(|range| sum_squares(&x[range])));
        assert_eq!(sum_squares(&[3.0f32, 4.0]), 25.0);
        assert_eq!(sum_squares::<f64>(&[]), 0.0);
    }
}

//! Products of matrices whose sums have one order: the terms of each element from the first to the last, none fused. So their bits depend neither on the
//! instruction set, nor on the number of threads, nor on where they are computed: the kernel of `cuda/kernels/ops.cu` has the same order.
//!
//! Operands are packed into panels, as in Goto and van de Geijn, *Anatomy of high-performance matrix multiplication* (2008); only the order of the terms of
//! one element is kept throughout.

use std::ops::Range;

use super::Float;
use super::instructions::vectorized;
use crate::optim::threads::for_each;

/// Rows of a panel of the left operand; with a line of the cache of columns as many sums as fit into the registers of all instruction sets.
const ROWS: usize = 5;
/// Terms that are added in one go: a panel of so many stays in the first-level cache.
const TERMS: usize = 256;
/// Rows that a thread takes at a time; their panels stay in the second-level cache.
const HEIGHT: usize = 60;
/// Products of two numbers that take about as long as the update of one element.
const PRODUCTS: usize = 16;
/// Rows and columns that are mirrored in one go.
const SQUARE: usize = 32;

/// Elements of a matrix.
#[derive(Debug, Clone, Copy)]
pub(in crate::optim) struct Matrix<'a, T> {
    elements: &'a [T],
    shape: (usize, usize),
    /// From an element to that of the next row, and of the next column.
    strides: (usize, usize),
}

impl<'a, T: Float> Matrix<'a, T> {
    /// Of so many rows and columns, in row-major order.
    pub(in crate::optim) fn new(elements: &'a [T], (rows, columns): (usize, usize)) -> Self {
        Matrix {
            elements: &elements[..rows * columns],
            shape: (rows, columns),
            strides: (columns, 1),
        }
    }

    /// The transposed one.
    pub(in crate::optim) fn t(self) -> Self {
        Matrix {
            shape: (self.shape.1, self.shape.0),
            strides: (self.strides.1, self.strides.0),
            ..self
        }
    }

    /// Some of its rows in panels of `N`, in each the first of these columns of all, then the second one and so on; what is missing in the last panel is
    /// zero.
    fn packed<const N: usize>(self, rows: Range<usize>, columns: Range<usize>) -> Vec<T> {
        let mut panels = vec![T::ZERO; rows.len().next_multiple_of(N) * columns.len()];
        for (i, row) in rows.enumerate() {
            let start = row * self.strides.0 + columns.start * self.strides.1;
            let row = self.elements[start..].iter().step_by(self.strides.1).take(columns.len());
            let panel = &mut panels[i / N * N * columns.len() + i % N..];
            panel.iter_mut().step_by(N).zip(row).for_each(|(place, &x)| *place = x);
        }
        panels
    }
}

/// The product of two matrices in row-major order. Of one that is `symmetric`, which the caller knows, a half is computed; with the terms in one order both
/// halves have the same bits.
pub(in crate::optim) fn product<T: Float>(a: Matrix<'_, T>, b: Matrix<'_, T>, symmetric: bool) -> Vec<T> {
    // A line of the cache.
    if size_of::<T>() == 4 {
        product_by::<T, 16>(a, b, symmetric)
    } else {
        product_by::<T, 8>(a, b, symmetric)
    }
}

fn product_by<T: Float, const COLUMNS: usize>(a: Matrix<'_, T>, b: Matrix<'_, T>, symmetric: bool) -> Vec<T> {
    let ((m, terms), n) = (a.shape, b.shape.1);
    // Whole panels; what is too much goes at the end.
    let (rows, columns) = (m.next_multiple_of(ROWS), n.next_multiple_of(COLUMNS));
    let mut out = vec![T::ZERO; rows * columns];
    if out.is_empty() {
        return out;
    }
    for start in (0..terms).step_by(TERMS) {
        let end = terms.min(start + TERMS);
        let right = b.t().packed::<COLUMNS>(0..n, start..end);
        let work = m * n / PRODUCTS * (end - start);
        for_each(out.chunks_mut(HEIGHT * columns).enumerate(), work, |(number, out)| {
            let first = number * HEIGHT;
            let left = a.packed::<ROWS>(first..m.min(first + HEIGHT), start..end);
            let block = Block {
                left: &left,
                right: &right,
                terms: end - start,
                columns,
                diagonal: symmetric.then_some(first),
            };
            vectorized(
                (block, out),
                #[inline(always)]
                |(block, out)| block.add_to::<COLUMNS>(out),
            );
        });
    }
    if columns > n {
        (1..m).for_each(|row| out.copy_within(row * columns..row * columns + n, row * n));
    }
    out.truncate(m * n);
    if symmetric {
        mirror(&mut out, n);
    }
    out
}

/// Some rows of a product, and a few terms of each of its elements.
#[derive(Clone, Copy)]
struct Block<'a, T> {
    left: &'a [T],
    right: &'a [T],
    terms: usize,
    columns: usize,
    /// The column of the diagonal in the first row, where what is below it isn't needed.
    diagonal: Option<usize>,
}

impl<T: Float> Block<'_, T> {
    #[inline(always)]
    fn add_to<const COLUMNS: usize>(self, out: &mut [T]) {
        for (right, column) in self.right.chunks_exact(COLUMNS * self.terms).zip((0..).step_by(COLUMNS)) {
            for (left, row) in self.left.chunks_exact(ROWS * self.terms).zip((0..).step_by(ROWS)) {
                if self.diagonal.is_none_or(|first| first + row < column + COLUMNS) {
                    add_terms::<T, COLUMNS>(left, right, &mut out[row * self.columns + column..], self.columns);
                }
            }
        }
    }
}

/// Adds the terms of a panel of each operand to `ROWS` x `COLUMNS` elements. Written with numbers for places, in this order: so the sums stay in vector
/// registers on all instruction sets. It is 20 times slower otherwise.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "said above")]
fn add_terms<T: Float, const COLUMNS: usize>(left: &[T], right: &[T], out: &mut [T], columns: usize) {
    let mut sums = [[T::ZERO; COLUMNS]; ROWS];
    for i in 0..ROWS {
        sums[i].copy_from_slice(&out[i * columns..i * columns + COLUMNS]);
    }
    for (a, b) in left.as_chunks::<ROWS>().0.iter().zip(right.as_chunks::<COLUMNS>().0) {
        for j in 0..COLUMNS {
            for i in 0..ROWS {
                sums[i][j] = sums[i][j] + a[i] * b[j];
            }
        }
    }
    for i in 0..ROWS {
        out[i * columns..i * columns + COLUMNS].copy_from_slice(&sums[i]);
    }
}

/// Copies what is above the diagonal to below it.
fn mirror<T: Float>(square: &mut [T], n: usize) {
    for rows in (0..n).step_by(SQUARE) {
        for columns in (0..=rows).step_by(SQUARE) {
            for row in rows..n.min(rows + SQUARE) {
                for column in columns..row.min(columns + SQUARE) {
                    square[row * n + column] = square[column * n + row];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::ComputeThreads;

    fn elements<T: Float>(n: usize, seed: usize) -> Vec<T> {
        (0..n).map(|i| T::of((i * (37 + seed) % 257) as f64 / 31.0 - 4.0)).collect()
    }

    fn bits<T: Float>(elements: &[T]) -> Vec<u64> {
        elements.iter().map(|x| x.wide().to_bits()).collect()
    }

    fn in_order<T: Float>(a: Matrix<'_, T>, b: Matrix<'_, T>) -> Vec<u64> {
        let at = |m: Matrix<'_, T>, i: usize, j: usize| m.elements[i * m.strides.0 + j * m.strides.1];
        let element = |i: usize, j: usize| (0..a.shape.1).fold(T::ZERO, |sum, k| sum + at(a, i, k) * at(b, k, j));
        let (m, n) = (a.shape.0, b.shape.1);
        bits(&(0..m * n).map(|place| element(place / n, place % n)).collect::<Vec<_>>())
    }

    fn sums_go_from_the_first_term_to_the_last<T: Float>() {
        for (m, k, n) in [
            (1, 1, 1),
            (3, 0, 2),
            (0, 3, 2),
            (8, 256, 8),
            (9, 257, 5),
            (130, 600, 75),
            (65, 40, 64),
        ] {
            let (left, right) = (elements::<T>(m * k, 0), elements::<T>(k * n, 1));
            let plain = [Matrix::new(&left, (m, k)), Matrix::new(&right, (k, n))];
            // The same elements, read as those of transposed matrices.
            let turned = [Matrix::new(&left, (k, m)).t(), Matrix::new(&right, (n, k)).t()];
            for [a, b] in [plain, turned] {
                assert_eq!(bits(&product(a, b, false)), in_order(a, b), "{m} x {k} x {n}");
                assert_eq!(bits(&product(a, a.t(), true)), in_order(a, a.t()), "{m} x {k}, symmetric");
            }
        }
    }

    #[test]
    fn single_sums_go_from_the_first_term_to_the_last() {
        sums_go_from_the_first_term_to_the_last::<f32>();
    }

    #[test]
    fn double_sums_go_from_the_first_term_to_the_last() {
        sums_go_from_the_first_term_to_the_last::<f64>();
    }

    #[test]
    fn threads_change_no_bit() {
        let x = elements::<f32>(200 * 300, 2);
        let a = Matrix::new(&x, (200, 300));
        let alone = bits(&product(a, a.t(), true));
        let threads = ComputeThreads::new(3);
        assert_eq!(bits(&product(a, a.t(), true)), alone);
        drop(threads);
    }
}

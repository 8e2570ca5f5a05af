//! Products of matrices. The terms of each element are added from the first to the last, none fused. All are local and don't wait for the device.
//!
//! # Errors
//! Each returns [`Error::Argument`] for operands that don't go together, [`Error::OutOfMemory`] and
//! [`Error::Driver`].

use crate::array::Float;
use crate::rules::table;
use crate::{Array, Error, Gpu, Result};

/// Rows and columns that a block of threads computes; the kernels say so too.
const TILE: usize = 64;
const OP: &str = "matmul";

/// A matrix: its elements in row-major order, its shape, and whether it is meant transposed.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T> {
    /// The elements.
    pub elements: &'a Array<T>,
    /// Rows and columns as the elements lie.
    pub shape: (usize, usize),
    /// Whether rows and columns are exchanged.
    pub transposed: bool,
}

impl<'a, T: Float> Matrix<'a, T> {
    /// Of so many rows and columns.
    pub fn new(elements: &'a Array<T>, shape: (usize, usize)) -> Self {
        Matrix {
            elements,
            shape,
            transposed: false,
        }
    }

    /// The transposed one.
    pub fn t(self) -> Self {
        Matrix {
            transposed: !self.transposed,
            ..self
        }
    }

    fn rows_and_columns(&self) -> (usize, usize) {
        let (rows, columns) = self.shape;
        if self.transposed { (columns, rows) } else { (rows, columns) }
    }

    fn strides(&self) -> [u64; 2] {
        let width = self.shape.1 as u64;
        if self.transposed { [1, width] } else { [width, 1] }
    }
}

/// A product of two matrices, and where it goes.
#[derive(Debug, Clone, Copy)]
pub struct Product<'a, T> {
    /// The left operand.
    pub a: Matrix<'a, T>,
    /// The right operand.
    pub b: Matrix<'a, T>,
    /// Where the result goes, in row-major order; none of the operands.
    pub out: &'a Array<T>,
    /// Makes the result `weight * elements + weight_of_product * product`.
    pub with: Option<(T, &'a Array<T>, T)>,
    /// Says that the result is symmetric: a half of it is computed.
    pub symmetric: bool,
}

/// A product as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Row<T> {
    a: u64,
    b: u64,
    other: u64,
    out: u64,
    m: u64,
    k: u64,
    n: u64,
    of_a: [u64; 2],
    of_b: [u64; 2],
    first: u64,
    symmetric: u64,
    weights: [T; 2],
}

impl<T: Float> Product<'_, T> {
    /// Rows and columns of the result, and the terms of each of its elements.
    fn dimensions(&self) -> (usize, usize, usize) {
        let ((m, k), (_, n)) = (self.a.rows_and_columns(), self.b.rows_and_columns());
        (m, n, k)
    }

    fn tiles(&self) -> (usize, usize) {
        let (m, n, _) = self.dimensions();
        (m.div_ceil(TILE), n.div_ceil(TILE))
    }

    fn row(&self, gpu: &Gpu, first: usize) -> Result<Row<T>> {
        let ((m, n, k), (other, _)) = (self.dimensions(), self.b.rows_and_columns());
        if k != other || (self.symmetric && m != n) {
            return Err(Error::argument(OP, format!("{m} x {k} times {other} x {n}")));
        }
        for matrix in [&self.a, &self.b] {
            matrix.elements.check(OP, gpu, matrix.shape.0 * matrix.shape.1)?;
        }
        let with = self.with.map(|(_, array, _)| array);
        for array in with.into_iter().chain([self.out]) {
            array.check(OP, gpu, m * n)?;
        }
        let [a, b, out] = [self.a.elements, self.b.elements, self.out].map(Array::pointer);
        Ok(Row {
            a: a?,
            b: b?,
            other: with.map_or(Ok(0), Array::pointer)?,
            out: out?,
            m: m as u64,
            k: k as u64,
            n: n as u64,
            of_a: self.a.strides(),
            of_b: self.b.strides(),
            first: first as u64,
            symmetric: u64::from(self.symmetric),
            weights: self.with.map_or([T::default(); 2], |(weight, _, of_product)| [weight, of_product]),
        })
    }
}

/// The product of two matrices, in row-major order.
///
/// # Errors
/// See the module.
pub fn matmul<T: Float>(a: Matrix<'_, T>, b: Matrix<'_, T>) -> Result<Array<T>> {
    let gpu = a.elements.gpu();
    let out = Array::new(gpu, a.rows_and_columns().0 * b.rows_and_columns().1)?;
    let product = Product {
        a,
        b,
        out: &out,
        with: None,
        symmetric: false,
    };
    let (rows, columns) = product.tiles();
    let mut row = product.row(gpu, 0)?;
    // SAFETY: the kernel takes this struct, whose strides lead to elements that the operands have; the result has as many as its rows and columns say.
    unsafe { gpu.launch(&format!("matmul_{}", T::SUFFIX), (columns, rows), &mut [(&raw mut row).cast()])? };
    Ok(out)
}

/// Products that don't depend on each other, in one launch; all on one device.
///
/// # Errors
/// See the module. Nothing is changed then.
pub fn multiply<T: Float>(products: &[Product<'_, T>]) -> Result<()> {
    let Some(gpu) = products.first().map(|product| product.out.gpu()) else {
        return Ok(());
    };
    let (mut tiles, mut rows) = (0, Vec::with_capacity(products.len()));
    for product in products {
        let row = product.row(gpu, tiles)?;
        let (high, wide) = product.tiles();
        if high * wide > 0 {
            rows.push(row);
            tiles += high * wide;
        }
    }
    if rows.is_empty() {
        return Ok(());
    }
    let table = table(gpu, &rows)?;
    let (mut pointer, mut count) = (table.pointer()?, rows.len() as u32);
    let mut arguments = [(&raw mut pointer).cast(), (&raw mut count).cast()];
    // SAFETY: the kernel takes a table and its length; strides lead to elements that the operands have, as was checked.
    unsafe { gpu.launch(&format!("products_{}", T::SUFFIX), (tiles, 1), &mut arguments) }
}

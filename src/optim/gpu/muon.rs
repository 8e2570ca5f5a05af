//! Muon on a GPU: directions and their norms, three products an iteration, all matrices of a launch together. Until the last launch, which moves averages
//! and parameters, it writes to memory of its own.

use rankgrad_cuda::products::{Matrix, Product, multiply};
use rankgrad_cuda::rules::{self, Kernel};
use rankgrad_cuda::{Array, Gpu};

use super::super::rules::Muon;
use super::cuda::{Both, Prepared};
use super::several::total;
use crate::Result;

/// Memory for what iterations work on: the matrices, the next ones, their squares, and what is made of these.
#[derive(Debug)]
pub(super) struct Scratch<T>([Array<T>; 4]);

impl<T: Both> Scratch<T> {
    /// Of so many elements each.
    pub(super) fn new(gpu: &Gpu, [matrices, next, grams, factors]: [usize; 4]) -> Result<Self> {
        let array = |length| Array::new(gpu, length);
        Ok(Scratch([array(matrices)?, array(next)?, array(grams)?, array(factors)?]))
    }

    /// The elements of each array that a launch over matrices of these shapes needs.
    pub(super) fn room(shapes: &[(usize, usize)]) -> Result<[usize; 4]> {
        let mut room = [0; 4];
        for (room, lengths) in room.iter_mut().zip(lengths(shapes)) {
            *room = Array::<T>::room(&lengths)?;
        }
        Ok(room)
    }

    fn matrices(&self, prepared: &[Prepared<'_, '_, T>]) -> Result<Vec<Iterated<T>>> {
        let shapes: Vec<_> = prepared.iter().map(Prepared::matrix).collect();
        let [x, next, grams, factors] = lengths(&shapes);
        let [of_x, of_next, of_grams, of_factors] = &self.0;
        let (x, next) = (of_x.pieces(&x)?, of_next.pieces(&next)?);
        let (grams, factors) = (of_grams.pieces(&grams)?, of_factors.pieces(&factors)?);
        let arrays = x.into_iter().zip(next).zip(grams.into_iter().zip(factors));
        let one = |(((x, next), (gram, factor)), prepared): (_, &Prepared<'_, '_, T>)| {
            let [_, _, _, _, a, b, c, ..] = prepared.step.numbers;
            Iterated {
                x,
                next,
                gram,
                factor,
                shape: prepared.matrix(),
                weights: [a, b, c].map(T::of),
                iterations: Muon::iterations(prepared.step.numbers),
            }
        };
        Ok(arrays.zip(prepared).map(one).collect())
    }
}

fn lengths(shapes: &[(usize, usize)]) -> [Vec<usize>; 4] {
    let matrices: Vec<usize> = shapes.iter().map(|(rows, columns)| rows * columns).collect();
    let squares: Vec<usize> = shapes.iter().map(|(rows, columns)| rows.min(columns).pow(2)).collect();
    [matrices.clone(), matrices, squares.clone(), squares]
}

/// A matrix that iterations bring near an orthogonal one.
struct Iterated<T> {
    x: Array<T>,
    next: Array<T>,
    gram: Array<T>,
    factor: Array<T>,
    shape: (usize, usize),
    weights: [T; 3],
    iterations: u32,
}

impl<T: Both> Iterated<T> {
    fn x(&self) -> Matrix<'_, T> {
        Matrix::new(&self.x, self.shape)
    }

    fn is_tall(&self) -> bool {
        self.shape.0 > self.shape.1
    }

    fn square<'a>(&self, elements: &'a Array<T>) -> Matrix<'a, T> {
        let side = self.shape.0.min(self.shape.1);
        Matrix::new(elements, (side, side))
    }

    fn to_gram(&self) -> Product<'_, T> {
        let (a, b) = if self.is_tall() {
            (self.x().t(), self.x())
        } else {
            (self.x(), self.x().t())
        };
        Product {
            a,
            b,
            out: &self.gram,
            with: None,
            symmetric: true,
        }
    }

    fn to_factor(&self) -> Product<'_, T> {
        let (gram, [_, b, c]) = (self.square(&self.gram), self.weights);
        Product {
            a: gram,
            b: gram,
            out: &self.factor,
            with: Some((b, &self.gram, c)),
            symmetric: true,
        }
    }

    fn to_next(&self) -> Product<'_, T> {
        let (factor, x) = (self.square(&self.factor), self.x());
        let (a, b) = if self.is_tall() { (x, factor) } else { (factor, x) };
        Product {
            a,
            b,
            out: &self.next,
            with: Some((self.weights[0], &self.x, T::ONE)),
            symmetric: false,
        }
    }
}

/// A step that has no state and no rows.
fn plain<'a, T: Both>(p: &'a Array<T>, g: &'a Array<T>, out: &'a Array<T>, numbers: [T; rules::NUMBERS], flags: u64) -> rules::Step<'a, T> {
    rules::Step {
        p,
        out,
        g,
        rows: None,
        state: [None; 3],
        numbers,
        flags,
    }
}

pub(super) fn muon<T: Both>(prepared: &[Prepared<'_, '_, T>], steps: Vec<rules::Step<'_, T>>, scratch: &Scratch<T>) -> Result<()> {
    let mut matrices = scratch.matrices(prepared)?;
    let directions: Vec<_> = (steps.iter().zip(&matrices))
        .map(|(step, matrix)| plain(step.state[0].unwrap_or(step.p), step.g, &matrix.x, step.numbers, step.flags))
        .collect();
    rules::update(Kernel::MuonDirection, &directions)?;
    let squares = rules::block_sums(rules::Sum::Squares, &matrices.iter().map(|matrix| &matrix.x).collect::<Vec<_>>())?;
    let divided: Vec<_> = (matrices.iter().zip(prepared).zip(squares))
        .map(|((Iterated { x, .. }, prepared), blocks)| {
            let mut numbers = [T::ZERO; rules::NUMBERS];
            numbers[2] = T::of(Muon::norm(prepared.step.numbers, total(blocks)));
            plain(x, x, x, numbers, 0)
        })
        .collect();
    rules::update(Kernel::Divide, &divided)?;
    for round in 0..matrices.iter().map(|matrix| matrix.iterations).max().unwrap_or(0) {
        let mut those: Vec<&mut Iterated<T>> = matrices.iter_mut().filter(|matrix| round < matrix.iterations).collect();
        let all = |product: fn(&Iterated<T>) -> Product<'_, T>| multiply(&those.iter().map(|matrix| product(matrix)).collect::<Vec<_>>());
        all(Iterated::to_gram)?;
        all(Iterated::to_factor)?;
        all(Iterated::to_next)?;
        those.iter_mut().for_each(|matrix| std::mem::swap(&mut matrix.x, &mut matrix.next));
    }
    let mut steps = steps;
    steps
        .iter_mut()
        .zip(&matrices)
        .for_each(|(step, matrix)| step.state[1] = Some(&matrix.x));
    Ok(rules::update(Kernel::Muon, &steps)?)
}

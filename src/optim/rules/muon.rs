//! Muon.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::optim::arithmetic::{Matrix, lerp, pass0, pass1, product, sum_squares};
use crate::optim::options::{Check, options};
use crate::optim::step::Flags;
use crate::optim::{Float, Rule, StateArray, StateView, Step};

/// How [`Muon`] fits the learning rate to a matrix of `rows` x `columns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// By `sqrt(max(1, rows / columns))`.
    Original,
    /// By `0.2 * sqrt(max(rows, columns))`, so that rates tuned for AdamW can be kept (Liu et al., *Muon is scalable for LLM
    /// training*, arXiv:2502.16982, 2025).
    MatchRmsAdamw,
}

options! {
    /// Muon, for matrices (Jordan et al., *Muon: an optimizer for hidden layers in neural networks*, 2024), in the form of
    /// `torch.optim.Muon`. It takes parameters of two dimensions only.
    ///
    /// `b += (1 - momentum) * (g - b)`; `u = g + momentum * (b - g)` with `nesterov`, else `b`;
    /// `O` is `u` with its singular values brought near 1: `X = u / norm(u)`, then `ns_steps` times `A = X X'`,
    /// `X = c0 * X + (c1 * A + c2 * A A) X`. `p *= 1 - lr * weight_decay`; `p -= lr * adjustment * O`.
    ///
    /// torch computes `O` in bfloat16; here it has the parameter's precision.
    Muon {
        /// Learning rate, at least 0.
        lr = 1e-3;
        /// Share of the parameter that `lr` takes off at each step, at least 0.
        weight_decay: f64 = 0.1;
        /// Share of the last direction that is kept, at least 0.
        momentum: f64 = 0.95;
        /// Looks one step ahead.
        nesterov: bool = true;
        /// Coefficients of the iteration.
        ns_coefficients: (f64, f64, f64) = (3.4445, -4.7750, 2.0315);
        /// Least norm that a direction is divided by.
        eps: f64 = 1e-7;
        /// Number of iterations, below 100.
        ns_steps: u32 = 5;
        /// How the learning rate is fitted to the matrix; as [`AdjustLr::Original`] if left out.
        adjust_lr_fn: [AdjustLr] = None;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

const BUFFER: &str = "momentum_buffer";

impl Rule for Muon {
    const NAME: &'static str = "Muon";
    const SCALARS: &'static [(&'static str, f64)] = &[];

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.at_least_0("momentum", self.momentum)?;
        check.at_least_0("weight_decay", self.weight_decay)?;
        check.that(!self.eps.is_nan(), "eps", self.eps, "a number")?;
        let (a, b, c) = self.ns_coefficients;
        check.that(
            ![a, b, c].iter().any(|x| x.is_nan()),
            "ns_coefficients",
            self.ns_coefficients,
            "three numbers",
        )?;
        check.that(self.ns_steps < 100, "ns_steps", self.ns_steps, "below 100")
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::zeros(BUFFER, shape)]
    }

    fn takes_shape(&self, shape: &[usize]) -> Result<(), &'static str> {
        if shape.len() == 2 {
            Ok(())
        } else {
            Err("Muon takes parameters of two dimensions; use AdamW for the others")
        }
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        // Nothing moves where there are no elements.
        self.numbers(state.shape()).filter(|_| !state.shape().contains(&0))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let (shape, Some(step)) = (state.shape().to_vec(), self.numbers(state.shape())) else {
            return;
        };
        let (descent, ahead) = (step.descent(), step.flags.ahead);
        let [rest, momentum, shrink, step_size] = step.numbers();
        let [buffer] = state.arrays([BUFFER]);
        let mut direction = vec![T::ZERO; p.len()];
        pass1(
            &mut direction,
            g,
            buffer,
            #[inline(always)]
            move |_, g, b| {
                let g = descent.of(g, T::ZERO);
                *b = lerp(*b, g, rest);
                if ahead { lerp(g, *b, momentum) } else { *b }
            },
        );
        let orthogonal = orthogonal(direction, (shape[0], shape[1]), &step);
        pass0(
            p,
            &orthogonal,
            #[inline(always)]
            move |p, o| p * shrink + step_size * o,
        );
    }
}

impl Muon {
    /// The numbers of a step of a matrix: four of its elements, and those of the iterations.
    fn numbers(&self, shape: &[usize]) -> Option<Step> {
        let &[rows, columns] = shape else { return None };
        let (long, wide) = (rows as f64, columns as f64);
        let adjustment = match self.adjust_lr_fn.unwrap_or(AdjustLr::Original) {
            AdjustLr::Original => f64::max(1.0, long / wide).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * f64::max(long, wide).sqrt(),
        };
        let (a, b, c) = self.ns_coefficients;
        let numbers = [
            1.0 - self.momentum,
            self.momentum,
            1.0 - self.lr * self.weight_decay,
            -self.lr * adjustment,
            a,
            b,
            c,
            self.eps,
            f64::from(self.ns_steps),
        ];
        let flags = Flags {
            ahead: self.nesterov,
            ..Flags::default()
        };
        Some(Step::new("muon", &[BUFFER], self.maximize, 0.0, numbers).flagged(flags))
    }

    /// What a direction with this sum of squares is divided by in a step of `numbers`.
    pub(crate) fn norm([.., eps, _]: [f64; 9], squares: f64) -> f64 {
        f64::max(squares.sqrt(), eps)
    }

    /// The number of iterations of a step of `numbers`.
    pub(crate) fn iterations([.., iterations]: [f64; 9]) -> u32 {
        iterations as u32
    }
}

/// Newton-Schulz iterations on a matrix. They are those on the one with the shorter side first, so that products are small; of a tall matrix it is the
/// transposed one, whose products have the same terms.
fn orthogonal<T: Float>(mut x: Vec<T>, (rows, columns): (usize, usize), step: &Step) -> Vec<T> {
    let [_, _, _, _, a, b, c]: [T; 7] = step.numbers();
    let norm = T::of(Muon::norm(step.numbers, sum_squares(&x)));
    let (tall, side) = (rows > columns, rows.min(columns));
    for x in &mut x {
        *x = *x / norm;
    }
    for _ in 0..Muon::iterations(step.numbers) {
        let matrix = Matrix::new(&x, (rows, columns));
        let mut gram = match tall {
            true => product(matrix.t(), matrix, true),
            false => product(matrix, matrix.t(), true),
        };
        let square = Matrix::new(&gram, (side, side));
        let square = product(square, square, true);
        for (gram, square) in gram.iter_mut().zip(square) {
            *gram = b * *gram + c * square;
        }
        let factor = Matrix::new(&gram, (side, side));
        let next = match tall {
            true => product(matrix, factor, false),
            false => product(factor, matrix, false),
        };
        for (x, next) in x.iter_mut().zip(next) {
            *x = a * *x + next;
        }
    }
    x
}

//! Muon.

use ndarray::{Array2, ArrayView2};
// Links the BLAS that ndarray's `dot` calls.
use ndarray_linalg as _;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::optim::arithmetic::{Descent, lerp, pass1, sum_squares};
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView};

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
    /// torch computes `O` in bfloat16; here it has the parameter's precision. Its matrix products are the BLAS's, so bits
    /// repeat on the same machine and BLAS only.
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

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let &[rows, columns] = state.shape() else { return };
        let descent = Descent::new(self.maximize, 0.0);
        let (rest, momentum, ahead) = (T::of(1.0 - self.momentum), T::of(self.momentum), self.nesterov);
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
        let (long, wide) = (rows as f64, columns as f64);
        let adjustment = match self.adjust_lr_fn.unwrap_or(AdjustLr::Original) {
            AdjustLr::Original => f64::max(1.0, long / wide).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * f64::max(long, wide).sqrt(),
        };
        let (shrink, step_size) = (T::of(1.0 - self.lr * self.weight_decay), T::of(-self.lr * adjustment));
        let Ok(matrix) = ArrayView2::from_shape((rows, columns), &direction) else {
            return;
        };
        let orthogonal = self.orthogonalize(matrix);
        for (p, &o) in p.iter_mut().zip(&orthogonal) {
            *p = *p * shrink + step_size * o;
        }
    }
}

impl Muon {
    /// Newton-Schulz iterations on the matrix with the shorter side first, so that products are small.
    fn orthogonalize<T: Float>(&self, matrix: ArrayView2<'_, T>) -> Array2<T> {
        let tall = matrix.nrows() > matrix.ncols();
        let matrix = if tall { matrix.reversed_axes() } else { matrix };
        let (a, b, c) = self.ns_coefficients;
        let (a, b, c) = (T::of(a), T::of(b), T::of(c));
        let elements: Vec<T> = matrix.iter().copied().collect();
        let norm = T::of(f64::max(sum_squares(&elements).sqrt(), self.eps));
        let mut x = matrix.mapv(|x| x / norm);
        for _ in 0..self.ns_steps {
            let gram = x.dot(&x.t());
            let mut factor = gram.dot(&gram);
            factor.zip_mut_with(&gram, |square, &gram| *square = b * gram + c * *square);
            let mut next = factor.dot(&x);
            next.zip_mut_with(&x, |next, &x| *next = a * x + *next);
            x = next;
        }
        if tall { x.reversed_axes() } else { x }
    }
}

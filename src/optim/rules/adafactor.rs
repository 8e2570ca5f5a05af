//! Adafactor.

use crate::Result;
use crate::optim::arithmetic::{lerp, maximum, sum, sum_squares};
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView};

options! {
    /// Adafactor (Shazeer and Stern, *Adafactor: adaptive learning rates with sublinear memory cost*, ICML 2018), in the form
    /// of `torch.optim.Adafactor`.
    ///
    /// With `w = t^beta2_decay`, a matrix keeps averages of the mean squares of its rows, `R += w * (mean(g^2) - R)`, and of
    /// its columns, `C`; `V = R C / max(mean(R), eps.0)`. A vector keeps all of `V += w * (g^2 - V)`. Then
    /// `u = g / sqrt(max(V, eps.0^2))`; `p *= 1 - lr * weight_decay`;
    /// `p -= max(eps.1, rms(p)) * min(lr, 1 / sqrt(t)) / max(1, rms(u) / d) * u`, with `rms(p)` from before the decay.
    /// Leading axes of arrays of more than two are batches of matrices.
    Adafactor {
        /// Largest learning rate, at least 0.
        lr = 1e-2;
        /// Power of the step that the averages' weights follow, at most 0.
        beta2_decay: f64 = -0.8;
        /// Least root mean square of a gradient (the dtype's epsilon if left out) and of a parameter; at least 0.
        eps: (Option<f64>, f64) = (None, 1e-3);
        /// Largest root mean square of the step's direction, at least 1.
        d: f64 = 1.0;
        /// Share of the parameter that `lr` takes off at each step, at least 0.
        weight_decay: f64 = 0.0;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl Rule for Adafactor {
    const NAME: &'static str = "Adafactor";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.that(self.beta2_decay <= 0.0, "beta2_decay", self.beta2_decay, "at most 0")?;
        let positive = self.eps.0.is_none_or(|eps| eps >= 0.0) && self.eps.1 >= 0.0;
        check.that(positive, "eps", self.eps, "two numbers that are at least 0, the first also null")?;
        check.that(self.d >= 1.0, "d", self.d, "at least 1")?;
        check.at_least_0("weight_decay", self.weight_decay)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        let [batch @ .., rows, columns] = shape else {
            return vec![StateArray::zeros("variance", shape)];
        };
        vec![
            StateArray::zeros("row_var", &[batch, &[*rows, 1]].concat()),
            StateArray::zeros("col_var", &[batch, &[1, *columns]].concat()),
        ]
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let t = state.count() as f64;
        let weight = T::of(libm::pow(t, self.beta2_decay));
        let rate = f64::min(self.lr, 1.0 / t.sqrt());
        let root_mean = |squares: f64| (squares / p.len() as f64).sqrt();
        let scale = f64::max(self.eps.1, root_mean(sum_squares(p))) * rate;
        let least = self.eps.0.unwrap_or(T::EPSILON.wide());
        let floor = T::of(least * least);
        let sign = if self.maximize { -T::ONE } else { T::ONE };
        let shrink = T::of(1.0 - self.lr * self.weight_decay);

        let matrix = match *state.shape() {
            [.., rows, columns] => Some((rows, columns)),
            _ => None,
        };
        // The direction of an element: its gradient over the root of the estimated square.
        let along = |g: T, estimate: T| sign * g * (T::ONE / maximum(estimate, floor).sqrt());
        let step = |p: T, u: T, size: T| p * shrink + size * u;
        let size = |squares: f64| T::of(-scale / f64::max(1.0, root_mean(squares) / self.d));
        match matrix {
            None => {
                let [variance] = state.arrays(["variance"]);
                for (v, &g) in variance.iter_mut().zip(g) {
                    *v = lerp(*v, g * g, weight);
                }
                let direction = |i: usize| along(g[i], variance[i]);
                let size = size(sum(p.len(), |i| direction(i).wide() * direction(i).wide()));
                p.iter_mut().enumerate().for_each(|(i, p)| *p = step(*p, direction(i), size));
            }
            Some((rows, columns)) => {
                let [row_var, col_var] = state.arrays(["row_var", "col_var"]);
                let means = follow(g, (rows, columns), row_var, col_var, weight);
                let means: Vec<T> = means.into_iter().map(|mean| maximum(mean, T::of(least))).collect();
                let direction = |i: usize| {
                    let (row, column) = (i / columns, i % columns);
                    let batch = row / rows;
                    along(g[i], row_var[row] * col_var[batch * columns + column] / means[batch])
                };
                let size = size(sum(p.len(), |i| direction(i).wide() * direction(i).wide()));
                p.iter_mut().enumerate().for_each(|(i, p)| *p = step(*p, direction(i), size));
            }
        }
    }
}

/// Moves the averages of rows and columns towards a gradient's mean squares; returns the mean over rows of each matrix.
fn follow<T: Float>(g: &[T], (rows, columns): (usize, usize), row_var: &mut [T], col_var: &mut [T], weight: T) -> Vec<T> {
    if g.is_empty() {
        return vec![];
    }
    let mut means = Vec::with_capacity(g.len() / (rows * columns));
    let matrices = g
        .chunks(rows * columns)
        .zip(row_var.chunks_mut(rows))
        .zip(col_var.chunks_mut(columns));
    for ((g, row_var), col_var) in matrices {
        let mut squares = vec![0.0; columns];
        for (row, average) in g.chunks(columns).zip(row_var.iter_mut()) {
            *average = lerp(*average, T::of(sum_squares(row) / columns as f64), weight);
            for (square, &g) in squares.iter_mut().zip(row) {
                *square += g.wide() * g.wide();
            }
        }
        for (average, square) in col_var.iter_mut().zip(squares) {
            *average = lerp(*average, T::of(square / rows as f64), weight);
        }
        means.push(T::of(sum(rows, |row| row_var[row].wide()) / rows as f64));
    }
    means
}

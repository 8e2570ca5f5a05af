//! Adafactor.

use crate::Result;
use crate::optim::arithmetic::{
    PIECE, add_each_square, add_squares, lerp, maximum, pass0, pass1, sum, sum_squares, sum_squares_of_rows, vectorized,
};
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView, Step};

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

impl Adafactor {
    /// The numbers of step `t`; two of them are for [`step_size`](Self::step_size).
    fn numbers<T: Float>(&self, t: u64, shape: &[usize]) -> Step {
        let t = t as f64;
        let least = self.eps.0.unwrap_or(T::EPSILON.wide());
        let rate = f64::min(self.lr, 1.0 / t.sqrt());
        let numbers = [
            libm::pow(t, self.beta2_decay),
            least * least,
            0.0, // the step size, which depends on norms
            1.0 - self.lr * self.weight_decay,
            least,
            rate,
            self.eps.1,
            self.d,
        ];
        let arrays: &[&str] = if shape.len() < 2 { &["variance"] } else { &["row_var", "col_var"] };
        Step::new("adafactor", arrays, self.maximize, 0.0, numbers)
    }

    /// The size of a step of `numbers`, over so many elements, where the parameter and the direction have these sums of squares.
    pub(crate) fn step_size([.., rate, least, d, _]: [f64; 9], elements: usize, squares: f64, direction_squares: f64) -> f64 {
        let root_mean = |squares: f64| (squares / elements as f64).sqrt();
        -(f64::max(least, root_mean(squares)) * rate) / f64::max(1.0, root_mean(direction_squares) / d)
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

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        let numbers = self.numbers::<T>(state.count(), state.shape());
        // Nothing moves where there are no elements.
        (!state.shape().contains(&0)).then_some(numbers)
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let step = self.numbers::<T>(state.count(), state.shape());
        let [weight, floor, _, shrink, least] = step.numbers();
        let sign = if self.maximize { -T::ONE } else { T::ONE };
        let along = Along { sign, floor };
        let (elements, parameter_squares) = (p.len(), sum_squares(p));
        let size = |squares: f64| T::of(Self::step_size(step.numbers, elements, parameter_squares, squares));
        let mut directions = vec![T::ZERO; p.len().min(PIECE)];
        let mut squares = 0.0;
        let [.., rows, columns] = *state.shape() else {
            let [variance] = state.arrays(["variance"]);
            for (v, g) in variance.chunks_mut(PIECE).zip(g.chunks(PIECE)) {
                pass0(
                    v,
                    g,
                    #[inline(always)]
                    move |v, g| lerp(v, g * g, weight),
                );
                let directions = &mut directions[..g.len()];
                pass1(
                    directions,
                    g,
                    v,
                    #[inline(always)]
                    move |_, g, v| along.of(g, *v),
                );
                add_squares(&mut squares, directions);
            }
            let size = size(squares);
            return pass1(
                p,
                g,
                variance,
                #[inline(always)]
                move |p, g, v| p * shrink + size * along.of(g, *v),
            );
        };
        if p.is_empty() {
            return;
        }
        let [row_var, col_var] = state.arrays(["row_var", "col_var"]);
        let means = follow(g, (rows, columns), row_var, col_var, weight);
        let means: Vec<T> = means.into_iter().map(|mean| maximum(mean, least)).collect();
        let estimates = Estimates {
            rows,
            columns,
            row_var,
            col_var,
            means: &means,
        };
        let mut start = 0;
        for g in g.chunks(PIECE) {
            let directions = &mut directions[..g.len()];
            estimates.pass(
                (start, directions, g),
                #[inline(always)]
                move |_, g, estimate| along.of(g, estimate),
            );
            add_squares(&mut squares, directions);
            start += g.len();
        }
        let size = size(squares);
        estimates.pass(
            (0, p, g),
            #[inline(always)]
            move |p, g, estimate| p * shrink + size * along.of(g, estimate),
        );
    }
}

/// The direction of an element: its gradient over the root of the estimated square.
#[derive(Clone, Copy)]
struct Along<T> {
    sign: T,
    floor: T,
}

impl<T: Float> Along<T> {
    #[inline(always)]
    fn of(self, g: T, estimate: T) -> T {
        self.sign * g * (T::ONE / maximum(estimate, self.floor).sqrt())
    }
}

/// Estimates of the squares of all elements of a stack of matrices, of at least one element.
#[derive(Clone, Copy)]
struct Estimates<'a, T> {
    rows: usize,
    columns: usize,
    row_var: &'a [T],
    col_var: &'a [T],
    means: &'a [T],
}

impl<T: Float> Estimates<'_, T> {
    /// One pass over elements from place `start` on, and their gradients and estimates.
    fn pass(self, (start, p, g): (usize, &mut [T], &[T]), update: impl Fn(T, T, T) -> T + Copy) {
        vectorized(
            (self, (start, p, g), update),
            #[inline(always)]
            |(estimates, elements, update)| estimates.each(elements, update),
        );
    }

    #[inline(always)]
    fn each(self, (start, mut p, mut g): (usize, &mut [T], &[T]), update: impl Fn(T, T, T) -> T + Copy) {
        let (mut row, mut column) = (start / self.columns, start % self.columns);
        while !p.is_empty() {
            let (matrix, r) = (row / self.rows, self.row_var[row]);
            let mean = self.means[matrix];
            let estimates = &self.col_var[matrix * self.columns + column..(matrix + 1) * self.columns];
            let len = estimates.len().min(p.len());
            let (values, gradients);
            (values, p) = p.split_at_mut(len);
            (gradients, g) = g.split_at(len);
            segment(values, gradients, estimates, (r, mean), update);
            (row, column) = (row + 1, 0);
        }
    }
}

/// Elements of one row.
#[inline(always)]
fn segment<T: Float>(p: &mut [T], g: &[T], col_var: &[T], (r, mean): (T, T), update: impl Fn(T, T, T) -> T) {
    for ((p, &g), &c) in p.iter_mut().zip(g).zip(col_var) {
        *p = update(*p, g, r * c / mean);
    }
}

/// Moves the averages of rows and columns towards a gradient's mean squares; returns the mean over rows of each matrix.
fn follow<T: Float>(g: &[T], (rows, columns): (usize, usize), row_var: &mut [T], col_var: &mut [T], weight: T) -> Vec<T> {
    let mut means = Vec::with_capacity(g.len() / (rows * columns));
    let matrices = g
        .chunks(rows * columns)
        .zip(row_var.chunks_mut(rows))
        .zip(col_var.chunks_mut(columns));
    // As many rows at a time as the cache holds while both sums go over them.
    let together = (PIECE / columns).clamp(1, rows);
    let mut row_squares = vec![0.0; together];
    for ((g, row_var), col_var) in matrices {
        let mut squares = vec![0.0; columns];
        for (g, row_var) in g.chunks(together * columns).zip(row_var.chunks_mut(together)) {
            let row_squares = &mut row_squares[..row_var.len()];
            sum_squares_of_rows(g, columns, row_squares);
            for (average, square) in row_var.iter_mut().zip(row_squares) {
                *average = lerp(*average, T::of(*square / columns as f64), weight);
            }
            g.chunks(columns).for_each(|row| add_each_square(&mut squares, row));
        }
        for (average, square) in col_var.iter_mut().zip(squares) {
            *average = lerp(*average, T::of(square / rows as f64), weight);
        }
        means.push(T::of(sum(rows, |row| row_var[row].wide()) / rows as f64));
    }
    means
}

//! LAMB.

use crate::Result;
use crate::optim::arithmetic::{BLOCK, Lanes, PIECE, lerp, pass1, powi, square_pass3, sum_of_lanes};
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// LAMB (You et al., *Large batch optimization for deep learning: training BERT in 76 minutes*, ICLR 2020, algorithm 2).
    /// Not in `torch.optim`.
    ///
    /// `m` and `v` as Adam's; `u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p`;
    /// `p -= lr * norm(p) / norm(u) * u`, with norms over the whole parameter, and 1 for their ratio when one of them is 0.
    Lamb {
        /// Learning rate, at least 0.
        lr = 1e-3;
        /// Decay rates of the averages of the gradient and of its square, each at least 0 and below 1.
        betas: (f64, f64) = (0.9, 0.999);
        /// Added to the denominator, at least 0.
        eps: f64 = 1e-6;
        /// Share of the parameter within the step, at least 0.
        weight_decay: f64 = 1e-2;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

/// Elements that go through the first pass at a time: their directions stay in the second-level cache, and are needed for their norm alone.
const LONG: usize = 4 * PIECE;
const BLOCKS: usize = LONG / BLOCK;

impl Lamb {
    /// The numbers of step `t`.
    fn numbers(&self, t: u64) -> Step {
        let (beta1, beta2) = self.betas;
        let (correction1, correction2) = (1.0 - powi(beta1, t), 1.0 - powi(beta2, t));
        let (rest1, rest2) = (1.0 - beta1, 1.0 - beta2);
        let numbers = [rest1, beta2, rest2, -self.lr, correction1, self.eps, self.weight_decay, correction2];
        Step::new("lamb", &["exp_avg", "exp_avg_sq"], self.maximize, 0.0, numbers)
    }

    /// The size of a step whose parameter and direction have these norms, from that of a step whose norms are equal.
    pub(crate) fn step_size(size: f64, norm: f64, step_norm: f64) -> f64 {
        let ratio = if norm > 0.0 && step_norm > 0.0 { norm / step_norm } else { 1.0 };
        size * ratio
    }
}

impl Rule for Lamb {
    const NAME: &'static str = "LAMB";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.betas(self.betas)?;
        check.at_least_0("eps", self.eps)?;
        check.at_least_0("weight_decay", self.weight_decay)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::zeros("exp_avg", shape), StateArray::zeros("exp_avg_sq", shape)]
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        Some(self.numbers(state.count()))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let step = self.numbers(state.count());
        let descent = step.descent();
        let [rest1, beta2, rest2, _, correction1, eps, decay, correction2] = step.numbers();
        let ([average, square], of_gradient) = state.arrays_and_squares(["exp_avg", "exp_avg_sq"], g);
        let mut of_gradient = of_gradient.chunks_mut(BLOCKS);
        // Computed twice, for the norm and for the step: cheaper than memory for it.
        let direction = {
            #[inline(always)]
            move |p: T, m: T, v: T| m / correction1 / ((v / correction2).sqrt() + eps) + decay * p
        };
        let (mut squares, mut step_squares) = (0.0, 0.0);
        let mut directions = vec![T::ZERO; p.len().min(LONG)];
        let pieces = p.chunks_mut(LONG).zip(g.chunks(LONG));
        for ((p, g), (m, v)) in pieces.zip(average.chunks_mut(LONG).zip(square.chunks_mut(LONG))) {
            let mut sums = [[Lanes::default(); BLOCKS]; 2];
            let [of_directions, of_p] = sums.each_mut().map(|sums| &mut sums[..g.len().div_ceil(BLOCK)]);
            square_pass3(
                &mut directions[..g.len()],
                g,
                [m, v, p],
                [&mut *of_directions, of_gradient.next().unwrap_or_default(), &mut *of_p],
                #[inline(always)]
                move |_, g, m, v, p| {
                    let g = descent.of(g, T::ZERO);
                    *m = lerp(*m, g, rest1);
                    *v = *v * beta2 + rest2 * g * g;
                    direction(*p, *m, *v)
                },
            );
            let add = |total, sums: &mut [Lanes]| sums.iter().fold(total, |sum, lanes| sum + sum_of_lanes(*lanes));
            (squares, step_squares) = (add(squares, of_p), add(step_squares, of_directions));
        }
        let (norm, step_norm) = (squares.sqrt(), step_squares.sqrt());
        let step_size = T::of(Self::step_size(step.numbers[3], norm, step_norm));
        pass1(
            p,
            average,
            square,
            #[inline(always)]
            move |p, m, v| p + step_size * direction(p, m, *v),
        );
    }
}

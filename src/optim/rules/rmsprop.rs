//! RMSprop.

use crate::Result;
use crate::optim::arithmetic::lerp;
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// RMSprop (Tieleman and Hinton, *Neural networks for machine learning*, lecture 6.5, 2012; `centered` from Graves,
    /// *Generating sequences with recurrent neural networks*, arXiv:1308.0850, 2013), in the form of `torch.optim.RMSprop`.
    ///
    /// `g = gradient + weight_decay * p`; `s = alpha * s + (1 - alpha) * g^2`; `r = sqrt(s) + eps`, or with `centered`
    /// `a += (1 - alpha) * (g - a)` and `r = sqrt(s - a^2) + eps`. Then `p -= lr * g / r`, or with momentum
    /// `b = momentum * b + g / r` and `p -= lr * b`.
    RmsProp {
        /// Learning rate, at least 0.
        lr = 1e-2;
        /// Decay rate of the averages, at least 0.
        alpha: f64 = 0.99;
        /// Added to the denominator, at least 0.
        eps: f64 = 1e-8;
        /// L2 penalty, at least 0.
        weight_decay: f64 = 0.0;
        /// Share of the last step that is kept, at least 0.
        momentum: f64 = 0.0;
        /// Divides by an estimate of the deviation instead of the root mean square.
        centered: bool = false;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl RmsProp {
    /// The numbers of a step.
    fn numbers(&self) -> Step {
        let (kernel, arrays): (_, &[_]) = match (self.momentum > 0.0, self.centered) {
            (false, false) => ("rmsprop", &["square_avg"]),
            (false, true) => ("rmsprop_centered", &["square_avg", "grad_avg"]),
            (true, false) => ("rmsprop_momentum", &["square_avg", "momentum_buffer"]),
            (true, true) => ("rmsprop_centered_momentum", &["square_avg", "grad_avg", "momentum_buffer"]),
        };
        let numbers = [self.alpha, 1.0 - self.alpha, self.lr, self.eps, self.momentum];
        Step::new(kernel, arrays, self.maximize, self.weight_decay, numbers)
    }
}

impl Rule for RmsProp {
    const NAME: &'static str = "RMSprop";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.at_least_0("alpha", self.alpha)?;
        check.at_least_0("eps", self.eps)?;
        check.at_least_0("weight_decay", self.weight_decay)?;
        check.at_least_0("momentum", self.momentum)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        let mut arrays = vec![StateArray::zeros("square_avg", shape)];
        if self.momentum > 0.0 {
            arrays.push(StateArray::zeros("momentum_buffer", shape));
        }
        if self.centered {
            arrays.push(StateArray::zeros("grad_avg", shape));
        }
        arrays
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        state.count();
        Some(self.numbers())
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        state.count();
        let step = self.numbers();
        let descent = step.descent();
        let [alpha, rest, lr, eps, momentum] = step.numbers();
        let square = {
            #[inline(always)]
            move |g: T, s: &mut T| *s = *s * alpha + rest * g * g
        };
        let root = {
            #[inline(always)]
            move |s: T| s.sqrt() + eps
        };
        let centered_root = {
            #[inline(always)]
            move |g: T, s: T, mean: &mut T| {
                *mean = lerp(*mean, g, rest);
                (s - *mean * *mean).sqrt() + eps
            }
        };
        let plain = {
            #[inline(always)]
            move |p: T, g: T, r: T| p - lr * g / r
        };
        let with_momentum = {
            #[inline(always)]
            move |p: T, g: T, r: T, b: &mut T| {
                *b = *b * momentum + g / r;
                p - lr * *b
            }
        };
        match (self.momentum > 0.0, self.centered) {
            (false, false) => {
                state.pass1(
                    p,
                    g,
                    "square_avg",
                    #[inline(always)]
                    move |p, g, s| {
                        let g = descent.of(g, p);
                        square(g, s);
                        plain(p, g, root(*s))
                    },
                );
            }
            (false, true) => state.pass2(
                p,
                g,
                ["square_avg", "grad_avg"],
                #[inline(always)]
                move |p, g, s, mean| {
                    let g = descent.of(g, p);
                    square(g, s);
                    plain(p, g, centered_root(g, *s, mean))
                },
            ),
            (true, false) => state.pass2(
                p,
                g,
                ["square_avg", "momentum_buffer"],
                #[inline(always)]
                move |p, g, s, b| {
                    let g = descent.of(g, p);
                    square(g, s);
                    with_momentum(p, g, root(*s), b)
                },
            ),
            (true, true) => state.pass3(
                p,
                g,
                ["square_avg", "grad_avg", "momentum_buffer"],
                #[inline(always)]
                move |p, g, s, mean, b| {
                    let g = descent.of(g, p);
                    square(g, s);
                    with_momentum(p, g, centered_root(g, *s, mean), b)
                },
            ),
        }
    }
}

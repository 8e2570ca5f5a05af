//! RAdam.

use crate::Result;
use crate::optim::arithmetic::{lerp, powi};
use crate::optim::options::{Check, options};
use crate::optim::step::Flags;
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// Rectified Adam (Liu et al., *On the variance of the adaptive learning rate and beyond*, ICLR 2020), in the form of
    /// `torch.optim.RAdam`.
    ///
    /// `m` and `v` as Adam's; `R = 2 / (1 - beta2) - 1`; `r = R - 2 * t * beta2^t / (1 - beta2^t)`; `m' = m / (1 - beta1^t)`.
    /// While `r <= 5`: `p -= lr * m'`. Then `p -= lr * m' * sqrt(1 - beta2^t) / (sqrt(v) + eps) * c` with
    /// `c = sqrt((r - 4) * (r - 2) * R / ((R - 4) * (R - 2) * r))`.
    RAdam {
        /// Learning rate, at least 0.
        lr = 1e-3;
        /// Decay rates of the averages of the gradient and of its square, each at least 0 and below 1.
        betas: (f64, f64) = (0.9, 0.999);
        /// Added to the denominator, at least 0.
        eps: f64 = 1e-8;
        /// L2 penalty, at least 0.
        weight_decay: f64 = 0.0;
        /// Shrinks the parameter by `lr * weight_decay` instead of adding a penalty to the gradient.
        decoupled_weight_decay: bool = false;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl RAdam {
    /// The numbers of step `t`.
    fn numbers(&self, t: u64) -> Step {
        let (beta1, beta2) = self.betas;
        let power = powi(beta2, t);
        let correction2 = 1.0 - power;
        let limit = 2.0 / (1.0 - beta2) - 1.0;
        let length = limit - 2.0 * t as f64 * power / correction2;
        // Not while the variance of the adaptive rate isn't tractable.
        let rectified = length > 5.0;
        let c = (length - 4.0) * (length - 2.0) * limit / ((limit - 4.0) * (limit - 2.0) * length);
        let (shrink, penalty) = match self.decoupled_weight_decay {
            true => (1.0 - self.lr * self.weight_decay, 0.0),
            false => (1.0, self.weight_decay),
        };
        let correction1 = 1.0 - powi(beta1, t);
        let (rest1, rest2) = (1.0 - beta1, 1.0 - beta2);
        let numbers = [
            rest1,
            beta2,
            rest2,
            self.lr,
            correction1,
            self.eps,
            shrink,
            correction2.sqrt(),
            c.sqrt(),
        ];
        let flags = Flags {
            rectified,
            ..Flags::default()
        };
        Step::new("radam", &["exp_avg", "exp_avg_sq"], self.maximize, penalty, numbers).flagged(flags)
    }
}

impl Rule for RAdam {
    const NAME: &'static str = "RAdam";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];
    const ELEMENTWISE: bool = true;

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
        let [rest1, beta2, rest2, lr, correction1, eps, shrink, root, c] = step.numbers();
        let rectified = step.flags.rectified.then_some((root, c));
        state.pass2(
            p,
            g,
            ["exp_avg", "exp_avg_sq"],
            #[inline(always)]
            move |p, g, m, v| {
                let g = descent.of(g, p);
                *m = lerp(*m, g, rest1);
                *v = *v * beta2 + rest2 * g * g;
                let step = *m / correction1 * lr;
                p * shrink
                    - match rectified {
                        Some((root, c)) => step * (root / (v.sqrt() + eps)) * c,
                        None => step,
                    }
            },
        );
    }
}

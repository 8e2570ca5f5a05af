//! NAdam.

use crate::Result;
use crate::optim::arithmetic::{lerp, powi};
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// Adam with Nesterov's momentum (Dozat, *Incorporating Nesterov momentum into Adam*, ICLR workshop 2016), in the form of
    /// `torch.optim.NAdam`.
    ///
    /// `mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2)`, `P` the product of `mu_1` to `mu_t`; `m` and `v` as Adam's;
    /// `r = sqrt(v / (1 - beta2^t)) + eps`;
    /// `p -= lr * (1 - mu_t) / (1 - P) * g / r + lr * mu_(t+1) / (1 - P * mu_(t+1)) * m / r`.
    ///
    /// `P` is kept in single precision, as torch keeps it, so that results agree.
    NAdam {
        /// Learning rate, at least 0.
        lr = 2e-3;
        /// Decay rates of the averages of the gradient and of its square, each at least 0 and below 1.
        betas: (f64, f64) = (0.9, 0.999);
        /// Added to the denominator, at least 0.
        eps: f64 = 1e-8;
        /// L2 penalty, at least 0.
        weight_decay: f64 = 0.0;
        /// How fast the momentum approaches `beta1`, at least 0.
        momentum_decay: f64 = 4e-3;
        /// Shrinks the parameter by `lr * weight_decay` instead of adding a penalty to the gradient.
        decoupled_weight_decay: bool = false;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl NAdam {
    /// The numbers of a step, which is counted.
    fn numbers<T: Float>(&self, state: &mut StateView<'_, T>) -> Step {
        let t = state.count();
        let (beta1, beta2) = self.betas;
        let momentum = |t: u64| beta1 * (1.0 - 0.5 * libm::pow(0.96, t as f64 * self.momentum_decay));
        let (now, next) = (momentum(t), momentum(t + 1));
        let product = state.scalar("mu_product");
        *product = f64::from(*product as f32 * now as f32);
        let by_gradient = -self.lr * (1.0 - now) / (1.0 - *product);
        let by_average = -self.lr * next / (1.0 - *product * next);
        let correction = 1.0 - powi(beta2, t);
        let (shrink, penalty) = match self.decoupled_weight_decay {
            true => (1.0 - self.lr * self.weight_decay, 0.0),
            false => (1.0, self.weight_decay),
        };
        let numbers = [
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            by_gradient,
            correction,
            self.eps,
            shrink,
            by_average,
        ];
        Step::new("nadam", &["exp_avg", "exp_avg_sq"], self.maximize, penalty, numbers)
    }
}

impl Rule for NAdam {
    const NAME: &'static str = "NAdam";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0), ("mu_product", 1.0)];
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.betas(self.betas)?;
        check.at_least_0("eps", self.eps)?;
        check.at_least_0("weight_decay", self.weight_decay)?;
        check.at_least_0("momentum_decay", self.momentum_decay)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::zeros("exp_avg", shape), StateArray::zeros("exp_avg_sq", shape)]
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        Some(self.numbers(state))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let step = self.numbers(state);
        let descent = step.descent();
        let [rest1, beta2, rest2, by_gradient, correction, eps, shrink, by_average] = step.numbers();
        state.pass2(
            p,
            g,
            ["exp_avg", "exp_avg_sq"],
            #[inline(always)]
            move |p, g, m, v| {
                let g = descent.of(g, p);
                *m = lerp(*m, g, rest1);
                *v = *v * beta2 + rest2 * g * g;
                let root = (*v / correction).sqrt() + eps;
                (p * shrink + by_gradient * g / root) + by_average * *m / root
            },
        );
    }
}

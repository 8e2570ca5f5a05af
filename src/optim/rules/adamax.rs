//! Adamax.

use crate::Result;
use crate::optim::arithmetic::{lerp, maximum, powi};
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// Adamax, Adam with the infinity norm (Kingma and Ba, *Adam: a method for stochastic optimization*, ICLR 2015, section
    /// 7.1), in the form of `torch.optim.Adamax`.
    ///
    /// `g = gradient + weight_decay * p`; `m += (1 - beta1) * (g - m)`; `u = max(beta2 * u, |g| + eps)`;
    /// `p -= lr / (1 - beta1^t) * m / u`.
    Adamax {
        /// Learning rate, at least 0.
        lr = 2e-3;
        /// Decay rates of the average of the gradient and of the norm, each at least 0 and below 1.
        betas: (f64, f64) = (0.9, 0.999);
        /// Added to the gradient's magnitude, at least 0.
        eps: f64 = 1e-8;
        /// L2 penalty, at least 0.
        weight_decay: f64 = 0.0;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl Adamax {
    /// The numbers of step `t`.
    fn numbers(&self, t: u64) -> Step {
        let (beta1, beta2) = self.betas;
        let step_size = -self.lr / (1.0 - powi(beta1, t));
        let numbers = [1.0 - beta1, beta2, self.eps, step_size];
        Step::new("adamax", &["exp_avg", "exp_inf"], self.maximize, self.weight_decay, numbers)
    }
}

impl Rule for Adamax {
    const NAME: &'static str = "Adamax";
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
        vec![StateArray::zeros("exp_avg", shape), StateArray::zeros("exp_inf", shape)]
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        Some(self.numbers(state.count()))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let step = self.numbers(state.count());
        let descent = step.descent();
        let [rest, beta2, eps, step_size] = step.numbers();
        state.pass2(
            p,
            g,
            ["exp_avg", "exp_inf"],
            #[inline(always)]
            move |p, g, m, norm| {
                let g = descent.of(g, p);
                *m = lerp(*m, g, rest);
                *norm = maximum(*norm * beta2, g.abs() + eps);
                p + step_size * *m / *norm
            },
        );
    }
}

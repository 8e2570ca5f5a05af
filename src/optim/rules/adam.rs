//! Adam.

use crate::Result;
use crate::optim::arithmetic::{lerp, maximum, powi};
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// Adam (Kingma and Ba, *Adam: a method for stochastic optimization*, ICLR 2015; `amsgrad` from Reddi et al., *On the
    /// convergence of Adam and beyond*, ICLR 2018), in the form of `torch.optim.Adam`.
    ///
    /// `g = gradient + weight_decay * p`; `m += (1 - beta1) * (g - m)`; `v = beta2 * v + (1 - beta2) * g^2`;
    /// `p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)`. With `amsgrad` the largest `v` so far stands in
    /// the denominator. No sparse gradients: [`SparseAdam`](super::SparseAdam) takes them.
    Adam {
        /// Learning rate, at least 0.
        lr = 1e-3;
        /// Decay rates of the averages of the gradient and of its square, each at least 0 and below 1.
        betas: (f64, f64) = (0.9, 0.999);
        /// Added to the denominator, at least 0.
        eps: f64 = 1e-8;
        /// L2 penalty, at least 0.
        weight_decay: f64 = 0.0;
        /// Divides by the largest average of the square so far.
        amsgrad: bool = false;
        /// Climbs instead of descending.
        maximize: bool = false;
        /// Shrinks the parameter by `lr * weight_decay` instead of adding a penalty to the gradient, as AdamW does.
        decoupled_weight_decay: bool = false;
    }
}

impl Rule for Adam {
    const NAME: &'static str = "Adam";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        self.check_as(Self::NAME)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        let mut arrays = vec![StateArray::zeros("exp_avg", shape), StateArray::zeros("exp_avg_sq", shape)];
        if self.amsgrad {
            arrays.push(StateArray::zeros("max_exp_avg_sq", shape));
        }
        arrays
    }

    fn form(&self, sparse: bool) -> Result<crate::optim::Form, &'static str> {
        dense_only(sparse)
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        Some(self.numbers(state.count()))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let step = self.numbers(state.count());
        let descent = step.descent();
        let [rest1, beta2, rest2, step_size, correction, eps, shrink] = step.numbers();
        let average = {
            #[inline(always)]
            move |p: T, g: T, m: &mut T, v: &mut T| {
                let g = descent.of(g, p);
                *m = lerp(*m, g, rest1);
                *v = *v * beta2 + rest2 * g * g;
                p * shrink
            }
        };
        if self.amsgrad {
            state.pass3(
                p,
                g,
                ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
                #[inline(always)]
                move |p, g, m, v, largest| {
                    let p = average(p, g, m, v);
                    *largest = maximum(*largest, *v);
                    p + step_size * *m / (largest.sqrt() / correction + eps)
                },
            );
        } else {
            state.pass2(
                p,
                g,
                ["exp_avg", "exp_avg_sq"],
                #[inline(always)]
                move |p, g, m, v| {
                    let p = average(p, g, m, v);
                    p + step_size * *m / (v.sqrt() / correction + eps)
                },
            );
        }
    }
}

impl Adam {
    /// The numbers of step `t`.
    pub(super) fn numbers(&self, t: u64) -> Step {
        let (beta1, beta2) = self.betas;
        let step_size = self.lr / (1.0 - powi(beta1, t));
        let correction = (1.0 - powi(beta2, t)).sqrt();
        let (shrink, penalty) = match self.decoupled_weight_decay {
            true => (1.0 - self.lr * self.weight_decay, 0.0),
            false => (1.0, self.weight_decay),
        };
        let numbers = [1.0 - beta1, beta2, 1.0 - beta2, -step_size, correction, self.eps, shrink];
        match self.amsgrad {
            true => Step::new(
                "amsgrad",
                &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
                self.maximize,
                penalty,
                numbers,
            ),
            false => Step::new("adam", &["exp_avg", "exp_avg_sq"], self.maximize, penalty, numbers),
        }
    }

    /// The checks, under the name of the rule that uses this one.
    pub(super) fn check_as(&self, name: &'static str) -> Result<()> {
        let check = Check(name);
        check.at_least_0("lr", self.lr)?;
        check.betas(self.betas)?;
        check.at_least_0("eps", self.eps)?;
        check.at_least_0("weight_decay", self.weight_decay)
    }
}

/// Refuses sparse gradients and says which rule takes them.
pub(super) fn dense_only(sparse: bool) -> Result<crate::optim::Form, &'static str> {
    if sparse {
        Err("its gradient is sparse; use SparseAdam")
    } else {
        Ok(crate::optim::Form::Dense)
    }
}

//! SparseAdam.

use crate::Result;
use crate::optim::arithmetic::{pass2, powi};
use crate::optim::options::{Check, options};
use crate::optim::{Float, Form, Rows, Rule, StateArray, StateView, Step};

options! {
    /// Adam for sparse gradients, in the form of `torch.optim.SparseAdam`: averages and parameters change in the touched
    /// rows only, and the others don't decay meanwhile. It takes no dense gradients.
    ///
    /// In each touched row `m += (1 - beta1) * (g - m)`; `v += (1 - beta2) * (g^2 - v)`;
    /// `p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)`, with `t` the steps of the whole parameter.
    SparseAdam {
        /// Learning rate, above 0.
        lr = 1e-3;
        /// Decay rates of the averages of the gradient and of its square, each at least 0 and below 1.
        betas: (f64, f64) = (0.9, 0.999);
        /// Added to the denominator, above 0.
        eps: f64 = 1e-8;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl SparseAdam {
    /// The numbers of step `t`.
    fn numbers(&self, t: u64) -> Step {
        let (beta1, beta2) = self.betas;
        let step_size = -self.lr * (1.0 - powi(beta2, t)).sqrt() / (1.0 - powi(beta1, t));
        let numbers = [1.0 - beta1, 1.0 - beta2, step_size, self.eps];
        Step::new("sparse_adam", &["exp_avg", "exp_avg_sq"], self.maximize, 0.0, numbers)
    }
}

impl Rule for SparseAdam {
    const NAME: &'static str = "SparseAdam";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];
    const BY_ROWS: bool = true;

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.that(self.lr > 0.0, "lr", self.lr, "above 0")?;
        check.that(self.eps > 0.0, "eps", self.eps, "above 0")?;
        check.betas(self.betas)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::zeros("exp_avg", shape), StateArray::zeros("exp_avg_sq", shape)]
    }

    fn form(&self, sparse: bool) -> Result<Form, &'static str> {
        if sparse {
            Ok(Form::Rows)
        } else {
            Err("its gradient is dense, and SparseAdam takes sparse ones only; use Adam")
        }
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        Some(self.numbers(state.count()))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let rows = [0];
        self.update_rows(p, Rows { rows: &rows, values: g }, state);
    }

    fn update_rows<T: Float>(&self, p: &mut [T], g: Rows<'_, T>, state: &mut StateView<'_, T>) {
        let step = self.numbers(state.count());
        let descent = step.descent();
        let [rest1, rest2, step_size, eps] = step.numbers();
        let [average, square] = state.arrays(["exp_avg", "exp_avg_sq"]);
        for (row, g) in g.iter() {
            pass2(
                &mut p[row.clone()],
                g,
                [&mut average[row.clone()], &mut square[row]],
                #[inline(always)]
                move |p, g, m, v| {
                    let g = descent.of(g, p);
                    *m = (g - *m) * rest1 + *m;
                    *v = (g * g - *v) * rest2 + *v;
                    p + step_size * (*m / (v.sqrt() + eps))
                },
            );
        }
    }
}

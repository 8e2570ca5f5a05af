//! Lion.

use crate::Result;
use crate::optim::arithmetic::{lerp, sign};
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// Lion (Chen et al., *Symbolic discovery of optimization algorithms*, NeurIPS 2023, program 1). Not in `torch.optim`.
    ///
    /// `c = m + (1 - beta1) * (g - m)`; `p -= lr * (sign(c) + weight_decay * p)`; `m += (1 - beta2) * (g - m)`.
    Lion {
        /// Learning rate, at least 0; three to ten times smaller than Adam's.
        lr = 1e-4;
        /// Decay rates of the average within the step's sign and of the average that is kept, each at least 0 and below 1.
        betas: (f64, f64) = (0.9, 0.99);
        /// Share of the parameter that `lr` takes off at each step, at least 0.
        weight_decay: f64 = 0.0;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl Lion {
    /// The numbers of a step.
    fn numbers(&self) -> Step {
        let shrink = 1.0 - self.lr * self.weight_decay;
        let numbers = [shrink, self.lr, 1.0 - self.betas.0, 1.0 - self.betas.1];
        Step::new("lion", &["exp_avg"], self.maximize, 0.0, numbers)
    }
}

impl Rule for Lion {
    const NAME: &'static str = "Lion";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.betas(self.betas)?;
        check.at_least_0("weight_decay", self.weight_decay)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::zeros("exp_avg", shape)]
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        state.count();
        Some(self.numbers())
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        state.count();
        let step = self.numbers();
        let descent = step.descent();
        let [shrink, lr, rest1, rest2] = step.numbers();
        state.pass1(
            p,
            g,
            "exp_avg",
            #[inline(always)]
            move |p, g, m| {
                let g = descent.of(g, p);
                let direction = sign(lerp(*m, g, rest1));
                *m = lerp(*m, g, rest2);
                p * shrink - lr * direction
            },
        );
    }
}

//! Adadelta.

use crate::Result;
use crate::optim::options::{Check, options};
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// Adadelta (Zeiler, *ADADELTA: an adaptive learning rate method*, arXiv:1212.5701, 2012), in the form of
    /// `torch.optim.Adadelta`.
    ///
    /// `g = gradient + weight_decay * p`; `s = rho * s + (1 - rho) * g^2`; `d = sqrt(a + eps) / sqrt(s + eps) * g`;
    /// `a = rho * a + (1 - rho) * d^2`; `p -= lr * d`.
    Adadelta {
        /// Factor of the step, at least 0.
        lr = 1.0;
        /// Decay rate of both averages, from 0 to 1.
        rho: f64 = 0.9;
        /// Added under both roots, at least 0.
        eps: f64 = 1e-6;
        /// L2 penalty, at least 0.
        weight_decay: f64 = 0.0;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl Adadelta {
    /// The numbers of a step.
    fn numbers(&self) -> Step {
        let numbers = [self.rho, 1.0 - self.rho, self.lr, self.eps];
        Step::new("adadelta", &["square_avg", "acc_delta"], self.maximize, self.weight_decay, numbers)
    }
}

impl Rule for Adadelta {
    const NAME: &'static str = "Adadelta";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.that((0.0..=1.0).contains(&self.rho), "rho", self.rho, "from 0 to 1")?;
        check.at_least_0("eps", self.eps)?;
        check.at_least_0("weight_decay", self.weight_decay)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::zeros("square_avg", shape), StateArray::zeros("acc_delta", shape)]
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        state.count();
        Some(self.numbers())
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        state.count();
        let step = self.numbers();
        let descent = step.descent();
        let [rho, rest, lr, eps] = step.numbers();
        state.pass2(
            p,
            g,
            ["square_avg", "acc_delta"],
            #[inline(always)]
            move |p, g, square, moved| {
                let g = descent.of(g, p);
                *square = *square * rho + rest * g * g;
                let delta = (*moved + eps).sqrt() / (*square + eps).sqrt() * g;
                *moved = *moved * rho + rest * delta * delta;
                p - lr * delta
            },
        );
    }
}

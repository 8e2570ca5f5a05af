//! ASGD.

use crate::Result;
use crate::optim::options::{Check, options};
use crate::optim::step::Flags;
use crate::optim::{Float, Rule, StateArray, StateView, Step};

options! {
    /// Averaged stochastic gradient descent (Polyak and Juditsky, *Acceleration of stochastic approximation by averaging*,
    /// SIAM J. Control Optim. 30, 1992), in the form of `torch.optim.ASGD`. The average is state `ax`.
    ///
    /// `g = gradient + weight_decay * p`; `p = p * (1 - lambd * eta) - eta * g`; `ax += mu * (p - ax)` (`ax = p` while `mu`
    /// is 1); then `eta = lr / (1 + lambd * lr * t)^alpha` and `mu = 1 / max(1, t - t0)`.
    ///
    /// `eta` and `mu` are kept in single precision, as torch keeps them, so that results agree.
    Asgd {
        /// First step size, at least 0.
        lr = 1e-2;
        /// Decay of the parameters and of the step size.
        lambd: f64 = 1e-4;
        /// Power of the step size's decay.
        alpha: f64 = 0.75;
        /// Step at which averaging starts.
        t0: f64 = 1e6;
        /// L2 penalty, at least 0.
        weight_decay: f64 = 0.0;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

const AVERAGE: &str = "ax";

impl Rule for Asgd {
    const NAME: &'static str = "ASGD";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0), ("eta", 0.0), ("mu", 1.0)];
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.at_least_0("weight_decay", self.weight_decay)?;
        for (option, value) in [("lambd", self.lambd), ("alpha", self.alpha), ("t0", self.t0)] {
            check.that(!value.is_nan(), option, value, "a number")?;
        }
        Ok(())
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::zeros(AVERAGE, shape)]
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        Some(self.numbers(state))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let step = self.numbers(state);
        let (descent, follows) = (step.descent(), step.flags.first);
        let [shrink, step, weight] = step.numbers();
        state.pass1(
            p,
            g,
            AVERAGE,
            #[inline(always)]
            move |p, g, ax| {
                let p = p * shrink + step * descent.of(g, p);
                *ax = if follows { p } else { *ax + (p - *ax) * weight };
                p
            },
        );
    }
}

impl Asgd {
    /// The numbers of a step, which is counted; and those that the next one starts from.
    fn numbers<T: Float>(&self, state: &mut StateView<'_, T>) -> Step {
        let single = |x: f64| f64::from(x as f32);
        let t = state.count() as f64;
        let eta = if state.is_fresh(AVERAGE) {
            single(self.lr)
        } else {
            *state.scalar("eta")
        };
        let mu = *state.scalar("mu");
        *state.scalar("eta") = single(self.lr / libm::pow(1.0 + self.lambd * self.lr * t, self.alpha));
        *state.scalar("mu") = single(1.0 / f64::max(1.0, t - self.t0));
        // While the weight is 1 the average is the parameter.
        let flags = Flags {
            first: mu == 1.0,
            ..Flags::default()
        };
        let numbers = [1.0 - self.lambd * eta, -eta, mu];
        Step::new("asgd", &[AVERAGE], self.maximize, self.weight_decay, numbers).flagged(flags)
    }
}

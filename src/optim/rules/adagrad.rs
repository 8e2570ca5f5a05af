//! Adagrad.

use crate::Result;
use crate::optim::arithmetic::pass1;
use crate::optim::options::{Check, options};
use crate::optim::{Float, Form, Rows, Rule, StateArray, StateView, Step};

options! {
    /// Adagrad (Duchi, Hazan and Singer, *Adaptive subgradient methods for online learning and stochastic optimization*,
    /// JMLR 12, 2011), in the form of `torch.optim.Adagrad`.
    ///
    /// `g = gradient + weight_decay * p`; `s += g^2`; `p -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)`.
    ///
    /// Sparse gradients change the touched rows only. Not with weight decay.
    Adagrad {
        /// Learning rate, at least 0.
        lr = 1e-2;
        /// Decay of the learning rate, at least 0.
        lr_decay: f64 = 0.0;
        /// L2 penalty, at least 0.
        weight_decay: f64 = 0.0;
        /// What the sum of squares starts from, at least 0.
        initial_accumulator_value: f64 = 0.0;
        /// Added to the denominator, at least 0.
        eps: f64 = 1e-10;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

const SUM: &str = "sum";

impl Adagrad {
    /// The numbers of step `t`.
    fn numbers(&self, t: u64) -> Step {
        let step_size = -self.lr / (1.0 + (t - 1) as f64 * self.lr_decay);
        Step::new("adagrad", &[SUM], self.maximize, self.weight_decay, [step_size, self.eps])
    }

    /// The update of one element, with this step's coefficients.
    fn element<T: Float>(&self, t: u64) -> impl Fn(T, T, &mut T) -> T + Copy {
        let step = self.numbers(t);
        let descent = step.descent();
        let [step_size, eps] = step.numbers();
        #[inline(always)]
        move |p, g, sum| {
            let g = descent.of(g, p);
            *sum = *sum + g * g;
            p + step_size * g / (sum.sqrt() + eps)
        }
    }
}

impl Rule for Adagrad {
    const NAME: &'static str = "Adagrad";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.at_least_0("lr_decay", self.lr_decay)?;
        check.at_least_0("weight_decay", self.weight_decay)?;
        check.at_least_0("initial_accumulator_value", self.initial_accumulator_value)?;
        check.at_least_0("eps", self.eps)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::filled(SUM, shape, self.initial_accumulator_value)]
    }

    fn form(&self, sparse: bool) -> Result<Form, &'static str> {
        match sparse {
            true if self.weight_decay != 0.0 => Err("its gradient is sparse, which weight decay doesn't go with; set it to 0"),
            true => Ok(Form::Rows),
            false => Ok(Form::Dense),
        }
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        Some(self.numbers(state.count()))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let element = self.element(state.count());
        state.pass1(p, g, SUM, element);
    }

    fn update_rows<T: Float>(&self, p: &mut [T], g: Rows<'_, T>, state: &mut StateView<'_, T>) {
        let element = self.element(state.count());
        let [sum] = state.arrays([SUM]);
        for (row, g) in g.iter() {
            pass1(&mut p[row.clone()], g, &mut sum[row], element);
        }
    }
}

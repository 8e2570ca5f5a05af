//! Stochastic gradient descent with momentum.

use crate::Result;
use crate::optim::arithmetic::pass0;
use crate::optim::options::{Check, options};
use crate::optim::step::Flags;
use crate::optim::{Float, Form, Rows, Rule, StateArray, StateView, Step};

options! {
    /// Stochastic gradient descent, with momentum (Polyak 1964) or Nesterov's (as in Sutskever et al., *On the importance
    /// of initialization and momentum in deep learning*, ICML 2013), in the form of `torch.optim.SGD`.
    ///
    /// `g = gradient + weight_decay * p`; without momentum `p -= lr * g`. With it `b = momentum * b + (1 - dampening) * g`
    /// (`b = g` at the first step), and `p -= lr * b`, or `p -= lr * (g + momentum * b)` with `nesterov`.
    ///
    /// Sparse gradients: without momentum only the touched rows change; with momentum all rows do. Not with weight decay.
    Sgd {
        /// Learning rate, at least 0.
        lr = 1e-3;
        /// Share of the last direction that is kept, at least 0.
        momentum: f64 = 0.0;
        /// Share of the gradient that is left out of the momentum.
        dampening: f64 = 0.0;
        /// L2 penalty, at least 0.
        weight_decay: f64 = 0.0;
        /// Looks one step ahead; needs momentum above 0 and no dampening.
        nesterov: bool = false;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

const BUFFER: &str = "momentum_buffer";

impl Sgd {
    /// The numbers of a step; `first` if the momentum hasn't been used yet.
    fn numbers(&self, first: bool) -> Step {
        let numbers = [self.lr, self.momentum, 1.0 - self.dampening];
        if self.momentum == 0.0 {
            return Step::new("sgd", &[], self.maximize, self.weight_decay, numbers);
        }
        let flags = Flags {
            first,
            ahead: self.nesterov,
            ..Flags::default()
        };
        Step::new("momentum", &[BUFFER], self.maximize, self.weight_decay, numbers).flagged(flags)
    }
}

impl Rule for Sgd {
    const NAME: &'static str = "SGD";
    const SCALARS: &'static [(&'static str, f64)] = &[];
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.at_least_0("momentum", self.momentum)?;
        check.at_least_0("weight_decay", self.weight_decay)?;
        check.that(!self.dampening.is_nan(), "dampening", self.dampening, "a number")?;
        let ahead = !self.nesterov || (self.momentum > 0.0 && self.dampening == 0.0);
        check.that(
            ahead,
            "nesterov",
            self.nesterov,
            "false, unless momentum is above 0 and dampening is 0",
        )
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        if self.momentum == 0.0 {
            vec![]
        } else {
            vec![StateArray::zeros(BUFFER, shape)]
        }
    }

    fn form(&self, sparse: bool) -> Result<Form, &'static str> {
        match sparse {
            true if self.weight_decay != 0.0 => Err("its gradient is sparse, which weight decay doesn't go with; set it to 0"),
            true if self.momentum == 0.0 => Ok(Form::Rows),
            // The momentum of every row decays, so every row moves.
            _ => Ok(Form::Dense),
        }
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        Some(self.numbers(state.is_fresh(BUFFER)))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let first = state.is_fresh(BUFFER);
        let step = self.numbers(first);
        let descent = step.descent();
        let [lr, momentum, rest] = step.numbers();
        if self.momentum == 0.0 {
            return state.pass0(
                p,
                g,
                #[inline(always)]
                move |p, g| p - lr * descent.of(g, p),
            );
        }
        let ahead = self.nesterov;
        state.pass1(
            p,
            g,
            BUFFER,
            #[inline(always)]
            move |p, g, b| {
                let g = descent.of(g, p);
                *b = if first { g } else { *b * momentum + rest * g };
                p - lr * if ahead { g + momentum * *b } else { *b }
            },
        );
    }

    fn update_rows<T: Float>(&self, p: &mut [T], g: Rows<'_, T>, _state: &mut StateView<'_, T>) {
        let step = self.numbers(false);
        let descent = step.descent();
        let [lr]: [T; 1] = step.numbers();
        for (row, g) in g.iter() {
            pass0(
                &mut p[row],
                g,
                #[inline(always)]
                move |p, g| p - lr * descent.of(g, p),
            );
        }
    }
}

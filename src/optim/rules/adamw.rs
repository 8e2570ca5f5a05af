//! AdamW.

use super::adam::{Adam, dense_only};
use crate::Result;
use crate::optim::options::options;
use crate::optim::{Float, Form, Rule, StateArray, StateView, Step};

options! {
    /// AdamW (Loshchilov and Hutter, *Decoupled weight decay regularization*, ICLR 2019), in the form of
    /// `torch.optim.AdamW`.
    ///
    /// `p *= 1 - lr * weight_decay`, then as [`Adam`](super::Adam) without a penalty.
    AdamW {
        /// Learning rate, at least 0.
        lr = 1e-3;
        /// Decay rates of the averages of the gradient and of its square, each at least 0 and below 1.
        betas: (f64, f64) = (0.9, 0.999);
        /// Added to the denominator, at least 0.
        eps: f64 = 1e-8;
        /// Share of the parameter that `lr` takes off at each step, at least 0.
        weight_decay: f64 = 1e-2;
        /// Divides by the largest average of the square so far.
        amsgrad: bool = false;
        /// Climbs instead of descending.
        maximize: bool = false;
    }
}

impl AdamW {
    fn adam(&self) -> Adam {
        let &Self {
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize,
        } = self;
        Adam {
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize,
            decoupled_weight_decay: true,
        }
    }
}

impl Rule for AdamW {
    const NAME: &'static str = "AdamW";
    const SCALARS: &'static [(&'static str, f64)] = Adam::SCALARS;
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<()> {
        self.adam().check_as(Self::NAME)
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        self.adam().arrays(shape)
    }

    fn form(&self, sparse: bool) -> Result<Form, &'static str> {
        dense_only(sparse)
    }

    fn step<T: Float>(&self, state: &mut StateView<'_, T>) -> Option<Step> {
        Some(self.adam().numbers(state.count()))
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        self.adam().update(p, g, state);
    }
}

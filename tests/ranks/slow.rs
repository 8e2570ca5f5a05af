//! A rule that takes its time.

use std::time::Duration;

use rankgrad::optim::options::Check;
use rankgrad::optim::{Float, Rule, StateArray, StateView};
use rankgrad::remote_optimizer;

remote_optimizer! {
    /// Sleeps, then descends.
    pub struct Slow {
        /// Learning rate.
        lr = 0.0;
        /// How long it sleeps.
        seconds: f64 = 0.0;
    }
}

impl Rule for Slow {
    const NAME: &'static str = "Slow";
    const SCALARS: &'static [(&'static str, f64)] = &[];

    fn check(&self) -> rankgrad::Result<()> {
        Check(Self::NAME).at_least_0("seconds", self.seconds)
    }

    fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
        Vec::new()
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], _state: &mut StateView<'_, T>) {
        std::thread::sleep(Duration::from_secs_f64(self.seconds));
        let lr = T::of(self.lr);
        rankgrad::optim::arithmetic::pass0(p, g, |p, g| p - lr * g);
    }
}

//! A rule that takes its time.

use std::time::Duration;

use rankgrad::optim::options::Check;
use rankgrad::optim::{Float, Registration, Rule, StateArray, StateView};
use serde::{Deserialize, Serialize};

/// Sleeps, then descends.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Slow {
    lr: f64,
    seconds: f64,
}

impl Slow {
    pub fn new(lr: f64) -> Self {
        Slow { lr, seconds: 0.0 }
    }

    pub fn seconds(self, seconds: f64) -> Self {
        Slow { seconds, ..self }
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

rankgrad::rpc::inventory::submit! { Registration::of::<Slow>() }

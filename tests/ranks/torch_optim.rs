//! torch's tests of distributed, sharded and named optimizers.

use std::time::Duration;

use rankgrad::optim::options::Check;
use rankgrad::optim::{
    Adadelta, Adagrad, AdamW, Adamax, Float, Optimizer, OptimizerSpec, Registration, RmsProp, Rprop, Rule, StateArray, StateView,
};
use rankgrad::prelude::*;
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::case::Case;
use crate::optimizer::{dense, vector};
use crate::settled::{led, led_locally};
use crate::slow::Slow;

/// Panics instead of an update.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Faulty {
    lr: f64,
}

impl Rule for Faulty {
    const NAME: &'static str = "TestPanicking";
    const SCALARS: &'static [(&'static str, f64)] = &[];

    fn check(&self) -> Result<()> {
        Check(Self::NAME).at_least_0("lr", self.lr)
    }

    fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
        Vec::new()
    }

    fn update<T: Float>(&self, _: &mut [T], _: &[T], _: &mut StateView<'_, T>) {
        panic!("Error running optimizer.")
    }
}

rankgrad::rpc::inventory::submit! { Registration::of::<Faulty>() }

remote! {
    fn layer(scope: &Scope, w: RRef<Tensor>, x: Tensor) -> Result<Tensor> {
        w.local(scope)?.matmul(&x)
    }
}

fn numbers(seed: usize) -> Tensor {
    let values = (0..9).map(|i| ((i * 37 + seed * 101) % 97) as f64 / 97.0 - 0.5).collect();
    Tensor::from_vec(values, [3, 3]).unwrap()
}

fn close(a: &Tensor, b: &Tensor) -> Result<()> {
    for (x, y) in a.to_vec::<f64>()?.into_iter().zip(b.to_vec::<f64>()?) {
        assert!((x - y).abs() <= 1e-12 * y.abs().max(1.0), "{x} {y}");
    }
    Ok(())
}

/// Two weights on two owners, and the same two here.
struct Both {
    far: [RRef<Tensor>; 2],
    here: [Tensor; 2],
}

impl Both {
    fn new(world: &World) -> Result<Self> {
        Ok(Both {
            far: [world.put(world.owner(1), numbers(1))?, world.put(world.owner(2), numbers(2))?],
            here: [numbers(1).parameter()?, numbers(2).parameter()?],
        })
    }

    /// `W2 (W1 x) + x`, summed; a context with its gradients, and the local ones.
    fn backward(&self, world: &World, batch: usize) -> Result<(Context, [Option<Gradient>; 2])> {
        let x = numbers(3 + batch);
        let ctx = world.context()?;
        let [a, b] = &self.far;
        let h = ctx.call(a.owner(), layer, (a, &x))?;
        let y = ctx.call(b.owner(), layer, (b, h))?;
        ctx.backward(&[y.add(&x)?.sum()?])?;
        let [a, b] = &self.here;
        b.matmul(&a.matmul(&x)?)?.add(&x)?.sum()?.backward()?;
        let gradients = [a.grad(), b.grad()];
        a.zero_grad();
        b.zero_grad();
        Ok((ctx, gradients))
    }

    fn agree(&self) -> Result<()> {
        self.far
            .iter()
            .zip(&self.here)
            .try_for_each(|(far, here)| close(&far.fetch()?, here))
    }
}

/// Each rule on two owners against the local one; with both weights, and with one that requires no gradient.
fn rules(world: &World) -> Result<()> {
    let specs: [OptimizerSpec; 9] = [
        Adagrad::new(0.05).into(),
        Adam::new(1e-2).amsgrad(true).into(),
        AdamW::new(0.05).amsgrad(true).into(),
        Sgd::new(0.05).into(),
        Sgd::new(1e-3).momentum(1.0).weight_decay(1.0).nesterov(true).into(),
        Adadelta::new(1.0).rho(0.95).into(),
        RmsProp::new(0.05).into(),
        Adamax::new(0.05).into(),
        Rprop::new(0.05).into(),
    ];
    for spec in specs {
        for frozen in [false, true] {
            let both = Both::new(world)?;
            both.agree()?;
            if frozen {
                world.freeze(&both.far[1])?;
                both.here[1].freeze()?;
            }
            let optimizer = DistributedOptimizer::new(world, spec.clone(), &both.far)?;
            let mut local = Optimizer::new(spec.clone(), both.here.to_vec())?;
            for batch in 0..3 {
                let (ctx, gradients) = both.backward(world, batch)?;
                assert_eq!(optimizer.step(&ctx)?.updated(), if frozen { 1 } else { 2 });
                local.step(&mut |place| gradients[place].clone())?;
                both.agree()?;
            }
            let moved = |k: usize| Ok::<_, Error>(both.far[k].fetch()?.to_vec::<f64>()? != numbers(k + 1).to_vec::<f64>()?);
            assert_eq!((moved(0)?, moved(1)?), (true, !frozen), "{spec:?}");
        }
    }
    Ok(())
}

/// A rule that panics is an error of each owner, with its text, and leaves the owners at work; one with bad options makes no optimizer.
fn faulty(world: &World) -> Result<()> {
    let both = Both::new(world)?;
    let error = DistributedOptimizer::new(world, Faulty { lr: -1.0 }, &both.far).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::OptionValue { optimizer, .. } if optimizer == "TestPanicking"),
        "{error}"
    );
    let optimizer = DistributedOptimizer::new(world, Faulty { lr: 1.0 }, &both.far)?;
    for _ in 0..2 {
        let (ctx, _) = both.backward(world, 0)?;
        let error = optimizer.step(&ctx).unwrap_err();
        match error.kind() {
            ErrorKind::Owners { failures, updated, .. } => {
                let mut owners: Vec<u32> = both.far.iter().map(RRef::owner).collect();
                owners.dedup();
                assert_eq!(failures.iter().map(|f| f.rank).collect::<Vec<_>>(), {
                    owners.sort();
                    owners
                });
                assert!(updated.is_empty());
            }
            other => panic!("{other:?}"),
        }
        assert!(error.to_string().contains("Error running optimizer."), "{error}");
        both.agree()?;
    }
    let (ctx, gradients) = both.backward(world, 1)?;
    DistributedOptimizer::new(world, Sgd::new(0.1), &both.far)?.step(&ctx)?;
    Optimizer::new(Sgd::new(0.1), both.here.to_vec())?.step(&mut |place| gradients[place].clone())?;
    both.agree()
}

/// Twenty batches as with a local optimizer, a weight frozen for some of them; then state goes from each to a new one of the other kind.
fn parity(world: &World) -> Result<()> {
    for maximize in [false, true] {
        let specs: [OptimizerSpec; 3] = [
            Adam::new(0.01).maximize(maximize).into(),
            AdamW::new(0.01).maximize(maximize).into(),
            Sgd::new(0.01).momentum(0.9).maximize(maximize).into(),
        ];
        for spec in specs {
            let both = Both::new(world)?;
            let mut optimizer = DistributedOptimizer::new(world, spec.clone(), &both.far)?;
            let mut local = Optimizer::new(spec.clone(), both.here.to_vec())?;
            for batch in 0..30 {
                match batch {
                    8 => {
                        world.freeze(&both.far[0])?;
                        both.here[0].freeze()?;
                    }
                    13 => {
                        world.unfreeze(&both.far[0])?;
                        both.here[0].unfreeze()?;
                    }
                    20 => {
                        let (far, here) = (optimizer.state_dict()?, local.state_dict());
                        let other = spec.with_options(&serde_json::json!({ "lr": 7.0 }))?;
                        optimizer = DistributedOptimizer::new(world, other.clone(), &both.far)?;
                        local = Optimizer::new(other, both.here.to_vec())?;
                        optimizer.load_state_dict(&here)?;
                        local.load_state_dict(&far)?;
                        assert_eq!(optimizer.groups(), local.groups());
                    }
                    _ => {}
                }
                let (ctx, gradients) = both.backward(world, batch)?;
                optimizer.step(&ctx)?;
                local.step(&mut |place| gradients[place].clone())?;
                both.agree()?;
            }
        }
    }
    Ok(())
}

/// State by name goes to an optimizer that has made no step, whose options it brings along; what has no state in it starts anew.
fn named_state(world: &World) -> Result<()> {
    let (x, y) = (
        world.put(world.owner(1), vector(&[1.0]))?,
        world.put(world.owner(2), vector(&[1.0]))?,
    );
    let make = |lr: f64| DistributedOptimizer::new(world, Sgd::new(lr).momentum(0.9), [("x", &x), ("y", &y)]);
    let step = |optimizer: &DistributedOptimizer, parameters: &[&RRef<Tensor>]| -> Result<()> {
        let ctx = world.context()?;
        parameters.iter().try_for_each(|p| ctx.accumulate(p, dense(&[1.0])))?;
        optimizer.step(&ctx).map(drop)
    };
    let first = make(0.1)?;
    step(&first, &[&x])?;
    assert_eq!(x.fetch()?.to_vec::<f64>()?, [0.9]);
    let dict = first.state_dict()?;
    assert_eq!(dict.state.keys().collect::<Vec<_>>(), ["x"]);
    let mut second = make(1.0)?;
    second.load_state_dict(&dict)?;
    assert_eq!(second.groups()[0].option("lr"), Some(serde_json::json!(0.1)));
    step(&second, &[&x, &y])?;
    let values = [x.fetch()?.item::<f64>()?, y.fetch()?.item::<f64>()?];
    assert!((values[0] - 0.71).abs() < 1e-15 && (values[1] - 0.9).abs() < 1e-15, "{values:?}");
    let buffer = |name: &str| -> Result<Vec<f64>> {
        let dict = second.state_dict()?;
        let data = dict.state[name].array("momentum_buffer").expect("a buffer").clone();
        Tensor::from_data(data).to_vec()
    };
    assert_eq!((buffer("x")?, buffer("y")?), (vec![1.9], vec![1.0]));
    Ok(())
}

/// A long step of one owner holds up no step of another.
fn independent(world: &World) -> Result<()> {
    let (a, b) = (world.put(1, vector(&[0.0]))?, world.put(2, vector(&[0.0]))?);
    let slow = DistributedOptimizer::new(world, Slow::new(1.0).seconds(1.0), [&a])?;
    let quick = DistributedOptimizer::new(world, Sgd::new(1.0), [&b])?;
    let ctx = world.context()?;
    ctx.accumulate(&a, dense(&[1.0]))?;
    ctx.accumulate(&b, dense(&[1.0]))?;
    let running = slow.step_async(&ctx, &StepOptions::new())?;
    std::thread::sleep(Duration::from_millis(50));
    let mut steps = 0;
    while !running.is_done() {
        quick.step(&ctx)?;
        steps += 1;
    }
    running.wait()?;
    assert!(steps > 10, "{steps} steps in a second");
    assert_eq!((a.fetch()?.item::<f64>()?, b.fetch()?.item::<f64>()?), (-1.0, -f64::from(steps)));
    Ok(())
}

fn on_local_ranks() -> Outcome {
    [rules as fn(&World) -> Result<()>, faulty, parity, named_state, independent]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 3],
        ..Case::new("torch_optim::every_rule_agrees_with_the_local_one", || led(rules))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("torch_optim::a_rule_that_panics_is_an_error_of_its_step", || led(faulty))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("torch_optim::state_goes_to_local_optimizers_and_back", || led(parity))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("torch_optim::named_state_goes_to_a_new_optimizer", || led(named_state))
    },
    Case {
        ranks: &[3],
        ..Case::new("torch_optim::steps_of_different_owners_are_independent", || led(independent))
    },
    Case {
        ranks: &[0],
        ..Case::new("torch_optim::hold_on_local_ranks_too", on_local_ranks)
    },
];

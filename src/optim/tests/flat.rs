//! Small parameters are updated together: the same bits, states and reports as one by one, whatever happens to some of them between steps.

use serde_json::json;

use super::bits::variants;
use crate::optim::{Norm, Optimizer, OptimizerSpec, ParameterReport, ParameterState, names};
use crate::tensor::{DType, Data, Element, Gradient, RowSparse, Tensor};

const COUNT: usize = 20;

fn draw<T: Element>(shape: &[usize], seed: u64, of: impl Fn(f64) -> T) -> Tensor {
    let len: usize = shape.iter().product();
    let value = |i: usize| of(((i as f64 + 1.0) * (seed as f64 + 0.7)).sin());
    Tensor::from_vec((0..len).map(value).collect(), shape).unwrap()
}

fn tensor(dtype: DType, shape: &[usize], seed: u64) -> Tensor {
    match dtype {
        DType::F32 => draw(shape, seed, |x| x as f32),
        _ => draw(shape, seed, |x| x),
    }
}

fn shape(place: usize) -> Vec<usize> {
    match place % 4 {
        0 => vec![3],
        1 => vec![2, 5],
        2 => vec![],
        _ => vec![place],
    }
}

fn parameters(dtype: DType) -> Vec<Tensor> {
    let one = |place| tensor(dtype, &shape(place), place as u64).parameter().unwrap();
    (0..COUNT).map(one).collect()
}

fn numbers(data: &Data) -> Vec<u64> {
    let data = data.to_contiguous();
    match data.dtype() {
        DType::F32 => data.view::<f32>().unwrap().iter().map(|x| u64::from(x.to_bits())).collect(),
        _ => data.view::<f64>().unwrap().iter().map(|x| x.to_bits()).collect(),
    }
}

fn shown(state: Option<ParameterState>) -> Vec<(String, Vec<u64>)> {
    let state = state.unwrap_or_default();
    let scalars = state.scalars().map(|(name, x)| (name.to_owned(), vec![x.to_bits()]));
    let arrays = state.arrays().map(|(name, data)| (name.to_owned(), numbers(data)));
    scalars.chain(arrays).collect()
}

/// All of them in one optimizer, and each in its own.
struct Both {
    together: (Optimizer, Vec<Tensor>),
    apart: Vec<(Optimizer, Tensor)>,
    dtype: DType,
    steps: u64,
    what: String,
}

impl Both {
    fn new(spec: &OptimizerSpec, dtype: DType) -> Self {
        let all = parameters(dtype);
        let alone = parameters(dtype)
            .into_iter()
            .map(|p| (Optimizer::new(spec.clone(), vec![p.clone()]).unwrap(), p));
        Both {
            together: (Optimizer::new(spec.clone(), all.clone()).unwrap(), all),
            apart: alone.collect(),
            dtype,
            steps: 0,
            what: format!("{} of {dtype}", spec.name()),
        }
    }

    fn gradient(&self, place: usize) -> Option<Gradient> {
        // Some have none now and then, so that their numbers differ from the others'.
        let seed = 100 + 31 * self.steps + place as u64;
        (!(seed + place as u64 / 3).is_multiple_of(5)).then(|| tensor(self.dtype, &shape(place), seed).data().into())
    }

    /// A step of both; `lent` in the way that lends gradients.
    fn step(&mut self, lent: bool, gradient: impl Fn(&Self, usize) -> Option<Gradient>) {
        let gradients: Vec<Option<Gradient>> = (0..COUNT).map(|place| gradient(self, place)).collect();
        let (optimizer, all) = &mut self.together;
        let lend = |leaf: u64| gradients[all.iter().position(|p| p.leaf().unwrap().id() == leaf)?].as_ref();
        let reports = match lent {
            true => optimizer
                .step_lent(lend, Norm::Two)
                .unwrap()
                .expect("all are small")
                .iter()
                .collect(),
            false => optimizer.step(&mut |place| gradients[place].clone()).unwrap(),
        };
        for (place, (one, _)) in self.apart.iter_mut().enumerate() {
            let report: Vec<ParameterReport> = one.step(&mut |_| gradients[place].clone()).unwrap();
            assert_eq!(reports[place], report[0], "{}: report {place} of step {}", self.what, self.steps);
        }
        self.steps += 1;
        self.compare();
    }

    fn compare(&self) {
        let (optimizer, all) = &self.together;
        for (place, (one, p)) in self.apart.iter().enumerate() {
            let what = format!("{}: parameter {place} after {} steps", self.what, self.steps);
            assert_eq!(numbers(&all[place].data()), numbers(&p.data()), "{what}");
            assert_eq!(shown(optimizer.state(place)), shown(one.state(0)), "{what}");
        }
    }

    fn each(&mut self, mut change: impl FnMut(&mut Optimizer)) {
        change(&mut self.together.0);
        self.apart.iter_mut().for_each(|(one, _)| change(one));
    }

    fn is_flat(&self) -> bool {
        self.together.0.has_flat()
    }
}

#[test]
fn every_rule_does_the_same_to_small_parameters_together_as_one_by_one() {
    let mut flat = 0;
    for name in names().into_iter().filter(|&name| name != "Muon") {
        for (options, _) in variants(name).into_iter().filter(|v| !v.1) {
            let spec = OptimizerSpec::from_json(name, &options).unwrap();
            for dtype in [DType::F32, DType::F64] {
                let mut both = Both::new(&spec, dtype);
                for step in 0..6 {
                    let lent = both.is_flat() && step % 2 == 1;
                    both.step(lent, Both::gradient);
                }
                flat += usize::from(both.is_flat());
            }
        }
    }
    assert!(flat > 20, "only {flat} were flat");
}

#[test]
fn what_happens_between_steps_is_seen() {
    let adam = OptimizerSpec::from_json("Adam", &json!({"lr": 0.1})).unwrap();
    let mut both = Both::new(&adam, DType::F32);
    both.step(false, Both::gradient);
    // Others write, hold and freeze parameters.
    let fresh = tensor(DType::F32, &shape(5), 77);
    both.together.1[5].leaf().unwrap().set_data(fresh.data()).unwrap();
    both.apart[5].1.leaf().unwrap().set_data(fresh.data()).unwrap();
    let held = [both.together.1[6].data(), both.apart[6].1.data()];
    for p in [&both.together.1[7], &both.apart[7].1] {
        p.leaf().unwrap().set_requires_grad(false);
    }
    both.step(true, Both::gradient);
    assert_eq!(numbers(&held[0]), numbers(&held[1]));
    // Options change, with and without the arrays that they ask for.
    let amsgrad = |on: bool| ("amsgrad", json!(on));
    let changes = [
        (("lr", json!(0.3)), [true, true]),
        (amsgrad(true), [false, true]),
        (amsgrad(false), [false, false]), // what it may come back to is kept
        (amsgrad(true), [false, true]),
    ];
    for ((option, value), flat) in changes {
        both.each(|optimizer| optimizer.set_option(None, option, &value).unwrap());
        let before = both.is_flat();
        both.compare();
        both.step(false, Both::gradient);
        assert_eq!([before, both.is_flat()], flat, "{option} {value}");
    }
    // State is loaded and forgotten.
    let state = both.together.0.state(9);
    let loaded = state.clone().unwrap();
    both.together
        .0
        .load_state(10, ParameterState::from_parts(vec![("step".into(), 3.0)], vec![]))
        .unwrap();
    both.apart[10]
        .0
        .load_state(0, ParameterState::from_parts(vec![("step".into(), 3.0)], vec![]))
        .unwrap();
    assert_eq!(loaded.scalar("step"), both.apart[9].0.state(0).unwrap().scalar("step"));
    both.step(false, Both::gradient);
    both.each(Optimizer::zero_state);
    both.compare();
    both.step(false, Both::gradient);
    assert!(both.is_flat());
}

#[test]
fn a_sparse_gradient_makes_them_go_one_by_one_and_a_wrong_one_changes_nothing() {
    let sgd = OptimizerSpec::from_json("SGD", &json!({"lr": 0.1})).unwrap();
    let mut both = Both::new(&sgd, DType::F64);
    both.step(false, Both::gradient);
    let sparse = |both: &Both, place: usize| match place {
        1 => {
            let values = tensor(DType::F64, &[1, 5], both.steps).data();
            Some(Gradient::Sparse(RowSparse::new(vec![1], values, vec![2, 5]).unwrap()))
        }
        _ => both.gradient(place),
    };
    both.step(false, sparse);
    both.step(false, Both::gradient);
    let before: Vec<Vec<u64>> = both.together.1.iter().map(|p| numbers(&p.data())).collect();
    for wrong in [tensor(DType::F32, &[3], 1), tensor(DType::F64, &[4], 1)] {
        let gradient = |place: usize| {
            Some(Gradient::Dense(if place == 4 {
                wrong.data()
            } else {
                both.together.1[place].data()
            }))
        };
        let gradients: Vec<Option<Gradient>> = (0..COUNT).map(gradient).collect();
        both.together.0.step(&mut |place| gradients[place].clone()).unwrap_err();
    }
    let after: Vec<Vec<u64>> = both.together.1.iter().map(|p| numbers(&p.data())).collect();
    assert_eq!(before, after);
}

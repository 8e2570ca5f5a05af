//! What an optimizer promises beyond the values of an update.

use serde_json::json;

use crate::optim::*;
use crate::tensor::{DType, Data, Gradient, RowSparse, Tensor};
use crate::{ErrorKind, Result};

fn parameter(values: &[f64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), [values.len()]).unwrap().parameter().unwrap()
}

fn dense(values: &[f64]) -> Gradient {
    Gradient::Dense(Tensor::from_vec(values.to_vec(), [values.len()]).unwrap().data())
}

fn sparse(rows: &[i64], values: &[f64], shape: &[usize]) -> Gradient {
    let width = shape[1];
    let values = Tensor::from_vec(values.to_vec(), [rows.len(), width]).unwrap().data();
    Gradient::Sparse(RowSparse::new(rows.to_vec(), values, shape.to_vec()).unwrap())
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_vec().unwrap()
}

fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind().clone()
}

/// Each rule that takes dense gradients and vectors, with its defaults.
fn dense_rules() -> impl Iterator<Item = OptimizerSpec> {
    let names = names().into_iter().filter(|name| !["SparseAdam", "Muon"].contains(name));
    names.map(|name| OptimizerSpec::from_json(name, &json!({})).unwrap())
}

#[test]
fn an_absent_gradient_skips_by_place_and_counts_no_step() {
    for spec in dense_rules() {
        let (a, b, alone) = (parameter(&[1.0, 2.0]), parameter(&[3.0, -1.0]), parameter(&[1.0, 2.0]));
        let mut both = Optimizer::new(spec.clone(), vec![a.clone(), b.clone()]).unwrap();
        let mut one = Optimizer::new(spec.clone(), vec![alone.clone()]).unwrap();
        for step in 0..6 {
            // `a` has gradients in even steps only; `b` never.
            let gradient = dense(&[0.5, -1.5 + f64::from(step)]);
            let report = both
                .step(&mut |place| (place == 0 && step % 2 == 0).then(|| gradient.clone()))
                .unwrap();
            assert_eq!(report[0].updated, step % 2 == 0);
            assert_eq!((report[1].updated, report[1].version, report[1].rows), (false, 0, None));
            if step % 2 == 0 {
                one.step_one(0, gradient).unwrap();
            }
        }
        assert_eq!(values(&a), values(&alone), "{}", spec.name());
        assert_eq!(values(&b), [3.0, -1.0]);
        assert!(both.state(1).is_none());
    }
}

#[test]
fn a_zero_gradient_is_a_gradient() {
    let (p, q) = (parameter(&[1.0]), parameter(&[1.0]));
    let mut optimizer = Optimizer::new(Sgd::new(0.1).weight_decay(1.0), vec![p.clone(), q.clone()]).unwrap();
    optimizer.step(&mut |place| (place == 0).then(|| dense(&[0.0]))).unwrap();
    assert_eq!((values(&p), values(&q)), (vec![0.9], vec![1.0]));
}

#[test]
fn parameters_are_checked() {
    let p = parameter(&[1.0]);
    let refused = |spec: OptimizerSpec, parameters| kind(Optimizer::new(spec, parameters));
    assert_eq!(
        refused(Sgd::new(0.1).into(), vec![]),
        ErrorKind::NoParameters { optimizer: "SGD".into() }
    );
    let twice = vec![p.clone(), parameter(&[2.0]), p.clone()];
    assert_eq!(
        refused(Adam::new(0.1).into(), twice),
        ErrorKind::DuplicateParameter {
            optimizer: "Adam".into(),
            first: 0,
            second: 2
        }
    );
    let plain = Tensor::from_vec(vec![1.0], [1]).unwrap();
    assert!(matches!(refused(Sgd::new(0.1).into(), vec![plain]), ErrorKind::NotALeaf { .. }));
    assert!(matches!(refused(Muon::new(0.1).into(), vec![p.clone()]), ErrorKind::Argument { what, .. } if what.contains("two dimensions")));
    assert!(matches!(
        refused(Sgd::new(-0.1).into(), vec![p.clone()]),
        ErrorKind::OptionValue { .. }
    ));

    let mut optimizer = Optimizer::new(Sgd::new(0.1), vec![p.clone()]).unwrap();
    let again = optimizer.add_group(Sgd::new(0.2), vec![parameter(&[1.0]), p]);
    assert!(matches!(kind(again), ErrorKind::DuplicateParameter { first: 0, second: 2, .. }));
    assert_eq!((optimizer.len(), optimizer.groups().len()), (1, 1));
}

#[test]
fn gradients_are_checked_before_anything_changes() {
    let (a, b) = (parameter(&[1.0]), Tensor::zeros(DType::F64, [2, 2]).parameter().unwrap());
    let bad = [
        dense(&[1.0, 2.0, 3.0, 4.0]),
        Gradient::Dense(Data::zeros(DType::F32, &[2, 2])),
        sparse(&[0], &[1.0, 1.0], &[2, 2]),
        Gradient::Sparse(RowSparse {
            rows: vec![2],
            values: Data::zeros(DType::F64, &[1, 2]),
            shape: vec![2, 2],
        }),
    ];
    for gradient in bad {
        let mut optimizer = Optimizer::new(Adam::new(0.1), vec![a.clone(), b.clone()]).unwrap();
        let result = optimizer.step(&mut |place| Some(if place == 0 { dense(&[1.0]) } else { gradient.clone() }));
        assert!(matches!(kind(result), ErrorKind::GradientKind { parameter: 1, .. }));
        assert!(optimizer.state(0).is_none());
        assert_eq!((values(&a), a.leaf().unwrap().version()), (vec![1.0], 0));
    }
    let mut optimizer = Optimizer::new(SparseAdam::new(0.1), vec![b.clone()]).unwrap();
    assert!(
        matches!(kind(optimizer.step_one(0, Gradient::Dense(Data::zeros(DType::F64, &[2, 2])))), ErrorKind::GradientKind { why, .. } if why.contains("Adam"))
    );
    // Rows out of range, for a rule that takes sparse gradients.
    let outside = Gradient::Sparse(RowSparse {
        rows: vec![2],
        values: Data::zeros(DType::F64, &[1, 2]),
        shape: vec![2, 2],
    });
    assert!(optimizer.step_one(0, outside).is_err());
    assert!(optimizer.step_one(1, dense(&[1.0])).is_err());
    assert_eq!(b.leaf().unwrap().version(), 0);
}

#[test]
fn updates_are_in_place_unless_somebody_holds_the_values() {
    for spec in dense_rules() {
        let p = parameter(&[1.0, 2.0]);
        let mut optimizer = Optimizer::new(spec, vec![p.clone()]).unwrap();
        let report = optimizer.step_one(0, dense(&[1.0, 1.0])).unwrap();
        assert_eq!((report.in_place, report.version), (true, 1));
        let held = p.data();
        let before = held.view::<f64>().unwrap().to_owned();
        let report = optimizer.step_one(0, dense(&[1.0, 1.0])).unwrap();
        assert_eq!((report.in_place, report.version), (false, 2));
        assert_eq!(held.view::<f64>().unwrap(), before);
        drop(held);
        assert!(optimizer.step_one(0, dense(&[1.0, 1.0])).unwrap().in_place);
    }
}

#[test]
fn state_that_is_moved_continues_to_the_bit() {
    for spec in dense_rules() {
        let gradients = |step: i32| dense(&[0.1 * f64::from(step) - 0.3, 1.0 / f64::from(step + 1)]);
        let (p, q) = (parameter(&[1.0, 2.0]), parameter(&[1.0, 2.0]));
        let mut whole = Optimizer::new(spec.clone(), vec![p.clone()]).unwrap();
        let mut first = Optimizer::new(spec.clone(), vec![q.clone()]).unwrap();
        (0..5).for_each(|step| assert!(first.step_one(0, gradients(step)).unwrap().updated));
        let mut second = Optimizer::new(spec.clone(), vec![q.clone()]).unwrap();
        let state = first.state(0).unwrap();
        let scalars = state.scalars().map(|(name, value)| (name.to_owned(), value)).collect();
        let arrays = state.arrays().map(|(name, data)| (name.to_owned(), data.clone())).collect();
        second.load_state(0, ParameterState::from_parts(scalars, arrays)).unwrap();
        (5..10).for_each(|step| assert!(second.step_one(0, gradients(step)).unwrap().updated));
        (0..10).for_each(|step| assert!(whole.step_one(0, gradients(step)).unwrap().updated));
        assert_eq!(values(&p), values(&q), "{}", spec.name());

        whole.zero_state();
        assert!(whole.state(0).is_none());
    }
}

#[test]
fn state_has_the_names_of_torch_and_others_are_refused() {
    let p = parameter(&[1.0, 2.0]);
    let mut optimizer = Optimizer::new(Adam::new(0.1).amsgrad(true), vec![p]).unwrap();
    optimizer.step_one(0, dense(&[1.0, 1.0])).unwrap();
    let state = optimizer.state(0).unwrap();
    assert_eq!(state.scalar("step"), Some(1.0));
    assert_eq!(
        state.arrays().map(|(name, _)| name).collect::<Vec<_>>(),
        ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    );
    let load = |scalar: &str, array: &str, data: Data| ParameterState::from_parts(vec![(scalar.into(), 1.0)], vec![(array.into(), data)]);
    let good = Data::zeros(DType::F64, &[2]);
    for bad in [
        load("steps", "exp_avg", good.clone()),
        load("step", "square_avg", good.clone()),
        load("step", "exp_avg", Data::zeros(DType::F32, &[2])),
        load("step", "exp_avg", Data::zeros(DType::F64, &[3])),
    ] {
        assert!(matches!(kind(optimizer.load_state(0, bad)), ErrorKind::Argument { .. }));
    }
    assert!(optimizer.load_state(1, ParameterState::default()).is_err());
    assert_eq!(optimizer.state(0).unwrap().scalar("step"), Some(1.0));
}

#[test]
fn groups_have_their_own_options() {
    let (a, b) = (parameter(&[1.0]), parameter(&[1.0]));
    let mut optimizer = Optimizer::new(Sgd::new(0.1), vec![a.clone()]).unwrap();
    assert_eq!(optimizer.add_group(Sgd::new(0.01), vec![b.clone()]).unwrap(), 1);
    optimizer.step(&mut |_| Some(dense(&[1.0]))).unwrap();
    assert_eq!((values(&a), values(&b)), (vec![0.9], vec![0.99]));
    optimizer.set_option(Some(1), "lr", &json!(0.0)).unwrap();
    optimizer.set_option(None, "momentum", &json!(0.9)).unwrap();
    assert!(optimizer.set_option(Some(2), "lr", &json!(0.1)).is_err());
    assert!(matches!(
        kind(optimizer.set_option(None, "lr", &json!(-1))),
        ErrorKind::OptionValue { .. }
    ));
    optimizer.step(&mut |_| Some(dense(&[1.0]))).unwrap();
    assert_eq!((values(&a), values(&b)), (vec![0.9 - 0.1], vec![0.99]));
    assert_eq!(optimizer.group_of(1), Some(1));
    assert_eq!(optimizer.groups()[1].option("momentum"), Some(json!(0.9)));
}

#[test]
fn options_that_change_between_the_halves_of_a_step_hold() {
    let p = Tensor::zeros(DType::F64, [3, 1]).parameter().unwrap();
    let mut optimizer = Optimizer::new(Sgd::new(1.0), vec![p.clone()]).unwrap();
    let checked = optimizer.check(vec![Some(sparse(&[1], &[1.0], &[3, 1]))], Norm::Two).unwrap();
    assert!(optimizer.state(0).is_none());
    optimizer.set_option(None, "momentum", &json!(0.5)).unwrap();
    optimizer.apply(checked).unwrap();
    assert!(optimizer.state(0).unwrap().array("momentum_buffer").is_some());
    assert_eq!(values(&p), [0.0, -1.0, 0.0]);
}

#[test]
fn sparse_gradients_touch_their_rows_once_and_are_counted() {
    for spec in [
        OptimizerSpec::from(Sgd::new(0.1)),
        Adagrad::new(0.1).into(),
        SparseAdam::new(0.1).into(),
    ] {
        let (p, q) = (Tensor::ones(DType::F64, [4, 2]), Tensor::ones(DType::F64, [4, 2]));
        let (p, q) = (p.parameter().unwrap(), q.parameter().unwrap());
        let mut repeated = Optimizer::new(spec.clone(), vec![p.clone()]).unwrap();
        let mut summed = Optimizer::new(spec, vec![q.clone()]).unwrap();
        let report = repeated
            .step_one(0, sparse(&[3, 0, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[4, 2]))
            .unwrap();
        assert_eq!(report.rows, Some(2));
        summed.step_one(0, sparse(&[0, 3], &[3.0, 4.0, 6.0, 8.0], &[4, 2])).unwrap();
        assert_eq!(values(&p), values(&q));
        assert_eq!(values(&p)[2..6], [1.0; 4]);
        let report = repeated.step_one(0, sparse(&[], &[], &[4, 2])).unwrap();
        assert_eq!((report.updated, report.rows), (true, Some(0)));
        assert_eq!(values(&p), values(&q));
    }
}

#[test]
fn sparse_gradients_with_momentum_are_as_dense_ones() {
    let spec = OptimizerSpec::from(Sgd::new(0.1).momentum(0.9).nesterov(true));
    let (p, q) = (Tensor::ones(DType::F64, [3, 1]).parameter().unwrap(), parameter(&[1.0; 3]));
    let mut by_rows = Optimizer::new(spec.clone(), vec![p.clone()]).unwrap();
    let mut whole = Optimizer::new(spec, vec![q.clone()]).unwrap();
    for row in [0, 2, 0] {
        by_rows.step_one(0, sparse(&[row], &[1.5], &[3, 1])).unwrap();
        let mut g = [0.0; 3];
        g[row as usize] = 1.5;
        whole.step_one(0, dense(&g)).unwrap();
    }
    assert_eq!(values(&p), values(&q));
    let decayed = Optimizer::new(Sgd::new(0.1).weight_decay(0.1), vec![p])
        .unwrap()
        .step_one(0, sparse(&[0], &[1.0], &[3, 1]));
    assert!(matches!(kind(decayed), ErrorKind::GradientKind { .. }));
}

#[test]
fn maximize_climbs_as_minimize_descends() {
    for spec in dense_rules() {
        let climb = spec.with_options(&json!({"maximize": true, "lr": 0.1})).unwrap();
        let descend = spec.with_options(&json!({"lr": 0.1})).unwrap();
        let (p, q) = (parameter(&[1.0, 2.0]), parameter(&[1.0, 2.0]));
        let mut up = Optimizer::new(climb, vec![p.clone()]).unwrap();
        let mut down = Optimizer::new(descend, vec![q.clone()]).unwrap();
        for _ in 0..4 {
            up.step_one(0, dense(&[0.5, -1.0])).unwrap();
            down.step_one(0, dense(&[-0.5, 1.0])).unwrap();
        }
        assert_eq!(values(&p), values(&q), "{}", spec.name());
        assert!(values(&p)[0] > 1.0, "{}", spec.name());
    }
}

#[test]
fn scalars_empty_and_transposed_parameters_work() {
    for spec in dense_rules() {
        let scalar = Tensor::scalar(1.0).parameter().unwrap();
        let empty = Tensor::zeros(DType::F64, [0, 3]).parameter().unwrap();
        let matrix = ndarray::Array2::from_shape_fn((2, 3), |(i, j)| (3 * i + j) as f64);
        let turned = Tensor::from_array(matrix.clone().reversed_axes()).parameter().unwrap();
        let straight = Tensor::from_array(matrix.t().as_standard_layout().to_owned()).parameter().unwrap();
        let gradient = Data::F64(matrix.mapv(|x| x - 2.0).into_dyn().reversed_axes().into_shared());
        let mut optimizer = Optimizer::new(spec, vec![scalar.clone(), empty, turned.clone(), straight.clone()]).unwrap();
        optimizer
            .step(&mut |place| {
                Some(Gradient::Dense(match place {
                    0 => Tensor::scalar(1.0).data(),
                    1 => Data::zeros(DType::F64, &[0, 3]),
                    _ => gradient.clone(),
                }))
            })
            .unwrap();
        assert!(values(&scalar)[0] < 1.0);
        assert_eq!(values(&turned), values(&straight));
    }
}

#[test]
fn adafactor_keeps_rows_and_columns_of_each_matrix() {
    let whole = ndarray::Array3::from_shape_fn((2, 3, 4), |(b, i, j)| ((7 * b + 5 * i + 3 * j) % 11) as f64 - 5.0);
    let p = Tensor::from_array(whole.clone()).parameter().unwrap();
    let mut optimizer = Optimizer::new(Adafactor::new(0.1), vec![p]).unwrap();
    optimizer
        .step_one(0, Gradient::Dense(Data::F64(whole.into_dyn().into_shared())))
        .unwrap();
    let state = optimizer.state(0).unwrap();
    assert_eq!(state.array("row_var").unwrap().shape(), [2, 3, 1]);
    assert_eq!(state.array("col_var").unwrap().shape(), [2, 1, 4]);
}

/// A rule of a program's own: it moves by `lr` against the gradient's sign, and counts its steps.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct SignDescent {
    pub(super) lr: f64,
}

impl Rule for SignDescent {
    const NAME: &'static str = "SignDescent";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];

    fn check(&self) -> Result<()> {
        options::Check(Self::NAME).at_least_0("lr", self.lr)
    }

    fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
        vec![]
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        state.count();
        let lr = T::of(self.lr);
        arithmetic::pass0(p, g, |p, g| p - lr * arithmetic::sign(g));
    }
}

#[test]
fn a_rule_of_ones_own_is_used_like_a_built_in() {
    let p = parameter(&[1.0, 2.0, 3.0]);
    let spec = OptimizerSpec::from(SignDescent { lr: 0.5 });
    let mut optimizer = Optimizer::new(spec.clone(), vec![p.clone()]).unwrap();
    optimizer.step_one(0, dense(&[4.0, 0.0, -1e-9])).unwrap();
    assert_eq!(values(&p), [0.5, 2.0, 3.5]);
    assert_eq!(optimizer.state(0).unwrap().scalar("step"), Some(1.0));
    assert_eq!(spec.to_json(), json!({"lr": 0.5}));
    assert!(matches!(
        kind(Optimizer::new(SignDescent { lr: -0.5 }, vec![p])),
        ErrorKind::OptionValue { .. }
    ));
}

#[test]
fn optimizers_can_be_sent_to_threads() {
    fn sendable<T: Send + Sync>() {}
    sendable::<OptimizerSpec>();
    sendable::<Optimizer>();
    sendable::<Checked>();
}

#[test]
fn a_frozen_parameter_stays_with_its_state_until_it_is_unfrozen() {
    let p = parameter(&[1.0]);
    let mut optimizer = Optimizer::new(Adam::new(0.5), vec![p.clone(), parameter(&[1.0])]).unwrap();
    let one = || Some(Gradient::Dense(Tensor::from_vec(vec![1.0], [1]).unwrap().data()));
    p.freeze().unwrap();
    let report = optimizer.step(&mut |_| one()).unwrap();
    assert_eq!((report[0].updated, report[0].norm, report[0].version), (false, None, 0));
    assert_eq!((report[1].updated, report[1].norm), (true, Some(1.0)));
    assert!(optimizer.state(0).is_none());
    assert_eq!(p.to_vec::<f64>().unwrap(), [1.0]);
    p.leaf().unwrap().set_requires_grad(true);
    assert!(optimizer.step(&mut |_| one()).unwrap()[0].updated);
    assert_eq!(optimizer.state(0).unwrap().scalar("step"), Some(1.0));
}

/// A rule that uses what it doesn't declare.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
struct Undeclared;

impl Rule for Undeclared {
    const NAME: &'static str = "Undeclared";
    const SCALARS: &'static [(&'static str, f64)] = &[];

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
        vec![]
    }

    fn update<T: Float>(&self, _p: &mut [T], _g: &[T], state: &mut StateView<'_, T>) {
        state.count();
    }
}

#[test]
fn a_panic_in_a_rule_is_an_error() {
    let (p, q) = (parameter(&[1.0]), parameter(&[2.0]));
    q.leaf().unwrap().set_name("bias");
    let mut optimizer = Optimizer::new(Undeclared, vec![p, q.clone()]).unwrap();
    let error = optimizer.step(&mut |place| (place == 1).then(|| dense(&[1.0]))).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::RulePanic { optimizer, parameter: 1, message, .. } if optimizer == "Undeclared" && message.contains("`step`")),
        "{error}"
    );
    assert!(error.to_string().contains("parameter 1 (`bias`)"), "{error}");
    assert!(optimizer.step(&mut |_| None).is_ok());
    assert_eq!(values(&q), [2.0]);
}

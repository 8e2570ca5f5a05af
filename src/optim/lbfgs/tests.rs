//! Replay of torch's runs (`tests/golden/lbfgs.jsonl`), and what holds beyond them.

use std::cell::Cell;

use serde_json::{Value, json};

use super::*;
use crate::tensor::{DType, Tensor};
use crate::{ErrorKind, Result};

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn tensor(array: &Value, dtype: &str) -> Tensor {
    let shape: Vec<usize> = numbers(&array["shape"]).into_iter().map(|n| n as usize).collect();
    let values = numbers(&array["value"]);
    match dtype {
        "f32" => Tensor::from_vec(values.into_iter().map(|x| x as f32).collect(), shape).unwrap(),
        _ => Tensor::from_vec(values, shape).unwrap(),
    }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.cast(DType::F64).unwrap().to_vec().unwrap()
}

/// The losses of `tests/golden/lbfgs.py`.
fn loss(case: &Value, p: &[Tensor]) -> Result<Tensor> {
    let data = |name: &str| tensor(&case["data"][name], case["dtype"].as_str().unwrap());
    match case["problem"].as_str().unwrap() {
        "rosenbrock" => {
            let a = p[0].neg()?.add_scalar(1.0)?;
            let b = p[1].sub(&p[0].mul(&p[0])?)?;
            a.mul(&a)?.add(&b.mul(&b)?.mul_scalar(100.0)?)?.sum()
        }
        "least_squares" => {
            let r = data("a").matmul(&p[0])?.add(&data("b").matmul(&p[1])?)?.sub(&data("c"))?;
            r.mul(&r)?.sum()?.mul_scalar(0.5)
        }
        "logistic" => {
            let z = data("x").matmul(&p[0])?.add(&p[1])?;
            let entropy = z.softplus()?.sub(&z.mul(&data("y"))?)?.mean()?;
            entropy.add(&p[0].mul(&p[0])?.sum()?.mul_scalar(0.01)?)
        }
        "embedding" => {
            let e = p[0].embedding(&Tensor::from_vec(vec![3i64, 0, 3, 5], [4])?)?.sub(&data("target"))?;
            e.mul(&e)?.sum()
        }
        other => panic!("{other}"),
    }
}

#[test]
fn runs_are_as_those_of_torch() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/lbfgs.jsonl")).unwrap();
    let mut failures = vec![];
    for line in text.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let exact = case["dtype"] == "f64";
        // In f32 torch differs by so much from its own f64 results.
        let tolerance = if exact { 1e-9 } else { 1e-3 };
        let start = case["params"].as_array().unwrap().iter();
        let parameters: Vec<Tensor> = start
            .map(|p| tensor(p, case["dtype"].as_str().unwrap()).parameter().unwrap())
            .collect();
        let mut optimizer = LbfgsOptimizer::new(Lbfgs::from_json(&case["options"]).unwrap(), parameters.clone()).unwrap();
        let (mut iterations, mut evaluations, mut worst) = (0, 0, 0.0f64);
        for (i, step) in case["steps"].as_array().unwrap().iter().enumerate() {
            let report = optimizer
                .step(|| {
                    parameters.iter().for_each(Tensor::zero_grad);
                    let loss = loss(&case, &parameters)?;
                    loss.backward()?;
                    Ok(values(&loss)[0])
                })
                .unwrap();
            (iterations, evaluations) = (iterations + report.iterations, evaluations + report.evaluations);
            let counts = (step["iterations"].as_u64().unwrap(), step["evaluations"].as_u64().unwrap());
            if exact && (iterations, evaluations) != counts {
                failures.push(format!(
                    "{} step {i}: {iterations} iterations, {evaluations} evaluations, not {counts:?}",
                    case["id"]
                ));
            }
            let expected_loss = step["first_loss"].as_f64().unwrap();
            worst = worst.max((report.first_loss - expected_loss).abs() / expected_loss.abs());
            for (p, expected) in parameters.iter().zip(step["params"].as_array().unwrap()) {
                let expected = numbers(expected);
                let scale = expected.iter().fold(1e-3f64, |a, b| a.max(b.abs()));
                for (found, expected) in values(p).iter().zip(&expected) {
                    worst = worst.max((found - expected).abs() / scale);
                }
            }
        }

        if worst.is_nan() || worst > tolerance {
            failures.push(format!("{}: {worst:e} > {tolerance:e}", case["id"]));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn rosenbrock(x: &Tensor) -> Result<f64> {
    x.zero_grad();
    let (a, b) = (x.slice(0, 0, 1, 1)?, x.slice(0, 1, 2, 1)?);
    let (u, v) = (a.neg()?.add_scalar(1.0)?, b.sub(&a.mul(&a)?)?);
    let loss = u.mul(&u)?.add(&v.mul(&v)?.mul_scalar(100.0)?)?.sum()?;
    loss.backward()?;
    loss.item()
}

fn parameter(values: &[f64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), [values.len()]).unwrap().parameter().unwrap()
}

#[test]
fn it_finds_the_minimum_and_says_why_it_stopped() {
    let x = parameter(&[-1.2, 1.0]);
    let options = Lbfgs::new(1.0)
        .line_search_fn(LineSearch::StrongWolfe)
        .max_iter(100)
        .max_eval(1000)
        .tolerance_change(1e-16);
    let mut optimizer = LbfgsOptimizer::new(options, vec![x.clone()]).unwrap();
    let report = optimizer.step(|| rosenbrock(&x)).unwrap();
    assert_eq!(report.first_loss, 24.199999999999996);
    assert!(
        report.loss < 1e-14 && values(&x).iter().all(|x| (x - 1.0).abs() < 1e-6),
        "{report:?}"
    );
    assert!(
        matches!(report.stop, LbfgsStop::Gradient | LbfgsStop::Loss | LbfgsStop::Move),
        "{report:?}"
    );
    assert!(report.iterations < 60 && report.evaluations >= report.iterations);
    let again = optimizer.step(|| rosenbrock(&x)).unwrap();
    assert!(again.loss <= report.loss);

    let stop = |options: Lbfgs| {
        let x = parameter(&[-1.2, 1.0]);
        let mut optimizer = LbfgsOptimizer::new(options.line_search_fn(LineSearch::StrongWolfe), vec![x.clone()]).unwrap();
        optimizer.step(|| rosenbrock(&x)).unwrap()
    };
    let report = stop(Lbfgs::new(1.0).max_iter(3).max_eval(99));
    assert_eq!((report.stop, report.iterations), (LbfgsStop::Iterations, 3));
    assert_eq!(stop(Lbfgs::new(1.0).max_eval(4)).stop, LbfgsStop::Evaluations);
    assert_eq!(stop(Lbfgs::new(1.0).tolerance_grad(1e9)).stop, LbfgsStop::Gradient);
    assert_eq!(stop(Lbfgs::new(1.0).tolerance_change(1e9)).stop, LbfgsStop::Slope);
    assert_eq!(stop(Lbfgs::new(1.0).max_iter(0)).evaluations, 1);
    assert_eq!(
        stop(Lbfgs::new(1.0).history_size(1).max_iter(500).max_eval(5000)).stop,
        stop(Lbfgs::new(1.0).max_iter(500)).stop
    );
}

#[test]
fn a_failing_closure_leaves_the_last_accepted_point() {
    let x = parameter(&[-1.2, 1.0]);
    let options = Lbfgs::new(1.0).line_search_fn(LineSearch::StrongWolfe);
    let mut optimizer = LbfgsOptimizer::new(options, vec![x.clone()]).unwrap();
    let accepted = Cell::new(f64::NAN);
    let mut calls = 0;
    let error = optimizer.step(|| {
        calls += 1;
        let loss = rosenbrock(&x)?;
        match calls {
            8 => Err(crate::Error::user("no more")),
            _ => {
                accepted.set(loss.min(accepted.get()));
                Ok(loss)
            }
        }
    });
    assert!(error.unwrap_err().to_string().contains("no more"));
    assert_eq!(rosenbrock(&x).unwrap(), accepted.get());
    // At the first call nothing has moved.
    let before = values(&x);
    assert!(optimizer.step(|| Err(crate::Error::user("at once"))).is_err());
    assert_eq!(values(&x), before);
    // And it goes on.
    for _ in 0..3 {
        optimizer.step(|| rosenbrock(&x)).unwrap();
    }
    assert!(rosenbrock(&x).unwrap() < 1e-8);
}

#[test]
fn what_is_not_finite_is_not_accepted() {
    // -log x + x: not finite below 0; its minimum is at 1.
    let closure = |x: &Tensor| -> Result<f64> {
        x.zero_grad();
        let loss = x.sub(&x.log()?)?.sum()?;
        loss.backward()?;
        loss.item()
    };
    // The first step length overshoots far.
    let x = parameter(&[3.0, 2.0]);
    let mut optimizer = LbfgsOptimizer::new(Lbfgs::new(100.0), vec![x.clone()]).unwrap();
    let report = optimizer.step(|| closure(&x)).unwrap();
    assert_eq!((report.stop, report.loss), (LbfgsStop::NotFinite, report.first_loss));
    assert_eq!(values(&x), [3.0, 2.0]);
    let options = Lbfgs::new(100.0).line_search_fn(LineSearch::StrongWolfe);
    let mut optimizer = LbfgsOptimizer::new(options, vec![x.clone()]).unwrap();
    let report = optimizer.step(|| closure(&x)).unwrap();
    assert!(
        report.loss.is_finite() && values(&x).iter().all(|x| (x - 1.0).abs() < 1e-4),
        "{report:?} {x:?}"
    );
    // Where it begins.
    let x = parameter(&[-1.0]);
    let mut optimizer = LbfgsOptimizer::new(Lbfgs::new(1.0), vec![x.clone()]).unwrap();
    assert_eq!(optimizer.step(|| closure(&x)).unwrap().stop, LbfgsStop::NotFinite);
    assert_eq!(values(&x), [-1.0]);
}

#[test]
fn options_and_parameters_are_checked() {
    let kind = |options: Value| Lbfgs::from_json(&options).unwrap_err().kind().clone();
    assert!(matches!(kind(json!({"lr": -1.0})), ErrorKind::OptionValue { option, .. } if option == "lr"));
    assert!(matches!(kind(json!({"history_size": 0})), ErrorKind::OptionValue { option, .. } if option == "history_size"));
    assert!(matches!(kind(json!({"line_search_fn": "armijo"})), ErrorKind::OptionValue { option, .. } if option == "line_search_fn"));
    assert!(matches!(kind(json!({"max_iter": -1})), ErrorKind::OptionValue { option, .. } if option == "max_iter"));
    assert!(
        matches!(kind(json!({"weight_decay": 0.0})), ErrorKind::UnknownOption { option, known, .. } if option == "weight_decay" && known.contains("history_size"))
    );
    assert_eq!(Lbfgs::from_json(&json!({})).unwrap(), Lbfgs::default());
    assert_eq!(Lbfgs::from_json(&json!({"max_eval": null})).unwrap().most_evaluations(), 25);

    let refused = |parameters| LbfgsOptimizer::new(Lbfgs::default(), parameters).unwrap_err().kind().clone();
    let x = parameter(&[1.0]);
    assert!(matches!(refused(vec![]), ErrorKind::NoParameters { .. }));
    assert!(matches!(
        refused(vec![x.clone(), x.clone()]),
        ErrorKind::DuplicateParameter { first: 0, second: 1, .. }
    ));
    assert!(matches!(refused(vec![Tensor::scalar(1.0)]), ErrorKind::NotALeaf { .. }));
    assert!(matches!(refused(vec![x.mul_scalar(2.0).unwrap()]), ErrorKind::NotALeaf { why, .. } if why.contains("computed")));
}

#[test]
fn graphs_keep_the_values_that_they_saw() {
    let x = parameter(&[-1.2, 1.0]);
    let held = x.data();
    let mut optimizer = LbfgsOptimizer::new(Lbfgs::new(0.01), vec![x.clone()]).unwrap();
    optimizer.step(|| rosenbrock(&x)).unwrap();
    assert_eq!(Tensor::from_data(held).to_vec::<f64>().unwrap(), [-1.2, 1.0]);
    assert_ne!(values(&x), [-1.2, 1.0]);
}

//! Replay of torch's results (`tests/golden/schedules.jsonl`), and what they don't cover.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::*;
use crate::Error;
use crate::optim::{Adagrad, Adam, Optimizer, OptimizerSpec, Sgd};
use crate::tensor::{DType, Tensor};

/// Learning rates: at first, and after each of `n` steps.
fn lrs(schedule: impl Into<Schedule>, base: f64, n: usize) -> Vec<f64> {
    let mut spec = OptimizerSpec::from(Sgd::new(base));
    let mut scheduler = Scheduler::new(schedule, &mut spec).unwrap();
    let mut lrs = vec![Rates::of(&spec).unwrap().lr];
    lrs.extend((0..n).map(|_| scheduler.step(&mut spec).unwrap()[0].lr));
    lrs
}

#[test]
fn every_case_gives_what_torch_gives() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/schedules.jsonl");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    for line in text.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let close = |what: &str, i: usize, found: f64| {
            let expected = case[what][i].as_f64().unwrap();
            let near = (found - expected).abs() <= 1e-12 * expected.abs();
            assert!(near, "{} {what}[{i}]: {found}, expected {expected}", case["id"]);
        };
        let mut spec = OptimizerSpec::from(Sgd::new(case["base_lr"].as_f64().unwrap()).momentum(0.9));
        let schedule: Schedule = serde_json::from_value(case.clone()).unwrap();
        let mut scheduler = Scheduler::new(schedule, &mut spec).unwrap();
        for i in 0..case["lrs"].as_array().unwrap().len() {
            let rates = match i {
                0 => Rates::of(&spec).unwrap(),
                i => {
                    // Interrupted and resumed before every step.
                    scheduler = serde_json::from_str(&serde_json::to_string(&scheduler).unwrap()).unwrap();
                    match case["metrics"].get(i - 1) {
                        Some(metric) => scheduler.step_with(&mut spec, metric.as_f64().unwrap()).unwrap()[0],
                        None => scheduler.step(&mut spec).unwrap()[0],
                    }
                }
            };
            close("lrs", i, rates.lr);
            if case.get("momentum").is_some() {
                close("momentum", i, rates.momentum.unwrap());
            } else {
                assert_eq!(rates.momentum, Some(0.9));
            }
            assert_eq!(Rates::of(&spec).unwrap(), rates);
        }
    }
    assert!(text.lines().count() >= 39);
}

#[test]
fn functions_of_the_epoch() {
    assert_eq!(lrs(Lambda::new(|t| 1.0 / (1 + t) as f64), 0.5, 3), [0.5, 0.25, 0.5 / 3.0, 0.125]);
    assert_eq!(lrs(Multiplicative::new(|t| t as f64), 0.5, 3), [0.5, 0.5, 1.0, 3.0]);
    assert!(Schedule::from(Lambda::new(|_| 1.0)).to_json().is_err());
    assert!(Schedule::from_json("Lambda", &json!({})).is_err());
    let mut spec = OptimizerSpec::from(Sgd::new(0.125));
    let mut resumed = Scheduler::resume(Lambda::new(|t| t as f64), 3, vec![0.5]).unwrap();
    assert_eq!(resumed.step(&mut spec).unwrap()[0].lr, 2.0);
}

#[test]
fn milestones_multiply_as_often_as_they_are_listed() {
    assert_eq!(lrs(MultiStep::new(vec![2, 1, 2]).gamma(0.5), 1.0, 3), [1.0, 0.5, 0.125, 0.125]);
}

#[test]
fn a_shrinking_range() {
    let cyclic = Cyclic::new(0.0, 1.0)
        .step_size_up(1)
        .mode(CyclicMode::ExpRange)
        .gamma(0.5)
        .cycle_momentum(false);
    assert_eq!(lrs(cyclic.clone(), 9.0, 4), [0.0, 0.5, 0.0, 0.125, 0.0]);
    // Two epochs down, the first of them at half the height.
    let uneven = cyclic.step_size_down(2).mode(CyclicMode::Triangular);
    for (found, expected) in lrs(uneven, 9.0, 4).into_iter().zip([0.0, 1.0, 0.5, 0.0, 1.0]) {
        assert!((found - expected).abs() < 1e-15);
    }
}

#[test]
fn a_learning_rate_that_is_set_by_hand_is_kept() {
    let mut spec = OptimizerSpec::from(Sgd::new(1.0));
    let mut scheduler = Scheduler::new(Exponential::new(0.5), &mut spec).unwrap();
    scheduler.step(&mut spec).unwrap();
    spec.adjust(0, &json!({"lr": 3.0})).unwrap();
    assert_eq!(scheduler.step(&mut spec).unwrap()[0].lr, 1.5);
}

#[test]
fn groups_move_from_their_own_rates() -> Result<()> {
    let parameter = || Tensor::zeros(DType::F64, [1]).parameter();
    let mut optimizer = Optimizer::new(Sgd::new(1.0), vec![parameter()?])?;
    optimizer.add_group(Adam::new(0.5), vec![parameter()?])?;
    let mut scheduler = Scheduler::new(OneCycle::new(4.0).epochs(2).steps_per_epoch(5), &mut optimizer)?;
    let rates = scheduler.step(&mut optimizer)?;
    assert_eq!(rates[0], rates[1]);
    // Momentum is the first of Adam's betas.
    assert_eq!(optimizer.groups()[1].option("betas"), Some(json!([rates[1].momentum, 0.999])));

    let mut scheduler = Scheduler::new(Exponential::new(0.5), &mut optimizer)?;
    optimizer.set_option(Some(1), "lr", &json!(0.5))?;
    assert_eq!(scheduler.step(&mut optimizer)?[1].lr, 0.25);
    optimizer.add_group(Sgd::new(1.0), vec![parameter()?])?;
    assert!(matches!(
        scheduler.step(&mut optimizer).unwrap_err().kind(),
        ErrorKind::Argument { .. }
    ));
    Ok(())
}

#[test]
fn what_a_rule_refuses_changes_nothing() {
    let mut spec = OptimizerSpec::from(Sgd::new(1.0));
    let mut scheduler = Scheduler::new(Lambda::new(|t| 1.0 - t as f64), &mut spec).unwrap();
    scheduler.step(&mut spec).unwrap();
    assert!(matches!(scheduler.step(&mut spec).unwrap_err().kind(), ErrorKind::OptionValue { option, .. } if option == "lr"));
    assert_eq!((scheduler.epoch(), Rates::of(&spec).unwrap().lr), (1, 0.0));
    let mut adagrad = OptimizerSpec::from(Adagrad::new(1.0));
    let error = Scheduler::new(OneCycle::new(1.0).total_steps(5), &mut adagrad).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::OptionValue { option, .. } if option == "cycle_momentum"));
    assert!(Scheduler::new(OneCycle::new(1.0).total_steps(5).cycle_momentum(false), &mut adagrad).is_ok());
}

#[test]
fn the_end_and_a_missing_metric_are_errors() {
    let mut spec = OptimizerSpec::from(Sgd::new(1.0));
    let mut scheduler = Scheduler::new(OneCycle::new(1.0).total_steps(2), &mut spec).unwrap();
    let steps: Vec<bool> = (0..3).map(|_| scheduler.step(&mut spec).is_ok()).collect();
    assert_eq!(steps, [true, true, false]);
    let mut plateau = Scheduler::new(ReduceLROnPlateau::new().patience(0), &mut spec).unwrap();
    assert!(matches!(plateau.step(&mut spec).unwrap_err().kind(), ErrorKind::Argument { .. }));
    assert!(plateau.step_with(&mut spec, f64::NAN).is_ok());
}

#[test]
fn bad_options_are_refused_by_name() {
    let option = |name: &str, options: Value| match Schedule::from_json(name, &options).map_err(|e: Error| e.kind().clone()) {
        Err(ErrorKind::OptionValue { optimizer, option, .. }) => {
            assert_eq!(optimizer, name);
            option
        }
        other => panic!("{name} {options}: {other:?}"),
    };
    assert_eq!(option("Step", json!({})), "step_size");
    assert_eq!(option("Step", json!({"step_size": -1})), "step_size");
    assert_eq!(option("Step", json!({"step_size": 3, "gamma": "x"})), "gamma");
    assert_eq!(option("Step", json!(3)), "options");
    assert_eq!(option("Constant", json!({"factor": 1.5})), "factor");
    assert_eq!(option("Linear", json!({"start_factor": 0.0})), "start_factor");
    assert_eq!(option("Linear", json!({"end_factor": 2.0})), "end_factor");
    assert_eq!(option("Polynomial", json!({"total_iters": 0})), "total_iters");
    assert_eq!(option("CosineAnnealing", json!({"T_max": 0})), "T_max");
    assert_eq!(option("CosineAnnealingWarmRestarts", json!({"T_0": 3, "T_mult": 0})), "T_mult");
    assert_eq!(option("OneCycle", json!({"max_lr": 1.0})), "total_steps");
    assert_eq!(
        option("OneCycle", json!({"max_lr": 1.0, "total_steps": 9, "pct_start": 1.5})),
        "pct_start"
    );
    assert_eq!(
        option("OneCycle", json!({"max_lr": 1.0, "total_steps": 9, "anneal_strategy": "sin"})),
        "anneal_strategy"
    );
    assert_eq!(
        option("Cyclic", json!({"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 0})),
        "step_size_up"
    );
    assert_eq!(option("ReduceLROnPlateau", json!({"factor": 1.0})), "factor");
    assert_eq!(option("Sequential", json!({"schedules": [], "milestones": []})), "schedules");
    let parts = json!([{"schedule": "Step", "options": {"step_size": 3}}, {"schedule": "Constant"}]);
    assert_eq!(option("Sequential", json!({"schedules": parts, "milestones": []})), "milestones");
    assert_eq!(option("Sequential", json!({"schedules": parts, "milestones": [0]})), "milestones");
    assert_eq!(
        option("Chained", json!({"schedules": [{"schedule": "ReduceLROnPlateau"}]})),
        "schedules"
    );
    assert_eq!(option("Chained", json!({"schedules": [{"schedule": "Step"}]})), "schedules");
    assert!(matches!(
        Schedule::from_json("Step", &json!({"step_size": 3, "last_epoch": 2})).unwrap_err().kind(),
        ErrorKind::UnknownOption { option, known, .. } if option == "last_epoch" && known == "step_size, gamma"
    ));
    assert!(Schedule::from_json("StepLR", &json!({})).unwrap_err().to_string().contains("Step"));
}

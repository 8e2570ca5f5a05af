//! Replay of torch's results (`tests/golden/`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::Value;

use crate::optim::{Optimizer, OptimizerSpec, names};
use crate::tensor::{DType, Data, Gradient, RowSparse, Tensor};
use crate::{ErrorKind, Result};

/// Rules that torch doesn't have, and where their reference values are.
const NOT_IN_TORCH: &[(&str, &str)] = &[("Lion", "reference.rs"), ("LAMB", "reference.rs")];

fn lines(file: &str) -> Vec<Value> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn shape(value: &Value) -> Vec<usize> {
    numbers(value).into_iter().map(|x| x as usize).collect()
}

fn data(dtype: DType, values: &Value, shape: &[usize]) -> Data {
    let values = numbers(values);
    match dtype {
        DType::F32 => Tensor::from_vec(values.into_iter().map(|x| x as f32).collect(), shape)
            .unwrap()
            .data(),
        _ => Tensor::from_vec(values, shape).unwrap().data(),
    }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        DType::F32 => tensor.to_vec::<f32>().unwrap().into_iter().map(f64::from).collect(),
        _ => tensor.to_vec::<f64>().unwrap(),
    }
}

fn gradient(dtype: DType, gradient: &Value, shape: &[usize]) -> Option<Gradient> {
    if gradient.is_null() {
        return None;
    }
    if let Some(dense) = gradient.get("dense") {
        return Some(Gradient::Dense(data(dtype, dense, shape)));
    }
    let rows: Vec<i64> = numbers(&gradient["indices"]).into_iter().map(|x| x as i64).collect();
    let flat: Vec<Value> = match &gradient["values"] {
        Value::Array(values) => values
            .iter()
            .flat_map(|v| v.as_array().cloned().unwrap_or_else(|| vec![v.clone()]))
            .collect(),
        other => panic!("values: {other}"),
    };
    let packed = [&[rows.len()], &shape[1..]].concat();
    let values = data(dtype, &Value::Array(flat), &packed);
    Some(Gradient::Sparse(RowSparse::new(rows, values, shape.to_vec()).unwrap()))
}

/// The largest error of a case: relative to the largest magnitude of each array, absolute for Muon.
fn replay(case: &Value) -> Result<f64> {
    let name = case["optimizer"].as_str().unwrap();
    let dtype = if case["dtype"] == "f32" { DType::F32 } else { DType::F64 };
    let shapes: Vec<_> = case["params"].as_array().unwrap().iter().map(|p| shape(&p["shape"])).collect();
    let parameters = case["params"].as_array().unwrap().iter().zip(&shapes);
    let parameters: Vec<Tensor> = parameters
        .map(|(p, shape)| Tensor::from_data(data(dtype, &p["value"], shape)).parameter())
        .collect::<Result<_>>()?;
    let mut optimizer = Optimizer::new(OptimizerSpec::from_json(name, &case["options"])?, parameters.clone())?;
    let mut worst = 0.0f64;
    for step in case["steps"].as_array().unwrap() {
        if let Some(lr) = step.get("lr").filter(|lr| !lr.is_null()) {
            optimizer.set_option(None, "lr", lr)?;
        }
        let report = optimizer.step(&mut |place| gradient(dtype, &step["grads"][place], &shapes[place]))?;
        for (place, report) in report.iter().enumerate() {
            assert_eq!(report.updated, !step["grads"][place].is_null());
            let (found, expected) = (values(&parameters[place]), numbers(&step["expected"][place]));
            let scale = if name == "Muon" {
                1.0
            } else {
                expected.iter().fold(0.0f64, |a, b| a.max(b.abs()))
            };
            for (found, expected) in found.iter().zip(&expected) {
                let error = (found - expected).abs() / scale;
                worst = worst.max(if found == expected {
                    0.0
                } else if error.is_nan() {
                    f64::INFINITY
                } else {
                    error
                });
            }
        }
    }
    Ok(worst)
}

#[test]
fn every_case_gives_what_torch_gives() {
    let mut failures = vec![];
    let mut table: BTreeMap<(String, String), (usize, f64)> = BTreeMap::new();
    for case in lines("optimizers.jsonl") {
        let (name, dtype) = (case["optimizer"].as_str().unwrap(), case["dtype"].as_str().unwrap());
        let tolerance = match (name, dtype) {
            ("Muon", _) => 0.4 * case["options"]["lr"].as_f64().unwrap(),
            (_, "f32") => 2e-6,
            _ => 1e-12,
        };
        let error = replay(&case);
        let worst = *error.as_ref().unwrap_or(&f64::INFINITY);
        let row = table.entry((name.into(), dtype.into())).or_default();
        *row = (row.0 + 1, row.1.max(worst));
        if worst > tolerance {
            failures.push(format!("{}: {error:?} > {tolerance:e}", case["id"]));
        }
    }
    let rows = table
        .iter()
        .map(|((name, dtype), (cases, worst))| format!("{name} {dtype}: {cases} cases, worst error {worst:.1e}"));
    assert!(
        failures.is_empty(),
        "{}\n{}",
        rows.collect::<Vec<_>>().join("\n"),
        failures.join("\n")
    );
}

#[test]
fn every_rule_has_cases_or_says_where_its_reference_is() {
    let with_cases: BTreeSet<String> = lines("optimizers.jsonl")
        .iter()
        .map(|c| c["optimizer"].as_str().unwrap().into())
        .collect();
    for name in names() {
        let elsewhere = NOT_IN_TORCH.iter().any(|(other, _)| *other == name);
        assert!(
            with_cases.contains(name) != elsewhere,
            "{name}: give it golden cases, or a line in NOT_IN_TORCH"
        );
    }
    for name in &with_cases {
        assert!(
            names().contains(&name.as_str()),
            "{name} has cases and no row in the table of rules"
        );
    }
}

#[test]
fn every_set_of_options_that_torch_refuses_is_refused() {
    for set in lines("refused.jsonl") {
        match OptimizerSpec::from_json(set["optimizer"].as_str().unwrap(), &set["options"])
            .as_ref()
            .map_err(|e| e.kind())
        {
            Err(ErrorKind::OptionValue { optimizer, option, .. }) => {
                assert_eq!(optimizer.as_str(), set["optimizer"]);
                assert!(set["options"].get(option).is_some(), "{set}: it blames `{option}`");
            }
            other => panic!("{set}: {other:?}"),
        }
    }
}

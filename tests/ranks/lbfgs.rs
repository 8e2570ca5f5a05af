//! L-BFGS over ranks: as torch's, with the bits of one rank, in few messages.

use std::cell::Cell;

use rankgrad::DistributedLbfgs;
use rankgrad::optim::{Lbfgs, LbfgsOptimizer, LbfgsReport, LbfgsStop, LineSearch};
use rankgrad::prelude::*;
use serde_json::Value;

use crate::Outcome;
use crate::case::Case;
use crate::settled::{led, led_locally};

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

fn tensor(array: &Value, dtype: &Value) -> Result<Tensor> {
    let shape: Vec<usize> = numbers(&array["shape"]).into_iter().map(|n| n as usize).collect();
    let tensor = Tensor::from_vec(numbers(&array["value"]), shape)?;
    if dtype == "f32" { tensor.cast(DType::F32) } else { Ok(tensor) }
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.cast(DType::F64)?.to_vec()
}

/// The losses of `tests/golden/lbfgs.py`.
fn loss(case: &Value, p: &[Tensor]) -> Result<Tensor> {
    let data = |name: &str| tensor(&case["data"][name], &case["dtype"]);
    match case["problem"].as_str() {
        Some("rosenbrock") => rosenbrock(&p[0], &p[1]),
        Some("least_squares") => {
            let r = data("a")?.matmul(&p[0])?.add(&data("b")?.matmul(&p[1])?)?.sub(&data("c")?)?;
            r.mul(&r)?.sum()?.mul_scalar(0.5)
        }
        Some("logistic") => {
            let z = data("x")?.matmul(&p[0])?.add(&p[1])?;
            let entropy = z.softplus()?.sub(&z.mul(&data("y")?)?)?.mean()?;
            entropy.add(&p[0].mul(&p[0])?.sum()?.mul_scalar(0.01)?)
        }
        Some("embedding") => {
            let e = p[0]
                .embedding(&Tensor::from_vec(vec![3i64, 0, 3, 5], [4])?)?
                .sub(&data("target")?)?;
            e.mul(&e)?.sum()
        }
        other => panic!("{other:?}"),
    }
}

fn rosenbrock(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let a = x.neg()?.add_scalar(1.0)?;
    let b = y.sub(&x.mul(x)?)?;
    a.mul(&a)?.add(&b.mul(&b)?.mul_scalar(100.0)?)?.sum()
}

/// Each run of torch's, on one rank and over all of them.
fn runs(world: &World) -> Result<()> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/lbfgs.jsonl")).map_err(Error::user)?;
    for line in text.lines() {
        let case: Value = serde_json::from_str(line).map_err(Error::user)?;
        let exact = case["dtype"] == "f64";
        let start: Vec<Tensor> = case["params"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|p| tensor(p, &case["dtype"]))
            .collect::<Result<_>>()?;
        let here: Vec<Tensor> = start.iter().map(|p| p.detach().parameter()).collect::<Result<_>>()?;
        // From the last rank down, so that the owners' order isn't that of the list.
        let there: Vec<RRef<Tensor>> = start
            .iter()
            .enumerate()
            .map(|(i, p)| world.put(world.owner(world.size() - 1 + i as u32 * (world.size() - 1)), p.clone()))
            .collect::<Result<_>>()?;
        let options = Lbfgs::from_json(&case["options"])?;
        let mut local = LbfgsOptimizer::new(options.clone(), here.clone())?;
        let mut distributed = DistributedLbfgs::new(world, options, &there)?;
        let mut so_far = (0, 0);
        for step in case["steps"].as_array().into_iter().flatten() {
            let expected = local.step(|| {
                here.iter().for_each(Tensor::zero_grad);
                let loss = loss(&case, &here)?;
                loss.backward()?;
                values(&loss).map(|v| v[0])
            })?;
            let found = distributed.step(|| {
                let context = world.context()?;
                let p: Vec<Tensor> = there.iter().map(|p| context.fetch(p)).collect::<Result<_>>()?;
                let loss = loss(&case, &p)?;
                let value = values(&loss.detach())?[0];
                context.backward(&[loss])?;
                Ok((value, context))
            })?;
            assert_eq!(found, expected, "{}", case["id"]);
            so_far = (so_far.0 + found.iterations, so_far.1 + found.evaluations);
            if exact {
                assert_eq!(
                    (Some(so_far.0), Some(so_far.1)),
                    (step["iterations"].as_u64(), step["evaluations"].as_u64())
                );
            }
            for ((here, there), torch) in here.iter().zip(&there).zip(step["params"].as_array().into_iter().flatten()) {
                let found = values(&there.fetch()?)?;
                assert_eq!(found, values(here)?, "{}: other bits than on one rank", case["id"]);
                let torch = numbers(torch);
                let scale = torch.iter().fold(1e-3f64, |a, b| a.max(b.abs()));
                for (found, torch) in found.iter().zip(&torch) {
                    assert!(
                        (found - torch).abs() / scale <= if exact { 1e-9 } else { 1e-3 },
                        "{}: {found} {torch}",
                        case["id"]
                    );
                }
            }
        }
    }
    Ok(())
}

fn searching() -> Lbfgs {
    Lbfgs::new(1.0).line_search_fn(LineSearch::StrongWolfe)
}

fn valley(world: &World) -> Result<[RRef<Tensor>; 2]> {
    let of = |values: [f64; 2]| Tensor::from_vec(values.to_vec(), [2]);
    Ok([
        world.put(world.owner(1), of([-1.2, 0.5])?)?,
        world.put(world.owner(2), of([1.0, 2.0])?)?,
    ])
}

fn evaluate(world: &World, [x, y]: &[RRef<Tensor>; 2]) -> Result<(f64, Context)> {
    let context = world.context()?;
    let loss = rosenbrock(&context.fetch(x)?, &context.fetch(y)?)?;
    let value = loss.item()?;
    context.backward(&[loss])?;
    Ok((value, context))
}

fn a_failing_closure(world: &World) -> Result<()> {
    let p = valley(world)?;
    let mut optimizer = DistributedLbfgs::new(world, searching(), &p)?;
    let (calls, accepted) = (Cell::new(0), Cell::new(f64::NAN));
    let error = optimizer.step(|| {
        calls.set(calls.get() + 1);
        let (loss, context) = evaluate(world, &p)?;
        if calls.get() == 9 {
            return Err(Error::user("enough"));
        }
        accepted.set(loss.min(accepted.get()));
        Ok((loss, context))
    });
    assert!(error.unwrap_err().to_string().contains("enough"));
    assert_eq!(evaluate(world, &p)?.0, accepted.get());
    let report: LbfgsReport = optimizer.step(|| evaluate(world, &p))?;
    assert_eq!(report.first_loss, accepted.get());
    assert!(report.loss < accepted.get());
    for _ in 0..4 {
        optimizer.step(|| evaluate(world, &p))?;
    }
    assert!(evaluate(world, &p)?.0 < 1e-8);
    Ok(())
}

fn checks(world: &World) -> Result<()> {
    let p = valley(world)?;
    p[1].fetch()?;
    let sent = || world.counters(world.rank()).map(|c| c.messages);
    let before = sent()?;
    let none: [&RRef<Tensor>; 0] = [];
    let kind = |result: Result<DistributedLbfgs>| result.unwrap_err().kind().clone();
    assert!(matches!(
        kind(DistributedLbfgs::new(world, searching(), none)),
        ErrorKind::NoParameters { .. }
    ));
    let twice = [&p[0], &p[1], &p[0]];
    assert!(matches!(
        kind(DistributedLbfgs::new(world, searching(), twice)),
        ErrorKind::DuplicateParameter { first: 0, second: 2, .. }
    ));
    assert!(matches!(
        kind(DistributedLbfgs::new(world, searching().history_size(0), &p)),
        ErrorKind::OptionValue { option, .. } if option == "history_size"
    ));
    assert_eq!(sent()?, before, "checked before anything is sent");
    let constant = world.put_constant(world.owner(1), Tensor::scalar(1.0))?;
    match kind(DistributedLbfgs::new(world, searching(), [&p[0], &p[1], &constant])) {
        ErrorKind::Owners { failures, .. } => {
            assert_eq!(failures.iter().map(|f| f.rank).collect::<Vec<_>>(), [world.owner(1)]);
            assert!(
                matches!(failures[0].error.kind(), ErrorKind::NotALeaf { what, .. } if what.contains("parameter 2")),
                "{failures:?}"
            );
        }
        other => panic!("{other:?}"),
    }
    Ok(())
}

/// An evaluation asks each owner once for its gradients, an iteration once to move.
fn few_messages(world: &World) -> Result<()> {
    let p = valley(world)?;
    let sent = || world.counters(world.rank()).map(|c| c.messages);
    let closures = |n: u64| -> Result<u64> {
        let before = sent()?;
        for _ in 0..n {
            drop(evaluate(world, &p)?);
        }
        Ok(sent()? - before)
    };
    closures(3)?;
    let of_closures = closures(50)?;
    let owners = if p[0].owner() == p[1].owner() { 1 } else { 2 };
    let mut optimizer = DistributedLbfgs::new(world, Lbfgs::new(1e-4).max_iter(49).max_eval(99), &p)?;
    let before = sent()?;
    let report = optimizer.step(|| evaluate(world, &p))?;
    let of_step = sent()? - before;
    // Without a line search the last move isn't evaluated.
    assert_eq!(
        (report.stop, report.iterations, report.evaluations),
        (LbfgsStop::Iterations, 49, 49)
    );
    let far = p.iter().filter(|p| p.owner() != world.rank()).count() as u64;
    let limit = of_closures + (report.iterations + report.evaluations) * owners.min(far.max(1)) + 10;
    assert!(
        of_step <= limit,
        "{of_step} messages, {of_closures} for the closures: more than {limit}"
    );
    Ok(())
}

fn on_local_ranks() -> Outcome {
    [runs as fn(&World) -> Result<()>, a_failing_closure, checks]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("lbfgs::runs_are_as_torchs_with_the_bits_of_one_rank", || led(runs))
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("lbfgs::a_failing_closure_leaves_the_last_accepted_point", || led(a_failing_closure))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("lbfgs::checks_before_it_sends_and_reports_failing_owners", || led(checks))
    },
    Case {
        ranks: &[2, 3],
        ..Case::new("lbfgs::an_iteration_takes_two_rounds_of_messages", || led(few_messages))
    },
    Case {
        ranks: &[0],
        ..Case::new("lbfgs::holds_on_local_ranks_too", on_local_ranks)
    },
];

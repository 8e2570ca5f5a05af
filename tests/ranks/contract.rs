//! Sixteen ways in which torch's distributed optimizer was found to go wrong, or to leave open what happens; here each is what should happen.

use rankgrad::optim::{Adadelta, Adagrad, Adamax, OptimizerSpec, RmsProp, Rprop};
use rankgrad::prelude::*;
use serde_json::json;

use crate::case::Case;
use crate::optimizer::{dense, vector};
use crate::settled::{led, led_locally, nothing_alive};
use crate::{Outcome, ok};

remote! {
    fn times(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)
    }

    fn total(scope: &Scope, w: RRef<Tensor>) -> Result<Tensor> {
        w.local(scope)?.sum()
    }

    fn squared(scope: &Scope, w: RRef<Tensor>) -> Result<Tensor> {
        let w = w.local(scope)?;
        w.mul(&w)
    }

    fn number(scope: &Scope) -> Result<f64> {
        let _ = scope;
        Ok(1.0)
    }

    fn has_local_gradient(scope: &Scope, w: RRef<Tensor>) -> Result<bool> {
        Ok(w.local(scope)?.grad().is_some())
    }
}

fn at(world: &World, k: u32, values: &[f64]) -> Result<RRef<Tensor>> {
    world.put(world.owner(k), vector(values))
}

fn value(parameter: &RRef<Tensor>) -> Result<Vec<f64>> {
    parameter.fetch()?.to_vec()
}

/// D1. Two clients step one large parameter at the same time, on whatever ranks they are.
fn no_update_is_lost() -> Outcome {
    const ELEMENTS: usize = 200_000;
    const STEPS: usize = 150;
    let world = World::init()?;
    world.lead(|world| {
        let w = world.put(world.owner(1), Tensor::zeros(DType::F32, [ELEMENTS]))?;
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| -> Result<()> {
                        let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), [&w])?;
                        let ctx = world.context()?;
                        ctx.accumulate(&w, Gradient::Dense(Tensor::ones(DType::F32, [ELEMENTS]).data()))?;
                        (0..STEPS).try_for_each(|_| optimizer.step(&ctx).map(drop))
                    })
                })
                .collect();
            clients.into_iter().try_for_each(|c| c.join().unwrap())
        })?;
        assert!(w.fetch()?.to_vec::<f32>()?.iter().all(|&x| x == -2.0 * STEPS as f32));
        drop(w);
        nothing_alive(world)
    })?;
    ok(world.finish())
}

/// D2. Every rule pairs parameters and gradients by place, also when some have none.
fn absent_gradients_move_nobody(world: &World) -> Result<()> {
    // All but those that take matrices, or sparse gradients only.
    let names = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD LAMB Lion NAdam RAdam RMSprop Rprop SGD";
    for name in names.split(' ') {
        let (a, b) = (at(world, 1, &[1.0])?, at(world, 1, &[1.0])?);
        let spec = OptimizerSpec::from_json(name, &json!({}))?;
        let optimizer = DistributedOptimizer::new(world, spec, [&a, &b])?;
        let ctx = world.context()?;
        ctx.accumulate(&b, dense(&[1.0]))?;
        let report = optimizer.step(&ctx)?;
        assert_eq!(
            report.owners[0].parameters.iter().map(|p| p.updated).collect::<Vec<_>>(),
            [false, true],
            "{name}"
        );
        assert_eq!(value(&a)?, [1.0], "{name}");
        assert_ne!(value(&b)?, [1.0], "{name}");
    }
    Ok(())
}

/// D3. A parameter that a step has no gradient for isn't updated with an older one.
fn gradients_do_not_outlive_their_context(world: &World) -> Result<()> {
    let (a, b) = (at(world, 1, &[1.0])?, at(world, 1, &[1.0])?);
    let optimizer = DistributedOptimizer::new(world, Adam::new(0.1), [&a, &b])?;
    for used in [&[&a, &b][..], &[&b]] {
        let ctx = world.context()?;
        for w in used {
            let y = ctx.call(w.owner(), times, (vector(&[2.0]), *w))?;
            ctx.backward(&[y.sum()?])?;
        }
        optimizer.step(&ctx)?;
    }
    assert_eq!(world.version(&a)?, 1);
    assert_eq!(world.version(&b)?, 2);
    Ok(())
}

/// D4. Options are checked as in local training, before anything is sent.
fn options_are_checked_for_every_rule(world: &World) -> Result<()> {
    let w = at(world, 1, &[1.0])?;
    let specs: [OptimizerSpec; 7] = [
        Sgd::new(-1.0).into(),
        Sgd::new(0.1).nesterov(true).into(),
        RmsProp::new(-10.0).into(),
        Adagrad::new(-1.0).into(),
        Adadelta::new(1.0).rho(1.5).into(),
        Rprop::new(0.1).etas(1.5, 1.2).into(),
        Adamax::new(0.1).betas(0.9, 1.0).into(),
    ];
    for spec in specs {
        let error = DistributedOptimizer::new(world, spec.clone(), [&w]).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::OptionValue { .. }), "{spec:?}: {error}");
        assert!(error.to_string().contains(spec.name()), "{error}");
    }
    Ok(())
}

/// D5. One table of defaults, that of the local rules, which are torch's classes.
fn defaults_are_the_same_everywhere(world: &World) -> Result<()> {
    for (name, lr) in [("SGD", 1e-3), ("Adamax", 2e-3), ("Adam", 1e-3), ("Adagrad", 1e-2)] {
        let spec = OptimizerSpec::from_json(name, &json!({}))?;
        let w = at(world, 1, &[1.0])?;
        let optimizer = DistributedOptimizer::new(world, spec.clone(), [&w])?;
        assert_eq!(optimizer.groups()[0].option("lr"), Some(json!(lr)), "{name}");
        let (ctx, p) = (world.context()?, vector(&[1.0]).parameter()?);
        ctx.accumulate(&w, dense(&[0.5]))?;
        optimizer.step(&ctx)?;
        rankgrad::optim::Optimizer::new(spec, vec![p.clone()])?.step_one(0, dense(&[0.5]))?;
        assert_eq!(value(&w)?, p.to_vec::<f64>()?, "{name}");
    }
    Ok(())
}

/// D6. An option that can't be had is refused when the optimizer is made, not when it steps.
fn unknown_options_are_refused_at_construction(_: &World) -> Result<()> {
    for option in ["fused", "foreach", "capturable", "learning_rate"] {
        let error = OptimizerSpec::from_json("Adam", &json!({ option: true })).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::UnknownOption { option: o, known, .. } if o == option && known.contains("lr")));
    }
    Ok(())
}

/// D7. If owners fail, the error has each of them and who did update; or nobody updates, if that was asked for.
fn every_failed_owner_is_reported(world: &World) -> Result<()> {
    let all: Vec<RRef<Tensor>> = (0..world.size())
        .map(|rank| world.put(rank, vector(&[1.0, 1.0])))
        .collect::<Result<_>>()?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(0.1), &all)?;
    let ctx = world.context()?;
    for w in &all[1..] {
        let rows = rankgrad::tensor::RowSparse::new(vec![0], Tensor::ones(DType::F64, [1]).data(), vec![2])?;
        ctx.accumulate(w, Gradient::Sparse(rows))?;
    }
    ctx.accumulate(&all[0], dense(&[1.0, 1.0]))?;
    let ranks: Vec<u32> = (1..world.size()).collect();
    for (options, updated) in [(StepOptions::new().all_or_nothing(), vec![]), (StepOptions::new(), vec![0])] {
        match optimizer.step_with(&ctx, &options).unwrap_err().kind() {
            ErrorKind::Owners {
                failures, updated: found, ..
            } => {
                assert_eq!(failures.iter().map(|f| f.rank).collect::<Vec<_>>(), ranks);
                assert_eq!(*found, updated);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(world.version(&all[0])?, 1);
    Ok(())
}

/// D8. An owner that the context never met has no gradients: nothing to do there, whichever thread steps.
fn an_owner_that_the_context_never_met_has_nothing_to_do(world: &World) -> Result<()> {
    let (a, b) = (at(world, 1, &[1.0])?, at(world, 2, &[1.0])?);
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&a, &b])?;
    let ctx = world.context()?;
    let y = ctx.call(a.owner(), times, (vector(&[2.0]), &a))?;
    ctx.backward(&[y.sum()?])?;
    let report = std::thread::scope(|scope| scope.spawn(|| optimizer.step(&ctx)).join().unwrap())?;
    assert_eq!((report.updated(), report.without_gradient()), (1, 1));
    assert_eq!((value(&a)?, value(&b)?), (vec![0.0], vec![1.0]));
    Ok(())
}

/// D9. A parameter listed twice is an error; a second step on a context applies it again.
fn a_parameter_is_listed_once_and_a_second_step_applies_again(world: &World) -> Result<()> {
    let w = at(world, 1, &[1.0])?;
    let error = DistributedOptimizer::new(world, Sgd::new(0.5), [&w, &w]).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::DuplicateParameter { first: 0, second: 1, .. }),
        "{error}"
    );
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&w])?;
    let ctx = world.context()?;
    ctx.accumulate(&w, dense(&[1.0]))?;
    optimizer.step(&ctx)?;
    optimizer.step(&ctx)?;
    assert_eq!(value(&w)?, [0.0]);
    Ok(())
}

/// D10. A computed tensor can't be optimized, and the error says so.
fn a_computed_tensor_is_refused(world: &World) -> Result<()> {
    let w = at(world, 1, &[2.0])?;
    let computed = world.remote(w.owner(), squared, (&w,))?;
    let error = DistributedOptimizer::new(world, Sgd::new(0.5), [&w, &computed]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Owners { failures, .. } if matches!(failures[0].error.kind(), ErrorKind::NotALeaf { .. })));
    for text in ["parameter 1", "computed", &format!("rank {}", w.owner())] {
        assert!(error.to_string().contains(text), "{error}");
    }
    Ok(())
}

/// D11. The first example that a user meets runs: remote parameters require gradients.
fn remote_parameters_require_gradients(world: &World) -> Result<()> {
    let w = at(world, 1, &[3.0, 4.0])?;
    let ctx = world.context()?;
    let loss = ctx.call(w.owner(), total, (&w,))?;
    ctx.backward(&[loss])?;
    DistributedOptimizer::new(world, Sgd::new(0.5), [&w])?.step(&ctx)?;
    assert_eq!(value(&w)?, [2.5, 3.5]);
    Ok(())
}

/// D12. An optimizer of nothing is an error, as for torch's local ones.
fn an_empty_list_is_refused(world: &World) -> Result<()> {
    let none: [&RRef<Tensor>; 0] = [];
    let error = DistributedOptimizer::new(world, Sgd::new(0.5), none).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NoParameters { .. }));
    assert!(error.to_string().contains("empty parameter list"), "{error}");
    Ok(())
}

/// D13. A reference to something else than a tensor: one typed error, whatever the rule.
fn a_reference_to_no_tensor_is_refused(world: &World) -> Result<()> {
    let number = world.remote(world.owner(1), number, ())?;
    let wrong: RRef<Tensor> = world.attach(number.id())?;
    for name in ["SGD", "Adam", "Adafactor"] {
        let error = DistributedOptimizer::new(world, OptimizerSpec::from_json(name, &json!({}))?, [&wrong]).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Owners { failures, .. } if matches!(failures[0].error.kind(), ErrorKind::WrongType { found, .. } if found == "f64")),
            "{error}"
        );
    }
    Ok(())
}

/// D14. A step, or a look at gradients, after the context was released says so.
fn a_released_context_is_named(world: &World) -> Result<()> {
    let w = at(world, 1, &[1.0])?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&w])?;
    let ctx = world.context()?;
    ctx.accumulate(&w, dense(&[1.0]))?;
    let id = ctx.id();
    // A step holds its context, so that it can't be released under it; what is left is a rank that knows its id.
    optimizer.step(&ctx)?;
    ctx.release()?;
    let error = world.gradients_here(id).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ContextReleased { context, .. } if *context == id.to_string()),
        "{error}"
    );
    Ok(())
}

/// D15. Another client's step between forward and backward: the graph keeps the version it saw.
fn a_step_between_forward_and_backward_harms_nothing(world: &World) -> Result<()> {
    let w = at(world, 1, &[3.0])?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), [&w])?;
    let (a, b) = (world.context()?, world.context()?);
    let y = b.call(w.owner(), squared, (&w,))?;
    a.accumulate(&w, dense(&[1.0]))?;
    optimizer.step(&a)?;
    b.backward(&[y.sum()?])?;
    let gradient = b
        .gradient(&w)?
        .map(|g| Tensor::from_data(g.to_dense().unwrap()).to_vec::<f64>().unwrap());
    assert_eq!(gradient, Some(vec![6.0])); // of 3 squared, though the parameter is 2 by now
    optimizer.step(&b)?;
    assert_eq!(value(&w)?, [-4.0]);
    assert!(!world.call(w.owner(), has_local_gradient, (&w,))?);
    Ok(())
}

/// D16. A constructor that fails on an owner gives the owner's error and name, and leaves nothing.
fn a_failed_constructor_names_the_owner(world: &World) -> Result<()> {
    let (w, constant) = (at(world, 1, &[1.0])?, world.put_constant(world.owner(2), vector(&[1.0]))?);
    let error = DistributedOptimizer::new(world, Sgd::new(0.5), [&w, &constant]).unwrap_err();
    match error.kind() {
        ErrorKind::Owners { failures, operation, .. } => {
            assert_eq!(failures.iter().map(|f| f.rank).collect::<Vec<_>>(), [constant.owner()]);
            assert!(
                matches!(failures[0].error.kind(), ErrorKind::NotALeaf { what, .. } if what.contains("parameter 1")),
                "{error}"
            );
            assert!(operation.contains("SGD"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    Ok(())
}

const ALL: &[fn(&World) -> Result<()>] = &[
    absent_gradients_move_nobody,
    gradients_do_not_outlive_their_context,
    options_are_checked_for_every_rule,
    defaults_are_the_same_everywhere,
    unknown_options_are_refused_at_construction,
    every_failed_owner_is_reported,
    an_owner_that_the_context_never_met_has_nothing_to_do,
    a_parameter_is_listed_once_and_a_second_step_applies_again,
    a_computed_tensor_is_refused,
    remote_parameters_require_gradients,
    an_empty_list_is_refused,
    a_reference_to_no_tensor_is_refused,
    a_released_context_is_named,
    a_step_between_forward_and_backward_harms_nothing,
    a_failed_constructor_names_the_owner,
];

const fn case(name: &'static str, run: fn() -> Outcome) -> Case {
    Case {
        ranks: &[1, 3],
        ..Case::new(name, run)
    }
}

/// The cases.
pub const CASES: &[Case] = &[
    case("contract::d1_no_update_is_lost", no_update_is_lost),
    case("contract::d2_absent_gradients_move_nobody", || led(absent_gradients_move_nobody)),
    case("contract::d3_gradients_do_not_outlive_their_context", || {
        led(gradients_do_not_outlive_their_context)
    }),
    case("contract::d4_options_are_checked_for_every_rule", || {
        led(options_are_checked_for_every_rule)
    }),
    case("contract::d5_defaults_are_the_same_everywhere", || {
        led(defaults_are_the_same_everywhere)
    }),
    case("contract::d6_unknown_options_are_refused_at_construction", || {
        led(unknown_options_are_refused_at_construction)
    }),
    Case {
        ranks: &[2, 3],
        ..case("contract::d7_every_failed_owner_is_reported", || {
            led(every_failed_owner_is_reported)
        })
    },
    case("contract::d8_an_owner_that_the_context_never_met_has_nothing_to_do", || {
        led(an_owner_that_the_context_never_met_has_nothing_to_do)
    }),
    case("contract::d9_a_parameter_is_listed_once_and_a_second_step_applies_again", || {
        led(a_parameter_is_listed_once_and_a_second_step_applies_again)
    }),
    case("contract::d10_a_computed_tensor_is_refused", || led(a_computed_tensor_is_refused)),
    case("contract::d11_remote_parameters_require_gradients", || {
        led(remote_parameters_require_gradients)
    }),
    case("contract::d12_an_empty_list_is_refused", || led(an_empty_list_is_refused)),
    case("contract::d13_a_reference_to_no_tensor_is_refused", || {
        led(a_reference_to_no_tensor_is_refused)
    }),
    case("contract::d14_a_released_context_is_named", || led(a_released_context_is_named)),
    case("contract::d15_a_step_between_forward_and_backward_harms_nothing", || {
        led(a_step_between_forward_and_backward_harms_nothing)
    }),
    case("contract::d16_a_failed_constructor_names_the_owner", || {
        led(a_failed_constructor_names_the_owner)
    }),
    Case {
        ranks: &[0],
        ..Case::new("contract::holds_on_local_ranks_too", || {
            ALL.iter().try_for_each(|f| led_locally(3, *f))
        })
    },
];

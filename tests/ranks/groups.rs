//! Groups, names, frozen parameters, and state that is saved and loaded.

use rankgrad::optim::{AdamW, ParameterState, StateDict};
use rankgrad::prelude::*;
use serde_json::json;

use crate::Outcome;
use crate::case::Case;
use crate::optimizer::{dense, vector};
use crate::settled::{led, led_locally};

/// A context with the gradient 1 for each element of these.
fn ones(world: &World, parameters: &[&RRef<Tensor>]) -> Result<Context> {
    let ctx = world.context()?;
    for parameter in parameters {
        ctx.accumulate(parameter, dense(&[1.0, 1.0]))?;
    }
    Ok(ctx)
}

fn first(parameter: &RRef<Tensor>) -> Result<f64> {
    Ok(parameter.fetch()?.to_vec::<f64>()?[0])
}

fn groups(world: &World) -> Result<()> {
    let all: Vec<RRef<Tensor>> = (0..5)
        .map(|i| world.put(world.owner(i), vector(&[0.0, 0.0])))
        .collect::<Result<_>>()?;
    let groups = [
        ParamGroup::new(Sgd::new(1.0), [("a", &all[0]), ("b", &all[1])]),
        ParamGroup::new(Sgd::new(0.25), [("c", &all[2])]),
    ];
    let mut optimizer = DistributedOptimizer::with_groups(world, groups)?;
    optimizer.step(&ones(world, &all.iter().collect::<Vec<_>>())?)?;
    let found = |at: usize| first(&all[at]);
    assert_eq!((found(0)?, found(1)?, found(2)?, found(3)?), (-1.0, -1.0, -0.25, 0.0));
    assert_eq!(optimizer.add_group(AdamW::new(0.5).weight_decay(0.0), [&all[3]])?, 2);
    assert_eq!(
        optimizer.parameters().map(|(name, _)| name).collect::<Vec<_>>(),
        ["a", "b", "c", "3"]
    );
    assert_eq!((optimizer.len(), optimizer.group_of(2), optimizer.group_of(4)), (4, Some(1), None));
    // One group, all groups, and options that no group of another rule has.
    optimizer.set_option(Some(1), "lr", 2.0)?;
    optimizer.step(&ones(world, &[&all[0], &all[2], &all[3]])?)?;
    assert_eq!((found(0)?, found(1)?, found(2)?), (-2.0, -1.0, -2.25));
    assert!((found(3)? + 0.5).abs() < 1e-6);
    optimizer.set_lr(0.0)?;
    let report = optimizer.step(&ones(world, &[&all[0], &all[2], &all[3]])?)?;
    assert_eq!(
        (report.updated(), report.without_gradient(), found(0)?, found(2)?),
        (3, 1, -2.0, -2.25)
    );
    let error = optimizer.set_options(None, &json!({"momentum": 0.5})).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::UnknownOption { option, .. } if option == "momentum"),
        "{error}"
    );
    assert_eq!(optimizer.groups()[0].option("momentum"), Some(json!(0.0)), "nothing changed");
    let error = optimizer.set_option(Some(3), "lr", 1.0).unwrap_err();
    assert!(error.to_string().contains("no group 3"), "{error}");
    // What is refused adds nothing.
    let constant = world.put_constant(world.owner(4), vector(&[0.0, 0.0]))?;
    let mut refused = |parameter: (&str, &RRef<Tensor>), lr: f64, what: &str| {
        let error = optimizer.add_group(Sgd::new(lr), [("good", &all[4]), parameter]).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
        assert_eq!((optimizer.len(), optimizer.groups().len()), (4, 3));
    };
    refused(("again", &all[0]), 1.0, "the same as parameter 0");
    refused(("a", &constant), 1.0, "`a` is taken");
    refused(("constant", &constant), 1.0, "requires no gradient");
    refused(("constant", &constant), -1.0, "lr");
    let report = optimizer.step(&ones(world, &all.iter().collect::<Vec<_>>())?)?;
    assert_eq!((report.updated(), report.without_gradient(), found(4)?), (4, 0, 0.0));
    // And then the group is added after all.
    assert_eq!(optimizer.add_group(Sgd::new(1.0), [("good", &all[4])])?, 3);
    optimizer.step(&ones(world, &[&all[4]])?)?;
    assert_eq!(found(4)?, -1.0);
    assert_eq!(optimizer.state_dict()?.groups[3].parameters, ["good"]);
    let none: [ParamGroup; 0] = [];
    let error = DistributedOptimizer::with_groups(world, none).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NoParameters { .. }), "{error}");
    Ok(())
}

remote! {
    fn times(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)
    }
}

fn frozen(world: &World) -> Result<()> {
    let (a, b) = (
        world.put(world.owner(1), vector(&[1.0, 1.0]))?,
        world.put(world.owner(2), vector(&[1.0, 1.0]))?,
    );
    world.freeze(&a)?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(0.5), [("a", &a), ("b", &b)])?;
    let forward = || -> Result<Context> {
        let ctx = world.context()?;
        let x = ctx.call(a.owner(), times, (vector(&[1.0, 1.0]), &a))?;
        let y = ctx.call(b.owner(), times, (x, &b))?;
        ctx.backward(&[y.sum()?])?;
        Ok(ctx)
    };
    let ctx = forward()?;
    assert!(ctx.gradient(&a)?.is_none());
    let report = optimizer.step(&ctx)?;
    assert_eq!((report.updated(), report.versions()), (1, vec![0, 1]));
    // A gradient that the host puts there moves it no more than one that was recorded.
    ctx.accumulate(&a, dense(&[1.0, 1.0]))?;
    assert_eq!((optimizer.step(&ctx)?.updated(), first(&a)?), (1, 1.0));
    assert_eq!(optimizer.state_dict()?.state.keys().collect::<Vec<_>>(), ["b"]);
    world.unfreeze(&a)?;
    assert_eq!(optimizer.step(&forward()?)?.updated(), 2);
    assert_eq!(optimizer.state_dict()?.state["a"].scalar("step"), Some(1.0));
    let constant = world.put_constant(world.owner(1), vector(&[1.0]))?;
    let error = world.freeze(&constant).unwrap_err();
    assert!(matches!(error.root(), ErrorKind::NotALeaf { .. }), "{error}");
    Ok(())
}

/// What an option switched off is left out; the rest continues.
fn options_that_keep_less(world: &World) -> Result<()> {
    for (name, on, off, array) in [
        ("Adam", json!({"amsgrad": true}), json!({"amsgrad": false}), "max_exp_avg_sq"),
        ("SGD", json!({"momentum": 0.9}), json!({"momentum": 0.0}), "momentum_buffer"),
        ("RMSprop", json!({"centered": true}), json!({"centered": false}), "grad_avg"),
    ] {
        let w = world.put(world.owner(1), vector(&[1.0, 2.0]))?;
        let spec = rankgrad::optim::OptimizerSpec::from_json(name, &on)?;
        let mut optimizer = DistributedOptimizer::new(world, spec, [("w", &w)])?;
        let ctx = ones(world, &[&w])?;
        optimizer.step(&ctx)?;
        assert!(optimizer.state_dict()?.state["w"].array(array).is_some(), "{name}");
        optimizer.set_options(None, &off)?;
        optimizer.step(&ctx)?;
        let dict = optimizer.state_dict()?;
        assert!(dict.state.get("w").is_none_or(|s| s.array(array).is_none()), "{name}");
        optimizer.load_state_dict(&dict)?;
        optimizer.step(&ctx)?;
    }
    Ok(())
}

/// Ten steps; or four, then state and values go to other owners, and six more. The same bits.
fn continues(world: &World) -> Result<()> {
    let names = ["a", "b", "c"];
    let start = |shift: u32| -> Result<Vec<RRef<Tensor>>> {
        (0..3)
            .map(|i| world.put(world.owner(i + shift), vector(&[1.0, f64::from(i)])))
            .collect()
    };
    let make = |parameters: &[RRef<Tensor>], lr: f64| -> Result<DistributedOptimizer> {
        let mut optimizer = DistributedOptimizer::new(world, Adam::new(lr).amsgrad(true), names.iter().copied().zip(parameters).take(2))?;
        optimizer.add_group(Sgd::new(lr).momentum(0.9), [("c", &parameters[2])])?;
        Ok(optimizer)
    };
    let step = |optimizer: &DistributedOptimizer, parameters: &[RRef<Tensor>], n: u32| -> Result<()> {
        let ctx = world.context()?;
        for (i, parameter) in (0u32..).zip(parameters) {
            if !(n + i).is_multiple_of(3) {
                ctx.accumulate(parameter, dense(&[f64::from(n) * 0.1 - 0.3, 1.0 / f64::from(n + i + 1)]))?;
            }
        }
        optimizer.step(&ctx).map(drop)
    };
    let bits = |parameters: &[RRef<Tensor>]| -> Result<Vec<Vec<u64>>> {
        let bits = |p: &RRef<Tensor>| Ok(p.fetch()?.to_vec::<f64>()?.into_iter().map(f64::to_bits).collect());
        parameters.iter().map(bits).collect()
    };
    let whole = start(0)?;
    let optimizer = make(&whole, 0.1)?;
    (0..10).try_for_each(|n| step(&optimizer, &whole, n))?;

    let one = start(0)?;
    let mut optimizer = make(&one, 0.7)?;
    optimizer.set_lr(0.1)?; // a change on its way is part of the state
    (0..4).try_for_each(|n| step(&optimizer, &one, n))?;
    let dict = optimizer.state_dict()?;
    let two = start(1)?;
    for (from, to) in one.iter().zip(&two) {
        world.assign(to, from.fetch()?)?;
    }
    let mut other = make(&two, 3.0)?;
    (0..2).try_for_each(|n| step(&other, &start(2)?, n))?;
    other.set_lr(5.0)?; // loses against what is loaded
    other.load_state_dict(&dict)?;
    (4..10).try_for_each(|n| step(&other, &two, n))?;
    assert_eq!(bits(&two)?, bits(&whole)?);
    drop((one, optimizer));

    // By owner: together they are the whole.
    let all = other.state_dict()?;
    let mut joined = StateDict {
        groups: all.groups.clone(),
        ..StateDict::default()
    };
    for owner in other.owners() {
        joined.state.extend(other.state_dict_of(owner)?.state);
    }
    assert_eq!(format!("{joined:?}"), format!("{all:?}"));
    assert_eq!(
        all.state["a"].arrays().map(|(n, _)| n).collect::<Vec<_>>(),
        ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    );
    assert_eq!(all.state["c"].arrays().map(|(n, _)| n).collect::<Vec<_>>(), ["momentum_buffer"]);

    // What doesn't fit changes nothing, also when only the last owner finds it.
    let mut bad = all.clone();
    bad.groups[0].spec = bad.groups[0].spec.with_options(&json!({"lr": 77.0}))?;
    bad.state
        .insert("c".into(), ParameterState::from_parts(vec![("step".into(), 1.0)], vec![]));
    let error = other.load_state_dict(&bad).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Owners { failures, updated, .. } if failures.len() == 1 && updated.is_empty()),
        "{error}"
    );
    assert_eq!(format!("{:?}", other.state_dict()?), format!("{all:?}"));
    bad.state.remove("c");
    bad.groups.pop();
    assert!(matches!(
        other.load_state_dict(&bad).unwrap_err().kind(),
        ErrorKind::Argument { .. }
    ));

    other.zero_state()?;
    assert!(other.state_dict()?.state.is_empty());
    let again = start(1)?;
    for (from, to) in again.iter().zip(&two) {
        world.assign(to, from.fetch()?)?;
    }
    (0..10).try_for_each(|n| step(&other, &two, n))?;
    assert_eq!(bits(&two)?, bits(&whole)?);
    Ok(())
}

fn on_local_ranks() -> Outcome {
    [groups as fn(&World) -> Result<()>, frozen, continues]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 2, 4],
        ..Case::new("groups::have_options_of_their_own", || led(groups))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("groups::frozen_parameters_stay_as_they_are", || led(frozen))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("groups::what_an_option_no_longer_keeps_is_not_saved", || {
            led(options_that_keep_less)
        })
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("groups::loaded_state_continues_to_the_bit", || led(continues))
    },
    Case {
        ranks: &[0],
        ..Case::new("groups::hold_on_local_ranks_too", on_local_ranks)
    },
];

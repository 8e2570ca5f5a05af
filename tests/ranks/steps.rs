//! Steps with options: clipping, gradients that aren't finite, all or nothing, expected versions, futures, several contexts.

use std::time::{Duration, Instant};

use rankgrad::optim::{AdamW, Clip, Norm};
use rankgrad::prelude::*;

use crate::case::Case;
use crate::optimizer::{dense, vector};
use crate::settled::{led, led_locally};
use crate::slow::Slow;
use crate::{Outcome, ok};

/// `n` parameters of two elements, dealt over the ranks; rank 0 owns none, unless it is alone.
fn parameters(world: &World, n: u32) -> Result<Vec<RRef<Tensor>>> {
    let others = world.size().max(2) - 1;
    (0..n)
        .map(|i| world.put(world.owner(1 + i % others), vector(&[1.0, f64::from(i)])))
        .collect()
}

fn values(parameters: &[RRef<Tensor>]) -> Result<Vec<Vec<f64>>> {
    parameters.iter().map(|p| p.fetch()?.to_vec()).collect()
}

/// A context with these gradients.
fn with_gradients(world: &World, parameters: &[RRef<Tensor>], gradients: &[[f64; 2]]) -> Result<Context> {
    let ctx = world.context()?;
    for (parameter, gradient) in parameters.iter().zip(gradients) {
        ctx.accumulate(parameter, dense(gradient))?;
    }
    Ok(ctx)
}

fn clipping(world: &World) -> Result<()> {
    let gradients: Vec<[f64; 2]> = (0..5).map(|i| [0.1 + f64::from(i), -0.7 * f64::from(i)]).collect();
    for (kind, of_two) in [
        (Norm::One, (|a, b| a + b) as fn(f64, f64) -> f64),
        (Norm::Two, |a, b| (a * a + b * b).sqrt()),
        (Norm::Inf, f64::max),
    ] {
        let parameters = parameters(world, 5)?;
        let before = values(&parameters)?;
        let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), &parameters)?;
        let ctx = with_gradients(world, &parameters, &gradients)?;
        let norms: Vec<f64> = gradients.iter().map(|[a, b]| of_two(a.abs(), b.abs())).collect();
        let total = match kind {
            Norm::Two => norms.iter().map(|n| n * n).sum::<f64>().sqrt(),
            Norm::One => norms.iter().sum(),
            Norm::Inf => norms.iter().copied().fold(0.0, f64::max),
        };
        // Below the bound nothing is scaled.
        let loose = StepOptions::new().clip(Clip::Norm { kind, max: 1e3 });
        let report = optimizer.step_with(&ctx, &loose)?;
        assert_eq!(report.scale, 1.0);
        assert!(
            (report.norm() - total).abs() <= 1e-14 * total,
            "{kind:?}: {} for {total}",
            report.norm()
        );
        let tight = StepOptions::new().clip(Clip::Norm { kind, max: 2.0 });
        let report = optimizer.step_with(&ctx, &tight)?;
        assert_eq!(report.scale, 2.0 / (report.norm() + 1e-6));
        for (place, found) in values(&parameters)?.into_iter().enumerate() {
            let moved = |k: usize| {
                let once = before[place][k] - 0.5 * gradients[place][k];
                once - 0.5 * (gradients[place][k] * report.scale)
            };
            assert_eq!(found, [moved(0), moved(1)]);
            assert_eq!(report.parameter(place).and_then(|p| p.norm), Some(norms[place]));
        }
        let owned: f64 = kind.total(report.owners.iter().map(|o| o.norm()));
        assert!((owned - total).abs() <= 1e-14 * total);
    }
    // By value: one round, each element.
    let parameters = parameters(world, 3)?;
    let before = values(&parameters)?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), &parameters)?;
    let ctx = with_gradients(world, &parameters, &[[3.0, -0.25], [-2.0, 0.5], [f64::INFINITY, 0.0]])?;
    optimizer.step_with(&ctx, &StepOptions::new().clip_value(0.5))?;
    let moves = [[0.5, -0.25], [-0.5, 0.5], [0.5, 0.0]];
    for ((found, before), moved) in values(&parameters)?.iter().zip(before).zip(moves) {
        assert_eq!(*found, [before[0] - moved[0], before[1] - moved[1]]);
    }
    let error = optimizer.step_with(&ctx, &StepOptions::new().clip_norm(0.0)).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::OptionValue { option, .. } if option == "max"),
        "{error}"
    );
    Ok(())
}

/// What a step must leave as it was.
fn snapshot(optimizer: &DistributedOptimizer, parameters: &[RRef<Tensor>]) -> Result<String> {
    let dict = optimizer.state_dict()?;
    Ok(format!("{:?} {:?} {:?}", values(parameters)?, optimizer.versions()?, dict.state))
}

fn not_finite(world: &World) -> Result<()> {
    let parameters = parameters(world, 4)?;
    let mut optimizer = DistributedOptimizer::new(world, Adam::new(0.5), &parameters[..2])?;
    optimizer.add_group(AdamW::new(0.5), &parameters[2..])?;
    optimizer.step(&with_gradients(world, &parameters, &[[1.0, 1.0]; 4])?)?;
    let before = snapshot(&optimizer, &parameters)?;
    let bad = with_gradients(world, &parameters, &[[1.0, 1.0], [1.0, f64::NAN], [2.0, 2.0], [f64::INFINITY, 0.0]])?;
    let report = optimizer.step_with(&bad, &StepOptions::new().skip_not_finite())?;
    assert!(report.skipped());
    assert_eq!(
        (report.not_finite.as_slice(), report.updated(), report.without_gradient()),
        (&[1, 3][..], 0, 0)
    );
    assert_eq!(report.versions(), [1; 4]);
    let options = StepOptions::new().refuse_not_finite().clip_norm(1.0);
    let error = optimizer.step_with(&bad, &options).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotFinite { .. }), "{error}");
    for text in ["Adam and AdamW", "1 (`1` on rank", "3 (`3` on rank", "nothing was updated"] {
        assert!(error.to_string().contains(text), "{error}");
    }
    assert_eq!(snapshot(&optimizer, &parameters)?, before);
    // Large, but numbers; and a parameter without a gradient is no parameter that isn't finite.
    let good = with_gradients(world, &parameters, &[[1e200, -1e200], [1.0, 2.0]])?;
    let report = optimizer.step_with(&good, &StepOptions::new().skip_not_finite())?;
    assert_eq!(
        (report.skipped(), report.updated(), report.versions()),
        (false, 2, vec![2, 2, 1, 1])
    );
    // Without the option they are applied, as in torch.
    assert_eq!(optimizer.step(&bad)?.updated(), 4);
    assert!(values(&parameters)?[1][1].is_nan());
    Ok(())
}

fn nothing_if_not_all(world: &World) -> Result<()> {
    let parameters = parameters(world, 4)?;
    let mut optimizer = DistributedOptimizer::new(world, Adam::new(0.5), &parameters)?;
    optimizer.step(&with_gradients(world, &parameters, &[[1.0, -1.0]; 4])?)?;
    let before = snapshot(&optimizer, &parameters)?;
    // Adam takes no sparse gradients: the owner of the last parameter refuses.
    let ctx = with_gradients(world, &parameters[..3], &[[1.0, 1.0]; 3])?;
    let rows = rankgrad::tensor::RowSparse::new(vec![0], Tensor::ones(DType::F64, [1]).data(), vec![2])?;
    ctx.accumulate(&parameters[3], Gradient::Sparse(rows))?;
    optimizer.set_lr(0.25)?;
    let error = optimizer.step_with(&ctx, &StepOptions::new().all_or_nothing()).unwrap_err();
    match error.kind() {
        ErrorKind::Owners {
            failures,
            updated,
            in_doubt,
            ..
        } => {
            assert_eq!(failures.iter().map(|f| f.rank).collect::<Vec<_>>(), [parameters[3].owner()]);
            assert!(updated.is_empty() && in_doubt.is_empty(), "{error}");
            assert!(
                matches!(failures[0].error.kind(), ErrorKind::GradientKind { parameter: 3, .. }),
                "{error}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert!(error.to_string().contains("nothing was applied"), "{error}");
    assert_eq!(snapshot(&optimizer, &parameters)?, before);
    let ctx = with_gradients(world, &parameters, &[[1.0, 1.0]; 4])?;
    assert_eq!(optimizer.step_with(&ctx, &StepOptions::new().all_or_nothing())?.updated(), 4);
    // Gradients that are accumulated between the rounds come too late, and a backward then disturbs nothing.
    let ctx = with_gradients(world, &parameters, &[[0.0, 0.0]; 4])?;
    let before = values(&parameters)?;
    let plain = DistributedOptimizer::new(world, Sgd::new(1.0), &parameters)?;
    let step = plain.step_async(&ctx, &StepOptions::new().all_or_nothing())?;
    while !step.is_done() {
        std::thread::yield_now();
    }
    ctx.accumulate(&parameters[0], dense(&[5.0, 5.0]))?;
    step.wait()?;
    assert_eq!(values(&parameters)?, before);
    Ok(())
}

/// While an owner is busy with a long step of somebody else, a first round gives up, and nothing is applied, now or later.
fn timeouts(world: &World) -> Result<()> {
    let parameters = parameters(world, 2)?;
    let busy = world.put(parameters[1].owner(), vector(&[0.0]))?;
    let slow = DistributedOptimizer::new(world, Slow::new(0.0).seconds(1.5), [&busy])?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), &parameters)?;
    let ctx = with_gradients(world, &parameters, &[[1.0, 1.0]; 2])?;
    let slow_ctx = world.context()?;
    slow_ctx.accumulate(&busy, dense(&[1.0]))?;
    let running = slow.step_async(&slow_ctx, &StepOptions::new())?;
    std::thread::sleep(Duration::from_millis(100));
    for options in [
        StepOptions::new().all_or_nothing(),
        StepOptions::new().clip_norm(1.0).expect_versions(vec![0, 0], 0),
    ] {
        let error = optimizer.step_with(&ctx, &options.timeout(Duration::from_millis(200))).unwrap_err();
        match error.kind() {
            ErrorKind::Owners {
                failures,
                updated,
                in_doubt,
                ..
            } => {
                assert!(
                    failures
                        .iter()
                        .any(|f| f.rank == busy.owner() && matches!(f.error.kind(), ErrorKind::Timeout { .. })),
                    "{error}"
                );
                assert!(updated.is_empty() && in_doubt.is_empty(), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
    // In one round that owner may still do it, and does.
    let error = optimizer
        .step_with(&ctx, &StepOptions::new().timeout(Duration::from_millis(200)))
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Owners { in_doubt, .. } if in_doubt.contains(&busy.owner())),
        "{error}"
    );
    assert!(error.to_string().contains("perhaps updated"), "{error}");
    running.wait()?;
    // Behind all that was asked of the queue.
    assert_eq!(optimizer.state_dict()?.state.len(), 0);
    assert_eq!(optimizer.versions()?, [1, 1]);
    assert_eq!(optimizer.step_with(&ctx, &StepOptions::new().all_or_nothing())?.updated(), 2);
    Ok(())
}

fn versions(world: &World) -> Result<()> {
    let parameters = parameters(world, 3)?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), &parameters)?;
    let ctx = with_gradients(world, &parameters, &[[1.0, 1.0]; 3])?;
    assert_eq!(optimizer.versions()?, [0; 3]);
    let report = optimizer.step_with(&ctx, &StepOptions::new().expect_versions(vec![0; 3], 0))?;
    assert_eq!(report.versions(), [1; 3]);
    world.assign(&parameters[2], vector(&[9.0, 9.0]))?;
    assert_eq!(world.version(&parameters[2])?, 2);
    let before = values(&parameters)?;
    // Each owner for itself: the others have updated.
    let stale = |options: StepOptions| {
        optimizer
            .step_with(&ctx, &options.expect_versions(report.versions(), 0))
            .unwrap_err()
    };
    let all_or_nothing = stale(StepOptions::new().all_or_nothing());
    assert_eq!(values(&parameters)?, before, "all or nothing");
    let alone = stale(StepOptions::new());
    for error in [&all_or_nothing, &alone] {
        match error.kind() {
            ErrorKind::Owners { failures, .. } => assert!(
                matches!(
                    failures[0].error.kind(),
                    ErrorKind::Stale {
                        parameter: 2,
                        expected: 1,
                        found: 2,
                        staleness: 0,
                        ..
                    }
                ),
                "{error}"
            ),
            other => panic!("{other:?}"),
        }
    }
    let others = parameters.iter().filter(|p| p.owner() != parameters[2].owner()).count() as u64;
    let moved: u64 = optimizer.versions()?.iter().sum();
    assert_eq!(moved, 4 + others);
    let options = StepOptions::new().all_or_nothing().expect_versions(optimizer.versions()?, 0);
    assert_eq!(optimizer.step_with(&ctx, &options)?.updated(), 3);
    let error = optimizer.step_with(&ctx, &options).unwrap_err();
    assert!(error.to_string().contains("is at version"), "{error}");
    let loose = StepOptions::new().all_or_nothing().expect_versions(report.versions(), 2);
    assert_eq!(optimizer.step_with(&ctx, &loose)?.updated(), 3);
    let error = optimizer
        .step_with(&ctx, &StepOptions::new().expect_versions(vec![0], 0))
        .unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Argument { .. }), "{error}");
    Ok(())
}

/// Two clients that list the same owners in opposite orders, 10,000 steps of two rounds; one step in eight keeps its turns.
fn opposite_orders() -> Outcome {
    const STEPS: u32 = 5_000;
    let world = World::init()?;
    let size = world.size();
    let targets: Vec<RRef<Tensor>> = match world.rank() {
        0 => [size - 1, size - 2]
            .into_iter()
            .map(|rank| world.put(rank, Tensor::from_vec(vec![0.0f32], [1])?))
            .collect::<Result<_>>()?,
        _ => Vec::new(),
    };
    world.set_state(targets);
    world.serve()?;
    if world.rank() < 2 {
        let mut targets = world.call(0, the_targets, ())?;
        if world.rank() == 1 {
            targets.reverse();
        }
        let optimizer = DistributedOptimizer::new(&world, Sgd::new(1.0), &targets)?;
        let one = || Tensor::from_vec(vec![1.0f32], [1]).map(|t| Gradient::Dense(t.data()));
        let mut longest = Duration::ZERO;
        for step in 0..STEPS {
            let ctx = world.context()?;
            for target in &targets {
                ctx.accumulate(target, one()?)?;
            }
            let options = StepOptions::new().all_or_nothing();
            let options = match step % 8 {
                0 => options.expect_versions(vec![0, 0], u64::MAX),
                _ => options,
            };
            let start = Instant::now();
            assert_eq!(optimizer.step_with(&ctx, &options)?.updated(), 2);
            longest = longest.max(start.elapsed());
        }
        assert!(longest < Duration::from_secs(1), "a step waited {longest:?}");
    }
    world.serve()?;
    for target in world.call(0, the_targets, ())? {
        assert_eq!(target.fetch()?.to_vec::<f32>()?, [-2.0 * STEPS as f32]);
    }
    world.serve()?;
    world.set_state(Vec::<RRef<Tensor>>::new());
    ok(world.finish())
}

remote! {
    fn the_targets(scope: &Scope) -> Result<Vec<RRef<Tensor>>> {
        Ok(scope.state::<Vec<RRef<Tensor>>>()?.to_vec())
    }
}

fn futures(world: &World) -> Result<()> {
    let parameters = parameters(world, 3)?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), &parameters)?;
    let ctx = with_gradients(world, &parameters, &[[1.0, 2.0]; 3])?;
    let start = values(&parameters)?;
    let moved = |times: f64| -> Vec<Vec<f64>> { start.iter().map(|v| vec![v[0] - times, v[1] - 2.0 * times]).collect() };
    // Several under way; each is applied, in order.
    let steps: Vec<_> = (0..10)
        .map(|_| optimizer.step_async(&ctx, &StepOptions::new()))
        .collect::<Result<_>>()?;
    let versions: Vec<_> = steps.into_iter().map(|s| Ok(s.wait()?.versions()[0])).collect::<Result<_>>()?;
    assert_eq!(versions, (1..=10).collect::<Vec<_>>());
    assert_eq!(values(&parameters)?, moved(10.0));
    // One that nobody waits for is applied too; of two rounds, only if it is waited for.
    drop(optimizer.step_async(&ctx, &StepOptions::new())?);
    drop(optimizer.step_async(&ctx, &StepOptions::new().clip_norm(1e9))?);
    drop(optimizer.step_async(&ctx, &StepOptions::new().clip_norm(1e9).expect_versions(vec![11; 3], 9))?);
    assert_eq!(optimizer.state_dict()?.state.len(), 0); // behind them in the queue
    assert_eq!(values(&parameters)?, moved(11.0));
    let step = optimizer.step_async(&ctx, &StepOptions::new().clip_norm(1e9))?;
    assert_eq!(step.wait()?.scale, 1.0);
    assert_eq!(values(&parameters)?, moved(12.0));
    Ok(())
}

remote! {
    fn times(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)
    }
}

/// k backwards in one context, or one in each of k contexts, are one step on the sum.
fn accumulation(world: &World) -> Result<()> {
    let backward = |ctx: &Context, w: &RRef<Tensor>, factor: f64| {
        let y = ctx.call(w.owner(), times, (vector(&[factor, -factor]), w))?;
        ctx.backward(&[y.sum()?])
    };
    let bits = |w: &RRef<Tensor>| -> Result<Vec<u64>> { Ok(w.fetch()?.to_vec::<f64>()?.into_iter().map(f64::to_bits).collect()) };
    let factors = [0.1, 0.7, 1e-9, -3.3];
    let mut found = Vec::new();
    for variant in 0..3 {
        let parameters = parameters(world, 2)?;
        let optimizer = DistributedOptimizer::new(world, Adam::new(0.1), &parameters)?;
        for _ in 0..3 {
            match variant {
                0 => {
                    let ctx = world.context()?;
                    for factor in factors {
                        parameters.iter().try_for_each(|w| backward(&ctx, w, factor))?;
                    }
                    optimizer.step(&ctx)?;
                }
                1 => {
                    let contexts: Vec<Context> = factors.iter().map(|_| world.context()).collect::<Result<_>>()?;
                    for (ctx, factor) in contexts.iter().zip(factors) {
                        parameters.iter().try_for_each(|w| backward(ctx, w, factor))?;
                    }
                    optimizer.step_many(&contexts, &StepOptions::new())?;
                }
                _ => {
                    // Through both rounds.
                    let contexts: Vec<Context> = factors.iter().map(|_| world.context()).collect::<Result<_>>()?;
                    for (ctx, factor) in contexts.iter().zip(factors) {
                        parameters.iter().try_for_each(|w| backward(ctx, w, factor))?;
                    }
                    optimizer.step_many(&contexts, &StepOptions::new().all_or_nothing().skip_not_finite())?;
                }
            }
        }
        assert_eq!(optimizer.state_dict()?.state["0"].scalar("step"), Some(3.0));
        found.push(parameters.iter().map(bits).collect::<Result<Vec<_>>>()?);
    }
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0], found[2]);
    let parameters = parameters(world, 1)?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.1), &parameters)?;
    let ctx = world.context()?;
    for contexts in [vec![], vec![&ctx, &ctx]] {
        let error = optimizer.step_many(&contexts, &StepOptions::new()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Argument { .. }), "{error}");
    }
    Ok(())
}

/// Steps over a tree of owners do what direct ones do, with one message of the client.
fn trees(world: &World) -> Result<()> {
    let sparse = |parameter: &RRef<Tensor>, ctx: &Context| {
        let rows = rankgrad::tensor::RowSparse::new(vec![0], Tensor::ones(DType::F64, [1]).data(), vec![2])?;
        ctx.accumulate(parameter, Gradient::Sparse(rows))
    };
    let start = |fan_out: usize| -> Result<(Vec<RRef<Tensor>>, DistributedOptimizer)> {
        let parameters = parameters(world, 2 * world.size())?;
        let half = parameters.len() / 2;
        let mut optimizer = DistributedOptimizer::new(world, Adam::new(0.5), &parameters[..half])?;
        optimizer.set_fan_out(fan_out)?;
        optimizer.add_group(Sgd::new(0.25), &parameters[half..])?; // perhaps with owners that join
        Ok((parameters, optimizer))
    };
    let gradients: Vec<[f64; 2]> = (0..2 * world.size()).map(|i| [f64::from(i) - 1.5, 0.25]).collect();
    let mut found = Vec::new();
    for fan_out in [0, 1, 2, 8] {
        let (parameters, mut optimizer) = start(fan_out)?;
        let ctx = with_gradients(world, &parameters[1..], &gradients[1..])?;
        let report = optimizer.step(&ctx)?;
        assert_eq!((report.updated(), report.without_gradient()), (parameters.len() - 1, 1));
        assert_eq!(report.summary.owners, optimizer.owners().len());
        assert_eq!(report.summary.versions, Some((0, 1)));
        assert_eq!(report.owners.len(), if fan_out == 0 { report.summary.owners } else { 0 });
        let report = optimizer.step_with(&ctx, &StepOptions::new().rows())?;
        assert_eq!(report.owners.iter().map(|o| o.rank).collect::<Vec<_>>(), optimizer.owners());
        assert_eq!(report.parameter(1).map(|p| p.version), Some(2));
        optimizer.set_lr(0.125)?;
        let norm = report.norm();
        let report = optimizer.step_with(&ctx, &StepOptions::new().clip_norm(norm / 4.0))?;
        assert!((report.norm() - norm).abs() <= 1e-14 * norm);
        assert!((report.scale - 0.25).abs() < 1e-6);
        let report = optimizer.step_with(&ctx, &StepOptions::new().all_or_nothing())?;
        assert_eq!(report.updated(), parameters.len() - 1);
        let options = StepOptions::new().all_or_nothing().expect_versions(optimizer.versions()?, 0);
        assert_eq!(optimizer.step_with(&ctx, &options)?.updated(), parameters.len() - 1);
        found.push(values(&parameters)?);

        // One owner refuses: alone, or with all others.
        let before = snapshot(&optimizer, &parameters)?;
        let ctx = with_gradients(world, &parameters, &gradients[..1])?;
        sparse(&parameters[1], &ctx)?;
        if world.size() == 1 {
            continue; // its only owner, whose other group is SGD's
        }
        for (options, all) in [(StepOptions::new().all_or_nothing(), true), (StepOptions::new(), false)] {
            match optimizer.step_with(&ctx, &options).unwrap_err().kind() {
                ErrorKind::Owners {
                    owners,
                    failures,
                    updated,
                    in_doubt,
                    ..
                } => {
                    assert_eq!(failures.iter().map(|f| f.rank).collect::<Vec<_>>(), [parameters[1].owner()]);
                    assert!(matches!(failures[0].error.kind(), ErrorKind::GradientKind { parameter: 1, .. }));
                    assert_eq!(updated.len(), if all { 0 } else { owners - 1 });
                    assert!(in_doubt.is_empty());
                }
                other => panic!("{other:?}"),
            }
            assert!(!all || snapshot(&optimizer, &parameters)? == before);
        }
    }
    // The norm's last bits depend on the tree; nothing else does.
    for other in &found[1..] {
        for (one, other) in found[0].iter().flatten().zip(other.iter().flatten()) {
            assert!((one - other).abs() <= 1e-12, "{one} and {other}");
        }
    }
    // What the client sends doesn't grow with the owners.
    let (parameters, optimizer) = start(2)?;
    let ctx = with_gradients(world, &parameters, &gradients)?;
    let sent = || world.counters(world.rank()).map(|c| c.messages);
    let before = sent()?;
    optimizer.step(&ctx)?;
    assert!(sent()? - before <= 1, "{} messages", sent()? - before);
    Ok(())
}

/// While an owner is busy, a tree gives up; what comes late is not applied.
fn timeouts_in_trees(world: &World) -> Result<()> {
    let parameters = parameters(world, 3)?;
    let busy = world.put(parameters[2].owner(), vector(&[0.0]))?;
    let slow = DistributedOptimizer::new(world, Slow::new(0.0).seconds(1.2), [&busy])?;
    let mut optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), &parameters)?;
    optimizer.set_fan_out(1)?;
    let ctx = with_gradients(world, &parameters, &[[1.0, 1.0]; 3])?;
    let slow_ctx = world.context()?;
    slow_ctx.accumulate(&busy, dense(&[1.0]))?;
    let running = slow.step_async(&slow_ctx, &StepOptions::new())?;
    std::thread::sleep(Duration::from_millis(100));
    let short = Duration::from_millis(200);
    let error = optimizer
        .step_with(&ctx, &StepOptions::new().all_or_nothing().timeout(short))
        .unwrap_err();
    match error.kind() {
        ErrorKind::Owners { updated, in_doubt, .. } => assert!(updated.is_empty() && in_doubt.is_empty(), "{error}"),
        other => panic!("{other:?}"),
    }
    let error = optimizer.step_with(&ctx, &StepOptions::new().timeout(short)).unwrap_err();
    match error.kind() {
        ErrorKind::Owners { updated, in_doubt, .. } => assert_eq!((updated.len(), in_doubt), (0, &optimizer.owners()), "{error}"),
        other => panic!("{other:?}"),
    }
    running.wait()?;
    let until = Instant::now() + Duration::from_secs(5);
    while optimizer.versions()? != [1; 3] {
        assert!(Instant::now() < until, "{:?}", optimizer.versions()?);
    }
    assert_eq!(optimizer.step_with(&ctx, &StepOptions::new().all_or_nothing())?.updated(), 3);
    assert_eq!(optimizer.versions()?, [2; 3]);
    Ok(())
}

/// A kept turn ends although the window to its owner is full of steps that wait behind it.
fn full_windows(world: &World) -> Result<()> {
    let (near, far) = (world.put(1, vector(&[0.0, 0.0]))?, world.put(2, vector(&[0.0, 0.0]))?);
    let busy = world.put(2, vector(&[0.0]))?;
    let slow = DistributedOptimizer::new(world, Slow::new(0.0).seconds(0.5), [&busy])?;
    let both = DistributedOptimizer::new(world, Sgd::new(1.0), [&near, &far])?;
    let other = DistributedOptimizer::new(world, Sgd::new(1.0), [&near])?;
    let ctx = with_gradients(world, &[near.clone(), far.clone()], &[[1.0, 1.0]; 2])?;
    ctx.accumulate(&busy, dense(&[1.0]))?;
    let running = slow.step_async(&ctx, &StepOptions::new())?;
    std::thread::scope(|scope| -> Result<()> {
        let kept = scope.spawn(|| both.step_with(&ctx, &StepOptions::new().all_or_nothing().expect_versions(vec![0, 0], 1000)));
        std::thread::sleep(Duration::from_millis(100)); // it keeps its turn on rank 1, and waits for rank 2
        let steps: Vec<_> = (0..50)
            .map(|_| other.step_async(&ctx, &StepOptions::new()))
            .collect::<Result<_>>()?;
        assert_eq!(kept.join().unwrap()?.updated(), 2);
        steps.into_iter().try_for_each(|s| s.wait().map(drop))
    })?;
    running.wait()?;
    assert_eq!(values(&[near, far])?, [[-51.0, -51.0], [-1.0, -1.0]]);
    Ok(())
}

/// Steps that nobody waits for are applied in order, each with its own options, also over a tree.
fn order(world: &World) -> Result<()> {
    for fan_out in [0, 1, 2] {
        let parameters = parameters(world, world.size())?;
        let mut optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), &parameters)?;
        optimizer.set_fan_out(fan_out)?;
        let ctx = with_gradients(world, &parameters, &vec![[1.0, 1.0]; parameters.len()])?;
        let before = values(&parameters)?;
        for k in 0..200 {
            optimizer.set_lr(f64::from(k % 17))?;
            drop(optimizer.step_async(&ctx, &StepOptions::new())?);
        }
        let moved = f64::from((0..200).map(|k| k % 17).sum::<i32>());
        optimizer.set_fan_out(0)?; // behind them
        optimizer.zero_state()?;
        for (before, after) in before.iter().zip(values(&parameters)?) {
            assert_eq!(after, [before[0] - moved, before[1] - moved], "fan-out {fan_out}");
        }
    }
    Ok(())
}

/// A parameter that is frozen between the rounds of a step stays.
fn frozen_between(world: &World) -> Result<()> {
    let parameters = parameters(world, 2)?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), &parameters)?;
    let ctx = with_gradients(world, &parameters, &[[1.0, 1.0]; 2])?;
    let step = optimizer.step_async(&ctx, &StepOptions::new().all_or_nothing())?;
    while !step.is_done() {
        std::thread::yield_now();
    }
    world.freeze(&parameters[0])?;
    assert_eq!(step.wait()?.updated(), 1);
    assert_eq!(values(&parameters)?, [[1.0, 0.0], [0.0, 0.0]]);
    Ok(())
}

/// A slow step holds up no other answer of its rank.
fn slow_steps(world: &World) -> Result<()> {
    let far = world.owner(1);
    let (slow, other) = (world.put(far, vector(&[0.0]))?, world.put(far, vector(&[1.0]))?);
    let optimizer = DistributedOptimizer::new(world, Slow::new(0.0).seconds(1.0), [&slow])?;
    let ctx = world.context()?;
    ctx.accumulate(&slow, dense(&[1.0]))?;
    for _ in 0..2 {
        let step = optimizer.step_async(&ctx, &StepOptions::new())?;
        let mut answers = 0;
        while !step.is_done() {
            other.fetch()?;
            answers += 1;
        }
        // A rank that answers nothing meanwhile answers one of these.
        assert!(answers > 100, "{answers} answers in a second");
        step.wait()?;
    }
    Ok(())
}

fn on_local_ranks() -> Outcome {
    [
        clipping as fn(&World) -> Result<()>,
        not_finite,
        nothing_if_not_all,
        timeouts,
        versions,
        futures,
        accumulation,
        trees,
        timeouts_in_trees,
        order,
        frozen_between,
        slow_steps,
    ]
    .into_iter()
    .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 3],
        ..Case::new("steps::clip_by_global_norm_and_by_value", || led(clipping))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("steps::skip_or_refuse_what_is_not_finite", || led(not_finite))
    },
    Case {
        ranks: &[1, 2, 4],
        ..Case::new("steps::all_or_nothing_leaves_everything_as_it_was", || led(nothing_if_not_all))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("steps::a_timeout_in_the_first_round_applies_nothing", || led(timeouts))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("steps::refuse_gradients_that_are_too_old", || led(versions))
    },
    Case {
        ranks: &[2, 4],
        limit: 120,
        alone: true,
        ..Case::new("steps::opposite_orders_of_owners_never_wait_for_each_other", opposite_orders)
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("steps::futures_give_reports", || led(futures))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("steps::accumulate_over_backwards_and_over_contexts", || led(accumulation))
    },
    Case {
        ranks: &[1, 3, 8],
        ..Case::new("steps::go_over_trees_of_owners", || led(trees))
    },
    Case {
        ranks: &[2, 4],
        ..Case::new("steps::a_timeout_in_a_tree_applies_nothing_in_its_first_round", || {
            led(timeouts_in_trees)
        })
    },
    Case {
        ranks: &[3],
        env: &[("RANKGRAD_WINDOW_REQUESTS", "8")],
        ..Case::new("steps::a_kept_turn_ends_behind_a_full_window", || led(full_windows))
    },
    Case {
        ranks: &[1, 4],
        ..Case::new("steps::unawaited_ones_keep_their_order", || led(order))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("steps::leave_what_is_frozen_between_the_rounds", || led(frozen_between))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("steps::a_slow_step_holds_up_nobody_else", || led(slow_steps))
    },
    Case {
        ranks: &[0],
        ..Case::new("steps::hold_on_local_ranks_too", on_local_ranks)
    },
];

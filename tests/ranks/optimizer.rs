//! The distributed optimizer: what it checks, what it reports, what it leaves alone.

use std::time::{Duration, Instant};

use rankgrad::prelude::*;

use crate::case::Case;
use crate::settled::{led, led_locally, nothing_alive};
use crate::{Outcome, ok};

remote! {
    fn number(scope: &Scope, value: f64) -> Result<f64> {
        let _ = scope;
        Ok(value)
    }

    fn doubled(scope: &Scope, w: RRef<Tensor>) -> Result<Tensor> {
        w.local(scope)?.mul_scalar(2.0)
    }

    fn look_up(scope: &Scope, table: RRef<Tensor>, ids: Tensor) -> Result<Tensor> {
        table.local(scope)?.embedding(&ids)
    }

    fn nap(scope: &Scope, millis: u64) -> Result<()> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(millis));
        Ok(())
    }
}

pub fn vector(values: &[f64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), [values.len()]).unwrap()
}

pub fn dense(values: &[f64]) -> Gradient {
    Gradient::Dense(vector(values).data())
}

fn checks(world: &World) -> Result<()> {
    let far = world.owner(1);
    let (a, b) = (world.put(far, vector(&[1.0]))?, world.put(world.owner(2), vector(&[2.0]))?);
    b.fetch()?;
    let sent = || world.counters(world.rank()).map(|c| c.messages);
    let before = sent()?;
    let none: [&RRef<Tensor>; 0] = [];
    let error = DistributedOptimizer::new(world, Sgd::new(0.1), none).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NoParameters { .. }), "{error}");
    let error = DistributedOptimizer::new(world, Sgd::new(0.1), [&a, &b, &a.clone()]).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::DuplicateParameter { first: 0, second: 2, .. }),
        "{error}"
    );
    let error = DistributedOptimizer::new(world, Sgd::new(-0.1), [&a]).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::OptionValue { option, .. } if option == "lr"),
        "{error}"
    );
    let error = DistributedOptimizer::new(world, Adam::new(0.1).betas(1.0, 0.9), [&a]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::OptionValue { .. }), "{error}");
    assert_eq!(sent()?, before, "checked before anything is sent");
    Ok(())
}

fn refusals(world: &World) -> Result<()> {
    let owners = [world.owner(1), world.owner(2)];
    let good: Vec<RRef<Tensor>> = (0..world.size())
        .map(|rank| world.put(rank, vector(&[1.0])))
        .collect::<Result<_>>()?;
    let constants: Vec<RRef<Tensor>> = owners
        .iter()
        .map(|&rank| world.put_constant(rank, vector(&[1.0])))
        .collect::<Result<_>>()?;
    let computed = world.remote(owners[0], doubled, (&good[owners[0] as usize],))?;
    let scalar = world.remote(owners[1], number, (1.0,))?;
    let no_tensor: RRef<Tensor> = world.attach(scalar.id())?;
    let all: Vec<&RRef<Tensor>> = good.iter().chain(&constants).chain([&computed, &no_tensor]).collect();
    let error = DistributedOptimizer::new(world, Sgd::new(0.1), all).unwrap_err();
    let mut failing = owners.to_vec();
    failing.dedup();
    match error.kind() {
        ErrorKind::Owners {
            owners, failures, updated, ..
        } => {
            assert_eq!(*owners, world.size() as usize);
            let mut named: Vec<u32> = failures.iter().map(|f| f.rank).collect();
            named.sort();
            failing.sort();
            assert_eq!(named, failing);
            assert!(updated.is_empty(), "nothing stays");
            assert!(
                failures.iter().all(|f| matches!(f.error.root(), ErrorKind::NotALeaf { .. })),
                "{failures:?}"
            );
        }
        other => panic!("{other:?}"),
    }
    for (wrong, why) in [
        (&computed, "computed"),
        (&no_tensor, "f64"),
        (&constants[0], "requires no gradient"),
    ] {
        let error = DistributedOptimizer::new(world, Sgd::new(0.1), [wrong]).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Owners { .. }) && error.to_string().contains(why),
            "{error}"
        );
        assert!(error.to_string().contains(&format!("rank {}", wrong.owner())), "{error}");
    }
    let optimizers = || {
        (0..world.size())
            .map(|rank| world.counters(rank).map(|c| c.optimizers))
            .sum::<Result<usize>>()
    };
    let until = Instant::now() + Duration::from_secs(5);
    while optimizers()? > 0 {
        assert!(Instant::now() < until, "a failed optimizer left something behind");
    }
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.1), &good)?;
    assert_eq!(optimizers()?, world.size() as usize);
    drop(optimizer);
    while optimizers()? > 0 {
        assert!(Instant::now() < until, "a dropped optimizer left something behind");
    }
    Ok(())
}

fn failures(world: &World) -> Result<()> {
    let size = world.size();
    let tables: Vec<RRef<Tensor>> = (0..size)
        .map(|rank| world.put(rank, Tensor::zeros(DType::F64, [6, 2])))
        .collect::<Result<_>>()?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(0.1), &tables)?;
    // Adam takes no sparse gradients: every owner but the last gets one.
    let ctx = world.context()?;
    let ids = Tensor::from_vec(vec![1i64, 4], [2])?;
    let mut sum = Tensor::scalar(0.0);
    for table in &tables[..size as usize - 1] {
        sum = sum.add(&ctx.call(table.owner(), look_up, (table, &ids))?.sum()?)?;
    }
    ctx.backward(&[sum])?;
    ctx.accumulate(&tables[size as usize - 1], Gradient::Dense(Tensor::ones(DType::F64, [6, 2]).data()))?;
    let error = optimizer.step(&ctx).unwrap_err();
    match error.kind() {
        ErrorKind::Owners {
            owners, failures, updated, ..
        } => {
            assert_eq!((*owners, updated.as_slice()), (size as usize, &[size - 1][..]));
            assert_eq!(
                failures.iter().map(|f| f.rank).collect::<Vec<_>>(),
                (0..size - 1).collect::<Vec<_>>()
            );
            assert!(
                failures.iter().all(|f| matches!(f.error.root(), ErrorKind::GradientKind { .. })),
                "{failures:?}"
            );
        }
        other => panic!("{other:?}"),
    }
    for text in ["step", "sparse", "rank 0"] {
        assert!(error.to_string().contains(text), "{error}");
    }
    for table in &tables {
        let moved = table.fetch()?.to_vec::<f64>()?.iter().any(|&x| x != 0.0);
        assert_eq!(moved, table.owner() == size - 1);
    }
    Ok(())
}

fn absent_and_zero(world: &World) -> Result<()> {
    let (a, b) = (
        world.put(world.owner(1), vector(&[1.0]))?,
        world.put(world.owner(2), vector(&[1.0]))?,
    );
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5).momentum(0.5), [&a, &b])?;
    let ctx = world.context()?;
    ctx.accumulate(&a, dense(&[1.0]))?;
    ctx.accumulate(&b, dense(&[1.0]))?;
    assert_eq!(optimizer.step(&ctx)?.updated(), 2);
    assert_eq!((a.fetch()?.item::<f64>()?, b.fetch()?.item::<f64>()?), (0.5, 0.5));
    // Zero for a: its momentum goes on. Nothing for b: it stays, wherever it lives.
    let ctx = world.context()?;
    ctx.accumulate(&a, dense(&[0.0]))?;
    let report = optimizer.step(&ctx)?;
    assert_eq!((report.updated(), report.without_gradient()), (1, 1));
    assert_eq!(
        (report.parameter(0).map(|p| p.updated), report.parameter(1).map(|p| p.updated)),
        (Some(true), Some(false))
    );
    assert_eq!((a.fetch()?.item::<f64>()?, b.fetch()?.item::<f64>()?), (0.25, 0.5));
    // Zero and absent stay different through a remote call, too.
    let ctx = world.context()?;
    let y = ctx.call(a.owner(), doubled, (&a,))?.mul_scalar(0.0)?;
    ctx.backward(&[y.sum()?])?;
    assert_eq!(
        ctx.gradient(&a)?
            .map(|g| Tensor::from_data(g.to_dense().unwrap()).to_vec::<f64>().unwrap()),
        Some(vec![0.0])
    );
    assert!(ctx.gradient(&b)?.is_none());
    assert_eq!(optimizer.step(&ctx)?.updated(), 1);
    assert_eq!(a.fetch()?.item::<f64>()?, 0.125);
    // A context that met no owner.
    let report = optimizer.step(&world.context()?)?;
    assert_eq!((report.updated(), report.without_gradient()), (0, 2));
    // A second step applies the same gradients again.
    let ctx = world.context()?;
    ctx.accumulate(&b, dense(&[4.0]))?;
    optimizer.step(&ctx)?;
    optimizer.step(&ctx)?;
    assert_eq!(b.fetch()?.item::<f64>()?, 0.5 - 0.5 * 4.5 - 0.5 * 6.25);
    Ok(())
}

fn all_at_once(world: &World) -> Result<()> {
    // The owners' queues are free, and their answers are waited for together: no sum of delays.
    let params: Vec<RRef<Tensor>> = (0..world.size())
        .map(|rank| world.put(rank, vector(&[1.0; 3])))
        .collect::<Result<_>>()?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), &params)?;
    let naps: Vec<_> = (0..world.size())
        .map(|rank| world.call_async(rank, nap, (300,)))
        .collect::<Result<_>>()?;
    let ctx = world.context()?;
    for p in &params {
        ctx.accumulate(p, dense(&[1.0, 2.0, 3.0]))?;
    }
    let report = optimizer.step(&ctx)?; // a function that sleeps holds up no step
    assert!(naps.iter().any(|n| !n.is_done()), "a step waited for a sleeping function");
    rankgrad::rpc::wait_all(naps)?;
    assert_eq!(
        report.owners.iter().map(|o| o.rank).collect::<Vec<_>>(),
        (0..world.size()).collect::<Vec<_>>()
    );
    for p in &params {
        assert_eq!(p.fetch()?.to_vec::<f64>()?, [0.0, -1.0, -2.0]);
    }
    Ok(())
}

/// Eight clients, on all ranks, 500 steps each.
fn clients() -> Outcome {
    const STEPS: u32 = 500;
    let world = World::init()?;
    let size = world.size();
    let targets: Vec<RRef<Tensor>> = match world.rank() {
        0 => (0..size).map(|rank| world.put(rank, vector(&[0.0, 0.0]))).collect::<Result<_>>()?,
        _ => Vec::new(),
    };
    world.set_state(targets.clone());
    drop(targets);
    world.serve()?;
    let targets = world.call(0, the_targets, ())?;
    let mine: Vec<u32> = (0..8).filter(|client| client % size == world.rank()).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = mine
            .iter()
            .map(|&client| {
                let (world, targets) = (&world, &targets);
                scope.spawn(move || -> Result<()> {
                    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), targets)?;
                    for step in 0..STEPS {
                        let ctx = world.context()?;
                        for target in targets {
                            ctx.accumulate(target, dense(&[1.0, f64::from(client * STEPS + step)]))?;
                        }
                        assert_eq!(optimizer.step(&ctx)?.updated(), targets.len());
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap())
    })?;
    world.serve()?;
    let n = f64::from(8 * STEPS);
    for target in &targets {
        assert_eq!(target.fetch()?.to_vec::<f64>()?, [-n, -n * (n - 1.0) / 2.0]);
    }
    let c = world.counters(world.rank())?;
    assert_eq!((c.updates_in_place, c.updates_out_of_place), (u64::from(8 * STEPS), 0), "{c:?}");
    drop(targets);
    world.serve()?;
    world.set_state(Vec::<RRef<Tensor>>::new());
    world.lead(nothing_alive)?;
    ok(world.finish())
}

remote! {
    fn the_targets(scope: &Scope) -> Result<Vec<RRef<Tensor>>> {
        Ok(scope.state::<Vec<RRef<Tensor>>>()?.to_vec())
    }
}

fn in_place(world: &World) -> Result<()> {
    let me = world.rank();
    let w = world.put(me, vector(&[1.0, 2.0]))?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), [&w])?;
    let step = || -> Result<(u64, u64)> {
        let ctx = world.context()?;
        ctx.accumulate(&w, dense(&[1.0, 1.0]))?;
        optimizer.step(&ctx)?;
        let c = world.counters(me)?;
        Ok((c.updates_in_place, c.updates_out_of_place))
    };
    let first = step()?;
    let held = w.local(world)?.data();
    assert_eq!(step()?, (first.0, first.1 + 1));
    assert_eq!(Tensor::from_data(held.clone()).to_vec::<f64>()?, [0.0, 1.0]); // who holds a version keeps it
    assert_eq!(step()?, (first.0 + 1, first.1 + 1));
    drop(held);
    assert_eq!(step()?, (first.0 + 2, first.1 + 1));
    assert_eq!(w.fetch()?.to_vec::<f64>()?, [-3.0, -2.0]);
    Ok(())
}

fn on_local_ranks() -> Outcome {
    [checks as fn(&World) -> Result<()>, refusals, failures, absent_and_zero, all_at_once]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("optimizer::checks_before_it_sends", || led(checks))
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("optimizer::refuses_what_is_no_parameter_and_leaves_nothing", || led(refusals))
    },
    Case {
        ranks: &[2, 4],
        ..Case::new("optimizer::reports_every_failure", || led(failures))
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("optimizer::absent_and_zero_gradients_differ", || led(absent_and_zero))
    },
    Case {
        ranks: &[2, 4],
        ..Case::new("optimizer::asks_all_owners_at_once", || led(all_at_once))
    },
    Case {
        ranks: &[1, 2, 4],
        ..Case::new("optimizer::eight_clients_lose_no_step", clients)
    },
    Case {
        ranks: &[1],
        ..Case::new("optimizer::writes_in_place_if_nobody_else_holds_the_values", || led(in_place))
    },
    Case {
        ranks: &[0],
        ..Case::new("optimizer::hold_on_local_ranks_too", on_local_ranks)
    },
];

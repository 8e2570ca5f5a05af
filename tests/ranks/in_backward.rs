//! Optimizers in backward over ranks: once for each backward, on the owner, on the whole sum; what fails, what is left.

use rankgrad::dist::DistributedInBackward;
use rankgrad::optim::schedule::{Scheduler, Step};
use rankgrad::optim::{Adagrad, OptimizerSpec, SparseAdam};
use rankgrad::prelude::*;

use crate::case::Case;
use crate::settled::{led, led_locally, nothing_alive};
use crate::{Outcome, ok};

remote! {
    fn times(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)
    }

    /// A layer on the rank of its bias; a weight that lives elsewhere is copied.
    fn linear(scope: &Scope, x: Tensor, w: RRef<Tensor>, b: RRef<Tensor>) -> Result<Tensor> {
        let w = if w.is_local() { w.local(scope)? } else { scope.fetch(&w)? };
        (x.matmul(&w)? + b.local(scope)?)?.tanh()
    }

    fn look_up(scope: &Scope, table: RRef<Tensor>, ids: Tensor) -> Result<Tensor> {
        table.local(scope)?.embedding(&ids)
    }

    /// Uses a weight of another rank there, and a fetched copy of it here.
    fn through(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        let there = scope.call(w.owner(), times, (&x, &w))?;
        there.add(&x.mul(&scope.fetch(&w)?)?)
    }

    /// Three leaves of this rank; gradients come to the last operation first.
    fn three(scope: &Scope, early: RRef<Tensor>, table: RRef<Tensor>, late: RRef<Tensor>, ids: Tensor) -> Result<Tensor> {
        let late = late.local(scope)?.sum()?;
        let middle = table.local(scope)?.embedding(&ids)?.sum()?;
        early.local(scope)?.sum()?.add(&middle)?.add(&late)
    }

    fn doubled(scope: &Scope, w: RRef<Tensor>) -> Result<Tensor> {
        w.local(scope)?.mul_scalar(2.0)
    }

    fn freeze(scope: &Scope, w: RRef<Tensor>) -> Result<()> {
        w.local(scope)?.freeze()
    }

    fn version(scope: &Scope, w: RRef<Tensor>) -> Result<u64> {
        Ok(w.local(scope)?.leaf().map_or(0, |leaf| leaf.version()))
    }

    fn has_grad(scope: &Scope, w: RRef<Tensor>) -> Result<bool> {
        Ok(w.local(scope)?.grad().is_some())
    }

    fn nothing(scope: &Scope) -> Result<()> {
        let _ = scope;
        Ok(())
    }

    /// A hook that calls another rank, waits for it, and takes every second gradient.
    fn hook(scope: &Scope, w: RRef<Tensor>, other: u32) -> Result<()> {
        let caller = scope.timeout(std::time::Duration::from_secs(20));
        let takes = std::sync::atomic::AtomicBool::new(true);
        let _hook = w.local(scope)?.register_post_accumulate_hook(move |_, gradient| {
            caller.call(other, nothing, ())?;
            if takes.fetch_xor(true, std::sync::atomic::Ordering::SeqCst) {
                drop(gradient.take());
            }
            Ok(())
        })?;
        Ok(())
    }

    fn all_weights(scope: &Scope) -> Result<Vec<RRef<Tensor>>> {
        Ok(scope.state::<Vec<RRef<Tensor>>>()?.to_vec())
    }
}

fn vector(values: &[f64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), [values.len()]).unwrap()
}

fn numbers(shape: &[usize], seed: usize) -> Tensor {
    let n = shape.iter().product::<usize>();
    let values = (0..n).map(|i| ((i * 37 + seed * 101) % 97) as f64 / 97.0 - 0.5).collect();
    Tensor::from_vec(values, shape).unwrap()
}

fn ids(rows: &[i64]) -> Tensor {
    Tensor::from_vec(rows.to_vec(), [rows.len()]).unwrap()
}

fn values(w: &RRef<Tensor>) -> Result<Vec<f64>> {
    w.fetch()?.to_vec()
}

fn dense(gradient: Option<Gradient>) -> Vec<f64> {
    let data = gradient.expect("a gradient").to_dense().unwrap();
    Tensor::from_data(data).to_vec().unwrap()
}

fn attach<'a>(spec: impl Into<OptimizerSpec>, parameters: impl IntoIterator<Item = &'a RRef<Tensor>>) -> Result<DistributedInBackward> {
    optimizer_in_backward(spec, parameters, InBackward::default())
}

/// Detaches what nobody holds a value for.
fn detach_all<'a>(parameters: impl IntoIterator<Item = &'a RRef<Tensor>>) -> Result<()> {
    optimizers_in_backward(parameters)?.detach()
}

/// torch's test with layers on several ranks: rates of their own, shared weights, several optimizers.
fn as_torch_tests_it(world: &World) -> Result<()> {
    let put = |shape: &[usize], layer: u32| world.put(world.owner(layer + 1), numbers(shape, layer as usize));
    let network = || -> Result<[RRef<Tensor>; 4]> { Ok([put(&[10, 10], 0)?, put(&[10], 0)?, put(&[10, 10], 1)?, put(&[10], 1)?]) };
    for (shared, rates) in [
        (false, [[1.0, 0.5].as_slice(), &[]]),
        (true, [&[0.5, 0.25], &[]]),
        (false, [&[0.03, 0.03], &[0.01, 0.01]]),
    ] {
        let (ours, plain) = (network()?, network()?);
        let tied = |p: &[RRef<Tensor>; 4]| [p[0].clone(), p[1].clone(), p[if shared { 0 } else { 2 }].clone(), p[3].clone()];
        let (ours, plain) = (tied(&ours), tied(&plain));
        let mut outside = Vec::new();
        for rate in rates.into_iter().filter(|r| !r.is_empty()) {
            attach(Sgd::new(rate[0]), [&ours[0], &ours[2]])?; // a shared one twice
            attach(Sgd::new(rate[1]), [&ours[1], &ours[3]])?;
            if shared {
                outside.push(DistributedOptimizer::new(world, Sgd::new(rate[0]), [&plain[0]])?);
                outside.push(DistributedOptimizer::new(world, Sgd::new(rate[0]), [&plain[0]])?);
            } else {
                outside.push(DistributedOptimizer::new(world, Sgd::new(rate[0]), [&plain[0], &plain[2]])?);
            }
            outside.push(DistributedOptimizer::new(world, Sgd::new(rate[1]), [&plain[1], &plain[3]])?);
        }
        for batch in 0..6 {
            for p in [&ours, &plain] {
                let ctx = world.context()?;
                let h = ctx.call(p[1].owner(), linear, (numbers(&[4, 10], batch), &p[0], &p[1]))?;
                let y = ctx.call(p[3].owner(), linear, (h, &p[2], &p[3]))?;
                ctx.backward(&[y.sum()?])?;
                for w in p {
                    assert_eq!(ctx.gradient(w)?.is_none(), std::ptr::eq(p, &ours));
                    assert!(!world.call(w.owner(), has_grad, (w,))?);
                }
                if std::ptr::eq(p, &plain) {
                    outside.iter().try_for_each(|o| o.step(&ctx).map(drop))?;
                }
            }
            for (w, v) in ours.iter().zip(&plain) {
                assert_eq!(values(w)?, values(v)?);
            }
        }
        assert_eq!(
            world.call(ours[1].owner(), version, (&ours[1],))?,
            6 * rates.iter().filter(|r| !r.is_empty()).count() as u64
        );
        detach_all(&ours)?;
    }
    Ok(())
}

/// Twenty iterations, dense and sparse: to the bit what backward followed by a step gives.
fn parity(world: &World) -> Result<()> {
    let rules: [(OptimizerSpec, bool); 6] = [
        (Sgd::new(0.1).momentum(0.9).into(), false),
        (Adam::new(0.05).into(), false),
        (Adagrad::new(0.1).into(), false),
        (Sgd::new(0.1).into(), true),
        (SparseAdam::new(0.05).into(), true),
        (Adagrad::new(0.1).into(), true),
    ];
    for (spec, sparse) in rules {
        let tables = || -> Result<Vec<RRef<Tensor>>> {
            (0..world.size())
                .map(|rank| world.put(rank, numbers(&[7, 3], rank as usize)))
                .collect()
        };
        let (ours, plain) = (tables()?, tables()?);
        let attached = attach(spec.clone(), &ours)?;
        let optimizer = DistributedOptimizer::new(world, spec, &plain)?;
        for batch in 0..20 {
            for p in [&ours, &plain] {
                let ctx = world.context()?;
                let mut sum = Tensor::scalar(0.0);
                for w in p {
                    let used = match sparse {
                        true => ctx.call(w.owner(), look_up, (w, ids(&[batch % 7, batch * 3 % 7, batch % 7])))?,
                        false => ctx.call(w.owner(), times, (numbers(&[7, 3], batch as usize), w))?,
                    };
                    sum = sum.add(&used.mul(&used)?.sum()?)?;
                }
                ctx.backward(&[sum])?;
                if std::ptr::eq(p, &plain) {
                    optimizer.step(&ctx)?;
                }
            }
            for (w, v) in ours.iter().zip(&plain) {
                let bits = |w| Ok::<_, Error>(values(w)?.into_iter().map(f64::to_bits).collect::<Vec<_>>());
                assert_eq!(bits(w)?, bits(v)?);
            }
        }
        attached.detach()?;
    }
    Ok(())
}

/// A leaf that all ranks use, directly, through others and by copies, steps once, on the sum.
fn whole_sum(world: &World) -> Result<()> {
    for mode in [Mode::Exact, Mode::Fast] {
        let w = world.put(world.owner(1), vector(&[0.0, 0.0]))?;
        let untouched = world.put(world.owner(1), vector(&[5.0]))?;
        let attached = attach(Sgd::new(1.0), [&w, &untouched])?;
        let ctx = world.context()?;
        let mut sum = Tensor::scalar(0.0);
        let mut expected = [0.0; 2];
        for rank in 0..world.size() {
            let x = [1.0 + f64::from(rank), 2.0];
            sum = sum.add(&ctx.call(rank, through, (vector(&x), &w))?.sum()?)?;
            expected = [expected[0] - 2.0 * x[0], expected[1] - 2.0 * x[1]];
        }
        // And here.
        sum = sum.add(&ctx.fetch(&w)?.sum()?)?;
        expected = expected.map(|e| e - 1.0);
        let options = BackwardOptions {
            mode,
            ..BackwardOptions::default()
        };
        ctx.backward_with(&[sum], options)?;
        assert_eq!(values(&w)?, expected);
        assert_eq!(world.call(w.owner(), version, (&w,))?, 1);
        assert_eq!(world.call(w.owner(), version, (&untouched,))?, 0);
        assert!(ctx.gradient(&w)?.is_none() && !world.call(w.owner(), has_grad, (&w,))?);
        attached.detach()?;
    }
    Ok(())
}

/// What a context held already is part of the sum; a step on it finds nothing; the values of a retained graph are those that it saw.
fn nothing_is_left(world: &World) -> Result<()> {
    let w = world.put(world.owner(1), vector(&[3.0]))?;
    let attached = attach(Sgd::new(1.0), [&w])?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(100.0), [&w])?;
    let ctx = world.context()?;
    ctx.accumulate(&w, Gradient::Dense(vector(&[0.5]).data()))?;
    let square = {
        let y = ctx.call(w.owner(), times, (vector(&[1.0]), &w))?;
        y.mul(&ctx.call(w.owner(), times, (vector(&[1.0]), &w))?)?.sum()?
    };
    let retain = BackwardOptions {
        retain_graph: true,
        ..BackwardOptions::default()
    };
    ctx.backward_with(&[&square], retain)?;
    assert_eq!(values(&w)?, [3.0 - 6.5]);
    assert_eq!(optimizer.step(&ctx)?.updated(), 0);
    ctx.backward(&[&square])?;
    assert_eq!(values(&w)?, [3.0 - 6.5 - 6.0]);
    assert_eq!((optimizer.step(&ctx)?.updated(), ctx.gradient(&w)?.is_none()), (0, true));
    attached.detach()?;
    // Detached, it is as it was before.
    let ctx = world.context()?;
    ctx.backward(&[ctx.call(w.owner(), times, (vector(&[2.0]), &w))?.sum()?])?;
    assert_eq!((values(&w)?, dense(ctx.gradient(&w)?)), (vec![-9.5], vec![2.0]));
    Ok(())
}

/// Only attached; several backwards for one update; clipped; kept for inspection; without a leak of updates elsewhere.
fn options(world: &World) -> Result<()> {
    let w = world.put(world.owner(1), vector(&[0.0, 0.0]))?;
    let turn = |x: [f64; 2]| {
        let ctx = world.context()?;
        ctx.backward(&[ctx.call(w.owner(), times, (vector(&x), &w))?.sum()?])?;
        ctx.gradient(&w)
    };
    let quiet = InBackward {
        register_hook: false,
        ..InBackward::default()
    };
    optimizer_in_backward(Sgd::new(1.0), [&w], quiet)?;
    assert!(turn([1.0, 2.0])?.is_some());
    assert_eq!(values(&w)?, [0.0, 0.0]);
    detach_all([&w])?;
    let third = InBackward {
        every: 3,
        clip_value: Some(4.0),
        keep_gradient: true,
        ..InBackward::default()
    };
    let attached = optimizer_in_backward(Sgd::new(1.0), [&w], third)?;
    for _ in 0..2 {
        assert!(turn([1.0, 2.0])?.is_none());
        assert_eq!((values(&w)?, attached.gradient(0)?.is_none()), (vec![0.0, 0.0], true));
    }
    assert!(turn([1.0, 2.0])?.is_none());
    assert_eq!((values(&w)?, dense(attached.gradient(0)?)), (vec![-3.0, -4.0], vec![3.0, 4.0]));
    attached.detach()?;
    let before = world.counters(world.rank())?.messages;
    for refused in [
        InBackward {
            clip_norm: Some(1.0),
            ..InBackward::default()
        },
        InBackward {
            all_or_nothing: true,
            ..InBackward::default()
        },
    ] {
        let error = optimizer_in_backward(Sgd::new(1.0), [&w], refused).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Argument { op, .. } if op == "SGD in backward"),
            "{error}"
        );
    }
    assert_eq!(world.counters(world.rank())?.messages, before, "checked before anything is sent");
    Ok(())
}

/// One owner refuses: nothing is attached anywhere, and the error names rank and parameter.
fn refusals(world: &World) -> Result<()> {
    let good: Vec<RRef<Tensor>> = (0..world.size())
        .map(|rank| world.put(rank, vector(&[1.0])))
        .collect::<Result<_>>()?;
    let far = world.owner(1);
    let frozen = world.put(far, vector(&[1.0]))?;
    world.call(far, freeze, (&frozen,))?;
    let computed = world.remote(far, doubled, (&good[far as usize],))?;
    let constant = world.put_constant(far, vector(&[1.0]))?;
    for (bad, why) in [(&frozen, "frozen"), (&computed, "computed"), (&constant, "requires no gradient")] {
        let list: Vec<&RRef<Tensor>> = good.iter().chain([bad]).collect();
        let place = format!("parameter {}", good.len());
        let error = attach(Sgd::new(0.1), list).unwrap_err();
        match error.kind() {
            ErrorKind::Owners { failures, .. } => {
                assert_eq!(failures.iter().map(|f| f.rank).collect::<Vec<_>>(), [far]);
                assert!(matches!(failures[0].error.kind(), ErrorKind::NotALeaf { .. }), "{error}");
            }
            other => panic!("{other:?}"),
        }
        for text in ["SGD in backward", &place, why] {
            assert!(error.to_string().contains(text), "{error}");
        }
        assert!(optimizers_in_backward(&good)?.is_empty());
    }
    Ok(())
}

/// Options, schedules and state through references; what is there, in order.
fn as_any_optimizer(world: &World) -> Result<()> {
    let size = world.size() as usize;
    let weights: Vec<RRef<Tensor>> = (0..world.size())
        .map(|rank| world.put(rank, vector(&[1.0])))
        .collect::<Result<_>>()?;
    let biases: Vec<RRef<Tensor>> = (0..world.size())
        .map(|rank| world.put(rank, vector(&[1.0])))
        .collect::<Result<_>>()?;
    let mut fast = attach(Sgd::new(0.5).momentum(0.5), &weights)?;
    attach(Sgd::new(0.25), &biases)?;
    let turn = || {
        let ctx = world.context()?;
        let mut sum = Tensor::scalar(0.0);
        for w in weights.iter().chain(&biases) {
            sum = sum.add(&ctx.call(w.owner(), times, (vector(&[1.0]), w))?.sum()?)?;
        }
        ctx.backward(&[sum])
    };
    let all = |p: &[RRef<Tensor>]| p.iter().map(|w| Ok(values(w)?[0])).collect::<Result<Vec<f64>>>();
    turn()?;
    assert_eq!((all(&weights)?, all(&biases)?), (vec![0.5; size], vec![0.75; size]));
    assert!(matches!(
        fast.set_option("lr", -1.0).unwrap_err().kind(),
        ErrorKind::OptionValue { .. }
    ));
    fast.set_lr(0.25)?;
    let mut model = optimizers_in_backward(biases.iter().rev().chain(&weights).chain(&biases))?;
    assert_eq!(model.len(), 2 * size);
    let ids = |p: &RRef<Tensor>| p.id();
    let order: Vec<_> = biases.iter().rev().chain(&weights).map(ids).collect();
    assert_eq!(model.parameters().map(ids).collect::<Vec<_>>(), order);
    assert_eq!(model.spec(size), Some(&Sgd::new(0.25).momentum(0.5).into()));
    // Biases are the first group, weights the second; each from its own rate.
    let mut scheduler = Scheduler::new(Step::new(1).gamma(0.5), &mut model)?;
    let rates = scheduler.step(&mut model)?;
    assert_eq!(rates.iter().map(|r| r.lr).collect::<Vec<_>>(), [0.125, 0.125]);
    turn()?;
    assert_eq!((all(&weights)?, all(&biases)?), (vec![0.5 - 0.125 * 1.5; size], vec![0.625; size]));
    // A checkpoint: state comes out and goes in.
    let state = model.state(size)?.expect("it was updated");
    let momentum = |state: &rankgrad::optim::ParameterState| {
        let data = state.array("momentum_buffer").expect("it has momentum").clone();
        Tensor::from_data(data).to_vec::<f64>().unwrap()
    };
    assert_eq!(momentum(&state), [1.5]);
    turn()?;
    for place in size..2 * size {
        assert_eq!(momentum(&model.state(place)?.expect("it was updated")), [1.75]);
        model.load_state(place, state.clone())?;
    }
    turn()?;
    assert_eq!(momentum(&model.state(size)?.expect("it was updated")), [1.75]);
    let wrong = rankgrad::optim::ParameterState::from_parts(vec![("steps".into(), 1.0)], vec![]);
    assert!(matches!(model.load_state(0, wrong).unwrap_err().root(), ErrorKind::Argument { .. }));
    assert!(matches!(model.state(2 * size).unwrap_err().kind(), ErrorKind::Argument { .. }));
    // Detached by one, gone for the other.
    model.detach()?;
    assert!(matches!(fast.state(0).unwrap_err().root(), ErrorKind::NoSuchValue { .. }));
    fast.detach()?;
    let before = all(&weights)?;
    turn()?;
    assert_eq!(all(&weights)?, before);
    Ok(())
}

/// A failure names rank, parameter and optimizer, and what was updated; what comes later is left alone.
fn failures(world: &World) -> Result<()> {
    let far = world.owner(1);
    let put = |x: f64| world.put(far, Tensor::full(DType::F64, [3, 1], x));
    let (early, table, late) = (put(1.0)?, put(2.0)?, put(3.0)?);
    let attached = attach(Adam::new(0.1), [&early, &table, &late])?;
    let ctx = world.context()?;
    let other = world.put(0, vector(&[1.0]))?;
    let root = ctx.call(far, three, (&early, &table, &late, ids(&[1])))?;
    let root = root.add(&other.local(world)?.sum()?)?;
    ctx.accumulate(&table, Gradient::Dense(Tensor::full(DType::F64, [3, 1], 0.0).data()))?;
    // With what the context holds the sum is dense, and Adam takes it.
    ctx.backward(&[root])?;
    assert_eq!(dense(ctx.gradient(&other)?), [1.0]);
    let (before, kept) = (values(&table)?, values(&late)?);
    let root = ctx.call(far, three, (&early, &table, &late, ids(&[1])))?;
    let moved = values(&early)?;
    let error = ctx.backward(&[root]).unwrap_err();
    let ErrorKind::Backward { rank, source, .. } = error.kind() else {
        panic!("{error}")
    };
    assert_eq!(*rank, far);
    match source.kind() {
        ErrorKind::InBackward {
            optimizer,
            parameter,
            updated,
            ..
        } => {
            assert_eq!((optimizer.as_str(), parameter.as_str(), updated.len()), ("Adam", "parameter 1", 1));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(error.root(), ErrorKind::GradientKind { parameter: 1, .. }), "{error}");
    for text in [
        format!("rank {far}"),
        "Adam in backward".into(),
        "parameter 1".into(),
        "sparse".into(),
        "updated".into(),
    ] {
        assert!(error.to_string().contains(&text), "{error}");
    }
    assert_ne!(values(&early)?, moved);
    assert_eq!((values(&table)?, values(&late)?), (before, kept));
    // The context goes on, and what hooks didn't take is as it was.
    assert_eq!(dense(ctx.gradient(&other)?), [1.0]);
    let again = ctx.call(far, times, (Tensor::full(DType::F64, [3, 1], 1.0), &late))?.sum()?;
    ctx.backward(&[again])?;
    attached.detach()
}

/// Hooks may wait for other ranks; what they leave is the context's, what they take isn't.
fn hooks(world: &World) -> Result<()> {
    let w = world.put(world.owner(1), vector(&[1.0]))?;
    world.call(w.owner(), hook, (&w, world.owner(2)))?;
    let ctx = world.context()?;
    for expected in [None, Some(2.0), None, Some(2.0)] {
        ctx.backward(&[ctx.call(w.owner(), times, (vector(&[2.0]), &w))?.sum()?])?;
        let found = ctx.gradient(&w)?.map(|g| dense(Some(g))[0]);
        assert_eq!(found, expected);
    }
    Ok(())
}

/// The plain loop writes in place, and says so.
fn in_place(world: &World) -> Result<()> {
    let far = world.owner(1);
    let (w, b) = (world.put(far, numbers(&[6, 6], 1))?, world.put(far, numbers(&[6], 2))?);
    let attached = attach(Adam::new(0.01), [&w, &b])?;
    let before = world.counters(far)?;
    for batch in 0..10 {
        let ctx = world.context()?;
        let h = ctx.call(far, linear, (numbers(&[3, 6], batch), &w, &b))?;
        let y = ctx.call(far, linear, (h, &w, &b))?;
        ctx.backward(&[y.sum()?])?;
    }
    let after = world.counters(far)?;
    assert_eq!(after.updates_in_place - before.updates_in_place, 20);
    assert_eq!(after.updates_out_of_place, before.updates_out_of_place);
    attached.detach()
}

/// All ranks, two threads each, go back to the same leaves at once: every update is made, on every leaf.
fn clients() -> Outcome {
    const TURNS: u32 = 60;
    let world = World::init()?;
    let size = world.size();
    let weights: Vec<RRef<Tensor>> = match world.rank() {
        0 => (0..size).map(|rank| world.put(rank, vector(&[0.0, 0.0]))).collect::<Result<_>>()?,
        _ => Vec::new(),
    };
    let attached = match world.rank() {
        0 => Some(attach(Sgd::new(1.0), &weights)?),
        _ => None,
    };
    world.set_state(weights.clone());
    drop(weights);
    world.serve()?;
    let weights = world.call(0, all_weights, ())?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|thread| {
                let (world, weights) = (&world, &weights);
                let client = f64::from(2 * world.rank() + thread);
                scope.spawn(move || -> Result<()> {
                    for _ in 0..TURNS {
                        let ctx = world.context()?;
                        let mut sum = Tensor::scalar(0.0);
                        for w in weights {
                            sum = sum.add(&ctx.call(w.owner(), times, (vector(&[1.0, client]), w))?.sum()?)?;
                        }
                        ctx.backward(&[sum])?;
                        assert!(ctx.gradient(&weights[0])?.is_none());
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap())
    })?;
    world.serve()?;
    let n = f64::from(2 * size);
    for w in &weights {
        assert_eq!(values(w)?, [-n * f64::from(TURNS), -n * (n - 1.0) / 2.0 * f64::from(TURNS)]);
        assert_eq!(world.call(w.owner(), version, (w,))?, u64::from(2 * size * TURNS));
    }
    world.serve()?;
    if let Some(attached) = attached {
        attached.detach()?;
    }
    drop(weights);
    world.serve()?;
    world.set_state(Vec::<RRef<Tensor>>::new());
    world.lead(nothing_alive)?;
    ok(world.finish())
}

fn on_local_ranks() -> Outcome {
    [
        as_torch_tests_it as fn(&World) -> Result<()>,
        whole_sum,
        nothing_is_left,
        options,
        refusals,
        as_any_optimizer,
        failures,
        hooks,
    ]
    .into_iter()
    .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("in_backward::as_torch_tests_it", || led(as_torch_tests_it)),
    Case::new("in_backward::agrees_with_backward_then_step_to_the_bit", || led(parity)),
    Case::new("in_backward::steps_once_on_the_whole_sum", || led(whole_sum)),
    Case::new("in_backward::leaves_no_gradient", || led(nothing_is_left)),
    Case::new("in_backward::accumulates_clips_and_keeps", || led(options)),
    Case::new("in_backward::refused_by_one_owner_it_is_attached_nowhere", || led(refusals)),
    Case::new("in_backward::has_options_schedules_and_state", || led(as_any_optimizer)),
    Case::new("in_backward::says_what_failed_and_what_was_updated", || led(failures)),
    Case::new("in_backward::hooks_may_wait_for_other_ranks", || led(hooks)),
    Case {
        ranks: &[1, 2],
        ..Case::new("in_backward::writes_in_place", || led(in_place))
    },
    Case::new("in_backward::backwards_that_overlap_lose_nothing", clients),
    Case {
        ranks: &[0],
        ..Case::new("in_backward::holds_on_local_ranks_too", on_local_ranks)
    },
];

//! Contexts: threads, hooks, functions of one's own, releases, versions, the same bits on any number of ranks.

use std::borrow::Cow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ndarray::{ArrayD, ArrayViewD};
use rankgrad::autograd::function::apply;
use rankgrad::config::Settings;
use rankgrad::prelude::*;
use rankgrad::rpc::wait_all;
use rankgrad::{BackwardOptions, Mode, local};

use crate::case::Case;
use crate::settled::{led, led_locally, nothing_alive, on_gpus};
use crate::{Outcome, ok};

/// Sums of gradients that hooks of this rank have seen.
static SEEN: Mutex<Vec<f64>> = Mutex::new(Vec::new());
static HOOKED: AtomicU64 = AtomicU64::new(0);

/// The cube of each element, with an adjoint of its own.
struct Cube;

impl Function<f64> for Cube {
    type Saved = ArrayD<f64>;

    fn name(&self) -> Cow<'static, str> {
        "cube".into()
    }

    fn forward(&self, inputs: &[ArrayViewD<'_, f64>]) -> Result<(Vec<ArrayD<f64>>, ArrayD<f64>)> {
        let x = inputs[0].to_owned();
        Ok((vec![&x * &x * &x], x))
    }

    fn adjoint(&self, x: &ArrayD<f64>, gradients: &[ArrayViewD<'_, f64>], _: &[bool]) -> Result<Vec<Option<ArrayD<f64>>>> {
        Ok(vec![Some(x * x * 3.0 * &gradients[0])])
    }
}

remote! {
    fn times(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)
    }

    fn nothing(scope: &Scope) -> Result<()> {
        let _ = scope;
        Ok(())
    }

    fn fail(scope: &Scope, x: Tensor) -> Result<Tensor> {
        let _ = (scope, x);
        Err(Error::user("no result"))
    }

    /// Back and forth between two ranks, multiplying by the weight of each.
    fn bounce(scope: &Scope, x: Tensor, here: RRef<Tensor>, there: RRef<Tensor>, turns: u32) -> Result<Tensor> {
        let y = x.mul(&here.local(scope)?)?;
        match turns {
            0 => Ok(y),
            _ => scope.call(there.owner(), bounce, (y, there, here, turns - 1)),
        }
    }

    fn via(scope: &Scope, to: u32) -> Result<()> {
        scope.call(to, nothing, ())
    }

    fn cube(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        let product = x.mul(&w.local(scope)?)?;
        Ok(apply(Cube, &[&product])?.remove(0))
    }

    /// A hook that doubles the gradient of a value computed here.
    fn hooked(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        let y = x.mul(&w.local(scope)?)?;
        let _hook = y.register_hook(|gradient| {
            HOOKED.fetch_add(1, Ordering::SeqCst);
            let mut twice = gradient.clone();
            twice.scale(2.0).ok()?;
            Some(twice)
        })?;
        y.mul_scalar(10.0)
    }

    fn hooks_run(scope: &Scope) -> Result<u64> {
        let _ = scope;
        Ok(HOOKED.load(Ordering::SeqCst))
    }

    /// One path is recorded, the other isn't.
    fn half_recorded(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        let w = w.local(scope)?;
        let quiet = no_grad(|| x.mul(&w))?;
        x.mul(&w)?.add(&quiet)
    }

    fn freeze(scope: &Scope, w: RRef<Tensor>, frozen: bool) -> Result<()> {
        let w = w.local(scope)?;
        if frozen { w.freeze() } else { w.unfreeze() }
    }

    fn look_up(scope: &Scope, table: RRef<Tensor>, ids: Tensor) -> Result<Tensor> {
        table.local(scope)?.embedding(&ids)
    }

    fn slow_adjoint(scope: &Scope, x: Tensor, w: RRef<Tensor>, millis: u64) -> Result<Tensor> {
        let y = x.mul(&w.local(scope)?)?;
        let _hook = y.register_hook(move |_| {
            std::thread::sleep(Duration::from_millis(millis));
            None
        })?;
        y.sum()
    }

    fn resident_bytes(scope: &Scope) -> Result<u64> {
        let _ = scope;
        let statm = std::fs::read_to_string("/proc/self/statm").map_err(Error::user)?;
        let pages = statm.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        Ok(pages * 4096)
    }

    /// Part of the program whose bits are compared: a weight that is used here, there, and by whom it is passed on to.
    fn fan(scope: &Scope, x: Tensor, shared: RRef<Tensor>, others: Vec<RRef<Tensor>>) -> Result<Tensor> {
        let mut sum = scope.call(shared.owner(), fan_leaf, (&x, &shared))?;
        for (i, other) in others.iter().enumerate() {
            let y = scope.call(other.owner(), fan_leaf, (&x.mul_scalar(0.7 + i as f64)?, other))?;
            let w = scope.fetch(&shared)?;
            sum = sum.add(&y.matmul(&w)?.tanh()?)?;
            sum = sum.add(&scope.call(shared.owner(), fan_leaf, (&sum, &shared))?)?;
        }
        match others.split_first() {
            Some((next, rest)) => sum.add(&scope.call(next.owner(), fan, (&sum, &shared, rest.to_vec()))?),
            None => Ok(sum),
        }
    }

    fn fan_leaf(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        let w = w.local(scope)?;
        x.matmul(&w)?.tanh()?.add(&x.matmul(&w)?.sin()?)
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

fn dense(gradient: Option<Gradient>) -> Vec<f64> {
    let data = gradient.expect("a gradient").to_dense().unwrap();
    Tensor::from_data(data).cast(DType::F64).unwrap().to_vec().unwrap()
}

fn threads(world: &World) -> Result<()> {
    let far = world.owner(1);
    let w = world.put(far, vector(&[1.0, 2.0]))?;
    // Many alive at once; each gets its own gradients, in any order.
    let contexts: Vec<Context> = (0..40).map(|_| world.context()).collect::<Result<_>>()?;
    let outputs: Vec<Tensor> = contexts
        .iter()
        .enumerate()
        .map(|(i, c)| c.call(far, times, (vector(&[i as f64, 1.0]), &w))?.sum())
        .collect::<Result<_>>()?;
    for (ctx, y) in contexts.iter().zip(&outputs).rev() {
        ctx.backward(&[y])?;
    }
    for (i, ctx) in contexts.iter().enumerate() {
        assert_eq!(dense(ctx.gradient(&w)?), [i as f64, 1.0]);
    }
    drop(contexts);
    // Threads with a context each, and threads that share one.
    let shared = world.context()?;
    let roots: Vec<Tensor> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|t| {
                let (w, shared) = (&w, &shared);
                scope.spawn(move || -> Result<Tensor> {
                    for i in 0..25 {
                        let own = world.context()?;
                        let x = vector(&[f64::from(t), f64::from(i)]);
                        let y = own.call(far, times, (&x, w))?;
                        own.backward(&[y.sum()?])?;
                        assert_eq!(dense(own.gradient(w)?), x.to_vec::<f64>()?);
                    }
                    let calls = (0..5).map(|_| shared.call_async(far, times, (vector(&[1.0, f64::from(t)]), w)));
                    let mut sum = Tensor::scalar(0.0);
                    for y in wait_all(calls.collect::<Result<Vec<_>>>()?)? {
                        sum = sum.add(&y.sum()?)?;
                    }
                    Ok(sum)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect::<Result<_>>()
    })?;
    shared.backward(&roots)?; // several roots are summed
    assert_eq!(dense(shared.gradient(&w)?), [20.0, 30.0]);
    Ok(())
}

fn validation(world: &World) -> Result<()> {
    let far = world.owner(1);
    let w = world.put(far, vector(&[1.0, 2.0]))?;
    let ctx = world.context()?;
    let y = ctx.call(far, times, (vector(&[3.0, 4.0]), &w))?;
    let none: [Tensor; 0] = [];
    assert!(matches!(ctx.backward(&none).unwrap_err().kind(), ErrorKind::NoRoots));
    let plain = Tensor::scalar(1.0);
    let error = ctx.backward(&[&y.sum()?, &plain]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::RootWithoutGradient { root: 1 }), "{error}");
    let error = ctx.backward(&[&y]).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::RootNotScalar { root: 0, shape } if shape == &[2]),
        "{error}"
    );
    let leaf = Tensor::scalar(1.0).parameter()?;
    let error = ctx.backward(&[&leaf]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::RootIsLeaf { root: 0 }), "{error}");
    // The plain engine refuses a graph that leads to other ranks.
    let error = y.sum()?.backward().unwrap_err();
    assert!(error.to_string().contains("context"), "{error}");
    assert!(ctx.gradient(&w)?.is_none());
    // Nothing of this spoilt the graph. A freed one is named, on whatever rank it was.
    ctx.backward(&[y.sum()?])?;
    assert_eq!(dense(ctx.gradient(&w)?), [3.0, 4.0]);
    let error = ctx.backward(&[y.sum()?]).unwrap_err();
    assert!(matches!(error.root(), ErrorKind::GraphFreed { .. }), "{error}");
    assert_eq!(dense(ctx.gradient(&w)?), [3.0, 4.0]);
    // Gradients that don't fit.
    let error = ctx.accumulate(&w, Gradient::Dense(vector(&[1.0]).data())).unwrap_err();
    assert!(matches!(error.root(), ErrorKind::Shape { .. }), "{error}");
    let error = ctx
        .accumulate(&w, Gradient::Dense(Tensor::ones(DType::F32, [2]).data()))
        .unwrap_err();
    assert!(matches!(error.root(), ErrorKind::DType { .. }), "{error}");
    ctx.accumulate(&w, Gradient::Dense(vector(&[0.5, 0.25]).data()))?;
    assert_eq!(dense(ctx.gradient(&w)?), [3.5, 4.25]);
    let constant = world.put_constant(far, vector(&[1.0]))?;
    let error = ctx.gradient(&constant).unwrap_err();
    assert!(matches!(error.root(), ErrorKind::NotALeaf { .. }), "{error}");
    Ok(())
}

fn own_code(world: &World) -> Result<()> {
    let far = world.owner(1);
    let w = world.put(far, vector(&[1.0, 2.0]))?;
    // A function with an adjoint of its own, there and here.
    let x = vector(&[3.0, 0.5]).parameter()?;
    let ctx = world.context()?;
    let y = ctx.call(far, cube, (&x, &w))?;
    let z = apply(Cube, &[&y])?.remove(0);
    ctx.backward(&[z.sum()?])?;
    let expected = |x: f64, w: f64, d: f64| 9.0 * (x * w).powi(8) * d;
    for (i, (gx, gw)) in dense(ctx.local_gradient(&x)?).into_iter().zip(dense(ctx.gradient(&w)?)).enumerate() {
        let (x, w) = ([3.0, 0.5][i], [1.0, 2.0][i]);
        assert!(
            (gx - expected(x, w, w)).abs() < 1e-9 * gx && (gw - expected(x, w, x)).abs() < 1e-9 * gw,
            "{gx} {gw}"
        );
    }
    assert_eq!(ctx.gradients()?.len(), if far == 0 { 2 } else { 1 });
    // Hooks, there and here: on a result, on a leaf.
    let before = world.call(far, hooks_run, ())?;
    let ctx = world.context()?;
    let y = ctx.call(far, hooked, (&x, &w))?;
    let here = y.mul_scalar(1.0)?;
    let _seen = here.register_hook(|gradient| {
        SEEN.lock().unwrap().push(dense(Some(gradient.clone())).iter().sum());
        None
    })?;
    let leaf_hook = x.register_hook(|gradient| {
        let mut negative = gradient.clone();
        negative.scale(-1.0).ok()?;
        Some(negative)
    })?;
    ctx.backward(&[here.sum()?])?;
    assert_eq!(world.call(far, hooks_run, ())? - before, 1);
    assert_eq!(*SEEN.lock().unwrap(), [2.0]);
    assert_eq!(dense(ctx.gradient(&w)?), [60.0, 10.0]);
    assert_eq!(dense(ctx.local_gradient(&x)?), [-20.0, -40.0]);
    leaf_hook.remove();
    // Sections that aren't recorded.
    let ctx = world.context()?;
    let y = ctx.call(far, half_recorded, (&x, &w))?;
    let quiet = no_grad(|| ctx.call(far, times, (&x, &w)))?;
    assert!(!quiet.requires_grad());
    ctx.backward(&[y.sum()?.add(&quiet.sum()?)?])?;
    assert_eq!(dense(ctx.gradient(&w)?), [3.0, 0.5]);
    // Frozen leaves.
    world.call(far, freeze, (&w, true))?;
    let ctx = world.context()?;
    let y = ctx.call(far, times, (&x, &w))?;
    ctx.backward(&[y.sum()?])?;
    assert_eq!(dense(ctx.local_gradient(&x)?), [1.0, 2.0]);
    world.call(far, freeze, (&w, false))?;
    assert!(ctx.gradient(&w)?.is_none());
    Ok(())
}

fn kinds_of_gradients(world: &World) -> Result<()> {
    let far = world.owner(1);
    // Rows: looked up on the owner, and in a copy that was fetched.
    let table = world.put(far, numbers(&[50, 3], 1))?;
    let ids = Tensor::from_vec(vec![7i64, 2, 7], [3])?;
    let ctx = world.context()?;
    let rows = ctx.call(far, look_up, (&table, &ids))?;
    ctx.backward(&[rows.sum()?])?;
    let gradient = ctx.gradient(&table)?.expect("a gradient");
    assert!(gradient.is_sparse() && gradient.bytes() < 500, "{gradient:?}");
    let expected: Vec<f64> = (0..150)
        .map(|i| [(2, 1.0), (7, 2.0)].iter().find(|r| r.0 == i / 3).map_or(0.0, |r| r.1))
        .collect();
    assert_eq!(dense(Some(gradient)), expected);
    let ctx = world.context()?;
    let copy = ctx.fetch(&table)?;
    ctx.backward(&[copy.embedding(&ids)?.sum()?])?;
    let gradient = ctx.gradient(&table)?.expect("a gradient");
    assert!(gradient.is_sparse(), "{gradient:?}");
    assert_eq!(dense(Some(gradient)), expected);
    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), [&table])?;
    let before = table.fetch()?.to_vec::<f64>()?;
    let report = optimizer.step(&ctx)?;
    assert_eq!(report.parameter(0).and_then(|p| p.rows), Some(2));
    for (i, (a, b)) in before.iter().zip(table.fetch()?.to_vec::<f64>()?).enumerate() {
        assert_eq!(a - expected[i], b);
    }
    // Single precision there, double here.
    let w = world.put(far, Tensor::from_vec(vec![1.5f32, -2.0], [2])?)?;
    let x = Tensor::from_vec(vec![0.5f32, 4.0], [2])?.parameter()?;
    let ctx = world.context()?;
    let y = ctx.call(far, times, (&x, &w))?;
    assert_eq!(y.dtype(), DType::F32);
    ctx.backward(&[y.cast(DType::F64)?.mul(&vector(&[3.0, 1.0]))?.sum()?])?;
    let gradient = ctx.gradient(&w)?.expect("a gradient");
    assert_eq!(gradient.dtype(), DType::F32);
    assert_eq!(dense(Some(gradient)), [1.5, 4.0]);
    assert_eq!(dense(ctx.local_gradient(&x)?), [4.5, -2.0]);
    Ok(())
}

fn rings(world: &World) -> Result<()> {
    for (a, b) in [(0, world.owner(1)), (world.owner(1), world.owner(2)), (world.owner(1), 0)] {
        let (wa, wb) = (world.put(a, vector(&[2.0]))?, world.put(b, vector(&[3.0]))?);
        for mode in [Mode::Exact, Mode::Fast] {
            let ctx = world.context()?;
            let x = vector(&[1.0]).parameter()?;
            let y = ctx.call(a, bounce, (&x, &wa, &wb, 5))?;
            assert_eq!(y.to_vec::<f64>()?, [216.0]);
            ctx.backward_with(
                &[y.sum()?],
                BackwardOptions {
                    mode,
                    ..Default::default()
                },
            )?;
            assert_eq!(dense(ctx.gradient(&wa)?), [324.0]);
            assert_eq!(dense(ctx.gradient(&wb)?), [216.0]);
            assert_eq!(dense(ctx.local_gradient(&x)?), [216.0]);
        }
        // Fetched twice, used apart and together; a reference to a result, fetched in the context.
        let ctx = world.context()?;
        let (first, second) = (ctx.fetch(&wa)?, ctx.fetch(&wa)?);
        let far = ctx.remote(b, times, (first.mul(&second)?, &wb))?;
        let (y, again) = (ctx.fetch(&far)?, ctx.fetch(&far)?);
        assert_eq!(y.to_vec::<f64>()?, [12.0]);
        let keep = BackwardOptions {
            retain_graph: true,
            ..Default::default()
        };
        ctx.backward_with(&[y.add(&again)?.add(&first)?.sum()?], keep)?;
        assert_eq!(dense(ctx.gradient(&wa)?), [2.0 * 2.0 * 2.0 * 3.0 + 1.0]);
        assert_eq!(dense(ctx.gradient(&wb)?), [8.0]);
        ctx.backward(&[y.sum()?])?;
        assert_eq!(dense(ctx.gradient(&wb)?), [12.0]);
    }
    Ok(())
}

fn releases(world: &World) -> Result<()> {
    let size = world.size();
    let sent = || {
        (1..size)
            .map(|rank| world.counters(rank).map(|c| (c.contexts, c.messages)))
            .collect::<Result<Vec<_>>>()
    };
    // Rank 2 meets the context through rank 1 only; rank 3 by a call that fails.
    let ctx = world.context()?;
    ctx.call(1, via, (2,))?;
    if size > 3 {
        assert!(ctx.call(3, fail, (vector(&[1.0]).parameter()?,)).is_err());
    }
    let before = sent()?;
    assert!(before.iter().all(|b| b.0 == 1), "{before:?}");
    ctx.release()?;
    let after = sent()?;
    assert!(after.iter().all(|b| b.0 == 0), "{after:?}");
    // Between the two looks each rank answered the first, and the release; rank 1 passed that on.
    let deltas: Vec<u64> = before.iter().zip(&after).map(|(b, a)| a.1 - b.1).collect();
    assert_eq!(deltas, [3, 2, 2][..deltas.len()]);
    // Rank 2 meets it through rank 0 and through rank 1: it hears of the release once.
    let ctx = world.context()?;
    ctx.call(2, nothing, ())?;
    ctx.call(1, via, (2,))?;
    ctx.call(2, via, (1,))?;
    let before = sent()?;
    ctx.release()?;
    let deltas: Vec<u64> = before.iter().zip(&sent()?).map(|(b, a)| a.1 - b.1).collect();
    assert_eq!(deltas, [2, 2, 1][..deltas.len()]);
    Ok(())
}

fn failed_calls(world: &World) -> Result<()> {
    let far = world.owner(1);
    let w = world.put(world.owner(2), vector(&[2.0]))?;
    let ctx = world.context()?;
    let x = vector(&[3.0]).parameter()?;
    let y = ctx.call(w.owner(), times, (&x, &w))?;
    assert!(ctx.call(far, fail, (&y,)).is_err());
    assert!(ctx.call(99, fail, (&y,)).is_err());
    let never = ctx.remote(far, fail, (&y,))?;
    assert!(ctx.fetch(&never).is_err());
    let late = ctx.timeout(Duration::from_millis(10)).call(w.owner(), slow_adjoint, (&x, &w, 0));
    drop(late);
    ctx.backward(&[y.sum()?])?;
    assert_eq!((dense(ctx.gradient(&w)?), dense(ctx.local_gradient(&x)?)), (vec![3.0], vec![2.0]));
    Ok(())
}

fn two_trainers() -> Outcome {
    let world = World::init()?;
    // The last rank owns; each rank that isn't it trains, and so does rank 0 with a second thread.
    let owner = world.size() - 1;
    world.lead(|world| {
        let w = world.put(owner, vector(&[1.0, 2.0]))?;
        let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&w])?;
        let (slow, fast) = (world.context()?, world.context()?);
        let x = vector(&[3.0, 5.0]).parameter()?;
        let y = slow.call(owner, times, (&x, &w))?; // forward
        let z = fast.call(owner, times, (vector(&[2.0, 2.0]), &w))?;
        fast.backward(&[z.sum()?])?;
        let report = optimizer.step(&fast)?; // another's step, in between
        assert_eq!(report.parameter(0).map(|p| p.in_place), Some(false));
        assert_eq!(w.fetch()?.to_vec::<f64>()?, [0.0, 1.0]);
        slow.backward(&[y.sum()?])?;
        // The gradient of x is the weight that its forward saw.
        assert_eq!(dense(slow.local_gradient(&x)?), [1.0, 2.0]);
        assert_eq!(dense(slow.gradient(&w)?), [3.0, 5.0]);
        drop(fast);
        assert_eq!(optimizer.step(&slow)?.parameter(0).map(|p| p.in_place), Some(true));
        assert_eq!(w.fetch()?.to_vec::<f64>()?, [-1.5, -1.5]);
        drop((slow, optimizer, w));
        nothing_alive(world)
    })?;
    ok(world.finish())
}

fn in_flight(world: &World) -> Result<()> {
    let far = world.owner(1);
    let w = world.put(far, vector(&[2.0]))?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&w])?;
    let ctx = world.context()?;
    let y = ctx.call(far, slow_adjoint, (vector(&[3.0]), &w, 500))?;
    let other = ctx.call(far, times, (vector(&[3.0]), &w))?.sum()?;
    std::thread::scope(|scope| {
        let backward = scope.spawn(|| ctx.backward(&[&y]));
        std::thread::sleep(Duration::from_millis(150));
        let begun = Instant::now();
        let busy = |error: Error| assert!(matches!(error.kind(), ErrorKind::BackwardInFlight { .. }), "{error}");
        busy(optimizer.step(&ctx).unwrap_err());
        busy(ctx.gradient(&w).unwrap_err());
        busy(ctx.gradients().unwrap_err());
        busy(ctx.backward(&[&other]).unwrap_err());
        busy(ctx.accumulate(&w, Gradient::Dense(vector(&[1.0]).data())).unwrap_err());
        assert!(
            begun.elapsed() < Duration::from_millis(300),
            "an error, not a wait: {:?}",
            begun.elapsed()
        );
        backward.join().unwrap()
    })?;
    assert_eq!(dense(ctx.gradient(&w)?), [3.0]);
    ctx.backward(&[&other])?;
    assert_eq!(dense(ctx.gradient(&w)?), [6.0]);
    assert_eq!(optimizer.step(&ctx)?.updated(), 1);
    // Two at once: each succeeds or is refused, and nothing is mixed up.
    for _ in 0..20 {
        let ctx = world.context()?;
        let roots: Vec<Tensor> = [1.0, 100.0]
            .iter()
            .map(|&x| ctx.call(far, times, (vector(&[x]), &w))?.sum())
            .collect::<Result<_>>()?;
        let done = std::thread::scope(|scope| {
            let threads: Vec<_> = roots
                .iter()
                .map(|root| {
                    let ctx = &ctx;
                    scope.spawn(move || ctx.backward(&[root]))
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap().is_ok()).collect::<Vec<_>>()
        });
        let expected = f64::from(u8::from(done[0])) + 100.0 * f64::from(u8::from(done[1]));
        assert_eq!(dense(ctx.gradient(&w)?), [expected], "{done:?}");
    }
    // One that takes too long is aborted everywhere.
    let ctx = world.context()?;
    let y = ctx.call(far, slow_adjoint, (vector(&[3.0]), &w, 400))?;
    let begun = Instant::now();
    let limit = BackwardOptions {
        timeout: Some(Duration::from_millis(100)),
        ..Default::default()
    };
    let late = ctx.backward_with(&[&y], limit);
    if far != world.rank() {
        let error = late.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Timeout { rank, .. } if *rank == far), "{error}");
        assert!(begun.elapsed() < Duration::from_millis(350), "{:?}", begun.elapsed());
        while let Err(error) = ctx.gradient(&w).map(|g| assert!(g.is_none())) {
            assert!(matches!(error.kind(), ErrorKind::BackwardInFlight { .. }), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

fn many_contexts(world: &World) -> Result<()> {
    let far = world.owner(1);
    let w = world.put(far, numbers(&[4, 4], 1))?;
    let x = numbers(&[2, 4], 2);
    // A simulated GPU takes its time.
    let (few, many) = if on_gpus() { (500, 2_500) } else { (2_000, 10_000) };
    let mut first = Vec::new();
    for i in 1..=many {
        let ctx = world.context()?;
        let h = ctx.call(far, fan_leaf, (&x, &w))?;
        if i % 2 == 0 {
            ctx.backward(&[h.sum()?])?;
        }
        if i % 10 == 0 {
            ctx.release()?;
        }
        if i == few {
            first = resident(world)?;
        }
    }
    let last = resident(world)?;
    for (rank, (a, b)) in first.iter().zip(&last).enumerate() {
        // Without a GPU its memory is this process's, too, and grows to the most that was ever under way at once.
        let spare = if on_gpus() { 4 << 20 } else { 1 << 20 };
        assert!(*b <= a + spare, "rank {rank}: {a} bytes after {few} contexts, {b} after {many}");
    }
    drop(w);
    nothing_alive(world)
}

/// Resident bytes of each rank, once all contexts are gone.
fn resident(world: &World) -> Result<Vec<u64>> {
    let contexts = || {
        (0..world.size())
            .map(|rank| world.counters(rank).map(|c| c.contexts))
            .sum::<Result<usize>>()
    };
    while contexts()? > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    (0..world.size()).map(|rank| world.call(rank, resident_bytes, ())).collect()
}

/// A program with fan-in on every weight; the bits of all its gradients and its loss.
fn bits(world: &World, single: bool) -> Result<Vec<u64>> {
    let dtype = if single { DType::F32 } else { DType::F64 };
    let put = |k: u32| world.put(world.owner(k), numbers(&[5, 5], k as usize).cast(dtype)?);
    let weights: Vec<RRef<Tensor>> = (1..5).map(put).collect::<Result<_>>()?;
    let x = numbers(&[3, 5], 9).cast(dtype)?.parameter()?;
    let ctx = world.context()?;
    let shared = &weights[0];
    let mut sum = ctx.call(weights[1].owner(), fan, (&x, shared, weights[1..].to_vec()))?;
    let calls: Vec<_> = weights
        .iter()
        .map(|w| ctx.call_async(w.owner(), fan, (&x.mul_scalar(1.3)?, shared, vec![w.clone()])))
        .collect::<Result<_>>()?;
    for y in wait_all(calls)? {
        sum = sum.add(&y.sigmoid()?)?;
    }
    let fetched = ctx.fetch(shared)?;
    sum = sum
        .add(&x.matmul(&fetched)?)?
        .add(&ctx.call(shared.owner(), fan_leaf, (&sum, shared))?)?;
    let loss = sum.mul(&sum)?.mean()?;
    let loss2 = sum.sum()?;
    ctx.backward(&[&loss, &loss2])?;
    let mut bits = vec![loss.cast(DType::F64)?.item::<f64>()?.to_bits()];
    for w in &weights {
        bits.extend(dense(ctx.gradient(w)?).into_iter().map(f64::to_bits));
    }
    bits.extend(dense(ctx.local_gradient(&x)?).into_iter().map(f64::to_bits));
    Ok(bits)
}

/// Numbers that differ by no more than this part of the largest.
fn same_values(a: &[u64], b: &[u64], part: f64) {
    assert_eq!(a.len(), b.len());
    let largest = a.iter().fold(0.0, |largest, x| f64::max(largest, f64::from_bits(*x).abs()));
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
        assert!((a - b).abs() <= part * largest, "{a} and {b}, of {largest}");
    }
}

fn same_bits(world: &World) -> Result<()> {
    for single in [true, false] {
        let here = bits(world, single)?;
        assert_eq!(here.len(), 1 + 4 * 25 + 15);
        assert_eq!(here, bits(world, single)?, "a second time");
        for ranks in [1, 3] {
            let there = Mutex::new(Vec::new());
            let settings = |settings: &mut Settings| settings.cuda = on_gpus();
            local::run_with(ranks, settings, |world| {
                world.lead(|world| {
                    *there.lock().unwrap() = bits(world, single)?;
                    Ok(())
                })
            })?;
            let there = there.into_inner().unwrap();
            if on_gpus() {
                // A matrix product has another order there than here, and a weight that is fetched is here.
                same_values(&here, &there, if single { 1e-5 } else { 1e-13 });
            } else {
                assert_eq!(here, there, "{ranks} local ranks, single precision: {single}");
            }
        }
    }
    Ok(())
}

fn on_local_ranks() -> Outcome {
    [
        threads as fn(&World) -> Result<()>,
        validation,
        own_code,
        kinds_of_gradients,
        rings,
        failed_calls,
        in_flight,
        same_bits,
    ]
    .into_iter()
    .try_for_each(|f| led_locally(3, f))
}

/// The cases.
/// Messages that a backward takes, of both ranks, and the gradient of the weight on the other one.
fn backward_through(world: &World, mode: Mode, calls: usize, turns: u32) -> Result<(u64, Vec<f64>)> {
    let far = world.owner(1);
    let (here, there) = (
        world.put(0, Tensor::from_vec(vec![2.0], [1])?)?,
        world.put(far, Tensor::from_vec(vec![3.0], [1])?)?,
    );
    let x = Tensor::from_vec(vec![1.0], [1])?.parameter()?;
    let ctx = world.context()?;
    let mut loss = ctx.call(far, bounce, (&x, &there, &here, turns))?.sum()?;
    for _ in 1..calls {
        loss = (loss + ctx.call(far, bounce, (&x, &there, &here, turns))?.sum()?)?;
    }
    let sent = || -> Result<u64> { Ok(world.traffic()?.iter().map(|t| t.0).sum()) };
    let before = sent()?;
    let options = BackwardOptions {
        mode,
        ..BackwardOptions::default()
    };
    ctx.backward_with(&[loss], options)?;
    // With what it takes to ask, always the same.
    let messages = sent()? - before;
    let gradient = ctx
        .gradient(&there)?
        .map(|g| Tensor::from_data(g.to_dense().expect("dense")).to_vec())
        .transpose()?;
    ctx.release()?;
    Ok((messages, gradient.unwrap_or_default()))
}

/// Values know what their gradients reach: an exact backward takes no round more than a fast one, unless that would be too much to know.
fn exactness(world: &World) -> Result<()> {
    for (calls, turns) in [(1, 0), (1, 7), (5, 1), (40, 0), (1, 20)] {
        let (exact, gradient) = backward_through(world, Mode::Exact, calls, turns)?;
        let (fast, same) = backward_through(world, Mode::Fast, calls, turns)?;
        let known = turns < 12; // more crossings than a value says that it reaches
        // A mark for each crossing, and its answer; dropped references may add a message or two to either.
        let asked = exact > fast + 2;
        if world.size() == 2 && asked == known {
            return Err(Error::user(format!(
                "{calls} calls of {turns} turns: {exact} messages, and {fast} of a fast backward"
            )));
        }
        let weights = (turns / 2 + 1) as i32;
        let want = calls as f64 * f64::from(weights) * 3f64.powi(weights - 1) * 2f64.powi(turns as i32 - turns as i32 / 2);
        if gradient != [want] || same != [want] {
            return Err(Error::user(format!(
                "{calls} calls of {turns} turns: gradients {gradient:?} and {same:?}, expected {want}"
            )));
        }
    }
    Ok(())
}

pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 2],
        ..Case::new("contexts::exact_backward_takes_no_round_of_its_own", || led(exactness))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("contexts::are_apart_on_many_threads_at_once", || led(threads))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("contexts::roots_and_gradients_are_checked", || led(validation))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("contexts::functions_hooks_unrecorded_sections_and_frozen_leaves", || led(own_code))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("contexts::sparse_and_single_precision_gradients", || led(kinds_of_gradients))
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("contexts::rings_and_repeated_fetches", || led(rings))
    },
    Case {
        ranks: &[3, 4],
        ..Case::new("contexts::a_release_reaches_each_rank_once", || led(releases))
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("contexts::survive_failed_calls", || led(failed_calls))
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("contexts::a_graph_keeps_the_version_that_it_saw", two_trainers)
    },
    Case {
        ranks: &[1, 2],
        alone: true,
        ..Case::new("contexts::one_backward_at_a_time", || led(in_flight))
    },
    Case {
        ranks: &[1, 2],
        alone: true,
        limit: 240,
        ..Case::new("contexts::ten_thousand_leave_nothing", || led(many_contexts))
    },
    Case {
        ranks: &[1, 2, 3, 4],
        ..Case::new("contexts::gradients_have_the_same_bits_on_any_ranks", || led(same_bits))
    },
    Case {
        ranks: &[0],
        ..Case::new("contexts::hold_on_local_ranks_too", on_local_ranks)
    },
];

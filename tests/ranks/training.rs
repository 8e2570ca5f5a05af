//! Contexts, backward over ranks, the distributed optimizer.

use rankgrad::prelude::*;
use rankgrad::{BackwardOptions, Mode};

use crate::case::Case;
use crate::{Outcome, ok};

remote! {
    fn layer(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.matmul(&w.local(scope)?)?.tanh()
    }

    /// Layers on a chain of ranks, each calling the next.
    fn chain(scope: &Scope, x: Tensor, layers: Vec<RRef<Tensor>>) -> Result<Tensor> {
        let h = x.matmul(&layers[0].local(scope)?)?.tanh()?;
        match layers.get(1) {
            Some(next) => scope.call(next.owner(), chain, (h, layers[1..].to_vec())),
            None => Ok(h),
        }
    }

    fn twice(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<(Tensor, Tensor)> {
        let w = w.local(scope)?;
        Ok((x.mul(&w)?, x.add(&w)?))
    }

    fn broken_adjoint(scope: &Scope, x: Tensor) -> Result<Tensor> {
        let _ = scope;
        let y = x.mul_scalar(3.0)?;
        let _stays = y.register_hook(|_| panic!("the adjoint of rank's function fails"))?;
        y.mul_scalar(2.0)
    }
}

fn numbers(shape: &[usize], seed: usize) -> Tensor {
    let n = shape.iter().product::<usize>();
    let values = (0..n).map(|i| ((i * 37 + seed * 101) % 97) as f64 / 97.0 - 0.5).collect();
    Tensor::from_vec(values, shape).unwrap()
}

fn close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    for (x, y) in a.iter().zip(b) {
        assert!((x - y).abs() <= 1e-14 * x.abs().max(1.0), "{a:?} {b:?}");
    }
}

fn dense(gradient: Option<Gradient>) -> Vec<f64> {
    Tensor::from_data(gradient.expect("a gradient").to_dense().unwrap())
        .to_vec::<f64>()
        .unwrap()
}

/// The same network on one rank, by the local engine.
fn reference(x: &Tensor, weights: &[Tensor]) -> (f64, Vec<Vec<f64>>) {
    let leaves: Vec<Tensor> = weights.iter().map(|w| Tensor::from_data(w.data()).parameter().unwrap()).collect();
    let mut h = x.clone();
    for w in &leaves {
        h = h.matmul(w).unwrap().tanh().unwrap();
    }
    let loss = h.mul(&h).unwrap().sum().unwrap();
    loss.backward().unwrap();
    (loss.item().unwrap(), leaves.iter().map(|l| dense(l.grad())).collect())
}

fn gradients_equal_one_rank() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let size = world.size();
        let x = numbers(&[5, 4], 1);
        let weights: Vec<Tensor> = (0..4).map(|k| numbers(&[4, 4], k + 2)).collect();
        let (loss, gradients) = reference(&x, &weights);
        let refs: Vec<RRef<Tensor>> = (0..4)
            .map(|k| world.put((k + 1) % size, weights[k as usize].clone()))
            .collect::<Result<_>>()?;
        for mode in [Mode::Exact, Mode::Fast] {
            for nested in [false, true] {
                let ctx = world.context()?;
                let h = if nested {
                    ctx.call(refs[0].owner(), chain, (&x, &refs))?
                } else {
                    let mut h = x.clone();
                    for w in &refs {
                        h = ctx.call(w.owner(), layer, (&h, w))?;
                    }
                    h
                };
                let root = h.mul(&h)?.sum()?;
                close(&[root.item::<f64>()?], &[loss]);
                ctx.backward_with(
                    &[root],
                    BackwardOptions {
                        mode,
                        ..Default::default()
                    },
                )?;
                for (w, expected) in refs.iter().zip(&gradients) {
                    close(&dense(ctx.gradient(w)?), expected);
                }
                ctx.release()?;
            }
        }
        Ok(())
    })?;
    ok(world.finish())
}

fn unused_results() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let far = world.owner(1);
        let w = world.put(far, numbers(&[3], 1))?;
        let x = numbers(&[3], 2).parameter()?;
        let expected = w.fetch()?.to_vec::<f64>()?;

        let ctx = world.context()?;
        let (product, _sum) = ctx.call(far, twice, (&x, &w))?; // one output of two
        let (_unused, _too) = ctx.call(far, twice, (&x, &w))?; // none of two
        ctx.backward(&[product.sum()?])?;
        close(&dense(ctx.local_gradient(&x)?), &expected);
        close(&dense(ctx.gradient(&w)?), &x.to_vec::<f64>()?);
        assert!(x.grad().is_none());

        let ctx = world.context()?;
        let (product, _) = ctx.call(far, twice, (&x, &w))?;
        let _unused = ctx.call(far, twice, (&x, &w))?;
        let fast = BackwardOptions {
            mode: Mode::Fast,
            ..Default::default()
        };
        let error = ctx.backward_with(&[product.sum()?], fast).unwrap_err();
        match error.kind() {
            ErrorKind::UnreachedCalls { calls } => assert!(!calls.is_empty() && calls.iter().all(|c| c.contains("twice")), "{calls:?}"),
            other => panic!("{other:?}"),
        }
        assert!(ctx.gradient(&w)?.is_none() && ctx.local_gradient(&x)?.is_none());
        Ok(())
    })?;
    ok(world.finish())
}

fn repeated() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let far = world.owner(1);
        let w = world.put(far, numbers(&[3], 1))?;
        let ctx = world.context()?;
        let x = numbers(&[3], 2);
        let (a, b) = ctx.call(far, twice, (&x, &w))?;
        let (a, b) = (a.sum()?, b.sum()?);
        let keep = BackwardOptions {
            retain_graph: true,
            ..Default::default()
        };
        ctx.backward_with(&[&a, &b], keep)?;
        let once: Vec<f64> = x.to_vec::<f64>()?.iter().map(|x| x + 1.0).collect();
        close(&dense(ctx.gradient(&w)?), &once);
        ctx.backward(&[&a, &b])?;
        let two: Vec<f64> = once.iter().map(|x| x + x).collect();
        close(&dense(ctx.gradient(&w)?), &two);
        let error = ctx.backward(&[&a, &b]).unwrap_err();
        assert!(matches!(error.root(), ErrorKind::GraphFreed { .. }), "{error}");
        close(&dense(ctx.gradient(&w)?), &two);
        Ok(())
    })?;
    ok(world.finish())
}

fn failing() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let far = world.owner(1);
        let w = world.put(world.owner(2), numbers(&[2, 2], 1))?;
        let ctx = world.context()?;
        let h = ctx.call(w.owner(), layer, (numbers(&[2, 2], 3), &w))?;
        let y = ctx.call(far, broken_adjoint, (&h,))?;
        let error = ctx.backward(&[y.sum()?]).unwrap_err();
        match error.kind() {
            ErrorKind::Backward { rank, .. } => assert_eq!(*rank, far),
            other => panic!("{other:?}"),
        }
        assert!(error.to_string().contains("adjoint"), "{error}");
        assert!(ctx.gradient(&w)?.is_none());
        // Another backward of the same context works.
        let h = ctx.call(w.owner(), layer, (numbers(&[2, 2], 3), &w))?;
        ctx.backward(&[h.sum()?])?;
        assert!(ctx.gradient(&w)?.is_some());
        Ok(())
    })?;
    ok(world.finish())
}

fn steps() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let size = world.size();
        let x = numbers(&[5, 4], 1);
        let weights: Vec<Tensor> = (0..3).map(|k| numbers(&[4, 4], k + 2)).collect();
        let refs: Vec<RRef<Tensor>> = (0..3)
            .map(|k| world.put((k + 1) % size, numbers(&[4, 4], k as usize + 2)))
            .collect::<Result<_>>()?;
        let optimizer = DistributedOptimizer::new(world, Sgd::new(0.1).momentum(0.9), &refs)?;
        let leaves: Vec<Tensor> = weights
            .iter()
            .map(|w| Tensor::from_data(w.data()).parameter())
            .collect::<Result<_>>()?;
        let mut local = rankgrad::optim::Optimizer::new(Sgd::new(0.1).momentum(0.9), leaves.clone())?;
        for _ in 0..10 {
            let ctx = world.context()?;
            let h = ctx.call(refs[0].owner(), chain, (&x, &refs))?;
            ctx.backward(&[h.mul(&h)?.sum()?])?;
            let report = optimizer.step(&ctx)?;
            assert_eq!((report.updated(), report.without_gradient()), (3, 0));
            let mut h = x.clone();
            for w in &leaves {
                w.zero_grad();
                h = h.matmul(w)?.tanh()?;
            }
            h.mul(&h)?.sum()?.backward()?;
            drop(h);
            local.step(&mut |i| leaves[i].grad())?;
        }
        for (w, leaf) in refs.iter().zip(&leaves) {
            close(&w.fetch()?.to_vec::<f64>()?, &leaf.to_vec::<f64>()?);
        }
        let mut in_place = 0;
        for rank in 0..size {
            let counters = world.counters(rank)?;
            assert_eq!(counters.updates_out_of_place, 0, "rank {rank}: {counters:?}");
            in_place += counters.updates_in_place;
        }
        assert_eq!(in_place, 30);
        Ok(())
    })?;
    ok(world.finish())
}

fn nothing_left() -> Outcome {
    let world = World::init()?;
    let done = world.lead(|world| {
        let far = world.owner(1);
        for _ in 0..300 {
            let w = world.put(far, numbers(&[2, 2], 1))?;
            let ctx = world.context()?;
            let h = ctx.call(far, layer, (numbers(&[2, 2], 3), &w))?;
            ctx.backward(&[h.sum()?])?;
        }
        Ok(())
    });
    done?;
    world.serve()?;
    for rank in 0..world.size() {
        let counters = world.counters(rank)?;
        let alive = (
            counters.values,
            counters.handles,
            counters.contexts,
            counters.backwards,
            counters.optimizers,
        );
        assert_eq!(alive, (0, 0, 0, 0, 0), "rank {rank}: {counters:?}");
    }
    ok(world.finish())
}

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("training::gradients_over_ranks_equal_those_of_one", gradients_equal_one_rank),
    Case {
        ranks: &[1, 2],
        ..Case::new("training::unused_results_are_no_obstacle_and_fast_mode_names_them", unused_results)
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("training::repeated_backward_accumulates", repeated)
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("training::a_failed_backward_changes_nothing_and_names_the_rank", failing)
    },
    Case::new("training::steps_equal_those_of_a_local_optimizer", steps),
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("training::nothing_is_left_behind", nothing_left)
    },
];

//! torch's tests of distributed autograd contexts: who knows them, what they record, when they are gone.

use std::time::Duration;

use rankgrad::prelude::*;

use crate::Outcome;
use crate::case::Case;
use crate::optimizer::vector;
use crate::settled::{led, led_locally, nothing_alive};

remote! {
    fn add(scope: &Scope, a: Tensor, b: Tensor) -> Result<Tensor> {
        let _ = scope;
        a.add(&b)
    }

    fn product(scope: &Scope, a: Tensor, b: Tensor) -> Result<Tensor> {
        let _ = scope;
        a.matmul(&b)
    }

    /// Passes its sum on along a route; what comes back goes back.
    fn along(scope: &Scope, a: Tensor, b: Tensor, route: Vec<u32>) -> Result<Tensor> {
        let sum = a.add(&b)?;
        match route.split_first() {
            Some((next, rest)) => scope.call(*next, along, (sum, b, rest.to_vec())),
            None => Ok(sum),
        }
    }

    /// As `along`, but values stay where they were made, and are fetched.
    fn along_by_reference(scope: &Scope, a: Tensor, b: Tensor, route: Vec<u32>) -> Result<Tensor> {
        let sum = a.add(&b)?;
        match route.split_first() {
            Some((next, rest)) => {
                let far = scope.remote(*next, along_by_reference, (sum, b, rest.to_vec()))?;
                scope.fetch(&far)
            }
            None => Ok(sum),
        }
    }

    fn stacked(scope: &Scope, tensors: Vec<Tensor>) -> Result<(Tensor, Vec<bool>)> {
        let _ = scope;
        Ok((Tensor::stack(&tensors, 0)?, tensors.iter().map(Tensor::requires_grad).collect()))
    }

    fn touch(scope: &Scope, x: Tensor) -> Result<Tensor> {
        let _ = scope;
        x.sum()
    }

    fn nothing(scope: &Scope) -> Result<()> {
        let _ = scope;
        Ok(())
    }

    fn slow_adjoint(scope: &Scope, x: Tensor, millis: u64) -> Result<Tensor> {
        let _ = scope;
        let y = x.mul_scalar(2.0)?;
        let _hook = y.register_hook(move |_| {
            std::thread::sleep(Duration::from_millis(millis));
            None
        })?;
        y.sum()
    }
}

fn leaf(values: &[f64]) -> Result<Tensor> {
    vector(values).parameter()
}

fn known(world: &World) -> Result<Vec<usize>> {
    (0..world.size()).map(|rank| world.counters(rank).map(|c| c.contexts)).collect()
}

/// 200 contexts have ids of their own, with their home; after its release an id is named as such.
fn ids(world: &World) -> Result<()> {
    let contexts: Vec<Context> = (0..200).map(|_| world.context()).collect::<Result<_>>()?;
    let ids: std::collections::BTreeSet<_> = contexts.iter().map(Context::id).collect();
    assert_eq!(ids.len(), 200);
    assert!(ids.iter().all(|id| id.rank() == world.rank()));
    for id in &ids {
        assert!(world.gradients_here(*id)?.is_empty());
    }
    for ctx in contexts {
        let id = ctx.id();
        ctx.release()?;
        let error = world.gradients_here(id).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::ContextReleased { .. }) && error.to_string().contains(&id.to_string()),
            "{error}"
        );
    }
    Ok(())
}

/// Exactly the ranks that were called know the context, with gradients or without.
fn known_ranks(world: &World) -> Result<()> {
    let last = world.size() - 1;
    for grad in [false, true] {
        let ctx = world.context()?;
        let x = if grad { leaf(&[1.0])? } else { vector(&[1.0]) };
        let mut expected: Vec<usize> = (0..world.size()).map(|rank| usize::from(rank == 0)).collect();
        assert_eq!(known(world)?, expected);
        for to in 1..last {
            ctx.call(to, add, (&x, &x))?;
            expected[to as usize] = 1;
            assert_eq!(known(world)?, expected);
        }
        ctx.release()?;
    }
    Ok(())
}

/// After a release no rank knows the context: not after tensors with gradients or without, nor after none, nor where only another rank called.
fn cleanup(world: &World) -> Result<()> {
    let x = leaf(&[1.0])?;
    let route: Vec<u32> = (1..world.size()).rev().collect();
    for kind in 0..5 {
        let ctx = world.context()?;
        match kind {
            0 => drop(ctx.call(world.owner(1), add, (&x, &x))?),
            1 => drop(ctx.call(world.owner(1), add, (vector(&[1.0]), vector(&[2.0])))?),
            2 => ctx.call(world.owner(1), nothing, ())?,
            3 => drop(ctx.call(world.owner(1), along, (&x, &x, route.clone()))?),
            _ => {
                // Rows of an embedding: gradients that are sparse.
                let table = Tensor::ones(DType::F64, [4, 2]).parameter()?;
                let rows = table.embedding(&Tensor::from_vec(vec![1i64, 1], [2])?)?;
                let sum = ctx.call(world.owner(1), add, (&rows, &rows))?.sum()?;
                ctx.backward(&[sum])?;
                assert!(ctx.local_gradient(&table)?.is_some_and(|g| g.is_sparse()));
            }
        }
        let ranks = if kind == 3 {
            world.size() as usize
        } else {
            2.min(world.size() as usize)
        };
        assert_eq!(known(world)?.into_iter().sum::<usize>(), ranks, "kind {kind}");
        ctx.release()?;
        assert_eq!(known(world)?.into_iter().sum::<usize>(), 0, "kind {kind}");
    }
    Ok(())
}

/// A function that fails inside a context is its caller's error, and everything goes on.
fn error_in_context(world: &World) -> Result<()> {
    let to = world.owner(1);
    let ctx = world.context()?;
    let (a, b) = (
        Tensor::ones(DType::F64, [3, 3]).parameter()?,
        Tensor::ones(DType::F64, [6, 6]).parameter()?,
    );
    let error = ctx.call(to, product, (&a, &b)).unwrap_err();
    assert!(
        matches!(error.root(), ErrorKind::Shape { left, right, .. } if left == &[3, 3] && right == &[6, 6]),
        "{error}"
    );
    assert!(
        error.to_string().contains("product") && error.to_string().contains(&format!("rank {to}")),
        "{error}"
    );
    let y = ctx.call(to, product, (&a, &a))?;
    ctx.backward(&[y.sum()?])?;
    assert!(ctx.local_gradient(&a)?.is_some());
    Ok(())
}

/// Contexts and backwards under way are counted on each rank, and are none in the end.
fn counted(world: &World) -> Result<()> {
    let to = world.owner(1);
    let ctx = world.context()?;
    let y = ctx.call(to, slow_adjoint, (leaf(&[1.0])?, 400))?;
    let seen = std::thread::scope(|scope| -> Result<usize> {
        let backward = scope.spawn(|| ctx.backward(&[&y]));
        let mut most = 0;
        while !backward.is_finished() {
            let counters = world.counters(to)?;
            assert_eq!(counters.contexts, 1);
            most = most.max(counters.backwards);
        }
        backward.join().unwrap()?;
        Ok(most)
    })?;
    assert_eq!(seen, 1);
    drop(ctx);
    nothing_alive(world)
}

/// What went between ranks in a context, by the calls that took it: what the fast mode misses when the root is of something else, on all ranks.
fn crossings(ctx: &Context) -> Result<Vec<String>> {
    let fast = BackwardOptions {
        mode: Mode::Fast,
        ..Default::default()
    };
    let (other, mut root) = (leaf(&[1.0])?, Tensor::scalar(0.0));
    for rank in 0..ctx.size() {
        root = root.add(&ctx.call(rank, touch, (&other,))?)?;
    }
    match ctx.backward_with(&[root], fast) {
        Ok(()) => Ok(Vec::new()),
        Err(error) => match error.kind() {
            ErrorKind::UnreachedCalls { calls } => Ok(sorted(calls.iter().map(|c| c.replace(concat!(module_path!(), "::"), "")).collect())),
            _ => Err(error),
        },
    }
}

fn sent(function: &str, to: u32) -> String {
    format!("{function} on rank {to} (arguments)")
}

fn returned(function: &str, on: u32, to: u32) -> String {
    format!("{function} on rank {on} (result for rank {to})")
}

fn sorted(mut all: Vec<String>) -> Vec<String> {
    all.sort();
    all
}

/// A call records what left with it and what came back; a call by reference, what left and what was fetched.
fn one_call(world: &World) -> Result<()> {
    let (me, to) = (world.rank(), world.owner(1));
    let (a, b) = (leaf(&[1.0])?, leaf(&[2.0])?);
    let ctx = world.context()?;
    assert!(ctx.call(to, add, (&a, &b))?.requires_grad());
    assert_eq!(crossings(&ctx)?, sorted(vec![sent("add", to), returned("add", to, me)]));
    let ctx = world.context()?;
    let far = ctx.remote(to, add, (&a, &b))?;
    assert!(ctx.fetch(&far)?.requires_grad());
    assert_eq!(crossings(&ctx)?, sorted(vec![sent("add", to), returned("fetch", to, me)]));
    Ok(())
}

/// Chains of three ranks, and there and back to the first: each hop leaves its two.
fn chains(world: &World) -> Result<()> {
    let me = world.rank();
    let (a, b) = (leaf(&[1.0])?, leaf(&[2.0])?);
    for route in [vec![world.owner(1), world.owner(2), world.owner(3)], vec![world.owner(1), me]] {
        let from = |hop: usize| if hop == 0 { me } else { route[hop - 1] };
        let ctx = world.context()?;
        let y = ctx.call(route[0], along, (&a, &b, route[1..].to_vec()))?;
        assert_eq!(y.to_vec::<f64>()?, [1.0 + 2.0 * route.len() as f64]);
        let hops = route.iter().enumerate();
        let expected = hops
            .flat_map(|(hop, &to)| [sent("along", to), returned("along", to, from(hop))])
            .collect();
        assert_eq!(crossings(&ctx)?, sorted(expected));
        let ctx = world.context()?;
        let far = ctx.remote(route[0], along_by_reference, (&a, &b, route[1..].to_vec()))?;
        assert_eq!(ctx.fetch(&far)?.to_vec::<f64>()?, [1.0 + 2.0 * route.len() as f64]);
        let hops = route.iter().enumerate();
        let expected = hops
            .flat_map(|(hop, &to)| [sent("along_by_reference", to), returned("fetch", to, from(hop))])
            .collect();
        assert_eq!(crossings(&ctx)?, sorted(expected));
    }
    Ok(())
}

/// Without gradients nothing is recorded, and yet the context reaches the rank.
fn no_gradients(world: &World) -> Result<()> {
    let to = world.owner(1);
    let ctx = world.context()?;
    assert!(!ctx.call(to, add, (vector(&[1.0]), vector(&[2.0])))?.requires_grad());
    let far = ctx.remote(to, add, (vector(&[1.0]), vector(&[2.0])))?;
    assert!(!ctx.fetch(&far)?.requires_grad());
    assert_eq!(world.counters(to)?.contexts, 1);
    assert!(crossings(&ctx)?.is_empty());
    Ok(())
}

/// Ten tensors, every second with a gradient: flags arrive, and gradients go to exactly those.
fn many_arguments(world: &World) -> Result<()> {
    let to = world.owner(1);
    for by_reference in [false, true] {
        let tensors: Vec<Tensor> = (0..10)
            .map(|i| {
                if i % 2 == 0 {
                    leaf(&[f64::from(i), 1.0])
                } else {
                    Ok(vector(&[f64::from(i), 1.0]))
                }
            })
            .collect::<Result<_>>()?;
        let ctx = world.context()?;
        let (stack, flags) = if by_reference {
            let far = ctx.remote(to, stacked, (&tensors,))?;
            ctx.fetch(&far)?
        } else {
            ctx.call(to, stacked, (&tensors,))?
        };
        assert_eq!(flags, (0..10).map(|i| i % 2 == 0).collect::<Vec<_>>());
        assert_eq!(stack.to_vec::<f64>()?, Tensor::stack(&tensors, 0)?.to_vec::<f64>()?);
        assert_eq!(known(world)?.into_iter().sum::<usize>(), 2.min(world.size() as usize));
        let weights = Tensor::from_vec((0..20).map(f64::from).collect(), [10, 2])?;
        ctx.backward(&[stack.mul(&weights)?.sum()?])?;
        assert_eq!(ctx.gradients()?.len(), 5);
        for (i, tensor) in tensors.iter().enumerate().step_by(2) {
            let gradient = ctx.local_gradient(tensor)?.expect("a gradient").to_dense()?;
            assert_eq!(Tensor::from_data(gradient).to_vec::<f64>()?, [2.0 * i as f64, 2.0 * i as f64 + 1.0]);
        }
        ctx.release()?;
    }
    Ok(())
}

fn bookkeeping(world: &World) -> Result<()> {
    [ids, known_ranks, cleanup, error_in_context, counted]
        .iter()
        .try_for_each(|f| f(world))
}

fn graphs(world: &World) -> Result<()> {
    let all = [one_call, chains, no_gradients, many_arguments];
    all.iter().try_for_each(|f| f(world).and_then(|()| nothing_alive(world)))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 4],
        ..Case::new("torch_contexts::are_known_where_calls_went_and_then_gone", || led(bookkeeping))
    },
    Case {
        ranks: &[1, 2, 4],
        ..Case::new("torch_contexts::record_what_went_between_ranks", || led(graphs))
    },
    Case {
        ranks: &[0],
        ..Case::new("torch_contexts::hold_on_local_ranks_too", on_local_ranks)
    },
];

fn on_local_ranks() -> Outcome {
    [graphs as fn(&World) -> Result<()>, cleanup]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

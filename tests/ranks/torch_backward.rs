//! torch's tests of distributed backwards: the gradients are those of one rank, and errors come home.

use std::borrow::Cow;

use ndarray::{ArrayD, ArrayViewD};
use rankgrad::autograd::function::apply;
use rankgrad::prelude::*;

use crate::case::Case;
use crate::optimizer::vector;
use crate::settled::{led, led_locally, nothing_alive};
use crate::{Outcome, ok};

/// Fails in its adjoint.
struct Faulty;

impl Function<f64> for Faulty {
    type Saved = ();

    fn name(&self) -> Cow<'static, str> {
        "faulty".into()
    }

    fn forward(&self, inputs: &[ArrayViewD<'_, f64>]) -> Result<(Vec<ArrayD<f64>>, ())> {
        Ok((vec![inputs[0].to_owned()], ()))
    }

    fn adjoint(&self, (): &(), _: &[ArrayViewD<'_, f64>], _: &[bool]) -> Result<Vec<Option<ArrayD<f64>>>> {
        Err(Error::user("Simulate error on backward pass"))
    }
}

remote! {
    fn add(scope: &Scope, a: Tensor, b: Tensor) -> Result<Tensor> {
        let _ = scope;
        a.add(&b)
    }

    fn total(scope: &Scope, a: Tensor, b: Tensor) -> Result<Tensor> {
        let _ = scope;
        a.mul(&b)?.sum()
    }

    fn add_to(scope: &Scope, held: RRef<Tensor>, b: Tensor) -> Result<Tensor> {
        let held = if held.is_local() { held.local(scope)? } else { scope.fetch(&held)? };
        held.add(&b)
    }

    /// Leaves the sum to another rank than the owner's and the caller's.
    fn add_on(scope: &Scope, to: u32, held: RRef<Tensor>, b: Tensor) -> Result<Tensor> {
        scope.call(to, add_to, (&held, b))
    }

    fn made_there(scope: &Scope) -> Result<Tensor> {
        let _ = scope;
        Tensor::ones(DType::F64, [3, 3]).parameter()
    }

    /// The gradients of a context on this rank.
    fn gradients_of(scope: &Scope, context: rankgrad::ContextId) -> Result<Vec<Vec<f64>>> {
        let all = scope.gradients_here(context)?;
        all.into_iter().map(|(_, g)| Tensor::from_data(g.to_dense()?).to_vec()).collect()
    }

    fn stack(scope: &Scope, tensors: Vec<Tensor>) -> Result<Tensor> {
        let _ = scope;
        Tensor::stack(&tensors, 0)
    }

    fn split(scope: &Scope, x: Tensor) -> Result<Vec<Tensor>> {
        let _ = scope;
        x.split(&[2; 5], 0)
    }

    fn cosine(scope: &Scope, x: Tensor) -> Result<Tensor> {
        let _ = scope;
        x.cos()?.sum()
    }

    fn ratio(scope: &Scope, a: Tensor, b: Tensor) -> Result<Tensor> {
        let _ = scope;
        (&a / &b)?.sum()
    }

    fn mixed_precision(scope: &Scope, single: Tensor, double: Tensor) -> Result<Tensor> {
        let _ = scope;
        single.cast(DType::F64)?.mul(&double)
    }

    fn network(scope: &Scope, x: Tensor, w: Tensor) -> Result<Tensor> {
        let _ = scope;
        network_here(&x, &w)
    }

    fn nested(scope: &Scope, to: u32, a: Tensor, b: Tensor) -> Result<Tensor> {
        let sum = a.add(&b)?;
        scope.call(to, network, (sum.mul(&a)?, b))
    }

    fn only_if_required(scope: &Scope, a: Tensor, b: Tensor) -> Result<Tensor> {
        let _ = scope;
        if b.requires_grad() { a.sub(&b) } else { a.mul(&b)?.mul(&a) }
    }

    /// A chain over the ranks; each rank multiplies by 2, and one of them fails on the way back.
    fn chain(scope: &Scope, x: Tensor, route: Vec<u32>, faulty: u32) -> Result<Tensor> {
        let mut y = x.mul_scalar(2.0)?;
        if scope.rank() == faulty {
            y = apply(Faulty, &[&y])?.remove(0);
        }
        match route.split_first() {
            Some((next, rest)) => scope.call(*next, chain, (y, rest.to_vec(), faulty)),
            None => Ok(y),
        }
    }

    /// The parameter of this rank, times a factor.
    fn served(scope: &Scope, x: Tensor) -> Result<(Tensor, RRef<Tensor>)> {
        let served = scope.state::<Served>()?;
        let parameter = served.0.clone().ok_or_else(|| Error::user("nothing is served any more"))?;
        Ok((x.mul(&parameter.local(scope)?)?, parameter))
    }
}

/// What a rank serves.
struct Served(Option<RRef<Tensor>>);

fn network_here(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let h = x.matmul(w)?.tanh()?;
    let factors = h.matmul(w)?.matmul(x)?.matmul(w)?;
    factors.matmul(&h)?.add(&h)
}

fn numbers(shape: &[usize], seed: usize) -> Tensor {
    let n = shape.iter().product::<usize>();
    let values = (0..n).map(|i| ((i * 37 + seed * 101) % 97) as f64 / 97.0 - 0.5).collect();
    Tensor::from_vec(values, shape).unwrap()
}

fn dense(gradient: Option<Gradient>) -> Vec<f64> {
    Tensor::from_data(gradient.expect("a gradient").to_dense().unwrap())
        .to_vec()
        .unwrap()
}

/// Leaves of a test, and the tensors that are computed with: themselves, or rows that are looked up in them, whose gradients are sparse.
fn leaves(sparse: bool) -> Result<[(Tensor, Tensor); 2]> {
    let one = |seed| -> Result<(Tensor, Tensor)> {
        if sparse {
            let table = numbers(&[8, 3], seed).parameter()?;
            let rows = table.embedding(&Tensor::from_vec(vec![6i64, 1, 1], [3])?)?;
            Ok((table, rows))
        } else {
            let leaf = numbers(&[3, 3], seed).parameter()?;
            Ok((leaf.clone(), leaf))
        }
    };
    Ok([one(1)?, one(2)?])
}

type Pair<'a> = [&'a Tensor; 2];

/// Runs a function here, and then as calls and by references on every rank: the same gradients, and the same ones absent.
fn agrees(
    world: &World,
    here: &dyn Fn(Pair<'_>) -> Result<Tensor>,
    there: &dyn Fn(&Context, u32, Pair<'_>) -> Result<Tensor>,
) -> Result<()> {
    for sparse in [false, true] {
        let local = leaves(sparse)?;
        here([&local[0].1, &local[1].1])?.sum()?.backward()?;
        let expected = local.map(|(leaf, _)| leaf.grad());
        for to in 0..world.size() {
            let far = leaves(sparse)?;
            let ctx = world.context()?;
            let y = there(&ctx, to, [&far[0].1, &far[1].1])?;
            ctx.backward(&[y.sum()?])?;
            for ((leaf, _), expected) in far.iter().zip(&expected) {
                let found = ctx.local_gradient(leaf)?;
                assert_eq!(found.is_some(), expected.is_some());
                if let Some(expected) = expected {
                    assert!(!sparse || found.as_ref().is_some_and(Gradient::is_sparse));
                    for (a, b) in dense(found).into_iter().zip(dense(Some(expected.clone()))) {
                        assert!((a - b).abs() <= 1e-14 * b.abs().max(1.0), "{a} {b}");
                    }
                }
                assert!(leaf.grad().is_none(), "a context's gradients are its own");
            }
        }
    }
    Ok(())
}

/// One call, by value and by reference, to others and to oneself.
fn simple(world: &World) -> Result<()> {
    agrees(world, &|[a, b]| a.add(b), &|ctx, to, [a, b]| ctx.call(to, add, (a, b)))?;
    agrees(world, &|[a, b]| a.add(b), &|ctx, to, [a, b]| {
        ctx.fetch(&ctx.remote(to, add, (a, b))?)
    })?;
    agrees(world, &|[a, b]| a.mul(b)?.sum(), &|ctx, to, [a, b]| ctx.call(to, total, (a, b)))
}

/// Functions of several operations, and functions that call others.
fn functions(world: &World) -> Result<()> {
    agrees(world, &|[a, b]| network_here(a, b), &|ctx, to, [a, b]| {
        ctx.call(to, network, (a, b))
    })?;
    agrees(world, &|[a, b]| network_here(&a.add(b)?.mul(a)?, b), &|ctx, to, [a, b]| {
        ctx.call(to, nested, (world.owner(to + 1), a, b))
    })?;
    // One operand without a gradient: the flag arrives, and nothing flows there.
    let constant = numbers(&[3, 3], 7);
    agrees(world, &|[a, _]| a.mul(&constant)?.mul(a), &|ctx, to, [a, _]| {
        ctx.call(to, only_if_required, (a, &constant))
    })?;
    agrees(world, &|[a, b]| a.sub(b), &|ctx, to, [a, b]| ctx.call(to, only_if_required, (a, b)))
}

/// A graph of one rank, in a context: ones, for both.
fn without_calls(world: &World) -> Result<()> {
    let (a, b) = (numbers(&[3, 3], 1).parameter()?, numbers(&[3, 3], 2).parameter()?);
    let ctx = world.context()?;
    ctx.backward(&[a.add(&b)?.sum()?])?;
    assert_eq!(ctx.gradients()?.len(), 2);
    assert_eq!(
        (dense(ctx.local_gradient(&a)?), dense(ctx.local_gradient(&b)?)),
        (vec![1.0; 9], vec![1.0; 9])
    );
    Ok(())
}

/// A tensor's own gradient is neither made nor changed.
fn own_gradients_stay(world: &World) -> Result<()> {
    let (a, b) = (numbers(&[3, 3], 1).parameter()?, numbers(&[3, 3], 2).parameter()?);
    let run = || -> Result<()> {
        let ctx = world.context()?;
        ctx.backward(&[ctx.call(world.owner(1), add, (&a, &b))?.sum()?])?;
        assert_eq!(dense(ctx.local_gradient(&a)?), [1.0; 9]);
        Ok(())
    };
    run()?;
    assert!(a.grad().is_none() && b.grad().is_none());
    a.mul_scalar(5.0)?.sum()?.backward()?;
    run()?;
    assert_eq!(dense(a.grad()), [5.0; 9]);
    assert!(b.grad().is_none());
    Ok(())
}

/// A tensor that a reference holds: used by its owner, by another rank, and through a third.
fn held_tensors(world: &World) -> Result<()> {
    for owner in 0..world.size() {
        for to in 0..world.size() {
            let held = world.put(owner, numbers(&[3, 3], 1))?;
            let b = numbers(&[3, 3], 2).parameter()?;
            for through in [None, Some(world.owner(to + 1))] {
                let ctx = world.context()?;
                let y = match through {
                    None => ctx.call(to, add_to, (&held, &b))?,
                    Some(third) => ctx.call(to, add_on, (third, &held, &b))?,
                };
                ctx.backward(&[y.mul_scalar(3.0)?.sum()?])?;
                assert_eq!(dense(ctx.gradient(&held)?), [3.0; 9]);
                assert_eq!(dense(ctx.local_gradient(&b)?), [3.0; 9]);
            }
        }
    }
    Ok(())
}

/// Only the result requires a gradient: the rank that made it has one, of ones.
fn made_by_the_callee(world: &World) -> Result<()> {
    for to in 0..world.size() {
        for by_reference in [false, true] {
            let ctx = world.context()?;
            let y = match by_reference {
                false => ctx.call(to, made_there, ())?,
                true => ctx.fetch(&ctx.remote(to, made_there, ())?)?,
            };
            ctx.backward(&[y.sum()?])?;
            assert_eq!(world.call(to, gradients_of, (ctx.id(),))?, [[1.0; 9]]);
            assert_eq!(ctx.gradients()?.is_empty(), to != world.rank());
        }
    }
    Ok(())
}

/// What takes no part in the roots has a gradient of zeros if it was part of a value that does.
fn unused(world: &World) -> Result<()> {
    let to = world.owner(1);
    let tensors: Vec<Tensor> = (0..3).map(|i| numbers(&[3], i).parameter()).collect::<Result<_>>()?;
    let ctx = world.context()?;
    let y = ctx.call(to, stack, (&tensors,))?;
    let (first, last) = (y.slice(0, 0, 1, 1)?, y.slice(0, 2, 3, 1)?);
    ctx.backward(&[first.mul(&last)?.sum()?])?;
    assert_eq!(dense(ctx.local_gradient(&tensors[0])?), tensors[2].to_vec::<f64>()?);
    assert_eq!(dense(ctx.local_gradient(&tensors[1])?), [0.0; 3]);
    assert_eq!(dense(ctx.local_gradient(&tensors[2])?), tensors[0].to_vec::<f64>()?);
    // Three of five results.
    let x = numbers(&[10, 2], 5).parameter()?;
    let ctx = world.context()?;
    let parts = ctx.call(to, split, (&x,))?;
    ctx.backward(&[parts[0].mul(&parts[2])?.mul(&parts[4])?.sum()?])?;
    let local = numbers(&[10, 2], 5).parameter()?;
    let parts = local.split(&[2; 5], 0)?;
    parts[0].mul(&parts[2])?.mul(&parts[4])?.sum()?.backward()?;
    assert_eq!(dense(ctx.local_gradient(&x)?), dense(local.grad()));
    assert_eq!(dense(local.grad())[4..8], [0.0; 4]);
    Ok(())
}

/// Four roots of four calls are summed.
fn several_roots(world: &World) -> Result<()> {
    let roots =
        |a: &Tensor, b: &Tensor| -> Result<Vec<Tensor>> { Ok(vec![a.add(b)?.sum()?, a.mul(b)?.sum()?, a.cos()?.sum()?, (a / b)?.sum()?]) };
    let (a, b) = (vector(&[1.0, 2.0, -3.0]).parameter()?, vector(&[0.5, -4.0, 2.0]).parameter()?);
    for root in roots(&a, &b)? {
        root.backward()?;
    }
    let expected = (dense(a.grad()), dense(b.grad()));
    let (a, b) = (a.detach().parameter()?, b.detach().parameter()?);
    let ctx = world.context()?;
    let to = |k| world.owner(k);
    let roots = [
        ctx.call(to(1), add, (&a, &b))?.sum()?,
        ctx.call(to(2), total, (&a, &b))?,
        ctx.call(to(1), cosine, (&a,))?,
        ctx.call(to(2), ratio, (&a, &b))?,
    ];
    ctx.backward(&roots)?;
    let close = |found: Vec<f64>, expected: &[f64]| {
        assert!(
            found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-13),
            "{found:?} {expected:?}"
        )
    };
    close(dense(ctx.local_gradient(&a)?), &expected.0);
    close(dense(ctx.local_gradient(&b)?), &expected.1);
    Ok(())
}

/// Single and double precision: each gradient in its own.
fn dtypes(world: &World) -> Result<()> {
    let single = Tensor::from_vec(vec![1.5f32, -2.0], [2])?.parameter()?;
    let double = vector(&[4.0, 0.1]).parameter()?;
    let ctx = world.context()?;
    ctx.backward(&[ctx.call(world.owner(1), mixed_precision, (&single, &double))?.sum()?])?;
    let gradient = ctx.local_gradient(&single)?.expect("a gradient");
    assert_eq!(gradient.dtype(), DType::F32);
    assert_eq!(Tensor::from_data(gradient.to_dense()?).to_vec::<f32>()?, [4.0, 0.1]);
    assert_eq!(dense(ctx.local_gradient(&double)?), [1.5, -2.0]);
    Ok(())
}

/// A thousand backwards through one recorded call.
fn thousand(world: &World) -> Result<()> {
    let (a, b) = (numbers(&[3], 1).parameter()?, numbers(&[3], 2).parameter()?);
    let ctx = world.context()?;
    let loss = ctx.call(world.owner(1), add, (&a, &b))?.sum()?;
    let keep = BackwardOptions {
        retain_graph: true,
        ..Default::default()
    };
    for _ in 0..1000 {
        ctx.backward_with(&[&loss], keep)?;
    }
    assert_eq!(dense(ctx.local_gradient(&a)?), [1000.0; 3]);
    Ok(())
}

fn values(world: &World) -> Result<()> {
    let all = [
        simple as fn(&World) -> Result<()>,
        functions,
        without_calls,
        own_gradients_stay,
        held_tensors,
        made_by_the_callee,
        unused,
        several_roots,
        dtypes,
        thousand,
    ];
    all.iter().try_for_each(|f| f(world))
}

/// Deep in a chain over all ranks and home again, one rank's adjoint fails: the root gets its text and its name, and the context goes on.
fn errors(world: &World) -> Result<()> {
    let route: Vec<u32> = (0..8).map(|k| world.owner(k + 2)).collect();
    for faulty in 0..world.size() {
        let ctx = world.context()?;
        let x = vector(&[1.0]).parameter()?;
        let y = ctx.call(world.owner(1), chain, (&x, route.clone(), faulty))?;
        let error = ctx.backward(&[y.sum()?]).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Backward { rank, .. } if *rank == faulty),
            "{error}"
        );
        assert!(error.to_string().contains("Simulate error on backward pass"), "{error}");
        assert!(ctx.local_gradient(&x)?.is_none());
        let y = ctx.call(world.owner(1), chain, (&x, route.clone(), u32::MAX))?;
        ctx.backward(&[y.sum()?])?;
        assert_eq!(dense(ctx.local_gradient(&x)?), [512.0]);
    }
    Ok(())
}

/// Every rank serves a parameter, and trains with those of three ranks at once: each trainer's context has gradients of its own, also on the server.
fn trainers() -> Outcome {
    let world = World::init()?;
    let me = world.rank();
    world.set_state(Served(Some(world.put(me, vector(&[1.0 + f64::from(me), -1.0]))?)));
    world.serve()?;
    let train = &|trainer: u32| -> Result<()> {
        let server = world.owner(me + trainer);
        for turn in 0..20 {
            let factor = f64::from(1000 * me + 100 * trainer + turn);
            let ctx = world.context()?;
            let x = vector(&[factor, 2.0 * factor]).parameter()?;
            let (y, parameter) = ctx.call(server, served, (&x,))?;
            ctx.backward(&[y.sum()?])?;
            assert_eq!(dense(ctx.gradient(&parameter)?), [factor, 2.0 * factor]);
            assert_eq!(dense(ctx.local_gradient(&x)?), parameter.fetch()?.to_vec::<f64>()?);
            let there = world.call(server, gradients_of, (ctx.id(),))?;
            assert!(
                there.contains(&vec![factor, 2.0 * factor]) && there.len() == if server == me { 2 } else { 1 },
                "{there:?}"
            );
            ctx.release()?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let trainers: Vec<_> = (1..=3).map(|trainer| scope.spawn(move || train(trainer))).collect();
        trainers.into_iter().try_for_each(|t| t.join().unwrap())
    })?;
    world.serve()?;
    world.set_state(Served(None));
    world.lead(nothing_alive)?;
    ok(world.finish())
}

fn on_local_ranks() -> Outcome {
    [values as fn(&World) -> Result<()>, errors]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 3],
        ..Case::new("torch_backward::gradients_are_those_of_one_rank", || led(values))
    },
    Case {
        ranks: &[1, 2, 4],
        ..Case::new("torch_backward::errors_deep_in_a_chain_come_home", || led(errors))
    },
    Case {
        ranks: &[1, 4],
        ..Case::new("torch_backward::trainers_do_not_see_each_other", trainers)
    },
    Case {
        ranks: &[0],
        ..Case::new("torch_backward::hold_on_local_ranks_too", on_local_ranks)
    },
];

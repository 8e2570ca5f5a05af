//! torch's tests of references: as arguments and results, methods, time limits, how long values live.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rankgrad::prelude::*;

use crate::case::{Case, Expect};
use crate::optimizer::vector;
use crate::settled::{led, led_locally, nothing_alive};
use crate::{Outcome, ok};

/// A counter with a method that changes it.
struct Counter {
    value: i64,
}

/// Holds references, also one to itself.
#[derive(Default)]
struct Knot(Mutex<Vec<RRef<Knot>>>);

remote! {
    fn number(scope: &Scope, value: i64) -> Result<i64> {
        let _ = scope;
        Ok(value)
    }

    fn add_tensors(scope: &Scope, a: Tensor, b: Tensor, c: Tensor) -> Result<Tensor> {
        let _ = scope;
        a.add(&b)?.add(&c)
    }

    fn add(scope: &Scope, a: RRef<i64>, b: RRef<i64>) -> Result<i64> {
        let _ = scope;
        Ok(a.fetch()? + b.fetch()?)
    }

    fn ten_more(scope: &Scope, a: RRef<i64>) -> Result<i64> {
        let _ = scope;
        Ok(a.fetch()? + 10)
    }

    /// A value that is made of one that another rank makes.
    fn nested(scope: &Scope, to: u32, value: i64) -> Result<i64> {
        let far = scope.remote(to, number, (value,))?;
        Ok(scope.fetch(&far)? + 3)
    }

    fn two_more(scope: &Scope, to: u32, value: i64) -> Result<Vec<RRef<i64>>> {
        Ok(vec![scope.remote(to, number, (value,))?, scope.remote(to, number, (value + 1,))?])
    }

    fn three_of_mine(scope: &Scope) -> Result<Vec<RRef<i64>>> {
        (1..=3).map(|k| scope.share(k)).collect()
    }

    fn new_counter(scope: &Scope, value: i64) -> Result<Counter> {
        let _ = scope;
        Ok(Counter { value })
    }

    fn increment(scope: &Scope, counter: &mut Counter, by: i64) -> Result<i64> {
        let _ = scope;
        counter.value += by;
        Ok(counter.value)
    }

    fn increment_by_reference(scope: &Scope, counter: RRef<Counter>, by: i64) -> Result<i64> {
        scope.call_mut(&counter, increment, (by,))
    }

    fn slow_increment(scope: &Scope, counter: &mut Counter, by: i64, millis: u64) -> Result<i64> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(millis));
        counter.value += by;
        Ok(counter.value)
    }

    fn slow_number(scope: &Scope, value: i64, millis: u64) -> Result<i64> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(millis));
        Ok(value)
    }

    /// Reads a reference long after it came.
    fn late_look(scope: &Scope, value: RRef<i64>, millis: u64) -> Result<i64> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(millis));
        value.fetch()
    }

    fn new_knot(scope: &Scope) -> Result<Knot> {
        let _ = scope;
        Ok(Knot::default())
    }

    fn tie(scope: &Scope, knot: &mut Knot, to: RRef<Knot>) -> Result<()> {
        let _ = scope;
        knot.0.lock().unwrap().push(to);
        Ok(())
    }

    /// A value for its owner to go back from, with its leaf.
    fn square(scope: &Scope, w: RRef<Tensor>) -> Result<Tensor> {
        let w = w.local(scope)?;
        w.mul(&w)?.sum()
    }
}

fn values(world: &World) -> Result<()> {
    for to in 0..world.size() {
        let x = |k: f64| vector(&[k, 2.0 * k]);
        let far = world.remote(to, add_tensors, (x(1.0), x(2.0), x(3.0)))?;
        assert_eq!(world.fetch(&far)?.to_vec::<f64>()?, [6.0, 12.0]);
        assert_eq!(far.is_local(), to == world.rank());
        if far.is_local() {
            assert_eq!(far.local(world)?.to_vec::<f64>()?, [6.0, 12.0]);
        }
        // Ten on their way at once.
        let all: Vec<_> = (0..10)
            .map(|k| world.remote(to, add_tensors, (x(f64::from(k)), x(1.0), x(1.0))))
            .collect::<Result<_>>()?;
        for (k, far) in all.iter().enumerate() {
            assert_eq!(far.fetch()?.to_vec::<f64>()?, [k as f64 + 2.0, 2.0 * k as f64 + 4.0]);
        }
    }
    Ok(())
}

/// References of any owner as arguments of every kind of call to any rank; and results that are references.
fn arguments(world: &World) -> Result<()> {
    let size = world.size();
    for owner in 0..size {
        for to in 0..size {
            let mine = world.share(40)?;
            let (a, b) = (world.remote(owner, number, (1,))?, world.remote(owner, number, (6,))?);
            assert_eq!(world.call(to, add, (&a, &b))?, 7);
            assert_eq!(world.call_async(to, add, (&a, &mine))?.wait()?, 41);
            assert_eq!(world.remote(to, add, (&b, &mine))?.fetch()?, 46);
            assert_eq!(world.call_async(to, ten_more, (&mine,))?.wait()?, 50);
            assert_eq!(world.remote(to, nested, (owner, 4))?.fetch()?, 7);
            // A reference to a list of references to a third rank's values.
            let list = world.remote(to, two_more, (owner, 8))?;
            let found: Vec<i64> = list.fetch()?.iter().map(RRef::fetch).collect::<Result<_>>()?;
            assert_eq!(found, [8, 9]);
            let theirs = world.call(to, three_of_mine, ())?;
            assert!(theirs.iter().all(|r| r.owner() == to));
            let more: Vec<_> = theirs.iter().map(|r| world.remote(owner, ten_more, (r,))).collect::<Result<_>>()?;
            let more: Vec<i64> = more.iter().map(RRef::fetch).collect::<Result<_>>()?;
            assert_eq!(more, [11, 12, 13]);
        }
    }
    Ok(())
}

/// An object is changed by all three kinds of calls.
fn methods(world: &World) -> Result<()> {
    for owner in 0..world.size() {
        let counter = world.remote(owner, new_counter, (10,))?;
        assert_eq!(world.call_mut(&counter, increment, (2,))?, 12);
        assert_eq!(world.call_mut_async(&counter, increment, (5,))?.wait()?, 17);
        for to in 0..world.size() {
            let after = world.remote(to, increment_by_reference, (&counter, 7))?;
            assert_eq!(after.fetch()?, 24 + 7 * i64::from(to));
        }
        let error = counter.fetch_as_number(world).unwrap_err();
        assert!(error.to_string().contains("Counter"), "{error}");
    }
    Ok(())
}

/// A wrong type, which torch meets as a missing attribute.
trait AsNumber {
    fn fetch_as_number(&self, world: &World) -> Result<i64>;
}

impl AsNumber for RRef<Counter> {
    fn fetch_as_number(&self, world: &World) -> Result<i64> {
        world.attach::<i64>(self.id())?.fetch()
    }
}

/// Owners can be compared and are keys; so can references; what they print names value, type and owner.
#[allow(clippy::mutable_key_type, reason = "keys are ids, which never change")]
fn identity(world: &World) -> Result<()> {
    let (a, b) = (
        world.remote(world.owner(1), number, (1,))?,
        world.remote(world.owner(1), number, (1,))?,
    );
    assert_eq!((a.owner(), a.owner()), (b.owner(), world.owner(1)));
    assert!(a != b && a == a.clone() && a.owner() != 23);
    let mut by_owner = HashMap::from([(a.owner(), "first")]);
    assert_eq!(by_owner.insert(b.owner(), "second"), Some("first"));
    let by_reference = HashMap::from([(a.clone(), 1), (b.clone(), 2)]);
    assert_eq!(by_reference[&a] + by_reference[&b], 3);
    assert_eq!(format!("{a:?}"), format!("RRef<i64>({} on rank {})", a.id().value, a.owner()));
    assert_eq!(world.share(35)?.local(world)?, 35);
    Ok(())
}

/// What is alive on a rank: values that it owns and references that it holds; a local value too, until it is dropped.
fn counted(world: &World) -> Result<()> {
    let far = world.owner(1);
    let mine = world.share(1)?;
    let theirs = [world.remote(far, number, (1,))?, world.remote(far, number, (2,))?];
    theirs[1].fetch()?;
    // Its answer may be there before that of the other.
    let start = Instant::now();
    while world.counters(world.rank())?.requests > 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "a request without an answer");
    }
    let (here, there) = (world.counters(world.rank())?, world.counters(far)?);
    if far == world.rank() {
        assert_eq!((here.values, here.handles), (3, 3));
    } else {
        assert_eq!((here.values, here.handles), (1, 3));
        assert_eq!((there.values, there.handles), (2, 0));
    }
    assert_eq!((here.requests, there.tasks), (0, 0));
    drop((mine, theirs));
    nothing_alive(world)
}

/// A function can rely on its arguments: its caller may forget them at once, also where the owner is a third rank.
fn confirmed(world: &World) -> Result<()> {
    for owner in 0..world.size() {
        for to in 0..world.size() {
            let value = world.remote(owner, number, (5,))?;
            let (call, reference) = (
                world.call_async(to, late_look, (&value, 20))?,
                world.remote(to, late_look, (&value, 20))?,
            );
            drop(value);
            assert_eq!((call.wait()?, reference.fetch()?), (5, 5));
        }
    }
    Ok(())
}

/// A backward from a value that its owner holds: there, and from afar; twice is twice.
fn backward(world: &World) -> Result<()> {
    for owner in 0..world.size() {
        let w = world.put(owner, vector(&[1.0, 2.0]))?;
        let ctx = world.context()?;
        let value = ctx.remote(owner, square, (&w,))?;
        let keep = BackwardOptions {
            retain_graph: true,
            ..Default::default()
        };
        let root = if value.is_local() { value.local(&ctx)? } else { ctx.fetch(&value)? };
        for times in 1..=2 {
            ctx.backward_with(&[&root], keep)?;
            let gradient = ctx.gradient(&w)?.expect("a gradient").to_dense()?;
            assert_eq!(
                Tensor::from_data(gradient).to_vec::<f64>()?,
                [2.0 * f64::from(times), 4.0 * f64::from(times)]
            );
        }
        // Of a fetch that no context saw there is nothing to go back from.
        let error = ctx.backward(&[value.fetch()?]).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::RootWithoutGradient { root: 0 }), "{error}");
    }
    Ok(())
}

fn timed_out<T>(result: Result<T>) {
    match result.err().map(|e| (matches!(e.kind(), ErrorKind::Timeout { .. }), e)) {
        Some((true, _)) => {}
        Some((false, other)) => panic!("{other}"),
        None => panic!("was in time"),
    }
}

/// A limit holds for every way to use a reference, on its owner too; what was asked for happens all the same, and later looks find it.
fn limits(world: &World) -> Result<()> {
    for owner in [world.owner(1), world.rank()] {
        let hurried = world.timeout(Duration::from_millis(20));
        let counter = world.remote(owner, new_counter, (0,))?;
        timed_out(hurried.call_mut(&counter, slow_increment, (1, 300)));
        timed_out(hurried.call_mut_async(&counter, slow_increment, (1, 300))?.wait());
        let late = hurried.remote(owner, slow_number, (3, 600))?;
        let begun = Instant::now();
        timed_out(hurried.fetch(&late));
        timed_out(hurried.call(owner, ten_more, (&late,)));
        // One that waits already gives up at its own limit.
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| world.timeout(Duration::from_millis(150)).fetch(&late));
            timed_out(waits.join().unwrap());
        });
        assert!(
            begun.elapsed() < Duration::from_millis(600),
            "nobody waited for the value: {:?}",
            begun.elapsed()
        );
        assert_eq!(late.fetch()?, 3);
        assert_eq!(world.call_mut(&counter, increment, (0,))?, 2);
        drop((counter, late));
        nothing_alive(world)?;
    }
    Ok(())
}

/// References that refer to each other across ranks don't keep the end from coming; what they held is reported.
fn knots() -> Outcome {
    let world = World::builder().env_logger().start()?;
    world.lead(|world| {
        let (a, b) = (world.remote(0, new_knot, ())?, world.remote(1, new_knot, ())?);
        world.call_mut(&a, tie, (&b,))?;
        world.call_mut(&b, tie, (&a,))?;
        world.call_mut(&b, tie, (&b,))
    })?;
    ok(world.finish())
}

fn travel(world: &World) -> Result<()> {
    [values as fn(&World) -> Result<()>, arguments, methods]
        .iter()
        .try_for_each(|f| f(world))
}

fn live(world: &World) -> Result<()> {
    let all = [identity as fn(&World) -> Result<()>, counted, confirmed, backward];
    all.iter().try_for_each(|f| f(world).and_then(|()| nothing_alive(world)))
}

fn on_local_ranks() -> Outcome {
    [travel as fn(&World) -> Result<()>, live, limits]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 3],
        ..Case::new("torch_rref::arguments_results_and_methods", || led(travel))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("torch_rref::live_as_long_as_they_must", || led(live))
    },
    Case {
        ranks: &[1, 2],
        alone: true,
        ..Case::new("torch_rref::limits_hold_and_the_value_comes_late", || led(limits))
    },
    Case {
        ranks: &[2],
        env: &[("RUST_LOG", "warn")],
        expect: Expect::Says(&[("is still held at the end", 2)]),
        ..Case::new("torch_rref::cycles_do_not_keep_the_end_from_coming", knots)
    },
    Case {
        ranks: &[0],
        ..Case::new("torch_rref::hold_on_local_ranks_too", on_local_ranks)
    },
];

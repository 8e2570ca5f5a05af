//! References: where they travel, what they refer to, and that values live as long as somebody holds them.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rankgrad::local;
use rankgrad::prelude::*;
use rankgrad::rpc::{Module, wait_all};
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::settled::{keep_log, led, led_locally, logged, nothing_alive};
use crate::{Outcome, ok};

/// References in each kind of container.
#[derive(Serialize, Deserialize, Clone)]
struct Bundle {
    one: RRef<f64>,
    many: Vec<RRef<f64>>,
    maybe: Option<RRef<f64>>,
    never: Option<RRef<f64>>,
    named: HashMap<String, (u32, RRef<f64>)>,
    tensor: RRef<Tensor>,
}

impl Bundle {
    fn sum(&self) -> Result<f64> {
        let mut sum = self.one.fetch()? + self.tensor.fetch()?.item::<f64>()?;
        assert!(self.never.is_none());
        let named = self.named.values().map(|n| &n.1);
        for rref in self.many.iter().chain(&self.maybe).chain(named) {
            sum += rref.fetch()?;
        }
        Ok(sum)
    }
}

/// A value that isn't serialisable, with a weight.
struct Model {
    weight: Tensor,
    calls: u64,
}

impl Module for Model {
    fn parameters(&self) -> Vec<Tensor> {
        vec![self.weight.clone()]
    }
}

/// A place on each rank where others leave references.
#[derive(Default)]
struct Shelf(Mutex<Vec<Item>>);

/// A reference, and what it must lead to.
#[derive(Serialize, Deserialize, Clone)]
struct Item {
    value: u64,
    rref: RRef<u64>,
}

remote! {
    fn number(scope: &Scope, value: f64) -> Result<f64> {
        let _ = scope;
        Ok(value)
    }

    /// Sends a reference along a route; the last rank reads it.
    fn along(scope: &Scope, route: Vec<u32>, rref: RRef<f64>) -> Result<f64> {
        match route.split_first() {
            Some((next, rest)) => scope.call(*next, along, (rest.to_vec(), rref)),
            None if rref.is_local() => rref.local(scope),
            None => rref.fetch(),
        }
    }

    fn give_back(scope: &Scope, rref: RRef<f64>) -> Result<RRef<f64>> {
        let _ = scope;
        Ok(rref)
    }

    /// A reference to a value of a third rank, which this one asked for.
    fn made_on(scope: &Scope, owner: u32, value: f64) -> Result<RRef<f64>> {
        scope.remote(owner, number, (value,))
    }

    fn bundle(scope: &Scope, first: u32) -> Result<Bundle> {
        let on = |k: u32| scope.remote((first + k) % scope.size(), number, (f64::from(k),));
        Ok(Bundle {
            one: on(1)?,
            many: vec![on(2)?, on(3)?, scope.share(4.0)?],
            maybe: Some(on(5)?),
            never: None,
            named: [("six".to_owned(), (6, on(6)?))].into(),
            tensor: scope.put(scope.owner_after(7), Tensor::scalar(7.0))?,
        })
    }

    fn sum_of(scope: &Scope, near: Bundle, extra: RRef<Bundle>) -> Result<f64> {
        let _ = scope;
        Ok(near.sum()? + extra.fetch()?.sum()?)
    }

    fn new_model(scope: &Scope, value: f64) -> Result<Model> {
        let _ = scope;
        Ok(Model { weight: Tensor::from_vec(vec![value; 3], [3])?.parameter()?, calls: 0 })
    }

    /// Not atomic on purpose: wrong if two of them run at once.
    fn tick(scope: &Scope, model: &mut Model, pause: u64) -> Result<u64> {
        let _ = scope;
        let calls = model.calls;
        std::thread::sleep(Duration::from_micros(pause));
        model.calls = calls + 1;
        Ok(model.calls)
    }

    fn hammer(scope: &Scope, model: RRef<Model>, times: u64) -> Result<Vec<u64>> {
        let futures: Vec<_> = (0..times).map(|_| scope.call_mut_async(&model, tick, (200,))).collect::<Result<_>>()?;
        wait_all(futures)
    }

    fn scaled(scope: &Scope, model: RRef<Model>, x: Tensor) -> Result<Tensor> {
        let _ = scope;
        let weight = model.with(|m| m.weight.clone())?;
        x.mul(&weight)
    }

    fn title(scope: &Scope) -> Result<String> {
        Ok(scope.state::<String>()?.as_str().to_owned())
    }

    fn kept(scope: &Scope, value: u64) -> Result<u64> {
        let _ = scope;
        Ok(value)
    }

    fn shelve(scope: &Scope, item: Item) -> Result<usize> {
        let shelf = scope.state::<Shelf>()?;
        let mut shelf = shelf.0.lock().unwrap();
        shelf.push(item);
        Ok(shelf.len())
    }

    fn take(scope: &Scope, which: u64) -> Result<Option<Item>> {
        let shelf = scope.state::<Shelf>()?;
        let mut shelf = shelf.0.lock().unwrap();
        let n = shelf.len() as u64;
        Ok((n > 0).then(|| shelf.swap_remove((which % n) as usize)))
    }

    fn look(scope: &Scope, which: u64) -> Result<Option<Item>> {
        let shelf = scope.state::<Shelf>()?;
        let shelf = shelf.0.lock().unwrap();
        Ok(shelf.get(which as usize % shelf.len().max(1)).cloned())
    }

    fn relay(scope: &Scope, route: Vec<u32>, item: Item) -> Result<Item> {
        match route.split_first() {
            Some((next, rest)) => scope.call(*next, relay, (rest.to_vec(), item)),
            None => Ok(item),
        }
    }

    fn refuse(scope: &Scope, rref: RRef<f64>) -> Result<RRef<f64>> {
        let _ = (scope, rref.clone());
        Err(Error::user("no"))
    }

    fn break_down(scope: &Scope, rref: RRef<f64>) -> Result<RRef<f64>> {
        panic!("rank {} breaks down over {rref:?}", scope.rank())
    }

    fn slowly(scope: &Scope, rref: RRef<f64>) -> Result<(RRef<f64>, RRef<f64>)> {
        std::thread::sleep(Duration::from_millis(150));
        Ok((rref, scope.share(1.5)?))
    }
}

/// A rank of the world for the `k`-th thing.
trait OwnerAfter: Calls {
    fn owner_after(&self, k: u32) -> u32 {
        (self.rank() + k) % self.size()
    }
}

impl<C: Calls + ?Sized> OwnerAfter for C {}

fn travel(world: &World) -> Result<()> {
    let size = world.size();
    for owner in 0..size {
        let rref = world.remote(owner, number, (2.5,))?;
        assert_eq!((rref.owner(), rref.is_local()), (owner, owner == 0));
        let clones = vec![rref.clone(); 3];
        assert!(clones.iter().all(|c| *c == rref));
        for a in 0..size {
            for b in 0..size {
                assert_eq!(world.call(a, along, (vec![b], &rref))?, 2.5);
                assert_eq!(world.call(a, along, (vec![b, a, owner, b], rref.clone()))?, 2.5);
                let made = world.call(a, made_on, (b, 0.5))?;
                assert_eq!((made.owner(), made.fetch()?), (b, 0.5));
                let again = world.call(owner, give_back, (&made,))?;
                drop(made); // the copy that came back must do
                assert_eq!(world.fetch(&again)?, 0.5);
            }
            assert_eq!(world.call(a, give_back, (&rref,))?, rref);
        }
        drop(rref);
        assert_eq!(clones[2].fetch()?, 2.5);
    }
    Ok(())
}

fn nested(world: &World) -> Result<()> {
    for a in 0..world.size() {
        let far = world.remote(a, bundle, (a,))?; // references inside of a referred value
        let near = world.call(world.owner(a + 1), bundle, (a,))?;
        assert_eq!(near.sum()?, 28.0);
        for b in 0..world.size() {
            assert_eq!(world.call(b, sum_of, (near.clone(), &far))?, 56.0);
        }
        let copy = far.fetch()?;
        drop(far);
        assert_eq!(copy.sum()?, 28.0);
    }
    Ok(())
}

/// Fetches into memory that MPI may write to itself, also with a time limit that may end meanwhile.
fn large_values(world: &World, owner: u32) -> Result<()> {
    let n = 1_000_000;
    let w = world.put(owner, Tensor::from_vec((0..n).map(|i| i as f64).collect(), [n / 10, 10])?)?;
    let right = |view: &ndarray::ArrayD<f64>| view.iter().zip(0..n).all(|(&x, i)| x == i as f64);
    let mut view = ndarray::ArrayD::<f64>::zeros(vec![n / 10, 10]);
    world.fetch_into(&w, view.view_mut())?;
    assert!(right(&view));
    let mut columns = ndarray::ArrayD::<f64>::zeros(vec![10, n / 10]);
    world.fetch_into(&w, columns.view_mut().reversed_axes())?;
    assert!(right(&columns.reversed_axes()));
    let mut narrow = ndarray::ArrayD::<f64>::zeros(vec![10, n / 10]);
    let error = world.fetch_into(&w, narrow.view_mut()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Shape { .. }), "{error}");
    for limit in [1, 200, 1_000, 3_000, 10_000] {
        view.fill(-1.0);
        match world.timeout(Duration::from_micros(limit)).fetch_into(&w, view.view_mut()) {
            Ok(()) => assert!(right(&view)),
            Err(error) => assert!(matches!(error.kind(), ErrorKind::Timeout { .. }), "{error}"),
        }
        view.fill(-1.0);
        std::thread::sleep(Duration::from_millis(5));
        assert!(view.iter().all(|&x| x == -1.0), "written to after it was given back");
    }
    world.fetch_into(&w, view.view_mut())?;
    assert!(right(&view));
    Ok(())
}

fn values(world: &World) -> Result<()> {
    for owner in 0..world.size() {
        let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?;
        let w = world.put(owner, x.clone())?;
        assert_eq!(w.fetch()?.to_vec::<f32>()?, x.to_vec::<f32>()?);
        let mut view = ndarray::ArrayD::<f32>::zeros(vec![2, 3]);
        let version = world.assign(&w, x.mul_scalar(2.0)?)?;
        assert_eq!(world.assign(&w, x.mul_scalar(3.0)?)?, version + 1);
        world.fetch_into(&w, view.view_mut())?;
        assert_eq!(view.iter().copied().collect::<Vec<_>>(), [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]);
        let mut narrow = ndarray::ArrayD::<f32>::zeros(vec![3, 2]);
        let error = world.fetch_into(&w, narrow.view_mut()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Shape { .. }), "{error}");
        let mut double = ndarray::ArrayD::<f64>::zeros(vec![2, 3]);
        let error = world.fetch_into(&w, double.view_mut()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::DType { .. }), "{error}");
        let error = world.assign(&w, Tensor::zeros(DType::F32, [3, 3])).unwrap_err();
        assert!(matches!(error.root(), ErrorKind::Shape { .. }), "{error}");
        let error = world.assign(&w, Tensor::zeros(DType::F64, [2, 3])).unwrap_err();
        assert!(matches!(error.root(), ErrorKind::DType { .. }), "{error}");
        assert_eq!(w.fetch()?.to_vec::<f32>()?[5], 18.0);

        large_values(world, owner)?;
        let ids = world.put_constant(owner, Tensor::from_vec(vec![1i64, 2], [2])?)?;
        assert_eq!(ids.fetch()?.to_vec::<i64>()?, [1, 2]);
        assert_eq!(world.assign(&ids, Tensor::from_vec(vec![true], [1])?)?, 0);
        assert_eq!(ids.fetch()?.to_vec::<bool>()?, [true]);
        let error = world.put(owner, Tensor::from_vec(vec![1i64], [1])?).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::DType { .. }), "{error}");
    }
    Ok(())
}

fn objects(world: &World) -> Result<()> {
    let owner = world.owner(1);
    let far = world.remote(owner, new_model, (3.0,))?;
    let futures: Vec<_> = (0..world.size())
        .map(|rank| world.call_async(rank, hammer, (&far, 100 / u64::from(world.size()))))
        .collect::<Result<_>>()?;
    let mut seen: Vec<u64> = wait_all(futures)?.concat();
    seen.sort();
    assert_eq!(seen, (1..=seen.len() as u64).collect::<Vec<_>>());
    let error = world.call_mut(&far, tick, (0,)).map(|n| n - seen.len() as u64)?;
    assert_eq!(error, 1);

    let weights = world.parameters(&far)?;
    assert_eq!((weights.len(), weights[0].owner()), (1, owner));
    let ctx = world.context()?;
    let y = ctx.call(owner, scaled, (&far, Tensor::from_vec(vec![1.0, 2.0, 4.0], [3])?))?;
    ctx.backward(&[y.sum()?])?;
    let gradient = ctx.gradient(&weights[0])?.expect("a gradient");
    assert_eq!(Tensor::from_data(gradient.to_dense()?).to_vec::<f64>()?, [1.0, 2.0, 4.0]);
    world.assign(&weights[0], Tensor::from_vec(vec![0.0; 3], [3])?)?;
    assert_eq!(
        world.call(owner, scaled, (&far, Tensor::ones(DType::F64, [3])))?.to_vec::<f64>()?,
        [0.0; 3]
    );
    drop(far);
    assert_eq!(weights[0].fetch()?.to_vec::<f64>()?, [0.0; 3]);
    let error = world.parameters(&weights[0]).unwrap_err();
    assert!(error.to_string().contains("Module"), "{error}");
    Ok(())
}

fn shared_and_found() -> Outcome {
    let world = World::builder().state("first".to_owned()).start()?;
    world.lead(|world| {
        let size = world.size();
        for rank in 0..size {
            assert_eq!(world.call(rank, title, ())?, "first");
        }
        world.set_state("second".to_owned());
        assert_eq!(world.call(0, title, ())?, "second");
        let mine = world.share(2.5)?;
        for rank in 0..size {
            assert_eq!(world.call(rank, along, (vec![size - 1], &mine))?, 2.5);
            let theirs = world.remote(rank, number, (4.5,))?;
            let found: RRef<f64> = world.attach(theirs.id())?;
            drop(theirs);
            assert_eq!(found.fetch()?, 4.5);
        }
        let object = world.share_object(Model {
            weight: Tensor::scalar(1.0),
            calls: 41,
        })?;
        assert_eq!(world.call(size - 1, hammer, (&object, 1))?, [42]);
        assert_eq!(object.with(|m| m.calls)?, 42);
        drop((mine, object));
        nothing_alive(world)
    })?;
    ok(world.finish())
}

/// One rank's part of a random program.
fn wander(world: &World, seed: u64, steps: usize) -> Result<()> {
    let me = u64::from(world.rank());
    let mut random = ChaCha8Rng::seed_from_u64(seed * 1000 + me);
    let mut draw = move |n: u64| random.next_u64() % n;
    let mut items: Vec<Item> = Vec::new();
    let mut unwatched = Vec::new();
    for step in 0..steps as u64 {
        let to = draw(world.size().into()) as u32;
        let value = (me << 32) + step;
        match draw(9) {
            0 => items.push(Item {
                value,
                rref: world.remote(to, kept, (value,))?,
            }),
            1 => items.push(Item {
                value,
                rref: world.share(value)?,
            }),
            2 if !items.is_empty() => {
                let item = items.swap_remove(draw(items.len() as u64) as usize);
                assert_eq!(world.fetch(&item.rref)?, item.value, "seed {seed}");
            }
            3 if !items.is_empty() => {
                let item = items[draw(items.len() as u64) as usize].clone();
                world.call(to, shelve, (item,))?;
            }
            4 => items.extend(world.call(to, take, (draw(1000),))?),
            5 => items.extend(world.call(to, look, (draw(1000),))?),
            6 if !items.is_empty() => {
                let route: Vec<u32> = (0..draw(4)).map(|_| draw(world.size().into()) as u32).collect();
                let item = items.swap_remove(draw(items.len() as u64) as usize);
                items.push(world.call(to, relay, (route, item))?);
            }
            7 if !items.is_empty() => {
                // Never waited for.
                let item = items.swap_remove(draw(items.len() as u64) as usize);
                unwatched.push(world.call_async(to, relay, (vec![0], item))?);
                unwatched.truncate(3);
            }
            _ => drop(items.pop()),
        }
    }
    for item in &items {
        assert_eq!(item.rref.fetch()?, item.value, "seed {seed}");
    }
    while world.call(world.rank(), take, (0,))?.is_some() {}
    Ok(())
}

fn random_programs(world: &World, seeds: std::ops::Range<u64>, steps: usize) -> Result<()> {
    world.set_state(Shelf::default());
    world.serve()?;
    for seed in seeds {
        wander(world, seed, steps).map_err(|e| Error::user(format!("seed {seed}: {e}")))?;
        world.serve()?;
        // Others may have left something after the shelf was cleared.
        while world.call(world.rank(), take, (0,))?.is_some() {}
        world.serve()?;
        nothing_left_here(world, seed)?;
        world.serve()?;
    }
    Ok(())
}

/// As [`nothing_alive`], when all ranks look at once: each at itself.
fn nothing_left_here(world: &World, seed: u64) -> Result<()> {
    let until = std::time::Instant::now() + Duration::from_secs(10);
    loop {
        let c = world.counters(world.rank())?;
        if (c.values, c.handles, c.requests, c.tasks) == (0, 0, 0, 0) {
            return Ok(());
        }
        assert!(std::time::Instant::now() < until, "seed {seed}: rank {}: {c:?}", world.rank());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn random() -> Outcome {
    let world = World::init()?;
    random_programs(&world, 0..20, 150)?;
    ok(world.finish())
}

fn random_locally() -> Outcome {
    ok(local::run(5, |world| random_programs(world, 100..130, 150)))
}

fn failures(world: &World) -> Result<()> {
    let size = world.size();
    for owner in 0..size {
        for to in 0..size {
            let rref = world.remote(owner, number, (1.0,))?;
            assert!(world.call(to, refuse, (&rref,)).is_err());
            assert!(world.call(to, break_down, (&rref,)).is_err());
            let never = world.remote(to, refuse, (&rref,))?;
            assert!(matches!(never.fetch().unwrap_err().kind(), ErrorKind::Creation { .. }));
            assert!(world.call(99, give_back, (&rref,)).is_err());
            let error = world.timeout(Duration::from_millis(20)).call(to, slowly, (&rref,)).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Timeout { .. }), "{error}");
            let _never_waited_for = world.call_async(to, slowly, (rref,))?;
        }
    }
    // Unserialisable arguments: nothing was sent, and the reference leads nowhere.
    for to in 0..size {
        assert!(world.remote(to, picky, (Picky,)).is_err());
    }
    Ok(())
}

/// What can't be serialised.
#[derive(Deserialize)]
struct Picky;

impl Serialize for Picky {
    fn serialize<S: serde::Serializer>(&self, _: S) -> std::result::Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("not today"))
    }
}

remote! {
    fn picky(scope: &Scope, argument: Picky) -> Result<f64> {
        let _ = (scope, argument);
        Ok(0.0)
    }
}

fn still_held() -> Outcome {
    keep_log();
    let world = World::init()?;
    let me = world.rank();
    let next = (me + 1) % world.size();
    let held = [world.remote(next, number, (1.0,))?, world.share(2.0)?];
    let tensor = world.put(next, Tensor::scalar(3.0))?;
    world.finish()?;
    let of_me = logged(&["still held", &format!("rank {me}: ")]);
    assert_eq!(of_me.len(), 3, "{of_me:?}");
    let before = (me + world_size() - 1) % world_size();
    let holder = if before == me {
        "1 handles here".into()
    } else {
        format!("by ranks [{before}]")
    };
    let tensors = logged(&["still held", "Tensor", &format!("made for rank {before}"), &holder]);
    assert_eq!(tensors.len(), 1, "{of_me:?}");
    assert_eq!(logged(&["still held", "f64"]).len(), 2);
    let error = held[0].fetch().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::ShutDown { .. }), "{error}");
    drop((held, tensor));
    Ok(())
}

fn world_size() -> u32 {
    std::env::var(crate::launch::COUNT).ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

fn on_local_ranks() -> Outcome {
    [travel as fn(&World) -> Result<()>, nested, values, objects, failures]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("references::travel_to_any_rank_and_back", || led(travel))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("references::travel_inside_of_values", || led(nested))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("references::put_assign_fetch_and_fetch_into", || led(values))
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("references::functions_on_an_object_run_one_at_a_time", || led(objects))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("references::shared_values_objects_state_and_attach", shared_and_found)
    },
    Case {
        ranks: &[1, 2, 3, 4],
        ..Case::new("references::random_programs_leave_nothing", random)
    },
    Case {
        ranks: &[3],
        env: &[
            ("RANKGRAD_EAGER_LIMIT", "128"),
            ("RANKGRAD_SEGMENT_TAGS", "1"),
            ("RANKGRAD_RING", "1"),
        ],
        ..Case::new("references::random_programs_leave_nothing_with_small_buffers", random)
    },
    Case {
        ranks: &[0],
        ..Case::new("references::random_programs_leave_nothing_on_local_ranks", random_locally)
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("references::failed_late_and_forgotten_calls_leave_nothing", || led(failures))
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("references::values_still_held_at_the_end_are_logged", still_held)
    },
    Case {
        ranks: &[0],
        ..Case::new("references::hold_on_local_ranks_too", on_local_ranks)
    },
];

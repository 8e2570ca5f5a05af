//! What fails, and what its error says.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rankgrad::config::Settings;
use rankgrad::prelude::*;
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::settled::{keep_log, led, led_locally, logged, nothing_alive};
use crate::{Outcome, ok};

static RUNNING: AtomicU32 = AtomicU32::new(0);

/// Fails to serialise, or panics over it.
#[derive(Debug, Clone, Deserialize)]
struct Stubborn {
    panics: bool,
}

impl Serialize for Stubborn {
    fn serialize<S: serde::Serializer>(&self, _: S) -> std::result::Result<S::Ok, S::Error> {
        assert!(!self.panics, "too stubborn");
        Err(serde::ser::Error::custom("stubborn"))
    }
}

/// Can be written, with its reference, but not read.
#[derive(Debug, Clone, Serialize)]
struct Unreadable(RRef<f64>);

impl<'de> Deserialize<'de> for Unreadable {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let _read = RRef::<f64>::deserialize(deserializer)?;
        Err(serde::de::Error::custom("unreadable"))
    }
}

/// What can come, and not go.
#[derive(Debug, Clone, Deserialize)]
struct OneWay;

remote! {
    fn number(scope: &Scope, value: f64) -> Result<f64> {
        let _ = scope;
        Ok(value)
    }

    fn add_one(scope: &Scope, value: &mut f64) -> Result<f64> {
        let _ = scope;
        *value += 1.0;
        Ok(*value)
    }

    fn read_here(scope: &Scope, value: RRef<f64>) -> Result<f64> {
        value.local(scope)
    }

    fn fail(scope: &Scope, text: String) -> Result<f64> {
        let _ = scope;
        Err(Error::user(text))
    }

    fn fail_on(scope: &Scope, rank: u32, text: String) -> Result<f64> {
        scope.call(rank, fail, (text,))
    }

    fn nap(scope: &Scope, millis: u64) -> Result<u32> {
        RUNNING.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(millis));
        RUNNING.fetch_sub(1, Ordering::SeqCst);
        Ok(scope.rank())
    }

    fn numbers(scope: &Scope, n: u64) -> Result<Tensor> {
        let _ = scope;
        Ok(Tensor::ones(DType::F64, [n as usize]))
    }

    fn letters(scope: &Scope, n: u64) -> Result<String> {
        let _ = scope;
        Ok("x".repeat(n as usize))
    }

    fn length(scope: &Scope, text: String) -> Result<u64> {
        let _ = scope;
        Ok(text.len() as u64)
    }

    fn elements(scope: &Scope, x: Tensor) -> Result<u64> {
        let _ = scope;
        Ok(x.len() as u64)
    }

    fn stubborn(scope: &Scope, panics: bool) -> Result<Stubborn> {
        let _ = scope;
        Ok(Stubborn { panics })
    }

    fn one_way(scope: &Scope) -> Result<OneWay> {
        let _ = scope;
        Ok(OneWay)
    }

    /// Writes its arguments to JSON: they may leave only by calls.
    fn to_json(scope: &Scope, x: Tensor, r: RRef<f64>) -> Result<(String, String)> {
        let _ = scope;
        Ok((serde_json::to_string(&x).unwrap_err().to_string(), serde_json::to_string(&r).unwrap_err().to_string()))
    }

    /// Stops this process for a while: nobody on it answers.
    fn stop_for(scope: &Scope, seconds: f64) -> Result<()> {
        let _ = scope;
        let me = std::process::id();
        let script = format!("sleep 0.2; kill -STOP {me}; sleep {seconds}; kill -CONT {me}");
        std::process::Command::new("sh").args(["-c", &script]).spawn().map_err(Error::user)?;
        Ok(())
    }
}

fn start(settings: impl FnOnce(&mut Settings) + 'static) -> Result<World> {
    World::builder().settings(settings).start()
}

/// The error's kind fits, and its text has each of these.
macro_rules! says {
    ($error:expr, $kind:pat $(if $guard:expr)?, $texts:expr) => {{
        let error: Error = $error;
        assert!(matches!(error.kind(), $kind $(if $guard)?), "{error:?}");
        let told = error.to_string();
        for text in $texts {
            assert!(told.contains(&text.to_string()), "`{told}` lacks `{text}`");
        }
    }};
}

fn references(world: &World) -> Result<()> {
    for owner in 0..world.size() {
        let rref = world.remote(owner, number, (2.0,))?;
        let id = rref.id();
        // Another type.
        let other: RRef<String> = world.attach(id)?;
        says!(other.fetch().unwrap_err(), ErrorKind::WrongType { owner: o, .. } if *o == owner, ["fetch", "f64", "String", &id.value.to_string()]);
        let text: RRef<String> = world.remote(owner, letters, (3,))?;
        let wrong: RRef<f64> = world.attach(text.id())?;
        says!(
            world.call_mut(&wrong, add_one, ()).unwrap_err(),
            ErrorKind::Remote { .. },
            ["call_mut", "f64", "String", "add_one"]
        );
        let tensor: RRef<Tensor> = world.attach(id)?;
        says!(
            world.assign(&tensor, Tensor::scalar(1.0)).unwrap_err(),
            ErrorKind::Remote { .. },
            ["f64", "Tensor"]
        );
        // Not the owner.
        let elsewhere = world.owner(owner + 1);
        if elsewhere != owner {
            let error = world.call(elsewhere, read_here, (&rref,)).unwrap_err();
            assert!(
                matches!(error.root(), ErrorKind::NotOwner { owner: o, rank, .. } if *o == owner && *rank == elsewhere),
                "{error:?}"
            );
            says!(
                error,
                ErrorKind::Remote { .. },
                ["read_here", "local", "fetch", &id.value.to_string()]
            );
        }
        // No such id: it was freed.
        drop((rref, other, tensor, text, wrong));
        nothing_alive(world)?;
        let gone: RRef<f64> = world.attach(id)?;
        says!(gone.fetch().unwrap_err(), ErrorKind::NoSuchValue { owner: o, .. } if *o == owner, ["fetch", &format!("rank {owner}"), &id.value.to_string()]);
        let error = world.call(owner, read_here, (&gone,)).unwrap_err();
        assert!(matches!(error.root(), ErrorKind::NoSuchValue { .. }), "{error:?}");
        let error = world.call_mut(&gone, add_one, ()).unwrap_err();
        assert!(matches!(error.root(), ErrorKind::NoSuchValue { .. }), "{error:?}");
    }
    // Unknown ranks.
    let far = world.size() + 5;
    let size = world.size();
    let unknown = |error: Error| says!(error, ErrorKind::UnknownRank { rank, .. } if *rank == i64::from(far), [&format!("no rank {far} in a world of {size}")]);
    unknown(world.call(far, number, (1.0,)).unwrap_err());
    unknown(world.call_async(far, number, (1.0,)).map(drop).unwrap_err());
    unknown(world.try_call(far, number, (1.0,)).map(drop).unwrap_err());
    unknown(world.remote(far, number, (1.0,)).unwrap_err());
    unknown(world.put(far, Tensor::scalar(1.0)).unwrap_err());
    unknown(world.counters(far).unwrap_err());
    let ctx = world.context()?;
    unknown(ctx.call(far, number, (1.0,)).unwrap_err());
    drop(ctx);
    Ok(())
}

fn owners(world: &World) -> Result<()> {
    let to = world.owner(1);
    let third = world.owner(2);
    says!(world.call(to, fail, ("it is raining".to_owned(),)).unwrap_err(), ErrorKind::Remote { rank, .. } if *rank == to, ["fail", "it is raining", &format!("rank {to}")]);
    let error = world.call(to, fail_on, (third, "deep".to_owned())).unwrap_err();
    assert_eq!(*error.root(), ErrorKind::User { message: "deep".into() });
    says!(error, ErrorKind::Remote { rank, .. } if *rank == to, ["fail_on", "::fail", "deep"]);
    // A creation that failed stays failed.
    let failed = world.remote(to, fail, ("never made".to_owned(),))?;
    for rank in 0..world.size() {
        says!(failed.fetch().unwrap_err(), ErrorKind::Creation { owner, .. } if *owner == to, ["never made", "never created"]);
        let error = world.call(to, read_here, (&failed,)).unwrap_err();
        assert!(error.to_string().contains("never made"), "{error}");
        if rank != to {
            let error = world.call(rank, fetch_there, (&failed,)).unwrap_err();
            assert!(error.to_string().contains("never made"), "{error}");
        }
    }
    // Results and arguments that don't serialise.
    says!(
        world.call(to, stubborn, (false,)).unwrap_err(),
        ErrorKind::Remote { .. },
        ["stubborn", "encoded"]
    );
    says!(world.call(to, stubborn, (true,)).unwrap_err(), ErrorKind::Panic { rank, .. } if *rank == to, ["stubborn", "too stubborn"]);
    says!(
        world.call(to, one_way, ()).unwrap_err(),
        ErrorKind::Remote { .. },
        ["OneWay", "Serialize"]
    );
    let kept = world.remote(to, one_way, ())?;
    says!(
        world.call(to, take_one_way, (&kept,)).map(|()| Error::user("fine"))?,
        ErrorKind::User { .. },
        ["fine"]
    );
    says!(
        world.call(to, take_stubborn, (Stubborn { panics: false },)).unwrap_err(),
        ErrorKind::Argument { .. },
        ["encoded"]
    );
    // What can't be read, where it arrives.
    for rank in 0..world.size() {
        let inside = world.remote(rank, number, (1.0,))?;
        says!(
            world.call(to, take_unreadable, (Unreadable(inside.clone()),)).unwrap_err(),
            ErrorKind::Remote { .. },
            ["take_unreadable", "Unreadable", "decode"]
        );
        says!(
            world.call(to, unreadable, (&inside,)).unwrap_err(),
            ErrorKind::Decode { .. },
            ["Unreadable"]
        );
    }
    // A creation that panics.
    let bursting = world.remote(to, burst, ())?;
    says!(
        bursting.fetch().unwrap_err(),
        ErrorKind::Creation { .. },
        ["bursts", "never created"]
    );
    drop(bursting);
    // Outside of a call.
    let (x, r) = (Tensor::scalar(1.0), world.remote(to, number, (1.0,))?);
    let here = (
        serde_json::to_string(&x).unwrap_err().to_string(),
        serde_json::to_string(&r).unwrap_err().to_string(),
    );
    let there = world.call(to, to_json, (&x, &r))?;
    for text in [here.0, here.1, there.0, there.1] {
        assert!(text.contains("only as an argument or a result of a call"), "{text}");
    }
    drop((failed, kept, r));
    Ok(())
}

remote! {
    fn fetch_there(scope: &Scope, value: RRef<f64>) -> Result<f64> {
        scope.fetch(&value)
    }

    fn take_unreadable(scope: &Scope, value: Unreadable) -> Result<()> {
        let _ = (scope, value);
        Ok(())
    }

    fn unreadable(scope: &Scope, value: RRef<f64>) -> Result<Unreadable> {
        let _ = scope;
        Ok(Unreadable(value))
    }

    fn burst(scope: &Scope) -> Result<f64> {
        panic!("rank {} bursts", scope.rank())
    }

    fn take_one_way(scope: &Scope, value: RRef<OneWay>) -> Result<()> {
        value.local(scope).map(drop)
    }

    fn take_stubborn(scope: &Scope, value: Stubborn) -> Result<()> {
        let _ = (scope, value);
        Ok(())
    }
}

fn times() -> Outcome {
    keep_log();
    let world = start(|s| (s.timeout_s, s.status_after_s) = (0.6, 0.2))?;
    world.lead(|world| {
        let to = world.owner(1);
        // A bound on the total.
        let begun = Instant::now();
        let error = world.timeout(Duration::from_millis(100)).call(to, nap, (700,)).unwrap_err();
        assert!(begun.elapsed() < Duration::from_millis(650));
        says!(error, ErrorKind::Timeout { rank, .. } if *rank == to, ["nap", "0.1 s", &format!("rank {to}"), "RANKGRAD_TIMEOUT"]);
        // It counts from the issue.
        let future = world.timeout(Duration::from_millis(300)).call_async(to, nap, (2000,))?;
        std::thread::sleep(Duration::from_millis(250));
        let begun = Instant::now();
        says!(future.wait().unwrap_err(), ErrorKind::Timeout { .. }, ["nap", "0.3 s"]);
        assert!(begun.elapsed() < Duration::from_millis(250), "{:?}", begun.elapsed());
        let begun = Instant::now();
        let future = world.call_async(to, nap, (1000,))?;
        says!(
            future.wait_timeout(Duration::from_millis(50)).unwrap_err(),
            ErrorKind::Timeout { .. },
            ["nap"]
        );
        assert!(begun.elapsed() < Duration::from_millis(900));
        // A running function is left alone by the default, and its state is logged.
        assert_eq!(world.call_async(to, nap, (2500,))?.wait()?, to);
        let told = logged(&["nap", &format!("on rank {to}"), "running there for"]);
        assert!(!told.is_empty(), "{:?}", logged(&[""]));
        // So is one that waits for a value in the making.
        let slow = world.remote(to, nap, (1500,))?;
        assert_eq!(slow.fetch()?, to);
        assert!(!logged(&["fetch", "still being made"]).is_empty(), "{:?}", logged(&["fetch"]));
        drop(slow);
        nothing_alive(world)
    })?;
    ok(world.finish())
}

fn stopped_rank() -> Outcome {
    let world = start(|s| (s.timeout_s, s.status_after_s) = (1.0, 0.3))?;
    world.lead(|world| {
        let w = world.put(1, Tensor::scalar(1.0))?;
        let limited = world.timeout(Duration::from_secs(1));
        let optimizer = DistributedOptimizer::new(&limited, Sgd::new(1.0), [&w])?;
        let ctx = world.context()?;
        ctx.accumulate(&w, Gradient::Dense(Tensor::scalar(1.0).data()))?;
        world.call(1, stop_for, (3.5,))?;
        std::thread::sleep(Duration::from_millis(700));
        let begun = Instant::now();
        says!(
            world.call(1, number, (1.0,)).unwrap_err(),
            ErrorKind::Timeout { rank: 1, .. },
            ["number", "rank 1", "1 s"]
        );
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        let error = optimizer.step(&ctx).unwrap_err();
        match error.kind() {
            ErrorKind::Owners { failures, .. } => {
                assert!(matches!(failures[0].error.kind(), ErrorKind::Timeout { rank: 1, .. }), "{error}")
            }
            other => panic!("{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(world.call(1, number, (1.0,))?, 1.0);
        assert_eq!(w.fetch()?.item::<f64>()?, 0.0); // the step was only late
        assert_eq!(optimizer.step(&ctx)?.updated(), 1);
        drop((ctx, optimizer, w));
        nothing_alive(world)
    })?;
    ok(world.finish())
}

fn after_the_end() -> Outcome {
    let world = World::init()?;
    let me = world.rank();
    let to = world.owner(me + 1);
    let caller = world.timeout(Duration::from_secs(5));
    let (far, near) = (world.put(to, Tensor::scalar(1.0))?, world.share(2.0)?);
    let object = world.remote(to, number, (1.0,))?;
    let ctx = world.context()?;
    let y = ctx.fetch(&far)?;
    let optimizer = DistributedOptimizer::new(&world, Sgd::new(0.1), [&far])?;
    let (done, chained) = (
        world.call_async(to, number, (4.0,))?,
        world.call_async(to, number, (5.0,))?.then(|x| Ok(x? + 1.0)),
    );
    world.finish()?;
    assert_eq!((done.wait()?, chained.wait()?), (4.0, 6.0)); // they were answered before the end
    let ended = |error: Error| says!(error, ErrorKind::ShutDown { .. }, ["ended", "finish"]);
    for rank in [me, to] {
        ended(caller.call(rank, number, (1.0,)).unwrap_err());
        ended(caller.call_async(rank, number, (1.0,)).map(drop).unwrap_err());
        ended(caller.try_call(rank, number, (1.0,)).map(drop).unwrap_err());
        ended(caller.remote(rank, number, (1.0,)).unwrap_err());
        ended(caller.put(rank, Tensor::scalar(1.0)).unwrap_err());
    }
    ended(caller.share(1.0).unwrap_err());
    ended(caller.attach::<f64>(near.id()).unwrap_err());
    ended(caller.fetch(&far).unwrap_err());
    ended(far.fetch().unwrap_err());
    ended(near.fetch().unwrap_err());
    ended(near.local(&caller).unwrap_err());
    ended(caller.call_mut(&object, add_one, ()).unwrap_err());
    ended(caller.assign(&far, Tensor::scalar(1.0)).unwrap_err());
    ended(ctx.call(to, number, (1.0,)).unwrap_err());
    ended(ctx.fetch(&far).unwrap_err());
    ended(ctx.backward(&[y.sum()?]).unwrap_err());
    ended(ctx.gradient(&far).unwrap_err());
    ended(optimizer.step(&ctx).unwrap_err());
    ended(DistributedOptimizer::new(&caller, Sgd::new(0.1), [&far]).map(drop).unwrap_err());
    ended(ctx.release().unwrap_err());
    drop((far, near, object, optimizer, caller));
    Ok(())
}

fn too_large() -> Outcome {
    let world = start(|s| (s.message_limit, s.timeout_s) = (100_000, 5.0))?;
    world.lead(|world| {
        for to in 0..world.size() {
            let far = to != world.rank(); // to oneself nothing travels
            let large = |error: Error| {
                says!(
                    error,
                    ErrorKind::TooLarge { limit: 100_000, .. },
                    ["RANKGRAD_MESSAGE_LIMIT", "100000"]
                )
            };
            // Requests: tensors, and other arguments.
            match world.call(to, elements, (Tensor::zeros(DType::F64, [20_000]),)) {
                Ok(n) => assert!(!far && n == 20_000),
                Err(error) => large(error),
            }
            match world.call(to, length, ("x".repeat(200_000),)) {
                Ok(n) => assert!(!far && n == 200_000),
                Err(error) => large(error),
            }
            // Replies.
            match world.call(to, numbers, (20_000,)) {
                Ok(x) => assert!(!far && x.len() == 20_000),
                Err(error) => large(error),
            }
            match world.call(to, letters, (200_000,)) {
                Ok(x) => assert!(!far && x.len() == 200_000),
                Err(error) => large(error),
            }
            // A value that can't be sent to its owner isn't made, one that can't be fetched is.
            let sent = world.put(to, Tensor::zeros(DType::F64, [20_000]))?;
            let made = world.remote(to, numbers, (20_000,))?;
            if far {
                let error = sent.fetch().unwrap_err();
                assert!(matches!(error.root(), ErrorKind::TooLarge { .. }), "{error:?}");
                large(made.fetch().unwrap_err());
                assert_eq!(world.call(to, sum_there, (&made,))?, 20_000.0);
                let error = world
                    .assign(&world.put(to, Tensor::scalar(1.0))?, Tensor::zeros(DType::F64, [20_000]))
                    .unwrap_err();
                assert!(matches!(error.root(), ErrorKind::TooLarge { .. }), "{error:?}");
            }
            assert_eq!(world.call(to, number, (1.0,))?, 1.0);
        }
        nothing_alive(world)
    })?;
    ok(world.finish())
}

remote! {
    fn sum_there(scope: &Scope, x: RRef<Tensor>) -> Result<f64> {
        x.local(scope)?.sum()?.item()
    }

    fn weighed(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)?.sum()
    }
}

/// Rank 0 takes less than the others: what it sends out comes back too large.
fn too_large_gradients() -> Outcome {
    let rank = std::env::var("OMPI_COMM_WORLD_RANK").or_else(|_| std::env::var("PMI_RANK"))?;
    let limit = if rank == "0" { 100_000 } else { 1 << 30 };
    let world = start(move |s| s.message_limit = limit)?;
    world.lead(|world| {
        let w = world.put(1, Tensor::scalar(2.0))?;
        let x = Tensor::ones(DType::F64, [20_000]).parameter()?;
        let ctx = world.context()?;
        let y = ctx.call(1, weighed, (&x, &w))?;
        let error = ctx.backward(&[y]).unwrap_err();
        assert!(
            matches!(
                error.root(),
                ErrorKind::TooLarge {
                    limit: 100_000,
                    from: 1,
                    ..
                }
            ),
            "{error:?}"
        );
        assert!(ctx.gradient(&w)?.is_none() && ctx.local_gradient(&x)?.is_none());
        // The context goes on.
        let y = ctx.call(1, weighed, (Tensor::ones(DType::F64, [10]), &w))?;
        ctx.backward(&[y])?;
        assert!(ctx.gradient(&w)?.is_some());
        drop((ctx, w));
        nothing_alive(world)
    })?;
    ok(world.finish())
}

fn windows(world: &World) -> Result<()> {
    let to = world.owner(1);
    // RANKGRAD_WINDOW_REQUESTS=4
    let naps: Vec<_> = (0..4).map(|_| world.call_async(to, nap, (400,))).collect::<Result<_>>()?;
    says!(world.try_call(to, nap, (1,)).map(drop).unwrap_err(), ErrorKind::WindowFull { rank, requests: 4, .. } if *rank == to, ["nap", "RANKGRAD_WINDOW_REQUESTS", "4 requests"]);
    assert!(naps.iter().all(|n| !n.is_done()));
    let begun = Instant::now();
    let fifth = world.call_async(to, nap, (1,))?; // blocks until one has ended
    assert!(
        naps.iter().any(|n| n.is_done()) && begun.elapsed() > Duration::from_millis(100),
        "{:?}",
        begun.elapsed()
    );
    fifth.wait()?;
    rankgrad::rpc::wait_all(naps)?;
    world.try_call(to, nap, (1,))?.wait()?;
    // RANKGRAD_WINDOW_BYTES=1MiB
    let large = || Tensor::zeros(DType::F64, [65_000]);
    let first = world.call_async(to, late_elements, (large(), 1000))?;
    let second = world.call_async(to, late_elements, (large(), 1000))?;
    says!(
        world.try_call(to, late_elements, (large(), 1)).map(drop).unwrap_err(),
        ErrorKind::WindowFull { requests: 2, .. },
        ["RANKGRAD_WINDOW_BYTES"]
    );
    assert_eq!(first.wait()? + second.wait()?, 130_000);
    // One that is larger than the window goes alone.
    assert_eq!(world.call(to, late_elements, (Tensor::zeros(DType::F64, [1 << 18]), 1))?, 1 << 18);
    // A bound on the total holds while the window is full, too.
    let naps: Vec<_> = (0..4).map(|_| world.call_async(to, nap, (600,))).collect::<Result<_>>()?;
    let begun = Instant::now();
    says!(
        world.timeout(Duration::from_millis(100)).call(to, nap, (1,)).unwrap_err(),
        ErrorKind::Timeout { .. },
        ["nap", "window"]
    );
    assert!(begun.elapsed() < Duration::from_millis(500));
    rankgrad::rpc::wait_all(naps)?;
    // Calls from inside of functions pass by: a ring of full windows goes on.
    let rings: Vec<_> = (0..4).map(|_| world.call_async(to, fan, (3,))).collect::<Result<_>>()?;
    for sum in rankgrad::rpc::wait_all(rings)? {
        assert_eq!(sum, 125);
    }
    Ok(())
}

remote! {
    fn late_elements(scope: &Scope, x: Tensor, millis: u64) -> Result<u64> {
        let _ = scope;
        std::thread::sleep(Duration::from_millis(millis));
        Ok(x.len() as u64)
    }

    /// Five calls to the next rank at each level.
    fn fan(scope: &Scope, depth: u32) -> Result<u64> {
        if depth == 0 {
            return Ok(1);
        }
        let next = (scope.rank() + 1) % scope.size();
        let futures: Vec<_> = (0..5).map(|_| scope.call_async(next, fan, (depth - 1,))).collect::<Result<_>>()?;
        Ok(rankgrad::rpc::wait_all(futures)?.into_iter().sum())
    }
}

fn released(world: &World) -> Result<()> {
    let to = world.owner(1);
    let ctx = world.context()?;
    let id = ctx.id().to_string();
    ctx.call(to, number, (1.0,))?;
    // A call in flight, whose function goes on calling after the release; a late one at a rank that meets the context with it.
    let slow = ctx.call_async(to, nap_and_call, (300, world.owner(2)))?;
    let late = ctx.call_async(world.owner(2), nap, (300,))?;
    std::thread::sleep(Duration::from_millis(50));
    let begun = Instant::now();
    ctx.release()?;
    assert!(
        begun.elapsed() < Duration::from_millis(200),
        "a release waits for no function: {:?}",
        begun.elapsed()
    );
    let error = slow.wait().unwrap_err();
    assert!(matches!(error.root(), ErrorKind::ContextReleased { .. }), "{error:?}");
    assert!(error.to_string().contains(&id), "{error}");
    late.wait()?;
    nothing_alive(world)?;
    // Released by drop, while its handler is asleep; a step of another context goes on.
    let w = world.put(to, Tensor::scalar(1.0))?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&w])?;
    let dropped = world.context()?;
    let slow = dropped.call_async(to, nap, (1000,))?;
    drop(dropped);
    let ctx = world.context()?;
    let y = ctx.fetch(&w)?;
    ctx.backward(&[y.mul(&y)?.sum()?])?;
    assert_eq!(optimizer.step(&ctx)?.updated(), 1);
    assert_eq!(w.fetch()?.item::<f64>()?, 0.0);
    drop((ctx, optimizer, w));
    slow.wait()?;
    Ok(())
}

remote! {
    fn nap_and_call(scope: &Scope, millis: u64, to: u32) -> Result<f64> {
        std::thread::sleep(Duration::from_millis(millis));
        scope.call(to, number, (1.0,))
    }
}

fn main_thread() -> Outcome {
    let world = World::init()?;
    world.lead(|world| {
        let to = world.owner(1);
        if to != world.rank() {
            // The other ranks are in `lead`, without a state.
            says!(
                world.call(to, on_main, ()).unwrap_err(),
                ErrorKind::Remote { .. },
                ["on_main", "serve_with", &format!("rank {to}")]
            );
        }
        nothing_alive(world)
    })?;
    let future = world.call_async(world.rank(), on_main, ())?;
    let mut state = 7u64;
    world.serve_with(&mut state)?;
    assert_eq!(future.wait()?, 7);
    let mut other = String::new();
    let future = world.call_async(world.rank(), on_main, ())?;
    world.serve_with(&mut other)?;
    says!(future.wait().unwrap_err(), ErrorKind::Remote { .. }, ["not a `u64`", "serve_with"]);
    ok(world.finish())
}

remote! {
    on_main fn on_main(scope: &Scope, state: &mut u64) -> Result<u64> {
        let _ = scope;
        Ok(*state)
    }
}

fn on_local_ranks() -> Outcome {
    [references as fn(&World) -> Result<()>, owners, released]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("errors::of_references_name_owner_and_id", || led(references))
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("errors::of_owners_reach_the_caller", || led(owners))
    },
    Case {
        ranks: &[1, 2],
        alone: true,
        ..Case::new("errors::timeouts_name_rank_function_and_time", times)
    },
    Case {
        ranks: &[2],
        alone: true,
        ..Case::new("errors::a_stopped_rank_times_out_and_works_again", stopped_rank)
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("errors::after_the_end_everything_is_shut_down", after_the_end)
    },
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("errors::messages_over_the_limit_are_refused", too_large)
    },
    Case {
        ranks: &[2, 3],
        ..Case::new("errors::gradients_over_the_limit_fail_the_backward", too_large_gradients)
    },
    Case {
        ranks: &[2],
        env: &[("RANKGRAD_WINDOW_REQUESTS", "4"), ("RANKGRAD_WINDOW_BYTES", "1MiB")],
        alone: true,
        ..Case::new("errors::a_full_window_refuses_or_blocks", || led(windows))
    },
    Case {
        ranks: &[1, 2, 3],
        alone: true,
        ..Case::new("errors::released_contexts_are_named_and_gone", || led(released))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("errors::on_main_functions_need_a_serving_main_thread", main_thread)
    },
    Case {
        ranks: &[0],
        ..Case::new("errors::hold_on_local_ranks_too", on_local_ranks)
    },
];

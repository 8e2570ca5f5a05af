//! What goes wrong for people who do this job with other software, as public reports tell it; here each is what should happen.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::collective::SystemOperation;
use mpi::traits::*;
use rankgrad::optim::{Adagrad, Optimizer, OptimizerSpec};
use rankgrad::prelude::*;
use rankgrad::rpc::{Caller, wait_all};

use crate::case::{Case, Expect};
use crate::optimizer::{dense, vector};
use crate::settled::{led, led_locally, nothing_alive};
use crate::start::refused_at;
use crate::{Outcome, ok};

const HOUR: Duration = Duration::from_secs(3600);

static SERVED: AtomicU64 = AtomicU64::new(0);

remote! {
    fn times(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)
    }

    /// Takes its time over a message.
    fn slow_sink(scope: &Scope, x: Tensor) -> Result<()> {
        let _ = (scope, x);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(20) {
            std::hint::spin_loop();
        }
        SERVED.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// What came, and what it adds up to.
    fn checked(scope: &Scope, x: Tensor) -> Result<(u64, Tensor)> {
        let _ = scope;
        Ok((checksum(&x)?, x))
    }

    fn resident(scope: &Scope) -> Result<u64> {
        let _ = scope;
        resident_bytes()
    }

    fn nap(scope: &Scope, millis: u64) -> Result<u32> {
        std::thread::sleep(Duration::from_millis(millis));
        Ok(scope.rank())
    }

    fn parameters(scope: &Scope) -> Result<Vec<RRef<Tensor>>> {
        Ok(scope.state::<Vec<RRef<Tensor>>>()?.to_vec())
    }
}

fn checksum(x: &Tensor) -> Result<u64> {
    Ok(x.to_vec::<f64>()?
        .into_iter()
        .fold(0, |sum: u64, v| sum.wrapping_mul(1_099_511_628_211).wrapping_add(v.to_bits())))
}

fn resident_bytes() -> Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").map_err(Error::user)?;
    let pages = statm.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok());
    Ok(pages.ok_or_else(|| Error::user("statm"))? * 4096)
}

/// A rank dies while another steps on it.
fn dies_during_steps() -> Outcome {
    let world = World::init()?;
    if world.rank() == 1 {
        std::thread::sleep(Duration::from_millis(700));
        panic!("on purpose");
    }
    let w = world.put(1, vector(&[1.0]))?;
    let optimizer = DistributedOptimizer::new(&world, Sgd::new(0.1), [&w])?;
    let ctx = world.context()?;
    ctx.accumulate(&w, dense(&[1.0]))?;
    loop {
        optimizer.step(&ctx)?;
    }
}

/// Rank 0 leaves while the others are deep in code of their own.
fn leaves_while_others_sleep() -> Outcome {
    let world = World::init()?;
    if world.rank() == 0 {
        std::thread::sleep(Duration::from_millis(300));
        std::process::exit(1);
    }
    std::thread::sleep(HOUR);
    ok(world.finish())
}

/// Threads of all ranks make optimizers over the same parameters at once.
fn made_at_once() -> Outcome {
    let world = World::init()?;
    let all: Vec<RRef<Tensor>> = match world.rank() {
        0 => (0..world.size())
            .map(|rank| world.put(rank, vector(&[0.0])))
            .collect::<Result<_>>()?,
        _ => Vec::new(),
    };
    world.set_state(all);
    world.serve()?;
    let parameters = world.call(0, parameters, ())?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let (world, parameters) = (&world, &parameters);
                scope.spawn(move || -> Result<()> {
                    for turn in 0..10 {
                        let spec: OptimizerSpec = match (thread + turn) % 3 {
                            0 => Sgd::new(1.0).into(),
                            1 => Adam::new(1.0).into(),
                            _ => Adagrad::new(1.0).into(),
                        };
                        let optimizer = DistributedOptimizer::new(world, spec, parameters)?;
                        let ctx = world.context()?;
                        parameters.iter().try_for_each(|p| ctx.accumulate(p, dense(&[1.0])))?;
                        assert_eq!(optimizer.step(&ctx)?.updated(), parameters.len());
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap())
    })?;
    world.serve()?;
    for p in &parameters {
        assert_eq!(world.version(p)?, u64::from(40 * world.size()));
    }
    drop(parameters);
    world.serve()?;
    world.set_state(Vec::<RRef<Tensor>>::new());
    world.lead(nothing_alive)?;
    ok(world.finish())
}

/// Three ranks flood a slow one with requests that nobody waits for: 100,000 of 2 KiB. RANKGRAD_WINDOW_REQUESTS=64 bounds what waits there, and its memory.
fn flood() -> Outcome {
    const EACH: u64 = 33_334;
    let world = World::init()?;
    if world.rank() > 0 {
        let x = Tensor::ones(DType::F64, [256]);
        for _ in 0..EACH {
            drop(world.call_async(0, slow_sink, (&x,))?);
        }
    } else {
        let all = EACH * u64::from(world.size() - 1);
        let (mut first, mut most) = (None, 0);
        while SERVED.load(Ordering::SeqCst) < all {
            std::thread::sleep(Duration::from_millis(5));
            most = resident_bytes()?.max(most);
            let tasks = world.counters(0)?.tasks;
            assert!(tasks <= 3 * 64, "{tasks} requests wait here");
            if first.is_none() && SERVED.load(Ordering::SeqCst) > all / 5 {
                first = Some(most);
            }
        }
        let first = first.unwrap_or(most);
        assert!(most <= first + (16 << 20), "{first} bytes after a fifth, then {most}");
    }
    ok(world.finish())
}

/// A thousand steps on a large parameter, fetched and sent whole: memory stays as it is on both ranks.
fn thousand_steps(world: &World) -> Result<()> {
    let w = world.put(1, Tensor::ones(DType::F32, [50_000]))?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(1e-3), [&w])?;
    let memory = || Ok::<_, Error>([world.call(0, resident, ())?, world.call(1, resident, ())?]);
    let mut early = [0; 2];
    for step in 0..1000 {
        let ctx = world.context()?;
        let copy = ctx.fetch(&w)?;
        let there = ctx.call(1, times, (&copy, &w))?;
        ctx.backward(&[there.sum()?])?;
        assert_eq!(optimizer.step(&ctx)?.updated(), 1);
        if step == 200 {
            early = memory()?;
        }
    }
    for (rank, (early, late)) in early.into_iter().zip(memory()?).enumerate() {
        assert!(
            late <= early + (8 << 20),
            "rank {rank}: {early} bytes after 200 steps, {late} after 1000"
        );
    }
    Ok(())
}

/// Steps from two threads, on parameters of different shapes, one right after the other.
fn two_shapes(world: &World) -> Result<()> {
    let far = world.owner(1);
    let shapes = [vec![3], vec![5, 2]];
    std::thread::scope(|scope| {
        let threads: Vec<_> = shapes
            .iter()
            .map(|shape| {
                scope.spawn(move || -> Result<()> {
                    let w = world.put(far, Tensor::zeros(DType::F64, shape.clone()))?;
                    let optimizer = DistributedOptimizer::new(world, Sgd::new(1.0), [&w])?;
                    let ctx = world.context()?;
                    ctx.accumulate(&w, Gradient::Dense(Tensor::ones(DType::F64, shape.clone()).data()))?;
                    for step in 1..=200 {
                        optimizer.step(&ctx)?;
                        let found = w.fetch()?;
                        assert_eq!(found.shape(), *shape);
                        assert!(found.to_vec::<f64>()?.iter().all(|x| *x == -f64::from(step)));
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap())
    })
}

/// 8 MiB there and back, by value, by reference and into memory of the caller's.
fn large(world: &World) -> Result<()> {
    let far = world.owner(1);
    let x = Tensor::from_vec((0..1 << 20).map(|i| f64::from(i) * 0.37).collect(), [1024, 1024])?;
    let expected = checksum(&x)?;
    for _ in 0..4 {
        let (there, back) = world.call(far, checked, (&x,))?;
        assert_eq!((there, checksum(&back)?), (expected, expected));
        let held = world.put(far, x.clone())?;
        assert_eq!(checksum(&held.fetch()?)?, expected);
        let mut view = ndarray::ArrayD::<f64>::zeros(vec![1024, 1024]);
        world.fetch_into(&held, view.view_mut())?;
        assert_eq!(checksum(&Tensor::from_array(view))?, expected);
    }
    Ok(())
}

/// Four threads send messages of all sizes to one rank, and each gets its own answers.
fn mixed_sizes(world: &World) -> Result<()> {
    let far = world.owner(1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u32)
            .map(|thread| {
                scope.spawn(move || -> Result<()> {
                    for turn in 0..100u32 {
                        let n = [0, 1, 7, 100, 5_000, 60_000][(thread + turn) as usize % 6];
                        let x = Tensor::from_vec((0..n).map(|i| f64::from(i * 10 + thread * 1000 + turn)).collect(), [n as usize])?;
                        let expected = checksum(&x)?;
                        let calls: Vec<_> = (0..2).map(|_| world.call_async(far, checked, (&x,))).collect::<Result<_>>()?;
                        for (there, back) in wait_all(calls)? {
                            assert_eq!((there, checksum(&back)?), (expected, expected));
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap())
    })
}

/// Weights that each rank has a copy of, whose gradients the host sums by MPI, beside one that rank 0 owns.
fn data_parallel() -> Outcome {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or("MPI is up")?;
    let all = universe.world();
    let world = World::builder().communicator(&all).start()?;
    let (me, size) = (f64::from(world.rank()), f64::from(world.size()));
    if world.rank() == 0 {
        world.set_state(vec![world.put(0, vector(&[2.0, 3.0]))?]);
    }
    world.serve()?;
    let w = world.call(0, parameters, ())?.remove(0);
    let v = vector(&[5.0, 7.0]).parameter()?;
    let x = vector(&[1.0 + me, -me]);
    let ctx = world.context()?;
    let y = ctx.call(0, times, (x.mul(&v)?, &w))?;
    ctx.backward(&[y.sum()?])?;
    // The copies: the host's all-reduce. Nothing of it is in the context, nor the other way round.
    let own = ctx.local_gradient(&v)?.ok_or("a gradient")?.to_dense()?;
    let own = Tensor::from_data(own).to_vec::<f64>()?;
    assert_eq!(own, [2.0 * (1.0 + me), -3.0 * me]);
    let mut sum = [0.0; 2];
    world.mpi(|| all.all_reduce_into(&own[..], &mut sum[..], SystemOperation::sum()));
    let mean: Vec<f64> = sum.iter().map(|s| s / size).collect();
    Optimizer::new(Sgd::new(1.0), vec![v.clone()])?.step_one(0, dense(&mean))?;
    // The shared one: every rank steps with its own context.
    DistributedOptimizer::new(&world, Sgd::new(1.0), [&w])?.step(&ctx)?;
    world.serve()?;
    let ranks = (0..world.size()).map(f64::from);
    let (up, down) = ranks.fold((0.0, 0.0), |(up, down), r| (up + 1.0 + r, down - r));
    assert_eq!(v.to_vec::<f64>()?, [5.0 - 2.0 * up / size, 7.0 - 3.0 * down / size]);
    assert_eq!(w.fetch()?.to_vec::<f64>()?, [2.0 - 5.0 * up, 3.0 - 7.0 * down]);
    drop((w, ctx));
    world.serve()?;
    world.set_state(Vec::<RRef<Tensor>>::new());
    ok(world.finish())
}

/// One rank is in a long call while all others are in a collective of the host's, which that rank comes to late.
fn collective_during_a_call() -> Outcome {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or("MPI is up")?;
    let all = universe.world();
    let world = World::builder().communicator(&all).start()?;
    if world.rank() == 0 {
        assert_eq!(world.call(1, nap, (1000,))?, 1);
    }
    let groups = world
        .mpi(|| all.split_by_color(mpi::topology::Color::with_value(all.rank() % 2)))
        .ok_or("no group")?;
    let mut sum = 0;
    world.mpi(|| groups.all_reduce_into(&1, &mut sum, SystemOperation::sum()));
    assert_eq!(sum, groups.size());
    drop(groups);
    ok(world.finish())
}

/// MPI_THREAD_FUNNELED is refused like MPI_THREAD_SINGLE, where MPI grants no more than was asked for.
fn funneled() -> Outcome {
    refused_at(Threading::Funneled)
}

/// Public types can go to threads and be shared by them, whatever MPI this is built with.
fn auto_traits() -> Outcome {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<World>();
    shared::<Context>();
    shared::<Caller>();
    shared::<Scope>();
    shared::<DistributedOptimizer>();
    shared::<RRef<Tensor>>();
    shared::<RRef<std::rc::Rc<u8>>>(); // the value stays on its owner
    shared::<Tensor>();
    shared::<Gradient>();
    shared::<Error>();
    sent::<Future<Tensor>>();
    sent::<Optimizer>();
    sent::<rankgrad::transport::mpi::MpiTransport>();
    Ok(())
}

fn on_local_ranks() -> Outcome {
    [two_shapes as fn(&World) -> Result<()>, large, mixed_sizes]
        .into_iter()
        .try_for_each(|f| led_locally(2, f))
}

const fn failing(name: &'static str, stderr: &'static [&'static str], run: fn() -> Outcome) -> Case {
    Case {
        ranks: &[2],
        expect: Expect::Fails { within: 10, stderr },
        ..Case::new(name, run)
    }
}

/// The cases.
pub const CASES: &[Case] = &[
    failing(
        "field::a_panic_ends_the_job_while_another_rank_steps",
        &["rank 1: panicked"],
        dies_during_steps,
    ),
    failing(
        "field::an_exit_ends_the_job_while_others_sleep",
        &["rank 0 exits while its world is open"],
        leaves_while_others_sleep,
    ),
    Case {
        ranks: &[1, 3],
        ..Case::new("field::optimizers_are_made_by_many_threads_at_once", made_at_once)
    },
    Case {
        ranks: &[4],
        limit: 120,
        env: &[("RANKGRAD_WINDOW_REQUESTS", "64")],
        ..Case::new("field::a_flood_leaves_the_memory_of_its_receiver_flat", flood)
    },
    Case {
        ranks: &[2],
        limit: 120,
        ..Case::new("field::a_thousand_steps_leave_memory_flat", || led(thousand_steps))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("field::steps_of_different_shapes_are_not_mixed_up", || led(two_shapes))
    },
    Case {
        ranks: &[2],
        ..Case::new("field::eight_mebibytes_arrive_as_they_left", || led(large))
    },
    Case {
        ranks: &[2],
        ..Case::new("field::threads_get_their_own_answers_of_any_size", || led(mixed_sizes))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("field::copies_that_the_host_sums_go_along", data_parallel)
    },
    Case {
        ranks: &[4],
        ..Case::new("field::a_collective_of_the_host_may_wait_for_a_call", collective_during_a_call)
    },
    Case {
        ranks: &[2],
        ..Case::new("field::funneled_is_too_low_a_level", funneled)
    },
    Case {
        ranks: &[0],
        ..Case::new("field::public_types_go_to_threads", auto_traits)
    },
    Case {
        ranks: &[0],
        ..Case::new("field::hold_on_local_ranks_too", on_local_ranks)
    },
];

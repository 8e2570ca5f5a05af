//! Faults on purpose: late and lost messages, ranks that stop or die, MPI that grants less, tiny limits. Only with the feature `faults`.

use std::time::Duration;

use mpi::Threading;
use mpi::collective::SystemOperation;
use mpi::traits::*;
use rankgrad::config::Settings;
use rankgrad::prelude::*;
use rankgrad::{BackwardOptions, faults};

use crate::case::{Case, Expect};
use crate::slow::Slow;
use crate::{Outcome, launcher_rank, ok};

const MILLISECOND: Duration = Duration::from_millis(1);

remote! {
    fn number(scope: &Scope, nap: u64) -> Result<u32> {
        std::thread::sleep(nap as u32 * MILLISECOND);
        Ok(scope.rank())
    }

    /// Layers on a chain of ranks, each calling the next. Its adjoint takes its time.
    fn chain(scope: &Scope, x: Tensor, layers: Vec<RRef<Tensor>>) -> Result<Tensor> {
        let h = x.matmul(&layers[0].local(scope)?)?.tanh()?;
        let _ = h.register_hook(|_| {
            std::thread::sleep(5 * MILLISECOND);
            None
        })?;
        match layers.get(1) {
            Some(next) => scope.call(next.owner(), chain, (h, layers[1..].to_vec())),
            None => Ok(h),
        }
    }

    fn broken_adjoint(scope: &Scope, x: Tensor) -> Result<Tensor> {
        let _ = scope;
        let _ = x.register_hook(|_| panic!("on purpose"))?;
        x.mul_scalar(2.0)
    }

    fn doubled(scope: &Scope, x: Tensor) -> Result<Tensor> {
        let _ = scope;
        x.mul_scalar(2.0)
    }

    /// A value on a third rank.
    fn made_there(scope: &Scope, to: u32, x: Tensor) -> Result<RRef<Tensor>> {
        scope.remote(to, doubled, (x,))
    }
}

fn numbers(shape: &[usize], seed: usize) -> Tensor {
    let n = shape.iter().product::<usize>();
    let values = (0..n).map(|i| ((i * 37 + seed * 101) % 97) as f64 / 97.0 - 0.5).collect();
    Tensor::from_vec(values, shape).unwrap()
}

/// A training loop that sends messages of every kind; the bits that it comes to.
fn train(world: &World, steps: usize) -> Result<Vec<u64>> {
    let x = numbers(&[9, 8], 1);
    let layers: Vec<RRef<Tensor>> = (0..3)
        .map(|k| world.put(world.owner(k + 1), numbers(&[8, 8], k as usize + 2)))
        .collect::<Result<_>>()?;
    let optimizer = DistributedOptimizer::new(world, Sgd::new(0.1).momentum(0.9), &layers)?;
    for step in 0..steps {
        let ctx = world.context()?;
        let h = ctx.call(layers[0].owner(), chain, (&x, &layers))?;
        ctx.backward(&[h.mul(&h)?.sum()?])?;
        optimizer.step(&ctx)?;

        let ctx = world.context()?;
        let y = numbers(&[2], step).parameter()?;
        let y = many_times_doubled(&ctx, world.owner(1), &y)?;
        let broken = ctx.call(world.owner(1), broken_adjoint, (&y,))?;
        let error = ctx.backward(&[broken.sum()?]).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Backward { .. }), "{error}");

        assert_eq!(world.call(world.owner(1), number, (5,))?, world.owner(1));
        let made = world.call(world.owner(1), made_there, (world.owner(2), numbers(&[3], step)))?;
        assert_eq!(made.fetch()?.to_vec::<f64>()?, doubled_numbers(step));
    }
    if world.size() > 2 {
        kept_turn(world)?;
    }
    let mut bits = Vec::new();
    for layer in &layers {
        bits.extend(layer.fetch()?.to_vec::<f64>()?.into_iter().map(f64::to_bits));
    }
    Ok(bits)
}

/// A step keeps its turn on one rank while it waits for another, which is busy; a second step waits for that turn, and asks what it waits for.
fn kept_turn(world: &World) -> Result<()> {
    let one = |rank| world.put(world.owner(rank), numbers(&[1], 1));
    let (near, far, busy) = (one(1)?, one(2)?, one(2)?);
    let slow = DistributedOptimizer::new(world, Slow::new(0.0).seconds(0.05), [&busy])?;
    let both = DistributedOptimizer::new(world, Sgd::new(0.1), [&near, &far])?;
    let other = DistributedOptimizer::new(world, Sgd::new(0.1), [&near])?;
    let ctx = world.context()?;
    for parameter in [&near, &far, &busy] {
        ctx.accumulate(parameter, Gradient::Dense(numbers(&[1], 2).data()))?;
    }
    let running = slow.step_async(&ctx, &StepOptions::new())?;
    std::thread::scope(|scope| -> Result<()> {
        let kept = scope.spawn(|| both.step_with(&ctx, &StepOptions::new().all_or_nothing().expect_versions(vec![0, 0], 0)));
        std::thread::sleep(10 * MILLISECOND);
        other.step(&ctx)?;
        kept.join().expect("no panic").map(drop)
    })?;
    running.wait().map(drop)
}

/// Through so many calls that a backward has to ask what takes part: marks travel.
fn many_times_doubled(ctx: &Context, rank: u32, x: &Tensor) -> Result<Tensor> {
    (0..13).try_fold(x.clone(), |y, _| ctx.call(rank, doubled, (y,)))
}

fn doubled_numbers(step: usize) -> Vec<f64> {
    let values = numbers(&[3], step).to_vec::<f64>().unwrap();
    values.into_iter().map(|x| 2.0 * x).collect()
}

/// A world for each run, on MPI that stays up.
struct Host(mpi::environment::Universe);

impl Host {
    fn new() -> Result<Host, &'static str> {
        let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or("MPI is up")?;
        Ok(Host(universe))
    }

    fn train(&self, steps: usize, settings: impl FnOnce(&mut Settings) + 'static) -> Result<Option<Vec<u64>>> {
        let world = World::builder().communicator(&self.0.world()).settings(settings).start()?;
        let bits = world.lead(|world| train(world, steps))?;
        world.finish()?;
        Ok(bits)
    }

    /// How many messages of a kind all ranks held back since the last time.
    fn delayed(&self, kind: &str) -> u64 {
        let mine: u64 = faults::tally()
            .iter()
            .filter(|(name, _)| kind == "all" || **name == kind)
            .map(|(_, tally)| tally.delayed)
            .sum();
        let mut sum = 0;
        self.0.world().all_reduce_into(&mine, &mut sum, SystemOperation::sum());
        sum
    }
}

/// With three ranks all kinds come up.
fn late(kinds: &[&str]) -> Outcome {
    let host = Host::new()?;
    let asks_soon = |settings: &mut Settings| settings.status_after_s = 0.001;
    let expected = host.train(2, asks_soon)?;
    for (seed, kind) in kinds.iter().enumerate() {
        faults::set(&format!("seed={seed} delay={kind}:4"))?;
        faults::tally();
        assert_eq!(host.train(2, asks_soon)?, expected, "{kind} late");
        let delayed = host.delayed(kind);
        assert!(delayed > 0, "no {kind} was sent");
    }
    Ok(())
}

/// Transfers in pieces of 16 bytes, one at a time, nothing sent at once, late in between.
fn tiny_limits() -> Outcome {
    let host = Host::new()?;
    let expected = host.train(2, |_| ())?;
    let tiny = |settings: &mut Settings| {
        settings.eager_limit = 64;
        settings.chunk_limit = 16;
        settings.segment_tags = 1;
        settings.ring = 1;
        settings.pool_bytes = 0;
    };
    assert_eq!(host.train(2, tiny)?, expected);
    faults::set("seed=3 delay=all:2")?;
    assert_eq!(host.train(2, tiny)?, expected);
    Ok(())
}

/// What is lost is one timeout, which names the rank, and the caller goes on. Such a world has no end, as a message never arrives.
fn lost(rules: &str, run: fn(&World) -> Result<()>, fails_at: usize) -> Outcome {
    faults::set(rules)?;
    let world = World::init()?;
    world.lead(|world| {
        for round in 0..5 {
            match run(world) {
                Ok(()) => assert_ne!(round, fails_at, "`{rules}` had no effect"),
                Err(error) => {
                    assert_eq!(round, fails_at, "{error}");
                    assert!(matches!(error.kind(), ErrorKind::Timeout { rank: 1, .. }), "{error}");
                }
            }
        }
        let lost: u64 = faults::tally().values().map(|tally| tally.lost).sum();
        Err::<(), _>(Error::user(format!("one timeout in five; lost here: {lost}")))
    })?;
    Ok(())
}

fn call_once(world: &World) -> Result<()> {
    world.call(1, number, (0,)).map(|rank| assert_eq!(rank, 1))
}

fn fetch_once(world: &World) -> Result<()> {
    let value = world.put_constant(1, numbers(&[2], 1))?;
    value.fetch().map(drop)
}

fn backward_once(world: &World) -> Result<()> {
    let ctx = world.context()?;
    let x = numbers(&[2], 1).parameter()?;
    let y = many_times_doubled(&ctx, 1, &x)?;
    // Without a limit it would wait: the rank gives signs of life, and MPI loses nothing.
    let limited = BackwardOptions {
        timeout: Some(1000 * MILLISECOND),
        ..Default::default()
    };
    ctx.backward_with(&[y.sum()?], limited)?;
    let gradient = Tensor::from_data(ctx.local_gradient(&x)?.expect("a gradient").to_dense()?);
    assert_eq!(gradient.to_vec::<f64>()?, [8192.0, 8192.0]);
    Ok(())
}

/// Works until it ends, or is ended.
fn work(rules: &str) -> Outcome {
    faults::set(rules)?;
    let world = World::builder().env_logger().start()?;
    world.lead(|world| train(world, 3))?;
    ok(world.finish())
}

/// A rank stops for longer than the timeout, in the middle of an answer, and then goes on.
fn stopped() -> Outcome {
    faults::set("stop=reply:3:3@1")?;
    let world = World::init()?;
    world.lead(|world| {
        let mut results = Vec::new();
        while results.len() < 10 {
            results.push(world.call(1, number, (0,)));
        }
        let failed: Vec<&Error> = results.iter().filter_map(|r| r.as_ref().err()).collect();
        assert!((1..=4).contains(&failed.len()), "{results:?}");
        assert!(
            failed.iter().all(|e| matches!(e.kind(), ErrorKind::Timeout { rank: 1, .. })),
            "{results:?}"
        );
        assert!(results[..2].iter().chain(&results[8..]).all(|r| r.is_ok()), "{results:?}");
        Ok(())
    })?;
    ok(world.finish())
}

/// On `refused` (or every rank), MPI grants too little: nobody starts, and each knows why.
fn refused_level(rules: &str, refused: Option<u32>) -> Outcome {
    faults::set(rules)?;
    let error = World::init().unwrap_err();
    match error.kind() {
        ErrorKind::ThreadLevel { needed, granted, cure } => {
            assert!(refused.is_none_or(|rank| rank == launcher_rank()), "{error}");
            assert_eq!((&needed[..], &granted[..]), ("SERIALIZED", "MPI_THREAD_FUNNELED"));
            assert!(cure.contains("rebuild MPI with thread support"), "{error}");
        }
        ErrorKind::Remote { rank, .. } => {
            assert!(refused == Some(*rank) && launcher_rank() != *rank, "{error}");
            assert!(error.to_string().contains("rebuild MPI with thread support"), "{error}");
        }
        _ => return Err(error.into()),
    }
    Ok(())
}

const QUICK: &[(&str, &str)] = &[("RANKGRAD_TIMEOUT", "1"), ("RANKGRAD_STATUS_AFTER", "0.3")];

const fn losing(name: &'static str, said: &'static [&'static str], run: fn() -> Outcome) -> Case {
    Case {
        ranks: &[2, 3],
        env: QUICK,
        expect: Expect::Fails { within: 10, stderr: said },
        ..Case::new(name, run)
    }
}

const fn dying(name: &'static str, said: &'static [&'static str], run: fn() -> Outcome) -> Case {
    Case {
        ranks: &[2, 4],
        env: &[("RUST_LOG", "warn")],
        expect: Expect::Fails { within: 10, stderr: said },
        ..Case::new(name, run)
    }
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[3],
        limit: 120,
        ..Case::new("faults::late_messages_of_each_kind_change_no_bit", || late(&faults::KINDS))
    },
    Case {
        ranks: &[2, 4],
        ..Case::new("faults::also_if_all_are_late", || late(&["all"; 4]))
    },
    Case {
        ranks: &[2, 3],
        ..Case::new("faults::tiny_limits_change_no_bit", tiny_limits)
    },
    losing(
        "faults::a_lost_reply_is_one_timeout",
        &["one timeout in five; lost here: 0"],
        || lost("drop=reply:2@1", call_once, 1),
    ),
    losing("faults::a_lost_call_is_one_timeout", &["one timeout in five; lost here: 1"], || {
        lost("drop=call:3@0", call_once, 2)
    }),
    losing(
        "faults::a_lost_fetch_is_one_timeout",
        &["one timeout in five; lost here: 1"],
        || lost("drop=fetch:1@0", fetch_once, 0),
    ),
    losing(
        "faults::a_lost_mark_is_ended_by_the_limit_of_the_backward",
        &["one timeout in five; lost here: 1"],
        || lost("drop=mark:14@0", backward_once, 1),
    ),
    losing("faults::a_lost_gradient_too", &["one timeout in five; lost here: 1"], || {
        lost("drop=gradient:1@0", backward_once, 0)
    }),
    dying("faults::killed_before_ranks_agree", &["rank 1 is killed at init 1"], || {
        work("kill=init:1@1")
    }),
    dying(
        "faults::killed_before_programs_are_compared",
        &["rank 1 is killed at start 1"],
        || work("kill=start:1@1"),
    ),
    dying("faults::killed_at_the_first_message", &["rank 1 is killed at"], || {
        work("kill=all:2@1")
    }),
    dying("faults::killed_at_message_10", &["message 10"], || work("kill=all:10@1")),
    dying("faults::killed_at_message_40", &["message 40"], || work("kill=all:40@1")),
    dying(
        "faults::the_leading_rank_killed_at_message_60",
        &["rank 0 is killed", "message 60"],
        || work("kill=all:60@0"),
    ),
    dying("faults::killed_in_a_backward", &["rank 0 is killed at gradient 2"], || {
        work("kill=gradient:2@0")
    }),
    dying("faults::killed_when_it_is_quiet", &["rank 1 is killed at quiet 1"], || {
        work("kill=quiet:1@1")
    }),
    dying("faults::killed_before_the_last_wave", &["rank 0 is killed at wave 1"], || {
        work("kill=wave:1@0")
    }),
    dying("faults::killed_at_the_end", &["rank 1 is killed at close 1"], || {
        work("kill=close:1@1")
    }),
    Case {
        ranks: &[2],
        env: QUICK,
        ..Case::new("faults::a_stopped_rank_costs_timeouts_and_nothing_else", stopped)
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("faults::a_refused_thread_level_says_what_to_do", || {
            refused_level("level=funneled", None)
        })
    },
    Case {
        ranks: &[2, 3],
        ..Case::new("faults::also_to_the_other_ranks", || refused_level("level=funneled@1", Some(1)))
    },
    Case {
        ranks: &[2, 3],
        ..Case::new("faults::one_mpi_call_at_a_time_is_enough", || work("level=serialized"))
    },
];

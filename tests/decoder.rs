//! The decoders under bytes that no rank would send: messages recorded from a world at work, mutated.
//!
//! None may panic, each failure must be a typed error, and none may allocate more than its limit and a small multiple of what arrived.
//! `DECODER_RUNS` sets how many mutations are tried, `DECODER_SEED` which. `fuzz/` feeds the same function by coverage.

#![allow(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::time::Duration;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rankgrad::faults::{self, KINDS};
use rankgrad::prelude::*;
use rankgrad::{BackwardOptions, Mode, local};

#[path = "ranks/slow.rs"]
mod slow;
use slow::Slow;

/// Counts what the thread holds, and the most that it held.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let held = HELD.get() + bytes;
    HELD.set(held);
    MOST.set(MOST.get().max(held));
}

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: all is done by `System`; the counters are plain cells that don't allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

/// The most bytes that the thread held during `f`, beyond those before.
fn most_held<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    MOST.set(before);
    let result = f();
    (result, (MOST.get() - before) as usize)
}

const MILLISECOND: Duration = Duration::from_millis(1);

remote! {
    fn scaled(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.mul(&w.local(scope)?)
    }

    fn looked_up(scope: &Scope, table: RRef<Tensor>, rows: Tensor) -> Result<Tensor> {
        table.local(scope)?.embedding(&rows)
    }

    fn slow(scope: &Scope, x: Tensor) -> Result<Tensor> {
        let _ = scope;
        std::thread::sleep(20 * MILLISECOND);
        let y = x.mul_scalar(2.0)?;
        let _ = y.register_hook(|_| {
            std::thread::sleep(20 * MILLISECOND);
            None
        })?;
        y.mul_scalar(1.0)
    }

    fn broken(scope: &Scope, x: Tensor) -> Result<Tensor> {
        let _ = scope;
        let _ = x.register_hook(|_| panic!("on purpose"))?;
        x.mul_scalar(2.0)
    }

    fn fails(scope: &Scope, words: Vec<String>) -> Result<()> {
        Err(Error::user(format!("{words:?} on {}", scope.rank())))
    }

    fn passed_on(scope: &Scope, to: u32, words: Vec<String>) -> Result<()> {
        scope.call(to, fails, (words,))
    }

    fn made_there(scope: &Scope, to: u32, x: Tensor) -> Result<RRef<Tensor>> {
        scope.remote(to, slow, (x,))
    }
}

/// Sends messages of all kinds over three ranks.
fn all_kinds(world: &World) -> Result<()> {
    world.lead(|world| {
        let w = world.put(1, Tensor::from_vec(vec![2.0f64, 3.0], [2])?)?;
        let table = world.put(2, Tensor::from_vec((0..12).map(f64::from).collect(), [6, 2])?)?;
        let optimizer = DistributedOptimizer::new(world, Sgd::new(0.1), [&w, &table])?;
        for mode in [Mode::Exact, Mode::Fast] {
            let ctx = world.context()?;
            let rows = ctx.call(2, looked_up, (&table, Tensor::from_vec(vec![1i64, 4], [2])?))?;
            let mut y = ctx.call(1, scaled, (rows, &w))?;
            for _ in 0..12 {
                y = ctx.call(1, scaled, (y, &w))?; // so many that a backward has to ask what takes part
            }
            let y = ctx.call(2, slow, (y,))?;
            ctx.backward_with(
                &[y.sum()?],
                BackwardOptions {
                    mode,
                    ..Default::default()
                },
            )?;
            ctx.gradient(&table)?;
            optimizer.step(&ctx)?;
        }
        let ctx = world.context()?;
        let x = Tensor::from_vec(vec![1.0f32; 400], [20, 20])?.parameter()?;
        let y = ctx.call(1, broken, (x,))?;
        assert!(ctx.backward(&[y.sum()?]).is_err());
        let made = world.call(1, made_there, (2, Tensor::from_vec(vec![true, false], [2])?))?;
        assert!(made.fetch().is_err());
        assert!(world.call(1, passed_on, (2, vec!["two".into(), "words".into()])).is_err());
        kept_turn(world)?;
        w.fetch().map(drop)
    })?;
    Ok(())
}

/// A step keeps its turn on rank 1 while it waits for rank 2, which is busy; another step waits for that turn, and asks what it waits for.
fn kept_turn(world: &World) -> Result<()> {
    let one = |rank| world.put(rank, Tensor::from_vec(vec![1.0f64], [1])?);
    let (near, far, busy) = (one(1)?, one(2)?, one(2)?);
    let slow = DistributedOptimizer::new(world, Slow::new(0.0).seconds(0.2), [&busy])?;
    let both = DistributedOptimizer::new(world, Sgd::new(0.1), [&near, &far])?;
    let other = DistributedOptimizer::new(world, Sgd::new(0.1), [&near])?;
    let ctx = world.context()?;
    for parameter in [&near, &far, &busy] {
        ctx.accumulate(parameter, Gradient::Dense(Tensor::from_vec(vec![1.0f64], [1])?.data()))?;
    }
    let running = slow.step_async(&ctx, &StepOptions::new())?;
    std::thread::scope(|scope| -> Result<()> {
        let kept = scope.spawn(|| both.step_with(&ctx, &StepOptions::new().all_or_nothing().expect_versions(vec![0, 0], 0)));
        std::thread::sleep(20 * MILLISECOND);
        other.step(&ctx)?;
        kept.join().expect("no panic").map(drop)
    })?;
    running.wait().map(drop)
}

/// Messages that a world at work sends, in every form in which they can come.
fn messages() -> Vec<Vec<u8>> {
    faults::record();
    local::run_with(3, |settings| settings.status_after_s = 0.005, all_kinds).unwrap();
    let frames = faults::recorded();
    let kinds: BTreeSet<&str> = frames.iter().map(faults::kind).collect();
    assert_eq!(kinds, BTreeSet::from(KINDS), "each kind of message was recorded");
    frames.iter().flat_map(|frame| faults::messages(frame).unwrap()).collect()
}

/// A varint of any size.
fn varint(random: &mut impl Rng) -> Vec<u8> {
    let mut value = random.random::<u64>() >> random.random_range(0..64);
    let mut bytes = Vec::new();
    while value > 0x7f {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn mutate(bytes: &mut Vec<u8>, all: &[Vec<u8>], random: &mut impl Rng) {
    let at = random.random_range(0..=bytes.len());
    match random.random_range(0..7) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.random_range(0..8),
        1 if at < bytes.len() => bytes[at] = random.random(),
        2 => bytes.truncate(at),
        // Lengths, ids, places: a number instead of another, or in between.
        3 => drop(bytes.splice(at..(at + 1).min(bytes.len()), varint(random))),
        4 => drop(bytes.splice(at..at, varint(random))),
        5 => {
            let other = all.choose(random).expect("messages were recorded");
            let from = random.random_range(0..=other.len());
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        _ => {
            let end = random.random_range(at..=bytes.len());
            let part = bytes[at..end].to_vec();
            drop(bytes.splice(at..at, part));
        }
    }
}

/// What the decoders may hold at once for so many bytes: twice the announced limit, as booleans are checked into other memory, an eighth more, as memory
/// is taken in sizes that can be used again, and what small things (an absent gradient is one byte on the way) take in memory.
fn bound(bytes: usize, limit: u64) -> usize {
    2 * (limit as usize + limit as usize / 8) + 100 * bytes + (16 << 10)
}

fn check(bytes: &[u8], limit: u64) -> faults::Decoded {
    let (decoded, held) = most_held(|| faults::decode(bytes, limit));
    assert!(
        held <= bound(bytes.len(), limit),
        "{held} bytes held for {} at a limit of {limit}: {bytes:x?}",
        bytes.len()
    );
    for error in &decoded.errors {
        assert!(matches!(error.kind(), ErrorKind::Decode { .. }), "{error}: {bytes:x?}");
    }
    decoded
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn what_a_world_sends_is_understood_and_what_it_would_not_is_an_error() {
    let all = messages();
    for bytes in &all {
        assert!(check(bytes, 1 << 20).understood > 0, "{bytes:x?}");
    }
    let mut random = ChaCha8Rng::seed_from_u64(number("DECODER_SEED", 1));
    let (mut understood, mut refused) = (0, 0);
    let runs = number("DECODER_RUNS", 500_000);
    for _ in 0..runs {
        let mut bytes = all.choose(&mut random).expect("messages were recorded").clone();
        for _ in 0..random.random_range(1..=3) {
            mutate(&mut bytes, &all, &mut random);
        }
        let limit = 1 << random.random_range(10..24);
        let decoded = check(&bytes, limit);
        understood += decoded.understood;
        refused += decoded.errors.len();
    }
    assert!(understood as u64 > runs / 20, "mutations went deep: {understood} of {runs}");
    assert!(refused as u64 > runs, "and were noticed: {refused} errors");
}

#[test]
fn the_allocator_counts() {
    let ((), held) = most_held(|| drop(std::hint::black_box(vec![0u8; 1 << 20])));
    assert!(held >= 1 << 20);
}

/// For `fuzz/`: `DECODER_CORPUS=fuzz/corpus/decode cargo test --features faults --test decoder -- --ignored`.
#[test]
#[ignore = "writes files"]
fn writes_a_corpus() {
    let folder = std::path::PathBuf::from(std::env::var_os("DECODER_CORPUS").expect("DECODER_CORPUS names a folder"));
    std::fs::create_dir_all(&folder).unwrap();
    for (number, bytes) in messages().iter().enumerate() {
        std::fs::write(folder.join(number.to_string()), bytes).unwrap();
    }
}

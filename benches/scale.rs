//! What many ranks cost, an idle rank, and start and end. `cargo bench --bench scale [-- --quick]`; launches each part on its own ranks.

#![allow(missing_docs, reason = "a program")]
#![allow(unsafe_code, reason = "an allocator that counts")]

mod bench;

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use bench::{Row, Times, finish, is_only_built, is_quick, leave, part, placed, places, run_part};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use rankgrad::optim::options::Check;
use rankgrad::optim::{Float, Rule, StateArray, StateView};
use rankgrad::prelude::*;
use rustix::time::{ClockId, clock_gettime};

struct Counting;

/// Allocations of this process.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: all is done by `System`; the counter doesn't allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

/// What the owner of [`clients`] has done.
#[derive(Debug, Default)]
struct Done {
    updates: u64,
    /// Processor time of the arithmetic, in seconds.
    busy: f64,
    first: Option<Instant>,
    last: Option<Instant>,
}

static DONE: Mutex<Option<Done>> = Mutex::new(None);

rankgrad::remote_optimizer! {
    /// A rule that does so much arithmetic.
    struct Work {
        /// Not used.
        lr = 0.0;
        /// How often it goes over the elements.
        rounds: f64 = 1.0;
    }
}

impl Rule for Work {
    const NAME: &'static str = "Work";
    const SCALARS: &'static [(&'static str, f64)] = &[];

    fn check(&self) -> Result<()> {
        Check(Self::NAME).at_least_0("rounds", self.rounds)
    }

    fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
        Vec::new()
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], _state: &mut StateView<'_, T>) {
        let start = processor_time(ClockId::ThreadCPUTime);
        work(p, g, self.rounds as u32);
        if let Some(done) = &mut *DONE.lock().unwrap_or_else(|e| e.into_inner()) {
            done.updates += 1;
            done.busy += processor_time(ClockId::ThreadCPUTime) - start;
            let now = Instant::now();
            done.first.get_or_insert(now);
            done.last = Some(now);
        }
    }
}

fn work<T: Float>(p: &mut [T], g: &[T], rounds: u32) {
    for _ in 0..rounds {
        for (p, &g) in p.iter_mut().zip(g) {
            *p = *p * T::of(0.5) + g;
        }
        std::hint::black_box(&mut *p);
    }
}

fn processor_time(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Elements that [`Work`] goes over.
const ELEMENTS: usize = 256;

/// How many rounds of [`work`] take a millisecond here.
fn rounds_here() -> f64 {
    static ROUNDS: OnceLock<f64> = OnceLock::new();
    *ROUNDS.get_or_init(|| {
        let (mut p, g) = (vec![1.0f32; ELEMENTS], vec![0.5f32; ELEMENTS]);
        let start = processor_time(ClockId::ThreadCPUTime);
        work(&mut p, &g, 100_000);
        100_000.0 * 1e-3 / (processor_time(ClockId::ThreadCPUTime) - start)
    })
}

/// Share of a core that a quiet process took, in percent, once it is known.
static WATCHED: OnceLock<f64> = OnceLock::new();

remote! {
    fn nothing(scope: &Scope) -> Result<()> {
        let _ = scope;
        Ok(())
    }

    /// How many rounds of [`work`] take a millisecond here.
    fn rounds_of_a_millisecond(scope: &Scope) -> Result<f64> {
        let _ = scope;
        Ok(rounds_here())
    }

    /// The far side of raw round trips of 8 bytes.
    fn pong(scope: &Scope, rounds: u32) -> Result<()> {
        let _ = scope;
        let (comm, mut buffer) = (SimpleCommunicator::world(), [0u8; 8]);
        let other = comm.process_at_rank(0);
        for _ in 0..rounds {
            other.receive_into(&mut buffer[..]);
            other.send(&buffer[..]);
        }
        Ok(())
    }

    /// Watches this process for so many seconds, after so many more.
    fn watch(scope: &Scope, after: f64, seconds: f64) -> Result<()> {
        let _ = scope;
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs_f64(after));
            let start = (Instant::now(), processor_time(ClockId::ProcessCPUTime));
            std::thread::sleep(Duration::from_secs_f64(seconds));
            let share = (processor_time(ClockId::ProcessCPUTime) - start.1) / start.0.elapsed().as_secs_f64();
            WATCHED.get_or_init(|| 100.0 * share);
        });
        Ok(())
    }

    fn watched(scope: &Scope) -> Result<f64> {
        let _ = scope;
        Ok(WATCHED.get().copied().unwrap_or(f64::NAN))
    }
}

fn main() -> ExitCode {
    if is_only_built() {
        return ExitCode::SUCCESS;
    }
    let begun = Instant::now();
    let ended = match part() {
        None => all(),
        Some(part) => match part.split('-').next() {
            Some("mpi") => only_mpi(begun),
            Some("world") => only_world(begun),
            Some("clients") => clients(),
            Some("owners") => owners(),
            _ => idle(),
        },
    };
    bench::ended(ended)
}

fn io(error: std::io::Error) -> Error {
    Error::user(format!("the bench itself: {error}"))
}

/// Launches one part after the other.
fn all() -> Result<()> {
    let mut rows = up_and_down(2, if is_quick() { 3 } else { 9 })?;
    rows.extend(up_and_down(64, 1)?);
    for (part, ranks) in [("idle", 2), ("clients", 9), ("owners", 65)] {
        rows.extend(run_part(part, ranks).map_err(io)?);
    }
    finish("scale", &rows).map_err(io)
}

/// A world up and down against MPI alone, in turns; processes of their own.
fn up_and_down(ranks: usize, turns: usize) -> Result<Vec<Row>> {
    let (mut ours, mut floor) = (Times::default(), Times::default());
    let mut places = Vec::new();
    for turn in 0..turns {
        for (kind, times) in [("mpi", &mut floor), ("world", &mut ours)] {
            for row in run_part(&format!("{kind}-{ranks}-{turn}"), ranks).map_err(io)? {
                times.push(Duration::from_secs_f64(row.value));
                places = row.ranks;
            }
        }
    }
    let (ours, floor) = (ours.quantile(0.5) / 1e6, floor.quantile(0.5) / 1e6);
    let rows = vec![
        Row::new(format!("up_and_down_{ranks}_ranks"), ours, "s", floor),
        Row::new(format!("up_and_down_{ranks}_ranks_more"), ours - floor, "s", 0.2),
    ];
    Ok(placed(rows, &places))
}

fn init() -> Result<Universe> {
    let up = mpi::initialize_with_threading(Threading::Multiple);
    up.map(|(universe, _)| universe).ok_or_else(|| Error::user("MPI is up already"))
}

/// Leaves the time from `begun` until now.
fn leave_time(rank: i32, begun: Instant) -> Result<()> {
    let rows = [Row::new("up_and_down", begun.elapsed().as_secs_f64(), "s", 1.0)];
    if rank == 0 { leave(&rows).map_err(io) } else { Ok(()) }
}

fn only_mpi(begun: Instant) -> Result<()> {
    let universe = init()?;
    let rank = universe.world().rank();
    drop(universe);
    leave_time(rank, begun)
}

fn only_world(begun: Instant) -> Result<()> {
    let world = World::init()?;
    let rank = world.rank();
    world.finish()?;
    leave_time(rank as i32, begun)
}

fn vector(n: usize, x: f32) -> Result<Tensor> {
    Tensor::from_vec(vec![x; n], [n])
}

/// Milliseconds of arithmetic that this rank gets done in a second.
fn alone() -> f64 {
    let rounds = rounds_here();
    let (mut p, g) = (vec![1.0f32; ELEMENTS], vec![0.5f32; ELEMENTS]);
    let (start, mut done) = (Instant::now(), 0.0);
    while start.elapsed() < Duration::from_secs(1) {
        work(&mut p, &g, rounds as u32);
        done += 1.0;
    }
    done / start.elapsed().as_secs_f64()
}

/// Eight clients step one owner, each its own parameter, with a millisecond of arithmetic a step. The floor is what the owner's arithmetic
/// alone reaches, before and after; in a second row, the processor time that it took.
fn clients() -> Result<()> {
    let universe = init()?;
    let comm = universe.world();
    let places = places(&comm);
    let world = World::builder().communicator(&comm).start()?;
    if world.rank() == 0 {
        world.serve()?;
        let before = alone();
        *DONE.lock().unwrap_or_else(|e| e.into_inner()) = Some(Done::default());
        world.serve()?; // lets the clients begin
        world.serve()?;
        let wall = (before + alone()) / 2.0;
        let done = DONE.lock().unwrap_or_else(|e| e.into_inner()).take().unwrap_or_default();
        let (Some(first), Some(last)) = (done.first, done.last) else {
            return Err(Error::user("no step"));
        };
        let throughput = (done.updates - 1) as f64 / (last - first).as_secs_f64();
        let processor = done.updates as f64 / done.busy;
        let rows = vec![
            Row::new("steps_of_8_clients", throughput, "1/s", wall),
            Row::new("steps_of_8_clients_against_processor_time", throughput, "1/s", processor),
        ];
        leave(&placed(rows, &places)).map_err(io)?;
        return world.finish();
    }
    let rounds = world.call(0, rounds_of_a_millisecond, ())?;
    let p = world.put(0, vector(ELEMENTS, 1.0)?)?;
    let optimizer = DistributedOptimizer::new(&world, Work::default().rounds(rounds), [&p])?;
    let ctx = world.context()?;
    ctx.accumulate(&p, Gradient::Dense(vector(ELEMENTS, 0.5)?.data()))?;
    world.serve()?;
    world.serve()?; // until the owner has measured itself
    let end = Instant::now() + Duration::from_secs(if is_quick() { 2 } else { 5 });
    while Instant::now() < end {
        optimizer.step(&ctx)?;
    }
    drop(ctx);
    world.serve()?;
    world.finish()
}

/// One client steps N owners: what each costs the client. The floor is what each of 8 costs.
fn owners() -> Result<()> {
    let universe = init()?;
    let comm = universe.world();
    let places = places(&comm);
    let world = World::builder().communicator(&comm).start()?;
    let costs = world.lead(|world| {
        [1, 2, 4, 8, 16, 32, 64]
            .into_iter()
            .map(|n| cost(world, n).map(|c| (n, c)))
            .collect::<Result<Vec<_>>>()
    })?;
    if let Some(costs) = costs {
        let mut rows = Vec::new();
        for (k, (name, unit)) in [("messages", "1"), ("allocations", "1"), ("coding", "us"), ("wall", "us")]
            .into_iter()
            .enumerate()
        {
            let floor = costs[3].1[k];
            rows.extend(
                costs
                    .iter()
                    .map(|(n, cost)| Row::new(format!("owners_{n}_{name}_each"), cost[k], unit, floor)),
            );
        }
        leave(&placed(rows, &places)).map_err(io)?;
    }
    world.finish()
}

/// Messages, allocations, microseconds of encoding and decoding, and of all together, an owner and a step.
fn cost(world: &World, n: u32) -> Result<[f64; 4]> {
    let p: Vec<RRef<Tensor>> = (1..=n).map(|k| world.put(k, vector(100, 1.0)?)).collect::<Result<_>>()?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(1e-3), &p)?;
    let ctx = world.context()?;
    for p in &p {
        ctx.accumulate(p, Gradient::Dense(vector(100, 0.5)?.data()))?;
    }
    let steps = if is_quick() { 11 } else { 31 };
    let mut costs: [Vec<f64>; 4] = Default::default();
    for step in 0..steps + 3 {
        let messages = world.counters(0)?.messages;
        let (allocations, wall) = (ALLOCATIONS.load(Relaxed), Instant::now());
        let cpu = processor_time(ClockId::ThreadCPUTime);
        let future = optimizer.step_async(&ctx, &StepOptions::new())?;
        let encoding = processor_time(ClockId::ThreadCPUTime) - cpu;
        while !future.is_done() {
            std::thread::sleep(Duration::from_micros(100));
        }
        let cpu = processor_time(ClockId::ThreadCPUTime);
        future.wait()?;
        let coding = encoding + processor_time(ClockId::ThreadCPUTime) - cpu;
        let wall = wall.elapsed().as_secs_f64();
        let allocations = ALLOCATIONS.load(Relaxed) - allocations;
        let messages = world.counters(0)?.messages - messages;
        if step >= 3 {
            let cost = [messages as f64, allocations as f64, coding * 1e6, wall * 1e6];
            costs.iter_mut().zip(cost).for_each(|(all, x)| all.push(x / f64::from(n)));
        }
    }
    ctx.release()?;
    Ok(costs.map(|mut all| {
        all.sort_unstable_by(f64::total_cmp);
        all[all.len() / 2]
    }))
}

/// What a quiet rank takes of a core, and how long its first answer takes.
fn idle() -> Result<()> {
    let universe = init()?;
    let comm = universe.world();
    let places = places(&comm);
    let world = World::builder().communicator(&comm).start()?;
    let rows = world.lead(|world| {
        let far = world.owner(1);
        let seconds = if is_quick() { 1.0 } else { 5.0 };
        world.call(far, watch, (0.1, seconds))?;
        std::thread::sleep(Duration::from_secs_f64(seconds + 0.3));
        let mut rows = vec![Row::new("idle_share_of_a_core", world.call(far, watched, ())?, "%", 1.0)];
        for (quiet, n) in [(5, 200), (100, 40)] {
            let n = if is_quick() { n / 2 } else { n };
            let (mut ours, mut floor) = (Times::default(), Times::default());
            for _ in 0..4 {
                first_answers(&mut ours, quiet, n / 4, || world.call(far, nothing, ()))?;
                let other = world.call_async(far, pong, (n / 4,))?;
                let (comm, mut buffer) = (SimpleCommunicator::world(), [0u8; 8]);
                let process = comm.process_at_rank(far as i32);
                first_answers(&mut floor, quiet, n / 4, || {
                    process.send(&buffer[..]);
                    process.receive_into(&mut buffer[..]);
                    Ok(())
                })?;
                other.wait()?;
            }
            rows.extend(ours.rows(&format!("first_answer_after_{quiet}_ms"), &mut floor));
        }
        Ok(rows)
    })?;
    if let Some(rows) = rows {
        leave(&placed(rows, &places)).map_err(io)?;
    }
    world.finish()
}

fn first_answers(times: &mut Times, quiet: u64, n: u32, mut f: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 0..n {
        std::thread::sleep(Duration::from_millis(quiet));
        let start = Instant::now();
        f()?;
        times.push(start.elapsed());
    }
    Ok(())
}

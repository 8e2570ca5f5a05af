//! Large tensors from rank to rank against raw MPI. `cargo bench --bench transfer [-- --quick]`; launches itself on two ranks.
//!
//! The floor of a fetch is what it would be by hand: 8 bytes there, the values back, into memory that was written before. That of an argument is the
//! values there, and 8 bytes back. Blocks of both take turns. A received value stays alive until the next has come.

#![allow(missing_docs, reason = "a program")]

mod bench;

use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use bench::{Row, Times, finish, is_quick, placed, places, ranks};
use mpi::Threading;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use ndarray::ArrayD;
use rankgrad::prelude::*;

/// The last argument that came.
static LAST: Mutex<Option<Tensor>> = Mutex::new(None);

remote! {
    fn keep(scope: &Scope, x: Tensor) -> Result<()> {
        let _ = scope;
        *LAST.lock().unwrap_or_else(|e| e.into_inner()) = Some(x);
        Ok(())
    }

    fn forget(scope: &Scope) -> Result<()> {
        let _ = scope;
        *LAST.lock().unwrap_or_else(|e| e.into_inner()) = None;
        Ok(())
    }

    fn value(scope: &Scope, bytes: u64) -> Result<Tensor> {
        let _ = scope;
        vector(bytes)
    }

    /// The far side of [`transfers`].
    fn raw(scope: &Scope, fetch: bool, bytes: u64, rounds: u32) -> Result<()> {
        let _ = scope;
        transfers(0, fetch, bytes, rounds);
        Ok(())
    }

    /// Bytes of memory at most since the last reset, and now; resets.
    fn memory(scope: &Scope) -> Result<(f64, f64)> {
        let _ = scope;
        my_memory()
    }
}

fn main() -> ExitCode {
    if let Some(code) = ranks(2) {
        return code;
    }
    bench::ended(run())
}

fn run() -> Result<()> {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or_else(|| Error::user("MPI is up already"))?;
    let comm = universe.world();
    let places = places(&comm);
    let world = World::builder().communicator(&comm).start()?;
    let rows = world.lead(|world| {
        let mut rows = Vec::new();
        // The peaks first: what later transfers leave behind would hide them.
        rows.extend(peaks(world, 256 << 20)?);
        for (name, bytes, blocks, rounds) in [("4KB", 4 << 10, 40, 500), ("4MB", 4 << 20, 20, 20), ("256MB", 256 << 20, 5, 4)] {
            let (blocks, rounds) = if is_quick() { (blocks / 2, rounds / 2) } else { (blocks, rounds) };
            rows.extend(sizes(world, name, bytes, blocks, rounds)?);
        }
        Ok(rows)
    })?;
    if let Some(rows) = rows {
        finish("transfer", &placed(rows, &places)).map_err(|e| Error::user(format!("bench/transfer.json: {e}")))?;
    }
    world.finish()
}

fn vector(bytes: u64) -> Result<Tensor> {
    let n = bytes as usize / size_of::<f32>();
    Tensor::from_vec(vec![1.0f32; n], [n])
}

/// One rank's side of transfers by MPI alone; rank 0's times.
fn transfers(other: i32, fetch: bool, bytes: u64, rounds: u32) -> Times {
    let comm = SimpleCommunicator::world();
    let (mut values, mut short, other) = (vec![1u8; bytes as usize], [0u8; 8], comm.process_at_rank(other));
    let mut times = Times::default();
    for round in 0..=rounds {
        let start = Instant::now();
        match (comm.rank(), fetch) {
            (0, true) => {
                other.send(&short[..]);
                other.receive_into(&mut values[..]);
            }
            (0, false) => {
                other.send(&values[..]);
                other.receive_into(&mut short[..]);
            }
            (_, true) => {
                other.receive_into(&mut short[..]);
                other.send(&values[..]);
            }
            (_, false) => {
                other.receive_into(&mut values[..]);
                other.send(&short[..]);
            }
        }
        if round > 0 {
            times.push(start.elapsed());
        }
    }
    times
}

/// A way to transfer values, and its times beside those of raw MPI.
struct Way<'a> {
    kind: &'static str,
    fetches: bool,
    transfer: &'a mut dyn FnMut() -> Result<()>,
    ours: Times,
    floor: Times,
}

impl<'a> Way<'a> {
    fn new(kind: &'static str, fetches: bool, transfer: &'a mut dyn FnMut() -> Result<()>) -> Self {
        let (ours, floor) = Default::default();
        Way {
            kind,
            fetches,
            transfer,
            ours,
            floor,
        }
    }
}

/// Blocks of transfers of one size, ours and raw ones, in turns.
fn sizes(world: &World, name: &str, bytes: u64, blocks: usize, rounds: usize) -> Result<Vec<Row>> {
    let far = world.owner(1);
    let value = world.put(far, vector(bytes)?)?;
    let argument = vector(bytes)?;
    let mut view = ArrayD::<f32>::zeros(vec![bytes as usize / size_of::<f32>()]);
    let mut kept = None;
    let mut into = || world.fetch_into(&value, view.view_mut());
    let mut fetch = || world.fetch(&value).map(|x| drop(kept.replace(x)));
    let mut pass = || world.call(far, keep, (&argument,));
    let mut ways = [
        Way::new("fetch_into", true, &mut into),
        Way::new("fetch", true, &mut fetch),
        Way::new("argument", false, &mut pass),
    ];
    for block in 0..=blocks {
        for way in &mut ways {
            let other = world.call_async(far, raw, (way.fetches, bytes, rounds as u32))?;
            let by_mpi = transfers(far as i32, way.fetches, bytes, rounds as u32);
            other.wait()?;
            if block > 0 {
                way.floor.append(by_mpi);
            }
            for round in 0..=rounds {
                let start = Instant::now();
                (way.transfer)()?;
                if round > 0 && block > 0 {
                    way.ours.push(start.elapsed());
                }
            }
        }
    }
    let mut rows = Vec::new();
    for Way {
        kind, mut ours, mut floor, ..
    } in ways
    {
        rows.extend(ours.rows(&format!("{kind}_{name}"), &mut floor));
        let bar = 1.15 * floor.quantile(0.5) + 3.0;
        rows.push(Row::new(
            format!("{kind}_{name}_against_1.15x_and_3_us"),
            ours.quantile(0.5),
            "us",
            bar,
        ));
    }
    world.call(far, forget, ())?;
    Ok(rows)
}

fn my_memory() -> Result<(f64, f64)> {
    let failed = |e: std::io::Error| Error::user(format!("/proc/self: {e}"));
    let status = std::fs::read_to_string("/proc/self/status").map_err(failed)?;
    let [most, now] = ["VmHWM:", "VmRSS:"].map(|name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.split_whitespace()
            .next()
            .and_then(|kb| kb.parse::<f64>().ok())
            .unwrap_or(f64::NAN)
            * 1024.0
    });
    std::fs::write("/proc/self/clear_refs", "5").map_err(failed)?;
    Ok((most, now))
}

/// How much memory each end holds at most for values of one size, in steady state, one of them alive.
fn peaks(world: &World, bytes: u64) -> Result<Vec<Row>> {
    let far = world.owner(1);
    let payload = bytes as f64 / 1e6;
    let value = world.remote(far, value, (bytes,))?;
    let argument = vector(4)?;
    world.call(far, keep, (&argument,))?;
    drop(world.fetch(&value)?); // until it is made
    let mut rows = Vec::new();
    let mut measure = |name: &str, held: [f64; 2], f: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let before = [my_memory()?.1, world.call(far, memory, ())?.1];
        f()?;
        let after = [my_memory()?.0, world.call(far, memory, ())?.0];
        for (end, k) in [("here", 0), ("there", 1)] {
            let most = (after[k] - before[k]) / 1e6 + held[k];
            rows.push(Row::new(format!("{name}_256MB_peak_{end}"), most, "MB", payload));
        }
        Ok(())
    };
    measure("fetch_into", [0.0, payload], &mut || {
        let mut view = ArrayD::<f32>::zeros(vec![bytes as usize / size_of::<f32>()]);
        (0..3).try_for_each(|_| world.fetch_into(&value, view.view_mut()))
    })?;
    measure("fetch", [0.0, payload], &mut || {
        (0..3).try_for_each(|_| world.fetch(&value).map(drop))
    })?;
    let argument = vector(bytes)?;
    measure("argument", [payload, 0.0], &mut || {
        (0..3).try_for_each(|_| {
            world.call(far, keep, (&argument,))?;
            world.call(far, forget, ())
        })
    })?;
    Ok(rows)
}

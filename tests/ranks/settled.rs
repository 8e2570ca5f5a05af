//! Cases that rank 0 leads; what is alive on the ranks, and what the library logs.

use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use rankgrad::config::Settings;
use rankgrad::{Calls, Result, World, local};

use crate::Outcome;

/// Waits until no rank holds a value, a reference, a context, a backward or an optimizer, nor has requests under way.
///
/// # Panics
/// If that isn't so after 10 s, with the counters of the ranks that still hold something.
pub fn nothing_alive(world: &World) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let mut left = Vec::new();
        for rank in 0..world.size() {
            let c = world.counters(rank)?;
            if c.values + c.handles + c.requests + c.tasks + c.contexts + c.backwards + c.optimizers > 0 {
                left.push(format!("rank {rank}: {c:?}"));
            }
        }
        if left.is_empty() {
            return Ok(());
        }
        assert!(Instant::now() < until, "still alive after 10 s:\n{}", left.join("\n"));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Over MPI: rank 0 leads `f`, and then nothing may be alive on any rank.
pub fn led(f: fn(&World) -> Result<()>) -> Outcome {
    let world = World::init()?;
    world.lead(|world| f(world).and_then(|()| nothing_alive(world)))?;
    Ok(world.finish()?)
}

/// The same with ranks that are threads of one process.
pub fn led_locally(ranks: u32, f: fn(&World) -> Result<()>) -> Outcome {
    let settings = |settings: &mut Settings| settings.cuda = on_gpus();
    Ok(local::run_with(ranks, settings, |world| {
        world.lead(|world| f(world).and_then(|()| nothing_alive(world)))
    })?)
}

/// Whether parameters live on GPUs in this run: with `RANKGRAD_CUDA=true`.
pub fn on_gpus() -> bool {
    std::env::var("RANKGRAD_CUDA").is_ok_and(|value| value == "true")
}

struct Log(Mutex<Vec<String>>);

static LOG: Log = Log(Mutex::new(Vec::new()));

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Keeps the warnings and errors of this process from now on.
pub fn keep_log() {
    static SET: Once = Once::new();
    SET.call_once(|| {
        log::set_logger(&LOG).expect("no other logger in a test");
        log::set_max_level(log::LevelFilter::Warn);
    });
}

/// The warnings and errors so far that contain all of these texts.
pub fn logged(texts: &[&str]) -> Vec<String> {
    let lines = LOG.0.lock().unwrap_or_else(PoisonError::into_inner);
    lines
        .iter()
        .filter(|line| texts.iter().all(|text| line.contains(text)))
        .cloned()
        .collect()
}

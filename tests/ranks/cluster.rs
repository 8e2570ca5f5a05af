//! What a batch system asks of a job: that it stop at a signal, all ranks at the same step; and logs.

use std::path::Path;
use std::process::{Command, id};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rankgrad::Signal;
use rankgrad::prelude::*;

use crate::case::Case;
use crate::{Outcome, launcher_rank, ok};

const SIGNALS: &[Signal] = &[Signal::Usr1, Signal::Term];

/// A job that hasn't stopped by then doesn't.
const LONG: Duration = Duration::from_secs(30);

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_millis() as u64)
}

/// How many steps this rank has made.
#[derive(Default)]
struct Made(std::sync::atomic::AtomicU64);

remote! {
    /// A signal to this rank; when it was sent, in ms.
    fn signalled(scope: &Scope, name: String) -> Result<u64> {
        let _ = scope;
        let sent = now();
        signal(&name);
        Ok(sent)
    }

    fn made(scope: &Scope) -> Result<u64> {
        Ok(scope.state::<Made>()?.0.load(std::sync::atomic::Ordering::SeqCst))
    }
}

fn signal(name: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{name} {}", id())]).status();
    assert!(sent.is_ok_and(|status| status.success()));
}

/// Waits until this rank knows of the signal; when that was, in ms.
fn learns(world: &World) -> Result<u64> {
    let start = Instant::now();
    while world.signal()?.is_none() {
        assert!(start.elapsed() < LONG, "rank {} never learnt of the signal", world.rank());
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(now())
}

/// Each rank gets one in turn; all learn of it, also those that sleep or compute.
fn all_learn() -> Outcome {
    let world = World::builder().on_signal(SIGNALS).start()?;
    assert_eq!((world.signal()?, world.stopped()?), (None, false));
    world.serve()?;
    let last = world.size() - 1;
    let sent = match world.rank() == last {
        true => world.call(last, signalled, ("USR1".to_owned(),))?,
        false => now(),
    };
    let learnt = learns(&world)?;
    assert_eq!(world.signal()?, Some(Signal::Usr1));
    assert!(learnt.saturating_sub(sent) <= 1000, "learnt after {} ms", learnt - sent);
    // A second one changes nothing.
    world.serve()?;
    if world.rank() == 0 {
        signal("TERM");
    }
    while !world.stopped()? {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(world.signal()?, Some(Signal::Usr1));
    ok(world.finish())
}

/// All ranks make steps, each at its own pace; one gets a signal.
fn all_stop_at_one_step() -> Outcome {
    let world = World::builder().state(Made::default()).on_signal(SIGNALS).start()?;
    world.serve()?;
    let (start, mut step) = (Instant::now(), 0);
    while !world.stop_at(step)? {
        assert!(start.elapsed() < LONG, "rank {} wasn't stopped", world.rank());
        std::thread::sleep(Duration::from_micros(300 * (1 + u64::from(world.rank()))));
        step += 1;
        if step == 100 && world.rank() == world.owner(1) {
            signal("TERM");
        }
    }
    // Later numbers are refused as well.
    assert!(world.stop_at(step + 1)? && world.stopped()? && step >= 100);
    world.set_state(Made(step.into()));
    world.serve()?;
    for rank in 0..world.size() {
        assert_eq!(world.call(rank, made, ())?, step);
    }
    ok(world.finish())
}

/// One rank makes the steps, and others know nothing of them.
fn a_leader_stops() -> Outcome {
    let world = World::init()?;
    world.on_signal(SIGNALS)?;
    world.serve()?;
    let to = world.owner(1);
    let steps = world.lead(|world| {
        let start = Instant::now();
        let mut step = 7;
        while !world.stop_at(step)? {
            assert!(start.elapsed() < LONG, "not stopped");
            step += 1;
            if step == 17 {
                world.call(to, signalled, ("USR1".to_owned(),))?;
            }
        }
        Ok(step)
    })?;
    assert!(steps.is_none_or(|step| step >= 17));
    assert!(world.stopped()?);
    ok(world.finish())
}

/// A signal during the start counts when the world is up.
fn a_signal_during_the_start() -> Outcome {
    let sender = (launcher_rank() == 0).then(|| {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            signal("USR1");
        })
    });
    let world = World::builder().on_signal(SIGNALS).start()?;
    learns(&world)?;
    drop(sender.map(std::thread::JoinHandle::join));
    // A rank may learn of it a moment before it is held.
    world.lead(|world| {
        let mut step = 0;
        while !world.stop_at(step)? {
            step += 1;
            assert!(step < 10_000, "never held");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(world.stopped()?);
        Ok(())
    })?;
    ok(world.finish())
}

/// A rank that doesn't answer when a signal comes holds the others up, and is asked until it does.
fn a_stopped_rank_is_asked_again() -> Outcome {
    let world = World::init()?;
    world.on_signal(SIGNALS)?;
    world.serve()?;
    if world.rank() == 1 {
        let script = format!("kill -STOP {0}; sleep 3; kill -CONT {0}", id());
        drop(Command::new("sh").args(["-c", &script]).spawn());
    }
    std::thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    if world.rank() == 0 {
        signal("TERM");
        std::thread::sleep(Duration::from_millis(100));
    }
    let mut step = 0;
    loop {
        assert!(start.elapsed() < LONG, "rank {} wasn't stopped", world.rank());
        match world.stop_at(step) {
            Ok(true) => break,
            Ok(false) => step += 1,
            Err(e) => assert!(matches!(e.kind(), rankgrad::ErrorKind::Timeout { .. }), "{e}"),
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    ok(world.finish())
}

const LOGS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/logs");

/// Each rank writes a file of its own, and adds to it in a second run; the script puts them in order.
fn one_log_a_rank() -> Outcome {
    let world = World::init()?;
    let mark = std::env::var("RANKS_MARK")?;
    for round in 0..3 {
        log::warn!("{mark} round {round} of {}\n  and more", world.rank());
        world.serve()?;
    }
    world.lead(|world| {
        for rank in 0..world.size() {
            let text = std::fs::read_to_string(Path::new(LOGS).join(format!("rank-{rank}.log"))).map_err(Error::user)?;
            let mine = format!("{mark} round 2 of {rank}");
            assert!(text.contains(&mine) && text.contains(&format!("Z rank {rank} WARN")), "{text}");
            assert!((0..world.size()).all(|other| other == rank || !text.contains(&format!("{mark} round 0 of {other}"))));
        }
        let logs = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/logs");
        let merged = Command::new(logs).arg(LOGS).output().map_err(Error::user)?;
        let merged = String::from_utf8_lossy(&merged.stdout).into_owned();
        let rounds: Vec<&str> = merged.split(&mark).skip(1).collect();
        assert_eq!(rounds.len(), 3 * world.size() as usize, "{merged}");
        for (at, round) in rounds.iter().enumerate() {
            let expected = format!(" round {} of", at / world.size() as usize);
            assert!(round.starts_with(&expected) && round.contains("\n  and more\n"), "{merged}");
        }
        std::fs::remove_dir_all(LOGS).map_err(Error::user)
    })?;
    ok(world.finish())
}

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("cluster::all_ranks_learn_of_a_signal_within_a_second", all_learn),
    Case::new("cluster::all_ranks_stop_at_one_step", all_stop_at_one_step),
    Case {
        ranks: &[0, 1, 3],
        ..Case::new("cluster::a_leader_stops", a_leader_stops)
    },
    Case {
        ranks: &[1, 3],
        env: &[("RANKGRAD_POOL_THREADS", "1")],
        ..Case::new("cluster::a_leader_stops_with_one_thread", a_leader_stops)
    },
    Case {
        ranks: &[2, 3],
        env: &[("RANKGRAD_TIMEOUT", "1")],
        ..Case::new("cluster::a_stopped_rank_is_asked_again", a_stopped_rank_is_asked_again)
    },
    Case {
        ranks: &[2, 4],
        ..Case::new("cluster::a_signal_during_the_start_counts", a_signal_during_the_start)
    },
    Case {
        ranks: &[1, 3],
        env: &[("RANKGRAD_LOG_DIR", LOGS)],
        alone: true,
        ..Case::new("cluster::each_rank_has_its_log_and_a_script_orders_them", one_log_a_rank)
    },
];

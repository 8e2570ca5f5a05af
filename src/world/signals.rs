//! Signals that ask the job to stop: every rank learns of them, and all agree on the step at which they do.

use std::any::TypeId;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};

use super::World;
use crate::rpc::{Caller, Calls, Future, Scope};
use crate::runtime::{Permission, Runtime, Windowed, lock};
use crate::{Error, ErrorKind, Result};

/// The exit code that asks a batch script to put the job back into the queue, as those in `slurm/` do. It is above those of ranks that a signal ended (129 to
/// 192): srun reports the highest of all ranks, and with `--kill-on-bad-exit` may end ranks that are just leaving. 205 is mpirun's for a lost node.
pub const REQUEUE: u8 = 200;

/// A signal that asks a job to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Signal {
    /// SIGUSR1, which batch systems send ahead of the time limit, when told to (`--signal=B:USR1@600`).
    Usr1,
    /// SIGUSR2.
    Usr2,
    /// SIGTERM, which a cancelled or preempted job gets some seconds before its end.
    Term,
    /// SIGINT, the interrupt key.
    Int,
    /// SIGHUP, the end of the terminal.
    Hup,
}

impl Signal {
    const ALL: [(Signal, c_int); 5] = [
        (Signal::Usr1, SIGUSR1),
        (Signal::Usr2, SIGUSR2),
        (Signal::Term, SIGTERM),
        (Signal::Int, SIGINT),
        (Signal::Hup, SIGHUP),
    ];

    fn number(self) -> c_int {
        Signal::ALL
            .iter()
            .find(|(signal, _)| *signal == self)
            .map_or(SIGTERM, |(_, number)| *number)
    }

    fn of(number: c_int) -> Option<Signal> {
        Signal::ALL.iter().find(|(_, known)| *known == number).map(|(signal, _)| *signal)
    }
}

impl std::fmt::Display for Signal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Signal::Usr1 => "SIGUSR1",
            Signal::Usr2 => "SIGUSR2",
            Signal::Term => "SIGTERM",
            Signal::Int => "SIGINT",
            Signal::Hup => "SIGHUP",
        })
    }
}

/// What a rank knows of a stop.
#[derive(Debug, Default)]
struct State {
    signal: Option<Signal>,
    /// The last step that it may make, as far as it has asked.
    passed: Option<u64>,
    /// Somebody counts the steps that were passed: no further one may be.
    held: bool,
    /// The first step that isn't made.
    at: Option<u64>,
    /// Each rank knows it.
    agreed: bool,
}

/// A rank's part in stopping.
#[derive(Debug, Default)]
pub(super) struct Stop(Mutex<State>);

impl Stop {
    /// For the table of a rank's states.
    pub(super) fn as_state() -> (TypeId, Arc<dyn std::any::Any + Send + Sync>) {
        (TypeId::of::<Stop>(), Arc::new(Stop::default()))
    }

    fn of(runtime: &Runtime) -> Result<Arc<Stop>> {
        let found = runtime.state().get(&TypeId::of::<Stop>()).cloned();
        found
            .and_then(|stop| stop.downcast().ok())
            .ok_or_else(|| Error::user("the world has no state for signals"))
    }

    /// Whether this is new.
    fn asked(&self, signal: Signal) -> bool {
        let mut state = lock(&self.0);
        let new = state.signal.is_none();
        state.signal.get_or_insert(signal);
        new
    }

    /// From here on no further step is passed; the last one that was.
    fn hold(&self, signal: Signal) -> Option<u64> {
        let mut state = lock(&self.0);
        state.signal.get_or_insert(signal);
        state.held = true;
        state.passed
    }

    fn stop(&self, at: u64) {
        lock(&self.0).at = Some(at);
    }

    fn agree(&self) {
        lock(&self.0).agreed = true;
    }

    /// Whether to stop before this step; `None` if that isn't agreed yet. A rank that stops may tell others of it in its own way: by then they know.
    fn pass(&self, step: u64) -> Option<bool> {
        let mut state = lock(&self.0);
        match (state.at, state.held) {
            (Some(at), _) if step < at => Some(false),
            (Some(_), _) => state.agreed.then_some(true),
            (None, true) => None,
            (None, false) => {
                state.passed = Some(state.passed.map_or(step, |passed| passed.max(step)));
                Some(false)
            }
        }
    }
}

crate::remote! {
    /// On rank 0: a rank has got a signal. Tells all, and makes out where to stop.
    fn stop_asked(scope: &Scope, signal: Signal) -> Result<()> {
        let stop = Stop::of(&scope.caller().runtime)?;
        if !stop.asked(signal) {
            return Ok(());
        }
        log::info!("rank {}: {signal} asks the job to stop", scope.caller_rank());
        let mut passed = others(scope, |rank| scope.call_async(rank, stop_hold, (signal,)))?;
        passed.push(stop.hold(signal));
        let at = passed.into_iter().flatten().max().map_or(0, |passed| passed.saturating_add(1));
        others(scope, |rank| scope.call_async(rank, stop_here, (at,)))?;
        stop.stop(at);
        others(scope, |rank| scope.call_async(rank, stop_agreed, ()))?;
        stop.agree();
        Ok(())
    }

    /// The last step that this rank has passed; it passes no further one until it knows where to stop.
    fn stop_hold(scope: &Scope, signal: Signal) -> Result<Option<u64>> {
        Ok(Stop::of(&scope.caller().runtime)?.hold(signal))
    }

    /// All stop before this step.
    fn stop_here(scope: &Scope, at: u64) -> Result<()> {
        Stop::of(&scope.caller().runtime)?.stop(at);
        Ok(())
    }

    /// All know where to stop.
    fn stop_agreed(scope: &Scope) -> Result<()> {
        Stop::of(&scope.caller().runtime)?.agree();
        Ok(())
    }
}

/// Asks all ranks but this one at once, which does its part itself: there may be no second thread for it. Whoever doesn't answer in time is asked again, since steps are
/// held until all have answered.
fn others<R: serde::de::DeserializeOwned>(scope: &Scope, ask: impl Fn(u32) -> Result<Future<R>>) -> Result<Vec<R>> {
    let ranks: Vec<u32> = (0..scope.size()).filter(|&rank| rank != scope.rank()).collect();
    let asked: Vec<_> = ranks.iter().map(|&rank| ask(rank)).collect::<Result<_>>()?;
    let mut answers = Vec::with_capacity(asked.len());
    for (&rank, asked) in ranks.iter().zip(asked) {
        let mut answer = asked.wait();
        while let Err(error) = &answer
            && matches!(error.kind(), ErrorKind::Timeout { .. })
        {
            log::warn!("a signal asks the job to stop, and rank {rank} doesn't answer; asking again: {error}");
            answer = ask(rank)?.wait();
        }
        answers.push(answer?);
    }
    Ok(answers)
}

/// The thread that takes signals, for the whole process.
static TAKER: Mutex<Option<Handle>> = Mutex::new(None);
/// The world that is told.
static TOLD: Mutex<Weak<Runtime>> = Mutex::new(Weak::new());
/// A signal that no world was told of yet.
static PENDING: AtomicI32 = AtomicI32::new(0);

/// Takes these signals from here on, in place of what the system does at them. Local.
pub(super) fn take(signals: &[Signal]) -> Result<()> {
    let failed = |e: std::io::Error| {
        Error::from(ErrorKind::Init {
            what: format!("can't take signals: {e}"),
            cure: "leave out `on_signal`, or raise the limits of this process".into(),
        })
    };
    let mut taker = lock(&TAKER);
    if let Some(handle) = &*taker {
        return signals
            .iter()
            .try_for_each(|signal| handle.add_signal(signal.number()))
            .map_err(failed);
    }
    let mut taken = Signals::new(signals.iter().map(|signal| signal.number())).map_err(failed)?;
    let handle = taken.handle();
    let forever = move || {
        for number in taken.forever() {
            PENDING.store(number, Ordering::SeqCst);
            let runtime = lock(&TOLD).upgrade();
            if let Some(runtime) = runtime {
                tell(&runtime);
            }
        }
    };
    std::thread::Builder::new()
        .name("rankgrad-signals".into())
        .spawn(forever)
        .map_err(failed)?;
    *taker = Some(handle);
    Ok(())
}

/// Whether signals are taken in this process.
pub(super) fn are_taken() -> bool {
    lock(&TAKER).is_some()
}

/// From here on signals are this world's.
pub(super) fn attach(runtime: &Arc<Runtime>) {
    *lock(&TOLD) = Arc::downgrade(runtime);
    tell(runtime);
}

/// Tells rank 0 of a signal that is pending.
fn tell(runtime: &Arc<Runtime>) {
    let Some(signal) = Signal::of(PENDING.swap(0, Ordering::SeqCst)) else {
        return;
    };
    let caller = Caller {
        runtime: Arc::clone(runtime),
        recorder: None,
        window: Windowed::Bypass,
        limit: None,
    };
    // Nobody waits for the answer: what it comes to, each rank is told.
    if let Err(e) = caller.call_async(0, stop_asked, (signal,)) {
        log::warn!("rank {}: got {signal}, and can't tell: {e}", runtime.rank());
    }
}

impl World {
    /// Takes these signals, on this rank, as a wish that the job stop: whichever rank gets one, all ranks learn it within milliseconds ([`signal`](Self::signal)), and
    /// [`stop_at`](Self::stop_at) says where they stop. What the system does at these signals otherwise, mostly the end of the process, is off from here on, for the life of
    /// the process. Local; blocks on nothing. [`Builder::on_signal`](super::Builder::on_signal) takes signals that come during the start, too.
    ///
    /// ```no_run
    /// use std::process::ExitCode;
    /// use rankgrad::prelude::*;
    /// use rankgrad::{REQUEUE, Signal};
    ///
    /// fn main() -> Result<ExitCode> {
    ///     let world = World::init()?;
    ///     world.on_signal(&[Signal::Usr1, Signal::Term])?;
    ///     let done = world.lead(|world| {
    ///         for step in 0..1_000_000 {
    ///             if world.stop_at(step)? {
    ///                 // save: `step` is the next one
    ///                 return Ok(false);
    ///             }
    ///             // make the step
    ///         }
    ///         Ok(true)
    ///     })?;
    ///     world.finish()?;
    ///     // The launcher reports the code of the rank that knows.
    ///     Ok(if done == Some(false) { ExitCode::from(REQUEUE) } else { ExitCode::SUCCESS })
    /// }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Init`] if the system refuses; [`ErrorKind::ShutDown`] after the end.
    pub fn on_signal(&self, signals: &[Signal]) -> Result<()> {
        self.runtime().check_alive("on_signal")?;
        take(signals)?;
        attach(self.runtime());
        Ok(())
    }

    /// The signal that asks the job to stop, whichever rank got it; `None` as long as there was none. Local; blocks on nothing.
    ///
    /// # Errors
    /// [`ErrorKind::ShutDown`] after the end.
    pub fn signal(&self) -> Result<Option<Signal>> {
        self.runtime().check_alive("signal")?;
        Ok(lock(&Stop::of(self.runtime())?.0).signal)
    }

    /// Whether this rank is to stop before it makes `step`: asked before each step, by each rank that makes steps of its own, with numbers that rise one by one. All such ranks stop before the
    /// same step, the first that none of them has passed when a signal came, so all have made the same steps and can save the same state. Without a signal it is always
    /// false. Local; blocks only for the moment in which the ranks agree, after a signal.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] if they don't agree in time, as a rank doesn't answer; [`ErrorKind::ShutDown`] after the end.
    pub fn stop_at(&self, step: u64) -> Result<bool> {
        let runtime = self.runtime();
        runtime.check_alive("stop_at")?;
        let stop = Stop::of(runtime)?;
        if let Some(answer) = stop.pass(step) {
            return Ok(answer);
        }
        let start = Instant::now();
        let limit = runtime.settings.timeout();
        let deadline = limit.and_then(|limit| start.checked_add(limit));
        runtime.wait_until(&|| lock(&stop.0).agreed, Permission::Nothing, deadline)?;
        stop.pass(step).ok_or_else(|| {
            ErrorKind::Timeout {
                operation: "stop_at".into(),
                rank: 0,
                seconds: start.elapsed().as_secs_f64(),
                status: "the ranks haven't agreed where to stop: one of them doesn't answer".into(),
            }
            .into()
        })
    }

    /// Whether a signal has made the ranks agree on a step to stop at. Once [`stop_at`](Self::stop_at) was true on any rank, this is true on all. It is also true
    /// where the signal came when all steps were made: a job leaves with [`REQUEUE`] only if [`stop_at`](Self::stop_at) has kept it from one. Local; blocks on nothing.
    ///
    /// # Errors
    /// [`ErrorKind::ShutDown`] after the end.
    pub fn stopped(&self) -> Result<bool> {
        self.runtime().check_alive("stopped")?;
        Ok(lock(&Stop::of(self.runtime())?.0).at.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_step_is_passed_while_others_are_counted() {
        let stop = Stop::default();
        assert_eq!((stop.pass(0), stop.pass(1)), (Some(false), Some(false)));
        assert!(stop.asked(Signal::Usr1) && !stop.asked(Signal::Term));
        assert_eq!(stop.hold(Signal::Usr1), Some(1));
        assert_eq!((stop.pass(2), stop.hold(Signal::Usr1)), (None, Some(1)));
        stop.stop(4);
        // Others may not know yet.
        assert_eq!([3, 4].map(|step| stop.pass(step)), [Some(false), None]);
        stop.agree();
        assert_eq!(
            [2, 3, 4, 5].map(|step| stop.pass(step)),
            [Some(false), Some(false), Some(true), Some(true)]
        );
        assert_eq!(lock(&stop.0).signal, Some(Signal::Usr1));
        assert_eq!(Stop::default().hold(Signal::Hup), None);
    }

    #[test]
    fn signals_have_names_and_numbers() {
        for (signal, number) in Signal::ALL {
            assert_eq!((signal.number(), Signal::of(number)), (number, Some(signal)));
            assert!(signal.to_string().starts_with("SIG"));
        }
        assert_eq!(Signal::of(0), None);
    }
}

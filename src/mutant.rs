//! Named faults of the protocol, for the simulation to find. Outside of it none is ever on, and nothing is left of the questions.

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutant {
    DropRelease,
    ReleaseAll,
    SkipPin,
    SkipAcknowledgement,
    ForgetParked,
    KeepRefusedRefs,
    CountDuplicate,
    LeakWindow,
    SkipChild,
    LoseLateReply,
    ReleaseTwice,
    ForgetReleased,
    MixContexts,
    AnswerMarkEarly,
    SkipCommit,
    SkipRecall,
    CommitEarly,
    KeepAborted,
    SumInOrderOfArrival,
    #[cfg(any(test, feature = "sim"))]
    RequestTwice,
    LastInFirstOut,
    StepsAtOnce,
    KeepNothing,
    KeepFailed,
    KeepGivenUp,
    EndKeeps,
    EndWaits,
    EndInAnyTurn,
    SkipKnock,
    StepDuringBackward,
    EndAfterOneWave,
}

impl Mutant {
    /// All of them, with what each does.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) const ALL: &[(Mutant, &str)] = &[
        (Mutant::DropRelease, "a release of references isn't sent"),
        (Mutant::ReleaseAll, "a release takes away registrations that it doesn't count"),
        (Mutant::SkipPin, "a reference isn't pinned while a third rank registers"),
        (
            Mutant::SkipAcknowledgement,
            "a reply doesn't wait for the registration of references",
        ),
        (Mutant::ForgetParked, "requests that wait for a value aren't woken"),
        (Mutant::KeepRefusedRefs, "the references of a refused request aren't dropped"),
        (Mutant::CountDuplicate, "a second reply counts for the end"),
        (Mutant::LeakWindow, "an answer makes no room in the window"),
        (Mutant::SkipChild, "a rank that met a context through this one isn't noted"),
        (Mutant::LoseLateReply, "the release of a context doesn't follow a late reply"),
        (Mutant::ReleaseTwice, "the release of a context is sent twice"),
        (Mutant::ForgetReleased, "a request of a released context is handled"),
        (Mutant::MixContexts, "a call is recorded in another context"),
        (
            Mutant::AnswerMarkEarly,
            "a rank answers the part of a backward that found it idle at once",
        ),
        (Mutant::SkipCommit, "a commit doesn't travel on"),
        (Mutant::SkipRecall, "the root doesn't recall that a rank is to commit"),
        (Mutant::CommitEarly, "a rank that is to commit does, though gradients go on from it"),
        (Mutant::KeepAborted, "gradients of a failed backward are kept"),
        (Mutant::SumInOrderOfArrival, "gradients are summed as they arrive"),
        (Mutant::RequestTwice, "a step is sent twice"),
        (Mutant::LastInFirstOut, "the step queue runs the last first"),
        (Mutant::StepsAtOnce, "the step queue doesn't wait"),
        (Mutant::KeepNothing, "a turn isn't kept between two rounds"),
        (Mutant::KeepFailed, "a turn is kept though its first round failed"),
        (Mutant::KeepGivenUp, "a turn is kept though its sender gave up before it came"),
        (Mutant::EndKeeps, "a second round doesn't end the turn"),
        (Mutant::EndWaits, "a second round waits behind the turn that it is to end"),
        (Mutant::EndInAnyTurn, "a second round runs in a turn that another request keeps"),
        (Mutant::SkipKnock, "a rank that keeps a turn isn't asked for a sign of life"),
        (Mutant::StepDuringBackward, "a step isn't refused during a backward"),
        (Mutant::EndAfterOneWave, "the end comes after one wave"),
    ];
}

#[cfg(any(test, feature = "sim"))]
thread_local! {
    static ON: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
}

/// Switches a fault on for this thread, or all off.
#[cfg(any(test, feature = "sim"))]
pub(crate) fn switch(mutant: Option<Mutant>) {
    ON.set(mutant);
}

/// Whether a fault is on.
#[cfg(any(test, feature = "sim"))]
pub(crate) fn is(mutant: Mutant) -> bool {
    ON.get() == Some(mutant)
}

/// Whether a fault is on: it isn't.
#[cfg(not(any(test, feature = "sim")))]
#[inline(always)]
pub(crate) const fn is(_: Mutant) -> bool {
    false
}

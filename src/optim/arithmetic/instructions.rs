//! The instruction sets that loops are compiled for.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use pulp::{Arch, NullaryFnOnce};

/// Those that this processor has, from the one that every processor has to the best.
static SETS: LazyLock<Vec<(&'static str, Arch)>> = LazyLock::new(|| {
    #[cfg_attr(
        not(any(target_arch = "x86", target_arch = "x86_64")),
        expect(unused_mut, reason = "one set, of which every processor has all")
    )]
    let mut sets = vec![("baseline", Arch::Scalar)];
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    {
        sets.extend(pulp::x86::V3::try_new().map(|v3| ("AVX2", Arch::V3(v3))));
        sets.extend(pulp::x86::V4::try_new().map(|v4| ("AVX-512", Arch::V4(v4))));
    }
    sets
});

/// The place of the best one to use.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Names of the instruction sets that loops are compiled for and this processor has; the last one is used.
pub fn instruction_sets() -> Vec<&'static str> {
    SETS.iter().map(|set| set.0).collect()
}

/// Uses no instruction set after this place of [`instruction_sets`], in all threads of the process: for tests and measurements.
pub fn limit_instructions(place: usize) {
    LIMIT.store(place, Ordering::Relaxed);
}

/// Runs a loop as it was compiled for the best instruction set. Wider vectors do more elements at a time, and nothing else: no sum changes its shape,
/// and nothing is fused, so the bits are the same.
///
/// `body` must be `#[inline(always)]` and capture nothing, and all that it calls for each element must be inlined too: what isn't is compiled for the
/// baseline, and called. A closure that captures could be called through a shim, which nobody can mark.
#[inline(always)]
pub(in crate::optim) fn vectorized<A, R>(arguments: A, body: impl Fn(A) -> R) -> R {
    struct Call<A, F>(A, F);
    impl<A, R, F: Fn(A) -> R> NullaryFnOnce for Call<A, F> {
        type Output = R;

        #[inline(always)]
        fn call(self) -> R {
            (self.1)(self.0)
        }
    }
    let sets = &*SETS;
    sets[LIMIT.load(Ordering::Relaxed).min(sets.len() - 1)]
        .1
        .dispatch(Call(arguments, body))
}

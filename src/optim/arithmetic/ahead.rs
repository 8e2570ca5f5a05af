//! Memory that is asked for before it is needed.

use std::ops::Range;
#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
use std::sync::LazyLock;

/// Bytes of a line of the cache, and of the widest vector.
pub(super) const LINE: usize = 64;

/// Whether this processor gains. Measured on two: one with AVX-512 is a fifth faster, and one that has AVX2 alone, which fetches beyond pages by itself, a tenth
/// slower in `f32`. (That one loses more if it is asked for every line.)
#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
static GAINS: LazyLock<bool> = LazyLock::new(|| pulp::x86::V4::try_new().is_some());

/// After a strip: asks for the beginnings of pages that the arrays come to soon. A processor fetches an array ahead within a page by itself, and many not beyond.
#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
#[inline(always)]
pub(super) fn ask_ahead<T, const N: usize>(strip: Range<usize>, arrays: [*const T; N]) {
    /// Bytes of a page of memory.
    const PAGE: usize = 4096;
    /// How many bytes before the end of a page the next one is asked for.
    const AHEAD: usize = 2048;
    /// How many lines of it are: until they are there, the processor fetches on by itself.
    const LINES: usize = 4;
    const INTO_ALL_CACHES: i32 = 3;
    let Some(sse) = pulp::core_arch::x86::Sse::try_new().filter(|_| *GAINS) else {
        return;
    };
    for array in arrays {
        let soon = array.wrapping_add(strip.start).wrapping_byte_add(AHEAD);
        let beyond = soon.addr() % PAGE;
        if beyond < strip.len() * size_of::<T>() {
            let page = soon.wrapping_byte_sub(beyond);
            for line in 0..LINES {
                sse._mm_prefetch::<INTO_ALL_CACHES>(page.wrapping_byte_add(line * LINE).cast());
            }
        }
    }
}

/// Nothing: no way to ask is at hand.
#[cfg(not(any(target_arch = "x86", target_arch = "x86_64")))]
#[inline(always)]
pub(super) fn ask_ahead<T, const N: usize>(_: Range<usize>, _: [*const T; N]) {}

//! Plain loops over as much memory.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rankgrad::optim::Float;

/// Parameters, gradients and state arrays of so many elements.
pub struct Arrays<T> {
    pub p: Vec<T>,
    pub g: Vec<T>,
    /// The arrays, behind elements that are left out.
    pub states: Vec<Vec<T>>,
}

/// Arrays begin so many bytes apart within a page: at the same place, loads wait for stores to other arrays, and the floor would be too low.
const APART: usize = 1536;

impl<T: Float> Arrays<T> {
    pub fn new(n: usize, states: usize) -> Self {
        let filled = |x: f64| vec![T::of(x); n];
        Self {
            p: filled(1.0),
            g: filled(0.5),
            states: (0..states).map(|k| vec![T::of(0.25); n + Self::skipped(k)]).collect(),
        }
    }

    fn skipped(state: usize) -> usize {
        (state + 1) * APART / size_of::<T>()
    }

    /// Bytes that an update of one element reads and writes.
    pub fn bytes(states: usize) -> usize {
        (3 + 2 * states) * size_of::<T>()
    }

    /// Reads gradients, and reads and writes all else, once.
    pub fn stream(&mut self) {
        let [a, b, c] = slices(&mut self.states);
        stream(&mut self.p, &self.g, a, b, c);
        black_box(self);
    }
}

/// The state arrays, none in place of those that aren't there.
pub fn slices<T: Float>(states: &mut [Vec<T>]) -> [&mut [T]; 3] {
    let mut states = states.iter_mut();
    [0, 1, 2].map(|k| states.next().map_or(&mut [][..], |s| &mut s[Arrays::<T>::skipped(k)..]))
}

fn stream<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T], c: &mut [T]) {
    match [&*a, b, c].iter().filter(|states| !states.is_empty()).count() {
        0 => stream0(p, g),
        1 => stream1(p, g, a),
        2 => stream2(p, g, a, b),
        _ => stream3(p, g, a, b, c),
    }
}

// Functions of their own, so that the compiler knows that the arrays don't overlap.

#[inline(never)]
fn stream0<T: Float>(p: &mut [T], g: &[T]) {
    for (p, &g) in p.iter_mut().zip(g) {
        *p = *p * T::of(0.5) + g;
    }
}

#[inline(never)]
fn stream1<T: Float>(p: &mut [T], g: &[T], a: &mut [T]) {
    for ((p, &g), a) in p.iter_mut().zip(g).zip(a) {
        *a = *a * T::of(0.5) + g;
        *p = *p * T::of(0.5) + *a;
    }
}

#[inline(never)]
fn stream2<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T]) {
    for (((p, &g), a), b) in p.iter_mut().zip(g).zip(a).zip(b) {
        *a = *a * T::of(0.5) + g;
        *b = *b * T::of(0.5) + g;
        *p = *p * T::of(0.5) + (*a + *b);
    }
}

#[inline(never)]
fn stream3<T: Float>(p: &mut [T], g: &[T], a: &mut [T], b: &mut [T], c: &mut [T]) {
    for ((((p, &g), a), b), c) in p.iter_mut().zip(g).zip(a).zip(b).zip(c) {
        *a = *a * T::of(0.5) + g;
        *b = *b * T::of(0.5) + g;
        *c = *c * T::of(0.5) + g;
        *p = *p * T::of(0.5) + ((*a + *b) + *c);
    }
}

/// Seconds until all threads, which start together, have streamed a part each.
pub fn stream_on_threads(parts: &mut [Arrays<f32>]) -> f64 {
    let Some((mine, others)) = parts.split_first_mut() else {
        return 0.0;
    };
    let (count, ready, go, done) = (others.len(), AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let wait = |counter: &AtomicUsize, count: usize| {
        while counter.load(Ordering::Acquire) < count {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        for part in others {
            scope.spawn(|| {
                ready.fetch_add(1, Ordering::Release);
                wait(&go, 1);
                part.stream();
                done.fetch_add(1, Ordering::Release);
            });
        }
        wait(&ready, count);
        let start = Instant::now();
        go.store(1, Ordering::Release);
        mine.stream();
        wait(&done, count);
        start.elapsed().as_secs_f64()
    })
}

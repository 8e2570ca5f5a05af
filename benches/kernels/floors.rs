//! Plain loops over as much memory.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rankgrad::Result;
use rankgrad::optim::{Float, Optimizer, ParameterState};
use rankgrad::tensor::Data;

/// Parameters, gradients and state arrays of a few elements.
pub struct Arrays<T> {
    pub p: Vec<T>,
    pub g: Vec<T>,
    pub states: Vec<Vec<T>>,
}

impl<T: Float> Arrays<T> {
    pub fn new(n: usize, states: usize) -> Self {
        let filled = |x: f64| vec![T::of(x); n];
        Self {
            p: filled(1.0),
            g: filled(0.5),
            states: (0..states).map(|_| filled(0.25)).collect(),
        }
    }
}

/// Bytes that an update of one element reads and writes.
pub fn bytes<T>(states: usize) -> usize {
    (3 + 2 * states) * size_of::<T>()
}

/// The memory of a parameter, its gradient and its state. Floors run in the memory of the optimizer: other pages may be slower or faster.
pub struct Lent {
    p: Data,
    g: Data,
    states: Vec<(String, Data)>,
}

/// Takes the memory of an optimizer's parameters and state for as long as `f` runs.
pub fn lend<R>(optimizer: &mut Optimizer, gradients: &[Data], f: impl FnOnce(&mut [Lent]) -> R) -> Result<R> {
    let (mut lent, mut scalars) = (Vec::new(), Vec::new());
    for (place, g) in gradients.iter().enumerate() {
        let (mut states, mut numbers) = (Vec::new(), Vec::new());
        if let Some(state) = optimizer.state(place) {
            states.extend(state.arrays().map(|(name, data)| (name.to_owned(), data.clone())));
            numbers.extend(state.scalars().map(|(name, value)| (name.to_owned(), value)));
        }
        scalars.push(numbers);
        lent.push((g.clone(), states));
    }
    optimizer.zero_state();
    let leaves: Vec<_> = optimizer.parameters().filter_map(|p| p.leaf().cloned()).collect();
    let mut all = Vec::new();
    for (leaf, (g, states)) in leaves.iter().zip(lent) {
        let p = leaf.data();
        leaf.set_data(Data::zeros(p.dtype(), p.shape()))?; // pages that nobody touches
        all.push(Lent { p, g, states });
    }
    let result = f(&mut all);
    for (place, ((leaf, lent), scalars)) in leaves.iter().zip(all).zip(scalars).enumerate() {
        leaf.set_data(lent.p)?;
        optimizer.load_state(place, ParameterState::from_parts(scalars, lent.states))?;
    }
    Ok(result)
}

impl Lent {
    /// Parameters, gradients and state arrays, none in place of those that aren't there.
    pub fn slices<T: Float>(&mut self) -> (&mut [T], &[T], [&mut [T]; 3]) {
        fn elements<T: Float>(data: &mut Data) -> &mut [T] {
            T::peek_mut(data).ok().and_then(|a| a.as_slice_mut()).unwrap_or_default()
        }
        let mut states = self.states.iter_mut().map(|(_, data)| elements(data));
        let states = [(); 3].map(|()| states.next().unwrap_or_default());
        let g = T::peek(&self.g).ok().and_then(|a| a.as_slice()).unwrap_or_default();
        (elements(&mut self.p), g, states)
    }

    /// Reads gradients, and reads and writes all else, once.
    pub fn stream<T: Float>(&mut self) {
        let (p, g, [a, b, c]) = self.slices::<T>();
        stream(p, g, a, b, c);
        black_box(self);
    }
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

/// Seconds until all threads, which start together, have streamed their parts.
pub fn stream_on_threads(parameters: &mut [Lent], threads: usize) -> f64 {
    let share = |part: &mut [Lent]| part.iter_mut().for_each(Lent::stream::<f32>);
    let mut parts = parameters.chunks_mut(parameters.len() / threads);
    let Some(mine) = parts.next() else { return 0.0 };
    let (count, ready, go, done) = (parts.len(), AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let wait = |counter: &AtomicUsize, count: usize| {
        while counter.load(Ordering::Acquire) < count {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        for part in parts {
            scope.spawn(|| {
                ready.fetch_add(1, Ordering::Release);
                wait(&go, 1);
                share(part);
                done.fetch_add(1, Ordering::Release);
            });
        }
        wait(&ready, count);
        let start = Instant::now();
        go.store(1, Ordering::Release);
        share(mine);
        wait(&done, count);
        start.elapsed().as_secs_f64()
    })
}

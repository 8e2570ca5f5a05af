//! Each rule on 16,000,000 elements.

use std::hint::black_box;

use ndarray::{Array2, LinalgScalar};
use rankgrad::Result;
use rankgrad::optim::*;
use rankgrad::tensor::{DType, Tensor};

use crate::Best;
use crate::bench::{Row, is_quick};
use crate::floors::{Arrays, slices};

/// Bytes of the first-level cache that a block takes.
const BLOCK_BYTES: usize = 24 << 10;

pub fn rows() -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    macro_rules! each {
        ($($name:literal: $rule:expr;)*) => {
            $(for dtype in [DType::F32, DType::F64] {
                rows.push(match dtype {
                    DType::F32 => elementwise::<_, f32>($name, $rule)?,
                    _ => elementwise::<_, f64>($name, $rule)?,
                });
            })*
        };
    }
    each! {
        "sgd": Sgd::new(1e-3);
        "sgd_momentum": Sgd::new(1e-3).momentum(0.9);
        "adagrad": Adagrad::new(1e-3);
        "adadelta": Adadelta::new(1e-3);
        "adam": Adam::new(1e-3);
        "adam_amsgrad": Adam::new(1e-3).amsgrad(true);
        "adamw": AdamW::new(1e-3);
        "adamax": Adamax::new(1e-3);
        "asgd": Asgd::new(1e-3);
        "lion": Lion::new(1e-3);
        "nadam": NAdam::new(1e-3);
        "radam": RAdam::new(1e-3);
        "rmsprop": RmsProp::new(1e-3);
        "rmsprop_momentum": RmsProp::new(1e-3).momentum(0.9);
        "rmsprop_centered_momentum": RmsProp::new(1e-3).momentum(0.9).centered(true);
        "rprop": Rprop::new(1e-3);
    }
    rows.push(passes::<_, f32>("lamb", Lamb::new(1e-3), lamb)?);
    rows.push(passes::<_, f64>("lamb", Lamb::new(1e-3), lamb)?);
    rows.push(passes::<_, f32>("adafactor", Adafactor::new(1e-3), adafactor)?);
    rows.push(passes::<_, f64>("adafactor", Adafactor::new(1e-3), adafactor)?);
    rows.push(muon::<f32>()?);
    rows.push(muon::<f64>()?);
    Ok(rows)
}

/// Sides of the matrix: 16,777,216 elements.
fn side() -> usize {
    if is_quick() { 2048 } else { 4096 }
}

fn rounds() -> usize {
    if is_quick() { 6 } else { 15 }
}

/// Steps of an optimizer over one parameter.
fn stepper<R: Rule, T: Float>(rule: R, shape: [usize; 2]) -> Result<impl FnMut() -> Result<()>> {
    let filled = |x: f64| Tensor::from_vec(vec![T::of(x); shape[0] * shape[1]], shape);
    let (p, gradient) = (filled(1.0)?.parameter()?, filled(0.5)?.data());
    let mut optimizer = Optimizer::new(rule, vec![p])?;
    Ok(move || optimizer.step_one(0, gradient.clone().into()).map(drop))
}

/// Seconds an element of a rule on a block that stays in the first-level cache, without what an update costs whatever its size.
struct InCache<R, T> {
    rule: R,
    n: usize,
    arrays: Arrays<T>,
    full: Best,
    empty: Best,
    steps: f64,
}

impl<R: Rule, T: Float> InCache<R, T> {
    fn new(rule: R) -> Self {
        let states = rule.arrays(&[64, 64]).len();
        let n = (BLOCK_BYTES / ((2 + states) * size_of::<T>())) & !63;
        let (arrays, steps) = (Arrays::new(n, states), 8.0);
        let (full, empty) = (Best::default(), Best::default());
        Self {
            rule,
            n,
            arrays,
            full,
            empty,
            steps,
        }
    }

    fn round(&mut self) {
        const REPEATED: usize = 100;
        for _ in 0..10 {
            self.full
                .time(|| (0..REPEATED).for_each(|_| update(&self.rule, &mut self.arrays, self.n, self.steps)));
            self.empty
                .time(|| (0..REPEATED).for_each(|_| update(&self.rule, &mut self.arrays, 0, self.steps)));
        }
    }

    fn seconds(&self) -> f64 {
        const REPEATED: f64 = 100.0;
        (self.full.seconds() - self.empty.seconds()) / REPEATED / self.n as f64
    }
}

/// One update of the first `n` elements, as one in the midst of training.
fn update<R: Rule, T: Float>(rule: &R, arrays: &mut Arrays<T>, n: usize, step: f64) {
    let shape = [n / 64, 64];
    let scalars = R::SCALARS
        .iter()
        .map(|&(name, value)| (name, if name == "step" { step } else { value }));
    let declared = rule.arrays(&shape).into_iter().map(|a| (a.name, a.shape.iter().product::<usize>()));
    let states = declared
        .zip(&mut arrays.states)
        .map(|((name, len), elements)| (name, &mut elements[..len]));
    rule.update(
        &mut arrays.p[..n],
        &arrays.g[..n],
        &mut StateView::new(&shape, scalars, states, false),
    );
    black_box(&mut arrays.p);
}

/// A rule of one pass: bytes a second, against the slower of streaming them and of the arithmetic alone.
fn elementwise<R: Rule, T: Float>(name: &str, rule: R) -> Result<Row> {
    let shape = [side(), side()];
    let n = side() * side();
    let mut step = stepper::<R, T>(rule.clone(), shape)?;
    let states = rule.arrays(&shape).len();
    let mut cache = InCache::<R, T>::new(rule);
    let mut arrays = Arrays::<T>::new(n, states);
    for _ in 0..7 {
        step()?; // allocates; and RAdam's first steps are cheaper
    }
    let (mut best, mut stream) = (Best::default(), Best::default());
    for _ in 0..rounds() {
        best.time(&mut step)?;
        stream.time(|| arrays.stream());
        cache.round();
    }
    let rate = |seconds: f64| Arrays::<T>::bytes(states) as f64 * n as f64 / seconds / 1e9;
    let floor = f64::min(rate(stream.seconds()), rate(cache.seconds() * n as f64));
    let bound = if floor < rate(stream.seconds()) { "arithmetic" } else { "memory" };
    Ok(Row::new(
        format!("{name}_{}_{bound}", T::DTYPE),
        rate(best.seconds()),
        "GB/s",
        floor,
    ))
}

/// A rule of several passes: elements a second, against the slower of loops over as much memory and of the arithmetic alone.
fn passes<R: Rule, T: Float>(name: &str, rule: R, floor: impl Fn(&mut Arrays<T>)) -> Result<Row> {
    let n = side() * side();
    let mut step = stepper::<R, T>(rule.clone(), [side(), side()])?;
    let mut cache = InCache::<R, T>::new(rule);
    let mut arrays = Arrays::<T>::new(n, 2);
    step()?;
    let (mut best, mut loops) = (Best::default(), Best::default());
    for _ in 0..rounds() {
        best.time(&mut step)?;
        loops.time(|| floor(&mut arrays));
        cache.round();
    }
    let rate = |seconds: f64| n as f64 / seconds / 1e6;
    let floor = f64::min(rate(loops.seconds()), 1e-6 / cache.seconds());
    let bound = if floor < rate(loops.seconds()) { "arithmetic" } else { "memory" };
    Ok(Row::new(format!("{name}_{}_{bound}", T::DTYPE), rate(best.seconds()), "M/s", floor))
}

/// A sum in parts, so that additions don't wait for each other.
fn sum<T: Float>(x: &[T]) -> T {
    let mut parts = [T::ZERO; 64];
    for x in x.as_chunks::<64>().0 {
        parts.iter_mut().zip(x).for_each(|(sum, &x)| *sum = *sum + x);
    }
    parts.into_iter().fold(T::ZERO, |a, b| a + b)
}

/// What LAMB must read and write: all for the averages and the two norms, then all but the gradient for the step.
fn lamb<T: Float>(arrays: &mut Arrays<T>) {
    let half = T::of(0.5);
    let Arrays { p, g, states } = arrays;
    let [m, v, _] = slices(states);
    for (((&p, &g), m), v) in p.iter().zip(&*g).zip(&mut *m).zip(&mut *v) {
        *m = *m * half + (g + p);
        *v = *v * half + g;
    }
    for ((p, &m), &v) in p.iter_mut().zip(&*m).zip(&*v) {
        *p = *p * half + (m + v);
    }
    black_box(arrays);
}

/// What Adafactor must read and write: the parameter for its norm, the gradient for the averages and again for the norm of the direction, both for the
/// step.
fn adafactor<T: Float>(arrays: &mut Arrays<T>) {
    let half = T::of(0.5);
    black_box((sum(&arrays.p), sum(&arrays.g), sum(&arrays.g)));
    for (p, &g) in arrays.p.iter_mut().zip(&arrays.g) {
        *p = *p * half + g;
    }
    black_box(arrays);
}

/// Muon on a square matrix: seconds, against its fifteen matrix products.
fn muon<T: Float + LinalgScalar>() -> Result<Row> {
    const N: usize = 1024;
    let mut step = stepper::<_, T>(Muon::new(1e-3), [N, N])?;
    let x = Array2::from_shape_fn((N, N), |(i, j)| T::of(((i * 7 + j * 13) % 101) as f64 * 1e-4));
    step()?;
    let (mut best, mut products) = (Best::default(), Best::default());
    for _ in 0..if is_quick() { 2 } else { 5 } {
        best.time(&mut step)?;
        products.time(|| {
            for _ in 0..5 {
                let gram = x.dot(&x.t());
                let square = gram.dot(&gram);
                black_box(square.dot(&x));
            }
        });
    }
    Ok(Row::new(
        format!("muon_{}_1024x1024", T::DTYPE),
        products.seconds() / best.seconds(),
        "1",
        1.0,
    ))
}

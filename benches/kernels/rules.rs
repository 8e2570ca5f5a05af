//! Each rule on 16,000,000 elements.

use std::hint::black_box;
use std::marker::PhantomData;

use ndarray::{Array2, LinalgScalar};
use rankgrad::Result;
use rankgrad::optim::*;
use rankgrad::tensor::{DType, Data, Tensor};

use crate::Best;
use crate::bench::{Row, is_quick};
use crate::floors::{Arrays, Lent, bytes, lend};

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
    rows.push(passes::<_, f32>("lamb", Lamb::new(1e-3), lamb::<f32>)?);
    rows.push(passes::<_, f64>("lamb", Lamb::new(1e-3), lamb::<f64>)?);
    rows.push(passes::<_, f32>("adafactor", Adafactor::new(1e-3), adafactor::<f32>)?);
    rows.push(passes::<_, f64>("adafactor", Adafactor::new(1e-3), adafactor::<f64>)?);
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

/// An optimizer over one parameter, and its gradient.
fn optimizer<R: Rule, T: Float>(rule: R, shape: [usize; 2]) -> Result<(Optimizer, Data)> {
    let filled = |x: f64| Tensor::from_vec(vec![T::of(x); shape[0] * shape[1]], shape);
    let p = filled(1.0)?.parameter()?;
    Ok((Optimizer::new(rule, vec![p])?, filled(0.5)?.data()))
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
    let states = rule.arrays(&[side(), side()]).len();
    against(
        name,
        rule,
        Lent::stream::<T>,
        "GB/s",
        bytes::<T>(states) as f64 / 1e9,
        PhantomData::<T>,
    )
}

/// A rule of several passes: elements a second, against the slower of loops over as much memory and of the arithmetic alone.
fn passes<R: Rule, T: Float>(name: &str, rule: R, floor: impl Fn(&mut Lent)) -> Result<Row> {
    against(name, rule, floor, "M/s", 1e-6, PhantomData::<T>)
}

fn against<R: Rule, T: Float>(
    name: &str,
    rule: R,
    floor: impl Fn(&mut Lent),
    unit: &'static str,
    scale: f64,
    _: PhantomData<T>,
) -> Result<Row> {
    let n = side() * side();
    let (mut optimizer, gradient) = optimizer::<R, T>(rule.clone(), [side(), side()])?;
    let mut cache = InCache::<R, T>::new(rule);
    for _ in 0..7 {
        optimizer.step_one(0, gradient.clone().into())?; // allocates; and RAdam's first steps are cheaper
    }
    let (mut best, mut loops) = (Best::default(), Best::default());
    for _ in 0..rounds() {
        best.time(|| optimizer.step_one(0, gradient.clone().into()))?;
        lend(&mut optimizer, std::slice::from_ref(&gradient), |memory| {
            loops.time(|| memory.iter_mut().for_each(&floor))
        })?;
        cache.round();
    }
    let rate = |seconds: f64| scale * n as f64 / seconds;
    let (memory, arithmetic) = (rate(loops.seconds()), rate(cache.seconds() * n as f64));
    let bound = if arithmetic < memory { "arithmetic" } else { "memory" };
    Ok(Row::new(
        format!("{name}_{}_{bound}", T::DTYPE),
        rate(best.seconds()),
        unit,
        f64::min(memory, arithmetic),
    ))
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
fn lamb<T: Float>(memory: &mut Lent) {
    let half = T::of(0.5);
    let (p, g, [m, v, _]) = memory.slices::<T>();
    for (((&p, &g), m), v) in p.iter().zip(g).zip(&mut *m).zip(&mut *v) {
        *m = *m * half + (g + p);
        *v = *v * half + g;
    }
    for ((p, &m), &v) in p.iter_mut().zip(&*m).zip(&*v) {
        *p = *p * half + (m + v);
    }
    black_box(memory);
}

/// What Adafactor must read and write: the parameter for its norm, the gradient for the averages and again for the norm of the direction, both for the
/// step.
fn adafactor<T: Float>(memory: &mut Lent) {
    let half = T::of(0.5);
    let (p, g, _) = memory.slices::<T>();
    black_box((sum(p), sum(g), sum(g)));
    for (p, &g) in p.iter_mut().zip(g) {
        *p = *p * half + g;
    }
    black_box(memory);
}

/// Muon on a square matrix: seconds, against its fifteen matrix products.
fn muon<T: Float + LinalgScalar>() -> Result<Row> {
    const N: usize = 1024;
    let (mut optimizer, gradient) = optimizer::<_, T>(Muon::new(1e-3), [N, N])?;
    let mut step = || optimizer.step_one(0, gradient.clone().into());
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

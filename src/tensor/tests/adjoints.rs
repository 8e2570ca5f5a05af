//! Every operation's adjoint against finite differences in f64, over random shapes.

use proptest::prelude::*;

use crate::Result;
use crate::tensor::{DType, Gelu, Reduction, Tensor};

/// Lengths of axes that a row's shapes are made of.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    b: usize,
    m: usize,
    k: usize,
    n: usize,
}

/// One operation: which inputs it takes, and how it is called.
struct Row {
    name: &'static str,
    domain: Domain,
    shapes: fn(Sizes) -> Vec<Vec<usize>>,
    call: fn(&[Tensor], Sizes) -> Result<Tensor>,
}

#[derive(Clone, Copy, PartialEq)]
enum Domain {
    Real,
    Positive,
}
use Domain::{Positive, Real};

fn one(s: Sizes) -> Vec<Vec<usize>> {
    vec![vec![s.b, s.m, s.n]]
}

fn equal(s: Sizes) -> Vec<Vec<usize>> {
    vec![vec![s.m, s.n]; 2]
}

fn row(s: Sizes) -> Vec<Vec<usize>> {
    vec![vec![s.m, s.n], vec![s.n]]
}

fn crossed(s: Sizes) -> Vec<Vec<usize>> {
    vec![vec![s.b, 1, s.n], vec![s.m, 1]]
}

fn with_scalar(s: Sizes) -> Vec<Vec<usize>> {
    vec![vec![], vec![s.m, s.n]]
}

/// Class numbers below `n`, that depend on the place.
fn classes(shape: &[usize], n: usize) -> Tensor {
    let count: usize = shape.iter().product();
    Tensor::from_vec((0..count).map(|i| ((3 * i + 1) % n) as i64).collect(), shape).unwrap()
}

macro_rules! rows {
    ($($name:literal $domain:ident $shapes:expr => |$x:pat_param, $s:pat_param| $call:expr;)*) => {
        vec![$(Row { name: $name, domain: $domain, shapes: $shapes, call: |$x, $s| $call }),*]
    };
}

fn table() -> Vec<Row> {
    rows! {
        "add" Real equal => |x, _| &x[0] + &x[1];
        "add row" Real row => |x, _| &x[0] + &x[1];
        "add crossed" Real crossed => |x, _| &x[0] + &x[1];
        "add to itself" Real one => |x, _| &x[0] + &x[0];
        "sub" Real crossed => |x, _| &x[0] - &x[1];
        "sub scalar first" Real with_scalar => |x, _| &x[0] - &x[1];
        "mul" Real equal => |x, _| &x[0] * &x[1];
        "mul crossed" Real crossed => |x, _| &x[0] * &x[1];
        "mul scalar first" Real with_scalar => |x, _| &x[0] * &x[1];
        "mul by transpose" Real one => |x, _| x[0].mul(&x[0].transpose(0, 2)?.transpose(2, 0)?);
        "div" Positive equal => |x, _| &x[0] / &x[1];
        "div row" Positive row => |x, _| &x[0] / &x[1];
        "div crossed" Positive crossed => |x, _| &x[0] / &x[1];
        "pow" Positive crossed => |x, _| x[0].pow(&x[1]);
        "maximum" Real crossed => |x, _| x[0].maximum(&x[1]);
        "minimum" Real row => |x, _| x[0].minimum(&x[1]);
        "where" Real row => |x, _| x[0].gt(&Tensor::scalar(0.0))?.where_(&x[0], &x[1]);
        "neg" Real one => |x, _| -&x[0];
        "exp" Real one => |x, _| x[0].exp();
        "log" Positive one => |x, _| x[0].log();
        "sqrt" Positive one => |x, _| x[0].sqrt();
        "abs" Real one => |x, _| x[0].abs();
        "sin" Real one => |x, _| x[0].sin();
        "cos" Real one => |x, _| x[0].cos();
        "tanh" Real one => |x, _| x[0].tanh();
        "tanh of a transpose" Real one => |x, _| x[0].transpose(0, 2)?.tanh();
        "sigmoid" Real one => |x, _| x[0].sigmoid();
        "relu" Real one => |x, _| x[0].relu();
        "softplus" Real one => |x, _| x[0].softplus();
        "gelu" Real one => |x, _| x[0].gelu(Gelu::Exact);
        "gelu tanh" Real one => |x, _| x[0].gelu(Gelu::Tanh);
        "scalars" Real one => |x, _| (&(&(&(&x[0] + 1.5)? * 2.0)? - 0.5)? / 3.0)?.neg();
        "square" Real one => |x, _| x[0].pow_scalar(2.0);
        "pow scalar" Positive one => |x, _| x[0].pow_scalar(-1.7);
        "sum" Real one => |x, _| x[0].sum();
        "sum 1" Real one => |x, _| x[0].sum_axes(&[1], false);
        "sum -1, 0" Real one => |x, _| x[0].sum_axes(&[-1, 0], true);
        "sum of a transpose" Real one => |x, _| x[0].transpose(0, 2)?.sum_axes(&[1], false);
        "mean" Real one => |x, _| x[0].mean();
        "mean 0" Real one => |x, _| x[0].mean_axes(&[0], true);
        "max" Real one => |x, _| x[0].max();
        "max 1" Real one => |x, _| x[0].max_axes(&[1], false);
        "max 0, 2" Real one => |x, _| x[0].max_axes(&[0, 2], true);
        "logsumexp" Real one => |x, _| x[0].logsumexp();
        "logsumexp 1" Real one => |x, _| x[0].logsumexp_axes(&[1], false);
        "logsumexp 0, -1" Real one => |x, _| x[0].logsumexp_axes(&[0, -1], true);
        "softmax" Real one => |x, _| x[0].softmax(-1);
        "softmax 1" Real one => |x, _| x[0].softmax(1);
        "log_softmax" Real one => |x, _| x[0].log_softmax(-1);
        "log_softmax 0" Real one => |x, _| x[0].log_softmax(0);
        "dot" Real |s| vec![vec![s.k], vec![s.k]] => |x, _| x[0].matmul(&x[1]);
        "matrix vector" Real |s| vec![vec![s.m, s.k], vec![s.k]] => |x, _| x[0].matmul(&x[1]);
        "vector matrix" Real |s| vec![vec![s.k], vec![s.k, s.n]] => |x, _| x[0].matmul(&x[1]);
        "matmul" Real |s| vec![vec![s.m, s.k], vec![s.k, s.n]] => |x, _| x[0].matmul(&x[1]);
        "matmul of transposes" Real |s| vec![vec![s.k, s.m], vec![s.n, s.k]] => |x, _| x[0].transpose(0, 1)?.matmul(&x[1].transpose(0, 1)?);
        "gram" Real |s| vec![vec![s.m, s.k]] => |x, _| x[0].matmul(&x[0].transpose(0, 1)?);
        "batch" Real |s| vec![vec![s.b, s.m, s.k], vec![s.b, s.k, s.n]] => |x, _| x[0].matmul(&x[1]);
        "batch crossed" Real |s| vec![vec![s.b, 1, s.m, s.k], vec![2, s.k, s.n]] => |x, _| x[0].matmul(&x[1]);
        "batch matrix" Real |s| vec![vec![s.b, s.m, s.k], vec![s.k, s.n]] => |x, _| x[0].matmul(&x[1]);
        "matrix batch" Real |s| vec![vec![s.m, s.k], vec![s.b, s.k, s.n]] => |x, _| x[0].matmul(&x[1]);
        "batch vector" Real |s| vec![vec![s.b, s.m, s.k], vec![s.k]] => |x, _| x[0].matmul(&x[1]);
        "vector batch" Real |s| vec![vec![s.k], vec![s.b, s.k, s.n]] => |x, _| x[0].matmul(&x[1]);
        "batch turned" Real |s| vec![vec![s.m, s.b, s.k], vec![s.k, s.n]] => |x, _| x[0].transpose(0, 1)?.matmul(&x[1]);
        "transpose" Real one => |x, _| x[0].transpose(0, -1);
        "permute" Real one => |x, _| x[0].permute(&[2, 0, -2]);
        "reshape" Real one => |x, s| x[0].reshape(&[-1, s.b as i64]);
        "reshape of a transpose" Real one => |x, _| x[0].transpose(0, 1)?.reshape(&[-1]);
        "broadcast_to" Real |s| vec![vec![s.m, 1]] => |x, s| x[0].broadcast_to((s.b, s.m, s.n));
        "slice" Real one => |x, s| x[0].slice(1, 0, s.m as i64 - 1, 1);
        "slice back" Real one => |x, _| x[0].slice(-1, None, None, -2);
        "index_select" Real one => |x, s| x[0].index_select(1, &classes(&[4], s.m));
        "concat" Real |s| vec![vec![s.m, s.n], vec![s.m, s.k]] => |x, _| Tensor::concat(x, 1);
        "concat of one twice" Real one => |x, _| Tensor::concat(&[&x[0], &x[0]], 0);
        "stack" Real equal => |x, _| Tensor::stack(x, -1);
        "split" Real one => |x, s| {
            let parts = x[0].split(&[1, s.m - 1], 1)?;
            parts[0].sum()?.mul(&parts[1].tanh()?)
        };
        "embedding" Real |s| vec![vec![s.m, s.n]] => |x, s| x[0].embedding(&classes(&[s.b, 2], s.m));
        "cross_entropy" Real |s| vec![vec![s.b, s.n]] => |x, s| x[0].cross_entropy(&classes(&[s.b], s.n));
        "cross_entropy deep" Real one => |x, s| x[0].cross_entropy_with(&classes(&[s.b, s.n], s.m), Reduction::None);
        "cross_entropy of one" Real |s| vec![vec![s.n]] => |x, s| x[0].cross_entropy_with(&classes(&[], s.n), Reduction::Sum);
        "nll" Real |s| vec![vec![s.b, s.n]] => |x, s| x[0].nll(&classes(&[s.b], s.n));
        "nll deep" Real one => |x, s| x[0].nll_with(&classes(&[s.b, s.n], s.m), Reduction::Sum);
        "mse" Real equal => |x, _| x[0].mse(&x[1]);
        "mse row" Real row => |x, _| x[0].mse_with(&x[1], Reduction::Sum);
        "mse none" Real crossed => |x, _| x[0].mse_with(&x[1], Reduction::None);
    }
}

/// Distinct values within ±2, none near zero or near another, in an order that `seed` sets.
fn inputs(shapes: &[Vec<usize>], domain: Domain, seed: u64) -> Vec<Vec<f64>> {
    let counts: Vec<usize> = shapes.iter().map(|shape| shape.iter().product()).collect();
    let total: usize = counts.iter().sum();
    let mut places: Vec<usize> = (0..total).collect();
    let mut state = seed | 1;
    for i in (1..total).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        places.swap(i, (state >> 33) as usize % (i + 1));
    }
    // The middle of an odd number of values would be zero, so they are shifted by a quarter of a step.
    let value = |place: usize| (place as f64 + 0.75 - total as f64 / 2.0) * 4.0 / total as f64;
    let value = |place: usize| {
        if domain == Positive {
            0.5 + value(place).abs()
        } else {
            value(place)
        }
    };
    let mut places = places.into_iter();
    counts
        .iter()
        .map(|&count| places.by_ref().take(count).map(value).collect())
        .collect()
}

fn weights(len: usize) -> Vec<f64> {
    (0..len).map(|i| 0.4 + (i as f64 * 1.3).sin()).collect()
}

fn check(row: &Row, sizes: Sizes, seed: u64) -> Result<(), TestCaseError> {
    let fail = |what: String| TestCaseError::fail(format!("{} {sizes:?}: {what}", row.name));
    let shapes = (row.shapes)(sizes);
    let values = inputs(&shapes, row.domain, seed);
    let tensors = |values: &[Vec<f64>]| -> Vec<Tensor> {
        values
            .iter()
            .zip(&shapes)
            .map(|(values, shape)| Tensor::from_vec(values.clone(), shape).unwrap())
            .collect()
    };
    let loss = |x: &[Tensor]| -> Result<Tensor> {
        let y = (row.call)(x, sizes)?;
        y.mul(&Tensor::from_vec(weights(y.len()), y.shape())?)?.sum()
    };
    let number = |values: &[Vec<f64>]| -> Result<f64> { loss(&tensors(values))?.item() };
    let leaves: Vec<Tensor> = tensors(&values).into_iter().map(|x| x.with_grad().unwrap()).collect();
    loss(&leaves).and_then(|loss| loss.backward()).map_err(|e| fail(e.to_string()))?;
    for (i, leaf) in leaves.iter().enumerate() {
        let gradient = leaf
            .grad()
            .ok_or_else(|| fail(format!("input {i} got no gradient")))?
            .to_dense()
            .unwrap();
        prop_assert_eq!(gradient.shape(), &shapes[i][..]);
        let gradient = Tensor::from_data(gradient).to_vec::<f64>().unwrap();
        for (j, &found) in gradient.iter().enumerate() {
            let step = 1e-5;
            let at = |shift: f64| {
                let mut moved = values.clone();
                moved[i][j] += shift;
                number(&moved).map_err(|e| fail(e.to_string()))
            };
            let expected = (at(step)? - at(-step)?) / (2.0 * step);
            if (found - expected).abs() > 1e-7 * (1.0 + expected.abs()) {
                return Err(fail(format!("input {i}, element {j}: adjoint {found}, difference {expected}")));
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn adjoints_agree_with_finite_differences(b in 1usize..4, m in 1usize..5, k in 1usize..5, n in 1usize..5, seed: u64) {
        for row in table() {
            check(&row, Sizes { b, m, k, n }, seed)?;
        }
    }
}

#[test]
fn a_cast_casts_its_gradient_back() {
    let x = Tensor::from_vec(vec![1.5, 2.5], 2).unwrap().with_grad().unwrap();
    let y = x.cast(DType::F32).unwrap();
    (&y * &y).unwrap().sum().unwrap().backward().unwrap();
    let gradient = x.grad().unwrap();
    assert_eq!(gradient.dtype(), DType::F64);
    assert_eq!(Tensor::from_data(gradient.to_dense().unwrap()).to_vec::<f64>().unwrap(), [3.0, 5.0]);
}

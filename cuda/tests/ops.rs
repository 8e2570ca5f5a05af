//! Operations against plain loops.

mod common;

use common::{gpu, is_real, numbers, turn};
use rankgrad_cuda::ops::{Binary, Unary, binary, cross_entropy, gather, sum_middle, unary, unary_gradient};
use rankgrad_cuda::products::{Matrix, Product, matmul, multiply};
use rankgrad_cuda::rules::{Sum, block_sums};
use rankgrad_cuda::{Array, elementwise};

fn near(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
        assert!(
            (x - y).abs() <= 1e-12 * y.abs().max(1.0) || x.to_bits() == y.to_bits(),
            "{i}: {x} and {y}"
        );
    }
}

#[test]
fn functions_of_one_operand() {
    let _turn = turn();
    let gpu = gpu();
    let (x, g) = (numbers(1, 1000), numbers(2, 1000));
    let positive: Vec<f64> = x.iter().map(|x| x.abs() + 0.1).collect();
    type Case = (Unary, fn(f64) -> f64, fn(f64) -> f64);
    let cases: [Case; 12] = [
        (Unary::Neg, |x| -x, |_| -1.0),
        (Unary::Exp, f64::exp, f64::exp),
        (Unary::Sqrt, f64::sqrt, |x| 0.5 / x.sqrt()),
        (Unary::Abs, f64::abs, f64::signum),
        (Unary::Tanh, f64::tanh, |x| 1.0 - x.tanh() * x.tanh()),
        (
            Unary::Sigmoid,
            |x| 1.0 / (1.0 + (-x).exp()),
            |x| (-x).exp() / ((1.0 + (-x).exp()) * (1.0 + (-x).exp())),
        ),
        (Unary::Relu, |x| x.max(0.0), |x| f64::from(u8::from(x > 0.0))),
        (Unary::AddScalar, |x| x + 3.0, |_| 1.0),
        (Unary::SubScalar, |x| x - 3.0, |_| 1.0),
        (Unary::MulScalar, |x| x * 3.0, |_| 3.0),
        (Unary::DivScalar, |x| x / 3.0, |_| 1.0 / 3.0),
        (Unary::Square, |x| x * x, |x| 2.0 * x),
    ];
    for (op, f, slope) in cases {
        let x = if op == Unary::Sqrt { &positive } else { &x };
        let on_gpu = Array::from_slice(&gpu, x).unwrap();
        let y = unary(op, &on_gpu, 3.0).unwrap();
        near(&y.to_vec().unwrap(), &x.iter().map(|&x| f(x)).collect::<Vec<_>>());
        let saved = if op.saves_operand() { &on_gpu } else { &y };
        let gradient = unary_gradient(op, &Array::from_slice(&gpu, &g).unwrap(), saved, 3.0).unwrap();
        near(
            &gradient.to_vec().unwrap(),
            &x.iter().zip(&g).map(|(&x, g)| g * slope(x)).collect::<Vec<_>>(),
        );
    }
}

#[test]
fn functions_of_two_operands_broadcast() {
    let _turn = turn();
    let gpu = gpu();
    let (a, b) = (numbers(3, 24), numbers(4, 24));
    let [x, y] = [&a, &b].map(|v| Array::from_slice(&gpu, v).unwrap());
    let product = binary(Binary::Mul, (&x, &[2, 3, 4]), (&y, &[2, 3, 4]), &[2, 3, 4]).unwrap();
    near(
        &product.to_vec().unwrap(),
        &a.iter().zip(&b).map(|(x, y)| x * y).collect::<Vec<_>>(),
    );
    let row = Array::from_slice(&gpu, &b[..4]).unwrap();
    let sum = binary(Binary::Add, (&x, &[2, 3, 4]), (&row, &[4]), &[2, 3, 4]).unwrap();
    near(&sum.to_vec().unwrap(), &(0..24).map(|i| a[i] + b[i % 4]).collect::<Vec<_>>());
    let column = Array::from_slice(&gpu, &b[..3]).unwrap();
    let quotient = binary(Binary::Div, (&column, &[3, 1]), (&x, &[2, 3, 4]), &[2, 3, 4]).unwrap();
    near(
        &quotient.to_vec().unwrap(),
        &(0..24).map(|i| b[i / 4 % 3] / a[i]).collect::<Vec<_>>(),
    );
    let one = Array::from_slice(&gpu, &b[..1]).unwrap();
    let difference = binary(Binary::Sub, (&one, &[]), (&x, &[24]), &[24]).unwrap();
    near(&difference.to_vec().unwrap(), &a.iter().map(|x| b[0] - x).collect::<Vec<_>>());
    assert!(binary(Binary::Add, (&x, &[2, 3, 4]), (&row, &[4]), &[2, 3, 5]).is_err());
    assert!(binary(Binary::Add, (&x, &[2, 3, 3]), (&row, &[4]), &[2, 3, 4]).is_err());
}

#[test]
fn sums_over_the_middle() {
    let _turn = turn();
    let gpu = gpu();
    for shape in [[1, 1000, 1], [3, 70, 1], [4, 5, 6], [1, 40, 33], [2, 0, 3], [7, 3, 1]] {
        let [outer, length, inner] = shape;
        let x = numbers(5, outer * length * inner);
        let found = sum_middle(&Array::from_slice(&gpu, &x).unwrap(), shape).unwrap().to_vec().unwrap();
        let at = |o: usize, i: usize| (0..length).map(|k| x[(o * length + k) * inner + i]).sum::<f64>();
        near(&found, &(0..outer * inner).map(|n| at(n / inner, n % inner)).collect::<Vec<_>>());
    }
}

const SHAPES: [(usize, usize, usize); 7] = [
    (1, 1, 1),
    (3, 5, 2),
    (16, 16, 16),
    (133, 17, 70),
    (2, 0, 3),
    (1, 40, 1),
    (65, 64, 130),
];

/// Sums of products from the first term to the last.
fn product(a: &[f64], b: &[f64], (m, k, n): (usize, usize, usize)) -> Vec<f64> {
    let element = |i: usize| (0..k).fold(0.0, |sum, j| sum + a[i / n * k + j] * b[j * n + i % n]);
    (0..m * n).map(element).collect()
}

fn turned(x: &[f64], (rows, columns): (usize, usize)) -> Vec<f64> {
    (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
}

#[test]
fn matrices_are_multiplied() {
    let _turn = turn();
    let gpu = gpu();
    for (m, k, n) in SHAPES {
        let (a, b) = (numbers(6, m * k), numbers(7, k * n));
        let expected = product(&a, &b, (m, k, n));
        let [x, y] = [&a, &b].map(|v| Array::from_slice(&gpu, v).unwrap());
        let plain = matmul(Matrix::new(&x, (m, k)), Matrix::new(&y, (k, n))).unwrap();
        assert_eq!(plain.to_vec().unwrap(), expected);
        let [x, y] = [turned(&a, (m, k)), turned(&b, (k, n))].map(|v| Array::from_slice(&gpu, &v).unwrap());
        let both = matmul(Matrix::new(&x, (k, m)).t(), Matrix::new(&y, (n, k)).t()).unwrap();
        assert_eq!(both.to_vec().unwrap(), expected);
        assert!(k == n || matmul(Matrix::new(&x, (k, m)).t(), Matrix::new(&y, (n, k))).is_err());
    }
}

#[test]
fn products_of_several_matrices_are_one_launch() {
    let _turn = turn();
    let gpu = gpu();
    let array = |seed, n| Array::from_slice(&gpu, &numbers(seed, n)).unwrap();
    let operands: Vec<_> = (0..)
        .zip(SHAPES)
        .map(|(i, (m, k, n))| [array(i, m * k), array(9 + i, k * n), array(20 + i, m * n)])
        .collect();
    let room = SHAPES.map(|(m, _, n)| m * n);
    let all = Array::new(&gpu, Array::<f64>::room(&room).unwrap()).unwrap();
    let outs = all.pieces(&room).unwrap();
    assert!(all.pieces(&[all.len(), 1]).is_err());
    let products: Vec<_> = operands
        .iter()
        .zip(SHAPES)
        .zip(&outs)
        .map(|(([a, b, other], (m, k, n)), out)| Product {
            a: Matrix::new(a, (m, k)),
            b: Matrix::new(b, (k, n)),
            out,
            with: Some((0.3, other, -1.7)),
            symmetric: false,
        })
        .collect();
    let before = rankgrad_cuda_fake::launches();
    multiply(&products).unwrap();
    assert!(is_real() || rankgrad_cuda_fake::launches() == before + 1);
    for (([a, b, other], shape), out) in operands.iter().zip(SHAPES).zip(&outs) {
        let product = product(&a.to_vec().unwrap(), &b.to_vec().unwrap(), shape);
        let expected: Vec<_> = other
            .to_vec()
            .unwrap()
            .iter()
            .zip(product)
            .map(|(x, y)| 0.3 * x + -1.7 * y)
            .collect();
        assert_eq!(out.to_vec().unwrap(), expected, "{shape:?}");
    }
    // A symmetric one, whose lower half isn't computed.
    let (x, out) = (array(1, 150 * 20), Array::new(&gpu, 150 * 150).unwrap());
    let matrix = Matrix::new(&x, (150, 20));
    let gram = Product {
        a: matrix,
        b: matrix.t(),
        out: &out,
        with: None,
        symmetric: true,
    };
    multiply(&[gram]).unwrap();
    let elements = x.to_vec().unwrap();
    assert_eq!(
        out.to_vec().unwrap(),
        product(&elements, &turned(&elements, (150, 20)), (150, 20, 150))
    );
    assert!(
        multiply(&[Product {
            a: matrix.t(),
            b: matrix,
            ..gram
        }])
        .is_err()
    );
    assert!(
        multiply(&[Product {
            with: Some((1.0, &x, 1.0)),
            ..gram
        }])
        .is_err()
    );
}

#[test]
fn scores_have_a_cross_entropy() {
    let _turn = turn();
    let gpu = gpu();
    let (rows, classes) = (9, 10);
    let x = numbers(8, rows * classes);
    let targets: Vec<i64> = (0..rows as i64).map(|row| row * 3 % 10).collect();
    let found = cross_entropy(&Array::from_slice(&gpu, &x).unwrap(), &targets, classes).unwrap();
    let g = numbers(9, rows);
    let gradient = found.gradient(&g).unwrap().to_vec().unwrap();
    for row in 0..rows {
        let scores = &x[row * classes..][..classes];
        let sum: f64 = scores.iter().map(|x| x.exp()).sum();
        let target = targets[row] as usize;
        near(&[found.rows.0[row].ln() - found.rows.1[row]], &[sum.ln() - scores[target]]);
        let slopes: Vec<f64> = (0..classes)
            .map(|k| g[row] * (scores[k].exp() / sum - f64::from(u8::from(k == target))))
            .collect();
        near(&gradient[row * classes..][..classes], &slopes);
    }
    assert!(cross_entropy(&Array::from_slice(&gpu, &x).unwrap(), &[10; 9], classes).is_err());
}

#[test]
fn rows_are_gathered_and_gradients_handled() {
    let _turn = turn();
    let gpu = gpu();
    let table = Array::from_slice(&gpu, &numbers(1, 30)).unwrap();
    let rows = gather(&table, 3, &[9, 0, 9]).unwrap().to_vec().unwrap();
    let all = table.to_vec().unwrap();
    assert_eq!(rows, [&all[27..], &all[..3], &all[27..]].concat());
    assert!(gather(&table, 3, &[10]).is_err() && gather(&table, 3, &[-1]).is_err());
    let doubled = elementwise::add(&table, &table).unwrap().to_vec().unwrap();
    assert_eq!(doubled, elementwise::scale(&table, 2.0).unwrap().to_vec().unwrap());
    let limited = elementwise::clamp(&table, 0.5).unwrap().to_vec().unwrap();
    assert_eq!(limited, all.iter().map(|x| x.clamp(-0.5, 0.5)).collect::<Vec<_>>());
    let single: Vec<f32> = elementwise::cast(&table).unwrap().to_vec().unwrap();
    assert_eq!(single, all.iter().map(|&x| x as f32).collect::<Vec<_>>());
}

#[test]
fn sums_have_one_shape() {
    let _turn = turn();
    let gpu = gpu();
    // As `rankgrad::optim::arithmetic::sum`.
    let block = |x: &[f64], term: fn(f64) -> f64| {
        let mut lanes = [0.0; 8];
        x.iter().enumerate().for_each(|(i, &x)| lanes[i % 8] += term(x));
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + b) + (c + d)) + ((e + f) + (g + h))
    };
    let lengths = [0, 1, 7, 4096, 4097, 20_003];
    let arrays: Vec<Vec<f64>> = lengths.iter().map(|&n| numbers(n as u64, n)).collect();
    let on_gpu: Vec<Array<f64>> = arrays.iter().map(|x| Array::from_slice(&gpu, x).unwrap()).collect();
    let all: Vec<&Array<f64>> = on_gpu.iter().collect();
    for (sum, term) in [(Sum::Squares, (|x| x * x) as fn(f64) -> f64), (Sum::Magnitudes, f64::abs)] {
        let expected: Vec<Vec<f64>> = arrays.iter().map(|x| x.chunks(4096).map(|x| block(x, term)).collect()).collect();
        assert_eq!(block_sums(sum, &all).unwrap(), expected);
    }
    let largest = block_sums(Sum::Largest, &all).unwrap();
    assert_eq!(
        largest[5].iter().fold(0.0, |a: f64, &b| a.max(b)),
        arrays[5].iter().fold(0.0, |a: f64, b| a.max(b.abs()))
    );
    let bad = Array::from_slice(&gpu, &[1.0, f64::NAN, f64::INFINITY, 3.0]).unwrap();
    assert_eq!(block_sums(Sum::NotFinite, &[&bad]).unwrap(), [[2.0]]);
    assert!(block_sums(Sum::Largest, &[&bad]).unwrap()[0][0].is_nan());
}

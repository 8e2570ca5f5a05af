//! The local backward of the digits model, against its matrix products and elementwise loops alone.

use std::hint::black_box;
use std::time::Instant;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array1, Array2};
use rankgrad::Result;
use rankgrad::tensor::{Tensor, init};

use crate::bench::{Row, Times, is_quick};

const BATCH: usize = 100;

pub fn rows() -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    // Those of the digits in tests/golden, and of the example.
    for widths in [&[64, 32, 10][..], &[64, 256, 128, 10]] {
        rows.extend(row(widths)?);
    }
    Ok(rows)
}

/// Median of a backward through `relu(x w + b)` layers and the cross entropy, in `f64`; and of the forward before it.
fn row(widths: &[usize]) -> Result<Vec<Row>> {
    let rounds = if is_quick() { 2_000 } else { 20_000 } * 64 / widths.iter().max().copied().unwrap_or(64);
    let mut layers = Vec::new();
    for (seed, pair) in widths.windows(2).enumerate() {
        let weight = init::kaiming_uniform([pair[0], pair[1]], pair[0], init::relu_gain(0.0), seed as u64)?;
        let bias = Tensor::from_vec(vec![0.01; pair[1]], pair[1])?;
        layers.push((weight.parameter()?, bias.parameter()?));
    }
    let pixels: Vec<f64> = (0..BATCH * widths[0]).map(|i| ((i * 7919) % 17) as f64 / 16.0).collect();
    let x = Tensor::from_vec(pixels, [BATCH, widths[0]])?;
    let labels = Tensor::from_vec((0..BATCH).map(|i| (i % 10) as i64).collect(), BATCH)?;
    let mut plain = Plain::new(widths, &layers, &x)?;
    let (mut forward, mut backward, mut floor) = (Times::default(), Times::default(), Times::default());
    for round in 0..rounds + rounds / 10 {
        let start = Instant::now();
        let mut y = x.clone();
        for (i, (weight, bias)) in layers.iter().enumerate() {
            y = (y.matmul(weight)? + bias)?;
            if i + 1 < layers.len() {
                y = y.relu()?;
            }
        }
        let loss = y.cross_entropy(&labels)?;
        let (forth, start) = (start.elapsed(), Instant::now());
        loss.backward()?;
        let back = start.elapsed();
        drop((loss, y));
        for p in layers.iter().flat_map(|(w, b)| [w, b]) {
            drop(p.leaf().and_then(|leaf| leaf.take_grad()));
        }
        let start = Instant::now();
        plain.backward();
        let alone = start.elapsed();
        if round >= rounds / 10 {
            forward.push(forth);
            backward.push(back);
            floor.push(alone);
        }
    }
    let name: Vec<String> = widths.iter().map(usize::to_string).collect();
    let name = name.join("-");
    Ok(vec![
        Row::new(
            format!("backward_digits_{name}_batch_{BATCH}"),
            backward.quantile(0.5),
            "us",
            floor.quantile(0.5),
        ),
        Row::new(
            format!("forward_digits_{name}_batch_{BATCH}"),
            forward.quantile(0.5),
            "us",
            floor.quantile(0.5),
        ),
    ])
}

/// The same backward by hand, in memory that is there already.
struct Plain {
    layers: Vec<PlainLayer>,
    /// Exponentials of the scores, and a factor for each row.
    scores: Array2<f64>,
    factors: Array1<f64>,
}

struct PlainLayer {
    input: Array2<f64>,
    weight: Array2<f64>,
    /// Gradients of weight, bias and output.
    of_weight: Array2<f64>,
    of_bias: Array1<f64>,
    of_output: Array2<f64>,
}

impl Plain {
    fn new(widths: &[usize], layers: &[(Tensor, Tensor)], x: &Tensor) -> Result<Self> {
        let matrix = |t: &Tensor, n: usize| -> Result<Array2<f64>> {
            let elements = t.to_vec::<f64>()?;
            Ok(Array2::from_shape_vec((elements.len() / n, n), elements).unwrap_or_default())
        };
        let mut input = matrix(x, widths[0])?;
        let mut plain = Vec::new();
        for (weight, bias) in layers {
            let (weight, bias) = (matrix(weight, weight.shape()[1])?, Array1::from(bias.to_vec::<f64>()?));
            let output = (input.dot(&weight) + &bias).mapv(|x| x.max(0.0));
            plain.push(PlainLayer {
                of_weight: Array2::zeros(weight.dim()),
                of_bias: Array1::zeros(bias.len()),
                of_output: Array2::zeros(output.dim()),
                input,
                weight,
            });
            input = output;
        }
        let classes = widths[widths.len() - 1];
        Ok(Plain {
            layers: plain,
            scores: Array2::from_elem((BATCH, classes), 0.3),
            factors: Array1::from_elem(BATCH, 0.01),
        })
    }

    fn backward(&mut self) {
        let Plain { layers, scores, factors } = self;
        let Some((last, _)) = layers.split_last_mut() else { return };
        for (i, ((out, score), &factor)) in last.of_output.rows_mut().into_iter().zip(scores.rows()).zip(&*factors).enumerate() {
            let Some(out) = out.into_slice() else { return };
            out.iter_mut().zip(score).for_each(|(out, &x)| *out = x * factor);
            out[i % 10] -= 0.01;
        }
        for k in (0..layers.len()).rev() {
            let (before, rest) = layers.split_at_mut(k);
            let PlainLayer {
                input,
                weight,
                of_weight,
                of_bias,
                of_output,
            } = &mut rest[0];
            general_mat_mul(1.0, &input.t(), of_output, 0.0, of_weight);
            of_bias.fill(0.0);
            for row in of_output.rows() {
                *of_bias += &row;
            }
            if let Some(before) = before.last_mut() {
                general_mat_mul(1.0, of_output, &weight.t(), 0.0, &mut before.of_output);
                before.of_output.zip_mut_with(input, |g, &x| *g = if x > 0.0 { *g } else { 0.0 });
            }
        }
        black_box(layers);
    }
}

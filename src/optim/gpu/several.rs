//! Rules that take several launches: until the last one they write to what nobody sees yet.

use rankgrad_cuda::Array;
use rankgrad_cuda::rules::{self, Kernel};

use super::super::rules::{Adafactor, Lamb};
use super::cuda::{Both, Prepared};
use crate::Result;

/// LAMB: two norms of each parameter come here, and all parameters move.
pub(super) fn lamb<T: Both>(prepared: &[Prepared<'_, '_, T>], mut steps: Vec<rules::Step<'_, T>>) -> Result<()> {
    let parameters: Vec<&Array<T>> = steps.iter().map(|step| step.p).collect();
    let norms = rules::block_sums(rules::Sum::Squares, &parameters)?
        .into_iter()
        .map(|blocks| total(blocks).sqrt());
    let step_norms = rules::lamb_squares(&steps)?.into_iter().map(|blocks| total(blocks).sqrt());
    let sizes: Vec<f64> = norms
        .zip(step_norms)
        .zip(prepared)
        .map(|((norm, step_norm), prepared)| Lamb::step_size(prepared.step.numbers[3], norm, step_norm))
        .collect();
    steps.iter_mut().zip(sizes).for_each(|(step, size)| step.numbers[5] = T::of(size));
    Ok(rules::update(Kernel::Lamb, &steps)?)
}

/// Adafactor, one parameter after the other.
pub(super) fn adafactor<T: Both>(prepared: &[Prepared<'_, '_, T>], steps: Vec<rules::Step<'_, T>>) -> Result<()> {
    prepared
        .iter()
        .zip(steps)
        .try_for_each(|(prepared, step)| adafactor_one(prepared, step))
}

/// A sum from those of its blocks.
pub(super) fn total(blocks: Vec<f64>) -> f64 {
    blocks.into_iter().fold(0.0, |sum, block| sum + block)
}

/// A step of Adafactor: averages move, two norms come here, and the parameter moves.
fn adafactor_one<T: Both>(prepared: &Prepared<'_, '_, T>, mut step: rules::Step<'_, T>) -> Result<()> {
    let (numbers, elements) = (prepared.step.numbers, step.p.len());
    if elements == 0 {
        return Ok(());
    }
    let [sign, _, weight, floor, _, shrink, least, ..] = step.numbers;
    let squares = total(rules::block_sums(rules::Sum::Squares, &[step.p])?.concat());
    let size = |direction: Vec<f64>| T::of(Adafactor::step_size(numbers, elements, squares, total(direction)));
    match (step.state, &prepared.job.parameter.shape[..]) {
        ([Some(row_var), Some(col_var), _], &[.., rows, columns]) => {
            let matrices = rules::Matrices {
                p: step.p,
                out: step.out,
                g: step.g,
                rows: row_var,
                columns: col_var,
                shape: (rows, columns),
            };
            let means = matrices.follow(weight, least)?;
            let size = size(matrices.squares(&means, sign, floor)?);
            Ok(matrices.step(&means, [sign, floor, size, shrink])?)
        }
        ([Some(variance), ..], _) => {
            rules::update(Kernel::AdafactorVariance, &[step])?;
            step.numbers[4] = size(rules::adafactor_vector_squares(step.g, variance, sign, floor)?);
            Ok(rules::update(Kernel::AdafactorStep, &[step])?)
        }
        _ => Ok(()),
    }
}

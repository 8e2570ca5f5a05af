//! The training loop.

use rankgrad::Result;

use crate::case::{Case, Epoch};
use crate::data::{CLASSES, Digits, Rows};
use crate::network::Network;

/// Trains over all epochs, batches in file order, and tells of each epoch as it ends.
pub fn train(network: &mut Network, case: &Case, digits: &Digits, mut ended: impl FnMut(&Epoch)) -> Result<Vec<Epoch>> {
    let mut history = Vec::with_capacity(case.epochs);
    for _ in 0..case.epochs {
        let mut sum = 0.0;
        for batch in digits.train.batches(case.batch) {
            let batch = batch?;
            sum += network.train(&batch)? * batch.len() as f64;
        }
        let train_loss = sum / digits.train.len() as f64;
        let told = guesses(network, &digits.test)?;
        let right = told
            .iter()
            .zip(labels(&digits.test)?)
            .filter(|(guess, label)| **guess == *label)
            .count();
        let epoch = Epoch {
            train_loss,
            test_accuracy: right as f64 / told.len() as f64,
        };
        ended(&epoch);
        history.push(epoch);
    }
    Ok(history)
}

/// How often each digit (row) was taken for each digit (column) among the test rows.
pub fn confusion(network: &Network, test: &Rows) -> Result<[[u32; CLASSES]; CLASSES]> {
    let mut table = [[0; CLASSES]; CLASSES];
    for (guess, label) in guesses(network, test)?.into_iter().zip(labels(test)?) {
        if let (Ok(guess), Ok(label)) = (usize::try_from(guess), usize::try_from(label)) {
            table[label][guess] += 1;
        }
    }
    Ok(table)
}

fn guesses(network: &Network, rows: &Rows) -> Result<Vec<i64>> {
    network.guess(&rows.pixels)?.argmax(1)?.to_vec()
}

fn labels(rows: &Rows) -> Result<Vec<i64>> {
    rows.labels.to_vec()
}

//! What is left at the end: a line of JSON, a file of JSON, a table.

use std::path::Path;

use rankgrad::{Error, Result};
use serde::Serialize;

use crate::case::Epoch;
use crate::data::CLASSES;

/// How far a loss may be from what is expected, relative.
pub const TOLERANCE: f64 = 1e-9;

/// The file that `--out` writes.
#[derive(Serialize)]
pub struct Run {
    /// Number of ranks.
    pub ranks: u32,
    /// Loss and accuracy of each epoch.
    pub history: Vec<Epoch>,
    /// The rank that owns each parameter.
    pub owners: Vec<u32>,
    /// Messages that each rank sent.
    pub messages: Vec<u64>,
    /// Bytes that each rank sent.
    pub bytes: Vec<u64>,
}

impl Run {
    /// Writes it as JSON.
    pub fn write(&self, file: &Path) -> Result<()> {
        let failed = |e: &dyn std::fmt::Display| Error::user(format!("{}: {e}", file.display()));
        let text = serde_json::to_string(self).map_err(|e| failed(&e))?;
        std::fs::write(file, text + "\n").map_err(|e| failed(&e))
    }
}

/// The line that is printed for a case.
#[derive(Serialize)]
pub struct Line {
    /// Which case of its file.
    pub case: usize,
    /// Number of ranks.
    pub ranks: u32,
    /// Largest relative error of an epoch's loss.
    pub max_loss_error: f64,
    /// Loss of the last epoch.
    pub final_train_loss: f64,
    /// Accuracy after the last epoch.
    pub final_test_accuracy: f64,
    /// Time that training took.
    pub seconds: f64,
}

/// The largest relative error of an epoch's loss, infinite if it isn't a number; and whether all accuracies are equal.
pub fn compare(found: &[Epoch], expected: &[Epoch]) -> (f64, bool) {
    let error = |(found, expected): (&Epoch, &Epoch)| {
        let error = (found.train_loss - expected.train_loss).abs() / expected.train_loss.abs();
        match found.train_loss == expected.train_loss {
            true => 0.0,
            false if error.is_nan() => f64::INFINITY,
            false => error,
        }
    };
    let worst = found.iter().zip(expected).map(error).fold(0.0, f64::max);
    let equal = found
        .iter()
        .zip(expected)
        .all(|(a, b)| (a.test_accuracy - b.test_accuracy).abs() < 1e-12);
    (worst, equal)
}

/// The table of digits and what they were taken for.
pub fn confusion(table: &[[u32; CLASSES]; CLASSES]) -> String {
    let header: String = (0..CLASSES).map(|digit| format!("{digit:>5}")).collect();
    let mut lines = vec![format!("digit taken for{header}")];
    for (digit, row) in table.iter().enumerate() {
        let cells: String = row
            .iter()
            .map(|&n| if n == 0 { "    .".into() } else { format!("{n:>5}") })
            .collect();
        lines.push(format!("{digit:>15}{cells}"));
    }
    lines.join("\n")
}

//! What passed, what failed, and by how much.

use rankgrad::Result;

/// Counts cases as they end.
#[derive(Default)]
pub struct Tally {
    passed: usize,
    failed: usize,
    worst: Option<(f64, String)>,
}

impl Tally {
    /// Counts a case that passed with this error, or prints why it failed.
    pub fn count(&mut self, id: &str, result: &Result<f64>) {
        match result {
            Ok(error) => {
                self.passed += 1;
                if self.worst.as_ref().is_none_or(|(worst, _)| error > worst) {
                    self.worst = Some((*error, id.into()));
                }
            }
            Err(why) => {
                self.failed += 1;
                println!("{id}: {why}");
            }
        }
    }

    /// Counts a case that passed by another measure than the relative error.
    pub fn pass(&mut self) {
        self.passed += 1;
    }

    /// Prints the closing line; whether no case failed.
    pub fn close(self) -> bool {
        let (error, id) = self.worst.unwrap_or((0.0, "none".into()));
        println!(
            "{} passed, {} failed, worst relative error {error:e} ({id})",
            self.passed, self.failed
        );
        self.failed == 0
    }
}

/// The larger of two errors; NaN stays.
pub fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

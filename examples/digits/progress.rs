//! What is seen while it trains: a bar on a terminal, plain lines otherwise.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use crate::case::Epoch;

/// Shows epochs as they end.
pub struct Progress {
    bar: Option<ProgressBar>,
    lines: bool,
    epochs: usize,
    done: usize,
}

impl Progress {
    /// For this many epochs. `lines` says whether there are plain lines where there is no terminal.
    pub fn new(epochs: usize, lines: bool) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(epochs as u64);
            let style = ProgressStyle::with_template("{bar:40} epoch {pos}/{len}  {msg}  {elapsed}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Self {
            bar,
            lines,
            epochs,
            done: 0,
        }
    }

    /// Shows an epoch.
    pub fn ended(&mut self, epoch: &Epoch) {
        self.done += 1;
        let text = format!("loss {:.4}  test accuracy {:.1} %", epoch.train_loss, 100.0 * epoch.test_accuracy);
        match &self.bar {
            Some(bar) => {
                bar.set_message(text);
                bar.inc(1);
            }
            None if self.lines => println!("epoch {:>3}/{}  {text}", self.done, self.epochs),
            None => {}
        }
    }

    /// Leaves the bar as it is.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.abandon();
        }
    }
}

//! What is seen while it trains: a bar on a terminal, plain lines otherwise.

use std::io::{self, IsTerminal, Write, stderr};
use std::str::FromStr;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use crate::case::Epoch;

/// How progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// A bar if standard error is a terminal, else lines.
    Auto,
    /// A bar. Launchers give ranks a pipe, also when what they forward ends on a terminal; who starts them knows.
    Bar,
    /// A line for each epoch.
    Lines,
    /// Nothing.
    Nothing,
}

impl FromStr for Show {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Show::Auto),
            "bar" => Ok(Show::Bar),
            "lines" => Ok(Show::Lines),
            "nothing" => Ok(Show::Nothing),
            _ => Err(()),
        }
    }
}

/// Shows epochs as they end.
pub struct Progress {
    bar: Option<ProgressBar>,
    lines: bool,
    epochs: usize,
    done: usize,
}

impl Progress {
    /// For this many epochs.
    pub fn new(epochs: usize, show: Show) -> Self {
        let terminal = stderr().is_terminal();
        let target = match show {
            Show::Auto | Show::Bar if terminal => Some(ProgressDrawTarget::stderr()),
            Show::Bar => Some(ProgressDrawTarget::term_like_with_hz(Box::new(Forwarded), 10)),
            _ => None,
        };
        let lines = show == Show::Lines || (show == Show::Auto && !terminal);
        let bar = target.map(|target| {
            let bar = ProgressBar::with_draw_target(Some(epochs as u64), target);
            let style = ProgressStyle::with_template("{bar:40} epoch {pos}/{len}  {msg}  {elapsed}");
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
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
        if let Some(bar) = &self.bar {
            bar.set_message(text);
            bar.inc(1);
        } else if self.lines {
            println!("epoch {:>3}/{}  {text}", self.done, self.epochs);
        }
    }

    /// Leaves the bar as it is.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.abandon();
        }
    }
}

/// A terminal behind a launcher's pipe, by the control sequences that every terminal knows (ECMA-48).
#[derive(Debug)]
struct Forwarded;

impl Forwarded {
    fn moved(&self, n: usize, way: char) -> io::Result<()> {
        if n == 0 { Ok(()) } else { write!(stderr(), "\x1b[{n}{way}") }
    }
}

impl TermLike for Forwarded {
    fn width(&self) -> u16 {
        100
    }
    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.moved(n, 'A')
    }
    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.moved(n, 'B')
    }
    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.moved(n, 'C')
    }
    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.moved(n, 'D')
    }
    fn write_line(&self, s: &str) -> io::Result<()> {
        writeln!(stderr(), "{s}")
    }
    fn write_str(&self, s: &str) -> io::Result<()> {
        write!(stderr(), "{s}")
    }
    fn clear_line(&self) -> io::Result<()> {
        write!(stderr(), "\r\x1b[2K")
    }
    fn flush(&self) -> io::Result<()> {
        stderr().flush()
    }
}

//! Simulated ranks: the state machines of `protocol` in one loop, in virtual time, all choices from one seed.
//!
//! Not a part of the library: it is there under the feature `sim` only, for tests. `README.md` beside this file says what is checked, and how to run a
//! failing seed again.

mod caller;
mod campaign;
mod checks;
mod client;
mod driver;
mod events;
mod functions;
mod generate;
mod handle;
mod jobs;
mod loggp;
mod mains;
mod node;
mod program;
mod run;
mod scale;
mod shrink;
#[cfg(test)]
mod tests;
mod trace;
mod waiting;
mod world;

pub use campaign::{Report, Violation, mutants, replay, run};
pub use loggp::LogGp;
pub use scale::{Cost, scale};

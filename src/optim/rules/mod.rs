//! The rules, one a file.

mod adam;
mod sgd;

pub use adam::Adam;
pub use sgd::Sgd;

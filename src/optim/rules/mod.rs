//! The rules, one a file.

mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod adamax;
mod adamw;
mod asgd;
mod lamb;
mod lion;
mod muon;
mod nadam;
mod radam;
mod rmsprop;
mod rprop;
mod sgd;
mod sparse_adam;

pub use adadelta::Adadelta;
pub use adafactor::Adafactor;
pub use adagrad::Adagrad;
pub use adam::Adam;
pub use adamax::Adamax;
pub use adamw::AdamW;
pub use asgd::Asgd;
pub use lamb::Lamb;
pub use lion::Lion;
pub use muon::{AdjustLr, Muon};
pub use nadam::NAdam;
pub use radam::RAdam;
pub use rmsprop::RmsProp;
pub use rprop::Rprop;
pub use sgd::Sgd;
pub use sparse_adam::SparseAdam;

//! Optimizers in backward on one rank.

//! Initial values.

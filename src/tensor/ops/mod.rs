//! Operations, by family.
/// Reduction
#[derive(Debug)]
pub enum Reduction {
    /// m
    Mean,
}
/// Gelu
#[derive(Debug)]
pub enum Gelu {
    /// e
    Erf,
}

//! Operations, by family.
/// Reduction
#[derive(Debug)]
pub enum Reduction {
    Mean,
}
/// Gelu
#[derive(Debug)]
pub enum Gelu {
    Erf,
}

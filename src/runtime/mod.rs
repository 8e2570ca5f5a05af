//! (room under construction)

#[allow(dead_code, reason = "the driver of a rank is its user")]
pub(crate) mod logging;
#[allow(dead_code, reason = "the driver of a rank is its user")]
pub(crate) mod placement;

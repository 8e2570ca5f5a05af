//! Gradients between the two halves of a step.

use std::sync::OnceLock;

use super::Norm;
use super::clip::{clamped, is_finite, scaled};
#[cfg(doc)]
use crate::ErrorKind;
use crate::Result;
use crate::tensor::Gradient;

/// Gradients that an [`Optimizer`](super::Optimizer) has checked, each in the form that its rule takes, with their norms. Made by [`Optimizer::check`](super::Optimizer::check).
#[derive(Debug, Clone)]
pub struct Checked {
    pub(super) gradients: Vec<Option<Gradient>>,
    pub(super) kind: Norm,
    /// Computed when they are asked for; else by the update, which has the gradients at hand.
    pub(super) norms: OnceLock<Vec<Option<f64>>>,
}

impl Checked {
    /// Norm of each parameter's gradient; `None` without one.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] for gradients on a GPU that can't be used.
    pub fn norms(&self) -> Result<&[Option<f64>]> {
        if self.norms.get().is_none() {
            let of = |g: &Option<Gradient>| g.as_ref().map(|g| self.kind.of(g)).transpose();
            let norms = self.gradients.iter().map(of).collect::<Result<_>>()?;
            let _ = self.norms.set(norms); // else another thread has computed the same
        }
        Ok(self.norms.get().map_or(&[], Vec::as_slice))
    }

    /// Places of the parameters whose gradient has an element that is infinite or NaN.
    ///
    /// # Errors
    /// As [`norms`](Self::norms).
    pub fn not_finite(&self) -> Result<Vec<usize>> {
        let mut found = Vec::new();
        for (place, (norm, gradient)) in self.norms()?.iter().zip(&self.gradients).enumerate() {
            // A finite norm is one of finite elements; another one may be too large for a number.
            if let (Some(norm), Some(gradient)) = (norm, gradient)
                && !norm.is_finite()
                && !is_finite(gradient)?
            {
                found.push(place);
            }
        }
        Ok(found)
    }

    /// Multiplies all gradients by a number. The norms stay those before.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] for gradients on a GPU that can't be used.
    pub fn scale(&mut self, factor: f64) -> Result<()> {
        if factor != 1.0 {
            self.norms()?;
            for gradient in self.gradients.iter_mut().flatten() {
                *gradient = scaled(gradient, factor)?;
            }
        }
        Ok(())
    }

    /// Brings all elements between `-max` and `max`. The norms stay those before.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] for gradients on a GPU that can't be used.
    pub fn clamp(&mut self, max: f64) -> Result<()> {
        self.norms()?;
        let clamped = |g: Option<Gradient>| g.map(|g| clamped(g, max)).transpose();
        let gradients = std::mem::take(&mut self.gradients).into_iter().map(clamped);
        self.gradients = gradients.collect::<Result<_>>()?;
        Ok(())
    }
}

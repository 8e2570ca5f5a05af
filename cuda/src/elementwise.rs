//! Gradients on the device: added, scaled, limited, cast.

use crate::array::{Float, grid};
use crate::{Array, Result};

/// `a + b`, element by element. Local; doesn't wait for the device.
///
/// # Errors
/// [`Error::Argument`](crate::Error::Argument) for another length or device; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
pub fn add<T: Float>(a: &Array<T>, b: &Array<T>) -> Result<Array<T>> {
    b.check("add", a.gpu(), a.len())?;
    let out = Array::new(a.gpu(), a.len())?;
    let (mut x, mut y, mut z, mut n) = (a.pointer()?, b.pointer()?, out.pointer()?, a.len() as u64);
    let mut arguments = [(&raw mut x).cast(), (&raw mut y).cast(), (&raw mut z).cast(), (&raw mut n).cast()];
    // SAFETY: the kernel takes three arrays of one length, which they have.
    unsafe { a.gpu().launch(&format!("add_{}", T::SUFFIX), (grid(a.len()), 1), &mut arguments)? };
    Ok(out)
}

/// `a * factor`. Local; doesn't wait for the device.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::Driver`](crate::Error::Driver).
pub fn scale<T: Float>(a: &Array<T>, factor: T) -> Result<Array<T>> {
    with_number("scale", a, factor)
}

/// Each element between `-most` and `most`; NaN stays. Local; doesn't wait for the device.
///
/// # Errors
/// As [`scale`].
pub fn clamp<T: Float>(a: &Array<T>, most: T) -> Result<Array<T>> {
    with_number("clamp", a, most)
}

fn with_number<T: Float>(name: &str, a: &Array<T>, mut number: T) -> Result<Array<T>> {
    let out = Array::new(a.gpu(), a.len())?;
    let (mut x, mut y, mut n) = (a.pointer()?, out.pointer()?, a.len() as u64);
    let mut arguments = [
        (&raw mut x).cast(),
        (&raw mut y).cast(),
        (&raw mut n).cast(),
        (&raw mut number).cast(),
    ];
    // SAFETY: the kernel takes two arrays of one length, which they have, and a number.
    unsafe {
        a.gpu()
            .launch(&format!("{name}_{}", T::SUFFIX), (grid(a.len()), 1), &mut arguments)?
    };
    Ok(out)
}

/// The same numbers in the other precision, rounded to the nearest. Local; doesn't wait for the device.
///
/// # Errors
/// As [`scale`].
pub fn cast<T: Float, U: Float>(a: &Array<T>) -> Result<Array<U>> {
    let out = Array::new(a.gpu(), a.len())?;
    let (mut x, mut y, mut n) = (a.pointer()?, out.pointer()?, a.len() as u64);
    let mut arguments = [(&raw mut x).cast(), (&raw mut y).cast(), (&raw mut n).cast()];
    let name = format!("cast_{}_{}", T::SUFFIX, U::SUFFIX);
    // SAFETY: the kernel of this name takes arrays of these two types, of one length, which they have.
    unsafe { a.gpu().launch(&name, (grid(a.len()), 1), &mut arguments)? };
    Ok(out)
}

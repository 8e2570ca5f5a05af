//! The gradients of a crossing in a message. Absent, zero, dense and sparse stay what they are.

use serde::{Deserialize, Serialize};

use super::{Payload, as_sent, decode_error, write};
use crate::tensor::{DType, Data, Element, Gradient, RowSparse};
use crate::{Result, spare};

#[derive(Serialize, Deserialize)]
enum Slot {
    Absent,
    /// The next segment.
    Dense,
    /// The next two segments: rows and values.
    Sparse {
        shape: Vec<usize>,
    },
}

/// Encodes a gradient per slot.
pub(crate) fn encode_gradients(gradients: Vec<Option<Gradient>>) -> Result<Payload> {
    let mut payload = Payload {
        bytes: spare::take(),
        segments: Vec::with_capacity(gradients.len()),
        recorded: None,
    };
    let mut slots = Vec::with_capacity(gradients.len());
    for gradient in gradients {
        slots.push(match gradient {
            None => Slot::Absent,
            Some(Gradient::Dense(data)) => {
                payload.segments.push(as_sent(data)?);
                Slot::Dense
            }
            Some(Gradient::Sparse(sparse)) => {
                let rows = ndarray::Array1::from_vec(sparse.rows).into_dyn().into_shared();
                payload.segments.extend([Data::I64(rows), as_sent(sparse.values)?]);
                Slot::Sparse { shape: sparse.shape }
            }
        });
    }
    write(&slots, &mut payload.bytes)?;
    Ok(payload)
}

/// Decodes a gradient per slot.
///
/// # Errors
/// [`ErrorKind::Decode`](crate::ErrorKind::Decode) if segments are missing, or a sparse gradient's parts don't fit together.
pub(crate) fn decode_gradients(payload: Payload) -> Result<Vec<Option<Gradient>>> {
    let slots: Vec<Slot> = postcard::from_bytes(&payload.bytes).map_err(|e| decode_error(format!("gradients: {e}")))?;
    spare::keep(payload.bytes);
    let mut segments = payload.segments.into_iter();
    let mut next = || {
        segments
            .next()
            .ok_or_else(|| decode_error("gradients: a segment is missing".into()))
    };
    let mut gradients = Vec::with_capacity(slots.len());
    for slot in slots {
        gradients.push(match slot {
            Slot::Absent => None,
            Slot::Dense => Some(Gradient::Dense(next()?)),
            Slot::Sparse { shape } => Some(Gradient::Sparse(sparse(next()?, next()?, shape)?)),
        });
    }
    Ok(gradients)
}

fn sparse(rows: Data, values: Data, shape: Vec<usize>) -> Result<RowSparse> {
    let rows: Vec<i64> = match rows.dtype() {
        DType::I64 => i64::peek(&rows)?.iter().copied().collect(),
        other => return Err(decode_error(format!("sparse gradient: rows of dtype {other}"))),
    };
    let fits = !shape.is_empty()
        && values.shape().first() == Some(&rows.len())
        && values.shape()[1..] == shape[1..]
        && rows.iter().all(|&r| usize::try_from(r).is_ok_and(|r| r < shape[0]));
    if !fits {
        return Err(decode_error(format!(
            "sparse gradient: {} rows and values of shape {:?} for a parameter of shape {shape:?}",
            rows.len(),
            values.shape()
        )));
    }
    Ok(RowSparse { rows, values, shape })
}

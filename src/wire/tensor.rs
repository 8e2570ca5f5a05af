//! Tensors in messages: the storage travels as a segment, the message holds its place.

use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{DECODER, ENCODER, as_sent};
use crate::autograd::Edge;
use crate::tensor::Tensor;

/// As an argument or a result of a call. The shape, the dtype and, in a recorded call, whether a gradient is required travel along.
impl Serialize for Tensor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let data = as_sent(self.data()).map_err(S::Error::custom)?;
        let place = ENCODER.with_borrow_mut(|encoder| {
            let encoder = encoder.as_mut()?;
            let edge = encoder.record.then(|| self.edge()).flatten();
            let left = encoder.left();
            let place = left.payload.segments.len() as u32;
            if edge.is_some() {
                left.payload.recorded.get_or_insert_default().slots.push(place);
                left.edges.push(edge);
            }
            left.payload.segments.push(data);
            Some(place)
        });
        match place {
            Some(place) => place.serialize(serializer),
            None => Err(S::Error::custom(
                "a tensor can be serialised only as an argument or a result of a call",
            )),
        }
    }
}

impl<'de> Deserialize<'de> for Tensor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let place = u32::deserialize(deserializer)?;
        DECODER.with_borrow(|decoder| {
            let decoder = decoder
                .as_ref()
                .ok_or_else(|| D::Error::custom("a tensor can be deserialised only from a call"))?;
            let data = decoder
                .segments
                .get(place as usize)
                .ok_or_else(|| D::Error::custom("no such segment"))?
                .clone();
            let slot = decoder
                .recorded
                .as_ref()
                .and_then(|recorded| recorded.slots.iter().position(|&s| s == place));
            Ok(match (slot, &decoder.node) {
                (Some(slot), Some(node)) => Tensor::with_edge(data, Edge { node: node.clone(), slot }),
                _ => Tensor::from_data(data),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::tensor::{Gradient, Tensor};
    use crate::wire::{encode, encode_gradients, write};

    #[test]
    fn what_a_rank_sends_to_itself_lies_in_memory_as_what_others_get() {
        let wide = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3]).unwrap();
        let transposed = wide.transpose(0, 1).unwrap();
        assert!(!transposed.data().is_contiguous());
        let sent = encode(false, |bytes| write(&transposed, bytes)).unwrap();
        assert!(sent.payload.segments[0].is_contiguous());
        let sent = encode_gradients(vec![Some(Gradient::Dense(transposed.data()))]).unwrap();
        assert!(sent.segments[0].is_contiguous());
    }
}

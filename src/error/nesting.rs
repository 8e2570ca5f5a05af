//! Errors inside errors, as they travel: the depth is bounded, for bytes from elsewhere must not decide how much of the stack their decoder takes.

use std::cell::Cell;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Error, ErrorKind};

/// The most errors inside each other that travel as they are.
const DEPTH: usize = 64;

thread_local! {
    /// How many errors the thread is inside of, while it encodes or decodes one.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// One error deeper, as long as it lives.
struct Deeper;

impl Deeper {
    fn go() -> (Deeper, usize) {
        let depth = INSIDE.get();
        INSIDE.set(depth + 1);
        (Deeper, depth)
    }
}

impl Drop for Deeper {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
    }
}

impl Serialize for Error {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (_deeper, depth) = Deeper::go();
        if depth < DEPTH {
            self.0.serialize(serializer)
        } else {
            let message = self.to_string();
            ErrorKind::User { message }.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for Error {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (_deeper, depth) = Deeper::go();
        if depth <= DEPTH {
            Box::deserialize(deserializer).map(Error)
        } else {
            Err(D::Error::custom("errors inside each other, deeper than any that is sent"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(depth: u32) -> Error {
        (0..depth).fold(Error::user("the cause"), |source, rank| {
            ErrorKind::Remote {
                rank,
                operation: "f".into(),
                source,
            }
            .into()
        })
    }

    #[test]
    fn causes_travel_up_to_a_depth_and_then_as_text() {
        for depth in [0, 1, 64] {
            let bytes = postcard::to_stdvec(&chain(depth)).unwrap();
            assert_eq!(postcard::from_bytes::<Error>(&bytes).unwrap(), chain(depth));
        }
        let bytes = postcard::to_stdvec(&chain(200)).unwrap();
        let back: Error = postcard::from_bytes(&bytes).unwrap();
        assert_eq!(back.to_string(), chain(200).to_string());
        assert!(matches!(back.root(), ErrorKind::User { message } if message.ends_with("the cause")));
        // As often as not: the depth is counted back.
        assert_eq!(postcard::to_stdvec(&chain(200)).unwrap(), bytes);
    }

    #[test]
    fn bytes_that_nest_for_ever_are_refused_on_a_small_stack() {
        let one = postcard::to_stdvec(&chain(1)).unwrap();
        let inner = postcard::to_stdvec(&chain(0)).unwrap();
        let outer = &one[..one.len() - inner.len()];
        let endless = outer.repeat(1_000_000);
        let decode = move || assert!(postcard::from_bytes::<Error>(&endless).is_err());
        std::thread::Builder::new()
            .stack_size(1 << 20)
            .spawn(decode)
            .unwrap()
            .join()
            .unwrap();
    }
}

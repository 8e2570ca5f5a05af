//! Names of things that more than one rank knows. Each is made without asking anybody: 24 bits of rank, 40 bits of sequence.

use serde::{Deserialize, Serialize};

const SEQUENCE_BITS: u32 = 40;
const SEQUENCE_MASK: u64 = (1 << SEQUENCE_BITS) - 1;

/// The largest world: ranks take 24 bits of an id.
pub(crate) const MAX_RANKS: u32 = 1 << (64 - SEQUENCE_BITS);

macro_rules! id {
    ($(#[$doc:meta])* $vis:vis $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        $vis struct $name(u64);

        #[allow(dead_code)]
        impl $name {
            pub(crate) fn new(rank: u32, sequence: u64) -> Self {
                debug_assert!(sequence <= SEQUENCE_MASK && rank < MAX_RANKS);
                $name((u64::from(rank) << SEQUENCE_BITS) | (sequence & SEQUENCE_MASK))
            }

            /// The rank that made it.
            $vis fn rank(self) -> u32 {
                (self.0 >> SEQUENCE_BITS) as u32
            }

            /// Its number among those that rank made.
            $vis fn sequence(self) -> u64 {
                self.0 & SEQUENCE_MASK
            }

            /// As one number.
            $vis fn to_bits(self) -> u64 {
                self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}.{}", self.rank(), self.sequence())
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{self}")
            }
        }
    };
}

id! {
    /// A value's id: the rank that asked for its creation, and that rank's count.
    pub ValueId
}
id! {
    /// A distributed autograd context: its home rank, and that rank's count.
    pub ContextId
}
id! {
    /// A set of tensors that went from one rank to another in a context: its sender, and that rank's count.
    pub(crate) CrossingId
}
id! {
    /// A distributed optimizer: the rank that made it, and that rank's count.
    pub OptimizerId
}

impl CrossingId {
    pub(crate) fn from_bits(bits: u64) -> Self {
        CrossingId(bits)
    }
}

/// Where a value lives, and which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RefId {
    /// The rank that owns the value.
    pub owner: u32,
    /// The value.
    pub value: ValueId,
}

/// A request, numbered by the rank that makes it.
pub(crate) type RequestId = u64;

/// A request as its receiver names it: who asked, and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TaskId {
    /// The rank that asked.
    pub from: u32,
    /// Its number there.
    pub request: RequestId,
}

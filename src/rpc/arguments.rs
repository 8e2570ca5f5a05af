//! Arguments of a call: a tuple of values or of references to them.

use std::borrow::Borrow;

use serde::Serialize;

use crate::Result;
use crate::wire;

/// A tuple that can be passed to a remote function with the parameters `A`: each element is a value of the parameter's type, or a reference to one.
pub trait Arguments<A> {
    #[doc(hidden)]
    fn encode(&self, bytes: &mut Vec<u8>) -> Result<()>;
}

impl Arguments<()> for () {
    fn encode(&self, _: &mut Vec<u8>) -> Result<()> {
        Ok(())
    }
}

macro_rules! arguments {
    ($(($type:ident $given:ident $place:tt)),+) => {
        impl<$($type, $given),+> Arguments<($($type,)+)> for ($($given,)+)
        where
            $($type: Serialize, $given: Borrow<$type>,)+
        {
            fn encode(&self, bytes: &mut Vec<u8>) -> Result<()> {
                $(wire::write::<$type>(self.$place.borrow(), bytes)?;)+
                Ok(())
            }
        }
    };
}

arguments!((A GivenA 0));
arguments!((A GivenA 0), (B GivenB 1));
arguments!((A GivenA 0), (B GivenB 1), (C GivenC 2));
arguments!((A GivenA 0), (B GivenB 1), (C GivenC 2), (D GivenD 3));
arguments!((A GivenA 0), (B GivenB 1), (C GivenC 2), (D GivenD 3), (E GivenE 4));
arguments!((A GivenA 0), (B GivenB 1), (C GivenC 2), (D GivenD 3), (E GivenE 4), (F GivenF 5));
arguments!((A GivenA 0), (B GivenB 1), (C GivenC 2), (D GivenD 3), (E GivenE 4), (F GivenF 5), (G GivenG 6));
arguments!((A GivenA 0), (B GivenB 1), (C GivenC 2), (D GivenD 3), (E GivenE 4), (F GivenF 5), (G GivenG 6), (H GivenH 7));

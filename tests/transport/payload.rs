//! Frames that can be made again from a seed, so that their receiver can check every byte.

use ndarray::{ArrayD, IxDyn, ShapeBuilder};
use rankgrad::tensor::{Data, Element};
use rankgrad::transport::Frame;

/// SplitMix64.
#[derive(Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// A header, padded with bytes that follow from the seed.
pub(crate) fn header(thread: u32, number: u64, seed: u64) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend(thread.to_le_bytes());
    header.extend(number.to_le_bytes());
    header.extend(seed.to_le_bytes());
    let mut random = Random(!seed);
    let padding = match random.below(20) {
        0 => random.below(6_000),
        1..6 => random.below(300),
        _ => 0,
    };
    header.extend((0..padding).map(|_| random.next() as u8));
    header
}

/// Thread, number and seed of a header.
pub(crate) fn parse(header: &[u8]) -> (u32, u64, u64) {
    let word = |at| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
    (u32::from_le_bytes(header[..4].try_into().expect("4 bytes")), word(4), word(12))
}

/// Segments of all dtypes and many sizes, sometimes not contiguous.
pub(crate) fn segments(seed: u64) -> Vec<Data> {
    let mut random = Random(seed);
    (0..random.below(4)).map(|_| segment(&mut random)).collect()
}

fn segment(random: &mut Random) -> Data {
    let largest = match random.below(40) {
        0 => 300_000,
        1..4 => 20_000,
        4..12 => 600,
        12..16 => 1,
        _ => 40,
    };
    let rows = 1 + random.below(5) as usize;
    let columns = random.below(largest) as usize / rows;
    let shape: Vec<usize> = match random.below(4) {
        0 => vec![],
        1 => vec![rows * columns],
        2 => vec![rows, columns],
        _ => vec![rows, 1, columns],
    };
    let reversed = random.below(4) == 0;
    match random.below(4) {
        0 => array(&shape, reversed, random, |bits| bits as u32 as f32 / 7.0),
        1 => array(&shape, reversed, random, |bits| bits as f64 / 7.0),
        2 => array(&shape, reversed, random, |bits| bits as i64),
        _ => array(&shape, reversed, random, |bits| bits & 1 == 1),
    }
}

fn array<T: Element>(shape: &[usize], reversed: bool, random: &mut Random, value: impl Fn(u64) -> T) -> Data {
    let values = (0..shape.iter().product()).map(|_| value(random.next())).collect();
    let order = IxDyn(shape).set_f(reversed);
    T::wrap(
        ArrayD::from_shape_vec(order, values)
            .expect("as many values as the shape has")
            .into_shared(),
    )
}

/// Compares a frame with what its header says that it should be.
pub(crate) fn check(frame: &Frame) {
    let (thread, number, seed) = parse(&frame.header);
    assert!(frame.header == header(thread, number, seed), "header {number} of thread {thread}");
    let expected = segments(seed);
    assert_eq!(frame.segments.len(), expected.len());
    for (got, expected) in frame.segments.iter().zip(&expected) {
        assert_eq!((got.dtype(), got.shape()), (expected.dtype(), expected.shape()));
        assert!(got.is_contiguous());
        let same = match (got, expected) {
            (Data::F32(a), Data::F32(b)) => a == b,
            (Data::F64(a), Data::F64(b)) => a == b,
            (Data::I64(a), Data::I64(b)) => a == b,
            (Data::Bool(a), Data::Bool(b)) => a == b,
            _ => false,
        };
        assert!(same, "segment of frame {number} of thread {thread}, seed {seed}");
    }
}

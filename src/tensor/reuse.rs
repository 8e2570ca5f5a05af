//! Arrays that nobody holds any more, kept by each thread for the outputs of its next operations.
//!
//! Memory fresh from the system costs a fault for each page, which takes longer than what most operations do with it, and an
//! allocator gives large blocks back to the system soon after they are freed. A training step frees and allocates the same
//! sizes over and over. So what an operation allocates here comes back when the last who holds it lets go of it: a tensor, an
//! adjoint that saved it, or a backward that used it up. A thread keeps no more than [`MOST`] bytes of each type, and nothing
//! of a size that it didn't take itself. What goes to the user doesn't come back, such as a leaf's gradient that is taken.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Deref;

use ndarray::{ArcArray, IxDyn};

use super::{Data, Float};

/// Smaller arrays are left to the allocator, which keeps them itself. In bytes, as the others.
const SMALLEST: usize = 16 << 10;
/// Larger ones are too much to keep.
const LARGEST: usize = 1 << 20;
/// What a thread keeps of each type.
const MOST: usize = 4 << 20;
/// So many of those taken last are expected back: as many as can be kept.
const EXPECTED: usize = MOST / SMALLEST;

thread_local! {
    static STORE: RefCell<Store> = const { RefCell::new(Store { single: Shelf::NEW, double: Shelf::NEW }) };
}

struct Store {
    single: Shelf<f32>,
    double: Shelf<f64>,
}

struct Shelf<T> {
    /// The oldest first.
    kept: VecDeque<Vec<T>>,
    bytes: usize,
    /// Capacities of those that were taken and haven't come back, the oldest first.
    expected: VecDeque<usize>,
}

impl Store {
    fn shelf<T: 'static>(&mut self) -> Option<&mut Shelf<T>> {
        let (single, double): (&mut dyn Any, &mut dyn Any) = (&mut self.single, &mut self.double);
        if single.is::<Shelf<T>>() { single } else { double }.downcast_mut()
    }
}

impl<T> Shelf<T> {
    const NEW: Self = Shelf {
        kept: VecDeque::new(),
        bytes: 0,
        expected: VecDeque::new(),
    };

    /// The smallest that is large enough, and at most a quarter larger; of equal ones the latest, which is in a cache.
    fn take(&mut self, len: usize) -> Option<Vec<T>> {
        let fits = |array: &Vec<T>| (len..=len + len / 4).contains(&array.capacity());
        let fitting = self.kept.iter().enumerate().rev().filter(|(_, array)| fits(array));
        let exact = self.kept.iter().rposition(|array| array.capacity() == len);
        let found = exact.or_else(|| fitting.min_by_key(|(_, array)| array.capacity()).map(|(place, _)| place));
        let array = found.and_then(|place| self.kept.remove(place));
        let capacity = array.as_ref().map_or(len, Vec::capacity);
        if array.is_some() {
            self.bytes -= capacity * size_of::<T>();
        }
        if self.expected.len() == EXPECTED {
            self.expected.pop_front();
        }
        self.expected.push_back(capacity);
        array
    }

    fn give(&mut self, array: Vec<T>) {
        let Some(place) = self.expected.iter().rposition(|&capacity| capacity == array.capacity()) else {
            return;
        };
        self.expected.remove(place);
        self.bytes += array.capacity() * size_of::<T>();
        self.kept.push_back(array);
        while self.bytes > MOST
            && let Some(oldest) = self.kept.pop_front()
        {
            self.bytes -= oldest.capacity() * size_of::<T>();
        }
    }
}

fn is_kept<T>(len: usize) -> bool {
    (SMALLEST..=LARGEST).contains(&len.saturating_mul(size_of::<T>()))
}

/// Runs `f` on this thread's shelf for the type, unless there is none, as in a thread that ends.
fn with_shelf<T: 'static, R>(f: impl FnOnce(&mut Shelf<T>) -> Option<R>) -> Option<R> {
    let run = |store: &RefCell<Store>| f(store.try_borrow_mut().ok()?.shelf()?);
    STORE.try_with(run).ok().flatten()
}

/// One that is kept; if there is none, the one that the caller allocates instead is expected.
fn take<T: 'static>(len: usize) -> Option<Vec<T>> {
    is_kept::<T>(len)
        .then(|| with_shelf(|shelf: &mut Shelf<T>| shelf.take(len)))
        .flatten()
}

/// An array of so many elements for what writes all of them and reads none: their values mean nothing. `None` if none is kept;
/// then an array that is allocated for it comes back as well.
pub(super) fn used<T: Float>(len: usize) -> Option<Vec<T>> {
    let mut array = take(len)?;
    array.resize(len, T::zero());
    Some(array)
}

/// An empty array with room for so many elements.
pub(super) fn empty<T: 'static>(len: usize) -> Vec<T> {
    let mut array = take(len).unwrap_or_else(|| Vec::with_capacity(len));
    array.clear();
    array
}

/// An array of what an iterator gives.
pub(super) fn collect<T: 'static>(elements: impl ExactSizeIterator<Item = T>) -> Vec<T> {
    let mut array = empty(elements.len());
    array.extend(elements);
    array
}

/// An array of so many elements that are all `value`.
pub(super) fn filled<T: Copy + 'static>(len: usize, value: T) -> Vec<T> {
    let mut array = empty(len);
    array.resize(len, value);
    array
}

/// A copy.
pub(super) fn copied<T: Copy + 'static>(elements: &[T]) -> Vec<T> {
    let mut array = empty(elements.len());
    array.extend_from_slice(elements);
    array
}

/// What can be given to the store.
pub(super) trait Give {
    /// Lets go of it; its memory is kept for other arrays if nobody else holds it.
    fn give(self);
}

impl<T: Float> Give for Vec<T> {
    fn give(mut self) {
        if is_kept::<T>(self.capacity()) {
            if cfg!(debug_assertions) {
                // So that tests see it where an output isn't written whole.
                self.fill(T::nan());
            }
            with_shelf(|shelf| {
                shelf.give(self);
                Some(())
            });
        }
    }
}

impl<T: Float> Give for ArcArray<T, IxDyn> {
    fn give(self) {
        if is_kept::<T>(self.len()) && self.is_unique() {
            self.into_owned().into_raw_vec_and_offset().0.give();
        }
    }
}

impl Give for Data {
    fn give(self) {
        match self {
            Data::F32(array) => array.give(),
            Data::F64(array) => array.give(),
            Data::I64(_) | Data::Bool(_) | Data::Cuda(_) => {}
        }
    }
}

/// What is given to the store when it's dropped.
#[derive(Debug)]
pub(super) struct Kept<A: Give>(Option<A>);

impl<A: Give> Kept<A> {
    pub(super) fn new(array: A) -> Self {
        Kept(Some(array))
    }

    pub(super) fn into_inner(mut self) -> A {
        self.0.take().expect("it's there until it is dropped")
    }
}

impl<A: Give> Deref for Kept<A> {
    type Target = A;

    fn deref(&self) -> &A {
        self.0.as_ref().expect("it's there until it is dropped")
    }
}

impl<A: Give> Drop for Kept<A> {
    fn drop(&mut self) {
        if let Some(array) = self.0.take() {
            array.give();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 10_000;

    fn kept<T: Float>() -> (usize, usize) {
        with_shelf(|shelf: &mut Shelf<T>| Some((shelf.kept.len(), shelf.bytes))).unwrap_or_default()
    }

    #[test]
    fn memory_comes_back_without_its_values() {
        let array = filled(LEN, 7.0_f64);
        let place = array.as_ptr();
        array.give();
        assert_eq!((kept::<f64>(), kept::<f32>()), ((1, 8 * LEN), (0, 0)));
        let empty = empty::<f64>(LEN);
        assert_eq!((empty.as_ptr(), empty.len(), kept::<f64>()), (place, 0, (0, 0)));
        empty.give();
        let written = filled(LEN - 1, 2.0_f64);
        assert!(written.as_ptr() == place && written.len() == LEN - 1 && written.iter().all(|&x| x == 2.0));
        written.give();
        assert_eq!(used::<f64>(LEN).map(|array| (array.as_ptr(), array.len())), Some((place, LEN)));
    }

    #[test]
    fn only_what_was_taken_and_nobody_holds_comes_back() {
        vec![0.0_f64; LEN].give();
        filled(SMALLEST / 8 - 1, 0.0_f64).give();
        filled(LARGEST / 8 + 1, 0.0_f64).give();
        assert_eq!(kept::<f64>(), (0, 0));
        let array = ArcArray::from_shape_vec(IxDyn(&[LEN]), filled(LEN, 0.0_f32)).unwrap();
        let view = array.clone();
        array.give();
        assert_eq!(kept::<f32>(), (0, 0));
        drop(Kept::new(view));
        assert_eq!(kept::<f32>(), (1, 4 * LEN));
        assert!(used::<f32>(LEN / 2).is_none(), "what is much larger isn't wasted");
        // What somebody kept is no longer expected once enough others were taken.
        let first = empty::<f32>(LEN + 1);
        (0..EXPECTED).for_each(|_| drop(empty::<f32>(2 * LEN)));
        first.give();
        assert_eq!(kept::<f32>(), (1, 4 * LEN));
    }

    #[test]
    fn a_thread_keeps_no_more_than_its_bound_and_nothing_when_it_ends() {
        for len in (1..50).map(|k| k * LEN / 4) {
            let arrays: Vec<Vec<f64>> = (0..20).map(|_| filled(len, 0.0)).collect();
            arrays.into_iter().for_each(Give::give);
            let (count, bytes) = kept::<f64>();
            let held = with_shelf(|shelf: &mut Shelf<f64>| Some(shelf.kept.iter().map(|array| 8 * array.capacity()).sum()));
            assert!(
                bytes <= MOST && held == Some(bytes) && count <= EXPECTED,
                "{len}: {count} of {bytes} bytes"
            );
        }

        /// Gives its array as the thread ends, after or before the store is gone.
        struct Late(Option<Vec<f64>>);
        impl Drop for Late {
            fn drop(&mut self) {
                self.0.take().into_iter().for_each(Give::give);
                assert_eq!(empty::<f64>(LEN).len(), 0);
            }
        }
        thread_local!(static LATE: RefCell<Late> = const { RefCell::new(Late(None)) });
        let ended = std::thread::spawn(|| {
            LATE.with_borrow_mut(|late| late.0 = Some(filled(LEN, 1.0)));
            filled(LEN, 1.0_f64).give();
        });
        assert!(ended.join().is_ok());
    }
}

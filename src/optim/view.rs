//! What a rule sees of one parameter's state during an update.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::Float;
use super::arithmetic::{BLOCK, Lanes, square_pass0, square_pass1, square_pass2, square_pass3, sum_of_lanes};

/// A rule's view of one parameter's state during one update: numbers, and the elements of arrays, by name.
///
/// An [`Optimizer`](super::Optimizer) makes it of the state that it keeps. Made of slices it lets a rule run without one:
///
/// ```
/// use rankgrad::optim::{Adam, Rule, StateView};
///
/// let (mut p, g, mut m, mut v) = ([1.0f32; 8], [0.5f32; 8], [0.0f32; 8], [0.0f32; 8]);
/// let mut state = StateView::new(&[8], [("step", 0.0)], [("exp_avg", &mut m[..]), ("exp_avg_sq", &mut v[..])], true);
/// Adam::new(0.1).update(&mut p, &g, &mut state);
/// assert_eq!(*state.scalar("step"), 1.0);
/// assert!(p.iter().all(|p| (p - 0.9).abs() < 1e-6));
/// ```
#[derive(Debug)]
pub struct StateView<'a, T> {
    shape: &'a [usize],
    scalars: Scalars<'a>,
    arrays: SmallVec<[Array<'a, T>; 4]>,
    /// The squares of the gradient, if they are asked for.
    squares: Option<Squares>,
}

/// The squares of a gradient.
#[derive(Debug)]
struct Squares {
    /// Where the gradient is in memory.
    place: Range<usize>,
    /// Those of each block.
    lanes: SmallVec<[Lanes; 4]>,
    done: bool,
}

type Scalars<'a> = SmallVec<[(&'a str, f64); 4]>;

#[derive(Debug)]
struct Array<'a, T> {
    name: &'a str,
    elements: &'a mut [T],
    /// No update has used it yet.
    fresh: bool,
}

/// What an update left: the numbers, and which arrays still weren't used, each in its order.
#[derive(Debug)]
pub(super) struct After {
    pub scalars: SmallVec<[f64; 4]>,
    pub fresh: SmallVec<[bool; 4]>,
}

impl<'a, T: Float> StateView<'a, T> {
    /// A view of these numbers and arrays of a parameter of this shape; `fresh` tells that no update has used the arrays yet. What the rule does to the
    /// numbers stays in the view.
    pub fn new(
        shape: &'a [usize],
        scalars: impl IntoIterator<Item = (&'a str, f64)>,
        arrays: impl IntoIterator<Item = (&'a str, &'a mut [T])>,
        fresh: bool,
    ) -> Self {
        Self::of(shape, scalars, arrays.into_iter().map(|(name, elements)| (name, elements, fresh)))
    }

    pub(super) fn of(
        shape: &'a [usize],
        scalars: impl IntoIterator<Item = (&'a str, f64)>,
        arrays: impl IntoIterator<Item = (&'a str, &'a mut [T], bool)>,
    ) -> Self {
        let array = |(name, elements, fresh)| Array { name, elements, fresh };
        Self {
            shape,
            scalars: scalars.into_iter().collect(),
            arrays: arrays.into_iter().map(array).collect(),
            squares: None,
        }
    }

    /// The parameter's shape.
    pub fn shape(&self) -> &[usize] {
        self.shape
    }

    /// The number of this name.
    ///
    /// # Panics
    /// If the rule doesn't declare it in [`Rule::SCALARS`](super::Rule::SCALARS).
    pub fn scalar(&mut self, name: &str) -> &mut f64 {
        match self.scalars.iter_mut().find(|(n, _)| *n == name) {
            Some((_, value)) => value,
            None => panic!("the rule doesn't declare the number `{name}`"),
        }
    }

    /// Adds one to `step`, and gives the number of this step, from 1.
    ///
    /// # Panics
    /// If the rule doesn't declare `step` in [`Rule::SCALARS`](super::Rule::SCALARS).
    pub fn count(&mut self) -> u64 {
        let step = self.scalar("step");
        *step += 1.0;
        *step as u64
    }

    /// Whether no update has used this array yet.
    pub fn is_fresh(&self, name: &str) -> bool {
        self.arrays.iter().any(|a| a.name == name && a.fresh)
    }

    /// The elements of these arrays, in row-major order.
    ///
    /// # Panics
    /// If the rule doesn't declare one of them in [`Rule::arrays`](super::Rule::arrays), or if one is named twice.
    pub fn arrays<const N: usize>(&mut self, names: [&str; N]) -> [&mut [T]; N] {
        find(&mut self.arrays, names)
    }

    /// As [`arrays`](Self::arrays), and where to sum the squares of each block of the gradient, if they are asked for.
    pub(super) fn arrays_and_squares<const N: usize>(&mut self, names: [&str; N], g: &[T]) -> ([&mut [T]; N], &mut [Lanes]) {
        (find(&mut self.arrays, names), squares(&mut self.squares, g))
    }

    /// One pass over parameters and gradients: [`arithmetic::pass0`](super::arithmetic::pass0).
    ///
    /// Unlike that function, this one and the other passes also compute the norm of the gradient on the way, if the step reports it.
    pub fn pass0(&mut self, p: &mut [T], g: &[T], update: impl Fn(T, T) -> T) {
        square_pass0(p, g, squares(&mut self.squares, g), update);
    }

    /// One pass over parameters, gradients and an array of the state: [`arithmetic::pass1`](super::arithmetic::pass1).
    ///
    /// # Panics
    /// As [`arrays`](Self::arrays).
    pub fn pass1(&mut self, p: &mut [T], g: &[T], array: &str, update: impl Fn(T, T, &mut T) -> T) {
        let [a] = find(&mut self.arrays, [array]);
        square_pass1(p, g, a, squares(&mut self.squares, g), update);
    }

    /// One pass over parameters, gradients and two arrays of the state: [`arithmetic::pass2`](super::arithmetic::pass2).
    ///
    /// # Panics
    /// As [`arrays`](Self::arrays).
    pub fn pass2(&mut self, p: &mut [T], g: &[T], arrays: [&str; 2], update: impl Fn(T, T, &mut T, &mut T) -> T) {
        let arrays = find(&mut self.arrays, arrays);
        square_pass2(p, g, arrays, squares(&mut self.squares, g), update);
    }

    /// One pass over parameters, gradients and three arrays of the state: [`arithmetic::pass3`](super::arithmetic::pass3).
    ///
    /// # Panics
    /// As [`arrays`](Self::arrays).
    pub fn pass3(&mut self, p: &mut [T], g: &[T], arrays: [&str; 3], update: impl Fn(T, T, &mut T, &mut T, &mut T) -> T) {
        let arrays = find(&mut self.arrays, arrays);
        square_pass3(p, g, arrays, [&mut [], squares(&mut self.squares, g), &mut []], update);
    }

    /// Asks for the sums of squares of the blocks of this gradient.
    pub(super) fn ask_for_squares(&mut self, g: &[T]) {
        self.squares = Some(Squares {
            place: place(g),
            lanes: smallvec![Lanes::default(); g.len().div_ceil(BLOCK)],
            done: false,
        });
    }

    /// The sums of squares that were asked for, if a pass has computed them.
    pub(super) fn squares(&self) -> Option<impl Iterator<Item = f64>> {
        let squares = self.squares.as_ref().filter(|squares| squares.done)?;
        Some(squares.lanes.iter().map(|lanes| sum_of_lanes(*lanes)))
    }

    /// Whether all arrays have so many elements.
    pub(super) fn is_of_len(&self, len: usize) -> bool {
        self.arrays.iter().all(|array| array.elements.len() == len)
    }

    /// Takes a view of the first elements of all arrays off, so many; it has the numbers as they are now. `None` if there are fewer.
    pub(super) fn split_off(&mut self, elements: usize) -> Option<Self> {
        let array = |array: &mut Array<'a, T>| {
            Some(Array {
                name: array.name,
                elements: array.elements.split_off_mut(..elements)?,
                fresh: array.fresh,
            })
        };
        Some(StateView {
            shape: self.shape,
            scalars: self.scalars.clone(),
            arrays: self.arrays.iter_mut().map(array).collect::<Option<_>>()?,
            squares: None,
        })
    }

    pub(super) fn after(&self) -> After {
        After {
            scalars: self.scalars.iter().map(|s| s.1).collect(),
            fresh: self.arrays.iter().map(|a| a.fresh).collect(),
        }
    }
}

fn find<'s, T, const N: usize>(arrays: &'s mut [Array<'_, T>], names: [&str; N]) -> [&'s mut [T]; N] {
    let mut found = [const { None }; N];
    for array in arrays {
        if let Some(place) = names.iter().position(|name| *name == array.name) {
            array.fresh = false;
            found[place] = Some(&mut *array.elements);
        }
    }
    let mut names = names.iter();
    found.map(|slice| {
        let name = names.next();
        slice.unwrap_or_else(|| panic!("the rule doesn't declare the array {name:?}"))
    })
}

fn place<T>(g: &[T]) -> Range<usize> {
    let Range { start, end } = g.as_ptr_range();
    start.addr()..end.addr()
}

/// Where a pass over `g` is to sum squares: nowhere, unless `g` is the gradient.
fn squares<'s, T>(asked: &'s mut Option<Squares>, g: &[T]) -> &'s mut [Lanes] {
    match asked {
        Some(squares) if squares.place == place(g) && !squares.done => {
            squares.done = true;
            &mut squares.lanes
        }
        _ => &mut [],
    }
}

//! Small parameters as one: their values and gradients are gathered into flat arrays, their state lives in such, and a rule passes over all at once.
//!
//! An elementwise rule does the same to an element wherever it stands, so the bits are those of an update one by one; what is saved is all that is done for each
//! parameter around it. Leaves stay the owners of their values, which others read and write, and are locked meanwhile.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::erased::{ErasedRule, RuleOn, Taken};
use super::report::ParameterReports;
use super::{Float, Norm, ParameterState, StateView};
use crate::Result;
use crate::tensor::{DType, Gradient, Leaf, Locked};

/// Parameters of more elements go by themselves.
pub(super) const SMALL: usize = 1024;

/// Small parameters of one group and dtype.
#[derive(Debug)]
pub(super) struct Flat<T> {
    pub group: usize,
    /// In ascending order of the leaves' ids: the order in which they are locked.
    members: Vec<Member>,
    /// Numbers of each member, in its rule's order.
    scalars: Vec<f64>,
    scalar_names: &'static [(&'static str, f64)],
    arrays: Vec<FlatArray<T>>,
    used: Vec<bool>,
    /// All members have the same numbers and freshness; not, as long as nobody has looked.
    alike: bool,
    values: Vec<T>,
    /// [`Locked::changes`] of each member's leaf whose values are these.
    seen: Vec<Option<u64>>,
    gradients: Vec<T>,
    /// Of each member's gradient in the step under way.
    norms: Vec<f64>,
}

#[derive(Debug)]
struct Member {
    /// Its place in the optimizer.
    place: usize,
    leaf: Arc<Leaf>,
    elements: Range<usize>,
    /// Whether it takes part in the step under way.
    steps: bool,
}

impl Member {
    #[inline(always)]
    fn elements(&self) -> Range<usize> {
        self.elements.clone()
    }
}

#[derive(Debug)]
struct FlatArray<T> {
    name: &'static str,
    elements: Vec<T>,
    /// Of each member: no update has used it yet.
    fresh: Vec<bool>,
}

/// A small parameter that may become a member, with its state.
pub(super) struct Candidate {
    pub place: usize,
    pub leaf: Arc<Leaf>,
    pub state: ParameterState,
}

impl<T: Float> Flat<T> {
    /// Takes over the state of small parameters of one group, if it is what the rule keeps now and all arrays have their parameter's shape.
    pub(super) fn of(group: usize, rule: &dyn ErasedRule, candidates: &mut Vec<Candidate>) -> Option<Self> {
        let scalar_names = rule.scalars();
        candidates.sort_by_key(|c| c.leaf.id());
        let mut flat = Flat {
            group,
            members: Vec::with_capacity(candidates.len()),
            scalars: Vec::new(),
            scalar_names,
            arrays: Vec::new(),
            used: Vec::new(),
            alike: false,
            values: Vec::new(),
            seen: Vec::new(),
            gradients: Vec::new(),
            norms: vec![0.0; candidates.len()],
        };
        let names = rule.arrays(&[1]).into_iter().map(|array| array.name);
        let array = |name| FlatArray {
            name,
            elements: Vec::new(),
            fresh: Vec::new(),
        };
        flat.arrays.extend(names.map(array));
        let mut end = 0;
        for Candidate { place, leaf, state } in candidates.iter() {
            let len: usize = leaf.shape().iter().product();
            if state.names().any(|name| !flat.arrays.iter().any(|a| a.name == name)) {
                return None; // from options before: the rule may come back to it
            }
            for (name, _) in scalar_names {
                flat.scalars.push(state.scalar(name)?);
            }
            for array in &mut flat.arrays {
                let (elements, fresh) = state.elements::<T>(array.name)?;
                if elements.len() != len {
                    return None;
                }
                array.elements.extend_from_slice(elements);
                array.fresh.push(fresh);
            }
            flat.used.push(state.is_used());
            flat.members.push(Member {
                place: *place,
                leaf: Arc::clone(leaf),
                elements: end..end + len,
                steps: false,
            });
            flat.seen.push(None);
            end += len;
        }
        (flat.values, flat.gradients) = (vec![T::ZERO; end], vec![T::ZERO; end]);
        candidates.clear();
        Some(flat)
    }

    /// Whether it still has what a rule keeps under its options.
    pub(super) fn fits(&self, rule: &dyn ErasedRule) -> bool {
        let arrays = rule.arrays(&[1]);
        rule.is_elementwise()
            && rule.form(false).is_ok()
            && arrays.len() == self.arrays.len()
            && arrays.iter().zip(&self.arrays).all(|(new, old)| new.name == old.name)
            && rule.scalars() == self.scalar_names
    }

    /// The place of each member in the optimizer, with its state.
    pub(super) fn states(&self) -> impl Iterator<Item = (usize, ParameterState)> + '_ {
        (0..self.members.len()).filter_map(|at| Some((self.members[at].place, self.state(at)?)))
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// The members' places in the optimizer.
    pub(super) fn places(&self) -> impl Iterator<Item = usize> + '_ {
        self.members.iter().map(|member| member.place)
    }

    /// The state of a member.
    pub(super) fn state(&self, at: usize) -> Option<ParameterState> {
        let Member { elements, leaf, .. } = &self.members[at];
        let numbers = self.scalar_names.iter().zip(&self.scalars[self.numbers(at)]);
        let arrays = self.arrays.iter().map(|a| (a.name, &a.elements[elements.clone()], a.fresh[at]));
        ParameterState::of_elements(
            numbers.map(|((name, _), &value)| (*name, value)),
            arrays,
            leaf.shape(),
            self.used[at],
        )
    }

    /// Where a parameter is among the members.
    pub(super) fn position(&self, place: usize) -> Option<usize> {
        self.members.iter().position(|member| member.place == place)
    }

    fn numbers(&self, at: usize) -> Range<usize> {
        let count = self.scalar_names.len();
        at * count..(at + 1) * count
    }

    /// Takes the gradient of each member that has one and isn't frozen. `false` if one isn't dense, contiguous and of its parameter's kind: then they go one by one.
    pub(super) fn take<'g>(&mut self, mut gradient: impl FnMut(usize, &Leaf) -> Option<&'g Gradient>) -> bool {
        let Self { members, gradients, .. } = self;
        members.iter_mut().all(|member| {
            let gradient = gradient(member.place, &member.leaf).filter(|_| member.leaf.requires_grad());
            member.steps = gradient.is_some();
            match gradient {
                None => true,
                Some(Gradient::Dense(data)) if is_same(data.shape(), member.leaf.shape()) => {
                    let found = T::peek(data).ok().and_then(|array| array.as_slice());
                    found.map(|g| gradients[member.elements()].copy_from_slice(g)).is_some()
                }
                Some(_) => false,
            }
        })
    }

    /// Updates the members whose gradients were taken, and reports on all, each at its place.
    ///
    /// # Errors
    /// Inside, the text of a panic in the rule, and the place of the first parameter that it was to update; no value is changed then.
    pub(super) fn step(
        &mut self,
        update: &RuleOn<'_, T>,
        norm: Norm,
        reports: &mut ParameterReports,
    ) -> Result<Result<(), (usize, String)>> {
        let Self {
            members,
            scalars,
            scalar_names,
            arrays,
            used,
            alike,
            values,
            seen,
            gradients,
            norms,
            ..
        } = self;
        let count = scalar_names.len();
        let mut locked: SmallVec<[Option<Locked<'_>>; 8]> = SmallVec::with_capacity(members.len());
        norm.of_each(gradients, members.iter().map(Member::elements), norms);
        for ((member, seen), &norm) in members.iter().zip(seen.iter_mut()).zip(norms.iter()) {
            let lock = member.leaf.lock();
            if member.steps {
                if *seen != Some(lock.changes()) {
                    lock.read(&mut values[member.elements()])?;
                }
                *seen = None; // until they are updated here and there
                reports.set_norm(member.place, Some(norm));
                locked.push(Some(lock));
            } else {
                reports.leave(member.place, lock.version());
                locked.push(None);
            }
        }
        let mut start = 0;
        while start < members.len() {
            let same_state = |at: usize| {
                let (first, here) = (start * count..(start + 1) * count, at * count..(at + 1) * count);
                let bits = |range: Range<usize>| scalars[range].iter().map(|x| x.to_bits());
                bits(first).eq(bits(here)) && arrays.iter().all(|a| a.fresh[at] == a.fresh[start])
            };
            let goes_along = |at: usize| members[at].steps == members[start].steps && (*alike || same_state(at));
            let end = (start + 1..members.len()).find(|&at| !goes_along(at)).unwrap_or(members.len());
            if members[start].steps {
                let elements = members[start].elements.start..members[end - 1].elements.end;
                let shape = [elements.len()];
                let numbers = scalar_names
                    .iter()
                    .zip(&scalars[start * count..])
                    .map(|((name, _), &value)| (*name, value));
                let slices = arrays
                    .iter_mut()
                    .map(|a| (a.name, &mut a.elements[elements.clone()], a.fresh[start]));
                let mut view = StateView::of(&shape, numbers, slices);
                let (p, g) = (&mut values[elements.clone()], &gradients[elements.clone()]);
                if let Err(text) = update(p, Taken::Dense(g), &mut view) {
                    return Ok(Err((members[start].place, text)));
                }
                let after = view.after();
                drop(view);
                used[start..end].fill(true);
                for (number, &value) in after.scalars.iter().enumerate() {
                    let each = scalars[start * count..end * count].iter_mut().skip(number).step_by(count);
                    each.for_each(|scalar| *scalar = value);
                }
                for (array, &fresh) in arrays.iter_mut().zip(&after.fresh) {
                    array.fresh[start..end].fill(fresh);
                }
            }
            *alike = (start, end) == (0, members.len());
            start = end;
        }
        for ((member, seen), lock) in members.iter().zip(seen).zip(locked) {
            if let Some(mut lock) = lock {
                let done = lock.write(&values[member.elements()])?;
                *seen = Some(lock.changes());
                reports.update(member.place, done.version, done.in_place);
            }
        }
        Ok(Ok(()))
    }
}

/// As `==`, which for so few calls another function.
fn is_same(one: &[usize], other: &[usize]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| a == b)
}

/// Small parameters of one group.
#[derive(Debug)]
pub(super) enum FlatGroup {
    F32(Flat<f32>),
    F64(Flat<f64>),
}

/// Does the same for either dtype.
macro_rules! each {
    ($flat:expr, $inner:ident => $body:expr) => {
        match $flat {
            FlatGroup::F32($inner) => $body,
            FlatGroup::F64($inner) => $body,
        }
    };
}
pub(super) use each;

impl FlatGroup {
    pub(super) fn of(group: usize, dtype: DType, rule: &dyn ErasedRule, candidates: &mut Vec<Candidate>) -> Option<Self> {
        match dtype {
            DType::F32 => Flat::of(group, rule, candidates).map(FlatGroup::F32),
            _ => Flat::of(group, rule, candidates).map(FlatGroup::F64),
        }
    }
}

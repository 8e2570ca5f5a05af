//! What an optimizer has gathered since its last update, among the names of its state.

use crate::optim::ParameterState;
use crate::tensor::{Data, Element, Gradient, RowSparse, Tensor};
use crate::{ErrorKind, Result};

const BACKWARDS: &str = "gathered.backwards";
const DENSE: &str = "gathered.gradient";
const ROWS: &str = "gathered.rows";
const VALUES: &str = "gathered.values";

fn named<T: Clone>((name, value): (&str, &T)) -> (String, T) {
    (name.to_owned(), value.clone())
}

/// A state, and the sum of the gradients of so many backwards.
pub(super) fn join(state: &ParameterState, backwards: u32, gradient: Option<&Gradient>) -> ParameterState {
    let mut scalars: Vec<_> = state.scalars().map(|(name, value)| (name.to_owned(), value)).collect();
    let mut arrays: Vec<_> = state.arrays().map(named).collect();
    scalars.push((BACKWARDS.into(), backwards.into()));
    match gradient {
        Some(Gradient::Dense(data)) => arrays.push((DENSE.into(), data.clone())),
        Some(Gradient::Sparse(sparse)) => {
            let rows = Tensor::from_array(ndarray::Array1::from_vec(sparse.rows.clone())).data();
            arrays.extend([(ROWS.into(), rows), (VALUES.into(), sparse.values.clone())]);
        }
        None => {}
    }
    ParameterState::from_parts(scalars, arrays)
}

/// The state (if there is any), and what was gathered, for a parameter of this shape.
pub(super) fn split(joined: ParameterState, shape: &[usize]) -> Result<(Option<ParameterState>, u32, Option<Gradient>)> {
    let backwards = joined.scalar(BACKWARDS).unwrap_or(0.0) as u32;
    let gradient = match (joined.array(DENSE), joined.array(ROWS), joined.array(VALUES)) {
        (Some(data), None, None) => Some(Gradient::Dense(data.clone())),
        (None, Some(rows), Some(values)) => {
            let rows = i64::peek(rows)?.iter().copied().collect();
            Some(Gradient::Sparse(RowSparse::new(rows, values.clone(), shape.to_vec())?))
        }
        (None, None, None) => None,
        _ => {
            let what = "a gathered gradient that is neither dense nor sparse".into();
            return Err(ErrorKind::Argument {
                op: "restore".into(),
                what,
            }
            .into());
        }
    };
    let scalars = joined.scalars().filter(|(name, _)| *name != BACKWARDS);
    let arrays = joined
        .arrays()
        .filter(|(name, _): &(&str, &Data)| ![DENSE, ROWS, VALUES].contains(name));
    let scalars = scalars.map(|(name, value)| (name.to_owned(), value)).collect();
    let state = ParameterState::from_parts(scalars, arrays.map(named).collect());
    Ok(((!state.is_empty()).then_some(state), backwards, gradient))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(values: &[f64], shape: &[usize]) -> Data {
        Tensor::from_vec(values.to_vec(), shape).unwrap().data()
    }

    #[test]
    fn what_was_gathered_comes_back() {
        let state = ParameterState::from_parts(vec![("step".into(), 3.0)], vec![("buffer".into(), data(&[1.0], &[1]))]);
        let (back, backwards, gradient) = split(join(&state, 2, None), &[1]).unwrap();
        let back = back.unwrap();
        assert_eq!(
            (back.scalar("step"), back.scalars().count(), back.arrays().count()),
            (Some(3.0), 1, 1)
        );
        assert!((backwards, gradient.is_none()) == (2, true));

        let sparse = Gradient::Sparse(RowSparse::new(vec![2, 0, 2], data(&[1.0, 2.0, 3.0], &[3, 1]), vec![4, 1]).unwrap());
        for gradient in [sparse, Gradient::Dense(data(&[1.0, 2.0], &[2]))] {
            let joined = join(&ParameterState::default(), 1, Some(&gradient));
            let (state, _, back) = split(joined, gradient.shape()).unwrap();
            assert!(state.is_none());
            let (back, dense) = (back.unwrap(), gradient.to_dense().unwrap());
            assert_eq!(back.is_sparse(), gradient.is_sparse());
            assert_eq!(back.to_dense().unwrap().view::<f64>().unwrap(), dense.view::<f64>().unwrap());
        }
        let half = ParameterState::from_parts(vec![], vec![(ROWS.into(), data(&[1.0], &[1]))]);
        assert!(split(half, &[1]).is_err());
    }
}

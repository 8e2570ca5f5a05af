//! Arrays that are split by rows: which rows of a checkpoint's parts a part here is made of.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::manifest::{Manifest, Parameter, State};
use crate::Result;
use crate::dist::{Rows, numbered};
use crate::optim::ParameterState;
use crate::tensor::{Data, Tensor};

/// A part of an array, in the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartOf {
    pub parameter: String,
    /// The first row, and the one after the last.
    pub rows: (usize, usize),
}

/// Rows of something that belongs to a parameter.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Cut {
    pub rows: Range<usize>,
    /// Shape of the parameter there.
    pub shape: Vec<usize>,
}

/// Where something that is restored comes from: a parameter, or its state.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Source<F> {
    /// Its name there.
    pub name: String,
    pub facts: F,
    /// If only rows of it are wanted.
    pub cut: Option<Cut>,
}

/// The states of an optimizer here, and what each is made of.
pub(super) type States = BTreeMap<String, Vec<Source<State>>>;

/// The arrays whose parts are among these parameters, each with its parts in the order of their rows.
pub(super) fn arrays(parameters: &BTreeMap<String, Parameter>) -> BTreeMap<String, Vec<PartOf>> {
    let mut arrays: BTreeMap<String, Vec<PartOf>> = BTreeMap::new();
    for (name, facts) in parameters {
        if let Some(Rows { array, rows, .. }) = Rows::parse(name).filter(|_| numbered(name).1.is_empty())
            && facts.shape.first() == Some(&rows.len())
            && !parameters.contains_key(array)
        {
            let (parameter, rows) = (name.clone(), (rows.start, rows.end));
            arrays.entry(array.to_owned()).or_default().push(PartOf { parameter, rows });
        }
    }
    arrays.values_mut().for_each(|parts| parts.sort_by_key(|part| part.rows));
    arrays
}

/// Two names of the same rows of an array, if there are such.
pub(super) fn overlap<'a>(names: impl Iterator<Item = &'a String>) -> Option<(&'a str, &'a str)> {
    let mut arrays: BTreeMap<&str, Vec<(usize, usize, &str)>> = BTreeMap::new();
    for name in names {
        if let Some(Rows { array, rows, .. }) = Rows::parse(name).filter(|rows| !rows.rows.is_empty() && numbered(name).1.is_empty()) {
            arrays.entry(array).or_default().push((rows.start, rows.end, name));
        }
    }
    arrays.values_mut().find_map(|parts| {
        parts.sort_unstable();
        let mut pairs = parts.windows(2);
        pairs.find_map(|pair| (pair[1].0 < pair[0].1).then_some((pair[0].2, pair[1].2)))
    })
}

/// Whether it is split as [`arrays`] says, for one that was read.
pub(super) fn is_sound(manifest: &Manifest) -> bool {
    let fits = |part: &PartOf| {
        let facts = manifest.parameters.get(&part.parameter);
        part.rows.0 <= part.rows.1 && facts.is_some_and(|facts| facts.shape.first() == Some(&(part.rows.1 - part.rows.0)))
    };
    let apart = |parts: &[PartOf]| parts.windows(2).all(|pair| pair[0].rows.1 <= pair[1].rows.0);
    manifest.arrays.values().all(|parts| parts.iter().all(fits) && apart(parts))
}

impl Manifest {
    /// What the parameter or state of this name here is made of: that of the same name, or rows of others. Which rows of which parameter, or why not.
    fn cuts(&self, slot: &str) -> Result<Vec<(String, Option<Cut>)>, String> {
        let (name, number) = numbered(slot);
        let has = |name: &str| self.parameters.contains_key(name);
        if has(slot) || has(name) {
            return Ok(vec![(slot.to_owned(), None)]);
        }
        let parsed = Rows::parse(name);
        let array = parsed.as_ref().map_or(name, |parsed| parsed.array);
        let parts: Vec<(&str, Range<usize>)> = match (self.arrays.get(array), self.parameters.get(array)) {
            (Some(parts), _) => parts
                .iter()
                .map(|part| (part.parameter.as_str(), part.rows.0..part.rows.1))
                .collect(),
            (None, Some(facts)) => vec![(array, 0..facts.shape.first().copied().unwrap_or(0))],
            (None, None) => vec![],
        };
        let rows = parsed.map_or(0..parts.last().map_or(0, |(_, last)| last.end), |parsed| parsed.rows);
        let (mut cuts, mut at) = (Vec::new(), rows.start);
        for (part, has) in parts {
            let (start, end) = (has.start.max(rows.start), has.end.min(rows.end));
            if start < end && start == at {
                let shape = self.parameters.get(part).map_or(vec![], |facts| facts.shape.clone());
                let rows = start - has.start..end - has.start;
                cuts.push((format!("{part}{number}"), Some(Cut { rows, shape })));
                at = end;
            }
        }
        match at == rows.end && !cuts.is_empty() {
            true => Ok(cuts),
            false => Err(format!("it lacks the rows from {at} to {} of `{array}`", rows.end)),
        }
    }

    /// The sources of a parameter here.
    ///
    /// # Errors
    /// Which rows aren't there.
    pub(super) fn parameter_sources(&self, name: &str) -> Result<Vec<Source<Parameter>>, String> {
        let source = |(name, cut): (String, _)| {
            let facts = self.parameters.get(&name)?.clone();
            Some(Source { name, facts, cut })
        };
        Ok(self.cuts(name)?.into_iter().filter_map(source).collect())
    }

    /// The sources of a state here; none if it was never updated.
    ///
    /// # Errors
    /// Which rows aren't there, or are without a state that others have.
    pub(super) fn state_sources(&self, states: &BTreeMap<String, State>, slot: &str) -> Result<Vec<Source<State>>, String> {
        let cuts = self.cuts(slot)?;
        let parts = cuts.len();
        let source = |(name, cut): (String, _)| {
            let facts = states.get(&name)?.clone();
            Some(Source { name, facts, cut })
        };
        let sources: Vec<_> = cuts.into_iter().filter_map(source).collect();
        match sources.len() == parts || sources.is_empty() {
            true => Ok(sources),
            false => Err(format!(
                "some of the rows of `{slot}` were updated and others never; split the array as it was"
            )),
        }
    }

    /// What a parameter is called when its rows don't matter.
    pub(super) fn array_of<'a>(&self, name: &'a str) -> &'a str {
        match Rows::parse(name) {
            Some(rows) if self.arrays.contains_key(rows.array) => rows.array,
            Some(rows) if self.parameters.contains_key(rows.array) && !self.parameters.contains_key(name) => rows.array,
            _ => name,
        }
    }

    /// Whether arrays that are split otherwise here have as many rows there.
    ///
    /// # Errors
    /// The first that hasn't, and how many it has.
    pub(super) fn check_rows<'a>(&self, here: impl Iterator<Item = &'a str>) -> Result<(), String> {
        let mut arrays: BTreeMap<&str, usize> = BTreeMap::new();
        let split = here.filter(|name| self.array_of(name) != *name).filter_map(Rows::parse);
        split.for_each(|parsed| *arrays.entry(parsed.array).or_default() += parsed.rows.len());
        for (array, rows) in arrays {
            let there = match (self.arrays.get(array), self.parameters.get(array)) {
                (Some(parts), _) => parts.iter().map(|part| part.rows.1 - part.rows.0).sum(),
                (None, Some(facts)) => facts.shape.first().copied().unwrap_or(0),
                (None, None) => continue,
            };
            if there != rows {
                return Err(format!("`{array}` has {there} rows in it, and {rows} here"));
            }
        }
        Ok(())
    }
}

/// Rows from several places as one array.
pub(super) fn joined(mut data: Vec<Data>) -> Result<Data> {
    match data.len() {
        1 => Ok(data.remove(0)),
        _ => Ok(Tensor::concat(&data.into_iter().map(Tensor::from_data).collect::<Vec<_>>(), 0)?.data()),
    }
}

/// What is known of parameters whose rows are joined.
///
/// # Errors
/// What differs.
pub(super) fn same_facts(sources: Vec<Source<Parameter>>) -> Result<Parameter, String> {
    let mut sources = sources.into_iter();
    let Some(Source { name, facts: mut all, .. }) = sources.next() else {
        return Err("nothing to restore from".into());
    };
    for Source { name: other, facts, .. } in sources {
        if (facts.requires_grad, facts.is_leaf) != (all.requires_grad, all.is_leaf) {
            return Err(format!(
                "one of `{name}` and `{other}` is a parameter, and the other frozen or a constant"
            ));
        }
        all.version = all.version.max(facts.version);
    }
    Ok(all)
}

/// The state of rows from several places.
///
/// # Errors
/// What differs.
pub(super) fn merged(mut states: Vec<(String, ParameterState)>) -> Result<ParameterState, String> {
    if states.len() == 1 {
        return Ok(states.remove(0).1);
    }
    let Some((first, state)) = states.first() else {
        return Ok(ParameterState::default());
    };
    let bits = |state: &ParameterState| {
        state
            .scalars()
            .map(|(name, value)| (name.to_owned(), value.to_bits()))
            .collect::<BTreeMap<_, _>>()
    };
    let names = |state: &ParameterState| state.arrays().map(|(name, _)| name.to_owned()).collect::<BTreeSet<_>>();
    for (other, found) in &states {
        if bits(found) != bits(state) || names(found) != names(state) {
            let told = |state: &ParameterState| (state.scalars().map(|(n, v)| (n.to_owned(), v)).collect::<Vec<_>>(), names(state));
            return Err(format!(
                "the state of `{first}` has {:?}, and that of `{other}` {:?}: they weren't updated together; split the array as it was",
                told(state),
                told(found)
            ));
        }
    }
    let array = |name: &str| {
        let parts = states.iter().filter_map(|(_, state)| state.array(name).cloned()).collect();
        let joined = joined(parts).map_err(|e| format!("`{name}` of `{first}` and others: {e}"))?;
        Ok((name.to_owned(), joined))
    };
    let arrays = state.arrays().map(|(name, _)| array(name)).collect::<Result<_, String>>()?;
    let scalars = state.scalars().map(|(name, value)| (name.to_owned(), value)).collect();
    Ok(ParameterState::from_parts(scalars, arrays))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A manifest of parameters with so many rows of two numbers, as older versions wrote it.
    fn manifest(parameters: &[(&str, usize)]) -> Manifest {
        let facts =
            |rows: usize| json!({"shard": 0, "dtype": "F64", "shape": [rows, 2], "version": 1, "requires_grad": true, "is_leaf": true});
        let parameters: BTreeMap<_, _> = parameters.iter().map(|(name, rows)| (*name, facts(*rows))).collect();
        let text = json!({"format": 1, "library": "0.1.0", "step": 1, "ranks": 1, "shards": [], "parameters": parameters, "optimizers": {}, "values": {}});
        serde_json::from_value(text).unwrap()
    }

    fn split(parameters: &[(&str, usize)]) -> Manifest {
        let mut manifest = manifest(parameters);
        manifest.arrays = arrays(&manifest.parameters);
        assert!(is_sound(&manifest));
        manifest
    }

    #[test]
    fn the_same_rows_have_one_name() {
        let found = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
            overlap(names.iter()).map(|(one, other)| (one.to_owned(), other.to_owned()))
        };
        assert_eq!(found(&["t[0:2]", "t[2:6]", "u[0:3]", "t[6:6]", "t[3:3]", "t", "t[1:x]"]), None);
        let pair = |one: &str, other: &str| Some((one.into(), other.into()));
        assert_eq!(found(&["t[0:10]", "u[0:1]", "t[0:5]"]), pair("t[0:5]", "t[0:10]"));
        assert_eq!(found(&["t[0:2]", "t[2:6]", "t[3:7]"]), pair("t[2:6]", "t[3:7]"));
        let mut manifest = split(&[("t[0:2]", 2), ("t[2:3]", 1)]);
        manifest.arrays.get_mut("t").unwrap()[1].rows = (1, 2);
        assert!(!is_sound(&manifest));
    }

    type Found = Vec<(String, Option<Range<usize>>)>;

    fn cuts(manifest: &Manifest, slot: &str) -> Result<Found, String> {
        let cuts = manifest.cuts(slot)?.into_iter();
        Ok(cuts.map(|(name, cut)| (name, cut.map(|cut| cut.rows))).collect())
    }

    #[test]
    fn rows_are_found_wherever_they_are() {
        let there = split(&[("w[0:5]", 5), ("w[5:6]", 1), ("w[6:9]", 3), ("b", 4)]);
        let of = |part: &str, rows| (part.to_owned(), Some(rows));
        assert_eq!(cuts(&there, "w[0:5]#1").unwrap(), [("w[0:5]#1".into(), None)]);
        assert_eq!(
            cuts(&there, "w[2:8]#1").unwrap(),
            [of("w[0:5]#1", 2..5), of("w[5:6]#1", 0..1), of("w[6:9]#1", 0..2)]
        );
        assert_eq!(cuts(&there, "w[7:8]").unwrap(), [of("w[6:9]", 1..2)]);
        assert_eq!(cuts(&there, "w").unwrap().len(), 3);
        assert_eq!(cuts(&there, "b[1:3]").unwrap(), [of("b", 1..3)]);
        assert_eq!(cuts(&there, "b#2").unwrap(), [("b#2".into(), None)]);
        for (slot, text) in [
            ("w[8:10]", "from 9 to 10"),
            ("b[4:5]", "from 4 to 5"),
            ("x[0:1]", "from 0 to 1"),
            ("x", "of `x`"),
        ] {
            assert!(cuts(&there, slot).unwrap_err().contains(text), "{slot}");
        }
        assert!(there.check_rows(["w[0:4]", "w[4:9]", "b"].into_iter()).is_ok());
        assert!(
            there
                .check_rows(["w[0:4]", "w[5:9]"].into_iter())
                .unwrap_err()
                .contains("9 rows in it, and 8 here")
        );
        // A gap.
        assert!(
            cuts(&split(&[("w[0:5]", 5), ("w[6:9]", 3)]), "w[4:7]")
                .unwrap_err()
                .contains("from 5 to 7")
        );
    }

    #[test]
    fn names_that_only_look_like_rows_are_names() {
        let plain = split(&[("w[0:5]", 4), ("w", 5), ("w[5:9]", 4), ("v[0:1]#0", 1)]);
        assert!(plain.arrays.is_empty());
        assert_eq!(plain.array_of("w[0:5]"), "w[0:5]");
        assert!(plain.check_rows(["w[0:5]", "w", "w[5:9]"].into_iter()).is_ok());
    }

    #[test]
    fn manifests_without_arrays_are_read_and_wrong_ones_refused() {
        let old = manifest(&[("w[0:5]", 5), ("w[5:9]", 4)]);
        assert!(old.arrays.is_empty() && is_sound(&old));
        assert_eq!(cuts(&old, "w[0:5]").unwrap(), [("w[0:5]".into(), None)]);
        assert!(cuts(&old, "w[0:6]").is_err());
        for (parameter, rows) in [("w[0:5]", (0, 4)), ("w[0:5]", (5, 0)), ("other", (0, 5))] {
            let mut wrong = old.clone();
            let parameter = parameter.to_owned();
            wrong.arrays.insert("w".into(), vec![PartOf { parameter, rows }]);
            assert!(!is_sound(&wrong));
        }
    }
}

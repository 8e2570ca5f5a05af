//! What a step did to parameters: a column for each thing that is said, since rows of them are a large part of a step on small parameters.

use std::borrow::Cow;

use bytemuck::{cast_slice, cast_slice_mut};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_bytes::Bytes;
use smallvec::SmallVec;

use super::Norm;

/// What a step did to one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParameterReport {
    /// Whether there was a gradient, and so an update.
    pub updated: bool,
    /// Rows that a sparse gradient touched; `None` for a dense one.
    pub rows: Option<usize>,
    /// Norm of its gradient before any clipping: of the kind that the step clips by, else the 2-norm. `None` without a gradient.
    pub norm: Option<f64>,
    /// The parameter's version after the step.
    pub version: u64,
    /// Whether the update wrote over the old values, because nobody else held them.
    pub in_place: bool,
}

impl ParameterReport {
    /// That nothing was done, of a parameter that was never updated.
    pub(super) const NOTHING: Self = Self {
        updated: false,
        rows: None,
        norm: None,
        version: 0,
        in_place: false,
    };
}

const UPDATED: u8 = 1;
const IN_PLACE: u8 = 2;
const HAS_NORM: u8 = 4;
const HAS_ROWS: u8 = 8;

/// What a step did to each of some parameters, in their order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ParameterReports {
    flags: SmallVec<[u8; 16]>,
    /// 0 where there is none.
    norms: SmallVec<[f64; 2]>,
    versions: SmallVec<[u64; 2]>,
    /// 0 where there are none; empty if no parameter has any.
    rows: Vec<usize>,
}

impl ParameterReports {
    /// That nothing was done to so many parameters, which were never updated.
    pub(super) fn nothing(len: usize) -> Self {
        ParameterReports {
            flags: zeros(len),
            norms: zeros(len),
            versions: zeros(len),
            rows: Vec::new(),
        }
    }

    /// Number of parameters.
    pub fn len(&self) -> usize {
        self.flags.len()
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.flags.is_empty()
    }

    /// What happened to the parameter at a place; `None` if there are fewer.
    pub fn get(&self, place: usize) -> Option<ParameterReport> {
        let flags = *self.flags.get(place)?;
        let has = |flag: u8| flags & flag != 0;
        Some(ParameterReport {
            updated: has(UPDATED),
            rows: self.rows.get(place).copied().filter(|_| has(HAS_ROWS)),
            norm: has(HAS_NORM).then(|| self.norms[place]),
            version: self.versions[place],
            in_place: has(IN_PLACE),
        })
    }

    /// What happened to each.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = ParameterReport> + '_ {
        (0..self.len()).map(|place| self.get(place).unwrap_or(ParameterReport::NOTHING))
    }

    /// The version of each after the step.
    pub fn versions(&self) -> &[u64] {
        &self.versions
    }

    /// The lowest and the highest version after the step.
    pub fn version_range(&self) -> Option<(u64, u64)> {
        match same(&self.versions) {
            Some(&one) => Some((one, one)),
            None => self.versions.iter().copied().min().zip(self.versions.iter().copied().max()),
        }
    }

    /// Number of parameters that were updated.
    pub fn updated(&self) -> usize {
        self.count(UPDATED)
    }

    /// Number of parameters that were updated in place.
    pub fn in_place(&self) -> usize {
        self.count(UPDATED | IN_PLACE)
    }

    /// Number of parameters without a gradient (or frozen), left as they were.
    pub fn without_gradient(&self) -> usize {
        self.len() - self.count(HAS_NORM)
    }

    /// Number of rows that sparse gradients touched.
    pub fn rows(&self) -> usize {
        self.rows.iter().fold(0, |sum, &rows| sum.saturating_add(rows)) // as another rank says
    }

    /// Norm of all gradients together, before any clipping; `kind` is that of each.
    pub fn norm(&self, kind: Norm) -> f64 {
        kind.of_slice(&self.present_norms())
    }

    /// Number of parameters with all of these flags.
    fn count(&self, flags: u8) -> usize {
        let has = |f: u8| f & flags == flags;
        match same(&self.flags) {
            Some(&all) => usize::from(has(all)) * self.len(),
            None => self.flags.iter().filter(|&&f| has(f)).count(),
        }
    }

    /// The norms of those that have one.
    fn present_norms(&self) -> Cow<'_, [f64]> {
        if self.without_gradient() == 0 {
            return Cow::Borrowed(&self.norms);
        }
        Cow::Owned(self.iter().filter_map(|report| report.norm).collect())
    }

    /// Notes that a parameter was left alone.
    #[inline]
    pub(super) fn leave(&mut self, place: usize, version: u64) {
        self.versions[place] = version;
    }

    /// Notes the norm of the gradient of a parameter.
    #[inline]
    pub(super) fn set_norm(&mut self, place: usize, norm: Option<f64>) {
        self.flags[place] = (self.flags[place] & !HAS_NORM) | flag(norm.is_some(), HAS_NORM);
        self.norms[place] = norm.unwrap_or(0.0);
    }

    /// Notes the update of a parameter by a dense gradient.
    #[inline]
    pub(super) fn update(&mut self, place: usize, version: u64, in_place: bool) {
        self.flags[place] |= UPDATED | flag(in_place, IN_PLACE);
        self.versions[place] = version;
    }

    /// Notes all that happened to a parameter.
    pub(crate) fn set(&mut self, place: usize, report: ParameterReport) {
        self.flags[place] = flag(report.updated, UPDATED) | flag(report.in_place, IN_PLACE) | flag(report.rows.is_some(), HAS_ROWS);
        self.set_norm(place, report.norm);
        self.versions[place] = report.version;
        if let Some(rows) = report.rows {
            self.rows.resize(self.len(), 0);
            self.rows[place] = rows;
        }
    }
}

/// The first of some things that are all the same, as those of most steps are. (Compared as memory, which is quick.)
fn same<T: Copy + PartialEq>(all: &[T]) -> Option<&T> {
    let (first, others) = all.split_first()?;
    (*others == all[..others.len()]).then_some(first)
}

/// So many zeros. (They are there at once: a push each takes longer.)
fn zeros<T: Copy + Default, const N: usize>(len: usize) -> SmallVec<[T; N]>
where
    [T; N]: smallvec::Array<Item = T>,
{
    match len <= N {
        true => SmallVec::from_buf_and_len([T::default(); N], len),
        false => vec![T::default(); len].into(),
    }
}

fn flag(set: bool, flag: u8) -> u8 {
    if set { flag } else { 0 }
}

impl FromIterator<ParameterReport> for ParameterReports {
    fn from_iter<I: IntoIterator<Item = ParameterReport>>(reports: I) -> Self {
        let each: Vec<ParameterReport> = reports.into_iter().collect();
        let mut reports = Self::nothing(each.len());
        each.into_iter().enumerate().for_each(|(place, report)| reports.set(place, report));
        reports
    }
}

/// Flags; norms and numbers of rows of those that have one; versions, or one, if all have the same.
type Columns<'a> = (&'a Bytes, &'a Bytes, &'a Bytes, Vec<usize>);

impl Serialize for ParameterReports {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let norms = self.present_norms();
        let versions = same(&self.versions).map_or(&self.versions[..], std::slice::from_ref);
        let rows = self.rows.iter().zip(&self.flags).filter(|(_, flags)| **flags & HAS_ROWS != 0);
        let columns: Columns<'_> = (
            Bytes::new(&self.flags),
            Bytes::new(cast_slice(&norms)),
            Bytes::new(cast_slice(versions)),
            rows.map(|(&rows, _)| rows).collect(),
        );
        columns.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ParameterReports {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (flags, norms, versions, rows) = Columns::deserialize(deserializer)?;
        let len = flags.len();
        let mut reports = ParameterReports {
            flags: SmallVec::from_slice(flags),
            ..Self::default()
        };
        let (with_norms, with_rows) = (reports.count(HAS_NORM), reports.count(HAS_ROWS));
        let one_version = versions.len() == size_of::<u64>() && len > 0;
        if flags.iter().any(|flags| flags & !(UPDATED | IN_PLACE | HAS_NORM | HAS_ROWS) != 0)
            || norms.len() != with_norms * size_of::<f64>()
            || rows.len() != with_rows
            || !(one_version || versions.len() == len * size_of::<u64>())
        {
            return Err(D::Error::custom("columns of a report that don't fit together"));
        }
        // Bytes in a message lie anywhere.
        let number = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes);
        (reports.versions, reports.norms) = (zeros(len), zeros(len));
        match versions.as_chunks().0 {
            [one] => reports.versions.fill(number(one)),
            each => reports.versions.iter_mut().zip(each).for_each(|(to, from)| *to = number(from)),
        }
        if with_norms == len {
            cast_slice_mut(&mut reports.norms).copy_from_slice(norms);
        } else {
            let places = (0..len).filter(|&place| flags[place] & HAS_NORM != 0);
            for (place, norm) in places.zip(norms.as_chunks().0) {
                reports.norms[place] = f64::from_ne_bytes(*norm);
            }
        }
        if with_rows > 0 {
            reports.rows = vec![0; len];
            let places = (0..len).filter(|&place| flags[place] & HAS_ROWS != 0);
            places.zip(rows).for_each(|(place, rows)| reports.rows[place] = rows);
        }
        Ok(reports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(n: u64) -> ParameterReport {
        ParameterReport {
            updated: n.is_multiple_of(2),
            rows: n.is_multiple_of(3).then_some(n as usize),
            norm: (!n.is_multiple_of(5)).then_some(n as f64 * 0.1),
            version: n / 4,
            in_place: n.is_multiple_of(7),
        }
    }

    #[test]
    fn reports_come_back() {
        for count in [0, 1, 2, 3, 100] {
            let rows: Vec<ParameterReport> = (0..count).map(report).collect();
            let sent: ParameterReports = rows.iter().copied().collect();
            assert_eq!(sent.iter().collect::<Vec<_>>(), rows);
            let bytes = postcard::to_stdvec(&sent).unwrap();
            assert_eq!(postcard::from_bytes::<ParameterReports>(&bytes).unwrap(), sent);
            for cut in 0..bytes.len() {
                assert!(
                    postcard::from_bytes::<ParameterReports>(&bytes[..cut]).is_err(),
                    "{count} reports cut to {cut}"
                );
            }
            for at in 0..bytes.len() {
                let mut bytes = bytes.clone();
                bytes[at] ^= 0x55;
                // No panic, whatever it is.
                drop(
                    postcard::from_bytes::<ParameterReports>(&bytes)
                        .map(|r| (r.rows(), r.version_range(), r.norm(Norm::Two), r.iter().count())),
                );
            }
        }
    }

    #[test]
    fn counts_are_those_of_the_rows() {
        let rows: Vec<ParameterReport> = (0..100).map(report).collect();
        let reports: ParameterReports = rows.iter().copied().collect();
        let count = |f: fn(&ParameterReport) -> bool| rows.iter().filter(|r| f(r)).count();
        assert_eq!(reports.updated(), count(|r| r.updated));
        assert_eq!(reports.in_place(), count(|r| r.updated && r.in_place));
        assert_eq!(reports.without_gradient(), count(|r| r.norm.is_none()));
        assert_eq!(reports.rows(), rows.iter().filter_map(|r| r.rows).sum::<usize>());
        let norms: Vec<f64> = rows.iter().filter_map(|r| r.norm).collect();
        assert_eq!(reports.norm(Norm::Two), Norm::Two.total(norms));
        assert_eq!(reports.get(100), None);
    }
}

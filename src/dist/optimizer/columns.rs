//! Reports of many parameters in a message: a column for each thing that is said, since rows of them are a large part of a step on small parameters.

use bytemuck::cast_slice;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_bytes::Bytes;
use smallvec::{SmallVec, smallvec};

use crate::optim::ParameterReport;

const UPDATED: u8 = 1;
const IN_PLACE: u8 = 2;
const HAS_NORM: u8 = 4;
const HAS_ROWS: u8 = 8;

/// Norms and numbers of rows of those that have one; one version, if all have the same.
#[derive(Serialize, Deserialize)]
struct Columns<'a> {
    #[serde(borrow)]
    flags: &'a Bytes,
    #[serde(borrow)]
    norms: &'a Bytes,
    #[serde(borrow)]
    versions: &'a Bytes,
    rows: Vec<usize>,
}

pub(super) fn serialize<S: Serializer>(reports: &[ParameterReport], serializer: S) -> Result<S::Ok, S::Error> {
    // Made at once and then filled: a push each takes longer.
    let mut flags: SmallVec<[u8; 64]> = smallvec![0; reports.len()];
    flags.iter_mut().zip(reports).for_each(|(flag, report)| *flag = flags_of(report));
    let mut norms: SmallVec<[f64; 8]> = smallvec![0.0; reports.len()];
    let mut count = 0;
    for norm in reports.iter().filter_map(|r| r.norm) {
        norms[count] = norm;
        count += 1;
    }
    norms.truncate(count);
    let one = reports
        .first()
        .is_some_and(|first| reports.iter().all(|r| r.version == first.version));
    let mut versions: SmallVec<[u64; 8]> = smallvec![0; if one { 1 } else { reports.len() }];
    versions
        .iter_mut()
        .zip(reports)
        .for_each(|(version, report)| *version = report.version);
    let columns = Columns {
        flags: Bytes::new(&flags),
        norms: Bytes::new(cast_slice(&norms)),
        versions: Bytes::new(cast_slice(&versions)),
        rows: reports.iter().filter_map(|r| r.rows).collect(),
    };
    columns.serialize(serializer)
}

fn flags_of(report: &ParameterReport) -> u8 {
    let flag = |set: bool, flag: u8| if set { flag } else { 0 };
    flag(report.updated, UPDATED)
        | flag(report.in_place, IN_PLACE)
        | flag(report.norm.is_some(), HAS_NORM)
        | flag(report.rows.is_some(), HAS_ROWS)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ParameterReport>, D::Error> {
    let Columns {
        flags,
        norms,
        versions,
        rows,
    } = Columns::deserialize(deserializer)?;
    if norms.len() % size_of::<f64>() != 0 || versions.len() % size_of::<u64>() != 0 {
        return Err(D::Error::custom("columns of a report that end within a number"));
    }
    // Bytes in a message lie anywhere.
    let (norms, versions) = (norms.as_chunks().0, versions.as_chunks().0);
    let (mut norms, mut rows) = (norms.iter().map(|&norm| f64::from_ne_bytes(norm)), rows.into_iter());
    let fits = |count: usize| versions.len() == count || (versions.len() == 1 && count > 0);
    let wanted = |flag: u8| flags.iter().filter(|&&f| f & flag != 0).count();
    if !fits(flags.len()) || norms.len() != wanted(HAS_NORM) || rows.len() != wanted(HAS_ROWS) {
        return Err(D::Error::custom("columns of a report that don't fit together"));
    }
    let report = |(at, &flag): (usize, &u8)| ParameterReport {
        updated: flag & UPDATED != 0,
        rows: if flag & HAS_ROWS != 0 { rows.next() } else { None },
        norm: if flag & HAS_NORM != 0 { norms.next() } else { None },
        version: versions
            .get(at)
            .or(versions.first())
            .map_or(0, |&version| u64::from_ne_bytes(version)),
        in_place: flag & IN_PLACE != 0,
    };
    Ok(flags.iter().enumerate().map(report).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sent(#[serde(with = "super")] Vec<ParameterReport>);

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
            let sent = Sent((0..count).map(report).collect());
            let bytes = postcard::to_stdvec(&sent).unwrap();
            assert_eq!(postcard::from_bytes::<Sent>(&bytes).unwrap(), sent);
            for cut in 0..bytes.len() {
                assert!(postcard::from_bytes::<Sent>(&bytes[..cut]).is_err(), "{count} reports cut to {cut}");
            }
            for at in 0..bytes.len() {
                let mut bytes = bytes.clone();
                bytes[at] ^= 0x55;
                drop(postcard::from_bytes::<Sent>(&bytes)); // no panic
            }
        }
    }
}

//! Names that someone may have meant.

/// Up to three of `known` that are near to `name`, nearest first.
pub(super) fn near<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let limit = name.len() / 4; // one slip in four letters; the common prefix makes that generous
    let mut near: Vec<(usize, &str)> = known.map(|k| (distance(name, k), k)).filter(|(d, _)| *d <= limit).collect();
    near.sort_unstable();
    near.into_iter().take(3).map(|(_, k)| k).collect()
}

/// Levenshtein's distance: the fewest insertions, deletions and replacements of a byte that make `b` of `a`.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replace = diagonal + usize::from(!x.eq_ignore_ascii_case(&y));
            diagonal = row[j + 1];
            row[j + 1] = replace.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_edits() {
        for (a, b, d) in [
            ("", "", 0),
            ("abc", "abc", 0),
            ("abc", "", 3),
            ("", "ab", 2),
            ("kitten", "sitting", 3),
            ("Tick", "tICK", 0),
        ] {
            assert_eq!(distance(a, b), d, "{a} {b}");
        }
    }

    #[test]
    fn nearest_comes_first() {
        let known = ["RANKGRAD_POOL_BYTES", "RANKGRAD_POOL_THREADS", "RANKGRAD_SPIN_US"];
        assert_eq!(near("RANKGRAD_POOL_BYTE", known.into_iter())[0], "RANKGRAD_POOL_BYTES");
        assert_eq!(near("RANKGRAD_SPIN", known.into_iter()), ["RANKGRAD_SPIN_US"]);
        assert!(near("RANKGRAD_COLOUR_OF_THE_SKY", known.into_iter()).is_empty());
    }
}

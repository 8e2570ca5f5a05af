//! Names of parameters that are rows of an array: `table[0:5]` are the first five of `table`.

use std::borrow::Cow;
use std::ops::Range;

/// The name of rows of an array.
pub(crate) fn name_of_rows(array: &str, rows: &Range<usize>) -> String {
    format!("{array}[{}:{}]", rows.start, rows.end)
}

/// What a name says of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rows<'a> {
    /// The array's name.
    pub array: &'a str,
    pub rows: Range<usize>,
    /// What follows: in a checkpoint, the number of an optimizer among several.
    suffix: &'a str,
}

/// A name, and the number `#N` behind it if there is one.
pub(crate) fn numbered(name: &str) -> (&str, &str) {
    match name.rsplit_once('#') {
        Some((front, number)) if number.parse::<usize>().is_ok() => name.split_at(front.len()),
        _ => (name, ""),
    }
}

impl<'a> Rows<'a> {
    /// None if the name is one of [`name_of_rows`] neither alone nor with a number behind it.
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        let (front, suffix) = numbered(name);
        let (array, rows) = front.strip_suffix(']')?.rsplit_once('[')?;
        let (start, end) = rows.split_once(':')?;
        let rows = start.parse().ok()?..end.parse().ok()?;
        // Only the one spelling.
        (name_of_rows(array, &rows) == front && rows.start <= rows.end).then_some(Rows { array, rows, suffix })
    }

    /// The name without the rows: what it is part of.
    pub(crate) fn whole(name: &str) -> Cow<'_, str> {
        match Rows::parse(name) {
            Some(rows) => Cow::Owned(format!("{}{}", rows.array, rows.suffix)),
            None => Cow::Borrowed(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_rows_are_told_from_others() {
        let parsed = Rows::parse("a.b[c][3:10]").unwrap();
        assert_eq!((parsed.array, parsed.rows, parsed.suffix), ("a.b[c]", 3..10, ""));
        assert_eq!(name_of_rows("a.b[c]", &(3..10)), "a.b[c][3:10]");
        assert_eq!(Rows::whole("table[0:5]#1"), "table#1");
        for name in [
            "table", "a[3]", "a[5:3]", "a[03:5]", "a[ 3:5]", "a[3:5] ", "a[3:]", "a[-1:5]", "3:5]", "a[0:5]#", "a[0:5]#x", "a#1", "",
        ] {
            assert_eq!(Rows::parse(name), None, "{name}");
            assert_eq!(Rows::whole(name), name);
        }
    }
}

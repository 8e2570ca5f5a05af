//! A file of cases: one JSON object a line.

use rankgrad::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A line as it was read: an id for reports, and its object, or why there is none.
pub struct Line {
    pub id: String,
    object: Result<Value>,
}

/// The lines of a file, empty ones left out.
pub fn lines(file: &str) -> Result<Vec<Line>> {
    // Bytes that are no text fail their line only.
    let bytes = std::fs::read(file).map_err(|error| Error::user(format!("{file}: {error}")))?;
    let lines = String::from_utf8_lossy(&bytes);
    let lines = lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    Ok(lines.map(|(number, line)| Line::read(number + 1, line)).collect())
}

impl Line {
    fn read(number: usize, line: &str) -> Self {
        let object = serde_json::from_str(line).map_err(not_a_case);
        let id = object.as_ref().ok().and_then(|object: &Value| object["id"].as_str());
        Line {
            id: id.map_or_else(|| format!("line {number}"), str::to_owned),
            object,
        }
    }

    /// The case on the line.
    pub fn case<T: DeserializeOwned>(self) -> Result<T> {
        serde_json::from_value(self.object?).map_err(not_a_case)
    }
}

fn not_a_case(error: serde_json::Error) -> Error {
    Error::user(format!("not a case: {error}"))
}

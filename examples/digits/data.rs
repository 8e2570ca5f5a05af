//! The digits: pixels and labels, split into training and test rows in file order.

use rankgrad::tensor::Tensor;
use rankgrad::{Error, Result};

/// 8x8 pixels a digit.
pub const PIXELS: usize = 64;
/// Ten digits.
pub const CLASSES: usize = 10;
/// Rows that are trained on; the others are for the test.
const TRAIN_ROWS: usize = 1437;
/// Pixels are integers from 0 to this.
const WHITE: f64 = 16.0;

/// Some rows of the data.
pub struct Rows {
    /// Pixels from 0 to 1, `[rows, 64]`, f64.
    pub pixels: Tensor,
    /// Labels 0 to 9, `[rows]`, i64.
    pub labels: Tensor,
}

impl Rows {
    fn new(rows: &[Vec<f64>]) -> Result<Self> {
        let pixels = rows.iter().flat_map(|row| row[..PIXELS].iter().map(|x| x / WHITE)).collect();
        let labels = rows.iter().map(|row| row[PIXELS] as i64).collect();
        Ok(Self {
            pixels: Tensor::from_vec(pixels, [rows.len(), PIXELS])?,
            labels: Tensor::from_vec(labels, [rows.len()])?,
        })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// The rows in their order, `size` at a time; the last batch may be smaller. They share the memory of these.
    pub fn batches(&self, size: usize) -> impl Iterator<Item = Result<Rows>> + '_ {
        (0..self.len()).step_by(size).map(move |start| {
            let (start, end) = (start as i64, self.len().min(start + size) as i64);
            Ok(Rows {
                pixels: self.pixels.slice(0, start, end, 1)?,
                labels: self.labels.slice(0, start, end, 1)?,
            })
        })
    }
}

/// Training and test rows.
pub struct Digits {
    /// The first 1,437 rows.
    pub train: Rows,
    /// The other 360 rows.
    pub test: Rows,
}

/// Reads the data, which is compiled in.
pub fn load() -> Result<Digits> {
    let rows: Vec<Vec<f64>> = include_str!("data/digits.csv")
        .lines()
        .enumerate()
        .map(row)
        .collect::<Result<_>>()?;
    let (train, test) = rows.split_at(TRAIN_ROWS);
    Ok(Digits {
        train: Rows::new(train)?,
        test: Rows::new(test)?,
    })
}

fn row((line, text): (usize, &str)) -> Result<Vec<f64>> {
    let row: Option<Vec<f64>> = text.split(',').map(|x| x.trim().parse().ok()).collect();
    row.filter(|row| row.len() == PIXELS + 1)
        .ok_or_else(|| Error::user(format!("digits.csv, line {}: not 65 numbers", line + 1)))
}

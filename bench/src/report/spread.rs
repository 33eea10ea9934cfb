//! Median and range of repeated measurements.

use serde::{Deserialize, Serialize};

/// Median and range of several numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Median of the numbers.
    pub median: f64,
    /// Smallest number.
    pub min: f64,
    /// Largest number.
    pub max: f64,
}

impl Spread {
    /// Returns the spread of `numbers`, none of which is NaN; `None` if `numbers` is empty.
    pub fn of(numbers: &[f64]) -> Option<Spread> {
        let mut sorted = numbers.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
            _ => sorted[middle],
        };
        Some(Spread { median, min, max })
    }
}

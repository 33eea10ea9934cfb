//! Histogram of latencies, which takes nanoseconds and returns microseconds.
//!
//! Invariant: a percentile is within 0.1 % of the exact latency.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Maximum latency that is recorded, in nanoseconds. A longer latency counts as this one.
const LATENCY_NS_MAX: u64 = 60_000_000_000;
const SIGNIFICANT_DIGITS: u8 = 3;

/// A histogram of latencies. Each thread has one histogram, and the histograms are merged at the end.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Latencies {
    /// Creates an empty histogram.
    pub fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, SIGNIFICANT_DIGITS);
        Self(histogram.expect("valid constant bounds"))
    }

    /// Adds a latency to the histogram. Allocates no memory.
    #[inline]
    pub fn record(&mut self, latency: Duration) {
        self.record_ns(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds a latency in nanoseconds to the histogram. Allocates no memory.
    #[inline]
    pub fn record_ns(&mut self, latency_ns: u64) {
        self.0.saturating_record(latency_ns);
    }

    /// Adds all latencies of `other` to this histogram.
    pub fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("all histograms here have the same bounds");
    }

    /// Returns the number of latencies.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Removes all latencies.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the average latency in microseconds, or 0 if the histogram is empty.
    pub fn mean_us(&self) -> f64 {
        self.0.mean() / 1000.0
    }

    /// Returns the shortest latency in microseconds, or 0 if the histogram is empty.
    pub fn min_us(&self) -> f64 {
        if self.count() == 0 { 0.0 } else { self.0.min() as f64 / 1000.0 }
    }

    /// Returns the longest latency in microseconds, or 0 if the histogram is empty.
    pub fn max_us(&self) -> f64 {
        self.0.max() as f64 / 1000.0
    }

    /// Returns the histogram in nanoseconds, for the interval log.
    pub(super) fn histogram(&self) -> &Histogram<u64> {
        &self.0
    }

    /// Returns the percentile `percent` (0 to 100) of the latencies in microseconds, or 0 if the histogram is empty.
    pub fn percentile_us(&self, percent: f64) -> f64 {
        self.0.value_at_percentile(percent.clamp(0.0, 100.0)) as f64 / 1000.0
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_in_microseconds() {
        let mut latencies = Latencies::new();
        for us in 1..=1000 {
            latencies.record(Duration::from_micros(us));
        }
        assert_eq!(latencies.count(), 1000);
        for (percent, us) in [(50.0, 500.0), (99.0, 990.0), (99.9, 999.0), (100.0, 1000.0)] {
            let seen = latencies.percentile_us(percent);
            assert!((seen / us - 1.0).abs() < 0.002, "p{percent} is {seen} us");
        }
    }

    #[test]
    fn a_merged_histogram_equals_one_that_recorded_all() {
        let (mut one, mut two, mut both) = (Latencies::new(), Latencies::new(), Latencies::new());
        for ns in 1..5000 {
            if ns % 3 == 0 {
                one.record_ns(ns)
            } else {
                two.record_ns(ns)
            }
            both.record_ns(ns);
        }
        one.merge(&two);
        assert_eq!(one.0, both.0);
    }

    #[test]
    fn empty_and_saturated_histograms_return_numbers() {
        let mut latencies = Latencies::new();
        assert_eq!(latencies.percentile_us(99.0), 0.0);
        latencies.record_ns(0);
        latencies.record_ns(u64::MAX);
        assert!((latencies.percentile_us(100.0) / 60_000_000.0 - 1.0).abs() < 0.001);
    }
}

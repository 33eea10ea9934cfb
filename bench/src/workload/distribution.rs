//! YCSB's request distributions by name, and draws of record numbers from them.
//!
//! Invariant: a key chooser never returns the number of a record that is newer than the newest one that its caller
//! passes.

use std::fmt;

use rand_core::Rng;

use super::generators::{
    Exponential, Hotspot, ScrambledZipfian, SkewedLatest, UniformLong, ZIPFIAN_THETA, Zipfian, fnv_hash, unit,
};
use super::skew;

/// Distribution of requests over the records. YCSB's property is `requestdistribution`; some distributions have
/// properties of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// All records get the same number of requests.
    Uniform,
    /// A few records get most requests. These records are scattered over all records.
    Zipfian,
    /// The same with another skew, over exactly the records that exist: `zipfian:0.5`.
    Zipf {
        /// Skew: 0.001 to [`Distribution::THETA_MAX`].
        theta: f64,
    },
    /// The newest records get most requests.
    Latest,
    /// A hot set of records gets a fixed share of the requests.
    Hotspot {
        /// Fraction of the records that are hot, from 0 to 1: `hotspotdatafraction`.
        data_fraction: f64,
        /// Fraction of the operations that use hot records, from 0 to 1: `hotspotopnfraction`.
        operation_fraction: f64,
    },
    /// The number of requests to a record falls exponentially with the record's age.
    Exponential {
        /// Percentage of the operations that use the newest records, above 0 and below 100: `exponential.percentile`.
        percentile: f64,
        /// Fraction of the records that count as newest, above 0: `exponential.frac`.
        data_fraction: f64,
    },
}

impl Distribution {
    /// All distributions, with YCSB's defaults for their parameters.
    pub const ALL: [Self; 5] = [
        Self::Uniform,
        Self::Zipfian,
        Self::Latest,
        Self::Hotspot { data_fraction: 0.2, operation_fraction: 0.8 },
        Self::Exponential { percentile: 95.0, data_fraction: 0.857_142_857_1 },
    ];

    /// Largest skew of [`Distribution::Zipf`]. With a larger one, nearly all requests use one record.
    pub const THETA_MAX: f64 = 10.0;

    /// Names of all distributions, for messages.
    pub const NAMES: &'static str = "uniform, zipfian, latest, hotspot, exponential";

    /// Returns the distribution called `name`, with YCSB's defaults for its parameters. `zipfian:0.5` has that theta.
    pub fn named(name: &str) -> Option<Self> {
        if let Some(theta) = name.strip_prefix("zipfian:") {
            let theta = theta.parse().ok().filter(|theta| (0.001..=Self::THETA_MAX).contains(theta))?;
            return Some(Self::Zipf { theta });
        }
        Self::ALL.into_iter().find(|distribution| distribution.name() == name)
    }

    /// Name of the distribution in YCSB.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipfian | Self::Zipf { .. } => "zipfian",
            Self::Latest => "latest",
            Self::Hotspot { .. } => "hotspot",
            Self::Exponential { .. } => "exponential",
        }
    }

    /// Name by which [`Distribution::named`] finds the distribution.
    pub fn label(&self) -> String {
        match self {
            Self::Zipf { theta } => format!("zipfian:{theta}"),
            other => other.name().into(),
        }
    }
}

/// Prints the distribution's name and parameters.
impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Uniform | Self::Latest => Ok(()),
            Self::Zipfian => write!(f, " (theta {ZIPFIAN_THETA}, scrambled)"),
            Self::Zipf { theta } => write!(f, " (theta {theta}, hashed)"),
            Self::Hotspot { data_fraction, operation_fraction } => {
                write!(
                    f,
                    " ({} % of operations on {} % of records)",
                    operation_fraction * 100.0,
                    data_fraction * 100.0
                )
            }
            Self::Exponential { percentile, data_fraction } => {
                write!(
                    f,
                    " ({percentile} % of operations on the newest {:.1} % of records)",
                    data_fraction * 100.0
                )
            }
        }
    }
}

/// Skew from which YCSB's method is not used, as it needs a skew below 1.
const YCSB_THETA_MAX: f64 = 0.9995;

/// Draws the numbers of records to use. Each client thread has its own clone.
#[derive(Clone, Debug)]
pub struct KeyChooser(Generator);

#[derive(Clone, Debug)]
enum Generator {
    Uniform(UniformLong),
    Zipfian(ScrambledZipfian),
    Zipf(Zipfian, u64),
    /// The same with a skew that YCSB's method does not support.
    Skewed(skew::Zipf, u64),
    Latest(SkewedLatest),
    Hotspot(Hotspot),
    Exponential(Exponential),
}

impl KeyChooser {
    /// Creates a chooser for `records` records at the start, and `inserts_expected` records that may be inserted.
    pub fn new(distribution: Distribution, records: u64, inserts_expected: u64) -> Self {
        let newest = records.saturating_sub(1);
        Self(match distribution {
            Distribution::Uniform => Generator::Uniform(UniformLong::new(0, newest)),
            Distribution::Zipfian => {
                // YCSB counts one record too many. The range includes future records from the start, so that an insert
                // does not change which records are popular.
                let range = records.saturating_add(inserts_expected).saturating_add(1);
                Generator::Zipfian(ScrambledZipfian::new(range))
            }
            Distribution::Zipf { theta } if theta >= YCSB_THETA_MAX => {
                Generator::Skewed(skew::Zipf::new(records.max(1), theta), records.max(1))
            }
            Distribution::Zipf { theta } => {
                Generator::Zipf(Zipfian::new(records.max(1), theta), records.max(1))
            }
            Distribution::Latest => Generator::Latest(SkewedLatest::new(newest)),
            Distribution::Hotspot { data_fraction, operation_fraction } => {
                Generator::Hotspot(Hotspot::new(records, data_fraction, operation_fraction))
            }
            Distribution::Exponential { percentile, data_fraction } => {
                Generator::Exponential(Exponential::new(percentile, records as f64 * data_fraction))
            }
        })
    }

    /// Draws the number of the record to use next. It is at most `newest`, the number of the newest record that exists
    /// now.
    ///
    /// As in YCSB, the chooser draws again if it has drawn the number of a record that does not exist yet. So `newest`
    /// should not be far below the number of records at the start.
    #[inline]
    pub fn next(&mut self, newest: u64, random: &mut impl Rng) -> u64 {
        loop {
            let drawn = match &mut self.0 {
                Generator::Uniform(uniform) => Some(uniform.next(random)),
                Generator::Zipfian(zipfian) => Some(zipfian.next(random)),
                Generator::Zipf(zipfian, records) => Some(fnv_hash(zipfian.next(random)) % *records),
                Generator::Skewed(zipf, records) => Some(fnv_hash(zipf.draw(|| unit(random))) % *records),
                Generator::Latest(latest) => Some(latest.next(newest, random)),
                Generator::Hotspot(hotspot) => Some(hotspot.next(random)),
                Generator::Exponential(exponential) => newest.checked_sub(exponential.next(random)),
            };
            if let Some(number) = drawn.filter(|&number| number <= newest) {
                return number;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand_core::SeedableRng;
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    #[test]
    fn every_distribution_is_listed_and_found_by_its_name() {
        for distribution in Distribution::ALL {
            assert_eq!(Distribution::named(distribution.name()), Some(distribution));
            assert!(distribution.to_string().starts_with(distribution.name()));
        }
        assert_eq!(Distribution::ALL.map(|distribution| distribution.name()).join(", "), Distribution::NAMES);
        for wrong in ["zipf", "zipfian:", "zipfian:0", "zipfian:11", "zipfian:nan", "uniform:0.5"] {
            assert_eq!(Distribution::named(wrong), None, "{wrong}");
        }
        let skewed = Distribution::Zipf { theta: 0.5 };
        assert_eq!(
            (skewed.label(), Distribution::named("zipfian:0.5")),
            ("zipfian:0.5".into(), Some(skewed))
        );
    }

    #[test]
    fn no_distribution_draws_a_record_that_does_not_exist() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let skewed = [0.5, 1.0, 1.5].map(|theta| Distribution::Zipf { theta });
        for distribution in Distribution::ALL.into_iter().chain(skewed) {
            for (records, inserts_expected) in [(1, 0), (2, 0), (1000, 0), (1000, 500)] {
                let mut keys = KeyChooser::new(distribution, records, inserts_expected);
                for newest in [records - 1, records + inserts_expected / 2] {
                    assert!((0..10_000).all(|_| keys.next(newest, &mut random) <= newest), "{distribution}");
                }
            }
        }
    }

    #[test]
    fn a_skew_above_one_sends_most_requests_to_one_record() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(3);
        let mut keys = KeyChooser::new(Distribution::Zipf { theta: 1.5 }, 1000, 0);
        let hottest = fnv_hash(0) % 1000;
        let hits = (0..10_000).filter(|_| keys.next(999, &mut random) == hottest).count();
        // The first of 1000 ranks has 1 / (sum of k^-1.5) = 0.392 of the requests.
        assert!((3700..4200).contains(&hits), "{hits}");
    }

    #[test]
    fn an_insert_does_not_change_which_records_are_popular() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(2);
        let mut keys = KeyChooser::new(Distribution::Zipfian, 1000, 200);
        let mut hottest = |newest| {
            let mut seen = vec![0; 1201];
            (0..100_000).for_each(|_| seen[keys.next(newest, &mut random) as usize] += 1);
            (0..seen.len()).max_by_key(|&number| seen[number])
        };
        assert_eq!(hottest(999), hottest(1100));
    }

    #[test]
    fn a_larger_theta_is_more_skewed() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(4);
        let mut of_the_hottest = |theta| {
            let mut keys = KeyChooser::new(Distribution::Zipf { theta }, 1000, 0);
            let mut seen = vec![0; 1000];
            (0..100_000).for_each(|_| seen[keys.next(999, &mut random) as usize] += 1);
            seen.into_iter().max().expect("records")
        };
        let (low, high) = (of_the_hottest(0.2), of_the_hottest(0.99));
        assert!((100..1000).contains(&low) && (8_000..25_000).contains(&high), "{low} and {high}");
    }

    #[test]
    fn exponential_favours_the_newest() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(3);
        let distribution = Distribution::Exponential { percentile: 95.0, data_fraction: 0.1 };
        let mut keys = KeyChooser::new(distribution, 1000, 0);
        let newest_tenth = (0..100_000).filter(|_| keys.next(999, &mut random) >= 900).count();
        assert!((94_000..96_000).contains(&newest_tenth), "{newest_tenth}");
    }
}

//! Lengths of values: YCSB's `fieldlengthdistribution`. A record has a single field here, so the length of a value is
//! drawn as one number.

use std::fmt;

use rand_core::Rng;

use super::generators::{UniformLong, ZIPFIAN_THETA, Zipfian};

/// Distribution of the lengths of values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Lengths {
    /// All values are equally long.
    #[default]
    Constant,
    /// All lengths are equally likely.
    Uniform {
        /// Length in bytes of the shortest value.
        shortest: u64,
    },
    /// Short values are most frequent.
    Zipfian {
        /// Length in bytes of the shortest value.
        shortest: u64,
    },
}

impl Lengths {
    /// Names of the distributions, for messages.
    pub const NAMES: &'static str = "constant, uniform, zipfian";

    /// Returns the distribution with this name, whose shortest value has one byte.
    pub fn named(name: &str) -> Option<Lengths> {
        Some(match name {
            "constant" => Lengths::Constant,
            "uniform" => Lengths::Uniform { shortest: 1 },
            "zipfian" => Lengths::Zipfian { shortest: 1 },
            _ => return None,
        })
    }

    /// Returns the length of the shortest value, in bytes, if the longest has `longest`.
    pub fn shortest(self, longest: usize) -> usize {
        match self {
            Lengths::Constant => longest,
            Lengths::Uniform { shortest } | Lengths::Zipfian { shortest } => {
                usize::try_from(shortest).unwrap_or(usize::MAX)
            }
        }
    }

    /// Creates a chooser of lengths up to `longest`, which is not less than the shortest.
    pub fn chooser(self, longest: usize) -> LengthChooser {
        let (shortest, last) = (self.shortest(longest) as u64, longest as u64);
        LengthChooser(match self {
            Lengths::Constant => Generator::Constant(longest),
            Lengths::Uniform { .. } => Generator::Uniform(UniformLong::new(shortest, last)),
            Lengths::Zipfian { .. } => {
                let items = last.saturating_sub(shortest).saturating_add(1);
                Generator::Zipfian(shortest, Zipfian::new(items, ZIPFIAN_THETA))
            }
        })
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lengths::Constant => f.write_str("values of one length"),
            Lengths::Uniform { shortest } => write!(f, "uniform lengths of values, from {shortest} B"),
            Lengths::Zipfian { shortest } => write!(f, "zipfian lengths of values, from {shortest} B"),
        }
    }
}

/// Draws the lengths of values.
#[derive(Clone, Debug)]
pub struct LengthChooser(Generator);

#[derive(Clone, Debug)]
enum Generator {
    Constant(usize),
    Uniform(UniformLong),
    /// The shortest length, and the generator of the difference.
    Zipfian(u64, Zipfian),
}

impl LengthChooser {
    /// Draws the next length, in bytes.
    #[inline]
    pub fn next(&mut self, random: &mut impl Rng) -> usize {
        match &mut self.0 {
            Generator::Constant(length) => *length,
            Generator::Uniform(lengths) => lengths.next(random) as usize,
            Generator::Zipfian(shortest, more) => (*shortest + more.next(random)) as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::random;

    #[test]
    fn lengths_are_drawn_from_the_shortest_to_the_longest() {
        let drawn = |lengths: Lengths| {
            let (mut chooser, mut random) = (lengths.chooser(40), random(1));
            let mut seen = [0; 41];
            (0..100_000).for_each(|_| seen[chooser.next(&mut random)] += 1);
            seen
        };
        assert_eq!(drawn(Lengths::Constant)[40], 100_000);
        let uniform = drawn(Lengths::Uniform { shortest: 31 });
        assert!(uniform[..31].iter().all(|&count| count == 0), "{uniform:?}");
        assert!(uniform[31..].iter().all(|count| (9_000..11_000).contains(count)), "{uniform:?}");
        let zipfian = drawn(Lengths::Zipfian { shortest: 31 });
        assert!(zipfian[..31].iter().all(|&count| count == 0), "{zipfian:?}");
        let few = 2.0_f64.powf(ZIPFIAN_THETA);
        let ratio = f64::from(zipfian[31]) / f64::from(zipfian[32]);
        assert!((ratio / few - 1.0).abs() < 0.1, "the second is {few} times as rare, not {ratio}");
        assert!(zipfian[33..].iter().all(|&count| count > 0), "{zipfian:?}");
    }

    #[test]
    fn one_length_is_possible() {
        for lengths in [Lengths::Uniform { shortest: 7 }, Lengths::Zipfian { shortest: 7 }] {
            assert_eq!(lengths.chooser(7).next(&mut random(1)), 7, "{lengths}");
        }
    }
}

//! Draws of the next operation. There are five kinds of operations, each with a share.
//!
//! Invariant: the shares of a `Mix` are between 0 and 1, and their sum is 1.

use std::fmt;

use rand_core::Rng;

use super::generators::unit;

/// Kind of an operation on a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Reads a record.
    Read,
    /// Overwrites a record.
    Update,
    /// Adds a new record.
    Insert,
    /// Reads a record and the records after it.
    Scan,
    /// Reads a record, then overwrites the record.
    ReadModifyWrite,
}

impl Operation {
    /// All kinds of operations, in the order in which YCSB draws them.
    pub const ALL: [Self; 5] = [Self::Read, Self::Update, Self::Insert, Self::Scan, Self::ReadModifyWrite];

    /// Names of the kinds in reports, in the order of [`Operation::ALL`].
    pub const NAMES: [&'static str; 5] = ["read", "update", "insert", "scan", "read-modify-write"];

    /// Name of the kind in reports.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Shares of the kinds of operations in a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    /// Share of each kind, from 0 to 1, in the order of [`Operation::ALL`].
    shares: [f64; 5],
}

impl Mix {
    /// Creates shares in proportion to `weights`, in the order of [`Operation::ALL`]. Returns `None` if a weight is
    /// negative or not a number, or all weights are 0.
    pub fn new(weights: [f64; 5]) -> Option<Self> {
        let sum: f64 = weights.iter().sum();
        let legal = weights.iter().all(|&weight| weight >= 0.0) && sum > 0.0 && sum.is_finite();
        legal.then(|| Self { shares: weights.map(|weight| weight / sum) })
    }

    /// Returns the share of `operation`, from 0 to 1.
    pub fn share(&self, operation: Operation) -> f64 {
        self.shares[operation as usize]
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let present = Operation::ALL.into_iter().filter(|&operation| self.share(operation) > 0.0);
        for (index, operation) in present.enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            // Rounded, so that 0.1 + 0.2 prints as 30 %.
            let percent = (self.share(operation) * 1e6).round() / 1e4;
            write!(f, "{separator}{percent} % {operation}")?;
        }
        Ok(())
    }
}

/// Draws kinds of operations by their shares: YCSB's `DiscreteGenerator`.
#[derive(Clone, Debug)]
pub struct Chooser {
    mix: Mix,
    /// Kind that is drawn if rounding errors leave a remainder.
    last: Operation,
}

impl Chooser {
    /// Creates a chooser for the shares in `mix`.
    pub fn new(mix: Mix) -> Self {
        let mut present = Operation::ALL.into_iter().filter(|&operation| mix.share(operation) > 0.0);
        Self { mix, last: present.next_back().unwrap_or(Operation::Read) }
    }

    /// Draws the kind of the next operation.
    #[inline]
    pub fn next(&mut self, random: &mut impl Rng) -> Operation {
        let mut left = unit(random);
        for operation in Operation::ALL {
            let share = self.mix.share(operation);
            if left < share {
                return operation;
            }
            left -= share;
        }
        self.last
    }
}

#[cfg(test)]
mod tests {
    use rand_core::SeedableRng;
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    #[test]
    fn operations_are_drawn_in_their_proportions() {
        let weights = [0.5, 0.2, 0.15, 0.1, 0.05];
        let mut chooser = Chooser::new(Mix::new(weights).unwrap());
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut seen = [0.0; 5];
        for _ in 0..1_000_000 {
            seen[chooser.next(&mut random) as usize] += 1e-6;
        }
        for (seen, weight) in seen.into_iter().zip(weights) {
            assert!((seen / weight - 1.0).abs() < 0.02, "{seen} is not {weight}");
        }
    }

    #[test]
    fn an_operation_with_share_0_is_never_drawn() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(2);
        for only in Operation::ALL {
            let mut weights = [0.0; 5];
            weights[only as usize] = 0.3;
            let mut chooser = Chooser::new(Mix::new(weights).unwrap());
            assert!((0..10_000).all(|_| chooser.next(&mut random) == only), "{only}");
        }
    }

    #[test]
    fn weights_are_scaled_to_a_sum_of_1() {
        assert_eq!(Mix::new([3.0, 1.0, 0.0, 0.0, 0.0]).unwrap().share(Operation::Update), 0.25);
        for wrong in
            [[0.0; 5], [1.0, -0.5, 0.0, 0.0, 0.0], [f64::NAN; 5], [f64::INFINITY, 0.0, 0.0, 0.0, 0.0]]
        {
            assert_eq!(Mix::new(wrong), None);
        }
    }

    #[test]
    fn a_mix_prints_its_nonzero_shares() {
        let mix = Mix::new([0.1 + 0.2, 0.0, 0.0, 0.0, 0.7]).unwrap();
        assert_eq!(mix.to_string(), "30 % read, 70 % read-modify-write");
    }
}

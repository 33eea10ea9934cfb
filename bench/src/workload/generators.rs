//! YCSB's number generators, with YCSB's formulas, so that results are comparable with YCSB's own.
//!
//! Invariant: a generator draws only from the random source that its caller passes. One seed yields one sequence.
//! Invariant: no input makes a generator panic or leave its range. Comments mark the places where YCSB's own would.

use rand_core::Rng;

/// Skew of the zipfian generators, theta in Gray et al.: YCSB's `ZIPFIAN_CONSTANT`.
pub const ZIPFIAN_THETA: f64 = 0.99;

/// Draws a number of at least 0 and below 1, in steps of 2^-53, like Java's `nextDouble`.
#[inline]
pub fn unit(random: &mut impl Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Draws a number below `count`, like YCSB's `Math.abs(nextLong()) % count`. Returns 0 if `count` is 0.
#[inline]
fn below(count: u64, random: &mut impl Rng) -> u64 {
    random.next_u64().cast_signed().unsigned_abs().checked_rem(count).unwrap_or(0)
}

/// Uniform distribution over a range, like YCSB's `UniformLongGenerator`.
#[derive(Clone, Debug)]
pub struct UniformLong {
    first: u64,
    count: u64,
}

impl UniformLong {
    /// Creates a generator of numbers from `first` to `last`, both included.
    pub fn new(first: u64, last: u64) -> Self {
        Self { first, count: last.saturating_sub(first).saturating_add(1) }
    }

    /// Draws the next number of the distribution.
    #[inline]
    pub fn next(&mut self, random: &mut impl Rng) -> u64 {
        self.first + below(self.count, random)
    }
}

/// Zipfian distribution, in which small numbers are most frequent. It is YCSB's `ZipfianGenerator`, after Gray et al.,
/// "Quickly Generating Billion-Record Synthetic Databases", SIGMOD 1994. The frequencies are exact for 0 and 1 and
/// approximate for other numbers.
#[derive(Clone, Debug)]
pub struct Zipfian {
    items: u64,
    theta: f64,
    zeta2: f64,
    zeta_items: f64,
    /// Number of items over which the sum `zeta_items` runs.
    summed: u64,
    alpha: f64,
    eta: f64,
}

impl Zipfian {
    /// Creates a generator of numbers below `items`. The sum over all items takes about 0.2 s for 8 million.
    pub fn new(items: u64, theta: f64) -> Self {
        Self::with_zeta(items, theta, zeta(0, items, theta, 0.0))
    }

    /// Creates a generator as [`Zipfian::new`] does, with the precomputed sum over the items.
    fn with_zeta(items: u64, theta: f64, zeta_items: f64) -> Self {
        let zeta2 = zeta(0, 2, theta, 0.0);
        let mut zipfian =
            Self { items, theta, zeta2, zeta_items, summed: items, alpha: 1.0 / (1.0 - theta), eta: 0.0 };
        zipfian.eta = zipfian.eta();
        zipfian
    }

    /// Draws the next number of the distribution.
    #[inline]
    pub fn next(&mut self, random: &mut impl Rng) -> u64 {
        self.next_of(self.items, random)
    }

    /// Draws the next number below `items`. `items` may grow from call to call. The sum zeta grows with `items` and
    /// never shrinks.
    #[inline]
    pub fn next_of(&mut self, items: u64, random: &mut impl Rng) -> u64 {
        if items > self.summed {
            self.zeta_items = zeta(self.summed, items, self.theta, self.zeta_items);
            self.summed = items;
            self.eta = self.eta();
        }
        let u = unit(random);
        let uz = u * self.zeta_items;
        let number = if uz < 1.0 {
            0
        } else if uz < 1.0 + 0.5f64.powf(self.theta) {
            1
        } else {
            (items as f64 * (self.eta * u - self.eta + 1.0).powf(self.alpha)) as u64
        };
        // For u close to 1 the product rounds up to `items`. YCSB returns that number.
        number.min(items.saturating_sub(1))
    }

    fn eta(&self) -> f64 {
        (1.0 - (2.0 / self.items as f64).powf(1.0 - self.theta)) / (1.0 - self.zeta2 / self.zeta_items)
    }
}

/// Returns `sum` plus the sum of 1 / i^theta for i from `from` + 1 to `to`.
fn zeta(from: u64, to: u64, theta: f64, sum: f64) -> f64 {
    (from..to).fold(sum, |sum, i| sum + 1.0 / ((i + 1) as f64).powf(theta))
}

/// Zipfian distribution with the popular numbers scattered over the range: YCSB's `ScrambledZipfianGenerator`. The
/// generator draws from ten billion items and hashes the result to the range, so the skew is always that of ten
/// billion items.
#[derive(Clone, Debug)]
pub struct ScrambledZipfian {
    zipfian: Zipfian,
    count: u64,
}

impl ScrambledZipfian {
    /// Number of items, YCSB's `ITEM_COUNT`. `ZETAN` is the sum zeta over these items. Some later copies of YCSB have
    /// 10^16 items with the same zeta, so their skew is not that of theta 0.99.
    const ITEM_COUNT: u64 = 10_000_000_000;
    const ZETAN: f64 = 26.46902820178302;

    /// Creates a generator of numbers below `count`.
    pub fn new(count: u64) -> Self {
        // YCSB's range includes both ends, so it has one item more than `ITEM_COUNT`.
        let zipfian = Zipfian::with_zeta(Self::ITEM_COUNT + 1, ZIPFIAN_THETA, Self::ZETAN);
        Self { zipfian, count }
    }

    /// Draws the next number of the distribution.
    #[inline]
    pub fn next(&mut self, random: &mut impl Rng) -> u64 {
        fnv_hash(self.zipfian.next(random)).checked_rem(self.count).unwrap_or(0)
    }
}

/// Returns the absolute value, as a signed number, of FNV-1a over the 8 bytes of `number`, low byte first: YCSB's
/// `Utils.fnvhash64`.
#[inline]
pub fn fnv_hash(number: u64) -> u64 {
    let hash = number.to_le_bytes().iter().fold(0xCBF2_9CE4_8422_2325u64, |hash, &octet| {
        (hash ^ u64::from(octet)).wrapping_mul(1_099_511_628_211)
    });
    hash.cast_signed().unsigned_abs()
}

/// Distribution in which the newest numbers are most frequent: YCSB's `SkewedLatestGenerator`.
#[derive(Clone, Debug)]
pub struct SkewedLatest {
    zipfian: Zipfian,
}

impl SkewedLatest {
    /// Creates a generator. `newest` is the newest number at the start.
    pub fn new(newest: u64) -> Self {
        Self { zipfian: Zipfian::new(newest, ZIPFIAN_THETA) }
    }

    /// Draws the next number, which is at most `newest`, the newest number that exists now. As in YCSB, 0 is drawn
    /// only if 0 is the newest number.
    #[inline]
    pub fn next(&mut self, newest: u64, random: &mut impl Rng) -> u64 {
        newest.saturating_sub(self.zipfian.next_of(newest, random))
    }
}

/// Distribution with a hot set at the low end of a range. It is uniform within the hot set and within the cold
/// numbers: YCSB's `HotspotIntegerGenerator`.
#[derive(Clone, Debug)]
pub struct Hotspot {
    hot_count: u64,
    cold_count: u64,
    operation_fraction: f64,
}

impl Hotspot {
    /// Creates a generator of numbers below `count`. The numbers in the lowest `data_fraction` of the range are drawn
    /// with the probability `operation_fraction`. Both parameters must be from 0 to 1.
    pub fn new(count: u64, data_fraction: f64, operation_fraction: f64) -> Self {
        let hot_count = ((count as f64 * data_fraction) as u64).min(count);
        Self { hot_count, cold_count: count - hot_count, operation_fraction }
    }

    /// Draws the next number of the distribution.
    #[inline]
    pub fn next(&mut self, random: &mut impl Rng) -> u64 {
        let hot = unit(random) < self.operation_fraction;
        // The set may be empty. YCSB divides by zero here.
        if (hot && self.hot_count > 0) || self.cold_count == 0 {
            below(self.hot_count, random)
        } else {
            self.hot_count + below(self.cold_count, random)
        }
    }
}

/// Exponential distribution, like YCSB's `ExponentialGenerator`.
#[derive(Clone, Debug)]
pub struct Exponential {
    gamma: f64,
}

impl Exponential {
    /// Creates a generator that draws `percentile` percent of its numbers below `range`.
    pub fn new(percentile: f64, range: f64) -> Self {
        Self { gamma: -(1.0 - percentile / 100.0).ln() / range }
    }

    /// Draws the next number of the distribution.
    #[inline]
    pub fn next(&mut self, random: &mut impl Rng) -> u64 {
        (-unit(random).ln() / self.gamma) as u64
    }
}

#[cfg(test)]
mod tests {
    use rand_core::SeedableRng;
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    const DRAWS: usize = 1_000_000;

    fn random(seed: u64) -> Xoshiro256PlusPlus {
        Xoshiro256PlusPlus::seed_from_u64(seed)
    }

    /// Returns the frequency of each number below `count` in `DRAWS` draws. A larger number fails the test.
    fn frequencies(count: usize, mut next: impl FnMut() -> u64) -> Vec<f64> {
        let mut seen = vec![0.0; count];
        for _ in 0..DRAWS {
            seen[next() as usize] += 1.0;
        }
        seen
    }

    /// Returns the sum of (seen - expected)^2 / expected. The sum is about the number of cells if the probabilities
    /// are right.
    fn chi_square(seen: &[f64], probabilities: &[f64]) -> f64 {
        let cells = seen.iter().zip(probabilities.iter().map(|p| p * DRAWS as f64));
        cells.map(|(seen, expected)| (seen - expected).powi(2) / expected).sum()
    }

    /// Returns the chi-square that is exceeded with a probability of one in a million: Wilson and Hilferty's
    /// approximation.
    fn bound(cells: usize) -> f64 {
        let freedom = (cells - 1) as f64;
        let spread = 2.0 / (9.0 * freedom);
        freedom * (1.0 - spread + 4.75 * spread.sqrt()).powi(3)
    }

    /// Returns the probabilities of Gray's method, derived from the inverse of its formula.
    fn gray_probabilities(items: u64) -> Vec<f64> {
        let zeta_items = zeta(0, items, ZIPFIAN_THETA, 0.0);
        let zeta2 = zeta(0, 2, ZIPFIAN_THETA, 0.0);
        let eta = (1.0 - (2.0 / items as f64).powf(1.0 - ZIPFIAN_THETA)) / (1.0 - zeta2 / zeta_items);
        let reached = |k: u64| match k {
            0 => 0.0,
            1 => 1.0 / zeta_items,
            k => 1.0 - (1.0 - (k as f64 / items as f64).powf(1.0 - ZIPFIAN_THETA)) / eta,
        };
        (0..items).map(|k| reached(k + 1) - reached(k)).collect()
    }

    #[test]
    fn zipfian_frequencies_match_grays_method() {
        for (items, seed) in [(10, 1), (100, 2), (1000, 3)] {
            let (mut zipfian, mut random) = (Zipfian::new(items, ZIPFIAN_THETA), random(seed));
            let seen = frequencies(items as usize, || zipfian.next(&mut random));
            let chi_square = chi_square(&seen, &gray_probabilities(items));
            assert!(chi_square < bound(items as usize), "{items} items: {chi_square}");
        }
    }

    #[test]
    fn zipfian_frequencies_follow_zipfs_law() {
        let items = 100u32;
        let law: Vec<f64> = (1..=items).map(|i| f64::from(i).powf(-ZIPFIAN_THETA)).collect();
        let sum: f64 = law.iter().sum();
        let (mut zipfian, mut random) = (Zipfian::new(items.into(), ZIPFIAN_THETA), random(4));
        let seen = frequencies(items as usize, || zipfian.next(&mut random));
        let head: Vec<f64> = law.iter().take(2).map(|weight| weight / sum).collect();
        assert!(chi_square(&seen[..2], &head) < bound(3), "the method is exact for the first two");
        for (number, (seen, weight)) in seen.iter().zip(&law).enumerate() {
            let ratio = seen / DRAWS as f64 / (weight / sum);
            assert!((0.75..1.25).contains(&ratio), "{number} came {ratio} times as often as the law has it");
        }
    }

    #[test]
    fn a_wrong_theta_or_a_uniform_source_fails_the_chi_square() {
        let (mut flatter, mut even, mut random) =
            (Zipfian::new(100, 0.98), UniformLong::new(0, 99), random(5));
        let seen = frequencies(100, || flatter.next(&mut random));
        assert!(chi_square(&seen, &gray_probabilities(100)) > bound(100));
        let seen = frequencies(100, || even.next(&mut random));
        assert!(chi_square(&seen, &gray_probabilities(100)) > bound(100));
    }

    #[test]
    fn zeta_grown_in_steps_is_zeta_summed_at_once() {
        let (mut grown, mut random) = (Zipfian::new(10, ZIPFIAN_THETA), random(6));
        for items in [11, 50, 50, 1000, 20] {
            assert!(grown.next_of(items, &mut random) < items);
        }
        assert_eq!(grown.zeta_items, Zipfian::new(1000, ZIPFIAN_THETA).zeta_items);
    }

    #[test]
    fn zetan_is_the_zeta_of_ten_billion_items() {
        // Euler and Maclaurin: the sum to n is that to m, the integral between, and half of the end terms.
        let (m, n) = (1e6, ScrambledZipfian::ITEM_COUNT as f64);
        let power = |x: f64| x.powf(-ZIPFIAN_THETA);
        let integral = |x: f64| x.powf(1.0 - ZIPFIAN_THETA) / (1.0 - ZIPFIAN_THETA);
        let sum =
            zeta(0, 1_000_000, ZIPFIAN_THETA, 0.0) + integral(n) - integral(m) + (power(n) - power(m)) / 2.0;
        assert!((sum - ScrambledZipfian::ZETAN).abs() < 1e-6, "{sum}");
    }

    #[test]
    fn the_hash_matches_ycsb() {
        // The keys "user6284781860667377211" and so on, with which every YCSB load starts.
        assert_eq!([0, 1].map(fnv_hash), [6_284_781_860_667_377_211, 8_517_097_267_634_966_620]);
    }

    #[test]
    fn scrambled_zipfian_scatters_the_first_numbers_over_its_range() {
        let (mut scrambled, mut random) = (ScrambledZipfian::new(1000), random(7));
        let seen = frequencies(1000, || scrambled.next(&mut random));
        assert!(seen.iter().all(|&count| count > 0.0), "every number of the range is drawn");
        let mut by_heat: Vec<usize> = (0..1000).collect();
        by_heat.sort_by(|&a, &b| seen[b].total_cmp(&seen[a]));
        let hottest = [0, 1, 2].map(|number| (fnv_hash(number) % 1000) as usize);
        assert_eq!(by_heat[..3], hottest);
        // Besides its own 1 / zeta, the hottest number gets its share of the remaining hashes.
        let share = seen[hottest[0]] / DRAWS as f64;
        assert!((share - 1.0 / ScrambledZipfian::ZETAN - 0.0008).abs() < 0.001, "{share}");
    }

    #[test]
    fn uniform_is_uniform_and_inclusive() {
        let (mut uniform, mut random) = (UniformLong::new(5, 54), random(8));
        let seen = frequencies(50, || uniform.next(&mut random) - 5);
        assert!(chi_square(&seen, &[0.02; 50]) < bound(50));
    }

    #[test]
    fn latest_favours_the_newest_number_also_after_inserts() {
        let (mut latest, mut random) = (SkewedLatest::new(99), random(9));
        for newest in [99, 149] {
            let seen = frequencies(150, || latest.next(newest, &mut random));
            assert_eq!(seen[0], 0.0);
            assert_eq!(seen[newest as usize + 1..].iter().sum::<f64>(), 0.0);
            let share = seen[newest as usize] / DRAWS as f64;
            let expected = 1.0 / zeta(0, newest, ZIPFIAN_THETA, 0.0);
            assert!((share / expected - 1.0).abs() < 0.02, "{share} of draws are the newest, not {expected}");
        }
    }

    #[test]
    fn hotspot_has_the_requested_fractions() {
        let (mut hotspot, mut random) = (Hotspot::new(50, 0.2, 0.8), random(10));
        let seen = frequencies(50, || hotspot.next(&mut random));
        let probabilities: Vec<f64> = (0..50).map(|n| if n < 10 { 0.8 / 10.0 } else { 0.2 / 40.0 }).collect();
        assert!(chi_square(&seen, &probabilities) < bound(50));
    }

    #[test]
    fn with_an_empty_set_all_numbers_come_from_the_other() {
        let mut random = random(11);
        for (data_fraction, operation_fraction) in [(0.0, 1.0), (1.0, 0.0), (0.5, 0.0), (0.5, 1.0)] {
            let mut hotspot = Hotspot::new(3, data_fraction, operation_fraction);
            assert!((0..1000).all(|_| hotspot.next(&mut random) < 3));
        }
    }

    #[test]
    fn exponential_puts_its_percentile_below_its_range() {
        let (mut exponential, mut random) = (Exponential::new(95.0, 1000.0), random(12));
        let below = (0..DRAWS).filter(|_| exponential.next(&mut random) < 1000).count();
        assert!((below as f64 / DRAWS as f64 - 0.95).abs() < 0.001, "{below}");
    }

    #[test]
    fn the_smallest_ranges_do_not_panic() {
        let mut random = random(13);
        for _ in 0..10_000 {
            for items in 0..4 {
                assert!(Zipfian::new(items, ZIPFIAN_THETA).next(&mut random) <= items);
                assert!(ScrambledZipfian::new(items).next(&mut random) <= items);
                assert!(SkewedLatest::new(items).next(items, &mut random) <= items);
                assert!(SkewedLatest::new(items).next(0, &mut random) == 0);
                assert!(Hotspot::new(items, 0.2, 0.8).next(&mut random) <= items);
                assert!(UniformLong::new(items, 0).next(&mut random) <= items);
            }
        }
        assert!(UniformLong::new(0, u64::MAX).next(&mut random) < u64::MAX);
    }
}

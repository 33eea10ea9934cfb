//! Draws numbers by Zipf's law with any coefficient, by rejection-inversion: Hörmann and Derflinger,
//! *Rejection-inversion to generate variates from monotone discrete distributions* (ACM TOMACS 6(3), 1996).
//!
//! YCSB's method ([`super::Zipfian`]) is for coefficients below 1 only.
//!
//! Invariant: rank `k`, counted from 0, is drawn with a probability proportional to `(k + 1)` to the power of minus the
//! coefficient.

/// Zipf's distribution over the ranks below a limit.
#[derive(Clone, Copy, Debug)]
pub struct Zipf {
    ranks: f64,
    coefficient: f64,
    /// Integral of the hat function up to the first and the last rank.
    first: f64,
    last: f64,
    /// Distance within which a candidate is accepted without a comparison.
    accepted: f64,
}

impl Zipf {
    /// Creates the distribution over `ranks` ranks with this coefficient, which is not negative.
    ///
    /// # Panics
    /// If there are no ranks.
    pub fn new(ranks: u64, coefficient: f64) -> Zipf {
        assert!(
            ranks > 0 && coefficient >= 0.0,
            "Zipf's law needs ranks, and a coefficient that is not negative"
        );
        let mut zipf = Zipf { ranks: ranks as f64, coefficient, first: 0.0, last: 0.0, accepted: 0.0 };
        zipf.first = zipf.integral(1.5) - 1.0;
        zipf.last = zipf.integral(zipf.ranks + 0.5);
        zipf.accepted = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.density(2.0));
        zipf
    }

    /// Draws a rank. `share` draws a number uniformly from 0 to 1.
    pub fn draw(&self, mut share: impl FnMut() -> f64) -> u64 {
        loop {
            let area = self.last + share() * (self.first - self.last);
            let at = self.inverse(area);
            let rank = at.round().clamp(1.0, self.ranks);
            if rank - at <= self.accepted || area >= self.integral(rank + 0.5) - self.density(rank) {
                return rank as u64 - 1;
            }
        }
    }

    fn density(&self, at: f64) -> f64 {
        (-self.coefficient * at.ln()).exp()
    }

    /// Integral of the density. The constant of integration is chosen so that a coefficient of 1 is no special case.
    fn integral(&self, to: f64) -> f64 {
        let power = (1.0 - self.coefficient) * to.ln();
        to.ln() * if power.abs() < SMALL { 1.0 + power / 2.0 } else { power.exp_m1() / power }
    }

    fn inverse(&self, area: f64) -> f64 {
        let power = (area * (1.0 - self.coefficient)).max(-1.0);
        (area * if power.abs() < SMALL { 1.0 - power / 2.0 } else { power.ln_1p() / power }).exp()
    }
}

/// Below this, the first terms of a series are exact enough.
const SMALL: f64 = 1e-8;

#[cfg(test)]
mod tests {
    use super::super::generators::unit;
    use super::*;
    use crate::workload::random;

    #[test]
    fn ranks_are_drawn_as_often_as_zipfs_law_says() {
        const DRAWS: u32 = 40_000;
        const RANKS: usize = 20;
        for coefficient in [0.0, 0.6, 0.99, 1.0, 1.2, 3.0] {
            let (zipf, random) = (Zipf::new(RANKS as u64, coefficient), &mut random(7));
            let mut seen = [0; RANKS];
            (0..DRAWS).for_each(|_| seen[zipf.draw(|| unit(random)) as usize] += 1);
            let weights: Vec<f64> = (1..=RANKS).map(|rank| (rank as f64).powf(-coefficient)).collect();
            let sum: f64 = weights.iter().sum();
            let chi_square: f64 = std::iter::zip(seen, &weights)
                .map(|(seen, weight)| {
                    let expected = f64::from(DRAWS) * weight / sum;
                    (f64::from(seen) - expected).powi(2) / expected
                })
                .sum();
            // With 19 degrees of freedom, one in 10,000 samples exceeds this.
            assert!(chi_square < 51.0, "coefficient {coefficient}: chi-square {chi_square}, seen {seen:?}");
        }
    }

    #[test]
    fn the_first_and_the_last_ranks_of_any_range_are_drawn_and_none_beyond() {
        for (ranks, coefficient) in [(1, 1.0), (2, 0.0), (3, 1.5), (50, 1.0)] {
            let (zipf, random) = (Zipf::new(ranks, coefficient), &mut random(1));
            let drawn: Vec<u64> = (0..20_000).map(|_| zipf.draw(|| unit(random))).collect();
            let [least, most] = [drawn.iter().min(), drawn.iter().max()];
            assert_eq!([least, most], [Some(&0), Some(&(ranks - 1))], "{ranks} ranks, {coefficient}");
        }
    }
}

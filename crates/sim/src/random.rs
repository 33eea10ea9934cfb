//! Source of random draws. All draws of a run derive from one seed.
//!
//! Invariant: the same seed and the same sequence of calls give the same draws, in every build and on every machine.

use farside_remote::draws::Draws;
use std::cell::Cell;

/// Stream of random draws.
#[derive(Debug)]
pub struct Random(Cell<u64>);

impl Random {
    /// Creates the stream of random draws that `seed` determines.
    pub fn new(seed: u64) -> Random {
        Random(Cell::new(seed))
    }

    #[inline]
    fn draw<T>(&self, draw: impl FnOnce(&mut Draws) -> T) -> T {
        let mut draws = Draws(self.0.get());
        let drawn = draw(&mut draws);
        self.0.set(draws.0);
        drawn
    }

    /// Draws 64 random bits.
    #[inline]
    pub fn bits(&self) -> u64 {
        self.draw(Draws::next)
    }

    /// Draws uniformly from `0..end`; returns 0 if `end` is 0.
    #[inline]
    pub fn below(&self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// Draws uniformly from `least..=most`.
    #[inline]
    pub fn between(&self, least: u64, most: u64) -> u64 {
        least + self.below(most.saturating_sub(least).saturating_add(1))
    }

    /// Returns true with probability 1 / `one_in`; never if `one_in` is 0.
    #[inline]
    pub fn one_in(&self, one_in: u64) -> bool {
        one_in != 0 && self.below(one_in) == 0
    }

    /// Draws a number uniformly from 0 (included) to 1 (excluded).
    pub fn share(&self) -> f64 {
        self.draw(Draws::share)
    }

    /// Draws a duration in nanoseconds, with a heavy tail. In 63 of 64 draws, the duration is uniform between 0 and
    /// twice `usual_ns`. In the others, a duration of at least `usual_ns` is multiplied by 16 and then doubled
    /// repeatedly, each time with probability 1/2, up to a factor of 16,384.
    ///
    /// The tail is needed because uniform delays would hide bugs that show only if one party pauses while the others
    /// continue.
    #[inline]
    pub fn heavy(&self, usual_ns: u64) -> u64 {
        let even = self.below(2 * usual_ns + 1);
        if !self.one_in(64) {
            return even;
        }
        let doublings = 4 + (self.bits() | 1 << 10).trailing_zeros();
        even.max(usual_ns) << doublings
    }

    /// Puts `things` in a random order.
    pub fn shuffle<T>(&self, things: &mut [T]) {
        for last in (1..things.len()).rev() {
            things.swap(last, self.below(last as u64 + 1) as usize);
        }
    }

    /// Creates an independent stream. Its draws do not advance this one.
    pub fn fork(&self) -> Random {
        Random::new(self.bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_pinned_so_that_seeds_stay_valid() {
        let random = Random::new(1);
        assert_eq!([random.bits(), random.bits()], [0x910a_2dec_8902_5cc1, 0xbeeb_8da1_658e_ec67]);
        assert_eq!((random.below(1000), random.between(5, 6), random.heavy(100)), (971, 5, 89));
        assert_eq!((random.below(0), random.one_in(0), random.one_in(1)), (0, false, true));
    }

    #[test]
    fn a_heavy_tail_is_long_and_rare() {
        let random = Random::new(7);
        let drawn: Vec<u64> = (0..100_000).map(|_| random.heavy(100)).collect();
        let late = drawn.iter().filter(|&&ns| ns > 200).count();
        assert!((1_000..2_500).contains(&late), "{late}");
        assert!(*drawn.iter().max().expect("some") > 100 << 10);
    }
}

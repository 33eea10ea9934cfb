//! Random draws that depend on the seed alone, in every build and on every machine (SplitMix64: Steele, Lea and Flood
//! 2014).

/// A pseudo-random generator. The field is the generator's state, initially the seed.
#[derive(Clone, Debug)]
pub struct Draws(pub u64);

#[allow(clippy::should_implement_trait, reason = "the sequence is infinite")]
impl Draws {
    /// Draws 64 random bits.
    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in `0..end`, computed as a remainder and therefore slightly biased if `end` is huge.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True with a probability of 1 in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// True with a probability of `percent` percent.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A random number in `0.0..1.0`.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with the given probability (0 to 1). Draws no number if the probability is 0.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.share() < probability
    }

    /// A random item of `from`.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Puts items into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }

    /// Draws `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

//! The words that a CAS compares and swaps, behind one trait for all widths.
//!
//! The CPU exchanges words of 8 and 16 bytes. *Wide* words, of 24 and 32 bytes, need a lock (PRISM, section 3.3), which
//! only wide memory has ([`Memory::is_wide`]).
//! Invariant: a word's first byte is the one at its address, and bytes beyond its width are zero.

use crate::memory::{Memory, WIDE_ALIGN, Width};
use crate::mutants;
use crate::op::{Mode, big_endian};

/// A word of 8, 16, 24 or 32 bytes. The methods take its length `len` in bytes.
pub(crate) trait Word: Copy {
    /// Whether the word requires wide memory.
    const IS_WIDE: bool;
    /// The word whose bits are all 1.
    const ONES: Self;

    /// Required alignment of the word's address, in bytes.
    fn align(len: u64) -> u64;

    fn from_bytes(bytes: &[u8]) -> Self;

    /// Returns the word's bytes, followed by zeros.
    fn to_bytes(self) -> impl AsRef<[u8]>;

    /// The bits of `self` where `mask` has ones, and zeros elsewhere.
    fn masked(self, mask: Self) -> Self;

    /// The bits of `other` where `mask` has ones, and the bits of `self` elsewhere.
    fn blended(self, other: Self, mask: Self) -> Self;

    /// Whether `target OP compare` holds, with the operator OP of `mode`.
    fn holds(mode: Mode, len: u64, target: Self, compare: Self) -> bool;

    /// Loads the word at `at` atomically.
    fn load<M: Memory>(memory: &M, at: u64, len: u64) -> Result<Self, M::Wait>;

    /// Stores `new` if the word at `at` is `old`; otherwise returns the current word.
    fn exchange<M: Memory>(
        memory: &M,
        at: u64,
        len: u64,
        old: Self,
        new: Self,
    ) -> Result<Result<(), Self>, M::Wait>;
}

#[inline(always)]
fn width(len: u64) -> Width {
    if len == 8 { Width::W8 } else { Width::W16 }
}

impl Word for u128 {
    const IS_WIDE: bool = false;
    const ONES: u128 = u128::MAX;

    #[inline(always)]
    fn align(len: u64) -> u64 {
        len
    }

    #[inline(always)]
    fn from_bytes(bytes: &[u8]) -> u128 {
        let mut word = [0; 16];
        word[..bytes.len()].copy_from_slice(bytes);
        u128::from_le_bytes(word)
    }

    #[inline(always)]
    fn to_bytes(self) -> impl AsRef<[u8]> {
        self.to_le_bytes()
    }

    #[inline(always)]
    fn masked(self, mask: u128) -> u128 {
        self & mask
    }

    #[inline(always)]
    fn blended(self, other: u128, mask: u128) -> u128 {
        (self & !mask) | (other & mask)
    }

    #[inline(always)]
    fn holds(mode: Mode, len: u64, target: u128, compare: u128) -> bool {
        let width = width(len);
        let ordered =
            |word| if mutants::LITTLE_ENDIAN_COMPARE.is_on() { big_endian(width, word) } else { word };
        mode.holds(width, ordered(target), ordered(compare))
    }

    #[inline(always)]
    fn load<M: Memory>(memory: &M, at: u64, len: u64) -> Result<u128, M::Wait> {
        memory.load(at, width(len))
    }

    #[inline(always)]
    fn exchange<M: Memory>(
        memory: &M,
        at: u64,
        len: u64,
        old: u128,
        new: u128,
    ) -> Result<Result<(), u128>, M::Wait> {
        memory.exchange(at, width(len), old, new)
    }
}

/// A word of 24 or 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Wide([u8; 32]);

impl Word for Wide {
    const IS_WIDE: bool = true;
    const ONES: Wide = Wide([0xff; 32]);

    fn align(_len: u64) -> u64 {
        WIDE_ALIGN
    }

    fn from_bytes(bytes: &[u8]) -> Wide {
        let mut word = [0; 32];
        word[..bytes.len()].copy_from_slice(bytes);
        Wide(word)
    }

    fn to_bytes(self) -> impl AsRef<[u8]> {
        self.0
    }

    fn masked(self, mask: Wide) -> Wide {
        Wide(std::array::from_fn(|i| self.0[i] & mask.0[i]))
    }

    fn blended(self, other: Wide, mask: Wide) -> Wide {
        Wide(std::array::from_fn(|i| (self.0[i] & !mask.0[i]) | (other.0[i] & mask.0[i])))
    }

    fn holds(mode: Mode, _len: u64, target: Wide, compare: Wide) -> bool {
        // Compare byte by byte from the lowest address: this is big-endian order, and the zeros beyond the width are
        // equal.
        mode.holds_for(target.cmp(&compare))
    }

    fn load<M: Memory>(memory: &M, at: u64, len: u64) -> Result<Wide, M::Wait> {
        let mut word = [0; 32];
        memory.read(at, &mut word[..len as usize])?;
        Ok(Wide(word))
    }

    fn exchange<M: Memory>(
        memory: &M,
        at: u64,
        len: u64,
        mut old: Wide,
        new: Wide,
    ) -> Result<Result<(), Wide>, M::Wait> {
        let swapped = memory.exchange_wide(at, &mut old.0[..len as usize], &new.0[..len as usize])?;
        Ok(if swapped { Ok(()) } else { Err(old) })
    }
}

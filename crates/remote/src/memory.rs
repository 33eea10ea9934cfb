//! The memory interface on which chains run. Real memory completes each access at once. A simulator may return *wait*,
//! perform the access interleaved with those of other processes, and run the chain again with the recorded results.
//!
//! Invariant: the next access of a caller depends only on the results so far, so a replay with the same results makes
//! the same accesses.

use crate::arena::Geometry;
use crate::key::Key;
use crate::rights::Rights;

/// Alignment of wide words, which have 24 or 32 bytes.
pub const WIDE_ALIGN: u64 = 32;

/// The width of a word that the CPU exchanges. Words are aligned to their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Width {
    /// A word of 8 bytes.
    W8 = 8,
    /// A word of 16 bytes.
    W16 = 16,
}

impl Width {
    /// The width in bytes.
    #[inline]
    pub const fn bytes(self) -> u64 {
        self as u64
    }
}

/// A node's memory as a runner of chains sees it. Addresses are byte offsets; no address here is scratch.
///
/// Guarantee for READs and WRITEs: each aligned unit of 16 bytes (32 in wide memory) is copied atomically. The units of
/// one access may be copied in any order and at different times.
///
/// Guarantee for a chain and for a call to a service: its accesses take effect in the order in which it makes them. A
/// reader that finds a unit of one write finds all units of the writes before it, or newer ones.
pub trait Memory {
    /// An access without a result yet. The caller must run the chain again once the simulator has recorded the result.
    /// [`std::convert::Infallible`] on real memory, which never waits.
    type Wait;

    /// Addresses of the node's records. Fixed for the lifetime of the memory, so this never waits.
    fn geometry(&self) -> Geometry;

    /// The current rights of `key` to its region: [`Rights::NONE`] unless the secret matches the region's.
    fn admits(&self, key: Key) -> Result<Rights, Self::Wait>;

    /// How many of the `len` bytes from `at` on belong to `region` and are contiguous. The count ends at the end of the
    /// buffer that contains `at`, or at the end of the table if `at` is in a table. 0 if `at` is not in the region.
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Self::Wait>;

    /// Copies `out.len()` bytes of memory, from `at` on, to `out`.
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Self::Wait>;

    /// Copies `bytes` to memory at `at`.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Self::Wait>;

    /// Loads the aligned word at `at` atomically; its lowest byte is the one at `at`.
    fn load(&self, at: u64, width: Width) -> Result<u128, Self::Wait>;

    /// Stores `new` if the aligned word at `at` is `old`; otherwise returns the current word as the inner error. The
    /// exchange is sequentially consistent.
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Self::Wait>;

    /// Announces that the `len` bytes from `at` are about to be written for the first time, so that memory can be
    /// prepared. Does not change the bytes.
    #[inline(always)]
    fn will_fill(&self, _at: u64, _len: u64) {}

    /// Whether words of 24 and 32 bytes can be exchanged here. Fixed for the lifetime of the memory, so this never
    /// waits. Code that runs chains for both wide and other regions has two memories and chooses one by the chain's
    /// key.
    #[inline(always)]
    fn is_wide(&self) -> bool {
        false
    }

    /// Stores `new` and returns true if the word at `at`, a multiple of [`WIDE_ALIGN`], is `old`; otherwise stores the
    /// current word in `old` and returns false. `old` and `new` have 24 or 32 bytes. The exchange is sequentially
    /// consistent.
    ///
    /// # Panics
    /// If the memory is not wide ([`Memory::is_wide`]).
    fn exchange_wide(&self, _at: u64, _old: &mut [u8], _new: &[u8]) -> Result<bool, Self::Wait> {
        panic!("a wide word was exchanged in memory that is not wide")
    }
}

impl<M: Memory + ?Sized> Memory for std::sync::Arc<M> {
    type Wait = M::Wait;
    #[inline(always)]
    fn geometry(&self) -> Geometry {
        (**self).geometry()
    }
    #[inline]
    fn admits(&self, key: Key) -> Result<Rights, M::Wait> {
        (**self).admits(key)
    }
    #[inline(always)]
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, M::Wait> {
        (**self).reach(region, at, len)
    }
    #[inline(always)]
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), M::Wait> {
        (**self).read(at, out)
    }
    #[inline]
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), M::Wait> {
        (**self).write(at, bytes)
    }
    #[inline(always)]
    fn load(&self, at: u64, width: Width) -> Result<u128, M::Wait> {
        (**self).load(at, width)
    }
    #[inline]
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, M::Wait> {
        (**self).exchange(at, width, old, new)
    }
    #[inline]
    fn will_fill(&self, at: u64, len: u64) {
        (**self).will_fill(at, len);
    }
    #[inline(always)]
    fn is_wide(&self) -> bool {
        (**self).is_wide()
    }
    fn exchange_wide(&self, at: u64, old: &mut [u8], new: &[u8]) -> Result<bool, M::Wait> {
        (**self).exchange_wide(at, old, new)
    }
}

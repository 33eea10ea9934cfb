//! The capability for one region of a node's memory.
//!
//! Invariant: a key's secret is 64 random bits. It is never printed, and it is compared in constant time.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A region's number and the secret that proves the right to use it. `| secret u64 | region u32 |`, little-endian.
///
/// A chain carries one key. Every address that the chain accesses, including the targets of pointers, must lie in that
/// key's region or in the chain's own scratch (PRISM, section 3.1: one registration for a table and all it points to).
#[derive(Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Key {
    secret: U64,
    region: U32,
}

impl Key {
    /// The key of region `region` with the 64 secret bits `secret`. Region 0 means no region.
    pub const fn new(region: u32, secret: u64) -> Key {
        Key { secret: U64::from_bytes(secret.to_le_bytes()), region: U32::from_bytes(region.to_le_bytes()) }
    }

    /// Returns the region's index at its node.
    #[inline]
    pub const fn region(self) -> u32 {
        u32::from_le_bytes(self.region.to_bytes())
    }

    /// The secret bits, for code that stores or sends the key.
    #[inline]
    pub const fn secret(self) -> u64 {
        u64::from_le_bytes(self.secret.to_bytes())
    }

    /// Whether `secret` is this key's secret; a secret of 0 never is. The comparison takes the same time for every
    /// guess.
    #[inline]
    pub const fn opens(self, secret: u64) -> bool {
        (self.secret() ^ secret) == 0 && secret != 0
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key(region {})", self.region())
    }
}

//! Addresses: offsets into one node's memory, and the pointers stored there.
//!
//! Invariant: an address means the same in every process, since it is an offset, not a pointer.
//! Invariant: the top bit marks the 32 bytes of scratch that are private to the running chain.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A memory node, identified by its index in the pool's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// A byte offset into a node's memory, or into the running chain's scratch. Stored little-endian, 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(transparent)]
pub struct Addr(U64);

/// Size of a running chain's scratch, in bytes (PRISM, section 3.4: 32 bytes suffice for the paper's three
/// applications).
pub const SCRATCH_SIZE: u64 = 32;

/// Size in bytes of a store's words in the memory of the node's NIC, if the NIC has such words
/// ([`crate::Capabilities::ON_CHIP_WORDS`]).
pub const ON_CHIP_SIZE: u64 = 1024;

const SCRATCH_BIT: u64 = 1 << 63;
/// Marks an address in the memory of the node's NIC. No node's memory is so large.
const ON_CHIP_BIT: u64 = 1 << 62;

impl Addr {
    /// The null address. An indirect access through it fails with [`crate::Status::NullPointer`].
    pub const NULL: Addr = Addr::new(0);

    /// The address of byte `offset` of the node's memory.
    pub const fn new(offset: u64) -> Addr {
        Addr(U64::from_bytes(offset.to_le_bytes()))
    }

    /// The address of byte `offset` of the running chain's scratch.
    pub const fn scratch(offset: u64) -> Addr {
        Addr::new(SCRATCH_BIT | offset)
    }

    /// The address of byte `offset` of the store's words in the memory of the node's NIC. The store is that of the
    /// chain's key, so no chain can name another store's words. The words start as zeros, and a restart of the node
    /// loses them. Without [`crate::Capabilities::ON_CHIP_WORDS`] the address is outside every region.
    pub const fn on_chip(offset: u64) -> Addr {
        Addr::new(ON_CHIP_BIT | offset)
    }

    /// The offset into the store's words in the memory of the node's NIC, if this address is there.
    pub const fn on_chip_offset(self) -> Option<u64> {
        let raw = self.raw();
        if raw & (SCRATCH_BIT | ON_CHIP_BIT) == ON_CHIP_BIT { Some(raw & !ON_CHIP_BIT) } else { None }
    }

    /// The raw 64 bits: an offset into the node's memory, unless [`Addr::scratch_offset`] returns `Some`.
    pub const fn raw(self) -> u64 {
        u64::from_le_bytes(self.0.to_bytes())
    }

    /// The offset into scratch, if this address is in scratch.
    pub const fn scratch_offset(self) -> Option<u64> {
        let raw = self.raw();
        if raw & SCRATCH_BIT != 0 { Some(raw & !SCRATCH_BIT) } else { None }
    }

    /// Whether this is [`Addr::NULL`].
    pub const fn is_null(self) -> bool {
        self.raw() == 0
    }

    /// The address `bytes` higher. The sum wraps instead of panicking, since a peer may send any address. The node
    /// checks the result like any other address.
    pub const fn plus(self, bytes: u64) -> Addr {
        Addr::new(self.raw().wrapping_add(bytes))
    }
}

impl std::fmt::Debug for Addr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.scratch_offset(), self.on_chip_offset()) {
            (Some(offset), _) => write!(f, "scratch+{offset}"),
            (_, Some(offset)) => write!(f, "on-chip+{offset}"),
            (None, None) => write!(f, "{:#x}", self.raw()),
        }
    }
}

/// A pointer together with the number of bytes that may be accessed through it. A bounded access dereferences such a
/// pointer.
///
/// `| ptr u64 | bound u32 | tag u32 |`, aligned to 16 bytes, so that the node reads and compares all three fields as
/// one word. The node ignores `tag`; CAS compares it. (PRISM's pointer is `{ptr, bound}`, section 3.1; we add the tag
/// against ABA.)
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct BoundedPtr {
    /// Address of the first byte that may be accessed.
    pub ptr: Addr,
    /// Number of bytes that may be accessed.
    pub bound: U32,
    /// Value that the protocol chooses, for example a version against ABA.
    pub tag: U32,
}

const _: () = assert!(size_of::<BoundedPtr>() == 16);

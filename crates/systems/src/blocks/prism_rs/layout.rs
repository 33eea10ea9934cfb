//! The bytes of a PRISM-RS store, the same at each replica except for addresses.
//!
//! ```text
//! table    | highest u64 | zeros, to byte 64 | register 16 bytes | x blocks
//! highest  | the highest writer id that a client has tried to claim here, big-endian
//! register | tag u64 | address u64 of the buffer with the block's bytes, 0 if the block is all zeros |
//! ```
//!
//! Invariant: the highest writer id never falls. So ids are never reused.
//! Invariant: a register's tag never falls.

use farside_remote::service::Extent;
use farside_remote::{Addr, Key};
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::KIND;
pub use crate::blocks::tag::{Tag, WRITERS_MAX, WriterId};
use crate::blocks::{BLOCK_MAX, BLOCK_MIN, Stripe};

/// Number of writer ids of a store whose parameters give none. Ids take no memory.
pub const WRITERS: u32 = WRITERS_MAX;

/// The highest writer id has a cache line of its own.
const REGISTERS_OFFSET: u64 = 64;
pub(super) const REGISTER_SIZE: u64 = size_of::<Register>() as u64;

/// Register of a block at one replica.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Register {
    /// Tag of the newest write that the replica knows.
    pub tag: Tag,
    /// Buffer with that write's bytes; null for zeros.
    pub at: Addr,
}

/// Mask of the tag in a register.
pub(super) const TAG_ALONE: Register = Register { tag: Tag::ALL_BITS, at: Addr::NULL };
/// Mask of a whole register.
pub(super) const WHOLE: Register = Register { tag: Tag::ALL_BITS, at: Addr::new(u64::MAX) };

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Length of a block in bytes.
    pub block: u32,
    /// Number of blocks.
    pub blocks: u64,
    /// Number of writer ids.
    pub writers: u32,
    /// Part of a volume that the store holds; absent if it is alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe: Option<Stripe>,
}

impl Spec {
    /// Checks the parameters.
    ///
    /// # Errors
    /// No store has these parameters.
    pub fn check(&self) -> Result<(), String> {
        let block = self.block as usize;
        if !block.is_multiple_of(BLOCK_MIN) || !(BLOCK_MIN..=BLOCK_MAX).contains(&block) {
            return Err(format!(
                "blocks of {block} bytes are not possible in a {KIND} store: give a multiple of {BLOCK_MIN} up to \
                 {BLOCK_MAX}"
            ));
        }
        if !(1..=WRITERS_MAX).contains(&self.writers) {
            return Err(format!(
                "{} writer ids are not possible in a {KIND} store: give 1 to {WRITERS_MAX}",
                self.writers
            ));
        }
        self.stripe.as_ref().map_or(Ok(()), Stripe::check)?;
        match self.table_len() {
            Some(_) if self.blocks > 0 => Ok(()),
            _ => {
                Err(format!("{} blocks are not possible in a {KIND} store: give another number", self.blocks))
            }
        }
    }

    /// Size of the table in bytes; `None` if it exceeds the address space.
    pub fn table_len(&self) -> Option<u64> {
        self.blocks.checked_mul(REGISTER_SIZE)?.checked_add(REGISTERS_OFFSET)
    }
}

/// A replica's table.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Key of the store at this replica.
    pub key: Key,
    /// Parameters of the store.
    pub spec: Spec,
    at: Addr,
}

impl Table {
    /// Creates access to the table that the catalog describes.
    ///
    /// # Errors
    /// The description is impossible. A node may answer anything.
    pub fn new(parameters: &str, extent: Extent) -> Result<Table, String> {
        let spec: Spec = serde_json::from_str(parameters)
            .map_err(|error| format!("invalid description of a {KIND} store in the catalog: {error}"))?;
        spec.check()?;
        let fits = spec.table_len().is_some_and(|len| len <= extent.len);
        if !fits || extent.at.checked_add(extent.len).is_none() {
            return Err(format!(
                "invalid description of a {KIND} store in the catalog: {} blocks in {} bytes",
                spec.blocks, extent.len
            ));
        }
        Ok(Table { key: extent.key, spec, at: Addr::new(extent.at) })
    }

    /// Address of the highest writer id that a client has tried to claim.
    pub(super) fn highest(&self) -> Addr {
        self.at
    }

    /// Address of a block's register. The block is one of this store.
    pub fn register(&self, block: u64) -> Addr {
        self.at.plus(REGISTERS_OFFSET + block * REGISTER_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_parameters_are_refused() {
        let good = Spec { block: 4096, blocks: 10, writers: 4, stripe: None };
        assert_eq!(good.check(), Ok(()));
        for bad in [
            Spec { block: 0, ..good },
            Spec { block: 1000, ..good },
            Spec { block: 64 << 10, ..good },
            Spec { blocks: 0, ..good },
            Spec { blocks: u64::MAX / 16, ..good },
            Spec { writers: 0, ..good },
            Spec { writers: WRITERS_MAX + 1, ..good },
            Spec { stripe: Some(Stripe { volume: 1, index: 2, count: 2 }), ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        let extent = |len| Extent { key: Key::new(1, 1), at: 1 << 20, len };
        let parameters = serde_json::to_string(&good).expect("plain data");
        let len = good.table_len().expect("small");
        assert!(Table::new(&parameters, extent(len)).is_ok());
        assert!(Table::new(&parameters, extent(len - 1)).is_err());
        assert!(Table::new("{}", extent(len)).is_err());
    }
}

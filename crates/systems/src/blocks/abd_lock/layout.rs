//! The bytes of an ABDLOCK store, the same at each replica except for addresses.
//!
//! ```text
//! table   | highest u64 | zeros, to byte 64 | entry | x writers | zeros | block | x blocks
//! highest | the highest client id that is known to be claimed: a hint
//! entry   | nonce u64 |                without leases
//!         | nonce u64 | beat u64 |     with leases
//! nonce   | of the client that has claimed the id; 0 if the id is unclaimed
//! beat    | number of renewals of the client's lease
//! block   | lock word u64 | tag u64 | bytes | zeros, to a multiple of 64 |                  without leases
//!         | lock word u64 | tag u64 | bytes | tag u64 | bytes | zeros, to a multiple of 64 |   with leases
//! ```
//!
//! The lock word is a [`crate::lease::LockWord`]: the id of the client that holds the lock, and the token of one
//! attempt of this client. The tag is a [`Tag`].
//!
//! A store with leases has two copies of each block. The copy with the higher tag is the block, and the other one is
//! its *spare*: the next write goes there. If the tags are equal, the first copy is the block.
//!
//! Invariant: an entry has its id's owner's nonce before the owner takes its first lock at the replica, and keeps it.
//! So ids are never reused.
//! Invariant: a block's tags and bytes change only while its lock is held, and the higher tag never falls.

use super::KIND;
use crate::blocks::tag::{Tag, WriterId};
use crate::blocks::{BLOCK_MAX, BLOCK_MIN};
use farside_remote::service::Extent;
use farside_remote::{Addr, Key};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::time::Duration;

/// Largest number of client ids of a store: an id has 16 bits in a lock word.
pub const WRITERS_MAX: u32 = u16::MAX as u32;
/// Number of client ids of a store whose parameters give none.
pub const WRITERS: u32 = WRITERS_MAX;

const LINE: u64 = 64;
const NONCES_OFFSET: u64 = LINE;
const NONCE_SIZE: u64 = 8;
const BEAT_SIZE: u64 = 8;
const LOCK_SIZE: u64 = 8;
/// Length of the longest block of a store with leases: a client reads both copies of a block in one chain.
pub const BLOCK_MAX_WITH_LEASES: usize = BLOCK_MAX - BLOCK_MIN;
/// Possible lengths of leases. Clients renew their leases four times within this time.
pub const LEASES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3600);
/// Length of a tag in bytes. A block's bytes follow its tag.
pub(super) const TAG_SIZE: usize = size_of::<Tag>();

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Length of a block in bytes.
    pub block: u32,
    /// Number of blocks.
    pub blocks: u64,
    /// Number of client ids.
    pub writers: u32,
    /// Length of a client's lease in microseconds. If absent, the store has no leases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_us: Option<u64>,
}

impl Spec {
    /// Checks the parameters.
    ///
    /// # Errors
    /// No store has these parameters.
    pub fn check(&self) -> Result<(), String> {
        let block = self.block as usize;
        let block_max = self.block_max();
        if !block.is_multiple_of(BLOCK_MIN) || !(BLOCK_MIN..=block_max).contains(&block) {
            let with = if self.lease_us.is_some() { " with leases" } else { "" };
            return Err(format!(
                "blocks of {block} bytes are not possible in an {KIND} store{with}: give a multiple of {BLOCK_MIN} up \
                 to {block_max}"
            ));
        }
        if let Some(lease) = self.lease().filter(|lease| !LEASES.contains(lease)) {
            return Err(format!(
                "leases of {lease:?} are not possible in an {KIND} store: give {:?} to {:?}",
                LEASES.start(),
                LEASES.end()
            ));
        }
        if !(1..=WRITERS_MAX).contains(&self.writers) {
            return Err(format!(
                "{} client ids are not possible in an {KIND} store: give 1 to {WRITERS_MAX}",
                self.writers
            ));
        }
        match self.table_len() {
            Some(_) if self.blocks > 0 => Ok(()),
            _ => Err(format!(
                "{} blocks are not possible in an {KIND} store: give another number",
                self.blocks
            )),
        }
    }

    /// Size of the table in bytes; `None` if it exceeds the address space.
    pub fn table_len(&self) -> Option<u64> {
        self.blocks.checked_mul(self.block_size())?.checked_add(self.blocks_offset())
    }

    /// Length of a client's lease; `None` if the store has no leases.
    pub fn lease(&self) -> Option<Duration> {
        self.lease_us.map(Duration::from_micros)
    }

    /// Number of copies of each block at each replica.
    pub fn copies(&self) -> usize {
        if self.lease_us.is_some() { 2 } else { 1 }
    }

    /// Length of the longest block.
    pub(super) fn block_max(&self) -> usize {
        if self.lease_us.is_some() { BLOCK_MAX_WITH_LEASES } else { BLOCK_MAX }
    }

    /// Distance between two blocks in bytes.
    pub(super) fn block_size(&self) -> u64 {
        (LOCK_SIZE + self.copies() as u64 * self.content_len() as u64).next_multiple_of(LINE)
    }

    /// Length of a copy of a block with its tag.
    pub(super) fn content_len(&self) -> usize {
        TAG_SIZE + self.block as usize
    }

    fn entry_size(&self) -> u64 {
        NONCE_SIZE + if self.lease_us.is_some() { BEAT_SIZE } else { 0 }
    }

    pub(super) fn blocks_offset(&self) -> u64 {
        (NONCES_OFFSET + u64::from(self.writers) * self.entry_size()).next_multiple_of(LINE)
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
            .map_err(|error| format!("invalid description of an {KIND} store in the catalog: {error}"))?;
        spec.check()?;
        let fits = spec.table_len().is_some_and(|len| len <= extent.len);
        if !fits || extent.at.checked_add(extent.len).is_none() {
            return Err(format!(
                "invalid description of an {KIND} store in the catalog: {} blocks in {} bytes",
                spec.blocks, extent.len
            ));
        }
        Ok(Table { key: extent.key, spec, at: Addr::new(extent.at) })
    }

    /// Address of the highest id that is known to be claimed.
    pub(super) fn highest(&self) -> Addr {
        self.at
    }

    /// Address of an id's nonce, with which its entry begins. The id is one of this store.
    pub(super) fn nonce(&self, id: WriterId) -> Addr {
        self.at.plus(NONCES_OFFSET + u64::from(id.number() - 1) * self.spec.entry_size())
    }

    /// Address of an id's beat. The id is one of this store, which has leases.
    pub(super) fn beat(&self, id: WriterId) -> Addr {
        self.nonce(id).plus(NONCE_SIZE)
    }

    /// Address of a block's lock word. The block is one of this store.
    pub fn lock(&self, block: u64) -> Addr {
        self.at.plus(self.spec.blocks_offset() + block * self.spec.block_size())
    }

    /// Address of the tag of a copy of a block, which the copy's bytes follow. The block is one of this store, and the
    /// copy is one of [`Spec::copies`].
    pub fn content(&self, block: u64, copy: usize) -> Addr {
        self.lock(block).plus(LOCK_SIZE + copy as u64 * self.spec.content_len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_parameters_are_refused() {
        let good = Spec { block: 4096, blocks: 10, writers: 4, lease_us: None };
        assert_eq!(good.check(), Ok(()));
        for bad in [
            Spec { block: 0, ..good },
            Spec { block: 1000, ..good },
            Spec { block: 64 << 10, ..good },
            Spec { blocks: 0, ..good },
            Spec { blocks: u64::MAX / 4096, ..good },
            Spec { writers: 0, ..good },
            Spec { writers: WRITERS_MAX + 1, ..good },
            Spec { lease_us: Some(999), ..good },
            Spec { lease_us: Some(3_600_000_001), ..good },
            Spec { lease_us: Some(1_000), block: BLOCK_MAX as u32, ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        let extent = |len| Extent { key: Key::new(1, 1), at: 1 << 20, len };
        let parameters = serde_json::to_string(&good).expect("plain data");
        let len = good.table_len().expect("small");
        assert!(Table::new(&parameters, extent(len)).is_ok());
        assert!(Table::new(&parameters, extent(len - 1)).is_err());
        assert!(Table::new(&parameters, Extent { at: u64::MAX, ..extent(len) }).is_err());
        assert!(Table::new("{}", extent(len)).is_err());
    }

    #[test]
    fn parts_of_a_table_do_not_overlap_and_words_are_aligned() {
        for lease_us in [None, Some(1_000)] {
            let spec = Spec { block: 512, blocks: 3, writers: 5, lease_us };
            let parameters = serde_json::to_string(&spec).expect("plain data");
            assert_eq!(serde_json::from_str::<Spec>(&parameters).expect("the same"), spec);
            let len = spec.table_len().expect("small");
            let table =
                Table::new(&parameters, Extent { key: Key::new(1, 1), at: 1 << 20, len }).expect("a table");
            let mut parts = vec![(table.highest(), 8)];
            for id in (1..=5).map(|id| WriterId::new(id).expect("an id")) {
                parts.push((table.nonce(id), NONCE_SIZE));
                if lease_us.is_some() {
                    parts.push((table.beat(id), BEAT_SIZE));
                }
            }
            for block in 0..3 {
                assert!(table.lock(block).raw().is_multiple_of(LINE));
                parts.push((table.lock(block), LOCK_SIZE));
                parts.extend((0..spec.copies()).map(|copy| (table.content(block, copy), 8 + 512)));
            }
            assert!(parts.iter().all(|(at, _)| at.raw().is_multiple_of(8)), "{parts:?}");
            parts.push((Addr::new((1 << 20) + len), 0));
            assert!(parts.windows(2).all(|pair| pair[0].0.raw() + pair[0].1 <= pair[1].0.raw()), "{parts:?}");
        }
    }
}

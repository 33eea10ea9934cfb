//! The bytes of a FaRM-KV store: buckets of slots with keys and values, and blocks for keys that find no slot there.
//!
//! ```text
//! table    | intents | bucket 0 | ... | bucket n | block 0 | ... |            n buckets are homes of keys
//! bucket   | version u64 | 0 u64 | content, in lines |                        super::super::inplace, 64-byte aligned
//! block    | version u64 | incarnation u64 | content, in lines |
//! content  | own joint u32 | former joint u32 | next block plus 1 u32 | its incarnation u32 | slot, x 4 |
//! slot     | generation u32 | value length u32 | key length u16 | 0 u16 | key | value | filler |
//! ```
//!
//! All numbers are little-endian. A slot with a key length of 0 has no key. `next` of a block that is in no chain names
//! the next spare block.
//!
//! A key lies in a slot of its home bucket, of the bucket after it, or of a block of the home bucket's chain. The two
//! buckets are the key's *neighbourhood*, of H = 8 slots, which one READ returns.
//!
//! Invariant: `own` of a bucket and `former` of the bucket after it count the keys that were moved from the one to the
//! other. They are equal except while such a move is under way.
//! Invariant: a key in a chain stays in its block until it is deleted, and a block in a chain has a key.
//! Invariant: a block's incarnation rises when the block leaves a chain and when it enters one.

use crate::hash_slots;
pub use crate::hash_slots::Placement;
use crate::kv::Version;
use crate::kv::inplace::{Intents, START, object_len};
use crate::kv::places::Places;
use farside_remote::service::Extent;
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Number of slots of a bucket or block: half of the neighbourhood.
pub const BUCKET_SLOTS: usize = 4;
/// Number of blocks of the longest chain.
pub const CHAIN_MAX: usize = 16;
/// Largest length of a key and its value together, in bytes. One READ returns a neighbourhood.
pub const PAIR_MAX: usize = 6 << 10;
/// Number of items that the largest table can hold.
pub const ITEM_COUNT_MAX: u64 = 1 << 31;
/// Size of the header of a slot in bytes.
pub const SLOT_HEADER: usize = size_of::<SlotHeader>();
const _: () = assert!(SLOT_HEADER == 12);
/// Smallest number of blocks of a table.
const BLOCKS_MIN: u64 = 16;
/// Number of home buckets for each block.
const BUCKETS_PER_BLOCK: u64 = 8;
/// Largest share of the slots of home buckets that the items of a table take: 3 of 4.
const FILL: [u64; 2] = [3, 4];

/// First 16 bytes of the content of a bucket or block.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Start {
    /// Number of keys that were moved from this bucket to the next one ("joint version").
    pub own: U32,
    /// Number of keys that were moved to this bucket from the one before.
    pub former: U32,
    /// Index of the next block of the chain, plus 1; 0 if there is none.
    pub next: U32,
    /// Incarnation of the next block.
    pub next_incarnation: U32,
}

const _: () = assert!(size_of::<Start>() == START);

impl Start {
    pub(super) fn bytes(self) -> [u8; START] {
        self.as_bytes().try_into().expect("its size")
    }
}

/// Header of a slot.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SlotHeader {
    generation: U32,
    value_len: U32,
    key_len: U16,
    reserved: U16,
}

impl SlotHeader {
    /// The slot that has no key.
    pub(super) fn empty() -> SlotHeader {
        SlotHeader::new_zeroed()
    }
}

/// Encodes the slot of a key.
pub(super) fn slot_of(version: Version, key: &[u8], value: &[u8]) -> Vec<u8> {
    let header = SlotHeader {
        generation: version.0.into(),
        value_len: (value.len() as u32).into(),
        key_len: (key.len() as u16).into(),
        reserved: U16::ZERO,
    };
    [header.as_bytes(), key, value].concat()
}

/// A decoded slot that has a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot<'a> {
    /// Version of the value.
    pub version: Version,
    /// The key.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
}

/// Content of a bucket or block.
#[derive(Clone, Copy, Debug)]
pub struct Content<'a> {
    /// First bytes of the content.
    pub start: Start,
    slots: &'a [u8],
}

impl<'a> Content<'a> {
    /// Decodes the content in `bytes`.
    pub fn of(bytes: &'a [u8]) -> Option<Content<'a>> {
        let (start, slots) = Start::read_from_prefix(bytes).ok()?;
        (!slots.is_empty() && slots.len().is_multiple_of(BUCKET_SLOTS)).then_some(Content { start, slots })
    }

    /// Iterates over the slots. `None` stands for a slot without a key, or with bytes that no service writes.
    pub fn slots(self) -> impl Iterator<Item = Option<Slot<'a>>> {
        self.slots.chunks(self.slots.len() / BUCKET_SLOTS).map(|slot| {
            let (header, rest) = SlotHeader::ref_from_prefix(slot).ok()?;
            let (key, rest) = rest.split_at_checked(header.key_len.get().into())?;
            let value = rest.get(..header.value_len.get() as usize)?;
            (!key.is_empty()).then_some(Slot { version: Version(header.generation.get()), key, value })
        })
    }

    /// Returns the slot of a key, with its index, if it has one here.
    pub fn find(self, key: &[u8]) -> Option<(usize, Slot<'a>)> {
        self.slots().enumerate().find_map(|(index, slot)| Some((index, slot.filter(|slot| slot.key == key)?)))
    }

    /// Returns the index of a slot without a key, if there is one.
    pub fn vacant(self) -> Option<usize> {
        self.slots().position(|slot| slot.is_none())
    }
}

/// Description of the table, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Number of buckets that are homes of keys: a power of two.
    pub buckets: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Largest length of a key and its value together, in bytes.
    pub pair: u32,
    /// Seed of the hash that maps keys to buckets.
    pub seed: u64,
    /// Function that maps keys to buckets.
    pub placement: Placement,
}

impl TableSpec {
    pub(super) fn slot_len(&self) -> usize {
        SLOT_HEADER + self.pair as usize
    }

    /// Length of the content of a bucket or block.
    pub fn content_len(&self) -> usize {
        START + BUCKET_SLOTS * self.slot_len()
    }

    /// Length of a bucket or block in bytes.
    pub fn bucket_len(&self) -> u64 {
        object_len(self.content_len())
    }

    /// Offset of a slot in a content.
    pub(super) fn slot_at(&self, slot: usize) -> usize {
        START + slot * self.slot_len()
    }

    /// A change writes two buckets or blocks, and one slot of each.
    fn intent_len(&self) -> u64 {
        Intents::len_of(2, 2 * self.slot_len())
    }
}

impl Places for TableSpec {
    const PAIR_MAX: usize = PAIR_MAX;

    fn of(items: u64, pair: u32, seed: u64, placement: Placement) -> Option<TableSpec> {
        if items > ITEM_COUNT_MAX || !(1..=PAIR_MAX).contains(&(pair as usize)) {
            return None;
        }
        let slots = (items * FILL[1]).div_ceil(FILL[0]);
        let buckets = slots.div_ceil(BUCKET_SLOTS as u64).next_power_of_two().max(2);
        let blocks = (buckets / BUCKETS_PER_BLOCK).max(BLOCKS_MIN);
        Some(TableSpec { buckets, blocks, pair, seed, placement })
    }

    /// Number of slots of the buckets that are homes of keys.
    fn places(&self) -> u64 {
        self.buckets * BUCKET_SLOTS as u64
    }
}

impl hash_slots::Spec for TableSpec {
    #[inline]
    fn slots(&self) -> (u64, u64, Placement) {
        (self.buckets, self.seed, self.placement)
    }

    fn table_len(&self) -> Option<u64> {
        if self.pair as usize > PAIR_MAX {
            return None;
        }
        let objects = self.buckets.checked_add(1)?.checked_add(self.blocks)?;
        objects.checked_mul(self.bucket_len())?.checked_add(2 * self.intent_len())
    }
}

/// A table as the catalog describes it.
pub type Table = hash_slots::Table<TableSpec>;

impl Table {
    /// Returns the index of the home bucket of `key`.
    pub fn home(&self, key: &[u8]) -> u64 {
        self.first_slot(key)
    }

    /// Returns the address of a bucket.
    pub fn bucket_at(&self, bucket: u64) -> u64 {
        self.extent.at + 2 * self.spec.intent_len() + bucket * self.spec.bucket_len()
    }

    /// Returns the address of a block.
    pub fn block_at(&self, block: u64) -> u64 {
        self.bucket_at(self.spec.buckets + 1 + block)
    }

    pub(super) fn intents(&self) -> Intents {
        let Extent { key, at, len } = self.extent;
        let extent = Extent { key, at, len };
        Intents { extent, len: self.spec.intent_len(), content: self.spec.content_len() }
    }
}

//! The bytes of a store with a cached index: buckets of entries that point to items, and the items.
//!
//! ```text
//! table    | intents | bucket 0 | ... | bucket n | extra bucket 0 | ... | item 0 | ... |
//! bucket   | entry, x 7 | link |                                               128 bytes, aligned
//! entry    | item plus 1: 40 bits | bits of the key's hash: 24 bits | incarnation u64 |   0 if it has no key
//! link     | extra bucket plus 1 u64 | 0 u64 |                                 0 if the chain ends here
//! item     | version u64 | incarnation u64 | content, in lines |               super::super::inplace, 64-byte aligned
//! content  | generation u32 | value length u32 | key length u16 | 0 u16 | next spare item plus 1 u32 | key | value |
//! ```
//!
//! All numbers are little-endian. `next spare` counts only in an item that no entry points to.
//!
//! Invariant: an entry and a link are written and read as a whole.
//! Invariant: a key keeps its entry and its item until it is deleted. A link is written once.
//! Invariant: an item's incarnation is that of the entry which points to it, and rises when a key gets the item and
//! when the key is deleted. So an entry that a client has cached leads to its key, or to another incarnation.

use crate::hash_slots;
pub use crate::hash_slots::Placement;
use crate::kv::Version;
use crate::kv::inplace::{Intents, START, object_len};
use crate::kv::places::Places;
use farside_remote::service::Extent;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Number of entries of a bucket.
pub const BUCKET_ENTRIES: usize = 7;
/// Size of a bucket in bytes.
pub const BUCKET_SIZE: u64 = size_of::<Bucket>() as u64;
const _: () = assert!(BUCKET_SIZE == 128);
/// Number of buckets of the longest chain.
pub const CHAIN_MAX: usize = 64;
/// Largest length of a key and its value together, in bytes. One READ returns an item.
pub const PAIR_MAX: usize = 48 << 10;
/// Number of items of the largest table.
pub const ITEM_COUNT_MAX: u64 = 1 << 31;
/// Smallest number of items of a table.
const ITEMS_MIN: u64 = 64;
/// Smallest number of extra buckets of a table.
const EXTRA_MIN: u64 = 16;
/// Number of buckets for each extra one. With most items, a hash gives a sixth of the buckets more keys than entries.
const BUCKETS_PER_EXTRA: u64 = 2;
/// Largest share of the entries of buckets that the items of a table take: 3 of 4.
const FILL: [u64; 2] = [3, 4];
const ITEM_BITS: u32 = 40;

/// Entry of a bucket.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Entry {
    item_and_tag: U64,
    /// Incarnation of the item.
    pub incarnation: U64,
}

const _: () = assert!(size_of::<Entry>() == START);

impl Entry {
    /// Entry that has no key.
    pub const NONE: Entry = Entry { item_and_tag: U64::ZERO, incarnation: U64::ZERO };

    pub(super) fn bytes(self) -> [u8; START] {
        self.as_bytes().try_into().expect("its size")
    }

    /// The link to an extra bucket.
    pub(super) fn link(bucket: u64) -> Entry {
        Entry { item_and_tag: (bucket + 1).into(), incarnation: U64::ZERO }
    }
}

/// A bucket of the index.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Bucket {
    /// The entries.
    pub entries: [Entry; BUCKET_ENTRIES],
    link: Entry,
}

impl Bucket {
    /// Index of the next extra bucket of the chain.
    pub fn next(&self) -> Option<u64> {
        self.link.item_and_tag.get().checked_sub(1)
    }
}

/// First 16 bytes of the content of an item.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Start {
    /// Number of the install in the store, modulo 2^31.
    pub generation: U32,
    value_len: U32,
    key_len: U16,
    reserved: U16,
    /// Next spare item, plus 1; 0 if there is none.
    pub next_spare: U32,
}

const _: () = assert!(size_of::<Start>() == START);

impl Start {
    pub(super) fn of(version: Version, key: &[u8], value: &[u8]) -> Start {
        Start {
            generation: version.0.into(),
            value_len: (value.len() as u32).into(),
            key_len: (key.len() as u16).into(),
            ..Start::new_zeroed()
        }
    }

    pub(super) fn bytes(self) -> [u8; START] {
        self.as_bytes().try_into().expect("its size")
    }
}

/// A decoded item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item<'a> {
    /// Version of the value.
    pub version: Version,
    /// The key.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
}

impl<'a> Item<'a> {
    /// Decodes the content in `bytes`; `None` if no service writes such bytes.
    pub fn of(bytes: &'a [u8]) -> Option<Item<'a>> {
        let (start, rest) = Start::ref_from_prefix(bytes).ok()?;
        let (key, rest) = rest.split_at_checked(start.key_len.get().into())?;
        let value = rest.get(..start.value_len.get() as usize)?;
        Some(Item { version: Version(start.generation.get()), key, value })
    }
}

/// Description of the table, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Number of buckets in which chains begin: a power of two.
    pub buckets: u64,
    /// Number of extra buckets.
    pub extra: u64,
    /// Number of items.
    pub items: u64,
    /// Largest length of a key and its value together, in bytes.
    pub pair: u32,
    /// Seed of the hash that maps keys to buckets.
    pub seed: u64,
    /// Function that maps keys to buckets.
    pub placement: Placement,
}

impl TableSpec {
    /// Length of the content of an item.
    pub fn content_len(&self) -> usize {
        START + self.pair as usize
    }

    /// Length of an item in bytes.
    pub fn item_len(&self) -> u64 {
        object_len(self.content_len())
    }

    /// A change writes an item, its entry and a link.
    fn intent_len(&self) -> u64 {
        Intents::len_of(3, self.pair as usize)
    }

    fn items_offset(&self) -> Option<u64> {
        let buckets = self.buckets.checked_add(self.extra)?.checked_mul(BUCKET_SIZE)?;
        buckets.checked_add(2 * self.intent_len())
    }
}

impl Places for TableSpec {
    const PAIR_MAX: usize = PAIR_MAX;

    fn of(items: u64, pair: u32, seed: u64, placement: Placement) -> Option<TableSpec> {
        if items > ITEM_COUNT_MAX || !(1..=PAIR_MAX).contains(&(pair as usize)) {
            return None;
        }
        let entries = (items * FILL[1]).div_ceil(FILL[0]);
        let buckets = entries.div_ceil(BUCKET_ENTRIES as u64).next_power_of_two().max(2);
        let extra = (buckets / BUCKETS_PER_EXTRA).max(EXTRA_MIN);
        let items = items.max(ITEMS_MIN);
        Some(TableSpec { buckets, extra, items, pair, seed, placement })
    }

    /// Number of entries of the buckets in which chains begin.
    fn places(&self) -> u64 {
        self.buckets * BUCKET_ENTRIES as u64
    }
}

impl hash_slots::Spec for TableSpec {
    #[inline]
    fn slots(&self) -> (u64, u64, Placement) {
        (self.buckets, self.seed, self.placement)
    }

    fn table_len(&self) -> Option<u64> {
        if self.pair as usize > PAIR_MAX || self.items > ITEM_COUNT_MAX {
            return None;
        }
        self.items.checked_mul(self.item_len())?.checked_add(self.items_offset()?)
    }
}

/// A table as the catalog describes it.
pub struct Table {
    inner: hash_slots::Table<TableSpec>,
    tags: RapidSecrets,
}

impl Table {
    /// Parses the catalog's description of a table.
    ///
    /// # Errors
    /// The description is invalid.
    pub fn new(parameters: &str, extent: Extent) -> Result<Table, String> {
        let inner = hash_slots::Table::<TableSpec>::new(parameters, extent)?;
        let tags = RapidSecrets::seed(!inner.spec.seed);
        Ok(Table { inner, tags })
    }

    /// Description of the table in the catalog.
    pub fn spec(&self) -> &TableSpec {
        &self.inner.spec
    }

    /// Address, length and region key of the table.
    pub fn extent(&self) -> Extent {
        self.inner.extent
    }

    /// Returns the index of the bucket in which the chain of `key` begins.
    pub fn home(&self, key: &[u8]) -> u64 {
        self.inner.first_slot(key)
    }

    /// Number of buckets, with the extra ones, which follow the others.
    pub fn buckets(&self) -> u64 {
        self.spec().buckets + self.spec().extra
    }

    /// Returns the index of an extra bucket among all buckets, if there is such a bucket.
    pub(super) fn extra(&self, extra: u64) -> Option<u64> {
        (extra < self.spec().extra).then(|| self.spec().buckets + extra)
    }

    /// Returns the address of a bucket.
    pub fn bucket_at(&self, bucket: u64) -> u64 {
        self.extent().at + 2 * self.spec().intent_len() + bucket * BUCKET_SIZE
    }

    /// Returns the address of an entry. The entry after the last one is the link.
    pub fn entry_at(&self, bucket: u64, entry: usize) -> u64 {
        self.bucket_at(bucket) + (entry * size_of::<Entry>()) as u64
    }

    /// Returns the address of an item.
    pub fn item_at(&self, item: u64) -> u64 {
        self.bucket_at(self.buckets()) + item * self.spec().item_len()
    }

    /// The entry of a key that has this item.
    pub(super) fn entry(&self, key: &[u8], item: u64, incarnation: u64) -> Entry {
        let item_and_tag = self.tag(key) << ITEM_BITS | (item + 1);
        Entry { item_and_tag: item_and_tag.into(), incarnation: incarnation.into() }
    }

    /// The item of a key to which this entry may belong; `None` if it belongs to another key or to none.
    pub fn item_of(&self, key: &[u8], entry: &Entry) -> Option<u64> {
        let word = entry.item_and_tag.get();
        let item = (word & ((1 << ITEM_BITS) - 1)).checked_sub(1)?;
        (word >> ITEM_BITS == self.tag(key) && item < self.spec().items).then_some(item)
    }

    /// Bits of a key's hash that its entry has.
    pub fn tag(&self, key: &[u8]) -> u64 {
        rapidhash_v3_seeded(key, &self.tags) >> ITEM_BITS
    }

    pub(super) fn intents(&self) -> Intents {
        Intents { extent: self.extent(), len: self.spec().intent_len(), content: self.spec().content_len() }
    }
}

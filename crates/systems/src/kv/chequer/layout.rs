//! The bytes of a Chequer store. All of it lies in one table segment, which is divided into partitions.
//!
//! ```text
//! table      | partition 0 | partition 1 | ...
//! partition  | head, 192 bytes | record 0 | record 1 | ... | area of values |
//! head       | epoch u64 | counter u64 | 0 | bucket u64 | record | CRC of bucket and record u64 | 0 |
//! record     | in use u8 | key length u8 | key, 46 bytes | pointer u64 | CRC of the value's block u64 | stamp u64 |
//!            | CRC of the record's bytes before u64 |                              80 bytes
//! pointer    | length of the value's block, 24 bits | address of the value's block, 40 bits |
//! block      | length of the value u64 | the key, if it is longer than 46 bytes | value |
//! stamp      | epoch, 24 bits | counter, 40 bits |
//! ```
//!
//! All numbers are little-endian. CRCs are CRC-64/NVME. A bucket that never had a record is all zero. A record of a key
//! that is longer than 46 bytes has the key length 255, and in the place of the key `| digest, 16 bytes | length u16
//! |`.
//!
//! A *block of buckets* is what one READ fetches: [`Spec::block_buckets`] consecutive buckets, of which the first has
//! an index that is a multiple of their number. So no record is in two blocks.
//!
//! Differs from the paper: the pointer contains the length of the value's block, so that one READ fetches exactly the
//! block. The paper does not say how a client knows the length.
//!
//! Invariant: a reader uses no byte of a record or a block, above all no length, before it has checked the CRC. The
//! only exception is a record of zeros.

use crate::hash_slots;
pub use crate::hash_slots::Placement;
use crate::kv::{KEY_MAX, Version};
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size of a record in bytes, and so of a bucket.
pub const RECORD_SIZE: u64 = size_of::<Record>() as u64;
const _: () = assert!(RECORD_SIZE == 80);
/// Size of a partition's head in bytes.
pub const HEAD_SIZE: u64 = 192;
const _: () = assert!(REDO_OFFSET + size_of::<Redo>() as u64 <= HEAD_SIZE);
/// Offset of the redo record in a partition's head.
pub const REDO_OFFSET: u64 = 64;
/// Length of the longest key that lies in its record, in bytes.
pub const KEY_INLINE: usize = 46;
/// Length of the longest value, in bytes.
pub const VALUE_MAX: usize = 1 << 20;
/// Size in bytes of the value's length, with which a block begins.
pub const LENGTH_SIZE: usize = size_of::<u64>();
/// Length of the longest block in bytes.
pub const BLOCK_MAX: usize = LENGTH_SIZE + KEY_MAX + VALUE_MAX;
/// Alignment of blocks in bytes.
pub const BLOCK_ALIGN: u64 = super::pool::UNIT;
/// Number of buckets that a search for a key visits at most.
pub const PROBES_MAX: u64 = 512;
/// Number of buckets of a table for each item that it must hold.
pub const SLOTS_PER_ITEM: u64 = 2;
/// Number of items that the largest table can hold.
pub const ITEM_COUNT_MAX: u64 = 1 << 33;
/// Largest number of buckets in a block.
pub const BLOCK_BUCKETS_MAX: u64 = 64;
/// Number of buckets in a block, unless the store's parameters have another.
pub const BLOCK_BUCKETS: u64 = 4;
/// Length in bytes from which a value is written by the client, unless the store's parameters have another.
pub const PUT_THRESHOLD: u32 = 1024;

/// Largest number of partitions: each has one of the locks of a service.
pub const PARTITIONS_MAX: u64 = 16;
/// A store has a further partition only if each then has an area of this many bytes, which is many times [`BLOCK_MAX`].
const AREA_MIN: u64 = 64 << 20;
/// A store has a further partition only if each then has this many buckets.
const PARTITION_BUCKETS_MIN: u64 = 4 * PROBES_MAX;
/// Smallest area of values in bytes: a few of the largest blocks.
const AREA_LEAST: u64 = 64 << 10;

const ADDRESS_BITS: u32 = 40;
const COUNTER_BITS: u32 = 40;
const EPOCH_BITS: u32 = u64::BITS - COUNTER_BITS;
/// Key length in the record of a key that is longer than [`KEY_INLINE`].
const LONG: u8 = u8::MAX;

/// Returns the checksum of a record's or a block's bytes.
pub fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// Time stamp of a put or delete. The stamps of a key rise: no two of its puts and deletes have the same, however often
/// its server was restarted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(pub u64);

impl Stamp {
    /// Largest counter. A partition that puts a million times a second reaches it after 12 days, and then begins the
    /// next epoch.
    pub const COUNTER_MAX: u64 = (1 << COUNTER_BITS) - 1;
    /// Largest epoch.
    pub const EPOCH_MAX: u64 = (1 << EPOCH_BITS) - 1;
    /// Largest epoch with which a server takes memory over. Servers that start every second reach it after three
    /// months. Those above are for counters that are used up, and for replays of logs.
    pub const EPOCH_TAKEN_OVER_MAX: u64 = Stamp::EPOCH_MAX / 2;

    /// Creates the stamp with this counter of an epoch.
    ///
    /// # Panics
    /// There is no such epoch.
    pub fn new(epoch: u64, counter: u64) -> Stamp {
        assert!(epoch <= Stamp::EPOCH_MAX, "a stamp has an epoch of {EPOCH_BITS} bits, not {epoch}");
        Stamp(epoch << COUNTER_BITS | counter & Stamp::COUNTER_MAX)
    }

    /// Returns the stamp from which a server goes on that has read this epoch and counter in memory, which are
    /// untrusted. An epoch that no server has reached was written by a client. The server then begins the largest one:
    /// stamps still rise, since their counters do.
    pub fn after(epoch: u64, counter: u64) -> Stamp {
        Stamp::new(epoch.saturating_add(1).min(Stamp::EPOCH_TAKEN_OVER_MAX), counter)
    }

    /// Whether a server can go on after this stamp of a log: the next epoch, and the one after it, exist.
    pub fn has_next(self) -> bool {
        self.epoch() + 2 <= Stamp::EPOCH_MAX
    }

    /// The epoch: how often a server has begun to serve the partition.
    pub fn epoch(self) -> u64 {
        self.0 >> COUNTER_BITS
    }

    /// The number of the put or delete among those of the partition.
    pub fn counter(self) -> u64 {
        self.0 & Stamp::COUNTER_MAX
    }

    /// Returns the version of the value with this stamp.
    pub fn version(self) -> Version {
        Version(self.0 as u32 & u32::MAX >> 1)
    }
}

/// A record: the content of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Record {
    /// [`IN_USE`] or [`DELETED`]; 0 in a bucket that never had a record.
    pub in_use: u8,
    /// Length of the key in bytes; 255 for a key of more than [`KEY_INLINE`] bytes.
    pub key_len: u8,
    /// The key, or its digest.
    pub key: [u8; KEY_INLINE],
    /// Address and length of the value's block.
    pub pointer: U64,
    /// CRC of the value's block.
    pub crc_value: U64,
    /// Stamp of the put or delete.
    pub stamp: U64,
    /// CRC of the bytes of the record before.
    pub crc_record: U64,
}

/// Value of [`Record::in_use`]: the key has a value.
pub const IN_USE: u8 = 1;
/// Value of [`Record::in_use`]: the key was deleted. Keys that collided with it may lie in the buckets behind this one.
/// Any key may take this bucket.
pub const DELETED: u8 = 2;

/// What identifies a key in records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyField {
    len: u8,
    bytes: [u8; KEY_INLINE],
}

impl KeyField {
    /// Whether several keys may have this field, so that the key in the block of the value decides.
    pub fn is_long(&self) -> bool {
        self.len == LONG
    }

    /// The key, if it lies in the record.
    pub fn in_record(&self) -> Option<&[u8]> {
        self.bytes.get(..self.len.into())
    }

    /// The key in a block, if it lies there.
    pub fn in_block<'a>(&self, block: &'a [u8]) -> Option<&'a [u8]> {
        block.get(LENGTH_SIZE..)?.get(..self.long_len())
    }

    /// Length of a key that lies in its blocks.
    fn long_len(&self) -> usize {
        U16::ref_from_prefix(&self.bytes[DIGEST_SIZE..]).map_or(0, |(len, _)| len.get().into())
    }
}

/// Where a value's block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Address of the block.
    pub at: u64,
    /// Length of the block in bytes.
    pub len: u32,
}

impl Block {
    fn pointer(self) -> u64 {
        u64::from(self.len) << ADDRESS_BITS | self.at
    }

    fn of(pointer: u64) -> Block {
        Block { at: pointer & ((1 << ADDRESS_BITS) - 1), len: (pointer >> ADDRESS_BITS) as u32 }
    }
}

/// Content of a bucket after the check of its CRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bucket {
    /// The bucket never had a record, so a search ends here.
    Never,
    /// The bucket's key was deleted.
    Deleted,
    /// The bucket has a key with a value.
    Used(Used),
    /// The CRC is wrong: the record is being written.
    Torn,
    /// The CRC is right, but no service has written the record.
    Nonsense,
}

/// A record of a key with a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What identifies the key.
    pub key: KeyField,
    /// The value's block.
    pub block: Block,
    /// CRC of the value's block.
    pub crc_value: u64,
    /// Stamp of the put.
    pub stamp: Stamp,
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.claims())
    }
}

impl Record {
    /// Creates the record of a value.
    pub fn used(used: Used) -> Record {
        Record {
            in_use: IN_USE,
            key_len: used.key.len,
            key: used.key.bytes,
            pointer: used.block.pointer().into(),
            crc_value: used.crc_value.into(),
            stamp: used.stamp.0.into(),
            crc_record: U64::ZERO,
        }
        .sealed()
    }

    /// Creates the record of a deleted key.
    pub fn deleted(key: KeyField, stamp: Stamp) -> Record {
        let stamp = stamp.0.into();
        Record { in_use: DELETED, key_len: key.len, key: key.bytes, stamp, ..Record::new_zeroed() }.sealed()
    }

    fn sealed(self) -> Record {
        Record { crc_record: self.checksum().into(), ..self }
    }

    fn checksum(&self) -> u64 {
        crc(&self.as_bytes()[..RECORD_SIZE as usize - size_of::<U64>()])
    }

    /// Whether the record is whole: its CRC is valid, or it is all zero.
    pub fn is_sound(&self) -> bool {
        *self == Record::new_zeroed() || self.crc_record.get() == self.checksum()
    }

    /// Checks the CRC and decodes the record.
    pub fn decode(&self) -> Bucket {
        if self.is_sound() { self.claims() } else { Bucket::Torn }
    }

    /// Decodes the record without a check of its CRC.
    pub(super) fn claims(&self) -> Bucket {
        let (block, key) = (Block::of(self.pointer.get()), self.key_field());
        let in_block = if key.is_long() { key.long_len() } else { 0 };
        let is_key = key.is_long() || (1..=KEY_INLINE).contains(&usize::from(key.len));
        let lens = LENGTH_SIZE + in_block..=LENGTH_SIZE + in_block + VALUE_MAX;
        match self.in_use {
            0 => Bucket::Never,
            DELETED => Bucket::Deleted,
            IN_USE if is_key && lens.contains(&(block.len as usize)) => Bucket::Used(Used {
                key,
                block,
                crc_value: self.crc_value.get(),
                stamp: Stamp(self.stamp.get()),
            }),
            _ => Bucket::Nonsense,
        }
    }

    /// Stamp of the put or delete that wrote the record; `None` if none did.
    pub(super) fn written(&self) -> Option<Stamp> {
        match self.decode() {
            Bucket::Used(used) => Some(used.stamp),
            Bucket::Deleted => Some(Stamp(self.stamp.get())),
            Bucket::Never | Bucket::Torn | Bucket::Nonsense => None,
        }
    }

    /// Block of the value of the record, if its key has one.
    pub(super) fn used_block(&self) -> Option<Block> {
        match self.decode() {
            Bucket::Used(used) => Some(used.block),
            _ => None,
        }
    }

    /// What identifies the record's key.
    pub(super) fn key_field(&self) -> KeyField {
        KeyField { len: self.key_len, bytes: self.key }
    }

    /// Returns the 8-byte pieces in which a service writes the record, with their offsets. The record's CRC is the
    /// last. A client that reads between two pieces reads a torn record.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, &[u8])> {
        const PIECE: usize = size_of::<u64>();
        self.as_bytes().chunks_exact(PIECE).enumerate().map(|(place, piece)| ((place * PIECE) as u64, piece))
    }
}

const DIGEST_SIZE: usize = 16;

/// The record that a service is writing, in the head of its partition. A service that takes over after a failure
/// completes the write. Clients do not read it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Redo {
    /// Index of the bucket.
    pub bucket: U64,
    /// The record.
    pub record: Record,
    /// CRC of the bytes before.
    pub crc: U64,
}

impl Redo {
    /// Creates the redo record for a bucket.
    pub fn new(bucket: u64, record: Record) -> Redo {
        let redo = Redo { bucket: bucket.into(), record, crc: U64::ZERO };
        Redo { crc: redo.checksum().into(), ..redo }
    }

    fn checksum(&self) -> u64 {
        crc(&self.as_bytes()[..size_of::<Redo>() - size_of::<U64>()])
    }

    /// Returns the record that was to be written to `bucket`, if this is it.
    pub fn record_of(&self, bucket: u64) -> Option<Record> {
        (self.bucket.get() == bucket && self.crc.get() == self.checksum() && self.record.is_sound())
            .then_some(self.record)
    }
}

/// Encodes a block into `bytes`, behind what is there.
pub fn put_block(bytes: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
    bytes.extend_from_slice(key_in_block(key));
    bytes.extend_from_slice(value);
}

/// Returns the key as it lies in its blocks: empty if it lies in its record.
pub fn key_in_block(key: &[u8]) -> &[u8] {
    if key.len() > KEY_INLINE { key } else { &[] }
}

/// Returns the CRC of the block of a value.
pub fn crc_of(key: &[u8], value: &[u8]) -> u64 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    digest.update(&(value.len() as u64).to_le_bytes());
    digest.update(key_in_block(key));
    digest.update(value);
    digest.finalize()
}

/// Length of the block of a value in bytes.
pub fn block_len(key_len: usize, value_len: usize) -> usize {
    LENGTH_SIZE + if key_len > KEY_INLINE { key_len } else { 0 } + value_len
}

/// Returns the value in a block of `key`; `None` if the block belongs to another key, or is no block.
pub fn value_in<'a>(block: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let (len, rest) = block.split_first_chunk::<LENGTH_SIZE>()?;
    let value = rest.strip_prefix(key_in_block(key))?;
    (value.len() as u64 == u64::from_le_bytes(*len)).then_some(value)
}

/// Parameters of a new store, parsed from JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Number of items that the table must hold; if absent, derived from the quota.
    items: Option<u64>,
    #[serde(default)]
    placement: Placement,
    #[serde(default)]
    block_buckets: Option<u64>,
    #[serde(default)]
    put_threshold: Option<u32>,
    /// Number of partitions; if absent, derived from the quota and the number of items.
    #[serde(default)]
    partitions: Option<u64>,
}

/// Description of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Number of buckets of all partitions: a power of two.
    pub slots: u64,
    /// Seed of the hash that maps keys to buckets.
    pub seed: u64,
    /// Function that maps keys to buckets.
    pub placement: Placement,
    /// Number of partitions: a power of two.
    pub partitions: u64,
    /// Number of buckets in a block: a power of two.
    pub block_buckets: u64,
    /// Size in bytes of the area of values of each partition.
    pub area: u64,
    /// Length in bytes from which a value is written by the client.
    pub put_threshold: u32,
}

impl Spec {
    /// Plans a store of `kind` from the parameters of a request. Table and values together take `quota`.
    ///
    /// # Errors
    /// No such store is possible, for the reason given.
    pub fn plan(kind: &str, parameters: &str, quota: u64, seed: u64) -> Result<Spec, String> {
        let request: Request = serde_json::from_str(parameters).map_err(|error| {
            format!(
                "a {kind} store takes {{\"items\": N, \"placement\": \"hashed\"|\"permuted\", \"block_buckets\": N, \
                 \"put_threshold\": BYTES, \"partitions\": N}}: {error}"
            )
        })?;
        let block_buckets = request.block_buckets.unwrap_or(BLOCK_BUCKETS);
        if !block_buckets.is_power_of_two() || block_buckets > BLOCK_BUCKETS_MAX {
            return Err(format!(
                "a block of a {kind} store has 1, 2, 4, ... or {BLOCK_BUCKETS_MAX} buckets, not {block_buckets}: give \
                 another --block-buckets"
            ));
        }
        let items = request.items.unwrap_or_else(|| hash_slots::items_of(quota));
        if let Some(wrong) = request.partitions.filter(|&of| !of.is_power_of_two() || of > PARTITIONS_MAX) {
            return Err(format!(
                "a {kind} store has 1, 2, 4, ... or {PARTITIONS_MAX} partitions, not {wrong}: give another number of \
                 \"partitions\""
            ));
        }
        let slots = slots_for(items, block_buckets * request.partitions.unwrap_or(1)).ok_or_else(|| {
            format!("{items} items are too many for one store: give at most {ITEM_COUNT_MAX}")
        })?;
        let most = (quota / AREA_MIN).min(slots / PARTITION_BUCKETS_MIN).clamp(1, PARTITIONS_MAX);
        let partitions = request.partitions.unwrap_or(1 << most.ilog2());
        let whole = quota / partitions / BLOCK_ALIGN * BLOCK_ALIGN;
        let area = area_offset(slots / partitions).and_then(|offset| whole.checked_sub(offset));
        let area = area.filter(|&area| area >= AREA_LEAST).ok_or_else(|| {
            format!(
                "a {kind} store for {items} items needs {} bytes for its table and at least {} KiB for the values, and \
                 its quota has {quota} bytes: give a larger --quota or fewer --items",
                slots.saturating_mul(RECORD_SIZE),
                AREA_LEAST >> 10
            )
        })?;
        let put_threshold = request.put_threshold.unwrap_or(PUT_THRESHOLD);
        let placement = request.placement;
        Ok(Spec { slots, seed, placement, partitions, block_buckets, area, put_threshold })
    }

    /// Number of buckets of each partition.
    pub fn buckets(&self) -> u64 {
        self.slots / self.partitions
    }

    /// Offset of a partition's area from the start of the partition.
    fn area_offset(&self) -> Option<u64> {
        area_offset(self.buckets())
    }

    /// Size of a partition in bytes.
    fn partition_len(&self) -> Option<u64> {
        self.area_offset()?.checked_add(self.area)
    }
}

impl hash_slots::Spec for Spec {
    #[inline]
    fn slots(&self) -> (u64, u64, Placement) {
        (self.slots, self.seed, self.placement)
    }

    fn table_len(&self) -> Option<u64> {
        let is_even = |number: u64, of: u64| number.is_power_of_two() && number <= of;
        let is_sound = is_even(self.partitions, PARTITIONS_MAX.min(self.slots))
            && is_even(self.block_buckets, BLOCK_BUCKETS_MAX.min(self.buckets()))
            && self.area.is_multiple_of(BLOCK_ALIGN);
        is_sound.then(|| self.partition_len()?.checked_mul(self.partitions)).flatten()
    }
}

fn area_offset(buckets: u64) -> Option<u64> {
    buckets.checked_mul(RECORD_SIZE)?.checked_add(HEAD_SIZE)?.checked_next_multiple_of(BLOCK_ALIGN)
}

/// Returns the number of buckets of a table for this number of items, which is at least `least`, a power of two. `None`
/// for more than [`ITEM_COUNT_MAX`] items.
pub fn slots_for(items: u64, least: u64) -> Option<u64> {
    (items <= ITEM_COUNT_MAX).then(|| (items * SLOTS_PER_ITEM).next_power_of_two().max(least))
}

/// A store as the catalog describes it.
pub struct Table {
    table: hash_slots::Table<Spec>,
    area_offset: u64,
    partition_len: u64,
    digests: [RapidSecrets; 2],
}

/// Where a key belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// Index of the partition.
    pub partition: u64,
    /// Index, among the blocks of the partition, of the block of buckets at which the search for the key begins.
    pub block: u64,
}

impl Table {
    /// Parses the catalog's description of a store.
    ///
    /// # Errors
    /// The description is invalid.
    pub fn new(parameters: &str, extent: farside_remote::service::Extent) -> Result<Table, String> {
        let table = hash_slots::Table::<Spec>::new(parameters, extent)?;
        let spec = &table.spec;
        let lens = spec.area_offset().zip(spec.partition_len());
        let (area_offset, partition_len) = lens.expect("the table's length was checked");
        if extent.at + extent.len > 1 << ADDRESS_BITS || !extent.at.is_multiple_of(BLOCK_ALIGN) {
            return Err(format!(
                "the store lies at {:#x}, where its pointers of {ADDRESS_BITS} bits cannot reach: use a node with less \
                 memory",
                extent.at
            ));
        }
        let digests = [1, 2].map(|more| RapidSecrets::seed(spec.seed.wrapping_add(more)));
        Ok(Table { area_offset, partition_len, digests, table })
    }

    /// The store's description.
    pub fn spec(&self) -> &Spec {
        &self.table.spec
    }

    /// Key of the store's region.
    pub fn key(&self) -> farside_remote::Key {
        self.table.extent.key
    }

    /// Returns where `key` belongs.
    pub fn home(&self, key: &[u8]) -> Home {
        let slot = self.table.first_slot(key);
        let buckets = self.spec().buckets();
        Home { partition: slot / buckets, block: slot % buckets / self.spec().block_buckets }
    }

    /// Number of blocks of buckets that a search visits at most.
    pub fn probes(&self) -> u64 {
        let Spec { block_buckets, .. } = *self.spec();
        (PROBES_MAX / block_buckets).min(self.blocks()).max(1)
    }

    /// Number of blocks of buckets of a partition.
    fn blocks(&self) -> u64 {
        self.spec().buckets() / self.spec().block_buckets
    }

    /// Returns the index in its partition of the first bucket of the block that a search visits after `step` others.
    pub fn bucket_of(&self, home: Home, step: u64) -> u64 {
        (home.block + step) % self.blocks() * self.spec().block_buckets
    }

    /// Returns how many blocks of buckets a search from `home` visits before that of a bucket; `None` if it does not
    /// visit this bucket.
    pub fn step_of(&self, home: Home, bucket: u64) -> Option<u64> {
        let blocks = self.blocks();
        let step = (bucket / self.spec().block_buckets + blocks - home.block) % blocks;
        (bucket < self.spec().buckets() && step < self.probes()).then_some(step)
    }

    /// Address of a partition's head.
    pub fn head_at(&self, partition: u64) -> u64 {
        self.table.extent.at + partition * self.partition_len
    }

    /// Address of a bucket, which has this index in its partition.
    pub fn bucket_at(&self, partition: u64, bucket: u64) -> u64 {
        self.head_at(partition) + HEAD_SIZE + bucket * RECORD_SIZE
    }

    /// The addresses of a partition's area of values.
    pub fn area(&self, partition: u64) -> Range<u64> {
        let at = self.head_at(partition) + self.area_offset;
        at..at + self.spec().area
    }

    /// Whether a block lies in a partition's area.
    pub fn contains(&self, partition: u64, block: Block) -> bool {
        let area = self.area(partition);
        area.contains(&block.at) && block.at + u64::from(block.len) <= area.end
    }

    /// Returns what identifies `key` in records.
    pub fn key_field(&self, key: &[u8]) -> KeyField {
        let mut bytes = [0; KEY_INLINE];
        if key.len() <= KEY_INLINE {
            bytes[..key.len()].copy_from_slice(key);
            return KeyField { len: key.len() as u8, bytes };
        }
        for (digest, secrets) in bytes.chunks_exact_mut(size_of::<u64>()).zip(&self.digests) {
            digest.copy_from_slice(&rapidhash_v3_seeded(key, secrets).to_le_bytes());
        }
        bytes[DIGEST_SIZE..][..size_of::<u16>()].copy_from_slice(&(key.len() as u16).to_le_bytes());
        KeyField { len: LONG, bytes }
    }
}

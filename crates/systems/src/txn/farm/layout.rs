//! The bytes of a FaRM store, the same at each member except for addresses: its parameters, its table and its index.
//! Module `log` has the bytes of the log, and module `object` those of the objects.
//!
//! ```text
//! table    | lease 32 bytes, x ids | word 32 bytes, x lanes, x ids | head 64 bytes | entry 8 bytes, x slots |
//!          | record, x 1 + backups, x lanes, x ids | object, x objects, x 1 + backups |
//! head     | number of objects with a key u64 | 0, 56 bytes |
//! entry    | number of the object, plus 1: 40 bits | bits of the key's hash: 24 bits |  0 while no key has the slot
//! ```
//!
//! All numbers are little-endian. Part 0 of the records and of the objects is that of the primary. Part r has the
//! copies of the objects of the member r places before this one, with the same numbers, and the records that clients
//! write for this backup.
//!
//! Invariant: an entry of the index is written once. So an object keeps its key, and a deleted key keeps its object.

use super::KIND;
use super::log::{CLIENT_BITS, EntryId, LANE_BITS, RECORD_SIZE, WORD_SIZE, WRITE_SIZE};
use super::object::CONTENT_SIZE;
use crate::hash_slots::{self, Placement};
use crate::lines::Lines;
use crate::txn::KEY_MAX;
use farside_remote::fabric::CALL_BYTES_MAX;
use farside_remote::leases::ENTRY_SIZE;
use farside_remote::service::Extent;
use farside_remote::{Addr, Key, NodeId};
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::time::Duration;
use zerocopy::little_endian::U64;

/// Number of slots of a bucket. One READ returns a bucket.
pub(super) const BUCKET_SLOTS: u64 = 8;
/// Size of a bucket in bytes.
pub(super) const BUCKET_SIZE: u64 = BUCKET_SLOTS * size_of::<U64>() as u64;
/// Number of buckets on a key's probe path.
const BUCKETS_MAX: u64 = 32;
/// Number of slots of a new index for each object.
const SLOTS_PER_OBJECT: u64 = 2;
/// Number of objects of the largest store.
const OBJECTS_MAX: u64 = 1 << 34;
/// Length of the longest value in bytes.
pub const VALUE_MAX: u32 = 32 << 10;
/// Length of the longest pair of a key and a value in bytes.
pub const PAIR_MAX: u32 = VALUE_MAX + KEY_MAX as u32;
/// Largest number of bytes that a transaction can write at one member.
pub const WRITES_MAX: u32 = (CALL_BYTES_MAX - 1024) as u32;
/// Largest number of client ids.
pub const IDS_MAX: u16 = (1 << CLIENT_BITS) - 1;
/// Largest number of lanes of a client.
pub const LANES_MAX: u16 = 1 << LANE_BITS;
/// Largest number of backups of an object.
pub const BACKUPS_MAX: u8 = 4;
/// Sizes of a line of an object.
pub const LINES: [u8; 2] = [16, WHOLE_LINE];
/// Size of a line that needs a fabric that reads and writes cache lines as a whole.
pub const WHOLE_LINE: u8 = 64;

const CACHE_LINE: u64 = 64;

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Number of slots of the index, a power of two.
    pub slots: u64,
    /// Seed of the hash from keys to slots.
    pub seed: u64,
    /// Function that maps each key to its first slot.
    pub placement: Placement,
    /// Number of objects: of keys that have or have had a value.
    pub objects: u64,
    /// Number of client ids.
    pub ids: u16,
    /// Number of transactions of a client that commit at the same time.
    pub lanes: u16,
    /// Length of a lease in microseconds.
    pub lease_us: u64,
    /// Length of the longest value in bytes.
    pub value_max: u32,
    /// Length of the longest pair of a key and a value in bytes.
    pub pair_max: u32,
    /// Number of bytes that a transaction can write at one member, with keys and headers.
    pub writes_max: u32,
    /// Number of other members that have copies of an object.
    pub backups: u8,
    /// Size of a line of an object in bytes.
    pub line: u8,
}

impl Spec {
    /// Checks the parameters.
    ///
    /// # Errors
    /// No store has these parameters.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=IDS_MAX).contains(&self.ids) || !(1..=LANES_MAX).contains(&self.lanes) {
            return Err(format!(
                "{} client ids with {} lanes are not possible: give 1 to {IDS_MAX} ids and 1 to {LANES_MAX} lanes",
                self.ids, self.lanes
            ));
        }
        if self.lease_us < 1000 {
            return Err(format!("leases of {} us are too short: give at least 1 ms", self.lease_us));
        }
        if self.value_max > VALUE_MAX || !(self.value_max + 1..=PAIR_MAX).contains(&self.pair_max) {
            return Err(format!(
                "values of {} bytes in pairs of {} bytes are not possible: give values of at most {VALUE_MAX} bytes",
                self.value_max, self.pair_max
            ));
        }
        let least = self.pair_max + WRITE_SIZE as u32;
        if !(least..=WRITES_MAX).contains(&self.writes_max) {
            return Err(format!(
                "transactions that write {} bytes are not possible with values of {} bytes: give {least} to \
                 {WRITES_MAX}",
                self.writes_max, self.value_max
            ));
        }
        if self.backups > BACKUPS_MAX || !LINES.contains(&self.line) {
            return Err(format!(
                "{} backups and lines of {} bytes are not possible: give at most {BACKUPS_MAX} backups, and lines of \
                 16 or 64 bytes",
                self.backups, self.line
            ));
        }
        let is_index = self.slots.is_power_of_two() && self.slots >= BUCKET_SLOTS;
        match self.table_len() {
            Some(_) if is_index && (1..=OBJECTS_MAX).contains(&self.objects) => Ok(()),
            _ => Err(format!("{} objects are not possible: give fewer --items", self.objects)),
        }
    }

    /// Size of the table in bytes; `None` if it exceeds the address space.
    pub fn table_len(&self) -> Option<u64> {
        let objects = self.objects.checked_mul(self.object_len())?.checked_mul(self.parts())?;
        self.objects_offset()?.checked_add(objects)
    }

    /// Length of a lease.
    pub fn lease(&self) -> Duration {
        Duration::from_micros(self.lease_us)
    }

    /// Number of parts of the records and of the objects: that of the primary, and those of the backups.
    fn parts(&self) -> u64 {
        1 + u64::from(self.backups)
    }

    pub(super) fn lines(&self) -> Lines {
        Lines::of(self.line)
    }

    /// Size of an object in bytes.
    pub(super) fn object_len(&self) -> u64 {
        let image = self.lines().image_len(CONTENT_SIZE + self.pair_max as usize);
        (image as u64).next_multiple_of(CACHE_LINE)
    }

    /// Number of bytes of the longest record.
    pub(super) fn record_bytes(&self) -> u32 {
        RECORD_SIZE as u32 + self.writes_max
    }

    fn record_len(&self) -> u64 {
        u64::from(self.record_bytes()).next_multiple_of(CACHE_LINE)
    }

    fn entries(&self) -> u64 {
        u64::from(self.ids) * u64::from(self.lanes)
    }

    fn words_offset(&self) -> u64 {
        (u64::from(self.ids) * ENTRY_SIZE).next_multiple_of(CACHE_LINE)
    }

    fn head_offset(&self) -> u64 {
        (self.words_offset() + self.entries() * WORD_SIZE).next_multiple_of(CACHE_LINE)
    }

    fn index_offset(&self) -> u64 {
        self.head_offset() + CACHE_LINE
    }

    fn records_offset(&self) -> Option<u64> {
        self.slots.checked_mul(size_of::<U64>() as u64)?.checked_add(self.index_offset())
    }

    fn objects_offset(&self) -> Option<u64> {
        let records = self.entries().checked_mul(self.record_len())?.checked_mul(self.parts())?;
        self.records_offset()?.checked_add(records)
    }
}

impl hash_slots::Spec for Spec {
    fn slots(&self) -> (u64, u64, Placement) {
        (self.slots, self.seed, self.placement)
    }

    fn table_len(&self) -> Option<u64> {
        Spec::table_len(self)
    }
}

/// Returns the number of slots of an index of `objects` objects; `None` if no store has so many.
pub(super) fn slots_for(objects: u64) -> Option<u64> {
    (objects <= OBJECTS_MAX).then(|| (objects * SLOTS_PER_OBJECT).next_power_of_two().max(64))
}

/// The part of a store at one member, as a client sees it.
pub(super) struct Shard {
    pub(super) node: NodeId,
    key: Cell<Key>,
    pub(super) table: Table,
}

impl Shard {
    /// Creates access to a member's table as the catalog describes it.
    ///
    /// # Errors
    /// The description is impossible. A node may answer anything.
    pub(super) fn new(node: NodeId, parameters: &str, extent: Extent) -> Result<Shard, String> {
        let table = Table::new(parameters, extent).map_err(|reason| {
            format!("the description of the store at node {} is wrong: {reason}", node.0)
        })?;
        Ok(Shard { node, key: Cell::new(extent.key), table })
    }

    /// The key that the node has granted last.
    pub(super) fn key(&self) -> Key {
        self.key.get()
    }

    /// Replaces the key by the one that the node has granted in another session.
    pub(super) fn set_key(&self, key: Key) {
        self.key.set(key);
    }

    pub(super) fn spec(&self) -> &Spec {
        &self.table.inner.spec
    }
}

/// The table of a store at one member.
pub(super) struct Table {
    inner: hash_slots::Table<Spec>,
    tags: RapidSecrets,
}

impl Table {
    /// Creates access to a table as the catalog describes it.
    ///
    /// # Errors
    /// The description is impossible.
    pub(super) fn new(parameters: &str, extent: Extent) -> Result<Table, String> {
        let inner = hash_slots::Table::<Spec>::new(parameters, extent)?;
        inner.spec.check().map_err(|reason| format!("invalid description of a {KIND} store: {reason}"))?;
        let tags = RapidSecrets::seed(!inner.spec.seed);
        Ok(Table { inner, tags })
    }

    pub(super) fn spec(&self) -> &Spec {
        &self.inner.spec
    }

    fn at(&self, offset: u64) -> Addr {
        Addr::new(self.inner.extent.at).plus(offset)
    }

    /// Address of the table of leases.
    pub(super) fn leases(&self) -> Addr {
        self.at(0)
    }

    /// Number of an entry; `None` if the store has no such client or lane.
    pub(super) fn number(&self, EntryId { client, lane }: EntryId) -> Option<u64> {
        let Spec { ids, lanes, .. } = *self.spec();
        (client.number() <= ids && lane < lanes).then(|| client.index() * u64::from(lanes) + u64::from(lane))
    }

    /// Address of the word of the entry with this number.
    pub(super) fn word(&self, number: u64) -> Addr {
        self.at(self.spec().words_offset() + number * WORD_SIZE)
    }

    /// Address of the number of objects that have a key.
    pub(super) fn used(&self) -> Addr {
        self.at(self.spec().head_offset())
    }

    /// Address of a record of the entry with this number: that of the primary, or of a backup.
    pub(super) fn record(&self, number: u64, part: u8) -> Addr {
        let spec = self.spec();
        let index = number * spec.parts() + u64::from(part);
        self.at(spec.records_offset().expect("it was checked") + index * spec.record_len())
    }

    /// Address of an object, or of a copy.
    pub(super) fn object(&self, part: u8, object: u64) -> Addr {
        let spec = self.spec();
        let index = u64::from(part) * spec.objects + object;
        self.at(spec.objects_offset().expect("it was checked") + index * spec.object_len())
    }

    /// Number of buckets of a key's probe path.
    pub(super) fn path_len(&self) -> u64 {
        BUCKETS_MAX.min(self.spec().slots / BUCKET_SLOTS)
    }

    /// Address of a bucket of a key's probe path.
    pub(super) fn bucket(&self, key: &[u8], probed: u64) -> Addr {
        let buckets = self.spec().slots / BUCKET_SLOTS;
        let bucket = (self.inner.first_slot(key) / BUCKET_SLOTS + probed) & (buckets - 1);
        self.at(self.spec().index_offset() + bucket * BUCKET_SIZE)
    }

    /// The entry of the index for a key that has this object.
    pub(super) fn entry(&self, key: &[u8], object: u64) -> u64 {
        self.tag(key) << 40 | (object + 1)
    }

    /// The object of a key to which this entry of the index may belong; `None` if it belongs to another key or to none.
    pub(super) fn object_of(&self, key: &[u8], entry: u64) -> Option<u64> {
        let object = (entry & ((1 << 40) - 1)).checked_sub(1)?;
        (entry >> 40 == self.tag(key) && object < self.spec().objects).then_some(object)
    }

    fn tag(&self, key: &[u8]) -> u64 {
        rapidhash_v3_seeded(key, &self.tags) >> 40
    }
}

#[cfg(test)]
impl Spec {
    /// A store of 20 objects, for tests.
    pub(super) fn example(line: u8) -> Spec {
        Spec {
            slots: 64,
            seed: 7,
            placement: Placement::Hashed,
            objects: 20,
            ids: 3,
            lanes: 2,
            lease_us: 1000,
            value_max: 200,
            pair_max: 264,
            writes_max: 1000,
            backups: 1,
            line,
        }
    }
}

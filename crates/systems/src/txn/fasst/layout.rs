//! The bytes of a FaSST store, the same at each member except for addresses.
//!
//! ```text
//! table   | lease 32 bytes, x ids | epochs 24 bytes, x ids | head 64 bytes | word 32 bytes, x lanes, x ids |
//!         | held bucket u64, x held, x lanes, x ids | record, x lanes, x ids |
//!         | bucket, x (buckets + extra buckets), x (1 + backups) |
//! epochs  | granted u64 | admitted u64 | nonce of the client that was fenced last u64 |
//! head    | number of extra buckets in use u64 | epoch of the last promoter u64 | 0, 48 bytes |
//! word    | transaction with locks u64 | number of held buckets u64 | ended u64 | closed u64 |
//! record  | checksum u64 | transaction u64 | stamp u64 | bytes u32 | 0 u32 | write ... |
//! write   | place u64 | bucket u64 | value length u32 | key length u16 | member u8 | kind u8 | key | value |
//! bucket  | version u63, lock u1 | transaction that has the lock u64 | next extra bucket u64 | 0, 40 bytes |
//!         | slot 32 bytes, x 7 | key and value, x 7 |
//! slot    | hash u64 | stamp u64 | key length u16 | kind u8 | 0 u8 | value length u32 | 0 u64 |
//! place   | number of the bucket u61, number of the slot u3 |
//! ```
//!
//! All numbers are little-endian. A key belongs to one bucket. If the bucket's slots belong to other keys, the key lies
//! in an extra bucket that is chained to it. Lock and version are those of the first bucket of the chain.
//!
//! Part 0 of the buckets is that of the primary. Part r has the copies of the buckets of the member r places before
//! this one. A copy of a slot has the same place as the slot, so copies need no chains.
//!
//! All members have the same seed, and so the same function from keys to buckets. A member that takes the place of one
//! that has lost its memory has it, too.
//!
//! Invariant: a slot that has a key keeps it. A deleted key keeps its slot, so that its absence has a stamp.
//! Invariant: the version and the lock of a bucket are one unit of 16 bytes with the lock's owner.

use super::KIND;
use crate::hash_slots::{self, Placement};
use crate::lease::ClientId;
use crate::txn::KEY_MAX;
use farside_remote::leases::ENTRY_SIZE;
use farside_remote::service::Extent;
use farside_remote::{Addr, Key, NodeId};
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::time::Duration;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Number of slots of a bucket (FaSST's code: 7).
pub(super) const SLOTS: usize = 7;
/// Number of keys for each bucket of a new table, on average.
const KEYS_PER_BUCKET: u64 = 5;
/// Number of extra buckets beyond those that keys need: a node that dies while it chains one loses it.
const EXTRAS_SPARE: u64 = 2;
/// Number of buckets of the largest table.
const BUCKETS_MAX: u64 = 1 << 34;
/// Length of the longest value in bytes.
pub const VALUE_MAX: u32 = 16 << 10;
/// Length of the longest pair of a key and a value in bytes.
pub const PAIR_MAX: u32 = VALUE_MAX + KEY_MAX as u32;
/// Largest number of bytes that a transaction can write, with keys and headers: a record fits into a packet.
pub const WRITES_MAX: u32 = 56 << 10;
/// Largest number of client ids.
pub const IDS_MAX: u16 = (1 << CLIENT_BITS) - 1;
/// Largest number of lanes of a client.
pub const LANES_MAX: u16 = 1 << LANE_BITS;
/// Largest number of backups of a key (FaSST: 2).
pub const BACKUPS_MAX: u8 = 4;

const CLIENT_BITS: u32 = 12;
const LANE_BITS: u32 = 6;
const CACHE_LINE: u64 = 64;
const SLOT_BITS: u32 = 3;
/// Size of the epochs of a client in bytes.
pub(super) const EPOCHS_SIZE: u64 = 24;
const WORD_SIZE: u64 = size_of::<Word>() as u64;
/// Size of the header of a write in bytes.
pub(super) const WRITE_SIZE: usize = size_of::<WriteHeader>();
/// Size of the header of a record in bytes.
pub(super) const RECORD_SIZE: usize = size_of::<RecordHeader>();
/// Size of a bucket without its keys and values.
const BUCKET_SIZE: usize = size_of::<BucketHead>();
/// Expected version of a bucket that may have any.
pub(super) const ANY_VERSION: u64 = u64::MAX;

/// Number of a transaction: its count in its lane, the lane, and the client's id. No two transactions of a store have
/// the same number, and those of a lane ascend.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub struct TxnId(U64);

impl TxnId {
    /// No transaction.
    pub const NONE: TxnId = TxnId(U64::ZERO);

    /// Returns the transaction with this count in a lane; `None` if the count has more than 46 bits.
    pub(super) fn new(entry: EntryId, count: u64) -> Option<TxnId> {
        let low = u64::from(entry.lane) << CLIENT_BITS | u64::from(entry.client.number());
        (count >> (u64::BITS - CLIENT_BITS - LANE_BITS) == 0)
            .then(|| TxnId(U64::new(count << (CLIENT_BITS + LANE_BITS) | low)))
    }

    pub(super) fn of_bits(bits: u64) -> TxnId {
        TxnId(U64::new(bits))
    }

    pub(super) fn bits(self) -> u64 {
        self.0.get()
    }

    /// Number of the transaction in its lane.
    pub(super) fn count(self) -> u64 {
        self.0.get() >> (CLIENT_BITS + LANE_BITS)
    }

    /// The lane of the transaction; `None` if it is no transaction.
    pub(super) fn entry(self) -> Option<EntryId> {
        let client = ClientId::new((self.0.get() & ((1 << CLIENT_BITS) - 1)) as u16)?;
        let lane = (self.0.get() >> CLIENT_BITS & ((1 << LANE_BITS) - 1)) as u16;
        Some(EntryId { client, lane })
    }

    /// The client of the transaction; `None` if it is no transaction.
    pub(super) fn client(self) -> Option<ClientId> {
        self.entry().map(|entry| entry.client)
    }
}

/// A lane of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId {
    pub(super) client: ClientId,
    pub(super) lane: u16,
}

/// State of a lane at a member.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub(super) struct Word {
    /// The last transaction that has locked buckets here.
    pub(super) holder: TxnId,
    /// Number of buckets in the list of those that it has locked.
    pub(super) held: U64,
    /// Transactions up to this one have ended here: they have no locks, and get none.
    pub(super) ended: TxnId,
    /// The records of transactions up to this one are not needed any more.
    pub(super) closed: TxnId,
}

/// Offset of the half of a word that says what has ended.
pub(super) const ENDED_OFFSET: u64 = 16;

impl Word {
    /// Whether a transaction may have locks here.
    pub(super) fn has_locks(&self) -> bool {
        self.holder > self.ended && self.held != U64::ZERO
    }
}

const LOCKED: u64 = 1 << 63;

/// Version, lock and owner of a bucket: one unit of 16 bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub(super) struct LockHeader {
    version_and_lock: U64,
    pub(super) owner: TxnId,
}

impl LockHeader {
    pub(super) fn free(version: u64) -> LockHeader {
        LockHeader { version_and_lock: U64::new(version & !LOCKED), owner: TxnId::NONE }
    }

    pub(super) fn locked(version: u64, owner: TxnId) -> LockHeader {
        LockHeader { version_and_lock: U64::new(version | LOCKED), owner }
    }

    pub(super) fn version(self) -> u64 {
        self.version_and_lock.get() & !LOCKED
    }

    pub(super) fn is_locked(self) -> bool {
        self.version_and_lock.get() & LOCKED != 0
    }

    pub(super) fn is_locked_by(self, txn: TxnId) -> bool {
        self.is_locked() && self.owner == txn
    }
}

/// Kind of the content of a slot or of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum SlotKind {
    /// The slot has no key.
    Free = 0,
    /// A value.
    Value = 1,
    /// A key without a value.
    Absent = 2,
    /// The slot is being written.
    Busy = 3,
}

/// A slot: what it has, and who wrote it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub(super) struct SlotHead {
    pub(super) hash: U64,
    pub(super) stamp: U64,
    pub(super) key_len: U16,
    kind: u8,
    reserved: u8,
    pub(super) value_len: U32,
    reserved_too: U64,
}

/// Offset of the half of a slot with its kind.
pub(super) const KIND_OFFSET: u64 = 16;

impl SlotHead {
    pub(super) fn new(hash: u64, stamp: u64, key_len: usize, kind: SlotKind, value_len: usize) -> SlotHead {
        SlotHead {
            hash: U64::new(hash),
            stamp: U64::new(stamp),
            key_len: U16::new(key_len as u16),
            kind: kind as u8,
            reserved: 0,
            value_len: U32::new(value_len as u32),
            reserved_too: U64::ZERO,
        }
    }

    /// Whether two slots have the same, beside their hashes.
    pub(super) fn is_like(self, other: SlotHead) -> bool {
        SlotHead { hash: other.hash, ..self } == other
    }

    pub(super) fn kind(self) -> SlotKind {
        match self.kind {
            0 => SlotKind::Free,
            1 => SlotKind::Value,
            2 => SlotKind::Absent,
            _ => SlotKind::Busy,
        }
    }
}

/// A bucket without its keys and values.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub(super) struct BucketHead {
    pub(super) lock: LockHeader,
    /// Number of the next bucket of the chain, plus 1; 0 at its end.
    pub(super) next: U64,
    reserved: [U64; 5],
    pub(super) slots: [SlotHead; SLOTS],
}

/// Offset of the number of the next bucket in a bucket.
pub(super) const NEXT_OFFSET: u64 = 16;
const SLOTS_OFFSET: u64 = 64;
const _: () = assert!(BUCKET_SIZE as u64 == SLOTS_OFFSET + (SLOTS * size_of::<SlotHead>()) as u64);

/// Place of a key: a bucket and a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) bucket: u64,
    pub(super) slot: usize,
}

impl Place {
    pub(super) fn bits(self) -> u64 {
        self.bucket << SLOT_BITS | self.slot as u64
    }

    pub(super) fn of_bits(bits: u64) -> Place {
        Place { bucket: bits >> SLOT_BITS, slot: (bits & ((1 << SLOT_BITS) - 1)) as usize }
    }
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WriteHeader {
    place: U64,
    bucket: U64,
    value_len: U32,
    key_len: U16,
    member: u8,
    kind: u8,
}

/// A write of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write<'a> {
    pub(super) place: Place,
    /// First bucket of the key's chain, which has the lock.
    pub(super) bucket: u64,
    /// Index of the key's primary.
    pub(super) member: u8,
    pub(super) key: &'a [u8],
    /// The new value; `None` if the key is deleted.
    pub(super) value: Option<&'a [u8]>,
}

impl<'a> Write<'a> {
    /// Number of bytes that a write takes.
    pub(super) fn len(key: &[u8], value: Option<&[u8]>) -> usize {
        WRITE_SIZE + key.len() + value.map_or(0, <[u8]>::len)
    }

    /// Appends the write to `out`.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let value = self.value.unwrap_or_default();
        let kind = if self.value.is_some() { SlotKind::Value } else { SlotKind::Absent };
        let header = WriteHeader {
            place: U64::new(self.place.bits()),
            bucket: U64::new(self.bucket),
            value_len: U32::new(value.len() as u32),
            key_len: U16::new(self.key.len() as u16),
            member: self.member,
            kind: kind as u8,
        };
        [header.as_bytes(), self.key, value].into_iter().for_each(|part| out.extend_from_slice(part));
    }

    /// Decodes writes; `None` if they are not those of a client of this store.
    pub(super) fn decode_all(mut bytes: &'a [u8], spec: &Spec) -> Option<Vec<Write<'a>>> {
        let mut writes = Vec::new();
        while !bytes.is_empty() {
            let (header, rest) = WriteHeader::ref_from_prefix(bytes).ok()?;
            let (key, rest) = rest.split_at_checked(header.key_len.get().into())?;
            let (value, rest) = rest.split_at_checked(header.value_len.get() as usize)?;
            let (place, bucket) = (Place::of_bits(header.place.get()), header.bucket.get());
            let is_sound = place.bucket < spec.all_buckets()
                && place.slot < SLOTS
                && bucket < spec.buckets
                && !key.is_empty()
                && key.len() + value.len() <= spec.pair_max as usize;
            let value = match header.kind {
                1 if is_sound => Some(value),
                2 if is_sound && value.is_empty() => None,
                _ => return None,
            };
            writes.push(Write { place, bucket, member: header.member, key, value });
            bytes = rest;
        }
        Some(writes)
    }
}

/// Header of a record.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RecordHeader {
    checksum: U64,
    pub(super) txn: TxnId,
    pub(super) stamp: U64,
    len: U32,
    reserved: U32,
}

impl RecordHeader {
    /// Header of the record of a transaction with these writes.
    pub(super) fn new(txn: TxnId, stamp: u64, writes: &[u8]) -> RecordHeader {
        let (stamp, len) = (U64::new(stamp), U32::new(writes.len() as u32));
        let header = RecordHeader { checksum: U64::ZERO, txn, stamp, len, reserved: U32::ZERO };
        RecordHeader { checksum: U64::new(header.checksum_with(writes)), ..header }
    }

    fn checksum_with(&self, writes: &[u8]) -> u64 {
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
        digest.update(&self.as_bytes()[size_of::<U64>()..]);
        digest.update(writes);
        digest.finalize()
    }

    /// Length of the writes in bytes. Untrusted.
    pub(super) fn len(&self) -> usize {
        self.len.get() as usize
    }

    /// Whether the record is whole.
    pub(super) fn is_sound(&self, writes: &[u8]) -> bool {
        self.txn != TxnId::NONE && self.checksum.get() == self.checksum_with(writes)
    }
}

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Number of buckets, a power of two.
    pub buckets: u64,
    /// Number of extra buckets.
    pub extras: u64,
    /// Seed of the hash from keys to buckets.
    pub seed: u64,
    /// Function that maps each key to its bucket.
    pub placement: Placement,
    /// Number of client ids.
    pub ids: u16,
    /// Number of transactions of a client that commit, or have locks, at the same time.
    pub lanes: u16,
    /// Length of a lease in microseconds.
    pub lease_us: u64,
    /// Length of the longest value in bytes.
    pub value_max: u32,
    /// Length of the longest pair of a key and a value in bytes.
    pub pair_max: u32,
    /// Number of bytes that a transaction can write, with keys and headers.
    pub writes_max: u32,
    /// Number of other members that have copies of a key.
    pub backups: u8,
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
        if self.backups > BACKUPS_MAX {
            return Err(format!("{} backups are not possible: give at most {BACKUPS_MAX}", self.backups));
        }
        let is_table = self.buckets.is_power_of_two() && self.buckets <= BUCKETS_MAX;
        match self.table_len() {
            Some(_) if is_table && self.extras <= BUCKETS_MAX => Ok(()),
            _ => Err(format!("a table of {} buckets is not possible: give fewer --items", self.buckets)),
        }
    }

    /// Size of the table in bytes; `None` if it exceeds the address space.
    pub fn table_len(&self) -> Option<u64> {
        let buckets = self.buckets.checked_add(self.extras)?.checked_mul(self.bucket_len())?;
        self.buckets_offset()?.checked_add(buckets.checked_mul(self.parts())?)
    }

    /// Length of a lease.
    pub fn lease(&self) -> Duration {
        Duration::from_micros(self.lease_us)
    }

    /// Number of buckets and extra buckets.
    pub(super) fn all_buckets(&self) -> u64 {
        self.buckets + self.extras
    }

    /// Number of parts of the buckets: that of the primary, and those of the backups.
    fn parts(&self) -> u64 {
        1 + u64::from(self.backups)
    }

    fn pair_len(&self) -> u64 {
        u64::from(self.pair_max).next_multiple_of(16)
    }

    /// Size of a bucket in bytes.
    pub(super) fn bucket_len(&self) -> u64 {
        (BUCKET_SIZE as u64 + SLOTS as u64 * self.pair_len()).next_multiple_of(CACHE_LINE)
    }

    /// Largest number of buckets that a transaction locks at one member.
    pub(super) fn held_max(&self) -> u64 {
        u64::from(self.writes_max) / (WRITE_SIZE as u64 + 1) + 1
    }

    /// Number of bytes of the longest record.
    pub(super) fn record_bytes(&self) -> usize {
        RECORD_SIZE + self.writes_max as usize
    }

    fn record_len(&self) -> u64 {
        (self.record_bytes() as u64).next_multiple_of(CACHE_LINE)
    }

    fn entries(&self) -> u64 {
        u64::from(self.ids) * u64::from(self.lanes)
    }

    fn epochs_offset(&self) -> u64 {
        (u64::from(self.ids) * ENTRY_SIZE).next_multiple_of(CACHE_LINE)
    }

    fn head_offset(&self) -> u64 {
        (self.epochs_offset() + u64::from(self.ids) * EPOCHS_SIZE).next_multiple_of(CACHE_LINE)
    }

    fn words_offset(&self) -> u64 {
        self.head_offset() + CACHE_LINE
    }

    fn held_offset(&self) -> u64 {
        (self.words_offset() + self.entries() * WORD_SIZE).next_multiple_of(CACHE_LINE)
    }

    fn held_len(&self) -> u64 {
        (self.held_max() * size_of::<U64>() as u64).next_multiple_of(CACHE_LINE)
    }

    fn records_offset(&self) -> u64 {
        self.held_offset() + self.entries() * self.held_len()
    }

    fn buckets_offset(&self) -> Option<u64> {
        self.records_offset().checked_add(self.entries().checked_mul(self.record_len())?)
    }
}

impl hash_slots::Spec for Spec {
    fn slots(&self) -> (u64, u64, Placement) {
        (self.buckets, self.seed, self.placement)
    }

    fn table_len(&self) -> Option<u64> {
        Spec::table_len(self)
    }
}

/// Returns the numbers of buckets and of extra buckets of a table for this many keys; `None` if there are too many keys
/// for a store.
///
/// A small table has enough extra buckets for any hash of the keys. In a large one, about one bucket in 7 needs an
/// extra bucket if it has 5 keys on average, so that one in 4 is many standard deviations more. [`EXTRAS_SPARE`] come
/// on top.
pub(super) fn buckets_for(keys: u64) -> Option<(u64, u64)> {
    let buckets = keys.div_ceil(KEYS_PER_BUCKET).max(1).checked_next_power_of_two()?;
    let extras = (keys / SLOTS as u64 + 1).min(buckets / 4 + 64);
    (buckets <= BUCKETS_MAX).then_some((buckets, extras + EXTRAS_SPARE))
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

    /// Address of the last epoch that was granted for a client; `None` if the store has no such client.
    pub(super) fn granted(&self, client: ClientId) -> Option<Addr> {
        let spec = self.spec();
        (client.number() <= spec.ids).then(|| self.at(spec.epochs_offset() + client.index() * EPOCHS_SIZE))
    }

    /// Address of the epoch of the packets that are admitted for a client; `None` if the store has no such client.
    pub(super) fn admitted(&self, client: ClientId) -> Option<Addr> {
        self.granted(client).map(|at| at.plus(size_of::<U64>() as u64))
    }

    /// Address of the nonce of the holder of a client id that was fenced last; `None` if the store has no such client.
    pub(super) fn fenced(&self, client: ClientId) -> Option<Addr> {
        self.admitted(client).map(|at| at.plus(size_of::<U64>() as u64))
    }

    /// Address of the nonce of the holder of a client id; `None` if the store has no such client.
    pub(super) fn holder(&self, client: ClientId) -> Option<Addr> {
        let at = self.leases().plus(client.index() * ENTRY_SIZE);
        (client.number() <= self.spec().ids).then_some(at)
    }

    /// Number of a lane; `None` if the store has no such client or lane.
    pub(super) fn number(&self, EntryId { client, lane }: EntryId) -> Option<u64> {
        let Spec { ids, lanes, .. } = *self.spec();
        (client.number() <= ids && lane < lanes).then(|| client.index() * u64::from(lanes) + u64::from(lane))
    }

    /// Address of the number of extra buckets in use.
    pub(super) fn used_extras(&self) -> Addr {
        self.at(self.spec().head_offset())
    }

    /// Address of the epoch of the promoter whose packets are admitted.
    pub(super) fn promoter(&self) -> Addr {
        self.used_extras().plus(size_of::<U64>() as u64)
    }

    /// Address of the word of the lane with this number.
    pub(super) fn word(&self, number: u64) -> Addr {
        self.at(self.spec().words_offset() + number * WORD_SIZE)
    }

    /// Address of the list of buckets that the lane with this number has locked.
    pub(super) fn held(&self, number: u64) -> Addr {
        self.at(self.spec().held_offset() + number * self.spec().held_len())
    }

    /// Address of the record of the lane with this number.
    pub(super) fn record(&self, number: u64) -> Addr {
        self.at(self.spec().records_offset() + number * self.spec().record_len())
    }

    /// Address of a bucket, or of a copy.
    pub(super) fn bucket(&self, part: u8, bucket: u64) -> Addr {
        let spec = self.spec();
        let index = u64::from(part) * spec.all_buckets() + bucket;
        self.at(spec.buckets_offset().expect("it was checked") + index * spec.bucket_len())
    }

    /// Address of the slot at a place.
    pub(super) fn slot(&self, part: u8, place: Place) -> Addr {
        self.bucket(part, place.bucket).plus(SLOTS_OFFSET + (place.slot * size_of::<SlotHead>()) as u64)
    }

    /// Address of the key and the value at a place.
    pub(super) fn pair(&self, part: u8, place: Place) -> Addr {
        self.bucket(part, place.bucket).plus(BUCKET_SIZE as u64 + place.slot as u64 * self.spec().pair_len())
    }

    /// First bucket of the chain of a key.
    pub(super) fn bucket_of(&self, key: &[u8]) -> u64 {
        self.inner.first_slot(key)
    }

    /// Hash of a key, by which slots are compared first.
    pub(super) fn hash(&self, key: &[u8]) -> u64 {
        rapidhash_v3_seeded(key, &self.tags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Spec {
        Spec {
            buckets: 8,
            extras: 5,
            seed: 1,
            placement: Placement::Hashed,
            ids: 3,
            lanes: 2,
            lease_us: 5000,
            value_max: 100,
            pair_max: 164,
            writes_max: 1000,
            backups: 2,
        }
    }

    fn table(spec: &Spec) -> Table {
        let parameters = serde_json::to_string(spec).expect("plain data");
        let len = spec.table_len().expect("a small table");
        Table::new(&parameters, Extent { key: Key::new(1, 2), at: 1 << 20, len }).expect("a sound table")
    }

    #[test]
    fn the_parts_of_a_table_do_not_overlap() {
        let (spec, table) = (spec(), table(&spec()));
        let client = |number| ClientId::new(number).expect("not 0");
        let entries: Vec<EntryId> = (1..=3)
            .flat_map(|number| (0..2).map(move |lane| EntryId { client: client(number), lane }))
            .collect();
        let numbers: Vec<u64> = entries.iter().filter_map(|entry| table.number(*entry)).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
        let mut areas =
            vec![(table.leases(), 3 * ENTRY_SIZE), (table.used_extras(), 8), (table.promoter(), 8)];
        areas.extend((1..=3).filter_map(|number| table.granted(client(number))).map(|at| (at, EPOCHS_SIZE)));
        areas.extend(numbers.iter().map(|number| (table.word(*number), WORD_SIZE)));
        areas.extend(numbers.iter().map(|number| (table.held(*number), spec.held_max() * 8)));
        areas.extend(numbers.iter().map(|number| (table.record(*number), RECORD_SIZE as u64 + 1000)));
        for part in 0..3 {
            for bucket in 0..spec.all_buckets() {
                areas.push((table.bucket(part, bucket), SLOTS_OFFSET));
                for slot in 0..SLOTS {
                    let place = Place { bucket, slot };
                    assert_eq!(Place::of_bits(place.bits()), place);
                    areas.push((table.slot(part, place), size_of::<SlotHead>() as u64));
                    areas.push((table.pair(part, place), u64::from(spec.pair_max)));
                }
            }
        }
        areas.sort_by_key(|(at, _)| at.raw());
        for pair in areas.windows(2) {
            assert!(pair[0].0.raw() + pair[0].1 <= pair[1].0.raw(), "{pair:?}");
        }
        let (last, len) = areas[areas.len() - 1];
        assert!(last.raw() + len <= (1 << 20) + spec.table_len().expect("a small table"));
        assert_eq!(table.number(EntryId { client: client(4), lane: 0 }), None);
        assert_eq!(table.number(EntryId { client: client(1), lane: 2 }), None);
        assert_eq!(table.granted(client(4)), None);
    }

    #[test]
    fn writes_and_records_survive_encoding_and_others_are_refused() {
        let (spec, mut bytes) = (spec(), Vec::new());
        let write =
            |value| Write { place: Place { bucket: 12, slot: 6 }, bucket: 7, member: 2, key: b"key", value };
        for value in [Some(&b"value"[..]), Some(b""), None] {
            write(value).encode(&mut bytes);
        }
        let wanted = vec![write(Some(b"value")), write(Some(b"")), write(None)];
        assert_eq!(Write::decode_all(&bytes, &spec), Some(wanted));
        assert_eq!(bytes.len(), 2 * Write::len(b"key", None) + Write::len(b"key", Some(b"value")));
        let smaller = Spec { extras: 4, ..spec };
        assert_eq!(Write::decode_all(&bytes, &smaller), None, "a place beyond the table");
        assert_eq!(Write::decode_all(&bytes[..bytes.len() - 1], &spec), None);
        let record = RecordHeader::new(TxnId::of_bits(9), 5, &bytes);
        assert!(record.is_sound(&bytes) && record.len() == bytes.len());
        bytes[0] ^= 1;
        assert!(!record.is_sound(&bytes));
    }

    #[test]
    fn a_small_table_has_room_for_its_keys_whatever_their_hash() {
        for keys in [1, 6, 7, 8, 40, 500] {
            let (buckets, extras) = buckets_for(keys).expect("a small store");
            assert!((extras + 1) * SLOTS as u64 >= keys, "all keys belong to one bucket");
            assert!(buckets.is_power_of_two());
        }
        assert_eq!(buckets_for(u64::MAX), None);
    }

    #[test]
    fn a_large_table_has_room_for_hashed_keys() {
        for keys in [1 << 10, 2_560, 10_000, 1 << 17] {
            let (buckets, extras) = buckets_for(keys).expect("a small store");
            let table = table(&Spec { buckets, extras, value_max: 8, pair_max: 16, backups: 0, ..spec() });
            let mut sizes = vec![0; buckets as usize];
            (0..keys).for_each(|key| sizes[table.bucket_of(&key.to_le_bytes()) as usize] += 1);
            let needed: u64 = sizes.iter().map(|size: &u64| size.saturating_sub(1) / SLOTS as u64).sum();
            assert!(3 * needed < 2 * extras, "{needed} of {extras} for {keys} keys");
        }
    }
}

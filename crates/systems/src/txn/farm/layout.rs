//! The bytes of a FaRM store, the same at each member except for addresses.
//!
//! ```text
//! table    | lease 32 bytes, x ids | word 32 bytes, x lanes, x ids | head 64 bytes | entry 8 bytes, x slots |
//!          | record, x 1 + backups, x lanes, x ids | object, x objects, x 1 + backups |
//! word     | transaction u64 | stamp u62, state u2 | truncated u64 | 0 u64 |
//! head     | number of objects with a key u64 | 0, 56 bytes |
//! entry    | number of the object, plus 1: 40 bits | bits of the key's hash: 24 bits |  0 while no key has the slot
//! record   | checksum u64 | transaction u64 | stamp u64 | writes u32 | bytes u32 | the writes |
//! write    | object u64 | expected version u64 | key length u16 | kind u8 | 0 u8 | value length u32 | key | value |
//! object   | version u63, lock u1 | transaction that has the lock u64 | content | filler, to whole cache lines |
//! content  | stamp u64 | key length u16 | kind u8 | 0 u8 | value length u32 | key | value |
//! ```
//!
//! All numbers are little-endian. An object consists of *lines*, of 16 or 64 bytes. Each line but the first begins with
//! 16 bits, the object's version modulo 65,535 (FaRM, NSDI'14, section 4.2), and the content fills the rest of all
//! lines. A line of 64 bytes has the mark 65,535 in place of a version while its content changes: a CPU writes such a
//! line in pieces.
//!
//! Part 0 of the records and of the objects is that of the primary. Part r has the copies of the objects of the member
//! r places before this one, with the same numbers, and the records that clients write for this backup.
//!
//! Invariant: an entry of the index is written once. So an object keeps its key, and a deleted key keeps its object.
//! Invariant: a line has a version only while its whole content is of this version.
//! Invariant: the version of an object rises by 1 with each write. The version and the lock are one word, which is
//! changed by an atomic exchange together with the lock's owner.

use super::{KIND, mutants};
use crate::hash_slots::{self, Placement};
use crate::lease::ClientId;
use crate::txn::KEY_MAX;
use farside_remote::fabric::CALL_BYTES_MAX;
use farside_remote::leases::ENTRY_SIZE;
use farside_remote::service::Extent;
use farside_remote::{Addr, Key, NodeId};
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::time::Duration;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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

const CLIENT_BITS: u32 = 14;
const LANE_BITS: u32 = 6;
const CACHE_LINE: u64 = 64;
const WORD_SIZE: u64 = size_of::<Word>() as u64;
/// Size of the header of an object in bytes.
pub(super) const HEADER_SIZE: usize = size_of::<Header>();
/// Size of the header of a write in bytes.
pub(super) const WRITE_SIZE: usize = size_of::<WriteHeader>();
/// Size of the header of a record in bytes.
pub(super) const RECORD_SIZE: usize = size_of::<RecordHeader>();
/// Size of the header of an object's content in bytes.
const CONTENT_SIZE: usize = size_of::<ContentHeader>();
/// Size of the version of a line in bytes.
const LINE_VERSION: usize = size_of::<U16>();
/// Number of bytes that every CPU and fabric copies at once.
const UNIT: usize = 16;
/// In place of the version of a line: its content changes. No version modulo 65,535 has this value.
const MARK: u16 = u16::MAX;
/// The bytes of [`MARK`].
pub(super) const MARKED: [u8; LINE_VERSION] = MARK.to_le_bytes();
/// Expected version of an object that may have any.
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

    /// Returns the transaction with this count in a lane; `None` if the count has more than 44 bits.
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

    /// The log entry of the transaction; `None` if it is no transaction.
    pub(super) fn entry(self) -> Option<EntryId> {
        let client = ClientId::new((self.0.get() & ((1 << CLIENT_BITS) - 1)) as u16)?;
        let lane = (self.0.get() >> CLIENT_BITS & ((1 << LANE_BITS) - 1)) as u16;
        Some(EntryId { client, lane })
    }
}

/// A log entry: a lane of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId {
    pub(super) client: ClientId,
    pub(super) lane: u16,
}

/// State of the last transaction of a lane at a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// It has no locks and changes nothing: it was aborted, or there is none.
    Aborted = 0,
    /// It may have locks, and its record is complete.
    Locked = 1,
    /// It is committed, and its values are being installed.
    Decided = 2,
    /// It is committed, and has no locks.
    Done = 3,
}

/// Word of a log entry at a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) txn: TxnId,
    pub(super) stamp: u64,
    pub(super) state: State,
    /// The records of the lane's transactions up to this one were applied to the copies here.
    pub(super) truncated: TxnId,
}

/// Bytes of a [`Word`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct WordBytes {
    txn: TxnId,
    stamp_and_state: U64,
    truncated: TxnId,
    reserved: U64,
}

/// Number of bytes of a word that hold the transaction, its stamp and its state. They are written at once.
pub(super) const WORD_HALF: usize = 16;
/// Offset of the number of the last truncated transaction in a word.
pub(super) const TRUNCATED_OFFSET: u64 = 16;

impl Word {
    pub(super) fn of(bytes: &WordBytes) -> Word {
        let number = bytes.stamp_and_state.get();
        let state = match number & 3 {
            0 => State::Aborted,
            1 => State::Locked,
            2 => State::Decided,
            _ => State::Done,
        };
        Word { txn: bytes.txn, stamp: number >> 2, state, truncated: bytes.truncated }
    }

    /// The half of the word with the transaction and its state.
    pub(super) fn half(txn: TxnId, stamp: u64, state: State) -> [u8; WORD_HALF] {
        let number = U64::new(stamp << 2 | state as u64);
        let mut half = [0; WORD_HALF];
        half[..8].copy_from_slice(txn.as_bytes());
        half[8..].copy_from_slice(number.as_bytes());
        half
    }

    /// Whether the transaction may have locks, or is yet to be completed.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, State::Locked | State::Decided)
    }
}

const LOCKED: u64 = 1 << 63;

/// Header of an object.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub(super) struct Header {
    version_and_lock: U64,
    pub(super) owner: TxnId,
}

impl Header {
    pub(super) fn free(version: u64) -> Header {
        Header { version_and_lock: U64::new(version & !LOCKED), owner: TxnId::NONE }
    }

    pub(super) fn locked(version: u64, owner: TxnId) -> Header {
        Header { version_and_lock: U64::new(version | LOCKED), owner }
    }

    pub(super) fn version(self) -> u64 {
        self.version_and_lock.get() & !LOCKED
    }

    pub(super) fn is_locked(self) -> bool {
        self.version_and_lock.get() & LOCKED != 0
    }

    /// The header as a word of 16 bytes.
    pub(super) fn word(self) -> u128 {
        u128::from_le_bytes(self.as_bytes().try_into().expect("16 bytes"))
    }

    pub(super) fn of_word(word: u128) -> Header {
        Header::read_from_bytes(&word.to_le_bytes()).expect("16 bytes")
    }
}

/// Header of the content of an object.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ContentHeader {
    stamp: U64,
    key_len: U16,
    kind: u8,
    reserved: u8,
    value_len: U32,
}

/// Kind of a content or write: the key has a value.
const VALUE: u8 = 1;
/// Kind of a content or write: the key has no value.
const ABSENT: u8 = 2;

/// A decoded content of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content<'a> {
    /// Stamp of the transaction that has written it; 0 if none has.
    pub(super) stamp: u64,
    pub(super) key: &'a [u8],
    /// The value; `None` if the key has none.
    pub(super) value: Option<&'a [u8]>,
}

impl<'a> Content<'a> {
    /// Encodes the content into `out`, which it clears.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let value = self.value.unwrap_or_default();
        let header = ContentHeader {
            stamp: U64::new(self.stamp),
            key_len: U16::new(self.key.len() as u16),
            kind: if self.value.is_some() { VALUE } else { ABSENT },
            reserved: 0,
            value_len: U32::new(value.len() as u32),
        };
        out.clear();
        [header.as_bytes(), self.key, value].into_iter().for_each(|part| out.extend_from_slice(part));
    }

    /// Decodes a content; `None` if no client writes such bytes.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<Content<'a>> {
        let (header, rest) = ContentHeader::ref_from_prefix(bytes).ok()?;
        let (key, value) = rest.split_at_checked(header.key_len.get().into())?;
        if value.len() != header.value_len.get() as usize || key.is_empty() {
            return None;
        }
        let value = match header.kind {
            VALUE => Some(value),
            ABSENT if value.is_empty() => None,
            _ => return None,
        };
        Some(Content { stamp: header.stamp.get(), key, value })
    }
}

/// How objects are divided into lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lines(usize);

impl Lines {
    /// Lines of one of the sizes in [`LINES`].
    pub(super) fn of(size: u8) -> Lines {
        Lines(size.into())
    }

    /// Offset of a content in its object.
    fn content_at(self) -> usize {
        match self.0 - HEADER_SIZE {
            0 => self.0 + LINE_VERSION,
            _ => HEADER_SIZE,
        }
    }

    /// Offset of the stamp in an object. It lies within one line.
    pub(super) fn stamp_at(self) -> u64 {
        self.content_at() as u64
    }

    /// Number of bytes of an object with a content of this length, without the filler at its end.
    fn image_len(self, content: usize) -> usize {
        let rest = content.saturating_sub(self.0 - HEADER_SIZE);
        self.0 + rest.div_ceil(self.0 - LINE_VERSION) * self.0
    }

    /// Whether a line is marked while its content changes.
    pub(super) fn are_marked(self) -> bool {
        self.0 > UNIT && !mutants::LINES_UNMARKED.is_on()
    }

    /// Offsets of the versions of lines in the `len` bytes of an object after its header.
    pub(super) fn versions_at(self, len: usize) -> impl Iterator<Item = usize> {
        (self.0 - HEADER_SIZE..len).step_by(self.0)
    }

    /// Marks the lines of an object. `image` holds its bytes after the header.
    pub(super) fn mark(self, image: &mut [u8]) {
        for at in self.versions_at(image.len()) {
            image[at..at + LINE_VERSION].copy_from_slice(&MARKED);
        }
    }

    /// Encodes the bytes of an object after its header into `out`, which it clears: those of a content that is written
    /// with this version.
    pub(super) fn encode(self, version: u64, content: &[u8], out: &mut Vec<u8>) {
        let (first, rest) = content.split_at(content.len().min(self.0 - HEADER_SIZE));
        out.clear();
        out.extend_from_slice(first);
        out.resize(self.0 - HEADER_SIZE, 0);
        for line in rest.chunks(self.0 - LINE_VERSION) {
            out.extend_from_slice(&line_version(version));
            out.extend_from_slice(line);
        }
        out.resize(self.image_len(content.len()) - HEADER_SIZE, 0);
    }

    /// Decodes an object, and puts its content into `out`, which it clears. `checks` is false for objects that nobody
    /// changes meanwhile.
    pub(super) fn decode(self, object: &[u8], out: &mut Vec<u8>, checks: bool) -> Reading {
        out.clear();
        let Ok((header, _)) = Header::read_from_prefix(object) else { return Reading::Damaged };
        if header.is_locked() && checks {
            return Reading::Locked(header.owner);
        }
        let version = line_version(header.version());
        for (number, line) in object.chunks(self.0).enumerate() {
            let (prefix, content) = line
                .split_at_checked(if number == 0 { HEADER_SIZE } else { LINE_VERSION })
                .unwrap_or_default();
            if checks && number > 0 && prefix != version && !mutants::LINES_UNCHECKED.is_on() {
                return Reading::Torn;
            }
            out.extend_from_slice(content);
            let Ok((header, _)) = ContentHeader::ref_from_prefix(&out[..]) else { continue };
            let len = CONTENT_SIZE + usize::from(header.key_len.get()) + header.value_len.get() as usize;
            if len <= out.len() {
                out.truncate(len);
                return Reading::Whole(header_version(object));
            }
        }
        Reading::Damaged
    }
}

/// The bytes of the version of each line but the first of an object with this version.
pub(super) fn line_version(version: u64) -> [u8; LINE_VERSION] {
    ((version % u64::from(MARK)) as u16).to_le_bytes()
}

fn header_version(object: &[u8]) -> u64 {
    Header::read_from_prefix(object).map_or(0, |(header, _)| header.version())
}

/// Result of a READ of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// The content of this version.
    Whole(u64),
    /// The object is locked by this transaction.
    Locked(TxnId),
    /// Bytes of several versions.
    Torn,
    /// No client writes such bytes.
    Damaged,
}

/// Header of a write.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WriteHeader {
    object: U64,
    expected: U64,
    key_len: U16,
    kind: u8,
    reserved: u8,
    value_len: U32,
}

/// A write of a transaction to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write<'a> {
    /// Number of the object at its primary.
    pub(super) object: u64,
    /// Version that the transaction has read; [`ANY_VERSION`] if it has not read the object.
    pub(super) expected: u64,
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
        let header = WriteHeader {
            object: U64::new(self.object),
            expected: U64::new(self.expected),
            key_len: U16::new(self.key.len() as u16),
            kind: if self.value.is_some() { VALUE } else { ABSENT },
            reserved: 0,
            value_len: U32::new(value.len() as u32),
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
            let is_sound = header.object.get() < spec.objects
                && !key.is_empty()
                && key.len() + value.len() <= spec.pair_max as usize;
            let value = match header.kind {
                VALUE if is_sound => Some(value),
                ABSENT if is_sound && value.is_empty() => None,
                _ => return None,
            };
            let (object, expected) = (header.object.get(), header.expected.get());
            writes.push(Write { object, expected, key, value });
            bytes = rest;
        }
        Some(writes)
    }

    /// The content that the write gives to its object.
    pub(super) fn content(&self, stamp: u64) -> Content<'a> {
        Content { stamp, key: self.key, value: self.value }
    }
}

/// Header of a record.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RecordHeader {
    checksum: U64,
    pub(super) txn: TxnId,
    pub(super) stamp: U64,
    reserved: U32,
    len: U32,
}

impl RecordHeader {
    /// Header of the record of a transaction with these writes.
    pub(super) fn new(txn: TxnId, stamp: u64, writes: &[u8]) -> RecordHeader {
        let header = RecordHeader { stamp: U64::new(stamp), ..RecordHeader::unchecked(txn, writes) };
        RecordHeader { checksum: U64::new(header.checksum_with(writes)), ..header }
    }

    /// Header of a record without a stamp and a checksum. Only its member reads it, and it knows that it is whole.
    pub(super) fn unchecked(txn: TxnId, writes: &[u8]) -> RecordHeader {
        RecordHeader {
            checksum: U64::ZERO,
            txn,
            stamp: U64::ZERO,
            reserved: U32::ZERO,
            len: U32::new(writes.len() as u32),
        }
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
mod tests {
    use super::*;

    fn spec(line: u8) -> Spec {
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

    #[test]
    fn an_object_survives_encoding_and_a_line_of_another_version_is_found() {
        for line in LINES {
            let spec = spec(line);
            assert_eq!(spec.check(), Ok(()));
            let (lines, mut content, mut out) = (spec.lines(), Vec::new(), Vec::new());
            for len in [0, 1, 13, 14, 15, 47, 48, 200] {
                let value = vec![9; len];
                let wanted = Content { stamp: 5, key: b"key", value: Some(&value) };
                wanted.encode(&mut content);
                let mut object = Header::free(0x3_0007).as_bytes().to_vec();
                let mut rest = Vec::new();
                lines.encode(0x3_0007, &content, &mut rest);
                object.extend_from_slice(&rest);
                assert_eq!(object.len() % usize::from(line), 0);
                assert!(object.len() as u64 <= spec.object_len());
                let stamp = &object[lines.stamp_at() as usize..][..8];
                assert_eq!(stamp, 5_u64.to_le_bytes());
                let used = object.len();
                object.resize(spec.object_len() as usize, 0x55);
                assert_eq!(lines.decode(&object, &mut out, true), Reading::Whole(0x3_0007));
                assert_eq!(Content::decode(&out), Some(wanted));
                for torn in (usize::from(line)..used).step_by(line.into()) {
                    let mut object = object.clone();
                    object[torn] ^= 1;
                    assert_eq!(lines.decode(&object, &mut out, true), Reading::Torn);
                }
                object[..HEADER_SIZE].copy_from_slice(Header::locked(7, TxnId::of_bits(9)).as_bytes());
                assert_eq!(lines.decode(&object, &mut out, true), Reading::Locked(TxnId::of_bits(9)));
            }
        }
    }

    #[cfg(farside_mutants)]
    #[test]
    fn a_torn_object_is_returned_if_versions_of_lines_are_not_compared() {
        use farside_remote::mutant::Mutant;
        let (lines, mut content, mut rest) = (spec(16).lines(), Vec::new(), Vec::new());
        Content { stamp: 5, key: b"key", value: Some(&[9; 100]) }.encode(&mut content);
        lines.encode(7, &content, &mut rest);
        let mut object = [Header::free(7).as_bytes(), &rest[..]].concat();
        object[64..66].copy_from_slice(&8_u16.to_le_bytes());
        assert_eq!(lines.decode(&object, &mut content, true), Reading::Torn);
        Mutant::switch(Some(mutants::LINES_UNCHECKED));
        let accepted = lines.decode(&object, &mut content, true);
        Mutant::switch(None);
        assert_eq!(accepted, Reading::Whole(7));
    }

    #[test]
    fn writes_survive_encoding_and_damaged_ones_are_refused() {
        let spec = spec(16);
        let writes = [
            Write { object: 3, expected: 9, key: b"ada", value: Some(b"1") },
            Write { object: 19, expected: ANY_VERSION, key: b"bob", value: None },
        ];
        let mut bytes = Vec::new();
        writes.iter().for_each(|write| write.encode(&mut bytes));
        assert_eq!(Write::decode_all(&bytes, &spec), Some(writes.to_vec()));
        assert_eq!(bytes.len(), writes.iter().map(|write| Write::len(write.key, write.value)).sum::<usize>());
        assert_eq!(Write::decode_all(&bytes[..bytes.len() - 1], &spec), None);
        let record = RecordHeader::new(TxnId::of_bits(4097), 3, &bytes);
        assert!(record.is_sound(&bytes));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x80;
            assert!(!record.is_sound(&damaged));
            let _must_not_panic = Write::decode_all(&damaged, &spec);
        }
        bytes[0] = 20;
        assert_eq!(Write::decode_all(&bytes, &spec), None, "the store has 20 objects");
    }

    #[test]
    fn transactions_of_a_lane_ascend_and_name_their_entry() {
        let entry = EntryId { client: ClientId::new(IDS_MAX).expect("an id"), lane: LANES_MAX - 1 };
        let ids = [1, 2, 1 << 43].map(|count| TxnId::new(entry, count).expect("a small count"));
        assert!(ids.is_sorted());
        assert!(ids.iter().all(|txn| txn.entry() == Some(entry)));
        assert_eq!((ids[1].count(), TxnId::new(entry, 1 << 44), TxnId::NONE.entry()), (2, None, None));
    }
}

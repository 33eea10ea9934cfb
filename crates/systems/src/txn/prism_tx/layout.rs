//! The bytes of a PRISM-TX store, the same at each member except for addresses.
//!
//! ```text
//! table | lease 32 bytes, x ids | word 16 bytes, x lanes, x ids | body, x lanes, x ids | slot 32 bytes, x slots |
//! slot  | PW u64 | PR u64 | C u64 | address of the item u64, 0 while no key has the slot |
//! word  | timestamp u64 | state u64 |
//! body  | timestamp u64 | writes u32 | bytes u32 | the writes |
//! write | slot u64 | key length u16 | kind u8 | 0 u8 | value length u32 | key | value |
//! item  | timestamp u64 | key length u16 | kind u8 | 0 u8 | value length u32 | key | value |
//! ```
//!
//! A timestamp is 48 bits of microseconds since the store's creation, and the 16 bits of its client's id. Timestamps
//! and states are big-endian, so that a CAS can compare them. The leases of the first member count.
//!
//! `PW|PR` and `C|address` are two words of 16 bytes, which no access tears. A READ of both may take them at different
//! times, in any order.
//!
//! Invariant: an item is written once, before a slot points to it, and never changes.
//! Invariant: a slot keeps its key. A delete installs a TOMBSTONE, and a transaction that reads or writes a key without
//! a slot claims one by a TOMBSTONE with the timestamp 0.
//! Invariant: PW, PR and C never fall, and C <= PW.

use super::KIND;
use crate::hash_slots::{self, Placement};
use crate::lease::ClientId;
use crate::txn::{KEY_MAX, Prepare};
use farside_remote::control::Store;
use farside_remote::leases::ENTRY_SIZE;
use farside_remote::service::Extent;
use farside_remote::wire::CHAIN_BYTES_MAX;
use farside_remote::{Addr, Key, NodeId};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::ops::Range;
use std::time::Duration;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, big_endian};

/// Number of slots on a key's probe path: the key's first slot and the slots after it.
pub(super) const PROBES_MAX: u64 = 256;
/// Number of slots of a new table for each item that the table must hold.
const SLOTS_PER_ITEM: u64 = 2;
/// Number of items that the largest table can hold.
const ITEM_COUNT_MAX: u64 = 1 << 34;
/// Length of the longest value in bytes. Item and intent of the longest pair fit into one chain.
pub const VALUE_MAX: u32 = 48 * 1024;
/// Number of bytes of a chain that its headers and checks need, beside the writes of an intent.
const CHAIN_RESERVED: usize = 8 * 1024;
/// Largest number of bytes that a transaction can write at one member.
pub const WRITES_MAX: u32 = (CHAIN_BYTES_MAX - CHAIN_RESERVED) as u32;

/// Size of a slot in bytes.
pub(super) const SLOT_SIZE: u64 = size_of::<Slot>() as u64;
const WORD_SIZE: u64 = size_of::<Word>() as u64;
/// Offset of the half `C|address` in a slot, in bytes.
const SETTLED_OFFSET: u64 = size_of::<Prepared>() as u64;
/// Offset of the address in a half of a slot.
pub(super) const ADDRESS_OFFSET: u32 = size_of::<Timestamp>() as u32;
/// Size of the headers of items, bodies and writes, in bytes.
pub(super) const HEADER_SIZE: usize = 16;

/// Timestamp of a transaction: clock and client id.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub struct Timestamp(big_endian::U64);

impl Timestamp {
    const ID_BITS: u32 = 16;
    /// Timestamp of no transaction.
    pub const ZERO: Timestamp = Timestamp(big_endian::U64::ZERO);
    const ALL_BITS: Timestamp = Timestamp(big_endian::U64::MAX_VALUE);

    /// Returns the timestamp of a client at a time in microseconds; `None` if the time has more than 48 bits.
    pub fn new(clock: u64, id: ClientId) -> Option<Timestamp> {
        let is_short = clock >> (u64::BITS - Timestamp::ID_BITS) == 0;
        let bits = clock << Timestamp::ID_BITS | u64::from(id.number());
        is_short.then(|| Timestamp(big_endian::U64::new(bits)))
    }

    /// The time in microseconds since the store's creation.
    pub fn clock(self) -> u64 {
        self.0.get() >> Timestamp::ID_BITS
    }

    /// Id of the client; `None` if no client has the timestamp.
    pub fn id(self) -> Option<ClientId> {
        ClientId::new(self.0.get() as u16)
    }

    /// The timestamp as a number, in the order of timestamps.
    pub fn bits(self) -> u64 {
        self.0.get()
    }
}

/// The half `PW|PR` of a slot.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Prepared {
    /// The latest transaction that has prepared to write the key.
    pub pw: Timestamp,
    /// The latest transaction that has prepared to read the key.
    pub pr: Timestamp,
}

impl Prepared {
    pub(super) const WHOLE: Prepared = Prepared { pw: Timestamp::ALL_BITS, pr: Timestamp::ALL_BITS };
    pub(super) const PW: Prepared = Prepared { pw: Timestamp::ALL_BITS, pr: Timestamp::ZERO };
    pub(super) const PR: Prepared = Prepared { pw: Timestamp::ZERO, pr: Timestamp::ALL_BITS };
    pub(super) const NONE: Prepared = Prepared { pw: Timestamp::ZERO, pr: Timestamp::ZERO };
}

/// The half `C|address` of a slot.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Settled {
    /// The latest transaction that is settled: it has installed its value, or was aborted.
    pub c: Timestamp,
    /// The item; null while no key has the slot.
    pub at: Addr,
}

impl Settled {
    pub(super) const WHOLE: Settled = Settled { c: Timestamp::ALL_BITS, at: Addr::new(u64::MAX) };
    pub(super) const C: Settled = Settled { c: Timestamp::ALL_BITS, at: Addr::NULL };
    pub(super) const ADDRESS: Settled = Settled { c: Timestamp::ZERO, at: Addr::new(u64::MAX) };
    pub(super) const NONE: Settled = Settled { c: Timestamp::ZERO, at: Addr::NULL };

    /// A half with this timestamp, for the comparison with C.
    pub(super) const fn at_time(c: Timestamp) -> Settled {
        Settled { c, at: Addr::NULL }
    }
}

/// Metadata of a key.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Slot {
    /// PW and PR.
    pub prepared: Prepared,
    /// C and the address of the item.
    pub settled: Settled,
}

impl Slot {
    /// Whether no transaction is between its prepare and its end on this key.
    pub fn is_settled(&self) -> bool {
        self.prepared.pw == self.settled.c
    }
}

/// State of a log entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum State {
    /// No transaction.
    Free = 0,
    /// The transaction may have prepared at this shard.
    Active = 1,
    /// The transaction commits.
    Decided = 2,
    /// The transaction was committed by a recoverer.
    Done = 3,
}

/// Word of a log entry: timestamp and state, which change together.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Word {
    /// Timestamp of the transaction.
    pub ts: Timestamp,
    state: big_endian::U64,
}

impl Word {
    /// Word of a free entry.
    pub const FREE: Word = Word { ts: Timestamp::ZERO, state: big_endian::U64::ZERO };

    /// Word that no entry ever has.
    pub(super) const NEVER: Word = Word { ts: Timestamp::ALL_BITS, state: big_endian::U64::ZERO };

    /// Returns the word of a transaction in this state.
    pub fn new(ts: Timestamp, state: State) -> Word {
        Word { ts, state: big_endian::U64::new(state as u64) }
    }

    /// The state; `None` if no client writes such a word.
    pub fn state(self) -> Option<State> {
        match self.state.get() {
            0 => Some(State::Free),
            1 => Some(State::Active),
            2 => Some(State::Decided),
            3 => Some(State::Done),
            _ => None,
        }
    }

    /// Whether the transaction of this entry may still change its keys.
    pub fn is_unsettled(self) -> bool {
        matches!(self.state(), Some(State::Active | State::Decided))
    }
}

/// Kind of an item or of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ItemKind {
    /// The key has a value.
    Value = 1,
    /// The key has no value.
    Tombstone = 2,
}

impl ItemKind {
    fn of(kind: u8) -> Option<ItemKind> {
        match kind {
            1 => Some(ItemKind::Value),
            2 => Some(ItemKind::Tombstone),
            _ => None,
        }
    }
}

/// Header of an item, or of a write in a body, where the first word is the index of the key's slot.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct ItemHeader<T> {
    pub(super) first: T,
    key_len: U16,
    kind: u8,
    reserved: u8,
    value_len: U32,
}

/// A key, its value, which is absent if the key has none, and the bytes after both.
type Parts<'a> = (&'a [u8], Option<&'a [u8]>, &'a [u8]);

impl<T> ItemHeader<T> {
    /// Returns the header of a key and its value, which is absent if the key was deleted. Both have valid lengths.
    pub(super) fn new(first: T, key: &[u8], value: Option<&[u8]>) -> ItemHeader<T> {
        let kind = if value.is_some() { ItemKind::Value } else { ItemKind::Tombstone };
        ItemHeader {
            first,
            key_len: U16::new(key.len() as u16),
            kind: kind as u8,
            reserved: 0,
            value_len: U32::new(value.map_or(0, <[u8]>::len) as u32),
        }
    }

    /// Splits the bytes after the header into key, value and rest.
    fn split<'a>(&self, rest: &'a [u8]) -> Option<Parts<'a>> {
        let (key_len, value_len) = (usize::from(self.key_len.get()), self.value_len.get() as usize);
        let kind = ItemKind::of(self.kind)?;
        if !(1..=KEY_MAX).contains(&key_len) {
            return None;
        }
        let (key, rest) = rest.split_at_checked(key_len)?;
        let (value, rest) = rest.split_at_checked(value_len)?;
        let value = (kind == ItemKind::Value).then_some(value);
        (value.is_some() || value_len == 0).then_some((key, value, rest))
    }
}

/// A decoded item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item<'a> {
    /// Timestamp of the transaction that has written the item.
    pub(super) ts: Timestamp,
    pub(super) key: &'a [u8],
    /// The value; `None` if the key has none.
    pub(super) value: Option<&'a [u8]>,
}

impl<'a> Item<'a> {
    /// Whether the key of the item that begins with these bytes has a value; `None` if the bytes are no item.
    pub(super) fn has_value(bytes: &[u8]) -> Option<bool> {
        let (header, _) = ItemHeader::<Timestamp>::ref_from_prefix(bytes).ok()?;
        ItemKind::of(header.kind).map(|kind| kind == ItemKind::Value)
    }

    /// Decodes the item at the start of `bytes`; `None` if the bytes are no item.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<Item<'a>> {
        let (header, rest) = ItemHeader::<Timestamp>::ref_from_prefix(bytes).ok()?;
        let (key, value, _) = header.split(rest)?;
        Some(Item { ts: header.first, key, value })
    }
}

/// Header of a body.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct BodyHeader {
    ts: Timestamp,
    writes: U32,
    bytes: U32,
}

/// A write in a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write<'a> {
    /// Index of the key's slot at this member.
    pub(super) slot: u64,
    pub(super) key: &'a [u8],
    /// The value; `None` if the key is deleted.
    pub(super) value: Option<&'a [u8]>,
}

impl Write<'_> {
    /// Number of bytes that a write takes in a body.
    pub(super) fn len(key: &[u8], value: Option<&[u8]>) -> usize {
        HEADER_SIZE + key.len() + value.map_or(0, <[u8]>::len)
    }
}

/// Appends the body of a transaction with these writes.
pub(super) fn encode_body<'a>(
    ts: Timestamp,
    writes: impl Iterator<Item = Write<'a>> + Clone,
    out: &mut Vec<u8>,
) {
    let bytes: usize = writes.clone().map(|write| Write::len(write.key, write.value)).sum();
    let header =
        BodyHeader { ts, writes: U32::new(writes.clone().count() as u32), bytes: U32::new(bytes as u32) };
    out.reserve_exact(header.as_bytes().len() + bytes);
    out.extend_from_slice(header.as_bytes());
    for Write { slot, key, value } in writes {
        out.extend_from_slice(ItemHeader::new(U64::new(slot), key, value).as_bytes());
        out.extend_from_slice(key);
        out.extend_from_slice(value.unwrap_or_default());
    }
}

/// Decodes a body: its timestamp and its writes. Returns `None` if no client writes such bytes.
pub(super) fn decode_body(bytes: &[u8]) -> Option<(Timestamp, Vec<Write<'_>>)> {
    let (header, rest) = BodyHeader::ref_from_prefix(bytes).ok()?;
    let mut rest = rest.get(..header.bytes.get() as usize)?;
    let mut writes = Vec::new();
    for _ in 0..header.writes.get() {
        let (write, after) = ItemHeader::<U64>::ref_from_prefix(rest).ok()?;
        let (key, value, after) = write.split(after)?;
        writes.push(Write { slot: write.first.get(), key, value });
        rest = after;
    }
    rest.is_empty().then_some((header.ts, writes))
}

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Number of slots at the member, a power of two.
    pub slots: u64,
    /// Seed of the hash from keys to slots.
    pub seed: u64,
    /// Function that maps each key to its first slot.
    pub placement: Placement,
    /// Number of client ids.
    pub ids: u16,
    /// Number of transactions of a client that commit at the same time.
    pub lanes: u16,
    /// Length of a lease in microseconds.
    pub lease_us: u64,
    /// Length of the longest value in bytes.
    pub value_max: u32,
    /// Number of bytes that a transaction can write at one member, with keys and headers.
    pub writes_max: u32,
    /// Number of rounds of a prepare.
    #[serde(default)]
    pub prepare: Prepare,
    /// Largest error of a client's clock, in microseconds. If present, commits wait for their timestamps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_error_us: Option<u64>,
}

impl Spec {
    /// Checks the parameters.
    ///
    /// # Errors
    /// No store has these parameters.
    pub fn check(&self) -> Result<(), String> {
        if self.ids == 0 || self.lanes == 0 {
            return Err("a store needs at least one client id and one lane".into());
        }
        if self.lease_us < 1000 {
            return Err(format!("leases of {} us are too short: give at least 1 ms", self.lease_us));
        }
        if self.value_max > VALUE_MAX {
            return Err(format!("values of {} bytes are too long: give at most {VALUE_MAX}", self.value_max));
        }
        let least = (HEADER_SIZE * 2 + KEY_MAX) as u32 + self.value_max;
        if !(least..=WRITES_MAX).contains(&self.writes_max) {
            return Err(format!(
                "transactions that write {} bytes are not possible with values of {} bytes: give {least} to \
                 {WRITES_MAX}",
                self.writes_max, self.value_max
            ));
        }
        match self.table_len() {
            Some(_) if self.slots.is_power_of_two() => Ok(()),
            _ => Err(format!("{} slots are not possible: give fewer --items", self.slots)),
        }
    }

    /// Size of the table in bytes; `None` if it exceeds the address space.
    pub fn table_len(&self) -> Option<u64> {
        self.slots.checked_mul(SLOT_SIZE)?.checked_add(self.slots_offset())
    }

    /// Length of a lease.
    pub fn lease(&self) -> Duration {
        Duration::from_micros(self.lease_us)
    }

    /// Length of the longest item in bytes.
    pub(super) fn item_max(&self) -> usize {
        HEADER_SIZE + KEY_MAX + self.value_max as usize
    }

    /// Size of a body in bytes.
    pub(super) fn body_len(&self) -> u64 {
        (HEADER_SIZE as u64 + u64::from(self.writes_max)).next_multiple_of(16)
    }

    /// Number of log entries at a member.
    pub(super) fn entries(&self) -> u64 {
        u64::from(self.ids) * u64::from(self.lanes)
    }

    fn words_offset(&self) -> u64 {
        u64::from(self.ids) * ENTRY_SIZE
    }

    fn bodies_offset(&self) -> u64 {
        self.words_offset() + self.entries() * WORD_SIZE
    }

    fn slots_offset(&self) -> u64 {
        (self.bodies_offset() + self.entries() * self.body_len()).next_multiple_of(64)
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

/// Returns the addresses of the log of a store's part at a member: of all words and bodies.
///
/// # Errors
/// The description is impossible.
pub fn log_of(store: &Store) -> Result<Range<u64>, String> {
    let Shard { table, .. } = Shard::new(NodeId(0), &store.parameters, store.extent())?;
    let (spec, at) = (table.spec, table.extent.at);
    Ok(at + spec.words_offset()..at + spec.slots_offset())
}

/// Number of slots of a table for `items` items; `None` if no table can hold them.
pub(super) fn slots_for(items: u64) -> Option<u64> {
    (items <= ITEM_COUNT_MAX).then(|| (items * SLOTS_PER_ITEM).next_power_of_two().max(64))
}

/// A log entry of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId {
    pub(super) client: ClientId,
    pub(super) lane: u16,
}

impl EntryId {
    /// The first entry of a log.
    pub(super) const FIRST: EntryId = EntryId { client: ClientId::new(1).expect("not 0"), lane: 0 };
}

/// The part of a store at one member.
pub(super) struct Shard {
    pub(super) node: NodeId,
    key: Cell<Key>,
    pub(super) table: hash_slots::Table<Spec>,
}

impl Shard {
    /// Creates access to a member's table as the catalog describes it.
    ///
    /// # Errors
    /// The description is impossible. A node may answer anything.
    pub(super) fn new(node: NodeId, parameters: &str, extent: Extent) -> Result<Shard, String> {
        let table = hash_slots::Table::<Spec>::new(parameters, extent)?;
        table.spec.check().map_err(|reason| {
            format!("invalid description of a {KIND} store in the catalog of node {}: {reason}", node.0)
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
        &self.table.spec
    }

    fn at(&self, offset: u64) -> Addr {
        Addr::new(self.table.extent.at).plus(offset)
    }

    /// Address of the table of leases.
    pub(super) fn leases(&self) -> Addr {
        self.at(0)
    }

    /// Number of an entry. The entries of a client's lanes follow each other, and those of the next client follow them.
    fn number(&self, EntryId { client, lane }: EntryId) -> u64 {
        client.index() * u64::from(self.spec().lanes) + u64::from(lane)
    }

    /// The entry with this number.
    pub(super) fn entry_numbered(&self, number: u64) -> EntryId {
        let lanes = u64::from(self.spec().lanes);
        let client = u16::try_from(number / lanes + 1).ok().and_then(ClientId::new);
        EntryId { client: client.expect("a log has few entries"), lane: (number % lanes) as u16 }
    }

    /// Address of the word of an entry.
    pub(super) fn word(&self, entry: EntryId) -> Addr {
        self.word_numbered(self.number(entry))
    }

    /// Address of the word of the entry with this number.
    pub(super) fn word_numbered(&self, number: u64) -> Addr {
        self.at(self.spec().words_offset() + number * WORD_SIZE)
    }

    /// Address of the body of an entry.
    pub(super) fn body(&self, entry: EntryId) -> Addr {
        self.at(self.spec().bodies_offset() + self.number(entry) * self.spec().body_len())
    }

    /// Address of a slot, and of its half `PW|PR`. The index is that of a slot of the table.
    pub(super) fn slot(&self, index: u64) -> Addr {
        self.at(self.spec().slots_offset() + index * SLOT_SIZE)
    }

    /// Address of the half `C|address` of a slot.
    pub(super) fn settled(&self, index: u64) -> Addr {
        self.slot(index).plus(SETTLED_OFFSET)
    }

    /// Index of the slot at this place of a key's probe path.
    pub(super) fn probe(&self, key: &[u8], number: u64) -> u64 {
        (self.table.first_slot(key) + number) & (self.spec().slots - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_ordered_by_clock_and_then_by_client() {
        let ts = |clock, id| Timestamp::new(clock, ClientId::new(id).expect("an id")).expect("a short clock");
        assert!(ts(1, 9) < ts(2, 1) && ts(2, 1) < ts(2, 2));
        assert_eq!((ts(7, 9).clock(), ts(7, 9).id()), (7, ClientId::new(9)));
        assert!(ts(1, 9).as_bytes() < ts(256, 1).as_bytes(), "the order of a CAS is that of the bytes");
        assert_eq!(Timestamp::new(1 << 48, ClientId::new(1).expect("an id")), None);
        assert_eq!(Timestamp::ZERO.id(), None);
    }

    #[test]
    fn a_body_round_trips_and_a_damaged_one_is_refused() {
        let writes =
            [Write { slot: 7, key: b"ada", value: Some(b"1") }, Write { slot: 9, key: b"bob", value: None }];
        let ts = Timestamp::new(5, ClientId::new(3).expect("an id")).expect("a short clock");
        let mut body = Vec::new();
        encode_body(ts, writes.iter().copied(), &mut body);
        assert_eq!(decode_body(&body), Some((ts, writes.to_vec())));
        for cut in 0..body.len() {
            assert_eq!(decode_body(&body[..cut]), None, "cut at {cut}");
        }
        for at in 8..body.len() {
            let mut damaged = body.clone();
            damaged[at] ^= 0x80;
            let _must_not_panic = decode_body(&damaged);
        }
    }
}

//! The bytes of a Pilaf store: a table of entries in a table segment, and items in buffers.
//!
//! ```text
//! table    | head, 64 bytes | entry 0 | entry 1 | ...
//! entry    | inuse u32 | size u32 | ptr u64 | CRC of the item u64 | CRC of the entry u64 |    32 bytes, aligned
//! item     | generation u32 | key length u16 | 0 u16 | value length u32 | 0 u32 | key | value |
//! head     | installs u64 | slot u64 | entry | 0 u64 | CRC of all before u64 |
//! request  | op u8 | 0 u8 | key length u16 | key | value |             of a call to the service, after its address
//! answer   | outcome u8 | 0 u8 x 3 | generation u32 | value |
//! ```
//!
//! All is little-endian; CRCs are CRC-64/NVME. An entry of zeros never had a key. Invariant: but for those zeros, no
//! bytes of an entry or item are believed before their CRC was seen to be theirs, its size least of all.

use crate::hash_slots;
pub use crate::hash_slots::Placement;
use crate::kv::{KEY_MAX, KvError, Version};
use farside_remote::fabric::CALL_BYTES_MAX;
use farside_remote::service::ADDRESS_SIZE;
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of an entry.
pub const ENTRY_SIZE: u64 = size_of::<Entry>() as u64;
const _: () = assert!(ENTRY_SIZE == 32);
/// Bytes of the table's head.
pub const HEAD_SIZE: u64 = size_of::<Head>() as u64;
const _: () = assert!(HEAD_SIZE == 64);
/// Slots that a key can have: its own and those after it.
pub const PROBES_MAX: u64 = 64;
/// Slots per item that a store is created for: as many as PRISM-KV's, so that both meet as many collisions.
pub const SLOTS_PER_ITEM: u64 = 4;
/// Items that the largest table has room for.
pub const ITEM_COUNT_MAX: u64 = 1 << 33;
/// Bytes of an item's header.
pub const HEADER_SIZE: usize = size_of::<ItemHeader>();
const _: () = assert!(HEADER_SIZE == 16);
/// The longest item, in bytes: what one call carries to the service, and one READ back.
pub const ITEM_MAX: usize = 60 * 1024;
/// The longest key and value together, in bytes.
pub const PAIR_MAX: usize = ITEM_MAX - HEADER_SIZE;
const _: () = assert!(ADDRESS_SIZE + REQUEST_SIZE + PAIR_MAX <= CALL_BYTES_MAX);
const _: () = assert!(ANSWER_SIZE + PAIR_MAX <= CALL_BYTES_MAX);

/// The checksum of entries and items.
pub fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// What a slot of the table holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Entry {
    /// [`IN_USE`] or [`DELETED`]; 0 in a slot that never had a key.
    pub inuse: U32,
    /// Bytes of the item.
    pub size: U32,
    /// Where the item is.
    pub ptr: U64,
    /// Of the item's bytes.
    pub crc_item: U64,
    /// Of the bytes of this entry before it.
    pub crc_entry: U64,
}

/// The slot has an item.
pub const IN_USE: u32 = 1;
/// The slot had an item, so that what collided with that lies behind it. Any key may have it.
pub const DELETED: u32 = 2;

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// The slot never had a key.
    Never,
    /// The slot has no key now.
    Deleted,
    /// Its item is here.
    Item {
        /// The address.
        at: u64,
        /// Bytes of it, at most [`ITEM_MAX`].
        len: u32,
    },
    /// Nothing: its CRC is another's. It was read while it was written, or someone has spoilt it.
    Torn,
    /// Its CRC is right, and what it says is nothing that a service writes.
    Nonsense,
}

impl Entry {
    /// The entry of an item of those bytes at `at`.
    pub fn of_item(at: u64, item: &[u8]) -> Entry {
        Entry {
            inuse: IN_USE.into(),
            size: (item.len() as u32).into(),
            ptr: at.into(),
            crc_item: crc(item).into(),
            crc_entry: U64::ZERO,
        }
        .sealed()
    }

    /// The entry of a slot whose key was deleted.
    pub fn deleted() -> Entry {
        Entry { inuse: DELETED.into(), ..Entry::new_zeroed() }.sealed()
    }

    fn sealed(self) -> Entry {
        Entry { crc_entry: self.checksum().into(), ..self }
    }

    fn checksum(&self) -> u64 {
        crc(&self.as_bytes()[..ENTRY_SIZE as usize - size_of::<U64>()])
    }

    /// Whether it is one that was written whole.
    pub fn is_sound(&self) -> bool {
        *self == Entry::new_zeroed() || self.crc_entry.get() == self.checksum()
    }

    /// What it says.
    pub fn said(&self) -> Said {
        if self.is_sound() { self.claims() } else { Said::Torn }
    }

    /// What it says if it is sound, which nobody has looked at.
    pub(super) fn claims(&self) -> Said {
        let (at, len) = (self.ptr.get(), self.size.get());
        match self.inuse.get() {
            0 => Said::Never,
            DELETED => Said::Deleted,
            IN_USE if (HEADER_SIZE..=ITEM_MAX).contains(&(len as usize)) => Said::Item { at, len },
            _ => Said::Nonsense,
        }
    }

    /// The pieces in which a service writes it, each with its offset: what the paper's server does with its words, the
    /// entry's CRC last. Whoever reads between two of them reads a torn entry.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, &[u8])> {
        const PIECE: usize = size_of::<u64>();
        self.as_bytes().chunks_exact(PIECE).enumerate().map(|(place, piece)| ((place * PIECE) as u64, piece))
    }
}

/// What the table begins with: no reader looks at it. What the service is about to write, so that a node that takes
/// over in the middle of that can write it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Head {
    /// How many puts and deletes there were.
    pub installs: U64,
    /// The slot of the last of them.
    pub slot: U64,
    /// What it puts there.
    pub entry: Entry,
    /// Zero.
    pub reserved: U64,
    /// Of the bytes before it.
    pub crc: U64,
}

impl Head {
    /// Of the install that gives slot `slot` that entry.
    pub fn new(installs: u64, slot: u64, entry: Entry) -> Head {
        let head =
            Head { installs: installs.into(), slot: slot.into(), entry, reserved: U64::ZERO, crc: U64::ZERO };
        Head { crc: head.checksum().into(), ..head }
    }

    fn checksum(&self) -> u64 {
        crc(&self.as_bytes()[..HEAD_SIZE as usize - size_of::<U64>()])
    }

    /// The entry that slot `slot` was to be given, if that is the last that was given any.
    pub fn entry_of(&self, slot: u64) -> Option<Entry> {
        (self.slot.get() == slot && self.crc.get() == self.checksum() && self.entry.is_sound())
            .then_some(self.entry)
    }
}

/// The header of an item.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ItemHeader {
    /// Which of the store's installs it was, modulo 2^31.
    pub generation: U32,
    /// Bytes of the key.
    pub key_len: U16,
    /// Zero.
    pub reserved: U16,
    /// Bytes of the value.
    pub value_len: U32,
    /// Zero.
    pub reserved_too: U32,
}

const GENERATION_MASK: u64 = (1 << 31) - 1;

/// Writes an item over what `item` held.
pub fn put_item(item: &mut Vec<u8>, installs: u64, key: &[u8], value: &[u8]) {
    let header = ItemHeader {
        generation: ((installs & GENERATION_MASK) as u32).into(),
        key_len: (key.len() as u16).into(),
        reserved: U16::ZERO,
        value_len: (value.len() as u32).into(),
        reserved_too: U32::ZERO,
    };
    item.clear();
    [header.as_bytes(), key, value].into_iter().for_each(|part| item.extend_from_slice(part));
}

/// An item as it was read.
#[derive(Clone, Copy, Debug)]
pub struct ItemView<'a> {
    /// Which install it was.
    pub version: Version,
    /// Its key.
    pub key: &'a [u8],
    /// Its value.
    pub value: &'a [u8],
}

impl<'a> ItemView<'a> {
    /// The item in `bytes`, whose CRC was seen to be right: so it is one, unless a peer wrote it.
    ///
    /// # Errors
    /// It is none.
    pub fn decode(bytes: &'a [u8]) -> Result<ItemView<'a>, KvError> {
        let (header, rest) =
            ItemHeader::ref_from_prefix(bytes).map_err(|_| KvError::Damaged("an item without a header"))?;
        let split = rest.split_at_checked(usize::from(header.key_len.get()));
        let (key, value) = split.ok_or(KvError::Damaged("an item shorter than its key"))?;
        if value.len() != header.value_len.get() as usize {
            return Err(KvError::Damaged("an item of another length than it says"));
        }
        Ok(ItemView { version: Version(header.generation.get()), key, value })
    }
}

/// What the service can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// The value of a key: for readers who find no peace.
    Get = 1,
    /// A value for a key.
    Put = 2,
    /// None for it.
    Delete = 3,
}

/// A request to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// What is to be done.
    pub op: Op,
    /// For which key.
    pub key: &'a [u8],
    /// By a put: which value it is to have.
    pub value: &'a [u8],
}

/// Bytes of a request before its key.
pub const REQUEST_SIZE: usize = 4;

impl<'a> Request<'a> {
    /// Appends its bytes.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let [low, high] = (self.key.len() as u16).to_le_bytes();
        bytes.extend_from_slice(&[self.op as u8, 0, low, high]);
        bytes.extend_from_slice(self.key);
        bytes.extend_from_slice(self.value);
    }

    /// The request in bytes from a peer.
    ///
    /// # Errors
    /// It is none that this release knows.
    pub fn decode(bytes: &'a [u8]) -> Result<Request<'a>, String> {
        let wrong =
            |what: &str| Err(format!("the request to the store {what}: use the same release on both sides"));
        let Some((&[op, reserved, low, high], rest)) = bytes.split_first_chunk::<REQUEST_SIZE>() else {
            return wrong("is shorter than any");
        };
        let op = match op {
            1 => Op::Get,
            2 => Op::Put,
            3 => Op::Delete,
            _ => return wrong("asks for what no store does"),
        };
        let Some((key, value)) = rest.split_at_checked(u16::from_le_bytes([low, high]).into()) else {
            return wrong("is shorter than its key");
        };
        if reserved != 0 || (op != Op::Put && !value.is_empty()) {
            return wrong("has bytes that mean nothing");
        }
        if !(1..=KEY_MAX).contains(&key.len()) || key.len() + value.len() > PAIR_MAX {
            return wrong("has a key or a value of an impossible length");
        }
        Ok(Request { op, key, value })
    }
}

/// What came of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// It was done; the key had or has a value.
    Done = 0,
    /// The key has no value. Nothing was changed.
    Absent = 1,
    /// No buffer is to be had. Nothing was changed.
    OutOfMemory = 2,
    /// Every slot that the key could have is another's. Nothing was changed.
    TableFull = 3,
    /// The key may be in an entry that someone has spoilt. Nothing was changed.
    Damaged = 4,
}

/// Bytes of an answer before the value.
pub const ANSWER_SIZE: usize = 8;

/// What the service answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'a> {
    /// What came of it.
    pub outcome: Outcome,
    /// Of a value that was asked for: which install it was; of a put or delete: which that was.
    pub version: Version,
    /// The value that was asked for.
    pub value: &'a [u8],
}

impl<'a> Answer<'a> {
    /// Appends its bytes.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&[self.outcome as u8, 0, 0, 0]);
        bytes.extend_from_slice(&self.version.0.to_le_bytes());
        bytes.extend_from_slice(self.value);
    }

    /// The answer in those bytes.
    pub fn decode(bytes: &'a [u8]) -> Option<Answer<'a>> {
        let (&[outcome, _, _, _, v0, v1, v2, v3], value) = bytes.split_first_chunk::<ANSWER_SIZE>()?;
        let outcome = match outcome {
            0 => Outcome::Done,
            1 => Outcome::Absent,
            2 => Outcome::OutOfMemory,
            3 => Outcome::TableFull,
            4 => Outcome::Damaged,
            _ => return None,
        };
        Some(Answer { outcome, version: Version(u32::from_le_bytes([v0, v1, v2, v3])), value })
    }
}

/// The number by which install number `installs` is known.
pub fn version_of(installs: u64) -> Version {
    Version((installs & GENERATION_MASK) as u32)
}

/// Slots of a table that has room for so many items. Nothing for more than [`ITEM_COUNT_MAX`].
pub fn slots_for(items: u64) -> Option<u64> {
    (items <= ITEM_COUNT_MAX).then(|| (items * SLOTS_PER_ITEM).next_power_of_two().max(PROBES_MAX))
}

/// Bytes of a table of so many slots, if there can be one.
pub fn table_len(slots: u64) -> Option<u64> {
    slots.checked_mul(ENTRY_SIZE)?.checked_add(HEAD_SIZE)
}

/// What every client must know of the table, as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// How many slots: a power of two.
    pub slots: u64,
    /// Seeds the hash.
    pub seed: u64,
    /// See [`Placement`].
    pub placement: Placement,
}

impl hash_slots::Spec for TableSpec {
    #[inline]
    fn slots(&self) -> (u64, u64, Placement) {
        (self.slots, self.seed, self.placement)
    }

    fn table_len(slots: u64) -> Option<u64> {
        table_len(slots)
    }
}

/// A table, as a client that has the catalog's word for it sees it.
pub type Table = hash_slots::Table<TableSpec>;

impl Table {
    /// The slots that `key` may have, in the order in which they are probed.
    pub fn probe(&self, key: &[u8]) -> impl Iterator<Item = u64> + use<> {
        let mask = self.spec.slots - 1;
        let first = self.first_slot(key);
        (0..PROBES_MAX.min(self.spec.slots)).map(move |step| (first + step) & mask)
    }

    /// The address of the entry of slot `slot`.
    pub fn entry_at(&self, slot: u64) -> u64 {
        self.extent.at + HEAD_SIZE + slot * ENTRY_SIZE
    }

    /// The address of the head.
    pub fn head_at(&self) -> u64 {
        self.extent.at
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::Key;
    use farside_remote::service::Extent;

    #[test]
    fn what_is_stored_never_changes() {
        assert_eq!(crc(b"123456789"), 0xae8b_1486_0a79_9888, "CRC-64/NVME, as its catalogues have it");
        let mut item = Vec::new();
        put_item(&mut item, (1 << 31) + 5, b"key", b"value");
        assert_eq!(item, b"\x05\0\0\0\x03\0\0\0\x05\0\0\0\0\0\0\0keyvalue");
        let entry = Entry::of_item(0x1234_5678, &item);
        assert_eq!(entry.as_bytes()[..16], *b"\x01\0\0\0\x18\0\0\0\x78\x56\x34\x12\0\0\0\0");
        assert_eq!(entry.as_bytes()[16..24], crc(&item).to_le_bytes());
        assert_eq!(entry.as_bytes()[24..], crc(&entry.as_bytes()[..24]).to_le_bytes());
        let spec = TableSpec { slots: 1 << 12, seed: 7, placement: Placement::Hashed };
        let extent = Extent { key: Key::new(1, 1), at: 1 << 20, len: 1 << 20 };
        let table = Table::new(&serde_json::to_string(&spec).expect("plain data"), extent).expect("a table");
        let firsts =
            [&b"a"[..], b"key", b"a longer key than sixteen bytes"].map(|key| table.probe(key).next());
        assert_eq!(firsts, [Some(311), Some(3271), Some(2699)]);
        assert_eq!(table.entry_at(1), (1 << 20) + 64 + 32);
    }

    #[test]
    fn an_entry_says_nothing_until_its_last_piece_is_there() {
        let (before, after) = (Entry::of_item(4096, b"an item that was"), Entry::of_item(8192, &[7; 60]));
        for from in [Entry::new_zeroed(), before, Entry::deleted()] {
            let mut bytes = [0; ENTRY_SIZE as usize];
            bytes.copy_from_slice(from.as_bytes());
            for (offset, piece) in after.pieces() {
                assert_eq!(
                    Entry::read_from_bytes(&bytes).expect("its size").said() == Said::Torn,
                    offset > 0
                );
                bytes[offset as usize..][..piece.len()].copy_from_slice(piece);
            }
            assert_eq!(bytes, after.as_bytes());
        }
        assert_eq!(after.said(), Said::Item { at: 8192, len: 60 });
        assert_eq!((Entry::new_zeroed().said(), Entry::deleted().said()), (Said::Never, Said::Deleted));
    }

    #[test]
    fn a_head_tells_of_one_slot_and_only_if_it_is_whole() {
        let entry = Entry::of_item(4096, &[1; 40]);
        let head = Head::new(7, 3, entry);
        assert_eq!((head.entry_of(3), head.entry_of(4)), (Some(entry), None));
        for place in 0..HEAD_SIZE as usize {
            let mut bytes = [0; HEAD_SIZE as usize];
            bytes.copy_from_slice(head.as_bytes());
            bytes[place] ^= 1;
            let torn = Head::read_from_bytes(&bytes).expect("its size");
            assert_eq!(torn.entry_of(3), None, "byte {place}");
        }
        assert_eq!(Head::new_zeroed().entry_of(0), None, "a fresh table tells nothing");
    }

    #[test]
    fn a_table_that_cannot_be_is_refused() {
        let parameters = |slots: u64| format!(r#"{{"slots":{slots},"seed":7,"placement":"hashed"}}"#);
        let extent = Extent { key: Key::new(1, 1), at: 1 << 20, len: 1 << 20 };
        assert!(Table::new(&parameters(1 << 14), extent).is_ok());
        for slots in [0, 3, 1 << 15, 1 << 63] {
            assert!(Table::new(&parameters(slots), extent).is_err(), "{slots} slots");
        }
        assert!(Table::new(&parameters(64), Extent { at: u64::MAX - 100, ..extent }).is_err());
        assert_eq!((slots_for(0), slots_for(100), slots_for(u64::MAX)), (Some(64), Some(512), None));
    }
}

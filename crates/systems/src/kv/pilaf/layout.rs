//! The bytes of a Pilaf store: a table of entries in a table segment, and items in buffers.
//!
//! ```text
//! table    | head, 64 bytes | entry 0 | entry 1 | ...
//! entry    | inuse u32 | size u32 | ptr u64 | CRC of the item u64 | CRC of the entry u64 |    32 bytes, aligned
//! item     | generation u32 | key length u16 | 0 u16 | value length u32 | 0 u32 | key | value |
//! head     | installs u64 | slot u64 | entry | 0 u64 | CRC of the bytes before u64 |
//! ```
//!
//! All numbers are little-endian. CRCs are CRC-64/NVME. The entry of a slot that never had a key is all zero.
//!
//! Invariant: a reader uses no byte of an entry or item, above all no size, before the reader has checked its CRC. The
//! only exception is an entry of zeros.

use crate::hash_slots;
pub use crate::hash_slots::Placement;
use crate::kv::called::{self, version_of};
pub use crate::kv::called::{ANSWER_SIZE, Answer, Op, Outcome, REQUEST_SIZE, Request};
use crate::kv::{KvError, Version};
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size of an entry in bytes.
pub const ENTRY_SIZE: u64 = size_of::<Entry>() as u64;
const _: () = assert!(ENTRY_SIZE == 32);
/// Size of the table's head in bytes.
pub const HEAD_SIZE: u64 = size_of::<Head>() as u64;
const _: () = assert!(HEAD_SIZE == 64);
/// Number of slots on a key's probe path: the key's first slot and the slots after it.
pub const PROBES_MAX: u64 = 64;
/// Number of slots of a table for each item that it must hold. PRISM-KV has the same number, so that both systems have
/// the same rate of collisions.
pub const SLOTS_PER_ITEM: u64 = 4;
/// Number of items that the largest table can hold.
pub const ITEM_COUNT_MAX: u64 = 1 << 33;
/// Size of an item's header in bytes.
pub const HEADER_SIZE: usize = size_of::<ItemHeader>();
const _: () = assert!(HEADER_SIZE == 16);
/// Length of the longest item, in bytes. One call carries it to the service, and one READ returns it.
pub const ITEM_MAX: usize = 60 * 1024;
/// Largest length of a key and its value together, in bytes.
pub const PAIR_MAX: usize = ITEM_MAX - HEADER_SIZE;
const _: () = assert!(PAIR_MAX == called::PAIR_MAX);

/// Returns the checksum of an entry's or item's bytes.
pub fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// Entry of the table: the content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Entry {
    /// [`IN_USE`] or [`DELETED`]; 0 in a slot that never had a key.
    pub inuse: U32,
    /// Length of the item in bytes.
    pub size: U32,
    /// Address of the item.
    pub ptr: U64,
    /// CRC of the item.
    pub crc_item: U64,
    /// CRC of the preceding bytes of this entry.
    pub crc_entry: U64,
}

/// Value of [`Entry::inuse`]: the slot has an item.
pub const IN_USE: u32 = 1;
/// Value of [`Entry::inuse`]: the slot's item was deleted. Keys that collided with the deleted key may lie in the
/// slots behind this one. Any key may take this slot.
pub const DELETED: u32 = 2;

/// Meaning of an entry, once its CRC is checked and its fields are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryState {
    /// The slot never had a key.
    Never,
    /// The slot has no key now.
    Deleted,
    /// The slot has an item.
    Item {
        /// Address of the item.
        at: u64,
        /// Length of the item in bytes, at most [`ITEM_MAX`].
        len: u32,
    },
    /// The CRC is wrong. The entry was read while the service wrote it, or a client has damaged it.
    Torn,
    /// The CRC is valid, but no service writes such an entry.
    Nonsense,
}

impl Entry {
    /// Creates the entry of an item at address `at`.
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

    /// Creates the entry of a slot whose key was deleted.
    pub fn deleted() -> Entry {
        Entry { inuse: DELETED.into(), ..Entry::new_zeroed() }.sealed()
    }

    fn sealed(self) -> Entry {
        Entry { crc_entry: self.checksum().into(), ..self }
    }

    fn checksum(&self) -> u64 {
        crc(&self.as_bytes()[..ENTRY_SIZE as usize - size_of::<U64>()])
    }

    /// Whether the entry is whole: its CRC is valid, or it is all zero.
    pub fn is_sound(&self) -> bool {
        *self == Entry::new_zeroed() || self.crc_entry.get() == self.checksum()
    }

    /// Checks the entry's CRC and decodes the entry.
    pub fn decode(&self) -> EntryState {
        if self.is_sound() { self.claims() } else { EntryState::Torn }
    }

    /// Decodes the entry without checking its CRC.
    pub(super) fn claims(&self) -> EntryState {
        let (at, len) = (self.ptr.get(), self.size.get());
        match self.inuse.get() {
            0 => EntryState::Never,
            DELETED => EntryState::Deleted,
            IN_USE if (HEADER_SIZE..=ITEM_MAX).contains(&(len as usize)) => EntryState::Item { at, len },
            _ => EntryState::Nonsense,
        }
    }

    /// Returns the 8-byte pieces in which a service writes the entry, with their offsets. Like the paper's server, the
    /// service writes word by word, with the entry's CRC last. A client that reads between two pieces reads a torn
    /// entry.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, &[u8])> {
        const PIECE: usize = size_of::<u64>();
        self.as_bytes().chunks_exact(PIECE).enumerate().map(|(place, piece)| ((place * PIECE) as u64, piece))
    }
}

/// Head of the table: the entry that the service is writing. A node that takes over after a failure finishes the write.
/// Clients do not read the head.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Head {
    /// Number of installs (puts and deletes) in the store so far.
    pub installs: U64,
    /// Index of the slot that the last install writes.
    pub slot: U64,
    /// Entry that the last install writes.
    pub entry: Entry,
    /// Reserved; zero.
    pub reserved: U64,
    /// CRC of the preceding bytes of the head.
    pub crc: U64,
}

impl Head {
    /// Creates the head for an install that writes `entry` to the slot with the index `slot`.
    pub fn new(installs: u64, slot: u64, entry: Entry) -> Head {
        let head =
            Head { installs: installs.into(), slot: slot.into(), entry, reserved: U64::ZERO, crc: U64::ZERO };
        Head { crc: head.checksum().into(), ..head }
    }

    fn checksum(&self) -> u64 {
        crc(&self.as_bytes()[..HEAD_SIZE as usize - size_of::<U64>()])
    }

    /// Returns the entry of the last install, if that install wrote to the slot with the index `slot`.
    pub fn entry_of(&self, slot: u64) -> Option<Entry> {
        (self.slot.get() == slot && self.crc.get() == self.checksum() && self.entry.is_sound())
            .then_some(self.entry)
    }
}

/// Header of an item.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ItemHeader {
    /// Number of the install in the store, modulo 2^31.
    pub generation: U32,
    /// Length of the key in bytes.
    pub key_len: U16,
    /// Reserved; zero.
    pub reserved: U16,
    /// Length of the value in bytes.
    pub value_len: U32,
    /// Reserved; zero.
    pub reserved_too: U32,
}

/// Encodes an item into `item`, replacing its content.
pub fn put_item(item: &mut Vec<u8>, installs: u64, key: &[u8], value: &[u8]) {
    let header = ItemHeader {
        generation: version_of(installs).0.into(),
        key_len: (key.len() as u16).into(),
        reserved: U16::ZERO,
        value_len: (value.len() as u32).into(),
        reserved_too: U32::ZERO,
    };
    item.clear();
    [header.as_bytes(), key, value].into_iter().for_each(|part| item.extend_from_slice(part));
}

/// A decoded item.
#[derive(Clone, Copy, Debug)]
pub struct ItemView<'a> {
    /// Version of the item.
    pub version: Version,
    /// Key of the item.
    pub key: &'a [u8],
    /// Value of the item.
    pub value: &'a [u8],
}

impl<'a> ItemView<'a> {
    /// Decodes the item in `bytes`. The caller has checked the item's CRC, so decoding fails only if a peer wrote the
    /// bytes.
    ///
    /// # Errors
    /// The bytes are no item.
    pub fn decode(bytes: &'a [u8]) -> Result<ItemView<'a>, KvError> {
        let (header, rest) =
            ItemHeader::ref_from_prefix(bytes).map_err(|_| KvError::Damaged("an item without a header"))?;
        let split = rest.split_at_checked(usize::from(header.key_len.get()));
        let (key, value) = split.ok_or(KvError::Damaged("an item shorter than its key"))?;
        if value.len() != header.value_len.get() as usize {
            return Err(KvError::Damaged("an item whose length differs from its header"));
        }
        Ok(ItemView { version: Version(header.generation.get()), key, value })
    }
}

/// Returns the number of slots of a table for this number of items, or `None` for more than [`ITEM_COUNT_MAX`] items.
pub fn slots_for(items: u64) -> Option<u64> {
    (items <= ITEM_COUNT_MAX).then(|| (items * SLOTS_PER_ITEM).next_power_of_two().max(PROBES_MAX))
}

/// Returns the bytes of a table with this number of slots, or `None` if that number overflows.
pub fn table_len(slots: u64) -> Option<u64> {
    slots.checked_mul(ENTRY_SIZE)?.checked_add(HEAD_SIZE)
}

/// Description of the table, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Number of slots: a power of two.
    pub slots: u64,
    /// Seed of the hash that maps keys to first slots.
    pub seed: u64,
    /// Function that maps keys to first slots.
    pub placement: Placement,
}

impl hash_slots::Spec for TableSpec {
    #[inline]
    fn slots(&self) -> (u64, u64, Placement) {
        (self.slots, self.seed, self.placement)
    }

    fn table_len(&self) -> Option<u64> {
        table_len(self.slots)
    }
}

/// A table as the catalog describes it.
pub type Table = hash_slots::Table<TableSpec>;

impl Table {
    /// Returns the probe path of `key`: the slots that the key may have, in order.
    pub fn probe(&self, key: &[u8]) -> impl Iterator<Item = u64> + use<> {
        let mask = self.spec.slots - 1;
        let first = self.first_slot(key);
        (0..PROBES_MAX.min(self.spec.slots)).map(move |step| (first + step) & mask)
    }

    /// Returns the address of the entry of the slot with the index `slot`.
    pub fn entry_at(&self, slot: u64) -> u64 {
        self.extent.at + HEAD_SIZE + slot * ENTRY_SIZE
    }

    /// Returns the address of the table's head.
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
    fn the_stored_format_never_changes() {
        assert_eq!(crc(b"123456789"), 0xae8b_1486_0a79_9888, "check value of CRC-64/NVME");
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
    fn an_entry_is_torn_until_its_last_piece_is_written() {
        let (before, after) = (Entry::of_item(4096, b"an item that was"), Entry::of_item(8192, &[7; 60]));
        for from in [Entry::new_zeroed(), before, Entry::deleted()] {
            let mut bytes = [0; ENTRY_SIZE as usize];
            bytes.copy_from_slice(from.as_bytes());
            for (offset, piece) in after.pieces() {
                assert_eq!(
                    Entry::read_from_bytes(&bytes).expect("its size").decode() == EntryState::Torn,
                    offset > 0
                );
                bytes[offset as usize..][..piece.len()].copy_from_slice(piece);
            }
            assert_eq!(bytes, after.as_bytes());
        }
        assert_eq!(after.decode(), EntryState::Item { at: 8192, len: 60 });
        assert_eq!(
            (Entry::new_zeroed().decode(), Entry::deleted().decode()),
            (EntryState::Never, EntryState::Deleted)
        );
    }

    #[test]
    fn a_head_names_one_slot_and_only_if_its_crc_is_valid() {
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
        assert_eq!(Head::new_zeroed().entry_of(0), None, "the head of a new table names no slot");
    }

    #[test]
    fn an_invalid_table_description_is_refused() {
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

//! The bytes of a PRISM-KV store: a table of slots, and items, each in its own buffer.
//!
//! ```text
//! slot   | item address u64 | bytes of the item u32 | tag u32 |     16 bytes, aligned; all zero while empty
//! tag    | FROZEN 1 bit | generation 31 bits |
//! item   | generation u32 | key length u16 | kind u8 | flags u8 | value length u32 | 0 u32 | key | value |
//! table  | slots | end slot, which no key has | item MOVED | item CLOSED |
//! part   | address u64 | bytes u32 | 0 u32 |                        the value of a LARGE item is a list of parts
//! ```
//!
//! Invariant: an item is written once, before a slot points to it, and never changes.
//! Invariant: a slot's generation grows with every install, and the slot's item carries the same generation.
//! Invariant: a slot keeps its key until the table is rebuilt. A delete installs a TOMBSTONE.
//! Invariant: a slot that a rebuild has left is FROZEN and points to the item MOVED or CLOSED behind the next table.

use super::mutants;
use crate::hash_slots;
pub use crate::hash_slots::Placement;
use crate::kv::{KEY_MAX, KvError, VALUE_MAX, Version};
use farside_remote::BoundedPtr;
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size of a slot in bytes.
pub const SLOT_SIZE: u64 = size_of::<BoundedPtr>() as u64;
/// Number of slots on a key's probe path: the key's first slot and the slots after it.
pub const PROBES_MAX: u64 = 256;
/// Number of slots of a new table for each item that the table must hold.
pub const SLOTS_PER_ITEM: u64 = 4;
/// Number of items that the largest table can hold.
pub const ITEM_COUNT_MAX: u64 = 1 << 34;
/// Length of the longest item in one buffer, in bytes. Longer values are lists of parts.
pub const ITEM_MAX: usize = 60 * 1024;
/// Length in bytes of each part except the last, which may be shorter.
pub const PART_MAX: usize = 60 * 1024;
/// Number of parts of the longest value.
pub const PARTS_MAX: usize = VALUE_MAX.div_ceil(PART_MAX);

const FROZEN: u32 = 1 << 31;
/// Mask of the tag's bits that hold the generation.
pub(super) const GENERATION_MASK: u32 = FROZEN - 1;

/// The 16-byte word that a slot holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot(pub BoundedPtr);

impl Slot {
    /// Whether the slot never had a key.
    pub fn is_empty(self) -> bool {
        self.0.ptr.is_null()
    }

    /// Whether a rebuild has moved this slot's key or is about to move it.
    pub fn is_frozen(self) -> bool {
        self.0.tag.get() & FROZEN != 0
    }

    /// Returns the generation of the install that the slot holds.
    pub fn generation(self) -> u32 {
        self.0.tag.get() & GENERATION_MASK
    }

    /// Returns the word with FROZEN set, which forbids clients to write the slot.
    pub fn frozen(self) -> Slot {
        Slot(BoundedPtr { tag: (self.0.tag.get() | FROZEN).into(), ..self.0 })
    }

    /// Returns the word with FROZEN cleared, which allows clients to write the slot.
    pub fn thawed(self) -> Slot {
        Slot(BoundedPtr { tag: self.generation().into(), ..self.0 })
    }

    /// Decodes a word as it lies in memory.
    pub fn of(word: u128) -> Slot {
        Slot(BoundedPtr::read_from_bytes(&word.to_le_bytes()).expect("a slot's size"))
    }

    /// Encodes the slot's word as it lies in memory.
    pub fn word(self) -> u128 {
        u128::from_le_bytes(self.0.as_bytes().try_into().expect("a slot's size"))
    }
}

/// Returns the generation after `generation`.
pub fn next_generation(generation: u32) -> u32 {
    let step = u32::from(!mutants::NO_GENERATION.is_on());
    generation.wrapping_add(step) & GENERATION_MASK
}

/// Returns the distance of `generation` above `floor`, or `None` if the generation is not above the floor.
pub fn above(generation: u32, floor: u32) -> Option<u32> {
    let by = generation.wrapping_sub(floor) & GENERATION_MASK;
    (1..GENERATION_MASK / 2).contains(&by).then_some(by)
}

/// Kind of an item, stored in its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The item has a key and its value.
    Value = 1,
    /// The item has a key whose value was deleted.
    Tombstone = 2,
    /// The item has a key and the list of the parts of the key's value.
    Large = 3,
    /// The slot's key is in the next table, unless the key was deleted.
    Moved = 4,
    /// The slot never had a key and will never have one. A key whose path reaches this slot can only be in the next
    /// table.
    Closed = 5,
}

impl Kind {
    #[inline]
    fn from_u8(kind: u8) -> Option<Kind> {
        match kind {
            1 => Some(Kind::Value),
            2 => Some(Kind::Tombstone),
            3 => Some(Kind::Large),
            4 => Some(Kind::Moved),
            5 => Some(Kind::Closed),
            _ => None,
        }
    }

    /// Whether an item of this kind means that the key has a value.
    pub fn is_present(self) -> bool {
        matches!(self, Kind::Value | Kind::Large)
    }
}

/// Flag of an item whose put did not depend on the old value. Another put whose CAS failed because of this put may
/// count as done just before it.
pub const UNCONDITIONAL: u8 = 1;

/// Header of an item.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ItemHeader {
    /// Generation of the install that wrote the item.
    pub generation: U32,
    /// Length of the key in bytes.
    pub key_len: U16,
    /// Number of the item's [`Kind`].
    pub kind: u8,
    /// Flags of the item: [`UNCONDITIONAL`], or 0.
    pub flags: u8,
    /// Length of the value in bytes. For a LARGE item, the length of all its parts together.
    pub value_len: U32,
    /// Reserved; zero.
    pub reserved: U32,
}

/// Size of an item's header in bytes.
pub const HEADER_SIZE: usize = size_of::<ItemHeader>();
const _: () = assert!(HEADER_SIZE == 16);

/// One part of a large value.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Part {
    /// Address of the buffer that holds the part.
    pub at: U64,
    /// Length of the part in bytes.
    pub len: U32,
    /// Reserved; zero.
    pub reserved: U32,
}

/// A decoded item. Peers write the item's bytes, so decoding checks every field before its use.
#[derive(Clone, Copy, Debug)]
pub struct ItemView<'a> {
    /// Kind of the item.
    pub kind: Kind,
    /// Header of the item.
    pub header: &'a ItemHeader,
    /// The key, or the part of the key that was read.
    pub key: &'a [u8],
    /// The bytes after the key, or the part of these bytes that was read.
    pub rest: &'a [u8],
}

impl<'a> ItemView<'a> {
    /// Decodes the item in `bytes`. The end of the item may be missing.
    ///
    /// # Errors
    /// The bytes are no item.
    #[inline]
    pub fn decode(bytes: &'a [u8]) -> Result<ItemView<'a>, KvError> {
        let (header, rest) =
            ItemHeader::ref_from_prefix(bytes).map_err(|_| KvError::Damaged("an item without a header"))?;
        let kind = Kind::from_u8(header.kind).ok_or(KvError::Damaged("an item of unknown kind"))?;
        let key_len = header.key_len.get() as usize;
        if key_len > KEY_MAX {
            return Err(KvError::Damaged("an item whose key is too long"));
        }
        let (key, rest) = rest.split_at_checked(key_len).unwrap_or((rest, &[]));
        Ok(ItemView { kind, header, key, rest })
    }

    /// Whether the item belongs to `key`.
    #[inline]
    pub fn is_of(&self, key: &[u8]) -> bool {
        self.header.key_len.get() as usize == key.len() && same(self.key, key)
    }

    /// Returns the version of the item.
    #[inline]
    pub fn version(&self) -> Version {
        Version(self.header.generation.get())
    }

    /// Whether the put of the item did not depend on the old value.
    pub fn is_unconditional(&self) -> bool {
        self.header.flags & UNCONDITIONAL != 0
    }

    /// Returns the value of an item that was read whole.
    ///
    /// # Errors
    /// The value's length differs from the header.
    #[inline]
    pub fn value(&self) -> Result<&'a [u8], KvError> {
        if self.rest.len() == self.header.value_len.get() as usize {
            Ok(self.rest)
        } else {
            Err(KvError::Damaged("an item whose length differs from its header"))
        }
    }

    /// Returns the parts of a large item that was read whole.
    ///
    /// # Errors
    /// The parts do not add up to the value.
    pub fn parts(&self) -> Result<&'a [Part], KvError> {
        let parts = <[Part]>::ref_from_bytes(self.rest)
            .map_err(|_| KvError::Damaged("a large item with half a part"))?;
        let sound = (1..=PARTS_MAX).contains(&parts.len())
            && parts.iter().all(|part| (1..=PART_MAX).contains(&(part.len.get() as usize)));
        let len: u64 = parts.iter().map(|part| u64::from(part.len.get())).sum();
        if sound && len == u64::from(self.header.value_len.get()) && len <= VALUE_MAX as u64 {
            Ok(parts)
        } else {
            Err(KvError::Damaged("a large item whose parts do not add up"))
        }
    }
}

/// Whether both slices are equal. Most keys are short: for them, a call to `memcmp` costs more than the comparison.
#[inline]
fn same(one: &[u8], other: &[u8]) -> bool {
    const SHORT: std::ops::RangeInclusive<usize> = 8..=16;
    if one.len() != other.len() || !SHORT.contains(&one.len()) {
        return one == other;
    }
    let ends = |bytes: &[u8]| (bytes.first_chunk::<8>().copied(), bytes.last_chunk::<8>().copied());
    ends(one) == ends(other)
}

/// Returns the number of slots of a table for this number of items, or `None` for more than [`ITEM_COUNT_MAX`] items.
/// The number is a power of two, at least [`SLOTS_PER_ITEM`] for each item, and at least [`PROBES_MAX`].
pub fn slots_for(items: u64) -> Option<u64> {
    (items <= ITEM_COUNT_MAX).then(|| (items * SLOTS_PER_ITEM).next_power_of_two().max(PROBES_MAX))
}

/// Returns the bytes of a table with this number of slots, or `None` if that number overflows. Behind the slots are
/// the end slot and the items MOVED and CLOSED. The slots that were left in the preceding table point to these two
/// items.
pub fn table_len(slots: u64) -> Option<u64> {
    slots.checked_add(1)?.checked_mul(SLOT_SIZE)?.checked_add(2 * HEADER_SIZE as u64)
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
    /// Number of the table (epoch), which grows with every rebuild.
    pub epoch: u64,
    /// Floor of the table: a new key's first install in this table has the generation after the floor.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub floor: u32,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
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
    /// Returns the probe path of `key`: the indexes of the slots that the key may have, in order, then the index of
    /// the end slot, which no key has.
    #[inline]
    pub fn probe(&self, key: &[u8]) -> impl Iterator<Item = u64> + use<> {
        let (slots, mask) = (self.spec.slots, self.spec.slots - 1);
        let first = self.first_slot(key);
        let probes = PROBES_MAX.min(slots);
        (0..probes + 1).map(move |step| if step < probes { (first + step) & mask } else { slots })
    }

    /// Index of the end slot, which lies behind all other slots.
    #[inline]
    pub fn end(&self) -> u64 {
        self.spec.slots
    }

    /// Returns the generation of the next install in this slot of the table.
    pub fn next_generation(&self, slot: Slot) -> u32 {
        let restarts = mutants::DROPPED_TOMBSTONE_RESTARTS_GENERATIONS.is_on();
        next_generation(if slot.is_empty() && !restarts { self.spec.floor } else { slot.generation() })
    }

    /// Returns the word that marks `slot`, of the table before this one, as left. The word points to CLOSED if the
    /// slot is empty, else to MOVED.
    pub fn left(&self, slot: Slot) -> Slot {
        let kind = if slot.is_empty() { Kind::Closed } else { Kind::Moved };
        let item = BoundedPtr {
            ptr: farside_remote::Addr::new(self.left_item_at(kind)),
            bound: (HEADER_SIZE as u32).into(),
            tag: slot.0.tag,
        };
        Slot(item).frozen()
    }

    /// Returns MOVED or CLOSED if `slot`, of the table before this one, was left.
    pub fn is_left(&self, slot: Slot) -> Option<Kind> {
        [Kind::Moved, Kind::Closed].into_iter().find(|&kind| slot.0.ptr.raw() == self.left_item_at(kind))
    }

    /// Returns the address of the items MOVED and CLOSED, then the two items.
    pub fn left_items(&self) -> (u64, [ItemHeader; 2]) {
        let item = |kind: Kind| ItemHeader { kind: kind as u8, ..ItemHeader::new_zeroed() };
        (self.left_item_at(Kind::Moved), [item(Kind::Moved), item(Kind::Closed)])
    }

    fn left_item_at(&self, kind: Kind) -> u64 {
        let behind = if kind == Kind::Closed { HEADER_SIZE as u64 } else { 0 };
        self.extent.at + (self.end() + 1) * SLOT_SIZE + behind
    }

    /// Returns the address of the slot with this index.
    #[inline]
    pub fn slot_at(&self, index: u64) -> farside_remote::Addr {
        farside_remote::Addr::new(self.extent.at + index * SLOT_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::service::Extent;
    use farside_remote::{Addr, Key};

    fn table(placement: Placement) -> Table {
        let spec = TableSpec { slots: 1 << 12, seed: 7, placement, epoch: 0, floor: 0 };
        let extent = Extent { key: Key::new(1, 1), at: 1 << 20, len: 1 << 20 };
        Table::new(&serde_json::to_string(&spec).expect("plain data"), extent).expect("a table")
    }

    #[test]
    fn the_hash_of_a_stored_table_never_changes() {
        let table = table(Placement::Hashed);
        let firsts: Vec<u64> = [&b"a"[..], b"key", b"a longer key than sixteen bytes"]
            .iter()
            .map(|key| table.first_slot(key))
            .collect();
        assert_eq!(firsts, PINNED);
    }
    const PINNED: [u64; 3] = [311, 3271, 2699];

    #[test]
    fn a_table_has_four_slots_an_item_and_at_least_256() {
        let expected = [
            (0, Some(256)),
            (64, Some(256)),
            (65, Some(512)),
            (1_000_000, Some(1 << 22)),
            (ITEM_COUNT_MAX, Some(1 << 36)),
            (ITEM_COUNT_MAX + 1, None),
            (u64::MAX, None),
        ];
        for (items, slots) in expected {
            assert_eq!(slots_for(items), slots, "{items} items");
        }
    }

    #[test]
    fn permuted_numbers_have_one_slot_each() {
        let table = table(Placement::Permuted);
        let mut seen = vec![false; 1 << 12];
        for number in 0..1u64 << 12 {
            let slot = table.first_slot(&number.to_be_bytes()) as usize;
            assert!(!std::mem::replace(&mut seen[slot], true), "slot {slot} has two numbers");
        }
    }

    #[test]
    fn invalid_items_are_refused() {
        assert!(ItemView::decode(&[]).is_err());
        assert!(ItemView::decode(&[0; 15]).is_err());
        assert!(ItemView::decode(&[0; 64]).is_err(), "kind 0");
        let mut header = ItemHeader {
            generation: U32::new(1),
            key_len: U16::new(KEY_MAX as u16 + 1),
            kind: Kind::Value as u8,
            flags: 0,
            value_len: U32::new(u32::MAX),
            reserved: U32::new(0),
        };
        assert!(ItemView::decode(header.as_bytes()).is_err(), "the key is too long");
        header.key_len = U16::new(3);
        let item = ItemView::decode(header.as_bytes()).expect("a truncated item");
        assert!(!item.is_of(b"abc") && item.value().is_err() && item.parts().is_err());
    }

    #[test]
    fn a_large_item_has_a_valid_number_of_parts_and_no_empty_part() {
        let parts_of = |lens: &[u32], value_len: usize| {
            let header = ItemHeader {
                generation: U32::new(1),
                key_len: U16::new(1),
                kind: Kind::Large as u8,
                flags: 0,
                value_len: U32::new(value_len as u32),
                reserved: U32::new(0),
            };
            let mut bytes = [header.as_bytes(), b"k"].concat();
            for &len in lens {
                let part = Part { at: U64::new(4096), len: U32::new(len), reserved: U32::new(0) };
                bytes.extend_from_slice(part.as_bytes());
            }
            let item = ItemView::decode(&bytes).expect("a header and a key");
            item.parts().map(<[Part]>::len)
        };
        let most = PART_MAX as u32;
        let last = (VALUE_MAX - (PARTS_MAX - 1) * PART_MAX) as u32;
        let longest: Vec<u32> = std::iter::repeat_n(most, PARTS_MAX - 1).chain([last]).collect();
        assert_eq!(parts_of(&longest, VALUE_MAX), Ok(PARTS_MAX));
        assert_eq!(parts_of(&[most, 1], PART_MAX + 1), Ok(2));
        assert!(parts_of(&[], 0).is_err(), "an empty value is never large");
        assert!(parts_of(&[0; 1000], 0).is_err());
        assert!(parts_of(&[7, 0], 7).is_err(), "no part is empty");
        assert!(parts_of(&[1; PARTS_MAX + 1], PARTS_MAX + 1).is_err(), "more parts than a value can have");
        assert!(parts_of(&[most + 1], PART_MAX + 1).is_err());
    }

    #[test]
    fn a_table_beyond_the_address_space_is_refused() {
        let spec = TableSpec { slots: 1 << 12, seed: 7, placement: Placement::Hashed, epoch: 0, floor: 0 };
        let extent = Extent { key: Key::new(1, 1), at: u64::MAX - 4095, len: 1 << 20 };
        assert!(Table::new(&serde_json::to_string(&spec).expect("plain data"), extent).is_err());
    }

    #[test]
    fn a_frozen_slot_is_recognized_and_generations_wrap() {
        let slot = |tag: u32| Slot(BoundedPtr { ptr: Addr::new(64), bound: 1.into(), tag: tag.into() });
        assert!(slot(FROZEN | 5).is_frozen() && slot(FROZEN | 5).generation() == 5);
        assert_eq!((slot(5).frozen(), slot(FROZEN | 5).thawed()), (slot(FROZEN | 5), slot(5)));
        assert_eq!(Slot::of(slot(FROZEN | 5).word()), slot(FROZEN | 5));
        assert_eq!(table(Placement::Hashed).next_generation(slot(GENERATION_MASK)), 0);
    }

    #[test]
    fn generations_are_compared_with_the_floor_across_the_wrap() {
        assert_eq!((above(7, 5), above(5, 5), above(4, 5), above(5, 0)), (Some(2), None, None, Some(5)));
        assert_eq!((above(3, GENERATION_MASK), above(GENERATION_MASK, 3)), (Some(4), None));
    }

    #[test]
    fn a_path_ends_in_the_end_slot_and_moved_and_closed_lie_behind_it() {
        let table = table(Placement::Hashed);
        let path: Vec<u64> = table.probe(b"k").collect();
        assert_eq!((path.len() as u64, path.last()), (PROBES_MAX + 1, Some(&(1 << 12))));
        assert!(path[..path.len() - 1].iter().all(|&index| index < 1 << 12));
        let taken = Slot(BoundedPtr { ptr: Addr::new(64), bound: 1.into(), tag: 9.into() });
        for (slot, kind) in [(Slot(BoundedPtr::default()), Kind::Closed), (taken, Kind::Moved)] {
            let left = table.left(slot);
            assert_eq!((table.is_left(left), left.is_frozen()), (Some(kind), true));
            let (at, items) = table.left_items();
            let item = (left.0.ptr.raw() - at) as usize / HEADER_SIZE;
            assert_eq!(ItemView::decode(items[item].as_bytes()).expect("an item").kind, kind);
        }
        assert_eq!((table.is_left(taken), table.left(taken).generation()), (None, 9));
        assert_eq!(table.left_items().0 + 32, table.extent.at + table_len(1 << 12).expect("the length fits"));
    }

    #[test]
    fn the_first_install_of_a_key_comes_after_the_floor() {
        let mut table = table(Placement::Hashed);
        table.spec.floor = 40;
        let empty = Slot(BoundedPtr::default());
        assert_eq!(table.next_generation(empty), 41);
        assert_eq!(
            table.next_generation(Slot(BoundedPtr { ptr: Addr::new(64), bound: 1.into(), tag: 3.into() })),
            4
        );
    }
}

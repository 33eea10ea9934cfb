//! The bytes of a store: slots, inner nodes, leaves, and the parts of the table at each member.
//!
//! ```text
//! table  | leases | redo records | root slot u64 | lock word u64 | 0 x 48 | hint u64 | 0 x 56 | chunk table | chunks |
//! chunk  | state u64 | x units, to a multiple of 64 | unit | x units
//! node   | rev_ptr u64 | header u64 | slot u64 | x 4, 8, 16, 32, 64, 128 or 256, with room for 256 | lock word u64
//! or     | first u64 | header u64 | slot u64 | x 4, 16, 48 or 256 | 0, to the unit's end | lock word u64 |
//! leaf   | rev_ptr u64 | head u64 | checksum u64 | path | value or pointer | 0, to the capacity | lock word u64 |
//! ```
//!
//! A long value lies *apart*, in a unit of its own, and its leaf has a pointer to it:
//!
//! ```text
//! pointer | offset 61, member 3 | generation u32 | length u32 | checksum of the value u64 |
//! ```
//!
//! Nodes are of the first form in stores of SMART, where they are *switched* to a larger type, and of the second one in
//! stores of ART, where they are *copied* ([`Growth`]). The lock of a copied node is the last word of its unit. A
//! copied node and its slots are *frozen* before a copy replaces it, and do not change afterwards.
//!
//! The leases and the root slot of the first member are used. The locks of nodes and of the root slot are used in
//! stores without lock-free nodes ([`Rung::Art`]) only. All words are little-endian. A *path* is a key as the tree sees
//! it: a string has a zero byte behind it, so no path is a prefix of another.
//!
//! ```text
//! slot   | partial byte 8 bits | units of 64 bytes, or type of the node 7 | is_leaf 1 | generation 11
//!        | place: offset in the chunks / 64 33, is_frozen 1, member 3 |           0 is null: the slot was never used
//! first  | generation 32 | is_frozen 1, 0 x 31 |
//! header | depth 8 | type 5, length of the prefix 3 | prefix 6 x 8 |
//! head   | generation 32 | length of the path 8 | length of the value 16
//!        | was written 1, is dead 1, is apart 1, is replaced 1, 0 x 4 |
//! state  | generation 32 | state 32 |
//! ```
//!
//! A slot of a leaf without units and without a place is *empty*: it keeps its partial byte, and no key is below it.
//! The slots of copied nodes have the generations of these nodes, too.
//!
//! The depth of a slot is the number of bytes of the path that lead to it, its partial byte included; that of the root
//! slot is 0. A node below a slot has this depth in its header, or a lower one for a while after a path split. The byte
//! after its prefix selects one of its slots. The sum of depth and prefix never changes.
//!
//! Differs from the paper: addresses count units of 64 bytes and not 256, a slot has bits of the generation of the
//! leaf's unit (see `cache`), the lock is an aligned word with its owner, and depth has no virtual byte 0.
//!
//! Invariant: all bytes from far memory are untrusted. Each function that decodes them ends and does not panic.

use super::Damaged;
use super::mutants;
use crate::index::place::{self, Member};
use crate::index::{Keys, NUMBER_LEN, Rung, STRING_MAX};
use crate::lease::{ClientId, ENTRY_SIZE, LockWord};
use crate::redo::{Areas, Object};
use farside_remote::service::Extent;
use farside_remote::{Addr, NodeId};
use serde::{Deserialize, Serialize};
use std::time::Duration;

pub(in crate::index) use crate::index::place::Far;

/// Largest number of members of a store.
pub const MEMBERS_MAX: usize = 8;
/// Length of the longest value in bytes. A chain has room for it and for a leaf and its nodes.
pub const VALUE_MAX: u32 = 48 << 10;
/// Length of the longest value that a leaf has room for, in bytes.
pub const INLINE_MAX: u32 = 7 << 10;
/// Size of a unit of an address in bytes.
pub(in crate::index) const UNIT: u64 = 64;
const WORD: usize = size_of::<u64>();
/// Offset of the word after `rev_ptr`, from which a leaf is written.
pub(in crate::index) const HEAD_AT: u64 = 8;
/// Offset of the path in a leaf.
const PATH_AT: usize = 24;
/// Number of slots of a node with the largest type.
pub(in crate::index) const SLOTS_MAX: usize = 256;
/// Size of a node with all its slots in bytes.
const NODE_SIZE: u64 = (2 * WORD + WORD * SLOTS_MAX) as u64;
const _: () =
    assert!(NODE_SIZE.next_multiple_of(UNIT) >= NODE_SIZE + WORD as u64, "a node has room for its lock");
/// Largest prefix of a node in bytes.
pub(in crate::index) const PREFIX_MAX: usize = 6;
const GENERATION_BITS: u32 = 11;
/// Number of generations that a slot can tell apart.
pub(in crate::index) const GENERATIONS: u64 = 1 << GENERATION_BITS;
const OFFSET_BITS: u32 = 33;

/// How inner nodes get room for more slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Growth {
    /// Each node has room for all slots, and its type says how many are in use.
    #[default]
    Switched,
    /// A node has room for the slots of its type. A copy of another type replaces it.
    Copied,
}

impl Growth {
    fn are_switched(&self) -> bool {
        *self == Growth::Switched
    }
}

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Kind of the keys.
    pub keys: Keys,
    /// Length of the longest value in bytes.
    pub value_max: u32,
    /// Length of the longest value that lies in its leaf, in bytes. Longer ones lie apart.
    pub inline_max: u32,
    /// Size of a chunk in bytes, a multiple of 64. If it is 0 when a store is created, it is chosen for the store's
    /// quota.
    pub chunk: u32,
    /// Number of client ids.
    pub ids: u16,
    /// Number of concurrent changes of a client.
    pub lanes: u16,
    /// Length of a lease in microseconds.
    pub lease_us: u64,
    /// Whether a WRITE may be cut, so that each update first writes a redo record.
    pub redo: bool,
    /// How many of the paper's techniques the clients use.
    #[serde(default, skip_serializing_if = "Rung::is_highest")]
    pub rung: Rung,
    /// How nodes get room for more slots, which depends on the store's kind.
    #[serde(default, skip_serializing_if = "Growth::are_switched")]
    pub nodes: Growth,
}

impl Default for Spec {
    fn default() -> Spec {
        Spec::of(Growth::Switched)
    }
}

impl Spec {
    /// The parameters of a store with such nodes, if nobody chooses others.
    pub(in crate::index) fn of(nodes: Growth) -> Spec {
        Spec {
            keys: Keys::Numbers,
            value_max: 8,
            inline_max: INLINE_MAX,
            chunk: 0,
            ids: 64,
            lanes: 32,
            lease_us: 2_000_000,
            redo: nodes == Growth::Switched,
            rung: Rung::default(),
            nodes,
        }
    }
}

impl Spec {
    /// Length of the longest path in bytes.
    pub(in crate::index) fn path_max(&self) -> usize {
        match self.keys {
            Keys::Numbers => NUMBER_LEN,
            Keys::Strings => STRING_MAX + 1,
        }
    }

    /// Size of the smallest chunk in bytes.
    fn chunk_min(&self) -> u64 {
        self.largest_class().size() + 2 * UNIT
    }

    /// # Errors
    /// The limit that the parameters exceed.
    pub(in crate::index) fn check(&self) -> Result<(), String> {
        let Spec { value_max, inline_max, chunk, ids, lanes, lease_us, .. } = *self;
        const CHUNK_MAX: u32 = 64 << 20;
        const LEASE_MAX: u64 = 3_600_000_000;
        if value_max > VALUE_MAX {
            return Err(format!("values of {value_max} bytes, and at most {VALUE_MAX} are possible"));
        }
        if inline_max > INLINE_MAX {
            return Err(format!(
                "values of {inline_max} bytes in leaves, and at most {INLINE_MAX} are possible"
            ));
        }
        let least = self.chunk_min();
        if !chunk.is_multiple_of(UNIT as u32) || u64::from(chunk) < least || chunk > CHUNK_MAX {
            return Err(format!("chunks of {chunk} bytes, and multiples of 64 from {least} are possible"));
        }
        if !(1..=1024).contains(&ids) || !(1..=1024).contains(&lanes) {
            return Err(format!("{ids} client ids with {lanes} lanes, and 1 to 1024 of each are possible"));
        }
        if !(1_000..=LEASE_MAX).contains(&lease_us) {
            return Err(format!("leases of {lease_us} us, and 1000 to {LEASE_MAX} are possible"));
        }
        Ok(())
    }

    /// Length of a lease.
    pub(in crate::index) fn lease(&self) -> Duration {
        Duration::from_micros(self.lease_us)
    }

    /// Whether some values lie apart.
    pub(in crate::index) fn has_values_apart(&self) -> bool {
        self.value_max > self.inline_max
    }

    /// Class of the unit of a value of this length that lies apart: a power of two, or room for the longest value.
    pub(in crate::index) fn value_class(&self, len: u32) -> Class {
        let units = |len: u32| u64::from(len).div_ceil(UNIT) as u16;
        Class(units(len).next_power_of_two().min(units(self.value_max)) | Class::IS_VALUE)
    }

    /// Class of the leaf of a path of this length. All values of the path, or pointers to them, fit into it.
    pub(in crate::index) fn leaf_class(&self, path_len: usize) -> Class {
        let inline =
            if self.has_values_apart() { self.inline_max.max(POINTER_LEN as u32) } else { self.value_max };
        let content = PATH_AT + path_len + inline as usize;
        Class(((content.next_multiple_of(WORD) + WORD) as u64).div_ceil(UNIT) as u16)
    }

    /// Writes the path of a key.
    pub(in crate::index) fn path_of(&self, key: &[u8], path: &mut Vec<u8>) {
        path.clear();
        path.extend_from_slice(key);
        if self.keys == Keys::Strings {
            path.push(0);
        }
    }

    /// Returns the key of a path.
    pub(in crate::index) fn key_of<'a>(&self, path: &'a [u8]) -> &'a [u8] {
        match self.keys {
            Keys::Numbers => path,
            Keys::Strings => &path[..path.len().saturating_sub(1)],
        }
    }

    fn is_path(&self, path: &[u8]) -> bool {
        match self.keys {
            Keys::Numbers => path.len() == NUMBER_LEN,
            Keys::Strings => {
                path.len() >= 2 && path.iter().position(|&byte| byte == 0) == Some(path.len() - 1)
            }
        }
    }

    fn areas_offset(&self) -> u64 {
        (u64::from(self.ids) * ENTRY_SIZE).next_multiple_of(UNIT)
    }

    fn areas(&self, node: NodeId, extent: Extent) -> Areas {
        let len_max = match self.nodes {
            Growth::Switched => (self.leaf_class(self.path_max()).size() - HEAD_AT) as u32,
            // No object is updated in place, so the records name the locks, and have no bytes.
            Growth::Copied => 0,
        };
        let at = Addr::new(extent.at).plus(self.areas_offset());
        // One record more than lanes, for recoveries.
        Areas { node, key: extent.key, at, lanes: self.lanes + 1, len_max }
    }

    fn root_offset(&self) -> u64 {
        let none = Extent { key: farside_remote::Key::new(0, 0), at: 0, len: 0 };
        self.areas_offset() + u64::from(self.ids) * self.areas(NodeId(0), none).area_size()
    }

    /// Smallest size of a table with a few chunks, in bytes.
    pub(in crate::index) fn table_min(&self) -> u64 {
        self.root_offset() + 3 * UNIT + 4 * u64::from(self.chunk)
    }
}

/// Class of a unit: the size of a leaf in units of 64 bytes, [`Class::NODE`], or the class of a value that lies apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::index) struct Class(pub(in crate::index) u16);

impl Class {
    /// Class of inner nodes. No leaf has it, so the unused slots of a node are 0 in each new node.
    pub(in crate::index) const NODE: Class = Class(1 << 10);

    /// Bits of the classes of values that lie apart, and of copied nodes. The other bits are the size in units of 64
    /// bytes.
    const IS_VALUE: u16 = 1 << 11;
    const IS_COPIED: u16 = 1 << 12;
    const UNITS: u16 = Class::NODE.0 - 1;

    /// Size of a unit in bytes.
    pub(in crate::index) fn size(self) -> u64 {
        if self == Class::NODE {
            NODE_SIZE.next_multiple_of(UNIT)
        } else {
            u64::from(self.0 & Class::UNITS) * UNIT
        }
    }

    /// Whether units of this class have values that lie apart.
    pub(in crate::index) fn is_of_value(self) -> bool {
        self.0 & Class::IS_VALUE != 0
    }

    /// Whether units of this class have nodes.
    pub(in crate::index) fn is_of_node(self) -> bool {
        self == Class::NODE || self.0 & Class::IS_COPIED != 0
    }

    /// Whether units of this class may exist.
    fn is_valid(self) -> bool {
        let units = u64::from(self.0 & !Class::IS_VALUE);
        let most = if self.is_of_value() { u64::from(VALUE_MAX) / UNIT } else { Slot::UNITS_MAX };
        let is_of_copy = NodeType::COPIED.iter().any(|kind| kind.class() == self);
        self == Class::NODE || is_of_copy || (1..=most).contains(&units)
    }

    /// Size of a chunk that this number of units fills, in bytes.
    pub(in crate::index) fn chunk(self, units: u64) -> u64 {
        (units * WORD as u64).next_multiple_of(UNIT) + units * self.size()
    }

    /// Number of units of a chunk of `len` bytes, and the offset of the first one.
    pub(in crate::index) fn units(self, len: u64) -> (u64, u64) {
        let mut units = len / (WORD as u64 + self.size());
        let first = |units: u64| (units * WORD as u64).next_multiple_of(UNIT);
        while units > 0 && first(units) + units * self.size() > len {
            units -= 1;
        }
        (units, first(units))
    }
}

/// Chunk of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::index) struct Chunk {
    pub(in crate::index) member: usize,
    pub(in crate::index) number: u64,
}

/// Owner and class of a chunk, from its word in the chunk table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Claim {
    pub(in crate::index) owner: ClientId,
    pub(in crate::index) class: Class,
}

impl Claim {
    pub(in crate::index) fn word(self) -> u64 {
        u64::from(self.owner.number()) | u64::from(self.class.0) << 16
    }

    /// Decodes a word; `None` if no client has claimed the chunk.
    ///
    /// # Errors
    /// No client writes this word.
    pub(in crate::index) fn of(word: u64) -> Result<Option<Claim>, Damaged> {
        if word == 0 {
            return Ok(None);
        }
        let owner = ClientId::new(word as u16).ok_or(Damaged("a chunk without an owner"))?;
        let class = Class((word >> 16) as u16);
        if !class.is_valid() || word >> 32 != 0 {
            return Err(Damaged("a chunk with an invalid class"));
        }
        Ok(Some(Claim { owner, class }))
    }
}

/// State of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct State {
    pub(in crate::index) generation: u32,
    pub(in crate::index) is_taken: bool,
}

impl State {
    pub(in crate::index) fn word(self) -> u64 {
        u64::from(self.generation) | u64::from(self.is_taken) << 32
    }

    pub(in crate::index) fn of(word: u64) -> State {
        State { generation: word as u32, is_taken: word >> 32 != 0 }
    }

    /// Whether a slot with these bits of a generation may point to the unit.
    pub(in crate::index) fn is_of_slot(self, generation: u32) -> bool {
        u64::from(self.generation ^ generation) & (GENERATIONS - 1) == 0
    }
}

/// The parts of a store's table, which all members have at the same offsets.
#[derive(Clone, Debug)]
pub(in crate::index) struct Layout {
    pub(in crate::index) spec: Spec,
    /// The members' tables, whose pieces are chunks.
    pub(in crate::index) members: Vec<Member>,
    /// Number of units of a chunk and the offset of the first one, for each class of leaves and then for those of
    /// nodes.
    units: Vec<(u64, u64)>,
}

impl Layout {
    /// # Errors
    /// The parameters are not from a plan of this system, or the tables are too small.
    pub(in crate::index) fn new(parameters: &str, members: &[(NodeId, Extent)]) -> Result<Layout, String> {
        let spec: Spec = serde_json::from_str(parameters).map_err(|error| error.to_string())?;
        spec.check()?;
        if !(1..=MEMBERS_MAX).contains(&members.len()) {
            return Err(format!("{} members, and 1 to {MEMBERS_MAX} are possible", members.len()));
        }
        let tables = members.iter().map(|&(node, extent)| {
            let table_at = spec.root_offset() + 2 * UNIT;
            let room = extent.len.saturating_sub(table_at);
            let mut chunks = room / (u64::from(spec.chunk) + WORD as u64);
            let chunks_at = |chunks: u64| (table_at + chunks * WORD as u64).next_multiple_of(UNIT);
            while chunks > 0 && chunks_at(chunks) + chunks * u64::from(spec.chunk) > extent.len {
                chunks -= 1;
            }
            if chunks == 0 {
                return Err(format!("a table of {} bytes has no room for a chunk", extent.len));
            }
            if chunks_at(chunks) >> OFFSET_BITS != 0 || (extent.len / UNIT) >> OFFSET_BITS != 0 {
                return Err(format!(
                    "a table of {} bytes, which is more than addresses have bits for",
                    extent.len
                ));
            }
            Ok(Member::new(extent, spec.areas(node, extent), (chunks, chunks_at(chunks))))
        });
        let of_nodes = [Class::NODE].into_iter().chain(NodeType::COPIED.map(NodeType::class));
        let classes = (0..=Slot::UNITS_MAX as u16).map(Class).chain(of_nodes);
        let units = classes.map(|class| class.units(spec.chunk.into())).collect();
        Ok(Layout { members: tables.collect::<Result<_, _>>()?, spec, units })
    }

    /// Number of units of a chunk of this class, and the offset of the first one.
    fn units_of(&self, class: Class) -> (u64, u64) {
        if class.is_of_value() {
            return class.units(self.spec.chunk.into());
        }
        let of_nodes = Slot::UNITS_MAX as usize + 1;
        let copied = NodeType::COPIED.iter().position(|kind| kind.class() == class);
        self.units[copied.map_or(usize::from(class.0).min(of_nodes), |copied| of_nodes + 1 + copied)]
    }

    /// Location of the root slot.
    pub(in crate::index) fn root(&self) -> Far {
        Far::new(0, self.spec.root_offset())
    }

    /// Location of the number of the chunk that is claimed next, more or less.
    pub(in crate::index) fn hint(&self, member: usize) -> Far {
        Far::new(member, self.spec.root_offset() + UNIT)
    }

    /// Location of a chunk's word in the chunk table.
    pub(in crate::index) fn claim(&self, chunk: Chunk) -> Far {
        Far::new(chunk.member, self.spec.root_offset() + 2 * UNIT + chunk.number * WORD as u64)
    }

    fn chunk_at(&self, chunk: Chunk) -> Far {
        let at = self.members[chunk.member].pieces_at + chunk.number * u64::from(self.spec.chunk);
        Far::new(chunk.member, at)
    }

    /// Number of units of a chunk of this class.
    pub(in crate::index) fn units(&self, class: Class) -> u64 {
        self.units_of(class).0
    }

    /// Location of a unit.
    pub(in crate::index) fn unit(&self, chunk: Chunk, class: Class, unit: u64) -> Far {
        let first = self.units_of(class).1;
        self.chunk_at(chunk).plus(first + unit * class.size())
    }

    /// Location of a unit's state.
    pub(in crate::index) fn state(&self, chunk: Chunk, unit: u64) -> Far {
        self.chunk_at(chunk).plus(unit * WORD as u64)
    }

    /// Returns the chunk and the number of the unit of this class at a location; `None` if none is there.
    pub(in crate::index) fn unit_at(&self, at: Far, class: Class) -> Option<(Chunk, u64)> {
        self.unit_around(at, class).and_then(|(place, within)| (within == 0).then_some(place))
    }

    /// Returns the chunk and the number of the unit of this class around a location, and the offset in the unit.
    fn unit_around(&self, at: Far, class: Class) -> Option<((Chunk, u64), u64)> {
        let table = self.members.get(at.member())?;
        let offset = at.offset().checked_sub(table.pieces_at)?;
        let number = offset / u64::from(self.spec.chunk);
        let (units, first) = self.units_of(class);
        let within = (offset % u64::from(self.spec.chunk)).checked_sub(first)?;
        let (unit, within) = (within / class.size(), within % class.size());
        let is_there = number < table.pieces && unit < units;
        is_there.then_some(((Chunk { member: at.member(), number }, unit), within))
    }

    /// Location of the lock of the node that has a slot, or of the root slot's lock.
    ///
    /// # Errors
    /// No node is there.
    pub(in crate::index) fn node_lock(&self, slot_at: Far) -> Result<Far, Damaged> {
        if slot_at == self.root() {
            return Ok(slot_at.plus(WORD as u64));
        }
        let around = self.unit_around(slot_at, Class::NODE);
        let ((chunk, unit), _) = around.ok_or(Damaged("a slot in no node"))?;
        Ok(self.unit(chunk, Class::NODE, unit).plus(NODE_SIZE))
    }

    /// Returns the address of `len` bytes at a location.
    ///
    /// # Errors
    /// The bytes are not in the table, or the word or unit is misaligned.
    pub(in crate::index) fn addr(&self, at: Far, len: u64) -> Result<Addr, Damaged> {
        place::addr(&self.members, at, len)
    }

    /// Location of the place of a slot.
    fn far_of(&self, member: usize, offset: u64) -> Result<Far, Damaged> {
        let table = self.members.get(member).ok_or(Damaged("a pointer to no member"))?;
        Ok(Far::new(member, table.pieces_at + offset * UNIT))
    }

    /// Slot of a leaf.
    pub(in crate::index) fn leaf_slot(&self, partial: u8, at: Far, class: Class, generation: u32) -> Slot {
        let generation = (u64::from(generation) & (GENERATIONS - 1)) << Slot::GENERATION_AT;
        Slot(u64::from(partial) | u64::from(class.0) << 8 | Slot::IS_LEAF | generation | self.place(at))
    }

    /// Slot of a node.
    pub(in crate::index) fn node_slot(&self, partial: u8, at: Far, kind: NodeType) -> Slot {
        Slot(u64::from(partial) | u64::from(kind.0) << 8 | self.place(at))
    }

    /// Slot of a copied node, whose unit has this generation.
    pub(in crate::index) fn copied_slot(
        &self,
        partial: u8,
        (at, kind): (Far, NodeType),
        generation: u32,
    ) -> Slot {
        let generation = (u64::from(generation) & (GENERATIONS - 1)) << Slot::GENERATION_AT;
        Slot(self.node_slot(partial, at, kind).0 | generation)
    }

    fn place(&self, at: Far) -> u64 {
        let offset = (at.offset() - self.members[at.member()].pieces_at) / UNIT;
        offset << Slot::OFFSET_AT | (at.member() as u64) << Slot::MEMBER_AT
    }

    /// Decodes a slot.
    ///
    /// # Errors
    /// No client writes such a slot.
    pub(in crate::index) fn view(&self, slot: Slot) -> Result<View, Damaged> {
        let Slot(word) = match self.spec.nodes {
            Growth::Switched if slot.is_frozen() => return Err(Damaged("a frozen slot")),
            _ => slot.thawed(),
        };
        if word == 0 {
            return Ok(View::Null);
        }
        let len = word >> 8 & 0x7f;
        let generation = ((word >> Slot::GENERATION_AT) & (GENERATIONS - 1)) as u32;
        if word & Slot::IS_LEAF != 0 && len == 0 {
            let is_empty = word >> Slot::GENERATION_AT == 0;
            return if is_empty { Ok(View::Empty) } else { Err(Damaged("a leaf without a length")) };
        }
        let offset = word >> Slot::OFFSET_AT & ((1 << OFFSET_BITS) - 1);
        let at = self.far_of((word >> Slot::MEMBER_AT) as usize, offset)?;
        if word & Slot::IS_LEAF != 0 {
            let class = Class(len as u16);
            self.unit_at(at, class).ok_or(Damaged("a slot that points to no leaf"))?;
            return Ok(View::Leaf { at, class, generation });
        }
        let kind = NodeType::of(len as u8).filter(|kind| kind.nodes() == self.spec.nodes);
        let kind = kind.ok_or(Damaged("a node of an unknown type"))?;
        self.unit_at(at, kind.class()).ok_or(Damaged("a slot that points to no node"))?;
        Ok(View::Node { at, kind, generation })
    }

    /// Object of a leaf or of a node, for the record of its lock.
    ///
    /// # Errors
    /// No leaf or node is there.
    pub(in crate::index) fn object(&self, at: Far, class: Class) -> Result<Object, Damaged> {
        let len = class.size();
        let addr = self.addr(at, len)?;
        Ok(Object { lock: addr.plus(lock_at(class)), at: addr.plus(HEAD_AT), len: (len - HEAD_AT) as u32 })
    }

    /// Class of the unit of a value.
    ///
    /// # Errors
    /// No client writes such a pointer.
    pub(in crate::index) fn class_of(&self, pointer: &Pointer) -> Result<Class, Damaged> {
        let is_value = pointer.len > self.spec.inline_max && pointer.len <= self.spec.value_max;
        let class = is_value.then(|| self.spec.value_class(pointer.len));
        let unit = class.filter(|class| self.unit_at(pointer.at, *class).is_some());
        unit.ok_or(Damaged("a pointer to no value"))
    }

    /// Returns the leaf, or the copied node, whose bytes from [`HEAD_AT`] on have this address and length at a member,
    /// and its class; `None` if there is no such unit.
    pub(in crate::index) fn unit_of_object(&self, member: usize, at: u64, len: u64) -> Option<(Far, Class)> {
        let size = len.checked_add(HEAD_AT).filter(|size| size.is_multiple_of(UNIT))?;
        let units = u16::try_from(size / UNIT).ok().filter(|units| (1..=0x7f).contains(units))?;
        let class = match self.spec.nodes {
            Growth::Switched => Class(units),
            Growth::Copied => Some(Class(units | Class::IS_COPIED)).filter(|class| class.is_valid())?,
        };
        let offset = at.checked_sub(self.members[member].extent.at)?.checked_sub(HEAD_AT)?;
        let far = (offset < self.members[member].extent.len).then(|| Far::new(member, offset))?;
        self.unit_at(far, class).map(|_| (far, class))
    }
}

/// Offset of the lock word in a leaf or in a copied node.
pub(in crate::index) fn lock_at(class: Class) -> u64 {
    class.size() - WORD as u64
}

/// Word of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(in crate::index) struct Slot(pub(in crate::index) u64);

impl Slot {
    const IS_LEAF: u64 = 1 << 15;
    const GENERATION_AT: u32 = 16;
    const OFFSET_AT: u32 = Slot::GENERATION_AT + GENERATION_BITS;
    const IS_FROZEN: u64 = 1 << (Slot::OFFSET_AT + OFFSET_BITS);
    const MEMBER_AT: u32 = Slot::OFFSET_AT + OFFSET_BITS + 1;
    /// Largest leaf in units.
    const UNITS_MAX: u64 = 0x7f;
    pub(in crate::index) const NULL: Slot = Slot(0);

    pub(in crate::index) fn empty(partial: u8) -> Slot {
        Slot(u64::from(partial) | Slot::IS_LEAF)
    }

    pub(in crate::index) fn is_null(self) -> bool {
        self == Slot::NULL
    }

    /// Whether the slot does not change any more.
    pub(in crate::index) fn is_frozen(self) -> bool {
        self.0 & Slot::IS_FROZEN != 0
    }

    /// The slot before it was frozen.
    pub(in crate::index) fn thawed(self) -> Slot {
        Slot(self.0 & !Slot::IS_FROZEN)
    }

    pub(in crate::index) fn is_leaf(self) -> bool {
        self.0 & Slot::IS_LEAF != 0
    }

    pub(in crate::index) fn partial(self) -> u8 {
        self.0 as u8
    }

    /// Number of keys that can be expected below the slot. A node's type is the smallest one for its slots in use, so
    /// they are three quarters on average.
    pub(in crate::index) fn expected(self) -> usize {
        match NodeType::of((self.0 >> 8 & 0x7f) as u8) {
            _ if self.is_null() || self == Slot::empty(self.partial()) => 0,
            Some(kind) if self.0 & Slot::IS_LEAF == 0 => kind.slots() * 3 / 4 - 1,
            _ => 1,
        }
    }

    /// Whether both point to the same unit of the same generation.
    pub(in crate::index) fn is_same_place(self, other: Slot) -> bool {
        (self.thawed().0 ^ other.thawed().0) >> Slot::GENERATION_AT == 0
    }

    /// The same slot with another partial byte.
    pub(in crate::index) fn with_partial(self, partial: u8) -> Slot {
        Slot(self.0 & !0xff | u64::from(partial))
    }

    /// The same slot of a node with another type.
    pub(in crate::index) fn with_type(self, kind: NodeType) -> Slot {
        Slot(self.0 & !0x7f00 | u64::from(kind.0) << 8)
    }
}

const _: () = assert!(Slot::MEMBER_AT + 3 == u64::BITS);

/// What a slot points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) enum View {
    Null,
    Empty,
    Leaf { at: Far, class: Class, generation: u32 },
    Node { at: Far, kind: NodeType, generation: u32 },
}

/// Bit of a frozen slot, and bit in the first word of a frozen node.
pub(in crate::index) const FROZEN_MASK: u64 = Slot::IS_FROZEN;
pub(in crate::index) const FROZEN_NODE_MASK: u64 = 1 << 32;

/// Number of slots in use of a node: 1 to 7 for 4, 8, 16, 32, 64, 128 and 256. Number of slots of a copied node: 8 to
/// 11 for 4, 16, 48 and 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::index) struct NodeType(pub(in crate::index) u8);

impl NodeType {
    pub(in crate::index) const SMALLEST: NodeType = NodeType(1);
    pub(in crate::index) const MAX: NodeType = NodeType(7);

    /// The types of switched nodes, and those of copied ones.
    pub(in crate::index) const SWITCHED: [NodeType; 7] =
        [NodeType(1), NodeType(2), NodeType(3), NodeType(4), NodeType(5), NodeType(6), NodeType(7)];
    pub(in crate::index) const COPIED: [NodeType; 4] = [NodeType(8), NodeType(9), NodeType(10), NodeType(11)];

    fn of(number: u8) -> Option<NodeType> {
        (1..=11).contains(&number).then_some(NodeType(number))
    }

    fn nodes(self) -> Growth {
        if self.is_copied() { Growth::Copied } else { Growth::Switched }
    }

    pub(in crate::index) const fn is_copied(self) -> bool {
        self.0 > NodeType::MAX.0
    }

    /// Number of slots.
    pub(in crate::index) const fn slots(self) -> usize {
        const SLOTS: [usize; 12] = [0, 4, 8, 16, 32, 64, 128, 256, 4, 16, 48, 256];
        SLOTS[self.0 as usize]
    }

    /// Class of the units of such nodes.
    pub(in crate::index) const fn class(self) -> Class {
        if !self.is_copied() {
            return Class::NODE;
        }
        let len = (3 * WORD + WORD * self.slots()) as u64;
        Class(len.div_ceil(UNIT) as u16 | Class::IS_COPIED)
    }

    /// Size of the part of a node that has slots, whether they are in use or not.
    pub(in crate::index) fn whole_len(self) -> u32 {
        if self.is_copied() { self.read_len() } else { NodeType::MAX.read_len() }
    }

    /// The smallest type of copied nodes with room for this number of slots.
    pub(in crate::index) fn copied_for(count: usize) -> Option<NodeType> {
        NodeType::COPIED.into_iter().find(|kind| kind.slots() >= count)
    }

    /// Size of the part of the node that a READ of all slots in use returns.
    pub(in crate::index) fn read_len(self) -> u32 {
        (2 * WORD + WORD * self.slots()) as u32
    }

    /// The smallest type with a slot of this index.
    pub(in crate::index) fn for_slot(index: usize) -> NodeType {
        let mut kind = NodeType::SMALLEST;
        while kind.slots() <= index {
            kind.0 += 1;
        }
        kind
    }
}

/// Location of a slot of a node.
pub(in crate::index) fn slot_at(node: Far, index: usize) -> Far {
    node.plus((2 * WORD + WORD * index) as u64)
}

/// Location of a node's header.
pub(in crate::index) fn header_at(node: Far) -> Far {
    node.plus(WORD as u64)
}

/// Header of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Header {
    pub(in crate::index) depth: u8,
    pub(in crate::index) kind: NodeType,
    pub(in crate::index) len: u8,
    pub(in crate::index) prefix: [u8; PREFIX_MAX],
}

/// Bits of a header that a type switch changes.
pub(in crate::index) const TYPE_MASK: u64 = 0x1f00;

impl Header {
    pub(in crate::index) fn new(depth: usize, kind: NodeType, prefix: &[u8]) -> Header {
        let mut padded = [0; PREFIX_MAX];
        padded[..prefix.len()].copy_from_slice(prefix);
        Header { depth: depth as u8, kind, len: prefix.len() as u8, prefix: padded }
    }

    pub(in crate::index) fn word(self) -> u64 {
        let mut bytes = [self.depth, self.kind.0 | self.len << 5, 0, 0, 0, 0, 0, 0];
        bytes[2..].copy_from_slice(&self.prefix);
        u64::from_le_bytes(bytes)
    }

    /// # Errors
    /// No client writes such a header.
    pub(in crate::index) fn of(word: u64) -> Result<Header, Damaged> {
        let bytes = word.to_le_bytes();
        let (kind, len) = (NodeType::of(bytes[1] & 0x1f), bytes[1] >> 5);
        let prefix = bytes[2..].try_into().expect("six bytes");
        match kind {
            Some(kind) if usize::from(len) <= PREFIX_MAX => Ok(Header { depth: bytes[0], kind, len, prefix }),
            _ => Err(Damaged("a node with an invalid header")),
        }
    }

    /// The prefix.
    pub(in crate::index) fn prefix(&self) -> &[u8] {
        &self.prefix[..usize::from(self.len)]
    }

    /// Depth of the byte that selects a slot.
    pub(in crate::index) fn branch(&self) -> usize {
        usize::from(self.depth) + usize::from(self.len)
    }

    /// The part of the prefix from this depth on; `None` if the node is not below a slot of this depth any more, or
    /// never was.
    pub(in crate::index) fn prefix_from(&self, depth: usize) -> Option<&[u8]> {
        depth.checked_sub(self.depth.into()).and_then(|skipped| self.prefix().get(skipped..))
    }

    /// The header of the same node below a slot of this depth, which is not lower.
    pub(in crate::index) fn below(&self, depth: usize) -> Option<Header> {
        self.prefix_from(depth).map(|prefix| Header::new(depth, self.kind, prefix))
    }
}

/// Bytes of a node: the words before the slots, and some slots.
pub(in crate::index) struct NodeView<'a> {
    bytes: &'a [u8],
}

impl<'a> NodeView<'a> {
    /// # Errors
    /// The bytes are too short.
    pub(in crate::index) fn of(bytes: &'a [u8]) -> Result<NodeView<'a>, Damaged> {
        if bytes.len() < 2 * WORD { Err(Damaged("a node that is too short")) } else { Ok(NodeView { bytes }) }
    }

    pub(in crate::index) fn rev_ptr(&self) -> u64 {
        word(self.bytes, 0)
    }

    pub(in crate::index) fn header(&self) -> Result<Header, Damaged> {
        Header::of(word(self.bytes, WORD))
    }

    /// The slots that were read, as they were before they were frozen.
    pub(in crate::index) fn slots(&self) -> impl Iterator<Item = Slot> + 'a {
        self.bytes[2 * WORD..].chunks_exact(WORD).map(|bytes| Slot(word(bytes, 0)).thawed())
    }

    /// Generation of a copied node's unit.
    pub(in crate::index) fn generation(&self) -> u32 {
        word(self.bytes, 0) as u32
    }

    /// Whether a copied node is that of a slot with this generation.
    pub(in crate::index) fn is_of(&self, generation: u32) -> bool {
        (word(self.bytes, 0) ^ u64::from(generation)) & (GENERATIONS - 1) == 0
    }

    /// Whether a copied node is being replaced or was replaced. The bit is in one word with the generation, so a node
    /// that has a slot's generation and is not frozen is linked.
    pub(in crate::index) fn is_frozen(&self) -> bool {
        word(self.bytes, 0) & FROZEN_NODE_MASK != 0
    }

    /// Whether a copied node is frozen, or one of the slots that were read: its writer may have died in between.
    pub(in crate::index) fn is_closing(&self) -> bool {
        let mut slots = self.bytes[2 * WORD..].chunks_exact(WORD).map(|bytes| Slot(word(bytes, 0)));
        self.is_frozen() || slots.any(Slot::is_frozen)
    }
}

/// Encodes a new node with a reverse pointer.
pub(in crate::index) fn node_bytes(rev_ptr: Far, header: Header, slots: &[Slot], out: &mut Vec<u8>) {
    encode_node(rev_ptr.0, header, slots, out);
}

/// Encodes a new copied node, with a free lock.
pub(in crate::index) fn copied_bytes(generation: u32, header: Header, slots: &[Slot], out: &mut Vec<u8>) {
    encode_node(generation.into(), header, slots, out);
    out.resize(header.kind.class().size() as usize, 0);
}

fn encode_node(first: u64, header: Header, slots: &[Slot], out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&first.to_le_bytes());
    out.extend_from_slice(&header.word().to_le_bytes());
    for index in 0..header.kind.slots() {
        out.extend_from_slice(&slots.get(index).copied().unwrap_or_default().0.to_le_bytes());
    }
}

/// Head of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Head(pub(in crate::index) u64);

impl Head {
    const WRITTEN: u64 = 1 << 56;
    const DEAD: u64 = 1 << 57;
    const APART: u64 = 1 << 58;
    const REPLACED: u64 = 1 << 59;

    pub(in crate::index) fn new(generation: u32, path_len: usize, content: Content<'_>) -> Head {
        let (len, flags) = match content {
            Content::Value(value) => (value.len(), Head::WRITTEN),
            Content::Apart(_) => (POINTER_LEN, Head::WRITTEN | Head::APART),
        };
        Head(u64::from(generation) | (path_len as u64) << 32 | (len as u64) << 40 | flags)
    }

    fn is_apart(self) -> bool {
        self.0 & Head::APART != 0
    }

    pub(in crate::index) fn generation(self) -> u32 {
        self.0 as u32
    }

    pub(in crate::index) fn is_dead(self) -> bool {
        self.0 & Head::DEAD != 0
    }

    pub(in crate::index) fn dead(self) -> Head {
        Head(self.0 | Head::DEAD)
    }

    /// Whether the slot's content may have changed from this leaf to another one, in stores without updates in place.
    pub(in crate::index) fn is_replaced(self) -> bool {
        self.0 & Head::REPLACED != 0
    }

    pub(in crate::index) fn replaced(self) -> Head {
        Head(self.0 | Head::REPLACED)
    }

    /// The head without the bits that are set by themselves.
    fn alive(self) -> Head {
        Head(self.0 & !(Head::DEAD | Head::REPLACED))
    }

    /// Ends of the path and of the value in the leaf.
    fn ends(self) -> (usize, usize) {
        let path_end = PATH_AT + usize::from((self.0 >> 32) as u8);
        (path_end, path_end + usize::from((self.0 >> 40) as u16))
    }
}

/// Length of an encoded pointer in bytes.
const POINTER_LEN: usize = 3 * WORD;

/// Pointer to a value that lies apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Pointer {
    pub(in crate::index) at: Far,
    pub(in crate::index) generation: u32,
    /// Length of the value in bytes.
    pub(in crate::index) len: u32,
    checksum: u64,
}

impl Pointer {
    /// Pointer to this value in a unit with this location and generation.
    pub(in crate::index) fn new(at: Far, generation: u32, value: &[u8]) -> Pointer {
        Pointer { at, generation, len: value.len() as u32, checksum: Pointer::checksum(value) }
    }

    fn checksum(value: &[u8]) -> u64 {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, value)
    }

    /// # Errors
    /// These bytes are not the value.
    pub(in crate::index) fn check(&self, value: &[u8]) -> Result<(), Damaged> {
        let is_value = value.len() == self.len as usize && Pointer::checksum(value) == self.checksum;
        if is_value { Ok(()) } else { Err(Damaged("a value with a wrong checksum")) }
    }

    fn bytes(self) -> [u8; POINTER_LEN] {
        let mut bytes = [0; POINTER_LEN];
        bytes[..WORD].copy_from_slice(&self.at.0.to_le_bytes());
        bytes[WORD..][..4].copy_from_slice(&self.generation.to_le_bytes());
        bytes[WORD + 4..][..4].copy_from_slice(&self.len.to_le_bytes());
        bytes[2 * WORD..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    fn of(bytes: &[u8]) -> Option<Pointer> {
        let half = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        (bytes.len() == POINTER_LEN).then_some(())?;
        let (at, checksum) = (Far(word(bytes, 0)), word(bytes, 2 * WORD));
        Some(Pointer { at, generation: half(WORD)?, len: half(WORD + 4)?, checksum })
    }
}

/// The value of a leaf, or a pointer to it.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) enum Content<'a> {
    Value(&'a [u8]),
    Apart(Pointer),
}

/// A leaf that was read whole.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) struct LeafView<'a> {
    pub(in crate::index) head: Head,
    pub(in crate::index) rev_ptr: u64,
    pub(in crate::index) path: &'a [u8],
    pub(in crate::index) value: &'a [u8],
}

/// Bytes of a leaf.
#[derive(Debug)]
pub(in crate::index) enum Leaf<'a> {
    Whole(LeafView<'a>),
    /// The READ met a WRITE, or a dead client has left the WRITE unfinished. The lock word was read, too.
    Torn(LockWord),
    /// The unit is not a leaf of the slot's generation any more.
    Reused,
}

/// Decodes a leaf that was read below a slot with this generation.
///
/// # Errors
/// No client writes such bytes.
pub(in crate::index) fn leaf_of<'a>(
    spec: &Spec,
    generation: u32,
    bytes: &'a [u8],
) -> Result<Leaf<'a>, Damaged> {
    let lock_at = bytes.len().checked_sub(WORD).filter(|&at| at >= PATH_AT);
    let lock_at = lock_at.ok_or(Damaged("a leaf that is too short"))?;
    let (head, lock) = (Head(word(bytes, WORD)), LockWord::of_bits(word(bytes, lock_at)));
    if u64::from(head.generation() ^ generation) & (GENERATIONS - 1) != 0 {
        return Ok(Leaf::Reused);
    }
    let (path_end, value_end) = head.ends();
    if head.0 & Head::WRITTEN == 0 || value_end > lock_at {
        return Err(Damaged("a slot that points to bytes that are no leaf"));
    }
    let (path, value) = (&bytes[PATH_AT..path_end], &bytes[path_end..value_end]);
    // A dead leaf never changes, and only its path is used. Its lock may still be held.
    if word(bytes, 2 * WORD) != checksum(head, path, value, bytes) {
        return Ok(Leaf::Torn(lock));
    }
    if !spec.is_path(path) {
        return Err(Damaged("a leaf with a key that the store cannot have"));
    }
    if head.is_apart() && value.len() != POINTER_LEN {
        return Err(Damaged("a leaf whose value lies apart, and that has no pointer"));
    }
    Ok(Leaf::Whole(LeafView { head, rev_ptr: word(bytes, 0), path, value }))
}

/// Encodes a leaf with this lock word.
pub(in crate::index) fn leaf_bytes(
    class: Class,
    (rev_ptr, generation): (u64, u32),
    (path, content): (&[u8], Content<'_>),
    lock: LockWord,
    out: &mut Vec<u8>,
) {
    let head = Head::new(generation, path.len(), content);
    let pointer;
    let value = match content {
        Content::Value(value) => value,
        Content::Apart(apart) => {
            pointer = apart.bytes();
            &pointer[..]
        }
    };
    out.clear();
    out.extend_from_slice(&rev_ptr.to_le_bytes());
    out.extend_from_slice(&head.0.to_le_bytes());
    out.extend_from_slice(&[0; WORD]);
    out.extend_from_slice(path);
    out.extend_from_slice(value);
    out.resize(lock_at(class) as usize, 0);
    out.extend_from_slice(&lock.bits().get().to_le_bytes());
    let sum = checksum(head, path, value, out);
    out[2 * WORD..3 * WORD].copy_from_slice(&sum.to_le_bytes());
}

/// Length of the longest path and value whose checksum is computed from a copy on the stack.
const COPIED_MAX: usize = 120;

/// Checksum of a leaf. The bits that say that it is dead or replaced are not covered: they are set in the head alone,
/// and no request tears a word.
fn checksum(head: Head, path: &[u8], value: &[u8], leaf: &[u8]) -> u64 {
    let path = if mutants::CHECKSUM_WITHOUT_KEY.is_on() { &[] } else { path };
    let lock = if mutants::CHECKSUM_OVER_LOCK.is_on() { &leaf[leaf.len() - WORD..] } else { &[] };
    let head = head.alive().0.to_le_bytes();
    let len = WORD + path.len() + value.len();
    if len <= WORD + COPIED_MAX && lock.is_empty() {
        // One call for a short leaf: each call costs more than its bytes.
        let mut copy = [0; WORD + COPIED_MAX];
        copy[..WORD].copy_from_slice(&head);
        copy[WORD..WORD + path.len()].copy_from_slice(path);
        copy[WORD + path.len()..len].copy_from_slice(value);
        return crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &copy[..len]);
    }
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    [&head, path, value, lock].into_iter().for_each(|part| digest.update(part));
    digest.finalize()
}

/// Reverse pointer and head of a leaf; `None` if it is too short.
pub(in crate::index) fn head_of(leaf: &[u8]) -> Option<(u64, Head)> {
    (leaf.len() >= PATH_AT).then(|| (word(leaf, 0), Head(word(leaf, WORD))))
}

/// Path and value of a leaf that may be torn, one after the other.
pub(in crate::index) fn path_and_value(leaf: &[u8]) -> Option<&[u8]> {
    let (_, head) = head_of(leaf)?;
    leaf.get(PATH_AT..head.ends().1)
}

/// The pointer of a leaf that was found to be whole, if its value lies apart.
pub(in crate::index) fn pointer_of(leaf: &[u8]) -> Option<Pointer> {
    let is_apart = head_of(leaf).is_some_and(|(_, head)| head.is_apart());
    if is_apart { Pointer::of(value_of(leaf)) } else { None }
}

/// The value of a leaf that was found to be whole, or its pointer.
pub(in crate::index) fn value_of(leaf: &[u8]) -> &[u8] {
    let (path_end, value_end) = Head(word(leaf, WORD)).ends();
    leaf.get(path_end..value_end).unwrap_or_default()
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + WORD].try_into().expect("a word has 8 bytes"))
}

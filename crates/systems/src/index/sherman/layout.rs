//! The parameters of a store, and the parts of its table at each member.
//!
//! ```text
//! table | leases | redo records | lock u64 x locks | root u64 | 0 x 56 | hint u64 | 0 x 56 | states u64 | units |
//! root  | place of the node 61 bits: member 3, offset 58 | its level, in the low 6 bits, which are 0 in an offset |
//! state | nonce of the client that has claimed the unit, 0 if it is free |
//! ```
//!
//! The leases and the root of the first member are used. A unit holds one node, and all units have one size. The lock
//! of a node is one of the locks of its member, which a hash of its place selects. So nodes may share a lock; a client
//! holds one lock at a time.
//!
//! Differs from the paper (4.3): the locks lie in the node's memory and not in that of its NIC, and a lock is a word of
//! 8 bytes with its owner, so that the lock of a dead client can be freed.
//!
//! Invariant: all bytes from far memory are untrusted. Each function that decodes them ends and does not panic.

use super::node::Form;
use crate::index::place::{self, Member};
use crate::index::{Keys, NUMBER_LEN, STRING_MAX};
use crate::lease::ENTRY_SIZE;
use crate::redo::Areas;
use farside_remote::service::Extent;
use farside_remote::{Addr, Key, NodeId};
use serde::{Deserialize, Serialize};
use std::time::Duration;

pub(super) use crate::index::place::{Damaged, Far};

/// Largest number of members of a store.
pub const MEMBERS_MAX: usize = 8;
/// Largest value in bytes.
pub const VALUE_MAX: u32 = 1 << 10;
/// Largest node in bytes. A chain that splits a node has three times its bytes.
pub(super) const NODE_MAX: usize = 16 << 10;
/// Number of entries of a node of the paper's evaluation in SMART.
pub(super) const SPAN: u16 = 32;
/// Smallest number of entries of a node.
pub(super) const SPAN_MIN: u16 = 4;
const SPAN_MAX: u16 = 256;
/// Alignment of units in bytes.
const ALIGNMENT: u64 = 64;
const WORD: u64 = size_of::<u64>() as u64;

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Kind of the keys.
    pub keys: Keys,
    /// Length of the longest key in bytes; 8 if keys are numbers.
    pub key_max: u16,
    /// Length of the longest value in bytes.
    pub value_max: u32,
    /// Number of entries of a node.
    pub span: u16,
    /// Number of bytes that the fabric reads and writes as a whole, and that have a version: 16, or 64 where lines are
    /// whole ([`farside_remote::Capabilities::WHOLE_LINES`]).
    pub line: u16,
    /// Number of bits of each of the two versions of a line: 4, as in the paper, 8 or 16. A READ that takes so long
    /// that a version may have wrapped is repeated.
    pub version_bits: u8,
    /// Number of locks of each member.
    pub locks: u32,
    /// Number of client ids.
    pub ids: u16,
    /// Number of concurrent changes of a client.
    pub lanes: u16,
    /// Length of a lease in microseconds.
    pub lease_us: u64,
    /// Whether a WRITE may be cut, so that each change first writes a redo record.
    pub redo: bool,
}

impl Default for Spec {
    fn default() -> Spec {
        Spec {
            keys: Keys::Numbers,
            key_max: NUMBER_LEN as u16,
            value_max: 8,
            span: SPAN,
            line: 16,
            version_bits: 16,
            locks: 4096,
            ids: 64,
            lanes: 16,
            lease_us: 2_000_000,
            redo: true,
        }
    }
}

impl Spec {
    /// # Errors
    /// The limit that the parameters exceed.
    pub(super) fn check(&self) -> Result<(), String> {
        const LEASE_MAX: u64 = 3_600_000_000;
        const LOCKS_MAX: u32 = 1 << 20;
        let Spec { keys, key_max, value_max, span, line, version_bits, locks, ids, lanes, lease_us, .. } =
            *self;
        let is_length = match keys {
            Keys::Numbers => usize::from(key_max) == NUMBER_LEN,
            Keys::Strings => (1..=STRING_MAX).contains(&key_max.into()),
        };
        if !is_length {
            return Err(format!(
                "keys of {key_max} bytes, and 8, or for strings 1 to {STRING_MAX}, are possible"
            ));
        }
        if value_max > VALUE_MAX {
            return Err(format!("values of {value_max} bytes, and at most {VALUE_MAX} are possible"));
        }
        if !(SPAN_MIN..=SPAN_MAX).contains(&span) {
            return Err(format!("nodes of {span} entries, and {SPAN_MIN} to {SPAN_MAX} are possible"));
        }
        if !matches!(line, 16 | 64) || !matches!(version_bits, 4 | 8 | 16) {
            return Err(format!(
                "versions of {version_bits} bits for {line} bytes, and 4, 8 or 16 for 16 or 64 are possible"
            ));
        }
        if !(1..=LOCKS_MAX).contains(&locks) {
            return Err(format!("{locks} locks, and 1 to {LOCKS_MAX} are possible"));
        }
        if !(1..=1024).contains(&ids) || !(1..=256).contains(&lanes) {
            return Err(format!(
                "{ids} client ids with {lanes} lanes, and 1 to 1024 and 1 to 256 are possible"
            ));
        }
        if !(1_000..=LEASE_MAX).contains(&lease_us) {
            return Err(format!("leases of {lease_us} us, and 1000 to {LEASE_MAX} are possible"));
        }
        let size = self.form().size();
        if size > NODE_MAX {
            return Err(format!(
                "nodes of {size} bytes, and at most {NODE_MAX} are possible: lower the span"
            ));
        }
        Ok(())
    }

    /// The same parameters with as many entries as a node of `size` bytes has, between the least and the most possible.
    pub(super) fn with_node_size(self, size: usize) -> Spec {
        let fits = |span: &u16| Spec { span: *span, ..self }.form().size() <= size;
        let span = (SPAN_MIN..=SPAN_MAX).rev().find(fits).unwrap_or(SPAN_MIN);
        Spec { span, ..self }
    }

    /// Length of a lease.
    pub(super) fn lease(&self) -> Duration {
        Duration::from_micros(self.lease_us)
    }

    /// Form of the nodes.
    pub(super) fn form(&self) -> Form {
        Form::new(self)
    }

    /// Size of a unit in bytes.
    pub(super) fn unit(&self) -> u64 {
        (self.form().size() as u64).next_multiple_of(ALIGNMENT)
    }

    fn areas_offset(&self) -> u64 {
        (u64::from(self.ids) * ENTRY_SIZE).next_multiple_of(ALIGNMENT)
    }

    fn areas(&self, node: NodeId, extent: Extent) -> Areas {
        let at = Addr::new(extent.at).plus(self.areas_offset());
        // One record more than lanes, for recoveries.
        Areas { node, key: extent.key, at, lanes: self.lanes + 1, len_max: self.form().size() as u32 }
    }

    fn locks_offset(&self) -> u64 {
        let none = Extent { key: Key::new(0, 0), at: 0, len: 0 };
        self.areas_offset() + u64::from(self.ids) * self.areas(NodeId(0), none).area_size()
    }

    fn root_offset(&self) -> u64 {
        self.locks_offset() + (u64::from(self.locks) * WORD).next_multiple_of(ALIGNMENT)
    }

    fn states_offset(&self) -> u64 {
        self.root_offset() + 2 * ALIGNMENT
    }

    /// Size of a table with this number of units, in bytes.
    pub(super) fn table_len(&self, units: u64) -> u64 {
        let states = units.saturating_mul(WORD).checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        self.states_offset().saturating_add(states).saturating_add(units.saturating_mul(self.unit()))
    }
}

/// The root of the tree: a node and its level. Leaves have the level 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Root {
    pub(super) at: Far,
    pub(super) level: u8,
}

/// Highest level of a node. With the least span, no tree is as high.
pub(super) const LEVEL_MAX: u8 = 40;

impl Root {
    pub(super) fn word(self) -> u64 {
        self.at.0 | u64::from(self.level)
    }
}

/// A lock: member, and index in the member's table of locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LockAt {
    pub(super) member: usize,
    pub(super) index: u64,
}

/// The parts of a store's table, which all members have at the same offsets.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) spec: Spec,
    pub(super) form: Form,
    /// The members' tables, whose pieces are units.
    pub(super) members: Vec<Member>,
}

impl Layout {
    /// # Errors
    /// The parameters are not from a plan of this system, or the tables are too small.
    pub(super) fn new(parameters: &str, members: &[(NodeId, Extent)]) -> Result<Layout, String> {
        let spec: Spec = serde_json::from_str(parameters).map_err(|error| error.to_string())?;
        spec.check()?;
        if !(1..=MEMBERS_MAX).contains(&members.len()) {
            return Err(format!("{} members, and 1 to {MEMBERS_MAX} are possible", members.len()));
        }
        let tables = members.iter().map(|&(node, extent)| {
            let mut units = extent.len.saturating_sub(spec.states_offset()) / (spec.unit() + WORD);
            while units > 0 && spec.table_len(units) > extent.len {
                units -= 1;
            }
            if units == 0 {
                return Err(format!("a table of {} bytes has no room for a node", extent.len));
            }
            let units_at = spec.table_len(units) - units * spec.unit();
            Ok(Member::new(extent, spec.areas(node, extent), (units, units_at)))
        });
        Ok(Layout { members: tables.collect::<Result<_, _>>()?, spec, form: spec.form() })
    }

    /// Location of the root's word.
    pub(super) fn root(&self) -> Far {
        Far::new(0, self.spec.root_offset())
    }

    /// Location of the number of the unit that is claimed next, more or less.
    pub(super) fn hint(&self, member: usize) -> Far {
        Far::new(member, self.spec.root_offset() + ALIGNMENT)
    }

    /// Location of a unit's state.
    pub(super) fn state(&self, member: usize, unit: u64) -> Far {
        Far::new(member, self.spec.states_offset() + unit * WORD)
    }

    /// Location of a unit.
    pub(super) fn unit(&self, member: usize, unit: u64) -> Far {
        Far::new(member, self.members[member].pieces_at + unit * self.spec.unit())
    }

    /// Number of the unit at a location.
    ///
    /// # Errors
    /// No unit is there.
    pub(super) fn unit_at(&self, at: Far) -> Result<u64, Damaged> {
        let table = self.members.get(at.member()).ok_or(Damaged("a pointer to no member"))?;
        let within = at.offset().checked_sub(table.pieces_at).ok_or(Damaged("a pointer to no node"))?;
        let unit = within / self.spec.unit();
        if unit >= table.pieces || !within.is_multiple_of(self.spec.unit()) {
            return Err(Damaged("a pointer to no node"));
        }
        Ok(unit)
    }

    /// Decodes a pointer to a node.
    ///
    /// # Errors
    /// No node is there.
    pub(super) fn pointer(&self, word: u64) -> Result<Far, Damaged> {
        self.unit_at(Far(word)).map(|_| Far(word))
    }

    /// Decodes the word of the root; `None` if the tree is empty.
    ///
    /// # Errors
    /// No client writes this word.
    pub(super) fn root_of(&self, word: u64) -> Result<Option<Root>, Damaged> {
        if word == 0 {
            return Ok(None);
        }
        let level = (word % ALIGNMENT) as u8;
        if level > LEVEL_MAX {
            return Err(Damaged("a root that is too high"));
        }
        // Offsets of units are multiples of the alignment, as the tables begin at one.
        Ok(Some(Root { at: self.pointer(word - u64::from(level))?, level }))
    }

    /// Lock of the node at a location.
    pub(super) fn lock_of(&self, node: Far) -> LockAt {
        let mixed = (node.0 / ALIGNMENT).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        LockAt { member: node.member(), index: mixed % u64::from(self.spec.locks) }
    }

    /// Location of a lock.
    pub(super) fn lock(&self, lock: LockAt) -> Far {
        Far::new(lock.member, self.spec.locks_offset() + lock.index * WORD)
    }

    /// Whether a change under this lock may write these bytes of its member.
    pub(super) fn guards(&self, lock: LockAt, at: u64, len: u64) -> bool {
        let table = &self.members[lock.member];
        let Some(offset) = at.checked_sub(table.extent.at).filter(|offset| *offset >= table.pieces_at) else {
            return false;
        };
        let within = (offset - table.pieces_at) % self.spec.unit();
        let node = Far::new(lock.member, offset - within);
        self.unit_at(node).is_ok()
            && self.lock_of(node) == lock
            && within.checked_add(len).is_some_and(|end| end <= self.form.size() as u64)
    }

    /// Returns the address of `len` bytes at a location.
    ///
    /// # Errors
    /// The bytes are not in the table, or are misaligned.
    pub(super) fn addr(&self, at: Far, len: u64) -> Result<Addr, Damaged> {
        place::addr(&self.members, at, len)
    }
}

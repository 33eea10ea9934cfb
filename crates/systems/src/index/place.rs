//! Places in the tables of a store's members, and the keys of these tables.
//!
//! Invariant: all bytes from far memory are untrusted. Each function that decodes them ends and does not panic.

use crate::index::IndexError;
use crate::lease::Table;
use crate::redo::Areas;
use farside_remote::service::Extent;
use farside_remote::{Addr, Key, NodeId};
use std::cell::Cell;

const WORD: u64 = size_of::<u64>() as u64;

/// Bytes that no client writes; the text says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Damaged(pub(super) &'static str);

impl From<Damaged> for IndexError {
    fn from(Damaged(what): Damaged) -> IndexError {
        IndexError::Damaged(what)
    }
}

/// Location in the store: member, and offset from the start of the member's table in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Far(pub(super) u64);

impl Far {
    const MEMBER_AT: u32 = 61;

    pub(super) const fn new(member: usize, offset: u64) -> Far {
        Far((member as u64) << Far::MEMBER_AT | offset)
    }

    pub(super) const fn member(self) -> usize {
        (self.0 >> Far::MEMBER_AT) as usize
    }

    pub(super) const fn offset(self) -> u64 {
        self.0 & ((1 << Far::MEMBER_AT) - 1)
    }

    pub(super) const fn plus(self, bytes: u64) -> Far {
        Far(self.0 + bytes)
    }
}

/// Table of one member. Clients claim its memory in pieces of one size.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) node: NodeId,
    /// Extent of the table. Its key may be that of an earlier session.
    pub(super) extent: Extent,
    key: Cell<Key>,
    /// The redo records. Their key may be that of an earlier session.
    areas: Areas,
    /// Number of pieces.
    pub(super) pieces: u64,
    /// Offset of the first piece in the table.
    pub(super) pieces_at: u64,
}

impl Member {
    pub(super) fn new(extent: Extent, areas: Areas, (pieces, pieces_at): (u64, u64)) -> Member {
        Member { node: areas.node, extent, key: Cell::new(extent.key), areas, pieces, pieces_at }
    }

    /// The key that the node has granted last.
    pub(super) fn key(&self) -> Key {
        self.key.get()
    }

    /// Replaces the key by the one that the node has granted in another session.
    pub(super) fn set_key(&self, key: Key) {
        self.key.set(key);
    }

    /// The redo records.
    pub(super) fn areas(&self) -> Areas {
        Areas { key: self.key(), ..self.areas }
    }
}

/// The table of leases, which is at the start of the first member's table.
pub(super) fn leases(members: &[Member]) -> Table {
    let first = &members[0];
    Table { node: first.node, key: first.key(), at: Addr::new(first.extent.at) }
}

/// Returns the address of `len` bytes at a location.
///
/// # Errors
/// The bytes are not in the table, or are misaligned.
pub(super) fn addr(members: &[Member], at: Far, len: u64) -> Result<Addr, Damaged> {
    let table = members.get(at.member()).ok_or(Damaged("a pointer to no member"))?;
    let end = at.offset().checked_add(len).ok_or(Damaged("a pointer out of the store"))?;
    if end > table.extent.len || !at.offset().is_multiple_of(WORD) {
        return Err(Damaged("a pointer out of the store"));
    }
    Ok(Addr::new(table.extent.at).plus(at.offset()))
}

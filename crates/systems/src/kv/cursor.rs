//! Position of an iteration over all keys of a store.
//!
//! Invariant: a cursor refers to the slots of one table of one member. If the table is rebuilt, the iteration must
//! start again.

/// Position of an iteration over all keys. It stays valid after the client that created it is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Index of the member whose keys are being visited; 0 if the store lies on one node.
    pub(super) member: u32,
    pub(super) next_slot: u64,
    /// Occupied slots that the last READ found and that are not yet visited, in descending order.
    pub(super) occupied: Vec<u64>,
    pub(super) table_epoch: Option<u64>,
}

/// Position at which an iteration continues, as numbers that can be passed to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the member whose keys are being visited; 0 if the store lies on one node.
    pub member: u32,
    /// Epoch of the table being iterated.
    pub table_epoch: u64,
    /// First slot that is not yet visited.
    pub slot: u64,
}

impl Cursor {
    /// Returns the position at which the iteration continues; `None` if the iteration has not started.
    pub fn place(&self) -> Option<Place> {
        let slot = self.occupied.last().copied().unwrap_or(self.next_slot);
        self.table_epoch.map(|table_epoch| Place { member: self.member, table_epoch, slot })
    }

    /// Creates a cursor that continues an iteration at `place`.
    ///
    /// A key that is present from the start of the first iteration to the end of the second is visited exactly once, by
    /// one of the two cursors. If the table was rebuilt in between, the iteration fails with
    /// [`KvError::Rebuilt`](super::KvError::Rebuilt).
    pub fn at(place: Place) -> Cursor {
        let Place { member, table_epoch, slot } = place;
        Cursor { member, next_slot: slot, occupied: Vec::new(), table_epoch: Some(table_epoch) }
    }

    /// Creates a cursor at the first key of a member.
    pub(super) fn at_member(member: u32) -> Cursor {
        Cursor { member, ..Cursor::default() }
    }
}

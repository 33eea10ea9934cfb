//! Where a visit of all keys of a store is: a place in its table of slots.
//!
//! Invariant: it names slots of one table, so where another takes the place of that the visit has to begin again.

/// Where an iteration is. Survives the loss of the client that made it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    pub(super) next_slot: u64,
    /// Of the slots that were read last, those that are not empty and not yet visited, in descending order.
    pub(super) occupied: Vec<u64>,
    pub(super) table_epoch: Option<u64>,
}

/// Where an iteration goes on: numbers that outlive the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Of the table that it goes through.
    pub table_epoch: u64,
    /// The first slot that it has yet to visit.
    pub slot: u64,
}

impl Cursor {
    /// Where the iteration goes on; nothing if it has not begun.
    pub fn place(&self) -> Option<Place> {
        let slot = self.occupied.last().copied().unwrap_or(self.next_slot);
        self.table_epoch.map(|table_epoch| Place { table_epoch, slot })
    }

    /// An iteration that goes on there. A key that is present all the while, from its beginning, is visited by one of
    /// the two cursors, and once; where the table was rebuilt since, it ends by
    /// [`KvError::Rebuilt`](super::KvError::Rebuilt).
    pub fn at(place: Place) -> Cursor {
        Cursor { next_slot: place.slot, occupied: Vec::new(), table_epoch: Some(place.table_epoch) }
    }
}

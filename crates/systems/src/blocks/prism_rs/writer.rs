//! A client's identity in the tags of its writes.
//!
//! Tags are compared within a block alone. So the blocks are divided into classes, and each class has a counter of its
//! own: a counter has 40 bits, which one counter for all blocks would use up in 4 months at 100,000 writes a second.
//!
//! Invariant: no two writes to a block have the same tag. The id is this client's alone, and the counter exceeds that
//! of each of its earlier writes to the block, also of those whose futures were dropped.

use super::layout::{Tag, WriterId};
use super::mutants;
use crate::blocks::BlocksError;
use std::cell::Cell;

/// Number of classes of blocks.
const CLASSES: usize = 64;

/// The writer id of a client, once claimed, and the counters of its newest writes.
pub(super) struct Writer {
    id: Cell<Option<WriterId>>,
    /// The highest counter that this client has used for the blocks of each class.
    counters: [Cell<u64>; CLASSES],
}

impl Writer {
    /// Creates a client that has no id yet.
    pub(super) fn new() -> Writer {
        Writer { id: Cell::new(None), counters: [const { Cell::new(0) }; CLASSES] }
    }

    /// The claimed id.
    pub(super) fn id(&self) -> Option<WriterId> {
        self.id.get()
    }

    /// Makes `id`, which was claimed for this client, the client's id, unless another task has claimed one meanwhile.
    /// Returns the client's id.
    pub(super) fn adopt(&self, id: WriterId) -> WriterId {
        let adopted = self.id.get().unwrap_or(id);
        self.id.set(Some(adopted));
        adopted
    }

    /// Returns the tag of a new write to block `block`. `newest` is the tag that a majority had after the write began.
    ///
    /// # Errors
    /// The counter has reached its end, which no correct client causes. Other classes of blocks can be written.
    pub(super) fn next_tag(&self, id: WriterId, block: u64, newest: Tag) -> Result<Tag, BlocksError> {
        let last = &self.counters[(block % CLASSES as u64) as usize];
        let used = if mutants::COUNTER_NOT_ABOVE_DROPPED.is_on() { 0 } else { last.get() };
        let counter = newest.counter().max(used) + 1;
        let tag = Tag::new(counter, id).ok_or(BlocksError::Damaged("a tag with the highest counter"))?;
        last.set(counter);
        Ok(if mutants::NO_WRITER_IN_TAG.is_on() { tag.without_writer() } else { tag })
    }
}

//! Tags, which order the writes of a replicated block, and the ids of the clients that write.
//!
//! ```text
//! tag | counter 40 bits | writer id 24 bits |      big-endian, so that CAS compares tags as numbers
//! ```

use zerocopy::big_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const WRITER_BITS: u32 = 24;
const COUNTER_MAX: u64 = (1 << (64 - WRITER_BITS)) - 1;
/// Largest number of writer ids of a store.
pub const WRITERS_MAX: u32 = (1 << WRITER_BITS) - 1;

/// Number of a client in the tags of its writes. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WriterId(u32);

impl WriterId {
    /// Returns the id with this number; `None` if it is 0 or too large.
    pub fn new(number: u64) -> Option<WriterId> {
        let number = u32::try_from(number).ok()?;
        (1..=WRITERS_MAX).contains(&number).then_some(WriterId(number))
    }

    /// The number.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// Tag of a write. Tags are ordered: first by counter, then by writer.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub struct Tag(U64);

impl Tag {
    /// Tag of a block that was never written.
    pub const NONE: Tag = Tag(U64::ZERO);
    /// Mask of all bits of a tag.
    pub(crate) const ALL_BITS: Tag = Tag(U64::MAX_VALUE);

    /// Returns the tag of a writer with this counter; `None` if the counter has more than 40 bits.
    pub fn new(counter: u64, writer: WriterId) -> Option<Tag> {
        (counter <= COUNTER_MAX).then(|| Tag(U64::new(counter << WRITER_BITS | u64::from(writer.0))))
    }

    /// Returns the tag with the same counter and no writer.
    pub(crate) fn without_writer(self) -> Tag {
        Tag(U64::new(self.counter() << WRITER_BITS))
    }

    /// The counter.
    pub fn counter(self) -> u64 {
        self.0.get() >> WRITER_BITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_ordered_by_counter_and_then_by_writer() {
        let tag = |counter, writer| Tag::new(counter, WriterId::new(writer).expect("an id")).expect("a tag");
        let mut tags = [tag(2, 1), tag(1, 300), tag(256, 1), Tag::NONE, tag(1, 2)];
        tags.sort();
        assert_eq!(tags, [Tag::NONE, tag(1, 2), tag(1, 300), tag(2, 1), tag(256, 1)]);
        let mut bytes = tags.map(|tag| tag.as_bytes().to_vec());
        bytes.sort();
        assert_eq!(bytes, tags.map(|tag| tag.as_bytes().to_vec()), "their bytes have the same order");
        assert_eq!(tag(7, 9).counter(), 7);
        assert_eq!(Tag::new(COUNTER_MAX + 1, WriterId(1)), None);
        assert_eq!((WriterId::new(0), WriterId::new(1 << WRITER_BITS)), (None, None));
    }
}

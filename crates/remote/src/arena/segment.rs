//! The segment table. It records for each segment the region that owns it, its use, and how many of its buffers were
//! ever taken.
//!
//! An entry is `| region u16 | use u8 | phase u8 | used u32 | taker u32 | count u32 |` and, for segments on a granted
//! list, `| next u64 |`. To check access to a byte, a runner reads only the first 8 bytes of an entry.

use super::Arena;
use crate::memory::{Memory, Width};

pub(crate) const ENTRY_SIZE: u64 = 32;
const NEXT_OFFSET: u64 = 16;

/// The use of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The segment belongs to no region.
    Free,
    /// Owned by a region, but not yet assigned to a class.
    Granted,
    /// The segment is part of a table.
    Table,
    /// The segment holds buffers of the class with this number.
    Buffers(u8),
}

const FREE: u8 = 0xfd;
const GRANTED: u8 = 0xfe;
const TABLE: u8 = 0xff;

/// The decoded word of an entry of the segment table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Region that owns the segment; 0 if none.
    pub region: u32,
    /// Use of the segment.
    pub usage: Use,
    /// Whether session `taker` is taking buffer number `used`.
    pub(crate) taking: bool,
    /// Number of the segment's buffers that have ever been taken.
    pub used: u32,
    pub(crate) taker: u32,
    /// Counter of the entry's changes, so that no value of the entry returns.
    pub(crate) count: u32,
}

const _: () = assert!(FREE as usize >= super::class::CLASSES, "the numbers of uses are not class numbers");

impl Segment {
    // The fields that `Arena::reach` needs, unpacked one by one.

    #[inline(always)]
    pub(crate) const fn region_of(word: u128) -> u32 {
        word as u32 & 0xffff
    }

    #[inline(always)]
    pub(crate) const fn is_table(word: u128) -> bool {
        Segment::class_of(word) == TABLE
    }

    /// The class of the segment's buffers, or a number that is not a class.
    #[inline(always)]
    pub(crate) const fn class_of(word: u128) -> u8 {
        (word >> 16) as u8
    }

    #[inline]
    pub(crate) const fn unpack(word: u128) -> Segment {
        let taking = (word >> 24) as u8;
        let usage = match (word >> 16) as u8 {
            _ if word as u16 == 0 => Use::Free,
            _ if taking > 1 => Use::Free, // No step writes this value: a peer has damaged it.
            GRANTED => Use::Granted,
            TABLE => Use::Table,
            FREE => Use::Free,
            class => Use::Buffers(class),
        };
        Segment {
            region: word as u32 & 0xffff,
            usage,
            taking: taking == 1,
            used: (word >> 32) as u32,
            taker: (word >> 64) as u32,
            count: (word >> 96) as u32,
        }
    }

    pub(crate) const fn pack(self) -> u128 {
        let usage = match self.usage {
            Use::Free if self.region == 0 => 0, // The same as in memory that was never written.
            Use::Free => FREE,
            Use::Granted => GRANTED,
            Use::Table => TABLE,
            Use::Buffers(class) => class,
        };
        self.region as u128
            | (usage as u128) << 16
            | (self.taking as u128) << 24
            | (self.used as u128) << 32
            | (self.taker as u128) << 64
            | (self.count as u128) << 96
    }

    /// The same segment with another region and use, and with no buffer taken.
    pub(crate) const fn put_to(self, region: u32, usage: Use) -> Segment {
        Segment { region, usage, taking: false, used: 0, taker: 0, count: self.count.wrapping_add(1) }
    }
}

impl<M: Memory> Arena<'_, M> {
    /// Returns the entry of segment `index`.
    pub fn segment(&self, index: u32) -> Result<Segment, M::Wait> {
        let word = self.memory.load(self.geometry().segment_entry_at(index), Width::W16)?;
        Ok(Segment::unpack(word))
    }

    /// Assigns segment `index` to a region and use. Returns false if its entry has changed since it was read as `old`.
    pub fn assign(&self, index: u32, old: Segment, region: u32, usage: Use) -> Result<bool, M::Wait> {
        let at = self.geometry().segment_entry_at(index);
        let word = self.memory.load(at, Width::W16)?;
        if Segment::unpack(word) != old {
            return Ok(false);
        }
        // Exchange the raw word, not the packed `old`. The two differ if a peer has damaged the entry; this exchange
        // then repairs it.
        Ok(self.memory.exchange(at, Width::W16, word, old.put_to(region, usage).pack())?.is_ok())
    }

    pub(crate) fn exchange_segment(&self, index: u32, old: Segment, new: Segment) -> Result<bool, M::Wait> {
        let at = self.geometry().segment_entry_at(index);
        Ok(self.memory.exchange(at, Width::W16, old.pack(), new.pack())?.is_ok())
    }

    pub(crate) fn segment_next(&self, index: u32) -> Result<u64, M::Wait> {
        Ok(self.memory.load(self.geometry().segment_entry_at(index) + NEXT_OFFSET, Width::W8)? as u64)
    }

    pub(crate) fn set_segment_next(&self, index: u32, next: u64) -> Result<(), M::Wait> {
        self.memory.write(self.geometry().segment_entry_at(index) + NEXT_OFFSET, &next.to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_round_trips_and_a_zero_word_is_free() {
        for usage in [Use::Granted, Use::Table, Use::Buffers(0), Use::Buffers(40)] {
            let segment = Segment { region: 255, usage, taking: true, used: 9, taker: u32::MAX, count: 3 };
            assert_eq!(Segment::unpack(segment.pack()), segment);
        }
        assert_eq!(Segment::unpack(0).usage, Use::Free);
        assert_eq!(Segment::unpack(0).pack(), 0);
        let freed = Segment::unpack(0).put_to(0, Use::Free);
        assert_eq!(Segment::unpack(freed.pack()), freed);
    }
}

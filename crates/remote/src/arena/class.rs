//! The size classes of buffers: four per doubling, from 64 bytes to 64 KiB.
//!
//! A segment of a class begins with its buffers' states, 16 bytes each, which no key covers. The buffers follow.
//! Invariant: sizes are multiples of 16, so buffers keep the alignment of atomic words.

use super::SEGMENT_SIZE;
use crate::op::ListId;

/// Number of classes.
pub const CLASSES: usize = 41;
/// Size of the largest buffers, in bytes.
pub const BUFFER_SIZE_MAX: u32 = 64 * 1024;

/// One class of buffers.
#[derive(Debug)]
pub struct Class {
    /// Class number, which is also the number of the free list that an ALLOCATE names.
    pub index: u8,
    /// Size of a buffer, in bytes.
    pub size: u32,
    /// Number of buffers in a segment.
    pub count: u32,
    /// Offset of the first buffer in its segment, in bytes.
    data: u32,
    /// The shift for which `size = (4..=7) << shift`. To divide by `size`, shift right and multiply by `reciprocal`.
    shift: u32,
    reciprocal: u32,
}

static TABLE: [Class; CLASSES] = {
    let mut table = [const { Class::new(0) }; CLASSES];
    let mut index = 0;
    while index < CLASSES {
        table[index] = Class::new(index as u8);
        index += 1;
    }
    table
};

const _: () = assert!(Class::new(0).size == 64 && Class::new(CLASSES as u8 - 1).size == BUFFER_SIZE_MAX);

/// Fraction bits of the reciprocals. 20 suffice for an exact quotient: an offset has 20 bits, and the division shifts
/// out at least four of them before it multiplies.
const RECIPROCAL_BITS: u32 = 20;

impl Class {
    const fn new(index: u8) -> Class {
        let (shift, factor) = (index as u32 / 4 + 4, 4 + index as u32 % 4);
        let size = factor << shift;
        let segment = SEGMENT_SIZE as u32;
        let mut count = segment / (size + 16);
        while (count * 16).next_multiple_of(64) + count * size > segment {
            count -= 1;
        }
        let data = (count * 16).next_multiple_of(64);
        Class { index, size, count, data, shift, reciprocal: (1 << RECIPROCAL_BITS) / factor + 1 }
    }

    /// Returns the class with this index, if it exists.
    #[inline(always)]
    pub fn get(index: u8) -> Option<&'static Class> {
        TABLE.get(index as usize)
    }

    /// Returns all classes, the smallest first.
    pub fn all() -> &'static [Class] {
        &TABLE
    }

    /// The smallest class whose buffers hold `len` bytes, or `None` if no class does.
    #[inline]
    pub fn for_len(len: usize) -> Option<&'static Class> {
        if len <= 64 {
            return Some(&TABLE[0]);
        }
        if len > BUFFER_SIZE_MAX as usize {
            return None;
        }
        // Find the largest `shift` with `4 << shift` below `len`. The result is the first of that shift's four classes
        // that holds `len` bytes, or the class after them.
        let shift = (len as u32 - 1).ilog2() - 2;
        let factor = (len as u32).div_ceil(1 << shift);
        Some(&TABLE[((shift - 4) * 4 + factor - 4) as usize])
    }

    /// The class's free list, as an ALLOCATE names it.
    pub const fn list(&self) -> ListId {
        ListId(self.index as u32)
    }

    /// Offset of buffer `ordinal` in its segment, in bytes.
    #[inline]
    pub(crate) const fn offset(&self, ordinal: u32) -> u64 {
        self.data as u64 + ordinal as u64 * self.size as u64
    }

    /// The number of the buffer that contains the segment's byte `offset`, or `None` if no buffer contains it.
    #[inline(always)]
    pub(crate) const fn ordinal(&self, offset: u64) -> Option<u32> {
        if offset < self.data as u64 {
            return None;
        }
        let units = (offset - self.data as u64) >> self.shift;
        let ordinal = ((units * self.reciprocal as u64) >> RECIPROCAL_BITS) as u32;
        if ordinal < self.count { Some(ordinal) } else { None }
    }

    /// Bytes from the segment's byte `offset` to the end of the buffer that contains it, or `None` if no buffer does.
    #[inline(always)]
    pub(crate) const fn left_of_buffer(&self, offset: u64) -> Option<u64> {
        match self.ordinal(offset) {
            Some(ordinal) => Some(self.offset(ordinal + 1) - offset),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_len_finds_the_smallest_fitting_class_for_every_length() {
        for len in 0..=BUFFER_SIZE_MAX as usize {
            let found = Class::for_len(len).expect("it fits");
            let first = Class::all().iter().find(|class| class.size as usize >= len).expect("it fits");
            assert_eq!(found.index, first.index, "for {len} bytes");
        }
        assert!(Class::for_len(BUFFER_SIZE_MAX as usize + 1).is_none());
    }

    #[test]
    fn every_offset_maps_to_the_same_buffer_as_division() {
        for class in Class::all() {
            for offset in 0..SEGMENT_SIZE {
                let expected = offset
                    .checked_sub(u64::from(class.data))
                    .map(|byte| byte / u64::from(class.size))
                    .filter(|&ordinal| ordinal < u64::from(class.count));
                assert_eq!(class.ordinal(offset).map(u64::from), expected, "class {class:?}, byte {offset}");
            }
            assert!(class.offset(class.count) <= SEGMENT_SIZE);
            assert_eq!(class.offset(0) % 16, 0);
        }
    }
}

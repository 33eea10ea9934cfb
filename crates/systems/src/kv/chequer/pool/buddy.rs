//! A buddy allocator over an area of units. It knows positions only, not the area's memory.
//!
//! A block of order `k` consists of `1 << k` units and starts at a multiple of its size. Two blocks that together form
//! a block of the next order are buddies. An area whose size is no power of two starts as a sequence of the largest
//! aligned blocks that fit.
//!
//! Each order has a bitmap with one bit for each of its blocks, which is set while the block is free as a whole. The
//! bitmaps of all orders have 2 bits for each unit. The summaries that find the first set bit add 1/63. With units of
//! 32 bytes, this is 8,323 bytes for each MiB of the area (0.8 %), zeroed on demand by the operating system.
//!
//! Invariants:
//! * A unit belongs to at most one free block.
//! * No two buddies are both free: they are merged. So the free blocks follow from the set of free units.

use super::super::mutants::BUDDY_MERGES_IN_USE;

/// A buddy allocator.
pub(super) struct Buddy {
    /// The free blocks of each order.
    orders: Vec<Bitmap>,
    /// The orders that have a free block, one bit each.
    filled: u64,
}

impl Buddy {
    /// Creates the allocator of an area of `units` units, all of them free.
    ///
    /// # Panics
    /// The area has no units.
    pub(super) fn new(units: u64) -> Buddy {
        assert!(units > 0, "an area has at least one unit");
        let orders = (0..=units.ilog2()).map(|order| Bitmap::new(units >> order)).collect();
        let mut buddy = Buddy { orders, filled: 0 };
        buddy.free_pieces(0, units);
        buddy
    }

    /// Takes the free block at the lowest address among the smallest that have at least this order, and splits it.
    /// Returns the block's first unit.
    pub(super) fn take(&mut self, order: u32) -> Option<u64> {
        let large = self.filled.checked_shr(order)?;
        if large == 0 {
            return None;
        }
        let from = order + large.trailing_zeros();
        let index = self.orders[from as usize].first().expect("the order has a free block");
        self.remove(from, index);
        let unit = index << from;
        self.split(unit, from, order);
        Some(unit)
    }

    /// Takes the block of this order at `unit`. Returns false and changes nothing if a part of it is not free.
    pub(super) fn take_at(&mut self, unit: u64, order: u32) -> bool {
        let Some(from) = self.free_order(unit, order) else { return false };
        self.remove(from, unit >> from);
        self.split(unit, from, order);
        true
    }

    /// Whether the block of this order at `unit` is free.
    pub(super) fn is_free(&self, unit: u64, order: u32) -> bool {
        self.free_order(unit, order).is_some()
    }

    /// Frees the units `unit..unit + units`. They were taken as the first units of a block.
    pub(super) fn free_pieces(&mut self, unit: u64, units: u64) {
        for (at, order) in pieces(unit, units) {
            self.free(at, order);
        }
    }

    /// Frees the last units of a block of the given order, behind its first `units`.
    pub(super) fn free_tail(&mut self, unit: u64, units: u64, order: u32) {
        let (mut at, end) = (unit + units, unit + (1 << order));
        while at < end {
            let piece = at.trailing_zeros();
            self.free(at, piece);
            at += 1 << piece;
        }
    }

    /// Number of free units.
    pub(super) fn units(&self) -> u64 {
        self.orders.iter().enumerate().map(|(order, bitmap)| bitmap.set << order).sum()
    }

    /// Number of units in the largest free block; 0 if no block is free.
    pub(super) fn largest(&self) -> u64 {
        self.filled.checked_ilog2().map_or(0, |order| 1 << order)
    }

    /// Returns the order of the free block that contains the block of the given order at `unit`.
    fn free_order(&self, unit: u64, order: u32) -> Option<u32> {
        let mut large = self.filled.checked_shr(order)?;
        let mut from = order;
        while large != 0 {
            from += large.trailing_zeros();
            if self.orders[from as usize].contains(unit >> from) {
                return Some(from);
            }
            from += 1;
            large = self.filled.checked_shr(from)?;
        }
        None
    }

    /// Frees what is left of a taken block of order `from` when the block of the order `to` at `unit` is cut from it.
    fn split(&mut self, unit: u64, from: u32, to: u32) {
        for order in (to..from).rev() {
            self.insert(order, (unit >> order) ^ 1);
        }
    }

    /// Frees a block, merged with its buddy if that is free, and so on.
    fn free(&mut self, unit: u64, mut order: u32) {
        assert!(!self.is_free(unit, order), "a block is freed once");
        let mut index = unit >> order;
        while (index ^ 1) < self.orders[order as usize].len {
            let buddy = index ^ 1;
            if !self.orders[order as usize].contains(buddy) && !BUDDY_MERGES_IN_USE.is_on() {
                break;
            }
            self.remove(order, buddy);
            index >>= 1;
            order += 1;
        }
        self.insert(order, index);
    }

    fn insert(&mut self, order: u32, index: u64) {
        self.orders[order as usize].insert(index);
        self.filled |= 1 << order;
    }

    fn remove(&mut self, order: u32, index: u64) {
        let bitmap = &mut self.orders[order as usize];
        bitmap.remove(index);
        if bitmap.set == 0 {
            self.filled &= !(1 << order);
        }
    }
}

/// Cuts `units` units that begin at the start of a block into the largest aligned blocks: each block's first unit and
/// order.
pub(super) fn pieces(unit: u64, units: u64) -> impl Iterator<Item = (u64, u32)> {
    let (mut at, mut rest) = (unit, units);
    std::iter::from_fn(move || {
        let order = rest.checked_ilog2()?;
        let piece = (at, order);
        at += 1 << order;
        rest -= 1 << order;
        Some(piece)
    })
}

/// A set of numbers below `len`. A bit of a summary is set while the word with its number in the level below has a set
/// bit. So the first set bit is found with one word of each level.
struct Bitmap {
    /// The bits, and the summary of each level. The last level has one word.
    levels: Vec<Vec<u64>>,
    len: u64,
    /// Number of set bits.
    set: u64,
}

impl Bitmap {
    fn new(len: u64) -> Bitmap {
        let mut levels = Vec::new();
        let mut bits = len;
        loop {
            let words = bits.div_ceil(64);
            levels.push(vec![0; usize::try_from(words).expect("the host has 64-bit addresses")]);
            if words <= 1 {
                return Bitmap { levels, len, set: 0 };
            }
            bits = words;
        }
    }

    fn contains(&self, at: u64) -> bool {
        at < self.len && self.levels[0][(at / 64) as usize] >> (at % 64) & 1 != 0
    }

    fn first(&self) -> Option<u64> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let word = level[at as usize];
            if word == 0 {
                return None;
            }
            at = at * 64 + u64::from(word.trailing_zeros());
        }
        Some(at)
    }

    fn insert(&mut self, at: u64) {
        self.set += u64::from(!self.contains(at));
        let mut at = at;
        for level in &mut self.levels {
            let word = &mut level[(at / 64) as usize];
            let is_known = *word != 0;
            *word |= 1 << (at % 64);
            if is_known {
                return;
            }
            at /= 64;
        }
    }

    fn remove(&mut self, at: u64) {
        self.set -= u64::from(self.contains(at));
        let mut at = at;
        for level in &mut self.levels {
            let word = &mut level[(at / 64) as usize];
            *word &= !(1 << (at % 64));
            if *word != 0 {
                return;
            }
            at /= 64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::draws::Draws;
    use std::collections::BTreeSet;

    #[test]
    fn a_bitmap_is_a_set() {
        let mut draws = Draws(1);
        for len in [1, 63, 64, 65, 4_096, 4_097, 300_000] {
            let (mut bitmap, mut model) = (Bitmap::new(len), BTreeSet::new());
            for _ in 0..5_000 {
                let at = if draws.percent(50) { draws.below(len) } else { draws.below(len.min(200)) };
                if draws.percent(50) {
                    bitmap.insert(at);
                    model.insert(at);
                } else {
                    bitmap.remove(at);
                    model.remove(&at);
                }
                assert_eq!(bitmap.contains(at), model.contains(&at));
                assert_eq!((bitmap.first(), bitmap.set), (model.first().copied(), model.len() as u64));
            }
            while let Some(at) = model.pop_first() {
                assert_eq!(bitmap.first(), Some(at));
                bitmap.remove(at);
            }
            assert_eq!(bitmap.first(), None);
        }
    }

    #[test]
    fn an_area_of_any_size_starts_as_the_largest_blocks() {
        for units in 1..300u64 {
            let buddy = Buddy::new(units);
            assert_eq!(buddy.units(), units);
            assert_eq!(buddy.orders.iter().map(|bitmap| bitmap.set).sum::<u64>(), units.count_ones().into());
            assert_eq!(buddy.largest(), 1 << units.ilog2());
        }
    }

    #[test]
    fn freed_blocks_merge_in_any_order() {
        let mut draws = Draws(2);
        for units in [1, 2, 13, 64, 100, 127, 128] {
            let mut buddy = Buddy::new(units);
            let mut taken: Vec<u64> = std::iter::from_fn(|| buddy.take(0)).collect();
            assert_eq!(taken, (0..units).collect::<Vec<_>>(), "the lowest address comes first");
            assert_eq!((buddy.units(), buddy.largest()), (0, 0));
            draws.shuffle(&mut taken);
            for unit in taken {
                buddy.free_pieces(unit, 1);
            }
            assert_eq!((buddy.units(), buddy.largest()), (units, 1 << units.ilog2()));
        }
    }

    #[test]
    fn a_block_is_taken_at_its_place_or_not_at_all() {
        let mut buddy = Buddy::new(16);
        assert!(buddy.take_at(6, 1) && !buddy.take_at(6, 0) && !buddy.take_at(7, 0) && !buddy.take_at(4, 2));
        assert!(buddy.take_at(4, 1) && buddy.take_at(0, 2) && !buddy.is_free(0, 3) && buddy.is_free(8, 3));
        assert_eq!((buddy.units(), buddy.take(3), buddy.take(0)), (8, Some(8), None));
    }

    #[test]
    #[should_panic(expected = "a block is freed once")]
    fn a_block_is_not_freed_twice() {
        let mut buddy = Buddy::new(16);
        let unit = buddy.take(1).expect("the area is free");
        buddy.free_pieces(unit, 2);
        buddy.free_pieces(unit, 2);
    }
}

//! A buddy allocator over an area of units. It knows positions only, not the area's memory.
//!
//! A free block of order `k` consists of `1 << k` units and starts at a multiple of its size. Two blocks that together
//! form a block of the next order are buddies. An area whose size is no power of two starts as a sequence of the
//! largest aligned blocks that fit.
//!
//! A *run* of units is taken and freed as the largest aligned blocks that it consists of. The number of units of a run
//! need not be a power of two. Then its *core*, the largest power of two that fits, is aligned, and the rest of the
//! run is on one or both sides of the core, possibly beyond the core's buddy. So runs of 5 units lie at 0..5, 7..12,
//! 12..17 and so on, and runs of 6 or 7 units without gaps. If each run took the next larger power of two instead, an
//! area full of runs of 5 units would use only 5 of 8 units.
//!
//! Because cores are aligned, the place of a freed run is found again: its core is a free block.
//!
//! Each order has a bitmap with one bit for each of its blocks, which is set while the block is free as a whole. The
//! bitmaps of all orders have 2 bits for each unit. The summaries that find the first set bit add 1/63. With units of
//! 32 bytes, this is 8,323 bytes for each MiB of the area (0.8 %), zeroed on demand by the operating system.
//!
//! Invariants:
//! * A unit belongs to at most one free block.
//! * No two buddies are both free: they are merged. So the free blocks follow from the set of free units.

use super::super::mutants::BUDDY_MERGES_IN_USE;

/// Maximum number of free blocks that one search tries as a core.
const CORES_MAX: u64 = 32;

/// A buddy allocator.
pub(super) struct Buddy {
    /// The free blocks of each order.
    orders: Vec<Bitmap>,
    /// The orders that have a free block, one bit each.
    filled: u64,
    /// For each order, the block with which the next search for a core begins.
    next_core: Vec<u64>,
}

impl Buddy {
    /// Creates the allocator of an area of `units` units, all of them free.
    ///
    /// # Panics
    /// The area has no units.
    pub(super) fn new(units: u64) -> Buddy {
        assert!(units > 0, "an area has at least one unit");
        let orders: Vec<Bitmap> = (0..=units.ilog2()).map(|order| Bitmap::new(units >> order)).collect();
        let next_core = vec![0; orders.len()];
        let mut buddy = Buddy { orders, filled: 0, next_core };
        buddy.free(0, units);
        buddy
    }

    /// Takes a run of `units` units. Returns its first unit. `None` if no run was found: if there are many free blocks
    /// of the core's size, this call has tried only [`CORES_MAX`] of them, and the next call tries others.
    pub(super) fn take(&mut self, units: u64) -> Option<u64> {
        let unit = self.hole(units).or_else(|| self.large(units))?;
        for (at, order) in pieces(unit, units) {
            self.take_piece(at, order);
        }
        Some(unit)
    }

    /// Takes the run of `units` units that starts at `unit`. Returns false and changes nothing if a part of it is not
    /// free.
    pub(super) fn take_at(&mut self, unit: u64, units: u64) -> bool {
        if !pieces(unit, units).all(|(at, order)| self.is_free(at, order)) {
            return false;
        }
        for (at, order) in pieces(unit, units) {
            self.take_piece(at, order);
        }
        true
    }

    /// Frees a run of units, and merges its blocks with their buddies.
    pub(super) fn free(&mut self, unit: u64, units: u64) {
        for (at, order) in pieces(unit, units) {
            self.free_piece(at, order);
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

    /// Finds a free block that is the core of a run of `units` units, with the rest of the run on one or both sides.
    /// Each search begins where the last one has ended, so that it does not always try the same blocks in vain.
    fn hole(&mut self, units: u64) -> Option<u64> {
        let order = units.ilog2();
        if units.is_power_of_two() {
            return None;
        }
        let tries = self.orders.get(order as usize)?.set.min(CORES_MAX);
        for _ in 0..tries {
            let cores = &self.orders[order as usize];
            let index = cores.next(self.next_core[order as usize]).or_else(|| cores.next(0))?;
            self.next_core[order as usize] = index + 1;
            let unit = self.place(index << order, 1 << order, units);
            if unit.is_some() {
                return unit;
            }
        }
        None
    }

    /// Finds a run in the free block that has at least `units` units: of the smallest sufficient order, the one at the
    /// lowest address.
    fn large(&self, units: u64) -> Option<u64> {
        let order = units.next_power_of_two().ilog2();
        let sufficient = self.filled.checked_shr(order)?;
        if sufficient == 0 {
            return None;
        }
        let from = order + sufficient.trailing_zeros();
        let core = self.orders[from as usize].first().expect("the order has a free block") << from;
        if units.is_power_of_two() { Some(core) } else { self.place(core, 1 << from, units) }
    }

    /// Finds the place of a run around the core of a free block, which has `size` units and starts at `block`. If the
    /// free units on one side of the block are too few for a run of their own, the run uses as many of them as
    /// possible.
    fn place(&self, block: u64, size: u64, units: u64) -> Option<u64> {
        let rest = units - (1 << units.ilog2());
        let grain = 1 << units.trailing_zeros();
        let (before, after) =
            (self.free_before(block, units, grain), self.free_after(block + size, units, grain));
        let (before_used, after_used) = (before.min(rest), after.min(rest));
        if before_used + size + after_used < units {
            return None;
        }
        if before < units {
            return Some(block - before_used);
        }
        Some(if after < units { block + size + after_used - units } else { block })
    }

    /// Returns how many of the `most` units before `unit` are free and adjacent, in blocks of `grain` units.
    fn free_before(&self, unit: u64, most: u64, grain: u64) -> u64 {
        let is_free = |free: &u64| unit >= free + grain && self.is_free(unit - free - grain, grain.ilog2());
        (0..most).step_by(grain as usize).take_while(is_free).count() as u64 * grain
    }

    /// Returns how many of the `most` units from `unit` on are free and adjacent, in blocks of `grain` units.
    fn free_after(&self, unit: u64, most: u64, grain: u64) -> u64 {
        let is_free = |free: &u64| self.is_free(unit + free, grain.ilog2());
        (0..most).step_by(grain as usize).take_while(is_free).count() as u64 * grain
    }

    /// Whether the block of this order at `unit` is free.
    fn is_free(&self, unit: u64, order: u32) -> bool {
        self.free_order(unit, order).is_some()
    }

    /// Takes the block of this order at `unit`, which is free or a part of a free block. The rest of that block stays
    /// free.
    fn take_piece(&mut self, unit: u64, order: u32) {
        let from = self.free_order(unit, order).expect("the block is free");
        self.remove(from, unit >> from);
        for order in (order..from).rev() {
            self.insert(order, (unit >> order) ^ 1);
        }
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

    /// Frees a block, merged with its buddy if that is free, and so on.
    fn free_piece(&mut self, unit: u64, mut order: u32) {
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

/// Whether a run of `units` units may start at `unit`: its core is aligned.
pub(super) fn is_place(unit: u64, units: u64) -> bool {
    let core = 1 << units.ilog2();
    let grain = 1 << units.trailing_zeros();
    unit.is_multiple_of(grain) && unit.next_multiple_of(core) + core <= unit + units
}

/// Cuts a run of units into the largest aligned blocks: each block's first unit and order.
fn pieces(unit: u64, units: u64) -> impl Iterator<Item = (u64, u32)> {
    let (mut at, mut rest) = (unit, units);
    std::iter::from_fn(move || {
        let order = rest.checked_ilog2()?.min(at.trailing_zeros());
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

    /// Returns the first number in the set that is at least `from`.
    fn next(&self, from: u64) -> Option<u64> {
        let mut at = from;
        for (height, level) in self.levels.iter().enumerate() {
            let later = level.get((at / 64) as usize)? & (u64::MAX << (at % 64));
            if later != 0 {
                let mut found = at / 64 * 64 + u64::from(later.trailing_zeros());
                for below in self.levels[..height].iter().rev() {
                    found = found * 64 + u64::from(below[found as usize].trailing_zeros());
                }
                return Some(found);
            }
            at = at / 64 + 1;
        }
        None
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
                let from = draws.below(len + 2);
                assert_eq!(bitmap.next(from), model.range(from..).next().copied());
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
            let blocks: u64 = buddy.orders.iter().map(|bitmap| bitmap.set).sum();
            assert_eq!(blocks, u64::from(units.count_ones()));
            assert_eq!(buddy.largest(), 1 << units.ilog2());
        }
    }

    #[test]
    fn freed_blocks_merge_in_any_order() {
        let mut draws = Draws(2);
        for units in [1, 2, 13, 64, 100, 127, 128] {
            let mut buddy = Buddy::new(units);
            let mut taken: Vec<u64> = std::iter::from_fn(|| buddy.take(1)).collect();
            // The smallest free block comes first, and within it the lowest address.
            let pieces: Vec<(u64, u32)> = pieces(0, units).collect();
            let expected = pieces.iter().rev().flat_map(|&(at, order)| at..at + (1 << order));
            assert_eq!(taken, expected.collect::<Vec<_>>());
            assert_eq!((buddy.units(), buddy.largest()), (0, 0));
            draws.shuffle(&mut taken);
            for unit in taken {
                buddy.free(unit, 1);
            }
            assert_eq!((buddy.units(), buddy.largest()), (units, 1 << units.ilog2()));
        }
    }

    #[test]
    fn runs_lie_close_together() {
        // An area of 304 units is filled from its end, because its last block is the smallest.
        let cases =
            [(256, 3, 255), (256, 5, 210), (256, 6, 252), (256, 7, 252), (256, 20, 200), (256, 28, 252)];
        for (area, units, used) in cases.into_iter().chain([(304, 3, 303), (304, 5, 250), (304, 7, 301)]) {
            let mut buddy = Buddy::new(area);
            let taken: Vec<u64> = std::iter::from_fn(|| buddy.take(units)).collect();
            assert!(taken.iter().all(|&unit| is_place(unit, units)), "{units}: {taken:?}");
            assert_eq!(area - buddy.units(), taken.len() as u64 * units);
            assert_eq!(taken.len() as u64 * units, used, "{units}: {taken:?}");
            // A freed run makes room for a run of this size, in any state of its neighbourhood.
            for unit in taken {
                buddy.free(unit, units);
                assert!(buddy.take(units).is_some(), "{units} at {unit}");
            }
        }
    }

    #[test]
    fn a_run_is_taken_at_its_place_or_not_at_all() {
        let mut buddy = Buddy::new(16);
        assert!(buddy.take_at(6, 2) && !buddy.take_at(6, 1) && !buddy.take_at(7, 3) && !buddy.take_at(3, 5));
        assert_eq!(buddy.units(), 14);
        assert!(buddy.take_at(3, 3) && buddy.take_at(8, 7));
        assert_eq!(
            (buddy.units(), buddy.take(3), buddy.take(1), buddy.take(1)),
            (4, Some(0), Some(15), None)
        );
    }

    #[test]
    #[should_panic(expected = "a block is freed once")]
    fn a_block_is_not_freed_twice() {
        let mut buddy = Buddy::new(16);
        let unit = buddy.take(2).expect("the area is free");
        buddy.free(unit, 2);
        buddy.free(unit, 2);
    }
}

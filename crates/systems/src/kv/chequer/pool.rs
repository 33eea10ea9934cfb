//! The memory pool of Chequer's server: blocks for values, cut from one contiguous area that is registered once.
//!
//! A block's size follows from the number of bytes that it was taken for: [`block_size`] rounds this number up to a
//! size class. There are four classes for each doubling, so a block of more than 128 bytes wastes less than a quarter
//! of the bytes that it was taken for. Smaller blocks are multiples of [`UNIT`].
//!
//! `take` looks for a block in this order:
//! 1. *The fast cache*: for each class, a stack of freed blocks.
//! 2. *The mixed cache*: the blocks for which the fast cache had no room. A block of the next class serves, too, if it
//!    is at most a quarter larger: it is cut to size.
//! 3. `buddy`: a buddy allocator of the whole area.
//!
//! If the buddy allocator has no block, the mixed cache and then the fast cache are emptied into it, which merges their
//! blocks with their neighbours. If that does not help, the area is full.
//!
//! A released block first goes into *quarantine*: a client may be READing the value that the block had. The checksum of
//! a value detects a reused block, but the client must then start again. The quarantine makes that rare.
//!
//! The caches hold at most a quarter of the bytes of the blocks in use, so they shrink with the pool's content. So
//! [`Stat::overhead`] is at most 1.25 times the size of the blocks in use, divided by the bytes that they were taken
//! for. That is less than 1.85 if all values have 64 bytes or more.
//!
//! The paper gives no sizes, limits or bounds: they are choices of this code.
//!
//! Invariants:
//! * Each unit of the area belongs to exactly one of: a block in use, the quarantine, the fast cache, the mixed cache,
//!   a free block of the buddy allocator.
//! * A block contains an aligned block of the largest power of two that fits. `buddy` says why.
//! * A block leaves the quarantine only after its time, even if the area is full.
//! * Equal calls have equal results: the pool draws no random numbers and reads no clock.
//!
//! Each call takes a number of steps that is bounded by the number of orders, with two exceptions. A call that finds
//! the area full empties the caches and the due part of the quarantine. A release of a block in use may have to move
//! blocks out of the caches. Both are paid for by the calls that put these blocks there.

mod buddy;

use buddy::Buddy;
use std::collections::VecDeque;
use std::time::Duration;

/// Size of the smallest block. All blocks consist of units.
pub const UNIT: u64 = 32;

/// Length of the longest content of a block: a value of 1 MiB, a key of 4 KiB, and 16 bytes for what the table stores
/// beside them.
pub const LEN_MAX: u64 = (1 << 20) + (4 << 10) + 16;

/// Time for which a released block is not handed out again. A client READs a value at most one round trip after it has
/// READ the value's address. That takes microseconds on RDMA, and less than 10 ms on a socket that is not overloaded. A
/// client that is slower detects the reuse by the checksum.
pub const QUARANTINE: Duration = Duration::from_millis(10);

/// Maximum number of blocks that one call takes out of the quarantine, unless the area is full.
const DUE_MAX: usize = 8;

/// Maximum number of blocks of one class in the fast cache.
const FAST_BLOCKS_MAX: usize = 64;
/// The fast cache holds at most this share of the bytes in use: 1 of 8.
const FAST_SHARE: u64 = 8;
/// Maximum number of blocks in the mixed cache. It bounds the time for which a call that finds the area full holds the
/// caller's lock.
const MIXED_BLOCKS_MAX: u64 = 16_384;
/// The mixed cache holds at most this share of the bytes in use: 1 of 8.
const MIXED_SHARE: u64 = 8;
/// The mixed cache holds at most this share of the area: 1 of 16.
const MIXED_AREA_SHARE: u64 = 16;

/// Number of size classes.
const CLASSES: usize = class_of(LEN_MAX) + 1;
const _: () = assert!(CLASSES <= 64, "a word has a bit for each class");

/// A block: its first address, and the number of bytes that it was taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Address of the first byte.
    pub at: u64,
    /// Number of bytes that the block was taken for. The block has [`block_size`] bytes.
    pub len: u64,
}

/// Reason why [`Pool::claim`] or [`Pool::release`] refuses a block. No call of [`Pool::take`] has returned such a
/// block, another claimed block overlaps it, or it was released before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimError {
    /// No block has this length.
    Length,
    /// A part of the block is outside the area.
    Outside,
    /// No block of this length starts at this address.
    Misaligned,
    /// A part of the block is in use.
    Overlaps,
    /// No block of this length is in use at this address.
    NotInUse,
}

/// State of a pool. All numbers of bytes are those of whole blocks, except `live_bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Size of the area.
    pub area_bytes: u64,
    /// Number of bytes that the blocks in use were taken for.
    pub live_bytes: u64,
    /// Bytes of the blocks in use.
    pub live_block_bytes: u64,
    /// Number of blocks in use.
    pub live_blocks: u64,
    /// Bytes in quarantine.
    pub quarantine_bytes: u64,
    /// Number of blocks in quarantine.
    pub quarantine_blocks: u64,
    /// Bytes in the fast cache.
    pub fast_bytes: u64,
    /// Bytes in the mixed cache.
    pub mixed_bytes: u64,
    /// Free bytes in the buddy allocator.
    pub free_bytes: u64,
    /// Size of the buddy allocator's largest free block, a power of two.
    pub largest_free_bytes: u64,
    /// Number of blocks that were taken from the fast cache.
    pub fast_takes: u64,
    /// Number of blocks that were taken from the mixed cache.
    pub mixed_takes: u64,
    /// Number of blocks that were taken from the buddy allocator.
    pub buddy_takes: u64,
    /// Number of times that the area had no block.
    pub failed_takes: u64,
}

impl Stat {
    /// Adds the state of another pool.
    pub fn add(&mut self, other: &Stat) {
        self.area_bytes += other.area_bytes;
        self.live_bytes += other.live_bytes;
        self.live_block_bytes += other.live_block_bytes;
        self.live_blocks += other.live_blocks;
        self.quarantine_bytes += other.quarantine_bytes;
        self.quarantine_blocks += other.quarantine_blocks;
        self.fast_bytes += other.fast_bytes;
        self.mixed_bytes += other.mixed_bytes;
        self.free_bytes += other.free_bytes;
        self.fast_takes += other.fast_takes;
        self.mixed_takes += other.mixed_takes;
        self.buddy_takes += other.buddy_takes;
        self.failed_takes += other.failed_takes;
        self.largest_free_bytes = self.largest_free_bytes.max(other.largest_free_bytes);
    }

    /// The numbers with their names, for an operator.
    #[must_use]
    pub fn rows(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("pool_area_bytes", self.area_bytes),
            ("pool_live_bytes", self.live_bytes),
            ("pool_live_block_bytes", self.live_block_bytes),
            ("pool_live_blocks", self.live_blocks),
            ("pool_quarantine_bytes", self.quarantine_bytes),
            ("pool_quarantine_blocks", self.quarantine_blocks),
            ("pool_fast_bytes", self.fast_bytes),
            ("pool_mixed_bytes", self.mixed_bytes),
            ("pool_free_bytes", self.free_bytes),
            ("pool_largest_free_bytes", self.largest_free_bytes),
            ("pool_fast_takes", self.fast_takes),
            ("pool_mixed_takes", self.mixed_takes),
            ("pool_buddy_takes", self.buddy_takes),
            ("pool_failed_takes", self.failed_takes),
        ]
    }

    /// Fragmentation of the free memory, 0 to 1: the share of the buddy allocator's free bytes outside its largest free
    /// block. An empty area whose size is no power of two has a fragmentation above 0, because it is not one block.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        match self.free_bytes {
            0 => 0.0,
            free => 1.0 - self.largest_free_bytes as f64 / free as f64,
        }
    }

    /// Bytes that the pool needs for each byte in use: the area without the buddy allocator's free bytes and without
    /// the quarantine, divided by `live_bytes`. At least 1, and 1 if no block is in use.
    #[must_use]
    pub fn overhead(&self) -> f64 {
        match self.live_bytes {
            0 => 1.0,
            live => (self.area_bytes - self.free_bytes - self.quarantine_bytes) as f64 / live as f64,
        }
    }
}

/// Returns the size of a block for `len` bytes.
///
/// # Panics
/// No block has this length: it is 0 or above [`LEN_MAX`].
#[must_use]
pub fn block_size(len: u64) -> u64 {
    assert!((1..=LEN_MAX).contains(&len), "a block holds 1 to {LEN_MAX} bytes, not {len}");
    units_of(class_of(len)) * UNIT
}

/// A memory pool. The caller has a lock on it.
pub struct Pool {
    /// The area's first address.
    at: u64,
    /// Size of the area.
    units: u64,
    buddy: Buddy,
    used: Used,
    fast: Shelf,
    mixed: Shelf,
    /// Released blocks, the oldest first.
    quarantine: VecDeque<Released>,
    quarantine_units: u64,
    live_bytes: u64,
    live_units: u64,
    live_blocks: u64,
    fast_takes: u64,
    mixed_takes: u64,
    buddy_takes: u64,
    failed_takes: u64,
}

/// A block in quarantine.
struct Released {
    until: Duration,
    unit: u64,
    class: usize,
}

impl Pool {
    /// Creates a pool of the addresses `at..at + len`. All of them are free.
    ///
    /// # Panics
    /// `at` or `len` is no multiple of [`UNIT`], or `len` is 0.
    #[must_use]
    pub fn new(at: u64, len: u64) -> Pool {
        assert!(
            at.is_multiple_of(UNIT) && len.is_multiple_of(UNIT),
            "an area consists of units: {at}, {len}"
        );
        assert!(at.checked_add(len).is_some(), "an area has addresses: {at}, {len}");
        let units = len / UNIT;
        Pool {
            at,
            units,
            buddy: Buddy::new(units),
            used: Used::new(units),
            fast: Shelf::new(),
            mixed: Shelf::new(),
            quarantine: VecDeque::new(),
            quarantine_units: 0,
            live_bytes: 0,
            live_units: 0,
            live_blocks: 0,
            fast_takes: 0,
            mixed_takes: 0,
            buddy_takes: 0,
            failed_takes: 0,
        }
    }

    /// Takes a block for `len` bytes. `None` if the area has none: retry after [`QUARANTINE`], or release blocks.
    ///
    /// # Panics
    /// No block has this length: it is 0 or above [`LEN_MAX`].
    pub fn take(&mut self, len: u64, now: Duration) -> Option<Block> {
        assert!((1..=LEN_MAX).contains(&len), "a block holds 1 to {LEN_MAX} bytes, not {len}");
        self.settle(now);
        let class = class_of(len);
        let found =
            self.take_fast(class).or_else(|| self.take_mixed(class)).or_else(|| self.take_buddy(class));
        let Some(unit) = found.or_else(|| self.take_scarce(class, now)) else {
            self.failed_takes += 1;
            return None;
        };
        self.live(unit, len, class);
        Some(Block { at: self.at + unit * UNIT, len })
    }

    /// Puts a block that was taken or claimed into quarantine.
    ///
    /// # Errors
    /// The block is not in use. Nothing was changed: the caller has read its place in damaged memory.
    pub fn release(&mut self, block: Block, now: Duration) -> Result<(), ClaimError> {
        let (unit, class) = self.locate(block)?;
        self.dead(unit, block.len, class)?;
        self.quarantine_units += units_of(class);
        self.quarantine.push_back(Released { until: now + QUARANTINE, unit, class });
        self.settle(now);
        Ok(())
    }

    /// Frees blocks in quarantine whose time is over, at most 8 of them, and returns how many were freed.
    /// [`Pool::take`] and [`Pool::release`] do the same.
    pub fn settle(&mut self, now: Duration) -> usize {
        let mut freed = 0;
        while freed < DUE_MAX
            && let Some((unit, class)) = self.due(now)
        {
            self.fast.push(unit, class);
            if self.fast.stacks[class].len() > FAST_BLOCKS_MAX {
                let oldest = self.fast.pop_oldest(class);
                self.mixed.push(oldest, class);
            }
            freed += 1;
        }
        self.trim();
        freed
    }

    /// Marks a block as in use, when a pool is built again from the table that survived a restart. The caller claims
    /// all blocks before it takes the first one.
    ///
    /// # Errors
    /// The pool cannot have handed out this block. The table is damaged here.
    pub fn claim(&mut self, block: Block) -> Result<(), ClaimError> {
        let (unit, class) = self.locate(block)?;
        if !self.buddy.take_at(unit, units_of(class)) {
            return Err(ClaimError::Overlaps);
        }
        self.live(unit, block.len, class);
        Ok(())
    }

    /// Whether the pool can hand out a block of this length at this place.
    #[must_use]
    pub fn has_place(&self, block: Block) -> bool {
        self.locate(block).is_ok()
    }

    /// Whether two blocks have a unit of the area in common. A block that the pool cannot have handed out has none.
    #[must_use]
    pub fn overlap(&self, one: Block, other: Block) -> bool {
        let units = |block| self.locate(block).map(|(unit, class)| unit..unit + units_of(class));
        match (units(one), units(other)) {
            (Ok(one), Ok(other)) => one.start < other.end && other.start < one.end,
            _ => false,
        }
    }

    /// Frees a claimed block at once: no client reads it.
    ///
    /// # Errors
    /// The block is not in use. Nothing was changed.
    pub fn vacate(&mut self, block: Block) -> Result<(), ClaimError> {
        let (unit, class) = self.locate(block)?;
        self.dead(unit, block.len, class)?;
        self.buddy.free(unit, units_of(class));
        Ok(())
    }

    /// Returns the pool's state.
    #[must_use]
    pub fn stat(&self) -> Stat {
        Stat {
            area_bytes: self.units * UNIT,
            live_bytes: self.live_bytes,
            live_block_bytes: self.live_units * UNIT,
            live_blocks: self.live_blocks,
            quarantine_bytes: self.quarantine_units * UNIT,
            quarantine_blocks: self.quarantine.len() as u64,
            fast_bytes: self.fast.units * UNIT,
            mixed_bytes: self.mixed.units * UNIT,
            free_bytes: self.buddy.units() * UNIT,
            largest_free_bytes: self.buddy.largest() * UNIT,
            fast_takes: self.fast_takes,
            mixed_takes: self.mixed_takes,
            buddy_takes: self.buddy_takes,
            failed_takes: self.failed_takes,
        }
    }

    fn take_fast(&mut self, class: usize) -> Option<u64> {
        let unit = self.fast.pop(class)?;
        self.fast_takes += 1;
        Some(unit)
    }

    fn take_mixed(&mut self, class: usize) -> Option<u64> {
        let unit = self.mixed.pop(class).or_else(|| self.cut_mixed(class))?;
        self.mixed_takes += 1;
        Some(unit)
    }

    /// Takes a block of the next class if that is at most a quarter larger, and frees the rest of it.
    fn cut_mixed(&mut self, class: usize) -> Option<u64> {
        let (wanted, larger) = (units_of(class), units_of(class + 1));
        if class + 1 == CLASSES || larger * 4 > wanted * 5 {
            return None;
        }
        let (unit, rest) = (self.mixed.pop(class + 1)?, larger - wanted);
        // A block of the smaller class may start at one of the two ends.
        let (kept, cut) =
            if buddy::is_place(unit, wanted) { (unit, unit + wanted) } else { (unit + rest, unit) };
        self.buddy.free(cut, rest);
        Some(kept)
    }

    fn take_buddy(&mut self, class: usize) -> Option<u64> {
        let unit = self.buddy.take(units_of(class))?;
        self.buddy_takes += 1;
        Some(unit)
    }

    /// Takes a block when neither the caches nor the buddy allocator have one of this class.
    fn take_scarce(&mut self, class: usize, now: Duration) -> Option<u64> {
        while let Some((unit, class)) = self.due(now) {
            self.buddy.free(unit, units_of(class));
        }
        self.mixed.empty_into(&mut self.buddy);
        self.take_buddy(class).or_else(|| {
            self.fast.empty_into(&mut self.buddy);
            self.take_buddy(class)
        })
    }

    /// Removes the oldest block from the quarantine if its time is over.
    fn due(&mut self, now: Duration) -> Option<(u64, usize)> {
        if self.quarantine.front()?.until > now {
            return None;
        }
        let released = self.quarantine.pop_front()?;
        self.quarantine_units -= units_of(released.class);
        Some((released.unit, released.class))
    }

    /// Moves blocks from the fast cache to the mixed cache, and from there to the buddy allocator, until both are
    /// within their limits. The class that has the most bytes loses its oldest block.
    fn trim(&mut self) {
        while self.fast.units > self.live_units / FAST_SHARE {
            let class = self.fast.largest();
            let unit = self.fast.pop_oldest(class);
            self.mixed.push(unit, class);
        }
        let units_max = (self.live_units / MIXED_SHARE).min(self.units / MIXED_AREA_SHARE);
        while self.mixed.units > units_max || self.mixed.blocks > MIXED_BLOCKS_MAX {
            let class = self.mixed.largest();
            let unit = self.mixed.pop_oldest(class);
            self.buddy.free(unit, units_of(class));
        }
    }

    fn live(&mut self, unit: u64, len: u64, class: usize) {
        self.used.insert(unit, units_of(class));
        self.live_bytes += len;
        self.live_units += units_of(class);
        self.live_blocks += 1;
    }

    fn dead(&mut self, unit: u64, len: u64, class: usize) -> Result<(), ClaimError> {
        if !self.used.remove(unit, units_of(class)) {
            return Err(ClaimError::NotInUse);
        }
        // A record may have another length of the same class.
        self.live_bytes = self.live_bytes.saturating_sub(len);
        self.live_units -= units_of(class);
        self.live_blocks -= 1;
        Ok(())
    }

    /// Returns the first unit and the class of a block.
    fn locate(&self, block: Block) -> Result<(u64, usize), ClaimError> {
        if !(1..=LEN_MAX).contains(&block.len) {
            return Err(ClaimError::Length);
        }
        let class = class_of(block.len);
        let offset = block.at.checked_sub(self.at).ok_or(ClaimError::Outside)?;
        if offset >= self.units * UNIT || units_of(class) > self.units - offset / UNIT {
            return Err(ClaimError::Outside);
        }
        if !offset.is_multiple_of(UNIT) || !buddy::is_place(offset / UNIT, units_of(class)) {
            return Err(ClaimError::Misaligned);
        }
        Ok((offset / UNIT, class))
    }
}

/// The first and the last unit of each block in use, one bit for each unit: 4 KiB each for a MiB of the area.
/// They show which blocks may be released: a block's place is read from memory that clients can write.
struct Used {
    firsts: Vec<u64>,
    lasts: Vec<u64>,
}

impl Used {
    fn new(units: u64) -> Used {
        let words = units.div_ceil(64) as usize;
        Used { firsts: vec![0; words], lasts: vec![0; words] }
    }

    fn insert(&mut self, unit: u64, units: u64) {
        let last = unit + units - 1;
        self.firsts[(unit / 64) as usize] |= 1 << (unit % 64);
        self.lasts[(last / 64) as usize] |= 1 << (last % 64);
    }

    /// Removes a block. Returns false and changes nothing if there is no such block.
    fn remove(&mut self, unit: u64, units: u64) -> bool {
        let last = unit + units - 1;
        let has = |bits: &[u64], at: u64| bits[(at / 64) as usize] >> (at % 64) & 1 == 1;
        // Blocks do not overlap, so the first end behind the start is that of the block.
        let end = (unit / 64..=last / 64).find_map(|word| {
            let from = if word == unit / 64 { u64::MAX << (unit % 64) } else { u64::MAX };
            let ends = self.lasts[word as usize] & from;
            (ends != 0).then(|| word * 64 + u64::from(ends.trailing_zeros()))
        });
        let is_used = has(&self.firsts, unit) && end == Some(last);
        if is_used {
            self.firsts[(unit / 64) as usize] &= !(1 << (unit % 64));
            self.lasts[(last / 64) as usize] &= !(1 << (last % 64));
        }
        is_used
    }
}

/// Free blocks of all classes. Each class has a stack, whose oldest blocks can be removed from below.
struct Shelf {
    stacks: Vec<VecDeque<u64>>,
    /// The classes that have a block, one bit each.
    filled: u64,
    units: u64,
    blocks: u64,
}

impl Shelf {
    fn new() -> Shelf {
        Shelf { stacks: vec![VecDeque::new(); CLASSES], filled: 0, units: 0, blocks: 0 }
    }

    fn push(&mut self, unit: u64, class: usize) {
        self.stacks[class].push_back(unit);
        self.filled |= 1 << class;
        self.units += units_of(class);
        self.blocks += 1;
    }

    fn pop(&mut self, class: usize) -> Option<u64> {
        let unit = self.stacks[class].pop_back()?;
        self.popped(class);
        Some(unit)
    }

    fn pop_oldest(&mut self, class: usize) -> u64 {
        let unit = self.stacks[class].pop_front().expect("the class has a block");
        self.popped(class);
        unit
    }

    fn popped(&mut self, class: usize) {
        if self.stacks[class].is_empty() {
            self.filled &= !(1 << class);
        }
        self.units -= units_of(class);
        self.blocks -= 1;
    }

    /// Returns the class that has the most bytes.
    fn largest(&self) -> usize {
        let mut classes = self.filled;
        let (mut largest, mut units) = (0, 0);
        while classes != 0 {
            let class = classes.trailing_zeros() as usize;
            classes &= classes - 1;
            let of_class = self.stacks[class].len() as u64 * units_of(class);
            if of_class > units {
                (largest, units) = (class, of_class);
            }
        }
        largest
    }

    fn empty_into(&mut self, buddy: &mut Buddy) {
        while self.filled != 0 {
            let class = self.filled.trailing_zeros() as usize;
            let unit = self.pop_oldest(class);
            buddy.free(unit, units_of(class));
        }
    }
}

/// Returns the size class of a content of `len` bytes.
const fn class_of(len: u64) -> usize {
    let last = (len - 1) / UNIT;
    if last < 4 {
        return last as usize;
    }
    let shift = last.ilog2() - 2;
    4 * shift as usize + (last >> shift) as usize
}

/// Returns the number of units of a block of this class: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
const fn units_of(class: usize) -> u64 {
    if class < 4 {
        return class as u64 + 1;
    }
    (class as u64 % 4 + 5) << (class / 4 - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);
    const LATER: Duration = Duration::from_millis(1_010);

    #[test]
    fn classes_are_four_for_each_doubling() {
        let sizes: Vec<u64> = (0..14).map(|class| units_of(class) * UNIT).collect();
        assert_eq!(sizes, [32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768]);
        assert_eq!(units_of(CLASSES - 1) * UNIT, 5 << 18);
        for len in 1..=LEN_MAX {
            let (class, size) = (class_of(len), block_size(len));
            assert!(size >= len && (class == 0 || units_of(class - 1) * UNIT < len), "{len}: {size}");
            assert!(size - len < UNIT || (size - len) * 4 < len, "{len}: {size}");
        }
    }

    #[test]
    fn each_level_serves_and_is_counted() {
        let mut pool = Pool::new(4096, 1 << 20);
        let kept: Vec<Block> = (0..1_500).map(|_| pool.take(256, NOW).expect("there is room")).collect();
        let counts = |pool: &Pool| {
            let stat = pool.stat();
            (stat.fast_takes, stat.mixed_takes, stat.buddy_takes, stat.failed_takes)
        };
        assert_eq!(counts(&pool), (0, 0, 1_500, 0));
        for block in &kept[..100] {
            pool.release(*block, NOW).expect("in use");
        }
        assert_eq!((pool.settle(NOW), pool.stat().quarantine_blocks), (0, 100));
        while pool.settle(LATER) > 0 {}
        let stat = pool.stat();
        assert_eq!((stat.fast_bytes, stat.mixed_bytes), (64 * 256, 36 * 256));
        // The newest block of the fast cache, then the newest of the mixed cache.
        for block in (36..100).rev().chain((0..36).rev()) {
            assert_eq!(pool.take(256, LATER), Some(kept[block]));
        }
        assert_eq!(counts(&pool), (64, 36, 1_500, 0));
    }

    #[test]
    fn the_mixed_cache_cuts_a_slightly_larger_block() {
        let mut pool = Pool::new(0, 1 << 20);
        let kept: Vec<Block> = (0..1_500).map(|_| pool.take(256, NOW).expect("there is room")).collect();
        for block in &kept[..100] {
            pool.release(*block, NOW).expect("in use");
        }
        while pool.settle(LATER) > 0 {}
        let free = pool.stat().free_bytes;
        // Of the mixed cache's 36 blocks, block 35 is the newest. 224 is the class below 256; 192 is too small for it.
        let cut = pool.take(224, LATER).expect("the mixed cache has a block");
        assert_eq!((cut.at, cut.len), (kept[35].at, 224));
        assert_eq!((pool.stat().mixed_takes, pool.stat().free_bytes), (1, free + 32));
        pool.take(192, LATER).expect("there is room");
        assert_eq!((pool.stat().mixed_takes, pool.stat().mixed_bytes), (1, 35 * 256));
        pool.release(cut, LATER).expect("in use");
        assert_eq!(pool.stat().quarantine_bytes, 224);
    }

    #[test]
    fn a_block_of_the_next_class_can_be_cut_at_one_of_its_ends() {
        for class in (0..CLASSES - 1).filter(|&class| units_of(class + 1) * 4 <= units_of(class) * 5) {
            let (wanted, larger) = (units_of(class), units_of(class + 1));
            for unit in (0..16 * larger).filter(|&unit| buddy::is_place(unit, larger)) {
                let ends = [unit, unit + larger - wanted];
                assert!(
                    ends.iter().any(|&end| buddy::is_place(end, wanted)),
                    "{larger} at {unit} to {wanted}"
                );
            }
        }
    }

    #[test]
    fn a_short_pool_empties_its_caches_but_not_the_quarantine() {
        let mut pool = Pool::new(0, 1 << 16);
        let mut kept: Vec<Block> = std::iter::from_fn(|| pool.take(64, NOW)).collect();
        assert_eq!((kept.len(), pool.stat().free_bytes, pool.stat().failed_takes), (1_024, 0, 1));
        for block in kept.drain(..64) {
            pool.release(block, NOW).expect("in use");
        }
        let early = LATER - Duration::from_nanos(1);
        assert_eq!((pool.take(4_096, early), pool.take(64, early)), (None, None));
        while pool.settle(LATER) > 0 {}
        assert_eq!((pool.stat().fast_bytes, pool.stat().quarantine_blocks), (4_096, 0));
        // The cached blocks are neighbours: merged, they make one block.
        assert_eq!(pool.take(4_096, LATER), Some(Block { at: 0, len: 4_096 }));
        assert_eq!((pool.stat().fast_bytes, pool.take(64, LATER)), (0, None));
    }

    #[test]
    fn a_full_pool_frees_all_that_is_due_at_once() {
        let mut pool = Pool::new(0, 1 << 16);
        let kept: Vec<Block> = std::iter::from_fn(|| pool.take(64, NOW)).collect();
        kept.iter().for_each(|block| pool.release(*block, NOW).expect("in use"));
        assert_eq!(pool.stat().quarantine_bytes, 1 << 16);
        assert_eq!(pool.take(1 << 16, LATER), Some(Block { at: 0, len: 1 << 16 }));
    }

    #[test]
    fn a_claim_is_refused_unless_a_take_can_have_returned_it() {
        let (at, area) = (1u64 << 20, 13 * UNIT);
        let claim =
            |pool: &mut Pool, offset: u64, len: u64| pool.claim(Block { at: at.wrapping_add(offset), len });
        let mut pool = Pool::new(at, area);
        let refused = [
            (0, 0, ClaimError::Length),
            (0, LEN_MAX + 1, ClaimError::Length),
            (0, u64::MAX, ClaimError::Length),
            (0u64.wrapping_sub(32), 32, ClaimError::Outside),
            (at.wrapping_neg(), 32, ClaimError::Outside),
            (u64::MAX - at, 32, ClaimError::Outside),
            (13 * UNIT, 1, ClaimError::Outside),
            (12 * UNIT, 33, ClaimError::Outside),
            (0, 13 * UNIT + 1, ClaimError::Outside),
            (1, 1, ClaimError::Misaligned),
            (UNIT, 33, ClaimError::Misaligned),
            (UNIT, 5 * UNIT, ClaimError::Misaligned),
            (2 * UNIT, 5 * UNIT, ClaimError::Misaligned),
        ];
        for (offset, len, error) in refused {
            assert_eq!(claim(&mut pool, offset, len), Err(error), "{offset} {len}");
        }
        assert_eq!(pool.stat(), Pool::new(at, area).stat(), "a refused claim changes nothing");
        assert_eq!(claim(&mut pool, 0, 5 * UNIT), Ok(()));
        assert_eq!(claim(&mut pool, 4 * UNIT, 1), Err(ClaimError::Overlaps));
        assert_eq!(claim(&mut pool, 4 * UNIT, 4 * UNIT), Err(ClaimError::Overlaps));
        assert_eq!(claim(&mut pool, 0, 8 * UNIT), Err(ClaimError::Overlaps));
        assert_eq!(claim(&mut pool, 6 * UNIT, 2 * UNIT), Ok(()));
        assert_eq!(claim(&mut pool, 12 * UNIT, UNIT), Ok(()));
        let stat = pool.stat();
        assert_eq!((stat.live_bytes, stat.live_blocks, stat.free_bytes), (8 * UNIT, 3, 5 * UNIT));
        assert_eq!(pool.take(4 * UNIT, NOW), Some(Block { at: at + 8 * UNIT, len: 4 * UNIT }));
        assert_eq!(pool.take(1, NOW), Some(Block { at: at + 5 * UNIT, len: 1 }));
        assert_eq!(pool.take(1, NOW), None);
    }

    #[test]
    fn only_a_block_in_use_is_released_and_only_once() {
        let mut pool = Pool::new(0, 64 * UNIT);
        let blocks: Vec<Block> =
            [40, 300, 40].map(|len| pool.take(len, NOW).expect("there is room")).to_vec();
        let before = pool.stat();
        let released = |pool: &mut Pool, at, len| pool.release(Block { at, len }, NOW);
        assert_eq!(released(&mut pool, 64 * UNIT, 1), Err(ClaimError::Outside));
        for block in &blocks {
            for len in [1, 200, 300, 64 * UNIT - block.at]
                .into_iter()
                .filter(|&len| len <= 64 * UNIT - block.at && block_size(len) != block_size(block.len))
            {
                assert!(released(&mut pool, block.at, len).is_err(), "{block:?} with {len} bytes");
            }
            assert!(
                released(&mut pool, block.at + UNIT, block.len).is_err(),
                "behind the start of {block:?}"
            );
        }
        assert_eq!(pool.stat(), before, "nothing was changed");
        for block in blocks {
            assert_eq!(pool.release(block, NOW), Ok(()));
            assert_eq!(pool.release(block, NOW), Err(ClaimError::NotInUse));
        }
        while pool.settle(LATER) > 0 {}
        assert_eq!(pool.stat().live_blocks, 0);
    }
}

//! The layout of a node's memory: its records, the owner of each segment, and the bytes that a key covers.
//!
//! ```text
//! 0          header    4 KiB   magic, version, size, incarnation, sleep, epoch
//! 4 KiB      regions   256 x 4 KiB   secret, granted segments, a list per size class       (lists)
//! +1 MiB     sessions  1024 x 256 B  turn, retired buffers, counters                       (session)
//! +256 KiB   catalog   2 x 256 KiB   the stores, in one of two copies (written by the node, read at a restart)
//! +512 KiB   segments  32 B each     region, class, number of buffers used                (segment)
//! next 2 MiB data      1 MiB segments: either a table's, or buffers of one class preceded by their states
//! ```
//!
//! A key covers only the data of tables and buffers. A process that runs chains takes and frees buffers by the
//! lock-free steps of [`lists`]. Only the node grants segments and frees retired buffers. Where the node permits it,
//! sessions take buffers that they retired themselves ([`reuse`]).
//!
//! Invariant: any process may die between any two accesses of a step. The next process that finds the step unfinished
//! completes it. There are no locks, so no process can die while it holds one.
//! Invariant: a word changes by compare-and-swap only, and no word returns to an earlier value while a process may
//! still compare with that value. For this purpose, heads, segment entries and buffer states contain a counter of their
//! changes.

pub mod class;
pub mod lists;
pub mod reuse;
pub mod segment;
pub mod session;
pub mod state;

use crate::key::Key;
use crate::memory::{Memory, Width};
use crate::rights::Rights;
use class::Class;
use segment::{Segment, Use};

/// Size of a segment in bytes: the unit that is granted, taken back and counted against a quota.
pub const SEGMENT_SIZE: u64 = 1 << 20;
/// Number of regions of one node, including the unused region 0.
pub const REGIONS_MAX: u32 = 256;
/// Maximum number of concurrent sessions of one node.
pub const SESSIONS_MAX: u32 = 1024;

/// Size of one of the two copies of the catalog, in bytes.
pub const CATALOG_SIZE: u64 = 256 << 10;

const HEADER_SIZE: u64 = 4096;
const REGION_SIZE: u64 = 4096;
const REGIONS_AT: u64 = HEADER_SIZE;
const SESSIONS_AT: u64 = REGIONS_AT + REGIONS_MAX as u64 * REGION_SIZE;
const CATALOG_AT: u64 = SESSIONS_AT + SESSIONS_MAX as u64 * session::SLOT_SIZE;
const SEGMENTS_AT: u64 = CATALOG_AT + 2 * CATALOG_SIZE;
const DATA_ALIGN: u64 = 2 << 20;

/// Offsets of the words in the header of a node's memory, and the values of two of them.
pub mod header {
    /// `u64`: [`MAGIC`].
    pub const MAGIC_AT: u64 = 0;
    /// `u64`: [`VERSION`].
    pub const VERSION_AT: u64 = 8;
    /// `u64`: size of the whole memory, in bytes.
    pub const SIZE_AT: u64 = 16;
    /// `u64`: a random number, drawn when the memory was created.
    pub const INCARNATION_AT: u64 = 24;
    /// `u64`: the number of the next session, higher than every number used so far.
    pub const NEXT_SESSION_AT: u64 = 32;
    /// 16 bytes: the machine's boot id. The sessions' processes run under this boot.
    pub const BOOT_AT: u64 = 48;
    /// `u64`: nonzero while the node sleeps and wants to be woken when memory is freed or requested.
    pub const NODE_SLEEPS_AT: u64 = 64;
    /// `u64`: 1 if a process that is about to fill memory asks the system for huge pages.
    pub const TRANSPARENT_AT: u64 = 72;
    /// Start of a part of the header that is not used.
    pub(crate) const UNUSED_AT: u64 = 128;
    /// `u64`: the epoch, by which sessions know that a grace is over (`reuse`). On a cache line of its own.
    pub const EPOCH_AT: u64 = 1024;
    /// `u64`: not 0 if a chain has found no free buffer since the node last took all lists of retired buffers.
    pub const NEEDED_AT: u64 = 960;
    /// `u64`: number of slots, from the first one, that have been opened since the node started. On the epoch's line.
    pub const SLOTS_AT: u64 = 1032;
    /// "farside" and a zero byte, which identify a node's memory.
    pub const MAGIC: u64 = u64::from_le_bytes(*b"farside\0");
    /// Version of the layout. Raised whenever the meaning of a byte changes.
    pub const VERSION: u64 = 2;
}

/// Addresses of the parts of a memory of a given size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    size: u64,
    data_at: u64,
    segments: u32,
}

impl Geometry {
    /// Smallest memory that has a segment, in bytes.
    pub const SIZE_MIN: u64 = 8 << 20;
    /// Largest memory that one node serves, in bytes: addresses have 48 bits, segment numbers 20.
    pub const SIZE_MAX: u64 = 1 << 40;

    /// The geometry of a memory of `size` bytes. `None` if `size` is below [`Geometry::SIZE_MIN`], above
    /// [`Geometry::SIZE_MAX`] or not a multiple of [`SEGMENT_SIZE`].
    pub const fn of(size: u64) -> Option<Geometry> {
        if size < Geometry::SIZE_MIN || size > Geometry::SIZE_MAX || !size.is_multiple_of(SEGMENT_SIZE) {
            return None;
        }
        // The table is sized as if the whole memory were data, which wastes only a few entries.
        let table = size / SEGMENT_SIZE * segment::ENTRY_SIZE;
        let data_at = (SEGMENTS_AT + table).next_multiple_of(DATA_ALIGN);
        Some(Geometry { size, data_at, segments: ((size - data_at) / SEGMENT_SIZE) as u32 })
    }

    /// Size of the whole memory, in bytes.
    #[inline]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Number of segments.
    #[inline]
    pub const fn segments(&self) -> u32 {
        self.segments
    }

    /// Returns the address of the first byte of segment `index`.
    #[inline]
    pub const fn segment_at(&self, index: u32) -> u64 {
        self.data_at + index as u64 * SEGMENT_SIZE
    }

    /// The segment that contains `at`, if any does.
    #[inline]
    pub const fn segment_of(&self, at: u64) -> Option<u32> {
        let index = at.wrapping_sub(self.data_at) >> SEGMENT_SIZE.trailing_zeros();
        if index < self.segments as u64 { Some(index as u32) } else { None }
    }

    /// The address of a copy of the catalog, 0 or 1.
    pub const fn catalog_at(copy: u64) -> u64 {
        CATALOG_AT + (copy & 1) * CATALOG_SIZE
    }

    pub(crate) const fn segment_entry_at(&self, index: u32) -> u64 {
        SEGMENTS_AT + index as u64 * segment::ENTRY_SIZE
    }

    pub(crate) const fn region_at(region: u32) -> u64 {
        REGIONS_AT + region as u64 * REGION_SIZE
    }

    pub(crate) const fn session_at(slot: u32) -> u64 {
        SESSIONS_AT + slot as u64 * session::SLOT_SIZE
    }

    /// The buffer that contains `at`, in segment `index` of class `class`. `None` if the segment is a table or only
    /// granted, or if `at` is in the states that precede the buffers.
    #[inline(always)]
    pub(crate) fn buffer_of(&self, index: u32, class: u8, at: u64) -> Option<Buffer> {
        let class = Class::get(class)?;
        let ordinal = class.ordinal(self.offset_in_segment(at))?;
        Some(self.buffer(index, class, ordinal))
    }

    /// Offset of `at` in its segment. `at` must be in a segment.
    #[inline(always)]
    const fn offset_in_segment(&self, at: u64) -> u64 {
        (at - self.data_at) & (SEGMENT_SIZE - 1)
    }

    /// Buffer number `ordinal` of segment `index`, whose buffers have `class`.
    #[inline]
    pub(crate) fn buffer(&self, index: u32, class: &'static Class, ordinal: u32) -> Buffer {
        let base = self.segment_at(index);
        Buffer { at: base + class.offset(ordinal), state_at: base + u64::from(ordinal) * 16, class }
    }
}

/// One buffer: the addresses of its bytes and of its state.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Address of the buffer's first byte.
    pub at: u64,
    pub(crate) state_at: u64,
    /// Size class of the buffer.
    pub class: &'static Class,
}

impl Buffer {
    /// Address of the buffer's state.
    #[inline]
    pub const fn state_at(&self) -> u64 {
        self.state_at
    }
}

/// One node's memory with its layout. The methods are the steps that runners of chains and the node perform on it.
pub struct Arena<'m, M> {
    pub(crate) memory: &'m M,
}

impl<'m, M> Clone for Arena<'m, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<'m, M> Copy for Arena<'m, M> {}

impl<'m, M: Memory> Arena<'m, M> {
    /// Returns the arena in `memory`.
    #[inline]
    pub fn of(memory: &'m M) -> Arena<'m, M> {
        Arena { memory }
    }

    /// Returns the addresses of the memory's parts.
    #[inline(always)]
    pub fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    /// Implementation of [`Memory::admits`] for a memory without restricted keys: the region's secret gives all rights,
    /// any other secret none.
    #[inline(always)]
    pub fn admits(&self, key: Key) -> Result<Rights, M::Wait> {
        let region = key.region();
        if region == 0 || region >= REGIONS_MAX {
            return Ok(Rights::NONE);
        }
        let secret = self.memory.load(Geometry::region_at(region) + lists::SECRET_OFFSET, Width::W8)?;
        Ok(if key.opens(secret as u64) { Rights::ALL } else { Rights::NONE })
    }

    /// Implementation of [`Memory::reach`]: how many of the `len` bytes from `at` on belong to `region`.
    #[inline(always)]
    pub fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, M::Wait> {
        let geometry = self.geometry();
        let Some(index) = geometry.segment_of(at) else { return Ok(0) };
        let segment = self.memory.load(geometry.segment_entry_at(index), Width::W8)?;
        // No region has number 0, so a segment of "region 0" is not accessible. Without this check, the word of a
        // segment that was never granted, which is all zero, would read as class 0 below.
        if Segment::region_of(segment) != region || region == 0 {
            return Ok(0);
        }
        if Segment::is_table(segment) {
            let left = SEGMENT_SIZE - geometry.offset_in_segment(at);
            return if len <= left { Ok(len) } else { self.reach_in_table(region, index, at, len) };
        }
        // The class number of a segment that is free or only granted is not a class.
        let Some(class) = Class::get(Segment::class_of(segment)) else { return Ok(0) };
        Ok(class.left_of_buffer(geometry.offset_in_segment(at)).map_or(0, |left| len.min(left)))
    }

    /// [`Arena::reach`] for a range that extends beyond its segment: a table may span adjacent segments.
    #[inline(never)]
    fn reach_in_table(self, region: u32, index: u32, at: u64, len: u64) -> Result<u64, M::Wait> {
        let mut end = self.geometry().segment_at(index) + SEGMENT_SIZE;
        let mut next = index + 1;
        while end - at < len && next < self.geometry().segments {
            let segment = self.segment_owner(next)?;
            if segment.region != region || segment.usage != Use::Table {
                break;
            }
            end += SEGMENT_SIZE;
            next += 1;
        }
        Ok(len.min(end - at))
    }

    /// Loads only the region and the use of a segment: half of its entry's word suffices for [`Arena::reach`].
    #[inline(always)]
    fn segment_owner(&self, index: u32) -> Result<Segment, M::Wait> {
        let word = self.memory.load(self.geometry().segment_entry_at(index), Width::W8)?;
        Ok(Segment::unpack(word))
    }

    /// Returns the buffer that begins exactly at `at`, with its region; `None` if no buffer begins there.
    pub fn buffer_at(&self, at: u64) -> Result<Option<(u32, Buffer)>, M::Wait> {
        let Some(index) = self.geometry().segment_of(at) else { return Ok(None) };
        let segment = self.segment_owner(index)?;
        let Use::Buffers(class) = segment.usage else { return Ok(None) };
        let buffer = self.geometry().buffer_of(index, class, at).filter(|buffer| buffer.at == at);
        Ok(buffer.map(|buffer| (segment.region, buffer)))
    }
}

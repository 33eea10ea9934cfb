//! Slots and items in the mapping, and the fetch of an item through its slot.
//!
//! Invariant: a slot with a non-zero address points to a whole item within the mapping.
//! Invariant: at most a quarter of the slots are in use, so a probe always ends.

use std::io;

use rand_core::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_inline};

use super::Layout;
use super::mapping::Mapping;
use super::measure::shuffled;

/// Bytes of a key: the key's number, big-endian.
pub(super) type Key = [u8; KEY_SIZE];

const SLOTS_PER_RECORD: u64 = 4;
const RECORDS_MAX: u64 = 1 << 32;
const VALUE_SIZE_MAX: u32 = 16 << 20;

/// Size of a slot in bytes: | address u64 | bound u32 | tag u32 |, in the host's byte order; all zero if empty
const SLOT_SIZE: usize = 16;
const BOUND: usize = 8;
const TAG: usize = 12;

/// Size of an item's header in bytes. Item: | generation u32 | key length u16 | kind u8 | 0 u8 | value length u32 | 0
/// u32 | key | value |
const HEADER_SIZE: usize = 16;
const KEY_LENGTH: usize = 4;
const VALUE_LENGTH: usize = 8;
const KEY_SIZE: usize = 8;
/// Offset in bytes of the value in its item.
pub(super) const VALUE: usize = HEADER_SIZE + KEY_SIZE;

/// Generation of an item that was written once, and tag of its slot.
const FIRST_GENERATION: u32 = 1;

const CACHE_LINE: usize = 64;
const SIZE_CLASS_MIN: usize = 64;

const _: () = assert!(SLOT_SIZE.is_power_of_two() && TAG + size_of::<u32>() == SLOT_SIZE);

/// Content of a slot: the address and the length of an item.
#[derive(Clone, Copy)]
struct Slot {
    address: u64,
    bound: u32,
}

/// The filled mapping: first the slots, then the items.
pub(super) struct Table {
    memory: Mapping,
    layout: Layout,
    slot_count: usize,
    hash: Hash,
    mean_probes: f64,
}

impl Table {
    pub(super) fn build(layout: Layout) -> io::Result<Self> {
        let slot_count = check(&layout)?;
        let item_size = VALUE + layout.value_size as usize;
        let stride = size_class(item_size);
        let items_at = slot_count * SLOT_SIZE;
        let len = (layout.records as usize).checked_mul(stride).and_then(|items| items.checked_add(items_at));
        let memory = Mapping::create(len.ok_or(io::ErrorKind::OutOfMemory)?, layout.huge_pages)?;
        let hash = Hash::new(&layout, slot_count);
        let mut table = Self { memory, layout, slot_count, hash, mean_probes: 0.0 };

        let mut random = Xoshiro256PlusPlus::seed_from_u64(layout.seed);
        let mut probes = 0;
        for (number, place) in shuffled(layout.records, &mut random).into_iter().enumerate() {
            let at = items_at + place as usize * stride;
            table.write_item(at, number as u64);
            probes += table.insert(key(number as u64), Slot { address: at as u64, bound: item_size as u32 });
        }
        table.mean_probes = probes as f64 / layout.records as f64;
        Ok(table)
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn page_size(&self) -> usize {
        self.memory.page_size()
    }

    /// Returns the number of slots that a GET probes, averaged over all keys.
    pub(super) fn mean_probes(&self) -> f64 {
        self.mean_probes
    }

    /// Returns the fraction of slots in use.
    pub(super) fn load_factor(&self) -> f64 {
        self.layout.records as f64 / self.slot_count as f64
    }

    pub(super) fn item_size(&self) -> usize {
        VALUE + self.layout.value_size as usize
    }

    pub(super) fn get<'out>(&self, number: u64, out: &'out mut Vec<u8>) -> Option<&'out [u8]> {
        out.resize(self.item_size(), 0);
        let key = key(number);
        self.fetch(&key, self.home(&key), out).then(|| &out[VALUE..])
    }

    /// Returns the index of the first slot of `key`.
    #[inline(always)]
    pub(super) fn home(&self, key: &Key) -> usize {
        self.hash.of(key) as usize & (self.slot_count - 1)
    }

    /// Copies the item of `key` into `out`, probing from the slot `index` on. Returns false if the key is absent.
    #[inline(always)]
    pub(super) fn fetch(&self, key: &Key, mut index: usize, out: &mut [u8]) -> bool {
        loop {
            let slot = self.slot(index);
            if slot.address == 0 {
                return false;
            }
            let item = self.item(slot);
            if holds(item, key) {
                out[..item.len()].copy_from_slice(item);
                return true;
            }
            index = (index + 1) & (self.slot_count - 1);
        }
    }

    /// Prefetches the slot with this index.
    #[inline(always)]
    pub(super) fn prefetch_slot(&self, index: usize) {
        prefetch(self.memory.bytes().as_ptr().wrapping_add(index * SLOT_SIZE));
    }

    /// Prefetches every cache line of the item to which the slot with this index points.
    #[inline(always)]
    pub(super) fn prefetch_item(&self, index: usize) {
        let slot = self.slot(index);
        let first = slot.address as usize & !(CACHE_LINE - 1);
        let end = slot.address as usize + slot.bound as usize;
        for line in (first..end).step_by(CACHE_LINE) {
            prefetch(self.memory.bytes().as_ptr().wrapping_add(line));
        }
    }

    #[inline(always)]
    fn slot(&self, index: usize) -> Slot {
        debug_assert!(index < self.slot_count);
        // SAFETY: callers mask `index` with `slot_count - 1`, and `build` put `slot_count` slots at the front.
        let bytes = unsafe { self.memory.bytes().get_unchecked(index * SLOT_SIZE..(index + 1) * SLOT_SIZE) };
        let word = u128::from_ne_bytes(bytes.try_into().expect("a slot is 16 bytes"));
        Slot { address: word as u64, bound: (word >> (8 * BOUND)) as u32 }
    }

    #[inline(always)]
    fn item(&self, slot: Slot) -> &[u8] {
        let at = slot.address as usize;
        // SAFETY: only `insert` writes slots, with the address and size of an item that `build` put into the mapping.
        // An empty slot (0, 0) is an empty range.
        unsafe { self.memory.bytes().get_unchecked(at..at + slot.bound as usize) }
    }

    fn write_item(&mut self, at: usize, number: u64) {
        let value_size = self.layout.value_size;
        let item = &mut self.memory.bytes_mut()[at..at + VALUE + value_size as usize];
        item[..KEY_LENGTH].copy_from_slice(&FIRST_GENERATION.to_ne_bytes());
        item[KEY_LENGTH..KEY_LENGTH + 2].copy_from_slice(&(KEY_SIZE as u16).to_ne_bytes());
        item[VALUE_LENGTH..VALUE_LENGTH + 4].copy_from_slice(&value_size.to_ne_bytes());
        item[HEADER_SIZE..VALUE].copy_from_slice(&key(number));
        fill(number, &mut item[VALUE..]);
    }

    /// Puts `slot` into the first empty slot on the path of `key`. Returns the number of slots probed.
    fn insert(&mut self, key: Key, slot: Slot) -> u64 {
        let mut index = self.home(&key);
        let mut probes = 1;
        while self.slot(index).address != 0 {
            index = (index + 1) & (self.slot_count - 1);
            probes += 1;
        }
        let bytes = &mut self.memory.bytes_mut()[index * SLOT_SIZE..(index + 1) * SLOT_SIZE];
        bytes[..BOUND].copy_from_slice(&slot.address.to_ne_bytes());
        bytes[BOUND..TAG].copy_from_slice(&slot.bound.to_ne_bytes());
        bytes[TAG..].copy_from_slice(&FIRST_GENERATION.to_ne_bytes());
        probes
    }
}

/// Returns the key with this number.
#[inline(always)]
pub(super) fn key(number: u64) -> Key {
    number.to_be_bytes()
}

/// Returns the value of key `number`, as `build` wrote it.
#[cfg(test)]
pub(super) fn value(number: u64, size: usize) -> Vec<u8> {
    let mut value = vec![0; size];
    fill(number, &mut value);
    value
}

/// Returns byte `index` of the value of key `number`. The byte depends on the key and on the index.
#[inline(always)]
pub(super) fn value_byte(number: u64, index: usize) -> u8 {
    (number as u8).wrapping_add(index as u8)
}

fn fill(number: u64, value: &mut [u8]) {
    for (index, byte) in value.iter_mut().enumerate() {
        *byte = value_byte(number, index);
    }
}

#[inline(always)]
fn holds(item: &[u8], key: &Key) -> bool {
    item.first_chunk::<VALUE>().is_some_and(|item| {
        item[KEY_LENGTH..KEY_LENGTH + 2] == (KEY_SIZE as u16).to_ne_bytes() && item[HEADER_SIZE..] == key[..]
    })
}

/// Function that maps keys to first slots: one for each of the two layouts.
enum Hash {
    /// Hash of any key: rapidhash v3.
    Spread(RapidSecrets),
    /// Bijection that gives each of the first 2^bits key numbers a separate slot.
    Bijection(Bijection),
}

impl Hash {
    fn new(layout: &Layout, slot_count: usize) -> Self {
        match layout.collision_free {
            true => Self::Bijection(Bijection::new(slot_count, layout.seed)),
            false => Self::Spread(RapidSecrets::seed(layout.seed)),
        }
    }

    #[inline(always)]
    fn of(&self, key: &Key) -> u64 {
        match self {
            Self::Spread(secrets) => rapidhash_v3_inline::<true, false, false>(key, secrets),
            Self::Bijection(bijection) => bijection.of(u64::from_be_bytes(*key)),
        }
    }
}

/// A permutation of the numbers below a power of two. Each of its steps is invertible.
struct Bijection {
    mask: u64,
    shift: u32,
    offset: u64,
}

impl Bijection {
    fn new(size: usize, offset: u64) -> Self {
        let mask = size as u64 - 1;
        Self { mask, shift: size.trailing_zeros().div_ceil(2), offset }
    }

    #[inline(always)]
    fn of(&self, number: u64) -> u64 {
        let mut x = number.wrapping_add(self.offset);
        for odd in [0x9E37_79B9_7F4A_7C15, 0xD6E8_FEB8_6659_FD93] {
            x = x.wrapping_mul(odd) & self.mask;
            x ^= x >> self.shift;
        }
        x
    }
}

/// Checks that `layout` is in range, and returns its number of slots.
pub(super) fn check(layout: &Layout) -> io::Result<usize> {
    if !(1..=RECORDS_MAX).contains(&layout.records) {
        let wrong = format!("{} records: the valid range is 1 to {RECORDS_MAX}", layout.records);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, wrong));
    }
    if layout.value_size > VALUE_SIZE_MAX {
        let wrong =
            format!("values of {} bytes: the valid range is 0 to {VALUE_SIZE_MAX}", layout.value_size);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, wrong));
    }
    Ok((layout.records * SLOTS_PER_RECORD).next_power_of_two() as usize)
}

/// Returns the size of the smallest buffer for `size` bytes. The sizes of buffers are (4 + m) << k for m below 4, from
/// 64 on.
fn size_class(size: usize) -> usize {
    let size = size.max(SIZE_CLASS_MIN);
    size.next_multiple_of(1 << (size.ilog2() - 2))
}

#[inline(always)]
fn prefetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch affects only the cache, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) line, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floor::HugePages;

    #[test]
    fn size_classes_are_four_a_doubling() {
        let classes: Vec<usize> = (1..=1024).map(size_class).collect();
        let mut distinct = classes.clone();
        distinct.dedup();
        assert_eq!(
            distinct,
            [64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
        );
        assert!(classes.iter().zip(1..).all(|(&class, size)| class >= size));
    }

    #[test]
    fn the_bijection_yields_every_slot_once() {
        for bits in [2, 3, 8, 13] {
            let size = 1 << bits;
            let bijection = Bijection::new(size, 0xDEAD_BEEF);
            let mut slots: Vec<u64> = (0..size as u64).map(|number| bijection.of(number)).collect();
            slots.sort_unstable();
            assert!(slots.into_iter().eq(0..size as u64), "{bits} bits");
        }
    }

    #[test]
    fn only_the_hashed_layout_probes() {
        let layout =
            Layout { records: 4096, value_size: 0, collision_free: true, huge_pages: HugePages::No, seed: 1 };
        let free = Table::build(layout).unwrap();
        assert_eq!((free.mean_probes(), free.load_factor()), (1.0, 0.25));
        let hashed = Table::build(Layout { collision_free: false, ..layout }).unwrap();
        // Linear probing at load a probes (1 + 1 / (1 - a)) / 2 slots to find a key: 1.17 at a quarter.
        assert!((1.12..1.22).contains(&hashed.mean_probes()), "{}", hashed.mean_probes());
    }

    #[test]
    fn one_record_of_one_byte_is_a_valid_floor() {
        let layout =
            Layout { records: 1, value_size: 1, collision_free: false, huge_pages: HugePages::No, seed: 0 };
        let table = Table::build(layout).unwrap();
        assert_eq!(table.get(0, &mut Vec::new()), Some(&[0][..]));
        assert_eq!(table.get(1, &mut Vec::new()), None);
    }
}

//! Slots and items in the mapping, and the fetch of an item through its slot.
//!
//! Invariant: a slot with a non-zero address points to a buffer with a whole item. An item is written before its slot
//! points to it. All items have one size, so an address and a length from different moments still lie in the mapping.
//! Invariant: a slot's generation grows with every overwrite. A reader that loads the same generation before and after
//! its accesses has read the item of that generation, although the buffer of a replaced item is reused at once.
//! Invariant: at most a quarter of the slots are in use, so a probe always ends.

use std::ffi::c_void;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rand_core::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_inline};

use super::Layout;
use super::mapping::Mapping;
use super::measure::shuffled;
use super::overwrite::{self, Spare};

/// Bytes of a key: the key's number, big-endian.
pub(super) type Key = [u8; KEY_SIZE];

const SLOTS_PER_RECORD: u64 = 4;
const RECORDS_MAX: u64 = 1 << 32;
const VALUE_SIZE_MAX: u32 = 16 << 20;

/// Size of a slot in bytes: | address u64 | state u64 |, in the host's byte order; all zero if empty. The low half of
/// the state is the item's length, and the high half is the generation.
pub(super) const SLOT_SIZE: usize = 16;
const STATE: usize = 8;

/// Size of an item's header in bytes. Item: | generation u32 | key length u16 | kind u8 | 0 u8 | value length u32 | 0
/// u32 | key | value |
const HEADER_SIZE: usize = 16;
const KEY_LENGTH: usize = 4;
const KEY_SIZE: usize = 8;
/// Offset in bytes of the value in its item.
pub(super) const VALUE: usize = HEADER_SIZE + KEY_SIZE;
/// Size in bytes of the words in which the start of an item is written and compared.
pub(super) const WORD: usize = size_of::<u64>();

/// Generation of the items that `build` writes.
const FIRST_GENERATION: u32 = 1;

const CACHE_LINE: usize = 64;
const SIZE_CLASS_MIN: usize = 64;

const _: () = assert!(SLOT_SIZE.is_power_of_two() && STATE + WORD == SLOT_SIZE && VALUE == 3 * WORD);

/// Content of a slot: the address of an item, and the item's length and generation.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub(super) address: u64,
    pub(super) state: u64,
}

impl Slot {
    fn first(address: usize, item_size: usize) -> Self {
        Self { address: address as u64, state: item_size as u64 | u64::from(FIRST_GENERATION) << 32 }
    }

    /// Returns the slot with the next generation and an item of the same length at `address`.
    #[inline(always)]
    pub(super) fn next(self, address: u64) -> Self {
        Self { address, state: self.state.wrapping_add(1 << 32) }
    }

    #[inline(always)]
    pub(super) fn is_empty(self) -> bool {
        self.address == 0
    }

    #[inline(always)]
    pub(super) fn item_size(self) -> usize {
        self.state as u32 as usize
    }

    #[inline(always)]
    pub(super) fn generation(self) -> u32 {
        (self.state >> 32) as u32
    }
}

/// The filled mapping: first the slots, then the buffers of the items, then the spare buffers.
pub(super) struct Table {
    pub(super) memory: Mapping,
    layout: Layout,
    slot_count: usize,
    hash: Hash,
    mean_probes: f64,
}

impl Table {
    /// Maps and fills a table. Returns also its spare buffers, which are as many as the layout says.
    pub(super) fn build(layout: Layout) -> io::Result<(Self, Vec<Spare>)> {
        let slot_count = check(&layout)?;
        let item_size = VALUE + layout.value_size as usize;
        let (items_at, stride) = (slot_count * SLOT_SIZE, size_class(item_size));
        let buffers = layout.records as usize + layout.spares as usize;
        let len = buffers.checked_mul(stride).and_then(|buffers| buffers.checked_add(items_at));
        let memory = Mapping::create(len.ok_or(io::ErrorKind::OutOfMemory)?, layout.huge_pages)?;
        let hash = Hash::new(&layout, slot_count);
        let mut table = Self { memory, layout, slot_count, hash, mean_probes: 0.0 };

        let mut random = Xoshiro256PlusPlus::seed_from_u64(layout.seed);
        let mut probes = 0;
        for (number, place) in shuffled(layout.records, &mut random).into_iter().enumerate() {
            let at = table.buffer_at(place as usize);
            table.write_item(at, number as u64);
            probes += table.insert(key(number as u64), Slot::first(at, item_size));
        }
        table.mean_probes = probes as f64 / layout.records as f64;
        let spares = (layout.records as usize..buffers).map(|place| Spare::new(table.buffer_at(place)));
        let spares = spares.collect();
        Ok((table, spares))
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

    pub(super) fn slot_count(&self) -> usize {
        self.slot_count
    }

    /// Whether overwrites may have changed the values that `build` wrote.
    #[inline(always)]
    pub(super) fn has_overwrites(&self) -> bool {
        self.layout.spares > 0
    }

    pub(super) fn item_size(&self) -> usize {
        VALUE + self.layout.value_size as usize
    }

    /// Returns the offset in the mapping of the buffer with this index.
    pub(super) fn buffer_at(&self, index: usize) -> usize {
        self.slot_count * SLOT_SIZE + index * size_class(self.item_size())
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

    /// Returns the index of the slot after the slot with this index.
    #[inline(always)]
    pub(super) fn following(&self, index: usize) -> usize {
        (index + 1) & (self.slot_count - 1)
    }

    /// Copies the item of `key` into `out`, probing from the slot `index` on. Returns false if the key is absent.
    #[inline(always)]
    pub(super) fn fetch(&self, key: &Key, index: usize, out: &mut [u8]) -> bool {
        match self.has_overwrites() {
            true => self.fetch_by::<true>(key, index, out),
            false => self.fetch_by::<false>(key, index, out),
        }
    }

    /// Fetches from a table that other threads may overwrite meanwhile, or from one that nobody writes.
    #[inline(always)]
    fn fetch_by<const IS_SHARED: bool>(&self, key: &Key, mut index: usize, out: &mut [u8]) -> bool {
        loop {
            let slot = self.slot(index);
            if slot.is_empty() {
                return false;
            }
            let is_its = self.holds(slot, key);
            if is_its {
                let out = &mut out[..slot.item_size()];
                let (from, to) = (self.at(slot.address as usize), out.as_mut_ptr());
                // SAFETY: a slot's item lies in the mapping, and `out` has its size. The plain copy is no data race,
                // because only overwrites write, and they need the spare buffers that make a table shared.
                unsafe {
                    match IS_SHARED {
                        true => copy_shared(from, to, out.len()),
                        false => ptr::copy_nonoverlapping(from, to, out.len()),
                    }
                }
            }
            if IS_SHARED && self.has_changed(index, slot) {
                continue; // The item was replaced meanwhile, so the bytes may be those of several items.
            }
            if is_its {
                return true;
            }
            index = self.following(index);
        }
    }

    /// Prefetches the slot with this index.
    #[inline(always)]
    pub(super) fn prefetch_slot(&self, index: usize) {
        prefetch(self.at(index * SLOT_SIZE));
    }

    /// Prefetches every cache line of the item to which the slot with this index points.
    #[inline(always)]
    pub(super) fn prefetch_item(&self, index: usize) {
        let slot = self.slot(index);
        self.prefetch_lines(slot.address as usize, slot.item_size());
    }

    /// Prefetches the key in the item to which the slot with this index points.
    #[inline(always)]
    pub(super) fn prefetch_key(&self, index: usize) {
        self.prefetch_lines(self.slot(index).address as usize, VALUE);
    }

    /// Prefetches every cache line of `len` bytes from the offset `at` on.
    #[inline(always)]
    pub(super) fn prefetch_lines(&self, at: usize, len: usize) {
        for line in (at & !(CACHE_LINE - 1)..at + len).step_by(CACHE_LINE) {
            prefetch(self.at(line));
        }
    }

    /// Loads the slot with this index. The address may belong to a later generation than the state; then
    /// [`has_changed`](Self::has_changed) is true.
    #[inline(always)]
    pub(super) fn slot(&self, index: usize) -> Slot {
        debug_assert!(index < self.slot_count);
        let at = index * SLOT_SIZE;
        // SAFETY: callers mask `index` with `slot_count - 1`, and `build` put `slot_count` slots at the front.
        let (address, state) = unsafe { (self.word(at), self.word(at + STATE)) };
        // Acquire: pairs with the exchange in `overwrite`, so that the item's bytes are visible with its slot. The
        // state is loaded first, so that an address of a later generation comes with a change of the state.
        let state = state.load(Ordering::Acquire);
        Slot { address: address.load(Ordering::Acquire), state }
    }

    /// Whether the slot with this index was overwritten after `slot` was loaded from it.
    #[inline(always)]
    pub(super) fn has_changed(&self, index: usize, slot: Slot) -> bool {
        // Acquire: pairs with the fence in `overwrite`. A reader that saw a byte of a reused buffer sees here that the
        // slot has changed.
        fence(Ordering::Acquire);
        // SAFETY: as in `slot`.
        unsafe { self.word(index * SLOT_SIZE + STATE) }.load(Ordering::Relaxed) != slot.state
    }

    /// Whether the item of `slot` has this key. The result counts only if the slot has not changed.
    #[inline(always)]
    pub(super) fn holds(&self, slot: Slot, key: &Key) -> bool {
        let at = slot.address as usize;
        // SAFETY: a slot's item lies in the mapping. Buffers are aligned to 16 bytes.
        let [header, found] =
            [at, at + HEADER_SIZE].map(|at| unsafe { self.word(at) }.load(Ordering::Relaxed));
        header.to_ne_bytes()[KEY_LENGTH..KEY_LENGTH + 2] == (KEY_SIZE as u16).to_ne_bytes()
            && found.to_ne_bytes() == *key
    }

    /// Returns the address of the byte at this offset.
    #[inline(always)]
    pub(super) fn at(&self, at: usize) -> *mut u8 {
        self.memory.base().wrapping_add(at)
    }

    /// Returns the word at the offset `at`.
    ///
    /// # Safety
    /// `at` is a multiple of 8, and a word at `at` lies within the mapping.
    #[inline(always)]
    pub(super) unsafe fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: by the caller's promise. The mapping stays until `self` drops. While `self` is borrowed, its bytes
        // are accessed only by atomics, by `exchange` and by `copy_shared`.
        unsafe { AtomicU64::from_ptr(self.at(at).cast()) }
    }

    fn write_item(&mut self, at: usize, number: u64) {
        let value_size = self.layout.value_size;
        let item = &mut self.memory.bytes_mut()[at..at + VALUE + value_size as usize];
        for (bytes, word) in item.chunks_exact_mut(WORD).zip(head(FIRST_GENERATION, &key(number), value_size))
        {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        fill(number as u8, &mut item[VALUE..]);
    }

    /// Puts `slot` into the first empty slot on the path of `key`. Returns the number of slots probed.
    fn insert(&mut self, key: Key, slot: Slot) -> u64 {
        let mut index = self.home(&key);
        let mut probes = 1;
        while !self.slot(index).is_empty() {
            index = self.following(index);
            probes += 1;
        }
        let bytes = &mut self.memory.bytes_mut()[index * SLOT_SIZE..(index + 1) * SLOT_SIZE];
        bytes[..STATE].copy_from_slice(&slot.address.to_ne_bytes());
        bytes[STATE..].copy_from_slice(&slot.state.to_ne_bytes());
        probes
    }
}

/// Returns the words at the start of an item: its header and its key.
#[inline(always)]
pub(super) fn head(generation: u32, key: &Key, value_size: u32) -> [u64; VALUE / WORD] {
    let mut bytes = [0; VALUE];
    bytes[..KEY_LENGTH].copy_from_slice(&generation.to_ne_bytes());
    bytes[KEY_LENGTH..KEY_LENGTH + 2].copy_from_slice(&(KEY_SIZE as u16).to_ne_bytes());
    bytes[WORD..WORD + 4].copy_from_slice(&value_size.to_ne_bytes());
    bytes[HEADER_SIZE..].copy_from_slice(key);
    let word = |at: usize| u64::from_ne_bytes(*bytes[at..].first_chunk().expect("a word of the head"));
    [word(0), word(WORD), word(2 * WORD)]
}

/// Copies `len` bytes. Other threads may access one side at the same time, so the copy may have bytes of several
/// moments.
///
/// # Safety
/// `from` is valid for reading `len` bytes and `to` for writing them, and the two ranges do not overlap. One of them
/// belongs to the caller. Threads access the other one only by this function and by atomics.
#[inline(always)]
pub(super) unsafe fn copy_shared(from: *const u8, to: *mut u8, len: usize) {
    type Copy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;
    static COPY: Copy = libc::memcpy;
    // SAFETY: a static is valid for reading. The read is volatile, so the compiler does not know which function it
    // calls. So it assumes nothing about the copied bytes, as in a plain copy, where a concurrent write is undefined.
    let copy = unsafe { ptr::read_volatile(&raw const COPY) };
    // SAFETY: by the caller's promise.
    unsafe { copy(to.cast(), from.cast(), len) };
}

/// Returns the key with this number.
#[inline(always)]
pub(super) fn key(number: u64) -> Key {
    number.to_be_bytes()
}

/// Returns the value that starts with the byte `first`. `build` writes to each key the value that starts with the low
/// byte of the key's number.
#[cfg(test)]
pub(super) fn value(first: u8, size: usize) -> Vec<u8> {
    let mut value = vec![0; size];
    fill(first, &mut value);
    value
}

/// Fills `value` with the value that starts with `first`: every byte is larger by one than the byte before it.
pub(super) fn fill(first: u8, value: &mut [u8]) {
    for (index, byte) in value.iter_mut().enumerate() {
        *byte = last_byte(first, index + 1);
    }
}

/// Returns the last byte of the value of `size` bytes that starts with `first`.
#[inline(always)]
pub(super) fn last_byte(first: u8, size: usize) -> u8 {
    first.wrapping_add(size.wrapping_sub(1) as u8)
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
    if layout.spares > 0 {
        overwrite::supported()?;
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

    const LAYOUT: Layout = Layout {
        records: 1,
        value_size: 1,
        spares: 0,
        collision_free: false,
        huge_pages: HugePages::No,
        seed: 1,
    };

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
        let layout = Layout { records: 4096, value_size: 0, collision_free: true, ..LAYOUT };
        let (free, _) = Table::build(layout).unwrap();
        assert_eq!((free.mean_probes(), free.load_factor()), (1.0, 0.25));
        let (hashed, _) = Table::build(Layout { collision_free: false, ..layout }).unwrap();
        // Linear probing at load a probes (1 + 1 / (1 - a)) / 2 slots to find a key: 1.17 at a quarter.
        assert!((1.12..1.22).contains(&hashed.mean_probes()), "{}", hashed.mean_probes());
    }

    #[test]
    fn one_record_of_one_byte_is_a_valid_floor() {
        let (table, spares) = Table::build(LAYOUT).unwrap();
        assert!(spares.is_empty());
        assert_eq!(table.get(0, &mut Vec::new()), Some(&[0][..]));
        assert_eq!(table.get(1, &mut Vec::new()), None);
    }
}

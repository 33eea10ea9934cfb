//! Overwrite of an item, out of place: write the new item into a spare buffer, swap it into the slot by one CAS, and
//! keep the replaced buffer as the next spare.
//!
//! The CAS covers the 16 bytes of a slot, as in PRISM-KV: an item's address, its length and the slot's generation
//! change at once. A CAS of the address alone could not tell an item from a later one in the same buffer.
//!
//! The free list is one buffer for each task. A replaced buffer has no grace period: it is reused by the next overwrite
//! of the same task. So a reader loads the slot again after its copy, and repeats a fetch whose slot has changed.
//!
//! Invariant: each buffer belongs to one slot or to one [`Spare`].

use std::io;
use std::sync::atomic::{Ordering, fence};

use super::table::{Key, SLOT_SIZE, Slot, Table, VALUE, WORD, copy_shared, fill, head, key, last_byte};

/// A buffer of a table to which no slot points. Its owner may write it.
#[derive(Debug)]
pub(super) struct Spare {
    address: u64,
}

impl Spare {
    /// Creates the owner of the buffer at the offset `at` of a table's mapping.
    pub(super) fn new(at: usize) -> Self {
        Self { address: at as u64 }
    }
}

/// All values of one size that overwrites write. They are made before the clock starts.
pub(super) struct Values {
    /// The values overlap: the value that starts with the byte b is at the offset b.
    bytes: Vec<u8>,
    size: usize,
}

impl Values {
    pub(super) fn new(size: usize) -> Self {
        let mut bytes = vec![0; size + usize::from(u8::MAX)];
        fill(0, &mut bytes);
        Self { bytes, size }
    }

    /// Returns the value that starts with this byte.
    #[inline(always)]
    pub(super) fn starting_with(&self, first: u8) -> &[u8] {
        &self.bytes[usize::from(first)..][..self.size]
    }
}

impl Table {
    /// Gives `key` the value `value`, probing from the slot `index` on. On return, `spare` is the replaced buffer.
    /// Returns false if the key is absent.
    ///
    /// # Panics
    /// If `value` has another size than the table's values.
    #[inline(always)]
    pub(super) fn overwrite(&self, key: &Key, mut index: usize, value: &[u8], spare: &mut Spare) -> bool {
        let value_size = self.layout().value_size;
        assert_eq!(value.len(), value_size as usize, "all items have one size");
        let at = spare.address as usize;
        // SAFETY: a spare buffer lies in the mapping, is aligned to 16 bytes, and has room for an item.
        let words = [0, 1, 2].map(|index| unsafe { self.word(at + index * WORD) });
        // Release: pairs with the fence in `has_changed`, so that a reader who still reads this buffer sees that its
        // slot has changed.
        fence(Ordering::Release);
        // The generation, in the first word, is not yet known. All other bytes are written while the slot is loaded.
        for (word, content) in words.iter().zip(head(0, key, value_size)).skip(1) {
            word.store(content, Ordering::Relaxed);
        }
        // SAFETY: as above. The buffer belongs to `spare`, so no other thread writes it.
        unsafe { copy_shared(value.as_ptr(), self.at(at + VALUE), value.len()) };
        loop {
            let slot = self.slot(index);
            if slot.is_empty() {
                return false;
            }
            if self.holds(slot, key) {
                let next = slot.next(spare.address);
                words[0].store(head(next.generation(), key, value_size)[0], Ordering::Relaxed);
                if self.exchange(index, slot, next) {
                    spare.address = slot.address;
                    self.prefetch_lines(slot.address as usize, slot.item_size()); // The next overwrite writes it.
                    return true;
                }
                continue; // Another overwrite of the key came first.
            }
            if !self.has_changed(index, slot) {
                index = self.following(index);
            }
        }
    }

    /// Replaces the slot with this index by `new` if it equals `old`.
    #[inline(always)]
    fn exchange(&self, index: usize, old: Slot, new: Slot) -> bool {
        let word = |slot: Slot| u128::from(slot.address) | u128::from(slot.state) << 64;
        // SAFETY: callers mask `index` with `slot_count - 1`, so the slot lies in the mapping. Slots are aligned.
        unsafe { arch::exchange(self.at(index * SLOT_SIZE), word(old), word(new)) }
    }

    /// Checks that each key has a whole value in a buffer of its own, and that each other buffer is one of `spares`.
    ///
    /// # Errors
    /// `InvalidData`, with the first violation.
    pub(super) fn check_buffers(&mut self, spares: &[Spare]) -> io::Result<()> {
        let records = self.layout().records as usize;
        let buffers = records + self.layout().spares as usize;
        let (base, stride) = (self.buffer_at(0), self.buffer_at(1) - self.buffer_at(0));
        let mut users = vec![0_u8; buffers];
        let mut holders = vec![0_u8; records];
        let mut take = |address: u64, user: &str| {
            let index =
                (address as usize).checked_sub(base).map(|at| at / stride).filter(|&index| index < buffers);
            match index.filter(|&index| base + index * stride == address as usize) {
                Some(index) if users[index] == 0 => users[index] = 1,
                Some(index) => {
                    return Err(broken(format!("{user} has buffer {index}, which is in use twice")));
                }
                None => return Err(broken(format!("{user} points to {address}, where no buffer begins"))),
            }
            Ok(())
        };
        for index in 0..self.slot_count() {
            let slot = self.slot(index);
            if slot.is_empty() {
                continue;
            }
            take(slot.address, "a slot")?;
            let number =
                self.number_of(slot).ok_or_else(|| broken(format!("slot {index} has no whole item")))?;
            if !self.leads_to(&key(number), index) {
                return Err(broken(format!("slot {index} is not on the path of its key {number}")));
            }
            match holders.get_mut(number as usize) {
                Some(holders @ 0) => *holders = 1,
                _ => {
                    return Err(broken(format!("slot {index} has the key {number}, absent or in two slots")));
                }
            }
        }
        spares.iter().try_for_each(|spare| take(spare.address, "a task"))?;
        let lost = users.iter().chain(&holders).filter(|&&count| count == 0).count();
        if lost == 0 { Ok(()) } else { Err(broken(format!("{lost} keys or buffers are lost"))) }
    }

    /// Returns the number of the key in the item of `slot`, or `None` if the item is not whole.
    fn number_of(&mut self, slot: Slot) -> Option<u64> {
        let (size, value_size) = (self.item_size(), self.layout().value_size);
        let item = &self.memory.bytes_mut()[slot.address as usize..][..size];
        let (start, value) = item.split_first_chunk::<VALUE>().expect("an item has a key");
        let item_key: Key = *start.last_chunk().expect("a key ends the start");
        let expected = head(slot.generation(), &item_key, value_size).map(u64::to_ne_bytes);
        let first = value.first().copied().unwrap_or(0);
        let is_whole = slot.item_size() == size
            && expected.as_flattened() == start
            && value.iter().zip(1..).all(|(&byte, size)| byte == last_byte(first, size));
        is_whole.then(|| u64::from_be_bytes(item_key))
    }

    /// Whether a probe for `key` reaches the slot with this index.
    fn leads_to(&self, key: &Key, index: usize) -> bool {
        let mut probed = self.home(key);
        while probed != index && !self.slot(probed).is_empty() {
            probed = self.following(probed);
        }
        probed == index
    }
}

#[cold]
fn broken(wrong: String) -> io::Error {
    let text =
        format!("after the overwrites, {wrong}: discard these figures, and check this machine's memory");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Checks that this CPU can compare and swap 16 bytes.
pub(super) fn supported() -> io::Result<()> {
    if arch::is_supported() {
        return Ok(());
    }
    let wrong = "this CPU cannot compare and swap 16 bytes, so it has no floor of overwrites: measure reads";
    Err(io::Error::new(io::ErrorKind::Unsupported, wrong))
}

#[cfg(target_arch = "x86_64")]
mod arch {
    pub(super) fn is_supported() -> bool {
        std::arch::is_x86_feature_detected!("cmpxchg16b")
    }

    /// Replaces the 16 bytes at `at` by `new` if they equal `old`, atomically. The locked instruction orders all other
    /// accesses of this thread.
    ///
    /// # Safety
    /// `at` is aligned to 16, and valid for reading and writing 16 bytes. All threads access them atomically.
    #[inline(always)]
    pub(super) unsafe fn exchange(at: *mut u8, old: u128, new: u128) -> bool {
        let is_swapped: u64;
        // SAFETY: by the caller's promise. rbx, which the compiler reserves, is restored. The other registers are
        // named, so that none of them is rbx.
        unsafe {
            std::arch::asm!(
                "xchg rsi, rbx", "lock cmpxchg16b [rdi]", "sete cl", "mov rbx, rsi",
                in("rdi") at, inout("rsi") new as u64 => _, inout("rcx") (new >> 64) as u64 => is_swapped,
                inout("rax") old as u64 => _, inout("rdx") (old >> 64) as u64 => _,
                options(nostack)
            );
        }
        is_swapped as u8 != 0
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    use portable_atomic::{AtomicU128, Ordering};

    pub(super) fn is_supported() -> bool {
        AtomicU128::is_lock_free() && cfg!(target_endian = "little")
    }

    /// Replaces the 16 bytes at `at` by `new` if they equal `old`, atomically.
    ///
    /// # Safety
    /// `at` is aligned to 16, and valid for reading and writing 16 bytes. All threads access them atomically.
    #[inline(always)]
    pub(super) unsafe fn exchange(at: *mut u8, old: u128, new: u128) -> bool {
        // SAFETY: by the caller's promise.
        let slot = unsafe { AtomicU128::from_ptr(at.cast()) };
        slot.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floor::{HugePages, Layout, table};

    const LAYOUT: Layout = Layout {
        records: 50,
        value_size: 40,
        spares: 2,
        collision_free: false,
        huge_pages: HugePages::No,
        seed: 3,
    };

    fn overwrite(table: &Table, number: u64, first: u8, spare: &mut Spare) -> bool {
        let key = key(number);
        table.overwrite(&key, table.home(&key), Values::new(40).starting_with(first), spare)
    }

    #[test]
    fn an_overwrite_leaves_the_old_bytes_in_the_buffer_that_it_returns() {
        let (mut table, mut spares) = Table::build(LAYOUT).unwrap();
        let before = spares[0].address;
        assert!(overwrite(&table, 7, 99, &mut spares[0]));
        assert_eq!(table.get(7, &mut Vec::new()), Some(&table::value(99, 40)[..]));
        let old = spares[0].address as usize;
        assert_ne!(old as u64, before);
        assert_eq!(
            table.memory.bytes_mut()[old + VALUE..][..40],
            table::value(7, 40),
            "a new buffer was written"
        );
        table.check_buffers(&spares).unwrap();
        let all_else = (0..50).filter(|&number| number != 7);
        for number in all_else {
            assert_eq!(table.get(number, &mut Vec::new()), Some(&table::value(number as u8, 40)[..]));
        }
    }

    #[test]
    fn each_overwrite_has_the_next_generation() {
        let (table, mut spares) = Table::build(LAYOUT).unwrap();
        let slot = || {
            (0..table.slot_count()).map(|index| table.slot(index)).find(|slot| table.holds(*slot, &key(4)))
        };
        let first = slot().unwrap();
        for by in 1..4 {
            assert!(overwrite(&table, 4, by, &mut spares[1]));
            let now = slot().unwrap();
            assert_eq!((now.generation(), now.item_size()), (first.generation() + u32::from(by), 64));
        }
        assert_eq!(slot().unwrap().next(0).next(0).generation(), first.generation() + 5);
    }

    #[test]
    fn an_absent_key_is_not_overwritten() {
        let (mut table, mut spares) = Table::build(LAYOUT).unwrap();
        assert!(!overwrite(&table, 50, 1, &mut spares[0]));
        table.check_buffers(&spares).unwrap();
    }

    #[test]
    fn an_exchange_needs_the_whole_slot() {
        let (table, _) = Table::build(LAYOUT).unwrap();
        let index = (0..table.slot_count()).find(|&index| !table.slot(index).is_empty()).unwrap();
        let slot = table.slot(index);
        let new = slot.next(slot.address);
        assert!(!table.exchange(index, Slot { address: slot.address + 16, ..slot }, new));
        assert!(!table.exchange(index, slot.next(slot.address), new));
        assert!(!table.has_changed(index, slot));
        assert!(table.exchange(index, slot, new));
        assert!(table.has_changed(index, slot));
    }

    #[test]
    fn every_kind_of_damage_is_found() {
        type Damage = fn(&mut Table, &mut Vec<Spare>);
        let slots = |table: &Table| -> Vec<usize> {
            (0..table.slot_count()).filter(|&index| !table.slot(index).is_empty()).collect()
        };
        let damages: [(&str, Damage); 6] = [
            ("lost", |_, spares| spares.truncate(spares.len() - 1)),
            ("in use twice", |_, spares| spares[0].address = spares[1].address),
            ("where no buffer begins", |_, spares| spares[0].address += 16),
            ("no whole item", |table, _| {
                let at = table.buffer_at(9) + VALUE + 20;
                table.memory.bytes_mut()[at] ^= 1;
            }),
            ("no whole item", |table, _| {
                let at = table.buffer_at(9); // The generation.
                table.memory.bytes_mut()[at] ^= 1;
            }),
            ("is not on the path", |table, _| {
                let at = table.buffer_at(9) + VALUE - 1;
                table.memory.bytes_mut()[at] ^= 64; // Another key.
            }),
        ];
        for (expected, damage) in damages {
            let (mut table, mut spares) = Table::build(LAYOUT).unwrap();
            table.check_buffers(&spares).unwrap();
            assert_eq!(slots(&table).len(), 50);
            damage(&mut table, &mut spares);
            let refusal = table.check_buffers(&spares).unwrap_err();
            assert_eq!(refusal.kind(), io::ErrorKind::InvalidData);
            assert!(refusal.to_string().contains(expected), "{refusal}");
        }
    }
}

//! PRISM-KV's GET on a node's memory, written by hand. A benchmark compares it with a chain of the same effect.
//!
//! This module defines the layout of slots and items again, so that a mistake in the system's layout is not repeated
//! here.
//!
//! Invariant: the GET makes only the checks that are needed to be safe on bytes that other processes write.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Size of a slot in bytes: the item's address, its length, and a tag.
const SLOT_SIZE: usize = 16;
/// Offset in bytes of the key in an item. An item is a header of 16 bytes, the key and the value.
const KEY_AT: usize = 16;
const VALUE_AT: usize = KEY_AT + 8;

/// A separate mapping of a node's memory, with the item that was read last.
pub struct ByHand {
    base: NonNull<u8>,
    len: usize,
    item: Vec<u8>,
}

impl ByHand {
    /// Maps all memory behind `fd`, for items of at most `item_max` bytes. No process may write to the memory while
    /// [`ByHand::get`] reads.
    ///
    /// # Errors
    /// `InvalidInput` if the memory is smaller than a slot or may shrink; otherwise the operating system's error.
    pub fn map(fd: BorrowedFd<'_>, item_max: usize) -> io::Result<ByHand> {
        let len = usize::try_from(fstat(fd)?.st_size).map_err(|_| Errno::NOMEM)?;
        if len < SLOT_SIZE || !fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
            let wrong = format!("{len} bytes that are not sealed against shrinking: use a node's memory");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, wrong));
        }
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses the address, so the new mapping overlaps no existing one.
        let base = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, flags, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(ByHand { base, len, item: vec![0; item_max] })
    }

    /// Returns the value of `key` if the slot at the offset `slot_at` belongs to the key. The value is copied, as in a
    /// chain's reply.
    ///
    /// # Panics
    /// If the slot at `slot_at` is not within the memory.
    #[inline]
    pub fn get(&mut self, slot_at: usize, key: &[u8; 8]) -> Option<&[u8]> {
        assert!(slot_at <= self.len - SLOT_SIZE, "a slot lies in the memory");
        // SAFETY: the slot is within the mapping, as just checked. The mapping stays until `self` drops, because the
        // memory is sealed against shrinking. The caller of `map` ensures that no process writes meanwhile.
        let slot = unsafe { self.base.as_ptr().add(slot_at).cast::<u128>().read_unaligned() };
        let (at, bound) = (slot as u64 as usize, (slot >> 64) as u32 as usize);
        if at > self.len || bound > self.len - at || !(VALUE_AT..=self.item.len()).contains(&bound) {
            return None;
        }
        // SAFETY: the item is within the mapping and fits the buffer, as just checked; otherwise as above.
        unsafe { ptr::copy_nonoverlapping(self.base.as_ptr().add(at), self.item.as_mut_ptr(), bound) };
        let item = &self.item[..bound];
        (item[KEY_AT..VALUE_AT] == key[..]).then_some(&item[VALUE_AT..])
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        // SAFETY: `map` mapped exactly this range, and only `get` reads it, which borrows `self`.
        // An error would mean that the range is not mapped; then there is nothing to undo.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::os::fd::{AsFd, OwnedFd};

    const LEN: usize = 8192;

    /// Creates memory with an item of key 7 at its end and a slot at its start. The slot holds the words `at` and
    /// `bound`.
    fn memory(at: u64, bound: u64, seals: SealFlags) -> OwnedFd {
        let fd = memfd_create(c"by-hand", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, LEN as u64).unwrap();
        rustix::io::pwrite(&fd, &[at.to_le_bytes(), bound.to_le_bytes()].concat(), 0).unwrap();
        let item = [&[0; KEY_AT][..], &7u64.to_be_bytes(), b"value"].concat();
        rustix::io::pwrite(&fd, &item, (LEN - item.len()) as u64).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn only_the_slots_own_key_is_found() {
        let memory = memory(LEN as u64 - 29, 29, SealFlags::SHRINK);
        let mut by_hand = ByHand::map(memory.as_fd(), 64).unwrap();
        assert_eq!(by_hand.get(0, &7u64.to_be_bytes()), Some(&b"value"[..]));
        assert_eq!(by_hand.get(0, &8u64.to_be_bytes()), None);
        assert_eq!(by_hand.get(LEN - SLOT_SIZE, &7u64.to_be_bytes()), None, "no slot");
    }

    #[test]
    fn a_slot_that_points_anywhere_else_finds_nothing() {
        let len = LEN as u64;
        for (at, bound) in [(len - 29, 30), (len, 29), (len + 1, 0), (u64::MAX, 29), (0, 23), (0, 65), (0, 0)]
        {
            let memory = memory(at, bound, SealFlags::SHRINK);
            let mut by_hand = ByHand::map(memory.as_fd(), 64).unwrap();
            assert_eq!(by_hand.get(0, &7u64.to_be_bytes()), None, "{bound} bytes at {at}");
        }
    }

    #[test]
    fn memory_that_may_shrink_is_not_mapped() {
        let refused = ByHand::map(memory(0, 0, SealFlags::GROW).as_fd(), 64).err().unwrap();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    }
}

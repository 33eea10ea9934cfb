//! The memory that the two sides of a connection share (six words and two rings of bytes) and their bell.
//!
//! Invariant: every access lies within the memory, whatever its words contain. Accesses are atomic: words entirely,
//! bytes in units of 16.

use super::RING;
use crate::memory::units::{self, UNIT};
use crate::memory::{MappingError, sealed};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// One of the two sides of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Engine,
}

impl Side {
    pub(super) fn other(self) -> Side {
        match self {
            Side::Client => Side::Engine,
            Side::Engine => Side::Client,
        }
    }
}

/// A word of the shared memory. The [`Side`] in a variant is the writer of the ring, or the side that sets the wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// Number of bytes that this side has written.
    Tail(Side),
    /// Number of bytes that the other side has read, out of those that this side has written.
    Head(Side),
    /// The events for which this side must be woken; 0 unless it sleeps.
    Wish(Side),
}

impl Word {
    const COUNT: usize = 6;

    fn index(self) -> usize {
        match self {
            Word::Tail(side) => 2 * side as usize,
            Word::Head(side) => 2 * side as usize + 1,
            Word::Wish(side) => 4 + side as usize,
        }
    }
}

/// A unit of 16 bytes, copied from or to a ring.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable,
)]
#[repr(C, align(16))]
pub(crate) struct Unit(pub(super) [u8; UNIT]);

/// State that the two sides of a connection share. The other side may change all of it at any time.
///
/// All accesses to words are sequentially consistent, so they all have one order. If one side stores a word while the
/// other falls asleep, at least one of them sees what the other has stored. Bytes that were copied in before a tail was
/// stored are visible to a side that loads that tail.
pub(crate) trait Shared {
    fn load(&self, word: Word) -> u64;
    fn store(&self, word: Word, value: u64);
    /// Stores 0 in `word`; returns its previous value.
    fn take(&self, word: Word) -> u64;
    /// Copies `bytes` into the ring of `writer`, from `position` on, which is a multiple of 16. Pads the last unit with
    /// zeros.
    fn copy_in(&self, writer: Side, position: u64, bytes: &[u8]);
    /// Copies out of the ring of `writer`, from `position` on, which is a multiple of 16.
    fn copy_out(&self, writer: Side, position: u64, to: &mut [Unit]);
    /// Wakes the other side by its bell.
    fn ring(&self);
}

/// Distance between words in bytes: two cache lines, since CPUs fetch lines in pairs. So no two words share a pair.
const WORD_STRIDE: usize = 128;
/// Offset of the first ring in a connection's memory, in bytes.
const RINGS_AT: usize = 4096;
/// Size of a connection's memory in bytes.
pub const SIZE: u64 = RINGS_AT as u64 + 2 * RING;

const _: () = assert!(Word::COUNT * WORD_STRIDE <= RINGS_AT);
const _: () = assert!(RING.is_power_of_two() && RING.is_multiple_of(UNIT as u64));

/// A connection's memory, mapped into this process.
pub(crate) struct Memory {
    base: *mut u8,
}

// SAFETY: the memory is shared with another process by design; every access to it is one of the atomic ones below.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// Creates a memory for one connection, which no process can resize. Returns its descriptor.
///
/// # Errors
/// The system is out of memory or descriptors.
pub(crate) fn make() -> Result<OwnedFd, MappingError> {
    sealed(SIZE, MemfdFlags::empty())
}

impl Memory {
    /// Maps the memory that `fd` names.
    ///
    /// # Errors
    /// The system has no address space, or the memory has the wrong size or could be truncated while it is mapped.
    pub(crate) fn map(fd: &OwnedFd) -> Result<Memory, MappingError> {
        let system = |doing| move |errno: Errno| MappingError::Io { doing, source: errno.into() };
        units::supported().map_err(MappingError::Unsupported)?;
        // A descriptor that cannot report seals is not that of a ring memory.
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL) {
            return Err(MappingError::Foreign(
                "the rings are not sealed and could be truncated while in use".into(),
            ));
        }
        // The size is read after the seals: a size read before them could be outdated by a truncation.
        let stat = rustix::fs::fstat(fd).map_err(system("inspect the rings"))?;
        if stat.st_size as u64 != SIZE {
            return Err(MappingError::Foreign(format!("the rings have {} bytes, not {SIZE}", stat.st_size)));
        }
        // SAFETY: a new mapping of a whole memory that cannot shrink, at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                SIZE as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )
        };
        Ok(Memory { base: base.map_err(system("map the rings"))?.cast() })
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        // SAFETY: the words are at the beginning of the memory, which is page-aligned, and stay mapped as long as
        // `self` lives. Our processes access them atomically; a client that does not harms only itself.
        unsafe { AtomicU64::from_ptr(self.base.add(word.index() * WORD_STRIDE).cast()) }
    }

    /// Returns the address of byte `position` of a ring, and the number of bytes from there to the ring's end.
    fn place(&self, writer: Side, position: u64) -> (*mut u8, usize) {
        assert!(position.is_multiple_of(UNIT as u64), "frames begin at units");
        let offset = position % RING;
        // SAFETY: the offset is less than a ring's size, and both rings are mapped.
        let at = unsafe { self.base.add(RINGS_AT + writer as usize * RING as usize + offset as usize) };
        (at, (RING - offset) as usize)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; no borrow outlives the mapping that is being dropped.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), SIZE as usize) };
        debug_assert!(unmapped.is_ok(), "unmapping an existing mapping succeeds");
    }
}

/// Maximum number of bell bytes read in one call.
const BELLS_AT_A_TIME: u32 = 16;

/// A connection's memory, and its socket, which is the bell.
pub(crate) struct Mapped {
    pub(crate) memory: Memory,
    pub(crate) socket: OwnedFd,
}

impl Mapped {
    /// Reads the pending bell bytes. Returns false if the other side has hung up.
    pub(super) fn is_connected(&self) -> bool {
        // The bell rings once per wish, so an honest peer never leaves more bytes than this.
        for _ in 0..BELLS_AT_A_TIME {
            let mut byte = [0; 1];
            match rustix::net::recv(&self.socket, &mut byte, RecvFlags::DONTWAIT) {
                Ok((_, 1..)) => {}
                Err(Errno::AGAIN | Errno::INTR) => return true,
                Ok((_, 0)) | Err(_) => return false,
            }
        }
        true
    }
}

impl AsFd for Mapped {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Shared for Mapped {
    fn load(&self, word: Word) -> u64 {
        self.memory.word(word).load(Ordering::SeqCst)
    }

    fn store(&self, word: Word, value: u64) {
        self.memory.word(word).store(value, Ordering::SeqCst);
    }

    fn take(&self, word: Word) -> u64 {
        self.memory.word(word).swap(0, Ordering::SeqCst)
    }

    fn copy_in(&self, writer: Side, position: u64, bytes: &[u8]) {
        let (whole, part) = bytes.split_at(bytes.len() - bytes.len() % UNIT);
        assert!(bytes.len() as u64 <= RING, "a frame fits in its ring");
        let (at, room) = self.memory.place(writer, position);
        let (now, wrapped) = whole.split_at(whole.len().min(room));
        let (start, _) = self.memory.place(writer, 0);
        // SAFETY: `now` ends at the ring's end at the latest, and `wrapped` is shorter than the ring. Both addresses
        // are mapped and aligned to units. Only whole units within the slices are read.
        unsafe {
            units::copy_in(now.as_ptr(), at, now.len() / UNIT);
            units::copy_in(wrapped.as_ptr(), start, wrapped.len() / UNIT);
        }
        if !part.is_empty() {
            let mut last = Unit::default();
            last.0[..part.len()].copy_from_slice(part);
            let (at, _) = self.memory.place(writer, position + whole.len() as u64);
            // SAFETY: one unit at an aligned address of the ring, whose size is a multiple of units.
            unsafe { units::copy_in(last.0.as_ptr(), at, 1) };
        }
    }

    fn copy_out(&self, writer: Side, position: u64, to: &mut [Unit]) {
        assert!(size_of_val(to) as u64 <= RING, "a frame fits in its ring");
        let (at, room) = self.memory.place(writer, position);
        let (now, wrapped) = to.split_at_mut(to.len().min(room / UNIT));
        let (start, _) = self.memory.place(writer, 0);
        // SAFETY: `now` ends at the ring's end at the latest, and `wrapped` is shorter than the ring. Both addresses
        // are mapped and aligned to units. Each slice is as long as the number of units copied.
        unsafe {
            units::copy_out(at, now.as_mut_ptr().cast(), now.len());
            units::copy_out(start, wrapped.as_mut_ptr().cast(), wrapped.len());
        }
    }

    fn ring(&self) {
        // Sending fails if the socket is full or the other side is gone. In both cases no byte is needed.
        let _rung_already = rustix::net::send(&self.socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

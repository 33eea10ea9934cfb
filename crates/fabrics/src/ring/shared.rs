//! What the two sides of a connection share: a few words, two rings of bytes, and a bell.
//!
//! Invariant: every access lies within the memory, whatever its words say, and is atomic: words whole, bytes by units
//! of 16.

use super::RING;
use crate::memory::units::{self, UNIT};
use crate::memory::{MappingError, sealed};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Which of the two.
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

/// A word, named by the side that writes the ring, or that wishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// How many bytes that side has written.
    Tail(Side),
    /// How many of them the other has read.
    Head(Side),
    /// What that side is to be woken for; it sleeps unless that is nothing.
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

/// Sixteen bytes of a ring, as this side has them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable,
)]
#[repr(C, align(16))]
pub(crate) struct Unit(pub(super) [u8; UNIT]);

/// What the two sides share. The other side may change all of it at any time.
///
/// Every word is read and written sequentially consistent: one order for all of them, so that of two sides, one that
/// writes and one that falls asleep, at least one sees what the other did. What was copied in before a tail was
/// stored is there for whoever loads that tail.
pub(crate) trait Shared {
    fn load(&self, word: Word) -> u64;
    fn store(&self, word: Word, value: u64);
    /// Stores 0; answers what was there.
    fn take(&self, word: Word) -> u64;
    /// Copies into the ring of `writer` from `position` on, a multiple of 16. The last unit is filled up with zeros.
    fn copy_in(&self, writer: Side, position: u64, bytes: &[u8]);
    /// Copies out of the ring of `writer` from `position` on, a multiple of 16.
    fn copy_out(&self, writer: Side, position: u64, to: &mut [Unit]);
    /// Wakes the other side.
    fn ring(&self);
}

/// Words lie so far apart: on lines of their own, and CPUs fetch lines in pairs.
const WORD_STRIDE: usize = 128;
/// Where the rings begin.
const RINGS_AT: usize = 4096;
/// Bytes of a connection's memory.
pub const SIZE: u64 = RINGS_AT as u64 + 2 * RING;

const _: () = assert!(Word::COUNT * WORD_STRIDE <= RINGS_AT);
const _: () = assert!(RING.is_power_of_two() && RING.is_multiple_of(UNIT as u64));

/// A connection's memory as this process has it mapped.
pub(crate) struct Memory {
    base: *mut u8,
}

// SAFETY: the memory is shared with another process by design; every access to it is one of the atomic ones below.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// A descriptor of fresh memory for one connection, which nobody can resize.
///
/// # Errors
/// The system has no more.
pub(crate) fn make() -> Result<OwnedFd, MappingError> {
    sealed(SIZE, MemfdFlags::empty())
}

impl Memory {
    /// Maps the memory that `fd` names.
    ///
    /// # Errors
    /// The system has no room, or the memory is none of ours, or could be cut while it is mapped.
    pub(crate) fn map(fd: &OwnedFd) -> Result<Memory, MappingError> {
        let system = |doing| move |errno: Errno| MappingError::Io { doing, source: errno.into() };
        units::supported().map_err(MappingError::Unsupported)?;
        // What has no seals is no memory at all.
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL) {
            return Err(MappingError::Foreign("the rings could be cut while they are in use".into()));
        }
        // After the seals: a size that was read before them might have been cut meanwhile.
        let stat = rustix::fs::fstat(fd).map_err(system("look at the rings"))?;
        if stat.st_size as u64 != SIZE {
            return Err(MappingError::Foreign(format!("the rings have {} bytes, not {SIZE}", stat.st_size)));
        }
        // SAFETY: a new mapping of the whole of a memory that cannot be cut, at a place that the system chooses.
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
        // SAFETY: the words lie at the memory's beginning, which is on a page, and stay mapped for as long as `self`
        // lives; everyone accesses them atomically, or harms himself.
        unsafe { AtomicU64::from_ptr(self.base.add(word.index() * WORD_STRIDE).cast()) }
    }

    /// Where `position` of a ring is, and how many bytes follow before the ring's end.
    fn place(&self, writer: Side, position: u64) -> (*mut u8, usize) {
        assert!(position.is_multiple_of(UNIT as u64), "frames begin at units");
        let offset = position % RING;
        // SAFETY: an offset is less than a ring's size, and both rings are mapped.
        let at = unsafe { self.base.add(RINGS_AT + writer as usize * RING as usize + offset as usize) };
        (at, (RING - offset) as usize)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; nobody borrows from a mapping that is being dropped.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), SIZE as usize) };
        debug_assert!(unmapped.is_ok(), "unmapping what was mapped succeeds");
    }
}

/// Bells that are heard at once.
const BELLS_AT_A_TIME: u32 = 16;

/// A connection's memory, and its socket, which is the bell.
pub(crate) struct Mapped {
    pub(crate) memory: Memory,
    pub(crate) socket: OwnedFd,
}

impl Mapped {
    /// Hears whether the bell was rung. False if the other side has hung up.
    pub(super) fn is_connected(&self) -> bool {
        // Rung once for each wish, so these are all that an honest peer leaves.
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
        assert!(bytes.len() as u64 <= RING, "a frame fits its ring");
        let (at, room) = self.memory.place(writer, position);
        let (now, wrapped) = whole.split_at(whole.len().min(room));
        let (start, _) = self.memory.place(writer, 0);
        // SAFETY: `now` ends at the ring's end at the latest, and `wrapped` is shorter than the ring; both places are
        // mapped, aligned to units, and as many whole units are read as the slices have.
        unsafe {
            units::copy_in(now.as_ptr(), at, now.len() / UNIT);
            units::copy_in(wrapped.as_ptr(), start, wrapped.len() / UNIT);
        }
        if !part.is_empty() {
            let mut last = Unit::default();
            last.0[..part.len()].copy_from_slice(part);
            let (at, _) = self.memory.place(writer, position + whole.len() as u64);
            // SAFETY: one unit at an aligned place of the ring, which is a multiple of units.
            unsafe { units::copy_in(last.0.as_ptr(), at, 1) };
        }
    }

    fn copy_out(&self, writer: Side, position: u64, to: &mut [Unit]) {
        assert!(size_of_val(to) as u64 <= RING, "a frame fits its ring");
        let (at, room) = self.memory.place(writer, position);
        let (now, wrapped) = to.split_at_mut(to.len().min(room / UNIT));
        let (start, _) = self.memory.place(writer, 0);
        // SAFETY: `now` ends at the ring's end at the latest, and `wrapped` is shorter than the ring; both places are
        // mapped and aligned to units, and each slice has room for as many as are copied.
        unsafe {
            units::copy_out(at, now.as_mut_ptr().cast(), now.len());
            units::copy_out(start, wrapped.as_mut_ptr().cast(), wrapped.len());
        }
    }

    fn ring(&self) {
        // Where it cannot be sent, so many lie there that the other side is awake, or gone.
        let _rung_already = rustix::net::send(&self.socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

//! Memory whose words of 24 and 32 bytes can be compared and swapped, for the engines of one process. Every access
//! takes the lock of each cache line it touches.
//!
//! No instruction exchanges more than 16 bytes, so locks are needed. All chains of wide regions run on one [`Wide`].
//! Chains of other regions run on the memory beneath, and take no lock.
//!
//! Invariant: a thread holds a lock during one non-blocking access to bytes of one line, and takes no other lock
//! meanwhile. So no thread waits long, and there is no deadlock.
//! Invariant: the locks are in this process. No other process can hold them, and they end with the process.

use crate::mutants;
use farside_remote::arena::{Geometry, SEGMENT_SIZE};
use farside_remote::memory::WIDE_ALIGN;
use farside_remote::{Key, Memory, Rights, Width};
use std::convert::Infallible;
use std::sync::atomic::{AtomicU8, Ordering};

/// Number of bytes under one lock: a cache line. No wide word crosses a line.
const LINE: u64 = 64;
const _: () = assert!(LINE.is_multiple_of(WIDE_ALIGN));

/// Number of locks. Lines whose numbers differ by a multiple of this share a lock.
const LOCKS: u64 = SEGMENT_SIZE / LINE;

/// Number of polls of a lock before the thread yields its core, which the lock's holder may need.
const LOOKS: u32 = 64;

const FREE: u8 = 0;
const HELD: u8 = 1;

/// A view of the memory `M` with wide words. All threads that run chains of wide regions must share one view: the locks
/// of two views do not exclude each other.
///
/// Unsuitable for memory whose clients run their own chains on the same regions, because those take no lock. A process
/// that dies while it stores a wide word may leave 16-byte units of two different values.
pub struct Wide<M> {
    memory: M,
    locks: Box<[AtomicU8]>,
}

impl<M: Memory<Wait = Infallible>> Wide<M> {
    /// Creates a wide view of `memory`.
    pub fn of(memory: M) -> Wide<M> {
        Wide { memory, locks: (0..LOCKS).map(|_| AtomicU8::new(FREE)).collect() }
    }

    /// Returns the memory beneath, for chains of regions that are not wide, and for the node's own operations.
    #[inline]
    pub fn beneath(&self) -> &M {
        &self.memory
    }

    /// Locks the line of the byte at `at` until the result is dropped.
    #[inline]
    fn hold(&self, at: u64) -> Held<'_> {
        let lock = &self.locks[(at / LINE % LOCKS) as usize];
        let mut looks = 0;
        // Acquire part of SeqCst: pairs with the Release in `Held::drop`, so that the last holder's stores are visible.
        // SeqCst, as for exchanges without locks: earlier stores of this thread to other lines are visible before the
        // lock is taken.
        while lock.swap(HELD, Ordering::SeqCst) == HELD && !mutants::WIDE_WITHOUT_LOCKS.is_on() {
            while lock.load(Ordering::Relaxed) == HELD {
                looks += 1;
                if looks < LOOKS { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
        }
        Held(lock)
    }
}

/// Guard of a locked line. Dropping it unlocks the line.
struct Held<'a>(&'a AtomicU8);

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the exchange in `Wide::hold`.
        self.0.store(FREE, Ordering::Release);
    }
}

/// Returns how many of the `len` bytes from `at` lie in the same line as the first of them.
#[inline]
fn in_line(at: u64, len: usize) -> usize {
    len.min((LINE - at % LINE) as usize)
}

impl<M: Memory<Wait = Infallible>> Memory for Wide<M> {
    type Wait = Infallible;

    #[inline(always)]
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    // These words are read without a lock: rights and extents are records of the node, and never wide words.

    #[inline]
    fn admits(&self, key: Key) -> Result<Rights, Infallible> {
        self.memory.admits(key)
    }

    #[inline]
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Infallible> {
        self.memory.reach(region, at, len)
    }

    fn read(&self, mut at: u64, mut out: &mut [u8]) -> Result<(), Infallible> {
        while !out.is_empty() {
            let (line, rest) = out.split_at_mut(in_line(at, out.len()));
            let held = self.hold(at);
            self.memory.read(at, line)?;
            drop(held);
            (at, out) = (at + line.len() as u64, rest);
        }
        Ok(())
    }

    fn write(&self, mut at: u64, mut bytes: &[u8]) -> Result<(), Infallible> {
        while !bytes.is_empty() {
            let (line, rest) = bytes.split_at(in_line(at, bytes.len()));
            let held = self.hold(at);
            self.memory.write(at, line)?;
            drop(held);
            (at, bytes) = (at + line.len() as u64, rest);
        }
        Ok(())
    }

    fn load(&self, at: u64, width: Width) -> Result<u128, Infallible> {
        let _held = self.hold(at);
        self.memory.load(at, width)
    }

    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Infallible> {
        let _held = self.hold(at);
        self.memory.exchange(at, width, old, new)
    }

    #[inline]
    fn will_fill(&self, at: u64, len: u64) {
        self.memory.will_fill(at, len);
    }

    #[inline(always)]
    fn is_wide(&self) -> bool {
        true
    }

    fn exchange_wide(&self, at: u64, old: &mut [u8], new: &[u8]) -> Result<bool, Infallible> {
        assert!(
            at.is_multiple_of(WIDE_ALIGN),
            "misaligned wide word at {at:#x}: alignment is checked before"
        );
        let mut now = [0; WIDE_ALIGN as usize];
        let now = &mut now[..new.len()];
        let _held = self.hold(at);
        self.memory.read(at, now)?;
        let swapped = now == old;
        if swapped {
            self.memory.write(at, new)?;
        } else {
            old.copy_from_slice(now);
        }
        Ok(swapped)
    }
}

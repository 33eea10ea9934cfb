//! Huge pages that nobody has reserved: whoever is about to fill a stretch asks the kernel for some.
//!
//! Left to itself, Linux gives shared memory small pages, whatever advice it hears, unless `shmem_enabled` is set. But
//! since Linux 6.1 a program may ask for the huge page of one stretch, by `MADV_COLLAPSE`, and for that no setting is
//! needed but that none forbids it. Asked before the stretch is filled, this takes a tenth of the time that its 512
//! faults would.
//!
//! Invariant: each page is asked for once by each process, so that memory which comes and goes costs no more than this.

use super::Mapping;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a huge page.
pub(super) const HUGE: u64 = 2 << 20;

/// Which pages of one mapping were asked for.
pub(super) struct Transparent {
    asked: Box<[AtomicU64]>,
    /// The kernel has none, or never had: to look for them may take long.
    is_over: AtomicBool,
}

impl Transparent {
    /// None was asked for, of a memory of `size` bytes.
    pub(super) fn new(size: u64) -> Transparent {
        let words = (size / HUGE).div_ceil(u64::BITS.into());
        Transparent {
            asked: (0..words).map(|_| AtomicU64::new(0)).collect(),
            is_over: AtomicBool::new(false),
        }
    }

    /// Has the first page made huge. False if it could not be.
    pub(super) fn fill_first(&self, mapping: &Mapping) -> bool {
        self.asked[0].fetch_or(1, Ordering::Relaxed);
        make_huge(mapping, 0) == Outcome::Made
    }

    /// Has the pages made huge in which the `len` bytes from `at` lie, as far as they are whole within the memory, and
    /// until the kernel has none.
    #[cold]
    pub(super) fn fill(&self, mapping: &Mapping, at: u64, len: u64) {
        let whole = mapping.geometry.size() / HUGE;
        let end = at.saturating_add(len).div_ceil(HUGE).min(whole);
        for page in at / HUGE..end {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            let (word, bit) = (&self.asked[(page / 64) as usize], 1 << (page % 64));
            if word.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
                let began = Instant::now();
                if make_huge(mapping, page * HUGE) == Outcome::Over || began.elapsed() >= TOO_LONG {
                    self.is_over.store(true, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Who gets a page after so long makes others wait for it: the kernel had to clear the place for it, or to take it from
/// somebody. Usual are 0.1 to 7 ms.
const TOO_LONG: Duration = Duration::from_millis(50);

/// What came of asking for a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Made,
    /// Somebody was using a small one: it stays as it is.
    Busy,
    /// There is no use in asking for another.
    Over,
}

/// Has the page at `at` made huge, with whatever it holds.
fn make_huge(mapping: &Mapping, at: u64) -> Outcome {
    /// `rustix` has it not, and `libc` not for every C library.
    const MADV_COLLAPSE: libc::c_int = 25;
    let place = mapping.at(at, HUGE as usize);
    // Only what has a page can be made huge.
    // SAFETY: the first page of these, which `mapping` keeps mapped; no byte of it changes.
    let populated = unsafe { madvise(place.cast(), rustix::param::page_size(), Advice::LinuxPopulateWrite) };
    if populated.is_err() {
        return Outcome::Over;
    }
    // SAFETY: likewise all of them.
    if unsafe { libc::madvise(place.cast(), HUGE as usize, MADV_COLLAPSE) } == 0 {
        return Outcome::Made;
    }
    // Not EBUSY, by which it says that the group's limit of memory is reached.
    match Errno::from_io_error(&std::io::Error::last_os_error()) {
        Some(Errno::AGAIN) => Outcome::Busy,
        _ => Outcome::Over,
    }
}

/// Where `len` bytes could be mapped so that a huge page can begin with them, as far as was to be seen a moment ago.
/// Null where nothing was.
pub(super) fn hint(len: usize) -> *mut u8 {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let Some(len) = len.checked_add(HUGE as usize) else { return std::ptr::null_mut() };
    // SAFETY: a new mapping wherever the kernel likes, which nobody may touch.
    let Ok(room) = (unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), flags) }) else {
        return std::ptr::null_mut();
    };
    // SAFETY: exactly what was mapped just now, of which nobody else knows.
    let unmapped = unsafe { munmap(room, len) };
    debug_assert!(unmapped.is_ok(), "unmapping what was mapped succeeds");
    room.cast::<u8>().map_addr(|room| room.next_multiple_of(HUGE as usize))
}

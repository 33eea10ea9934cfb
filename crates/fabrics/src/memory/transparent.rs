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
use rustix::mm::{Advice, madvise};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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

    /// Has the pages made huge in which the `len` bytes from `at` lie, as far as they are whole within the memory.
    /// False if the system makes no page huge, or no more.
    #[cold]
    pub(super) fn fill(&self, mapping: &Mapping, at: u64, len: u64) -> bool {
        let end = (at + len).next_multiple_of(HUGE).min(mapping.geometry.size() / HUGE * HUGE);
        for page in at / HUGE..end / HUGE {
            if self.is_over.load(Ordering::Relaxed) {
                return false;
            }
            let (word, bit) = (&self.asked[(page / 64) as usize], 1 << (page % 64));
            if word.fetch_or(bit, Ordering::Relaxed) & bit == 0 && !make_huge(mapping, page * HUGE) {
                self.is_over.store(true, Ordering::Relaxed);
            }
        }
        !self.is_over.load(Ordering::Relaxed)
    }
}

/// Has the page at `at` made huge, with whatever it holds. False if there is no use in asking for another.
fn make_huge(mapping: &Mapping, at: u64) -> bool {
    /// Neither `rustix` nor `libc` has it.
    const MADV_COLLAPSE: libc::c_int = 25;
    let place = mapping.at(at, HUGE as usize);
    // Only what has a page can be made huge.
    // SAFETY: the first page of these, which `mapping` keeps mapped; no byte of it changes.
    let populated = unsafe { madvise(place.cast(), rustix::param::page_size(), Advice::LinuxPopulateWrite) };
    if populated.is_err() {
        return false;
    }
    // SAFETY: likewise all of them.
    if unsafe { libc::madvise(place.cast(), HUGE as usize, MADV_COLLAPSE) } == 0 {
        return true;
    }
    // Somebody was using a small page: this one stays as it is.
    let errno = Errno::from_io_error(&std::io::Error::last_os_error());
    matches!(errno, Some(Errno::AGAIN | Errno::BUSY))
}

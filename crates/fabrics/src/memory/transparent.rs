//! Huge pages without a reservation: a process that is about to fill memory requests them from the kernel.
//!
//! By default Linux backs shared memory with small pages, even if `madvise` requests huge ones, unless the system's
//! `shmem_enabled` allows them. Since Linux 6.1, `MADV_COLLAPSE` requests a huge page for one range. This request works
//! by default, but a setting may forbid it. A request before the range is filled takes a tenth of the time of the 512
//! page faults that it replaces.
//!
//! Invariant: each process requests each huge page only once, so that memory used again costs no further requests.

use super::Mapping;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Size of a huge page in bytes.
pub(super) const HUGE: u64 = 2 << 20;

/// Record of the huge pages that were requested in one mapping.
pub(super) struct Transparent {
    asked: Box<[AtomicU64]>,
    /// Set when the kernel has no huge pages, or provides them too slowly. Then no further requests are made.
    is_over: AtomicBool,
}

impl Transparent {
    /// Creates the record for a memory of `size` bytes, with no page requested.
    pub(super) fn new(size: u64) -> Transparent {
        let words = (size / HUGE).div_ceil(u64::BITS.into());
        Transparent {
            asked: (0..words).map(|_| AtomicU64::new(0)).collect(),
            is_over: AtomicBool::new(false),
        }
    }

    /// Requests a huge page for the start of the memory. Returns false if that fails.
    pub(super) fn fill_first(&self, mapping: &Mapping) -> bool {
        self.asked[0].fetch_or(1, Ordering::Relaxed);
        make_huge(mapping, 0) == Outcome::Made
    }

    /// Requests the huge pages that contain the `len` bytes from `at` and lie within the memory. Stops when the kernel
    /// has none.
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

/// Maximum time of one request; most requests take 0.1 to 7 ms. After a slower request no more are made, because the
/// kernel had to compact memory or reclaim pages, which delays other threads.
const TOO_LONG: Duration = Duration::from_millis(50);

/// Outcome of a request for a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Made,
    /// One of the small pages was in use, so the range keeps its small pages.
    Busy,
    /// The request failed, and further requests would fail too.
    Over,
}

/// Replaces the small pages at `at` by a huge page with the same content.
fn make_huge(mapping: &Mapping, at: u64) -> Outcome {
    /// Advice number of Linux, defined here because `rustix` lacks it, and `libc` has it only for certain C libraries.
    const MADV_COLLAPSE: libc::c_int = 25;
    let place = mapping.at(at, HUGE as usize);
    // Only a range with at least one populated page can become a huge page, so this populates the first one. SAFETY:
    // the page lies in the range, which `mapping` keeps mapped; no byte of it changes.
    let populated = unsafe { madvise(place.cast(), rustix::param::page_size(), Advice::LinuxPopulateWrite) };
    if populated.is_err() {
        return Outcome::Over;
    }
    // SAFETY: the whole range, which `mapping` keeps mapped; no byte of it changes.
    if unsafe { libc::madvise(place.cast(), HUGE as usize, MADV_COLLAPSE) } == 0 {
        return Outcome::Made;
    }
    // EBUSY is not transient: it means that the cgroup's memory limit is reached.
    match Errno::from_io_error(&std::io::Error::last_os_error()) {
        Some(Errno::AGAIN) => Outcome::Busy,
        _ => Outcome::Over,
    }
}

/// Returns an address, aligned to a huge page, at which `len` bytes can be mapped; null if there is none. The address
/// is only a hint, because another mapping may take the space before.
pub(super) fn hint(len: usize) -> *mut u8 {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let Some(len) = len.checked_add(HUGE as usize) else { return std::ptr::null_mut() };
    // SAFETY: a new mapping at an address of the kernel's choice, without access rights.
    let Ok(room) = (unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), flags) }) else {
        return std::ptr::null_mut();
    };
    // SAFETY: exactly the range mapped above, which no other code knows.
    let unmapped = unsafe { munmap(room, len) };
    debug_assert!(unmapped.is_ok(), "unmapping an existing mapping succeeds");
    room.cast::<u8>().map_addr(|room| room.next_multiple_of(HUGE as usize))
}

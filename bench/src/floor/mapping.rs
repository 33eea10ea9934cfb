//! Shared mapping of the same kind as a node's memory: a memfd that is mapped with `MAP_SHARED`.
//!
//! Invariant: every page is present before the first fetch, so no measurement includes a page fault.
//! Invariant: the file has no name and its descriptor is closed, so no other process can map or write the file.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::slice;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;

use super::HugePages;

/// Size in bytes of the huge page that `MFD_HUGE_2MB` selects.
const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Shared memory of whole pages, which is zero at first.
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    page_size: usize,
}

impl Mapping {
    /// Maps at least `len` bytes on the pages that `huge_pages` selects.
    pub(super) fn create(len: usize, huge_pages: HugePages) -> io::Result<Self> {
        match huge_pages {
            HugePages::No => Self::on_small_pages(len),
            HugePages::Required => Self::on_huge_pages(len).map_err(|cause| no_huge_pages(len, cause)),
            HugePages::IfAvailable => Self::on_huge_pages(len)
                .or_else(|_| Self::on_collapsed_pages(len))
                .or_else(|_| Self::on_small_pages(len)),
        }
    }

    /// Size of one page in bytes.
    pub(super) fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the address of the first byte. The mapping stays until `self` drops.
    #[inline(always)]
    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `base` is mapped for `len` bytes until `self` drops. `&mut self` excludes all other borrowers, and no
        // other mapping of the file exists.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    fn on_small_pages(len: usize) -> io::Result<Self> {
        let mapping = Self::map(len, page_size(), MemfdFlags::CLOEXEC)?;
        // Without this advice, a system with automatic huge pages could change the page size.
        mapping.advise(Advice::LinuxNoHugepage)?;
        mapping.populate()
    }

    fn on_huge_pages(len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        Self::map(len, HUGE_PAGE_SIZE, flags)?.populate()
    }

    /// Maps huge pages that need no reservation. Since Linux 6.1 the kernel collapses small pages to huge pages on
    /// request.
    fn on_collapsed_pages(len: usize) -> io::Result<Self> {
        /// Linux's advice to collapse pages. The constant is missing in `rustix`, and in `libc` for some C libraries.
        const MADV_COLLAPSE: libc::c_int = 25;
        let len = len.checked_next_multiple_of(HUGE_PAGE_SIZE).ok_or(Errno::NOMEM)?;
        let mut mapping = Self::map(len, page_size(), MemfdFlags::CLOEXEC)?;
        for page in mapping.bytes_mut().chunks_exact_mut(HUGE_PAGE_SIZE) {
            page[0] = 1; // Only present pages can be collapsed.
            // SAFETY: the range is exactly the pages of this slice, and no byte of them changes.
            if unsafe { libc::madvise(page.as_mut_ptr().cast(), page.len(), MADV_COLLAPSE) } != 0 {
                return Err(io::Error::last_os_error());
            }
            page[0] = 0;
        }
        mapping.page_size = HUGE_PAGE_SIZE;
        Ok(mapping)
    }

    fn map(len: usize, page_size: usize, flags: MemfdFlags) -> io::Result<Self> {
        let len = len.checked_next_multiple_of(page_size).ok_or(Errno::NOMEM)?;
        let file = memfd_create(c"farside-floor", flags)?;
        ftruncate(&file, len as u64)?;
        let how = MapFlags::SHARED;
        // SAFETY: the kernel chooses a free range for the new mapping; the hint replaces no existing mapping.
        let base = unsafe { mmap(hint(len), len, ProtFlags::READ | ProtFlags::WRITE, how, &file, 0)? };
        Ok(Self { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, len, page_size })
    }

    /// Makes every page present, so that a lack of memory is an error here and not a signal at the first access.
    fn populate(self) -> io::Result<Self> {
        self.advise(Advice::LinuxPopulateWrite)?;
        Ok(self)
    }

    /// Calls `madvise`. Ignores `EINVAL`, with which a kernel refuses unknown advice: `MADV_POPULATE_WRITE` needs
    /// Linux 5.14. On older kernels, filling the memory makes its pages present.
    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is the mapping itself, and no advice used here discards contents.
        match unsafe { madvise(self.base.as_ptr().cast(), self.len, advice) } {
            Err(Errno::INVAL) => Ok(()),
            answer => Ok(answer?),
        }
    }
}

/// Returns an address at which `len` bytes are probably free and which is aligned to a huge page; null if none was
/// found.
fn hint(len: usize) -> *mut c_void {
    let nothing = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let Some(len) = len.checked_add(HUGE_PAGE_SIZE) else { return ptr::null_mut() };
    // SAFETY: the kernel chooses the address, so the new mapping overlaps no existing one.
    let Ok(room) = (unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), nothing) }) else {
        return ptr::null_mut();
    };
    // SAFETY: the range is exactly the mapping above, to which no other reference exists.
    // An error would leave a reserved address range, but no memory.
    let _ = unsafe { munmap(room, len) };
    room.map_addr(|room| room.next_multiple_of(HUGE_PAGE_SIZE))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` mapped exactly this range, and no slice of it outlives `self`.
        // An error would mean that the range is not mapped; then there is nothing to undo.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

// SAFETY: a `Mapping` is plain memory with one owner, like a `Box<[u8]>`.
unsafe impl Send for Mapping {}
// SAFETY: through `&Mapping` the memory can only be accessed by `base`, whose users promise that their accesses from
// several threads are no data race.
unsafe impl Sync for Mapping {}

fn no_huge_pages(len: usize, cause: io::Error) -> io::Error {
    let pages = len.div_ceil(HUGE_PAGE_SIZE);
    let remedy = format!(
        "{pages} pages of 2 MiB are not available ({cause}); reserve them: sysctl vm.nr_hugepages={pages}"
    );
    io::Error::new(cause.kind(), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_pages_are_whole_zeroed_and_writable() {
        let mut mapping = Mapping::create(5000, HugePages::No).unwrap();
        assert_eq!(mapping.bytes_mut().len() % mapping.page_size(), 0);
        assert!(mapping.bytes_mut().iter().all(|&byte| byte == 0));
        mapping.bytes_mut()[4999] = 7;
        assert_eq!(mapping.bytes_mut()[4999], 7);
    }

    #[test]
    fn a_length_beyond_the_address_space_is_an_error() {
        assert!(Mapping::create(usize::MAX, HugePages::No).is_err());
        assert!(Mapping::create(usize::MAX / 4, HugePages::No).is_err());
    }

    #[test]
    fn without_huge_pages_the_refusal_names_the_remedy() {
        let beyond_any_reserve = 1 << 45;
        let refusal = Mapping::create(beyond_any_reserve, HugePages::Required).err().unwrap();
        assert!(refusal.to_string().contains("sysctl vm.nr_hugepages=16777216"), "{refusal}");
        let mapping = Mapping::create(4096, HugePages::IfAvailable).unwrap();
        assert!([page_size(), HUGE_PAGE_SIZE].contains(&mapping.page_size()));
    }
}

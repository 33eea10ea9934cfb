//! One shared mapping, made as far memory makes its own: a memfd, mapped `MAP_SHARED`.
//!
//! Invariant: every page is present before the first fetch, so that no measurement pays for a page fault.
//! Invariant: the file has no name and its descriptor is closed, so nobody else can map it or write to it.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::slice;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;

use super::HugePages;

/// Bytes in the huge page that `MFD_HUGE_2MB` asks for.
const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Zeroed shared memory, whole pages of it.
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    page_size: usize,
}

impl Mapping {
    /// Maps at least `len` bytes on the pages that `huge_pages` asks for.
    pub(super) fn create(len: usize, huge_pages: HugePages) -> io::Result<Self> {
        match huge_pages {
            HugePages::No => Self::on_small_pages(len),
            HugePages::Required => Self::on_huge_pages(len).map_err(|cause| no_huge_pages(len, cause)),
            HugePages::IfAvailable => Self::on_huge_pages(len)
                .or_else(|_| Self::on_collapsed_pages(len))
                .or_else(|_| Self::on_small_pages(len)),
        }
    }

    /// Bytes in one page.
    pub(super) fn page_size(&self) -> usize {
        self.page_size
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `base` is mapped for `len` bytes until `self` drops, and only `bytes_mut` hands out a way
        // to write them, which borrows `self` exclusively.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` excludes every other borrower, and no other mapping of the file
        // exists.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    fn on_small_pages(len: usize) -> io::Result<Self> {
        let mapping = Self::map(len, page_size(), MemfdFlags::CLOEXEC)?;
        // Where shared memory gets huge pages by itself this keeps the page size what it is said to be.
        mapping.advise(Advice::LinuxNoHugepage)?;
        mapping.populate()
    }

    fn on_huge_pages(len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        Self::map(len, HUGE_PAGE_SIZE, flags)?.populate()
    }

    /// On huge pages that nobody has reserved: since Linux 6.1 the kernel makes a stretch one where it is asked to.
    fn on_collapsed_pages(len: usize) -> io::Result<Self> {
        /// `rustix` has it not, and `libc` not for every C library.
        const MADV_COLLAPSE: libc::c_int = 25;
        let len = len.checked_next_multiple_of(HUGE_PAGE_SIZE).ok_or(Errno::NOMEM)?;
        let mut mapping = Self::map(len, page_size(), MemfdFlags::CLOEXEC)?;
        for page in mapping.bytes_mut().chunks_exact_mut(HUGE_PAGE_SIZE) {
            page[0] = 1; // Only what has a page can become a huge one.
            // SAFETY: exactly the pages of this slice; no byte of them changes.
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
        // SAFETY: a new mapping, where the kernel finds room; the hint takes nobody's place.
        let base = unsafe { mmap(hint(len), len, ProtFlags::READ | ProtFlags::WRITE, how, &file, 0)? };
        Ok(Self { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, len, page_size })
    }

    /// Makes every page present. Here, and not at the first touch, a lack of memory is an error and not a
    /// signal.
    fn populate(self) -> io::Result<Self> {
        self.advise(Advice::LinuxPopulateWrite)?;
        Ok(self)
    }

    /// Gives advice; a kernel that does not know it (`EINVAL`; populating came with Linux 5.14) does without,
    /// and filling the memory makes its pages present.
    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is the mapping itself, and the advice used here never discards contents.
        match unsafe { madvise(self.base.as_ptr().cast(), self.len, advice) } {
            Err(Errno::INVAL) => Ok(()),
            answer => Ok(answer?),
        }
    }
}

/// Where `len` bytes could be mapped so that a huge page can begin with them, as far as was to be seen a moment ago.
/// Null where nothing was.
fn hint(len: usize) -> *mut c_void {
    let nothing = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let Some(len) = len.checked_add(HUGE_PAGE_SIZE) else { return ptr::null_mut() };
    // SAFETY: the kernel chooses the address, so the new mapping overlaps nothing that anybody holds.
    let Ok(room) = (unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), nothing) }) else {
        return ptr::null_mut();
    };
    // SAFETY: exactly what was mapped just now, of which nobody else knows.
    // An error would leave a reserved address, and no memory.
    let _ = unsafe { munmap(room, len) };
    room.map_addr(|room| room.next_multiple_of(HUGE_PAGE_SIZE))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` mapped exactly this range, and no slice of it outlives `self`.
        // An error would mean that the range is not mapped, and then there is nothing to undo.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

// SAFETY: a `Mapping` is plain memory with one owner, as a `Box<[u8]>` is; the borrow rules of `bytes` and
// `bytes_mut` keep writers and readers apart, whichever threads they are on.
unsafe impl Send for Mapping {}
// SAFETY: through `&Mapping` the memory can only be read.
unsafe impl Sync for Mapping {}

fn no_huge_pages(len: usize, cause: io::Error) -> io::Error {
    let pages = len.div_ceil(HUGE_PAGE_SIZE);
    let remedy = format!(
        "{pages} pages of 2 MiB are not free ({cause}); reserve them: sysctl vm.nr_hugepages={pages}"
    );
    io::Error::new(cause.kind(), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_pages_are_zeroed_whole_and_writable() {
        let mut mapping = Mapping::create(5000, HugePages::No).unwrap();
        assert_eq!(mapping.bytes().len() % mapping.page_size(), 0);
        assert!(mapping.bytes().iter().all(|&byte| byte == 0));
        mapping.bytes_mut()[4999] = 7;
        assert_eq!(mapping.bytes()[4999], 7);
    }

    #[test]
    fn a_length_beyond_the_address_space_is_an_error() {
        assert!(Mapping::create(usize::MAX, HugePages::No).is_err());
        assert!(Mapping::create(usize::MAX / 4, HugePages::No).is_err());
    }

    #[test]
    fn without_huge_pages_the_fall_back_says_its_page_size_and_the_refusal_its_remedy() {
        let beyond_any_reserve = 1 << 45;
        let refusal = Mapping::create(beyond_any_reserve, HugePages::Required).err().unwrap();
        assert!(refusal.to_string().contains("sysctl vm.nr_hugepages=16777216"), "{refusal}");
        let mapping = Mapping::create(4096, HugePages::IfAvailable).unwrap();
        assert!([page_size(), HUGE_PAGE_SIZE].contains(&mapping.page_size()));
    }
}

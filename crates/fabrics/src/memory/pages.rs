//! Which pages back a node's memory: the default's 4 KiB, or 2 MiB where the system has some reserved.
//!
//! Huge pages make random fetches 1.3 to 2 times faster. Linux gives them to shared memory only if some are
//! reserved (`vm.nr_hugepages`) or `shmem_enabled` allows more.

use super::{MappingError, io};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;

/// Bytes of the pages that back a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSize(pub u64);

/// Which pages to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pages {
    /// 2 MiB if enough are reserved, else 4 KiB.
    #[default]
    Auto,
    /// 4 KiB.
    Small,
    /// 2 MiB, or an error that says how to reserve them.
    Huge,
}

const HUGE: u64 = 2 << 20;

/// A descriptor of `size` bytes that nobody can resize, and its page size.
pub(super) fn anonymous(size: u64, pages: Pages) -> Result<(OwnedFd, PageSize), MappingError> {
    if pages != Pages::Small {
        match huge(size) {
            Ok(fd) => return Ok((fd, PageSize(HUGE))),
            Err(_) if pages == Pages::Auto => {}
            Err(error) => return Err(error),
        }
    }
    let fd = sealed(size, MemfdFlags::empty())?;
    let page_size = of_file(&fd)?;
    Ok((fd, page_size))
}

/// Huge pages are reserved by writing to the file's whole length, so that a later access cannot fail.
fn huge(size: u64) -> Result<OwnedFd, MappingError> {
    let needed = size.div_ceil(HUGE);
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok())
        .unwrap_or(0);
    let remedy = || {
        MappingError::Foreign(format!(
            "{needed} huge pages of 2 MiB are needed and {free} are free: reserve them with \
             'sysctl vm.nr_hugepages={needed}', or go without by --pages small"
        ))
    };
    if free < needed || !size.is_multiple_of(HUGE) {
        return Err(remedy());
    }
    let fd = sealed(size, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).map_err(|_| remedy())?;
    rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, size).map_err(|_| remedy())?;
    Ok(fd)
}

fn sealed(size: u64, flags: MemfdFlags) -> Result<OwnedFd, MappingError> {
    let fd = rustix::fs::memfd_create("farside", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(io("make shared memory"))?;
    rustix::fs::ftruncate(&fd, size).map_err(io("size the shared memory"))?;
    // So that no peer can cut the memory from under us.
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(io("seal the shared memory"))?;
    Ok(fd)
}

/// The page size of a file's memory.
pub(super) fn of_file(fd: &OwnedFd) -> Result<PageSize, MappingError> {
    const HUGETLBFS_MAGIC: i64 = 0x958458f6;
    let stat = rustix::fs::fstatfs(fd).map_err(io("look at the node's memory"))?;
    let huge = i64::from(stat.f_type) & 0xffff_ffff == HUGETLBFS_MAGIC;
    Ok(PageSize(if huge { HUGE } else { rustix::param::page_size() as u64 }))
}

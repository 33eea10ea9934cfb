//! The pages behind a node's memory: of 4 KiB by default, or of 2 MiB if enough huge pages are reserved.
//!
//! Huge pages make random reads 1.3 to 2 times faster. If none are reserved (`vm.nr_hugepages`), small pages may become
//! huge ones when they are filled, as [`super::transparent`] describes.

use super::transparent::HUGE;
use super::{Found, MappingError, io};
use farside_remote::arena::{Geometry, header};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Size in bytes of the pages behind a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSize(pub u64);

/// Page size to request for a new memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pages {
    /// Pages of 2 MiB if enough are reserved. Otherwise pages of 4 KiB that become pages of 2 MiB when they are filled,
    /// if the kernel supports it.
    #[default]
    Auto,
    /// Pages of 4 KiB.
    Small,
    /// Pages of 2 MiB. If too few are reserved, the result is an error that explains how to reserve them.
    Huge,
}

/// Returns a descriptor of `size` bytes of anonymous memory that no process can resize, and the memory's page size.
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

/// Returns a descriptor of `size` bytes of reserved huge pages. Allocates all of them now, so that no later access can
/// fail.
fn huge(size: u64) -> Result<OwnedFd, MappingError> {
    let needed = size.div_ceil(HUGE);
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok())
        .unwrap_or(0);
    let remedy = || {
        MappingError::Foreign(format!(
            "{needed} huge pages of 2 MiB are needed and {free} are free: reserve them with \
             'sysctl vm.nr_hugepages={needed}', or use --pages small"
        ))
    };
    if free < needed || !size.is_multiple_of(HUGE) {
        return Err(remedy());
    }
    let fd = sealed(size, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).map_err(|_| remedy())?;
    rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, size).map_err(|_| remedy())?;
    Ok(fd)
}

/// Returns a descriptor of `size` zero bytes that no process can resize.
pub(crate) fn sealed(size: u64, flags: MemfdFlags) -> Result<OwnedFd, MappingError> {
    let fd = rustix::fs::memfd_create("farside", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(io("create shared memory"))?;
    rustix::fs::ftruncate(&fd, size).map_err(io("resize the shared memory"))?;
    // With these seals, no peer can truncate the memory while this process uses it.
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(io("seal the shared memory"))?;
    Ok(fd)
}

/// Returns the size of a node's memory after checking that it cannot shrink. Anonymous memory is sealed, so that not
/// even the node can truncate it while clients use it. A memory file cannot be sealed.
pub(super) fn sealed_size(fd: &OwnedFd) -> Result<u64, MappingError> {
    let seals = rustix::fs::fcntl_get_seals(fd);
    // The size is read after the seals: a size read before them could be outdated by a truncation.
    let stat = rustix::fs::fstat(fd).map_err(io("inspect the node's memory"))?;
    // A file on a disk reports no seals. A file on tmpfs reports seals too, but differs from anonymous memory by its
    // links.
    let is_file = seals.is_err() || stat.st_nlink > 0;
    if is_file || seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::SEAL)) {
        return Ok(stat.st_size as u64);
    }
    Err(MappingError::Foreign(
        "the node's memory is not sealed and could be truncated while in use: connect to a node of this release".into(),
    ))
}

/// First bytes of a memory file while the file is being created, in place of a header's magic and version. Random, so
/// that no other program writes them. The memory's size follows, at the same offset as in the header.
pub(super) const UNFINISHED: [u8; 16] =
    [0xd3, 0x5a, 0x0f, 0x91, 0xe6, 0x47, 0xbc, 0x28, 0x73, 0xf4, 0x1d, 0xa8, 0x62, 0xcb, 0x99, 0x3e];
const MARK_SIZE: usize = UNFINISHED.len() + 8;
const _: () =
    assert!(header::SIZE_AT == UNFINISHED.len() as u64 && header::VERSION_AT + 8 == header::SIZE_AT);

/// Returns the bytes that are written first into a new memory file of `size` bytes.
pub(super) fn mark(size: u64) -> [u8; MARK_SIZE] {
    let mut mark = [0; MARK_SIZE];
    mark[..UNFINISHED.len()].copy_from_slice(&UNFINISHED);
    mark[UNFINISHED.len()..].copy_from_slice(&size.to_le_bytes());
    mark
}

/// Whether the creator of the file with this beginning and length died before the file was complete. Such a file has a
/// mark with a valid size, and is not longer than that size.
fn is_unfinished(beginning: &[u8], len: u64) -> bool {
    let Some(&size) = beginning.last_chunk::<8>() else { return false };
    let size = u64::from_le_bytes(size);
    beginning == mark(size) && Geometry::of(size).is_some() && len <= size
}

/// Mode of a memory file: only its owner has access.
const MODE: u32 = 0o600;

/// Opens or creates the memory file at `path`. Returns its descriptor, a second descriptor that holds the lock, and the
/// content found.
pub(super) fn file(path: &Path, size: u64) -> Result<(OwnedFd, OwnedFd, Found), MappingError> {
    let named = |doing: &str, error: std::io::Error| {
        MappingError::Foreign(format!(
            "could not {doing} the memory file {}: {error}; fix that, or give another --memory-file",
            path.display()
        ))
    };
    let open = || {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(MODE).open(path)
    };
    let lock = open().map_err(|error| named("open", error))?;
    let locked = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    if locked.is_err() {
        return Err(MappingError::Foreign(format!(
            "another node serves the memory file {}: use that one, or stop it",
            path.display()
        )));
    }
    let file = open().map_err(|error| named("open", error))?;
    let found = file.metadata().map_err(|error| named("inspect", error))?;
    if !found.is_file() {
        return Err(MappingError::Foreign(format!("{} is not a regular file: name another", path.display())));
    }
    let mut beginning = [0; MARK_SIZE];
    let read = std::os::unix::fs::FileExt::read_at(&file, &mut beginning, 0)
        .map_err(|error| named("read", error))?;
    if found.len() == 0 || is_unfinished(&beginning[..read], found.len()) {
        // Without this, an existing empty file could stay accessible to other users.
        file.set_permissions(PermissionsExt::from_mode(MODE))
            .map_err(|error| named("set the mode of", error))?;
        // The header replaces the mark at the end. If the creator dies before that, the mark stays.
        let marked =
            file.set_len(0).and_then(|()| std::os::unix::fs::FileExt::write_all_at(&file, &mark(size), 0));
        marked.map_err(|error| named("write to", error))?;
        // Allocates all blocks now, so that a full disk is an error here and does not kill the process later.
        let allocated = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size);
        if let Err(errno) = allocated {
            let _stays_empty = file.set_len(0);
            return Err(named(&format!("allocate {size} bytes for"), errno.into()));
        }
        return Ok((file.into(), lock.into(), Found::Nothing));
    }
    if Geometry::of(found.len()).is_none() {
        return Err(MappingError::Foreign(format!(
            "{} is not a farside memory: name another file",
            path.display()
        )));
    }
    if found.len() != size {
        return Err(MappingError::Foreign(format!(
            "the memory file {} has {} bytes: give --memory {}, or name another file",
            path.display(),
            found.len(),
            found.len()
        )));
    }
    Ok((file.into(), lock.into(), Found::Memory))
}

/// Returns the page size of a memory file.
pub(super) fn of_file(fd: &OwnedFd) -> Result<PageSize, MappingError> {
    const HUGETLBFS_MAGIC: i64 = 0x958458f6;
    let stat = rustix::fs::fstatfs(fd).map_err(io("inspect the node's memory"))?;
    let huge = stat.f_type as i64 & 0xffff_ffff == HUGETLBFS_MAGIC;
    Ok(PageSize(if huge { HUGE } else { rustix::param::page_size() as u64 }))
}

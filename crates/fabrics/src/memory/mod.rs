//! A node's memory as mapped into this process, and the operations that chains perform on it.
//!
//! Invariant: every access is bounds-checked against the mapping, for any address. The keys of chains are checked
//! earlier. So an address outside the mapping means a bug in this project, and panics.
//! Invariant: aligned 16-byte units are copied and exchanged atomically, for all processes that map the memory.

mod pages;
mod transparent;
pub(crate) mod units;
mod wide;

pub(crate) use pages::sealed;
pub use pages::{PageSize, Pages};
pub use wide::Wide;

use farside_remote::arena::class::Class;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::{Arena, Buffer, Geometry, header};
use farside_remote::{Key, Memory, Rights, Width};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use transparent::{HUGE, Transparent};
use units::UNIT;

/// The mapped memory of a whole node. Shared by all threads that use it; unmapped when the last one drops it.
pub struct Mapping {
    base: *mut u8,
    geometry: Geometry,
    page_size: PageSize,
    /// The huge pages requested so far; `None` if small pages cannot become huge ones.
    transparent: Option<Transparent>,
    fd: OwnedFd,
    backing: Backing,
    /// Whether no page may be returned to the system, since a device uses them.
    keeps_pages: AtomicBool,
}

/// Storage behind a memory.
enum Backing {
    /// Anonymous memory, which the system frees when its last user unmaps it.
    Anonymous,
    /// A file with all blocks allocated. While the lock's descriptor is open, no other node can serve this file. The
    /// lock has a descriptor of its own, because the file's main descriptor is shared with clients, which may outlive
    /// this node.
    File { _lock: OwnedFd },
}

/// Content of a memory file at the time when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// No memory: the file is new.
    Nothing,
    /// The memory of a node.
    Memory,
}

// SAFETY: the memory is shared with other processes by design; every access to it is one of the atomic ones below.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Why a memory cannot be created or mapped. The message names a remedy.
#[derive(Debug)]
pub enum MappingError {
    /// The CPU lacks the required instruction that the text names.
    Unsupported(&'static str),
    /// A node cannot have a memory of this size in bytes.
    Size(u64),
    /// A system call failed.
    Io {
        /// The attempted operation.
        doing: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not a memory that this program can use; the text gives the reason.
    Foreign(String),
}

impl std::fmt::Display for MappingError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MappingError::Unsupported(reason) => f.write_str(reason),
            MappingError::Size(size) => write!(
                f,
                "a node's memory cannot have {size} bytes: give a multiple of 1 MiB from {} MiB to {} GiB",
                Geometry::SIZE_MIN >> 20,
                Geometry::SIZE_MAX >> 30
            ),
            MappingError::Io { doing, source } => write!(f, "could not {doing}: {source}"),
            MappingError::Foreign(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for MappingError {}

fn io(doing: &'static str) -> impl FnOnce(rustix::io::Errno) -> MappingError {
    move |errno| MappingError::Io { doing, source: errno.into() }
}

impl Mapping {
    /// Creates a memory of `size` bytes, all zero except the header. Other processes can map it by its descriptor.
    ///
    /// # Errors
    /// The CPU lacks an instruction, the size is invalid, or a system call fails; nothing is kept.
    pub fn create(size: u64, pages: Pages) -> Result<Mapping, MappingError> {
        let geometry = Geometry::of(size).ok_or(MappingError::Size(size))?;
        let (fd, page_size) = pages::anonymous(size, pages)?;
        let mut mapping = Mapping::map(fd, geometry, page_size)?;
        if pages == Pages::Auto && page_size.0 < HUGE {
            let transparent = Transparent::new(size);
            mapping.transparent = transparent.fill_first(&mapping).then_some(transparent);
            mapping.put(header::TRANSPARENT_AT, mapping.transparent.is_some().into());
        }
        mapping.write_header()?;
        Ok(mapping)
    }

    /// Whether the kernel turns small pages into huge ones without a reservation, as [`Pages::Auto`] requests.
    ///
    /// # Errors
    /// No memory can be created at all, for the reason that the error gives.
    pub fn makes_pages_huge() -> Result<bool, MappingError> {
        let size = Geometry::SIZE_MIN;
        let geometry = Geometry::of(size).ok_or(MappingError::Size(size))?;
        let (fd, page_size) = pages::anonymous(size, Pages::Small)?;
        let mapping = Mapping::map(fd, geometry, page_size)?;
        Ok(Transparent::new(size).fill_first(&mapping))
    }

    /// Opens and locks the memory file at `path`; creates it with `size` bytes if it is absent.
    ///
    /// # Errors
    /// The errors of [`Mapping::create`]; or the file has other content or another size, or another node serves it. An
    /// existing file is left unchanged.
    pub fn open(path: &Path, size: u64) -> Result<(Mapping, Found), MappingError> {
        let geometry = Geometry::of(size).ok_or(MappingError::Size(size))?;
        let (fd, lock, found) = pages::file(path, size)?;
        let page_size = pages::of_file(&fd)?;
        let mut mapping = Mapping::map(fd, geometry, page_size)?;
        mapping.backing = Backing::File { _lock: lock };
        match found {
            Found::Nothing => mapping.write_header()?,
            Found::Memory => mapping.check_header().map_err(|error| match error {
                MappingError::Foreign(reason) => {
                    MappingError::Foreign(format!("{}: {reason}", path.display()))
                }
                error => error,
            })?,
        }
        Ok((mapping, found))
    }

    /// Maps the memory of a node by the descriptor that the node sent.
    ///
    /// # Errors
    /// The errors of [`Mapping::create`]; or the descriptor is not a node's memory, has another layout, or is anonymous
    /// memory without seals.
    pub fn attach(fd: OwnedFd) -> Result<Mapping, MappingError> {
        let size = pages::sealed_size(&fd)?;
        let geometry = Geometry::of(size).ok_or(MappingError::Size(size))?;
        let page_size = pages::of_file(&fd)?;
        let mut mapping = Mapping::map(fd, geometry, page_size)?;
        mapping.check_header()?;
        mapping.transparent = (mapping.get(header::TRANSPARENT_AT) != 0).then(|| Transparent::new(size));
        Ok(mapping)
    }

    fn map(fd: OwnedFd, geometry: Geometry, page_size: PageSize) -> Result<Mapping, MappingError> {
        units::supported().map_err(MappingError::Unsupported)?;
        let len = usize::try_from(geometry.size()).map_err(|_| MappingError::Size(geometry.size()))?;
        // SAFETY: a new mapping at an address of the kernel's choice; the hint replaces no existing mapping. The bytes
        // are only accessed atomically. If the file were truncated, an access beyond its end would raise SIGBUS, which
        // ends the process and violates no rule of the language. Anonymous memory is sealed against truncation:
        // `pages::anonymous` seals it, and `attach` checks the seals. A memory file cannot be sealed: its owner, who
        // alone may write it (mode 0600), must not truncate it while any process maps it.
        let base = unsafe {
            rustix::mm::mmap(
                transparent::hint(len).cast(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &fd,
                0,
            )
        }
        .map_err(io("map the node's memory"))?
        .cast::<u8>();
        let backing = Backing::Anonymous;
        let mapping =
            Mapping { base, geometry, page_size, transparent: None, fd, backing, keeps_pages: false.into() };
        // Requests huge pages where the kernel has them for shared memory. A failure is harmless. SAFETY: covers
        // exactly the new mapping; the advice changes no bytes.
        let _advice_only = unsafe { rustix::mm::madvise(base.cast(), len, Advice::LinuxHugepage) };
        // A forked child would run chains in its parent's session.
        // SAFETY: as above.
        unsafe { rustix::mm::madvise(base.cast(), len, Advice::LinuxDontFork) }
            .map_err(io("exclude the node's memory from forked processes"))?;
        Ok(mapping)
    }

    fn write_header(&self) -> Result<(), MappingError> {
        let mut incarnation = [0; 8];
        rustix::rand::getrandom(&mut incarnation, rustix::rand::GetRandomFlags::empty())
            .map_err(io("draw random bytes"))?;
        self.put(header::SIZE_AT, self.geometry.size());
        self.put(header::INCARNATION_AT, u64::from_le_bytes(incarnation));
        // Magic and version are stored in one exchange. If the creator dies before it, the memory is not valid, and a
        // memory file still has the mark of an unfinished one in this place.
        const { assert!(header::VERSION_AT == header::MAGIC_AT + 8) }
        let made = u128::from(header::MAGIC) | u128::from(header::VERSION) << 64;
        let Ok(mut old) = self.load(header::MAGIC_AT, Width::W16);
        while let Ok(Err(now)) = self.exchange(header::MAGIC_AT, Width::W16, old, made) {
            old = now;
        }
        Ok(())
    }

    fn check_header(&self) -> Result<(), MappingError> {
        let (magic, version) = (self.get(header::MAGIC_AT), self.get(header::VERSION_AT));
        if magic != header::MAGIC {
            return Err(MappingError::Foreign(
                "this is not a farside memory: name a file that a node created by --memory-file".into(),
            ));
        }
        if version != header::VERSION {
            return Err(MappingError::Foreign(format!(
                "the memory has layout {version}, this program knows layout {}: use the same release on both sides",
                header::VERSION
            )));
        }
        if self.get(header::SIZE_AT) != self.geometry.size() {
            return Err(MappingError::Foreign(format!(
                "the memory's header says {} bytes, but it has {}: it was truncated or extended; restore it",
                self.get(header::SIZE_AT),
                self.geometry.size()
            )));
        }
        Ok(())
    }

    /// Random number drawn when the memory was created. Distinguishes it from other memories.
    pub fn incarnation(&self) -> u64 {
        self.get(header::INCARNATION_AT)
    }

    /// Size of the pages behind the memory. 2 MiB also if small pages are to become huge ones, even if the kernel then
    /// has none.
    pub fn page_size(&self) -> PageSize {
        if self.transparent.is_some() { PageSize(HUGE) } else { self.page_size }
    }

    /// Returns the descriptor by which other processes map the same memory.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the memory as an arena: its records, segments and buffers.
    #[inline]
    pub fn arena(&self) -> Arena<'_, Mapping> {
        Arena::of(self)
    }

    /// Returns `len` bytes from `at` to the system; they then read as zeros.
    ///
    /// # Errors
    /// A system call failed; the bytes may be partly zeroed.
    ///
    /// # Panics
    /// If the range is not within the memory.
    pub fn discard(&self, at: u64, len: u64) -> Result<(), MappingError> {
        self.at(at, len as usize);
        if self.keeps_pages.load(Ordering::Acquire) {
            return Err(MappingError::Foreign("a device uses the pages: write zeros instead".into()));
        }
        if self.page_size.0 > len {
            // Some kernels only punch whole huge pages, and still report success.
            return Err(MappingError::Foreign("less than a page cannot be discarded: write zeros".into()));
        }
        let flags = match self.backing {
            Backing::Anonymous => {
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE
            }
            // The blocks stay allocated: on a full disk, touching a hole would kill the process.
            Backing::File { .. } => rustix::fs::FallocateFlags::ZERO_RANGE,
        };
        rustix::fs::fallocate(&self.fd, flags, at, len).map_err(io("return memory to the system"))
    }

    /// Keeps all pages from now on: [`Mapping::discard`] fails. A device that was given pages would go on using them
    /// after they were returned to the system, and this process would see others.
    pub fn keep_pages(&self) {
        self.keeps_pages.store(true, Ordering::Release);
    }

    /// Fills the pages of `len` bytes from `at`, which a device would otherwise do when it is given them.
    ///
    /// # Errors
    /// The system has no memory for them, or does not fill pages on request.
    #[cfg(feature = "verbs")]
    pub(crate) fn fill_pages(&self, at: u64, len: u64) -> rustix::io::Result<()> {
        let start = self.place(at, len);
        // SAFETY: the bytes are in the mapping; the advice changes none of them.
        unsafe { rustix::mm::madvise(start.cast(), len as usize, Advice::LinuxPopulateWrite) }
    }

    /// Returns the address of the `len` mapped bytes at offset `at`, for a device.
    #[cfg(feature = "verbs")]
    pub(crate) fn place(&self, at: u64, len: u64) -> *mut u8 {
        self.at(at, usize::try_from(len).expect("the memory is mapped, so its size is a usize"))
    }

    /// Returns the address of the `len` mapped bytes at offset `at`.
    #[inline(always)]
    fn at(&self, at: u64, len: usize) -> *mut u8 {
        let size = self.geometry.size();
        if len as u64 > size || at > size - len as u64 {
            outside(at, len, size);
        }
        // SAFETY: within the mapping, as just checked.
        unsafe { self.base.add(at as usize) }
    }

    /// Returns the address of the aligned word of `WIDTH` bytes at offset `at`.
    #[inline(always)]
    fn aligned<const WIDTH: usize>(&self, at: u64) -> *mut u8 {
        const { assert!(WIDTH as u64 <= Geometry::SIZE_MIN && WIDTH.is_power_of_two()) }
        let size = self.geometry.size();
        // SAFETY: `Geometry::of` returns no geometry smaller than `SIZE_MIN`. Knowing that, the compiler removes the
        // check below for words of a fixed record.
        unsafe { std::hint::assert_unchecked(size >= Geometry::SIZE_MIN) };
        // The mapping is page-aligned, so a word is aligned if its offset is.
        if at > size - WIDTH as u64 || !at.is_multiple_of(WIDTH as u64) {
            misplaced(at, WIDTH, size);
        }
        // SAFETY: within the mapping, as just checked: no geometry is smaller than a word.
        unsafe { self.base.add(at as usize) }
    }

    #[inline(always)]
    fn word(&self, at: u64) -> &AtomicU64 {
        let place = self.aligned::<8>(at);
        // SAFETY: mapped as long as `self` lives, aligned, and accessed atomically by all processes.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }

    #[inline]
    fn get(&self, at: u64) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    fn put(&self, at: u64, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }

    /// Stores an 8-byte word that only this process writes.
    #[inline]
    pub(crate) fn publish(&self, at: u64, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }

    /// Stores like [`Mapping::publish`]; the word is visible to all processes before any later access of this thread.
    #[inline]
    pub(crate) fn publish_and_fence(&self, at: u64, value: u64) {
        self.word(at).swap(value, Ordering::SeqCst);
        #[cfg(not(target_arch = "x86_64"))] // On x86-64 an exchange is a full fence.
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Announces that the node is about to sleep and needs a wake-up, or that it is awake.
    pub fn set_node_sleeps(&self, sleeps: bool) {
        self.word(header::NODE_SLEEPS_AT).store(u64::from(sleeps), Ordering::SeqCst);
    }

    /// Whether the node sleeps and needs a wake-up.
    #[inline]
    pub fn node_sleeps(&self) -> bool {
        self.word(header::NODE_SLEEPS_AT).load(Ordering::SeqCst) != 0
    }

    /// Whether the caller must wake the node. Of several callers, only one gets true each time the node sleeps.
    pub(crate) fn is_to_ring_node(&self) -> bool {
        self.node_sleeps() && self.word(header::NODE_SLEEPS_AT).swap(0, Ordering::SeqCst) != 0
    }

    /// Copies the bytes at `at` to `out`. All of them must lie within one unit of 16 bytes.
    #[inline(never)]
    fn read_within_unit(&self, at: u64, out: &mut [u8]) {
        let base = at & !(UNIT as u64 - 1);
        // SAFETY: the unit around a mapped byte is mapped, as the mapping is page-aligned.
        let unit = unsafe { units::load(self.at(base, UNIT)) };
        put_first_bytes(unit >> (8 * (at - base)), out);
    }

    /// Copies `bytes` to `at`, all within one unit of 16 bytes. Writes the largest possible aligned words, but no byte
    /// beyond the given ones.
    #[inline]
    fn write_within_unit(&self, mut at: u64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let aligned = 1usize << at.trailing_zeros().min(3);
            let width = aligned.min(1 << bytes.len().ilog2());
            let place = self.at(at, width);
            let (word, rest) = bytes.split_at(width);
            // SAFETY: mapped as long as `self` lives, aligned to `width`, and accessed atomically by all processes.
            unsafe {
                match *word {
                    [a] => AtomicU8::from_ptr(place).store(a, Ordering::Release),
                    [a, b] => {
                        AtomicU16::from_ptr(place.cast()).store(u16::from_ne_bytes([a, b]), Ordering::Release)
                    }
                    [a, b, c, d] => AtomicU32::from_ptr(place.cast())
                        .store(u32::from_ne_bytes([a, b, c, d]), Ordering::Release),
                    _ => AtomicU64::from_ptr(place.cast())
                        .store(u64::from_ne_bytes(word.try_into().expect("eight bytes")), Ordering::Release),
                }
            }
            (at, bytes) = (at + width as u64, rest);
        }
    }

    // Prefetching: loads the memory that a chain will touch while other chains run.

    /// Guesses the bytes, at most `len`, to which the pointer at `at` leads. Checks only that the pointer and these
    /// bytes lie within the memory.
    #[inline(always)]
    pub(crate) fn guess_pointee(&self, at: u64, len: u32, bounded: bool) -> Option<Stretch> {
        if !at.is_multiple_of(16) || !self.holds(at, 16) {
            return None;
        }
        let Ok(word) = self.load(at, Width::W16);
        let bound = if bounded { (word >> 64) as u32 } else { u32::MAX };
        Some(Stretch { at: word as u64, len: len.min(bound) }).filter(|stretch| self.has(stretch))
    }

    /// Guesses which buffer the session's next ALLOCATE in the region will take: the first one, or the one after
    /// `before`. Prefetches the buffer's state.
    pub(crate) fn guess_buffer(
        &self,
        session: SessionId,
        region: u32,
        class: &'static Class,
        before: Option<Buffer>,
    ) -> Option<Buffer> {
        if region >= farside_remote::arena::REGIONS_MAX {
            return None;
        }
        let Ok(reused) = self.arena().next_reused(session, region, class, before);
        let buffer = reused.or_else(|| {
            let Ok(free) = self.arena().first_free(region, class);
            free
        });
        buffer.inspect(|buffer| self.prefetch_line(buffer.state_at()))
    }

    /// Prefetches the state of the buffer to which the pointer at `at` leads.
    #[inline]
    pub(crate) fn prefetch_state_behind(&self, at: u64) {
        if at.is_multiple_of(8) && self.holds(at, 8) {
            let Ok(Some((_, buffer))) = self.arena().buffer_at(self.get(at)) else { return };
            self.prefetch_line(buffer.state_at());
        }
    }

    /// Whether the stretch is not empty and lies within the memory.
    #[inline(always)]
    pub(crate) fn has(&self, stretch: &Stretch) -> bool {
        stretch.len > 0 && self.holds(stretch.at, u64::from(stretch.len))
    }

    #[inline(always)]
    fn holds(&self, at: u64, len: u64) -> bool {
        at < self.geometry.size() && len <= self.geometry.size() - at
    }

    /// Prefetches the cache line of the byte at `at`. Cannot fault.
    #[inline(always)]
    pub(crate) fn prefetch_line(&self, at: u64) {
        let place = self.base.wrapping_add(at as usize).cast_const();
        // SAFETY: a prefetch has no architectural effect, whatever its address.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _no_hint_on_this_cpu = place;
    }

    /// Prefetches the cache lines of a stretch after the first line, up to a useful maximum.
    #[inline(always)]
    pub(crate) fn prefetch_rest(&self, stretch: &Stretch) {
        const LINE: u64 = 64;
        const LINES_MAX: u64 = 24;
        let first = stretch.at & !(LINE - 1);
        let end = (stretch.at + u64::from(stretch.len)).min(first + LINES_MAX * LINE);
        let mut line = first + LINE;
        while line < end {
            self.prefetch_line(line);
            line += LINE;
        }
    }
}

/// A range of bytes that a chain will likely touch.
#[derive(Clone, Copy, Default)]
pub(crate) struct Stretch {
    pub(crate) at: u64,
    pub(crate) len: u32,
}

// These are separate functions, so that the checks that are inlined do not contain the formatting.

#[cold]
#[inline(never)]
fn outside(at: u64, len: usize, size: u64) -> ! {
    panic!("access to bytes {at:#x}+{len} of a memory of {size:#x}: keys are checked before")
}

#[cold]
#[inline(never)]
fn misplaced(at: u64, width: usize, size: u64) -> ! {
    panic!(
        "access to a {width}-byte word at {at:#x} of a memory of {size:#x}: keys are checked before, and alignment"
    )
}

/// Fills `out`, which is shorter than a unit, with the lowest bytes of `word`. Uses at most four stores, because a copy
/// of variable length would be a slower function call.
#[inline(always)]
fn put_first_bytes(mut word: u128, out: &mut [u8]) {
    let (len, mut at) = (out.len(), 0);
    debug_assert!(len < UNIT);
    if let Ok(half) = <&mut [u8; 8]>::try_from(&mut *out) {
        *half = (word as u64).to_le_bytes();
        return;
    }
    if len & 8 != 0 {
        out[..8].copy_from_slice(&(word as u64).to_le_bytes());
        (word, at) = (word >> 64, 8);
    }
    if len & 4 != 0 {
        out[at..at + 4].copy_from_slice(&(word as u32).to_le_bytes());
        (word, at) = (word >> 32, at + 4);
    }
    if len & 2 != 0 {
        out[at..at + 2].copy_from_slice(&(word as u16).to_le_bytes());
        (word, at) = (word >> 16, at + 2);
    }
    if len & 1 != 0 {
        out[at] = word as u8;
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; no borrow outlives the mapping that is being dropped.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.geometry.size() as usize) };
        debug_assert!(unmapped.is_ok(), "unmapping an existing mapping succeeds");
    }
}

impl Memory for Mapping {
    type Wait = Infallible;

    #[inline]
    fn will_fill(&self, at: u64, len: u64) {
        if let Some(transparent) = &self.transparent {
            transparent.fill(self, at, len);
        }
    }

    #[inline(always)]
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    #[inline]
    fn admits(&self, key: Key) -> Result<Rights, Infallible> {
        self.arena().admits(key)
    }

    #[inline(always)]
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Infallible> {
        self.arena().reach(region, at, len)
    }

    #[inline(always)]
    fn read(&self, mut at: u64, mut out: &mut [u8]) -> Result<(), Infallible> {
        self.at(at, out.len());
        // The mapping is page-aligned, so a unit is aligned if its offset is.
        if !at.is_multiple_of(UNIT as u64) {
            let (first, rest) = out.split_at_mut(out.len().min(UNIT - at as usize % UNIT));
            self.read_within_unit(at, first);
            (at, out) = (at + first.len() as u64, rest);
        }
        let whole = out.len() / UNIT;
        if whole > 0 {
            let (body, rest) = out.split_at_mut(whole * UNIT);
            // SAFETY: `at` is aligned here, and `body` lies within the range checked above.
            unsafe { units::copy_out(self.base.add(at as usize), body.as_mut_ptr(), whole) };
            (at, out) = (at + body.len() as u64, rest);
        }
        if !out.is_empty() {
            // SAFETY: the unit around a mapped byte is mapped, as the mapping is page-aligned; `at` is aligned here.
            put_first_bytes(unsafe { units::load(self.base.add(at as usize)) }, out);
        }
        Ok(())
    }

    #[inline]
    fn write(&self, mut at: u64, mut bytes: &[u8]) -> Result<(), Infallible> {
        let to = self.at(at, bytes.len());
        let head = to.align_offset(UNIT).min(bytes.len());
        if head > 0 {
            let (first, rest) = bytes.split_at(head);
            self.write_within_unit(at, first);
            (at, bytes) = (at + head as u64, rest);
        }
        let whole = bytes.len() / UNIT;
        if whole > 0 {
            let (body, rest) = bytes.split_at(whole * UNIT);
            // SAFETY: `at` is aligned here, and `body` lies within the range checked above.
            unsafe { units::copy_in(body.as_ptr(), self.base.add(at as usize), whole) };
            (at, bytes) = (at + body.len() as u64, rest);
        }
        self.write_within_unit(at, bytes);
        Ok(())
    }

    #[inline(always)]
    fn load(&self, at: u64, width: Width) -> Result<u128, Infallible> {
        Ok(match width {
            Width::W8 => u128::from(self.word(at).load(Ordering::SeqCst)),
            // SAFETY: mapped, and aligned: `unit` checks it.
            Width::W16 => unsafe { units::load(self.unit(at)) },
        })
    }

    #[inline]
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Infallible> {
        Ok(match width {
            Width::W8 => self
                .word(at)
                .compare_exchange(old as u64, new as u64, Ordering::SeqCst, Ordering::SeqCst)
                .map(drop)
                .map_err(u128::from),
            // SAFETY: mapped, and aligned: `unit` checks it.
            Width::W16 => unsafe { units::exchange(self.unit(at), old, new) },
        })
    }
}

impl Mapping {
    #[inline(always)]
    fn unit(&self, at: u64) -> *mut u8 {
        self.aligned::<UNIT>(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Mapping {
        Mapping::create(Geometry::SIZE_MIN, Pages::Small).expect("a small memory")
    }

    /// Returns how many KiB of this process's mapping at `base` are backed by huge pages.
    fn huge_kib(base: *mut u8) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps is readable");
        let begins = format!("{:x}-", base.addr());
        let ours = maps.lines().skip_while(|line| !line.starts_with(&begins));
        let line = ours
            .skip(1)
            .find_map(|line| line.strip_prefix("ShmemPmdMapped:"))
            .expect("a line with the number");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    #[test]
    fn filled_memory_gets_huge_pages_and_keeps_its_content() {
        if !Mapping::makes_pages_huge().expect("memory") {
            return eprintln!("skipped: this system has no huge pages for shared memory");
        }
        let (size, len) = (Geometry::SIZE_MIN + (1 << 20), 1 << 20);
        let memory = Mapping::create(size, Pages::Auto).expect("a small memory");
        if memory.transparent.is_none() {
            return eprintln!("skipped: huge pages are reserved here");
        }
        assert_eq!(
            (memory.page_size(), huge_kib(memory.base)),
            (PageSize(HUGE), HUGE >> 10),
            "the page of the header"
        );
        let Ok(()) = memory.write(3 << 20, b"before");
        memory.will_fill(3 << 20, len);
        assert_eq!(huge_kib(memory.base), (2 * HUGE) >> 10);
        let mut held = [0; 6];
        let Ok(()) = memory.read(3 << 20, &mut held);
        assert_eq!(&held, b"before");
        memory.will_fill(size - len, len);
        assert_eq!(huge_kib(memory.base), (2 * HUGE) >> 10, "an incomplete huge page stays small");

        let others = Mapping::attach(memory.fd().try_clone_to_owned().expect("a descriptor"))
            .expect("the same memory");
        let others = wide::Wide::of(std::sync::Arc::new(others));
        others.will_fill(4 << 20, 2 * len);
        let Ok(()) = memory.write(4 << 20, b"here");
        assert_eq!(huge_kib(memory.base), (3 * HUGE) >> 10, "huge pages by another mapping");

        memory.discard(3 << 20, len).expect("a hole");
        let Ok(()) = memory.read(3 << 20, &mut held);
        assert_eq!(held, [0; 6], "half a huge page is discarded");
        let small = Mapping::create(size, Pages::Small).expect("a small memory");
        small.will_fill(0, size);
        assert!(small.page_size().0 < HUGE && huge_kib(small.base) == 0);
    }

    #[test]
    fn reads_return_writes_at_any_offset_and_neighbours_keep_theirs() {
        let memory = small();
        let base = memory.geometry().segment_at(0);
        let bytes: Vec<u8> = (1..=200).collect();
        for offset in 0..40u64 {
            for len in 0..bytes.len() {
                let Ok(()) = memory.write(base, &[0; 256]);
                let Ok(()) = memory.write(base + offset, &bytes[..len]);
                let mut all = [9; 256];
                let Ok(()) = memory.read(base, &mut all);
                let end = offset as usize + len;
                assert_eq!(&all[offset as usize..end], &bytes[..len]);
                assert!(all[..offset as usize].iter().chain(&all[end..]).all(|&byte| byte == 0));
                let mut part = vec![0; len];
                let Ok(()) = memory.read(base + offset, &mut part);
                assert_eq!(part, &bytes[..len]);
            }
        }
    }

    #[test]
    fn sixteen_bytes_are_never_torn() {
        let memory = small();
        let at = memory.geometry().segment_at(0);
        let old = |n: u64| u128::from(n) << 64 | u128::from(n);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..200_000u64 {
                    let Ok(swapped) = memory.exchange(at, Width::W16, old(n), old(n + 1));
                    assert_eq!(swapped, Ok(()));
                }
            });
            let mut last = 0;
            while last < 200_000 {
                let mut bytes = [0; 48];
                let Ok(()) = memory.read(at, &mut bytes);
                let word = u128::from_le_bytes(bytes[..16].try_into().expect("16 bytes"));
                assert_eq!(word as u64, (word >> 64) as u64);
                assert!(word as u64 >= last);
                last = word as u64;
            }
        });
    }

    #[test]
    fn a_failed_exchange_returns_the_value_and_changes_nothing() {
        let memory = small();
        let at = memory.geometry().segment_at(0);
        for width in [Width::W8, Width::W16] {
            let Ok(swapped) = memory.exchange(at, width, 0, 5);
            assert_eq!(swapped, Ok(()));
            let Ok(refused) = memory.exchange(at, width, 4, 6);
            assert_eq!(refused, Err(5));
            let Ok(swapped) = memory.exchange(at, width, 5, 0);
            assert_eq!(swapped, Ok(()));
        }
    }

    #[test]
    fn discarded_memory_reads_as_zeros() {
        let memory = small();
        let at = memory.geometry().segment_at(1);
        let Ok(()) = memory.write(at, &[7; 100]);
        memory.discard(at, 1 << 20).expect("a hole can be punched");
        let mut bytes = [1; 100];
        let Ok(()) = memory.read(at, &mut bytes);
        assert_eq!(bytes, [0; 100]);
    }

    #[test]
    #[should_panic(expected = "keys are checked before")]
    fn an_address_outside_the_memory_panics() {
        let Ok(()) = small().read(u64::MAX - 7, &mut [0; 8]);
    }

    #[test]
    fn errors_for_odd_sizes_and_foreign_files_name_a_remedy() {
        let error =
            Mapping::create((8 << 20) + 1, Pages::Small).map(drop).expect_err("not a multiple of 1 MiB");
        assert!(error.to_string().contains("multiple of 1 MiB"), "{error}");
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(8 << 20).expect("grown");
        let opened = file.reopen().expect("the same file");
        let error = Mapping::attach(opened.into()).map(drop).expect_err("not a node's memory");
        assert!(error.to_string().contains("not a farside memory"), "{error}");
    }

    #[test]
    fn memory_that_can_be_truncated_is_not_attached() {
        use rustix::fs::{MemfdFlags, SealFlags};
        let node = small();
        let twin = node.fd().try_clone_to_owned().expect("a descriptor");
        assert_eq!(Mapping::attach(twin).expect("it is sealed").incarnation(), node.incarnation());
        let mut header = vec![0; 4096];
        let Ok(()) = node.read(0, &mut header);
        let seals = [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW | SealFlags::SEAL];
        for seals in seals {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create("unsealed", flags).expect("memory");
            rustix::fs::ftruncate(&fd, Geometry::SIZE_MIN).expect("memory");
            rustix::io::pwrite(&fd, &header, 0).expect("memory");
            rustix::fs::fcntl_add_seals(&fd, seals).expect("sealed");
            let error = Mapping::attach(fd).map(drop).expect_err("it can be truncated");
            assert!(error.to_string().contains("connect to a node of this release"), "{seals:?}: {error}");
        }
    }

    #[test]
    fn a_memory_file_whose_creator_died_is_created_again() {
        let size = Geometry::SIZE_MIN;
        for (marked_size, len) in [(size, 24), (size, size), (2 * size, size), (2 * size, 2 * size)] {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("memory");
            let mut bytes = pages::mark(marked_size).to_vec();
            bytes.resize(len as usize, 0);
            std::fs::write(&path, &bytes).expect("a file");
            let (memory, found) = Mapping::open(&path, size).expect("no node uses it");
            assert_eq!(found, Found::Nothing);
            drop(memory);
            let (memory, found) = Mapping::open(&path, size).expect("a memory");
            assert_eq!(found, Found::Memory);
            let mut rest = [1; 32];
            let Ok(()) = memory.read(header::NEXT_SESSION_AT, &mut rest);
            assert_eq!(rest, [0; 32], "the mark is erased");
        }
    }

    #[test]
    fn a_foreign_file_is_rejected_and_left_unchanged() {
        let size = Geometry::SIZE_MIN;
        let mark = pages::mark(size);
        let cases: [(&[u8], u64); 7] = [
            (b"farsidem", 8),
            (b"farsidem and other notes", 24),
            (b"farsidem", size),
            (&mark[..16], 16),
            (&mark[..23], 23),
            (&mark, size + 1),
            (&pages::mark(size + 1), size),
        ];
        for (beginning, len) in cases {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("memory");
            let mut bytes = beginning.to_vec();
            bytes.resize(len as usize, b'x');
            std::fs::write(&path, &bytes).expect("a file");
            let error = Mapping::open(&path, size).map(drop).expect_err("the file is foreign");
            assert!(error.to_string().contains("name"), "{error}");
            assert!(
                std::fs::read(&path).expect("the file still exists") == bytes,
                "{beginning:?} with {len} bytes"
            );
        }
    }
}

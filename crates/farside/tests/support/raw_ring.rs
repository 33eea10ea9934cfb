//! Client's or engine's side of a pair of rings, written by hand from the description of the layout: words, frames and
//! bell.
//!
//! Invariant: no code is shared with the implementation under test.
//! Invariant: a test can write everything that a malicious side could write.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::cell::Cell;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) const HELLO: &[u8] = br#"{"magic":"farside-ring","version":1}"#;
pub(crate) const WELCOME: &[u8] = br#""Welcome""#;
/// Bytes of one ring.
pub(crate) const RING: u64 = 256 << 10;
/// Offset of the first ring in a connection's memory, in bytes.
const RINGS_AT: u64 = 4096;
/// Bytes of a connection's memory.
pub(crate) const SIZE: u64 = RINGS_AT + 2 * RING;
/// Maximum number of bytes of a frame.
pub(crate) const FRAME_MAX: u32 = 24 << 10;
/// Maximum time to wait for the other side.
const PATIENCE: Duration = Duration::from_secs(20);

/// A word of a connection's memory. `Tail` and `Head` name the side that writes the ring, `Wish` the side that wishes
/// for a bell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    Tail(Side),
    Head(Side),
    Wish(Side),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Engine,
}

impl Side {
    fn other(self) -> Side {
        match self {
            Side::Client => Side::Engine,
            Side::Engine => Side::Client,
        }
    }
}

/// A connection's memory.
pub(crate) struct Memory(*mut u8);

// SAFETY: all accesses go through `Memory::at`, which are atomic; so are those of the other process.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(fd: &OwnedFd) -> Memory {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses. The memory is sealed, so it cannot shrink.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), SIZE as usize, protection, MapFlags::SHARED, fd, 0)
        };
        Memory(base.expect("a mapping").cast())
    }

    /// Returns the eight bytes at an offset.
    pub(crate) fn at(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < SIZE);
        // SAFETY: aligned and within the mapping, by the assertion; the mapping lasts as long as `self`.
        unsafe { AtomicU64::from_ptr(self.0.add(offset as usize).cast()) }
    }

    pub(crate) fn word(&self, word: Word) -> &AtomicU64 {
        self.at(128
            * match word {
                Word::Tail(side) => 2 * side as u64,
                Word::Head(side) => 2 * side as u64 + 1,
                Word::Wish(side) => 4 + side as u64,
            })
    }

    /// Returns the eight bytes at a position of the ring that `side` writes.
    pub(crate) fn of_ring(&self, side: Side, position: u64) -> &AtomicU64 {
        self.at(RINGS_AT + side as u64 * RING + position % RING)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `map` mapped it with this length; borrows of it end before `self` drops.
        unsafe { rustix::mm::munmap(self.0.cast(), SIZE as usize) }.expect("a mapping of this length");
    }
}

/// One side of a connection, with its socket.
pub(crate) struct Ring {
    pub(crate) socket: OwnedFd,
    pub(crate) memory: Arc<Memory>,
    /// Descriptor of the memory, which the greeting carried.
    pub(crate) fd: OwnedFd,
    side: Side,
    pub(crate) written: Cell<u64>,
    pub(crate) read: Cell<u64>,
}

impl Ring {
    pub(crate) fn new(socket: OwnedFd, fd: OwnedFd, side: Side) -> Ring {
        let memory = Arc::new(Memory::map(&fd));
        Ring { socket, memory, fd, side, written: Cell::new(0), read: Cell::new(0) }
    }

    /// Connects to the engine at `path`.
    #[track_caller]
    pub(crate) fn join(path: &Path) -> Ring {
        let socket = dial(path);
        send(&socket, HELLO, &[]);
        let (greeting, mut fds) = receive(&socket).expect("a greeting");
        assert_eq!(greeting, WELCOME, "{}", greeting.escape_ascii());
        assert_eq!(fds.len(), 1, "the greeting carries the memory");
        Ring::new(socket, fds.remove(0), Side::Client)
    }

    /// Welcomes a client that has connected, as an engine does; `None` if the client has hung up.
    pub(crate) fn welcome(socket: OwnedFd) -> Option<Ring> {
        receive(&socket)?;
        let fd = sealed(SIZE);
        send(&socket, WELCOME, &[fd.as_fd()]);
        Some(Ring::new(socket, fd, Side::Engine))
    }

    /// Writes a frame of any length that fits into a ring. Returns false if the other side has hung up.
    pub(crate) fn send(&self, frame: &[u8]) -> bool {
        let size = (4 + frame.len() as u64).next_multiple_of(16);
        assert!(size <= RING, "no ring holds {size} bytes");
        let until = Instant::now() + PATIENCE;
        let head = self.memory.word(Word::Head(self.side));
        // The other side's head is not trusted: at worst, this overwrites frames that it has not read.
        while self.written.get().wrapping_sub(head.load(Ordering::SeqCst)) + size > RING {
            assert!(Instant::now() < until, "the other side does not read");
            if self.is_hung_up() {
                return false;
            }
            std::thread::yield_now();
        }
        let bytes = [&(frame.len() as u32).to_le_bytes()[..], frame].concat();
        for (word, bytes) in (0..).zip(bytes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            let at = self.memory.of_ring(self.side, self.written.get() + 8 * word);
            at.store(u64::from_le_bytes(whole), Ordering::SeqCst);
        }
        self.written.set(self.written.get() + size);
        self.publish(self.written.get());
        !self.is_hung_up()
    }

    /// Publishes the tail, in bytes, and rings the bell if the other side wishes for it.
    pub(crate) fn publish(&self, tail: u64) {
        self.memory.word(Word::Tail(self.side)).store(tail, Ordering::SeqCst);
        self.grant();
    }

    fn grant(&self) {
        if self.memory.word(Word::Wish(self.side.other())).swap(0, Ordering::SeqCst) != 0 {
            self.bell();
        }
    }

    pub(crate) fn bell(&self) {
        let _full_or_gone = rustix::net::send(&self.socket, &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    /// Waits for the next frame; `None` after `wait`, or if the other side hung up.
    pub(crate) fn receive(&self, wait: Duration) -> Option<Vec<u8>> {
        let until = Instant::now() + wait;
        let theirs = self.side.other();
        let tail = self.memory.word(Word::Tail(theirs));
        while tail.load(Ordering::SeqCst) == self.read.get() {
            // A side that hung up writes nothing more: so the tail is read again after this check.
            let has_ended = self.hangs_up_within(Duration::from_micros(50));
            if tail.load(Ordering::SeqCst) == self.read.get() && (has_ended || Instant::now() >= until) {
                return None;
            }
        }
        let read = self.read.get();
        let word = |at: u64| self.memory.of_ring(theirs, read + at).load(Ordering::SeqCst).to_le_bytes();
        let len = u32::from_le_bytes(word(0)[..4].try_into().expect("four bytes"));
        assert!(u64::from(len) < RING / 2, "a frame of {len} bytes");
        let size = u64::from(4 + len).next_multiple_of(16);
        let bytes: Vec<u8> = (0..size / 8).flat_map(|at| word(8 * at)).collect();
        self.read.set(read + size);
        self.memory.word(Word::Head(theirs)).store(read + size, Ordering::SeqCst);
        self.grant();
        Some(bytes[4..4 + len as usize].to_vec())
    }

    /// Whether the other side has hung up. Does not read bells from the socket.
    pub(crate) fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Whether the other side hangs up within `wait`. Reads bells from the socket and ignores them.
    pub(crate) fn hangs_up_within(&self, wait: Duration) -> bool {
        hangs_up_within(&self.socket, wait)
    }
}

/// Creates an unsealed memory of `size` bytes.
pub(crate) fn unsealed(size: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("by hand", flags).expect("memory");
    rustix::fs::ftruncate(&fd, size).expect("memory");
    fd
}

/// Creates a memory of `size` bytes that cannot shrink or grow.
pub(crate) fn sealed(size: u64) -> OwnedFd {
    let fd = unsealed(size);
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals).expect("the memory allows seals");
    fd
}

/// Connects a socket to `path` and sends nothing.
#[track_caller]
pub(crate) fn dial(path: &Path) -> OwnedFd {
    let socket = socket();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).expect("a name")).expect("a listener");
    socket
}

/// Listens at `path` in place of an engine.
pub(crate) fn listen(path: &Path) -> OwnedFd {
    let socket = socket();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).expect("a name")).expect("a place");
    rustix::net::listen(&socket, 8).expect("a listener");
    socket
}

pub(crate) fn socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("a socket")
}

/// Sends a message with descriptors. Returns false if it was not sent, for example because the other side hung up.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    try_send(socket, bytes, fds).is_ok()
}

pub(crate) fn try_send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags).map(drop)
}

/// Receives a message and its descriptors; `None` if the other side has hung up.
#[track_caller]
pub(crate) fn receive(socket: &OwnedFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    wait(socket, PollFlags::IN);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; 256 << 10];
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = match rustix::net::recvmsg(socket, &mut slices, &mut ancillary, flags) {
        Err(Errno::CONNRESET) => return None,
        received => received.expect("a message"),
    };
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    bytes.truncate(received.bytes);
    (received.bytes > 0).then_some((bytes, fds))
}

#[track_caller]
pub(crate) fn wait(socket: &OwnedFd, for_what: PollFlags) {
    let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(socket, for_what)], Some(&timeout)).expect("a poll");
    assert!(ready > 0, "the other side does nothing");
}

/// Whether the other end of a socket hangs up within `wait`. Reads earlier messages and ignores them.
pub(crate) fn hangs_up_within(socket: &OwnedFd, wait: Duration) -> bool {
    let until = Instant::now() + wait;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        let _interrupted = poll(&mut fds, Some(&left));
        if fds[0].revents().contains(PollFlags::HUP) {
            return true;
        }
        match rustix::net::recv(socket, &mut [0u8; 1][..], RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() >= until => return false,
            Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => {}
            Ok((_, 0)) | Err(_) => return true,
        }
    }
}

//! The other side, written by hand: it shares no code with what it meets.

use farside_remote::draws::Draws;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const HELLO: &[u8] = br#"{"magic":"farside-ring","version":1}"#;
const RING: u64 = 256 << 10;
pub(crate) const SIZE: u64 = 4096 + 2 * RING;
/// Where the counts and the wishes are.
const WORDS: [usize; 6] = [0, 128, 256, 384, 512, 640];
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn mode(found: &std::fs::Metadata) -> u32 {
    found.permissions().mode() & 0o7777
}

fn socket() -> OwnedFd {
    let made =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    made.expect("a socket")
}

fn send(socket: &OwnedFd, bytes: &[u8], fds: &[&OwnedFd]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    // Who is not listened to may have been hung up on.
    let _unheard = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL);
}

/// A message and the descriptors that come with it; nothing once the other side has hung up.
fn receive(socket: &OwnedFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; 1 << 16];
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let received = rustix::net::recvmsg(socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    bytes.truncate(received.bytes);
    (received.bytes > 0).then_some((bytes, fds))
}

/// A client by hand.
pub(crate) struct Peer {
    socket: OwnedFd,
    memory: Option<Shared>,
}

/// The memory of a connection.
struct Shared(*mut u8);

// SAFETY: every access is atomic, as of all who have the memory.
unsafe impl Sync for Shared {}

impl Shared {
    fn map(fd: &OwnedFd) -> Shared {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a memory that the engine has sealed, at a place that the system chooses.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), SIZE as usize, protection, MapFlags::SHARED, fd, 0)
        };
        Shared(base.expect("it can be mapped").cast())
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at < SIZE as usize);
        // SAFETY: within the mapping, which lasts as long as `self`, and aligned.
        unsafe { AtomicU64::from_ptr(self.0.add(at).cast()) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; nobody borrows it any more.
        unsafe { rustix::mm::munmap(self.0.cast(), SIZE as usize) }.expect("it was mapped");
    }
}

impl Peer {
    pub(crate) fn dial(path: &Path) -> Peer {
        let socket = socket();
        let address = SocketAddrUnix::new(path).expect("a name");
        rustix::net::connect(&socket, &address).expect("the engine listens");
        Peer { socket, memory: None }
    }

    pub(crate) fn join(path: &Path) -> Peer {
        Peer::greeted(path, &[])
    }

    /// Sends descriptors that nobody asked for.
    pub(crate) fn join_with_descriptors(path: &Path) {
        let null = OwnedFd::from(std::fs::File::open("/dev/null").expect("a device"));
        Peer::greeted(path, &[&null, &null]);
    }

    fn greeted(path: &Path, fds: &[&OwnedFd]) -> Peer {
        let mut peer = Peer::dial(path);
        send(&peer.socket, HELLO, fds);
        let (greeting, fds) = receive(&peer.socket).expect("a greeting");
        assert_eq!(String::from_utf8_lossy(&greeting), "\"Welcome\"");
        let [memory] = <[OwnedFd; 1]>::try_from(fds).expect("one descriptor");
        let seals = rustix::fs::fcntl_get_seals(&memory).expect("a memory");
        assert_eq!(seals, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
        assert!(rustix::fs::ftruncate(&memory, 0).is_err(), "nobody can cut it");
        peer.memory = Some(Shared::map(&memory));
        peer
    }

    /// Writes anything anywhere, from as many threads, while `others` do what they do, a few times.
    pub(crate) fn scribble(&self, seed: u64, threads: u64, mut others: impl FnMut()) {
        let memory = self.memory.as_ref().expect("it has joined");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let stop = &stop;
                scope.spawn(move || {
                    let mut draws = Draws(seed << 8 | thread);
                    while !stop.load(Ordering::Relaxed) {
                        let random = draws.next();
                        let word = memory.word(WORDS[(random >> 20) as usize % 6]);
                        match random % 8 {
                            0 => word.store(random, Ordering::SeqCst),
                            1 => drop(word.fetch_add(16, Ordering::SeqCst)),
                            2 => drop(word.fetch_sub(16, Ordering::SeqCst)),
                            3 => word.store(RING, Ordering::SeqCst),
                            4 => word.store(u64::MAX, Ordering::SeqCst),
                            5 => word.store(0, Ordering::SeqCst),
                            6 => memory
                                .word(4096 + (random >> 24) as usize % (1 << 15) * 16)
                                .store(8, Ordering::SeqCst),
                            _ => drop(rustix::net::send(
                                &self.socket,
                                &[0],
                                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
                            )),
                        }
                    }
                });
            }
            (0..20).for_each(|_| others());
            stop.store(true, Ordering::Relaxed);
        });
    }

    /// Says that it has written what no ring holds, and rings.
    pub(crate) fn claim_the_impossible(&self) {
        let memory = self.memory.as_ref().expect("it has joined");
        memory.word(WORDS[0]).store(u64::MAX - 15, Ordering::SeqCst);
        let _hung_up_already =
            rustix::net::send(&self.socket, &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    /// Whether the engine lets go of it in time.
    pub(crate) fn is_hung_up_on(&self, patience: Duration) -> bool {
        let since = Instant::now();
        loop {
            let left = patience.saturating_sub(since.elapsed());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
            if poll(&mut fds, Some(&left)).is_ok() && fds[0].revents().contains(PollFlags::HUP) {
                return true;
            }
            if since.elapsed() >= patience {
                return false;
            }
        }
    }

    pub(crate) fn expect_refusal(&self, hello: &[u8], reason: &str) {
        send(&self.socket, hello, &[]);
        let (refusal, fds) = receive(&self.socket).expect("a refusal");
        let refusal = String::from_utf8_lossy(&refusal);
        assert!(refusal.starts_with("{\"Refusal\":") && refusal.contains(reason), "{refusal}");
        assert!(fds.is_empty());
        assert!(receive(&self.socket).is_none(), "it hangs up");
    }

    pub(crate) fn expect_hang_up(&self, hello: &[u8]) {
        send(&self.socket, hello, &[]);
        assert!(receive(&self.socket).is_none(), "it hangs up");
    }
}

/// Something else than an engine, which serves one client.
pub(crate) struct Impostor {
    _folder: TempDir,
    path: PathBuf,
}

impl Impostor {
    pub(crate) fn saying(greeting: &'static [u8]) -> Impostor {
        Impostor::serving(move |client| send(&client, greeting, &[]))
    }

    /// Hands over a memory that is not quite right.
    pub(crate) fn lending(size: u64, is_sealed: bool) -> Impostor {
        Impostor::serving(move |client| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let memory = rustix::fs::memfd_create("impostor", flags).expect("memory");
            rustix::fs::ftruncate(&memory, size).expect("memory");
            if is_sealed {
                let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
                rustix::fs::fcntl_add_seals(&memory, seals).expect("it allows that");
            }
            send(&client, br#""Welcome""#, &[&memory]);
        })
    }

    /// Never answers.
    pub(crate) fn silent() -> Impostor {
        Impostor::serving(|client| drop(receive(&client).map(|_| receive(&client))))
    }

    fn serving(meet: impl FnOnce(OwnedFd) + Send + 'static) -> Impostor {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ring");
        let listener = listening(&path);
        std::thread::spawn(move || meet(rustix::net::accept(&listener).expect("a client")));
        Impostor { _folder: folder, path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What a node that was killed leaves behind.
    pub(crate) fn leave_behind(path: &Path) {
        drop(listening(path));
        assert!(path.exists());
    }
}

fn listening(path: &Path) -> OwnedFd {
    let listener = socket();
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).expect("a name")).expect("a place");
    rustix::net::listen(&listener, 1).expect("a listener");
    listener
}

const PART: &str = "FARSIDE_TEST_RING";

/// A process of its own that streams frames until it is killed: the test's binary, started again.
pub(crate) struct Child(std::process::Child);

impl Child {
    /// Starts one, and waits until it has begun.
    pub(crate) fn streaming(path: &Path) -> Child {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "ring::child", "--nocapture", "--test-threads=1"])
            .env(PART, path)
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let said = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let child = Child(child);
        let since = Instant::now();
        for line in said {
            assert!(since.elapsed() < PATIENCE);
            if line.expect("text").ends_with("ready") {
                return child;
            }
        }
        panic!("it ended before it began");
    }

    pub(crate) fn kill(mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it has ended");
    }

    /// Where this process is to stream to, if it was started for that.
    pub(crate) fn part() -> Option<PathBuf> {
        let path = std::env::var_os(PART)?;
        let killed = Some(rustix::process::Signal::KILL);
        rustix::process::set_parent_process_death_signal(killed).expect("the system can");
        Some(path.into())
    }

    pub(crate) fn say_ready() {
        let mut out = std::io::stdout().lock();
        out.write_all(b"\nready\n").and_then(|()| out.flush()).expect("the parent listens");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may have been killed and waited for already.
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

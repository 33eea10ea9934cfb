//! The peer's side of a ring. It is written independently, and shares no code with the crate under test.

use crate::ring::raw_ring::{self, HELLO, RING, Ring, Side, Word};
use farside_remote::draws::Draws;
use rustix::fs::SealFlags;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn mode(found: &std::fs::Metadata) -> u32 {
    found.permissions().mode() & 0o7777
}

/// Joins as a client, optionally with unrequested descriptors.
pub(crate) fn join(path: &Path, descriptors: &[BorrowedFd<'_>]) -> Ring {
    let socket = raw_ring::dial(path);
    raw_ring::send(&socket, HELLO, descriptors);
    let (greeting, fds) = raw_ring::receive(&socket).expect("a greeting");
    assert_eq!(String::from_utf8_lossy(&greeting), "\"Welcome\"");
    let [memory] = <[OwnedFd; 1]>::try_from(fds).expect("one descriptor");
    let seals = rustix::fs::fcntl_get_seals(&memory).expect("a memory");
    assert_eq!(seals, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
    assert!(rustix::fs::ftruncate(&memory, 0).is_err(), "the memory cannot be truncated");
    Ring::new(socket, memory, Side::Client)
}

/// Writes arbitrary values from `threads` threads while `others` runs 20 times.
pub(crate) fn scribble(ring: &Ring, seed: u64, threads: u64, mut others: impl FnMut()) {
    let memory = &ring.memory;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (stop, socket) = (&stop, &ring.socket);
            scope.spawn(move || {
                let mut draws = Draws(seed << 8 | thread);
                while !stop.load(Ordering::Relaxed) {
                    let random = draws.next();
                    // This picks one of the six words: the counters and the wishes.
                    let word = memory.at(128 * ((random >> 20) % 6));
                    match random % 8 {
                        0 => word.store(random, Ordering::SeqCst),
                        1 => drop(word.fetch_add(16, Ordering::SeqCst)),
                        2 => drop(word.fetch_sub(16, Ordering::SeqCst)),
                        3 => word.store(RING, Ordering::SeqCst),
                        4 => word.store(u64::MAX, Ordering::SeqCst),
                        5 => word.store(0, Ordering::SeqCst),
                        6 => memory.at(4096 + (random >> 24) % (1 << 15) * 16).store(8, Ordering::SeqCst),
                        _ => _ = raw_ring::send(socket, &[0], &[]),
                    }
                }
            });
        }
        (0..20).for_each(|_| others());
        stop.store(true, Ordering::Relaxed);
    });
}

/// Publishes a tail that no correct peer can reach, and rings the bell.
pub(crate) fn claim_the_impossible(ring: &Ring) {
    ring.memory.word(Word::Tail(Side::Client)).store(u64::MAX - 15, Ordering::SeqCst);
    ring.bell();
}

pub(crate) fn expect_refusal(path: &Path, hello: &[u8], reason: &str) {
    let socket = raw_ring::dial(path);
    raw_ring::send(&socket, hello, &[]);
    let (refusal, fds) = raw_ring::receive(&socket).expect("a refusal");
    let refusal = String::from_utf8_lossy(&refusal);
    assert!(refusal.starts_with("{\"Refusal\":") && refusal.contains(reason), "{refusal}");
    assert!(fds.is_empty());
    assert!(raw_ring::receive(&socket).is_none(), "the engine hangs up");
}

pub(crate) fn expect_hang_up(path: &Path, hello: &[u8]) {
    let socket = raw_ring::dial(path);
    raw_ring::send(&socket, hello, &[]);
    assert!(raw_ring::receive(&socket).is_none(), "the engine hangs up");
}

/// A process that is not an engine but listens at a socket, and serves one client.
pub(crate) struct Impostor {
    _folder: TempDir,
    path: PathBuf,
}

impl Impostor {
    pub(crate) fn saying(greeting: &'static [u8]) -> Impostor {
        Impostor::serving(move |client| {
            raw_ring::send(&client, greeting, &[]);
        })
    }

    /// Creates an impostor that sends a memory with the wrong size, or without seals.
    pub(crate) fn lending(size: u64, is_sealed: bool) -> Impostor {
        Impostor::serving(move |client| {
            let memory = if is_sealed { raw_ring::sealed(size) } else { raw_ring::unsealed(size) };
            raw_ring::send(&client, raw_ring::WELCOME, &[memory.as_fd()]);
        })
    }

    /// Creates an impostor that never responds.
    pub(crate) fn silent() -> Impostor {
        Impostor::serving(|client| drop(raw_ring::receive(&client).map(|_| raw_ring::receive(&client))))
    }

    fn serving(meet: impl FnOnce(OwnedFd) + Send + 'static) -> Impostor {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ring");
        let listener = raw_ring::listen(&path);
        std::thread::spawn(move || meet(rustix::net::accept(&listener).expect("a client")));
        Impostor { _folder: folder, path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves a socket behind, like a killed node.
    pub(crate) fn leave_behind(path: &Path) {
        drop(raw_ring::listen(path));
        assert!(path.exists());
    }
}

const PART: &str = "FARSIDE_TEST_RING";

/// A separate process that streams frames until it is killed: the test binary, started again.
pub(crate) struct Child(std::process::Child);

impl Child {
    /// Starts the process, and waits until it is ready.
    pub(crate) fn streaming(path: &Path) -> Child {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "ring::child", "--nocapture", "--test-threads=1"])
            .env(PART, path)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the process starts");
        let said = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let child = Child(child);
        let since = Instant::now();
        for line in said {
            assert!(since.elapsed() < PATIENCE);
            if line.expect("text").ends_with("ready") {
                return child;
            }
        }
        panic!("the process exited before it was ready");
    }

    pub(crate) fn kill(mut self) {
        self.0.kill().expect("a running process");
        self.0.wait().expect("the process exits");
    }

    /// Returns the path to stream to if this process is such a child; `None` otherwise.
    pub(crate) fn part() -> Option<PathBuf> {
        let path = std::env::var_os(PART)?;
        let killed = Some(rustix::process::Signal::KILL);
        rustix::process::set_parent_process_death_signal(killed).expect("the system supports it");
        Some(path.into())
    }

    pub(crate) fn say_ready() {
        let mut out = std::io::stdout().lock();
        out.write_all(b"\nready\n").and_then(|()| out.flush()).expect("the parent reads");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may already have been killed and awaited.
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

//! Tests of rings between two real sides: threads, processes that are killed, and malicious peers.

mod peer;
#[path = "../../../farside/tests/support/raw_ring.rs"]
mod raw_ring;

use farside_fabrics::ring::{Connected, RingLine, RingPort};
use farside_fabrics::session::carrier::{Arrival, Broken, Datagrams, Line, Port};
use farside_fabrics::shm::ConnectError;
use farside_fabrics::socket::ListenError;
use peer::{Child, Impostor};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time limit of every wait, even on a slow machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Record of an echoing engine: the number of frames that it received from each client, and of its sleeps.
#[derive(Debug, Default)]
struct Seen {
    frames: BTreeMap<u32, u64>,
    slept: u64,
}

/// An engine that returns each frame to its sender.
struct Echo {
    folder: TempDir,
    stop: Arc<AtomicBool>,
    /// Number of clients whose hang-up the engine has noticed.
    ended: Arc<AtomicUsize>,
    thread: Option<JoinHandle<Seen>>,
}

impl Echo {
    fn start() -> Echo {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ring");
        let port = RingPort::bind(&path, 1).expect("a socket").remove(0);
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::new(AtomicUsize::new(0));
        let (stopped, hung_up) = (Arc::clone(&stop), Arc::clone(&ended));
        let thread = Some(std::thread::spawn(move || echo(port, &stopped, &hung_up)));
        Echo { folder, stop, ended, thread }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("ring")
    }

    fn connect(&self) -> RingLine {
        RingLine::connect(&self.path()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Waits until the engine has noticed the hang-up of `count` clients. Fails if it notices more.
    fn hears_of_ends(&self, count: usize) {
        let since = Instant::now();
        while self.ended.load(Ordering::SeqCst) < count && since.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        assert_eq!(self.ended.load(Ordering::SeqCst), count);
    }

    fn stop(mut self) -> Seen {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().expect("a running engine").join().expect("no client can make the engine panic")
    }
}

fn echo(mut port: RingPort, stop: &AtomicBool, ended: &AtomicUsize) -> Seen {
    let mut seen = Seen::default();
    let mut numbers: Vec<Connected> = Vec::new();
    let mut answers: Vec<(Connected, Vec<u8>)> = Vec::new();
    let mut idle = 0;
    while !stop.load(Ordering::SeqCst) {
        let received = port.receive(|from, arrival| match arrival {
            Arrival::Datagram(bytes) => {
                let number = numbers.iter().position(|&known| known == from).unwrap_or(numbers.len());
                if number == numbers.len() {
                    numbers.push(from);
                }
                *seen.frames.entry(number as u32).or_default() += 1;
                answers.push((from, bytes.to_vec()));
            }
            Arrival::HungUp => drop(ended.fetch_add(1, Ordering::SeqCst)),
            Arrival::Outsider(..) => panic!("the carrier rejected a greeting"),
        });
        let received = received.expect("a working port");
        for (to, bytes) in answers.drain(..) {
            port.send(to, &bytes);
        }
        port.flush();
        idle = if received { 0 } else { idle + 1 };
        if idle > 50 && port.may_sleep() {
            seen.slept += 1;
            wait(port.fd(), Duration::from_millis(200)); // Wakes also to check `stop`.
        }
    }
    seen
}

/// Waits until `fd` is readable. Returns false after `patience`.
fn wait(fd: BorrowedFd<'_>, patience: Duration) -> bool {
    let patience = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&patience)).is_ok_and(|ready| ready > 0)
}

/// Receives at least one frame; sleeps until then.
fn receive(line: &RingLine, mut take: impl FnMut(&[u8])) -> Result<(), Broken> {
    while !line.receive(&mut take)? {
        if line.may_sleep() {
            assert!(wait(line.fd(), PATIENCE), "the bell did not ring");
        }
    }
    Ok(())
}

fn ask(line: &RingLine, frame: &[u8]) {
    line.send(frame).and_then(|()| line.flush()).expect("a working line");
    let mut answered = 0;
    while answered == 0 {
        let take = |bytes: &[u8]| {
            assert_eq!(bytes, frame);
            answered += 1;
        };
        receive(line, take).expect("a response");
    }
}

/// Writes the frame with this number to `out`.
fn frame(number: u64, out: &mut Vec<u8>) {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let len = if number.is_multiple_of(1000) { mixed >> 51 } else { mixed >> 57 };
    out.clear();
    out.extend_from_slice(&number.to_le_bytes());
    out.extend((0..len).map(|at| (mixed >> 8).wrapping_add(at) as u8));
}

#[test]
fn a_million_frames_arrive_intact_and_in_order() {
    const FRAMES: u64 = 1_000_000;
    let engine = Echo::start();
    let line = engine.connect();
    let (mut sent, mut heard) = (0, 0);
    let (mut next, mut expected) = (Vec::new(), Vec::new());
    while heard < FRAMES {
        // This keeps more frames in flight than the rings hold.
        while sent < FRAMES && sent - heard < 10_000 {
            frame(sent, &mut next);
            line.send(&next).expect("a working line");
            sent += 1;
        }
        line.flush().expect("a working line");
        let take = |bytes: &[u8]| {
            frame(heard, &mut expected);
            assert_eq!(bytes, expected, "frame {heard}");
            heard += 1;
        };
        receive(&line, take).expect("the engine runs");
    }
    drop(line);
    let seen = engine.stop();
    assert_eq!(seen.frames.values().copied().collect::<Vec<_>>(), [FRAMES]);
}

#[test]
fn no_wake_up_is_lost_however_sleeps_coincide() {
    let engine = Echo::start();
    // More clients than the engine keeps active.
    let clients: Vec<_> = (0..8)
        .map(|client| {
            let path = engine.path();
            std::thread::spawn(move || {
                let line = RingLine::connect(&path).expect("a connection");
                for round in 0..3000u64 {
                    // Some pauses are so long that the engine sleeps, or is about to.
                    for _ in 0..(round * 7919 + client) % 4096 {
                        std::hint::spin_loop();
                    }
                    ask(&line, &round.to_le_bytes());
                }
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().expect("every request gets a response"));
    let seen = engine.stop();
    assert_eq!(seen.frames.values().copied().collect::<Vec<_>>(), [3000; 8]);
    assert!(seen.slept > 0);
}

#[test]
fn frames_sent_before_a_hang_up_are_received() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ring");
    let mut port = RingPort::bind(&path, 1).expect("a socket").remove(0);
    let joining = std::thread::spawn({
        let path = path.clone();
        move || {
            let line = RingLine::connect(&path).expect("a connection");
            line.send(b"farewell").and_then(|()| line.flush()).expect("a working line");
        }
    });
    let mut heard = Vec::new();
    let since = Instant::now();
    while heard.last().is_none_or(|last: &Vec<u8>| last != b"hung up") {
        assert!(since.elapsed() < PATIENCE, "{heard:?}");
        let received = port.receive(|_, arrival| match arrival {
            Arrival::Datagram(bytes) => heard.push(bytes.to_vec()),
            Arrival::HungUp => heard.push(b"hung up".to_vec()),
            Arrival::Outsider(..) => panic!("the carrier rejected a greeting"),
        });
        received.expect("a working port");
    }
    joining.join().expect("the client does not panic");
    assert_eq!(heard, [b"farewell".to_vec(), b"hung up".to_vec()]);
    assert_eq!(port.connections(), 0);

    // The other direction, to a sleeping client.
    let dialling = std::thread::spawn(move || RingLine::connect(&path).expect("a connection"));
    let mut client = None;
    while !dialling.is_finished() {
        port.receive(|_, _| {}).expect("a working port");
    }
    let line = dialling.join().expect("the client does not panic");
    line.send(b"hello").and_then(|()| line.flush()).expect("a working line");
    while client.is_none() {
        port.receive(|from, _| client = Some(from)).expect("a working port");
    }
    assert!(line.may_sleep() && !wait(line.fd(), Duration::ZERO));
    let client = client.expect("a client");
    port.send(client, b"refused");
    port.hang_up(client);
    assert!(wait(line.fd(), PATIENCE), "the bell did not ring");
    let mut heard = Vec::new();
    assert_eq!(line.receive(|bytes| heard.push(bytes.to_vec())), Ok(true));
    assert_eq!(heard, [b"refused"]);
    assert_eq!(line.receive(|_| panic!("no more frames")), Err(Broken("the node has ended".into())));
}

#[test]
fn a_client_that_never_reads_delays_nobody_and_is_closed() {
    let engine = Echo::start();
    let (deaf, line) = (engine.connect(), engine.connect());
    // The responses fill the ring, then the engine's outbox, until the engine closes the connection.
    let since = Instant::now();
    let mut sent = 0u64;
    while !wait(deaf.fd(), Duration::ZERO) {
        assert!(since.elapsed() < PATIENCE, "{sent} bytes were accepted");
        // Frames that do not fit wait in the line, so this loop sends no faster than the engine reads.
        if deaf.send(&[5; 16_000]).and_then(|()| deaf.flush()).is_err() {
            break;
        }
        sent += 16_000;
        ask(&line, &sent.to_le_bytes());
    }
    ask(&line, b"still there");
    engine.hears_of_ends(1);
}

#[test]
fn a_client_killed_at_any_moment_counts_as_hung_up() {
    let engine = Echo::start();
    let line = engine.connect();
    const KILLED: usize = 20;
    for round in 0..KILLED as u64 {
        let child = Child::streaming(&engine.path());
        for number in 0..=round * 10 {
            ask(&line, &number.to_le_bytes());
        }
        child.kill();
        ask(&line, b"and the others go on");
    }
    engine.hears_of_ends(KILLED);
    let seen = engine.stop();
    assert!(seen.frames.len() > 1 && seen.frames.values().sum::<u64>() > 10_000, "{seen:?}");
}

/// Entry point of the child process, which streams frames. Does nothing when run as a test.
#[test]
fn child() {
    let Some(path) = Child::part() else { return };
    let line = RingLine::connect(&path).expect("a connection");
    let mut bytes = Vec::new();
    Child::say_ready();
    for number in 0.. {
        frame(number, &mut bytes);
        line.send(&bytes).expect("a working line");
        if number % 64 == 0 {
            line.flush().expect("a working line");
            receive(&line, |_| {}).expect("the engine runs");
        }
    }
}

#[test]
fn a_client_that_corrupts_its_rings_harms_nobody_else() {
    let engine = Echo::start();
    let line = engine.connect();
    let mut before = 0;
    for seed in 0..60 {
        let ring = peer::join(&engine.path(), &[]);
        peer::scribble(&ring, seed, 1 + seed % 3, || ask(&line, &seed.to_le_bytes()));
        before += usize::from(ring.hangs_up_within(Duration::ZERO));
        // The last counter written is an impossible one, whatever the engine has read before.
        peer::claim_the_impossible(&ring);
        assert!(ring.hangs_up_within(PATIENCE), "seed {seed}");
    }
    assert!(before > 0, "the engine noticed no corruption early");
    ask(&line, b"still there");
    engine.hears_of_ends(60);
}

#[test]
fn an_invalid_hello_is_refused_or_closed() {
    let engine = Echo::start();
    let good = raw_ring::HELLO;
    for len in 1..good.len() {
        peer::expect_refusal(&engine.path(), &good[..len], "not understood");
    }
    let hellos: [(&[u8], &str); 6] = [
        (b"\0\xff", "not understood"),
        (b"null", "not understood"),
        (&[b'['; 50_000], "not understood"),
        (br#"{"magic":"farside-shm","version":1}"#, "use the same release"),
        (br#"{"magic":"farside-ring","version":2}"#, "use the same release"),
        (br#"{"magic":"farside-ring","version":-1}"#, "not understood"),
    ];
    for (hello, reason) in hellos {
        peer::expect_refusal(&engine.path(), hello, reason);
    }
    peer::expect_hang_up(&engine.path(), b"");
    peer::expect_hang_up(&engine.path(), &[b' '; 100_000]);
    let silent: Vec<_> = (0..100).map(|_| raw_ring::dial(&engine.path())).collect();
    ask(&engine.connect(), b"still there");
    drop(silent);
    let null = std::fs::File::open("/dev/null").expect("a device");
    peer::join(&engine.path(), &[null.as_fd(), null.as_fd()]);
    ask(&engine.connect(), b"still there");
}

#[test]
fn connecting_to_an_impostor_is_an_error() {
    let refused = |impostor: Impostor| match RingLine::connect(impostor.path()) {
        Ok(_) => panic!("connected to an impostor"),
        Err(error) => error.to_string(),
    };
    assert!(refused(Impostor::saying(b"{}")).contains("not a node that this program knows"));
    assert!(refused(Impostor::saying(b"")).contains("hung up"));
    assert!(refused(Impostor::saying(br#"{"Refusal":"not today"}"#)).contains("refuses: not today"));
    assert!(refused(Impostor::saying(br#""Welcome""#)).contains("sent no memory"));
    assert!(refused(Impostor::lending(raw_ring::SIZE, false)).contains("could be truncated"));
    assert!(refused(Impostor::lending(raw_ring::SIZE - 4096, true)).contains("bytes, not"));
    assert!(refused(Impostor::silent()).contains("did not answer"));
}

#[test]
fn a_path_that_cannot_be_bound_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let bind = |path: &Path| RingPort::bind(path, 2).map(|ports| ports.len());
    let long = at(&"x".repeat(120));
    assert!(matches!(bind(&long), Err(ListenError::Name(_))));
    assert!(matches!(RingLine::connect(&long), Err(ConnectError::Name(_))));
    std::fs::write(at("file"), b"mine").expect("a file");
    assert!(matches!(bind(&at("file")), Err(ListenError::InTheWay(_))));
    assert_eq!(std::fs::read(at("file")).expect("the file still exists"), b"mine");
    std::os::unix::fs::symlink(at("file"), at("link")).expect("a link");
    assert!(matches!(bind(&at("link")), Err(ListenError::InTheWay(_))));
    assert!(matches!(bind(&at("no/such/folder")), Err(ListenError::System(..))));
    assert!(matches!(RingLine::connect(&at("nothing")), Err(ConnectError::NoRing(_))));

    let serving = RingPort::bind(&at("ring"), 2).expect("a socket");
    assert_eq!(
        std::fs::metadata(at("ring")).map(|found| peer::mode(&found)).expect("the socket exists"),
        0o600
    );
    let pid = std::process::id();
    assert!(matches!(bind(&at("ring")), Err(ListenError::Served(_, Some(found))) if found == pid));
    drop(serving);
    assert!(!at("ring").exists(), "a node removes its socket");

    Impostor::leave_behind(&at("stale"));
    assert!(matches!(RingLine::connect(&at("stale")), Err(ConnectError::NoRing(_))));
    assert_eq!(bind(&at("stale")).expect("a dead node's socket is replaced"), 2);
}

#[test]
fn engines_at_one_socket_share_the_clients() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ring");
    let mut ports = RingPort::bind(&path, 2).expect("a socket");
    let peers: Vec<_> = (0..8).map(|_| raw_ring::dial(&path)).collect();
    for _ in &peers {
        for port in &mut ports {
            port.receive(|_, _| {}).expect("a working port");
        }
    }
    assert_eq!(ports.iter().map(RingPort::connections).collect::<Vec<_>>(), [4, 4]);
}

//! Attacks that only shared memory permits:
//!
//! * counters that jump, go back or wrap, and wrong lengths;
//! * frames that change while the engine reads them;
//! * floods of wishes and bells;
//! * peers that never read, or die in the middle of a write.
//!
//! Invariant: the same engine serves the witness, through a ring of its own, before, during and after each attack.

use crate::attacks::bytes::*;
use crate::attacks::crowds::Descriptors;
use crate::attacks::peer::{PATIENCE, Raw, SILENCE, Session, Store};
use crate::attacks::target::{Before, SECRET, Target, Witness, contains_secret};
use crate::support::raw_ring::{self, FRAME_MAX, Memory, RING, Ring, SIZE, Side, Word};
use crate::support::until;
use rustix::fs::{FallocateFlags, OFlags, SealFlags};
use rustix::net::Shutdown;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A node under attack over rings, and a well-behaved client.
struct Scene {
    target: Target,
    witness: Witness,
    before: Before,
}

impl Scene {
    fn new() -> Scene {
        let target = Target::start();
        let before = target.now();
        let witness = target.witness("ring");
        Scene { target, witness, before }
    }

    fn path(&self) -> &Path {
        path_of(&self.target)
    }

    /// Opens a session for an attacker; returns the session and the attacker's store.
    #[track_caller]
    fn attacker(&self) -> (Session, Store) {
        let mut session = Session::open(self.target.url("ring"));
        let store = session.store("default");
        (session, store)
    }

    /// Asserts that the node hangs up on the session, and that the witness is not affected.
    #[track_caller]
    fn assert_ends_alone(&self, mut session: Session, what: &str) {
        self.witness.assert_well();
        ring_of(&session).bell();
        assert!(session.raw.is_hung_up(PATIENCE), "{what}");
        self.witness.assert_well();
    }

    #[track_caller]
    fn assert_nothing_left(self) {
        self.witness.assert_well();
        drop(self.witness);
        self.target.assert_as_before(self.before);
    }
}

fn path_of(target: &Target) -> &Path {
    Path::new(target.url("ring").strip_prefix("ring:").expect("a path"))
}

fn ring_of(session: &Session) -> &Ring {
    let Raw::Ring(ring) = &session.raw else { panic!("the session is over a ring") };
    ring
}

#[test]
fn counters_that_jump_go_back_or_wrap_end_only_their_session() {
    let scene = Scene::new();
    let ended = scene.target.count("engine_sessions_ended_total");
    let tails: [fn(u64) -> u64; 10] = [
        |at| at + 1,
        |at| at + 8,
        |at| at - 16,
        |at| at + RING + 16,
        |at| at.wrapping_sub(RING),
        |at| at ^ 1 << 63,
        |at| at ^ 1 << 32,
        |_| 0,
        |_| u64::MAX,
        |_| u64::MAX - 15,
    ];
    for (nth, tail) in tails.into_iter().enumerate() {
        let (session, _) = scene.attacker();
        let ring = ring_of(&session);
        ring.publish(tail(ring.written.get()));
        scene.assert_ends_alone(session, &format!("tail {nth}"));
    }
    // Heads: how much of the engine's ring the client has read. The engine loads them when the ring seems full.
    let heads: [fn(u64) -> u64; 6] =
        [|_| 0, |at| at + 8, |at| at + (1 << 40), |at| at ^ 1 << 63, |_| u64::MAX, |_| u64::MAX - 15];
    for (nth, head) in heads.into_iter().enumerate() {
        let (mut session, store) = scene.attacker();
        let long = chain(store.key, &[read(store.table_at, 1600), read(store.table_at, 1600)]);
        // Several times the ring's capacity, so that the engine has loaded the head.
        let mut read = 0;
        while read < 4 * RING {
            let reply = session.round_trip(CHAIN, 0, &long);
            read += reply.len() as u64;
        }
        let ring = ring_of(&session);
        ring.memory.word(Word::Head(Side::Engine)).store(head(ring.read.get()), Ordering::SeqCst);
        let asked = |slot| session.datagram(DATA, &Entry::whole(CHAIN, slot, 1, &long).bytes());
        for slot in 1..64 {
            session.raw.send(&asked(slot));
        }
        for number in 2..20 {
            for slot in 1..64 {
                let again = Entry::whole(CHAIN, slot, number, &long).bytes();
                session.raw.send(&session.datagram(DATA, &again));
            }
        }
        scene.assert_ends_alone(session, &format!("head {nth}"));
    }
    scene.target.reaches("engine_sessions_ended_total", ended + 16);
    scene.assert_nothing_left();
}

#[test]
fn lengths_that_lie_end_only_their_session() {
    let scene = Scene::new();
    let ended = scene.target.count("engine_sessions_ended_total");
    let lies = [
        (13, 16),
        (29, 32),
        (FRAME_MAX, 16),
        (FRAME_MAX + 1, u64::from(FRAME_MAX) + 32),
        (1 << 16, RING),
        (1 << 31, RING),
        (u32::MAX - 3, RING),
        (u32::MAX, 16),
    ];
    for (len, published) in lies {
        let (session, _) = scene.attacker();
        let ring = ring_of(&session);
        let at = ring.memory.of_ring(Side::Client, ring.written.get());
        at.store(len.into(), Ordering::SeqCst);
        ring.publish(ring.written.get() + published);
        scene.assert_ends_alone(session, &format!("{len} bytes in {published}"));
    }
    scene.target.reaches("engine_sessions_ended_total", ended + lies.len() as u64);
    let malformed = scene.target.count("engine_malformed_total");
    let (mut session, _) = scene.attacker();
    for _ in 0..1000 {
        session.raw.send(b"");
    }
    session.keep_alive();
    scene.target.reaches("engine_malformed_total", malformed + 1000);
    drop(session);
    scene.assert_nothing_left();
}

/// Calls `run` while another thread alternately writes two values to a position of the client's ring. `run` receives a
/// function that sets the position and the values.
fn while_it_changes<O>(memory: &Memory, run: impl FnOnce(&dyn Fn(u64, [u64; 2])) -> O) -> O {
    const NOWHERE: u64 = u64::MAX;
    let (stop, at) = (AtomicBool::new(false), AtomicU64::new(NOWHERE));
    let values = [const { AtomicU64::new(0) }; 2];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                for value in &values {
                    let (position, value) = (at.load(Ordering::SeqCst), value.load(Ordering::SeqCst));
                    if position != NOWHERE {
                        memory.of_ring(Side::Client, position).store(value, Ordering::SeqCst);
                    }
                }
            }
        });
        let out = run(&|position, [one, other]| {
            at.store(NOWHERE, Ordering::SeqCst);
            values[0].store(one, Ordering::SeqCst);
            values[1].store(other, Ordering::SeqCst);
            at.store(position, Ordering::SeqCst);
        });
        stop.store(true, Ordering::SeqCst);
        out
    })
}

/// Offset in a frame, in bytes, of a word that holds the length and the low 32 bits of the address of the chain's only
/// op.
const LEN_AND_ADDRESS: u64 = 4 + (HEADER + 16 + 24 + 4) as u64;

#[test]
fn an_address_that_changes_during_the_read_reveals_nothing() {
    let scene = Scene::new();
    let (mut session, store) = scene.attacker();
    let own = session.buffer(&store, &[1; 64]);
    let mut other = Session::open(scene.target.url("ring"));
    let theirs = other.store("witness");
    let their_buffer = other.buffer(&theirs, &SECRET.repeat(4));
    assert!(own < 1 << 32 && their_buffer < 1 << 32, "one word holds the length and the address");
    let (mut own_seen, mut refused) = (0, 0);
    let memory = Arc::clone(&ring_of(&session).memory);
    while_it_changes(&memory, |changes| {
        let since = Instant::now();
        while own_seen < 100 || refused < 100 {
            assert!(
                since.elapsed() < 2 * PATIENCE,
                "{own_seen} read their own bytes, {refused} were refused"
            );
            let frame_at = ring_of(&session).written.get();
            changes(frame_at + LEN_AND_ADDRESS, [own << 32 | 64, their_buffer << 32 | 64]);
            let reply = session.round_trip(CHAIN, 0, &chain(store.key, &[read(own, 64)]));
            assert!(!contains_secret(&reply), "the reply holds another tenant's bytes");
            match ChainReply::of(&reply, 1).statuses()[0] {
                OK => own_seen += 1,
                ACCESS => refused += 1,
                status => panic!("unexpected status {status}"),
            }
            if (own_seen + refused) % 64 == 0 {
                other.keep_alive();
                scene.witness.assert_well();
            }
        }
    });
    println!("{own_seen} chains read their own bytes, {refused} were refused");
    assert_eq!(other.chain(theirs.key, &[read(their_buffer, 64)]).output(0), SECRET.repeat(4));
    drop((session, other));
    scene.assert_nothing_left();
}

#[test]
fn a_length_that_changes_during_the_read_ends_only_its_session() {
    let scene = Scene::new();
    let [mut answered, mut ended] = [0, 0];
    let since = Instant::now();
    while answered < 20 || ended < 20 {
        assert!(since.elapsed() < 3 * PATIENCE, "{answered} were answered, {ended} ended");
        let (mut session, store) = scene.attacker();
        let memory = Arc::clone(&ring_of(&session).memory);
        let ops = chain(store.key, &[read(store.table_at, 64)]);
        let lies = [0, 15, 16, FRAME_MAX, FRAME_MAX + 1, u32::MAX];
        while_it_changes(&memory, |changes| {
            for turn in 0..200 {
                let (frame_at, number) = (ring_of(&session).written.get(), session.numbers[0] + 1);
                let good = session.datagram(DATA, &Entry::whole(CHAIN, 0, number, &ops).bytes());
                let magic = u64::from(u32_at(&good, 0)) << 32;
                let lie = lies[turn % lies.len()];
                changes(frame_at, [magic | good.len() as u64, magic | u64::from(lie)]);
                session.request(CHAIN, 0, &ops);
                if session.reply(0, number, SILENCE).is_none() {
                    // The engine did not understand the frame, or hung up.
                    ended += 1;
                    break;
                }
                answered += 1;
            }
        });
        scene.witness.assert_well();
        drop(session);
    }
    println!("{answered} frames were answered, {ended} sessions ended");
    scene.assert_nothing_left();
}

#[test]
fn floods_of_wishes_and_bells_delay_no_other_client() {
    let scene = Scene::new();
    let (mut session, _) = scene.attacker();
    let with_session = scene.target.node.descriptors();
    let null = std::fs::File::open("/dev/null").expect("a device");
    let ring = ring_of(&session);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for flood in 0..2_u64 {
            let (memory, stop, null) = (&ring.memory, &stop, &null);
            let socket = ring.socket.try_clone().expect("another descriptor");
            scope.spawn(move || {
                for turn in flood.. {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    let wish = [0, 1, 2, 3, 4, u64::MAX, 1 << 63][turn as usize % 7];
                    memory.word(Word::Wish(Side::Client)).store(wish, Ordering::SeqCst);
                    memory.word(Word::Wish(Side::Engine)).store(wish, Ordering::SeqCst);
                    match turn % 64 {
                        0 => raw_ring::send(&socket, &[0; 50_000], &[]),
                        1 => raw_ring::send(&socket, &[0], &[null.as_fd(); 8]),
                        2 => raw_ring::send(&socket, raw_ring::HELLO, &[socket.as_fd()]),
                        _ => raw_ring::send(&socket, &[0], &[]),
                    };
                }
            });
        }
        for _ in 0..10 {
            scene.witness.assert_well();
            session.say(PING); // The engine ends silent sessions.
        }
        stop.store(true, Ordering::SeqCst);
    });
    // The engine counts every message as a bell. The flood may have erased its wish, so it is rung once more.
    ring.bell();
    session.keep_alive();
    until("no descriptor is kept", || scene.target.node.descriptors() <= with_session);
    // A client that wishes and never reads makes the engine's bells pile up.
    let ring = ring_of(&session);
    for _ in 0..5000 {
        ring.memory.word(Word::Wish(Side::Client)).store(u64::MAX, Ordering::SeqCst);
        assert!(session.say(PING));
    }
    scene.witness.assert_well();
    session.keep_alive();
    drop(session);
    scene.assert_nothing_left();
}

#[test]
fn a_rings_memory_cannot_be_resized_and_a_hole_ends_its_session() {
    let scene = Scene::new();
    let (mut session, _) = scene.attacker();
    let ring = ring_of(&session);
    for size in [0, 4096, SIZE - 4096, SIZE - 1, SIZE + 1, SIZE + 4096, 1 << 40] {
        assert!(rustix::fs::ftruncate(&ring.fd, size).is_err(), "{size} bytes");
    }
    let of_process = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&ring.fd));
    let truncated = std::fs::File::options().write(true).truncate(true).open(&of_process);
    assert!(truncated.is_err(), "reopening the memory permitted a truncation");
    for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE, SealFlags::GROW | SealFlags::SHRINK] {
        assert!(rustix::fs::fcntl_add_seals(&ring.fd, seal).is_err(), "{seal:?}");
    }
    let grown = rustix::fs::fallocate(&ring.fd, FallocateFlags::empty(), SIZE, 4096);
    assert!(grown.is_err(), "the memory was extended");
    // Flags and locks belong to this descriptor, and do not affect the engine's.
    rustix::fs::fcntl_setfl(&ring.fd, OFlags::NONBLOCK | OFlags::APPEND).expect("our descriptor");
    rustix::fs::fcntl_setfl(&ring.socket, OFlags::NONBLOCK).expect("our descriptor");
    rustix::fs::flock(&ring.fd, rustix::fs::FlockOperation::LockExclusive).expect("our descriptor");
    rustix::net::sockopt::set_socket_recv_buffer_size(&ring.socket, 1).expect("our descriptor");
    rustix::net::sockopt::set_socket_send_buffer_size(&ring.socket, 1).expect("our descriptor");
    session.keep_alive();
    scene.witness.assert_well();
    // A hole reads as zeros, so the counters go back.
    let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&ring_of(&session).fd, holes, 0, SIZE).expect("a hole");
    scene.assert_ends_alone(session, "the memory is all zeros");
    scene.assert_nothing_left();
}

#[test]
fn a_half_closed_socket_ends_at_most_its_session() {
    let scene = Scene::new();
    for half in [Shutdown::Read, Shutdown::Write, Shutdown::Both] {
        let (mut session, _) = scene.attacker();
        let ring = ring_of(&session);
        rustix::net::shutdown(&ring.socket, half).expect("connected");
        for _ in 0..100 {
            ring.memory.word(Word::Wish(Side::Client)).store(u64::MAX, Ordering::SeqCst);
            session.say(PING);
        }
        if half == Shutdown::Read {
            // The engine cannot ring the bell, but it writes its frames.
            let tail = ring.memory.word(Word::Tail(Side::Engine));
            until("the engine responds", || tail.load(Ordering::SeqCst) > ring.read.get());
        } else {
            assert!(session.raw.is_hung_up(PATIENCE), "{half:?}");
        }
        scene.witness.assert_well();
    }
    scene.assert_nothing_left();
}

#[test]
fn a_client_that_never_reads_its_ring_is_disconnected() {
    let scene = Scene::new();
    let (mut session, store) = scene.attacker();
    let resident = scene.target.resident_kib();
    let ops = chain(store.key, &[read(store.table_at, 60_000)]);
    let since = Instant::now();
    'asks: for number in 1.. {
        for slot in 1..64 {
            let asked = session.datagram(DATA, &Entry::whole(CHAIN, slot, number, &ops).bytes());
            if !session.raw.send(&asked) {
                break 'asks;
            }
        }
        assert!(since.elapsed() < PATIENCE, "the engine does not hang up");
        if number % 10 == 0 {
            scene.witness.assert_well();
        }
    }
    let grown = scene.target.resident_kib().saturating_sub(resident);
    println!("a peer that never reads made the node grow by {grown} KiB");
    assert!(grown < 32 << 10, "{grown} KiB");
    assert!(session.raw.is_hung_up(PATIENCE));
    scene.witness.assert_well();
    drop(session);
    scene.assert_nothing_left();
}

#[test]
fn a_silent_ring_is_disconnected_even_if_it_is_the_only_one() {
    let target = Target::start();
    let before = target.now();
    let silent = raw_ring::dial(path_of(&target));
    assert!(raw_ring::hangs_up_within(&silent, PATIENCE), "a connection without a hello");
    let welcomed = Ring::join(path_of(&target));
    assert!(welcomed.hangs_up_within(PATIENCE), "a connection without a session");
    let chatty = Ring::join(path_of(&target));
    let since = Instant::now();
    while chatty.send(b"no session's datagram") {
        assert!(since.elapsed() < PATIENCE, "the engine does not hang up");
        std::thread::sleep(Duration::from_millis(5));
    }
    target.witness("ring").assert_well();
    target.assert_as_before(before);
}

#[test]
fn rings_beyond_the_maximum_are_refused_and_leave_nothing() {
    const RINGS_MAX: usize = 1024;
    let _descriptors = Descriptors::raised();
    let scene = Scene::new();
    let rings: Vec<_> = (0..RINGS_MAX + 50).map(|_| raw_ring::dial(scene.path())).collect();
    let refused = raw_ring::receive(rings.last().expect("many")).expect("a reason").0;
    let refused = String::from_utf8_lossy(&refused);
    assert!(refused.contains("the most there can be: end another first"), "{refused}");
    scene.witness.assert_well();
    drop(rings);
    until("others can connect", || farside::connect(scene.target.url("ring")).is_ok());
    scene.assert_nothing_left();
}

/// If silent connections hold every descriptor, they time out, and then the engine serves other clients.
#[test]
fn rings_that_hold_every_descriptor_are_disconnected() {
    let limited = |serve: Command| {
        let mut shell = Command::new("/bin/sh");
        shell.env_clear().args(["-c", "ulimit -n 64 && exec \"$@\"", "sh"]);
        shell.arg(serve.get_program()).args(serve.get_args());
        shell
    };
    let target = Target::within(limited);
    let before = target.now();
    let silent: Vec<_> = (0..100).map(|_| raw_ring::dial(path_of(&target))).collect();
    until("the engine serves others", || farside::connect(target.url("ring")).is_ok());
    target.witness("ring").assert_well();
    drop(silent);
    target.assert_as_before(before);
}

/// Environment variables for a child: the engine's url, and the stage at which the child dies.
const URL: &str = "FARSIDE_TEST_RING";
const STAGE: &str = "FARSIDE_TEST_STAGE";
const STAGES: u64 = 8;

/// Entry point of child processes. Does nothing when it runs as a test.
#[test]
fn child() {
    let Ok(url) = std::env::var(URL) else { return };
    let stage: u64 = std::env::var(STAGE).expect("a number").parse().expect("a number");
    gets_as_far_as(stage, &url);
    let killed = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("this process has killed itself: {killed:?}");
}

fn gets_as_far_as(stage: u64, url: &str) {
    let socket = raw_ring::dial(Path::new(url.strip_prefix("ring:").expect("a path")));
    match stage {
        0 => return std::mem::forget(socket),
        1 => {
            raw_ring::send(&socket, raw_ring::HELLO, &[]);
            return std::mem::forget(socket);
        }
        _ => drop(socket),
    }
    let mut session = Session::open(url);
    let store = session.store("default");
    for _ in 0..10 {
        session.buffer(&store, &[7; 1000]);
    }
    let half = chain(store.key, &[allocate(crate::attacks::peer::list_for(1000), &[7; 1000])]);
    let half = session.datagram(DATA, &Entry::whole(CHAIN, 1, 1, &half).bytes());
    let ring = ring_of(&session);
    let at = ring.written.get();
    match stage {
        2 => {}
        // Half a frame is written but not published; or its length is more than what is published.
        3 => ring.memory.of_ring(Side::Client, at).store(half.len() as u64, Ordering::SeqCst),
        4 => {
            ring.memory.of_ring(Side::Client, at).store(half.len() as u64, Ordering::SeqCst);
            ring.publish(at + 512);
        }
        // To the engine, the child seems to sleep.
        5 => ring.memory.word(Word::Wish(Side::Client)).store(3, Ordering::SeqCst),
        // A chain that allocates a buffer is in flight.
        6 => _ = session.raw.send(&half),
        // The child has replies in its ring, and has not reported them as read.
        _ => {
            for slot in 1..64 {
                session.request(CHAIN, slot, &chain(store.key, &[read(store.table_at, 1600)]));
            }
        }
    }
    // Not dropped: the child dies with everything that it holds.
    std::mem::forget(session);
}

#[test]
fn clients_that_die_during_a_write_leave_nothing() {
    let scene = Scene::new();
    let buffers = || {
        let stat = scene.target.stat("default");
        (stat["live_buffers"].as_u64(), stat["retired_buffers"].as_u64())
    };
    let (had, scanned) = (buffers(), scene.target.count("scanned_buffers_total"));
    for wave in 0..5 {
        let children: Vec<_> = (0..2 * STAGES)
            .map(|stage| {
                let mut command = Command::new(std::env::current_exe().expect("this test has a file"));
                command.args(["--exact", "attacks::rings::child", "--nocapture"]);
                command.env(URL, scene.target.url("ring")).env(STAGE, (stage % STAGES).to_string());
                command.stdout(Stdio::null()).spawn().expect("the command starts")
            })
            .collect();
        for mut child in children {
            use std::os::unix::process::ExitStatusExt;
            let status = child.wait().expect("it is our child");
            assert_eq!(status.signal(), Some(9), "wave {wave}: another signal");
        }
        scene.witness.assert_well();
    }
    until("every lost buffer is free again", || buffers() == had);
    let found = scene.target.count("scanned_buffers_total") - scanned;
    println!("{} clients died; {found} lost buffers were found", 5 * 2 * STAGES);
    assert!(found >= 5 * 2 * (STAGES - 2) * 10, "{found}");
    scene.assert_nothing_left();
}

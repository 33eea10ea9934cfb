//! Attacks that only a byte stream permits: half frames, frames of any length, peers that do not read.

use crate::attacks::bytes::*;
use crate::attacks::peer::{PATIENCE, Raw, SILENCE, Session};
use crate::attacks::target::Target;
use crate::support::until;
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

fn stream(target: &Target) -> TcpStream {
    let Raw::Tcp(stream, _) = Raw::connect(target.url("tcp")) else { panic!("tcp is a stream") };
    stream
}

#[test]
fn frames_of_impossible_length_end_only_their_connection() {
    let target = Target::start();
    let witness = target.witness("tcp");
    let before = target.now();
    for len in [65_508, 1 << 16, 1 << 31, u32::MAX - 3, u32::MAX] {
        let mut raw = Raw::connect(target.url("tcp"));
        let Raw::Tcp(stream, _) = &mut raw else { panic!("tcp is a stream") };
        stream.write_all(&u32::to_le_bytes(len)).expect("the node listens");
        assert!(raw.is_hung_up(PATIENCE), "a frame cannot have {len} bytes");
    }
    // The greeting of another protocol reads as a length.
    for greeting in ["GET / HTTP/1.1\r\n\r\n", "*1\r\n$4\r\nPING\r\n", "\u{16}\u{3}\u{1}\u{2}\u{0}\u{1}\u{0}"]
    {
        let mut raw = Raw::connect(target.url("tcp"));
        let Raw::Tcp(stream, _) = &mut raw else { panic!("tcp is a stream") };
        stream.write_all(greeting.as_bytes()).expect("the node listens");
        assert!(raw.is_hung_up(PATIENCE), "{greeting:?} is not a frame");
    }
    let malformed = target.count("engine_malformed_total");
    let mut session = Session::open(target.url("tcp"));
    for _ in 0..1000 {
        session.raw.send(b"");
    }
    assert!(session.sync(), "empty frames are ignored");
    target.reaches("engine_malformed_total", malformed + 1000);
    drop(session);
    witness.assert_well();
    target.assert_as_before(before);
}

/// The node disconnects a peer that is silent or sends one byte at a time, even if no other client wakes the engine.
#[test]
fn slow_and_silent_connections_are_closed_even_if_alone() {
    let target = Target::start();
    let before = target.now();
    let hello = hello(7, 1, 7, b"");
    let frame = [&(hello.len() as u32).to_le_bytes()[..], &hello].concat();
    let (silent, mut slow) = (stream(&target), stream(&target));
    let since = Instant::now();
    let mut bytes = frame.iter();
    // The slow peer must be disconnected first, so that its bytes do not wake the engine for the silent one.
    while slow.write_all(&[*bytes.next().expect("a hello is long")]).is_ok() {
        assert!(since.elapsed() < PATIENCE, "the node does not hang up");
        std::thread::sleep(Duration::from_millis(400));
    }
    let mut silent = Raw::Tcp(silent, Vec::new());
    assert!(silent.is_hung_up(PATIENCE));
    let mut alone = Raw::Tcp(stream(&target), Vec::new());
    assert!(alone.is_hung_up(PATIENCE), "the engine wakes by itself to check silent peers");
    let half_open: Vec<TcpStream> = (0..50).map(|_| stream(&target)).collect();
    for one in &half_open {
        let _half = one.shutdown(std::net::Shutdown::Write);
    }
    target.witness("tcp").assert_well();
    target.assert_as_before(before);
}

#[test]
fn a_client_that_never_reads_its_replies_is_disconnected() {
    let target = Target::start();
    let witness = target.witness("tcp");
    let before = target.now();
    let mut session = Session::open(target.url("tcp"));
    let store = session.store("default");
    let resident = target.resident_kib();
    let ops = chain(store.key, &[read(store.table_at, 60_000)]);
    let Raw::Tcp(stream, _) = &session.raw else { panic!("tcp is a stream") };
    stream.set_write_timeout(Some(Duration::from_millis(500))).expect("a stream");
    let since = Instant::now();
    'asks: for number in 1.. {
        for slot in 1..64 {
            let asked = session.datagram(DATA, &Entry::whole(CHAIN, slot, number, &ops).bytes());
            if !session.raw.send(&asked) || since.elapsed() > PATIENCE {
                break 'asks;
            }
        }
        if number % 10 == 0 {
            witness.assert_well();
        }
    }
    let grown = target.resident_kib().saturating_sub(resident);
    println!("a peer that never reads made the node grow by {grown} KiB");
    assert!(grown < 32 << 10, "{grown} KiB");
    assert!(session.raw.is_hung_up(PATIENCE), "the node does not hang up");
    witness.assert_well();
    drop(session);
    target.assert_as_before(before);
}

/// If silent connections hold every descriptor, they time out, and then the node serves other clients.
#[test]
fn connections_that_hold_every_descriptor_are_closed() {
    let limited = |serve: std::process::Command| {
        let mut shell = std::process::Command::new("/bin/sh");
        shell.env_clear().args(["-c", "ulimit -n 64 && exec \"$@\"", "sh"]);
        shell.arg(serve.get_program()).args(serve.get_args());
        shell
    };
    let target = Target::within(limited);
    let before = target.now();
    let silent: Vec<TcpStream> = (0..100).map(|_| stream(&target)).collect();
    until("the node serves others", || farside::connect(target.url("tcp")).is_ok());
    target.witness("tcp").assert_well();
    drop(silent);
    target.assert_as_before(before);
}

#[test]
fn a_connection_that_breaks_ends_its_session_at_once() {
    let target = Target::start();
    let ended = target.count("engine_sessions_ended_total");
    let mut thief = Raw::connect(target.url("tcp"));
    for _ in 0..20 {
        let session = Session::open(target.url("tcp"));
        let late = session.datagram(PING, &[]);
        drop(session);
        thief.send(&late);
        assert!(thief.receive(SILENCE).is_none_or(|answer| answer[3] == GONE));
    }
    target.reaches("engine_sessions_ended_total", ended + 20);
}

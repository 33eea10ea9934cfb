//! Thousands of peers at once: idle connections, idle sessions, and sessions that never end by themselves.

use crate::attacks::bytes::*;
use crate::attacks::on_each_carrier;
use crate::attacks::peer::{PATIENCE, Raw, Session, random};
use crate::attacks::target::Target;
use crate::support::until;
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, NodeId};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

on_each_carrier![
    a_crowd_of_idle_sessions_does_not_block_other_clients,
    a_client_that_requests_a_scan_gets_a_response
];

const CROWD: usize = 10_000;
/// Size of a crowd over rings. An engine serves at most 1024 rings, because each ring has memory of its own.
const CROWD_OF_RINGS: usize = 1_000;

/// Guard that raises the limit of descriptors to the maximum, for this process and its children, until it is dropped.
/// Only one test at a time holds a guard, because two crowds together exceed the maximum.
pub(crate) struct Descriptors(Rlimit, #[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Descriptors {
    pub(crate) fn raised() -> Descriptors {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: before.maximum, ..before }).expect("below the maximum");
        Descriptors(before, alone)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.0).expect("a limit may be lowered");
    }
}

const WHILE: Duration = Duration::from_millis(700);

fn report(what: &str, count: usize, kib: u64, gets: [u64; 2]) {
    println!(
        "{count} {what}: {} bytes each in the node; the rate of another client's gets was {:.2} of that without them",
        kib * 1024 / count as u64,
        gets[1] as f64 / gets[0] as f64
    );
}

#[test]
fn ten_thousand_idle_connections_do_not_block_other_clients() {
    let _descriptors = Descriptors::raised();
    let target = Target::start();
    let witness = target.witness("tcp");
    let before = target.now();
    let alone = witness.gets_in(WHILE);
    let resident = target.resident_kib();
    let crowd: Vec<Raw> = (0..CROWD).map(|_| Raw::connect(target.url("tcp"))).collect();
    let with = witness.gets_in(WHILE);
    let kib = target.resident_kib().saturating_sub(resident);
    report("silent connections", CROWD, kib, [alone, with]);
    assert!(with > 0 && kib < 64 << 10, "{kib} KiB");
    drop(crowd);
    witness.assert_well();
    target.assert_as_before(before);
}

fn a_crowd_of_idle_sessions_does_not_block_other_clients(carrier: &'static str) {
    let count = if carrier == "ring" { CROWD_OF_RINGS } else { CROWD };
    let _descriptors = Descriptors::raised();
    let target = Target::start();
    let witness = target.witness(carrier);
    let before = target.now();
    let alone = witness.gets_in(WHILE);
    let resident = target.resident_kib();
    let mut crowd: Vec<Session> = Vec::with_capacity(count);
    let mut kept = Instant::now();
    for _ in 0..count {
        crowd.push(Session::open(target.url(carrier)));
        // The node ends a session after 5 s of silence.
        if kept.elapsed() > Duration::from_secs(1) {
            crowd.iter().for_each(|session| assert!(session.say(PING)));
            kept = Instant::now();
        }
    }
    crowd.iter().for_each(|session| assert!(session.say(PING)));
    let with = witness.gets_in(WHILE);
    let kib = target.resident_kib().saturating_sub(resident);
    report(&format!("idle sessions over {carrier}"), count, kib, [alone, with]);
    assert!(with > 0 && kib < 512 << 10, "{kib} KiB");
    drop(crowd);
    until("the crowd's sessions have ended", || target.count("engine_sessions_ended_total") >= count as u64);
    witness.assert_well();
    target.assert_as_before(before);
}

/// A scan waits for clients' turns, but not for the turn of the client that requests it.
fn a_client_that_requests_a_scan_gets_a_response(carrier: &'static str) {
    let target = Target::start();
    let witness = target.witness(carrier);
    let pool = farside::connect(target.url(carrier)).expect("the node serves");
    let endpoint = pool.endpoint_here().expect("a session");
    endpoint.set_call_timeout(PATIENCE);
    let since = Instant::now();
    let mut answer = Vec::new();
    let ask = br#"{"scan":{"name":"default"}}"#;
    let asked = endpoint.call(NodeId(0), ServiceId::NODE, ask, &mut answer);
    farside_fabrics::executor::block_on(&endpoint, asked).expect("the scan completes");
    assert_eq!(answer, b"\"done\"");
    assert!(since.elapsed() < PATIENCE / 2, "it took {:?}", since.elapsed());
    witness.assert_well();
}

/// The node keeps each reply until the client acknowledges it, but bounds the replies of all sessions together.
#[test]
fn unread_replies_of_all_sessions_have_a_common_bound() {
    let target = Target::start();
    let witness = target.witness("udp");
    let before = target.now();
    let resident = target.resident_kib();
    let refused = target.count("engine_disallowed_total");
    let mut greedy = Vec::new();
    for _ in 0..120 {
        let mut session = Session::open(target.url("udp"));
        let store = session.store("default");
        let at = session.buffer(&store, &vec![1; 30_000]);
        let long = chain(store.key, &[read(at, 30_000), read(at, 30_000)]);
        // The session never reads its replies.
        for slot in 1..64 {
            session.request(CHAIN, slot, &long);
        }
        greedy.push(session);
        greedy.iter().for_each(|session| assert!(session.say(PING)));
    }
    let grown = target.resident_kib().saturating_sub(resident) >> 10;
    println!("120 sessions that each leave 63 replies of 60 kB: the node grew by {grown} MiB");
    assert!(grown < 400, "{grown} MiB");
    target.reaches("engine_disallowed_total", refused + 100);
    witness.assert_well();
    drop((greedy, witness));
    target.assert_as_before(before);
}

/// One socket requests 9,600 sessions. The node ends them, and keeps serving others.
#[test]
fn the_sessions_of_one_socket_are_bounded_and_end() {
    let target = Target::start();
    let before = target.now();
    let mut raw = Raw::connect(target.url("udp"));
    let mut welcomes = 0;
    for _ in 0..300 {
        for _ in 0..32 {
            raw.send(&hello(u128::from(random()), 1, 7, b""));
        }
        while let Some(answer) = raw.receive(Duration::from_millis(2)) {
            welcomes += u32::from(answer[3] == WELCOME);
        }
    }
    assert!(welcomes > 1000, "{welcomes}");
    let kib = target.resident_kib();
    println!("{welcomes} sessions were granted to one socket; the node has {kib} KiB");
    target.witness("udp").assert_well();
    drop(raw);
    target.assert_as_before(before);
}

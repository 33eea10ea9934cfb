//! Attacks on the access by the NIC, from a session whose requests the tests build by hand. Attacks on the messages are
//! those on every carrier ([`crate::attacks`]), and run over the device too.

use super::{Atomic, Resources, node, until};
use crate::attacks::bytes::CALL;
use crate::attacks::peer::{PATIENCE, Raw, Session, Store, random};
use serde_json::{Value, json};

/// Number of the engine's service for access by the NIC.
const SERVICE: u32 = u32::MAX;

/// Calls that service.
fn ask(session: &mut Session, request: &Value) -> Result<Value, String> {
    session.call_service(SERVICE, &request.to_string())
}

/// A description of a queue pair that a client might send.
fn pair(change: &[(&str, Value)]) -> Value {
    let mut gid = vec![0_u8; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 10, 9, 0, 1]);
    let mut pair = json!({ "number": 1, "first": 1, "lid": 0, "gid": gid, "mtu": 3, "reads": 1 });
    for (name, value) in change {
        pair[*name] = value.clone();
    }
    json!({ "connect": pair })
}

fn register(key: (u32, u64)) -> Value {
    json!({ "register": { "region": key.0, "secret": key.1 } })
}

/// Has a store's memory registered. The node prepares large memory by several steps.
#[track_caller]
fn registered(session: &mut Session, store: &Store) -> Value {
    loop {
        let response = ask(session, &register(store.key)).expect("registered");
        if response != json!("pending") {
            return response;
        }
    }
}

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn a_nics_keys_are_given_for_valid_keys_only() {
    let before = Resources::now();
    let node = node(Atomic::Nic, &["--memory", "64MiB"]);
    let url = node.listening();
    let mut session = Session::open(&url);
    session.create("mine", 8 << 20);
    let store = session.store("mine");
    assert!(ask(&mut session, &register(store.key)).is_err(), "a queue pair comes first");
    ask(&mut session, &pair(&[])).expect("connected");
    let mine = registered(&mut session, &store);
    let extents = mine["registered"].as_array().expect("a list");
    assert!(!extents.is_empty() && extents.iter().all(|extent| extent["len"].as_u64() > Some(0)), "{mine}");
    // Another session's key is of no use, nor is any other key.
    let bits = (0..64).map(|bit| (store.key.0, store.key.1 ^ 1 << bit));
    let regions = (0..64).chain([u32::MAX]).filter(|region| *region != store.key.0);
    let wrong: Vec<(u32, u64)> = std::iter::once(store.key)
        .chain(bits)
        .chain(regions.map(|region| (region, store.key.1)))
        .chain([(0, 0), (store.key.0, random())])
        .collect();
    // The node ends a session after 16 wrong keys.
    for keys in wrong.chunks(15) {
        let mut other = Session::open(&url);
        other.store("mine");
        ask(&mut other, &pair(&[])).expect("connected");
        for key in keys {
            let response = ask(&mut other, &register(*key)).expect("a response");
            assert_eq!(response, json!({ "registered": [] }), "{key:x?}");
        }
        other.keep_alive();
        if keys.len() == 15 {
            let one_more = register((0, 0)).to_string();
            other.request(CALL, 0, &[&u64::from(SERVICE).to_le_bytes(), one_more.as_bytes()].concat());
            until("the guessing session is over", || !other.sync());
        }
        session.keep_alive();
    }
    assert_eq!(registered(&mut session, &store), mine);
    drop(session);
    until("the sessions are over", || node.sessions() == 0);
    drop(node);
    before.are_back();
}

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn odd_descriptions_of_queue_pairs_are_refused() {
    let node = node(Atomic::Nic, &["--memory", "32MiB"]);
    let url = node.listening();
    let mut session = Session::open(&url);
    let before = Resources::now();
    for change in [
        [("number", json!(0x0100_0000))],
        [("first", json!(0x0100_0000))],
        [("mtu", json!(0))],
        [("mtu", json!(6))],
        [("reads", json!(0))],
        [("reads", json!(255))],
        [("gid", json!([1, 2, 3]))],
        [("number", json!(-1))],
        [("lid", json!("x"))],
    ] {
        let refused = ask(&mut session, &pair(&change)).expect_err("refused");
        assert!(!refused.is_empty(), "{change:?}");
    }
    for odd in [json!({}), json!([]), json!("connect"), json!({ "register": {} }), json!({ "frob": 1 })] {
        assert!(ask(&mut session, &odd).is_err(), "{odd}");
    }
    before.are_back();
    // A queue pair that is asked for again replaces the former one.
    for _ in 0..100 {
        ask(&mut session, &pair(&[])).expect("connected");
    }
    assert!(Resources::now().queue_pairs() <= before.queue_pairs() + 1, "{:?}", Resources::now());
    drop(session);
    until("the session is over", || node.sessions() == 0);
    super::at(&url, &["info"]).done();
}

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn connections_that_say_nothing_are_closed() {
    use std::io::Write;
    use std::net::TcpStream;
    let node = node(Atomic::Engine, &["--memory", "32MiB"]);
    let url = node.listening();
    let (before, descriptors) = (Resources::now(), node.descriptors());
    let at = url.strip_prefix("verbs://").expect("a url");
    let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(at).expect("it listens")).collect();
    let mut wrong: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(at).expect("it listens")).collect();
    for (index, stream) in wrong.iter_mut().enumerate() {
        let bytes: Vec<u8> = (0..48).map(|byte| (byte * 7 + index) as u8).collect();
        let _hung_up = stream.write_all(&bytes[..48 - index]);
    }
    // Queue pairs without a session.
    let pairs: Vec<Raw> = (0..10).map(|_| Raw::connect(&url)).collect();
    super::at(&url, &["info"]).done();
    until("all of them are closed", || node.descriptors() <= descriptors);
    drop((silent, wrong, pairs));
    before.are_back();
    let mut late = Raw::connect(&url);
    assert!(late.is_hung_up(PATIENCE), "a queue pair without a session is closed");
}

//! Tests of Pilaf: the behaviour of its operations over every fabric, and their costs.

use crate::support::Home;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Turns, block_on};
use farside_fabrics::layer::count::Count;
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::ring::RingLine;
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::shm;
use farside_fabrics::tcp::TcpLine;
use farside_fabrics::udp::UdpLine;
use farside_node::access::{Fingerprint, Grant, Token, Tokens};
use farside_node::host::{Listen, Options};
use farside_remote::clock::Clock;
use farside_remote::{Fabric, NodeId, Rights};
use farside_systems::kv::pilaf::layout::{ANSWER_SIZE, ENTRY_SIZE, HEADER_SIZE, PAIR_MAX, REQUEST_SIZE};
use farside_systems::kv::pilaf::{KIND, Pilaf};
use farside_systems::kv::{KEY_MAX, Kv, KvError};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const NODE: NodeId = NodeId(0);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A client of the store `s`, with the endpoint that runs the client's operations.
struct Client<F> {
    endpoint: Rc<Count<F>>,
    kv: Pilaf<Rc<Count<F>>>,
}

impl<F: Fabric + Clock + Turns> Client<F> {
    fn open(fabric: F) -> Client<F> {
        let endpoint = Rc::new(Count::new(fabric));
        let kv = block_on(&endpoint, Pilaf::open(Rc::clone(&endpoint), NODE, "s")).expect("the store exists");
        Client { endpoint, kv }
    }

    fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let got = block_on(&self.endpoint, self.kv.get(key)).unwrap_or_else(|error| panic!("{error}"));
        got.map(|item| item.value.to_vec())
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        block_on(&self.endpoint, self.kv.put(key, value))
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        block_on(&self.endpoint, self.kv.delete(key)).unwrap_or_else(|error| panic!("{error}"))
    }
}

fn local(home: &Home) -> Direct {
    let node: Arc<dyn LocalNode> = Arc::clone(&home.host) as _;
    local::connect(&node, NODE).expect("a session")
}

fn who(token: &[u8]) -> Config {
    static CLIENTS: AtomicU64 = AtomicU64::new(0);
    let identity = CLIENTS.fetch_add(1, Ordering::Relaxed).into();
    Config { identity, incarnation: 1, nonce: 7, token: token.to_vec(), ..Config::default() }
}

fn home(mib: u64, options: Options, parameters: &str) -> Home {
    let memory = Mapping::create(mib << 20, Pages::Small).expect("memory");
    let home = Home::with(memory, options);
    home.create_of(KIND, "s", mib / 2, parameters);
    home
}

// Over every fabric.

/// Compares puts, deletes and gets of two clients with a map. Each client sees the changes of the other.
fn two_clients_agree_with_a_map<F: Fabric + Clock + Turns>(connect: impl Fn() -> F) {
    let mut clients = [Client::open(connect()), Client::open(connect())];
    let mut model = BTreeMap::new();
    let mut state = 1u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for round in 0..1500u64 {
        let client = &mut clients[draw(2) as usize];
        let key = format!("key {}", draw(40)).into_bytes();
        match draw(5) {
            0 => assert_eq!(client.delete(&key), model.remove(&key).is_some(), "round {round}"),
            1 | 2 => {
                let value = vec![round as u8; [0, 1, 30, 500, 5000, 40_000][draw(6) as usize]];
                client.put(&key, &value).unwrap_or_else(|error| panic!("round {round}: {error}"));
                model.insert(key, value);
            }
            _ => assert!(client.get(&key).as_ref() == model.get(&key), "round {round}"),
        }
    }
    let largest = vec![7; PAIR_MAX - 1];
    clients[0].put(b"k", &largest).expect("one call carries it");
    assert!(clients[1].get(b"k") == Some(largest), "one READ carries it");
    assert_eq!(clients[0].endpoint.take().retired, 0, "the node's CPU frees replaced items");
}

const SOME: &str = r#"{"items": 40}"#;

#[test]
fn two_clients_agree_with_a_map_on_local() {
    let home = home(16, Options::default(), SOME);
    two_clients_agree_with_a_map(|| local(&home));
}

#[test]
fn two_clients_agree_with_a_map_on_shm() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let _home = home(16, Options { socket: Some(socket.clone()), ..Options::default() }, SOME);
    two_clients_agree_with_a_map(|| shm::connect(&socket, NODE).unwrap_or_else(|error| panic!("{error}")));
}

fn listening(listen: Listen) -> (Home, Listen) {
    let home = home(16, Options { listen: vec![listen], ..Options::default() }, SOME);
    let listen = home.host.listening()[0].clone();
    (home, listen)
}

#[test]
fn two_clients_agree_with_a_map_on_udp() {
    let (_home, Listen::Udp(address)) = listening(Listen::Udp(LOOPBACK)) else {
        panic!("the node listens on UDP")
    };
    let line = || UdpLine::connect(address, None).expect("a socket");
    two_clients_agree_with_a_map(|| Endpoint::open(line(), NODE, who(b"")).expect("a session"));
}

#[test]
fn two_clients_agree_with_a_map_on_tcp() {
    let (_home, Listen::Tcp(address)) = listening(Listen::Tcp(LOOPBACK)) else {
        panic!("the node listens on TCP")
    };
    let line = || TcpLine::connect(address).expect("a connection");
    two_clients_agree_with_a_map(|| Endpoint::open(line(), NODE, who(b"")).expect("a session"));
}

#[test]
fn two_clients_agree_with_a_map_on_ring() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_home, Listen::Ring(path)) = listening(Listen::Ring(folder.path().join("node.ring"))) else {
        panic!("the node listens on rings")
    };
    let line = || RingLine::connect(&path).unwrap_or_else(|error| panic!("{error}"));
    two_clients_agree_with_a_map(|| Endpoint::open(line(), NODE, who(b"")).expect("a session"));
}

#[test]
fn a_put_needs_the_right_to_write_and_a_get_the_right_to_read() {
    let token = |name: &str, rights| {
        let stores = BTreeMap::from([("s".to_owned(), Grant(rights))]);
        Token { name: name.into(), sha256: Fingerprint::of(name.as_bytes()), admin: false, stores }
    };
    let tokens = Tokens { token: vec![token("reader", Rights::READ), token("writer", Rights::WRITE)] };
    let options = Options { listen: vec![Listen::Tcp(LOOPBACK)], tokens: Some(tokens), ..Options::default() };
    let home = home(16, options, SOME);
    let Listen::Tcp(address) = home.host.listening()[0] else { panic!("the node listens on TCP") };
    let client = |token: &str| {
        let line = TcpLine::connect(address).expect("a connection");
        Client::open(Endpoint::open(line, NODE, who(token.as_bytes())).expect("a session"))
    };
    let (mut reader, mut writer) = (client("reader"), client("writer"));
    writer.put(b"k", b"v").expect("the token may write");
    assert_eq!(reader.get(b"k").as_deref(), Some(&b"v"[..]));
    for refused in [
        reader.put(b"k", b"w").expect_err("the token may not write"),
        block_on(&reader.endpoint, reader.kv.delete(b"k")).expect_err("the token may not write"),
    ] {
        assert!(refused.to_string().contains("needs the right 'write'"), "{refused}");
        assert_eq!(refused.ran(), farside_remote::fabric::Ran::No);
    }
    let refused =
        block_on(&writer.endpoint, writer.kv.get(b"k")).map(drop).expect_err("the token may not read");
    assert!(refused.to_string().contains("lacks a right"), "{refused}");
    assert_eq!(reader.get(b"k").as_deref(), Some(&b"v"[..]));
}

// Costs, as in the PRISM paper: section 6.1 and figure 3.

#[test]
fn a_get_is_two_reads_and_a_put_is_one_call() {
    let home = home(16, Options::default(), r#"{"items": 40, "placement": "permuted"}"#);
    let mut client = Client::open(local(&home));
    let key = 7u64.to_be_bytes();
    client.endpoint.take();

    client.put(&key, &[1; 100]).expect("stored");
    let costs = client.endpoint.take();
    assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "a PUT is one call");
    assert_eq!(costs.bytes_out, 8 + REQUEST_SIZE as u64 + 8 + 100, "the store's secret, then key and value");
    assert_eq!((costs.bytes_in, costs.atomics), (ANSWER_SIZE as u64, 0));

    assert_eq!(client.get(&key), Some(vec![1; 100]));
    let costs = client.endpoint.take();
    assert_eq!((costs.round_trips, costs.requests, costs.calls), (2, 2, 0), "READ the entry, READ the item");
    let item = HEADER_SIZE as u64 + 8 + 100;
    assert_eq!(costs.bytes_in, 8 + ENTRY_SIZE + 8 + item, "each in a reply of one op");
    assert_eq!((costs.atomics, costs.retired), (0, 0));

    assert!(client.delete(&key));
    let costs = client.endpoint.take();
    assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "a DELETE is one call");
    assert_eq!(client.get(&8u64.to_be_bytes()), None);
    assert_eq!(client.endpoint.take().round_trips, 1, "an entry that never had a key ends a probe");
}

// The service, its table and its memory.

#[test]
fn pairs_of_every_size_are_returned_and_longer_ones_are_refused() {
    let home = home(32, Options::default(), SOME);
    let mut client = Client::open(local(&home));
    for key_len in [1, 2, 8, 255, 256, KEY_MAX] {
        for value_len in [0, 1, 47, 256, 4096, 57_000, PAIR_MAX - KEY_MAX] {
            let (key, value) = (vec![key_len as u8; key_len], vec![value_len as u8; value_len]);
            client.put(&key, &value).expect("stored");
            assert!(client.get(&key) == Some(value), "a key of {key_len} with a value of {value_len}");
            assert!(client.delete(&key));
        }
    }
    assert_eq!(home.stat("s").live_buffers, 0, "a deleted key has no item");
    let refused = client.put(b"k", &vec![0; PAIR_MAX]).expect_err("one byte too many");
    assert_eq!(refused, KvError::PairLength { len: PAIR_MAX + 1, max: PAIR_MAX });
    assert!(refused.to_string().contains(&PAIR_MAX.to_string()), "{refused}");
    assert!(matches!(client.put(b"", b""), Err(KvError::KeyLength(0))));
    assert!(matches!(client.put(&[0; KEY_MAX + 1], b""), Err(KvError::KeyLength(_))));
}

#[test]
fn colliding_keys_keep_their_values_while_others_are_deleted() {
    // 64 slots, the smallest table.
    let home = home(16, Options::default(), r#"{"items": 1}"#);
    let mut client = Client::open(local(&home));
    let key = |n: u32| n.to_string().into_bytes();
    for n in 0..64u32 {
        client.put(&key(n), &n.to_le_bytes()).expect("each key has a slot");
    }
    assert!(matches!(client.put(b"one too many", b"x"), Err(KvError::TableFull(_))));
    client.put(&key(5), b"again").expect("the key has a slot");
    // Every other key is deleted, and other keys take their slots.
    for n in (0..64u32).step_by(2) {
        assert!(client.delete(&key(n)));
        assert!(!client.delete(&key(n)));
    }
    for n in (0..64u32).step_by(2) {
        assert_eq!(client.get(&key(n)), None, "{n} was deleted");
        client.put(&key(n + 1000), &n.to_le_bytes()).expect("a vacant slot");
    }
    for n in (1..64u32).step_by(2) {
        let value = if n == 5 { b"again".to_vec() } else { n.to_le_bytes().to_vec() };
        assert_eq!(client.get(&key(n)), Some(value), "{n} keeps its value");
        assert_eq!(client.get(&key(n + 999)), Some((n - 1).to_le_bytes().to_vec()));
    }
}

#[test]
fn every_put_raises_the_version_even_after_a_delete() {
    let home = home(16, Options::default(), SOME);
    let mut client = Client::open(local(&home));
    let mut seen = Vec::new();
    for round in 0..20 {
        client.put(b"k", b"v").expect("stored");
        let got = block_on(&client.endpoint, client.kv.get(b"k")).expect("read").expect("present");
        seen.push(got.version.0);
        if round % 3 == 0 {
            client.delete(b"k");
        }
    }
    assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
}

#[test]
fn replaced_and_deleted_items_are_freed_immediately() {
    let home = home(16, Options::default(), r#"{"items": 5000}"#);
    let mut client = Client::open(local(&home));
    for round in 0..40u8 {
        for n in 0..500u32 {
            client.put(&n.to_be_bytes(), &[round; 1000]).expect("memory is reused: 20 MB in 6 MiB");
        }
    }
    let stat = home.stat("s");
    assert_eq!((stat.live_buffers, stat.retired_buffers), (500, 0), "no buffer is retired: {stat:?}");
    let mut count = 500u32;
    let refused = loop {
        match client.put(&count.to_be_bytes(), &[9; 1000]) {
            Ok(()) => count += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, KvError::OutOfMemory);
    assert!(count > 5500, "{count} items of 1000 bytes in 6 MiB");
    assert_eq!(client.put(&7u32.to_be_bytes(), &[1; 1000]), Err(KvError::OutOfMemory));
    assert_eq!(
        client.get(&7u32.to_be_bytes()),
        Some(vec![39; 1000]),
        "the value that could not be replaced remains"
    );
    for n in 0..count {
        assert!(client.delete(&n.to_be_bytes()), "a full store can be emptied");
    }
    assert_eq!(home.stat("s").live_buffers, 0);
    client.put(b"another size", &[3; 5000]).expect("segments of small items are reused for other sizes");
}

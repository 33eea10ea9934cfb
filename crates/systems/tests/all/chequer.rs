//! Tests of Chequer and of Chequer-message: the behaviour of their operations over every fabric, and their costs.

use crate::support::Home;
use crate::support::intercept::{Intercept, Then};
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
use farside_node::host::{Listen, LogFolder, Options};
use farside_node::log::{Log, LogOptions};
use farside_remote::clock::Clock;
use farside_remote::service::Records;
use farside_remote::{Fabric, FabricError, NodeId};
use farside_systems::kv::chequer::layout::{KEY_INLINE, LENGTH_SIZE, RECORD_SIZE, VALUE_MAX};
use farside_systems::kv::chequer::request::{ANSWER_SIZE, PART_MAX, REQUEST_SIZE};
use farside_systems::kv::chequer::{Chequer, ChequerKind, ChequerMessageKind, TRANSFER_MAX};
use farside_systems::kv::{KEY_MAX, Kv, KvError};
use farside_systems::system::System;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

const NODE: NodeId = NodeId(0);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A client of the store `s`, with the endpoint that runs the client's operations.
struct Client<F> {
    endpoint: Rc<Count<F>>,
    kv: Chequer<Rc<Count<F>>>,
}

/// A client whose cache of values has this many bytes.
fn chequer<F: Fabric + Clock + Turns>(fabric: F, cache: usize) -> Client<F> {
    let endpoint = Rc::new(Count::new(fabric));
    let opened = block_on(&endpoint, Chequer::open(Rc::clone(&endpoint), NODE, "s"));
    let kv = opened.expect("the store exists").with_cache(cache);
    endpoint.take();
    Client { endpoint, kv }
}

fn message<F: Fabric + Clock + Turns>(fabric: F) -> Client<F> {
    let endpoint = Rc::new(Count::new(fabric));
    let opened = block_on(&endpoint, Chequer::open_message(Rc::clone(&endpoint), NODE, "s"));
    let kv = opened.expect("the store exists");
    endpoint.take();
    Client { endpoint, kv }
}

impl<F: Fabric + Clock + Turns> Client<F> {
    fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let got = block_on(&self.endpoint, self.kv.get(key)).unwrap_or_else(|error| panic!("{error}"));
        got.map(|item| item.value.to_vec())
    }

    fn contains(&mut self, key: &[u8]) -> bool {
        block_on(&self.endpoint, self.kv.contains(key)).unwrap_or_else(|error| panic!("{error}"))
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

fn who() -> Config {
    static CLIENTS: AtomicU64 = AtomicU64::new(0);
    let identity = CLIENTS.fetch_add(1, Ordering::Relaxed).into();
    Config { identity, incarnation: 1, nonce: 7, ..Config::default() }
}

fn home(kind: &str, mib: u64, options: Options, parameters: &str) -> Home {
    let memory = Mapping::create((mib + 8) << 20, Pages::Small).expect("memory");
    let home = Home::with(memory, options);
    home.create_of(kind, "s", mib, parameters);
    home
}

const SOME: &str = r#"{"items": 60}"#;

// Over every fabric.

/// Compares puts, deletes and gets of two clients with a map. Each client sees the changes of the other. One of them
/// has a cache.
fn two_clients_agree_with_a_map<F: Fabric + Clock + Turns>(mut clients: [Client<F>; 2]) {
    let mut model = BTreeMap::new();
    let mut state = 1u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for round in 0..1500u64 {
        let client = &mut clients[draw(2) as usize];
        let mut key = format!("key {}", draw(40)).into_bytes();
        if draw(4) == 0 {
            key.resize(KEY_INLINE + 20, b'.');
        }
        match draw(6) {
            0 => assert_eq!(client.delete(&key), model.remove(&key).is_some(), "round {round}"),
            1 | 2 => {
                let value = vec![round as u8; [0, 1, 30, 500, 5000, 200_000][draw(6) as usize]];
                client.put(&key, &value).unwrap_or_else(|error| panic!("round {round}: {error}"));
                model.insert(key, value);
            }
            3 => assert_eq!(client.contains(&key), model.contains_key(&key), "round {round}"),
            _ => assert!(client.get(&key).as_ref() == model.get(&key), "round {round}"),
        }
    }
    let largest = vec![7; VALUE_MAX];
    clients[0].put(b"k", &largest).expect("the store has space for it");
    assert!(clients[1].get(b"k") == Some(largest));
}

/// Runs the test on a store of each kind, on a node that listens at `listen`.
fn on_each_kind<F: Fabric + Clock + Turns>(options: impl Fn() -> Options, connect: impl Fn(&Home) -> F) {
    let home_of = home(ChequerKind::KIND, 32, options(), SOME);
    two_clients_agree_with_a_map([chequer(connect(&home_of), 0), chequer(connect(&home_of), 100_000)]);
    drop(home_of);
    let home_of = home(ChequerMessageKind::KIND, 32, options(), SOME);
    two_clients_agree_with_a_map([message(connect(&home_of)), message(connect(&home_of))]);
}

fn on_each_kind_over<F: Fabric + Clock + Turns>(listen: &Listen, connect: impl Fn(&Listen) -> F) {
    let options = || Options { listen: vec![listen.clone()], ..Options::default() };
    on_each_kind(options, |home| connect(&home.host.listening()[0]));
}

fn session<L: farside_fabrics::session::carrier::Line>(line: L) -> Endpoint<L> {
    Endpoint::open(line, NODE, who()).expect("a session")
}

#[test]
fn two_clients_agree_with_a_map_on_local() {
    on_each_kind(Options::default, local);
}

#[test]
fn two_clients_agree_with_a_map_on_shm() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    on_each_kind(
        || Options { socket: Some(socket.clone()), ..Options::default() },
        |_| shm::connect(&socket, NODE).unwrap_or_else(|error| panic!("{error}")),
    );
}

#[test]
fn two_clients_agree_with_a_map_on_udp() {
    on_each_kind_over(&Listen::Udp(LOOPBACK), |listen| {
        let Listen::Udp(address) = listen else { panic!("the node listens on UDP") };
        session(UdpLine::connect(*address, None).expect("a socket"))
    });
}

#[test]
fn two_clients_agree_with_a_map_on_tcp() {
    on_each_kind_over(&Listen::Tcp(LOOPBACK), |listen| {
        let Listen::Tcp(address) = listen else { panic!("the node listens on TCP") };
        session(TcpLine::connect(*address).expect("a connection"))
    });
}

#[test]
fn two_clients_agree_with_a_map_on_ring() {
    let folder = tempfile::tempdir().expect("a folder");
    on_each_kind_over(&Listen::Ring(folder.path().join("node.ring")), |listen| {
        let Listen::Ring(path) = listen else { panic!("the node listens on rings") };
        session(RingLine::connect(path).unwrap_or_else(|error| panic!("{error}")))
    });
}

// Costs, as in the paper.

#[test]
fn a_get_is_one_read_of_a_block_and_one_of_the_value_unless_it_is_cached() {
    let parameters = r#"{"items": 64, "placement": "permuted", "block_buckets": 8}"#;
    let home = home(ChequerKind::KIND, 8, Options::default(), parameters);
    let (mut client, mut caching) = (chequer(local(&home), 0), chequer(local(&home), 10_000));
    let key = 7u64.to_be_bytes();

    client.put(&key, &[1; 100]).expect("stored");
    let costs = client.endpoint.take();
    assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "a PUT in mode 1 is one call");
    assert_eq!(costs.bytes_out, 8 + REQUEST_SIZE as u64 + 8 + 100, "the store's secret, then key and value");
    assert_eq!((costs.bytes_in, costs.atomics), (ANSWER_SIZE as u64, 0));

    assert_eq!(client.get(&key), Some(vec![1; 100]));
    let costs = client.endpoint.take();
    assert_eq!((costs.round_trips, costs.requests, costs.calls), (2, 2, 0), "READ the block, READ the value");
    let (block, value) = (8 * RECORD_SIZE, LENGTH_SIZE as u64 + 100);
    assert_eq!(costs.bytes_in, 8 + block + 8 + value, "each in a reply of one op");
    assert_eq!((costs.atomics, costs.retired), (0, 0));

    for (expected, of) in [(2, "the value is not cached"), (1, "the cached value is current")] {
        assert_eq!(caching.get(&key), Some(vec![1; 100]));
        let costs = caching.endpoint.take();
        assert_eq!((costs.round_trips, costs.requests, costs.calls), (expected, expected, 0), "{of}");
    }
    client.put(&key, &[2; 100]).expect("stored");
    assert_eq!(caching.get(&key), Some(vec![2; 100]));
    assert_eq!(caching.endpoint.take().round_trips, 2, "the cached value is not current");

    assert!(client.contains(&key) && !client.contains(&99u64.to_be_bytes()));
    let costs = {
        client.endpoint.take();
        client.contains(&key);
        client.endpoint.take()
    };
    assert_eq!((costs.round_trips, costs.requests, costs.calls), (1, 1, 0), "CONTAINS is the first READ");
    assert!(client.delete(&key));
    let costs = client.endpoint.take();
    assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "a DELETE is one call");
    assert_eq!(client.get(&key), None);
    assert_eq!(client.endpoint.take().round_trips, 1, "the block has a bucket that never had a record");
}

#[test]
fn a_put_in_mode_two_is_two_calls_and_a_write_between_them() {
    let parameters = r#"{"items": 64, "placement": "permuted", "put_threshold": 1024}"#;
    let home = home(ChequerKind::KIND, 8, Options::default(), parameters);
    let mut client = chequer(local(&home), 0);
    let key = 7u64.to_be_bytes();
    for (len, is_written) in [(1023, false), (1024, true), (TRANSFER_MAX, true)] {
        client.put(&key, &vec![3; len]).expect("stored");
        let costs = client.endpoint.take();
        let expected = if is_written { (3, 2, 1) } else { (1, 1, 0) };
        assert_eq!((costs.round_trips, costs.calls, costs.requests), expected, "{len} bytes");
        assert_eq!(client.get(&key), Some(vec![3; len]));
        client.endpoint.take();
    }
}

#[test]
fn every_operation_of_chequer_message_is_one_call() {
    let home = home(ChequerMessageKind::KIND, 8, Options::default(), SOME);
    let mut client = message(local(&home));
    for len in [0, 100, PART_MAX] {
        client.put(b"key", &vec![4; len]).expect("stored");
        assert_eq!(client.get(b"key"), Some(vec![4; len]));
        assert!(client.contains(b"key") && client.delete(b"key"));
        let costs = client.endpoint.take();
        assert_eq!((costs.round_trips, costs.calls, costs.requests), (4, 4, 0), "{len} bytes");
    }
}

/// The session says when a WRITE of a dropped put has ended, so that its block may be given back.
#[test]
fn a_dropped_put_gives_its_block_back_over_a_session() {
    let listen = vec![Listen::Tcp(LOOPBACK)];
    let home = home(ChequerKind::KIND, 8, Options { listen, ..Options::default() }, SOME);
    let Listen::Tcp(address) = home.host.listening()[0] else { panic!("the node listens on TCP") };
    let endpoint = Rc::new(session(TcpLine::connect(address).expect("a connection")));
    let is_written = Cell::new(false);
    let fabric = Rc::new(Intercept::new(Rc::clone(&endpoint)));
    let opened = block_on(&endpoint, Chequer::open(Rc::clone(&fabric), NODE, "s"));
    let mut kv = opened.expect("the store exists");
    fabric.before_each(|| {
        is_written.set(true);
        Then::Runs
    });
    let reservations = || home.stat("s").service["reservations"];
    let value = vec![7; 5000];
    let is_dropped = block_on(&endpoint, async {
        let mut put = pin!(kv.put(b"key", &value));
        poll_fn(|context| match put.as_mut().poll(context) {
            Poll::Ready(_) => Poll::Ready(false),
            Poll::Pending if is_written.get() => Poll::Ready(true),
            Poll::Pending => Poll::Pending,
        })
        .await
    });
    assert!(is_dropped, "the put waits for its WRITE");
    assert_eq!(reservations(), 1);
    let began = Instant::now();
    while reservations() > 0 {
        assert!(began.elapsed() < Duration::from_secs(30), "the client withdraws the reservation");
        assert!(!block_on(&endpoint, kv.contains(b"key")).expect("read"), "the put was not committed");
    }
    block_on(&endpoint, kv.put(b"key", &value)).expect("stored");
    assert!(block_on(&endpoint, kv.get(b"key")).expect("read").is_some_and(|item| item.value == value));
}

/// Many clients put large values at the same time, faster than the disk stores them.
#[test]
fn writers_of_large_values_wait_for_a_log_that_is_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = Some(LogFolder { path: folder.path().to_owned(), options: LogOptions::default() });
    let home = home(ChequerKind::KIND, 128, Options { log, ..Options::default() }, SOME);
    let value = vec![8; VALUE_MAX];
    let writers = 40u64;
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let (home, value) = (&home, &value);
            scope.spawn(move || {
                let mut client = chequer(local(home), 0);
                for round in 0..2 {
                    let key = [writer as u8, round];
                    client.put(&key, value).unwrap_or_else(|error| panic!("writer {writer}: {error}"));
                }
            });
        }
    });
    assert!(home.stat("s").service["log_records"] >= 2 * writers);
}

/// The clients know a log that is behind by the text of its refusal.
#[test]
fn the_refusal_of_a_log_that_is_behind_is_known_as_such() {
    let home = home(ChequerKind::KIND, 8, Options::default(), SOME);
    let store = chequer(local(&home), 0).kv.store().clone();
    let mut log = Log::new(store, LogOptions::default(), 1);
    let mut records = Records::default();
    records.append(&vec![1; 1 << 20]);
    let refused = (0..100).find_map(|_| log.append(&records).err()).expect("nothing writes this log");
    assert!(FabricError::Refused(refused.clone()).is_log_behind(), "{refused}");
    assert!(!FabricError::Refused("the log cannot be written: the disk is full".into()).is_log_behind());
}

// The service, its table and its memory.

#[test]
fn pairs_of_every_size_are_returned_and_longer_ones_are_refused() {
    fn on(mut client: Client<Direct>) {
        for key_len in [1, 2, KEY_INLINE, KEY_INLINE + 1, 256, KEY_MAX] {
            for value_len in [0, 1, 1023, 1024, PART_MAX, PART_MAX + 1, TRANSFER_MAX + 1, VALUE_MAX] {
                let (key, value) = (vec![key_len as u8; key_len], vec![value_len as u8; value_len]);
                client.put(&key, &value).unwrap_or_else(|error| panic!("{value_len} bytes: {error}"));
                assert!(client.get(&key) == Some(value), "a key of {key_len} with a value of {value_len}");
                assert!(client.contains(&key) && client.delete(&key) && !client.contains(&key));
            }
        }
        let refused = client.put(b"k", &vec![0; VALUE_MAX + 1]).expect_err("one byte too many");
        assert_eq!(refused, KvError::PairLength { len: VALUE_MAX + 2, max: VALUE_MAX + 1 });
        assert!(matches!(client.put(b"", b""), Err(KvError::KeyLength(0))));
        assert!(matches!(client.put(&[0; KEY_MAX + 1], b""), Err(KvError::KeyLength(_))));
    }
    let home_of = |kind| home(kind, 32, Options::default(), SOME);
    on(chequer(local(&home_of(ChequerKind::KIND)), 0));
    on(message(local(&home_of(ChequerMessageKind::KIND))));
}

#[test]
fn colliding_keys_keep_their_values_while_others_are_deleted() {
    // 64 buckets, in blocks of each size.
    for block_buckets in [1, 4, 8, 64] {
        let parameters = format!(r#"{{"items": 32, "block_buckets": {block_buckets}}}"#);
        let home = home(ChequerKind::KIND, 8, Options::default(), &parameters);
        let mut client = chequer(local(&home), 0);
        let key = |n: u32| n.to_string().into_bytes();
        for n in 0..64u32 {
            client.put(&key(n), &n.to_le_bytes()).expect("each key has a bucket");
        }
        assert!(matches!(client.put(b"one too many", b"x"), Err(KvError::TableFull(_))));
        client.put(&key(5), b"again").expect("the key has a bucket");
        // Every other key is deleted, and other keys take their buckets.
        for n in (0..64u32).step_by(2) {
            assert!(client.delete(&key(n)));
            assert!(!client.delete(&key(n)));
        }
        for n in (0..64u32).step_by(2) {
            assert_eq!(client.get(&key(n)), None, "{n} was deleted");
            client.put(&key(n + 1000), &n.to_le_bytes()).expect("a vacant bucket");
        }
        for n in (1..64u32).step_by(2) {
            let value = if n == 5 { b"again".to_vec() } else { n.to_le_bytes().to_vec() };
            assert_eq!(client.get(&key(n)), Some(value), "{n} keeps its value");
            assert_eq!(client.get(&key(n + 999)), Some((n - 1).to_le_bytes().to_vec()));
        }
    }
}

#[test]
fn every_put_raises_the_version_even_after_a_delete() {
    let home = home(ChequerKind::KIND, 8, Options::default(), SOME);
    let mut client = chequer(local(&home), 0);
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
fn a_cached_value_is_not_taken_for_one_that_was_put_after_a_delete() {
    let home = home(ChequerKind::KIND, 8, Options::default(), SOME);
    let (mut writer, mut caching) = (chequer(local(&home), 0), chequer(local(&home), 10_000));
    for round in 0..10u8 {
        writer.put(b"k", &[round; 50]).expect("stored");
        assert_eq!(caching.get(b"k"), Some(vec![round; 50]));
        assert!(writer.delete(b"k"));
        assert_eq!(caching.get(b"k"), None);
    }
}

#[test]
fn a_store_that_is_full_can_be_emptied_and_filled_with_another_size() {
    let home = home(ChequerKind::KIND, 8, Options::default(), r#"{"items": 8000}"#);
    let mut client = chequer(local(&home), 0);
    let mut count = 0u32;
    for size in [1000, 5000, 700] {
        let refused = loop {
            match client.put(&count.to_be_bytes(), &vec![9; size]) {
                Ok(()) => count += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(refused, KvError::OutOfMemory);
        if count == 0 {
            panic!("no value of {size} bytes was stored");
        }
        assert_eq!(client.get(&0u32.to_be_bytes()), Some(vec![9; size]), "the others remain");
        assert!((0..count).all(|n| client.delete(&n.to_be_bytes())), "a full store can be emptied");
        count = 0;
    }
}

#[test]
fn a_client_of_another_kind_is_refused() {
    let home = home(ChequerMessageKind::KIND, 8, Options::default(), SOME);
    let endpoint = Rc::new(local(&home));
    let refused = block_on(&endpoint, Chequer::open(Rc::clone(&endpoint), NODE, "s")).err();
    assert!(refused.is_some_and(|error| error.to_string().contains("is a chequer-message")));
}

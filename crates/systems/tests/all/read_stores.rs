//! Tests of what FaRM-KV and the cached index share: their behaviour over every fabric, after a node failure, with
//! malicious clients, and with concurrent readers and writers.

use crate::support::intercept::{Intercept, Then};
use crate::support::paced::{self, ALL, Stepped};
use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Turns, block_on};
use farside_fabrics::layer::count::Count;
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, MappingError, Pages};
use farside_fabrics::ring::RingLine;
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::shm;
use farside_fabrics::tcp::TcpLine;
use farside_fabrics::udp::UdpLine;
use farside_node::access::{Fingerprint, Grant, Token, Tokens};
use farside_node::host::{Listen, Options};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, Memory, NodeId, Rights};
use farside_systems::kv::called::{ATTEMPTS_MAX, Op};
use farside_systems::kv::{AnyKv, Kv, KvError, cached_index, farm_kv};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const KINDS: [&str; 2] = [farm_kv::KIND, cached_index::KIND];
const NODE: NodeId = NodeId(0);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// The smallest table: keys collide, move, and lie in chains.
const SMALL: &str = r#"{"items": 1, "pair": 64}"#;

type Client = AnyKv<Rc<Count<Direct>>>;

fn client(home: &Home, name: &str) -> (Rc<Count<Direct>>, Client) {
    let endpoint = home.endpoint();
    let kv = run(&endpoint, AnyKv::open(Rc::clone(&endpoint), 1, name, &<_>::default()));
    (endpoint, kv.expect("the store exists"))
}

fn value_of<F: Fabric + Clock + Clone>(kv: &mut AnyKv<F>, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
    block_on((), kv.get(key)).map(|item| item.map(|item| item.value.to_vec()))
}

fn key(number: u64) -> Vec<u8> {
    format!("key {number}").into_bytes()
}

/// Draws numbers, always the same ones.
fn drawing() -> impl FnMut(u64) -> u64 {
    let mut state = 1u64;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

/// As many items as fill three quarters of the slots or entries, the most for a number of buckets.
#[test]
fn a_table_takes_all_items_for_which_it_is_created() {
    for (kind, items) in [(farm_kv::KIND, 1536), (cached_index::KIND, 1344)] {
        let home = Home::new(16);
        for table in 0..8 {
            // Each store has its own hash.
            let name = format!("s{table}");
            home.create_of(kind, &name, 1, &format!(r#"{{"items": {items}, "pair": 20}}"#));
            let (endpoint, mut kv) = client(&home, &name);
            for number in 0..items {
                let stored = run(&endpoint, kv.put(&key(number), b"v"));
                assert_eq!(stored, Ok(()), "{kind}: key {number} of {items}");
            }
        }
    }
}

// Over every fabric.

/// Compares puts, deletes and gets of two clients with a map. Each client sees the changes of the other.
fn two_clients_agree_with_a_map<F: Fabric + Clock + Turns>(kind: &str, connect: impl Fn() -> F) {
    let mut clients = [connect(), connect()].map(|fabric| {
        let endpoint = Rc::new(fabric);
        let opened = block_on(&endpoint, AnyKv::open(Rc::clone(&endpoint), 1, kind, &<_>::default()));
        (Rc::clone(&endpoint), opened.expect("the store exists"))
    });
    let (mut model, mut draw) = (BTreeMap::new(), drawing());
    for round in 0..1000u64 {
        let (endpoint, kv) = &mut clients[draw(2) as usize];
        let key = key(draw(40));
        match draw(5) {
            0 => {
                let was_present = block_on(&*endpoint, kv.delete(&key));
                assert_eq!(was_present, Ok(model.remove(&key).is_some()), "{kind}: round {round}");
            }
            1 | 2 => {
                let value = vec![round as u8; [0, 1, 30, 500, 2000, 5900][draw(6) as usize]];
                let stored = block_on(&*endpoint, kv.put(&key, &value));
                assert_eq!(stored, Ok(()), "{kind}: round {round}");
                model.insert(key, value);
            }
            _ => {
                let got = block_on(&*endpoint, kv.get(&key)).expect("read");
                let is_right = got.map(|item| item.value) == model.get(&key).map(|value| &value[..]);
                assert!(is_right, "{kind}: round {round}");
            }
        }
    }
}

/// Creates a node with a store of each kind, which has the name of its kind.
fn home(options: Options) -> Home {
    let memory = Mapping::create(32 << 20, Pages::Small).expect("memory");
    let home = Home::with(memory, options);
    for kind in KINDS {
        home.create_of(kind, kind, 8, r#"{"items": 40, "pair": 6000}"#);
    }
    home
}

fn who(token: &[u8]) -> Config {
    static CLIENTS: AtomicU64 = AtomicU64::new(0);
    let identity = CLIENTS.fetch_add(1, Ordering::Relaxed).into();
    Config { identity, incarnation: 1, nonce: 7, token: token.to_vec(), ..Config::default() }
}

fn listening(listen: Listen) -> (Home, Listen) {
    let home = home(Options { listen: vec![listen], ..Options::default() });
    let listen = home.host.listening()[0].clone();
    (home, listen)
}

#[test]
fn two_clients_agree_with_a_map_on_local() {
    let home = home(Options::default());
    let node: Arc<dyn LocalNode> = Arc::clone(&home.host) as _;
    for kind in KINDS {
        two_clients_agree_with_a_map(kind, || local::connect(&node, NODE).expect("a session"));
    }
}

#[test]
fn two_clients_agree_with_a_map_on_shm() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let _home = home(Options { socket: Some(socket.clone()), ..Options::default() });
    for kind in KINDS {
        two_clients_agree_with_a_map(kind, || shm::connect(&socket, NODE).expect("a session"));
    }
}

#[test]
fn two_clients_agree_with_a_map_on_udp() {
    let (_home, Listen::Udp(address)) = listening(Listen::Udp(LOOPBACK)) else {
        panic!("the node listens on UDP")
    };
    let line = || UdpLine::connect(address, None).expect("a socket");
    for kind in KINDS {
        two_clients_agree_with_a_map(kind, || Endpoint::open(line(), NODE, who(b"")).expect("a session"));
    }
}

#[test]
fn two_clients_agree_with_a_map_on_tcp() {
    let (_home, Listen::Tcp(address)) = listening(Listen::Tcp(LOOPBACK)) else {
        panic!("the node listens on TCP")
    };
    let line = || TcpLine::connect(address).expect("a connection");
    for kind in KINDS {
        two_clients_agree_with_a_map(kind, || Endpoint::open(line(), NODE, who(b"")).expect("a session"));
    }
}

#[test]
fn two_clients_agree_with_a_map_on_ring() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_home, Listen::Ring(path)) = listening(Listen::Ring(folder.path().join("node.ring"))) else {
        panic!("the node listens on rings")
    };
    let line = || RingLine::connect(&path).unwrap_or_else(|error| panic!("{error}"));
    for kind in KINDS {
        two_clients_agree_with_a_map(kind, || Endpoint::open(line(), NODE, who(b"")).expect("a session"));
    }
}

#[test]
fn a_put_needs_the_right_to_write_and_a_get_the_right_to_read() {
    let token = |name: &str, rights| {
        let stores = KINDS.map(|kind| (kind.to_owned(), Grant(rights))).into();
        Token { name: name.into(), sha256: Fingerprint::of(name.as_bytes()), admin: false, stores }
    };
    let tokens = Tokens { token: vec![token("reader", Rights::READ), token("writer", Rights::WRITE)] };
    let home = home(Options { listen: vec![Listen::Tcp(LOOPBACK)], tokens: Some(tokens), ..<_>::default() });
    let Listen::Tcp(address) = home.host.listening()[0] else { panic!("the node listens on TCP") };
    for kind in KINDS {
        let client = |token: &str| {
            let line = TcpLine::connect(address).expect("a connection");
            let endpoint = Rc::new(Endpoint::open(line, NODE, who(token.as_bytes())).expect("a session"));
            let opened = block_on(&endpoint, AnyKv::open(Rc::clone(&endpoint), 1, kind, &<_>::default()));
            (Rc::clone(&endpoint), opened.expect("the store exists"))
        };
        let ((of_reader, mut reader), (of_writer, mut writer)) = (client("reader"), client("writer"));
        block_on(&of_writer, writer.put(b"k", b"v")).expect("the token may write");
        for refused in [
            block_on(&of_reader, reader.put(b"k", b"w")).expect_err("the token may not write"),
            block_on(&of_reader, reader.delete(b"k")).map(drop).expect_err("the token may not write"),
        ] {
            assert!(refused.to_string().contains("needs the right 'write'"), "{refused}");
            assert_eq!(refused.ran(), Ran::No);
        }
        let refused = block_on(&of_writer, writer.get(b"k")).map(drop).expect_err("the token may not read");
        assert!(refused.to_string().contains("lacks a right"), "{refused}");
        let got = block_on(&of_reader, reader.get(b"k")).expect("the token may read").expect("present");
        assert_eq!(got.value, b"v");
    }
}

// Node failures.

/// Maps the memory file. Retries, because a process that another test has just forked shares the file's lock until
/// this process starts its own program.
fn mapped(path: &Path) -> Mapping {
    for _ in 0..500 {
        match Mapping::open(path, 8 << 20) {
            Err(MappingError::Foreign(_)) => std::thread::sleep(Duration::from_millis(10)),
            opened => return opened.expect("the file can be mapped").0,
        }
    }
    panic!("the file stays locked");
}

/// Counts the keys that an empty store takes, and deletes them.
fn capacity(home: &Home) -> u64 {
    let (endpoint, mut kv) = client(home, "s");
    let count = (0..1000).find(|number| run(&endpoint, kv.put(&key(*number), b"")).is_err());
    let count = count.expect("the table is small");
    for number in 0..count {
        assert_eq!(run(&endpoint, kv.delete(&key(number))), Ok(true));
    }
    count
}

/// A put that moves keys or adds a block, one in place, and a delete: each is done or not done, and no key, block or
/// item is lost.
fn a_node_failure_at_any_access_loses_nothing_of(kind: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("memory");
    let serve = |take_over: bool| Home::with(mapped(&path), Options { take_over, ..Options::default() });
    let home = serve(false);
    let store = home.create_of(kind, "s", 4, SMALL);
    let capacity_before = capacity(&home);
    // With so many keys, most neighbourhoods are full.
    let others = 0..14;
    let (endpoint, mut kv) = client(&home, "s");
    for number in others.clone() {
        run(&endpoint, kv.put(&key(number), b"kept")).expect("stored");
    }
    drop((endpoint, kv, home));
    let (mut undone, mut done) = (0, 0);
    for name in 20..23 {
        let name = key(name);
        let mut before = None;
        for (op, value) in [(Op::Put, &b"old"[..]), (Op::Put, b"new"), (Op::Delete, b"")] {
            let after = (op == Op::Put).then(|| value.to_vec());
            for accesses in 0.. {
                let home = serve(true);
                let made = paced::interrupted(home.host.memory(), &store, (op, &name, value), accesses);
                drop(home);
                let home = serve(true);
                let (endpoint, mut kv) = client(&home, "s");
                let got = value_of(&mut kv, &name).expect("the change is completed");
                let what = || format!("{kind}: {op:?} after {accesses}: {got:?}");
                assert!(got == before || got == after, "{}", what());
                for number in others.clone() {
                    assert_eq!(value_of(&mut kv, &key(number)), Ok(Some(b"kept".to_vec())), "{}", what());
                }
                // The next call completes a change that was recorded, and is on top of it.
                run(&endpoint, kv.put(&key(0), b"kept")).expect("stored");
                let settled = value_of(&mut kv, &name).expect("the table is whole");
                assert!(settled == got || settled == after, "{}, then {settled:?}", what());
                let got = settled;
                *(if got == after { &mut done } else { &mut undone }) += 1;
                if made < accesses {
                    break;
                }
                // Restore the state before the call.
                match &before {
                    Some(value) => run(&endpoint, kv.put(&name, value)).expect("stored"),
                    None => _ = run(&endpoint, kv.delete(&name)).expect("deleted"),
                }
            }
            before = after;
        }
    }
    assert!(undone > 20 && done > 20, "{kind}: {undone} undone, {done} done");
    let home = serve(true);
    let (endpoint, mut kv) = client(&home, "s");
    for number in others {
        assert_eq!(run(&endpoint, kv.delete(&key(number))), Ok(true));
    }
    assert_eq!(capacity(&home), capacity_before, "{kind}");
}

pub(crate) fn a_node_failure_loses_nothing_of_farm_kv() {
    a_node_failure_at_any_access_loses_nothing_of(farm_kv::KIND);
}

pub(crate) fn a_node_failure_loses_nothing_of_the_cached_index() {
    a_node_failure_at_any_access_loses_nothing_of(cached_index::KIND);
}

#[test]
fn a_node_failure_at_any_access_loses_no_key_and_no_place() {
    a_node_failure_loses_nothing_of_farm_kv();
    a_node_failure_loses_nothing_of_the_cached_index();
}

// Malicious clients with the store's key.

/// A store and another one on the same node. The table's bytes can be spoiled and restored.
struct Rig {
    home: Home,
    store: Store,
    good: Vec<u8>,
    endpoint: Rc<Count<Direct>>,
    kv: Client,
}

impl Rig {
    /// Creates a store with these keys.
    fn new(kind: &str, keys: u64) -> Rig {
        let home = Home::new(16);
        let store = home.create_of(kind, "s", 4, SMALL);
        home.create_of(kind, "other", 4, SMALL);
        let (endpoint, mut kv) = client(&home, "s");
        for number in 0..keys {
            run(&endpoint, kv.put(&key(number), b"value")).expect("stored");
        }
        let (of_other, mut other) = client(&home, "other");
        run(&of_other, other.put(b"mine", b"untouched")).expect("stored");
        let mut good = vec![0; store.table_len as usize];
        let Ok(()) = home.host.memory().read(store.table_at, &mut good);
        Rig { home, store, good, endpoint, kv }
    }

    fn spoil(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.store.table_len);
        let Ok(()) = self.home.host.memory().write(self.store.table_at + at, bytes);
    }

    fn restore(&self) {
        self.spoil(0, &self.good);
    }

    fn assert_well(&self) {
        let (_, mut other) = client(&self.home, "other");
        assert_eq!(value_of(&mut other, b"mine"), Ok(Some(b"untouched".to_vec())));
    }
}

#[test]
fn with_any_bytes_in_the_table_operations_end_and_other_stores_are_unaffected() {
    for kind in KINDS {
        let mut rig = Rig::new(kind, 20);
        let used = rig.good.iter().rposition(|byte| *byte != 0).expect("a used byte") as u64;
        let (mut draw, mut ended) = (drawing(), [0; 2]);
        for round in 0..20_000u64 {
            if round % 10 == 0 {
                rig.restore();
            }
            let word = match draw(4) {
                0 => u64::MAX,
                1 => draw(100),
                2 => rig.store.table_at + draw(used / 16) * 16,
                _ => draw(1 << 31) << 33 | draw(1 << 31),
            };
            // A line keeps its version in most cases, so that its object is not torn.
            let line = draw(used / 16) * 16;
            let at = line + [0, 2, 4, 8][draw(4) as usize];
            rig.spoil(at, &word.to_le_bytes());
            let name = key(draw(30));
            let is_done = match draw(3) {
                0 => value_of(&mut rig.kv, &name).is_ok(),
                1 => run(&rig.endpoint, rig.kv.put(&name, &vec![1; draw(50) as usize])).is_ok(),
                _ => run(&rig.endpoint, rig.kv.delete(&name)).is_ok(),
            };
            ended[usize::from(is_done)] += 1;
        }
        assert!(ended.iter().all(|&ended| ended > 100), "{kind}: some succeed and some fail: {ended:?}");
        rig.assert_well();
    }
}

/// An object whose lines are of several versions is reread, then the service is called.
fn torn_bytes_are_never_returned_by(kinds: &[&str]) {
    for &kind in kinds {
        let mut rig = Rig::new(kind, 1);
        // The last intent has the value, too.
        let at = rig.good.windows(5).rposition(|bytes| bytes == b"value").expect("the value") as u64;
        let object_line = at / 16 * 16;
        // Each READ finds the line with another version. The service finds it as it was.
        let (is_torn, torn, line) = (Cell::new(true), [0xAB; 2], &rig.good[object_line as usize..][..2]);
        let hot = Intercept::new(rig.home.endpoint());
        hot.before_each(|| {
            if is_torn.get() {
                rig.spoil(object_line, &torn);
            }
            Then::Runs
        });
        hot.before_each_call(|| rig.spoil(object_line, line));
        let mut kv = block_on((), AnyKv::open(&hot, 1, "s", &<_>::default())).expect("the store exists");
        hot.inner().take();
        assert_eq!(value_of(&mut kv, &key(0)), Ok(Some(b"value".to_vec())), "{kind}");
        let costs = hot.inner().take();
        let reads = if kind == farm_kv::KIND { 1 } else { 2 };
        // The bucket of the index is cached after the first READ and read again in each further attempt.
        assert_eq!((costs.requests, costs.calls), (u64::from(reads * ATTEMPTS_MAX), 1), "{kind}");
        is_torn.set(false);
        assert_eq!(value_of(&mut kv, &key(0)), Ok(Some(b"value".to_vec())), "{kind}");
        assert_eq!(hot.inner().take().calls, 0, "{kind}");
        drop(kv);
        drop(hot);
        // If the line stays torn, the service finds it, too.
        rig.spoil(object_line, &torn);
        assert!(matches!(value_of(&mut rig.kv, &key(0)), Err(KvError::Damaged(_))), "{kind}");
        let refused = run(&rig.endpoint, rig.kv.put(&key(0), b"w"));
        assert!(matches!(refused, Err(KvError::Damaged(_))), "{kind}: {refused:?}");
        rig.restore();
        assert_eq!(value_of(&mut rig.kv, &key(0)), Ok(Some(b"value".to_vec())), "{kind}");
        rig.assert_well();
    }
}

#[cfg(farside_mutants)]
pub(crate) fn torn_bytes_are_never_returned_by_farm_kv() {
    torn_bytes_are_never_returned_by(&[farm_kv::KIND]);
}

#[cfg(farside_mutants)]
pub(crate) fn torn_bytes_are_never_returned_by_the_cached_index() {
    torn_bytes_are_never_returned_by(&[cached_index::KIND]);
}

#[test]
fn a_get_of_torn_bytes_calls_the_service_at_last() {
    torn_bytes_are_never_returned_by(&KINDS);
}

// Concurrent readers and writers.

const OF_FARM_KV: (&str, &str) = (farm_kv::KIND, r#"{"items": 20000, "pair": 100}"#);
const OF_CACHED_INDEX: (&str, &str) = (cached_index::KIND, r#"{"items": 20000, "pair": 100}"#);

#[test]
fn a_get_is_right_at_every_point_of_a_concurrent_put_or_delete() {
    for (kind, parameters) in [OF_FARM_KV, OF_CACHED_INDEX] {
        assert_eq!(paced::play_on(kind, parameters, || ()), Ok(()), "{kind}");
    }
}

/// As the test above, for the cached index alone.
#[cfg(farside_mutants)]
pub(crate) fn a_get_of_the_cached_index_is_right_at_every_point() {
    let (kind, parameters) = OF_CACHED_INDEX;
    assert_eq!(paced::play_on(kind, parameters, || ()), Ok(()));
}

/// Keys that move or stay are found at every point of a put that fills the smallest table further.
#[test]
fn keys_are_found_at_every_point_of_a_put_of_another_key() {
    for kind in KINDS {
        let home = Home::new(32);
        let (mut found, mut torn) = (0, 0);
        for keys in 4..24 {
            let name = format!("s{keys}");
            let store = home.create_of(kind, &name, 1, SMALL);
            let mut service = Stepped::new(home.host.memory(), &store);
            (0..keys).for_each(|number| service.ask(Op::Put, &key(number), b"v"));
            service.step(ALL);
            let (_, mut kv) = client(&home, &name);
            service.ask(Op::Put, &key(keys), b"v");
            loop {
                let made = service.step(1);
                for number in 0..keys {
                    match value_of(&mut kv, &key(number)) {
                        Ok(Some(value)) if value == b"v" => found += 1,
                        // The node's own service does not wait for the one that pauses.
                        Err(KvError::Damaged(_)) if made > 0 => torn += 1,
                        got => panic!("{kind}: key {number} of {keys}: {got:?}"),
                    }
                }
                if made == 0 {
                    break;
                }
            }
            assert_eq!(value_of(&mut kv, &key(keys)), Ok(Some(b"v".to_vec())), "{kind}: {keys}");
        }
        assert!(found > 1000 && torn < found / 10, "{kind}: {found} gets, {torn} torn");
    }
}

/// Returns a value that can be checked: the value's number, repeated.
fn numbered(number: u64, len: usize) -> Vec<u8> {
    number.to_le_bytes().into_iter().cycle().take(len).collect()
}

#[test]
fn concurrent_readers_see_whole_values_that_never_go_back() {
    const KEYS: u64 = 24;
    const FOR: Duration = Duration::from_secs(1);
    for kind in KINDS {
        let home = Home::new(16);
        home.create_of(kind, "s", 8, r#"{"items": 12, "pair": 500}"#);
        let (is_over, gets, puts) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            // Each writer has its own keys. Keys come and go, so that others move.
            for writer in 0..2 {
                let (home, is_over, puts) = (&home, &is_over, &puts);
                scope.spawn(move || {
                    let (endpoint, mut kv) = client(home, "s");
                    for number in 1.. {
                        if is_over.load(Ordering::Relaxed) {
                            return;
                        }
                        let key = (number % (KEYS / 2) * 2 + writer).to_le_bytes();
                        let value = numbered(number, 8 + (number % 5) as usize * 100);
                        run(&endpoint, kv.put(&key, &value)).expect("stored");
                        if number % 7 == 0 {
                            assert!(run(&endpoint, kv.delete(&key)).expect("deleted"));
                        }
                        puts.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for _ in 0..2 {
                let (home, is_over, gets) = (&home, &is_over, &gets);
                scope.spawn(move || {
                    let (endpoint, mut kv) = client(home, "s");
                    let mut seen = [0; KEYS as usize];
                    while !is_over.load(Ordering::Relaxed) {
                        for key in 0..KEYS {
                            let got = run(&endpoint, kv.get(&key.to_le_bytes())).expect("read");
                            let Some(item) = got else { continue };
                            let number = u64::from_le_bytes(item.value[..8].try_into().expect("a number"));
                            assert!(
                                item.value == numbered(number, item.value.len()),
                                "torn: {:?}",
                                item.value
                            );
                            let before = std::mem::replace(&mut seen[key as usize], number);
                            assert!(number >= before, "key {key} went from {before} back to {number}");
                            gets.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            let since = Instant::now();
            while since.elapsed() < FOR {
                std::thread::sleep(Duration::from_millis(20));
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let (gets, puts) = (gets.into_inner(), puts.into_inner());
        println!("{kind}: {gets} gets among {puts} puts");
        assert!(gets > 0 && puts > 0);
    }
}

//! Tests of SMART on a real fabric: results against a model, costs, scans, and damaged memory.

use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::{Costs, Count};
use farside_remote::draws::Draws;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, write};
use farside_systems::index::smart::system::SmartKind;
use farside_systems::index::smart::{KIND, Smart, Spec};
use farside_systems::index::{Index, IndexError, Keys, Rung};
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

const NODE: NodeId = NodeId(0);
/// Length of a lease in microseconds that no client renews during a test: only operations send requests.
const LONG: u64 = 600_000_000;

type Endpoint = Rc<Count<Direct>>;

/// A client with its task, which runs while an operation runs.
struct Client {
    endpoint: Endpoint,
    index: Smart<Endpoint>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
    /// Whether the task has ended.
    has_ended: bool,
}

impl Client {
    fn open(home: &Home, cache: usize) -> Client {
        static ENTROPY: AtomicU64 = AtomicU64::new(1);
        let endpoint = home.endpoint();
        let entropy = ENTROPY.fetch_add(1, Ordering::Relaxed);
        let patience = Some(Duration::from_millis(50));
        let options = Options { entropy, patience, node_cache: Some(cache), ..Options::NONE };
        let opening = async {
            let store = store::fetch_of(&endpoint, NODE, "s", KIND).await.expect("the store exists");
            SmartKind::open(Rc::clone(&endpoint), &Members::one(NODE, store), &options).await
        };
        let index = run(&endpoint, opening).expect("it has that kind");
        let keeper = index.keeper();
        endpoint.take();
        Client { endpoint, index, keeper, has_ended: false }
    }

    /// Runs an operation that may fail. If the client's task ends, the operation may never end.
    fn try_run<O>(&mut self, operation: impl AsyncFnOnce(&mut Smart<Endpoint>) -> O) -> Option<O> {
        let Client { endpoint, index, keeper, has_ended } = self;
        let both = async {
            let mut operation = pin!(operation(index));
            poll_fn(|cx| {
                for _ in 0..2 {
                    *has_ended = *has_ended || keeper.as_mut().poll(cx).is_ready();
                    if let Poll::Ready(output) = operation.as_mut().poll(cx) {
                        return Poll::Ready(Some(output));
                    }
                }
                if *has_ended { Poll::Ready(None) } else { Poll::Pending }
            })
            .await
        };
        run(endpoint, both)
    }

    fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut Smart<Endpoint>) -> O) -> O {
        let Client { endpoint, index, keeper, .. } = self;
        let both = async {
            let mut operation = pin!(operation(index));
            poll_fn(|cx| {
                assert!(keeper.as_mut().poll(cx).is_pending(), "the client's task has ended");
                if let Poll::Ready(output) = operation.as_mut().poll(cx) {
                    return Poll::Ready(output);
                }
                assert!(keeper.as_mut().poll(cx).is_pending(), "the client's task has ended");
                operation.as_mut().poll(cx)
            })
            .await
        };
        run(endpoint, both)
    }

    fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        self.run(async |index| index.get(key).await.map(|found| found.map(<[u8]>::to_vec))).expect("a get")
    }

    fn put(&mut self, key: &[u8], value: &[u8]) {
        self.run(async |index| index.put(key, value).await).expect("a put");
    }

    fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> bool {
        self.run(async |index| index.put_if_absent(key, value).await).expect("a put")
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        self.run(async |index| index.delete(key).await).expect("a delete")
    }

    fn scan(&mut self, from: &[u8], limit: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut found = Vec::new();
        let visit = |key: &[u8], value: &[u8]| found.push((key.to_vec(), value.to_vec()));
        let count = self.run(async |index| index.scan(from, limit, visit).await).expect("a scan");
        assert_eq!(count, found.len());
        found
    }

    fn counter(&self, name: &str) -> u64 {
        let counters = self.index.counters();
        counters.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1
    }
}

fn spec(keys: Keys) -> Spec {
    Spec { keys, value_max: 20, chunk: 1 << 14, ids: 8, lanes: 4, lease_us: LONG, ..Spec::default() }
}

fn home(spec: &Spec, mib: u64) -> Home {
    let home = Home::new(2 * mib + 8);
    home.create_of(KIND, "s", mib, &serde_json::to_string(spec).expect("plain data"));
    home
}

fn number(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

/// A key that shares prefixes with many others.
fn any_key(keys: Keys, draws: &mut Draws) -> Vec<u8> {
    match keys {
        Keys::Numbers => {
            let mut key = number(draws.below(300)).to_vec();
            key[draws.below(4) as usize] = draws.below(2) as u8;
            key
        }
        Keys::Strings => {
            let len = draws.below(20);
            let mut key = draws.pick(&[&b"a"[..], b"a/long/common/prefix/", b"b"]).to_vec();
            key.extend((0..len).map(|_| b'a' + draws.below(2) as u8));
            key
        }
    }
}

fn agrees_with_a_map(spec: Spec, cache: usize, seed: u64) {
    let (home, keys) = (home(&spec, 16), spec.keys);
    let mut client = Client::open(&home, cache);
    let (mut model, mut draws) = (BTreeMap::new(), Draws(seed));
    for step in 0..6000_u64 {
        let key = any_key(keys, &mut draws);
        let value = draws.bytes((step % 20) as usize);
        match draws.below(10) {
            0..4 => {
                client.put(&key, &value);
                model.insert(key, value);
            }
            4 => {
                let is_new = !model.contains_key(&key);
                assert_eq!(client.put_if_absent(&key, &value), is_new, "step {step}");
                model.entry(key).or_insert(value);
            }
            5..7 => assert_eq!(client.delete(&key), model.remove(&key).is_some(), "step {step}, {key:?}"),
            7 => {
                let limit = draws.below(30) as usize;
                let expected: Vec<_> = model
                    .range(key.clone()..)
                    .take(limit)
                    .map(|(key, value)| (key.clone(), value.clone()))
                    .collect();
                assert_eq!(client.scan(&key, limit), expected, "step {step}");
            }
            _ => assert_eq!(client.get(&key).as_ref(), model.get(&key), "step {step}, {key:?}"),
        }
    }
    let all: Vec<_> = model.into_iter().collect();
    assert_eq!(client.scan(&[], usize::MAX), all);
    // Another client, with nothing in its cache, sees the same.
    let mut other = Client::open(&home, cache);
    assert_eq!(other.scan(&[], usize::MAX), all);
    for (key, value) in &all {
        assert_eq!(other.get(key).as_ref(), Some(value));
    }
    for name in ["leaf splits", "path splits", "tombstones revived", "slots emptied"] {
        assert!(client.counter(name) > 0, "{name}");
    }
}

#[test]
fn a_tree_of_numbers_agrees_with_a_map() {
    agrees_with_a_map(spec(Keys::Numbers), 0, 1);
    agrees_with_a_map(spec(Keys::Numbers), 1 << 20, 2);
}

#[test]
fn a_tree_of_strings_agrees_with_a_map() {
    agrees_with_a_map(spec(Keys::Strings), 0, 3);
    agrees_with_a_map(spec(Keys::Strings), 1 << 20, 4);
    agrees_with_a_map(spec(Keys::Strings), 4000, 5);
}

#[test]
fn every_type_switch_happens_as_a_node_fills() {
    let home = home(&spec(Keys::Numbers), 8);
    let mut client = Client::open(&home, 1 << 20);
    for key in 0..256 {
        client.put(&number(key), b"v");
    }
    for from in [4, 8, 16, 32, 64, 128] {
        assert_eq!(client.counter(&format!("type switches from {from}")), 1, "from {from}");
    }
    assert_eq!(client.scan(&[], 1000).len(), 256);
    let mut other = Client::open(&home, 0);
    assert!((0..256).all(|key| other.get(&number(key)).is_some()));
}

/// Round trips, requests and atomics of an operation.
fn costs(client: &mut Client, operation: impl FnOnce(&mut Client)) -> (u64, u64, u64) {
    client.endpoint.take();
    operation(client);
    let Costs { round_trips, requests, atomics, .. } = client.endpoint.take();
    (round_trips, requests, atomics)
}

#[test]
fn operations_cost_what_the_paper_says() {
    let home = home(&spec(Keys::Numbers), 8);
    let mut client = Client::open(&home, 1 << 20);
    // The root's node, and one below it for each of two bytes.
    for key in [0x0101, 0x0102, 0x0201, 0x0202] {
        client.put(&number(key), b"v");
    }
    client.get(&number(0x0101));
    client.get(&number(0x0201));
    let get = |client: &mut Client| _ = client.get(&number(0x0101));
    assert_eq!(costs(&mut client, get), (1, 1, 0), "a get of a cached key");
    // The path of a number has two nodes: the root's, and the one above the leaf.
    let mut cold = Client::open(&home, 0);
    assert_eq!(costs(&mut cold, get), (4, 4, 0), "the root slot, two nodes and the leaf");
    let update = |client: &mut Client| client.put(&number(0x0101), b"w");
    client.put(&number(0x0101), b"x"); // Reserves tokens of locks.
    assert_eq!(costs(&mut client, update), (3, 3, 1), "read, lock and read, write");
    let insert = |client: &mut Client| client.put(&number(0x0103), b"v");
    assert_eq!(costs(&mut client, insert), (3, 3, 1), "read the node, write the leaf, CAS");
    let split = |client: &mut Client| client.put(&number(0x01_0000_0101), b"v");
    let (waves, _, atomics) = costs(&mut client, split);
    assert_eq!(
        (waves, atomics),
        (4, 3),
        "a path split: read the node, write, CAS, header and reverse pointer"
    );
    client.put(&number(0xff_0000_0000_0101), b"v");
    client.get(&number(0xff_0000_0000_0101));
    let split = |client: &mut Client| client.put(&number(0xff_0000_0000_0201), b"v");
    let (waves, _, atomics) = costs(&mut client, split);
    assert_eq!((waves, atomics), (4, 2), "a leaf split: read the leaf, write, CAS, reverse pointer");
    client.put(&number(0x0104), b"v");
    let switch = |client: &mut Client| client.put(&number(0x0105), b"v");
    assert_eq!(costs(&mut client, switch), (4, 4, 3), "a type switch: one wave more");
    let delete = |client: &mut Client| assert!(client.delete(&number(0x0102)));
    assert_eq!(costs(&mut client, delete), (3, 3, 3), "read, lock and read, write and CAS");
}

#[test]
fn every_rung_costs_what_its_requests_say() {
    // Waves, requests and atomics of an update, and of an insert into a free slot.
    for (rung, of_update, of_insert) in [
        (Rung::Art, (3, 3, 2), (5, 5, 3)), // The insert locks the node and frees the lock.
        (Rung::LockFree, (3, 3, 2), (3, 3, 1)), // The update: read, write and mark, CAS.
        (Rung::InPlace, (3, 3, 2), (3, 3, 1)), // The update: read, lock and read, write and unlock.
        (Rung::EmbeddedLock, (3, 3, 1), (3, 3, 1)),
        (Rung::WriteCombining, (3, 3, 1), (3, 3, 1)),
    ] {
        let home = home(&Spec { rung, ..spec(Keys::Numbers) }, 8);
        let mut client = Client::open(&home, 1 << 20);
        for key in [0x0101, 0x0102, 0x0201, 0x0202] {
            client.put(&number(key), b"v");
        }
        client.get(&number(0x0101));
        client.put(&number(0x0101), b"x"); // Reserves tokens of locks.
        let update = costs(&mut client, |client| client.put(&number(0x0101), b"w"));
        assert_eq!(update, of_update, "{rung:?}: an update");
        let insert = costs(&mut client, |client| client.put(&number(0x0103), b"v"));
        assert_eq!(insert, of_insert, "{rung:?}: an insert");
    }
}

#[test]
fn every_rung_agrees_with_a_map() {
    for rung in Rung::ALL {
        agrees_with_a_map(Spec { rung, ..spec(Keys::Strings) }, 4000, 6);
    }
}

#[test]
fn two_clients_see_each_others_changes_through_their_caches() {
    let home = home(&spec(Keys::Strings), 8);
    let (mut one, mut two) = (Client::open(&home, 1 << 20), Client::open(&home, 1 << 20));
    let mut draws = Draws(11);
    let mut model = BTreeMap::new();
    for step in 0..4000_u64 {
        let key = any_key(Keys::Strings, &mut draws);
        let (writer, reader) = if draws.once_in(2) { (&mut one, &mut two) } else { (&mut two, &mut one) };
        if draws.once_in(4) {
            assert_eq!(writer.delete(&key), model.remove(&key).is_some(), "step {step}");
        } else {
            let value = step.to_le_bytes().to_vec();
            writer.put(&key, &value);
            model.insert(key.clone(), value);
        }
        assert_eq!(reader.get(&key).as_ref(), model.get(&key), "step {step}");
    }
    assert!(one.counter("cache invalidations") > 0 && two.counter("cache invalidations") > 0);
}

#[test]
fn keys_and_values_that_a_store_cannot_have_are_refused() {
    let home = home(&spec(Keys::Strings), 8);
    let mut client = Client::open(&home, 0);
    let put =
        |client: &mut Client, key: &[u8], value: &[u8]| client.run(async |index| index.put(key, value).await);
    assert_eq!(put(&mut client, b"a\0", b""), Err(IndexError::ZeroByte));
    let long = IndexError::ValueLength { len: 21, max: 20 };
    assert_eq!(put(&mut client, b"a", &[0; 21]), Err(long));
    assert_eq!(put(&mut client, &[1; 128], &[1; 20]), Ok(()));
    assert_eq!(client.get(&[1; 128]), Some(vec![1; 20]));
}

#[test]
fn a_client_that_leaves_gives_its_id_back() {
    let home = home(&Spec { ids: 1, ..spec(Keys::Numbers) }, 8);
    for round in 0..3_u64 {
        let mut client = Client::open(&home, 0);
        client.put(&number(round), b"v");
        let Client { endpoint, index, keeper, .. } = client;
        drop(index);
        run(&endpoint, keeper);
    }
}

#[test]
fn memory_of_deleted_keys_is_used_again() {
    const KEYS: u64 = 1000;
    const ROUNDS: u64 = 10;
    let spec = Spec { lease_us: 200_000, ..spec(Keys::Numbers) };
    // Room for the leaves of about six rounds.
    let home = home(&spec, 1);
    let (mut client, mut idle) = (Client::open(&home, 1 << 20), Client::open(&home, 0));
    for round in 0..ROUNDS {
        for key in 0..KEYS {
            client.put(&number(key), &round.to_le_bytes());
        }
        for key in 0..KEYS {
            assert_eq!(client.get(&number(key)), Some(round.to_le_bytes().to_vec()));
            assert!(client.delete(&number(key)));
        }
        assert!(client.index.waiting_units() > 0);
        while client.index.waiting_units() > 0 {
            // The other client must publish its epochs, too.
            client.get(&number(1));
            idle.get(&number(1));
        }
    }
    assert_eq!(client.counter("units freed"), ROUNDS * KEYS);
    assert_eq!(idle.scan(&[], 10), []);
}

#[test]
fn damaged_memory_causes_errors_and_neither_panics_nor_endless_loops() {
    let mut draws = Draws(99);
    for keys in [Keys::Numbers, Keys::Strings] {
        let spec = Spec { lease_us: 20_000, chunk: 1 << 13, ..spec(keys) };
        let home = Home::new(24);
        let store = home.create_of(KIND, "s", 1, &serde_json::to_string(&spec).expect("plain data"));
        let mut errors = 0;
        let mut client = None;
        for round in 0..100 {
            if client.is_none() {
                let opened = std::panic::catch_unwind(AssertUnwindSafe(|| Client::open(&home, 1 << 16)));
                // The table of leases may be damaged, so that no id is free.
                client = opened.ok();
            }
            let Some(open) = &mut client else { break };
            let value = draws.bytes(8);
            let mut has_ended = false;
            for _ in 0..20 {
                let key = any_key(keys, &mut draws);
                let limit = draws.below(20) as usize;
                let done = match draws.below(6) {
                    0 | 1 => open.try_run(async |index| index.put(&key, &value).await),
                    2 => open.try_run(async |index| index.delete(&key).await.map(drop)),
                    3 => open.try_run(async |index| index.scan(&key, limit, |_, _| ()).await.map(drop)),
                    4 if round % 20 == 0 => open.try_run(async |index| index.stat().await.map(drop)),
                    _ => open.try_run(async |index| index.get(&key).await.map(drop)),
                };
                errors += u64::from(!matches!(done, Some(Ok(()))));
                has_ended = has_ended || done.is_none();
            }
            if has_ended
                || !matches!(
                    open.try_run(async |index| index.put(&any_key(keys, &mut Draws(1)), b"").await),
                    Some(Ok(()))
                )
            {
                client = None;
                continue;
            }
            // Words of the tree, behind the table of leases.
            let mut chain = ChainBuf::new();
            let mut words = chain.begin(store.extent().key);
            let junk: Vec<[u8; 8]> = (0..4)
                .map(|_| (draws.next() & draws.next() & (draws.next() | 0xffff_ffff)).to_le_bytes())
                .collect();
            for word in &junk {
                let at = 4096 + draws.below((store.extent().len - 4096) / 8 / 4) * 8;
                words.also(write(Addr::new(store.extent().at + at), word));
            }
            let endpoint = Rc::clone(&open.endpoint);
            let mut reply = Reply::new();
            run(&endpoint, endpoint.run(NODE, &words, &mut reply)).expect("the node lives");
        }
        println!("{keys:?}: {errors} errors");
    }
}

#[test]
fn healing_finds_nothing_where_no_client_has_died() {
    let home = home(&Spec { lease_us: 40_000, ..spec(Keys::Numbers) }, 8);
    let mut client = Client::open(&home, 0);
    for key in 0..500 {
        client.put(&number(key), b"v");
    }
    let Client { endpoint, index, keeper, .. } = client;
    drop(index);
    run(&endpoint, keeper);
    let endpoint = home.endpoint();
    let healing = async {
        let store = store::fetch_of(&endpoint, NODE, "s", KIND).await.expect("the store exists");
        let options = Options { entropy: 77, ..Options::NONE };
        SmartKind::heal(Rc::clone(&endpoint), &Members::one(NODE, store), &options).await
    };
    assert_eq!(run(&endpoint, healing), Ok(Vec::new()));
    let mut client = Client::open(&home, 0);
    let stat = client.run(async |index| index.stat().await).expect("a walk");
    assert_eq!((stat.leaves, stat.taken, stat.hidden, stat.locked), (500, stat.linked(), 0, 0));
}

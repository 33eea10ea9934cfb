//! Tests of Sherman on a real fabric: results against a model, costs, scans, and damaged memory.

use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::{Costs, Count};
use farside_remote::draws::Draws;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, write};
use farside_systems::index::sherman::system::ShermanKind;
use farside_systems::index::sherman::{KIND, Sherman, Spec};
use farside_systems::index::{Index, IndexError, Keys};
use farside_systems::store::{self, Members, StoreError};
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
    index: Sherman<Endpoint>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
    /// Whether the task has ended.
    has_ended: bool,
}

impl Client {
    fn try_open(home: &Home, cache: usize, patience: Duration) -> Result<Client, StoreError> {
        static ENTROPY: AtomicU64 = AtomicU64::new(1 << 20);
        let endpoint = home.endpoint();
        let entropy = ENTROPY.fetch_add(1, Ordering::Relaxed);
        let options = Options { entropy, patience: Some(patience), node_cache: Some(cache), ..Options::NONE };
        let opening = async {
            let store = store::fetch_of(&endpoint, NODE, "s", KIND).await.expect("the store exists");
            ShermanKind::open(Rc::clone(&endpoint), &Members::one(NODE, store), &options).await
        };
        let index = run(&endpoint, opening)?;
        let keeper = index.keeper();
        endpoint.take();
        Ok(Client { endpoint, index, keeper, has_ended: false })
    }

    fn open(home: &Home, cache: usize) -> Client {
        Client::try_open(home, cache, Duration::from_secs(5)).expect("it has that kind")
    }

    /// Runs an operation that may fail. Returns `None` if the client's task ends first.
    fn try_run<O>(&mut self, operation: impl AsyncFnOnce(&mut Sherman<Endpoint>) -> O) -> Option<O> {
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

    fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut Sherman<Endpoint>) -> O) -> O {
        self.try_run(operation).expect("the client's task has ended")
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
    let key_max = if keys == Keys::Numbers { 8 } else { 128 };
    Spec {
        keys,
        key_max,
        value_max: 20,
        span: 4,
        locks: 64,
        ids: 8,
        lanes: 4,
        lease_us: LONG,
        ..Spec::default()
    }
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

fn agrees_with_a_map(spec: &Spec, cache: usize, seed: u64) {
    let home = home(spec, 16);
    let mut client = Client::open(&home, cache);
    let (mut model, mut draws) = (BTreeMap::new(), Draws(seed));
    for step in 0..6000_u64 {
        let key = any_key(spec.keys, &mut draws);
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
    for name in ["leaf splits", "inner splits", "root growths"] {
        assert!(client.counter(name) > 0, "{name}");
    }
    let stat = client.run(async |index| index.stat().await).expect("a walk");
    let orphans = client.counter("separators left out");
    assert_eq!((stat.keys, stat.orphans, stat.locked), (all.len() as u64, orphans, 0));
    assert_eq!(stat.claimed, stat.nodes() + client.index.spare_units() as u64);
}

#[test]
fn a_tree_of_numbers_agrees_with_a_map() {
    agrees_with_a_map(&spec(Keys::Numbers), 0, 1);
    agrees_with_a_map(&spec(Keys::Numbers), 1 << 20, 2);
    agrees_with_a_map(&Spec { span: 7, version_bits: 8, ..spec(Keys::Numbers) }, 1 << 20, 6);
}

#[test]
fn a_tree_of_strings_agrees_with_a_map() {
    agrees_with_a_map(&spec(Keys::Strings), 0, 3);
    agrees_with_a_map(&spec(Keys::Strings), 1 << 20, 4);
    agrees_with_a_map(&spec(Keys::Strings), 4000, 5);
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
    for key in (0..200).step_by(10) {
        client.put(&number(key), b"v");
    }
    let levels = client.run(async |index| index.stat().await).expect("a walk").levels;
    assert!(levels >= 3);
    let get = |client: &mut Client| assert!(client.get(&number(50)).is_some());
    get(&mut client);
    assert_eq!(costs(&mut client, get), (1, 1, 0), "a get with the leaf's parent in the cache");
    let mut cold = Client::open(&home, 0);
    assert_eq!(
        costs(&mut cold, get),
        (levels + 1, levels + 1, 0),
        "the root's word, and a node of each level"
    );
    assert_eq!(costs(&mut cold, get), (levels, levels, 0), "the root is known");
    let update = |client: &mut Client| client.put(&number(50), b"w");
    assert_eq!(costs(&mut client, update), (3, 3, 1), "lock, read, write and unlock");
    let delete = |client: &mut Client| assert!(client.delete(&number(50)));
    assert_eq!(costs(&mut client, delete), (3, 3, 1), "lock, read, write and unlock");
    let insert = |client: &mut Client| client.put(&number(51), b"w");
    assert_eq!(costs(&mut client, insert), (3, 3, 1), "lock, read, write and unlock");
    let absent = |client: &mut Client| assert!(!client.put_if_absent(&number(51), b"w"));
    assert_eq!(costs(&mut client, absent), (3, 3, 1), "lock, read, unlock");
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
fn keys_values_and_lines_that_are_not_possible_are_refused() {
    let home = home(&Spec { key_max: 100, ..spec(Keys::Strings) }, 8);
    let mut client = Client::open(&home, 0);
    let put =
        |client: &mut Client, key: &[u8], value: &[u8]| client.run(async |index| index.put(key, value).await);
    assert_eq!(put(&mut client, b"a\0", b""), Err(IndexError::ZeroByte));
    let long = IndexError::ValueLength { len: 21, max: 20 };
    assert_eq!(put(&mut client, b"a", &[0; 21]), Err(long));
    let long = IndexError::KeyLength { len: 101, keys: Keys::Strings };
    assert_eq!(put(&mut client, &[1; 101], b""), Err(long));
    assert_eq!(put(&mut client, &[1; 100], &[1; 20]), Ok(()));
    assert_eq!(client.get(&[1; 100]), Some(vec![1; 20]));
    // The memory of this node is copied 16 bytes at a time.
    let lines = self::home(&Spec { line: 64, ..spec(Keys::Numbers) }, 8);
    assert!(matches!(Client::try_open(&lines, 0, Duration::ZERO), Err(StoreError::Gone(_))));
}

#[test]
fn a_client_that_leaves_gives_back_its_id_and_its_memory() {
    let home = home(&Spec { ids: 1, ..spec(Keys::Numbers) }, 8);
    for round in 0..3_u64 {
        let mut client = Client::open(&home, 0);
        client.put(&number(round), b"v");
        let stat = client.run(async |index| index.stat().await).expect("a walk");
        assert_eq!(stat.claimed, 1 + client.index.spare_units() as u64);
        assert_eq!(client.index.spare_units() > 0, round == 0);
        let Client { endpoint, index, keeper, .. } = client;
        drop(index);
        run(&endpoint, keeper);
    }
}

#[test]
fn a_full_store_refuses_what_needs_a_node_and_nothing_else() {
    let home = home(&Spec { lanes: 1, ids: 2, ..spec(Keys::Numbers) }, 1);
    let mut client = Client::open(&home, 1 << 20);
    let mut key = 0;
    let full = loop {
        let put = client.run(async |index| index.put(&number(key), b"v").await);
        match put {
            Ok(()) => key += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full, IndexError::OutOfMemory);
    assert_eq!(client.scan(&[], usize::MAX).len() as u64, key);
    client.put(&number(0), b"w");
    assert!(client.delete(&number(1)));
    client.put(&number(1), b"x");
    assert_eq!(client.get(&number(1)), Some(b"x".to_vec()));
}

#[test]
fn damaged_memory_causes_errors_and_neither_panics_nor_endless_loops() {
    let mut draws = Draws(99);
    for keys in [Keys::Numbers, Keys::Strings] {
        let spec = Spec { lease_us: 20_000, ..spec(keys) };
        let home = Home::new(24);
        let store = home.create_of(KIND, "s", 1, &serde_json::to_string(&spec).expect("plain data"));
        let mut errors = 0;
        let mut client = None;
        for round in 0..60 {
            if client.is_none() {
                let opened = std::panic::catch_unwind(AssertUnwindSafe(|| {
                    Client::try_open(&home, 1 << 16, Duration::from_millis(5))
                }));
                // The table of leases may be damaged, so that no id is free.
                client = opened.expect("no panic").ok();
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
            let last = any_key(keys, &mut Draws(1));
            if has_ended || !matches!(open.try_run(async |index| index.put(&last, b"").await), Some(Ok(()))) {
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
        ShermanKind::heal(Rc::clone(&endpoint), &Members::one(NODE, store), &options).await
    };
    assert_eq!(run(&endpoint, healing), Ok(Vec::new()));
    let mut client = Client::open(&home, 0);
    let stat = client.run(async |index| index.stat().await).expect("a walk");
    assert_eq!((stat.keys, stat.claimed, stat.orphans, stat.locked), (500, stat.nodes(), 0, 0));
}

//! Tests of the store with a cached index: its operations, their costs, and stale entries.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, go};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::count::Count;
use farside_remote::NodeId;
use farside_systems::kv::cached_index::layout::BUCKET_SIZE;
use farside_systems::kv::cached_index::{CachedIndex, KIND};
use farside_systems::kv::{Kv, KvError};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::time::Duration;

type Client = CachedIndex<Rc<Count<Direct>>>;

fn home(parameters: &str) -> Home {
    let home = Home::new(16);
    home.create_of(KIND, "s", 8, parameters);
    home
}

fn client(home: &Home) -> Client {
    block_on((), CachedIndex::open(home.endpoint(), NodeId(0), "s")).expect("the store exists")
}

fn value_of(kv: &mut Client, key: &[u8]) -> Option<Vec<u8>> {
    go!(kv, get(key)).unwrap_or_else(|error| panic!("{error}")).map(|item| item.value.to_vec())
}

fn key(number: u64) -> Vec<u8> {
    format!("key {number}").into_bytes()
}

#[test]
fn a_cold_get_is_two_reads_and_a_warm_one_is_one() {
    let home = home(r#"{"items": 1000, "pair": 108, "placement": "permuted"}"#);
    let (mut kv, mut other) = (client(&home), client(&home));
    let key = 7u64.to_be_bytes();
    kv.fabric().take();

    go!(kv, put(&key, &[1; 100])).expect("stored");
    let costs = kv.fabric().take();
    assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "a PUT is one call");
    assert_eq!(kv.cache().bytes, 0);

    assert_eq!(value_of(&mut kv, &key), Some(vec![1; 100]));
    let costs = kv.fabric().take();
    let item = kv.table().spec().item_len();
    assert_eq!((costs.round_trips, costs.requests, costs.calls), (2, 2, 0), "READ the bucket, READ the item");
    assert_eq!(costs.bytes_in, 8 + BUCKET_SIZE + 8 + item, "each in a reply of one op");

    // Another client's put leaves the item in its place.
    go!(other, put(&key, &[2; 90])).expect("stored");
    assert_eq!(value_of(&mut kv, &key), Some(vec![2; 90]));
    let costs = kv.fabric().take();
    assert_eq!((costs.round_trips, costs.requests, costs.calls), (1, 1, 0), "READ the item");
    assert_eq!(costs.bytes_in, 8 + item);
    let stat = kv.cache();
    assert_eq!((stat.buckets, stat.hits, stat.misses, stat.stale), (1, 1, 1, 0));
    assert!(stat.bytes > 0);

    assert!(go!(other, delete(&key)).expect("deleted"));
    assert_eq!(value_of(&mut kv, &key), None);
    assert_eq!(kv.fabric().take().requests, 2, "the item has another incarnation: READ the bucket");
    assert_eq!(kv.cache().stale, 1);
    assert_eq!(value_of(&mut kv, &key), None);
    assert_eq!(kv.fabric().take().requests, 1, "the cache does not show that a key is absent");
}

/// Returns two keys of one bucket whose entries have the same bits of the hash.
fn keys_with_one_tag(kv: &Client) -> [Vec<u8>; 2] {
    let mut seen = HashMap::new();
    let mut pairs = (0..).map(key).filter_map(|key| {
        let place = (kv.table().home(&key), kv.table().tag(&key));
        seen.insert(place, key.clone()).map(|other| [other, key])
    });
    pairs.next().expect("hashes collide")
}

#[test]
fn an_entry_of_another_key_with_the_same_tag_is_not_counted_as_stale() {
    let home = home(r#"{"items": 1, "pair": 64}"#);
    let (mut kv, mut other) = (client(&home), client(&home));
    let [present, absent] = keys_with_one_tag(&kv);
    go!(kv, put(&present, b"v")).expect("stored");
    assert!(value_of(&mut kv, &present).is_some());
    let mut get = |key: &[u8]| {
        kv.fabric().take();
        let (before, found) = (kv.cache(), value_of(&mut kv, key).is_some());
        let after = kv.cache();
        let counted = [after.hits - before.hits, after.misses - before.misses, after.stale - before.stale];
        (found, kv.fabric().take().requests, counted)
    };
    let [hit, miss, stale] = [[1, 0, 0], [0, 1, 0], [0, 0, 1]];
    assert_eq!(get(&absent), (false, 3, miss), "READ the other's item, the bucket, and the item again");
    go!(other, put(&absent, b"w")).expect("stored");
    assert_eq!(get(&absent), (true, 4, miss), "the same, and READ the key's item");
    assert_eq!(get(&absent), (true, 2, hit), "READ both items");
    assert!(go!(other, delete(&absent)).expect("deleted"));
    assert_eq!(get(&absent), (false, 4, stale), "READ both items, the bucket, and the other's item");
}

#[test]
fn two_clients_agree_with_a_map_with_caches_that_are_often_stale() {
    for (items, keys) in [(1, 60), (200, 200)] {
        let home = home(&format!(r#"{{"items": {items}, "pair": 200}}"#));
        let mut clients = [client(&home), client(&home)];
        let mut model = BTreeMap::new();
        let mut state = 1u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for round in 0..4000u64 {
            let (kv, key) = (&mut clients[draw(2) as usize], key(draw(keys)));
            match draw(5) {
                0 => assert_eq!(
                    go!(kv, delete(&key)).expect("deleted"),
                    model.remove(&key).is_some(),
                    "round {round}"
                ),
                1 | 2 => {
                    let value = vec![round as u8; draw(190) as usize];
                    go!(kv, put(&key, &value)).unwrap_or_else(|error| panic!("round {round}: {error}"));
                    model.insert(key, value);
                }
                _ => assert_eq!(value_of(kv, &key).as_ref(), model.get(&key), "round {round}"),
            }
        }
        let stat = clients[0].cache();
        assert!(stat.hits > 100 && stat.stale > 10, "{stat:?}");
    }
}

#[test]
fn longer_pairs_and_further_keys_are_refused() {
    let home = home(r#"{"items": 1, "pair": 64}"#);
    let mut kv = client(&home);
    assert_eq!(go!(kv, put(b"k", &[0; 64])), Err(KvError::PairLength { len: 65, max: 64 }));
    go!(kv, put(b"k", &[5; 63])).expect("the longest pair");
    let full = (0..).find(|number| go!(kv, put(&key(*number), b"v")).is_err()).expect("the table is small");
    assert_eq!(full, kv.table().spec().items - 1);
    assert!(matches!(go!(kv, put(&key(full), b"v")), Err(KvError::TableFull(_))));
    assert_eq!(value_of(&mut kv, b"k"), Some(vec![5; 63]));
    assert!(go!(kv, delete(b"k")).expect("deleted"));
    go!(kv, put(&key(full), b"v")).expect("the item is reused");
    assert_eq!(value_of(&mut kv, b"k"), None);
}

/// A GET does not trust a READ that took so long that the versions of lines may have wrapped.
pub(crate) fn a_slow_read_is_repeated() {
    let home = home(r#"{"items": 1, "pair": 64}"#);
    go!(client(&home), put(b"k", b"v")).expect("stored");
    let (slow, hot) = (Cell::new(0), Intercept::new(home.endpoint()));
    let mut reader = block_on((), CachedIndex::open(&hot, NodeId(0), "s")).expect("the store exists");
    assert!(block_on((), reader.get(b"k")).expect("read").is_some(), "the bucket is cached now");
    hot.before_each(|| {
        if slow.get() > 0 {
            slow.update(|slow| slow - 1);
            std::thread::sleep(Duration::from_millis(60));
        }
        Then::Runs
    });
    hot.inner().take();
    slow.set(1);
    assert!(block_on((), reader.get(b"k")).expect("read").is_some());
    assert!(hot.inner().take().requests >= 3, "the first READ of the item took 60 ms");
    slow.set(3);
    assert!(block_on((), reader.get(b"k")).expect("called").is_some());
    let costs = hot.inner().take();
    assert_eq!((costs.requests, costs.calls), (3, 1), "both READs of the item took 60 ms");
}

#[test]
fn a_get_trusts_no_slow_read() {
    a_slow_read_is_repeated();
}

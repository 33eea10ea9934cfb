//! Tests of FaRM-KV: its operations, their costs, displaced keys and chains.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, go};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::count::Count;
use farside_remote::{Memory, NodeId};
use farside_systems::kv::called::{ANSWER_SIZE, REQUEST_SIZE};
use farside_systems::kv::farm_kv::layout::{BUCKET_SLOTS, CHAIN_MAX};
use farside_systems::kv::farm_kv::{FarmKv, KIND};
use farside_systems::kv::{Kv, KvError};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

type Client = FarmKv<Rc<Count<Direct>>>;

/// The smallest table: two home buckets.
const SMALL: &str = r#"{"items": 1, "pair": 64}"#;

fn home(parameters: &str) -> Home {
    let home = Home::new(16);
    home.create_of(KIND, "s", 8, parameters);
    home
}

fn client(home: &Home) -> Client {
    block_on((), FarmKv::open(home.endpoint(), NodeId(0), "s")).expect("the store exists")
}

fn value_of(kv: &mut Client, key: &[u8]) -> Option<Vec<u8>> {
    go!(kv, get(key)).unwrap_or_else(|error| panic!("{error}")).map(|item| item.value.to_vec())
}

fn key(number: u64) -> Vec<u8> {
    format!("key {number}").into_bytes()
}

/// Keys with this home bucket.
fn keys_of(kv: &Client, home: u64) -> impl Iterator<Item = Vec<u8>> {
    (0..).map(key).filter(move |key| kv.table().home(key) == home)
}

#[test]
fn a_get_is_one_read_of_eight_slots_and_a_put_is_one_call() {
    let home = home(r#"{"items": 1000, "pair": 108, "placement": "permuted"}"#);
    let mut kv = client(&home);
    let key = 7u64.to_be_bytes();
    kv.fabric().take();

    go!(kv, put(&key, &[1; 100])).expect("stored");
    let costs = kv.fabric().take();
    assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "a PUT is one call");
    assert_eq!(costs.bytes_out, 8 + REQUEST_SIZE as u64 + 8 + 100, "the store's secret, then key and value");
    assert_eq!(costs.bytes_in, ANSWER_SIZE as u64);

    assert_eq!(value_of(&mut kv, &key), Some(vec![1; 100]));
    let costs = kv.fabric().take();
    assert_eq!((costs.round_trips, costs.requests, costs.calls), (1, 1, 0), "READ the neighbourhood");
    assert_eq!(costs.bytes_in, 8 + 2 * kv.table().spec.bucket_len(), "in a reply of one op");
    let amplification = costs.bytes_in as f64 / 108.0;
    assert!((8.0..12.0).contains(&amplification), "8 slots, and the versions of lines: {amplification}");

    assert_eq!(value_of(&mut kv, &8u64.to_be_bytes()), None);
    assert_eq!(kv.fabric().take().requests, 1, "a key without a chain is absent by one READ");
    assert!(go!(kv, delete(&key)).expect("deleted"));
    let costs = kv.fabric().take();
    assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "a DELETE is one call");
}

#[test]
fn two_clients_agree_with_a_map_in_tables_of_all_fills() {
    for (items, keys) in [(1, 60), (40, 40), (200, 200)] {
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
        let kv = &mut clients[0];
        for key in (0..keys).map(key) {
            assert_eq!(value_of(kv, &key).as_ref(), model.get(&key));
            go!(kv, delete(&key)).expect("deleted");
        }
        // All blocks are spare again: as many keys find space as at first.
        let refused = (0..1000).map(key).position(|key| go!(kv, put(&key, b"")).is_err());
        for key in (0..1000).map(key) {
            _ = go!(kv, delete(&key)).expect("deleted");
        }
        let again = (0..1000).map(key).position(|key| go!(kv, put(&key, b"")).is_err());
        assert_eq!(refused, again, "{items} items");
    }
}

#[test]
fn longer_pairs_and_further_keys_are_refused() {
    let home = home(SMALL);
    let mut kv = client(&home);
    assert_eq!(go!(kv, put(b"k", &[0; 64])), Err(KvError::PairLength { len: 65, max: 64 }));
    go!(kv, put(b"k", &[5; 63])).expect("the longest pair");
    assert_eq!(value_of(&mut kv, b"k"), Some(vec![5; 63]));
    let full = (0..).find_map(|number| go!(kv, put(&key(number), b"v")).err()).expect("the table is small");
    assert!(matches!(full, KvError::TableFull(_)), "{full}");
    go!(kv, put(b"k", b"again")).expect("the key has a slot");
    assert_eq!(value_of(&mut kv, b"k").as_deref(), Some(&b"again"[..]));
}

/// Every key has the same home bucket, so that all but 8 of them lie in its chain. Blocks are left when the chain has
/// its greatest length.
#[test]
fn a_get_costs_one_read_for_each_block_and_seventeen_behind_the_longest_chain() {
    let home = home(r#"{"items": 600, "pair": 64}"#);
    let mut kv = client(&home);
    assert!(kv.table().spec.blocks > CHAIN_MAX as u64, "blocks are left");
    let in_buckets = 2 * BUCKET_SLOTS;
    let present = in_buckets + CHAIN_MAX * BUCKET_SLOTS;
    let keys: Vec<_> = keys_of(&kv, 0).take(present + 1).collect();
    let (absent, keys) = keys.split_last().expect("there are keys");
    for key in keys {
        go!(kv, put(key, b"v")).expect("stored");
    }
    let full = go!(kv, put(absent, b"v")).expect_err("the chain has its greatest length");
    assert!(matches!(full, KvError::TableFull(_)), "{full}");

    let costs_of = |kv: &mut Client, key: &[u8], is_there: bool| {
        kv.fabric().take();
        assert_eq!(value_of(kv, key).is_some(), is_there);
        let costs = kv.fabric().take();
        assert_eq!((costs.calls, costs.round_trips), (0, costs.requests), "one READ after the other");
        costs.requests
    };
    for (place, key) in keys.iter().enumerate() {
        let blocks = (place + BUCKET_SLOTS).saturating_sub(in_buckets) / BUCKET_SLOTS;
        assert_eq!(costs_of(&mut kv, key, true), 1 + blocks as u64, "key {place} is behind {blocks} blocks");
    }
    assert_eq!(costs_of(&mut kv, absent, false), 17, "the neighbourhood, and 16 blocks");
    // The last block loses its keys and leaves the chain.
    for key in &keys[present - BUCKET_SLOTS..] {
        assert!(go!(kv, delete(key)).expect("deleted"));
    }
    assert_eq!(costs_of(&mut kv, absent, false), 16, "the neighbourhood, and 15 blocks");
}

/// A GET that reads a block of a chain finds it in the chain of another bucket, and starts again.
pub(crate) fn a_block_that_changes_its_chain_hides_no_key() {
    let home = home(SMALL);
    let mut kv = client(&home);
    // Buckets 1 and 2 are full of keys of bucket 1, so all keys of bucket 0 but 4 lie in its chain.
    let of_one: Vec<_> = keys_of(&kv, 1).take(12).collect();
    let of_zero: Vec<_> = keys_of(&kv, 0).take(9).collect();
    for key in of_one[..8].iter().chain(&of_zero) {
        go!(kv, put(key, b"v")).expect("stored");
    }
    let (first_block, wanted) = (of_zero[4..8].to_vec(), &of_zero[8]);
    let hot = Intercept::new(home.endpoint());
    let mut reader = block_on((), FarmKv::open(&hot, NodeId(0), "s")).expect("the store exists");
    // After the reader has seen bucket 0, its first block becomes that of bucket 1.
    hot.before_chain(1, || {
        for key in &first_block {
            assert!(go!(kv, delete(key)).expect("deleted"));
        }
        go!(kv, put(&of_one[8], b"v")).expect("stored");
    });
    hot.inner().take();
    let got = block_on((), reader.get(wanted)).expect("read").map(|item| item.value.to_vec());
    assert_eq!(got.as_deref(), Some(&b"v"[..]), "the key is present");
    assert_eq!(hot.inner().take().requests, 4, "two READs, and two more");
}

/// A NIC may read the next bucket before a key moves there, and the home bucket after it. The GET starts again.
pub(crate) fn a_key_that_moves_during_a_read_is_found() {
    let home = home(SMALL);
    let mut kv = client(&home);
    let of_one: Vec<_> = keys_of(&kv, 1).take(4).collect();
    let of_zero: Vec<_> = keys_of(&kv, 0).take(5).collect();
    // Buckets 0 and 1 are full. The fifth key of bucket 0 makes the first of bucket 1 move to bucket 2.
    for key in of_zero[..4].iter().chain(&of_one) {
        go!(kv, put(key, b"v")).expect("stored");
    }
    let (at, len) = (kv.table().bucket_at(2), kv.table().spec.bucket_len() as usize);
    let memory = home.host.memory();
    let bytes = || {
        let mut bytes = vec![0; len];
        let Ok(()) = memory.read(at, &mut bytes);
        bytes
    };
    let (mut chains, mut after) = (0, Vec::new());
    let hot = Intercept::new(home.endpoint());
    let mut reader = block_on((), FarmKv::open(&hot, NodeId(0), "s")).expect("the store exists");
    hot.before_each(|| {
        if chains == 0 {
            let before = bytes();
            go!(kv, put(&of_zero[4], b"v")).expect("stored");
            after = bytes();
            assert_ne!(before, after, "a key has moved to bucket 2");
            let Ok(()) = memory.write(at, &before);
        } else {
            let Ok(()) = memory.write(at, &after);
        }
        chains += 1;
        Then::Runs
    });
    hot.inner().take();
    let got = block_on((), reader.get(&of_one[0])).expect("read").map(|item| item.value.to_vec());
    assert_eq!(got.as_deref(), Some(&b"v"[..]), "the key was present all the time");
    assert_eq!(hot.inner().take().requests, 2, "the joint versions differed, and the second READ was right");
}

/// A GET does not trust a READ that took so long that the versions of lines may have wrapped.
pub(crate) fn a_slow_read_is_repeated() {
    let home = home(SMALL);
    go!(client(&home), put(b"k", b"v")).expect("stored");
    let (slow, hot) = (Cell::new(1), Intercept::new(home.endpoint()));
    let mut reader = block_on((), FarmKv::open(&hot, NodeId(0), "s")).expect("the store exists");
    hot.before_each(|| {
        if slow.get() > 0 {
            slow.update(|slow| slow - 1);
            std::thread::sleep(Duration::from_millis(60));
        }
        Then::Runs
    });
    hot.inner().take();
    assert!(block_on((), reader.get(b"k")).expect("read").is_some());
    assert!(hot.inner().take().requests >= 2, "the first READ took 60 ms");
    slow.set(2);
    assert!(block_on((), reader.get(b"k")).expect("called").is_some());
    let costs = hot.inner().take();
    assert_eq!((costs.requests, costs.calls), (2, 1), "both READs took 60 ms");
}

#[test]
fn a_get_misses_no_key_that_moves_and_trusts_no_slow_read() {
    a_block_that_changes_its_chain_hides_no_key();
    a_key_that_moves_during_a_read_is_found();
    a_slow_read_is_repeated();
}

//! Tests of PRISM-KV on a node in this process: the behaviour and the costs of its operations.

use crate::support::{Client, Home, go, run, value_of};
use farside_remote::fabric::Ran;
use farside_systems::kv::Cursor;
use farside_systems::kv::{KEY_MAX, Kv, KvError, VALUE_MAX};
use std::collections::BTreeMap;

#[test]
fn a_get_returns_the_value_until_it_is_replaced_or_deleted() {
    let home = Home::new(64);
    home.create("s", 32, r#"{"items": 1000}"#);
    let mut client = home.client("s");
    assert_eq!(value_of(&mut client, b"k"), None);
    go!(client, put(b"k", b"one")).expect("stored");
    assert_eq!(value_of(&mut client, b"k").as_deref(), Some(&b"one"[..]));
    go!(client, put(b"k", b"")).expect("stored");
    assert_eq!(value_of(&mut client, b"k").as_deref(), Some(&b""[..]));
    assert!(go!(client, delete(b"k")).expect("deleted"));
    assert!(!go!(client, delete(b"k")).expect("nothing to delete"));
    assert_eq!(value_of(&mut client, b"k"), None);
    go!(client, put(b"k", b"two")).expect("stored");
    assert_eq!(value_of(&mut client, b"k").as_deref(), Some(&b"two"[..]));
}

#[test]
fn operations_cost_as_many_round_trips_as_in_the_paper() {
    let home = Home::new(64);
    home.create("s", 32, r#"{"items": 1000, "placement": "permuted"}"#);
    let mut client = home.client("s").with_slot_cache(100);
    let mut uncached = home.client("s");
    let endpoint = std::rc::Rc::clone(client.fabric());
    let plain = std::rc::Rc::clone(uncached.fabric());
    let key = 7u64.to_be_bytes();

    plain.take();
    go!(uncached, put(&key, &[1; 100])).expect("stored");
    let costs = plain.take();
    assert_eq!((costs.round_trips, costs.requests, costs.atomics), (2, 2, 1), "a PUT probes, then installs");
    go!(uncached, put(&key, &[2; 100])).expect("stored");
    let costs = plain.take();
    assert_eq!((costs.round_trips, costs.retired), (2, 1), "a PUT retires the item that it replaced");
    assert_eq!(costs.bytes_out, 80 + 112 + (16 + 8 + 100), "a probe, then a chain and its item");

    go!(uncached, get(&key)).expect("read");
    let costs = plain.take();
    assert_eq!((costs.round_trips, costs.requests, costs.atomics), (1, 1, 0), "a GET is one indirect READ");
    assert_eq!(
        costs.bytes_in,
        8 + 16 + 8 + 100,
        "the reply has its entry, the header, the key and the value"
    );

    go!(client, get(&key)).expect("read");
    endpoint.take();
    go!(client, put(&key, &[3; 100])).expect("stored");
    let costs = endpoint.take();
    assert_eq!(
        (costs.round_trips, costs.atomics, costs.retired),
        (1, 1, 1),
        "a PUT to a cached slot only installs"
    );
    let item = 16 + 8 + 100;
    assert_eq!(
        (costs.bytes_out, costs.bytes_in),
        (144 + item, 40),
        "two masks of 16 bytes, and no trailing READ"
    );

    plain.take();
    assert!(go!(uncached, delete(&key)).expect("deleted"));
    assert_eq!(plain.take().round_trips, 2, "a DELETE probes, then installs a tombstone");
    assert!(!go!(uncached, delete(&key)).expect("absent"));
    assert_eq!(plain.take().round_trips, 1, "a DELETE of an absent key only probes");

    go!(client, put(&key, &[4; 100])).expect("stored");
    let costs = endpoint.take();
    assert_eq!((costs.round_trips, costs.requests), (3, 3), "a PUT to a stale cached slot probes again");
    assert_eq!(value_of(&mut uncached, &key), Some(vec![4; 100]));
}

#[test]
fn conditional_puts_detect_every_change() {
    let home = Home::new(64);
    home.create("s", 32, "{}");
    let (mut a, mut b) = (home.client("s"), home.client("s"));
    assert!(go!(a, put_if_absent(b"k", b"1")).expect("stored"));
    assert!(!go!(b, put_if_absent(b"k", b"2")).expect("refused"));
    let version = go!(a, get(b"k")).expect("read").expect("present").version;
    let newer = go!(b, compare_and_put(b"k", version, b"3")).expect("compared").expect("unchanged since");
    assert!(newer != version);
    let conflict =
        go!(a, compare_and_put(b"k", version, b"4")).expect("compared").expect_err("changed since");
    assert_eq!(conflict.version, Some(newer));
    go!(b, delete(b"k")).expect("deleted");
    let conflict = go!(a, compare_and_put(b"k", newer, b"5")).expect("compared").expect_err("deleted since");
    assert_eq!(conflict.version, None);
    assert!(go!(a, put_if_absent(b"k", b"6")).expect("stored"));
    assert_eq!(value_of(&mut b, b"k").as_deref(), Some(&b"6"[..]));
}

#[test]
fn keys_and_values_of_every_size_are_returned_unchanged() {
    let home = Home::new(192);
    home.create("s", 128, r#"{"items": 1000}"#);
    let mut client = home.client("s");
    let mut other = home.client("s");
    let bytes = |len: usize, salt: u8| -> Vec<u8> {
        (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(salt) ^ (i >> 8) as u8).collect()
    };
    let keys = [1, 2, 8, 255, 256, 257, KEY_MAX];
    let values =
        [0, 1, 47, 255, 256, 4096, 57_000, 61_420, 61_424, 61_425, 70_000, 200_000, 1 << 20, VALUE_MAX];
    for (salt, (&key_len, &value_len)) in
        keys.iter().flat_map(|key| values.iter().map(move |value| (key, value))).enumerate()
    {
        let (key, value) = (bytes(key_len, salt as u8), bytes(value_len, !salt as u8));
        go!(client, put(&key, &value)).expect("stored");
        assert!(value_of(&mut other, &key) == Some(value), "a key of {key_len} with a value of {value_len}");
        assert!(go!(other, delete(&key)).expect("deleted"));
    }
    assert!(matches!(go!(client, put(b"", b"")), Err(KvError::KeyLength(0))));
    assert!(matches!(go!(client, get(&[0; KEY_MAX + 1])), Err(KvError::KeyLength(_))));
    assert!(matches!(go!(client, put(b"k", &vec![0; VALUE_MAX + 1])), Err(KvError::ValueLength(_))));
    drop((client, other));
    let stat = home.settled("s");
    assert!(stat.live_buffers <= (keys.len() * values.len()) as u64, "only tombstones remain: {stat:?}");
}

#[test]
fn keys_that_collide_keep_their_values() {
    let home = Home::new(64);
    // 200 keys in 256 slots, the smallest table.
    home.create("s", 32, r#"{"items": 1}"#);
    let mut client = home.client("s");
    let mut expected = BTreeMap::new();
    for n in 0..200u32 {
        let (key, value) = (n.to_string().into_bytes(), vec![n as u8; n as usize]);
        go!(client, put(&key, &value)).expect("stored");
        expected.insert(key, value);
    }
    for (key, value) in &expected {
        assert_eq!(value_of(&mut client, key).as_ref(), Some(value));
    }
}

#[test]
fn a_table_that_cannot_grow_is_filled_to_its_last_slot() {
    let home = Home::new(16);
    // 256 slots, the smallest table. No segment is unassigned: the store has 14 MiB, including 1 MiB of reserve.
    home.create("s", 13, r#"{"items": 1}"#);
    let mut client = home.client("s");
    for n in 0..256u32 {
        go!(client, put(&n.to_string().into_bytes(), b"x")).expect("stored");
    }
    let Err(full @ KvError::TableFull(_)) = go!(client, put(b"one too many", b"x")) else {
        panic!("no slot is free")
    };
    let full = full.to_string();
    assert!(full.contains("needs 1 MiB of adjacent segments") && full.contains("more --memory"), "{full}");
    go!(client, put(b"7", b"y")).expect("the key has a slot");
    assert_eq!(value_of(&mut client, b"one too many"), None);
}

#[test]
fn get_many_returns_every_value_and_an_iteration_visits_each_key_once() {
    let home = Home::new(64);
    home.create("s", 48, r#"{"items": 10000}"#);
    let mut client = home.client("s");
    let mut expected = BTreeMap::new();
    for n in 0..3000u32 {
        let key = n.to_be_bytes().to_vec();
        let value = vec![n as u8; if n == 77 { 100_000 } else { 20 }];
        go!(client, put(&key, &value)).expect("stored");
        if n % 10 == 3 {
            go!(client, delete(&key)).expect("deleted");
        } else {
            expected.insert(key, value);
        }
    }
    let keys: Vec<Vec<u8>> = (60..90u32).chain([9999]).map(|n| n.to_be_bytes().to_vec()).collect();
    let refs: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let mut seen = BTreeMap::new();
    let endpoint = std::rc::Rc::clone(client.fabric());
    run(
        &endpoint,
        client.get_many(&refs, |index, item| {
            seen.insert(keys[index].clone(), item.map(|item| item.value.to_vec()));
        }),
    )
    .expect("read");
    for key in &keys {
        assert_eq!(seen[key].as_ref(), expected.get(key));
    }

    let mut visited = BTreeMap::new();
    let mut cursor = Cursor::default();
    loop {
        let more = run(
            &endpoint,
            client.next(&mut cursor, |key, item| {
                assert!(visited.insert(key.to_vec(), item.value.to_vec()).is_none(), "a key is visited once");
            }),
        )
        .expect("visited");
        if !more {
            break;
        }
    }
    assert!(visited == expected);
}

#[test]
fn put_many_takes_two_round_trips_and_the_later_of_two_values_wins() {
    let home = Home::new(64);
    home.create("s", 48, r#"{"items": 1000, "placement": "permuted"}"#);
    let mut client = home.client("s");
    let endpoint = std::rc::Rc::clone(client.fabric());
    let keys: Vec<[u8; 8]> = (0..16u64).map(u64::to_be_bytes).collect();
    let items: Vec<(&[u8], &[u8])> = keys.iter().map(|key| (&key[..], &key[4..])).collect();
    endpoint.take();
    run(&endpoint, client.put_many(&items)).expect("stored");
    assert_eq!(endpoint.take().round_trips, 2, "one probe for all keys, then one install for all keys");
    let large = vec![9; 100_000];
    let again: Vec<(&[u8], &[u8])> =
        vec![(&keys[3], b"once"), (&keys[5], &large), (&keys[3], b"twice"), (b"another", b"x")];
    run(&endpoint, client.put_many(&again)).expect("stored");
    assert_eq!(value_of(&mut client, &keys[3]).as_deref(), Some(&b"twice"[..]));
    assert_eq!(value_of(&mut client, &keys[5]), Some(large.clone()));
    assert_eq!(value_of(&mut client, b"another").as_deref(), Some(&b"x"[..]));
    run(&endpoint, client.put_many(&items)).expect("stored");
    for key in &keys {
        assert_eq!(value_of(&mut client, key).as_deref(), Some(&key[4..]));
    }
    drop(client);
    assert_eq!(home.settled("s").live_buffers, 17, "replaced items and parts are freed");
}

#[test]
fn replaced_items_are_freed_and_none_is_leaked() {
    let home = Home::new(64);
    home.create("s", 32, r#"{"items": 1000}"#);
    let mut client = home.client("s");
    for round in 0..20u8 {
        for n in 0..500u32 {
            go!(client, put(&n.to_be_bytes(), &[round; 1000]))
                .expect("memory is reused: 10 MB in a store of 32 MiB");
        }
    }
    drop(client);
    let stat = home.settled("s");
    assert_eq!(stat.live_buffers, 500, "{stat:?}");
}

#[test]
fn a_full_store_returns_an_error_and_can_be_emptied_and_refilled() {
    let home = Home::new(64);
    home.create("s", 24, r#"{"items": 30000}"#);
    home.create("other", 16, r#"{"items": 1000}"#);
    let mut client = home.client("s");
    let mut other = home.client("other");
    go!(other, put(b"mine", b"untouched")).expect("stored");
    let fill = |client: &mut Client, len: usize, from: u32| -> u32 {
        let mut n = from;
        loop {
            match go!(client, put(&n.to_be_bytes(), &vec![n as u8; len])) {
                Ok(()) => n += 1,
                Err(KvError::OutOfMemory) => return n,
                Err(error) => panic!("{error}"),
            }
        }
    };
    let first = fill(&mut client, 512, 0);
    assert!(first > 20_000, "{first} items of 512 bytes in 22 MiB");
    for n in 0..first / 2 {
        assert!(go!(client, delete(&n.to_be_bytes())).expect("a full store can be emptied"));
    }
    let again = fill(&mut client, 512, 0);
    // One segment of small buffers is reserved for tombstones. If none of these buffers is free, a tombstone takes a
    // buffer as large as that of the replaced item, until an empty segment is cut into small buffers.
    assert!(again * 2 > first / 2, "{again} of {} fit again", first / 2);
    for n in 0..first {
        go!(client, delete(&n.to_be_bytes())).expect("a full store can be emptied");
        // A client that deletes faster than the node frees segments leaves large tombstones in each of them.
        if n.is_multiple_of(1000) {
            home.settled("s");
        }
    }
    home.settled("s");
    let large = fill(&mut client, 4000, 0);
    // Large items need segments without small buffers. Small buffers worth four segments stay on their free list,
    // spread over a random number of segments.
    assert!(large > 1_000, "{large} items of 4000 bytes after {first} of 512; {:?}", home.stat("s"));
    assert_eq!(value_of(&mut other, b"mine").as_deref(), Some(&b"untouched"[..]));
}

#[test]
fn a_put_many_that_runs_out_of_memory_reports_a_partial_result() {
    let home = Home::new(16);
    home.create("s", 5, r#"{"items": 4000}"#);
    let mut client = home.client("s");
    let endpoint = std::rc::Rc::clone(client.fabric());
    let keys: Vec<[u8; 4]> = (0..600u32).map(u32::to_be_bytes).collect();
    let items: Vec<(&[u8], &[u8])> = keys.iter().map(|key| (&key[..], &[8; 20_000][..])).collect();
    let error = run(&endpoint, client.put_many(&items)).expect_err("12 MB into 5 MiB");
    let stored = keys.iter().filter(|key| value_of(&mut client, &key[..]).is_some()).count();
    assert!((1..600).contains(&stored), "{stored}");
    assert_eq!(error.ran(), Ran::Unknown, "{error}");
    assert!(error.to_string().contains("some of the keys may have been stored"), "{error}");
    let one = go!(client, put(&keys[599], &[8; 20_000])).expect_err("no buffer is free");
    assert_eq!((one.ran(), one), (Ran::No, KvError::OutOfMemory));
}

#[test]
fn put_many_succeeds_with_too_few_free_buffers_for_one_chain() {
    let home = Home::new(16);
    home.create("s", 5, r#"{"items": 4000}"#);
    let mut client = home.client("s");
    let value = [7; 3000];
    let mut count = 0u32;
    while go!(client, put(&count.to_be_bytes(), &value)).is_ok() {
        count += 1;
    }
    for n in 0..8u32 {
        assert!(go!(client, delete(&n.to_be_bytes())).expect("a full store can be emptied"));
    }
    home.settled("s");
    // A chain for all keys needs 16 buffers, and 8 are free.
    let keys: Vec<[u8; 4]> = (100..116u32).map(u32::to_be_bytes).collect();
    let items: Vec<(&[u8], &[u8])> = keys.iter().map(|key| (&key[..], &[8; 3000][..])).collect();
    let endpoint = std::rc::Rc::clone(client.fabric());
    run(&endpoint, client.put_many(&items)).expect("each put finds one buffer");
    for key in &keys {
        assert_eq!(value_of(&mut client, key), Some(vec![8; 3000]));
    }
    assert_eq!(home.settled("s").live_buffers, u64::from(count), "replaced items are freed");
}

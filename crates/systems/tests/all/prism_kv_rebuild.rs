//! Tests of PRISM-KV while its table is rebuilt, on a node in this process with its own thread.

use crate::support::audit::Audit;
use crate::support::{Client, Home, go, run, script, value_of};
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::{ChainBuf, Fabric, FabricError, NodeId, Reply, read, write};
use farside_systems::kv::{Kv, Version};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

fn store(home: &Home) -> Store {
    match home.ask(Ask::OpenStore { name: "s".into() }) {
        Answer::Store(store) => store,
        other => panic!("expected a store, got {other:?}"),
    }
}

/// Rebuilds the table for `items` items. Waits until the store has a single table and the former table's memory is
/// free.
fn rebuild(home: &Home, items: u64) {
    let parameters = format!(r#"{{"items": {items}}}"#);
    let ask = Ask::RebuildStore { name: "s".into(), parameters };
    loop {
        match home.host.ask(ask.clone(), Duration::from_secs(60)) {
            Ok(_) => break,
            // The table may be growing by itself, or a chain may still be in the former table.
            Err(error) => assert!(error.to_string().contains("is being rebuilt"), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    settle(home);
}

fn settle(home: &Home) {
    for _ in 0..5000 {
        if store(home).former.is_none() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("the rebuild has not ended: {:?}", store(home));
}

fn audit(home: &Home) {
    let live = home.settled("s");
    let audit = Audit::of(home.host.memory(), &store(home));
    audit.check();
    assert_eq!(audit.reachable.len() as u64, live.live_buffers);
}

#[test]
fn a_rebuilt_table_has_every_value_no_tombstone_and_the_same_costs() {
    let home = Home::new(64);
    home.create("s", 32, r#"{"items": 1000}"#);
    let mut client = home.client("s").with_slot_cache(100);
    let mut expected = BTreeMap::new();
    for n in 0..500u32 {
        let (key, value) =
            (n.to_be_bytes().to_vec(), vec![n as u8; if n == 7 { 200_000 } else { n as usize }]);
        go!(client, put(&key, &value)).expect("stored");
        if n % 3 == 0 {
            go!(client, delete(&key)).expect("deleted");
        } else {
            expected.insert(key, value);
        }
    }
    let before = store(&home);
    rebuild(&home, 2000);
    let after = store(&home);
    assert_ne!((before.secret, before.table_at), (after.secret, after.table_at));
    for n in 0..500u32 {
        let key = n.to_be_bytes();
        assert!(value_of(&mut client, &key).as_ref() == expected.get(&key[..]), "{n}");
    }
    assert_eq!(client.table().spec.slots, 8192);
    drop(client);
    audit(&home);
    assert_eq!(home.settled("s").live_buffers, 333 + 4, "items, four parts, and no tombstone");
    let mut client = home.client("s");
    let endpoint = Rc::clone(client.fabric());
    endpoint.take();
    let trips: u64 = (0..500u32)
        .map(|n| {
            value_of(&mut client, &n.to_be_bytes());
            endpoint.take().round_trips
        })
        .sum();
    assert!(trips < 550, "a GET takes one round trip, except for collisions and the large value: {trips}");
}

#[test]
fn keys_that_are_put_and_deleted_never_fill_a_table() {
    let home = Home::new(64);
    home.create("s", 16, r#"{"items": 64}"#);
    let mut client = home.client("s");
    let slots = client.table().spec.slots;
    for n in 0..slots as u32 * 20 {
        let key = n.to_be_bytes();
        go!(client, put(&key, b"x")).expect("stored");
        assert!(go!(client, delete(&key)).expect("deleted"));
        assert_eq!(value_of(&mut client, &key), None);
    }
    settle(&home);
    assert!(value_of(&mut client, b"none").is_none());
    assert_eq!(client.table().spec.slots, slots, "tombstones need no larger table");
    assert!(client.table().spec.epoch > 10);
    drop(client);
    audit(&home);
}

#[test]
fn a_table_grows_with_its_keys() {
    let home = Home::new(64);
    home.create("s", 16, r#"{"items": 64}"#);
    let mut client = home.client("s").with_slot_cache(50);
    for n in 0..20_000u32 {
        go!(client, put(&n.to_be_bytes(), &n.to_le_bytes())).expect("stored");
    }
    for n in 0..20_000u32 {
        assert_eq!(value_of(&mut client, &n.to_be_bytes()).as_deref(), Some(&n.to_le_bytes()[..]), "{n}");
    }
    settle(&home);
    let mut client = home.client("s");
    assert!(client.table().spec.slots >= 32_768);
    assert_eq!(value_of(&mut client, b"none"), None);
    drop(client);
    audit(&home);
}

#[test]
fn a_version_of_a_deleted_key_never_comes_again() {
    let home = Home::new(64);
    home.create("s", 16, r#"{"items": 64}"#);
    let mut client = home.client("s");
    go!(client, put(b"k", b"one")).expect("stored");
    let mut seen: Vec<Version> = Vec::new();
    for round in 0..20 {
        let version = go!(client, get(b"k")).expect("read").expect("present").version;
        assert!(!seen.contains(&version), "{version:?} came again after {round} rebuilds");
        for old in &seen {
            let put = go!(client, compare_and_put(b"k", *old, b"lost update")).expect("compared");
            assert!(put.is_err(), "{old:?} is from before a delete");
        }
        seen.push(version);
        go!(client, put(b"k", b"two")).expect("stored");
        assert!(go!(client, delete(b"k")).expect("deleted"));
        rebuild(&home, 64);
        assert!(go!(client, put_if_absent(b"k", b"three")).expect("put"));
    }
}

#[test]
fn a_rebuild_without_enough_memory_is_refused_and_changes_nothing() {
    let home = Home::new(16);
    home.create("s", 10, r#"{"items": 64}"#);
    let mut client = home.client("s");
    go!(client, put(b"k", b"v")).expect("stored");
    let ask = Ask::RebuildStore { name: "s".into(), parameters: r#"{"items": 1000000}"#.into() };
    let refused =
        home.host.ask(ask, Duration::from_secs(10)).expect_err("the node has less than 64 MiB").to_string();
    assert!(refused.contains("65 MiB") && refused.contains("more --memory"), "{refused}");
    assert_eq!(value_of(&mut client, b"k").as_deref(), Some(&b"v"[..]));
    rebuild(&home, 64);
    rebuild(&home, 65);
    assert_eq!(value_of(&mut client, b"k").as_deref(), Some(&b"v"[..]));
}

#[test]
fn keys_put_while_their_table_is_made_too_small_find_a_larger_one() {
    const KEYS: u32 = 20_000;
    let home = Home::new(128);
    home.create("s", 32, r#"{"items": 60000}"#);
    std::thread::scope(|scope| {
        let loader = scope.spawn(|| {
            let mut client = home.client("s");
            for n in 0..KEYS {
                go!(client, put(&n.to_be_bytes(), &n.to_le_bytes())).expect("stored");
            }
        });
        let ask = Ask::RebuildStore { name: "s".into(), parameters: r#"{"items": 1}"#.into() };
        while !loader.is_finished() {
            let _refused_meanwhile = home.host.ask(ask.clone(), Duration::from_secs(60));
        }
    });
    settle(&home);
    let mut client = home.client("s");
    for n in 0..KEYS {
        assert_eq!(value_of(&mut client, &n.to_be_bytes()).as_deref(), Some(&n.to_le_bytes()[..]), "{n}");
    }
    go!(client, put(b"new", b"value")).expect("stored");
    drop(client);
    audit(&home);
}

/// The test fills all slots with copies of one word, as a malicious client may do. The node must bound the size of the
/// next table.
#[test]
fn a_table_grows_no_further_than_the_buffers_of_its_store() {
    const QUOTA_MIB: u64 = 4;
    let home = Home::new(64);
    home.create("s", QUOTA_MIB, r#"{"items": 1}"#);
    let mut client = home.client("s");
    let endpoint = Rc::clone(client.fabric());
    go!(client, put(b"k", b"v")).expect("stored");
    for _ in 0..8 {
        let table = client.table().clone();
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let mut slot = [0; 16];
        for index in table.probe(b"k") {
            let mut chain = buf.begin(table.extent.key);
            let word = chain.also(read(table.slot_at(index), 16));
            run(&endpoint, endpoint.run(NodeId(0), &chain, &mut reply)).expect("read");
            slot.copy_from_slice(reply.get(word).expect("the client may read"));
            if slot != [0; 16] {
                break;
            }
        }
        let slots = slot.repeat(2048);
        for first in (0..table.spec.slots).step_by(2048) {
            let mut chain = buf.begin(table.extent.key);
            let count = (table.spec.slots - first).min(2048) as usize;
            chain.also(write(table.slot_at(first), &slots[..count * 16]));
            run(&endpoint, endpoint.run(NodeId(0), &chain, &mut reply)).expect("written");
        }
        match home.host.ask(Ask::GrowStore { name: "s".into() }, Duration::from_secs(60)) {
            // The node may have noticed the crowded table by itself, and replaced it already.
            Err(FabricError::Refused(reason)) => {
                assert!(reason.contains("not crowded"), "{reason}");
                assert!(home.client("s").table().spec.epoch > table.spec.epoch, "{reason}");
            }
            answered => drop(answered.expect("an answer")),
        }
        run(&endpoint, async {});
        settle(&home);
        client = home.client("s");
    }
    let table_len = store(&home).table_len;
    assert!(table_len <= (2 * (QUOTA_MIB + 1) + 1) << 20, "a table of {table_len} bytes");
}

/// Duration of the test that rebuilds a table in use again and again.
const IN_USE: Duration = Duration::from_secs(3);

/// Keys that only one client uses, with the values that the keys must have.
struct Owner {
    name: u32,
    /// Number and length in bytes of each key's value. Absent keys are not in the map.
    values: BTreeMap<u32, (u32, usize)>,
    random: u64,
    put: u32,
}

impl Owner {
    fn new(name: u32) -> Owner {
        Owner { name, values: BTreeMap::new(), random: u64::from(name), put: 0 }
    }

    fn key(&self, key: u32) -> Vec<u8> {
        [self.name.to_be_bytes(), key.to_be_bytes()].concat()
    }

    fn value(&self, key: u32) -> Option<Vec<u8>> {
        let (number, len) = *self.values.get(&key)?;
        Some(script::value(u64::from(self.name), u64::from(number), len))
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random = script::mix(self.random);
        self.random % below
    }

    /// Runs a random operation on a key, and checks the values of this key and of another key.
    fn operate(&mut self, client: &mut Client, keys: u64) {
        let key = self.draw(keys) as u32;
        let len = [0, 20, 300, 3000, 130_000][[0, 1, 1, 1, 2, 2, 3, 3, 4][self.draw(9) as usize]];
        let name = self.key(key);
        let new = (self.put, len);
        let bytes = script::value(u64::from(self.name), u64::from(self.put), len);
        self.put += 1;
        match self.draw(8) {
            0 | 1 => {
                let had = self.values.remove(&key).is_some();
                assert_eq!(go!(client, delete(&name)), Ok(had), "{name:?}");
            }
            2 => {
                let stored = go!(client, put_if_absent(&name, &bytes)).expect("put");
                assert_eq!(stored, !self.values.contains_key(&key), "{name:?}");
                self.values.entry(key).or_insert(new);
            }
            3 => {
                let keys: Vec<u32> = (0..10).map(|n| (key + n) % keys as u32).collect();
                let items: Vec<(Vec<u8>, Vec<u8>)> = keys
                    .iter()
                    .map(|&key| (self.key(key), script::value(u64::from(self.name), u64::from(new.0), 20)))
                    .collect();
                let refs: Vec<(&[u8], &[u8])> =
                    items.iter().map(|(key, value)| (&key[..], &value[..])).collect();
                go!(client, put_many(&refs)).expect("stored");
                self.values.extend(keys.into_iter().map(|key| (key, (new.0, 20))));
            }
            4 => {
                let keys: Vec<u32> = (0..20).map(|n| (key + n) % keys as u32).collect();
                let names: Vec<Vec<u8>> = keys.iter().map(|&key| self.key(key)).collect();
                let refs: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
                let endpoint = Rc::clone(client.fabric());
                let many = client.get_many(&refs, |index, item| {
                    assert!(
                        item.map(|item| item.value.to_vec()) == self.value(keys[index]),
                        "{:?}",
                        names[index]
                    );
                });
                run(&endpoint, many).expect("read");
            }
            _ => {
                go!(client, put(&name, &bytes)).expect("stored");
                self.values.insert(key, new);
            }
        }
        for key in [key, self.draw(keys) as u32] {
            assert!(value_of(client, &self.key(key)) == self.value(key), "{:?}", self.key(key));
        }
    }

    fn check(&self, client: &mut Client, keys: u64) {
        for key in 0..keys as u32 {
            assert!(value_of(client, &self.key(key)) == self.value(key), "{:?}", self.key(key));
        }
    }
}

/// Adds 1 to a counter in the store, which several clients share, and to `counted`.
fn count(client: &mut Client, counted: &mut u64) {
    loop {
        let item =
            go!(client, get(b"counter")).expect("read").map(|item| (item.value.to_vec(), item.version));
        let stored = match item {
            None => go!(client, put_if_absent(b"counter", &1u64.to_le_bytes())).expect("put"),
            Some((value, version)) => {
                let next = u64::from_le_bytes(value.try_into().expect("a number")) + 1;
                go!(client, compare_and_put(b"counter", version, &next.to_le_bytes())).expect("put").is_ok()
            }
        };
        if stored {
            *counted += 1;
            return;
        }
    }
}

#[test]
fn concurrent_clients_lose_no_value_while_tables_are_rebuilt() {
    const KEYS: u64 = 60;
    let home = Home::new(96);
    home.create("s", 48, r#"{"items": 64}"#);
    let until = std::time::Instant::now() + IN_USE;
    let rebuilds = std::thread::scope(|scope| {
        let workers: Vec<_> = (1..=3)
            .map(|name| {
                let home = &home;
                scope.spawn(move || {
                    let mut client = home.client("s").with_slot_cache(if name == 1 { 40 } else { 0 });
                    // This client is used seldom, so that it misses rebuilds.
                    let mut idle = home.client("s");
                    let (mut owner, mut counted) = (Owner::new(name), 0);
                    while std::time::Instant::now() < until {
                        for _ in 0..200 {
                            owner.operate(&mut client, KEYS);
                            count(&mut client, &mut counted);
                        }
                        owner.operate(&mut idle, KEYS);
                    }
                    owner.check(&mut idle, KEYS);
                    (owner, counted)
                })
            })
            .collect();
        let mut rebuilds = 0;
        let mut random = 1;
        while std::time::Instant::now() < until {
            random = script::mix(random);
            rebuild(&home, [1, 300, 2000, 20_000][random as usize % 4]);
            rebuilds += 1;
        }
        let done: Vec<(Owner, u64)> =
            workers.into_iter().map(|worker| worker.join().expect("the worker succeeds")).collect();
        let mut client = home.client("s");
        done.iter().for_each(|(owner, _)| owner.check(&mut client, KEYS));
        let counted: u64 = done.iter().map(|(_, counted)| counted).sum();
        let counter = value_of(&mut client, b"counter").expect("present");
        assert_eq!(u64::from_le_bytes(counter.try_into().expect("a number")), counted);
        println!(
            "{rebuilds} rebuilds under {} puts, {counted} counted",
            done.iter().map(|(owner, _)| owner.put).sum::<u32>()
        );
        rebuilds
    });
    assert!(rebuilds > 20, "{rebuilds}");
    settle(&home);
    audit(&home);
}

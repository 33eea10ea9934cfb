//! Tests of SMART on a real fabric: results against a model, costs, scans, and damaged memory.

use crate::support::Home;
use crate::support::index_client::{
    self, Endpoint, agrees_with_a_map, endures_damage, healed, number, see_each_others_changes,
};
use farside_systems::index::smart::system::SmartKind;
use farside_systems::index::smart::{KIND, Smart, Spec};
use farside_systems::index::{Index, IndexError, Keys, Rung};
use std::time::Duration;

/// Length of a lease in microseconds that no client renews during a test: only operations send requests.
const LONG: u64 = 600_000_000;

type Client = index_client::Client<Smart<Endpoint>>;

fn open(home: &Home, cache: usize) -> Client {
    Client::open::<SmartKind>(home, cache, Duration::from_millis(50)).expect("it has that kind")
}

fn spec(keys: Keys) -> Spec {
    Spec { keys, value_max: 20, chunk: 1 << 14, ids: 8, lanes: 4, lease_us: LONG, ..Spec::default() }
}

fn home(spec: &Spec, mib: u64) -> Home {
    let home = Home::new(2 * mib + 8);
    home.create_of(KIND, "s", mib, &serde_json::to_string(spec).expect("plain data"));
    home
}

fn tree_agrees_with_a_map(spec: Spec, cache: usize, seed: u64) {
    let home = home(&spec, 16);
    let (client, _) = agrees_with_a_map(|| open(&home, cache), spec.keys, seed);
    for name in ["leaf splits", "path splits", "tombstones revived", "slots emptied"] {
        assert!(client.counter(name) > 0, "{name}");
    }
}

#[test]
fn a_tree_of_numbers_agrees_with_a_map() {
    tree_agrees_with_a_map(spec(Keys::Numbers), 0, 1);
    tree_agrees_with_a_map(spec(Keys::Numbers), 1 << 20, 2);
}

#[test]
fn a_tree_of_strings_agrees_with_a_map() {
    tree_agrees_with_a_map(spec(Keys::Strings), 0, 3);
    tree_agrees_with_a_map(spec(Keys::Strings), 1 << 20, 4);
    tree_agrees_with_a_map(spec(Keys::Strings), 4000, 5);
}

#[test]
fn every_type_switch_happens_as_a_node_fills() {
    let home = home(&spec(Keys::Numbers), 8);
    let mut client = open(&home, 1 << 20);
    for key in 0..256 {
        client.put(&number(key), b"v");
    }
    for from in [4, 8, 16, 32, 64, 128] {
        assert_eq!(client.counter(&format!("type switches from {from}")), 1, "from {from}");
    }
    assert_eq!(client.scan(&[], 1000).len(), 256);
    let mut other = open(&home, 0);
    assert!((0..256).all(|key| other.get(&number(key)).is_some()));
}

#[test]
fn operations_cost_what_the_paper_says() {
    let home = home(&spec(Keys::Numbers), 8);
    let mut client = open(&home, 1 << 20);
    // The root's node, and one below it for each of two bytes.
    for key in [0x0101, 0x0102, 0x0201, 0x0202] {
        client.put(&number(key), b"v");
    }
    client.get(&number(0x0101));
    client.get(&number(0x0201));
    let get = |client: &mut Client| _ = client.get(&number(0x0101));
    assert_eq!(client.costs(get), (1, 1, 0), "a get of a cached key");
    // The path of a number has two nodes: the root's, and the one above the leaf.
    let mut cold = open(&home, 0);
    assert_eq!(cold.costs(get), (4, 4, 0), "the root slot, two nodes and the leaf");
    let update = |client: &mut Client| client.put(&number(0x0101), b"w");
    client.put(&number(0x0101), b"x"); // Reserves tokens of locks.
    assert_eq!(client.costs(update), (3, 3, 1), "read, lock and read, write");
    let insert = |client: &mut Client| client.put(&number(0x0103), b"v");
    assert_eq!(client.costs(insert), (3, 3, 1), "read the node, write the leaf, CAS");
    let split = |client: &mut Client| client.put(&number(0x01_0000_0101), b"v");
    let (waves, _, atomics) = client.costs(split);
    assert_eq!(
        (waves, atomics),
        (4, 3),
        "a path split: read the node, write, CAS, header and reverse pointer"
    );
    client.put(&number(0xff_0000_0000_0101), b"v");
    client.get(&number(0xff_0000_0000_0101));
    let split = |client: &mut Client| client.put(&number(0xff_0000_0000_0201), b"v");
    let (waves, _, atomics) = client.costs(split);
    assert_eq!((waves, atomics), (4, 2), "a leaf split: read the leaf, write, CAS, reverse pointer");
    client.put(&number(0x0104), b"v");
    let switch = |client: &mut Client| client.put(&number(0x0105), b"v");
    assert_eq!(client.costs(switch), (4, 4, 3), "a type switch: one wave more");
    let delete = |client: &mut Client| assert!(client.delete(&number(0x0102)));
    assert_eq!(client.costs(delete), (3, 3, 3), "read, lock and read, write and CAS");
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
        let mut client = open(&home, 1 << 20);
        for key in [0x0101, 0x0102, 0x0201, 0x0202] {
            client.put(&number(key), b"v");
        }
        client.get(&number(0x0101));
        client.put(&number(0x0101), b"x"); // Reserves tokens of locks.
        let update = client.costs(|client| client.put(&number(0x0101), b"w"));
        assert_eq!(update, of_update, "{rung:?}: an update");
        let insert = client.costs(|client| client.put(&number(0x0103), b"v"));
        assert_eq!(insert, of_insert, "{rung:?}: an insert");
    }
}

#[test]
fn every_rung_agrees_with_a_map() {
    for rung in Rung::ALL {
        tree_agrees_with_a_map(Spec { rung, ..spec(Keys::Strings) }, 4000, 6);
    }
}

#[test]
fn two_clients_see_each_others_changes_through_their_caches() {
    let home = home(&spec(Keys::Strings), 8);
    see_each_others_changes(open(&home, 1 << 20), open(&home, 1 << 20));
}

#[test]
fn keys_and_values_that_a_store_cannot_have_are_refused() {
    let home = home(&spec(Keys::Strings), 8);
    let mut client = open(&home, 0);
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
        let mut client = open(&home, 0);
        client.put(&number(round), b"v");
        client.leave();
    }
}

#[test]
fn memory_of_deleted_keys_is_used_again() {
    const KEYS: u64 = 1000;
    const ROUNDS: u64 = 10;
    let spec = Spec { lease_us: 200_000, ..spec(Keys::Numbers) };
    // Room for the leaves of about six rounds.
    let home = home(&spec, 1);
    let (mut client, mut idle) = (open(&home, 1 << 20), open(&home, 0));
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
    for keys in [Keys::Numbers, Keys::Strings] {
        let spec = Spec { lease_us: 20_000, chunk: 1 << 13, ..spec(keys) };
        let home = Home::new(24);
        let store = home.create_of(KIND, "s", 1, &serde_json::to_string(&spec).expect("plain data"));
        let open = || Client::open::<SmartKind>(&home, 1 << 16, Duration::from_millis(50));
        endures_damage(open, &store, keys, async |index| index.stat().await.map(drop));
    }
}

#[test]
fn healing_finds_nothing_where_no_client_has_died() {
    let home = home(&Spec { lease_us: 40_000, ..spec(Keys::Numbers) }, 8);
    let mut client = open(&home, 0);
    for key in 0..500 {
        client.put(&number(key), b"v");
    }
    client.leave();
    assert_eq!(healed::<SmartKind>(&home), Ok(Vec::new()));
    let mut client = open(&home, 0);
    let stat = client.run(async |index| index.stat().await).expect("a walk");
    assert_eq!((stat.leaves, stat.taken, stat.hidden, stat.locked), (500, stat.linked(), 0, 0));
}

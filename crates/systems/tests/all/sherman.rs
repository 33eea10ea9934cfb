//! Tests of Sherman on a real fabric: results against a model, costs, scans, and damaged memory.

use crate::support::Home;
use crate::support::index_client::{
    self, Endpoint, agrees_with_a_map, endures_damage, healed, number, see_each_others_changes,
};
use farside_systems::index::sherman::system::ShermanKind;
use farside_systems::index::sherman::{KIND, Sherman, Spec};
use farside_systems::index::{Index, IndexError, Keys};
use farside_systems::store::StoreError;
use std::time::Duration;

/// Length of a lease in microseconds that no client renews during a test: only operations send requests.
const LONG: u64 = 600_000_000;

type Client = index_client::Client<Sherman<Endpoint>>;

fn open(home: &Home, cache: usize) -> Client {
    Client::open::<ShermanKind>(home, cache, Duration::from_secs(5)).expect("it has that kind")
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

fn tree_agrees_with_a_map(spec: &Spec, cache: usize, seed: u64) {
    let home = home(spec, 16);
    let (mut client, keys) = agrees_with_a_map(|| open(&home, cache), spec.keys, seed);
    for name in ["leaf splits", "inner splits", "root growths"] {
        assert!(client.counter(name) > 0, "{name}");
    }
    let stat = client.run(async |index| index.stat().await).expect("a walk");
    let orphans = client.counter("separators left out");
    assert_eq!((stat.keys, stat.orphans, stat.locked), (keys, orphans, 0));
    assert_eq!(stat.claimed, stat.nodes() + client.index.spare_units() as u64);
}

#[test]
fn a_tree_of_numbers_agrees_with_a_map() {
    tree_agrees_with_a_map(&spec(Keys::Numbers), 0, 1);
    tree_agrees_with_a_map(&spec(Keys::Numbers), 1 << 20, 2);
    tree_agrees_with_a_map(&Spec { span: 7, version_bits: 8, ..spec(Keys::Numbers) }, 1 << 20, 6);
}

#[test]
fn a_tree_of_strings_agrees_with_a_map() {
    tree_agrees_with_a_map(&spec(Keys::Strings), 0, 3);
    tree_agrees_with_a_map(&spec(Keys::Strings), 1 << 20, 4);
    tree_agrees_with_a_map(&spec(Keys::Strings), 4000, 5);
}

#[test]
fn operations_cost_what_the_paper_says() {
    let home = home(&spec(Keys::Numbers), 8);
    let mut client = open(&home, 1 << 20);
    for key in (0..200).step_by(10) {
        client.put(&number(key), b"v");
    }
    let levels = client.run(async |index| index.stat().await).expect("a walk").levels;
    assert!(levels >= 3);
    let get = |client: &mut Client| assert!(client.get(&number(50)).is_some());
    get(&mut client);
    assert_eq!(client.costs(get), (1, 1, 0), "a get with the leaf's parent in the cache");
    let mut cold = open(&home, 0);
    assert_eq!(cold.costs(get), (levels + 1, levels + 1, 0), "the root's word, and a node of each level");
    assert_eq!(cold.costs(get), (levels, levels, 0), "the root is known");
    let update = |client: &mut Client| client.put(&number(50), b"w");
    assert_eq!(client.costs(update), (3, 3, 1), "lock, read, write and unlock");
    let delete = |client: &mut Client| assert!(client.delete(&number(50)));
    assert_eq!(client.costs(delete), (3, 3, 1), "lock, read, write and unlock");
    let insert = |client: &mut Client| client.put(&number(51), b"w");
    assert_eq!(client.costs(insert), (3, 3, 1), "lock, read, write and unlock");
    let absent = |client: &mut Client| assert!(!client.put_if_absent(&number(51), b"w"));
    assert_eq!(client.costs(absent), (3, 3, 1), "lock, read, unlock");
}

#[test]
fn two_clients_see_each_others_changes_through_their_caches() {
    let home = home(&spec(Keys::Strings), 8);
    see_each_others_changes(open(&home, 1 << 20), open(&home, 1 << 20));
}

#[test]
fn keys_values_and_lines_that_are_not_possible_are_refused() {
    let home = home(&Spec { key_max: 100, ..spec(Keys::Strings) }, 8);
    let mut client = open(&home, 0);
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
    assert!(matches!(Client::open::<ShermanKind>(&lines, 0, Duration::ZERO), Err(StoreError::Gone(_))));
}

#[test]
fn a_client_that_leaves_gives_back_its_id_and_its_memory() {
    let home = home(&Spec { ids: 1, ..spec(Keys::Numbers) }, 8);
    for round in 0..3_u64 {
        let mut client = open(&home, 0);
        client.put(&number(round), b"v");
        let stat = client.run(async |index| index.stat().await).expect("a walk");
        assert_eq!(stat.claimed, 1 + client.index.spare_units() as u64);
        assert_eq!(client.index.spare_units() > 0, round == 0);
        client.leave();
    }
}

#[test]
fn a_full_store_refuses_what_needs_a_node_and_nothing_else() {
    let home = home(&Spec { lanes: 1, ids: 2, ..spec(Keys::Numbers) }, 1);
    let mut client = open(&home, 1 << 20);
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
    for keys in [Keys::Numbers, Keys::Strings] {
        let spec = Spec { lease_us: 20_000, ..spec(keys) };
        let home = Home::new(24);
        let store = home.create_of(KIND, "s", 1, &serde_json::to_string(&spec).expect("plain data"));
        let open = || Client::open::<ShermanKind>(&home, 1 << 16, Duration::from_millis(5));
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
    assert_eq!(healed::<ShermanKind>(&home), Ok(Vec::new()));
    let mut client = open(&home, 0);
    let stat = client.run(async |index| index.stat().await).expect("a walk");
    assert_eq!((stat.keys, stat.claimed, stat.orphans, stat.locked), (500, stat.nodes(), 0, 0));
}

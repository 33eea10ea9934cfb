//! Clients of SMART that are killed while they change a tree in shared memory.
//!
//! The tests check, besides what [`strikes`](crate::support::strikes) says, that after each death:
//! * every acknowledged change is there, and the change in progress is there or not,
//! * scans return the keys in order, with whole values,
//! * healing leaves no lock, and no memory that the tree does not have.

use crate::support::deadly_index::{self, Phase, SPEC};
use crate::support::deadly_table::{Purpose, Strike, Table};
use crate::support::index_script::{Op, TOUR, after, value};
use crate::support::kept_index::KeptIndex;
use crate::support::process::Role;
use crate::support::script;
use crate::support::strikes::{Struck, killed_at_accesses};
use farside_fabrics::direct::Direct;
use farside_fabrics::memory::Mapping;
use farside_remote::control::Store;
use farside_systems::index::Index;
use farside_systems::index::smart::system::SmartKind;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn clients_of_a_tree_killed_at_any_access_lose_nothing() {
    killed_at_accesses::<Trees>(Phase::ALL.len());
}

#[test]
#[ignore = "kills 200 processes: for the soak"]
fn soak_200_clients_of_a_tree_killed_at_any_access_lose_nothing() {
    killed_at_accesses::<Trees>(200);
}

struct Trees;

impl Struck for Trees {
    type System = SmartKind;
    type Phase = Phase;
    type Client = Client;

    const TEST: &'static str = "clients_of_a_tree_killed";
    const LEASE: Duration = deadly_index::LEASE;

    fn parameters() -> String {
        serde_json::to_string(&SPEC).expect("plain data")
    }

    fn found(store: &Store, _client: impl FnOnce() -> Client) -> Table {
        Table { at: store.table_at, len: store.table_len }
    }

    fn open(endpoint: Rc<Direct>, name: &str, entropy: u64) -> Client {
        KeptIndex::open(endpoint, name, entropy)
    }

    fn victim(
        socket: PathBuf,
        store: String,
        table: Table,
        entropy: u64,
        strike: Option<Strike<Phase>>,
    ) -> Role {
        Role::IndexClient { socket, store, table, entropy, strike }
    }

    /// Inserts, updates and deletes keys between the victim's, in the same nodes.
    fn go_on(client: &mut Client, round: u64) -> Duration {
        let mut slowest = Duration::ZERO;
        for key in survivors_keys() {
            let before = Instant::now();
            let value = survivors_value(round);
            match &value {
                Some(value) => put(client, key, value),
                None => {
                    let deleted = client.run(async |index| index.delete(&key.to_be_bytes()).await);
                    assert_eq!(deleted, Ok(round > 0));
                }
            }
            assert_eq!(get(client, key), value);
            slowest = slowest.max(before.elapsed());
        }
        client.run(async |_| std::thread::sleep(Duration::from_micros(200)));
        slowest
    }

    fn check(client: &mut Client, done: u64) {
        check_script(client, done as usize);
        victims_keys().into_iter().for_each(|key| put(client, key, b"last"));
    }

    fn check_healed(mut client: Client, rounds: u64) {
        let found = scan(&mut client);
        let expected = victims_keys().into_iter().map(|key| (key, b"last".to_vec()));
        let expected = expected.chain(survivors_items(rounds)).collect();
        assert!(found == expected, "after healing, other keys or values are there: {found:?}");
        let stat = client.run(async |index| index.stat().await).expect("a walk");
        assert_eq!((stat.locked, stat.hidden, stat.taken), (0, 0, stat.linked()), "{stat:?}");
        client.leave();
    }

    fn leave(client: Client) {
        client.leave();
    }
}

type Client = KeptIndex<Arc<Mapping>>;

fn victims_keys() -> BTreeSet<u64> {
    TOUR.into_iter().filter_map(key_of).collect()
}

fn key_of(op: Op) -> Option<u64> {
    match op {
        Op::Put(key) | Op::Delete(key) => Some(key),
        Op::Pause => None,
    }
}

fn put(client: &mut Client, key: u64, value: &[u8]) {
    client.run(async |index| index.put(&key.to_be_bytes(), value).await).expect("stored");
}

fn get(client: &mut Client, key: u64) -> Option<Vec<u8>> {
    let got =
        client.run(async |index| index.get(&key.to_be_bytes()).await.map(|found| found.map(<[u8]>::to_vec)));
    got.expect("a get")
}

/// Scans all keys. They must be in order.
fn scan(client: &mut Client) -> BTreeMap<u64, Vec<u8>> {
    let mut found = Vec::new();
    let visit = |key: &[u8], value: &[u8]| {
        found.push((u64::from_be_bytes(key.try_into().expect("a number")), value.to_vec()));
    };
    client.run(async |index| index.scan(&[0; 8], usize::MAX, visit).await).expect("a scan");
    assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0), "a scan is not in order: {found:?}");
    found.into_iter().collect()
}

/// Checks that the victim's keys have the values that the first `done` operations of its script leave, or those after
/// the next operation, which was in progress. Gets and a scan must agree.
fn check_script(client: &mut Client, done: usize) {
    let scanned = scan(client);
    let found: BTreeMap<u64, Vec<u8>> = TOUR
        .into_iter()
        .filter_map(key_of)
        .filter_map(|key| get(client, key).map(|value| (key, value)))
        .collect();
    let is_left_by = |count: usize| {
        let expected: BTreeMap<u64, Vec<u8>> =
            after(count).into_iter().map(|(key, index)| (key, value(index))).collect();
        expected == found
    };
    assert!(is_left_by(done) || is_left_by(done + 1), "after {done} operations: {found:?}");
    let scanned: BTreeMap<u64, Vec<u8>> =
        scanned.into_iter().filter(|(key, _)| !survivors_keys().any(|own| own == *key)).collect();
    assert!(scanned == found, "a scan has {scanned:?}, gets have {found:?}");
}

fn survivors_keys() -> impl Iterator<Item = u64> {
    (0..8).map(|key| [0x0180, 0x0380, 0x02_0000_0180, 0xff_0000_0000_0180][key as usize % 4] + key)
}

/// The value of the survivor's operation with this number on each of its keys; `None` if it is a delete.
fn survivors_value(number: u64) -> Option<Vec<u8>> {
    (!number.is_multiple_of(5)).then(|| script::value(number, number, number as usize % 41))
}

/// What the survivor's keys have after this number of rounds.
fn survivors_items(rounds: u64) -> impl Iterator<Item = (u64, Vec<u8>)> {
    survivors_keys().filter_map(move |key| Some((key, survivors_value(rounds - 1)?)))
}

//! Tests of ART on a real fabric: results against a model, costs, what another client does between two requests of an
//! operation, deaths, and damaged memory.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::Core;
use farside_fabrics::layer::count::{Costs, Count};
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, write};
use farside_systems::index::art::system::ArtKind;
use farside_systems::index::art::{Art, Growth, KIND, Spec, Stat};
use farside_systems::index::{Index, IndexError, Keys};
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use std::cell::{Cell, RefCell};
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

type Endpoint = Rc<Intercept<'static, Rc<Count<Direct>>>>;

/// A client with its task, which runs while an operation runs.
struct Client {
    endpoint: Endpoint,
    index: Art<Endpoint>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
    /// Whether the task has ended.
    has_ended: bool,
}

impl Client {
    fn open(home: &Home, cache: usize) -> Client {
        Client::open_with(home, cache, Duration::from_secs(60))
    }

    /// Opens a client whose operations wait only briefly for a lock.
    fn impatient(home: &Home, cache: usize) -> Client {
        Client::open_with(home, cache, Duration::from_millis(200))
    }

    fn open_with(home: &Home, cache: usize, patience: Duration) -> Client {
        static ENTROPY: AtomicU64 = AtomicU64::new(1 << 42);
        let endpoint = Rc::new(Intercept::new(home.endpoint()));
        let entropy = ENTROPY.fetch_add(1, Ordering::Relaxed);
        let options = Options { entropy, patience: Some(patience), node_cache: Some(cache), ..Options::NONE };
        let opening = async {
            let store = store::fetch_of(&endpoint, NODE, "s", KIND).await.expect("the store exists");
            ArtKind::open(Rc::clone(&endpoint), &Members::one(NODE, store), &options).await
        };
        let index = run(endpoint.inner(), opening).expect("it has that kind");
        let keeper = index.keeper();
        Client { endpoint, index, keeper, has_ended: false }
    }

    /// Runs an operation until it has ended, or until the client's task has ended, or a chain of it is stopped.
    fn try_run<O>(&mut self, operation: impl AsyncFnOnce(&mut Art<Endpoint>) -> O) -> Option<O> {
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
                if *has_ended || endpoint.is_stuck() { Poll::Ready(None) } else { Poll::Pending }
            })
            .await
        };
        run(endpoint.inner(), both)
    }

    fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut Art<Endpoint>) -> Result<O, IndexError>) -> O {
        self.try_run(operation).expect("the client's task runs").expect("an operation")
    }

    fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        self.run(async |index| index.get(key).await.map(|found| found.map(<[u8]>::to_vec)))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) {
        self.run(async |index| index.put(key, value).await);
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        self.run(async |index| index.delete(key).await)
    }

    fn scan(&mut self, from: &[u8], limit: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut found = Vec::new();
        let visit = |key: &[u8], value: &[u8]| found.push((key.to_vec(), value.to_vec()));
        let count = self.run(async |index| index.scan(from, limit, visit).await);
        assert_eq!(count, found.len());
        found
    }

    fn stat(&mut self) -> Stat {
        self.run(async |index| index.stat().await)
    }

    fn counter(&self, name: &str) -> u64 {
        counter_of(&self.index, name)
    }

    /// Waits until the memory that the client has unlinked is free. The other clients publish their epochs, too.
    fn await_free(&mut self, others: &mut [Client]) {
        while self.index.waiting_units() > 0 {
            self.get(&number(1));
            others.iter_mut().for_each(|other| _ = other.get(&number(1)));
        }
    }
}

fn counter_of(index: &Art<Endpoint>, name: &str) -> u64 {
    let counters = index.counters();
    counters.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1
}

fn spec(keys: Keys) -> Spec {
    Spec {
        keys,
        value_max: 20,
        chunk: 1 << 14,
        ids: 8,
        lanes: 4,
        lease_us: LONG,
        redo: false,
        nodes: Growth::Copied,
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
                let stored = client.run(async |index| index.put_if_absent(&key, &value).await);
                assert_eq!(stored, is_new, "step {step}");
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
    let stat = client.stat();
    assert_eq!((stat.leaves, stat.locked), (all.len() as u64, 0));
    assert!(stat.taken >= stat.linked(), "{stat:?}");
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
    agrees_with_a_map(Spec { inline_max: 5, ..spec(Keys::Strings) }, 4000, 6);
}

#[test]
fn a_node_grows_as_it_fills_and_shrinks_as_it_empties() {
    let home = home(&Spec { lease_us: 200_000, ..spec(Keys::Numbers) }, 8);
    let (mut client, mut other) = (Client::open(&home, 1 << 20), Client::open(&home, 1 << 20));
    // Number of nodes with 4, 16, 48 and 256 slots.
    let nodes = |client: &mut Client| client.stat().nodes[7..].to_vec();
    let mut seen = Vec::new();
    for key in 0..256 {
        client.put(&number(key), b"v");
        assert_eq!(other.get(&number(key)), Some(b"v".to_vec()), "through the other client's cache");
        let now = nodes(&mut client);
        if seen.last() != Some(&now) {
            seen.push(now);
        }
    }
    // A node without a prefix of its own leads to each: 7 bytes are common, and a prefix has 6.
    let below = |kind: usize| {
        let mut nodes = vec![1, 0, 0, 0];
        nodes[kind] += 1;
        nodes
    };
    assert_eq!(seen[seen.len() - 4..], [below(0), below(1), below(2), below(3)]);
    for from in [4, 16, 48] {
        assert_eq!(client.counter(&format!("nodes grown from {from}")), 1, "from {from}");
    }
    let mut seen = Vec::new();
    for key in 0..256 {
        assert!(client.delete(&number(key)));
        assert_eq!(other.get(&number(key)), None, "through the other client's cache");
        assert_eq!(other.scan(&[], 1000).len() as u64, 255 - key);
        let now = nodes(&mut client);
        if seen.last() != Some(&now) {
            seen.push(now);
        }
    }
    assert_eq!(seen[..4], [below(3), below(2), below(1), below(0)]);
    assert_eq!(client.counter("nodes shrunk"), 3);
    assert!(client.counter("nodes collapsed") >= 1);
    client.await_free(&mut [other]);
    let stat = client.stat();
    assert_eq!((stat.taken, stat.leaves), (stat.linked(), 0));
}

/// Round trips and atomics of an operation.
fn costs(client: &mut Client, operation: impl FnOnce(&mut Client)) -> (u64, u64) {
    client.endpoint.inner().take();
    operation(client);
    let Costs { round_trips, atomics, .. } = client.endpoint.inner().take();
    (round_trips, atomics)
}

#[test]
fn operations_cost_what_is_said() {
    let home = home(&spec(Keys::Numbers), 8);
    let mut client = Client::open(&home, 1 << 20);
    // The root's node, and one below it for each of two bytes. One has grown, so there is a chunk for such nodes.
    for key in [0x0101, 0x0102, 0x0201, 0x0202, 0x0203, 0x0204, 0x0205] {
        client.put(&number(key), b"v");
    }
    client.get(&number(0x0101));
    client.get(&number(0x0201));
    let get = |client: &mut Client| _ = client.get(&number(0x0101));
    assert_eq!(costs(&mut client, get), (1, 0), "a get of a cached key");
    let mut cold = Client::open(&home, 0);
    assert_eq!(costs(&mut cold, get), (4, 0), "the root slot, two nodes and the leaf");
    let update = |client: &mut Client| client.put(&number(0x0101), b"w");
    assert_eq!(costs(&mut client, update), (3, 2), "an update: read, write and mark, CAS");
    assert_eq!(costs(&mut client, get), (1, 0), "the writer's cache has the new leaf");
    client.put(&number(0x0103), b"v"); // Reserves tokens of locks.
    let insert = |client: &mut Client| client.put(&number(0x0104), b"v");
    assert_eq!(costs(&mut client, insert), (3 + 2, 3), "read the node, write, CAS; lock, unlock");
    let grow = |client: &mut Client| client.put(&number(0x0105), b"v");
    assert_eq!(
        costs(&mut client, grow),
        (3 + 2 + 2, 8),
        "also: read a slot again, freeze a node and 4 slots"
    );
    let split = |client: &mut Client| client.put(&number(0x01_0000_0101), b"v");
    assert_eq!(costs(&mut client, split), (3, 1), "a path split: read the node, write, CAS");
    client.put(&number(0xff_0000_0000_0101), b"v");
    client.get(&number(0xff_0000_0000_0101));
    let split = |client: &mut Client| client.put(&number(0xff_0000_0000_0201), b"v");
    assert_eq!(costs(&mut client, split), (3, 1), "a leaf split: read the leaf, write, CAS");
    client.get(&number(0x0102)); // The node has grown since it was cached.
    let delete = |client: &mut Client| assert!(client.delete(&number(0x0102)));
    assert_eq!(costs(&mut client, delete), (4, 2), "read, mark, CAS; read the node");
}

#[test]
fn a_get_with_an_outdated_slot_costs_two_waves_more() {
    let home = home(&spec(Keys::Numbers), 8);
    let (mut one, mut two) = (Client::open(&home, 1 << 20), Client::open(&home, 1 << 20));
    for key in [0x0101, 0x0102, 0x0201, 0x0202] {
        one.put(&number(key), b"v");
    }
    assert_eq!(two.get(&number(0x0101)), Some(b"v".to_vec()));
    one.put(&number(0x0101), b"w");
    let get = |client: &mut Client| assert_eq!(client.get(&number(0x0101)), Some(b"w".to_vec()));
    assert_eq!(
        costs(&mut two, get),
        (3, 0),
        "the old leaf, the slot with its node's first words, the new leaf"
    );
    assert_eq!(costs(&mut two, get), (1, 0));
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
    assert!(one.counter("cache invalidations") > 0 && two.counter("cached nodes replaced") > 0);
}

/// Puts four keys into one node, and the fifth one by a client for which `then` decides the fate of each chain with
/// this number or a later one. Returns the result of that put, if it has ended.
fn growth_is_cut(
    at: u64,
    then: impl Fn() -> Then + 'static,
) -> (Home, Client, Option<Result<(), IndexError>>) {
    let home = home(&Spec { lease_us: 20_000, ..spec(Keys::Numbers) }, 1);
    let mut dead = Client::open(&home, 0);
    dead.endpoint.stop_sleeps();
    for key in 1..=4 {
        dead.put(&number(key), b"old");
    }
    dead.put(&number(1 << 20), b"x");
    dead.put(&number(1 << 20 | 1), b"x");
    let mut chains = 0;
    dead.endpoint.before_each(move || {
        chains += 1;
        if chains == at { then() } else { Then::Runs }
    });
    let put = dead.try_run(async |index| index.put(&number(5), b"new").await);
    (home, dead, put)
}

#[test]
fn a_client_may_die_in_each_step_of_a_growth() {
    let mut thawed = 0;
    for at in 1..=12 {
        for ran in [Ran::No, Ran::Yes] {
            let (home, dead, _) = growth_is_cut(at, move || match ran {
                Ran::Yes => Then::Lost(Ran::Yes),
                _ => Then::Stops,
            });
            let mut other = Client::open(&home, 1 << 20);
            for key in 1..=4 {
                assert_eq!(other.get(&number(key)), Some(b"old".to_vec()), "readers need no lock");
            }
            // An update of a key in the node, which may be frozen, and an insert.
            other.put(&number(2), b"next");
            other.put(&number(6), b"next");
            assert_eq!(other.get(&number(2)), Some(b"next".to_vec()));
            assert!(matches!(other.get(&number(5)).as_deref(), None | Some(b"new")));
            thawed += other.counter("nodes thawed");
            drop(dead);
            other.run(async |index| index.heal().await);
            other.await_free(&mut []);
            let stat = other.stat();
            assert_eq!((stat.locked, stat.taken), (0, stat.linked()), "chain {at}: {stat:?}");
            assert_eq!(other.scan(&[], 100).len() as u64, stat.leaves);
        }
    }
    assert!(thawed >= 2, "a frozen node is left behind after the freeze and after the WRITE of the copy");
}

/// Loses the answer of each chain of a growth in turn, so that it may still run. Returns the numbers of held locks
/// after puts with an unknown outcome: the slot above may be swung later.
fn locks_while_a_request_may_still_run() -> Vec<u64> {
    let mut locks = Vec::new();
    for at in 1..=16 {
        let (home, _dead, put) = growth_is_cut(at, || Then::Lost(Ran::Unknown));
        if put.is_some_and(|put| put.is_err_and(|error| error.ran() == Ran::Unknown)) {
            locks.push(Client::open(&home, 0).stat().locked);
        }
    }
    locks
}

#[test]
fn a_lock_is_kept_while_a_request_under_it_may_still_run() {
    assert_eq!(locks_while_a_request_may_still_run(), [1]);
}

#[cfg(farside_mutants)]
#[test]
fn a_lock_is_freed_too_early_by_a_mutant() {
    use farside_remote::mutant::Mutant;
    Mutant::switch(Some(farside_systems::index::art::mutants::FREED_TOO_EARLY));
    let locks = std::panic::catch_unwind(locks_while_a_request_may_still_run);
    Mutant::switch(None);
    assert!(!matches!(locks, Ok(locks) if locks == [1]), "the mutant lives");
}

#[test]
fn keys_below_a_frozen_node_are_deleted_in_a_full_store() {
    let mut thawed = 0;
    for at in 4..=16 {
        let (home, dead, _) = growth_is_cut(at, || Then::Stops);
        let mut other = Client::open(&home, 1 << 20);
        let mut keys = 1_u64 << 32..;
        let full = loop {
            let key = number(keys.next().expect("there is no end"));
            if let Err(error) =
                other.try_run(async |index| index.put(&key, b"v").await).expect("the task runs")
            {
                break error;
            }
        };
        assert_eq!(full, IndexError::OutOfMemory);
        assert!((1..=4).all(|key| other.delete(&number(key))), "the growth ends before chain {at}");
        thawed += other.counter("nodes thawed");
        drop(dead);
    }
    assert!(thawed >= 2, "a frozen node is left behind after the freeze and after the WRITE of the copy");
}

/// Updates a key of a full node while another client replaces the node by a larger one: before each chain of the
/// growth in turn. Returns the values that were lost.
fn updates_during_growth() -> Vec<u32> {
    let mut lost = Vec::new();
    for at in 1..=10 {
        let home = home(&spec(Keys::Numbers), 8);
        let mut one = Client::open(&home, 0);
        one.endpoint.stop_sleeps();
        let two = Rc::new(RefCell::new(Client::impatient(&home, 1 << 20)));
        for key in 1..=4 {
            one.put(&number(key), b"old");
        }
        assert_eq!(two.borrow_mut().get(&number(2)), Some(b"old".to_vec()));
        let (theirs, was_busy) = (Rc::clone(&two), Rc::new(Cell::new(false)));
        let noted = Rc::clone(&was_busy);
        one.endpoint.before_chain(at, move || {
            let put = theirs.borrow_mut().try_run(async |index| index.put(&number(2), b"new").await);
            assert!(matches!(put, Some(Ok(()) | Err(IndexError::Busy))), "{put:?}");
            // While the node is frozen and its lock is held, an update waits, and gives up here.
            noted.set(put == Some(Err(IndexError::Busy)));
        });
        one.put(&number(5), b"v");
        let expected = if was_busy.get() { b"old" } else { b"new" };
        if one.get(&number(2)) != Some(expected.to_vec()) {
            lost.push(at);
        }
    }
    lost
}

#[test]
fn an_update_during_a_growth_is_not_lost() {
    assert_eq!(updates_during_growth(), [0_u32; 0]);
}

#[test]
fn puts_of_deleted_keys_during_a_copy_are_kept() {
    let mut grown = 0;
    for at in 1..=8 {
        let home = home(&spec(Keys::Numbers), 8);
        let mut one = Client::open(&home, 0);
        one.endpoint.stop_sleeps();
        let two = Rc::new(RefCell::new(Client::impatient(&home, 0)));
        (1..=16).for_each(|key| one.put(&number(key), b"old"));
        assert!((1..=8).all(|key| one.delete(&number(key))));
        let (theirs, done) = (Rc::clone(&two), Rc::new(RefCell::new(Vec::new())));
        let noted = Rc::clone(&done);
        // A copy has room for the 8 keys that are left and the new one. Meanwhile, the empty slots are filled again.
        one.endpoint.before_chain(at, move || {
            for key in 1..=8 {
                let put = theirs.borrow_mut().try_run(async |index| index.put(&number(key), b"new").await);
                match put {
                    Some(Ok(())) => noted.borrow_mut().push(key),
                    Some(Err(IndexError::Busy)) => break,
                    other => panic!("{other:?}"),
                }
            }
        });
        one.put(&number(17), b"v");
        assert!(done.borrow().iter().all(|key| one.get(&number(*key)) == Some(b"new".to_vec())));
        assert!((9..=17).all(|key| one.get(&number(key)).is_some()), "before chain {at}");
        assert_eq!(one.scan(&[], 100).len(), 9 + done.borrow().len());
        grown += one.counter("nodes grown from 16");
    }
    assert!(grown > 0, "the slots are filled between the READ of the node and the freeze");
}

#[test]
fn a_client_that_dies_with_a_lock_is_fenced() {
    let home = home(&Spec { lease_us: 20_000, ..spec(Keys::Numbers) }, 8);
    let mut dead = Client::open(&home, 0);
    dead.endpoint.stop_sleeps();
    dead.put(&number(1), b"v");
    dead.put(&number(2), b"v");
    // The root slot, two nodes, the lock, the leaf; it dies before the CAS.
    dead.endpoint.of_chain(6, Then::Stops);
    assert_eq!(dead.try_run(async |index| index.put(&number(3), b"v").await), None);
    let mut other = Client::open(&home, 0);
    assert_eq!(other.get(&number(3)), None);
    other.put(&number(1), b"w");
    assert_eq!(other.index.recovered(), 0, "an update needs no lock");
    other.put(&number(4), b"w");
    assert_eq!(other.index.recovered(), 1);
    assert_eq!((other.get(&number(1)), other.get(&number(4))), (Some(b"w".to_vec()), Some(b"w".to_vec())));
    drop(dead);
}

/// Lets a client die with a lock. A second one heals, and the node refuses the chain of its recovery behind this number
/// of others. Then a third one heals. Returns the result of the second one, and the number of locks that are held.
fn healed_with_a_refused_chain(chains: u32) -> (Result<(), IndexError>, u64) {
    let home = home(&Spec { lease_us: 20_000, ..spec(Keys::Numbers) }, 8);
    let mut dead = Client::open(&home, 0);
    dead.endpoint.stop_sleeps();
    (1..=2).for_each(|key| dead.put(&number(key), b"v"));
    // The root slot, two nodes, the lock, the leaf; it dies before the CAS.
    dead.endpoint.of_chain(6, Then::Stops);
    assert_eq!(dead.try_run(async |index| index.put(&number(3), b"v").await), None);
    let mut second = Client::open(&home, 0);
    let (endpoint, is_fenced) = (Rc::clone(&second.endpoint), Rc::new(Cell::new(false)));
    let noted = Rc::clone(&is_fenced);
    endpoint.before_each_call(move || noted.set(true));
    let mut left = chains;
    endpoint.refuse_if(move || {
        if !is_fenced.get() {
            return false;
        }
        let is_refused = left == 0;
        left = left.wrapping_sub(1);
        is_refused
    });
    let healed = second.try_run(async |index| index.heal().await).unwrap_or(Err(IndexError::Lost));
    drop(second);
    let mut third = Client::open(&home, 0);
    third.run(async |index| index.heal().await);
    (healed, third.stat().locked)
}

#[test]
fn a_lock_is_recovered_although_the_first_recovery_was_refused() {
    let refused = (0..8).filter(|&chains| {
        let (healed, held) = healed_with_a_refused_chain(chains);
        assert_eq!(held, 0, "chain {chains}: {healed:?}");
        healed.is_err()
    });
    assert!(refused.count() >= 3, "the records, the locks and the lease are read");
}

#[test]
fn the_tasks_of_a_client_lock_a_node_in_turn() {
    const TASKS: u64 = 16;
    const KEYS: u64 = 500;
    // When the client closes, its task waits for parts of the lease until others can reach no replaced node any more.
    let home = home(&Spec { lanes: TASKS as u16, lease_us: 8_000_000, ..spec(Keys::Numbers) }, 8);
    let Client { endpoint, index, keeper, .. } = Client::open(&home, 1 << 20);
    let failures = Rc::new(Cell::new(0));
    let mut core = Core::new(endpoint.inner().inner());
    core.spawn(keeper);
    for task in 0..TASKS {
        let (mut handle, failures) = (index.another(), Rc::clone(&failures));
        core.spawn(async move {
            for key in (task..KEYS).step_by(TASKS as usize) {
                handle.put(&number(key), b"v").await.expect("a put");
            }
            failures.set(counter_of(&handle, "lock failures"));
        });
    }
    drop(index);
    core.run();
    assert_eq!(failures.get(), 0, "no lane asks for a lock that another lane has");
    let mut other = Client::open(&home, 0);
    assert_eq!(other.scan(&[], usize::MAX).len() as u64, KEYS);
}

#[test]
fn keys_and_values_that_a_store_cannot_have_are_refused() {
    let home = home(&spec(Keys::Strings), 8);
    let mut client = Client::open(&home, 0);
    let mut put = |key: &[u8], value: &[u8]| client.try_run(async |index| index.put(key, value).await);
    assert_eq!(put(b"a\0", b""), Some(Err(IndexError::ZeroByte)));
    assert_eq!(put(b"a", &[0; 21]), Some(Err(IndexError::ValueLength { len: 21, max: 20 })));
    assert_eq!(put(&[1; 128], &[1; 20]), Some(Ok(())));
}

#[test]
fn memory_of_replaced_leaves_is_used_again() {
    const KEYS: u64 = 2000;
    const ROUNDS: u64 = 10;
    // Room for the leaves of about six rounds.
    let home = home(&Spec { lease_us: 200_000, ..spec(Keys::Numbers) }, 1);
    let (mut client, mut idle) = (Client::open(&home, 1 << 20), Client::open(&home, 0));
    for round in 0..ROUNDS {
        for key in 0..KEYS {
            client.put(&number(key), &round.to_le_bytes());
            if key % 64 == 0 {
                // The other client renews its lease.
                idle.get(&number(key));
            }
        }
        client.await_free(std::slice::from_mut(&mut idle));
    }
    assert!((0..KEYS).all(|key| idle.get(&number(key)) == Some((ROUNDS - 1).to_le_bytes().to_vec())));
}

#[test]
fn damaged_memory_causes_errors_and_neither_panics_nor_endless_loops() {
    let mut draws = Draws(99);
    for keys in [Keys::Numbers, Keys::Strings] {
        let spec = Spec { lease_us: 20_000, chunk: 1 << 13, ..spec(keys) };
        let home = Home::new(24);
        let store = home.create_of(KIND, "s", 1, &serde_json::to_string(&spec).expect("plain data"));
        let (mut errors, mut client) = (0, None);
        for round in 0..60 {
            if client.is_none() {
                // The table of leases may be damaged, so that no id is free.
                client =
                    std::panic::catch_unwind(AssertUnwindSafe(|| Client::impatient(&home, 1 << 16))).ok();
            }
            let Some(open) = &mut client else { break };
            let value = draws.bytes(8);
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
            }
            if open.has_ended {
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
            run(endpoint.inner(), endpoint.run(NODE, &words, &mut reply)).expect("the node lives");
        }
        println!("{keys:?}: {errors} errors");
    }
}

#[cfg(farside_mutants)]
#[test]
fn an_update_is_lost_if_a_node_is_copied_before_it_is_frozen() {
    use farside_remote::mutant::Mutant;
    Mutant::switch(Some(farside_systems::index::art::mutants::COPIED_UNFROZEN));
    let lost = std::panic::catch_unwind(updates_during_growth);
    Mutant::switch(None);
    assert!(!matches!(lost, Ok(lost) if lost.is_empty()), "the mutant lives");
}

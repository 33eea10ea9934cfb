//! A node that runs one step at a time, and clients that act between the steps. The test determines the order.
//!
//! Invariant: the test runs in a single thread, so a failure is reproducible. States between two accesses of one step
//! are not tested here.

use super::audit::Audit;
use super::script;
use super::{Client, go, run, value_of};
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::count::Count;
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_node::{Node, Progress};
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::SessionId;
use farside_remote::control::{Answer, Ask, NodeInfo, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::mutant::Mutant;
use farside_remote::{FabricError, Memory, NodeId};
use farside_systems::kv::prism_kv::layout::{Slot, Table};
use farside_systems::kv::prism_kv::service::PrismKvKind;
use farside_systems::kv::prism_kv::{KIND, PrismKv};
use farside_systems::kv::{Kv, KvError};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

pub(crate) struct Stepped {
    memory: Arc<Mapping>,
    node: Mutex<Node<Mapping>>,
    /// State of the random generator.
    drawn: Mutex<u64>,
    /// Number of items for which the node rebuilds the table just before it handles the next `GrowStore`.
    before_growth: Mutex<Option<u64>>,
}

/// Number of the first slots on its path that a new key may take in the next table during a rebuild.
const PROBES_OF_NEW_KEYS: usize = 64;
/// Maximum number of steps; every scenario takes fewer.
const STEPS_MAX: u32 = 200_000;

impl Stepped {
    /// Creates a node with a store `s`. A part of its memory is unassigned.
    fn new() -> Arc<Stepped> {
        let memory = Arc::new(Mapping::create(24 << 20, Pages::Small).expect("memory"));
        let node = Node::new(&*memory, vec![Box::new(PrismKvKind)], NodeInfo::default());
        let node = Arc::new(Stepped {
            memory,
            node: Mutex::new(node),
            drawn: Mutex::new(1),
            before_growth: Mutex::default(),
        });
        let parameters = r#"{"items": 1}"#.into();
        node.ask(Ask::CreateStore { name: "s".into(), kind: KIND.into(), parameters, quota: 12 << 20 });
        node
    }

    fn node(&self) -> MutexGuard<'_, Node<Mapping>> {
        self.node.lock().expect("one thread")
    }

    fn entropy(&self) -> [u64; 2] {
        let mut drawn = self.drawn.lock().expect("one thread");
        *drawn = script::mix(*drawn);
        [*drawn, script::mix(!*drawn)]
    }

    /// Sends a request to the node, and runs steps until the node answers.
    fn try_ask(&self, ask: Ask) -> Result<Answer, String> {
        let entropy = self.entropy();
        let ticket = self.node().ask(ask, entropy);
        for _ in 0..STEPS_MAX {
            if let Some((of, answer)) = self.node().answer() {
                assert_eq!(of, ticket, "one request at a time");
                return answer;
            }
            self.step();
        }
        panic!("no answer");
    }

    fn ask(&self, ask: Ask) -> Answer {
        self.try_ask(ask).unwrap_or_else(|refusal| panic!("refused: {refusal}"))
    }

    fn store(&self) -> Store {
        match self.ask(Ask::OpenStore { name: "s".into() }) {
            Answer::Store(store) => store,
            other => panic!("expected a store, got {other:?}"),
        }
    }

    /// Requests a rebuild for `items` items without running a step.
    fn begin_rebuild(&self, items: u64) {
        let parameters = format!(r#"{{"items": {items}}}"#);
        let entropy = self.entropy();
        let mut node = self.node();
        let ticket = node.ask(Ask::RebuildStore { name: "s".into(), parameters }, entropy);
        node.cancel(&[ticket].into());
    }

    /// Runs steps until the catalog has both tables.
    fn publish(&self) {
        for _ in 0..STEPS_MAX {
            if self.node().catalog().get("s").expect("the store exists").store.former.is_some() {
                return;
            }
            self.step();
        }
        panic!("the rebuild does not begin");
    }

    /// Runs one step. Returns false if the node had nothing to do.
    fn step(&self) -> bool {
        let Ok(progress) = self.node().step(&self.memory);
        progress == Progress::Made
    }

    /// Runs steps until the node has nothing to do, even after the host's periodic work.
    fn idle(&self) {
        for _ in 0..20 {
            self.poll_shared();
            self.settle();
        }
    }

    /// Does the host's periodic work.
    fn poll_shared(&self) {
        self.node().poll_shared();
        self.node().grow_crowded(|| self.entropy());
    }

    /// Runs steps until the node has nothing to do.
    fn settle(&self) {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < STEPS_MAX, "the node is still busy");
        }
    }

    /// Returns the oldest table that is being left.
    fn former(&self) -> Table {
        let store = self.store();
        let (parameters, extent) = store.formers()[0];
        Table::new(parameters, extent).expect("a table")
    }

    /// Returns the newest table.
    fn next(&self) -> Table {
        let store = self.store();
        Table::new(&store.parameters, store.extent()).expect("a table")
    }

    fn load(&self, table: &Table, index: u64) -> Slot {
        let Ok(word) = self.memory.load(table.slot_at(index).raw(), farside_remote::Width::W16);
        Slot::of(word)
    }

    /// Runs steps until no new key can enter the former table.
    fn close(&self) {
        let former = self.former();
        for _ in 0..STEPS_MAX {
            if (0..former.spec.slots).all(|index| !self.load(&former, index).is_empty()) {
                return;
            }
            self.step();
        }
        panic!("the table is not closed");
    }

    /// Stops the node and its clients, and restores another node from the memory.
    fn die(&self) {
        let Ok(restored) = Node::restore(&*self.memory, vec![Box::new(PrismKvKind)], NodeInfo::default());
        let mut node = restored.expect("its memory is sound");
        while node.recover_step(&*self.memory) == Ok(Ok(false)) {}
        *self.node() = node;
    }

    fn client(self: &Arc<Stepped>) -> Client {
        let node: Arc<dyn LocalNode> = Arc::clone(self) as _;
        let endpoint = Rc::new(Count::new(local::connect(&node, NodeId(0)).expect("a session")));
        block_on((), PrismKv::open(endpoint, NodeId(0), "s")).expect("the store exists")
    }

    /// Checks that the store has a single table, that every buffer is accounted for, and that no segment of another
    /// table is kept.
    fn audit(&self) {
        self.idle();
        self.ask(Ask::Scan { name: "s".into() });
        self.idle();
        let store = self.store();
        assert_eq!(store.former, None, "the rebuild has ended");
        Audit::of(&self.memory, &store).check();
        let Answer::StoreStat(stat) = self.ask(Ask::StoreStat { name: "s".into() }) else {
            panic!("no figures")
        };
        assert_eq!(stat.table_bytes, store.table_len, "no other table is kept");
    }
}

impl LocalNode for Stepped {
    fn memory(&self) -> &Arc<Mapping> {
        &self.memory
    }

    fn open_session(&self) -> Result<SessionId, FabricError> {
        let Ok(opened) = self.node().open_session(&self.memory, 1, 1);
        Ok(opened.expect("a slot is free"))
    }

    fn close_session(&self, session: SessionId) {
        self.node().end_session(session, true);
    }

    fn call(
        &self,
        _: SessionId,
        _: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let ask = serde_json::from_slice(request).expect("a request");
        if matches!(ask, Ask::GrowStore { .. })
            && let Some(items) = self.before_growth.lock().expect("one thread").take()
        {
            self.begin_rebuild(items);
            self.idle();
        }
        let answered = self.try_ask(ask).map_err(FabricError::Refused)?;
        *answer = serde_json::to_vec(&answered).expect("plain data");
        Ok(())
    }

    fn ring(&self) {
        self.node().poll_shared();
        while self.step() {}
    }
}

/// Scenarios, each with its name. The correct code passes every scenario, and each scenario kills a mutant.
pub(crate) const CASES: &[(&str, fn())] = &[
    ("every_step_among_operations_of_clients_with_any_catalog", every_step_among_operations),
    ("keys_without_a_place_move_to_a_further_table", no_place),
    ("a_new_key_is_seen_by_a_client_of_the_former_table", a_new_key_is_seen),
    ("a_frozen_slot_is_waited_for_and_moved_by_the_next_node", a_frozen_slot_is_waited_for),
    ("a_version_from_before_a_delete_never_matches", a_version_of_an_earlier_life),
    ("a_table_is_kept_while_a_chain_may_access_it", a_table_stays),
    ("keys_that_collide_in_two_tables_move_to_the_third", chosen_keys),
    ("keys_without_a_place_can_be_deleted_without_free_memory", no_place_nor_memory),
    ("a_put_succeeds_after_its_full_table_was_replaced", a_full_path),
];

/// Clients run operations between the steps of a rebuild. One client knows only the former table, one client knows
/// both tables, and one client is opened during the rebuild. In every third round, the node fails once, at a random
/// step.
pub(crate) fn every_step_among_operations() {
    for round in 0..24u64 {
        let node = Stepped::new();
        let mut random = round + 1;
        let mut draw = |below: u64| {
            random = script::mix(random);
            random % below
        };
        let mut model: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        let mut clients = vec![node.client(), node.client().with_slot_cache(20), node.client()];
        let dies_at = (round % 3 == 0).then(|| draw(1200));
        let mut steps = 0;
        for _ in 0..2 {
            for key in 0..90 {
                put(&mut clients[0], &mut model, key, draw(3));
            }
            node.begin_rebuild([1, 200, 2000][draw(3) as usize]);
            loop {
                if dies_at == Some(steps) {
                    clients.clear();
                    node.die();
                    clients = vec![node.client(), node.client().with_slot_cache(20), node.client()];
                }
                steps += 1;
                if draw(40) == 0 {
                    node.node().poll_shared();
                }
                if !node.step() && node.catalog_is_settled() {
                    break;
                }
                if draw(200) == 0 {
                    clients[2] = node.client();
                }
                // Most steps of a node are of modules that have nothing to do.
                if draw(6) != 0 {
                    continue;
                }
                let who = draw(3) as usize;
                let key = draw(120);
                match draw(6) {
                    0 => {
                        let had = model.remove(&key).is_some();
                        assert_eq!(
                            go!(clients[who], delete(&name(key))),
                            Ok(had),
                            "round {round}, key {key}"
                        );
                    }
                    1 | 2 => put(&mut clients[who], &mut model, key, draw(3)),
                    3 => {
                        let stored = go!(clients[who], put_if_absent(&name(key), b"new")).expect("put");
                        assert_eq!(stored, !model.contains_key(&key), "round {round}, key {key}");
                        model.entry(key).or_insert_with(|| b"new".to_vec());
                    }
                    _ => {
                        let found = value_of(&mut clients[who], &name(key));
                        assert!(found.as_ref() == model.get(&key), "round {round}, key {key}");
                    }
                }
                // All clients see the result of each operation.
                for client in &mut clients {
                    let found = value_of(client, &name(key));
                    assert!(found.as_ref() == model.get(&key), "round {round}, key {key}");
                }
            }
        }
        for client in &mut clients {
            for key in 0..120 {
                let found = value_of(client, &name(key));
                assert!(found.as_ref() == model.get(&key), "round {round}, key {key}");
            }
        }
        drop(clients);
        node.audit();
    }
}

fn name(key: u64) -> Vec<u8> {
    key.to_be_bytes().to_vec()
}

fn put(client: &mut Client, model: &mut BTreeMap<u64, Vec<u8>>, key: u64, kind: u64) {
    let value = script::value(key, model.len() as u64, [10, 300, 70_000][kind as usize]);
    go!(client, put(&name(key), &value)).expect("stored");
    model.insert(key, value);
}

impl Stepped {
    fn catalog_is_settled(&self) -> bool {
        let mut node = self.node();
        node.poll_shared();
        let entry = node.catalog().get("s").expect("the store exists");
        entry.rebuild.is_none()
    }
}

pub(crate) fn a_new_key_is_seen() {
    let node = Stepped::new();
    let mut stale = node.client();
    go!(stale, put(b"there", b"1")).expect("stored");
    node.begin_rebuild(500);
    node.publish();
    let mut fresh = node.client();
    assert!(node.store().former.is_some());
    for n in 0..40u64 {
        go!(fresh, put(&n.to_be_bytes(), b"new")).expect("stored");
        assert_eq!(value_of(&mut stale, &n.to_be_bytes()).as_deref(), Some(&b"new"[..]), "{n}");
        node.step();
    }
    drop((stale, fresh));
    node.audit();
}

/// The node fails after it has frozen a slot and written the slot's word into the next table.
pub(crate) fn a_frozen_slot_is_waited_for() {
    let node = Stepped::new();
    let mut client = node.client();
    go!(client, put(b"k", b"old")).expect("stored");
    node.begin_rebuild(500);
    node.publish();
    let (former, next) = (node.former(), node.next());
    let at = |table: &Table| table.slot_at(table.probe(b"k").next().expect("a slot")).raw();
    for _ in 0..1 + former.spec.slots / 8 {
        node.step();
    }
    let word = node.load(&former, former.probe(b"k").next().expect("a slot"));
    assert!(!word.is_frozen() && !word.is_empty(), "the slot is not yet moved: {word:?}");
    let exchange = |at: u64, old: Slot, new: Slot| {
        let Ok(Ok(())) = node.memory.exchange(at, farside_remote::Width::W16, old.word(), new.word()) else {
            panic!("no other process uses the memory")
        };
    };
    exchange(at(&former), word, word.frozen());
    exchange(at(&next), Slot::default(), word);
    let mut both = node.client();
    assert_eq!(value_of(&mut client, b"k").as_deref(), Some(&b"old"[..]), "a frozen slot can be read");
    for client in [&mut client, &mut both] {
        assert_eq!(go!(client, put(b"k", b"new")), Err(KvError::NotMoved));
    }
    drop((client, both));
    node.die();
    node.idle();
    let mut client = node.client();
    assert_eq!(value_of(&mut client, b"k").as_deref(), Some(&b"old"[..]));
    go!(client, put(b"k", b"new")).expect("stored");
    assert_eq!(value_of(&mut client, b"k").as_deref(), Some(&b"new"[..]));
    drop(client);
    node.audit();
}

pub(crate) fn a_version_of_an_earlier_life() {
    let node = Stepped::new();
    let mut client = node.client();
    go!(client, put(b"k", b"before the delete")).expect("stored");
    let version = go!(client, get(b"k")).expect("read").expect("present").version;
    assert!(go!(client, delete(b"k")).expect("deleted"));
    node.begin_rebuild(100);
    node.idle();
    go!(client, put(b"k", b"after the delete")).expect("stored");
    let stored = go!(client, compare_and_put(b"k", version, b"lost update")).expect("compared");
    assert!(stored.is_err(), "the version is from before the delete");
    drop(client);
    node.audit();
}

pub(crate) fn a_table_stays() {
    let node = Stepped::new();
    let mut client = node.client();
    go!(client, put(b"k", b"v")).expect("stored");
    let former = node.store();
    let segment = node.memory.geometry().segment_of(former.table_at).expect("a segment");
    // The turn does not end: the node must assume that a chain is still accessing memory.
    let endpoint = Rc::clone(client.fabric());
    let polled = Cell::new(false);
    let mut get = std::pin::pin!(client.get(b"k"));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    polled.set(get.as_mut().poll(&mut context).is_ready());
    assert!(polled.get(), "the get does not wait");
    node.begin_rebuild(500);
    node.idle();
    assert!(node.store().former.is_none() && node.store().secret != former.secret, "all keys are moved");
    let Ok(usage) = node.memory.arena().segment(segment).map(|segment| segment.usage);
    assert_eq!(usage, Use::Table, "the former table is kept");
    let again = Ask::RebuildStore { name: "s".into(), parameters: "{}".into() };
    let refusal = node.try_ask(again).expect_err("the former table is still in use");
    assert!(refusal.contains("process 1 may still use the former table"), "{refusal}");
    run(&endpoint, async {});
    node.idle();
    let Ok(usage) = node.memory.arena().segment(segment).map(|segment| segment.usage);
    assert_eq!(usage, Use::Free, "no chain can access it any more");
}

/// The node pauses after it has closed the former table, and new keys take all places in the next table. Then the node
/// continues, and fails once, each time at another step.
pub(crate) fn no_place() {
    for dies_at in (0..2000).step_by(191) {
        let node = Stepped::new();
        let mut client = node.client();
        let mut model = BTreeMap::new();
        for key in 0..60 {
            put(&mut client, &mut model, key, 0);
        }
        node.begin_rebuild(1);
        node.publish();
        node.close();
        // One client knows one table, one knows two, and a third is opened each time.
        let mut clients = vec![client, node.client()];
        fill(&node, 1 << 32);
        let (mut longest, mut steps) = (0, 0);
        while node.store().former.is_some() {
            if steps == dies_at {
                clients.clear();
                node.die();
                clients = vec![node.client(), node.client()];
            }
            node.poll_shared();
            node.step();
            longest = longest.max(node.store().formers().len());
            steps += 1;
            assert!(steps < STEPS_MAX, "the rebuild does not end, with {longest} former tables");
            if steps % 151 == 0 {
                let mut fresh = node.client();
                let client = if steps % 3 == 2 { &mut fresh } else { &mut clients[steps as usize % 3] };
                for key in 0..60 {
                    assert!(value_of(client, &name(key)).as_ref() == model.get(&key), "{key}");
                }
                let (changed, deleted) = (u64::from(steps) % 60, u64::from(steps) / 7 % 60);
                if model.contains_key(&changed) {
                    put(client, &mut model, changed, 1);
                }
                let had = model.remove(&deleted).is_some();
                assert_eq!(go!(client, delete(&name(deleted))), Ok(had), "{deleted}");
            }
        }
        assert_eq!(longest, 2, "the next table has no place for all keys");
        for client in &mut clients {
            for key in 0..60 {
                assert!(value_of(client, &name(key)).as_ref() == model.get(&key), "{key}");
            }
            go!(client, put(b"new", b"value")).expect("stored");
        }
        drop(clients);
        node.audit();
    }
}

/// The test chooses the keys: one key has no place in the next table, and other keys have no place in the table after
/// the next one.
pub(crate) fn chosen_keys() {
    const COLLIDING: usize = 300;
    let node = Stepped::new();
    let mut client = node.client();
    go!(client, put(&name(0), b"value")).expect("stored");
    node.begin_rebuild(200);
    node.publish();
    node.close();
    let mut chosen = vec![0];
    let next = node.next();
    for index in next.probe(&name(0)).filter(|&index| index != next.end()) {
        let of_it = |&key: &u64| next.probe(&name(key)).next() == Some(index);
        chosen.push((1 << 32..).find(of_it).expect("every slot is some key's first slot"));
    }
    for &key in &chosen[1..] {
        go!(client, put(&name(key), b"value")).expect("stored");
    }
    for _ in 0..STEPS_MAX {
        if node.store().formers().len() == 2 {
            break;
        }
        node.poll_shared();
        node.step();
    }
    let further = node.next();
    let colliding = (2 << 32..).filter(|&key| further.probe(&name(key)).next() == Some(7));
    let is_open = |index| index != next.end() && node.load(&next, index).is_empty();
    let has_place = |&key: &u64| next.probe(&name(key)).any(is_open);
    for key in colliding.filter(has_place).take(COLLIDING) {
        go!(client, put(&name(key), b"value")).expect("the middle table is not closed yet");
        chosen.push(key);
    }
    node.idle();
    assert!(node.store().former.is_none() && node.next().spec.epoch == 4, "{:?}", node.store());
    for &key in &chosen {
        assert_eq!(value_of(&mut client, &name(key)).as_deref(), Some(&b"value"[..]), "{key}");
    }
    go!(client, put(b"new", b"value")).expect("stored");
    drop(client);
    node.audit();
}

/// New keys take all places in the next table, and no memory is left for a further table. Deletes need neither a place
/// nor memory.
pub(crate) fn no_place_nor_memory() {
    let node = Stepped::new();
    let mut client = node.client();
    for key in 0..60 {
        go!(client, put(&name(key), b"value")).expect("stored");
    }
    node.begin_rebuild(1);
    node.publish();
    node.close();
    let Answer::NodeInfo(info) = node.ask(Ask::NodeInfo) else { panic!("no figures") };
    let (quota, parameters) = (info.unassigned_bytes - SEGMENT_SIZE, r#"{"items": 1}"#.into());
    node.ask(Ask::CreateStore { name: "other".into(), kind: KIND.into(), parameters, quota });
    fill(&node, 1 << 32);
    node.idle();
    assert!(node.store().former.is_some(), "the next table has no place for all keys");
    let reported = go!(client, put(b"new", b"value")).expect_err("no place for a new key").to_string();
    assert!(reported.contains("needs 1 MiB of adjacent segments, and the node has 0 MiB"), "{reported}");
    for key in 0..60 {
        assert_eq!(value_of(&mut client, &name(key)).as_deref(), Some(&b"value"[..]), "{key}");
    }
    drop(client);
    node.die();
    let mut client = node.client();
    for key in 0..60 {
        assert_eq!(go!(client, delete(&name(key))), Ok(true), "{key}");
    }
    node.idle();
    assert_eq!(node.store().former, None, "no key needs a place any more");
    go!(client, put(b"new", b"value")).expect("stored");
    drop(client);
    node.audit();
}

/// Puts and deletes new keys until the next table has fewer than 30 empty slots and no place for the next key.
fn fill(node: &Arc<Stepped>, first: u64) {
    let next = node.next();
    let mut client = node.client();
    for key in first.. {
        // Only keys that find a place are put: a put of another key would wait for the node.
        let mut path = next.probe(&name(key)).take(PROBES_OF_NEW_KEYS);
        if path.any(|index| node.load(&next, index).is_empty()) {
            go!(client, put(&name(key), b"x")).expect("stored");
            assert!(go!(client, delete(&name(key))).expect("deleted"));
        } else if (0..next.spec.slots).filter(|&index| node.load(&next, index).is_empty()).count() < 30 {
            return;
        }
    }
}

/// A client finds a full path. Before the client's request for a larger table arrives, the node has built such a table.
pub(crate) fn a_full_path() {
    let node = Stepped::new();
    let mut client = node.client();
    for key in 0..256 {
        go!(client, put(&name(key), b"value")).expect("stored");
    }
    *node.before_growth.lock().expect("one thread") = Some(2000);
    go!(client, put(&name(256), b"value")).expect("the larger table has a place");
    assert_eq!(*node.before_growth.lock().expect("one thread"), None, "the client found a full path");
    assert!(go!(client, delete(&name(256))).expect("deleted"));
    drop(client);
    node.audit();
}

/// Whether a scenario passes with this mutant switched on.
pub(crate) fn passes(mutant: Option<Mutant>, case: fn()) -> bool {
    #[cfg(farside_mutants)]
    Mutant::switch(mutant);
    #[cfg(not(farside_mutants))]
    assert_eq!(mutant, None, "mutants are compiled in only for their own test");
    let passed = std::panic::catch_unwind(case).is_ok();
    #[cfg(farside_mutants)]
    Mutant::switch(None);
    passed
}

//! Tests that in the steady state no operation allocates: neither to build its chain, to run it, to wait, nor to
//! return.
//!
//! Invariant: only allocations of the test's own thread count. The node's thread and the harness may allocate.

use crate::support::counting::{Counting, allocations};
use crate::support::{Client, Home};
use farside_fabrics::executor::{Core, block_on, yield_now};
use farside_fabrics::memory::{Mapping, Pages};
use farside_node::served::{Buffers, Calling, Start};
use farside_node::{Node, Progress};
use farside_remote::control::{Answer, Ask, NodeInfo};
use farside_remote::{NodeId, Rights};
use farside_systems::blocks::Blocks;
use farside_systems::kv::chequer::pool::QUARANTINE;
use farside_systems::kv::chequer::request::{self, Outcome, Request};
use farside_systems::kv::prism_kv::PrismKv;
use farside_systems::kv::{AnyKv, Kv, cached_index, chequer, farm_kv, pilaf};
use farside_systems::raw::{self, Raw};
use farside_systems::registry::{self, AnyBlocks, all_kinds};
use farside_systems::system::{Family, Options, Sizing};
use std::cell::Cell;
use std::rc::Rc;

#[global_allocator]
static COUNTING: Counting = Counting;

const OPERATIONS: usize = 10_000;
const WARM_UP: usize = 2_000;
const KEYS_PER_TASK: usize = 8;
const VALUE_SIZE: usize = 512;

#[derive(Clone, Copy, Debug)]
enum Work {
    Get,
    CachedGet,
    Put,
    CachedPut,
    DeleteAndPut,
}

impl Work {
    async fn once(self, client: &mut Client, key: &[u8], value: &[u8]) {
        match self {
            Work::Get | Work::CachedGet => {
                let item = client.get(key).await.expect("a get").expect("the key was put");
                assert_eq!(item.value.len(), VALUE_SIZE);
            }
            Work::Put | Work::CachedPut => client.put(key, value).await.expect("a put"),
            Work::DeleteAndPut => {
                assert!(client.delete(key).await.expect("a delete"));
                client.put(key, value).await.expect("a put");
            }
        }
    }
}

/// Shared state of all tasks of a test. The counting of allocations starts when all tasks have finished their warm-up.
#[derive(Default)]
struct Phase {
    warm: Cell<usize>,
    done: Cell<usize>,
    at_first: Cell<Option<u64>>,
    at_last: Cell<u64>,
}

/// Returns the number of blocks that all tasks together allocate, from the first counted operation to the last.
fn allocations_of(work: Work, tasks: usize) -> u64 {
    let home = Home::new(64);
    home.create("s", 48, r#"{"items": 1000}"#);
    let endpoint = home.endpoint();
    let phase = Phase::default();
    let mut core = Core::new(endpoint.inner());
    for task in 0..tasks {
        let opened = PrismKv::open(Rc::clone(&endpoint), NodeId(0), "s");
        let mut client: Client = block_on((), opened).expect("the store exists");
        if let Work::CachedGet | Work::CachedPut = work {
            client = client.with_slot_cache(2 * KEYS_PER_TASK);
        }
        core.spawn(run_task(client, work, task, tasks, &phase));
    }
    core.run();
    drop(core);
    assert_eq!(phase.done.get(), tasks);
    phase.at_last.get() - phase.at_first.get().expect("every task began")
}

async fn run_task(mut client: Client, work: Work, task: usize, tasks: usize, phase: &Phase) {
    let keys: Vec<[u8; 8]> =
        (0..KEYS_PER_TASK).map(|key| ((task * KEYS_PER_TASK + key) as u64).to_be_bytes()).collect();
    let value = [task as u8; VALUE_SIZE];
    for key in &keys {
        client.put(key, &value).await.expect("a put");
    }
    for turn in 0..WARM_UP {
        work.once(&mut client, &keys[turn % KEYS_PER_TASK], &value).await;
    }
    phase.warm.set(phase.warm.get() + 1);
    while phase.warm.get() < tasks {
        yield_now().await;
    }
    if phase.at_first.get().is_none() {
        phase.at_first.set(Some(allocations()));
    }
    for turn in 0..OPERATIONS.div_ceil(tasks) {
        work.once(&mut client, &keys[turn % KEYS_PER_TASK], &value).await;
    }
    phase.at_last.set(allocations());
    phase.done.set(phase.done.get() + 1);
    // The end of a task may allocate or free. So no task ends before all have finished counting.
    while phase.done.get() < tasks {
        yield_now().await;
    }
}

fn assert_none(work: Work) {
    for tasks in [1, 16] {
        let allocations = allocations_of(work, tasks);
        assert_eq!(allocations, 0, "{OPERATIONS} x {work:?} by {tasks} tasks");
    }
}

#[test]
fn the_allocator_counts_this_thread_and_no_other() {
    let before = allocations();
    let block = std::hint::black_box(Box::new(1));
    assert_eq!(allocations(), before + 1);
    std::thread::spawn(|| drop(std::hint::black_box(vec![0u8; 100]))).join().expect("a thread");
    drop(block);
    let here = allocations();
    assert!(
        here < before + 20,
        "the start of the other thread counts, but not its allocations: {}",
        here - before
    );
}

#[test]
fn a_get_allocates_nothing() {
    assert_none(Work::Get);
    assert_none(Work::CachedGet);
}

#[test]
fn a_put_allocates_nothing() {
    assert_none(Work::Put);
}

#[test]
fn a_put_of_a_cached_slot_allocates_nothing() {
    assert_none(Work::CachedPut);
}

#[test]
fn a_delete_and_a_put_allocate_nothing() {
    assert_none(Work::DeleteAndPut);
}

#[test]
fn a_get_of_a_store_with_calls_allocates_nothing() {
    let of_places = r#"{"items": 1000, "pair": 1000}"#;
    for (kind, parameters) in [
        (pilaf::KIND, r#"{"items": 1000}"#),
        (farm_kv::KIND, of_places),
        // Its cache is warm.
        (cached_index::KIND, of_places),
    ] {
        gets_allocate_nothing(kind, parameters);
    }
}

fn gets_allocate_nothing(kind: &str, parameters: &str) {
    let home = Home::new(16);
    home.create_of(kind, "s", 12, parameters);
    let endpoint = home.endpoint();
    let options = Options::default();
    let opened = AnyKv::open(Rc::clone(&endpoint), 1, "s", &options);
    let mut client = block_on((), opened).expect("the store exists");
    let allocated = Cell::new(None);
    let mut core = Core::new(endpoint.inner());
    core.spawn(async {
        let keys: Vec<[u8; 8]> = (0..KEYS_PER_TASK as u64).map(u64::to_be_bytes).collect();
        for key in &keys {
            client.put(key, &[7; VALUE_SIZE]).await.expect("a put");
        }
        let mut before = 0;
        for turn in 0..WARM_UP + OPERATIONS {
            if turn == WARM_UP {
                before = allocations();
            }
            let got = client.get(&keys[turn % KEYS_PER_TASK]).await.expect("a get");
            assert_eq!(got.map(|item| item.value.len()), Some(VALUE_SIZE));
        }
        allocated.set(Some(allocations() - before));
    });
    core.run();
    drop(core);
    assert_eq!(allocated.get(), Some(0), "{kind}: {OPERATIONS} gets");
}

/// A thread that carries calls to a service keeps its buffers.
#[test]
fn the_service_of_chequer_allocates_nothing_for_puts_and_deletes() {
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    let mut node = Node::new(&memory, all_kinds(), NodeInfo::default());
    let (name, kind, parameters) =
        ("s".to_owned(), chequer::KIND.to_owned(), r#"{"items": 1000}"#.to_owned());
    node.ask(Ask::CreateStore { name, kind, parameters, quota: 8 << 20 }, [3, 4]);
    while node.step(&memory) == Ok(Progress::Made) {}
    let Some((_, Ok(Answer::Store(store)))) = node.answer() else { panic!("no store") };
    let served = node.served(store.region).expect("it is served");
    let (mut buffers, mut request, mut answer) = (Buffers::default(), Vec::new(), Vec::new());
    let key_of_store = store.extent().key;
    let mut ask = |turn: usize, asked: Request<'_>| {
        request.clear();
        asked.encode(&mut request);
        let calling = Calling { key: key_of_store, rights: Rights::ALL, session: Some(1), request: &request };
        let start = Start { now: QUARANTINE * turn as u32, seed: turn as u64 + 1 };
        assert!(
            served.serve(&memory, || start, calling, &mut buffers, &mut answer).is_ok_and(|of| of.is_none())
        );
        assert_eq!(request::Answer::decode(&answer).map(|answer| answer.outcome), Some(Outcome::Done));
    };
    // One of the keys does not fit into its record.
    let keys: Vec<Vec<u8>> = (1..=KEYS_PER_TASK).map(|key| vec![key as u8; 7 * key]).collect();
    let mut before = 0;
    for turn in 0..WARM_UP + OPERATIONS {
        if turn == WARM_UP {
            before = allocations();
        }
        let key = &keys[turn % KEYS_PER_TASK];
        ask(2 * turn, Request::Put { key, value: &[7; VALUE_SIZE] });
        if turn % 3 == 0 {
            ask(2 * turn + 1, Request::Delete { key });
        }
    }
    assert_eq!(allocations() - before, 0, "{OPERATIONS} puts");
}

#[test]
fn no_chain_on_raw_memory_allocates() {
    let home = Home::new(32);
    home.create_of(raw::KIND, "s", 16, "{}");
    let endpoint = home.endpoint();
    let opened = Raw::open(Rc::clone(&endpoint), NodeId(0), "s");
    let mut raw = block_on((), opened).expect("the store exists");
    let allocated = Cell::new(None);
    let mut core = Core::new(endpoint.inner());
    core.spawn(async {
        let bytes = [7; VALUE_SIZE];
        let mut held = raw.pointer(0).await.expect("a READ");
        let mut before = 0;
        for turn in 0..WARM_UP + OPERATIONS {
            if turn == WARM_UP {
                before = allocations();
            }
            raw.write(64, &bytes).await.expect("a WRITE");
            assert_eq!(raw.read(64, VALUE_SIZE as u32).await.expect("a READ"), bytes);
            assert_eq!(raw.fetch_add(0, 1).await, Ok(turn as u64));
            held = raw.put(0, held, &bytes).await.expect("a put");
            assert_eq!(raw.get(0, VALUE_SIZE as u32).await.expect("a get"), bytes);
            yield_now().await; // Ends the turn, so that replaced buffers are freed.
        }
        allocated.set(Some(allocations() - before));
    });
    core.run();
    drop(core);
    assert_eq!(allocated.get(), Some(0), "{OPERATIONS} of each");
}

#[test]
fn reads_and_writes_of_blocks_allocate_nothing() {
    for system in registry::family(Family::Blocks) {
        // There is a buffer for each write. If the node's thread gets no CPU time to free any, no write waits for it.
        let home = Home::new(32);
        let sizing = Sizing { items: Some(64), value_len: VALUE_SIZE, ..Sizing::default() };
        home.create_of(system.kind, "s", 24, &(system.parameters)(&sizing));
        let (endpoint, options) = (home.endpoint(), Options::default());
        let opened = AnyBlocks::open(Rc::clone(&endpoint), NodeId(0), "s", &options);
        let blocks = block_on((), opened).expect("the store exists");
        let allocated = Cell::new(None);
        let mut core = Core::new(endpoint.inner());
        core.spawn(blocks.keeper());
        core.spawn(async {
            let (mut blocks, mut bytes, mut before) = (blocks, [7; VALUE_SIZE], 0);
            for turn in 0..WARM_UP + OPERATIONS {
                if turn == WARM_UP {
                    before = allocations();
                }
                blocks.write(turn as u64 % 8, &bytes).await.expect("written");
                blocks.read(turn as u64 % 8, &mut bytes).await.expect("read");
            }
            allocated.set(Some(allocations() - before));
        });
        core.run();
        drop(core);
        assert_eq!(allocated.get(), Some(0), "{}", system.kind);
    }
}

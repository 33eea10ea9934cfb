//! Datagrams that are lost, duplicated, reordered and delayed, in both directions.

use crate::faults::{WORDS, connect, node_at};
use farside::Pool;
use farside_bench::driver::Tally;
use farside_bench::kv::{Plan, Run};
use farside_bench::workload::Workload;
use farside_fabrics::executor::{Core, block_on};
use farside_fabrics::layer::fault::{Faults, Strikes};
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, fetch_add};
use farside_systems::kv::prism_kv::PrismKv;
use std::cell::RefCell;
use std::rc::Rc;
use zerocopy::little_endian::U64;

const THREADS: u32 = 2;
const TASKS: u32 = 16;
const VALUE: usize = 128;

/// Returns faults: loss, duplication and reordering of datagrams, each with the same probability.
pub(crate) fn lossy(probability: f64) -> Faults {
    Faults { loss: probability, duplicate: probability, reorder: probability, ..Faults::default() }
}

#[test]
fn every_operation_completes_once_under_faults_over_udp() {
    let strikes = every_operation_completes_once("udp", lossy(0.02), 1000);
    let Strikes { lost, duplicated, reordered, .. } = strikes;
    assert!(lost > 0 && duplicated > 0 && reordered > 0, "{strikes}");
}

#[test]
fn every_operation_completes_once_under_delays_over_tcp() {
    let strikes = every_operation_completes_once("tcp", Faults { delay: 0.02, ..Faults::default() }, 1000);
    assert!(strikes.delayed > 0, "{strikes}");
}

/// Each task runs `each` operations of workload A, with verified values, and then adds `each` times to its own word.
/// Returns how often each fault struck.
pub(crate) fn every_operation_completes_once(scheme: &str, faults: Faults, each: u64) -> Strikes {
    let (_node, url) = node_at(&format!("{scheme}://127.0.0.1:0"));
    let pool = connect(&url).with_faults(faults).expect("the fabric can have these faults");
    let mut workload = Workload::resolve("a").expect("a workload");
    workload.records = 1000;
    let plan = Plan {
        workload,
        value_size: VALUE,
        tasks: THREADS * TASKS,
        verify: true,
        by_node: false,
        sampled: 64,
        seed: 42,
    };
    let run = plan.run().expect("a run");
    let drive = |step: &(dyn Fn(&Pool, u32) + Sync)| {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let pool = &pool;
                scope.spawn(move || step(pool, thread));
            }
        });
    };
    drive(&|pool, thread| load(pool, &run, thread));
    let tally = std::sync::Mutex::new(Tally::default());
    drive(&|pool, thread| {
        let done = operate(pool, &run, thread, each);
        tally.lock().expect("no holder of the lock panics").merge(done);
    });
    drive(&|pool, thread| add(pool, thread, each));
    let tally = tally.into_inner().expect("no holder of the lock panicked");
    let strikes = pool.strikes().expect("the pool has faults");
    println!(
        "{scheme}: {} operations, {} errors, {} violations; {strikes}",
        tally.operations(),
        tally.errors,
        tally.violations
    );
    assert_eq!((tally.errors, tally.violations), (0, 0), "{}", tally.failures.join("\n"));
    assert_eq!(tally.operations(), u64::from(THREADS * TASKS) * each);
    strikes
}

fn load(pool: &Pool, run: &Run, thread: u32) {
    let endpoint = Rc::new(pool.endpoint_here().expect("a session"));
    let mut core = Core::new(&endpoint);
    for task in 0..TASKS {
        let opened = block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), "default"));
        let mut kv = opened.expect("a store");
        core.spawn(async move {
            let (first, all) = (thread * TASKS + task, THREADS * TASKS);
            run.load(&mut kv, first.into(), all.into(), |_, _| {}).await.expect("loaded");
        });
    }
    core.run();
}

fn operate(pool: &Pool, run: &Run, thread: u32, each: u64) -> Tally {
    let endpoint = Rc::new(pool.endpoint_here().expect("a session"));
    let drawn = run.thread(thread);
    let mut core = Core::new(&endpoint);
    for task in 0..TASKS {
        let opened = block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), "default"));
        let (mut kv, drawn) = (opened.expect("a store"), &drawn);
        core.spawn(async move {
            run.task(&mut kv, drawn, thread * TASKS + task, each).await;
        });
    }
    core.run();
    drop(core);
    drawn.take_tally()
}

/// Each task adds 1 to its own word, `each` times. An addition that ran twice, or not at all, changes the old value
/// that the next addition returns.
fn add(pool: &Pool, thread: u32, each: u64) {
    let endpoint = Rc::new(pool.endpoint_here().expect("a session"));
    let words = block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), WORDS)).expect("a store");
    let (store, failed) = (words.store().clone(), RefCell::new(None));
    let mut core = Core::new(&endpoint);
    for task in 0..TASKS {
        let (endpoint, store, failed) = (&endpoint, &store, &failed);
        core.spawn(async move {
            let (mut buffer, mut reply, one) = (ChainBuf::new(), Reply::new(), U64::new(1));
            let word = Addr::new(store.table_at + 8 + 16 * u64::from(thread * TASKS + task));
            for turn in 0..each {
                let mut chain = buffer.begin(store.extent().key);
                let old = chain.also(fetch_add(word, &one));
                let ran = endpoint.run(NodeId(0), &chain, &mut reply).await;
                let old = ran.map(|()| reply.get(old).map(|old| old.get()));
                if !matches!(old, Ok(Ok(old)) if old == turn) {
                    failed
                        .borrow_mut()
                        .get_or_insert(format!("addition {turn} of task {task} found {old:?}"));
                    break;
                }
            }
        });
    }
    core.run();
    drop(core);
    assert_eq!(failed.into_inner(), None);
}

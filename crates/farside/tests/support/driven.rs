//! Runs a workload on a store of a node in this process: several threads of many tasks, with every value verified.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use farside::parts::{AnyKv, Endpoint};
use farside::{NewStore, Pool};
use farside_bench::driver::Tally;
use farside_bench::kv::Plan;
use farside_bench::workload::Workload;
use farside_fabrics::executor::{Core, block_on};
use farside_systems::kv::{Fetched, Item, Kv, KvError};
use farside_systems::system::Options;
use std::rc::Rc;
use std::sync::Mutex;

/// Number of tasks per thread.
pub(crate) const TASKS: u32 = 32;
const THREADS: u32 = 2;
const STORE: &str = "driven";

/// The workload to run.
#[derive(Clone, Copy)]
pub(crate) struct Driven<'a> {
    pub(crate) system: &'a str,
    pub(crate) workload: &'a str,
    pub(crate) records: u64,
    /// Number of operations per task.
    pub(crate) each: u64,
    pub(crate) slot_cache: usize,
}

/// Wraps a task's client, for example with planted flaws.
pub(crate) type Wrap<'a> = dyn Fn(AnyKv<Rc<Endpoint>>) -> Client<'a> + Sync + 'a;

/// A task's client of the store.
pub(crate) enum Client<'a> {
    /// The store's client without an interposer.
    Plain(Box<AnyKv<Rc<Endpoint>>>),
    /// The store's client with an interposer between the client and the task.
    Interposed(Box<AnyKv<Rc<Endpoint>>>, &'a dyn Interposer),
}

/// An interposer between a client and a task.
pub(crate) trait Interposer: Sync {
    /// Returns whether to carry out a put. Otherwise the put is acknowledged without effect.
    fn puts(&self, key: &[u8], value: &[u8]) -> bool;
    /// Returns the result of a get that has read `value`.
    fn got(&self, key: &[u8], value: &[u8]) -> GetResult;
}

/// Result of a get, as reported to the task.
pub(crate) enum GetResult {
    /// The value that was read, unchanged.
    Unchanged,
    /// This value in place of the one that was read.
    Other(Vec<u8>),
    /// No value, as if the key were absent.
    Nothing,
}

/// A task's client, and the value that the interposer returned last.
struct TaskClient<'a> {
    client: Client<'a>,
    value: Vec<u8>,
}

impl TaskClient<'_> {
    fn kv(&mut self) -> &mut AnyKv<Rc<Endpoint>> {
        let (Client::Plain(kv) | Client::Interposed(kv, _)) = &mut self.client;
        kv
    }
}

impl Kv for TaskClient<'_> {
    fn kind(&self) -> &'static str {
        let (Client::Plain(kv) | Client::Interposed(kv, _)) = &self.client;
        kv.kind()
    }

    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        let Some(fetched) = self.kv().fetch(key).await? else { return Ok(None) };
        if let Client::Interposed(kv, interposer) = &self.client {
            let value = kv.item(fetched).value;
            self.value = match interposer.got(key, value) {
                GetResult::Unchanged => value.to_vec(),
                GetResult::Other(value) => value,
                GetResult::Nothing => return Ok(None),
            };
        }
        Ok(Some(fetched))
    }

    fn item(&self, fetched: Fetched) -> Item<'_> {
        match &self.client {
            Client::Plain(kv) => kv.item(fetched),
            Client::Interposed(..) => Item { value: &self.value, version: fetched.version },
        }
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        match &self.client {
            Client::Interposed(_, interposer) if !interposer.puts(key, value) => Ok(()),
            _ => self.kv().put(key, value).await,
        }
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.kv().delete(key).await
    }
}

/// Wraps a task's client without an interposer.
pub(crate) fn plain<'a>(kv: AnyKv<Rc<Endpoint>>) -> Client<'a> {
    Client::Plain(Box::new(kv))
}

/// Loads a store and runs the workload. `begin` runs at the start of each thread of the measured phase.
pub(crate) fn drive(driven: Driven<'_>, wrap: &Wrap<'_>, begin: &(dyn Fn() + Sync)) -> Tally {
    let pool = farside::connect("local:64MiB").expect("a node");
    pool.drop_store("default").expect("a node in this process has it");
    let quota = 48 << 20;
    let new = NewStore {
        kind: driven.system.into(),
        // The table also has capacity for the items that some workloads insert.
        items: Some(driven.records + u64::from(THREADS * TASKS) * driven.each / 10),
        ..NewStore::prism_kv(STORE, quota)
    };
    pool.create_store(&new).expect("the node has memory");
    let mut workload = Workload::resolve(driven.workload).expect("a workload");
    workload.records = driven.records;
    let plan = Plan {
        workload,
        value_size: 512,
        tasks: THREADS * TASKS,
        verify: true,
        by_node: false,
        sampled: 64,
        seed: 42,
    };
    let run = plan.run().expect("a run");
    let tally = Mutex::new(Tally::default());
    let threads = |work: &(dyn Fn(u32) + Sync)| {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || work(thread));
            }
        });
    };
    threads(&|thread| {
        on_core(&pool, driven, &plain, async |kv, task| {
            let (first, all) = (thread * TASKS + task, THREADS * TASKS);
            run.load(kv, first.into(), all.into(), |_, _| {}).await.expect("loaded");
        })
    });
    threads(&|thread| {
        begin();
        let drawn = run.thread(thread);
        on_core(&pool, driven, wrap, async |kv, task| {
            run.task(kv, &drawn, thread * TASKS + task, driven.each).await;
        });
        tally.lock().expect("no holder of the lock panics").merge(drawn.take_tally());
    });
    tally.into_inner().expect("no holder of the lock panicked")
}

fn on_core(pool: &Pool, driven: Driven<'_>, wrap: &Wrap<'_>, work: impl AsyncFn(&mut TaskClient<'_>, u32)) {
    let endpoint = Rc::new(pool.endpoint_here().expect("a session"));
    let options = Options { slot_cache: driven.slot_cache, ..Options::default() };
    let mut core = Core::new(&endpoint);
    for task in 0..TASKS {
        let opened =
            block_on(&endpoint, AnyKv::open(Rc::clone(&endpoint), endpoint.nodes(), STORE, &options));
        let client = wrap(opened.expect("a store"));
        let (mut client, work) = (TaskClient { client, value: Vec::new() }, &work);
        core.spawn(async move { work(&mut client, task).await });
    }
    core.run();
}

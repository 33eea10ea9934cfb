//! A store on a node of this process, driven through a workload by threads of many tasks, with every value verified.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use farside::parts::{AnyKv, Endpoint};
use farside::{NewStore, Pool};
use farside_bench::driver::{Plan, Run, Tally};
use farside_bench::workload::Workload;
use farside_fabrics::executor::{Core, block_on};
use farside_remote::NodeId;
use farside_systems::kv::pilaf::Pilaf;
use farside_systems::kv::prism_kv::PrismKv;
use farside_systems::kv::{Item, Kv, KvError};
use std::rc::Rc;
use std::sync::Mutex;

/// Tasks of each thread.
pub(crate) const TASKS: u32 = 32;
const THREADS: u32 = 2;
const STORE: &str = "driven";

/// What is to be driven.
#[derive(Clone, Copy)]
pub(crate) struct Driven<'a> {
    pub(crate) system: &'a str,
    pub(crate) workload: &'a str,
    pub(crate) records: u64,
    /// Operations of each task.
    pub(crate) each: u64,
    pub(crate) slot_cache: usize,
}

/// A client through which a task asks, whatever it does on the way. Threads are told apart by their number.
pub(crate) type Wrap<'a> = dyn Fn(AnyKv<Rc<Endpoint>>) -> Client<'a> + Sync + 'a;

/// A client of the store.
pub(crate) enum Client<'a> {
    /// As it is.
    PrismKv(Box<PrismKv<Rc<Endpoint>>>),
    /// As it is.
    Pilaf(Box<Pilaf<Rc<Endpoint>>>),
    /// With something between it and who asks.
    Through(Box<AnyKv<Rc<Endpoint>>>, &'a dyn Between),
}

/// What stands between a client and who asks.
pub(crate) trait Between: Sync {
    /// Whether a put is to be done.
    fn puts(&self, key: &[u8], value: &[u8]) -> bool;
    /// What is told of what was read.
    fn got(&self, key: &[u8], value: &[u8]) -> Told;
}

pub(crate) enum Told {
    /// The value.
    AsItIs,
    /// This one in its place.
    Other(Vec<u8>),
    /// That there is none.
    Nothing,
}

/// A client, and what it told last.
struct Asked<'a> {
    client: Client<'a>,
    told: Vec<u8>,
}

impl Kv for Asked<'_> {
    async fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        match &mut self.client {
            Client::PrismKv(kv) => kv.get(key).await,
            Client::Pilaf(kv) => kv.get(key).await,
            Client::Through(kv, between) => {
                let Some(item) = kv.get(key).await? else { return Ok(None) };
                let version = item.version;
                self.told = match between.got(key, item.value) {
                    Told::AsItIs => item.value.to_vec(),
                    Told::Other(value) => value,
                    Told::Nothing => return Ok(None),
                };
                Ok(Some(Item { value: &self.told, version }))
            }
        }
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        match &mut self.client {
            Client::PrismKv(kv) => kv.put(key, value).await,
            Client::Pilaf(kv) => kv.put(key, value).await,
            Client::Through(kv, between) => {
                if between.puts(key, value) {
                    kv.put(key, value).await
                } else {
                    Ok(())
                }
            }
        }
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        match &mut self.client {
            Client::PrismKv(kv) => kv.delete(key).await,
            Client::Pilaf(kv) => kv.delete(key).await,
            Client::Through(kv, _) => kv.delete(key).await,
        }
    }
}

/// As it is.
pub(crate) fn plain<'a>(kv: AnyKv<Rc<Endpoint>>) -> Client<'a> {
    match kv {
        AnyKv::PrismKv(kv) => Client::PrismKv(Box::new(kv)),
        AnyKv::Pilaf(kv) => Client::Pilaf(Box::new(kv)),
    }
}

/// Loads a store and drives it. `begin` runs at the start of each thread that drives.
pub(crate) fn drive(driven: Driven<'_>, wrap: &Wrap<'_>, begin: &(dyn Fn() + Sync)) -> Tally {
    let pool = farside::connect("local:64MiB").expect("a node");
    pool.drop_store("default").expect("it is there");
    let quota = 48 << 20;
    let new = NewStore {
        kind: driven.system.into(),
        // With those that some workloads add.
        items: Some(driven.records + u64::from(THREADS * TASKS) * driven.each / 10),
        ..NewStore::prism_kv(STORE, quota)
    };
    pool.create_store(&new).expect("there is memory");
    let mut workload = Workload::resolve(driven.workload).expect("a workload");
    workload.records = driven.records;
    let plan =
        Plan { workload, value_size: 512, tasks: THREADS * TASKS, verify: true, sampled: 64, seed: 42 };
    let run = Run::new(plan).expect("a run");
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
        tally.lock().expect("nobody panics with it").merge(drawn.take_tally());
    });
    tally.into_inner().expect("nobody panicked with it")
}

fn on_core(pool: &Pool, driven: Driven<'_>, wrap: &Wrap<'_>, work: impl AsyncFn(&mut Asked<'_>, u32)) {
    let endpoint = Rc::new(pool.endpoint_here().expect("a session"));
    let mut core = Core::new(&endpoint);
    for task in 0..TASKS {
        let opened = block_on(&endpoint, AnyKv::open(Rc::clone(&endpoint), NodeId(0), STORE));
        let client = wrap(opened.expect("a store").with_slot_cache(driven.slot_cache));
        let (mut asked, work) = (Asked { client, told: Vec::new() }, &work);
        core.spawn(async move { work(&mut asked, task).await });
    }
    core.run();
}

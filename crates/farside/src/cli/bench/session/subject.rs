//! Families of stores, as a measurement sees them: how a store is created and opened, and the work of its clients.

use super::pace::{Pace, Start};
use super::{Dropping, Measured, SessionConfig, check_is_loaded, check_kind, check_records};
use crate::cli::{Done, Failure};
use farside::parts::{AnyKv, Keepers};
use farside::volume::NewVolume;
use farside::{NewStore, Pool};
use farside_bench::blocks::{self, BlockWork};
use farside_bench::calls::{self, CallWork};
use farside_bench::driver::{Run, Thread, Work};
use farside_bench::index::{self, IndexWork};
use farside_bench::kv::{self, Counted, Ycsb};
use farside_bench::latched::{self, LatchTrouble, LatchWork};
use farside_bench::oltp::Oltp;
use farside_bench::oltp::any::AnyBenchmark;
use farside_bench::report::Latencies;
use farside_bench::txn::{self, Transactional, TxnWork};
use farside_fabrics::executor::{Turns, block_on};
use farside_fabrics::layer::count::Count;
use farside_remote::clock::Clock;
use farside_remote::{Fabric, NodeId};
use farside_systems::index::Index;
use farside_systems::kv::Kv;
use farside_systems::latch::system::LatchKind;
use farside_systems::latch::{self, Latched};
use farside_systems::registry::{AnyBlocks, AnyIndex, AnyTxn};
use farside_systems::rpc::echo::Echo;
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use farside_systems::txn::Txn;
use farside_systems::with_kv;
use std::marker::PhantomData;
use std::rc::Rc;
use std::time::Instant;

/// Family of the store under measurement.
pub(in crate::cli) trait Subject: Sized {
    /// Name of the command that measures stores of this family.
    const COMMAND: &'static str;
    /// Whether each task of a thread has a client of its own. Otherwise, all have handles of one client.
    const HAS_OWN_CLIENTS: bool = false;
    /// How a store of this family is dropped.
    const DROPPING: Dropping;
    /// Work of the clients.
    type Work: Work + Send + Sync;
    /// Client of the store, for one task.
    type Client<F: Fabric + Clock + Turns>;

    /// Creates the state that all clients of the plan share.
    fn planned(config: &SessionConfig) -> Result<Run<Self::Work>, Failure>;

    /// Creates the store with this name and this memory: of the whole store, or of each replica.
    fn create(pool: &Pool, config: &SessionConfig, name: &str, quota: u64) -> Result<(), farside::Error>;

    /// Checks that an existing store is loaded as the run expects.
    fn check_is_loaded(pool: &Pool, config: &SessionConfig, name: &str) -> Done;

    /// Opens a client of the store for each of `count` tasks of a thread.
    fn clients<F: Fabric + Clock + Turns + 'static>(
        session: &Measured<Self>,
        fabric: &Rc<F>,
        count: u32,
    ) -> Result<Vec<Self::Client<F>>, Failure>;

    /// Returns the tasks that must run beside these clients, which are those of one thread.
    fn keepers<F: Fabric + Clock + Turns + 'static>(_clients: &[Self::Client<F>]) -> Keepers {
        Keepers::default()
    }

    /// Loads a task's share of the records: see [`Run::load`].
    async fn load<F: Fabric + Clock + Turns + 'static>(
        run: &Run<Self::Work>,
        client: &mut Self::Client<F>,
        task: u64,
        tasks: u64,
        tell: impl FnMut(u64, &Latencies),
    ) -> Result<(), String>;

    /// Performs up to `limit` operations: see [`Run::task`].
    async fn perform<F: Fabric + Clock + Turns + 'static>(
        run: &Run<Self::Work>,
        client: &mut Self::Client<F>,
        drawn: &Thread<Self::Work>,
        number: u32,
        limit: u64,
    ) -> bool;

    /// Performs operations until the run is over: see [`Pace::task`].
    async fn pace<F: Fabric + Clock + Turns + 'static>(
        pace: Pace,
        run: &Run<Self::Work>,
        client: &mut Self::Client<F>,
        drawn: &Thread<Self::Work>,
        number: u32,
        start: &Start,
        warmed_up: Option<impl FnOnce()>,
    );

    /// Waits until the requests that a client's operations have sent and did not await have completed.
    ///
    /// # Errors
    /// The first error of these requests.
    async fn settle<F: Fabric + Clock + Turns + 'static>(
        _client: &mut Self::Client<F>,
    ) -> Result<(), <Self::Work as Work>::Trouble> {
        Ok(())
    }

    /// Numbers of events in the operations of a thread's clients so far, with their names, or of this client if each
    /// task has its own. Empty if the family counts none.
    fn events<F: Fabric + Clock + Turns + 'static>(_client: &Self::Client<F>) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Returns the operations of the tasks of each of `shards` nodes so far. Empty unless each task keeps to one node.
    fn counted(_work: &Self::Work, _shards: usize) -> Vec<Counted> {
        Vec::new()
    }

    /// Measures the mean number of probes of a read; `None` if reads do not probe.
    fn probes<F: Fabric + Clock + Turns + 'static>(
        _session: &Measured<Self>,
        _counted: &Rc<Count<F>>,
    ) -> Result<Option<f64>, Failure>
    where
        Count<F>: Fabric + Clock + Turns,
    {
        Ok(None)
    }
}

/// Key-value stores.
pub(in crate::cli) struct Keys;

impl Subject for Keys {
    const COMMAND: &'static str = "ycsb";
    const HAS_OWN_CLIENTS: bool = true;
    const DROPPING: Dropping = Dropping::STORE;
    type Work = Ycsb;
    type Client<F: Fabric + Clock + Turns> = AnyKv<Rc<F>>;

    fn planned(config: &SessionConfig) -> Result<kv::Run, Failure> {
        let plan = kv::Plan {
            workload: config.workload.clone(),
            value_size: config.value_size,
            tasks: config.threads * config.tasks,
            verify: config.verify,
            by_node: config.by_node,
            sampled: config.sampled,
            seed: config.seed,
        };
        plan.run().map_err(Failure::Error)
    }

    fn create(pool: &Pool, config: &SessionConfig, name: &str, quota: u64) -> Result<(), farside::Error> {
        let new = NewStore {
            items: Some(config.items()),
            collision_free: config.collision_free,
            kind: config.system.kind.into(),
            value_size: u32::try_from(config.value_size).ok(),
            ..NewStore::prism_kv(name, quota)
        };
        pool.create_store(&new).map(drop)
    }

    fn check_is_loaded(pool: &Pool, config: &SessionConfig, name: &str) -> Done {
        check_is_loaded(pool, config, name)
    }

    fn clients<F: Fabric + Clock + Turns + 'static>(
        session: &Measured<Keys>,
        fabric: &Rc<F>,
        count: u32,
    ) -> Result<Vec<AnyKv<Rc<F>>>, Failure> {
        Ok((0..count).map(|_| session.kv(fabric)).collect::<Result<_, _>>()?)
    }

    async fn load<F: Fabric + Clock + Turns + 'static>(
        run: &kv::Run,
        client: &mut AnyKv<Rc<F>>,
        task: u64,
        tasks: u64,
        tell: impl FnMut(u64, &Latencies),
    ) -> Result<(), String> {
        with_kv!(client, kv => run.load(kv, task, tasks, tell).await)
    }

    async fn perform<F: Fabric + Clock + Turns + 'static>(
        run: &kv::Run,
        client: &mut AnyKv<Rc<F>>,
        drawn: &kv::Thread,
        number: u32,
        limit: u64,
    ) -> bool {
        with_kv!(client, kv => run.task(kv, drawn, number, limit).await)
    }

    async fn pace<F: Fabric + Clock + Turns + 'static>(
        pace: Pace,
        run: &kv::Run,
        client: &mut AnyKv<Rc<F>>,
        drawn: &kv::Thread,
        number: u32,
        start: &Start,
        warmed_up: Option<impl FnOnce()>,
    ) {
        with_kv!(client, kv => pace.task(run, kv, drawn, number, start, warmed_up).await);
    }

    fn counted(work: &Ycsb, shards: usize) -> Vec<Counted> {
        work.counted(shards)
    }

    fn probes<F: Fabric + Clock + Turns + 'static>(
        session: &Measured<Keys>,
        counted: &Rc<Count<F>>,
    ) -> Result<Option<f64>, Failure>
    where
        Count<F>: Fabric + Clock + Turns,
    {
        let mut kv = session.kv(counted)?;
        counted.take();
        let (records, reads) = (session.config.workload.records, super::COUNTED / 10);
        let (began, mut read) = (Instant::now(), 0);
        while read == 0 || read < reads && began.elapsed() < super::COUNT_MAX {
            let key = farside_bench::workload::key(read * (records / reads).max(1) % records);
            block_on(counted, kv.get(&key))?;
            read += 1;
        }
        let chains_per_probe = session.config.system.work.chains_per_probe;
        Ok(Some(counted.take().requests as f64 / read as f64 / f64::from(chains_per_probe)))
    }

    fn events<F: Fabric + Clock + Turns + 'static>(client: &AnyKv<Rc<F>>) -> Vec<(&'static str, u64)> {
        client.counters()
    }
}

/// Block stores.
pub(in crate::cli) struct Replicas;

impl Subject for Replicas {
    const COMMAND: &'static str = "blocks";
    const DROPPING: Dropping = Dropping::VOLUME;
    type Work = BlockWork;
    type Client<F: Fabric + Clock + Turns> = AnyBlocks<Rc<F>>;

    fn planned(config: &SessionConfig) -> Result<blocks::Run, Failure> {
        let plan = blocks::Plan {
            workload: config.workload.clone(),
            block: config.value_size,
            tasks: config.threads * config.tasks,
            verify: config.verify,
            sampled: config.sampled,
            seed: config.seed,
        };
        plan.run().map_err(Failure::Error)
    }

    fn create(pool: &Pool, config: &SessionConfig, name: &str, quota: u64) -> Result<(), farside::Error> {
        let size = config.workload.records * config.value_size as u64;
        let new = NewVolume {
            block: config.value_size as u32,
            replicas: config.replicas.unwrap_or(1) as usize,
            // A store is measured. More groups would be more stores.
            groups: Some(1),
            quota: Some(quota),
            kind: config.system.kind.into(),
            ..NewVolume::new(name, size)
        };
        pool.create_volume(&new).map(drop)
    }

    fn check_is_loaded(_pool: &Pool, _config: &SessionConfig, _name: &str) -> Done {
        unreachable!("a run on blocks loads its own store")
    }

    fn clients<F: Fabric + Clock + Turns + 'static>(
        session: &Measured<Replicas>,
        fabric: &Rc<F>,
        count: u32,
    ) -> Result<Vec<AnyBlocks<Rc<F>>>, Failure> {
        let entropy = getrandom::u64().expect("the system has random bytes: ids must not be guessed");
        let (nodes, options) = (session.pool.nodes().len() as u32, Options { entropy, ..Options::default() });
        let opened = AnyBlocks::open_in(Rc::clone(fabric), nodes, &session.store, &options);
        // All tasks of a thread are one client to the store.
        let mut clients = vec![block_on(fabric, opened)?];
        clients.extend((1..count).map(|_| clients[0].another()).collect::<Vec<_>>());
        Ok(clients)
    }

    fn keepers<F: Fabric + Clock + Turns + 'static>(clients: &[AnyBlocks<Rc<F>>]) -> Keepers {
        // All of them are handles of one client.
        Keepers::of(clients.first())
    }

    async fn load<F: Fabric + Clock + Turns + 'static>(
        run: &blocks::Run,
        client: &mut AnyBlocks<Rc<F>>,
        task: u64,
        tasks: u64,
        tell: impl FnMut(u64, &Latencies),
    ) -> Result<(), String> {
        run.load(client, task, tasks, tell).await
    }

    async fn perform<F: Fabric + Clock + Turns + 'static>(
        run: &blocks::Run,
        client: &mut AnyBlocks<Rc<F>>,
        drawn: &Thread<BlockWork>,
        number: u32,
        limit: u64,
    ) -> bool {
        run.task(client, drawn, number, limit).await
    }

    async fn pace<F: Fabric + Clock + Turns + 'static>(
        pace: Pace,
        run: &blocks::Run,
        client: &mut AnyBlocks<Rc<F>>,
        drawn: &Thread<BlockWork>,
        number: u32,
        start: &Start,
        warmed_up: Option<impl FnOnce()>,
    ) {
        pace.task(run, client, drawn, number, start, warmed_up).await;
    }
}

/// Ordered indexes.
pub(in crate::cli) struct Ordered;

impl Subject for Ordered {
    const COMMAND: &'static str = "ycsb";
    const DROPPING: Dropping = Dropping::STORE;
    type Work = IndexWork;
    type Client<F: Fabric + Clock + Turns> = AnyIndex<Rc<F>>;

    fn planned(config: &SessionConfig) -> Result<index::Run, Failure> {
        let plan = index::Plan {
            workload: config.workload.clone(),
            value_size: config.value_size,
            kind: config.names,
            tasks: config.threads * config.tasks,
            verify: config.verify,
            sampled: config.sampled,
            seed: config.seed,
        };
        plan.run().map_err(Failure::Error)
    }

    fn create(pool: &Pool, config: &SessionConfig, name: &str, quota: u64) -> Result<(), farside::Error> {
        let new = NewStore {
            keys: Some(config.names.keys()),
            rung: config.rung,
            value_size: Some(config.value_size as u32),
            kind: config.system.kind.into(),
            ..NewStore::prism_kv(name, quota)
        };
        pool.create_store(&new).map(drop)
    }

    fn check_is_loaded(pool: &Pool, config: &SessionConfig, name: &str) -> Done {
        let (mut index, names) = (None, Ordered::planned(config)?.work().names());
        check_records(pool, config, name, |record| {
            let index = match &mut index {
                Some(index) => index,
                none => none.insert(farside::index::Index::open(pool, name)?),
            };
            if index.keys() != config.names.keys() {
                return Ok(None);
            }
            let mut key = Vec::new();
            names.write(record, &mut key);
            Ok(index.get(&key)?.map(|value| value.len()))
        })
    }

    fn clients<F: Fabric + Clock + Turns + 'static>(
        session: &Measured<Ordered>,
        fabric: &Rc<F>,
        count: u32,
    ) -> Result<Vec<AnyIndex<Rc<F>>>, Failure> {
        let entropy = getrandom::u64().expect("the system has random bytes: ids must not be guessed");
        let (nodes, options) = (session.pool.nodes().len() as u32, Options { entropy, ..Options::NONE });
        let opened = AnyIndex::open_in(Rc::clone(fabric), nodes, &session.store, &options);
        // All tasks of a thread are one client to the store.
        let mut clients = vec![block_on(fabric, opened)?];
        clients.extend((1..count).map(|_| clients[0].another()).collect::<Vec<_>>());
        Ok(clients)
    }

    fn keepers<F: Fabric + Clock + Turns + 'static>(clients: &[AnyIndex<Rc<F>>]) -> Keepers {
        // All of them are handles of one client.
        Keepers::of_tasks(clients.first().map(Index::keeper))
    }

    async fn load<F: Fabric + Clock + Turns + 'static>(
        run: &index::Run,
        client: &mut AnyIndex<Rc<F>>,
        task: u64,
        tasks: u64,
        tell: impl FnMut(u64, &Latencies),
    ) -> Result<(), String> {
        run.load(client, task, tasks, tell).await
    }

    async fn perform<F: Fabric + Clock + Turns + 'static>(
        run: &index::Run,
        client: &mut AnyIndex<Rc<F>>,
        drawn: &Thread<IndexWork>,
        number: u32,
        limit: u64,
    ) -> bool {
        run.task(client, drawn, number, limit).await
    }

    async fn pace<F: Fabric + Clock + Turns + 'static>(
        pace: Pace,
        run: &index::Run,
        client: &mut AnyIndex<Rc<F>>,
        drawn: &Thread<IndexWork>,
        number: u32,
        start: &Start,
        warmed_up: Option<impl FnOnce()>,
    ) {
        pace.task(run, client, drawn, number, start, warmed_up).await;
    }

    fn events<F: Fabric + Clock + Turns + 'static>(client: &AnyIndex<Rc<F>>) -> Vec<(&'static str, u64)> {
        client.counters()
    }
}

/// Work of transactions, as a session plans it.
pub(in crate::cli) trait Audited: Transactional + Send + Sync + Sized + 'static {
    /// As [`Subject::planned`].
    fn planned(config: &SessionConfig) -> Result<Run<Self>, Failure>;
}

impl Audited for TxnWork {
    fn planned(config: &SessionConfig) -> Result<txn::Run, Failure> {
        let plan = txn::Plan {
            workload: config.workload.clone(),
            len: config.value_size,
            keys: config.keys_per_transaction,
            tasks: config.threads * config.tasks,
            sampled: config.sampled,
            seed: config.seed,
        };
        plan.run().map_err(Failure::Error)
    }
}

/// The tables of a benchmark.
impl Audited for Oltp<AnyBenchmark> {
    fn planned(config: &SessionConfig) -> Result<Run<Self>, Failure> {
        let benchmark = config.benchmark.clone().expect("a run of a benchmark has one");
        let tasks = config.threads * config.tasks;
        Oltp::run(benchmark, tasks, config.sampled, config.seed, config.verify).map_err(Failure::Error)
    }
}

/// Transactional stores, with this work.
pub(in crate::cli) struct Transactions<W>(PhantomData<W>);

impl<W: Audited> Subject for Transactions<W> {
    const COMMAND: &'static str = "txn";
    const DROPPING: Dropping = Dropping::STORE;
    type Work = W;
    type Client<F: Fabric + Clock + Turns> = txn::Client<AnyTxn<Rc<F>>, Rc<F>>;

    fn planned(config: &SessionConfig) -> Result<Run<W>, Failure> {
        W::planned(config)
    }

    fn create(pool: &Pool, config: &SessionConfig, name: &str, quota: u64) -> Result<(), farside::Error> {
        pool.create_store(&new_transactional(config, name, quota)).map(drop)
    }

    fn check_is_loaded(pool: &Pool, config: &SessionConfig, name: &str) -> Done {
        check_kind(pool, config, name)
    }

    fn clients<F: Fabric + Clock + Turns + 'static>(
        session: &Measured<Self>,
        fabric: &Rc<F>,
        count: u32,
    ) -> Result<Vec<Self::Client<F>>, Failure> {
        let entropy = getrandom::u64().expect("the system has random bytes: ids must not be guessed");
        let (nodes, options) = (session.pool.nodes().len() as u32, Options { entropy, ..Options::NONE });
        let opened = AnyTxn::open_in(Rc::clone(fabric), nodes, &session.store, &options);
        let client = |txn| txn::Client { txn, clock: Rc::clone(fabric) };
        // All tasks of a thread are one client to the store.
        let mut clients = vec![client(block_on(fabric, opened)?)];
        clients.extend((1..count).map(|_| client(clients[0].txn.another())).collect::<Vec<_>>());
        Ok(clients)
    }

    fn keepers<F: Fabric + Clock + Turns + 'static>(clients: &[Self::Client<F>]) -> Keepers {
        // All of them are handles of one client.
        Keepers::of_tasks(clients.first().map(|client| client.txn.keeper()))
    }

    async fn load<F: Fabric + Clock + Turns + 'static>(
        run: &Run<W>,
        client: &mut Self::Client<F>,
        task: u64,
        tasks: u64,
        tell: impl FnMut(u64, &Latencies),
    ) -> Result<(), String> {
        run.load(client, task, tasks, tell).await
    }

    async fn perform<F: Fabric + Clock + Turns + 'static>(
        run: &Run<W>,
        client: &mut Self::Client<F>,
        drawn: &Thread<W>,
        number: u32,
        limit: u64,
    ) -> bool {
        run.task(client, drawn, number, limit).await
    }

    async fn pace<F: Fabric + Clock + Turns + 'static>(
        pace: Pace,
        run: &Run<W>,
        client: &mut Self::Client<F>,
        drawn: &Thread<W>,
        number: u32,
        start: &Start,
        warmed_up: Option<impl FnOnce()>,
    ) {
        pace.task(run, client, drawn, number, start, warmed_up).await;
    }

    fn events<F: Fabric + Clock + Turns + 'static>(client: &Self::Client<F>) -> Vec<(&'static str, u64)> {
        client.txn.counters()
    }
}

/// The transactional store of a session. Its table has the size from which the session's memory is computed.
fn new_transactional(config: &SessionConfig, name: &str, quota: u64) -> NewStore {
    NewStore {
        items: Some(config.items()),
        collision_free: config.collision_free,
        key_max: Some(config.names.len_max() as u32),
        value_size: Some(config.value_size as u32),
        transacting: config.transacting,
        kind: config.system.kind.into(),
        ..NewStore::prism_kv(name, quota)
    }
}

/// Stores of latched objects.
pub(in crate::cli) struct Objects;

impl Subject for Objects {
    const COMMAND: &'static str = "latch";
    const DROPPING: Dropping = Dropping::STORE;
    type Work = LatchWork;
    type Client<F: Fabric + Clock + Turns> = Latched<Rc<F>>;

    fn planned(config: &SessionConfig) -> Result<latched::Run, Failure> {
        let plan = latched::Plan {
            workload: config.workload.clone(),
            len: config.value_size,
            tasks: config.threads * config.tasks,
            sampled: config.sampled,
            seed: config.seed,
        };
        plan.run().map_err(Failure::Error)
    }

    fn create(pool: &Pool, config: &SessionConfig, name: &str, quota: u64) -> Result<(), farside::Error> {
        pool.create_sized(config.system, name, &config.sizing(), quota)
    }

    fn check_is_loaded(_pool: &Pool, _config: &SessionConfig, _name: &str) -> Done {
        unreachable!("a run on latched objects loads its own store")
    }

    fn clients<F: Fabric + Clock + Turns + 'static>(
        session: &Measured<Objects>,
        fabric: &Rc<F>,
        count: u32,
    ) -> Result<Vec<Latched<Rc<F>>>, Failure> {
        let found = block_on(fabric, store::fetch_of(fabric, NodeId(0), &session.store, latch::KIND))?;
        let members = Members::one(NodeId(0), found);
        let entropy = getrandom::u64().expect("the system has random bytes: clients must draw other pauses");
        let options = Options { entropy, ..Options::NONE };
        let opened = LatchKind::open(Rc::clone(fabric), &members, &options);
        // All tasks of a thread are one client to the store.
        let mut clients = vec![block_on(fabric, opened)?];
        clients.extend((1..count).map(|_| clients[0].another()).collect::<Vec<_>>());
        Ok(clients)
    }

    fn keepers<F: Fabric + Clock + Turns + 'static>(clients: &[Latched<Rc<F>>]) -> Keepers {
        // All of them are handles of one client.
        Keepers::of_tasks(clients.first().map(|client| {
            let keeper = client.keeper();
            // No operation is dropped, so its caller has heard of each error.
            async move { drop(keeper.await) }
        }))
    }

    async fn load<F: Fabric + Clock + Turns + 'static>(
        run: &latched::Run,
        client: &mut Latched<Rc<F>>,
        task: u64,
        tasks: u64,
        tell: impl FnMut(u64, &Latencies),
    ) -> Result<(), String> {
        run.load(client, task, tasks, tell).await
    }

    async fn perform<F: Fabric + Clock + Turns + 'static>(
        run: &latched::Run,
        client: &mut Latched<Rc<F>>,
        drawn: &Thread<LatchWork>,
        number: u32,
        limit: u64,
    ) -> bool {
        run.task(client, drawn, number, limit).await
    }

    async fn pace<F: Fabric + Clock + Turns + 'static>(
        pace: Pace,
        run: &latched::Run,
        client: &mut Latched<Rc<F>>,
        drawn: &Thread<LatchWork>,
        number: u32,
        start: &Start,
        warmed_up: Option<impl FnOnce()>,
    ) {
        pace.task(run, client, drawn, number, start, warmed_up).await;
    }

    async fn settle<F: Fabric + Clock + Turns + 'static>(
        client: &mut Latched<Rc<F>>,
    ) -> Result<(), LatchTrouble> {
        Ok(client.settle().await?)
    }
}

/// Nodes that answer calls.
pub(in crate::cli) struct Calls;

impl Subject for Calls {
    const COMMAND: &'static str = "rpc";
    const DROPPING: Dropping = Dropping::STORE;
    type Work = CallWork;
    type Client<F: Fabric + Clock + Turns> = Echo<Rc<F>>;

    fn planned(config: &SessionConfig) -> Result<calls::Run, Failure> {
        let plan = calls::Plan {
            asking: config.calls.expect("a run of calls has calls").1,
            tasks: config.threads * config.tasks,
            sampled: config.sampled,
            seed: config.seed,
        };
        plan.run().map_err(Failure::Error)
    }

    fn create(pool: &Pool, config: &SessionConfig, name: &str, quota: u64) -> Result<(), farside::Error> {
        let new = NewStore { kind: config.system.kind.into(), ..NewStore::prism_kv(name, quota) };
        pool.create_store(&new).map(drop)
    }

    fn check_is_loaded(_pool: &Pool, _config: &SessionConfig, _name: &str) -> Done {
        unreachable!("a run of calls creates its own store")
    }

    fn clients<F: Fabric + Clock + Turns + 'static>(
        session: &Measured<Calls>,
        fabric: &Rc<F>,
        count: u32,
    ) -> Result<Vec<Echo<Rc<F>>>, Failure> {
        let nodes = session.pool.nodes().len() as u32;
        let first = block_on(fabric, Echo::open_in(Rc::clone(fabric), nodes, &session.store))?;
        Ok((0..count).map(|task| first.another(task as u16)).collect())
    }

    async fn load<F: Fabric + Clock + Turns + 'static>(
        run: &calls::Run,
        client: &mut Echo<Rc<F>>,
        task: u64,
        tasks: u64,
        tell: impl FnMut(u64, &Latencies),
    ) -> Result<(), String> {
        run.load(client, task, tasks, tell).await
    }

    async fn perform<F: Fabric + Clock + Turns + 'static>(
        run: &calls::Run,
        client: &mut Echo<Rc<F>>,
        drawn: &Thread<CallWork>,
        number: u32,
        limit: u64,
    ) -> bool {
        run.task(client, drawn, number, limit).await
    }

    async fn pace<F: Fabric + Clock + Turns + 'static>(
        pace: Pace,
        run: &calls::Run,
        client: &mut Echo<Rc<F>>,
        drawn: &Thread<CallWork>,
        number: u32,
        start: &Start,
        warmed_up: Option<impl FnOnce()>,
    ) {
        pace.task(run, client, drawn, number, start, warmed_up).await;
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::quota;
    use super::*;
    use farside_bench::oltp::tatp::Tatp;
    use farside_bench::workload::Workload;
    use farside_systems::registry::family;
    use farside_systems::system::Family;

    #[test]
    fn the_memory_of_a_session_holds_the_table_of_each_transactional_store() {
        for system in family(Family::Txn) {
            for (benchmark, records, value_size) in [
                (None, 1, 8),
                (None, 200_000, 512),
                (Some(AnyBenchmark::Tatp(Tatp::new(100_000).expect("a small one"))), 100_000, 40),
            ] {
                let workload = Workload { records, ..Workload::resolve("a").expect("it is built in") };
                let config = SessionConfig { benchmark, value_size, ..SessionConfig::new(system, workload) };
                let sizing = new_transactional(&config, "store", 0).sizing();
                let table = (system.footprint)(&sizing).expect("a small store").table_bytes;
                assert!(
                    quota(&config).is_ok_and(|quota| table <= quota),
                    "{}, {records} records",
                    system.kind
                );
            }
        }
    }
}

//! Simulates an ordered index under a closed loop of clients, on the papers' machines in virtual time.
//!
//! As in the evaluation of SMART (Luo et al., OSDI 2023), a *client* is a thread of a compute node, and has several
//! operations in flight. The threads of a compute node share one client of the system: its cache, and what it combines.
//!
//! The model has fewer records than the paper, and as much cache for each record: see [`Ranks`].
//!
//! The records are inserted, and the caches warmed up, without the model of time: at one instant, chain by chain. That
//! takes seconds, and with the model it would take minutes.
//!
//! Invariant: the real protocol runs on a real store's bytes; only time is modelled.
//! Invariant: a value that is read or scanned is that of its key, and whole.

use super::STORE;
use farside_bench::index::{NameKind, Names};
use farside_bench::report::Latencies;
use farside_bench::workload::skew::Zipf;
use farside_remote::NodeId;
use farside_remote::clock::Clock;
use farside_sim::fabric::hardware::{Machines, Setup, Threads, start_node};
use farside_sim::hardware::{Inputs, Platform, Testbed};
use farside_sim::nic::Traffic;
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{MILLIS, Nanos, ProcessId, SECONDS, World};
use farside_systems::index::{Index, Indexing};
use farside_systems::members::{self, New};
use farside_systems::registry::{self, AnyIndex};
use farside_systems::system::{Family, Options, Sizing, SizingError};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Shares of the kinds of operations, from 0 to 1. The rest are updates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    /// Share of reads of a record.
    pub reads: f64,
    /// Share of insertions of new records.
    pub inserts: f64,
    /// Share of scans of 1 to [`SCAN_MAX`] records.
    pub scans: f64,
    /// Whether the latest records are read most.
    pub is_latest: bool,
}

impl Mix {
    /// YCSB's load phase: insertions alone.
    pub const LOAD: Mix = Mix { reads: 0.0, inserts: 1.0, scans: 0.0, is_latest: false };
    /// Workload A: half reads, half updates.
    pub const A: Mix = Mix::of_reads(0.5);
    /// Workload B: 95 % reads, 5 % updates.
    pub const B: Mix = Mix::of_reads(0.95);
    /// Workload C: reads alone.
    pub const C: Mix = Mix::of_reads(1.0);
    /// Workload D: 95 % reads of the latest records, 5 % insertions.
    pub const D: Mix = Mix { reads: 0.95, inserts: 0.05, scans: 0.0, is_latest: true };
    /// Workload E: 95 % scans, 5 % insertions.
    pub const E: Mix = Mix { reads: 0.0, inserts: 0.05, scans: 0.95, is_latest: false };

    /// Whether some operations are updates.
    fn has_updates(&self) -> bool {
        self.reads + self.inserts + self.scans < 1.0 - 1e-9
    }

    /// Reads with this share, and updates.
    pub const fn of_reads(reads: f64) -> Mix {
        Mix { reads, inserts: 0.0, scans: 0.0, is_latest: false }
    }
}

/// Number of records of the longest scan, in workload E as SMART's evaluation has it.
pub const SCAN_MAX: u64 = 100;

/// A workload: an index, its machines, and its operations.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Kind of the system.
    pub system: &'static str,
    /// Options of the store.
    pub indexing: Indexing,
    /// Options of the clients, except for the size of the cache.
    pub options: Options,
    /// The compute nodes, and the network.
    pub testbed: Testbed,
    /// Parameters of the machines' model.
    pub inputs: Inputs,
    /// Number of memory nodes.
    pub members: u32,
    /// Largest number of clients that is measured.
    pub clients_max: u32,
    /// Number of operations that a client has in flight.
    pub coroutines: u32,
    /// Kind of the keys.
    pub keys: NameKind,
    /// Number of bytes that are appended to each key. Only strings can be longer.
    pub key_padding: usize,
    /// Length of a value in bytes.
    pub value_len: usize,
    /// Number of records of the model, and of the paper.
    pub records: u64,
    /// Number of the paper's records, among which Zipf's law holds.
    pub ranks: u64,
    /// Size in bytes of a compute node's cache in the paper. The cache of the model has as many bytes for each record.
    pub cache_bytes: u64,
    /// Number of reads with which all compute nodes together warm their caches up, unless fewer do.
    pub warm_up: u64,
    /// Zipf coefficient of the records; 0 if all records are equally likely.
    pub skew: f64,
    /// Whether keys are in the order of their records, as scans need it. If not, keys are scattered.
    pub is_ordered: bool,
    /// The operations.
    pub mix: Mix,
}

/// One measurement of a load.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Number of clients.
    pub clients: u32,
    /// Operations per second.
    pub ops_per_s: f64,
    /// Mean latency of an operation, in microseconds.
    pub mean_us: f64,
    /// Latency that 99 % of the operations do not exceed, in microseconds.
    pub p99_us: f64,
    /// Mean number of lists of verbs that an operation sends to all memory nodes.
    pub lists: f64,
    /// Mean number of ops that the NICs of the memory nodes start for an operation.
    pub nic_ops: f64,
    /// Mean number of bytes that an operation sends to all memory nodes, and that it receives, with packet headers.
    pub bytes: [f64; 2],
    /// Share of the time in which the NICs of the memory nodes start ops, and in which the busier direction of their
    /// links carries bytes. The one that is near 1 limits the throughput.
    pub busy: Busy,
    /// Events of the system's counters for each operation, by their names.
    counted: Vec<(&'static str, f64)>,
}

/// Utilization of the memory nodes' NICs, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Busy {
    /// The unit that starts ops.
    pub ops: f64,
    /// The busier direction of the link.
    pub link: f64,
}

impl Measured {
    /// Events for each operation that the system counts under this name; 0 if it has no such counter.
    pub fn counted(&self, name: &str) -> f64 {
        self.counted.iter().filter(|(other, _)| *other == name).map(|(_, count)| count).sum()
    }

    /// Share of the READs of a read-only load that fetch a leaf, from 0 to 1. It is 1 if each lookup finds the leaf's
    /// slot in the cache.
    pub fn leaf_share(&self) -> f64 {
        (1.0 - self.counted("reads delegated")) / self.nic_ops
    }
}

/// Draws the records of operations.
///
/// The model has fewer records than the paper has ranks. A rank among the first sixteenth of the records has a record
/// of its own, so that as many clients meet at hot records as in the paper. Ranks behind that are folded in two ways,
/// so that a cache of a share of the records has as many hits as one of the same share of the ranks:
///
/// - A rank that is among the first sixteenth of the ranks shares a record among the first sixteenth of the records,
///   but not one of the first 256.
/// - All further ranks keep their place in proportion. Each record has the same number of them.
#[derive(Clone, Copy, Debug)]
pub struct Ranks {
    zipf: Option<Zipf>,
    ranks: u64,
    records: u64,
}

/// Number of the hottest records whose probability is exact.
const OWN: u64 = 256;
/// The first records, one in this many, are hot.
const HOT_ONE_IN: u64 = 16;

impl Ranks {
    /// Draws of `records` records for `ranks` ranks, under Zipf's law with this coefficient, or all equally often if it
    /// is 0.
    pub fn new(ranks: u64, records: u64, skew: f64) -> Ranks {
        let zipf = (skew > 0.0).then(|| Zipf::new(ranks, skew));
        Ranks { zipf, ranks, records }
    }

    fn draw(&self, random: &Random) -> u64 {
        match &self.zipf {
            Some(zipf) => self.record(zipf.draw(|| random.share())),
            None => random.below(self.records),
        }
    }

    /// Returns the record of a rank.
    pub fn record(&self, rank: u64) -> u64 {
        let hot = self.records / HOT_ONE_IN;
        if rank < hot {
            return rank;
        }
        let in_proportion = (u128::from(rank) * u128::from(self.records) / u128::from(self.ranks)) as u64;
        let own = OWN.min(hot / 2);
        if in_proportion >= hot || hot == 0 { in_proportion } else { own + (rank - own) % (hot - own) }
    }
}

impl Load {
    fn ranks(&self) -> Ranks {
        Ranks::new(self.ranks, self.records, self.skew)
    }

    fn names(&self) -> Names {
        Names { kind: self.keys, is_ordered: self.is_ordered }
    }

    /// Number of threads of each compute node.
    fn threads(&self) -> u32 {
        self.clients_max.div_ceil(self.testbed.machines)
    }

    fn sizing(&self) -> Sizing {
        /// Records that measurements insert, and leaves that they replace and that are not free again.
        const GROWTH: u64 = 200_000;
        let lanes = u16::try_from(self.threads() * self.coroutines).unwrap_or(u16::MAX);
        let ids = u16::try_from(self.testbed.machines).unwrap_or(u16::MAX);
        Sizing {
            items: Some(self.records + GROWTH.max(self.records)),
            key_len: self.keys.len_max() + self.key_padding,
            value_len: self.value_len,
            indexing: Indexing {
                keys: Some(self.keys.keys()),
                ids: Some(ids),
                lanes: Some(lanes),
                ..self.indexing
            },
            ..Sizing::default()
        }
    }

    /// Returns the quota of each member, in bytes.
    ///
    /// # Errors
    /// There is no such index, or no such store of it.
    fn quota(&self) -> Result<u64, String> {
        let found = registry::named(self.system).filter(|system| system.family == Family::Index);
        let system = found.ok_or_else(|| format!("no index of kind '{}': name {}", self.system, names()))?;
        let footprint = (system.footprint)(&self.sizing()).map_err(|error| match error {
            SizingError::Value(most) => {
                format!("no values of {} bytes: give at most {most}", self.value_len)
            }
            SizingError::Items | SizingError::Writes(_) => {
                format!("no store of {} records: give fewer", self.records)
            }
        })?;
        Ok((footprint.table_bytes + (16 << 20)) >> 20 << 20)
    }

    /// Size of a compute node's cache in bytes.
    fn node_cache(&self) -> usize {
        (u128::from(self.cache_bytes) * u128::from(self.records) / u128::from(self.ranks)) as usize
    }
}

/// Returns the kinds of all indexes, joined for a sentence.
fn names() -> String {
    registry::joined(registry::ALL.iter().filter(|system| system.family == Family::Index))
}

/// Virtual time after which a steady share of the clients wait for the locks of hot records. Until then, the others
/// have the NICs for themselves, and the rate is higher than it can stay.
pub const SETTLES: Nanos = 4 * MILLIS;
/// Longest time of a measurement in virtual time. Operations that try again without end would take minutes otherwise.
pub const LASTS_MAX: Nanos = 2 * MILLIS;

/// A loaded index, and the compute nodes that have it open.
pub struct Bed {
    world: World,
    machines: Rc<Machines>,
    load: Load,
    compute: Vec<Compute>,
    /// Number of records.
    inserted: Rc<Cell<u64>>,
    /// Source of the seeds of the compute nodes.
    random: Random,
}

/// A compute node.
struct Compute {
    process: ProcessId,
    threads: Rc<Threads>,
    index: AnyIndex<Rc<Threads>>,
    /// Whether the index has a client that has not been closed.
    is_open: Rc<Cell<bool>>,
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.world.end();
    }
}

impl Bed {
    /// Creates an index, inserts all records, and warms the caches of all compute nodes up.
    ///
    /// # Errors
    /// The index cannot be created, or an operation fails.
    pub fn new(load: Load, seed: u64) -> Result<Bed, String> {
        let mut bed = Bed::create(load, seed)?;
        bed.open_all()?;
        bed.fill()?;
        bed.warm_up()?;
        Ok(bed)
    }

    fn create(load: Load, seed: u64) -> Result<Bed, String> {
        let (world, random, quota) = (World::new(seed), Random::new(!seed), load.quota()?);
        let setup = Setup { inputs: load.inputs, ..Setup::new(Platform::Rdma, load.testbed) };
        let start =
            |id| start_node(&world, NodeId(id), Rc::new(registry::all_kinds), quota + (32 << 20), &setup);
        let nodes: Vec<Node> = (0..load.members).map(start).collect();
        let (name, kind) = (STORE.to_owned(), load.system.to_owned());
        let new = New { name, kind, sizing: load.sizing(), quota, members: nodes.len() };
        let attempt = [random.bits(), random.bits()];
        let opened = world.complete(SECONDS, async move {
            let machines = Machines::open(&nodes, setup).await.map_err(|error| error.to_string())?;
            let created = members::create(&*machines.connect(), machines.count(), &new, attempt).await;
            created.map_err(|error| error.to_string())?;
            Ok::<_, String>(machines)
        });
        let machines = opened.unwrap_or_else(|| Err("the nodes did not respond within 1 s".to_owned()))?;
        Ok(Bed { world, machines, load, compute: Vec::new(), inserted: Rc::default(), random })
    }

    /// Opens the index on all compute nodes.
    fn open_all(&mut self) -> Result<(), String> {
        for _ in 0..self.load.testbed.machines {
            let node_cache = Some(self.load.node_cache());
            let options = Options { entropy: self.random.bits(), node_cache, ..self.load.options };
            let compute = self.open(options)?;
            self.compute.push(compute);
        }
        Ok(())
    }

    fn open(&self, options: Options) -> Result<Compute, String> {
        let threads = self.machines.connect_threads(self.load.threads());
        let (fabric, members) = (Rc::clone(&threads), self.load.members);
        let opened = self.world.complete(SECONDS, async move {
            AnyIndex::open_in(fabric, members, STORE, &options).await.map_err(|error| error.to_string())
        });
        let index = opened.unwrap_or_else(|| Err("the index was not opened within 1 s".to_owned()))?;
        let process = self.world.start_process();
        let (keeper, is_open) = (index.keeper(), Rc::new(Cell::new(true)));
        let closes = Rc::clone(&is_open);
        self.world.spawn(process, async move {
            keeper.await;
            closes.set(false);
        });
        Ok(Compute { process, threads, index, is_open })
    }

    /// Runs a task on each compute node, without the model of time. Returns the number of ops of the tasks' chains.
    fn run_at_once<W>(&self, task: impl Fn(u64, Client) -> W) -> Result<u64, String>
    where
        W: Future<Output = Result<(), String>> + 'static,
    {
        let run = Rc::new(Run::default());
        run.tasks.set(self.compute.len() as u32);
        let ops = || self.compute.iter().map(|compute| compute.threads.ops_at_once()).sum::<u64>();
        let before = ops();
        for (number, compute) in (0..).zip(&self.compute) {
            compute.threads.run_at_once(true);
            let client = Client::of(compute.index.another(), self.load, self.load.names(), &self.inserted);
            let (working, run) = (task(number, client), Rc::clone(&run));
            self.world.spawn(compute.process, async move {
                if let Err(error) = working.await {
                    run.failed.borrow_mut().get_or_insert(error);
                }
                run.tasks.set(run.tasks.get() - 1);
            });
        }
        self.world.run_while(self.world.now() + SECONDS, || run.tasks.get() > 0);
        self.compute.iter().for_each(|compute| compute.threads.run_at_once(false));
        match run.failed.take() {
            Some(error) => Err(error),
            None if run.tasks.get() > 0 => Err("the index was not prepared within 1 s".to_owned()),
            None => Ok(ops() - before),
        }
    }

    /// Inserts all records, in no order of their keys.
    fn fill(&self) -> Result<(), String> {
        let (all, machines) = (self.load.records, self.load.testbed.machines);
        self.run_at_once(|number, mut client| async move {
            for place in (number..all).step_by(machines as usize) {
                client.put(scattered(place, all)).await?;
            }
            Ok(())
        })?;
        self.inserted.set(all);
        Ok(())
    }

    /// Reads records on all compute nodes, until the reads of a part need as many ops as those of the part before.
    fn warm_up(&self) -> Result<(), String> {
        /// Number of parts, at most.
        const PARTS: u64 = 8;
        /// Relative difference between the ops of two parts that counts as none.
        const SAME: f64 = 0.005;
        let count = self.load.warm_up / PARTS / u64::from(self.load.testbed.machines);
        let mut before = f64::INFINITY;
        for _ in 0..PARTS {
            let random = self.world.random();
            let ops = self.run_at_once(|_, mut client| {
                let random = random.fork();
                async move {
                    for _ in 0..count {
                        let record = client.draw(&random);
                        client.get(record).await?;
                    }
                    Ok(())
                }
            })? as f64;
            if ops > (1.0 - SAME) * before {
                break;
            }
            before = ops;
        }
        Ok(())
    }

    /// Opens the index anew on all compute nodes, with caches of this size, and warms them up. The size is that of the
    /// paper's caches, as in [`Load`].
    ///
    /// # Errors
    /// An operation failed, or the index cannot be opened.
    pub fn set_cache(&mut self, cache_bytes: u64) -> Result<(), String> {
        /// Longest time in which clients close, in virtual time.
        const CLOSES_MAX: Nanos = 60 * SECONDS;
        if self.load.cache_bytes == cache_bytes {
            return Ok(());
        }
        self.load.cache_bytes = cache_bytes;
        self.compute.iter().for_each(|compute| compute.threads.run_at_once(true));
        let open: Vec<_> = self.compute.drain(..).map(|compute| compute.is_open).collect();
        let is_any_open = || open.iter().any(|is_open| is_open.get());
        self.world.run_while(self.world.now() + CLOSES_MAX, is_any_open);
        if is_any_open() {
            return Err("the index was not closed within 60 s".to_owned());
        }
        self.open_all()?;
        self.warm_up()
    }

    /// Sets the operations of the next measurements. If other records are hot then, warms the caches up with them.
    ///
    /// # Errors
    /// An operation failed.
    pub fn set_mix(&mut self, mix: Mix) -> Result<(), String> {
        let is_hot = self.load.mix.is_latest == mix.is_latest;
        self.load.mix = mix;
        if is_hot { Ok(()) } else { self.warm_up() }
    }

    /// Sets the Zipf coefficient of the records of the next measurements.
    pub fn set_skew(&mut self, skew: f64) {
        self.load.skew = skew;
    }

    /// Measures `operations` operations of `clients` clients. Successive clients are on successive compute nodes, round
    /// robin. Repeats the measurement, with the same clients, until the rate no longer falls. If there are updates, the
    /// clients first run for [`SETTLES`]. A measurement ends after [`LASTS_MAX`] of virtual time, with fewer
    /// operations.
    ///
    /// # Errors
    /// An operation failed, or none completed in time.
    ///
    /// # Panics
    /// If there are more clients than the load has.
    pub fn measure(&self, clients: u32, operations: u64) -> Result<Measured, String> {
        /// Number of measurements, at most.
        const REPEATS: u32 = 12;
        /// Relative difference between the rates of two measurements that counts as none.
        const SAME: f64 = 0.03;
        let most = self.load.clients_max;
        assert!(clients <= most, "the bed has connections for {most} clients");
        let run = self.start(clients);
        if self.load.mix.has_updates() {
            self.world.run_while(self.world.now() + SETTLES, || run.failed.borrow().is_none());
        }
        let mut last = self.measure_once(&run, clients, operations)?;
        for _ in 1..REPEATS {
            let before = std::mem::replace(&mut last, self.measure_once(&run, clients, operations)?);
            if last.ops_per_s > (1.0 - SAME) * before.ops_per_s {
                break;
            }
        }
        run.is_over.set(true);
        self.world.run_while(self.world.now() + SECONDS, || run.tasks.get() > 0);
        match run.failed.take() {
            Some(error) => Err(error),
            None if run.tasks.get() > 0 => Err(format!("operations of {clients} clients did not end in 1 s")),
            None => Ok(last),
        }
    }

    /// Starts clients that run operations until the run is over.
    fn start(&self, clients: u32) -> Rc<Run> {
        let (world, load, machines) = (&self.world, self.load, self.load.testbed.machines);
        let run = Rc::new(Run::default());
        let tasks = clients * load.coroutines;
        run.tasks.set(tasks);
        for (number, compute) in (0..machines.min(clients)).zip(&self.compute) {
            compute.threads.activate((clients - number).div_ceil(machines) as usize);
        }
        for task in 0..tasks {
            let compute = &self.compute[(task / load.coroutines % machines) as usize];
            let mut client = Client::of(compute.index.another(), load, load.names(), &self.inserted);
            let (run, random, clock) = (Rc::clone(&run), world.random().fork(), Rc::clone(&compute.threads));
            world.spawn(compute.process, async move {
                while !run.is_over.get() {
                    let since = clock.now();
                    if let Err(error) = client.perform(&random).await {
                        run.failed.borrow_mut().get_or_insert(error);
                        break;
                    }
                    run.latencies.borrow_mut().record(clock.now() - since);
                    run.done.set(run.done.get() + 1);
                }
                run.tasks.set(run.tasks.get() - 1);
            });
        }
        run
    }

    /// Measures the next operations of a run.
    fn measure_once(&self, run: &Run, clients: u32, operations: u64) -> Result<Measured, String> {
        let (world, load) = (&self.world, &self.load);
        run.done.set(0);
        run.latencies.replace(Latencies::new());
        let (since, before, counted) = (world.now(), self.machines.traffic(), self.counters());
        let goes_on = || {
            run.done.get() < operations && world.now() < since + LASTS_MAX && run.failed.borrow().is_none()
        };
        world.run_while(since + LASTS_MAX, goes_on);
        let (lasted, after, counters) = (world.now() - since, self.machines.traffic(), self.counters());
        if let Some(error) = run.failed.take() {
            return Err(error);
        }
        let done = run.done.get();
        if done == 0 {
            return Err(format!("no operation of {clients} clients completed in time"));
        }
        let each = |count: u64| count as f64 / done as f64;
        let traffic = |count: fn(&Traffic) -> u64| count(&after) - count(&before);
        let [lists, ops] = [traffic(|at| at.round_trips), traffic(|at| at.ops)];
        let [bytes_in, bytes_out] = [traffic(|at| at.bytes_in), traffic(|at| at.bytes_out)];
        let time_ps = lasted as f64 * 1e3 * f64::from(load.members);
        let grown =
            counters.into_iter().zip(counted).map(|((name, now), (_, before))| (name, each(now - before)));
        let latencies = run.latencies.borrow();
        Ok(Measured {
            clients,
            ops_per_s: done as f64 * SECONDS as f64 / lasted as f64,
            mean_us: latencies.mean_us(),
            p99_us: latencies.percentile_us(99.0),
            lists: each(lists),
            nic_ops: each(ops),
            bytes: [each(bytes_in), each(bytes_out)],
            busy: Busy {
                ops: (ops * load.inputs.nic_op_ps) as f64 / time_ps,
                link: (bytes_in.max(bytes_out) * 8_000 / load.testbed.link_gbit) as f64 / time_ps,
            },
            counted: grown.collect(),
        })
    }

    /// Sums of the counters of all compute nodes.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut sums: Vec<(&'static str, u64)> = Vec::new();
        for compute in &self.compute {
            for (place, (name, count)) in compute.index.counters().into_iter().enumerate() {
                match sums.get_mut(place) {
                    Some((_, sum)) => *sum += count,
                    None => sums.push((name, count)),
                }
            }
        }
        sums
    }
}

/// Operations of clients that go on until the run is over.
#[derive(Default)]
struct Run {
    is_over: Cell<bool>,
    /// Number of coroutines that have not stopped.
    tasks: Cell<u32>,
    /// Number of operations of the current measurement, and their latencies.
    done: Cell<u64>,
    latencies: RefCell<Latencies>,
    /// The first error of any client.
    failed: RefCell<Option<String>>,
}

/// Client of one coroutine.
struct Client {
    index: AnyIndex<Rc<Threads>>,
    load: Load,
    names: Names,
    ranks: Ranks,
    inserted: Rc<Cell<u64>>,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl Client {
    fn of(index: AnyIndex<Rc<Threads>>, load: Load, names: Names, inserted: &Rc<Cell<u64>>) -> Client {
        let value = vec![0; load.value_len];
        let (ranks, inserted) = (load.ranks(), Rc::clone(inserted));
        Client { index, load, names, ranks, inserted, key: Vec::new(), value }
    }

    async fn perform(&mut self, random: &Random) -> Result<(), String> {
        let Mix { reads, inserts, scans, .. } = self.load.mix;
        let kind = random.share();
        if kind < inserts {
            let record = self.inserted.replace(self.inserted.get() + 1);
            return self.put(record).await;
        }
        let record = self.draw(random);
        if kind < inserts + reads {
            self.get(record).await
        } else if kind < inserts + reads + scans {
            self.scan(record, 1 + random.below(SCAN_MAX)).await
        } else {
            self.put(record).await
        }
    }

    /// Draws the record of an operation that inserts none.
    fn draw(&self, random: &Random) -> u64 {
        let drawn = self.ranks.draw(random);
        match (self.load.mix.is_latest, self.names.is_ordered) {
            // The latest record may still be inserted.
            (true, _) => (self.inserted.get() - 1).saturating_sub(drawn),
            // Hot records are no neighbours.
            (false, true) => scattered(drawn, self.load.records),
            (false, false) => drawn,
        }
    }

    async fn put(&mut self, record: u64) -> Result<(), String> {
        self.name(record);
        fill(&mut self.value, record);
        self.index.put(&self.key, &self.value).await.map_err(|error| error.to_string())
    }

    async fn get(&mut self, record: u64) -> Result<(), String> {
        self.name(record);
        fill(&mut self.value, record);
        let found = self.index.get(&self.key).await.map_err(|error| error.to_string())?;
        match found {
            Some(found) if found == self.value => Ok(()),
            None if record >= self.load.records => Ok(()),
            found => Err(format!("record {record} has the value {found:?}")),
        }
    }

    async fn scan(&mut self, record: u64, len: u64) -> Result<(), String> {
        self.name(record);
        let (mut next, names, padding, mut is_right) = (record, self.names, self.load.key_padding, true);
        let (mut key, mut value) = (Vec::new(), vec![0; self.load.value_len]);
        let visit = |found: &[u8], bytes: &[u8]| {
            name(names, padding, next, &mut key);
            fill(&mut value, next);
            // New records are the largest, and need not be inserted in order.
            is_right &= next >= self.load.records || (found == key && bytes == value);
            next += 1;
        };
        let visited =
            self.index.scan(&self.key, len as usize, visit).await.map_err(|error| error.to_string())?;
        let expected = (self.load.records - record).min(len);
        if is_right && visited as u64 >= expected {
            return Ok(());
        }
        Err(format!("a scan of {len} records from {record} visited {visited}, or other records"))
    }

    fn name(&mut self, record: u64) {
        name(self.names, self.load.key_padding, record, &mut self.key);
    }
}

/// Returns another number below `all` for each number below it, so that neighbours are far apart.
fn scattered(number: u64, all: u64) -> u64 {
    /// A prime.
    const FACTOR: u64 = 2_654_435_761;
    (u128::from(number) * u128::from(FACTOR) % u128::from(all)) as u64
}

/// Writes the key of a record.
fn name(names: Names, padding: usize, record: u64, key: &mut Vec<u8>) {
    names.write(record, key);
    key.resize(key.len() + padding, b'.');
}

/// Fills a value with the number of its record, so that a value of another record or a torn one is detected.
fn fill(value: &mut [u8], record: u64) {
    for part in value.chunks_mut(8) {
        part.copy_from_slice(&record.to_le_bytes()[..part.len()]);
    }
}

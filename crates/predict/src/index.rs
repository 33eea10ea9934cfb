//! Simulates an ordered index under a closed loop of clients, on the papers' machines in virtual time.
//!
//! As in the evaluation of SMART (Luo et al., OSDI 2023), a *client* is a thread of a compute node, and has several
//! operations in flight. The threads of a compute node share one client of the system: its cache, and what it combines.
//!
//! The model has fewer records than the paper, and as much cache for each record: see [`Ranks`].
//!
//! Invariant: the real protocol runs on a real store's bytes; only time is modelled.
//! Invariant: a value that is read or scanned is that of its key, and whole.

use super::{SLOWEST, STORE, Work};
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
use farside_sim::world::{ProcessId, SECONDS, World};
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
    /// Number of reads with which all compute nodes together warm their caches up.
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
        let lanes = lanes.max(LOADERS as u16);
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
            SizingError::Items => format!("no store of {} records: give fewer", self.records),
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

/// Number of tasks with which each compute node loads its share of the records.
const LOADERS: u32 = 16;
/// Longest time of the load phase in virtual time.
const LOAD_MAX: u64 = 60 * SECONDS;

/// A loaded index, and the compute nodes that have it open.
pub struct Bed {
    world: World,
    machines: Rc<Machines>,
    load: Load,
    compute: Vec<Compute>,
    /// Number of records.
    inserted: Rc<Cell<u64>>,
}

/// A compute node.
struct Compute {
    process: ProcessId,
    threads: Rc<Threads>,
    index: AnyIndex<Rc<Threads>>,
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
        bed.fill()?;
        bed.load.mix = Mix::C;
        bed.run(load.testbed.machines * LOADERS.div_ceil(load.coroutines), load.warm_up, 0)?;
        bed.load.mix = load.mix;
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
        let mut bed = Bed { world, machines, load, compute: Vec::new(), inserted: Rc::default() };
        for _ in 0..load.testbed.machines {
            let options =
                Options { entropy: random.bits(), node_cache: Some(load.node_cache()), ..load.options };
            let compute = bed.open(options)?;
            bed.compute.push(compute);
        }
        Ok(bed)
    }

    fn open(&self, options: Options) -> Result<Compute, String> {
        let threads = self.machines.connect_threads(self.load.threads().max(LOADERS));
        let (fabric, members) = (Rc::clone(&threads), self.load.members);
        let opened = self.world.complete(SECONDS, async move {
            AnyIndex::open_in(fabric, members, STORE, &options).await.map_err(|error| error.to_string())
        });
        let index = opened.unwrap_or_else(|| Err("the index was not opened within 1 s".to_owned()))?;
        let process = self.world.start_process();
        self.world.spawn(process, index.keeper());
        Ok(Compute { process, threads, index })
    }

    /// Inserts all records.
    fn fill(&self) -> Result<(), String> {
        let load = Load { mix: Mix::LOAD, ..self.load };
        let names = self.load.names();
        let all = self.load.records;
        let tasks = self.load.testbed.machines * LOADERS;
        let work = Rc::new(Work::default());
        work.clients.set(tasks);
        for task in 0..tasks {
            let compute = &self.compute[(task % self.load.testbed.machines) as usize];
            let mut client = Client::of(compute.index.another(), load, names, &self.inserted);
            let work = Rc::clone(&work);
            self.world.spawn(compute.process, async move {
                for record in (u64::from(task)..all).step_by(tasks as usize) {
                    if let Err(error) = client.put(record).await {
                        work.failed.borrow_mut().get_or_insert(error);
                        break;
                    }
                }
                work.clients.set(work.clients.get() - 1);
            });
        }
        self.world.run_while(self.world.now() + LOAD_MAX, || work.clients.get() > 0);
        self.inserted.set(all);
        match work.failed.take() {
            Some(error) => Err(error),
            None if work.clients.get() > 0 => Err("the records were not inserted in 60 s".to_owned()),
            None => Ok(()),
        }
    }

    /// Sets the operations of the next measurements.
    pub fn set_mix(&mut self, mix: Mix) {
        self.load.mix = mix;
    }

    /// Sets the Zipf coefficient of the records of the next measurements.
    pub fn set_skew(&mut self, skew: f64) {
        self.load.skew = skew;
    }

    /// Measures `operations` operations of `clients` clients, after a warm-up of 8 operations of each coroutine.
    /// Successive clients are on successive compute nodes, round robin.
    ///
    /// # Errors
    /// An operation failed, or the operations did not complete in time.
    ///
    /// # Panics
    /// If there are more clients than the load has.
    pub fn measure(&self, clients: u32, operations: u64) -> Result<Measured, String> {
        assert!(
            clients <= self.load.clients_max,
            "the bed has connections for {} clients",
            self.load.clients_max
        );
        self.run(clients, u64::from(clients * self.load.coroutines) * 8, operations)
    }

    /// Runs `warm_up` operations and then `operations`, which are measured.
    fn run(&self, clients: u32, warm_up: u64, operations: u64) -> Result<Measured, String> {
        let (world, load, machines) = (&self.world, self.load, self.load.testbed.machines);
        let work = Rc::new(Work { left: Cell::new(warm_up + operations), ..Work::default() });
        let latencies = Rc::new(RefCell::new(Latencies::new()));
        let tasks = clients * load.coroutines;
        work.clients.set(tasks);
        for (number, compute) in (0..machines.min(clients)).zip(&self.compute) {
            compute.threads.activate((clients - number).div_ceil(machines) as usize);
        }
        for task in 0..tasks {
            let compute = &self.compute[(task / load.coroutines % machines) as usize];
            let mut client = Client::of(compute.index.another(), load, load.names(), &self.inserted);
            let (work, random, latencies) = (Rc::clone(&work), world.random().fork(), Rc::clone(&latencies));
            let clock = Rc::clone(&compute.threads);
            world.spawn(compute.process, async move {
                while work.left.get() > 0 {
                    let since = clock.now();
                    if let Err(error) = client.perform(&random).await {
                        work.failed.borrow_mut().get_or_insert(error);
                        break;
                    }
                    let left = work.left.get();
                    if left <= operations && left > 0 {
                        latencies.borrow_mut().record(clock.now() - since);
                    }
                    work.left.set(left.saturating_sub(1));
                }
                work.clients.set(work.clients.get() - 1);
            });
        }
        let until = world.now() + SECONDS + (warm_up + operations) * SLOWEST;
        world.run_while(until, || work.left.get() > operations && work.failed.borrow().is_none());
        let (since, before, counted) = (world.now(), self.machines.traffic(), self.counters());
        world.run_while(until, || work.left.get() > 0 && work.failed.borrow().is_none());
        let (lasted, after, counters) = (world.now() - since, self.machines.traffic(), self.counters());
        world.run_while(until, || work.clients.get() > 0);
        if let Some(error) = work.failed.take() {
            return Err(error);
        }
        if work.clients.get() > 0 || (lasted == 0 && operations > 0) {
            return Err(format!("{operations} operations of {clients} clients did not complete in time"));
        }
        let each = |count: u64| count as f64 / operations as f64;
        let traffic = |count: fn(&Traffic) -> u64| count(&after) - count(&before);
        let [ops, bytes_in, bytes_out] =
            [traffic(|at| at.ops), traffic(|at| at.bytes_in), traffic(|at| at.bytes_out)];
        let time_ps = lasted as f64 * 1e3 * f64::from(load.members);
        let grown =
            counters.into_iter().zip(counted).map(|((name, now), (_, before))| (name, each(now - before)));
        let latencies = latencies.borrow();
        Ok(Measured {
            clients,
            ops_per_s: operations as f64 * SECONDS as f64 / lasted as f64,
            mean_us: latencies.mean_us(),
            p99_us: latencies.percentile_us(99.0),
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
        let Mix { reads, inserts, scans, is_latest } = self.load.mix;
        let kind = random.share();
        if kind < inserts {
            let record = self.inserted.replace(self.inserted.get() + 1);
            return self.put(record).await;
        }
        let drawn = self.ranks.draw(random);
        let record = match (is_latest, self.names.is_ordered) {
            // The latest record may still be inserted.
            (true, _) => (self.inserted.get() - 1).saturating_sub(drawn),
            // Hot records are no neighbours.
            (false, true) => (u128::from(drawn) * 2_654_435_761 % u128::from(self.load.records)) as u64,
            (false, false) => drawn,
        };
        if kind < inserts + reads {
            self.get(record).await
        } else if kind < inserts + reads + scans {
            self.scan(record, 1 + random.below(SCAN_MAX)).await
        } else {
            self.put(record).await
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

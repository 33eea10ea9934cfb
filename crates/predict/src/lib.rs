//! Simulates a system under a closed loop of clients, on the papers' machines in virtual time. The system is a
//! key-value store, a transactional store, a store of latched objects or a tree of such objects on one node, a block
//! store on several, or a node that answers FaSST's calls. [`index`] does so for ordered indexes, and
//! [`calls`] for FaSST's calls and READs, and [`oltp`] for FaSST's transactions, on machines that are nodes and clients
//! at once.
//!
//! Invariant: the real protocol runs on a real store's bytes; only time is modelled. So clients that use the same key
//! at the same time hinder each other as the protocol lets them.

#![forbid(unsafe_code)]

pub mod calls;
pub mod index;
pub mod oltp;

use farside_bench::workload::skew::Zipf;
use farside_bench::workload::{self, Lengths};
use farside_remote::NodeId;
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use farside_sim::fabric::hardware::{BufferReturn, Machines, PoolClient, ServiceWork, Setup, start_node};
use farside_sim::hardware::{Inputs, Platform, Testbed};
use farside_sim::nic::Traffic;
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{Bell, MILLIS, Nanos, SECONDS, World};
use farside_systems::blocks::{BLOCK_MAX, BLOCK_MIN, Blocks};
use farside_systems::kv::Kv;
use farside_systems::latch::btree::Btree;
use farside_systems::latch::system::LatchKind;
use farside_systems::latch::{self, Latched, Latching};
use farside_systems::members::{self, New};
use farside_systems::registry::{self, AnyBlocks, AnyTxn, OneKv, Registered};
use farside_systems::rpc::echo::{self, Asking, Echo};
use farside_systems::store::{self, Members};
use farside_systems::system::{Backoff, Family, Got, Nodes, Options, Sizing, SizingError, System as _};
use farside_systems::txn::fasst;
use farside_systems::txn::prism_tx;
use farside_systems::txn::retry::{self, Attempts};
use farside_systems::txn::{KEY_MAX, Prepare, Transacting, Txn, TxnError};
use std::cell::{Cell, RefCell};
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::time::Duration;

/// Bytes of a key: 8, as in PRISM, section 6.2.
const KEY_LEN: usize = size_of::<u64>();

/// Number of replicas of a replicated system, as in PRISM's evaluation of PRISM-RS.
const REPLICAS: usize = 3;

/// Systems that have a model: all of their families.
fn systems() -> impl Iterator<Item = &'static Registered> {
    let has_model = |system: &&Registered| {
        matches!(system.family, Family::Kv | Family::Blocks | Family::Latched | Family::Txn | Family::Calls)
    };
    registry::ALL.iter().filter(has_model)
}

/// Returns the system of this kind.
///
/// # Errors
/// The kind is unknown, or there is no model of it. The text lists the alternatives.
pub fn system(kind: &str) -> Result<&'static Registered, String> {
    let found = systems().find(|system| system.kind == kind);
    found.ok_or_else(|| format!("no model of '{kind}': name {}", names()))
}

/// Returns the kinds of all systems that have a model, joined for a sentence: `prism-kv, pilaf or prism-rs`.
pub fn names() -> String {
    registry::joined(systems())
}

/// A variant of a system, which changes the setup of the model.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Name in figures; empty for this project's variant.
    pub name: &'static str,
    /// Changes the model's setup to the variant's.
    pub setup: fn(&mut Setup),
    /// Options of the clients.
    pub options: Options,
    /// How clients synchronize, and where latches lie, in a store of latched objects.
    pub latching: Latching,
    /// The tree whose nodes are the objects of the store, if they are.
    pub tree: Option<Tree>,
    /// Options of a transactional store. The model sets those for its number of clients.
    pub transacting: Transacting,
    /// Whether the ops on the log of a PRISM-TX store take neither bytes nor time, as if clients wrote no intents. No
    /// protocol without intents survives the death of a client: this is for experiments.
    pub log_is_free: bool,
    /// Whether a client that aborts a transaction goes on with the next one. If not, it repeats the transaction until
    /// it commits.
    pub gives_up: bool,
}

/// A B-tree of latched objects. GETs are lookups of keys, and PUTs overwrite values.
#[derive(Clone, Copy, Debug)]
pub struct Tree {
    /// Number of entries of each node, except the root and the last node of each level.
    pub fill: usize,
    /// How lookups read nodes.
    pub search: Search,
}

/// How lookups read the nodes of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// In the way of the store's scheme.
    Synchronized,
    /// By plain READs, which nothing checks: only of a tree that nobody changes.
    Unsynchronized,
}

impl Tree {
    /// Number of objects of a tree with this many keys.
    fn objects(&self, keys: u64) -> u64 {
        // The root and the object that counts nodes.
        let (mut objects, mut left) = (2, keys);
        while left > self.fill as u64 {
            left = left.div_ceil(self.fill as u64);
            objects += left;
        }
        objects
    }
}

impl Variant {
    /// The system as this project implements it.
    pub const OURS: Variant = Variant {
        name: "",
        setup: |_| {},
        options: Options::NONE,
        latching: Latching::NONE,
        tree: None,
        transacting: Transacting::NONE,
        log_is_free: false,
        gives_up: false,
    };
    /// The paper's reclamation (PRISM, section 6.1): clients request the addresses of new buffers, and report buffers
    /// that they no longer use.
    pub const PAPER: Variant = Variant {
        name: "paper",
        setup: |setup| setup.buffer_return = BufferReturn::ByReport,
        ..Variant::OURS
    };
    /// The paper's reclamation, and PRISM-TX's prepare in two rounds: all reads are checked, then all writes (PRISM,
    /// section 8). Intents are logged and keys are settled in order as in [`Variant::OURS`]: the paper does neither,
    /// and loses writes without.
    pub const TWO_ROUNDS: Variant = Variant {
        transacting: Transacting { prepare: Some(Prepare::Paper), ..Transacting::NONE },
        ..Variant::PAPER
    };
    /// [`Variant::TWO_ROUNDS`] as if clients wrote no intents, which is what the paper describes.
    pub const NO_INTENTS: Variant = Variant { log_is_free: true, ..Variant::TWO_ROUNDS };
    /// A node whose cores sleep until events wake them, as Chequer's server does: it has no polling threads.
    pub const EVENTS: Variant =
        Variant { name: "events", setup: |setup| setup.sleeps = true, ..Variant::OURS };
    /// ABDLOCK as published: a lock is released in a round trip of its own. The paper does not say how long clients
    /// pause between attempts. These pauses serve ABDLOCK best on the paper's machines, whose round trips take 2 to
    /// 6 us.
    pub const RELEASES_APART: Variant = Variant {
        name: "releases apart",
        options: Options {
            releases_apart: true,
            backoff: Some(Backoff { first: Duration::from_micros(5), longest: Duration::from_millis(10) }),
            ..Variant::OURS.options
        },
        ..Variant::OURS
    };
}

/// A workload: a system, its machines, and its operations.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Kind of the system.
    pub system: &'static str,
    /// Variant of the system.
    pub variant: Variant,
    /// Platform that runs the chains.
    pub platform: Platform,
    /// The machines, and the network between them.
    pub testbed: Testbed,
    /// Parameters of the machines' model.
    pub inputs: Inputs,
    /// Share of operations that are GETs, 0 to 1; the others are PUTs. In a transactional store, a GET reads
    /// `keys` records in one transaction, and a PUT reads and writes them. A GET by FaSST's calls is a short request
    /// with a value in its response, and a PUT a request with a value and a short response.
    pub reads: f64,
    /// Number of records of an operation: 1, except in transactional stores.
    pub keys: usize,
    /// Bytes of a value, of the longest if lengths vary.
    pub value_len: usize,
    /// Distribution of the lengths of values.
    pub lengths: Lengths,
    /// Zipf coefficient of the keys; 0 if all keys are equally likely.
    pub skew: f64,
    /// Number of records, over which Zipf's law then holds. If absent, the model has fewer records than the paper:
    /// see `Keys`.
    pub records: Option<u64>,
    /// Number of values that each client caches, in systems whose clients cache values.
    pub cached: usize,
}

/// One measurement of a load.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Number of clients. Each runs one operation at a time, in a closed loop.
    pub clients: u32,
    /// Operations per second.
    pub ops_per_s: f64,
    /// Mean latency of an operation, in microseconds.
    pub mean_us: f64,
    /// Mean number of round trips of an operation. If the system has several nodes, mean per node.
    pub round_trips: f64,
    /// Mean number of bytes that an operation sends to all nodes, including packet headers.
    pub bytes_in: f64,
    /// Mean number of bytes that an operation receives from all nodes, including packet headers.
    pub bytes_out: f64,
}

/// Maximum number of records of a store. The paper's runs have more: see `Keys`.
const RECORDS_MAX: u64 = 1 << 14;
/// Maximum number of bytes of all values of a store.
const BYTES_MAX: u64 = 64 << 20;

/// Number of keys over which Zipf's law holds: the records of PRISM's application benchmarks.
const KEYS: u64 = 8_000_000;

impl Load {
    fn records(&self) -> u64 {
        if let Some(records) = self.records {
            return records;
        }
        (BYTES_MAX / self.value_len.max(1) as u64).min(RECORDS_MAX)
    }

    fn value(&self) -> Vec<u8> {
        vec![7; self.value_len]
    }

    fn sizing(&self, system: &Registered) -> Sizing {
        let has_keys = matches!(system.family, Family::Kv | Family::Txn);
        Sizing {
            items: Some(self.variant.tree.map_or(self.records(), |tree| tree.objects(self.records()))),
            key_len: if has_keys { KEY_LEN } else { 0 },
            value_len: self.value_len,
            // Collision-free, as in the paper's runs.
            collision_free: has_keys,
            latching: self.variant.latching,
            transacting: self.transacting(),
            ..Sizing::default()
        }
    }

    /// Largest number of clients of a curve. A store of FaSST has fewer ids than the others.
    fn clients_max(&self) -> u32 {
        if self.system == fasst::KIND { u32::from(fasst::layout::IDS_MAX / 2) } else { CLIENTS_MAX }
    }

    /// Options of a transactional store: an id for each client, also for those of two measurements that follow each
    /// other, and room for one transaction of each.
    fn transacting(&self) -> Transacting {
        /// Room for the headers of a transaction and of one write, and for the longest key, which a store must have.
        const HEADERS: usize = 32 + KEY_MAX;
        /// Room for the header and the key of another write.
        const HEADER: usize = 16 + KEY_LEN;
        let writes = HEADERS + self.value_len + (self.keys - 1) * (HEADER + self.value_len);
        Transacting {
            ids: Some(2 * self.clients_max() as u16),
            lanes: Some(1),
            writes_max: Some(u32::try_from(writes).unwrap_or(u32::MAX)),
            ..self.variant.transacting
        }
    }

    /// Returns the quota of each node's part of the store, in bytes.
    ///
    /// # Errors
    /// The system cannot have values of this length.
    fn quota(&self, system: &Registered) -> Result<u64, String> {
        // A buffer is at most a quarter larger than its item. The second half is for retired buffers that are not free
        // yet.
        let items = match system.family {
            Family::Latched | Family::Calls => 0,
            _ => self.records() * (self.value_len as u64 + 256) * 5 / 2,
        };
        let table = match system.family {
            Family::Blocks | Family::Latched | Family::Txn => {
                (system.footprint)(&self.sizing(system))
                    .map_err(|error| match error {
                        SizingError::Value(most) if system.family == Family::Txn => {
                            format!("no values of {} bytes: give at most {most}", self.value_len)
                        }
                        SizingError::Items | SizingError::Writes(_) if system.family == Family::Txn => format!(
                            "no transactions that write {} values of {} bytes: give fewer keys, or shorter values",
                            self.keys, self.value_len
                        ),
                        SizingError::Value(most) if system.family == Family::Latched => {
                            format!("no objects of {} bytes: give at most {most}", self.value_len)
                        }
                        SizingError::Value(_) => format!(
                            "no blocks of {} bytes: give a multiple of {BLOCK_MIN} up to {BLOCK_MAX}",
                            self.value_len
                        ),
                        SizingError::Items | SizingError::Writes(_) => {
                            format!(
                                "no store of {} {}: give shorter ones",
                                self.records(),
                                system.family.contents()
                            )
                        }
                    })?
                    .table_bytes
            }
            _ => 0,
        };
        // Replaced values arrive as fast as the link is, and their buffers are at most a quarter larger.
        let quarantine_ns = system.work.quarantine.as_nanos() as u64;
        let quarantined = self.testbed.link_gbit * quarantine_ns / 8 * 3 / 2;
        Ok((items + table + quarantined + (16 << 20)) >> 20 << 20)
    }

    /// Whether a GET of a record that was never put moves fewer bytes, or is no GET of a value. If not, the store has
    /// all records from the start: blocks that lie in the table, and not in buffers.
    fn needs_records(&self, system: &Registered) -> bool {
        let footprint = (system.footprint)(&self.sizing(system));
        self.variant.tree.is_some()
            || matches!(system.family, Family::Kv | Family::Txn)
            || footprint.is_ok_and(|footprint| footprint.item_bytes > 0)
    }

    fn keys(&self) -> Keys {
        let zipf = (self.skew > 0.0).then(|| Zipf::new(self.records.unwrap_or(KEYS), self.skew));
        Keys { zipf, records: self.records(), is_whole: self.records.is_some() }
    }
}

/// Draws the records of operations.
///
/// The paper's stores have more records than the simulated one. No number of the model depends on how many there are,
/// as long as few clients use the same record at the same time. With skew, the hot keys therefore have records of their
/// own: a sixteenth of the records. All other keys share the rest, where a record is less likely than the coldest hot
/// key.
#[derive(Clone, Copy)]
struct Keys {
    zipf: Option<Zipf>,
    records: u64,
    /// Whether each key has a record of its own.
    is_whole: bool,
}

impl Keys {
    fn draw(&self, random: &Random) -> u64 {
        let Some(zipf) = &self.zipf else { return random.below(self.records) };
        let (key, hot) = (zipf.draw(|| random.share()), self.records / 16);
        if self.is_whole || key < hot { key } else { hot + (key - hot) % (self.records - hot) }
    }

    /// Draws records until there are `count` different ones with the first.
    fn draw_others(&self, first: u64, count: usize, random: &Random) -> Vec<u64> {
        let mut records = vec![first];
        while records.len() < count {
            let record = self.draw(random);
            if !records.contains(&record) {
                records.push(record);
            }
        }
        records
    }
}

/// Largest number of clients of a curve, unless a store has fewer ids.
const CLIENTS_MAX: u32 = 4_096;

/// Longest mean time per operation, in ns. A measurement times out after this time per operation, plus one second.
const SLOWEST: Nanos = MILLIS;

/// Name of the store.
const STORE: &str = "figure";

/// A loaded store, and the machines that reach it.
pub struct Bed {
    world: World,
    machines: Rc<Machines>,
    load: Load,
    /// Source of the clients' entropy.
    random: Random,
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.world.end();
    }
}

impl Bed {
    /// Creates a store and puts all records, unless they lie in the store's table from the start.
    ///
    /// # Errors
    /// The store cannot be created, or a put fails.
    pub fn new(load: Load, seed: u64) -> Result<Bed, String> {
        let (system, world, random) = (system(load.system)?, World::new(seed), Random::new(!seed));
        let (sizing, nodes) =
            (load.sizing(system), if system.nodes == Nodes::Replicas { REPLICAS } else { 1 });
        let quota = load.quota(system)?;
        if load.lengths != Lengths::Constant && system.family == Family::Blocks {
            return Err(format!("all blocks of {} are equally long: give one length", load.system));
        }
        if load.lengths.shortest(load.value_len) > load.value_len {
            return Err(format!(
                "the longest value has {} bytes, less than the shortest: give a smaller minfieldlength",
                load.value_len
            ));
        }
        if system.family == Family::Latched && !load.value_len.is_multiple_of(8) {
            return Err(format!("no objects of {} bytes: give a multiple of 8", load.value_len));
        }
        let lens = echo::LEN_MIN..=echo::LEN_MAX;
        if system.family == Family::Calls
            && (!lens.contains(&load.value_len) || load.lengths != Lengths::Constant)
        {
            return Err(format!(
                "no calls with {} bytes{}: give one length from {} to {}",
                load.value_len,
                if load.lengths == Lengths::Constant { "" } else { " and fewer" },
                lens.start(),
                lens.end()
            ));
        }
        let work = &system.work;
        let service = ServiceWork { accesses: work.call_accesses, checksummed: work.call_checksummed };
        let mut setup = Setup { service, inputs: load.inputs, ..Setup::new(load.platform, load.testbed) };
        (load.variant.setup)(&mut setup);
        let nodes: Vec<Node> = (0..nodes as u32)
            .map(|id| {
                start_node(&world, NodeId(id), Rc::new(registry::all_kinds), quota + (32 << 20), &setup)
            })
            .collect();
        let (name, kind) = (STORE.to_owned(), load.system.to_owned());
        let new = New { name, kind, sizing, quota, members: nodes.len() };
        let attempt = [random.bits(), random.bits()];
        let opened = world.complete(SECONDS, async move {
            let machines = Machines::open(&nodes, setup).await.map_err(|error| error.to_string())?;
            let created = members::create(&*machines.connect(), machines.count(), &new, attempt).await;
            created.map_err(|error| error.to_string())?;
            if load.variant.log_is_free {
                let found = store::fetch_of(&*machines.connect(), NodeId(0), STORE, prism_tx::KIND).await;
                let store = found.map_err(|error| error.to_string())?;
                machines.leave_out(NodeId(0), prism_tx::layout::log_of(&store)?);
            }
            Ok(machines)
        });
        let machines = opened.unwrap_or_else(|| Err("the nodes did not respond within 1 s".to_owned()))?;
        let bed = Bed { world, machines, load, random };
        if load.needs_records(system) {
            bed.fill()?;
        }
        Ok(bed)
    }

    /// Sets the Zipf coefficient of the keys of the next measurements.
    pub fn set_skew(&mut self, skew: f64) {
        self.load.skew = skew;
    }

    /// Connects another client.
    fn opening(&self) -> Opening {
        // Bytes of the key and of the entry in the cache.
        const ENTRY: usize = 128;
        let value_cache = self.load.cached * (self.load.value_len + ENTRY);
        let options = Options { entropy: self.random.bits(), value_cache, ..self.load.variant.options };
        let (world, client) = (self.world.clone(), self.machines.connect());
        Opening { world, client, nodes: self.machines.count(), options }
    }

    /// Puts every record. A tree is loaded by one client.
    fn fill(&self) -> Result<(), String> {
        const LOADERS: u64 = 64;
        let clients = if self.load.variant.tree.is_some() { 1 } else { LOADERS };
        let work = Rc::new(Work { left: Cell::new(u64::MAX), ..Work::default() });
        let loaders = Rc::new(Cell::new(clients));
        for loader in 0..clients {
            let (opening, load) = (self.opening(), self.load);
            let (work, loaders) = (Rc::clone(&work), Rc::clone(&loaders));
            self.world.spawn(self.world.start_process(), async move {
                let keys = (loader..load.records()).step_by(clients as usize);
                let done = put_all(opening, &work, loader, load, keys).await;
                if let Err(error) = done {
                    work.failed.borrow_mut().get_or_insert(error);
                }
                loaders.set(loaders.get() - 1);
            });
        }
        self.world.run_while(self.world.now() + SECONDS, || loaders.get() > 0);
        match work.failed.take() {
            Some(error) => Err(error),
            None if loaders.get() > 0 => Err("the store was not filled within 1 s".to_owned()),
            None => Ok(()),
        }
    }

    /// Measures `operations` operations of `clients` clients, after a warm-up of 8 operations per client.
    ///
    /// # Errors
    /// An operation failed, or the operations did not complete in time.
    pub fn measure(&self, clients: u32, operations: u64) -> Result<Measured, String> {
        let warm_up = u64::from(clients) * 8;
        let work = Rc::new(Work { left: Cell::new(warm_up + operations), ..Work::default() });
        let world = &self.world;
        work.clients.set(clients);
        for number in 0..clients {
            let opening = self.opening();
            let (work, load, random) = (Rc::clone(&work), self.load, world.random().fork());
            world.spawn(world.start_process(), async move {
                let done = closed_loop(opening, (number, clients), load, &random, &work, operations).await;
                if let Err(error) = done {
                    work.failed.borrow_mut().get_or_insert(error);
                }
                work.clients.set(work.clients.get() - 1);
            });
        }
        let until = world.now() + SECONDS + (warm_up + operations) * SLOWEST;
        world.run_while(until, || work.left.get() > operations && work.failed.borrow().is_none());
        let (since, before) = (world.now(), self.machines.traffic());
        world.run_while(until, || work.left.get() > 0 && work.failed.borrow().is_none());
        let (lasted, after) = (world.now() - since, self.machines.traffic());
        world.run_while(until, || work.clients.get() > 0);
        if let Some(error) = work.failed.take() {
            return Err(error);
        }
        if work.clients.get() > 0 || lasted == 0 {
            return Err(format!("{operations} operations of {clients} clients did not complete in time"));
        }
        let each = |count: fn(&Traffic) -> u64| (count(&after) - count(&before)) as f64 / operations as f64;
        Ok(Measured {
            clients,
            ops_per_s: operations as f64 * SECONDS as f64 / lasted as f64,
            mean_us: work.took.get() as f64 / work.taken.get() as f64 / 1e3,
            round_trips: each(|traffic| traffic.round_trips) / f64::from(self.machines.count()),
            bytes_in: each(|traffic| traffic.bytes_in),
            bytes_out: each(|traffic| traffic.bytes_out),
        })
    }

    /// Measures increasing numbers of clients, starting with one. Stops when throughput grows by less than 1 %, or
    /// after 4,096 clients: 2,047 of FaSST.
    ///
    /// # Errors
    /// As [`Bed::measure`].
    pub fn curve(&self, operations: u64) -> Result<Vec<Measured>, String> {
        const GROWTH_MIN: f64 = 1.01;
        let mut curve = vec![self.measure(1, operations)?];
        let mut clients = 2;
        while clients <= self.load.clients_max() {
            let last = curve[curve.len() - 1].ops_per_s;
            let next = self.measure(clients, operations.max(u64::from(clients) * 20))?;
            curve.push(next);
            if next.ops_per_s < last * GROWTH_MIN {
                break;
            }
            // Smaller steps where the curve bends.
            clients = if clients < 16 { clients * 2 } else { clients * 3 / 2 };
        }
        Ok(curve)
    }
}

/// State that the clients of one measurement share.
#[derive(Default)]
struct Work {
    /// Number of operations that have not completed.
    left: Cell<u64>,
    /// Number of clients that have opened the store, and the bell that rings at each of them.
    opened: Cell<u32>,
    opens: Bell,
    /// Number of clients that have not stopped.
    clients: Cell<u32>,
    /// Number of operations whose latency was measured.
    taken: Cell<u64>,
    /// Sum of the latencies of the timed operations, in ns.
    took: Cell<Nanos>,
    /// The first error of any client.
    failed: RefCell<Option<String>>,
}

impl Work {
    /// Waits until this number of clients have opened the store.
    async fn opened(&self, clients: u32) {
        while self.opened.get() < clients {
            self.opens.rung().await;
        }
    }
}

/// A connected client, before it opens the store.
struct Opening {
    world: World,
    client: Rc<PoolClient>,
    nodes: u32,
    options: Options,
}

/// A client of the store.
enum Store {
    Kv(Box<OneKv<Rc<PoolClient>>>),
    Blocks(AnyBlocks<Rc<PoolClient>>),
    Latched(Box<Latched<Rc<PoolClient>>>),
    Tree(Box<Btree<Rc<PoolClient>>>, Tree),
    Txn(Box<AnyTxn<Rc<PoolClient>>>),
    Calls(Box<Echo<Rc<PoolClient>>>),
}

impl Opening {
    /// Opens the store. The clients of a block store claim ids by their first write, one after the other, so that they
    /// do not disturb each other.
    async fn open(self, load: Load, number: u32, work: &Work) -> Result<Store, String> {
        let Opening { world, client, nodes, options } = self;
        let store = match system(load.system)?.family {
            Family::Blocks => {
                work.opened(number).await;
                let opened = AnyBlocks::open_in(client, nodes, STORE, &options).await;
                let mut blocks = opened.map_err(|error| error.to_string())?;
                world.spawn(world.start_process(), blocks.keeper());
                blocks.write(0, &load.value()).await.map_err(|error| error.to_string())?;
                Store::Blocks(blocks)
            }
            Family::Latched => {
                let found = store::fetch_of(&client, NodeId(0), STORE, latch::KIND).await;
                let members = Members::one(NodeId(0), found.map_err(|error| error.to_string())?);
                let opened = LatchKind::open(client, &members, &options).await;
                let latched = opened.map_err(|error| error.to_string())?;
                match load.variant.tree {
                    None => Store::Latched(Box::new(latched)),
                    Some(tree) => {
                        let nodes = Btree::new(latched).map_err(|error| error.to_string())?;
                        Store::Tree(Box::new(nodes), tree)
                    }
                }
            }
            Family::Txn => {
                let opened = AnyTxn::open_in(client, nodes, STORE, &options).await;
                let txn = opened.map_err(|error| error.to_string())?;
                world.spawn(world.start_process(), txn.keeper());
                // The keeper carries out the client's transactions once it has run for the first time.
                world.sleep(1).await;
                Store::Txn(Box::new(txn))
            }
            Family::Calls => {
                let opened = Echo::open_in(client, nodes, STORE).await;
                Store::Calls(Box::new(opened.map_err(|error| error.to_string())?))
            }
            _ => {
                let opened = OneKv::open(client, NodeId(0), STORE, &options).await;
                Store::Kv(Box::new(opened.map_err(|error| error.to_string())?))
            }
        };
        work.opened.set(work.opened.get() + 1);
        work.opens.ring();
        Ok(store)
    }
}

impl Store {
    async fn put(&mut self, record: u64, value: &[u8]) -> Result<(), String> {
        match self {
            Store::Kv(kv) => kv.put(&record.to_be_bytes(), value).await.map_err(|error| error.to_string()),
            Store::Blocks(blocks) => blocks.write(record, value).await.map_err(|error| error.to_string()),
            Store::Latched(latched) => {
                let add = async |content: &mut [u8]| {
                    let next = repeated(content)?.wrapping_add(1);
                    content.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&next.to_le_bytes()));
                    Ok(())
                };
                latched.with_exclusive(record, add).await.map_err(|error| error.to_string())?
            }
            Store::Tree(nodes, _) => nodes.put(record, record).await.map_err(|error| error.to_string()),
            Store::Txn(txn) => {
                txn.begin();
                txn.put(&record.to_be_bytes(), value).map_err(|error| error.to_string())?;
                txn.commit().await.map(drop).map_err(|error| error.to_string())
            }
            Store::Calls(echo) => call(echo, value.len(), echo::LEN_MIN).await,
        }
    }

    /// Reads a record, whose value must be this one, or a part of it if lengths vary. Returns its length.
    async fn get(
        &mut self,
        record: u64,
        value: &[u8],
        lengths: &RangeInclusive<usize>,
        room: &mut [u8],
    ) -> Result<usize, String> {
        match self {
            Store::Kv(kv) => {
                let found = kv.get(&record.to_be_bytes()).await.map_err(|error| error.to_string())?;
                let len = found.expect("Bed::new put every record").value.len();
                assert!(lengths.contains(&len), "a value is as it was put: {len} bytes");
                return Ok(len);
            }
            Store::Blocks(blocks) => {
                blocks.read(record, room).await.map_err(|error| error.to_string())?;
                assert!(room == value || room.iter().all(|&byte| byte == 0), "a block is as it was written");
            }
            Store::Latched(latched) => {
                latched.read(record, room).await.map_err(|error| error.to_string())?;
                repeated(room)?;
            }
            Store::Tree(nodes, tree) => {
                let found = match tree.search {
                    Search::Synchronized => nodes.get(record).await,
                    Search::Unsynchronized => nodes.get_unsynchronized(record).await,
                };
                let found = found.map_err(|error| error.to_string())?;
                assert_eq!(found, Some(record), "a key has the value with which it was loaded");
            }
            Store::Calls(echo) => call(echo, echo::LEN_MIN, value.len()).await?,
            Store::Txn(_) => unreachable!("transactions read their records by `Transactions::perform`"),
        }
        Ok(value.len())
    }
}

/// Sends one request, and checks the response.
async fn call(
    echo: &mut Echo<Rc<PoolClient>>,
    request_len: usize,
    response_len: usize,
) -> Result<(), String> {
    let asking = Asking { requests: 1, request_len, response_len };
    echo.ask(asking, || 0).await.map_err(|error| error.to_string())
}

/// Transactions of one client.
struct Transactions {
    clock: Rc<PoolClient>,
    /// Source of the pauses between attempts.
    draws: Draws,
    attempts: Attempts,
    lengths: RangeInclusive<usize>,
}

impl Transactions {
    fn of(load: &Load, clock: Rc<PoolClient>, seed: u64) -> Transactions {
        let backoff = load.variant.options.backoff.unwrap_or(retry::BACKOFF);
        let most = if load.variant.gives_up { 1 } else { u32::MAX };
        Transactions {
            clock,
            draws: Draws(seed),
            attempts: Attempts { most, backoff, ..Attempts::UNLIMITED },
            lengths: load.lengths.shortest(load.value_len)..=load.value_len,
        }
    }

    /// Reads records in a transaction, and writes this value to each of them if there is one. Returns whether the
    /// transaction has committed.
    async fn perform(
        &mut self,
        txn: &mut AnyTxn<Rc<PoolClient>>,
        records: &[u64],
        value: Option<&[u8]>,
    ) -> Result<bool, String> {
        let keys: Vec<[u8; KEY_LEN]> = records.iter().map(|record| record.to_be_bytes()).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        let legal = self.lengths.clone();
        let body = async |txn: &mut AnyTxn<Rc<PoolClient>>| {
            match value {
                Some(_) => txn.fetch_to_write(&keys, &[]).await?,
                None => txn.fetch(&keys).await?,
            }
            for key in &keys {
                let len = txn.get(key).await?.map(<[u8]>::len);
                assert!(
                    len.is_some_and(|len| legal.contains(&len)),
                    "a value is as it was put: {len:?} bytes"
                );
                if let Some(value) = value {
                    txn.put(key, value)?;
                }
            }
            Ok(())
        };
        match retry::run(txn, &self.clock, &mut self.draws, self.attempts, body).await {
            Ok(_) => Ok(true),
            Err(TxnError::Conflict) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Returns the number that a latched object has in all its words.
///
/// # Errors
/// The words differ: the object has bytes of two writes.
fn repeated(content: &[u8]) -> Result<u64, String> {
    let first = content.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    let is_whole = content.chunks_exact(8).all(|word| word == first.to_le_bytes());
    if is_whole { Ok(first) } else { Err("an object has torn bytes".to_owned()) }
}

async fn put_all(
    opening: Opening,
    work: &Work,
    number: u64,
    load: Load,
    keys: impl Iterator<Item = u64>,
) -> Result<(), String> {
    let mut store = opening.open(load, number as u32, work).await?;
    if let Store::Tree(nodes, tree) = &mut store {
        let pairs: Vec<(u64, u64)> = keys.map(|key| (key, key)).collect();
        return nodes.load(&pairs, tree.fill).await.map_err(|error| error.to_string());
    }
    let value = load.value();
    let (mut lengths, mut drawn) = (load.lengths.chooser(load.value_len), workload::random(number));
    for key in keys {
        store.put(key, &value[..lengths.next(&mut drawn)]).await?;
    }
    Ok(())
}

/// One client's closed loop, which starts when all clients have opened the store. The last `timed` operations of all
/// clients are timed; the ones before are warm-up.
async fn closed_loop(
    opening: Opening,
    (number, clients): (u32, u32),
    load: Load,
    random: &Random,
    work: &Work,
    timed: u64,
) -> Result<(), String> {
    let (client, options) = (Rc::clone(&opening.client), opening.options);
    let mut store = opening.open(load, number, work).await?;
    work.opened(clients).await;
    let (keys, value, mut room) = (load.keys(), load.value(), load.value());
    let costs = &system(load.system).expect("Bed::new checked the kind").work;
    // The scheme's checksums, on both ends.
    let checked = load.variant.latching.checksummed(load.value_len as u64);
    let legal = load.lengths.shortest(load.value_len)..=load.value_len;
    // Its seed is none of those with which the store was filled.
    let seed = !u64::from(number);
    let (mut lengths, mut drawn) = (load.lengths.chooser(load.value_len), workload::random(seed));
    let mut transactions = Transactions::of(&load, Rc::clone(&client), seed);
    while work.left.get() > 0 {
        let (record, since) = (keys.draw(random), client.now());
        let is_get = random.share() < load.reads;
        if let Store::Txn(txn) = &mut store {
            let records = keys.draw_others(record, load.keys, random);
            let value = (!is_get).then(|| &value[..lengths.next(&mut drawn)]);
            if !transactions.perform(txn, &records, value).await? {
                continue;
            }
        } else if is_get {
            let before = client.returned();
            let value_len = store.get(record, &value, &legal, &mut room).await?;
            let returned = client.returned() - before;
            let got = Got { key_len: KEY_LEN, value_len, returned };
            let checking = load.inputs.crc_ns((costs.get_checksummed)(&got) + checked);
            client.sleep(Duration::from_nanos(checking)).await;
        } else {
            let value = &value[..lengths.next(&mut drawn)];
            let preparing = load.inputs.crc_ns((costs.put_checksummed)(&options, value.len()) + checked);
            if preparing > 0 {
                client.sleep(Duration::from_nanos(preparing)).await;
            }
            store.put(record, value).await?;
        }
        let left = work.left.get();
        if left <= timed && left > 0 {
            work.taken.set(work.taken.get() + 1);
            work.took.set(work.took.get() + (client.now() - since).as_nanos() as Nanos);
        }
        work.left.set(left.saturating_sub(1));
    }
    Ok(())
}

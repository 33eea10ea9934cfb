//! Simulates a key-value system under a closed loop of clients, on the papers' machines in virtual time.
//!
//! Invariant: the real protocol runs on a real store's bytes; only time is modelled.

use farside_remote::NodeId;
use farside_remote::clock::Clock;
use farside_remote::control::Ask;
use farside_sim::fabric::hardware::{BufferReturn, Client, Machine, ServiceWork, Setup, Traffic, start_node};
use farside_sim::hardware::{Inputs, Platform, Testbed};
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{MILLIS, Nanos, SECONDS, World};
use farside_systems::kv::{Kv, KvError};
use farside_systems::registry::{self, OneKv, Registered};
use farside_systems::store::StoreError;
use farside_systems::system::{Family, Options, Sizing};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Bytes of a key: 8, as in PRISM, section 6.2.
const KEY_LEN: usize = size_of::<u64>();

/// Returns the key-value system of this kind.
///
/// # Errors
/// The kind is unknown, or is not a key-value store. The text lists the alternatives.
pub fn system(kind: &str) -> Result<&'static Registered, String> {
    let found = registry::named(kind).filter(|system| system.family == Family::Kv);
    found.ok_or_else(|| format!("no model of '{kind}': name {}", registry::names(Family::Kv)))
}

/// A variant of a system, which changes the setup of the model.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Name in figures; empty for this project's variant.
    pub name: &'static str,
    /// Changes the model's setup to the variant's.
    pub setup: fn(&mut Setup),
}

impl Variant {
    /// The system as this project implements it.
    pub const OURS: Variant = Variant { name: "", setup: |_| {} };
    /// The paper's reclamation (PRISM, section 6.1): clients request the addresses of new buffers, and report buffers
    /// that they no longer use.
    pub const PAPER: Variant =
        Variant { name: "paper", setup: |setup| setup.buffer_return = BufferReturn::ByReport };
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
    /// Share of operations that are GETs, 0 to 1; the others are PUTs.
    pub reads: f64,
    /// Bytes of a value.
    pub value_len: usize,
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
    /// Mean number of round trips of an operation.
    pub round_trips: f64,
    /// Mean number of bytes that an operation sends to the node, including packet headers.
    pub bytes_in: f64,
    /// Mean number of bytes that an operation receives from the node, including packet headers.
    pub bytes_out: f64,
}

/// Maximum number of records of a store. The paper's runs have more, but no number of the model depends on it, as long
/// as few clients use the same key at the same time.
const RECORDS_MAX: u64 = 1 << 14;
/// Maximum number of bytes of all values of a store.
const BYTES_MAX: u64 = 64 << 20;

impl Load {
    fn records(&self) -> u64 {
        (BYTES_MAX / self.value_len.max(1) as u64).min(RECORDS_MAX)
    }
}

/// Longest mean time per operation, in ns. A measurement times out after this time per operation, plus one second.
const SLOWEST: Nanos = MILLIS;

/// Name of the store.
const STORE: &str = "figure";

/// A loaded store, and the machines that reach it.
pub struct Bed {
    world: World,
    machine: Rc<Machine>,
    load: Load,
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.world.end();
    }
}

impl Bed {
    /// Creates a store and puts all records.
    ///
    /// # Errors
    /// The store cannot be created, or a put fails.
    pub fn new(load: Load, seed: u64) -> Result<Bed, String> {
        let world = World::new(seed);
        // A buffer is at most a quarter larger than its item. The second half is for retired buffers that are not free
        // yet.
        let quota = (load.records() * (load.value_len as u64 + 256) * 5 / 2 + (16 << 20)) >> 20 << 20;
        let node = start_node(&world, Rc::new(registry::kinds), quota + (32 << 20));
        let work = system(load.system)?.work;
        let service = ServiceWork { accesses: work.call_accesses, checksummed: work.call_checksummed };
        let mut setup = Setup { service, inputs: load.inputs, ..Setup::new(load.platform, load.testbed) };
        (load.variant.setup)(&mut setup);
        let opened = world.complete(SECONDS, async move { open(&node, load, quota, setup).await });
        let machine = opened.unwrap_or_else(|| Err("the node did not respond within 1 s".to_owned()))?;
        let bed = Bed { world, machine, load };
        bed.fill()?;
        Ok(bed)
    }

    /// Puts every record.
    fn fill(&self) -> Result<(), String> {
        const LOADERS: u64 = 64;
        let work = Rc::new(Work { left: Cell::new(u64::MAX), ..Work::default() });
        let loaders = Rc::new(Cell::new(LOADERS));
        for loader in 0..LOADERS {
            let (client, load) = (self.machine.connect(), self.load);
            let (work, loaders) = (Rc::clone(&work), Rc::clone(&loaders));
            self.world.spawn(self.world.start_process(), async move {
                let keys = (loader..load.records()).step_by(LOADERS as usize);
                let done = put_all(client, load, keys).await;
                if let Err(error) = done {
                    work.failed.borrow_mut().get_or_insert(error.to_string());
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
        for _ in 0..clients {
            let client = self.machine.connect();
            let (work, load, random) = (Rc::clone(&work), self.load, world.random().fork());
            work.clients.set(work.clients.get() + 1);
            world.spawn(world.start_process(), async move {
                if let Err(error) = closed_loop(client, load, &random, &work, operations).await {
                    work.failed.borrow_mut().get_or_insert(error.to_string());
                }
                work.clients.set(work.clients.get() - 1);
            });
        }
        let until = world.now() + SECONDS + (warm_up + operations) * SLOWEST;
        world.run_while(until, || work.left.get() > operations && work.failed.borrow().is_none());
        let (since, before) = (world.now(), self.machine.traffic());
        world.run_while(until, || work.left.get() > 0 && work.failed.borrow().is_none());
        let (lasted, after) = (world.now() - since, self.machine.traffic());
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
            round_trips: each(|traffic| traffic.round_trips),
            bytes_in: each(|traffic| traffic.bytes_in),
            bytes_out: each(|traffic| traffic.bytes_out),
        })
    }

    /// Measures increasing numbers of clients, starting with one. Stops when throughput grows by less than 1 %, or
    /// after 4,096 clients.
    ///
    /// # Errors
    /// As [`Bed::measure`].
    pub fn curve(&self, operations: u64) -> Result<Vec<Measured>, String> {
        const CLIENTS_MAX: u32 = 4_096;
        const GROWTH_MIN: f64 = 1.01;
        let mut curve = vec![self.measure(1, operations)?];
        let mut clients = 2;
        while clients <= CLIENTS_MAX {
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

async fn open(node: &Node, load: Load, quota: u64, setup: Setup) -> Result<Rc<Machine>, String> {
    let ask = Ask::CreateStore {
        name: STORE.to_owned(),
        kind: load.system.to_owned(),
        // Collision-free, as in the paper's runs.
        parameters: (system(load.system)?.parameters)(&Sizing {
            items: Some(load.records()),
            key_len: KEY_LEN,
            value_len: load.value_len,
            collision_free: true,
        }),
        quota,
    };
    node.answer(ask).await?;
    Machine::open(node, setup).await.map_err(|error| error.to_string())
}

/// State that the clients of one measurement share.
#[derive(Default)]
struct Work {
    /// Number of operations that have not completed.
    left: Cell<u64>,
    /// Number of clients that have not stopped.
    clients: Cell<u32>,
    /// Number of operations whose latency was measured.
    taken: Cell<u64>,
    /// Sum of the latencies of the timed operations, in ns.
    took: Cell<Nanos>,
    /// The first error of any client.
    failed: RefCell<Option<String>>,
}

async fn connect(client: &Rc<Client>) -> Result<OneKv<Rc<Client>>, StoreError> {
    OneKv::open(Rc::clone(client), NodeId(0), STORE, &Options::default()).await
}

async fn put_all(client: Rc<Client>, load: Load, keys: impl Iterator<Item = u64>) -> Result<(), KvError> {
    let mut kv = connect(&client).await?;
    let value = vec![7; load.value_len];
    for key in keys {
        kv.put(&key.to_be_bytes(), &value).await?;
    }
    Ok(())
}

/// One client's closed loop. The last `timed` operations of all clients are timed; the ones before are warm-up.
async fn closed_loop(
    client: Rc<Client>,
    load: Load,
    random: &Random,
    work: &Work,
    timed: u64,
) -> Result<(), KvError> {
    let mut kv = connect(&client).await?;
    let value = vec![7; load.value_len];
    let checksummed = system(load.system).expect("Bed::new checked the kind").work.get_checksummed;
    let checking = load.inputs.crc_ns(checksummed(KEY_LEN, load.value_len));
    while work.left.get() > 0 {
        let (key, since) = (random.below(load.records()), client.now());
        if random.share() < load.reads {
            let len = kv.get(&key.to_be_bytes()).await?.map(|item| item.value.len());
            assert_eq!(len, Some(load.value_len), "Bed::new put every record");
            client.sleep(Duration::from_nanos(checking)).await;
        } else {
            kv.put(&key.to_be_bytes(), &value).await?;
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

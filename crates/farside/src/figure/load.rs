//! A key-value system under a closed loop of clients, on the papers' machines in virtual time.
//!
//! Invariant: what is measured is the real protocol on a real store's bytes; only time is modelled.

use farside_remote::NodeId;
use farside_remote::clock::Clock;
use farside_remote::control::Ask;
use farside_sim::fabric::hardware::{Client, GivenBack, Machine, ServiceWork, Setup, Traffic, start_node};
use farside_sim::hardware::{Inputs, Platform, Testbed};
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{MILLIS, Nanos, SECONDS, World};
use farside_systems::kv::{Kv, KvError};
use farside_systems::registry::{self, AnyKv, Registered};
use farside_systems::store::StoreError;
use farside_systems::system::{Family, Options, Sizing};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Bytes of a key (PRISM, section 6.2).
const KEY_LEN: usize = size_of::<u64>();

/// The system of that kind.
///
/// # Errors
/// There is none, or it is no key-value store.
pub fn system(kind: &str) -> Result<&'static Registered, String> {
    let found = registry::named(kind).filter(|system| system.family == Family::Kv);
    found.ok_or_else(|| format!("there is no model of '{kind}': name {}", registry::names(Family::Kv)))
}

/// A variant of a system, as far as the model can tell it from others.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Its name in figures; empty for the system as it is here.
    pub name: &'static str,
    /// Changes the model's setup to that of the variant.
    pub setup: fn(&mut Setup),
}

impl Variant {
    /// The system as it is here.
    pub const OURS: Variant = Variant { name: "", setup: |_| {} };
    /// Buffers are given back as in PRISM (section 6.1): clients learn new addresses and report what became garbage.
    pub const PAPER: Variant =
        Variant { name: "paper", setup: |setup| setup.given_back = GivenBack::ByReport };
}

/// What is asked of which system on which machines.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The system's kind.
    pub system: &'static str,
    /// Its variant.
    pub variant: Variant,
    /// What runs its chains.
    pub platform: Platform,
    /// What connects machines.
    pub testbed: Testbed,
    /// What machines are made of.
    pub inputs: Inputs,
    /// The share of operations that are GETs; the others are PUTs.
    pub reads: f64,
    /// Bytes of a value.
    pub value_len: usize,
}

/// What so many clients have measured.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Each asks one operation at a time, and the next when it is answered.
    pub clients: u32,
    /// Operations a second.
    pub ops_per_s: f64,
    /// How long an operation took, on average.
    pub mean_us: f64,
    /// What one cost on the node's link, on average.
    pub round_trips: f64,
    /// Bytes to the node, with those of packets.
    pub bytes_in: f64,
    /// Bytes from it.
    pub bytes_out: f64,
}

/// The most records of a store. There are fewer than in the paper's runs, since no number of the model depends on it:
/// only few clients may meet on one key.
const RECORDS_MAX: u64 = 1 << 14;
/// And the most bytes that its values may have together.
const BYTES_MAX: u64 = 64 << 20;

impl Load {
    fn records(&self) -> u64 {
        (BYTES_MAX / self.value_len.max(1) as u64).min(RECORDS_MAX)
    }
}

/// So long an operation may take on average, and a second more for all of them: else they never end.
const SLOWEST: Nanos = MILLIS;

/// The store's name.
const STORE: &str = "figure";

/// A store that is loaded, and machines that reach it.
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
    /// Loads a store.
    ///
    /// # Errors
    /// The store cannot be made, or a record not be put.
    pub fn new(load: Load, seed: u64) -> Result<Bed, String> {
        let world = World::new(seed);
        // Buffers are of at most a quarter more than is asked for; and as much again is on its way back.
        let quota = (load.records() * (load.value_len as u64 + 256) * 5 / 2 + (16 << 20)) >> 20 << 20;
        let node = start_node(&world, Rc::new(registry::kinds), quota + (32 << 20));
        let work = system(load.system)?.work;
        let service = ServiceWork { accesses: work.call_accesses, checksummed: work.call_checksummed };
        let mut setup = Setup { service, inputs: load.inputs, ..Setup::new(load.platform, load.testbed) };
        (load.variant.setup)(&mut setup);
        let opened = world.complete(SECONDS, async move { open(&node, load, quota, setup).await });
        let machine = opened.unwrap_or_else(|| Err("the node never answered".to_owned()))?;
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
            None if loaders.get() > 0 => Err("the store was never filled".to_owned()),
            None => Ok(()),
        }
    }

    /// Has so many clients at work for as many operations, after a while in which they begin.
    ///
    /// # Errors
    /// An operation failed, or none ended.
    pub fn measure(&self, clients: u32, operations: u64) -> Result<Measured, String> {
        let warm_up = u64::from(clients) * 8;
        let work = Rc::new(Work { left: Cell::new(warm_up + operations), ..Work::default() });
        let world = &self.world;
        for _ in 0..clients {
            let client = self.machine.connect();
            let (work, load, random) = (Rc::clone(&work), self.load, world.random().fork());
            work.clients.set(work.clients.get() + 1);
            world.spawn(world.start_process(), async move {
                if let Err(error) = work_on(client, load, &random, &work, operations).await {
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
            return Err(format!("{operations} operations of {clients} clients never ended"));
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

    /// Measures ever more clients, from one on, until more of them do no more.
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
            // Closer together where the curve bends.
            clients = if clients < 16 { clients * 2 } else { clients * 3 / 2 };
        }
        Ok(curve)
    }
}

async fn open(node: &Node, load: Load, quota: u64, setup: Setup) -> Result<Rc<Machine>, String> {
    let ask = Ask::CreateStore {
        name: STORE.to_owned(),
        kind: load.system.to_owned(),
        // Without collisions, as in the paper's runs.
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

/// What clients of one measurement share.
#[derive(Default)]
struct Work {
    /// Operations that have not ended.
    left: Cell<u64>,
    clients: Cell<u32>,
    /// Operations whose time was taken, and how long they took together.
    taken: Cell<u64>,
    took: Cell<Nanos>,
    failed: RefCell<Option<String>>,
}

async fn connect(client: &Rc<Client>) -> Result<AnyKv<Rc<Client>>, StoreError> {
    AnyKv::open(Rc::clone(client), NodeId(0), STORE, &Options::default()).await
}

async fn put_all(client: Rc<Client>, load: Load, keys: impl Iterator<Item = u64>) -> Result<(), KvError> {
    let mut kv = connect(&client).await?;
    let value = vec![7; load.value_len];
    for key in keys {
        kv.put(&key.to_be_bytes(), &value).await?;
    }
    Ok(())
}

/// One client's closed loop. Of the last `timed` operations of all clients it takes the time.
async fn work_on(
    client: Rc<Client>,
    load: Load,
    random: &Random,
    work: &Work,
    timed: u64,
) -> Result<(), KvError> {
    let mut kv = connect(&client).await?;
    let value = vec![7; load.value_len];
    let checksummed = system(load.system).expect("a bed was made for it").work.get_checksummed;
    let checking = load.inputs.crc_ns(checksummed(KEY_LEN, load.value_len));
    while work.left.get() > 0 {
        let (key, since) = (random.below(load.records()), client.now());
        if random.share() < load.reads {
            let len = kv.get(&key.to_be_bytes()).await?.map(|item| item.value.len());
            assert_eq!(len, Some(load.value_len), "every record is there");
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

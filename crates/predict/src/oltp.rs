//! Simulates FaSST's transactions under closed loops of tasks on machines that are nodes and clients at once (Kalia et
//! al., OSDI 2016): TATP, SmallBank and an object store.
//!
//! Each thread of each machine is a client with several tasks. A task runs one transaction after the other, and tries
//! one that met another again. All machines are members of the store, and each key has backups on the machines after
//! its own.
//!
//! Invariant: the real clients and services run on a real store's bytes, and every row that is read is checked; only
//! time is modelled. Work of a thread between its requests takes no time.

use super::STORE;
use super::calls::{Busy, Headers};
use farside_bench::driver::{Trouble as _, Work as _};
use farside_bench::oltp::{Benchmark, Kind, Oltp, Run, Source};
use farside_bench::report::Latencies;
use farside_bench::txn::{Client, Transactional as _};
use farside_bench::workload;
use farside_remote::NodeId;
use farside_remote::clock::Clock;
use farside_sim::fabric::hardware::peers::{Doorbells, Peering, Peers, Rung, Task};
use farside_sim::fabric::hardware::{Machines, ServiceWork, Setup, start_node};
use farside_sim::hardware::{Cluster, Distance, Platform, Testbed};
use farside_sim::nic::Used;
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{MICROS, Nanos, SECONDS, World};
use farside_systems::members::{self, New};
use farside_systems::registry;
use farside_systems::store;
use farside_systems::system::{Options, Sizing, System as _, Work};
use farside_systems::txn::fasst::service::FasstKind;
use farside_systems::txn::fasst::{self, Fasst};
use farside_systems::txn::{Transacting, Txn as _};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// A workload: the machines, and the tasks of their threads.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The machines' hardware.
    pub cluster: Cluster,
    /// Number of machines, all members of the store.
    pub machines: u32,
    /// Number of threads of a machine.
    pub threads: u32,
    /// Number of tasks of a thread.
    pub tasks: u32,
    /// Number of backups of a key.
    pub backups: u8,
}

impl Load {
    /// The load of the paper's runs of TATP and SmallBank, on this number of machines of a cluster: all threads have 19
    /// tasks, and each key has 2 backups.
    pub const fn paper(cluster: Cluster, machines: u32) -> Load {
        Load { cluster, machines, threads: cluster.threads, tasks: 19, backups: 2 }
    }

    const fn clients(&self) -> u32 {
        self.machines * self.threads
    }

    /// Number of tasks of all machines.
    const fn tasks_of_all(&self) -> u64 {
        self.clients() as u64 * self.tasks as u64
    }
}

/// One measurement of a load.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Transactions per second of a machine, with those that fail by themselves.
    pub ops_per_s: f64,
    /// Those that do not fail by themselves: what the paper's code counts.
    pub successes_per_s: f64,
    /// Fraction of the attempts that met another transaction.
    pub abort_rate: f64,
    /// Mean time of a transaction, in microseconds.
    pub mean_us: f64,
    /// Mean number of packets that a transaction sends.
    pub packets: f64,
    /// Share of the time in which parts of the machines' NICs are busy.
    pub busy: Busy,
    /// Numbers of transactions of each kind.
    pub kinds: Vec<(&'static str, Kind)>,
}

/// Mean number of transactions of a task in a warm-up and, at least, in a measurement.
const WARM_UP: u64 = 8;
const ROUNDS: u64 = 20;
/// Time in which all tasks begin.
const BEGIN: Duration = Duration::from_micros(20);
/// Longest virtual time in which all clients open the store and load it.
const OPENING: Nanos = 20 * SECONDS;

/// Machines with a FaSST store on all nodes.
pub struct Bed<B: Benchmark> {
    world: World,
    peers: Rc<Peers>,
    load: Load,
    run: Rc<Run<B>>,
}

impl<B: Benchmark> Drop for Bed<B> {
    fn drop(&mut self) {
        self.world.end();
    }
}

impl<B: Benchmark + 'static> Bed<B> {
    /// Creates the machines and their store.
    ///
    /// # Errors
    /// There is no such load, or the store cannot be created.
    pub fn new(load: Load, benchmark: B, seed: u64) -> Result<Bed<B>, String> {
        let Load { cluster, machines, threads, .. } = load;
        if machines < 2 || threads > cluster.threads {
            return Err("a store of peers has 2 machines or more, and no more threads than cores".to_owned());
        }
        let (world, random) = (World::new(seed), Random::new(!seed));
        let Cluster { link_gbit, inputs, .. } = cluster;
        let testbed = Testbed { link_gbit, distance: Distance::Direct, cores: cluster.threads, machines };
        let Work { call_accesses: accesses, call_checksummed: checksummed, .. } = FasstKind::WORK;
        let service = ServiceWork { accesses, checksummed };
        let setup = Setup { inputs, service, ..Setup::new(Platform::Rdma, testbed) };
        let sizing = sizing(&load, &benchmark);
        let of_member = Sizing {
            items: sizing.items.map(|items| members::items_of_member(items, machines as usize, false)),
            ..sizing
        };
        let footprint = FasstKind::footprint(&of_member);
        let table = footprint.map_err(|_| "no store is that large".to_owned())?.table_bytes;
        let quota = (table + (2 << 20)).next_multiple_of(1 << 20);
        let kinds = || -> farside_sim::node::Kinds { Rc::new(registry::all_kinds) };
        let start = |id| start_node(&world, NodeId(id), kinds(), quota + (36 << 20), &setup);
        let nodes: Vec<Node> = (0..machines).map(start).collect();
        let (name, kind) = (STORE.to_owned(), fasst::KIND.to_owned());
        let quota = quota * u64::from(machines);
        let new = New { name, kind, sizing, quota, members: nodes.len() };
        let peering = Peering {
            cluster,
            connections: 1,
            sharers: 1,
            doorbells: Doorbells::ForList,
            omitted: Headers::Paper.omitted(),
        };
        let (theirs, attempt) = (world.clone(), [random.bits(), random.bits()]);
        let opened = world.complete(SECONDS, async move {
            let machines = Machines::open(&nodes, setup).await.map_err(|error| error.to_string())?;
            let peers = Peers::new(&theirs, &machines, peering);
            let created = members::create(&peers.task(0, 0), peers.count(), &new, attempt).await;
            created.map_err(|error| error.to_string())?;
            Ok::<_, String>(peers)
        });
        let peers = opened.unwrap_or_else(|| Err("the nodes did not respond within 1 s".to_owned()))?;
        let run = Rc::new(Oltp::run(benchmark, load.tasks_of_all() as u32, 1, seed, true)?);
        Ok(Bed { world, peers, load, run })
    }

    /// Loads the store, and measures `operations` transactions of all machines together, or more: each task runs
    /// `ROUNDS` on average. Before that, it runs `WARM_UP`. Calls that open and load the store take no time.
    ///
    /// # Errors
    /// A transaction failed, or the transactions did not complete in time.
    pub fn measure(&self, operations: u64) -> Result<Measured, String> {
        let (world, load) = (&self.world, &self.load);
        let progress = Rc::new(Progress::default());
        let members = Rc::new(self.members()?);
        self.peers.set_timed(false);
        for machine in 0..load.machines {
            for thread in 0..load.threads {
                let client = OneClient {
                    world: world.clone(),
                    fabric: self.peers.task(machine, thread),
                    number: machine * load.threads + thread,
                    load: *load,
                    members: Rc::clone(&members),
                    run: Rc::clone(&self.run),
                    progress: Rc::clone(&progress),
                };
                world.spawn(world.start_process(), client.open());
            }
        }
        world.run_while(world.now() + OPENING, || !progress.is_loaded(load) && !progress.has_failed());
        progress.check(progress.is_loaded(load), "the clients did not load the store in time")?;
        self.peers.set_timed(true);
        let rounds = load.tasks_of_all();
        self.run_until(&progress, rounds * WARM_UP)?;
        let (since, before) = (world.now(), self.counted());
        progress.begin_window();
        self.run_until(&progress, operations.max(rounds * ROUNDS))?;
        let (lasted, after) = (world.now() - since, self.counted());
        let (done, mean_us) = (progress.done.get() as f64, progress.latencies.borrow().mean_us());
        progress.is_over.set(true);
        world.run_while(world.now() + SECONDS, || progress.tasks.get() > 0);
        progress.check(progress.tasks.get() == 0, "the transactions did not end within 1 s")?;

        let kinds = self.run.kinds();
        let [commits, successes] = [
            kinds.iter().map(|(_, kind)| kind.commits).sum::<u64>() as f64,
            kinds.iter().map(|(_, kind)| kind.succeeded).sum::<u64>() as f64,
        ];
        let ops_per_s = done * SECONDS as f64 / lasted as f64 / f64::from(load.machines);
        let ((rung, used), (rung_before, used_before)) = (&after, &before);
        Ok(Measured {
            ops_per_s,
            successes_per_s: ops_per_s * successes / commits,
            abort_rate: self.run.work().abort_rate(),
            mean_us,
            packets: (rung.requests[1] - rung_before.requests[1]) as f64 / done,
            busy: Busy::between(&load.cluster, load.machines, used_before, used, lasted),
            kinds,
        })
    }

    /// Reads and checks all rows, after a measurement. Calls take no time.
    ///
    /// # Errors
    /// A row is wrong, or the rows of a unit are not what the transactions have made of them.
    pub fn audit(&self) -> Result<(), String> {
        let (world, fabric, members) = (self.world.clone(), self.peers.task(0, 0), self.members()?);
        let (run, entropy) = (Rc::clone(&self.run), self.world.random().bits());
        self.peers.set_timed(false);
        let audited = self.world.complete(OPENING, async move {
            let txn = open(&world, fabric.clone(), &members, entropy).await?;
            let work = run.work();
            let audited = work.audit(&mut Client { txn, clock: fabric }, 0, 1).await;
            audited.and_then(|total| work.check_total(total)).map_err(|trouble| trouble.to_string())
        });
        audited.unwrap_or_else(|| Err("the rows were not read in time".to_owned()))
    }

    /// Fetches the description of the store.
    fn members(&self) -> Result<store::Members, String> {
        let peers = Rc::clone(&self.peers);
        let opened = self.world.complete(SECONDS, async move {
            let opened = members::open(&peers.task(0, 0), peers.count(), STORE).await;
            opened.map_err(|error| error.to_string())
        });
        opened.unwrap_or_else(|| Err("the store was not opened within 1 s".to_owned()))
    }

    /// Lets this number of transactions complete.
    fn run_until(&self, progress: &Progress, operations: u64) -> Result<(), String> {
        /// Longest mean time of a transaction.
        const SLOWEST: Nanos = 2_000 * MICROS;
        let until = self.world.now() + SECONDS + operations / self.load.tasks_of_all() * SLOWEST;
        self.world.run_while(until, || progress.done.get() < operations && !progress.has_failed());
        progress.check(progress.done.get() >= operations, "the transactions did not complete in time")
    }

    fn counted(&self) -> (Rung, (Used, u64)) {
        (self.peers.rung(), self.peers.used())
    }
}

/// Sizes of the store: it has all rows that a transaction may name.
fn sizing<B: Benchmark>(load: &Load, benchmark: &B) -> Sizing {
    /// Bytes of a row beside its value, in a record.
    const BESIDE: u64 = 64;
    let value_len = benchmark.value_len();
    let writes_max = benchmark.writes_max() * (value_len as u64 + BESIDE);
    let transacting = Transacting {
        // An id is free after a few attempts.
        ids: Some((load.clients() + load.clients() / 4 + 4) as u16),
        lanes: Some(load.tasks as u16),
        writes_max: Some(writes_max as u32),
        backups: Some(load.backups),
        ..Transacting::NONE
    };
    let items = Some(benchmark.units() * benchmark.rows_of_unit());
    Sizing { items, key_len: 8, value_len, transacting, ..Sizing::default() }
}

/// What all tasks have done.
#[derive(Default)]
struct Progress {
    /// Number of tasks that have loaded their share.
    loaded: Cell<u64>,
    /// Number of tasks that have not stopped.
    tasks: Cell<u64>,
    is_over: Cell<bool>,
    /// Number of transactions of the current measurement, and their times.
    done: Cell<u64>,
    latencies: RefCell<Latencies>,
    /// The first error of any task.
    failed: RefCell<Option<String>>,
}

impl Progress {
    fn is_loaded(&self, load: &Load) -> bool {
        self.loaded.get() == load.tasks_of_all()
    }

    fn has_failed(&self) -> bool {
        self.failed.borrow().is_some()
    }

    fn begin_window(&self) {
        self.done.set(0);
        self.latencies.replace(Latencies::new());
    }

    fn check(&self, is_done: bool, otherwise: &str) -> Result<(), String> {
        match self.failed.take() {
            Some(error) => Err(error),
            None if is_done => Ok(()),
            None => Err(otherwise.to_owned()),
        }
    }

    fn fail(&self, error: String) {
        self.failed.borrow_mut().get_or_insert(error);
    }
}

/// Opens the store for a client, whose task it starts.
async fn open(
    world: &World,
    fabric: Task,
    members: &store::Members,
    entropy: u64,
) -> Result<Fasst<Task>, String> {
    let options = Options { entropy, ..Options::NONE };
    let client = FasstKind::open(fabric, members, &options).await.map_err(|error| error.to_string())?;
    world.spawn(world.start_process(), client.keeper());
    // The keeper carries out the client's transactions once it has run for the first time.
    world.sleep(1).await;
    Ok(client)
}

/// Client of one thread.
struct OneClient<B: Benchmark> {
    world: World,
    fabric: Task,
    number: u32,
    load: Load,
    members: Rc<store::Members>,
    run: Rc<Run<B>>,
    progress: Rc<Progress>,
}

impl<B: Benchmark + 'static> OneClient<B> {
    /// Opens the store, and begins the tasks.
    async fn open(self) {
        let OneClient { world, fabric, number, load, members, run, progress } = self;
        let random = world.random().fork();
        let client = match open(&world, fabric.clone(), &members, random.bits()).await {
            Ok(client) => client,
            Err(error) => return progress.fail(error),
        };
        for task in 0..load.tasks {
            let number = number * load.tasks + task;
            let task = OneTask {
                client: Client { txn: client.another(), clock: fabric.clone() },
                number,
                load,
                source: run.work().source(workload::random(random.bits())),
                random: random.fork(),
                run: Rc::clone(&run),
                progress: Rc::clone(&progress),
            };
            progress.tasks.set(progress.tasks.get() + 1);
            let progress = Rc::clone(&progress);
            world.spawn(world.start_process(), async move {
                if let Err(error) = task.closed_loop().await {
                    progress.fail(error);
                }
                progress.tasks.set(progress.tasks.get() - 1);
            });
        }
    }
}

struct OneTask<B: Benchmark> {
    client: Client<Fasst<Task>, Task>,
    number: u32,
    load: Load,
    source: Source<B>,
    random: Random,
    run: Rc<Run<B>>,
    progress: Rc<Progress>,
}

impl<B: Benchmark> OneTask<B> {
    /// Loads a share of the units, and runs transactions until the run is over. Tasks begin at random times, since they
    /// would stay in step otherwise.
    async fn closed_loop(mut self) -> Result<(), String> {
        const PAUSE: Duration = Duration::from_micros(10);
        let (work, progress) = (self.run.work(), &self.progress);
        let mut task = work.task(self.number);
        for unit in (u64::from(self.number)..work.records()).step_by(self.load.tasks_of_all() as usize) {
            let loaded = work.load(&mut self.client, unit, &mut task).await;
            loaded.map_err(|trouble| trouble.to_string())?;
        }
        progress.loaded.set(progress.loaded.get() + 1);
        while !progress.is_loaded(&self.load) {
            self.client.clock.sleep(PAUSE).await;
        }
        self.client.clock.sleep(BEGIN.mul_f64(self.random.share())).await;
        while !progress.is_over.get() {
            let since = self.client.clock.now();
            let drawn = Oltp::<B>::draw(&mut self.source);
            let done = work.perform(&mut self.client, drawn, &mut task).await;
            done.map_err(|trouble| format!("{trouble} ({:?})", trouble.fault()))?;
            progress.latencies.borrow_mut().record(self.client.clock.now() - since);
            progress.done.set(progress.done.get() + 1);
        }
        Ok(())
    }
}

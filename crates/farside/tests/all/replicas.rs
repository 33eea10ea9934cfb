//! A volume on three real nodes under load, whose nodes are killed, come back without their memory, are healed, and are
//! stopped: what its clients meet, and what the replicas hold afterwards.
//!
//! The writers check every block that they read against the order of all writes ([`farside_bench::verify`]). The tests
//! print the longest stall of each step, and the times to heal. They assert only what holds on any machine.

use crate::support::{PATIENCE, Process, Ran, command, run_within, serve, until, until_within};
use farside::Pool;
use farside::volume::{NewVolume, ReplicaStat};
use farside_bench::blocks::{Plan, Run};
use farside_bench::driver::Tally;
use farside_bench::workload::{Chosen, Distribution, Lengths, Mix, Workload};
use farside_fabrics::executor::{Core, block_on};
use farside_fabrics::timer;
use farside_systems::blocks::Blocks;
use farside_systems::registry::AnyBlocks;
use farside_systems::system::Options;
use rustix::process::Signal;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const NODES: usize = 3;
const VOLUME: &str = "v";
/// Tasks of the load, each with one operation in flight.
const TASKS: usize = 16;
/// Interval at which the load publishes the number of its operations.
const TICK: Duration = Duration::from_millis(2);

/// A volume, and the time for which a node is stopped.
#[derive(Clone, Copy)]
struct Setup {
    scheme: &'static str,
    /// Memory of each node.
    memory: &'static str,
    /// Memory of each replica in bytes; `None` for what the volume needs.
    quota: Option<u64>,
    block: u32,
    blocks: u64,
    stopped: Duration,
    /// Number of operations that must end in each step while a node is away or back.
    operations: u64,
    /// Deadline of every wait.
    patience: Duration,
}

/// Three nodes whose memory ends with their processes.
struct Nodes {
    setup: Setup,
    processes: Vec<Process>,
    urls: Vec<String>,
    folder: TempDir,
}

impl Nodes {
    fn start(setup: Setup) -> Nodes {
        let folder = tempfile::tempdir().expect("a folder");
        let mut nodes = Nodes { setup, processes: Vec::new(), urls: Vec::new(), folder };
        for number in 0..NODES {
            let (process, url) = nodes.serve(number, None);
            nodes.processes.push(process);
            nodes.urls.push(url);
        }
        let Setup { quota, block, blocks, .. } = setup;
        let new = NewVolume { quota, block, ..NewVolume::new(VOLUME, blocks * u64::from(block)) };
        nodes.pool().create_volume(&new).expect("the nodes have memory");
        nodes
    }

    /// Starts a node, at `url` if it is given.
    fn serve(&self, number: usize, url: Option<&str>) -> (Process, String) {
        let Setup { scheme, memory, .. } = self.setup;
        let at = |name: &str| self.folder.path().join(format!("{name}-{number}"));
        let listen = match scheme {
            "shm" => None,
            _ => Some(url.map_or_else(|| format!("{scheme}://127.0.0.1:0"), str::to_owned)),
        };
        let listen = listen.iter().flat_map(|listen| ["--listen", listen]);
        let arguments: Vec<&str> = ["--memory", memory].into_iter().chain(listen).collect();
        let socket = at("socket");
        let node = serve(&socket, &arguments, at("log"));
        node.line();
        let url = match scheme {
            "shm" => format!("shm:{}", socket.display()),
            _ => node.line().split_once(" at ").expect("an engine").1.to_owned(),
        };
        (node, url)
    }

    fn url(&self) -> String {
        self.urls.join(",")
    }

    fn pool(&self) -> Pool {
        farside::connect(&self.url()).expect("the nodes serve")
    }

    /// Starts a killed node again, without its memory.
    fn restart(&mut self, number: usize) {
        let (process, _) = self.serve(number, Some(&self.urls[number]));
        self.processes[number] = process;
    }

    /// Runs `farside heal`, and returns its time and its report.
    fn heal(&self) -> (Duration, String) {
        let healed = self.farside(&["heal"]).done();
        let report = healed.text().trim_end().to_owned();
        assert!(report.contains("which had lost its memory"), "{report}");
        println!("{}: {report}", self.setup.scheme);
        (healed.took, report)
    }

    /// Runs `farside` with these arguments and the pool.
    fn farside(&self, arguments: &[&str]) -> Ran {
        let mut command = command();
        command.args(arguments).args(["--pool", &self.url()]);
        run_within(self.setup.patience, command, b"")
    }

    /// Compares all replicas of all blocks, and repairs those that are behind. Returns the number of blocks that were
    /// repaired.
    fn scrub(&self) -> u64 {
        let found = self.farside(&["volume", "scrub", VOLUME, "--json", "--quiet"]).done().json();
        assert_eq!((&found["damaged"], &found["incomplete"]), (&0.into(), &0.into()), "{found}");
        found["repaired"].as_u64().expect("a number")
    }

    /// Checks that all replicas serve the configuration with this number.
    fn check_served(&self, configuration: u64) {
        let stat = self.pool().volume_stat(VOLUME).expect("the nodes serve");
        let group = &stat.groups[0];
        assert_eq!(group.configuration, configuration);
        assert!(group.replicas.iter().all(|replica| replica.memory.is_ok()), "{group:?}");
    }
}

/// What the load and its observer share.
struct Shared {
    run: Run,
    patience: Duration,
    /// Number of the current step.
    step: AtomicUsize,
    /// Number of operations that have ended.
    ended: AtomicU64,
    is_over: AtomicBool,
}

impl Shared {
    fn new(setup: &Setup) -> Shared {
        let workload = Workload {
            name: "blocks".into(),
            records: setup.blocks,
            operations: 0,
            mix: Mix::new([0.5, 0.5, 0.0, 0.0, 0.0]).expect("shares"),
            distribution: Distribution::named("zipfian:0.9").expect("a distribution"),
            scan_max: 1,
            lengths: Lengths::Constant,
            chosen: Chosen::default(),
            unused: Vec::new(),
        };
        let (block, tasks) = (setup.block as usize, TASKS as u32);
        let plan = Plan { workload, block, tasks, verify: true, sampled: 64, seed: 1 };
        Shared {
            run: plan.run().expect("a plan of reads and updates"),
            patience: setup.patience,
            step: AtomicUsize::new(0),
            ended: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        }
    }

    /// Waits until this number of operations has ended since now.
    #[track_caller]
    fn more(&self, operations: u64) {
        let since = self.ended.load(Ordering::Acquire);
        until_within(self.patience, "the load goes on", || {
            self.ended.load(Ordering::Acquire) - since >= operations || self.is_over.load(Ordering::Acquire)
        });
    }

    /// Begins the next step.
    fn next_step(&self) {
        self.step.fetch_add(1, Ordering::AcqRel);
    }

    /// Opens clients for all tasks of a thread.
    fn clients(endpoint: &Rc<farside::parts::Endpoint>) -> Vec<AnyBlocks<Rc<farside::parts::Endpoint>>> {
        let options = Options { entropy: getrandom::u64().expect("random bytes"), ..Options::default() };
        let opened = AnyBlocks::open_in(Rc::clone(endpoint), NODES as u32, VOLUME, &options);
        let first = block_on(endpoint, opened).expect("the volume exists");
        let others: Vec<_> = (1..TASKS).map(|_| first.another()).collect();
        std::iter::once(first).chain(others).collect()
    }

    /// Writes all blocks, then reads and writes until the run is stopped. Returns the tally of each step.
    fn load(&self, pool: &Pool) -> Vec<Tally> {
        let endpoint = Rc::new(pool.endpoint_over_all().expect("the nodes serve"));
        let mut clients = Shared::clients(&endpoint);
        let mut core = Core::new(&endpoint);
        for (task, client) in (0..).zip(&mut clients) {
            core.spawn(async move {
                let loaded = self.run.load(client, task, TASKS as u64, |_, _| {}).await;
                loaded.expect("all nodes serve");
            });
        }
        core.run();
        drop(core);
        let thread = self.run.thread(0);
        let (met, running) = (RefCell::new(Vec::<Tally>::new()), Cell::new(TASKS));
        let mut core = Core::new(&endpoint);
        for (task, client) in (0..).zip(&mut clients) {
            let (thread, running) = (&thread, &running);
            core.spawn(async move {
                while !self.run.is_stopped() && !self.run.task(client, thread, task, u64::MAX).await {
                    timer::sleep(TICK).await; // Its error is counted.
                }
                running.set(running.get() - 1);
            });
        }
        core.spawn(async {
            let mut is_last = false;
            while !is_last {
                is_last = running.get() == 0;
                let step = self.step.load(Ordering::Acquire);
                let tally = thread.take_tally();
                self.ended.fetch_add(tally.operations(), Ordering::AcqRel);
                {
                    let mut met = met.borrow_mut();
                    let steps = met.len().max(step + 1);
                    met.resize(steps, Tally::default());
                    met[step].merge(tally);
                }
                timer::sleep(TICK).await;
            }
        });
        core.run();
        drop(core);
        self.is_over.store(true, Ordering::Release);
        met.into_inner()
    }

    /// Reads all blocks by a new client, and checks them.
    fn read_back(&self, pool: &Pool) -> Tally {
        let endpoint = Rc::new(pool.endpoint_over_all().expect("the nodes serve"));
        let mut clients = Shared::clients(&endpoint);
        let thread = self.run.thread(0);
        let mut core = Core::new(&endpoint);
        for (task, client) in (0..).zip(&mut clients) {
            let thread = &thread;
            core.spawn(async move { self.run.read_back(client, thread, task, TASKS).await });
        }
        core.run();
        drop(core);
        thread.take_tally()
    }
}

/// Stops a run when it is dropped, so that the load ends also if the test fails.
struct Stop<'r>(&'r Run);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Kills, wipes and heals each node in turn, then stops one, all under load.
fn survive(setup: Setup) {
    let mut nodes = Nodes::start(setup);
    let shared = Shared::new(&setup);
    let pool = nodes.pool();
    let mut names = vec!["all nodes serve".to_owned()];
    let met = std::thread::scope(|scope| {
        let load = scope.spawn(|| shared.load(&pool));
        let _stopped_at_a_panic = Stop(&shared.run);
        let mut step = |name: String| {
            names.push(name);
            shared.next_step();
        };
        shared.more(setup.operations);
        for victim in 0..NODES {
            step(format!("node {victim} is killed"));
            nodes.processes[victim].kill();
            shared.more(setup.operations);
            step(format!("node {victim} is back without its memory"));
            nodes.restart(victim);
            shared.more(setup.operations);
            step(format!("node {victim} is healed"));
            let (took, _) = nodes.heal();
            println!("{}: node {victim} was healed under load in {took:.2?}", setup.scheme);
            shared.more(setup.operations);
        }
        step("node 0 is stopped".to_owned());
        nodes.processes[0].signal(Signal::STOP);
        let since = Instant::now();
        shared.more(setup.operations);
        std::thread::sleep(setup.stopped.saturating_sub(since.elapsed()));
        shared.more(1);
        step("node 0 is continued".to_owned());
        nodes.processes[0].signal(Signal::CONT);
        shared.more(setup.operations);
        shared.run.stop();
        load.join().expect("the load reports what it meets")
    });
    assert_eq!(met.len(), names.len(), "each step was met");
    for (name, tally) in names.iter().zip(&met) {
        println!(
            "{}: {name}: {} operations, longest stall {:.1?}",
            setup.scheme,
            tally.operations(),
            tally.longest_stall
        );
    }
    for (name, tally) in names.iter().zip(&met) {
        let Tally { errors, violations, failures, .. } = tally;
        assert_eq!((*errors, *violations), (0, 0), "{name}: {failures:?}");
    }
    nodes.check_served(1 + NODES as u64);
    let read = shared.read_back(&nodes.pool());
    assert_eq!((read.errors, read.violations), (0, 0), "{:?}", read.failures);
    nodes.scrub();
    assert_eq!(nodes.scrub(), 0, "the replicas are equal");
}

/// A volume that fits many of these tests beside each other.
fn small(scheme: &'static str) -> Setup {
    Setup {
        scheme,
        memory: "24MiB",
        quota: Some(12 << 20),
        block: 512,
        blocks: 400,
        stopped: Duration::from_millis(1500),
        operations: 300,
        patience: PATIENCE,
    }
}

#[test]
fn writers_notice_nothing_while_each_node_is_wiped_and_healed_over_tcp() {
    survive(small("tcp"));
}

#[test]
fn writers_notice_nothing_while_each_node_is_wiped_and_healed_over_udp() {
    survive(small("udp"));
}

/// What `heal` reports if clients waited for no copy.
const COPIED_BEFORE: &str = ", 0 of them while clients waited";

#[test]
fn blocks_that_a_surviving_replica_lacks_are_copied_before_clients_wait() {
    let setup = small("tcp");
    let mut nodes = Nodes::start(setup);
    let shared = Shared::new(&setup);
    let pool = nodes.pool();
    nodes.processes[2].signal(Signal::STOP);
    shared.run.stop(); // Only loads the blocks.
    shared.load(&pool);
    nodes.processes[2].signal(Signal::CONT);
    nodes.processes[1].kill();
    nodes.restart(1);
    // Most blocks are at node 0 alone now.
    let (_, report) = nodes.heal();
    assert!(report.contains(COPIED_BEFORE), "{report}");
    // Before any read: a read writes back what it finds at one replica only.
    assert!(nodes.scrub() > setup.blocks / 2, "node 2 was behind");
    let read = shared.read_back(&nodes.pool());
    assert_eq!((read.errors, read.violations), (0, 0), "{:?}", read.failures);
}

/// A volume of 1 GiB.
fn large(scheme: &'static str) -> Setup {
    Setup {
        memory: "1400MiB",
        quota: None,
        block: 4096,
        blocks: (1 << 30) / 4096,
        stopped: Duration::from_secs(10),
        operations: 20_000,
        patience: Duration::from_secs(600),
        ..small(scheme)
    }
}

#[test]
#[ignore = "takes a minute and 4 GB: cargo xtask soak"]
fn soak_writers_notice_nothing_while_each_node_of_a_large_volume_is_wiped_and_healed_over_tcp() {
    survive(large("tcp"));
}

#[test]
#[ignore = "takes a minute and 4 GB: cargo xtask soak"]
fn soak_writers_notice_nothing_while_each_node_of_a_large_volume_is_wiped_and_healed_over_udp() {
    survive(large("udp"));
}

#[test]
#[ignore = "takes a minute and 4 GB: cargo xtask soak"]
fn soak_an_idle_volume_of_1_gib_is_healed() {
    for scheme in ["tcp", "udp"] {
        let setup = large(scheme);
        let mut nodes = Nodes::start(setup);
        let shared = Shared::new(&setup);
        shared.run.stop(); // Only loads the blocks.
        shared.load(&nodes.pool());
        nodes.processes[1].kill();
        nodes.restart(1);
        let (took, report) = nodes.heal();
        assert!(report.contains(COPIED_BEFORE), "{report}");
        let mib = (setup.blocks * 4096) >> 20;
        println!("{scheme}: an idle volume of {mib} MiB was healed in {took:.2?}");
        let read = shared.read_back(&nodes.pool());
        assert_eq!((read.errors, read.violations), (0, 0), "{:?}", read.failures);
    }
}

/// Stops a node for ten thousand writes, continues it, and checks that all replicas come to rest with exactly as many
/// live buffers as there are written blocks, although no scan has found a leaked buffer.
fn leak_nothing(scheme: &'static str) {
    const WRITTEN: u64 = 64;
    const WRITES: u64 = 10_000;
    const STOPPED: usize = 1;
    let setup = Setup { blocks: 2 * WRITTEN, ..small(scheme) };
    let nodes = Nodes::start(setup);
    let pool = nodes.pool();
    let endpoint = Rc::new(pool.endpoint_over_all().expect("the nodes serve"));
    let mut clients = Shared::clients(&endpoint);
    let mut write = |writes: u64| {
        let next = Cell::new(0);
        let mut core = Core::new(&endpoint);
        for client in &mut clients {
            let next = &next;
            core.spawn(async move {
                while next.get() < writes {
                    let number = next.replace(next.get() + 1);
                    let bytes = [number as u8; 512];
                    client.write(number % WRITTEN, &bytes).await.expect("a majority serves");
                }
            });
        }
        core.run();
    };
    // Each replica gets each block, so it reaches that number of buffers from now on.
    write(WRITTEN);
    nodes.scrub();
    let replicas = || {
        let stat = nodes.pool().volume_stat(VOLUME).expect("the nodes serve");
        let memory = |replica: &ReplicaStat| replica.memory.clone().expect("the replica serves");
        stat.groups[0].replicas.iter().map(memory).collect::<Vec<_>>()
    };
    let is_at_rest =
        || replicas().iter().all(|memory| (memory.blocks_written, memory.buffers_retired) == (WRITTEN, 0));
    nodes.processes[STOPPED].signal(Signal::STOP);
    write(WRITES);
    nodes.processes[STOPPED].signal(Signal::CONT);
    let since = Instant::now();
    while !is_at_rest() {
        assert!(since.elapsed() < PATIENCE, "{:?}", replicas());
        // The session with the stopped node is opened again while the core runs.
        block_on(&endpoint, timer::sleep(TICK));
    }
    println!("{scheme}: at rest {:.2?} after node {STOPPED} was continued", since.elapsed());
    // A session that has ended causes a scan, which finds nothing.
    assert!(replicas().iter().all(|memory| memory.buffers_leaked == 0), "{:?}", replicas());
    // The stopped replica missed writes. To bring it up to date leaks nothing either.
    nodes.scrub();
    until("all replicas are at rest", is_at_rest);
    assert!(replicas().iter().all(|memory| memory.buffers_leaked == 0), "{:?}", replicas());
}

#[test]
fn a_replica_that_was_stopped_for_ten_thousand_writes_leaks_nothing() {
    for scheme in ["tcp", "udp", "shm"] {
        leak_nothing(scheme);
    }
}

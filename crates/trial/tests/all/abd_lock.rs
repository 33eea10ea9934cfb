//! ABDLOCK over classic verbs: the simulated NICs of three nodes execute the requests of clients that compete for few
//! blocks, and whose callers drop operations. READs and WRITEs are executed line by line, so blocks can be torn.

use crate::blocks::{check_struck, play};
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::session::Identity;
use farside_sim::fabric::verbs::Verbs;
use farside_sim::fault::{Struck, Target};
use farside_sim::hardware::{INPUTS, Testbed};
use farside_sim::history::register::{Ask, History, Outcome as Recorded, Value};
use farside_sim::linearizable::{self, Limits};
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::nic::{Device, Sender, Timing};
use farside_sim::node::{Kinds, Node, Options as NodeOptions};
use farside_sim::world::{MICROS, MILLIS, ProcessId, SECONDS, World, within};
use farside_systems::blocks::abd_lock::{AbdLock, KIND};
use farside_systems::blocks::{Blocks, BlocksError};
use farside_systems::members::{self, New};
use farside_systems::registry;
use farside_systems::system::{Options, Sizing};
use farside_trial::values;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const NODES: u32 = 3;
const NAME: &str = "s";
const BLOCK: usize = 512;
const BLOCKS: u64 = 2;
const CLIENTS: u32 = 3;
const TASKS: u32 = 2;
/// Number of operations of each task.
const TURNS: u32 = 25;
/// Seeds of every run of the test.
const SEEDS: u64 = 12;
/// Seeds of the trials with faults, for each number of replicas, and of the long ones.
const FAULTY_SEEDS: u64 = 12;
const SOAK_SEEDS: u64 = 10_000;

/// One process's queue pairs with all nodes.
struct Pool {
    clock: ProcessClock,
    pairs: Vec<Rc<Verbs>>,
}

impl Pool {
    async fn open(scene: &Scene, process: ProcessId, host: HostId) -> Rc<Pool> {
        let clock = ProcessClock::new(&scene.world, 0, &scene.struck, Target::Client(process.0));
        let sender = Rc::new(Sender::new(1_000, 1_000, 64));
        let mut pairs = Vec::new();
        for node in &scene.nodes {
            let identity = scene.world.random().bits().into();
            let identity = Identity { identity, incarnation: 1, silence: 60 * MILLIS };
            let pair = Verbs::open(node, 0, process, host, &clock, identity, &sender);
            pairs.push(pair.await.expect("no fault strikes"));
        }
        Rc::new(Pool { clock, pairs })
    }

    fn pair(&self, node: NodeId) -> Result<&Verbs, FabricError> {
        self.pairs.get(node.0 as usize).map(|pair| &**pair).ok_or(FabricError::NoSuchNode(node))
    }
}

impl Fabric for Pool {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.pair(node)?.run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.pair(node)?.call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if let Ok(pair) = self.pair(node) {
            pair.retire(node, key, buffer);
        }
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.pairs[node.0 as usize].capabilities(node)
    }
}

impl Clock for Pool {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn wall(&self) -> Duration {
        self.clock.wall()
    }

    async fn sleep(&self, duration: Duration) {
        self.clock.sleep(duration).await;
    }
}

/// Outcome of a trial.
#[derive(Default)]
struct Outcome {
    /// Violations, one sentence for each.
    violated: Vec<String>,
    /// Number of operations, and of those whose futures were dropped.
    operations: usize,
    dropped: u32,
    /// Digest of the history of operations.
    digest: u64,
}

struct Scene {
    world: World,
    network: Network,
    struck: Rc<Struck>,
    nodes: Vec<Node>,
    history: RefCell<History>,
    /// Number of tasks that have not ended.
    running: Cell<u32>,
    outcome: RefCell<Outcome>,
    next_tag: Cell<u64>,
}

/// Runs a trial. Its history must be linearizable, each block that is read must be that of one write, all operations
/// must succeed, and at the end no majority of a block's locks may be held.
fn run(seed: u64) -> Outcome {
    let world = World::new(seed);
    let random = world.random();
    let struck = Rc::new(Struck::default());
    let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: 2 * MICROS }, &struck);
    let any = || [20, 200, 2_000, 20_000][random.below(4) as usize];
    let timing = Timing {
        link_gbit: 0,
        fetch_spread_ns: any(),
        land_spread_ns: any(),
        slot_spread_ns: any(),
        relaxed: random.one_in(4),
        ..INPUTS.timing(Testbed::PRISM_APPLICATIONS)
    };
    let nic = Device { timing, has_masked_cas: false, has_on_chip_words: false };
    let kinds: Kinds = Rc::new(registry::all_kinds);
    let node = |id: u32| {
        let options = NodeOptions {
            memory_bytes: 12 << 20,
            engines: 1,
            is_reliable: true,
            nic: Some(nic),
            ..NodeOptions::default()
        };
        Node::start(&world, &network, network.add_host(), NodeId(id), Rc::clone(&kinds), options)
    };
    let scene = Rc::new(Scene {
        nodes: (0..NODES).map(node).collect(),
        history: RefCell::default(),
        running: Cell::new(CLIENTS * TASKS),
        outcome: RefCell::default(),
        next_tag: Cell::new(1),
        struck,
        network,
        world: world.clone(),
    });
    let theirs = Rc::clone(&scene);
    let created = world.complete(SECONDS, async move {
        let process = theirs.world.start_process();
        let pool = Pool::open(&theirs, process, theirs.network.add_host()).await;
        let sizing = Sizing { items: Some(BLOCKS), value_len: BLOCK, ..Sizing::default() };
        let (name, kind) = (NAME.to_owned(), KIND.to_owned());
        let new = New { name, kind, sizing, quota: 4 << 20, members: NODES as usize };
        members::create(&pool, NODES, &new, [1, 2]).await.map(|stores| stores.len())
    });
    assert_eq!(created.expect("in time"), Ok(NODES as usize));
    for client in 0..CLIENTS {
        let (process, theirs) = (world.start_process(), Rc::clone(&scene));
        world.spawn(process, async move { live(&theirs, client, process).await });
    }
    let theirs = Rc::clone(&scene);
    world.run_while(60 * SECONDS, || theirs.running.get() > 0);
    if scene.running.get() > 0 {
        scene.blame("some operations have not ended".to_owned());
    }
    check_locks(&scene);
    world.end();
    let history = scene.history.take();
    let report = linearizable::check(&history, Limits::default());
    if !report.is_linearizable() {
        scene.blame(format!("the history is not linearizable: {report:?}"));
    }
    let mut outcome = scene.outcome.take();
    (outcome.operations, outcome.digest) = (history.operations().len(), history.digest());
    outcome
}

impl Scene {
    fn blame(&self, violation: String) {
        self.outcome.borrow_mut().violated.push(violation);
    }
}

/// Opens the store as a client, and starts the client's tasks.
async fn live(scene: &Rc<Scene>, client: u32, process: ProcessId) {
    let pool = Pool::open(scene, process, scene.network.add_host()).await;
    let members = members::open(&pool, NODES, NAME).await.expect("the store");
    let releases_apart = scene.world.random().one_in(2);
    let options = Options { entropy: scene.world.random().bits(), releases_apart, ..Options::default() };
    let blocks = AbdLock::of(Rc::clone(&pool), &members, &options).expect("the fabric suffices");
    scene.world.spawn(process, blocks.keeper());
    for _ in 0..TASKS {
        let (scene, mut blocks) = (Rc::clone(scene), blocks.another());
        scene.world.clone().spawn(process, async move {
            for _ in 0..TURNS {
                turn(&scene, client, &mut blocks).await;
            }
            scene.running.set(scene.running.get() - 1);
        });
    }
}

/// Carries out one operation, and drops it in the middle at times.
async fn turn(scene: &Scene, client: u32, blocks: &mut AbdLock<Rc<Pool>>) {
    let (world, random) = (&scene.world, scene.world.random());
    let block = random.below(BLOCKS);
    let tag = scene.next_tag.replace(scene.next_tag.get() + 1);
    let value = Value { tag, len: BLOCK as u32 };
    let ask = if random.one_in(2) { Ask::Put(value) } else { Ask::Get };
    let id = scene.history.borrow_mut().call(client, block, ask, world.now());
    let patience = if random.one_in(6) { random.below(60 * MICROS) } else { 60 * SECONDS };
    let mut bytes = values::bytes(value);
    let done = match ask {
        Ask::Put(_) => within(world, patience, blocks.write(block, &bytes)).await,
        _ => within(world, patience, blocks.read(block, &mut bytes)).await,
    };
    let outcome = match done {
        None => {
            scene.outcome.borrow_mut().dropped += 1;
            return;
        }
        // No fault has struck.
        Some(Err(error)) => return scene.blame(error.to_string()),
        Some(Ok(())) => match (ask, values::known(&bytes)) {
            (Ask::Put(_), _) => Recorded::Done(None),
            (_, Some(value)) if value.tag > 0 => Recorded::Found(value, None),
            _ if bytes.iter().all(|&byte| byte == 0) => Recorded::Absent,
            _ => return scene.blame(format!("torn bytes in block {block}")),
        },
    };
    scene.history.borrow_mut().returned(id, outcome, world.now());
}

/// Checks that another client finds no lock that is held.
fn check_locks(scene: &Rc<Scene>) {
    let theirs = Rc::clone(scene);
    let read = scene.world.complete(4 * SECONDS, async move {
        let process = theirs.world.start_process();
        let pool = Pool::open(&theirs, process, theirs.network.add_host()).await;
        let members = members::open(&pool, NODES, NAME).await.expect("the store");
        let mut blocks = AbdLock::of(pool, &members, &Options::default()).expect("the fabric suffices");
        theirs.world.spawn(process, blocks.keeper());
        let mut bytes = [0; BLOCK];
        for block in 0..BLOCKS {
            blocks.read(block, &mut bytes).await?;
        }
        Ok::<_, BlocksError>(())
    });
    if read != Some(Ok(())) {
        scene.blame(format!("blocks cannot be read at the end: {read:?}"));
    }
}

#[test]
fn blocks_over_classic_verbs_are_linearizable() {
    let mut dropped = 0;
    for seed in 0..SEEDS {
        let outcome = run(seed);
        assert!(outcome.violated.is_empty(), "seed {seed}: {:?}", outcome.violated);
        assert_eq!(outcome.operations, (CLIENTS * TASKS * TURNS) as usize);
        dropped += outcome.dropped;
    }
    println!("{dropped} operations were dropped");
    assert!(dropped > 20, "{dropped}");
}

#[test]
fn every_block_is_linearizable_also_if_clients_die() {
    play(KIND, 3, 1..=FAULTY_SEEDS);
    play(KIND, 5, 1..=FAULTY_SEEDS);
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_blocks_under_locks() {
    check_struck(KIND, &play(KIND, 3, 1..=SOAK_SEEDS), |_| true);
    check_struck(KIND, &play(KIND, 5, 1..=SOAK_SEEDS), |_| true);
}

#[test]
fn the_same_seed_gives_the_same_history() {
    assert_eq!(run(7).digest, run(7).digest);
}

/// The others need lost requests, or a lock that is granted late, while another client acts. The tests of single steps
/// kill them.
#[cfg(farside_mutants)]
#[test]
fn mutants_are_killed_by_their_seeds_over_classic_verbs() {
    use farside_systems::blocks::abd_lock::mutants::{
        DROPPED_KEEPS_LOCKS, MINORITY_QUORUM, READS_UNLOCKED, UNLOCK_BEFORE_WRITE,
    };
    let mutants = &[MINORITY_QUORUM, UNLOCK_BEFORE_WRITE, READS_UNLOCKED, DROPPED_KEEPS_LOCKS];
    let recorded = include_str!("../../kills/abd-lock-verbs.txt");
    crate::killed::by_their_seeds("abd-lock-verbs.txt", recorded, mutants, |seed| run(seed).violated);
}

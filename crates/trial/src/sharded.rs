//! Trials of key-value stores whose keys are divided among several nodes, while clients, nodes and the network fail.
//!
//! One store lies on all nodes. A node that is killed comes back with its memory, and the store goes on; or one of them
//! comes back empty, and its keys are lost for good. Each client has a pool of sessions that lists the nodes in an
//! order of its own, and that opens the session after a lost one in the background, as pools outside the simulator do.
//! See [`run`].
//!
//! Invariant: the same seed gives the same trial.

use crate::sessions::Sessions;
use crate::{AGAIN, values};
use farside_remote::arena::header;
use farside_remote::clock::Clock;
use farside_remote::control::Ask as NodeAsk;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply, Width};
use farside_sim::checker::Checker;
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::session::Endpoint;
use farside_sim::fault::{Fault, FaultRates, OUTAGE, Struck, Target};
use farside_sim::history::register::{Ask, History, Outcome as Recorded, Value, Version};
use farside_sim::history::{Ask as _, OperationId};
use farside_sim::linearizable::{Limits, Registers};
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::node::{Node, Options as NodeOptions};
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, SECONDS, World, within};
use farside_systems::kv::{AnyKv, Kv, KvError, Sharded, Version as Installed, pilaf, prism_kv};
use farside_systems::members::{self, New};
use farside_systems::registry;
use farside_systems::store::StoreError;
use farside_systems::system::{Options, Sizing};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const NAME: &str = "s";
/// Bytes of memory of each node.
const MEMORY: u64 = 14 << 20;
/// Bytes of memory of each member of the store.
const QUOTA: u64 = 6 << 20;
/// Length of the longest value in bytes.
const VALUE_MAX: u64 = 40;
/// Bounds of the check of a history. Operations whose futures were dropped stay unanswered until their node is killed.
const LIMITS: Limits = Limits { operations_max: 5_000, steps_max: 8_000_000 };
/// Longest time for which a node is down, in nanoseconds.
const DOWN_MAX: Nanos = 200 * MILLIS;
/// Pause, in nanoseconds, after which a trial checks again whether a node has recovered.
const SERVED_AGAIN: Nanos = 50 * MICROS;

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Opens the store.
    Open,
    /// Carries out an operation on one key.
    One,
    /// Carries out an operation on several keys.
    Several,
    /// Opens the session with a node again.
    Reopen,
    /// Fetches the description of a member again.
    FetchMember,
}

impl Step {
    /// All steps.
    pub const ALL: [Step; 5] = [Step::Open, Step::One, Step::Several, Step::Reopen, Step::FetchMember];

    /// Whether few requests belong to the step. Faults strike these requests more often than others.
    fn is_rare(self) -> bool {
        matches!(self, Step::Open | Step::Reopen | Step::FetchMember)
    }
}

/// Faults that strike within steps. Faults of messages strike besides.
pub const FAULTS: [Fault; 6] = [
    Fault::ClientDeath,
    Fault::ClientPause,
    Fault::Partition,
    Fault::NodePause,
    Fault::NodeRestart,
    Fault::NodeLoss,
];

/// Outcome of a trial.
#[derive(Default)]
pub struct Outcome {
    /// Violations, one sentence for each.
    pub violated: Vec<String>,
    /// One sentence for each key whose history could not be decided.
    pub undecided: Vec<String>,
    /// Number of times that each fault struck a client within each step.
    pub matrix: BTreeMap<(String, Step), u64>,
    /// Numbers of notable outcomes of operations.
    pub counts: Counts,
    /// Digest of the history of operations.
    pub digest: u64,
}

/// Numbers of notable outcomes in a trial.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Number of operations that succeeded.
    pub done: u64,
    /// Number of operations that may or may not have been carried out.
    pub unknown: u64,
    /// Number of operations that reported a member's lost memory.
    pub lost: u64,
    /// Number of operations that succeeded while a node was down that they did not need.
    pub beside: u64,
    /// Number of operations on several keys that failed, after they had visited the keys of other nodes.
    pub parts: u64,
    /// Number of operations that had to succeed, because no fault had struck their nodes.
    pub judged: u64,
    /// Number of sessions that were opened after a lost one.
    pub reopened: u64,
    /// Number of requests for the description of a member that an operation fetched again.
    pub fetched: u64,
}

/// How a client stands with a node.
#[derive(Clone, Copy, Default)]
struct Link {
    /// Number of faults that have struck the node, the client, or the network between them.
    strikes: u64,
    /// End of the latest of these faults.
    until: Nanos,
    /// Whether an operation at the node has succeeded that began after the end of all these faults. So the client's
    /// session with the node has survived them, or was opened after them.
    is_proven: bool,
}

struct Scene {
    world: World,
    network: Network,
    struck: Rc<Struck>,
    nodes: Vec<Node>,
    /// Index of the node of each member.
    holders: RefCell<Vec<usize>>,
    /// The kind of the store, and whether its clients call the service. Then they have no conditional operations, and
    /// none on several keys.
    kind: &'static str,
    is_called: bool,
    hosts: Vec<HostId>,
    processes: RefCell<Vec<Option<ProcessId>>>,
    /// Number of requests in flight of each client, by step.
    steps: RefCell<Vec<[u32; Step::ALL.len()]>>,
    /// Links of each client, by node.
    links: RefCell<Vec<Vec<Link>>>,
    keys: u64,
    left: Cell<u32>,
    tags: Cell<u64>,
    /// One in this many operations is dropped.
    drop_one_in: u64,
    /// One in this many requests of the step `focus` is struck; none is if 0.
    strike_one_in: u64,
    focus: Step,
    faults: Vec<Fault>,
    /// The node that most faults of nodes strike.
    victim: usize,
    /// The node that has lost its memory.
    wiped: Cell<Option<usize>>,
    /// Operations on the keys of each node that have ended with an unknown outcome, or whose futures were dropped.
    /// Their requests may still be in flight.
    unanswered: RefCell<Vec<Vec<OperationId>>>,
    history: RefCell<History>,
    outcome: RefCell<Outcome>,
}

impl Scene {
    fn blame(&self, violation: String) {
        self.outcome.borrow_mut().violated.push(violation);
    }

    fn count(&self, count: impl FnOnce(&mut Counts)) {
        count(&mut self.outcome.borrow_mut().counts);
    }

    fn is_good(&self) -> bool {
        self.outcome.borrow().violated.is_empty()
    }

    /// Notes a fault between a node and a client that lasts until this time. Without a client, the fault strikes all.
    fn note(&self, node: usize, client: Option<usize>, until: Nanos) {
        for (index, links) in self.links.borrow_mut().iter_mut().enumerate() {
            if client.is_none_or(|client| client == index) {
                let Link { strikes, until: end, is_proven } = &mut links[node];
                (*strikes, *end, *is_proven) = (*strikes + 1, until.max(*end), false);
            }
        }
    }

    /// Notes, once the node is served, that it is.
    fn note_when_served(self: &Rc<Self>, node: usize) {
        let theirs = Rc::clone(self);
        self.world.at(self.world.now() + SERVED_AGAIN, move || {
            if !theirs.nodes[node].is_served() {
                return theirs.note_when_served(node);
            }
            let now = theirs.world.now();
            theirs.links.borrow_mut().iter_mut().for_each(|links| links[node].until = now);
        });
    }

    fn returned(&self, id: OperationId, outcome: Recorded) {
        self.history.borrow_mut().returned(id, outcome, self.world.now());
    }

    /// Kills the process that serves a node. Nothing in flight is carried out there any more.
    fn kill(&self, node: usize) {
        self.note(node, None, Nanos::MAX);
        self.nodes[node].kill();
        let ended = std::mem::take(&mut self.unanswered.borrow_mut()[node]);
        ended.into_iter().for_each(|id| self.returned(id, Recorded::Unknown));
    }

    fn value(&self) -> Value {
        self.tags.set(self.tags.get() + 1);
        Value { tag: self.tags.get(), len: self.world.random().between(8, VALUE_MAX) as u32 }
    }
}

/// One client's sessions with all nodes. Sessions that are over are opened again in the background.
struct Pool {
    scene: Rc<Scene>,
    client: usize,
    process: ProcessId,
    sessions: Sessions,
}

impl Pool {
    /// Creates a pool that lists the nodes in this order, and begins to open the sessions.
    fn open(scene: &Rc<Scene>, client: usize, process: ProcessId, order: &[usize]) -> Rc<Pool> {
        let clock = ProcessClock::new(&scene.world, 0, &scene.struck, Target::Client(client as u32));
        let nodes = order.iter().map(|node| scene.nodes[*node].clone()).collect();
        let sessions = Sessions::new(&scene.world, nodes, process, scene.hosts[client], clock);
        let pool = Rc::new(Pool { scene: Rc::clone(scene), client, process, sessions });
        (0..order.len() as u32).for_each(|node| pool.reopen(NodeId(node)));
        pool
    }

    /// Opens the next session with a node in the background.
    fn reopen(self: &Rc<Self>, node: NodeId) {
        let own = Rc::clone(self);
        self.scene.world.spawn(self.process, async move {
            let is_first = own.sessions.number(node) == 0;
            loop {
                let running = own.begin(if is_first { Step::Open } else { Step::Reopen });
                let opened = own.sessions.open(node).await;
                drop(running);
                match opened {
                    Ok(_) => break,
                    Err(_) => own.scene.world.sleep(own.scene.world.random().heavy(AGAIN)).await,
                }
            }
            own.scene.count(|counts| counts.reopened += u64::from(!is_first));
        });
    }

    fn session(&self, node: NodeId) -> Result<Rc<Endpoint>, FabricError> {
        let reason = "the next session is being opened";
        let unreachable = || FabricError::Unreachable { node, reason: reason.to_owned() };
        self.sessions.current(node).ok_or_else(unreachable)
    }

    /// Begins a request. It ends when the returned value is dropped.
    fn begin(&self, step: Step) -> Running {
        let (scene, client) = (Rc::clone(&self.scene), self.client);
        scene.steps.borrow_mut()[client][step as usize] += 1;
        strike_soon(&scene, client, step);
        Running { scene, client, step }
    }

    fn check(
        self: &Rc<Self>,
        node: NodeId,
        session: &Rc<Endpoint>,
        outcome: Result<(), FabricError>,
    ) -> Result<(), FabricError> {
        if self.sessions.forget_if_over(node, session, &outcome) {
            self.reopen(node);
        }
        outcome
    }
}

/// A request of a client, which ends when this value is dropped: also if the caller drops the future, or its process
/// dies.
struct Running {
    scene: Rc<Scene>,
    client: usize,
    step: Step,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.scene.steps.borrow_mut()[self.client][self.step as usize] -= 1;
    }
}

/// A pool as one task uses it. Errors name a node by its own number, not by its number in the pool.
#[derive(Clone)]
struct Seat {
    pool: Rc<Pool>,
    doing: Rc<Cell<Step>>,
}

impl Seat {
    fn new(pool: &Rc<Pool>) -> Seat {
        Seat { pool: Rc::clone(pool), doing: Rc::new(Cell::new(Step::Open)) }
    }

    fn step(&self, service: ServiceId, request: &[u8]) -> Step {
        let is_fetch = || {
            let ask = serde_json::from_slice(request);
            matches!(ask, Ok(NodeAsk::FindStore { .. } | NodeAsk::OpenStore { .. } | NodeAsk::Decide { .. }))
        };
        match self.doing.get() {
            Step::One | Step::Several if service == ServiceId::NODE && is_fetch() => Step::FetchMember,
            step => step,
        }
    }
}

impl Fabric for Seat {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let session = self.pool.session(node)?;
        let _running = self.pool.begin(self.doing.get());
        let ran = session.run(self.pool.sessions.node(node).id(), chain, reply).await;
        self.pool.check(node, &session, ran)
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let session = self.pool.session(node)?;
        let step = self.step(service, request);
        self.pool.scene.count(|counts| counts.fetched += u64::from(step == Step::FetchMember));
        let _running = self.pool.begin(step);
        let called = session.call(self.pool.sessions.node(node).id(), service, request, answer).await;
        self.pool.check(node, &session, called)
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if let Some(session) = self.pool.sessions.current(node) {
            session.retire(self.pool.sessions.node(node).id(), key, buffer);
        }
    }

    fn capabilities(&self, _: NodeId) -> Capabilities {
        Capabilities::SOFTWARE
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.pool.sessions.number(node)
    }
}

impl Clock for Seat {
    fn now(&self) -> Duration {
        self.pool.sessions.clock().now()
    }

    fn wall(&self) -> Duration {
        self.pool.sessions.clock().wall()
    }

    async fn sleep(&self, duration: Duration) {
        self.pool.sessions.clock().sleep(duration).await;
    }
}

/// Runs a trial. Judges it by these rules:
///
/// - The history of every key is linearizable. An operation that failed was not carried out.
/// - An operation succeeds if no fault strikes the nodes of its keys, the client, or the network between them, even if
///   another node is down. An operation on several keys visits the keys of such nodes.
/// - After a node has lost its memory, no operation on one of its keys succeeds, and none reports a missing store.
/// - Only an operation on such a key reports lost memory.
/// - After the faults, a new client reads every key whose node has its memory, and the other keys report lost memory.
pub fn run(seed: u64) -> Outcome {
    let world = World::new(seed);
    let random = world.random();
    let struck = Rc::new(Struck::default());
    let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: MICROS }, &struck);
    let count = random.between(2, 3) as usize;
    let clients = random.between(2, 4) as usize;
    let (is_reliable, is_called) = (random.one_in(2), random.one_in(3));
    let node = |id: usize| {
        let options = NodeOptions { memory_bytes: MEMORY, engines: 1, is_reliable, ..NodeOptions::default() };
        let host = network.add_host();
        Node::start(&world, &network, host, NodeId(id as u32), Rc::new(registry::kinds), options)
    };
    let nodes: Vec<Node> = (0..count).map(node).collect();
    let (is_calm, may_lose) = (random.one_in(8), random.one_in(2));
    let faults = FAULTS.into_iter().filter(|fault| match fault {
        Fault::NodeLoss => may_lose,
        _ => !random.one_in(4),
    });
    let faults: Vec<Fault> = faults.collect();
    let is_calm = is_calm || faults.is_empty();
    let scene = Rc::new(Scene {
        hosts: (0..=clients).map(|_| network.add_host()).collect(),
        holders: RefCell::default(),
        kind: if is_called { pilaf::KIND } else { prism_kv::KIND },
        is_called,
        processes: RefCell::new(vec![None; clients + 1]),
        steps: RefCell::new(vec![[0; Step::ALL.len()]; clients + 1]),
        links: RefCell::new(vec![vec![Link::default(); count]; clients + 1]),
        keys: random.between(5, 10),
        left: Cell::new(random.between(100, 220) as u32),
        tags: Cell::new(0),
        // A restart answers dropped operations. Many unanswered ones would make the history's check too long.
        drop_one_in: match faults.contains(&Fault::NodeRestart) {
            true => [0, 0, 20, 60][random.below(4) as usize],
            false => [0, 0, 60, 120][random.below(4) as usize],
        },
        strike_one_in: if is_calm { 0 } else { [10, 30, 80][random.below(3) as usize] },
        focus: Step::ALL[random.below(Step::ALL.len() as u64) as usize],
        faults,
        victim: random.below(count as u64) as usize,
        wiped: Cell::new(None),
        unanswered: RefCell::new(vec![Vec::new(); count]),
        history: RefCell::default(),
        outcome: RefCell::default(),
        nodes,
        struck,
        network,
        world: world.clone(),
    });
    observe_resets(&scene);
    if create(&scene, clients) {
        if !is_calm {
            // No message is so late that a session ends by its timeout: only the other faults end sessions.
            scene.network.set_fault_rates(FaultRates { late_ns: MICROS, ..FaultRates::TYPICAL });
        }
        (0..clients).for_each(|client| start(&scene, client));
        let theirs = Rc::clone(&scene);
        world.run_while(120 * SECONDS, || theirs.left.get() > 0 && theirs.is_good());
        if scene.left.get() > 0 && scene.is_good() {
            scene.blame(format!("the clients did not begin {} operations", scene.left.get()));
        }
    }
    scene.left.set(0);
    (0..clients).for_each(|client| {
        if let Some(process) = scene.processes.borrow_mut()[client].take() {
            world.kill(process);
        }
    });
    scene.network.set_fault_rates(FaultRates::NONE);
    // Partitions, pauses and restarts end before this time.
    world.run_until(world.now() + SECONDS);
    if scene.is_good() {
        finish(&scene, clients);
    }
    world.end();
    scene.struck.observe(|_, _| ());
    let mut outcome = scene.outcome.take();
    let history = scene.history.borrow();
    let checked = Registers(LIMITS).check(&history);
    outcome.violated.extend(checked.violated);
    outcome.undecided.extend(checked.undecided);
    outcome.digest = history.digest();
    outcome
}

/// Notes the connections that break.
fn observe_resets(scene: &Rc<Scene>) {
    let struck = Rc::downgrade(scene);
    scene.struck.observe(move |fault, target| {
        let (Some(scene), Fault::Reset, Target::Session(one, other)) = (struck.upgrade(), fault, target)
        else {
            return;
        };
        let is_end = |host: HostId| one == host || other == host;
        let node = scene.nodes.iter().position(|node| is_end(node.host()));
        let client = scene.hosts.iter().position(|host| is_end(*host));
        if let (Some(node), Some(client)) = (node, client) {
            scene.note(node, Some(client), scene.world.now());
        }
    });
}

/// Creates the store over all nodes, before any fault. Returns whether that succeeded.
fn create(scene: &Rc<Scene>, client: usize) -> bool {
    let (theirs, process, count) = (Rc::clone(scene), scene.world.start_process(), scene.nodes.len());
    let order = drawn_order(scene);
    let listed = order.clone();
    let created = scene.world.complete(SECONDS, async move {
        let seat = Seat::new(&Pool::open(&theirs, client, process, &order));
        while (0..count as u32).any(|node| seat.session_number(NodeId(node)) == 0) {
            theirs.world.sleep(MICROS).await;
        }
        let sizing = Sizing { items: Some(4 * theirs.keys), ..Sizing::default() };
        let quota = QUOTA * count as u64;
        let new = New { name: NAME.into(), kind: theirs.kind.into(), sizing, quota, members: count };
        let random = theirs.world.random();
        members::create(&seat, count as u32, &new, [random.bits(), random.bits()]).await
    });
    scene.world.kill(process);
    let Some(Ok(stores)) = &created else {
        scene.blame(format!("the store was not created: {created:?}"));
        return false;
    };
    let incarnation = |node: &Node| node.memory().load(header::INCARNATION_AT, Width::W8) as u64;
    let holders: Vec<usize> = stores.iter().map(|(node, _)| listed[node.0 as usize]).collect();
    let mut held = holders.iter().zip(stores);
    let is_held = held.all(|(holder, (_, store))| incarnation(&scene.nodes[*holder]) == store.incarnation);
    if holders.len() != count || !is_held {
        scene.blame(format!("the store was created at other nodes than it names: {stores:?}"));
        return false;
    }
    scene.holders.replace(holders);
    true
}

/// Draws the order in which a client lists the nodes.
fn drawn_order(scene: &Scene) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scene.nodes.len()).collect();
    scene.world.random().shuffle(&mut order);
    order
}

/// Starts the next process of a client.
fn start(scene: &Rc<Scene>, client: usize) {
    let (world, random) = (&scene.world, scene.world.random());
    let process = world.start_process();
    scene.processes.borrow_mut()[client] = Some(process);
    (0..scene.nodes.len()).for_each(|node| scene.note(node, Some(client), world.now()));
    let again = Rc::clone(scene);
    world.on_death(process, move || {
        let at = again.world.now() + again.world.random().heavy(AGAIN).min(DOWN_MAX);
        let scene = Rc::clone(&again);
        again.world.at(at, move || {
            if scene.left.get() > 0 {
                start(&scene, client);
            }
        });
    });
    let pool = Pool::open(scene, client, process, &drawn_order(scene));
    for _ in 0..random.between(1, 2) {
        let own = Rc::clone(&pool);
        world.spawn(process, async move {
            while own.scene.left.get() > 0 {
                if let Some(mut task) = Task::open(&own).await {
                    task.work().await;
                }
                own.scene.world.sleep(own.scene.world.random().heavy(20 * MICROS)).await;
            }
        });
    }
}

/// One task with its own client of the store.
struct Task {
    pool: Rc<Pool>,
    doing: Rc<Cell<Step>>,
    kv: Sharded<Seat>,
    /// The key and the version that the task has seen last.
    seen: Option<(u64, Installed)>,
}

/// An operation on one key, as the history records it. If this value is dropped before the return, because the outcome
/// is unknown, the operation may be carried out as long as the process that serves the key's node lives.
struct Call {
    scene: Rc<Scene>,
    holder: usize,
    number: u64,
    id: OperationId,
    ask: Ask,
    has_returned: Cell<bool>,
}

impl Call {
    fn returned(&self, outcome: Recorded) {
        self.has_returned.set(true);
        self.scene.returned(self.id, outcome);
    }

    /// Records the outcome of a failed operation.
    fn failed(&self, error: &KvError) {
        if self.ask.is_read() || error.ran() == Ran::No {
            self.returned(Recorded::Failed);
        } else {
            self.scene.count(|counts| counts.unknown += 1);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.has_returned.get() {
            self.scene.unanswered.borrow_mut()[self.holder].push(self.id);
        }
    }
}

impl Task {
    /// Opens the store. Returns `None` if too few nodes respond.
    async fn open(pool: &Rc<Pool>) -> Option<Task> {
        let (scene, seat) = (&pool.scene, Seat::new(pool));
        let doing = Rc::clone(&seat.doing);
        let slot_cache = [0, 1, 16][scene.world.random().below(3) as usize];
        let opened =
            AnyKv::open(seat, scene.nodes.len() as u32, NAME, &Options { slot_cache, ..Options::default() })
                .await;
        match opened {
            Ok(AnyKv::Sharded(kv)) => Some(Task { pool: Rc::clone(pool), doing, kv, seen: None }),
            Ok(AnyKv::One(_)) => {
                scene.blame("a store with several members was opened as a store on one node".to_owned());
                None
            }
            Err(error) => {
                judge_error(scene, &error.into(), &[]);
                None
            }
        }
    }

    /// Carries out operations until the store is opened again.
    async fn work(&mut self) {
        let scene = Rc::clone(&self.pool.scene);
        let random = scene.world.random();
        let reopen_one_in = if scene.focus == Step::Open { 5 } else { 40 };
        while scene.left.get() > 0 && scene.is_good() && !random.one_in(reopen_one_in) {
            scene.left.set(scene.left.get() - 1);
            let several_one_in = if scene.focus == Step::Several { 2 } else { 6 };
            // The caller may drop the operation's future at any await.
            let patience =
                if random.one_in(scene.drop_one_in) { random.heavy(10 * MICROS) } else { Nanos::MAX / 4 };
            let is_several = !scene.is_called && random.one_in(several_one_in);
            let operation = async { if is_several { self.several().await } else { self.single().await } };
            within(&scene.world, patience, operation).await;
            if random.one_in(2) {
                scene.world.sleep(random.heavy(5 * MICROS)).await;
            }
        }
    }

    fn call(&self, number: u64, ask: Ask) -> Call {
        let (scene, holder) = (Rc::clone(&self.pool.scene), self.holder(number));
        let id = scene.history.borrow_mut().call(self.pool.client as u32, number, ask, scene.world.now());
        Call { scene, holder, number, id, ask, has_returned: Cell::new(false) }
    }

    /// Index of the node that holds a key.
    fn holder(&self, number: u64) -> usize {
        let member = self.kv.shard_of(&values::key(number));
        self.pool.scene.holders.borrow()[member]
    }

    fn draw(&mut self) -> (u64, Ask) {
        let (scene, random) = (&self.pool.scene, self.pool.scene.world.random());
        let number = random.below(scene.keys);
        let ask = match random.below(if scene.is_called { 13 } else { 18 }) {
            0..6 => Ask::Get,
            6..10 => Ask::Put(scene.value()),
            10..13 => Ask::Delete,
            13..15 => Ask::PutIfAbsent(scene.value()),
            _ => match self.seen.take().filter(|(seen, _)| *seen == number) {
                Some((_, version)) => {
                    Ask::CompareAndPut { expected: reported(version), value: scene.value() }
                }
                None => Ask::Get,
            },
        };
        (number, ask)
    }

    async fn single(&mut self) {
        let (number, ask) = self.draw();
        self.doing.set(Step::One);
        let judged = Judged::begin(&self.pool, vec![self.holder(number)]);
        let call = self.call(number, ask);
        match perform(&mut self.kv, number, &ask).await {
            Ok((outcome, version)) => {
                self.seen = version.map(|version| (number, version)).or(self.seen);
                call.returned(outcome);
                judged.succeeded(&format!("'{ask}' of key {number}"));
            }
            Err(error) => {
                call.failed(&error);
                judged.failed(&error, &format!("'{ask}' of key {number}"));
            }
        }
    }

    async fn several(&mut self) {
        let (scene, random) = (Rc::clone(&self.pool.scene), self.pool.scene.world.random());
        let mut numbers: Vec<u64> = (0..scene.keys).collect();
        random.shuffle(&mut numbers);
        numbers.truncate(random.between(2, 4) as usize);
        self.doing.set(Step::Several);
        let holders: Vec<usize> = numbers.iter().map(|number| self.holder(*number)).collect();
        let judged = Judged::begin(&self.pool, holders.clone());
        let keys: Vec<Vec<u8>> = numbers.iter().map(|number| values::key(*number)).collect();
        if random.one_in(2) {
            let values: Vec<Value> = numbers.iter().map(|_| scene.value()).collect();
            let bytes: Vec<Vec<u8>> = values.iter().map(|value| values::bytes(*value)).collect();
            let items: Vec<(&[u8], &[u8])> =
                keys.iter().zip(&bytes).map(|(key, value)| (&key[..], &value[..])).collect();
            let calls =
                numbers.iter().zip(&values).map(|(number, value)| self.call(*number, Ask::Put(*value)));
            let calls: Vec<Call> = calls.collect();
            let put = self.kv.put_many(&items).await;
            match &put {
                Ok(()) => {
                    calls.iter().for_each(|call| call.returned(Recorded::Done(None)));
                    judged.succeeded(&format!("a put of keys {numbers:?}"));
                }
                Err(error) => {
                    calls.iter().for_each(|call| call.failed(error));
                    judged.failed(error, &format!("a put of keys {numbers:?}"));
                }
            }
            return;
        }
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let calls: Vec<Call> = numbers.iter().map(|number| self.call(*number, Ask::Get)).collect();
        let mut visits: Vec<Vec<Result<Recorded, u64>>> = vec![Vec::new(); keys.len()];
        let got = self.kv.get_many(&keys, |index, item| {
            visits[index].push(match item {
                None => Ok(Recorded::Absent),
                Some(item) => {
                    let value = values::known(item.value).ok_or(numbers[index]);
                    value.map(|value| Recorded::Found(value, Some(reported(item.version))))
                }
            });
        });
        let got = got.await;
        for ((call, visits), holder) in calls.iter().zip(&visits).zip(&holders) {
            match (&visits[..], &got) {
                ([Ok(outcome)], _) => {
                    call.returned(*outcome);
                    judged.visited(*holder, call.number);
                }
                ([], Err(_)) => {
                    call.returned(Recorded::Failed);
                    if judged.must_succeed(&[*holder]) {
                        scene.blame(format!(
                            "a get of keys {numbers:?} did not visit key {}, whose node no fault has struck",
                            call.number
                        ));
                    }
                }
                ([Err(number)], _) => {
                    scene.blame(format!("a get read bytes of key {number} that nobody has put"))
                }
                (visits, _) => {
                    scene.blame(format!(
                        "a get of keys {numbers:?} visited key {} {} times",
                        call.number,
                        visits.len()
                    ));
                }
            }
        }
        match got {
            Ok(()) => judged.succeeded(&format!("a get of keys {numbers:?}")),
            Err(error) => {
                let is_any = visits.iter().any(|visits| !visits.is_empty());
                scene.count(|counts| counts.parts += u64::from(is_any));
                judged.failed(&error, &format!("a get of keys {numbers:?}"));
            }
        }
    }
}

/// Carries out an operation on one key. Also returns the version that a get has read.
async fn perform(
    kv: &mut Sharded<Seat>,
    number: u64,
    ask: &Ask,
) -> Result<(Recorded, Option<Installed>), KvError> {
    let key = values::key(number);
    let outcome = match *ask {
        Ask::Get => {
            let has_versions = kv.kind() == prism_kv::KIND;
            let Some(item) = kv.get(&key).await? else { return Ok((Recorded::Absent, None)) };
            let unknown = KvError::Damaged("bytes that no client has put");
            let value = values::known(item.value).ok_or(unknown)?;
            let version = has_versions.then_some(item.version);
            return Ok((Recorded::Found(value, Some(reported(item.version))), version));
        }
        Ask::Contains => unreachable!("these trials draw no contains"),
        Ask::Put(value) => {
            kv.put(&key, &values::bytes(value)).await?;
            Recorded::Done(None)
        }
        Ask::Delete => match kv.delete(&key).await? {
            true => Recorded::Done(None),
            false => Recorded::Absent,
        },
        Ask::PutIfAbsent(value) => match kv.put_if_absent(&key, &values::bytes(value)).await? {
            true => Recorded::Done(None),
            false => Recorded::Conflict(None),
        },
        Ask::CompareAndPut { expected, value } => {
            let (expected, bytes) = (Installed(expected.0 as u32), values::bytes(value));
            match kv.compare_and_put(&key, expected, &bytes).await? {
                Ok(version) => Recorded::Done(Some(reported(version))),
                Err(conflict) => {
                    let version = conflict.version.map(reported);
                    version.map_or(Recorded::Absent, |version| Recorded::Conflict(Some(version)))
                }
            }
        }
    };
    Ok((outcome, None))
}

/// Converts a system's version to a version of the history.
fn reported(version: Installed) -> Version {
    Version(version.0.into())
}

/// An operation, and how its client stood with the nodes of its keys when the operation began.
struct Judged {
    pool: Rc<Pool>,
    /// Indices of the nodes, in ascending order.
    nodes: Vec<usize>,
    /// Links of the client with all nodes.
    links: Vec<Link>,
    began: Nanos,
    /// The node that had lost its memory.
    wiped: Option<usize>,
}

impl Judged {
    fn begin(pool: &Rc<Pool>, mut nodes: Vec<usize>) -> Judged {
        nodes.sort_unstable();
        nodes.dedup();
        let scene = &pool.scene;
        let links = scene.links.borrow()[pool.client].clone();
        Judged { pool: Rc::clone(pool), nodes, links, began: scene.world.now(), wiped: scene.wiped.get() }
    }

    /// Whether no fault has struck these nodes since the client last proved its sessions with them.
    fn must_succeed(&self, nodes: &[usize]) -> bool {
        let links = &self.pool.scene.links.borrow()[self.pool.client];
        nodes
            .iter()
            .all(|&node| self.links[node].is_proven && links[node].strikes == self.links[node].strikes)
    }

    /// Judges the visit of a key of this node.
    fn visited(&self, node: usize, number: u64) {
        if self.wiped == Some(node) {
            self.pool.scene.blame(format!(
                "a get of several keys visited key {number}, although its node had lost its memory"
            ));
        }
    }

    fn succeeded(&self, what: &str) {
        let scene = &self.pool.scene;
        if self.wiped.is_some_and(|wiped| self.nodes.contains(&wiped)) {
            scene.blame(format!("{what} succeeded after the key's node had lost its memory"));
        }
        let is_judged = self.must_succeed(&self.nodes);
        let others = (0..scene.nodes.len()).filter(|node| !self.nodes.contains(node));
        let is_beside = others.into_iter().any(|node| !scene.nodes[node].is_served());
        scene.count(|counts| {
            counts.done += 1;
            counts.judged += u64::from(is_judged);
            counts.beside += u64::from(is_beside);
        });
        for &node in &self.nodes {
            let link = &mut scene.links.borrow_mut()[self.pool.client][node];
            link.is_proven |= link.strikes == self.links[node].strikes && link.until < self.began;
        }
    }

    fn failed(&self, error: &KvError, what: &str) {
        let scene = &self.pool.scene;
        judge_error(scene, error, &self.nodes);
        if self.must_succeed(&self.nodes) {
            scene
                .blame(format!("{what} failed, although no fault had struck the nodes of its keys: {error}"));
        }
    }
}

/// Checks that an error is one that the faults of a trial may cause. `nodes` are those of the operation's keys; there
/// are none if the store was opened.
fn judge_error(scene: &Scene, error: &KvError, nodes: &[usize]) {
    match error {
        KvError::Several(of_one) => judge_error(scene, of_one, nodes),
        KvError::Store(StoreError::MemoryLost { member, .. }) => {
            let holder = scene.holders.borrow()[*member as usize];
            scene.count(|counts| counts.lost += 1);
            if scene.wiped.get() != Some(holder) || !nodes.contains(&holder) {
                scene.blame(format!("lost memory is reported of a node that has its memory: {error}"));
            }
        }
        KvError::Fabric(FabricError::NoSuchNode(_)) => scene.blame(format!("an operation failed: {error}")),
        KvError::Fabric(_) => {}
        KvError::OutOfMemory if !nodes.is_empty() => {}
        other => scene.blame(format!("an operation failed for no fault of the trial: {other}")),
    }
}

/// After the faults have ended, reads every key by a new client.
fn finish(scene: &Rc<Scene>, client: usize) {
    let (theirs, process) = (Rc::clone(scene), scene.world.start_process());
    let end = async move {
        let pool = Pool::open(&theirs, client, process, &drawn_order(&theirs));
        while (0..theirs.nodes.len() as u32).any(|node| pool.sessions.number(NodeId(node)) == 0) {
            theirs.world.sleep(MILLIS).await;
        }
        let Some(mut task) = Task::open(&pool).await else {
            return theirs.blame("the store cannot be opened after the faults have ended".to_owned());
        };
        for number in 0..theirs.keys {
            let is_lost = theirs.wiped.get() == Some(task.holder(number));
            let call = task.call(number, Ask::Get);
            match perform(&mut task.kv, number, &Ask::Get).await {
                Ok((outcome, _)) if !is_lost => call.returned(outcome),
                Err(KvError::Store(StoreError::MemoryLost { .. })) if is_lost => {
                    call.returned(Recorded::Failed);
                }
                other => theirs.blame(format!(
                    "after the faults have ended, a get of key {number}, whose memory is lost: {is_lost}, returns \
                     {other:?}"
                )),
            }
        }
    };
    let is_done = Rc::new(Cell::new(false));
    let done = Rc::clone(&is_done);
    scene.world.spawn(process, async move {
        end.await;
        done.set(true);
    });
    scene.world.run_while(scene.world.now() + 10 * SECONDS, || !is_done.get());
    if !is_done.get() {
        scene.blame("reading all keys does not end, after the faults have ended".to_owned());
    }
}

/// With the drawn probability, plans a fault for the near future, while the client's request probably lasts.
fn strike_soon(scene: &Rc<Scene>, client: usize, step: Step) {
    let random = scene.world.random();
    let often = if step.is_rare() { 10 } else { 1 };
    // Sessions are lost, and members fetched again, only after other faults.
    let one_in =
        if step == scene.focus { (scene.strike_one_in / often).max(2) } else { 4 * scene.strike_one_in };
    let is_off = scene.left.get() == 0 || scene.strike_one_in == 0 || client + 1 == scene.hosts.len();
    if is_off || !random.one_in(one_in) {
        return;
    }
    let fault = scene.faults[random.below(scene.faults.len() as u64) as usize];
    if fault == Fault::NodeLoss && step != scene.focus {
        return;
    }
    // A request and its response take a few microseconds.
    let at = scene.world.now() + random.below(1 << random.below(14));
    let theirs = Rc::clone(scene);
    scene.world.at(at, move || strike(&theirs, client, step, fault));
}

fn strike(scene: &Rc<Scene>, client: usize, step: Step, fault: Fault) {
    let (world, random) = (&scene.world, scene.world.random());
    let index = if random.one_in(4) { random.below(scene.nodes.len() as u64) as usize } else { scene.victim };
    let node = scene.nodes[index].clone();
    let process = scene.processes.borrow()[client].filter(|process| world.is_alive(*process));
    let (Some(process), true) = (process, scene.left.get() > 0) else { return };
    let is_within = scene.steps.borrow()[client][step as usize] > 0;
    let [least, most] = OUTAGE;
    let until = world.now() + random.between(least, least << random.below((most / least).ilog2().into()));
    match fault {
        Fault::ClientDeath => world.kill(process),
        Fault::ClientPause if !world.is_stopped(process) => {
            (0..scene.nodes.len()).for_each(|node| scene.note(node, Some(client), until));
            pause(scene, process, until);
        }
        Fault::Partition => {
            let until = world.now() + random.between(MILLIS, 200 * MILLIS);
            scene.note(index, Some(client), until);
            scene.network.cut(scene.hosts[client], node.host(), until, Fault::Partition);
            scene.network.cut(node.host(), scene.hosts[client], until, Fault::Partition);
        }
        Fault::NodePause => {
            let Some(process) = node.process().filter(|process| !world.is_stopped(*process)) else { return };
            scene.note(index, None, until);
            pause(scene, process, until);
        }
        Fault::NodeRestart | Fault::NodeLoss if node.is_served() => {
            let is_loss = fault == Fault::NodeLoss;
            if is_loss && scene.wiped.get().is_some() {
                return;
            }
            scene.kill(index);
            if is_loss {
                scene.wiped.set(Some(index));
            }
            let theirs = Rc::clone(scene);
            world.at(world.now() + random.heavy(MILLIS).min(DOWN_MAX), move || {
                if is_loss {
                    node.lose_memory()
                } else {
                    node.restart()
                }
                theirs.note_when_served(index);
            });
        }
        _ => return,
    }
    if is_within {
        *scene.outcome.borrow_mut().matrix.entry((fault.name().to_owned(), step)).or_default() += 1;
    }
}

/// Stops a process, and resumes it at this time.
fn pause(scene: &Rc<Scene>, process: ProcessId, until: Nanos) {
    scene.world.stop(process);
    let theirs = Rc::clone(scene);
    scene.world.at(until, move || theirs.world.resume(process));
}

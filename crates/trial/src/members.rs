//! Trials of stores with several members: clients create, drop, open, use and heal stores while clients, nodes and
//! the network fail.
//!
//! These trials have no history of operations on items: they are judged by what clients learn, and by what the nodes
//! hold at the end. See [`run`].
//!
//! Invariant: the same seed gives the same trial.

use crate::AGAIN;
use crate::sessions::Sessions;
use farside_remote::arena::header;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Attempt, Found, MemberId, MemberState, Membership, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply, Width};
use farside_sim::clock::ProcessClock;
use farside_sim::fault::{Fault, FaultRates, Struck, Target};
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::node::{Node, Options as NodeOptions};
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, SECONDS, World, within};
use farside_systems::heal::heal;
use farside_systems::kv::{Kv, prism_kv};
use farside_systems::members::{self, New, WithoutFirst};
use farside_systems::registry::{self, OneKv};
use farside_systems::store::{Members, StoreError};
use farside_systems::system::{Options, Sizing};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Number of nodes.
const NODES: u32 = 3;
/// Bytes of memory of each node.
const MEMORY: u64 = 14 << 20;
/// Bytes of memory of a whole store. Each member gets 3 MiB.
const QUOTA: u64 = 9 << 20;
/// Time for which a recoverer watches an unfinished creation before it aborts it.
const PATIENCE: Duration = Duration::from_micros(300);
/// Names of the stores.
const NAMES: [&str; 2] = ["a", "b"];
/// Number of each recoverer: the stores have no replicas, so no recoverer proposes a configuration.
const NO_BALLOTS: u64 = 0;

/// What a client does with stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Looks at the nodes in order to create a store.
    CreateFind,
    /// Prepares a member.
    CreatePrepare,
    /// Decides on a creation, or tells the others of the decision.
    CreateDecide,
    /// Looks at the nodes in order to drop a store.
    DropFind,
    /// Drops a member.
    DropDecide,
    /// Looks at the nodes in order to open a store.
    OpenFind,
    /// Gets a member's key.
    OpenKey,
    /// Looks at the nodes in order to heal stores.
    SettleFind,
    /// Decides in order to settle a store, or to open one.
    SettleDecide,
    /// Uses an open store.
    Use,
}

impl Step {
    /// All steps.
    pub const ALL: [Step; 10] = [
        Step::CreateFind,
        Step::CreatePrepare,
        Step::CreateDecide,
        Step::DropFind,
        Step::DropDecide,
        Step::OpenFind,
        Step::OpenKey,
        Step::SettleFind,
        Step::SettleDecide,
        Step::Use,
    ];
}

/// Steps that few requests belong to. Faults strike these requests more often than others.
const RARE: [Step; 5] = [Step::CreateDecide, Step::DropDecide, Step::OpenKey, Step::SettleDecide, Step::Use];

/// Faults that strike within steps. Faults of messages strike besides.
pub const FAULTS: [Fault; 4] = [Fault::ClientDeath, Fault::Partition, Fault::NodeRestart, Fault::NodeLoss];

/// Outcome of a trial.
pub struct Outcome {
    /// Violations, one sentence for each.
    pub violated: Vec<String>,
    /// Number of times that each fault struck a client within each step.
    pub matrix: BTreeMap<(String, Step), u64>,
    /// Number of creations, openings and drops that succeeded.
    pub done: [u64; 3],
    /// Number of members that clients found to have lost their memory.
    pub lost: u64,
}

/// The operation that a client performs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Create,
    Drop,
    Open,
    Settle,
}

/// A store whose creation was acknowledged.
struct Acknowledged {
    name: &'static str,
    members: Vec<MemberId>,
    /// Number of drops of this name that had begun before the creation.
    drops_before: u64,
    /// Whether a drop of this name may have been in progress when the creation began.
    is_contested: bool,
    /// Whether a complete drop was acknowledged that had begun after the acknowledgement.
    is_dropped: bool,
}

struct Scene {
    world: World,
    network: Network,
    struck: Rc<Struck>,
    nodes: Vec<Node>,
    /// Steps of the clients, by the number of the client.
    steps: RefCell<Vec<Option<Step>>>,
    processes: RefCell<Vec<Option<ProcessId>>>,
    hosts: Vec<HostId>,
    left: Cell<u32>,
    attempts: RefCell<BTreeMap<Attempt, Acknowledged>>,
    /// All drops that have begun: the name, and the time at which the drop ended, cancelled or not. A drop's requests
    /// name an attempt, so those that arrive after its end cannot remove a store whose creation began later.
    drops: RefCell<Vec<(&'static str, Nanos)>>,
    violated: RefCell<Vec<String>>,
    matrix: RefCell<BTreeMap<(String, Step), u64>>,
    done: [Cell<u64>; 3],
    lost: Cell<u64>,
    strike_one_in: u64,
}

/// One client's sessions with all nodes, and what the client does over them.
struct Pool {
    scene: Rc<Scene>,
    client: usize,
    doing: Cell<Doing>,
    sessions: Sessions,
}

impl Pool {
    fn new(scene: &Rc<Scene>, client: usize, process: ProcessId) -> Rc<Pool> {
        let clock = ProcessClock::new(&scene.world, 0, &scene.struck, Target::Client(client as u32));
        Rc::new(Pool {
            scene: Rc::clone(scene),
            client,
            doing: Cell::new(Doing::Open),
            sessions: Sessions::new(&scene.world, scene.nodes.clone(), process, scene.hosts[client], clock),
        })
    }

    fn step(&self, request: &[u8]) -> Option<Step> {
        let ask: Ask = serde_json::from_slice(request).ok()?;
        Some(match (self.doing.get(), ask) {
            (_, Ask::OpenStore { .. }) => Step::OpenKey,
            (Doing::Create, Ask::PrepareStore { .. }) => Step::CreatePrepare,
            (Doing::Create, Ask::Decide { .. }) => Step::CreateDecide,
            (Doing::Create, _) => Step::CreateFind,
            (Doing::Drop, Ask::Decide { .. }) => Step::DropDecide,
            (Doing::Drop, _) => Step::DropFind,
            (Doing::Open | Doing::Settle, Ask::Decide { .. }) => Step::SettleDecide,
            (Doing::Open, _) => Step::OpenFind,
            (Doing::Settle, _) => Step::SettleFind,
        })
    }

    fn begin(&self, step: Option<Step>) {
        self.scene.steps.borrow_mut()[self.client] = step;
        if step.is_some() {
            strike_soon(&self.scene, self.client);
        }
    }
}

impl Fabric for Pool {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let session = self.sessions.current_or_next(node).await?;
        self.begin(Some(Step::Use));
        let ran = session.run(node, chain, reply).await;
        self.begin(None);
        self.sessions.forget_if_over(node, &session, &ran);
        ran
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let session = self.sessions.current_or_next(node).await?;
        self.begin(self.step(request));
        let called = session.call(node, service, request, answer).await;
        self.begin(None);
        self.sessions.forget_if_over(node, &session, &called);
        called
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if let Some(session) = self.sessions.current(node) {
            session.retire(node, key, buffer);
        }
    }

    fn capabilities(&self, _: NodeId) -> Capabilities {
        Capabilities::SOFTWARE
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.sessions.number(node)
    }
}

impl Clock for Pool {
    fn now(&self) -> Duration {
        self.sessions.clock().now()
    }

    fn wall(&self) -> Duration {
        self.sessions.clock().wall()
    }

    async fn sleep(&self, duration: Duration) {
        self.sessions.clock().sleep(duration).await;
    }
}

/// Runs a trial. Judges it by these rules:
///
/// - A store that a client has opened is committed at every member that has a key, and all members are of one attempt.
///   Any other member has lost its memory, or did not answer.
/// - No store is opened after the acknowledgement of a complete drop that began after its creation.
/// - A store whose creation was acknowledged is not missing, unless a drop has begun or a member is wiped.
/// - After the faults, and after `heal`, a store is at all members or at none, unless a member is wiped.
/// - After all stores are dropped, all memory is free.
pub fn run(seed: u64) -> Outcome {
    let world = World::new(seed);
    let random = world.random();
    let struck = Rc::new(Struck::default());
    let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: MICROS }, &struck);
    let clients = random.between(2, 4) as usize;
    let node = |id: u32| {
        let options = NodeOptions { memory_bytes: MEMORY, engines: 1, ..NodeOptions::default() };
        let host = network.add_host();
        Node::start(&world, &network, host, NodeId(id), Rc::new(registry::kinds), options)
    };
    let nodes = (0..NODES).map(node).collect();
    let is_calm = random.one_in(8);
    let scene = Rc::new(Scene {
        nodes,
        steps: RefCell::new(vec![None; clients + 1]),
        processes: RefCell::new(vec![None; clients + 1]),
        hosts: (0..=clients).map(|_| network.add_host()).collect(),
        left: Cell::new(random.between(20, 60) as u32),
        attempts: RefCell::default(),
        drops: RefCell::default(),
        violated: RefCell::default(),
        matrix: RefCell::default(),
        done: [const { Cell::new(0) }; 3],
        lost: Cell::new(0),
        strike_one_in: if is_calm { 0 } else { [20, 60, 200][random.below(3) as usize] },
        struck,
        network,
        world: world.clone(),
    });
    let free: Vec<u64> =
        scene.nodes.iter().filter_map(Node::info).map(|info| info.unassigned_bytes).collect();
    if !is_calm {
        scene.network.set_fault_rates(FaultRates { reset_one_in: 0, ..FaultRates::TYPICAL });
    }
    (0..clients).for_each(|client| start(&scene, client));
    let theirs = Rc::clone(&scene);
    world.run_while(120 * SECONDS, || theirs.left.get() > 0);
    (0..clients).for_each(|client| {
        if let Some(process) = scene.processes.borrow()[client] {
            world.kill(process);
        }
    });
    scene.network.set_fault_rates(FaultRates::NONE);
    scene.left.set(0);
    // Partitions and restarts end before this time.
    world.run_until(world.now() + SECONDS);
    if !finish(&scene, clients, &free) {
        scene.blame("the end of the trial was not reached".into());
    }
    world.end();
    let done = [0, 1, 2].map(|index: usize| scene.done[index].get());
    Outcome { violated: scene.violated.take(), matrix: scene.matrix.take(), done, lost: scene.lost.get() }
}

/// Starts the next process of a client.
fn start(scene: &Rc<Scene>, client: usize) {
    let process = scene.world.start_process();
    scene.processes.borrow_mut()[client] = Some(process);
    let (theirs, again) = (Rc::clone(scene), Rc::clone(scene));
    scene.world.on_death(process, move || {
        again.steps.borrow_mut()[client] = None;
        let at = again.world.now() + again.world.random().heavy(AGAIN);
        let scene = Rc::clone(&again);
        again.world.at(at, move || {
            if scene.left.get() > 0 {
                start(&scene, client);
            }
        });
    });
    scene.world.spawn(process, async move {
        let pool = Pool::new(&theirs, client, process);
        while theirs.left.get() > 0 {
            theirs.left.set(theirs.left.get() - 1);
            let random = theirs.world.random();
            let name = NAMES[random.below(NAMES.len() as u64) as usize];
            // A caller may drop the operation's future at any await.
            let patience = if random.one_in(6) { random.heavy(50 * MICROS) } else { 10 * SECONDS };
            let which = random.below(16);
            within(&theirs.world, patience, async {
                match which {
                    0..5 => create(&pool, name).await,
                    5..10 => open(&pool, name).await,
                    10..13 => drop_store(&pool, name).await,
                    _ => {
                        pool.doing.set(Doing::Settle);
                        let patience = if random.one_in(2) { Duration::ZERO } else { PATIENCE };
                        let _may_fail = heal(&*pool, NODES, None, patience, NO_BALLOTS, drop).await;
                    }
                }
            })
            .await;
            theirs.steps.borrow_mut()[client] = None;
            let pause = random.heavy(20 * MICROS);
            theirs.world.sleep(pause).await;
        }
    });
}

async fn create(pool: &Rc<Pool>, name: &'static str) {
    let scene = &pool.scene;
    let random = scene.world.random();
    pool.doing.set(Doing::Create);
    let attempt = [random.bits(), random.bits()];
    let sizing =
        Sizing { items: Some(100), key_len: 8, value_len: 8, collision_free: false, ..Sizing::default() };
    let members = random.between(2, NODES.into()) as usize;
    let new = New { name: name.into(), kind: prism_kv::KIND.into(), sizing, quota: QUOTA, members };
    let drops_before = scene.drops_of(name);
    let began = scene.world.now();
    let is_contested = scene.drops.borrow().iter().any(|(of, until)| *of == name && *until > began);
    if let Ok(stores) = members::create(&**pool, NODES, &new, attempt).await {
        scene.done[0].set(scene.done[0].get() + 1);
        let membership = stores.first().and_then(|(_, store)| store.membership.clone());
        let Some(Membership { members, .. }) = membership else {
            return scene.blame(format!("creation of '{name}' returned no members"));
        };
        let made = Acknowledged { name, members, drops_before, is_contested, is_dropped: false };
        scene.attempts.borrow_mut().insert(attempt, made);
    }
}

/// A drop in progress, which ends when this value is dropped: also if the caller drops the future, or its process dies.
struct Running {
    scene: Rc<Scene>,
    index: usize,
}

impl Running {
    fn begin(scene: &Rc<Scene>, name: &'static str) -> Running {
        let mut drops = scene.drops.borrow_mut();
        drops.push((name, Nanos::MAX));
        Running { scene: Rc::clone(scene), index: drops.len() - 1 }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.scene.drops.borrow_mut()[self.index].1 = self.scene.world.now();
    }
}

async fn drop_store(pool: &Rc<Pool>, name: &'static str) {
    let scene = &pool.scene;
    pool.doing.set(Doing::Drop);
    let running = Running::begin(scene, name);
    let before: Vec<Attempt> = {
        let attempts = scene.attempts.borrow();
        attempts.iter().filter(|(_, made)| made.name == name).map(|(attempt, _)| *attempt).collect()
    };
    let dropped = members::drop_store(&**pool, NODES, name, WithoutFirst::Refuse).await;
    drop(running);
    if dropped.is_ok_and(|untold| untold.is_empty()) {
        scene.done[2].set(scene.done[2].get() + 1);
        let mut attempts = scene.attempts.borrow_mut();
        before.iter().for_each(|attempt| {
            if let Some(made) = attempts.get_mut(attempt) {
                made.is_dropped = true;
            }
        });
    }
}

async fn open(pool: &Rc<Pool>, name: &'static str) {
    let scene = &pool.scene;
    pool.doing.set(Doing::Open);
    let living: Vec<Attempt> = {
        let attempts = scene.attempts.borrow();
        let living = attempts.iter().filter(|(_, made)| made.name == name && !made.is_dropped);
        living.map(|(attempt, _)| *attempt).collect()
    };
    let dropped: Vec<Attempt> = {
        let attempts = scene.attempts.borrow();
        attempts.iter().filter(|(_, made)| made.is_dropped).map(|(attempt, _)| *attempt).collect()
    };
    match members::open(&**pool, NODES, name).await {
        Ok(members) => {
            scene.done[1].set(scene.done[1].get() + 1);
            let attempt = members.store().membership.as_ref().map(|membership| membership.attempt);
            if attempt.is_some_and(|attempt| dropped.contains(&attempt)) {
                scene.blame(format!("store '{name}' was opened after its drop was acknowledged"));
            }
            judge_opened(scene, name, &members).await;
            use_members(pool, &members).await;
        }
        Err(StoreError::Gone(reason)) if reason.contains("there is no store") => {
            for attempt in living {
                if scene.should_be_there(attempt) {
                    scene.blame(format!("store '{name}' is missing although its creation was acknowledged"));
                }
            }
        }
        Err(StoreError::MemoryLost { .. }) => scene.lost.set(scene.lost.get() + 1),
        Err(_) => {}
    }
}

/// Checks a list of members against what the nodes hold.
async fn judge_opened(scene: &Rc<Scene>, name: &str, opened: &Members) {
    let mut attempts = Vec::new();
    for member in opened.list() {
        match &member.store {
            Ok(store) => attempts.extend(store.membership.as_ref().map(|membership| membership.attempt)),
            Err(StoreError::MemoryLost { .. }) => scene.lost.set(scene.lost.get() + 1),
            Err(StoreError::Fabric(_)) => {}
            Err(error) => {
                scene.blame(format!("a member of store '{name}' is not usable, lost or silent: {error}"));
            }
        }
    }
    attempts.dedup();
    if attempts.len() > 1 {
        scene.blame(format!("the members of store '{name}' are of {} attempts", attempts.len()));
    }
    for node in &scene.nodes {
        if let Some(Found { store: Some(store), .. }) = found(node, name).await
            && store.is_prepared()
            && store.membership.is_some_and(|membership| attempts.contains(&membership.attempt))
            && opened.list().iter().any(|member| member.node == node.id() && member.store.is_ok())
        {
            scene.blame(format!("store '{name}' was opened while a member is not committed"));
        }
    }
}

/// Puts and gets an item at each member that has a key.
async fn use_members(pool: &Rc<Pool>, opened: &Members) {
    for member in opened.list() {
        let Ok(store) = &member.store else { continue };
        let alone = Store { membership: None, ..store.clone() };
        let one = Members::one(member.node, alone);
        let Ok(OneKv::PrismKv(mut kv)) = OneKv::of(Rc::clone(pool), &one, &Options::default()).await else {
            continue;
        };
        let value = pool.scene.world.random().bits().to_le_bytes();
        let key = (pool.client as u64).to_le_bytes();
        if kv.put(&key, &value).await.is_ok()
            && let Ok(None) = kv.get(&key).await.map(|found| found.map(drop))
        {
            pool.scene.blame(format!("an item of store '{}' is missing after its put", store.name));
        }
    }
}

impl Scene {
    fn blame(&self, violation: String) {
        self.violated.borrow_mut().push(violation);
    }

    fn drops_of(&self, name: &str) -> u64 {
        self.drops.borrow().iter().filter(|(of, _)| *of == name).count() as u64
    }

    fn incarnation(&self, node: usize) -> u64 {
        self.nodes[node].memory().load(header::INCARNATION_AT, Width::W8) as u64
    }

    /// Whether the memory of all these members exists.
    fn is_whole(&self, members: &[MemberId]) -> bool {
        let present: Vec<u64> = (0..self.nodes.len()).map(|node| self.incarnation(node)).collect();
        members.iter().all(|member| present.contains(&member.incarnation))
    }

    /// Whether nothing has removed this store since its creation was acknowledged.
    fn should_be_there(&self, attempt: Attempt) -> bool {
        let attempts = self.attempts.borrow();
        attempts.get(&attempt).is_some_and(|made| {
            let drops = self.drops_of(made.name);
            let present: Vec<u64> = (0..self.nodes.len()).map(|node| self.incarnation(node)).collect();
            // A wiped member makes the store damaged, not missing.
            let is_any_left = made.members.iter().any(|member| present.contains(&member.incarnation));
            !made.is_dropped && !made.is_contested && drops == made.drops_before && is_any_left
        })
    }
}

async fn found(node: &Node, name: &str) -> Option<Found> {
    match node.answer(Ask::FindStore { name: name.to_owned() }).await {
        Ok(Answer::Found(found)) => Some(found),
        _ => None,
    }
}

/// Settles, judges what the nodes hold, drops everything, and judges the free memory. Returns false if that does not
/// end.
fn finish(scene: &Rc<Scene>, client: usize, free: &[u64]) -> bool {
    let theirs = Rc::clone(scene);
    let process = scene.world.start_process();
    let pool = Pool::new(scene, client, process);
    let end = async move {
        let scene = theirs;
        for _ in 0..3 {
            pool.doing.set(Doing::Settle);
            let _may_fail = heal(&*pool, NODES, None, PATIENCE, NO_BALLOTS, drop).await;
        }
        for name in NAMES {
            let mut found_all = Vec::new();
            for node in &scene.nodes {
                found_all.extend(found(node, name).await);
            }
            judge_settled(&scene, name, &found_all);
        }
        for name in NAMES {
            for _ in 0..20 {
                pool.doing.set(Doing::Drop);
                match members::drop_store(&*pool, NODES, name, WithoutFirst::Refuse).await {
                    Err(StoreError::Gone(reason)) if reason.contains("there is no store") => break,
                    _ => pool.sleep(Duration::from_millis(5)).await,
                }
            }
        }
    };
    let is_done = Rc::new(Cell::new(false));
    let done = Rc::clone(&is_done);
    scene.world.spawn(process, async move {
        end.await;
        done.set(true);
    });
    scene.world.run_while(scene.world.now() + 60 * SECONDS, || !is_done.get());
    scene.world.run_until(scene.world.now() + SECONDS);
    for (index, (node, free)) in scene.nodes.iter().zip(free).enumerate() {
        let now = node.info().map(|info| info.unassigned_bytes);
        if now != Some(*free) {
            scene.blame(format!("node {index} has {now:?} bytes free after all drops, not {free}"));
        }
    }
    is_done.get()
}

/// Checks that each attempt of this name is at all of its members, or that a member is wiped.
fn judge_settled(scene: &Scene, name: &str, found: &[Found]) {
    let memberships: Vec<&Membership> =
        found.iter().filter_map(|found| found.store.as_ref()?.membership.as_ref()).collect();
    for membership in &memberships {
        let same = memberships.iter().filter(|other| other.attempt == membership.attempt);
        let committed = same.filter(|other| other.state == MemberState::Committed).count();
        if scene.is_whole(&membership.members) && committed != membership.members.len() {
            scene.blame(format!(
                "store '{name}' is committed at {committed} of {} members after it was settled",
                membership.members.len()
            ));
        }
    }
    let attempts: Vec<Attempt> = scene.attempts.borrow().keys().copied().collect();
    for attempt in attempts {
        let is_of_name = scene.attempts.borrow()[&attempt].name == name;
        let is_there = memberships.iter().any(|membership| membership.attempt == attempt);
        if is_of_name && scene.should_be_there(attempt) && !is_there {
            scene.blame(format!(
                "store '{name}' is missing at the end although its creation was acknowledged"
            ));
        }
    }
}

/// With the drawn probability, plans a fault for the near future, while the client's step probably lasts.
fn strike_soon(scene: &Rc<Scene>, client: usize) {
    let random = scene.world.random();
    let is_rare = scene.steps.borrow()[client].is_some_and(|step| RARE.contains(&step));
    let one_in = if is_rare { scene.strike_one_in / 10 } else { scene.strike_one_in };
    if scene.left.get() == 0 || scene.strike_one_in == 0 || !random.one_in(one_in) {
        return;
    }
    let fault = FAULTS[random.below(FAULTS.len() as u64) as usize];
    if fault == Fault::NodeLoss && !is_rare && !random.one_in(3) {
        return;
    }
    // A request and its response take a few microseconds.
    let at = scene.world.now() + random.below(1 << random.below(if is_rare { 13 } else { 14 }));
    let theirs = Rc::clone(scene);
    scene.world.at(at, move || strike(&theirs, client, fault));
}

fn strike(scene: &Rc<Scene>, client: usize, fault: Fault) {
    let (world, random) = (&scene.world, scene.world.random());
    let node = scene.nodes[random.below(NODES.into()) as usize].clone();
    if scene.left.get() == 0 {
        return;
    }
    let step = scene.steps.borrow()[client];
    match fault {
        Fault::ClientDeath => {
            let process = scene.processes.borrow()[client];
            if let Some(process) = process.filter(|process| world.is_alive(*process)) {
                world.kill(process);
            }
        }
        Fault::Partition => {
            let (host, until) = (scene.hosts[client], world.now() + random.between(MILLIS, 200 * MILLIS));
            scene.network.cut(host, node.host(), until, Fault::Partition);
            scene.network.cut(node.host(), host, until, Fault::Partition);
        }
        _ if !node.is_served() => return,
        _ => {
            node.kill();
            world.at(world.now() + random.heavy(MILLIS), move || match fault {
                Fault::NodeLoss => node.lose_memory(),
                _ => node.restart(),
            });
        }
    }
    if let Some(step) = step {
        *scene.matrix.borrow_mut().entry((fault.name().to_owned(), step)).or_default() += 1;
    }
}

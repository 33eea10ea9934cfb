//! Trials of timestamps: the wall clocks of clients and nodes are wrong and jump, and clients die and reopen their ids.
//! See [`run`].
//!
//! Invariant: the same seed gives the same trial.

use crate::AGAIN;
use crate::epochs::{IDS, KIND, LinkedKind};
use farside_remote::clock::Clock;
use farside_remote::control::{Ask, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fault::{FaultRates, Struck, Target};
use farside_sim::memory::Replay;
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::node::{Kinds, Node, Options};
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, SECONDS, World};
use farside_systems::lease::{ClientId, LeaseError, Leases, Observer, Table};
use farside_systems::stamps::{AHEAD_MAX, StampError, Stamps};
use farside_systems::store::fetch;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::time::Duration;

const NAME: &str = "s";
/// Length of a lease.
const LEASE: Duration = Duration::from_millis(400);
/// Number of concurrent tasks of a client.
const TASKS: u32 = 3;
/// Time of a trial.
const LENGTH: Nanos = 15 * SECONDS;
/// Time after a jump of a node's clock until all clients know of the jump, in nanoseconds.
const KNOWN_AFTER: Nanos = 4 * SECONDS;
/// Error of a client's idea of a node's clock.
const SLACK: Duration = Duration::from_millis(50);

/// Outcome of a trial.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Violations, one sentence for each.
    pub violated: Vec<String>,
    /// Number of stamps.
    pub given: u64,
    /// Number of stamps that were refused since they are ahead of a node's clock.
    pub ahead: u64,
    /// Number of times that a client has opened an id that another one had before.
    pub reopened: u64,
    /// Number of jumps of their clocks that clients have noticed.
    pub jumps: u64,
}

struct Scene {
    world: World,
    network: Network,
    struck: Rc<Struck>,
    nodes: Vec<Node>,
    hosts: Vec<HostId>,
    processes: RefCell<Vec<Option<ProcessId>>>,
    clocks: RefCell<Vec<Option<ProcessClock>>>,
    /// Offsets of the wall clocks of the clients' hosts in nanoseconds.
    walls: RefCell<Vec<i64>>,
    /// Time of the last jump of each node's clock.
    jumped: RefCell<Vec<Nanos>>,
    /// The highest stamp of each id, and the nonce of the client that opened the id last.
    highest: RefCell<BTreeMap<ClientId, (u64, NonZeroU64)>>,
    outcome: RefCell<Outcome>,
}

/// One client's sessions with all nodes.
struct Pool {
    clock: ProcessClock,
    sessions: Vec<Rc<Endpoint>>,
}

impl Pool {
    fn session(&self, node: NodeId) -> Result<&Endpoint, FabricError> {
        self.sessions.get(node.0 as usize).map(|session| &**session).ok_or(FabricError::NoSuchNode(node))
    }
}

impl Fabric for Pool {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.session(node)?.run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.session(node)?.call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if let Ok(session) = self.session(node) {
            session.retire(node, key, buffer);
        }
    }

    fn capabilities(&self, _: NodeId) -> Capabilities {
        Capabilities::SOFTWARE
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

/// Runs a trial. Judges it by these rules:
///
/// - A stamp of an id is higher than all stamps of the id that were given before, by whatever client. A client that was
///   fenced may not know it yet, and still give stamps that it had reserved. They do not count once another client has
///   opened the id: no operation with such a stamp has an effect.
/// - No stamp is more than [`AHEAD_MAX`] ahead of a node's clock, unless that clock has just jumped.
pub fn run(seed: u64) -> Outcome {
    let world = World::new(seed);
    let random = world.random();
    let struck = Rc::new(Struck::default());
    let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: MICROS }, &struck);
    let (clients, count) = (random.between(1, 3) as usize, if random.one_in(2) { 1 } else { 3 });
    let kinds: Kinds =
        Rc::new(|| -> Vec<Box<dyn farside_remote::service::Kind<Replay>>> { vec![Box::new(LinkedKind)] });
    let node = |id: u32| {
        let options = Options {
            memory_bytes: 12 << 20,
            engines: 1,
            clock_ppm: random.below(401) as i64 - 200,
            wall: Some(offset(&world, 40 * MILLIS)),
            ..Options::default()
        };
        Node::start(&world, &network, network.add_host(), NodeId(id), Rc::clone(&kinds), options)
    };
    let nodes: Vec<Node> = (0..count).map(node).collect();
    for node in nodes.clone() {
        let created = world.complete(SECONDS, async move {
            let (name, kind, parameters) = (NAME.to_owned(), KIND.to_owned(), "1".to_owned());
            node.answer(Ask::CreateStore { name, kind, parameters, quota: 2 << 20 }).await
        });
        assert!(matches!(created, Some(Ok(_))), "the store was not created: {created:?}");
    }
    let walls = (0..clients).map(|_| offset(&world, 40 * MILLIS)).collect();
    let scene = Rc::new(Scene {
        hosts: (0..clients).map(|_| network.add_host()).collect(),
        processes: RefCell::new(vec![None; clients]),
        clocks: RefCell::new(vec![None; clients]),
        walls: RefCell::new(walls),
        jumped: RefCell::new(vec![0; nodes.len()]),
        highest: RefCell::default(),
        outcome: RefCell::default(),
        nodes,
        struck,
        network,
        world: world.clone(),
    });
    if !random.one_in(4) {
        scene.network.set_fault_rates(FaultRates { reset_one_in: 0, ..FaultRates::TYPICAL });
        strike_later(&scene);
    }
    (0..clients).for_each(|client| start(&scene, client));
    let theirs = Rc::clone(&scene);
    world.run_while(LENGTH, || theirs.outcome.borrow().violated.is_empty());
    world.end();
    scene.outcome.take()
}

/// Draws an offset of a wall clock in nanoseconds.
fn offset(world: &World, most: Nanos) -> i64 {
    world.random().below(2 * most + 1) as i64 - most as i64
}

/// Starts the next process of a client.
fn start(scene: &Rc<Scene>, client: usize) {
    let process = scene.world.start_process();
    scene.processes.borrow_mut()[client] = Some(process);
    let again = Rc::clone(scene);
    scene.world.on_death(process, move || {
        let at = again.world.now() + again.world.random().below(2 * AGAIN);
        let scene = Rc::clone(&again);
        again.world.at(at, move || {
            if scene.world.now() < LENGTH {
                start(&scene, client);
            }
        });
    });
    let ppm = scene.world.random().below(401) as i64 - 200;
    let clock = ProcessClock::new(&scene.world, ppm, &scene.struck, Target::Client(client as u32));
    clock.jump_wall(scene.walls.borrow()[client]);
    scene.clocks.borrow_mut()[client] = Some(clock.clone());
    let theirs = Rc::clone(scene);
    scene.world.spawn(process, async move {
        loop {
            let _may_fail = live(&theirs, client, process, &clock).await;
            theirs.world.sleep(theirs.world.random().below(20 * MILLIS)).await;
        }
    });
}

/// Lives as a client with a new nonce until a request fails, or for a while.
async fn live(
    scene: &Rc<Scene>,
    index: usize,
    process: ProcessId,
    clock: &ProcessClock,
) -> Result<(), StampError> {
    let (world, random) = (&scene.world, scene.world.random());
    let (mut sessions, mut stores) = (Vec::new(), Vec::new());
    for node in &scene.nodes {
        let identity = Identity { identity: random.bits().into(), incarnation: 1, silence: 60 * MILLIS };
        sessions.push(Endpoint::open(node, 0, process, scene.hosts[index], clock, identity).await?);
    }
    let pool = Rc::new(Pool { clock: clock.clone(), sessions });
    for node in 0..scene.nodes.len() as u32 {
        let fetched = fetch(&pool, NodeId(node), NAME).await;
        stores.push(fetched.map_err(|error| FabricError::Refused(error.to_string()))?);
    }
    let stores: Vec<&Store> = stores.iter().collect();
    let table = |(node, store): (usize, &&Store)| Table {
        node: NodeId(node as u32),
        key: store.extent().key,
        at: Addr::new(store.table_at),
    };
    let leases = Leases::new(Rc::clone(&pool), stores.iter().enumerate().map(table).collect(), IDS);
    let nonce = NonZeroU64::new(random.bits() | 1).expect("odd");
    // Clients compete for few ids, so that many ids are opened again.
    let claimed = leases.claim(nonce, random.below(2) as u16).await;
    if let Err(LeaseError::NoneFree) = claimed {
        let until = clock.now() + 3 * LEASE;
        watch(&pool, &leases, &stores, || clock.now() < until).await;
    }
    let mut lease = claimed?;
    leases.bind_each(&lease, &stores).await?;
    let stamps = Rc::new(Stamps::open(&leases, &lease, &stores).await?);
    let is_reopened = {
        let mut highest = scene.highest.borrow_mut();
        let before = highest.get(&lease.id()).map(|(stamp, _)| *stamp);
        highest.insert(lease.id(), (before.unwrap_or(0), nonce));
        before.is_some()
    };
    scene.outcome.borrow_mut().reopened += u64::from(is_reopened);
    let (running, is_over) = (Rc::new(Cell::new(TASKS)), Rc::new(Cell::new(false)));
    for _ in 0..TASKS {
        let (scene, stamps, id) = (Rc::clone(scene), Rc::clone(&stamps), lease.id());
        let (running, is_over) = (Rc::clone(&running), Rc::clone(&is_over));
        world.spawn(process, async move {
            while !is_over.get() && take(&scene, &stamps, id, nonce).await {
                scene.world.sleep(scene.world.random().below(30 * MILLIS)).await;
            }
            running.set(running.get() - 1);
        });
    }
    let asking = Rc::clone(&stamps);
    world.spawn(process, async move { asking.keep().await });
    let until = clock.now() + Duration::from_nanos(random.between(SECONDS / 4, 6 * SECONDS));
    let mut watched = clock.now();
    let observer = RefCell::new(Observer::new(LEASE));
    loop {
        pool.sleep(LEASE / 4).await;
        leases.renew(&mut lease).await?;
        if clock.now() >= watched + LEASE / 2 {
            watched = clock.now();
            look(&leases, &stores, &observer).await;
        }
        is_over.set(is_over.get() || clock.now() > until);
        if running.get() == 0 {
            scene.outcome.borrow_mut().jumps += stamps.jumps();
            leases.release(lease).await?;
            return Ok(());
        }
    }
}

/// Takes a stamp, and judges it. Returns false if a request has failed.
async fn take(scene: &Scene, stamps: &Stamps<Rc<Pool>>, id: ClientId, nonce: NonZeroU64) -> bool {
    let taken = stamps.next().await;
    let mut outcome = scene.outcome.borrow_mut();
    let stamp = match taken {
        Ok(stamp) => stamp,
        Err(StampError::Ahead { .. }) => {
            outcome.ahead += 1;
            return true;
        }
        Err(StampError::Lease(_)) => return false,
    };
    outcome.given += 1;
    let mut highest = scene.highest.borrow_mut();
    let (before, opener) = highest[&id];
    if opener != nonce {
        return true; // Another client has opened the id, so this one is fenced.
    }
    if before >= stamp {
        outcome.violated.push(format!("the stamp {stamp} of {id:?} follows {before}"));
    }
    highest.insert(id, (stamp, nonce));
    drop(highest);
    let Some(created) = scene.created() else { return true };
    for (node, jumped) in scene.nodes.iter().zip(&*scene.jumped.borrow()) {
        let Some(wall) = node.wall().filter(|_| scene.world.now() > jumped + KNOWN_AFTER) else { continue };
        let theirs = (wall.as_micros() as u64).saturating_sub(created);
        if stamp > theirs + (AHEAD_MAX + SLACK).as_micros() as u64 {
            outcome.violated.push(format!(
                "the stamp {stamp} of {id:?} is far ahead of the clock of node {}, which is {theirs}",
                node.id().0
            ));
        }
    }
    true
}

impl Scene {
    /// Time of the store's creation at its first member, in microseconds since the Unix epoch.
    fn created(&self) -> Option<u64> {
        self.nodes[0].created(NAME)
    }
}

/// Watches the leases of all clients, and fences those whose leases have expired.
async fn watch(pool: &Rc<Pool>, leases: &Leases<Rc<Pool>>, stores: &[&Store], goes_on: impl Fn() -> bool) {
    let observer = RefCell::new(Observer::new(LEASE));
    while goes_on() {
        pool.sleep(LEASE / 3).await;
        look(leases, stores, &observer).await;
    }
}

async fn look(leases: &Leases<Rc<Pool>>, stores: &[&Store], observer: &RefCell<Observer>) {
    for id in (1..=IDS).filter_map(ClientId::new) {
        let Ok((_, expired)) = leases.observe(observer, id).await else { return };
        let Some(expired) = expired else { continue };
        let Ok(fenced) = leases.fence_each(expired, stores).await else { continue };
        // The clients hold no locks.
        let _another_was_faster = leases.free(fenced.recovered()).await;
    }
}

/// Strikes again and again.
fn strike_later(scene: &Rc<Scene>) {
    let theirs = Rc::clone(scene);
    let at = scene.world.now() + scene.world.random().below(SECONDS);
    scene.world.at(at, move || {
        if theirs.world.now() < LENGTH {
            strike(&theirs);
            strike_later(&theirs);
        }
    });
}

fn strike(scene: &Rc<Scene>) {
    let (world, random) = (&scene.world, scene.world.random());
    let client = random.below(scene.hosts.len() as u64) as usize;
    match random.below(8) {
        0..5 => {
            let most = [100 * MILLIS, 2 * SECONDS][random.below(2) as usize];
            let ns = offset(world, most);
            scene.walls.borrow_mut()[client] += ns;
            if let Some(clock) = &scene.clocks.borrow()[client] {
                clock.jump_wall(ns);
            }
        }
        5..7 => {
            let process = scene.processes.borrow()[client];
            process.into_iter().for_each(|process| world.kill(process));
        }
        _ => {
            let node = random.below(scene.nodes.len() as u64) as usize;
            if random.one_in(2) {
                scene.jumped.borrow_mut()[node] = world.now();
                scene.nodes[node].jump_wall(offset(world, SECONDS));
            } else if scene.nodes[node].is_served() {
                scene.nodes[node].kill();
                let node = scene.nodes[node].clone();
                world.at(world.now() + random.below(200 * MILLIS), move || node.restart());
            }
        }
    }
}

//! Trials of epochs: clients read a pointer in one chain and follow it in a later one, while others replace the
//! buffers, and while clients, the node and the network fail.
//!
//! The system is the smallest one with such pointers. A store has *cells*, each with the address of a buffer. A READ
//! reads a cell's pointer and its buffer in one chain, waits, and reads the buffer again by the address. A WRITE reads
//! a cell, waits, and installs another buffer by a reclaiming CAS on the address. A buffer is written once, so both
//! must find the first buffer again. See [`run`].
//!
//! Invariant: the same seed gives the same trial.

use crate::AGAIN;
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Store, StoreStat};
use farside_remote::leases::LeaseTable;
use farside_remote::op::ListId;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{
    Addr, ChainBuf, Fabric, FabricError, Memory, NodeId, Reply, Status, allocate, cas_from, read, read_as,
};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::AnyFabric;
use farside_sim::fabric::direct::Direct;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fault::{Fault, FaultRates, Struck, Target};
use farside_sim::memory::{Pace, Replay};
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::node::{Node, Options};
use farside_sim::world::{MICROS, MILLIS, ProcessId, SECONDS, World, within};
use farside_systems::epoch::Epochs;
use farside_systems::lease::{ClientId, ENTRY_SIZE, LeaseError, Leases, Observer, Table};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::time::Duration;

const NODE: NodeId = NodeId(0);
const NAME: &str = "s";
/// Kind of a store of cells. Its parameters are the number of cells.
pub(crate) const KIND: &str = "linked-cells";
/// Number of client ids.
pub(crate) const IDS: u16 = 10;
/// Length of a lease.
const LEASE: Duration = Duration::from_millis(3);
/// Length of a buffer in bytes.
const LEN: u32 = 64;
/// Longest pause in nanoseconds.
const PAUSE_MAX: u64 = 200 * MILLIS;
/// Number of concurrent operations of a client.
const TASKS: u32 = 3;

/// Faults that strike clients and nodes. Faults of messages strike besides.
pub const FAULTS: [Fault; 4] = [Fault::ClientPause, Fault::ClientDeath, Fault::NodePause, Fault::NodeRestart];

/// Outcome of a trial.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Violations, one sentence for each.
    pub violated: Vec<String>,
    /// Number of READs, of WRITEs that installed a buffer, and of those that another WRITE preceded.
    pub done: [u64; 3],
    /// Number of buffers that the node has reclaimed.
    pub reclaimed: u64,
    /// Number of clients that others fenced.
    pub fenced: u64,
    /// Number of times that an operation has found its client fenced.
    pub found_fenced: u64,
    /// Number of operations during which their client's epoch has advanced.
    pub spanned: u64,
    /// Number of times that each fault has struck.
    pub struck: BTreeMap<&'static str, u64>,
}

/// Node-side half of the cells.
pub(crate) struct LinkedKind;

fn cells_of(parameters: &str) -> Result<u64, String> {
    parameters.parse().map_err(|_| "give the number of cells".to_owned())
}

impl<M: Memory> Kind<M> for LinkedKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        let table_len = u64::from(IDS) * ENTRY_SIZE + cells_of(parameters)? * 8;
        Ok(Plan { table_len, parameters: parameters.to_owned(), ..Plan::default() })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Linked { at: table.at, cells: cells_of(parameters)? }))
    }
}

struct Linked {
    at: u64,
    cells: u64,
}

impl<M: Memory> Service<M> for Linked {
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        let mut pointer = [0; 8];
        memory.read(cell_at(self.at, cursor).raw(), &mut pointer)?;
        found.extend(Some(u64::from_le_bytes(pointer)).filter(|&at| at != 0));
        Ok((cursor + 1 < self.cells).then_some(cursor + 1))
    }

    fn leases(&self) -> Option<LeaseTable> {
        Some(LeaseTable { at: self.at, ids: IDS })
    }
}

fn cell_at(table_at: u64, cell: u64) -> Addr {
    Addr::new(table_at + u64::from(IDS) * ENTRY_SIZE + cell * 8)
}

/// Bytes of a buffer: the cell and a number that no other buffer has, repeated.
fn content(cell: u64, number: u64) -> [u8; LEN as usize] {
    let mut bytes = [0; LEN as usize];
    for (index, place) in bytes.chunks_exact_mut(8).enumerate() {
        place.copy_from_slice(&[cell, number][index % 2].to_le_bytes());
    }
    bytes
}

struct Scene {
    world: World,
    network: Network,
    struck: Rc<Struck>,
    node: Node,
    cells: u64,
    hosts: Vec<HostId>,
    is_direct: bool,
    processes: RefCell<Vec<Option<ProcessId>>>,
    /// Number of operations that clients may still begin.
    left: Cell<u32>,
    /// Whether clients end, and give their ids back.
    is_ending: Cell<bool>,
    next_number: Cell<u64>,
    /// Why a client has ended last.
    last_error: RefCell<String>,
    outcome: RefCell<Outcome>,
}

impl Scene {
    fn blame(&self, violation: String) {
        self.outcome.borrow_mut().violated.push(violation);
    }

    /// Draws a duration in nanoseconds, with a heavy tail that ends at [`PAUSE_MAX`].
    fn pause(&self, usual: u64) -> u64 {
        self.world.random().heavy(usual).min(PAUSE_MAX)
    }

    fn count(&self, count: impl FnOnce(&mut Outcome)) {
        count(&mut self.outcome.borrow_mut());
    }
}

/// Runs a trial. Judges it by these rules:
///
/// - A buffer that an operation reads by an address of its own earlier chain has not changed since.
/// - If a WRITE replaces a buffer that it has read before, the cell has had no other buffer in between.
/// - Once all clients have ended, and those that have failed are fenced, each cell's buffer is the only one in use.
pub fn run(seed: u64) -> Outcome {
    let world = World::new(seed);
    let random = world.random();
    let struck = Rc::new(Struck::default());
    let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: MICROS }, &struck);
    let clients = random.between(2, 4) as usize;
    let (is_direct, is_reliable) = (random.one_in(2), random.one_in(2));
    let options = Options {
        memory_bytes: 14 << 20,
        is_reliable,
        engines: if is_direct { 0 } else { 2 },
        idle_pause: [50 * MICROS, MILLIS / 2],
        silence: 20 * MILLIS,
        ..Options::default()
    };
    let kinds = || -> Vec<Box<dyn Kind<Replay>>> { vec![Box::new(LinkedKind)] };
    let node = Node::start(&world, &network, network.add_host(), NODE, Rc::new(kinds), options);
    let is_calm = random.one_in(4);
    let scene = Rc::new(Scene {
        hosts: (0..=clients).map(|_| network.add_host()).collect(),
        cells: random.between(1, 4),
        processes: RefCell::new(vec![None; clients + 1]),
        left: Cell::new(random.between(300, 900) as u32),
        is_ending: Cell::new(false),
        next_number: Cell::new(1),
        last_error: RefCell::default(),
        outcome: RefCell::default(),
        is_direct,
        struck,
        node,
        network,
        world: world.clone(),
    });
    let (asked, parameters) = (scene.node.clone(), scene.cells.to_string());
    let created = world.complete(SECONDS, async move {
        let (name, kind) = (NAME.to_owned(), KIND.to_owned());
        asked.answer(Ask::CreateStore { name, kind, parameters, quota: 3 << 20 }).await
    });
    if !matches!(created, Some(Ok(Answer::Store(_)))) {
        scene.blame(format!("the store was not created: {created:?}"));
    }
    if !is_calm {
        scene.network.set_fault_rates(FaultRates { reset_one_in: 0, ..FaultRates::TYPICAL });
        let one_in = [MILLIS, 4 * MILLIS][random.below(2) as usize];
        strike_later(&scene, one_in);
    }
    (0..clients).for_each(|client| start(&scene, client));
    let theirs = Rc::clone(&scene);
    world.run_while(30 * SECONDS, || theirs.left.get() > 0 && theirs.outcome.borrow().violated.is_empty());
    if scene.left.get() > 0 && scene.outcome.borrow().violated.is_empty() {
        let (left, error) = (scene.left.get(), scene.last_error.borrow().clone());
        scene.blame(format!("the clients did not perform {left} operations; the last error: {error}"));
    }
    scene.network.set_fault_rates(FaultRates::NONE);
    scene.left.set(0);
    scene.is_ending.set(true);
    if scene.outcome.borrow().violated.is_empty() {
        finish(&scene, clients);
    }
    world.end();
    scene.outcome.take()
}

/// A client between two losses of its session. It has its own nonce.
struct Client {
    scene: Rc<Scene>,
    fabric: AnyFabric,
    store: Store,
    leases: Leases<AnyFabric>,
    epochs: Epochs<AnyFabric>,
    /// Number of operations in progress.
    running: Cell<u32>,
    /// Whether this is the client of the trial's end, which watches the others until all is settled.
    is_last: bool,
    /// Why the client ends: a request has failed.
    failure: RefCell<Option<FabricError>>,
}

/// Starts the next process of a client.
fn start(scene: &Rc<Scene>, client: usize) {
    let process = scene.world.start_process();
    scene.processes.borrow_mut()[client] = Some(process);
    let again = Rc::clone(scene);
    scene.world.on_death(process, move || {
        let at = again.world.now() + again.pause(AGAIN);
        let scene = Rc::clone(&again);
        again.world.at(at, move || {
            if !scene.is_ending.get() {
                start(&scene, client);
            }
        });
    });
    let theirs = Rc::clone(scene);
    scene.world.spawn(process, async move {
        let ppm = theirs.world.random().below(2001) as i64 - 1000;
        let clock = ProcessClock::new(&theirs.world, ppm, &theirs.struck, Target::Client(client as u32));
        while !theirs.is_ending.get() {
            if let Err(error) = live(&theirs, client, process, &clock).await {
                theirs.last_error.replace(format!("client {client}: {error}"));
            }
            theirs.world.sleep(theirs.pause(AGAIN)).await;
        }
    });
}

/// Lives as a client with a new nonce until a request fails, or until the clients end.
async fn live(
    scene: &Rc<Scene>,
    index: usize,
    process: ProcessId,
    clock: &ProcessClock,
) -> Result<(), LeaseError> {
    let (world, random) = (&scene.world, scene.world.random());
    let fabric = if scene.is_direct {
        AnyFabric::Direct(Direct::open(&scene.node, process, clock, Pace::CPU).await?)
    } else {
        let (host, engine) = (scene.hosts[index], random.below(2) as u32);
        let identity = Identity { identity: random.bits().into(), incarnation: 1, silence: 20 * MILLIS };
        let opening = Endpoint::open(&scene.node, engine, process, host, clock, identity);
        AnyFabric::Session(opening.await?)
    };
    let fetched = farside_systems::store::fetch(&fabric, NODE, NAME).await;
    let store = fetched.map_err(|error| FabricError::Refused(error.to_string()))?;
    let extent = store.extent();
    let table = Table { node: NODE, key: extent.key, at: Addr::new(extent.at) };
    let leases = Leases::new(fabric.clone(), vec![table], IDS);
    let nonce = NonZeroU64::new(random.bits() | 1).expect("odd");
    let claimed = leases.claim(nonce, random.below(IDS.into()) as u16).await;
    if let Err(LeaseError::NoneFree) = claimed {
        // All clients that hold an id may be dead.
        let until = fabric.now() + 3 * LEASE;
        watch(scene, &fabric, &leases, &store, || fabric.now() < until).await;
    }
    let mut lease = claimed?;
    leases.bind(&lease, &store).await?;
    let epochs = Epochs::open(&leases, &lease).await?;
    let client = Rc::new(Client {
        scene: Rc::clone(scene),
        fabric,
        store,
        leases,
        epochs,
        running: Cell::new(TASKS),
        is_last: index + 1 == scene.hosts.len(),
        failure: RefCell::default(),
    });
    for _ in 0..TASKS {
        let own = Rc::clone(&client);
        world.spawn(process, async move {
            own.perform().await;
            own.running.set(own.running.get() - 1);
        });
    }
    let own = Rc::clone(&client);
    world.spawn(process, async move {
        let goes_on = || own.failure.borrow().is_none() && (own.running.get() > 0 || own.is_last);
        watch(&own.scene, &own.fabric, &own.leases, &own.store, goes_on).await;
    });
    // Renews the lease, and publishes epochs.
    loop {
        client.fabric.sleep(LEASE / 4).await;
        match client.leases.renew_and_advance(&mut lease, &client.epochs, LEASE / 4).await {
            Err(LeaseError::Fabric(error)) => client.fail(error),
            Err(error) => {
                client.fail(FabricError::Refused(error.to_string()));
                return Err(error);
            }
            Ok(()) => {}
        }
        if client.failure.borrow().is_some() {
            // Others fence this client. Its requests in flight end with its session.
            return Ok(());
        }
        if client.running.get() == 0 && !client.is_last {
            return client.leases.release(lease).await;
        }
    }
}

impl Client {
    fn fail(&self, error: FabricError) {
        if error.is_fenced() {
            self.scene.count(|outcome| outcome.found_fenced += 1);
        }
        self.failure.borrow_mut().get_or_insert(error);
    }

    async fn perform(&self) {
        let (scene, random) = (&self.scene, self.scene.world.random());
        while scene.left.get() > 0 && self.failure.borrow().is_none() {
            scene.left.set(scene.left.get() - 1);
            let cell = random.below(scene.cells);
            let before = self.epochs.current();
            let done = match random.one_in(2) {
                true => self.read(cell).await,
                false => self.write(cell).await,
            };
            scene.count(|outcome| outcome.spanned += u64::from(self.epochs.current() != before));
            if let Err(error) = done {
                return self.fail(error);
            }
            scene.world.sleep(scene.pause(20 * MICROS)).await;
        }
    }

    async fn wait(&self) {
        let random = self.scene.world.random();
        let usual = if random.one_in(8) { MILLIS } else { 10 * MICROS };
        self.scene.world.sleep(self.scene.pause(usual)).await;
    }

    /// Reads a cell's pointer and its buffer. Returns `None` if the cell has no buffer.
    async fn look(&self, cell: u64) -> Result<Option<(Addr, Vec<u8>)>, FabricError> {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(self.store.extent().key);
        let pointer = Addr::scratch(0);
        chain.also(read(cell_at(self.store.table_at, cell), 8).redirect(pointer));
        let at = chain.then(read_as::<Addr>(pointer));
        let bytes = chain.then(read(pointer, LEN).indirect());
        self.fabric.run(NODE, &chain, &mut reply).await?;
        let Ok(at) = reply.get(at).copied() else { return Ok(None) };
        Ok(reply.get(bytes).ok().map(|bytes| (at, bytes.to_vec())))
    }

    fn check(&self, what: &str, cell: u64, at: Addr, expected: &[u8], found: &[u8]) {
        if expected != found || expected[..8] != cell.to_le_bytes() {
            let word = |bytes: &[u8], at: usize| {
                bytes.get(at..at + 8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
            };
            let of = |bytes: &[u8]| (word(bytes, 0), word(bytes, 8));
            self.scene.blame(format!(
                "{what} of cell {cell} found {:?} at {at:?}, where its first chain found {:?}",
                of(found),
                of(expected)
            ));
        }
    }

    async fn read(&self, cell: u64) -> Result<(), FabricError> {
        let _guard = self.epochs.enter();
        let Some((at, expected)) = self.look(cell).await? else { return Ok(()) };
        self.wait().await;
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(self.store.extent().key);
        let found = chain.also(read(at, LEN));
        self.fabric.run(NODE, &chain, &mut reply).await?;
        match reply.get(found) {
            Ok(found) => self.check("a READ", cell, at, &expected, found),
            Err(status) => self.scene.blame(format!("a READ of cell {cell} at {at:?} is refused: {status}")),
        }
        self.scene.count(|outcome| outcome.done[0] += 1);
        Ok(())
    }

    async fn write(&self, cell: u64) -> Result<(), FabricError> {
        let guard = self.epochs.enter();
        let before = self.look(cell).await?;
        self.wait().await;
        let number = self.scene.next_number.get();
        self.scene.next_number.set(number + 1);
        let (new, old) = (content(cell, number), before.as_ref().map_or(Addr::NULL, |(at, _)| *at));
        let list = ListId(Class::for_len(new.len()).expect("a class").index.into());
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(self.store.extent().key);
        let found =
            before.is_some().then(|| chain.also(read(cell_at(self.store.table_at, cell), LEN).indirect()));
        chain.also(allocate(list, [&new, &[], &[]]).redirect(Addr::scratch(0)));
        let at = cell_at(self.store.table_at, cell);
        let swung = chain.then(cas_from(at, &old, Addr::scratch(0)).reclaiming(0));
        let ran = self.fabric.run(NODE, &chain, &mut reply).await;
        if ran.is_err() {
            // The chain may still run.
            guard.keep();
            return ran;
        }
        match reply.status(swung) {
            Status::Ok => {
                if let (Some((at, expected)), Some(found)) = (&before, found) {
                    self.check("a WRITE", cell, *at, expected, reply.get(found).unwrap_or_default());
                }
                self.scene.count(|outcome| outcome.done[1] += 1);
            }
            Status::CasFailed => self.scene.count(|outcome| outcome.done[2] += 1),
            Status::Skipped if reply.last_status() == Status::NotReady => {
                drop(guard);
                let _published_later_too = self.epochs.advance().await;
            }
            refused => self.scene.blame(format!("a WRITE of cell {cell} is refused: {refused}")),
        }
        Ok(())
    }
}

/// Watches the leases of all clients, and fences those whose leases have expired.
async fn watch(
    scene: &Scene,
    fabric: &AnyFabric,
    leases: &Leases<AnyFabric>,
    store: &Store,
    goes_on: impl Fn() -> bool,
) {
    let observer = RefCell::new(Observer::new(LEASE));
    while goes_on() {
        fabric.sleep(LEASE / 3).await;
        for id in (1..=IDS).filter_map(ClientId::new) {
            let Ok((_, expired)) = leases.observe(&observer, id).await else { return };
            let Some(expired) = expired else { continue };
            let Ok(fenced) = leases.fence(expired, store).await else { continue };
            scene.count(|outcome| outcome.fenced += 1);
            // The clients hold no locks.
            let _another_was_faster = leases.free(fenced.recovered()).await;
        }
    }
}

/// Strikes again and again, while clients have operations to perform.
fn strike_later(scene: &Rc<Scene>, usual: u64) {
    let theirs = Rc::clone(scene);
    let at = scene.world.now() + scene.world.random().heavy(usual);
    scene.world.at(at, move || {
        if theirs.left.get() > 0 {
            strike(&theirs);
            strike_later(&theirs, usual);
        }
    });
}

fn strike(scene: &Rc<Scene>) {
    let (world, random) = (&scene.world, scene.world.random());
    let fault = match random.below(12) {
        0..7 => Fault::ClientPause,
        7..10 => Fault::ClientDeath,
        10 => Fault::NodePause,
        _ => Fault::NodeRestart,
    };
    let clients = scene.processes.borrow().len() as u64 - 1;
    let process = match fault {
        Fault::NodePause | Fault::NodeRestart => scene.node.process().filter(|_| scene.node.is_served()),
        _ => scene.processes.borrow()[random.below(clients) as usize],
    };
    let Some(process) = process.filter(|&process| world.is_alive(process)) else { return };
    match fault {
        Fault::ClientDeath => world.kill(process),
        Fault::NodeRestart => {
            scene.node.kill();
            end_runners(scene);
            let theirs = Rc::clone(scene);
            world.at(world.now() + scene.pause(MILLIS), move || {
                end_runners(&theirs);
                theirs.node.restart();
            });
        }
        _ => {
            world.stop(process);
            let usual = if random.one_in(2) { 8 * MILLIS } else { MILLIS };
            let theirs = world.clone();
            world.at(world.now() + scene.pause(usual), move || theirs.resume(process));
        }
    }
    scene.count(|outcome| *outcome.struck.entry(fault.name()).or_default() += 1);
}

/// Kills the processes that run chains on the node's memory themselves. They must be dead before another process takes
/// over this memory.
fn end_runners(scene: &Scene) {
    if scene.is_direct {
        let processes = scene.processes.borrow().clone();
        processes.into_iter().flatten().for_each(|process| scene.world.kill(process));
    }
}

/// Waits until all clients have ended, fences those that failed, and judges what is left.
fn finish(scene: &Rc<Scene>, client: usize) {
    let process = scene.world.start_process();
    // A client that was fenced leaves its session open, and with it the buffers that the session owns.
    let theirs = Rc::clone(scene);
    scene.world.at(scene.world.now() + SECONDS, move || {
        let processes = theirs.processes.borrow().clone();
        processes.into_iter().flatten().for_each(|process| theirs.world.kill(process));
    });
    let (theirs, is_done) = (Rc::clone(scene), Rc::new(Cell::new(false)));
    let done = Rc::clone(&is_done);
    scene.world.spawn(process, async move {
        let scene = theirs;
        let clock = ProcessClock::new(&scene.world, 0, &scene.struck, Target::None);
        let reader = async {
            loop {
                match settled(&scene).await {
                    Ok(()) => return,
                    Err(_) => scene.world.sleep(5 * MILLIS).await,
                }
            }
        };
        let watcher = async {
            loop {
                let _may_fail = live(&scene, client, process, &clock).await;
                scene.world.sleep(MILLIS).await;
            }
        };
        let mut watcher = std::pin::pin!(watcher);
        let mut reader = std::pin::pin!(reader);
        let both = std::future::poll_fn(|cx| {
            let _never_ends: std::task::Poll<()> = watcher.as_mut().poll(cx);
            reader.as_mut().poll(cx)
        });
        if within(&scene.world, 20 * SECONDS, both).await.is_none() {
            let why = settled(&scene).await;
            scene.blame(format!("not all buffers are reclaimed after all clients have ended: {why:?}"));
        }
        done.set(true);
    });
    scene.world.run_while(scene.world.now() + 60 * SECONDS, || !is_done.get());
    let reclaimed = scene.node.info().map_or(0, |info| info.reclaimed_buffers);
    scene.count(|outcome| outcome.reclaimed = reclaimed);
    if !is_done.get() {
        scene.blame("the end of the trial was not reached".into());
    }
}

/// Checks that the store has exactly the buffers of its cells in use.
async fn settled(scene: &Scene) -> Result<(), String> {
    scene.node.answer(Ask::Scan { name: NAME.into() }).await?;
    let Answer::StoreStat(stat) = scene.node.answer(Ask::StoreStat { name: NAME.into() }).await? else {
        return Err("no statistics".into());
    };
    let StoreStat { live_buffers, retired_buffers, delaying_ids, .. } = stat;
    let reachable = scene.node.reachable(NAME)?;
    if retired_buffers == 0 && live_buffers == reachable {
        return Ok(());
    }
    Err(format!(
        "{retired_buffers} retired, {live_buffers} live of {reachable} reachable; delayed by {delaying_ids:?}"
    ))
}

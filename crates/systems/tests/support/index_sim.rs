//! An index in the simulator: several nodes, client processes that die, operations whose futures are dropped. Each key
//! is checked as a register. A scan counts as a get of each key in its range, at any instant of the scan.

use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask as NodeAsk};
use farside_remote::draws::Draws;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::AnyFabric;
use farside_sim::fabric::direct::Direct;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fabric::verbs::Verbs;
use farside_sim::fault::{Struck, Target};
use farside_sim::hardware::{INPUTS, Testbed};
use farside_sim::history::register::{Ask, History, Outcome, Value};
use farside_sim::linearizable::{Limits, check, explain};
use farside_sim::memory::Pace;
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::nic::{Device, Sender, Timing};
use farside_sim::node::{Kinds, Node, Options as NodeOptions};
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, SECONDS, World, within};
use farside_systems::index::art::Art;
use farside_systems::index::sherman::Sherman;
use farside_systems::index::smart::Smart;
use farside_systems::index::{Index, IndexError, Indexing, Keys, Rung};
use farside_systems::members::{self, New};
use farside_systems::registry::{AnyIndex, all_kinds};
use farside_systems::system::{Options, Sizing};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Lines land slowly, so that operations meet within a READ or a WRITE.
const SLOW: Timing = Timing {
    fetch_spread_ns: 400,
    land_spread_ns: 400,
    slot_spread_ns: 100,
    ..INPUTS.timing(Testbed::PRISM_MICRO)
};
const DEVICE: Device = Device { timing: SLOW, has_masked_cas: true, has_on_chip_words: false };
const LEASE: Duration = Duration::from_millis(1);
const VALUE_MAX: usize = 150;

/// What a run is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Kind of the index.
    pub(crate) kind: &'static str,
    /// Parameters of the store, if it has one member; else they follow from the plan.
    pub(crate) parameters: Option<&'static str>,
    /// Size of the pieces of memory that clients claim.
    pub(crate) chunk: u32,
    pub(crate) nodes: u32,
    pub(crate) fabric: Kind,
    pub(crate) clients: u32,
    pub(crate) tasks: u32,
    /// Number of operations of each task.
    pub(crate) operations: u32,
    pub(crate) keys: Keys,
    /// Number of keys.
    pub(crate) count: usize,
    /// Whether client processes die.
    pub(crate) deaths: bool,
    /// Whether futures are dropped.
    pub(crate) drops: bool,
    /// Bytes of the clients' caches.
    pub(crate) cache: usize,
    /// How many of the paper's techniques the clients use.
    pub(crate) rung: Rung,
    /// Percentage of scans, and of deletes.
    pub(crate) scans: u64,
    pub(crate) deletes: u64,
    /// Length of the longest value that lies in its leaf.
    pub(crate) inline_max: u32,
    /// Time that a message takes in one direction.
    pub(crate) delay_ns: Nanos,
}

/// How clients reach the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The nodes' NICs execute verbs.
    Verbs,
    /// The clients' CPUs run the chains, and may stop within a WRITE.
    Direct,
    /// The nodes' engines run the chains.
    Session,
}

impl Plan {
    /// A plan for an index of a kind, which follows from a seed.
    pub(crate) fn of(kind: &'static str, seed: u64) -> Plan {
        let mut draws = Draws(seed ^ 0x5a5a);
        Plan {
            kind,
            parameters: None,
            chunk: 4 << 10,
            nodes: 1 + draws.below(3) as u32,
            fabric: draws.pick(&[Kind::Verbs, Kind::Verbs, Kind::Direct, Kind::Session]),
            clients: 2 + draws.below(2) as u32,
            tasks: 1 + draws.below(3) as u32,
            operations: draws.pick(&[30, 60, 200]),
            keys: draws.pick(&[Keys::Numbers, Keys::Strings]),
            count: draws.pick(&[3, 8, 24, 60, 300]),
            deaths: draws.once_in(2),
            drops: draws.once_in(3),
            cache: draws.pick(&[0, 3_000, 1 << 20]),
            rung: Rung::default(),
            scans: draws.pick(&[0, 5, 20]),
            deletes: draws.pick(&[0, 10, 30]),
            inline_max: draws.pick(&[VALUE_MAX as u32, 40]),
            delay_ns: 2 * MICROS,
        }
    }
}

/// Sessions of a process with all nodes.
struct Many {
    endpoints: Vec<AnyFabric>,
}

#[derive(Clone)]
struct Reach(Rc<Many>);

impl Fabric for Reach {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.0.endpoints[node.0 as usize].run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.0.endpoints[node.0 as usize].call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.0.endpoints[node.0 as usize].retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.0.endpoints[node.0 as usize].capabilities(node)
    }
}

impl Clock for Reach {
    fn now(&self) -> Duration {
        self.0.endpoints[0].now()
    }

    fn wall(&self) -> Duration {
        self.0.endpoints[0].wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.0.endpoints[0].sleep(duration)
    }
}

/// Events of a run, by name.
pub(crate) type Events = BTreeMap<&'static str, u64>;

struct Bench {
    world: World,
    nodes: Vec<Node>,
    network: Network,
    sender: Rc<Sender>,
    incarnations: Cell<u64>,
    plan: Plan,
    keys: Vec<Vec<u8>>,
    history: RefCell<History>,
    draws: RefCell<Draws>,
    tags: Cell<u64>,
    events: RefCell<Events>,
    failure: RefCell<Option<String>>,
}

/// Keys with many common prefixes, in order.
fn keys_of(plan: &Plan, draws: &mut Draws) -> Vec<Vec<u8>> {
    let mut keys = std::collections::BTreeSet::new();
    let letters: &[u8] = if plan.count > 20 { b"abcdefghijklmnopqrstuvwxyz" } else { b"ab" };
    for _ in 0..plan.count {
        keys.insert(match plan.keys {
            Keys::Numbers if plan.count > 100 => [0, 0, 0, 0, 0, 0, 0, draws.next() as u8].to_vec(),
            Keys::Numbers => {
                let mut key = [0; 8];
                let varied = 1 + draws.below(3) as usize;
                for byte in &mut key[8 - varied..] {
                    *byte = draws.pick(if plan.count > 20 {
                        &[0, 1, 2, 3, 4, 5, 6, 7, 8, 200]
                    } else {
                        &[0, 255]
                    });
                }
                key[0] = draws.pick(&[0, 0, 0, 9]);
                key.to_vec()
            }
            Keys::Strings => {
                let mut key =
                    draws.pick(&[&b""[..], b"common", b"common/prefix/that/is/long/", b"x"]).to_vec();
                let tail = 1 + draws.below(4);
                key.extend((0..tail).map(|_| draws.pick(letters)));
                key
            }
        });
    }
    keys.into_iter().collect()
}

fn bytes_of(value: Value) -> Vec<u8> {
    let mut bytes = value.tag.to_le_bytes().to_vec();
    bytes.resize(value.len as usize, value.tag.wrapping_mul(31) as u8);
    bytes
}

fn value_of(bytes: &[u8]) -> Option<Value> {
    let tag = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let value = Value { tag, len: bytes.len() as u32 };
    (bytes_of(value) == bytes).then_some(value)
}

impl Bench {
    fn new(seed: u64, plan: Plan) -> Rc<Bench> {
        let world = World::new(seed);
        let struck = Rc::new(Struck::default());
        let network = Network::new(&world, Wire { delay_ns: plan.delay_ns, jitter_ns: 500 }, &struck);
        let mut draws = Draws(seed);
        let kinds: Kinds = Rc::new(all_kinds);
        let nodes = (0..plan.nodes).map(|node| {
            let at = network.add_host();
            let options = NodeOptions {
                engines: 1,
                is_reliable: true,
                nic: Some(DEVICE),
                memory_bytes: 24 << 20,
                ..NodeOptions::default()
            };
            Node::start(&world, &network, at, NodeId(node), Rc::clone(&kinds), options)
        });
        let nodes = nodes.collect();
        let keys = keys_of(&plan, &mut draws);
        Rc::new(Bench {
            nodes,
            network,
            sender: Rc::new(INPUTS.sender()),
            incarnations: Cell::new(0),
            plan,
            keys,
            history: RefCell::new(History::new()),
            draws: RefCell::new(draws),
            tags: Cell::new(0),
            events: RefCell::default(),
            failure: RefCell::default(),
            world,
        })
    }

    async fn connect(&self, process: ProcessId, host: HostId) -> Result<Reach, FabricError> {
        let incarnation = self.incarnations.get() + 1;
        self.incarnations.set(incarnation);
        let clock = ProcessClock::new(&self.world, 0, self.network.struck(), Target::Client(0));
        let mut endpoints = Vec::new();
        for node in &self.nodes {
            let silence = 60 * MILLIS;
            let identity = Identity { identity: 1000 + u128::from(incarnation), incarnation, silence };
            endpoints.push(match self.plan.fabric {
                Kind::Verbs => AnyFabric::Verbs(
                    Verbs::open(node, 0, process, host, &clock, identity, &self.sender).await?,
                ),
                Kind::Direct => AnyFabric::Direct(Direct::open(node, process, &clock, Pace::CPU).await?),
                Kind::Session => {
                    AnyFabric::Session(Endpoint::open(node, 0, process, host, &clock, identity).await?)
                }
            });
        }
        Ok(Reach(Rc::new(Many { endpoints })))
    }

    async fn create(&self) {
        let reach = self.connect(self.world.start_process(), self.network.add_host()).await.expect("nodes");
        let (name, kind) = ("s".to_owned(), self.plan.kind.to_owned());
        let (members, quota) = (self.plan.nodes as usize, u64::from(self.plan.nodes) << 20);
        if let Some(parameters) = self.plan.parameters.filter(|_| members == 1) {
            let ask = NodeAsk::CreateStore { name, kind, parameters: parameters.to_owned(), quota };
            let (request, mut answer) = (serde_json::to_vec(&ask).expect("plain data"), Vec::new());
            let called = reach.call(NodeId(0), ServiceId::NODE, &request, &mut answer).await;
            let answer = called.map(|()| serde_json::from_slice(&answer));
            assert!(matches!(answer, Ok(Ok(Answer::Store(_)))), "{answer:?}");
            return;
        }
        let Plan { keys, rung, inline_max, chunk, .. } = self.plan;
        let indexing = Indexing {
            keys: Some(keys),
            inline_max: Some(inline_max),
            chunk: Some(chunk),
            ids: Some(6),
            lanes: Some(4),
            rung: Some(rung),
            ..Indexing::NONE
        };
        let sizing = Sizing {
            items: Some(100),
            value_len: VALUE_MAX,
            lease: Some(LEASE),
            indexing,
            ..Sizing::default()
        };
        let new = New { name, kind, sizing, quota, members };
        members::create(&reach, self.plan.nodes, &new, [1, 2]).await.expect("the nodes have memory");
    }

    async fn open(&self, process: ProcessId, host: HostId) -> Result<AnyIndex<Reach>, String> {
        let reach = self.connect(process, host).await.map_err(|error| error.to_string())?;
        let entropy = self.draws.borrow_mut().next() | 1;
        let options = Options {
            entropy,
            node_cache: Some(self.plan.cache),
            patience: Some(Duration::from_millis(100) + 100 * Duration::from_nanos(self.plan.delay_ns)),
            ..Options::NONE
        };
        AnyIndex::open_in(reach, self.plan.nodes, "s", &options).await.map_err(|error| error.to_string())
    }

    fn fail(&self, why: String) {
        self.failure.borrow_mut().get_or_insert(why);
    }

    fn count(&self, index: &AnyIndex<Reach>) {
        let mut events = self.events.borrow_mut();
        for (name, count) in index.counters() {
            *events.entry(name).or_default() += count;
        }
    }

    /// Heals the store, and checks that nothing is left of dead clients.
    async fn audit(&self, index: AnyIndex<Reach>) {
        match index {
            AnyIndex::Smart(index) => self.audit_smart(index).await,
            AnyIndex::Art(index) => self.audit_art(index).await,
            AnyIndex::Sherman(index) => self.audit_sherman(index).await,
        }
    }

    async fn audit_art(&self, mut index: Art<Reach>) {
        if let Err(error) = index.heal().await {
            return self.fail(format!("healing has failed: {error}"));
        }
        let stat = match index.stat().await {
            Ok(stat) => stat,
            Err(error) => return self.fail(format!("the last walk has failed: {error}")),
        };
        if stat.locked > 0 || stat.taken != stat.linked() {
            self.fail(format!("after healing, memory or locks are left behind: {stat:?}"));
        }
        let present = index.scan(&[], usize::MAX, |_, _| ()).await;
        if present != Ok(stat.leaves as usize) {
            self.fail(format!("a scan has returned {present:?} keys: {stat:?}"));
        }
        let mut events = self.events.borrow_mut();
        *events.entry("recovered clients").or_default() += index.recovered();
        *events.entry("swept units").or_default() += index.swept();
    }

    async fn audit_sherman(&self, mut index: Sherman<Reach>) {
        if let Err(error) = index.heal().await {
            return self.fail(format!("healing has failed: {error}"));
        }
        let stat = match index.stat().await {
            Ok(stat) => stat,
            Err(error) => return self.fail(format!("the last walk has failed: {error}")),
        };
        let is_clean = stat.locked == 0 && stat.orphans == 0;
        if !is_clean || stat.claimed != stat.nodes() + index.spare_units() as u64 {
            self.fail(format!("after healing, memory, locks or splits are left behind: {stat:?}"));
        }
        let present = index.scan(&[], usize::MAX, |_, _| ()).await;
        if present != Ok(stat.keys as usize) {
            self.fail(format!("a scan has returned {present:?} keys: {stat:?}"));
        }
        let mut events = self.events.borrow_mut();
        *events.entry("recovered clients").or_default() += index.recovered();
        *events.entry("swept units").or_default() += index.swept();
        *events.entry("splits completed").or_default() += index.completed();
    }

    async fn audit_smart(&self, mut index: Smart<Reach>) {
        if let Err(error) = index.heal().await {
            return self.fail(format!("healing has failed: {error}"));
        }
        let (stat, swept) = match index.stat().await {
            Ok(stat) => (stat, index.swept()),
            Err(error) => return self.fail(format!("the last walk has failed: {error}")),
        };
        // The client's own deletes may wait. It has made none.
        if stat.locked > 0 || stat.taken != stat.linked() {
            self.fail(format!("after healing, memory or locks are left behind: {stat:?}"));
        }
        let present = index.scan(&[], usize::MAX, |_, _| ()).await;
        if present != Ok(stat.leaves as usize) {
            self.fail(format!("a scan has returned {present:?} keys: {stat:?}"));
        }
        let mut events = self.events.borrow_mut();
        *events.entry("recovered clients").or_default() += index.recovered();
        *events.entry("swept units").or_default() += swept;
        *events.entry("dead leaves left").or_default() += stat.dead;
        *events.entry("hidden leaves left").or_default() += stat.hidden;
    }

    /// Runs one operation, and records it.
    async fn operate(&self, client: u32, index: &mut AnyIndex<Reach>) -> Result<(), IndexError> {
        let (key, kind, len) = {
            let mut draws = self.draws.borrow_mut();
            let len = 8 + draws.below(VALUE_MAX as u64 - 8) as u32;
            (draws.below(self.keys.len() as u64), draws.below(100), len)
        };
        if kind < self.plan.scans {
            return self.scan(client, index, key).await;
        }
        let tag = self.tags.get() + 1;
        self.tags.set(tag);
        let (value, deletes) = (Value { tag, len }, 100 - self.plan.deletes);
        let ask = match kind {
            _ if kind >= deletes => Ask::Delete,
            _ if kind % 8 == 0 => Ask::PutIfAbsent(value),
            _ if kind % 2 == 0 => Ask::Put(value),
            _ => Ask::Get,
        };
        let bytes = &self.keys[key as usize];
        let call = self.history.borrow_mut().call(client, key, ask, self.world.now());
        let done = match ask {
            Ask::Get => match index.get(bytes).await {
                Ok(None) => Ok(Outcome::Absent),
                Ok(Some(found)) => match value_of(found) {
                    Some(value) => Ok(Outcome::Found(value, None)),
                    None => {
                        self.fail(format!("a get of key {key} has returned torn bytes"));
                        Ok(Outcome::Unknown)
                    }
                },
                Err(error) => Err(error),
            },
            Ask::Put(_) => index.put(bytes, &bytes_of(value)).await.map(|()| Outcome::Done(None)),
            Ask::PutIfAbsent(_) => {
                let stored = index.put_if_absent(bytes, &bytes_of(value)).await;
                stored.map(|stored| if stored { Outcome::Done(None) } else { Outcome::Conflict(None) })
            }
            _ => {
                let deleted = index.delete(bytes).await;
                deleted.map(|deleted| if deleted { Outcome::Done(None) } else { Outcome::Absent })
            }
        };
        let now = self.world.now();
        match done {
            Ok(outcome) => {
                self.history.borrow_mut().returned(call, outcome, now);
                Ok(())
            }
            Err(error) => {
                if ask == Ask::Get || error.ran() == Ran::No {
                    self.history.borrow_mut().returned(call, Outcome::Failed, now);
                }
                Err(error)
            }
        }
    }

    /// Scans from a key on, and records a get of each key that the scan has covered.
    async fn scan(&self, client: u32, index: &mut AnyIndex<Reach>, from: u64) -> Result<(), IndexError> {
        let limit = 1 + self.draws.borrow_mut().below(12) as usize;
        let mut found = Vec::new();
        let visited = Rc::new(RefCell::new(Vec::new()));
        let theirs = Rc::clone(&visited);
        let calls: Vec<_> = (from..self.keys.len() as u64)
            .map(|key| (key, self.history.borrow_mut().call(client, key, Ask::Get, self.world.now())))
            .collect();
        let visit = |key: &[u8], value: &[u8]| theirs.borrow_mut().push((key.to_vec(), value.to_vec()));
        let scanned = index.scan(&self.keys[from as usize], limit, visit).await;
        found.append(&mut visited.borrow_mut());
        let now = self.world.now();
        if !found.windows(2).all(|pair| pair[0].0 < pair[1].0) {
            self.fail(format!("a scan from key {from} is not in order: {found:?}"));
        }
        let is_complete = scanned.as_ref().is_ok_and(|count| *count < limit);
        let last = found.last().map(|(key, _)| key.clone());
        let mut found: BTreeMap<Vec<u8>, Vec<u8>> = found.into_iter().collect();
        for (key, call) in calls {
            let bytes = &self.keys[key as usize];
            let outcome = match found.remove(bytes) {
                Some(value) => match value_of(&value) {
                    Some(value) => Outcome::Found(value, None),
                    None => {
                        self.fail(format!("a scan has returned torn bytes of key {key}"));
                        Outcome::Failed
                    }
                },
                None if scanned.is_ok()
                    && (is_complete || last.as_ref().is_some_and(|last| bytes < last)) =>
                {
                    Outcome::Absent
                }
                None => Outcome::Failed,
            };
            self.history.borrow_mut().returned(call, outcome, now);
        }
        if let Some((key, _)) = found.first_key_value() {
            self.fail(format!("a scan from key {from} has returned {key:?}"));
        }
        scanned.map(drop)
    }
}

/// Runs a client process until its operations are done. Opens the store again if the client has lost its lease.
async fn run_client(bench: Rc<Bench>, process: ProcessId, host: HostId, client: u32) {
    let mut left = bench.plan.operations * bench.plan.tasks;
    let mut attempts = 0;
    while left > 0 && attempts < 50 {
        attempts += 1;
        let index = match bench.open(process, host).await {
            Ok(index) => index,
            Err(error) => {
                if error.contains("damaged") {
                    bench.fail(format!("an open has failed: {error}"));
                }
                bench.world.sleep(MILLIS).await;
                continue;
            }
        };
        bench.world.spawn(process, index.keeper());
        let running = Rc::new(Cell::new(bench.plan.tasks));
        let done = Rc::new(Cell::new(0));
        for task in 0..bench.plan.tasks {
            let (bench, running, done) = (Rc::clone(&bench), Rc::clone(&running), Rc::clone(&done));
            let (mut index, share) = (index.another(), left.div_ceil(bench.plan.tasks));
            let spawned = Rc::clone(&bench);
            spawned.world.clone().spawn(process, async move {
                for _ in 0..share {
                    let drops = bench.plan.drops && bench.draws.borrow_mut().once_in(6);
                    let operation = bench.operate(client * 8 + task, &mut index);
                    let outcome = if drops {
                        let after = bench.draws.borrow_mut().below(40 * MICROS);
                        within(&bench.world, after, operation).await.unwrap_or(Ok(()))
                    } else {
                        operation.await
                    };
                    done.set(done.get() + 1);
                    match outcome {
                        Ok(()) | Err(IndexError::OutOfMemory) => {}
                        Err(IndexError::Busy) => *bench.events.borrow_mut().entry("busy").or_default() += 1,
                        Err(IndexError::Damaged(what)) => {
                            bench.fail(format!("the store is damaged: {what}"));
                            break;
                        }
                        Err(_) => break,
                    }
                }
                running.set(running.get() - 1);
            });
        }
        while running.get() > 0 {
            bench.world.sleep(100 * MICROS).await;
        }
        bench.count(&index);
        left = left.saturating_sub(done.get().max(1));
    }
}

/// Runs a seed to its end. Returns the events of its clients.
///
/// # Errors
/// What is wrong.
pub(crate) fn run(seed: u64, plan: Plan) -> Result<Events, String> {
    let bench = Bench::new(seed, plan);
    let theirs = Rc::clone(&bench);
    let ended = bench.world.complete(20 * SECONDS, async move {
        let bench = theirs;
        bench.create().await;
        let running = Rc::new(Cell::new(0));
        let mut client = 0;
        let start = |client: u32| {
            let (process, host) = (bench.world.start_process(), bench.network.add_host());
            let (theirs, running) = (Rc::clone(&bench), Rc::clone(&running));
            running.set(running.get() + 1);
            let ended = Rc::clone(&running);
            // A process ends once: when its work is done, or when it dies.
            let is_counted = Rc::new(Cell::new(false));
            let counted = Rc::clone(&is_counted);
            let end = move || {
                if !counted.replace(true) {
                    ended.set(ended.get() - 1);
                }
            };
            bench.world.on_death(process, end.clone());
            bench.world.spawn(process, async move {
                run_client(theirs, process, host, client).await;
                end();
            });
            process
        };
        let mut processes: Vec<ProcessId> = Vec::new();
        for _ in 0..bench.plan.clients {
            processes.push(start(client));
            client += 1;
        }
        let mut deaths = if bench.plan.deaths { 2 } else { 0 };
        while running.get() > 0 {
            let pause = bench.draws.borrow_mut().below(600 * MICROS);
            bench.world.sleep(pause).await;
            if deaths > 0 && bench.draws.borrow_mut().once_in(2) {
                deaths -= 1;
                let victim = bench.draws.borrow_mut().below(processes.len() as u64) as usize;
                bench.world.kill(processes[victim]);
                processes[victim] = start(client);
                client += 1;
            }
        }
        // No lock of a dead client may stay.
        bench.world.sleep(3 * MILLIS).await;
        // Read everything at the end, as another client.
        let (process, host) = (bench.world.start_process(), bench.network.add_host());
        match bench.open(process, host).await {
            Err(error) => bench.fail(format!("the last open has failed: {error}")),
            Ok(mut index) => {
                bench.world.spawn(process, index.keeper());
                for key in 0..bench.keys.len() {
                    let call = bench.history.borrow_mut().call(9999, key as u64, Ask::Get, bench.world.now());
                    let got = index.get(&bench.keys[key]).await.map(|found| found.map(value_of));
                    let outcome = match got {
                        Ok(None) => Outcome::Absent,
                        Ok(Some(Some(value))) => Outcome::Found(value, None),
                        other => {
                            bench.fail(format!("the last get of key {key} has failed: {other:?}"));
                            Outcome::Failed
                        }
                    };
                    bench.history.borrow_mut().returned(call, outcome, bench.world.now());
                }
                bench.audit(index).await;
            }
        }
    });
    bench.world.end();
    if ended.is_none() {
        return Err(format!("seed {seed}: the run does not end: {plan:?}"));
    }
    if let Some(failure) = bench.failure.borrow().as_ref() {
        return Err(format!("seed {seed}: {failure}: {plan:?}"));
    }
    let history = bench.history.borrow();
    let report = check(&history, Limits::default());
    if let Some(key) = report.violated.first() {
        let window = explain(&history, *key, Limits::default());
        return Err(format!("seed {seed}: key {key} is not linearizable: {window:?}: {plan:?}"));
    }
    let events = bench.events.borrow().clone();
    Ok(events)
}

/// Number of seeds; `INDEX_SEEDS` sets another one, and `INDEX_SEED` the first.
pub(crate) fn seeds(default: u64) -> std::ops::Range<u64> {
    let from = |name| std::env::var(name).ok().and_then(|number: String| number.parse().ok());
    let first = from("INDEX_SEED").unwrap_or(0);
    first..first + from("INDEX_SEEDS").unwrap_or(default)
}

/// Runs all seeds. Returns the events of their clients.
///
/// # Panics
/// If something is wrong with a seed.
pub(crate) fn run_all(seeds: std::ops::Range<u64>, plan: impl Fn(u64) -> Plan) -> Events {
    let (mut events, mut failures) = (Events::new(), Vec::new());
    for seed in seeds {
        match run(seed, plan(seed)) {
            Ok(seen) => seen.into_iter().for_each(|(name, count)| *events.entry(name).or_default() += count),
            Err(failure) => failures.push(failure),
        }
    }
    println!("{events:?}");
    assert!(failures.is_empty(), "{} failures: {}", failures.len(), failures[0]);
    events
}

/// Runs seeds with a mutant until one of them fails. Returns whether one has.
#[cfg(farside_mutants)]
pub(crate) fn is_found(
    mutant: farside_remote::mutant::Mutant,
    mut seeds: impl Iterator<Item = u64>,
    plan: impl Fn(u64) -> Plan,
) -> bool {
    farside_remote::mutant::Mutant::switch(Some(mutant));
    let found = seeds.find_map(|seed| run(seed, plan(seed)).err());
    farside_remote::mutant::Mutant::switch(None);
    let start = found.as_ref().map(|failure| failure.chars().take(160).collect::<String>());
    println!("{mutant:?}: {}", start.as_deref().unwrap_or("it lives"));
    found.is_some()
}
